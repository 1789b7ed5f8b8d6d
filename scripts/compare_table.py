"""The tables of docs/comparison.md from an evaluation and the training runs of its heads.

    python -m scripts.compare_table outputs compare             # outputs/eval/compare and the runs it names
    python -m scripts.compare_table outputs --runs eagle3 eagle3-random

Measured: tokens per pass (tau), joint position acceptance, milliseconds of drafting a round, the tau above which rounds
of k drafts pay (a pass over k + 1 tokens and the drafting, in passes over one token), speed over plain decoding one by
one. Replayed: the training log's held-out figures, tau of greedy rounds over the target's own text, and alpha, the
overlap sum_x min(p, q) at temperature 1, over every held-out slot.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train.track import read_log

Row = dict[str, Any]


def _json(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"{path} is missing: run the stage that writes it first")
    return json.loads(path.read_text(encoding="utf-8"))


def heldout(run: Path) -> list[Row]:
    """Held-out lines of a training log, one per selection, in order of steps; of a step logged twice the last."""
    log = run / "log.jsonl"
    if not log.is_file():
        raise ValueError(f"{log} is missing: train the head first")
    return list({line["step"]: line for line in read_log(log) if line["split"] == "heldout"}.values())


def _cells(values: Sequence[float] | None, digits: int = 3) -> str:
    return "–" if not values else " ".join(f"{x:.{digits}f}".removeprefix("0") for x in values)


def _table(head: list[str], body: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def measured(folder: Path) -> str:
    """One line per method and temperature: many prompts where they were decoded in batches, speed one by one."""
    rows = [r for r in _json(folder / "rows.json") if r["route"] == "all" and not r["sweep"]]
    cost, heads = _json(folder / "cost.json"), _json(folder / "manifest.json")["heads"]
    one = cost["target_pass_s"]["1"]
    body = []
    for temperature in sorted({r["temperature"] for r in rows}):
        here = [r for r in rows if r["temperature"] == temperature and r["method"] != "plain"]
        for method in dict.fromkeys(r["method"] for r in here):
            own = [r for r in here if r["method"] == method]
            most, alone = max(own, key=lambda r: r["prompts"]), next((r for r in own if r["concurrency"] == 1), None)
            drafting = round_s(cost, method, most["k"]) if method in cost["draft_step_s"] else 0.0
            pays = (cost["target_pass_s"][str(most["k"] + 1)] + drafting) / one if method in heads else None
            body.append(
                [
                    f"{temperature:g}",
                    method,
                    f"{most['prompts']}",
                    f"{most['acceptance_length']:.3f}",
                    _cells(most["position_acceptance_joint"]),
                    f"{most['acceptance_rate']:.3f}",
                    f"{1e3 * drafting:.1f} ms ({drafting / one:.2f})",
                    "–" if pays is None else f"{pays:.2f}",
                    "–" if alone is None or not alone["speedup_decode"] else f"{alone['speedup_decode']:.2f}×",
                ]
            )
    head = ["T", "head", "prompts", "tau", "joint acceptance 1..k", "drafts kept", "drafting a round (of a pass)"]
    head += ["tau that pays"]
    return _table([*head, "speed, one by one"], body)


def round_s(cost: dict[str, Any], method: str, k: int) -> float:
    """Seconds of drafting k tokens: what a round costs once, and each step of it."""
    return float(cost["draft_fixed_s"].get(method, 0.0) + k * cost["draft_step_s"][method])


def replayed(outputs: Path, names: Sequence[str]) -> str:
    """One line per selection of every run: the learning curves."""
    body = []
    for name in names:
        for line in heldout(outputs / "train" / f"compare-{name}"):
            body.append(
                [
                    name,
                    str(line["step"]),
                    f"{line['predicted_acceptance_length']:.3f}",
                    _cells(line["position_acceptance_joint"]),
                    _cells(line["alpha_sum_min"]),
                ]
            )
    return _table(["run", "step", "replayed tau", "joint acceptance 1..k", "alpha at T = 1, 1..k"], body)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("outputs", type=Path)
    parser.add_argument("evaluation", nargs="?", help="name of the evaluation; without it the replayed table alone")
    parser.add_argument("--runs", nargs="*", default=[], help="training runs, without `compare-`")
    given = parser.parse_args()
    try:
        if given.evaluation:
            print(measured(given.outputs / "eval" / given.evaluation) + "\n")
        if given.runs:
            print(replayed(given.outputs, given.runs))
    except ValueError as error:
        parser.exit(1, f"error: {error}\n")


if __name__ == "__main__":
    main()
