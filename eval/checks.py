"""Self-checks of a result: what must hold between its rows and records, or the report says so on its first line.

A check is {"name", "ok", "detail"}; detail names the row when it fails. Pure.
"""

from collections.abc import Sequence
from typing import Any

from eval import metrics
from eval.metrics import Record

Row = dict[str, Any]


def run(
    groups: Sequence[tuple[Row, Sequence[Record]]], equal: Sequence[Row], exact: dict[str, float]
) -> list[dict[str, Any]]:
    """All checks. groups: every result row with its records; equal: comparisons with plain {"what", "same", "detail"};
    exact: verification rule -> total variation found by enumeration."""
    found: dict[str, list[str]] = {
        "tau between 1 and K+1": [],
        "tau = 1 + sum of joint": [],
        "joint acceptance non-increasing": [],
        "counters equal the records": [],
    }
    for row, records in groups:
        where = f"{row['method']} k={row['k']} T={row['temperature']:g} {row['route']}"
        tau = row["acceptance_length"]
        if tau is None:
            continue
        if not bounded(row, records):
            found["tau between 1 and K+1"].append(f"{where}: {tau:.3f}")
        if not identity(records):
            found["tau = 1 + sum of joint"].append(where)
        if not non_increasing(records):
            found["joint acceptance non-increasing"].append(where)
        if any(row[name] != value for name, value in metrics.counters(records).items()):
            found["counters equal the records"].append(where)
    checks = [{"name": name, "ok": not bad, "detail": "; ".join(bad[:3])} for name, bad in found.items()]
    bad = [f"{e['what']}: {e['detail']}" for e in equal if not e["same"]]
    checks.append({"name": "output equal to plain", "ok": not bad, "detail": "; ".join(bad[:3])})
    biased = [f"{rule}: total variation {tv:.4f}" for rule, tv in exact.items() if tv > 1e-12]
    checks.append({"name": "verification rules exact by enumeration", "ok": not biased, "detail": "; ".join(biased)})
    return checks


def bounded(row: Row, records: Sequence[Record]) -> bool:
    """1 <= tau <= K+1. A record cut right after an accepted draft lacks the step's own token, hence the slack."""
    steps = sum(len(r["steps"]) for r in records)
    deepest = max((K for r in records for K, _ in r["steps"]), default=0)  # above k where the length is adaptive
    return 1 - len(records) / steps <= row["acceptance_length"] <= max(row["k"], deepest) + 1


def identity(records: Sequence[Record]) -> bool:
    """Tokens emitted = steps + accepted, less at most one own token cut off per record.

    An engine that tells its rounds in no order counts drafts of the last one that were cut off as well.
    """
    for record in records:
        missing = len(record["steps"]) + sum(a for _, a in record["steps"]) - metrics.emitted(record)
        if not 0 <= missing <= (record["k"] if record.get("steps_unordered") else 1):
            return False
    return True


def non_increasing(records: Sequence[Record]) -> bool:
    """joint[i+1] <= joint[i] over the steps that drafted the full K, and 0 <= a_s <= K_s everywhere."""
    steps = [step for record in records for step in record["steps"]]
    full = [step for step in steps if step[0] == max(K for K, _ in steps)]
    joint, _ = metrics.position_acceptance([{"steps": full}])
    falling = all(b <= a for a, b in zip(joint, joint[1:], strict=False) if a is not None and b is not None)
    return falling and all(0 <= a <= K for K, a in steps)


def first_line(checks: Sequence[dict[str, Any]]) -> str:
    """What stands first in the report and on the screen."""
    bad = [f"{c['name']} ({c['detail']})" for c in checks if not c["ok"]]
    return f"SELF-CHECK FAILED: {'; '.join(bad)}" if bad else f"Self-checks passed: {len(checks)} of {len(checks)}."


def first_difference(ours: Sequence[int], plain: Sequence[int]) -> int | None:
    """Index of the first token that differs (a missing token differs), None when the outputs are the same."""
    for i, (a, b) in enumerate(zip(ours, plain, strict=False)):
        if a != b:
            return i
    return None if len(ours) == len(plain) else min(len(ours), len(plain))
