"""Distil a draft head on a frozen target.

    python -m train name=first dataset=outputs/data/own head=eagle3
    python -m train launcher=cpu2 ...                  two processes, started through `accelerate launch`
    accelerate launch -m train name=first ...          the same, started by yourself

Leaves outputs/train/<name>/: best/ (the head with the best acceptance length on held-out prompts), checkpoints/,
log.jsonl and, last, manifest.json. The same command again resumes an interrupted run and skips a finished one.
With train.joint.mode the target learns with its Medusa heads (Medusa-2) and best/ holds its adapter as well.
Settings, losses, selection and memory: docs/training.md.
"""

import dataclasses
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from conf.entry import run
from conf.launch import LauncherSettings, relaunch_if_needed
from data import rows as token_rows
from data import vocab
from eval.live import measure_acceptance
from heads import HEADS
from heads.hub import build_head, read_facts, write_json
from heads.target import Target, TargetSettings
from train import checkpoint, features
from train.loop import Data, Loop, Stopped
from train.settings import TrainSettings
from train.warm import load_warm

PRECISIONS = ("no", "bf16")  # parameters stay fp32 in both


@dataclasses.dataclass
class TrainRun:
    """Everything `python -m train` can be told."""

    name: str = "train"
    outputs: str = "outputs"
    dataset: str = "outputs/data/own"  # folder left by `python -m data`
    fresh: bool = False  # throw away what an earlier run of this name left
    target: TargetSettings = dataclasses.field(default_factory=TargetSettings)
    head: Any = None  # conf/head/*.yaml
    train: TrainSettings = dataclasses.field(default_factory=TrainSettings)
    launcher: LauncherSettings = dataclasses.field(default_factory=LauncherSettings)


def main(settings: TrainRun) -> int:
    if settings.launcher.mixed_precision not in PRECISIONS:
        raise ValueError(
            f"launcher.mixed_precision={settings.launcher.mixed_precision} is not for training: its loss scaling would "
            "hide skipped steps, and features above 65504 overflow; use bf16, or no"
        )
    manifest = token_rows.manifest(settings.dataset)
    folder = Path(settings.outputs) / "train" / settings.name
    wanted = run_facts(settings, manifest)
    if finished(folder, wanted, settings.fresh):
        print(f"train: {folder} is up to date, skipped", file=sys.stderr)
        return 0
    status = relaunch_if_needed(settings.launcher, "train")
    if status is not None:
        return status
    accelerator = Accelerator(mixed_precision=settings.launcher.mixed_precision, cpu=settings.launcher.cpu)
    torch.manual_seed(settings.train.seed)
    # packed weights take no adapter
    packed = settings.target.packed and settings.train.joint.mode is None
    target = Target.load(dataclasses.replace(settings.target, packed=packed))
    head, data = prepare(settings, target, manifest, folder)
    loop = Loop(settings.train, head, target, data, folder, accelerator, wanted, measure_acceptance)
    if accelerator.is_main_process:
        open_folder(folder, wanted, settings.fresh)
    accelerator.wait_for_everyone()
    try:
        state = loop.run()
    except Stopped as stop:
        print(f"train: {stop}", file=sys.stderr)
        return 0
    if accelerator.is_main_process:
        saved, state_facts = read_facts(folder), dataclasses.asdict(state)
        best = saved["provenance"]
        facts = {"kind": "train", **wanted, "selected_by": best["selected_by"], "state": state_facts, "best": best}
        facts |= {name: saved[name] for name in ("adapter",) if name in saved}
        write_json(folder / "manifest.json", {**facts, "stopped_early": loop.exhausted})
        report(folder, settings.train, loop.exhausted, state.step, best)
    return 0


def report(folder: Path, settings: TrainSettings, stopped_early: bool, step: int, best: dict[str, Any]) -> None:
    """The last lines of a run, on standard error."""
    if stopped_early:
        print(
            f"train: stopped at step {step} of {settings.steps}: no better head in {settings.patience} selections",
            file=sys.stderr,
        )
    heldout, live = best["heldout"], best.get("live")
    measured = f"measured acceptance length {live['acceptance_length']:.3f}, " if live else ""
    joint = " ".join(f"{x:.3f}" for x in heldout["position_acceptance_joint"])
    print(
        f"train: {folder}/best from step {best['step']}: {measured}predicted acceptance length "
        f"{heldout['predicted_acceptance_length']:.3f} at k={settings.predict_k}, joint position acceptance {joint}",
        file=sys.stderr,
    )


