"""What an evaluation measures, in which order: settings, prompts and the list of units.

The order is by importance, since a run may have a time budget: the main table at temperature 0 on all prompts, then the
other temperatures, then the recording of alpha, then the sweep over k. Within a group (one prompt, one temperature)
plain and every method take turns, rotating from prompt to prompt, so that a drift of the machine hits them alike.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from data.rows import DataRow
from heads.target import TargetSettings

BUILT_IN = ("lookup", "random", "random-tokens", "replay")


@dataclass
class EvalSettings:
    """Settings of `python -m eval`."""

    name: str = "default"
    outputs: str = "outputs"
    mode: str = "run"  # run, or theory: print the expected-speedup table
    target: TargetSettings = field(default_factory=TargetSettings)
    dataset: str = "outputs/data/default"  # data folder
    split: str = "heldout"
    heads: dict[str, str] = field(default_factory=dict)  # method name -> head or run folder, or Hub id (user/repo@rev)
    methods: list[str] = field(default_factory=lambda: ["lookup", "random"])  # plain is always measured
    prompts: int = 20  # main table, temperature 0; spread over the routes; 0 = all
    sampled_prompts: int = 8  # main table, other temperatures
    sweep_prompts: int = 3  # sweep over k; also the random head
    alpha_prompts: int = 3  # alpha is recorded on these, apart from the timed runs
    k: int = 4
    sweep_k: list[int] = field(default_factory=lambda: [1, 2, 3, 5])
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    proposals: list[str] = field(default_factory=lambda: ["greedy", "sampled"])  # at temperatures above 0, heads only
    rule: str = "auto"
    min_confidence: float = 0.0  # heads stop drafting where their path confidence falls below this; 0 = always k
    max_new_tokens: int = 64
    max_prompt_tokens: int = 1024
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # 1 = off
    seed: int = 0
    threads: int = 0  # 0 = torch's default
    minutes: float = 0.0  # stop decoding after this long (at the end of a group) and report what there is; 0 = no limit
    cost_context: int = 128  # tokens in the cache while costs are measured


@dataclass(frozen=True)
class Unit:
    """One decoding: kind "timed" or "alpha"."""

    kind: str
    prompt: int
    method: str
    k: int
    temperature: float
    proposal: str


def check(settings: EvalSettings, limits: dict[str, int]) -> None:
    """Refuse settings that cannot be measured. limits: method -> most tokens it can draft.

    Raises ValueError naming the setting.
    """
    wanted = [settings.k, *settings.sweep_k]
    for k in wanted:
        if k < 1:
            raise ValueError(f"k={k}: a draft has at least 1 token (plain decoding, k = 0, is always measured)")
        for method in settings.methods:
            if k > limits.get(method, k):
                raise ValueError(f"k={k} is above what {method!r} can draft ({limits[method]}): lower k or sweep_k")
    if not 0 <= settings.min_confidence <= 1:
        raise ValueError(f"min_confidence={settings.min_confidence}: give a number between 0 (always draft k) and 1")
    if settings.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={settings.max_new_tokens}: give at least 1")
    if not settings.temperatures or min(settings.temperatures) < 0:
        raise ValueError(f"temperatures={list(settings.temperatures)}: give at least one, none below 0")
    if bad := [p for p in settings.proposals if p not in ("greedy", "sampled")]:
        raise ValueError(f"proposals has {bad[0]!r}: choose from greedy, sampled")
    if not settings.proposals:
        raise ValueError("proposals is empty: give greedy, sampled or both")


def method_names(settings: EvalSettings) -> None:
    """Every method is built in or names a head. Raises ValueError."""
    for method in settings.methods:
        if method not in BUILT_IN and method not in settings.heads:
            known = [*settings.heads, *BUILT_IN]
            raise ValueError(f"methods has {method!r}: choose from {', '.join(known)}, or give its folder in heads")


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
    return spread(list(usable.values()), settings.prompts)


def plan(settings: EvalSettings, count: int) -> list[list[Unit]]:
    """Groups of units; a time budget is looked at between groups only, so that methods stay comparable."""
    groups: list[list[Unit]] = []
    heads = [m for m in settings.methods if m in settings.heads]

    def units(
        kind: str, i: int, temperature: float, k: int, methods: Sequence[str], proposals: Sequence[str]
    ) -> list[Unit]:
        return [
            Unit(kind, i, m, k, temperature, p)
            for p in proposals
            for m in methods
            if p == "greedy" or m in settings.heads
        ]

    for temperature in sorted(settings.temperatures):
        for i in range(count if temperature == 0 else min(settings.sampled_prompts, count)):
            proposals = ["greedy"] if temperature == 0 else settings.proposals
            methods = [m for m in settings.methods if not m.startswith("random") or i < settings.sweep_prompts]
            group = [Unit("timed", i, "plain", 0, temperature, "greedy")]
            group += units("timed", i, temperature, settings.k, methods, proposals)
            group += [  # a drafter without a law of its own still has its row where only sampled drafts are asked for
                Unit("timed", i, m, settings.k, temperature, "greedy")
                for m in methods
                if "greedy" not in proposals and m not in settings.heads
            ]
            turn = i % len(group)
            group = [*group[turn:], *group[:turn]]
            groups.append(sorted(group, key=lambda unit: unit.method == "replay"))  # needs plain's output
    for temperature in (t for t in sorted(settings.temperatures) if t > 0):
        for i in range(min(settings.alpha_prompts, settings.sampled_prompts, count)):
            groups.append(units("alpha", i, temperature, settings.k, heads, ["greedy"]))
    swept = [m for m in settings.methods if m not in ("replay", "random", "random-tokens")]
    for temperature in sorted(settings.temperatures):
        most = count if temperature == 0 else min(settings.sampled_prompts, count)
        for i in range(min(settings.sweep_prompts, most)):
            ks = [k for k in dict.fromkeys(settings.sweep_k) if k != settings.k]
            groups.append([u for k in ks for u in units("timed", i, temperature, k, swept, ["greedy"])])
    return [group for group in groups if group]


def measured(settings: EvalSettings, facts: dict[str, Any]) -> dict[str, Any]:
    """What the records depend on: a run folder holds records of one such set only."""
    held = dataclasses.asdict(settings)
    names = ["split", "rule", "max_new_tokens", "max_prompt_tokens", "top_k", "top_p", "min_p", "seed"]
    # not named where they are off: records of runs before there were such settings go on
    names += [name for name, off in (("min_confidence", 0.0), ("repetition_penalty", 1.0)) if held[name] != off]
    return {**{name: held[name] for name in names}, **facts}
