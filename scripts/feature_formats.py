"""What each format of captured features does to a trained head, on held-out rows: `python -m scripts.feature_formats`.

    python -m scripts.feature_formats outputs/train/quickstart-eagle3 outputs/data/quickstart [--rows N] [--k K]

One live pass of the target per row gives float32 features; every format is what reading a store of it would give. Of
each: bytes a token, how far the features are off, KL of the teacher rebuilt from them, and the acceptance predicted of
the head on them. Then, for a kept top m, how far the kept teacher is from the whole one. Tables on standard output; its
last line is a JSON object.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from data import rows
from data.quantise import dequantise, quantise
from data.store import DTYPES, Contents
from data.teacher import teacher_logits, top_m
from heads.hub import load_head
from heads.target import Target, TargetSettings
from train.batches import collate
from train.evaluate import Tally, evaluate
from train.losses import kl, total_variation
from train.mixture import LossSettings
from train.objective import Objective

_CHUNK = 256  # positions whose logits exist at one moment


def stored(features: Tensor, dtype: str) -> Tensor:
    """float32 features [..., H] as a store of that dtype gives them back."""
    return dequantise(*quantise(features)) if dtype == "int8" else features.to(DTYPES[dtype]).float()


class Means:
    """Means over positions by name, added up part by part."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.counts: dict[str, int] = {}

    def add(self, name: str, values: Tensor) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + float(values.double().sum())
        self.counts[name] = self.counts.get(name, 0) + values.numel()

    def all(self) -> dict[str, float]:
        return {name: total / self.counts[name] for name, total in self.sums.items()}


def add_top_m(means: Means, whole: Tensor, drafted: Tensor | None, m: int) -> None:
    """The kept teacher against the whole one [N, V], over all ids and over the draft vocabulary."""
    kept, V = top_m(whole, m), whole.shape[-1]
    rebuilt = teacher_logits(kept, V)
    means.add("rest", kept.log_rest.exp())
    means.add("kl", kl(rebuilt, whole))
    means.add("total_variation", total_variation(rebuilt, whole))
    means.add("kl_draft_vocabulary", kl(*(x if drafted is None else x[:, drafted] for x in (rebuilt, whole))))


@torch.no_grad()
def measure(
    target: Target, head: Any, data: Sequence[rows.DataRow], k: int, sizes: Sequence[int]
) -> tuple[dict[str, Any], dict[int, Any]]:
    """Figures by dtype and by m."""
    objective = Objective(head.attach(target).eval(), target, LossSettings())
    tallies, means = {d: Tally.empty(k) for d in DTYPES}, {d: Means() for d in DTYPES}
    kept = {m: Means() for m in sizes}
    for row in tqdm(data, unit="row", file=sys.stderr):
        batch, taught = collate([{"ids": row.ids, "spans": row.spans}], [row.index]), row.supervised()
        live = target.forward(batch.ids, taps=head.taps)
        read = live.last[:, :, None] if live.taps is None else live.taps  # [1, T, n, H]
        for dtype in DTYPES:
            batch.last, batch.taps = stored(live.last, dtype), None if live.taps is None else stored(live.taps, dtype)
            tallies[dtype].add(evaluate(objective, batch, k, 64, alphas=False))
            off = (stored(read, dtype) - read).norm(dim=-1) / read.norm(dim=-1)
            means[dtype].add("feature_error", off[0][taught])
        for part in live.last[0][taught].split(_CHUNK):
            whole = target.logits(part)
            for dtype in DTYPES:
                rebuilt = target.logits(stored(part, dtype))
                means[dtype].add("teacher_kl", kl(rebuilt, whole))
                means[dtype].add("teacher_top1_same", rebuilt.argmax(-1) == whole.argmax(-1))
            for m in sizes:
                add_top_m(kept[m], whole, head.target_rows(), m)
    names = ("predicted_acceptance_length", "position_acceptance_joint", "rounds", "slots")
    formats: dict[str, Any] = {}
    for dtype in DTYPES:
        figures, size = tallies[dtype].figures(), Contents(head.taps, dtype).token_bytes(target.spec.hidden_size)
        formats[dtype] = {"bytes": size, **means[dtype].all(), **{name: figures[name] for name in names}}
    return formats, {m: {"bytes": 8 * m + 4, **kept[m].all()} for m in sizes}


def print_tables(formats: dict[str, Any], teachers: dict[int, Any]) -> None:
    print("| format | bytes a token | features off | teacher KL | same top token | tau | joint acceptance |")
    print("|---|---|---|---|---|---|---|")
    for dtype, f in formats.items():
        joint = ", ".join(f"{x:.4f}" for x in f["position_acceptance_joint"])
        print(
            f"| {dtype} | {f['bytes']} | {f['feature_error']:.2%} | {f['teacher_kl']:.2g} "
            f"| {f['teacher_top1_same']:.2%} | {f['predicted_acceptance_length']:.4f} | {joint} |"
        )
    print("\n| m | bytes a token | mass outside | KL(p, p') | total variation | KL over the draft vocabulary |")
    print("|---|---|---|---|---|---|")
    for m, f in teachers.items():
        print(
            f"| {m} | {f['bytes']} | {f['rest']:.2%} | {f['kl']:.3f} | {f['total_variation']:.2%} "
            f"| {f['kl_draft_vocabulary']:.3f} |"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m scripts.feature_formats", description=about)
    parser.add_argument("trained", help="a run folder of python -m train")
    parser.add_argument("dataset", help="a data folder of python -m data")
    parser.add_argument("--target", default=TargetSettings.id, help="id or folder of the target")
    parser.add_argument("--rows", type=int, default=0, help="held-out rows to use (0: all)")
    parser.add_argument("--k", type=int, default=4, help="drafted tokens of a round")
    parser.add_argument("--top-m", type=int, nargs="+", default=[8, 32, 128])
    given = parser.parse_args(arguments)
    try:
        target = Target.load(TargetSettings(id=given.target))
        head = load_head(Path(given.trained), target.spec)
        data = rows.load(given.dataset, "heldout", target.spec)[: given.rows or None]
    except ValueError as error:
        parser.exit(1, f"error: {error}\n")
    formats, teachers = measure(target, head, data, min(given.k, head.max_draft), given.top_m)
    print_tables(formats, teachers)
    print(json.dumps({"rows": len(data), "formats": formats, "top_m": teachers}))


if __name__ == "__main__":
    main()