def prepare(settings: TrainRun, target: Target, manifest: dict[str, Any], folder: Path) -> tuple[Any, Data]:
    """Head and data of a run, every input checked before work starts."""
    source = Path(settings.dataset)
    data = Data(train=_rows(source, "train", target), heldout=_rows(source, "heldout", target))
    ids = torch.tensor([data.train[0]["ids"][:128]], device=target.device)
    target.check_parity(ids)
    wanted = dataclasses.asdict(settings.head)
    found = None if settings.fresh else checkpoint.latest(folder / "checkpoints")
    if settings.train.warm_start and found is None:
        head: Any = load_warm(settings.train.warm_start, wanted, target)
    else:
        counts = token_rows.counts(source)
        head = build_head(wanted, target.spec, vocabulary(settings.head, counts, manifest, target, found))
        head.init_from(target, ids)
    settings.train.layout().check([len(row["ids"]) for row in data.train])
    if settings.train.features == "captured":
        places = settings.outputs, source
        data.train_store = features.open_store(settings.train, *places, "train", target, head)
        data.heldout_store = features.open_store(settings.train, *places, "heldout", target, head)
        features.check_store(target, data.train, data.train_store, head.taps)
    elif settings.train.packing:
        features.check_packing(target, data.train)
    return head, data


def _rows(source: Path, split: str, target: Target) -> list[dict[str, Any]]:
    return [dataclasses.asdict(row) for row in token_rows.load(source, split, target.spec)]


def vocabulary(
    config: Any, counts: torch.Tensor, manifest: dict[str, Any], target: Target, found: Path | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The draft vocabulary: that of the checkpoint `found` (never rebuilt), else built from the counts."""
    size = vocab.check_size(config.draft_vocab_size, target.spec.vocab_size)
    if size is None or size == target.spec.vocab_size:
        return None
    if found is not None:
        tensors = load_file(found / "head.safetensors")
        return tensors["d2t"], tensors["t2d"]
    d2t, t2d = vocab.build(counts, size, manifest["special_ids"], target.spec.tokenizer_size)
    share = vocab.coverage(counts, t2d)
    print(f"train: draft vocabulary of {size} ids covers {share:.2%} of the training answers", file=sys.stderr)
    return d2t, t2d


def run_facts(settings: TrainRun, manifest: dict[str, Any]) -> dict[str, Any]:
    """What makes two runs the same run; the number of processes, logging and file places do not count."""
    train = dataclasses.asdict(settings.train)
    for irrelevant in ("wandb", "micro_batch_size", "max_tokens", "packing", "pack_length", "save_every"):
        del train[irrelevant]
    del train["loss"]["chunk"]
    if settings.train.joint.mode is None:  # the rest of them does nothing
        del train["joint"]
    facts = {
        "target": dataclasses.asdict(settings.target),
        "head": dataclasses.asdict(settings.head),
        "train": train,
        "mixed_precision": settings.launcher.mixed_precision,
        "data": manifest["fingerprint"],
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return {**facts, "fingerprint": digest}


def finished(folder: Path, wanted: dict[str, Any], fresh: bool) -> bool:
    """Whether this run is complete; raises ValueError when the folder holds a run with other settings."""
    if fresh or not (folder / "run.json").is_file():
        return False
    made = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    if made["fingerprint"] != wanted["fingerprint"]:
        changed = sorted(key for key in wanted if key != "fingerprint" and made.get(key) != wanted[key])
        raise ValueError(
            f"{folder} holds a run with another {', '.join(changed)}: give this one another name, or "
            "fresh=true to start over"
        )
    return (folder / "manifest.json").is_file() and (folder / "best" / "head.json").is_file()


def open_folder(folder: Path, wanted: dict[str, Any], fresh: bool) -> None:
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "run.json", wanted)
    except OSError as error:
        raise ValueError(f"cannot write to {folder}: {error.strerror}; choose another `outputs` folder") from error


if __name__ == "__main__":
    run("train", TrainRun, main, schemas={f"head/{kind}": config for kind, (_, config) in HEADS.items()})
