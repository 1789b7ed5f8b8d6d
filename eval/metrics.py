"""Every figure of a report, derived from step records. Pure: lists of records in, numbers out; a mean is never stored.

A record is one (prompt, turn, sample): `steps` [[K_s, a_s], ...], `new_tokens`, seconds per part. The first new token
comes from the prefill; the S verification steps emit the other N = new_tokens - 1. A step emits a_s + 1 tokens, less
what an end-of-turn token or the budget cuts off the last one. K = 0 is null (None), never 0.

    steps [[4, 4], [4, 2], [4, 0]], new_tokens 10 -> acceptance_length 9/3 = 3, acceptance_rate 6/12,
    position_acceptance_joint [2/3, 2/3, 1/3, 1/3]
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

Record = dict[str, Any]
# what records of runs before there were such mean by leaving it out
LATER: Record = {"tree": "chain", "adaptive": "none", "concurrency": 1, "lossy": False}
PREFIX = "spec_decode_num_"  # vLLM's counter names, so that existing dashboards read the file


def ratio(part: float, whole: float) -> float | None:
    """part / whole, None when there was nothing to count."""
    return part / whole if whole else None


def emitted(record: Record) -> int:
    """N: tokens the verification steps of a record emitted."""
    return max(record["new_tokens"] - 1, 0)


def decode_seconds(record: Record) -> float:
    """Of all rounds. Serving engines do not tell the parts (`decode_s`), some not even that: 0."""
    parts = ("draft_s", "verify_s", "other_s") if "draft_s" in record else ("decode_s",)
    return float(sum(record.get(name, 0.0) for name in parts))


def whole_seconds(record: Record) -> float:
    """Prefill and rounds; 0 where an engine tells neither."""
    return float(record.get("prefill_s", 0.0) + decode_seconds(record))


def counters(records: Iterable[Record]) -> dict[str, Any]:
    """Drafts, draft tokens, accepted tokens, and accepted per position, under vLLM's names."""
    records = list(records)
    steps = [step for record in records for step in record["steps"] if step[0] > 0]
    longest = max((K for K, _ in steps), default=0)
    return {
        f"{PREFIX}drafts": len(steps),
        f"{PREFIX}draft_tokens": drafted(records),
        f"{PREFIX}accepted_tokens": sum(a for _, a in steps),
        f"{PREFIX}accepted_tokens_per_pos": [sum(a > i for _, a in steps) for i in range(longest)],
    }


def drafted(records: Iterable[Record]) -> int:
    """Draft tokens: a record of trees has the nodes of each step, on a chain they are its K_s."""
    return sum(sum(r["nodes"] if "nodes" in r else (K for K, _ in r["steps"])) for r in records)


def acceptance_length(records: Sequence[Record]) -> float | None:
    """N / S over all steps (micro); plain decoding = 1."""
    return ratio(sum(map(emitted, records)), sum(len(r["steps"]) for r in records))


def acceptance_length_macro(records: Sequence[Record]) -> float | None:
    """Mean over records of their own N / S."""
    each = [emitted(r) / len(r["steps"]) for r in records if r["steps"]]
    return ratio(sum(each), len(each))


def position_acceptance(records: Iterable[Record]) -> tuple[list[float | None], list[float | None]]:
    """(joint, conditional): joint[i] = #(a > i) / #(K > i); conditional[i] = #(a > i) / #(a >= i and K > i)."""
    steps = [step for record in records for step in record["steps"]]
    longest = max((K for K, _ in steps), default=0)
    joint, conditional = [], []
    for i in range(longest):
        accepted = sum(a > i for _, a in steps)
        joint.append(ratio(accepted, sum(K > i for K, _ in steps)))
        conditional.append(ratio(accepted, sum(a >= i and K > i for K, a in steps)))
    return joint, conditional


def mean_by_position(records: Iterable[Record], name: str) -> list[float | None]:
    """Mean of a recorded per-step list (alpha_sum_min, alpha_greedy) at each position that has values."""
    lists = [values for record in records for values in record.get(name) or []]
    longest = max(map(len, lists), default=0)
    columns = [[v[i] for v in lists if len(v) > i] for i in range(longest)]
    return [ratio(sum(c), len(c)) for c in columns]


