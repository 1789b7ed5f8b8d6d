"""The prompts of an evaluation: which conversations of a split, spread over the routes."""

from collections.abc import Sequence
from typing import Any

from data.rows import DataRow
from eval.plan import EvalSettings


def spread(rows: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """`count` rows, one route after the other in turn, in file order within a route (0 = all).

    Routes a, a, b, c with count 3 -> a, b, c.
    """
    by_route: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_route.setdefault(row["route"], []).append(row)
    found: list[dict[str, Any]] = []
    for turn in range(max(map(len, by_route.values()), default=0)):
        found += [held[turn] for held in by_route.values() if len(held) > turn]
    return found[:count] if count else found


def prompts(rows: Sequence[DataRow], settings: EvalSettings, context: int) -> list[dict[str, Any]]:
    """Evaluation prompts {"id", "key", "route", "turn", "ids"}: each conversation up to its last answer.

    Raises ValueError when none is left.
    """
    longest = min(settings.max_prompt_tokens, context - 1)
    usable: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.spans and 0 < row.spans[-1][0] <= longest:
            name = row.id if row.id not in usable else f"{row.id}#{row.index}"
            facts = {"id": name, "key": row.key, "route": row.route, "turn": len(row.spans) - 1}
            usable[name] = {**facts, "ids": list(row.ids[: row.spans[-1][0]])}
    if not usable:
        raise ValueError(
            f"dataset={settings.dataset}: no prompt of at most {longest} tokens in split {settings.split!r} "
            f"({len(rows)} rows): raise max_prompt_tokens or prepare other data"
        )
    counts = [settings.prompts, settings.concurrency_prompts] if max(settings.concurrency) > 1 else [settings.prompts]
    # the first of more prompts are those of fewer
    return spread(list(usable.values()), max(counts) if min(counts) else 0)
