"""Offline beside served: one head's acceptance by our own loop and by an engine, on the same prompt ids, k and T = 0.

    python -m eval name=offline dataset=D 'heads={eagle3: F}' 'methods=[eagle3]' 'temperatures=[0.0]' prompts=64
    python -m eval name=served backend=vllm ...         the same settings
    python -m scripts.compare_serving --offline outputs/eval/offline --served outputs/eval/served

F is an exported folder, so that both read the same files. Ends with status 1 where acceptance length or a position's
acceptance differs by more than --within (relative), or an answer has another token.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval import metrics
from eval.metrics import Record
from eval.records import RecordFile
from heads.hub import write_text

SAME = ("target", "data", "split", "max_new_tokens", "max_prompt_tokens")  # of both runs, or the figures mean nothing


@dataclass
class Compared:
    """One head at one k, on the prompts that both have."""

    method: str
    k: int
    prompts: int
    batches: list[int]  # sequences that our loop decoded at once
    rounds: tuple[int, int]
    length: tuple[float, float]
    joint: tuple[list[float], list[float]]
    same_tokens: int  # prompts whose answers are equal token by token
    same_rounds: int | None  # prompts whose rounds are equal one by one; None where the engine tells no order

    @property
    def difference(self) -> float:
        """Largest relative difference of the acceptance length and of every position's acceptance."""
        return max(relative(*self.length), *(relative(a, b) for a, b in zip(*self.joint, strict=True)))


def relative(ours: float, theirs: float) -> float:
    return abs(ours - theirs) / max(abs(ours), abs(theirs)) if ours != theirs else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--offline", required=True, help="run folder of python -m eval")
    parser.add_argument("--served", required=True, help="run folder of python -m eval backend=vllm or backend=sglang")
    parser.add_argument("--within", type=float, default=0.02, help="largest relative difference, 0.02")
    parser.add_argument("--out", help="file for the table, beside standard output")
    options = parser.parse_args()
    try:
        text, ok = compare(Path(options.offline), Path(options.served), options.within)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(text, end="")
    if options.out:
        write_text(Path(options.out), text)
    if not ok:
        sys.exit(f"error: offline and served differ by more than {options.within:.0%}, or in a token")


def compare(offline: Path, served: Path, within: float) -> tuple[str, bool]:
    """(table, whether they agree). Raises ValueError for runs that are not of the same prompts."""
    ours, theirs = read(offline), read(served)
    facts = check_same(offline, served)
    engines = sorted({r["engine"] for r in theirs if "engine" in r})
    if not engines:
        raise ValueError(f"--served {served}: no engine made these records; run python -m eval backend=vllm ...")
    found = [pairs for method, k in groups(theirs) if (pairs := matched(ours, theirs, method, k))]
    if not found:
        raise ValueError(f"{offline} and {served} have no head in common at one k and temperature 0")
    results = [measure(pairs) for pairs in found]
    return table(results, engines, facts, within), all(agree(one, within) for one in results)


def agree(one: Compared, within: float) -> bool:
    return one.difference <= within and one.same_tokens == one.prompts


def read(folder: Path) -> list[Record]:
    path = folder / "records.jsonl"
    if not path.is_file():
        raise ValueError(f"{folder}: no run of python -m eval (records.jsonl is missing)")
    kept = {"kind": "timed", "temperature": 0, "tree": "chain", "adaptive": "none"}
    rows = [{**metrics.LATER, **row} for row in RecordFile(path).rows]
    return [row for row in rows if all(row[name] == value for name, value in kept.items()) and row["k"]]