def loop_share(output_ids: Sequence[int], n: int = 4) -> float:
    """Share of n-grams of an output that occurred earlier in it: greedy loops flatter every drafter."""
    grams = [tuple(output_ids[i : i + n]) for i in range(len(output_ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def key(record: Record) -> tuple[Any, ...]:
    """What makes the speed of two records comparable: the same prompt, turn, sample, temperature and concurrency."""
    return (*text_key(record), record.get("concurrency", 1))


def text_key(record: Record) -> tuple[Any, ...]:
    """What makes the text of two records comparable: a batch changes none."""
    return record["id"], record["turn"], record["seed"], record["temperature"]


def pair(records: Sequence[Record], plain: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Each record with the plain one of the same key; those without are left out."""
    by_key = {key(p): p for p in plain}
    return [(r, by_key[key(r)]) for r in records if key(r) in by_key]


def speedups(pairs: Sequence[tuple[Record, Record]]) -> tuple[float | None, float | None]:
    """(speedup_decode, speedup_e2e): tokens per second over plain's on the same prompts, token ids counted."""
    return _speedup(pairs, emitted, decode_seconds), _speedup(pairs, lambda r: r["new_tokens"], whole_seconds)


def request_speed(records: Sequence[Record]) -> float | None:
    """Mean over requests of new tokens per second from the start of its prefill to its end: what one user sees."""
    each = [r["new_tokens"] / r["wall_s"] for r in records if r.get("wall_s")]
    return ratio(sum(each), len(each))


def break_even(speedups: Sequence[tuple[int, float | None]]) -> float | None:
    """The concurrency above which speculation loses: where speedup (c, value) falls through 1, between the two measured
    c by straight line. 0 where it loses at the lowest already, None where it wins at all.

    [(1, 1.4), (4, 1.1), (8, .9)] -> 6
    """
    before: tuple[int, float] | None = None
    for c, value in sorted((c, value) for c, value in speedups if value is not None):
        if value < 1:
            return 0.0 if before is None else before[0] + (c - before[0]) * (before[1] - 1) / (before[1] - value)
        before = c, value
    return None


def _speedup(
    pairs: Sequence[tuple[Record, Record]], tokens: Callable[[Record], float], seconds: Callable[[Record], float]
) -> float | None:
    ours = ratio(sum(tokens(r) for r, _ in pairs), sum(seconds(r) for r, _ in pairs))
    theirs = ratio(sum(tokens(p) for _, p in pairs), sum(seconds(p) for _, p in pairs))
    return ratio(ours, theirs) if ours is not None and theirs is not None else None


def bootstrap(
    columns: dict[Any, Sequence[float]], statistic: Callable[[np.ndarray], np.ndarray], draws: int = 1000, seed: int = 0
) -> list[float] | None:
    """95% interval of a statistic of sums, prompts resampled with replacement.

    columns: prompt -> its sums [c]; statistic: [draws, c] -> [draws]. None with fewer than two prompts.
    """
    if len(columns) < 2:
        return None
    sums = np.array(list(columns.values()), dtype=float)
    weights = np.random.default_rng(seed).multinomial(len(sums), [1 / len(sums)] * len(sums), size=draws)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = statistic(weights @ sums)
    found = found[np.isfinite(found)]
    return [float(x) for x in np.percentile(found, [2.5, 97.5])] if len(found) else None


def _by_prompt(rows: Iterable[tuple[Any, Sequence[float]]]) -> dict[Any, Sequence[float]]:
    found: dict[Any, list[float]] = {}
    for prompt, values in rows:
        held = found.setdefault(prompt, [0.0] * len(values))
        for i, value in enumerate(values):
            held[i] += value
    return dict(found)


def intervals(
    records: Sequence[Record], pairs: Sequence[tuple[Record, Record]]
) -> tuple[list[float] | None, list[float] | None]:
    """(acceptance_length_ci, speedup_decode_ci)."""
    length = _by_prompt((r["id"], (emitted(r), len(r["steps"]))) for r in records)
    speed = _by_prompt((r["id"], (emitted(r), decode_seconds(r), emitted(p), decode_seconds(p))) for r, p in pairs)
    return (
        bootstrap(length, lambda s: s[:, 0] / s[:, 1]),
        bootstrap(speed, lambda s: s[:, 0] / s[:, 1] / (s[:, 2] / s[:, 3])),
    )


def summarise(records: Sequence[Record], plain: Sequence[Record], route: str = "all") -> dict[str, Any]:
    """One result row from the records of one (method, k, temperature, proposal) and the plain records."""
    first = records[0]
    pairs = pair(records, plain)
    decode, e2e = speedups(pairs)
    joint, conditional = position_acceptance(records)
    tau = acceptance_length(records)
    length_ci, speed_ci = intervals(records, pairs)
    seconds = sum(map(decode_seconds, records))
    drafting = [r for r in records if "draft_s" in r]  # engines do not tell it
    counts = counters(records)
    return {
        **{name: first[name] for name in ("method", "k", "temperature", "rule", "proposal")},
        **{name: first.get(name, value) for name, value in LATER.items()},
        "nodes_per_pass": ratio(drafted(records), sum(len(r["steps"]) for r in records)),
        "route": route,
        "prompts": len({r["id"] for r in records}),
        "tokens": sum(r["new_tokens"] for r in records),
        "acceptance_length": tau,
        "acceptance_length_ci": length_ci,
        "acceptance_length_macro": acceptance_length_macro(records),
        "acceptance_rate": ratio(counts[f"{PREFIX}accepted_tokens"], counts[f"{PREFIX}draft_tokens"]),
        "position_acceptance_joint": joint,
        "position_acceptance_conditional": conditional,
        "alpha_sum_min": mean_by_position(records, "alpha_sum_min"),
        "alpha_greedy": mean_by_position(records, "alpha_greedy"),
        "predicted_acceptance_length": None,
        "draft_overhead": ratio(sum(r["draft_s"] for r in drafting), sum(map(whole_seconds, drafting))),
        "tokens_per_second": ratio(sum(map(emitted, records)), seconds),
        "request_tokens_per_second": request_speed(records),
        "speedup_decode": decode,
        "speedup_decode_ci": speed_ci,
        "speedup_e2e": e2e,
        "speedup_efficiency": ratio(decode, tau) if decode is not None and tau else None,
        "loop_share": ratio(sum(loop_share(r["output_ids"]) for r in records), len(records)),
        **counts,
    }