def check_same(offline: Path, served: Path) -> dict[str, Any]:
    """What both runs measured. Raises ValueError naming what differs."""
    marks = []
    for folder in (offline, served):
        path = folder / "measured.json"
        if not path.is_file():
            raise ValueError(f"{folder}: measured.json is missing, which says what the records are of; run it again")
        marks.append(json.loads(path.read_text(encoding="utf-8")))
    if differing := [name for name in SAME if marks[0].get(name) != marks[1].get(name)]:
        raise ValueError(f"{offline} and {served} were measured with another {', '.join(differing)}: run one again")
    heads = marks[0].get("heads", {}), marks[1].get("heads", {})
    if other := [name for name in heads[0] if name in heads[1] and heads[0][name] != heads[1][name]]:
        raise ValueError(f"{other[0]} is another head in {offline} than in {served}: name one exported folder in both")
    return marks[0]


def groups(records: Sequence[Record]) -> list[tuple[str, int]]:
    return list(dict.fromkeys((r["method"], r["k"]) for r in records))


def matched(ours: Sequence[Record], theirs: Sequence[Record], method: str, k: int) -> list[tuple[Record, Record]]:
    """Records of the same prompt, ours first; of ours those that were decoded alone, where there are such."""
    single_last = sorted(ours, key=lambda r: -int(r["concurrency"]))
    own = {(r["id"], r["turn"]): r for r in single_last if (r["method"], r["k"]) == (method, k)}
    served = [r for r in theirs if (r["method"], r["k"]) == (method, k)]
    return [(own[place], r) for r in served if (place := (r["id"], r["turn"])) in own]


def measure(pairs: Sequence[tuple[Record, Record]]) -> Compared:
    ours, theirs = [a for a, _ in pairs], [b for _, b in pairs]
    joints = [[value or 0.0 for value in metrics.position_acceptance(side)[0]] for side in (ours, theirs)]
    longest = max(map(len, joints))
    lengths = [metrics.acceptance_length(side) or 0.0 for side in (ours, theirs)]
    ordered = not any(r.get("steps_unordered") for r in theirs)
    return Compared(
        method=ours[0]["method"],
        k=ours[0]["k"],
        prompts=len(pairs),
        batches=sorted({r["concurrency"] for r in ours}),
        rounds=(sum(len(r["steps"]) for r in ours), sum(len(r["steps"]) for r in theirs)),
        length=(lengths[0], lengths[1]),
        joint=(joints[0] + [0.0] * (longest - len(joints[0])), joints[1] + [0.0] * (longest - len(joints[1]))),
        same_tokens=sum(a["output_ids"] == b["output_ids"] for a, b in pairs),
        same_rounds=sum(a["steps"] == b["steps"] for a, b in pairs) if ordered else None,
    )


def table(results: Sequence[Compared], engines: Sequence[str], facts: dict[str, Any], within: float) -> str:
    lines = [
        f"{', '.join(engines)} beside drafthead's own loop: {facts.get('target')}, T = 0, at most "
        f"{facts['max_new_tokens']} new tokens, held-out prompts of data {str(facts.get('data'))[:12]}",
        "made by: python -m scripts.compare_serving; the commands stand in docs/export.md",
        "",
    ]
    for one in results:
        verdict = "agree" if agree(one, within) else "DIFFER"
        rounds = "not told in order" if one.same_rounds is None else f"{one.same_rounds} of {one.prompts}"
        lines += [
            f"{one.method}, k = {one.k}, {one.prompts} prompts: {verdict}",
            f"  {'':<26}{'rounds':>8}{'tau':>9}   acceptance of position 1, 2, ... (joint)",
            side(f"drafthead, batch {' and '.join(map(str, one.batches))}", one.rounds[0], one.length[0], one.joint[0]),
            side(f"{' and '.join(engines)}, batch 1", one.rounds[1], one.length[1], one.joint[1]),
            f"  largest relative difference {one.difference:.2%}; answers equal token by token: {one.same_tokens} of "
            f"{one.prompts}; rounds equal one by one: {rounds}",
            "",
        ]
    return "\n".join(lines)


def side(name: str, rounds: int, length: float, joint: Sequence[float]) -> str:
    return f"  {name:<26}{rounds:>8}{length:>9.4f}   {', '.join(f'{value:.4f}' for value in joint)}"


if __name__ == "__main__":
    main()
