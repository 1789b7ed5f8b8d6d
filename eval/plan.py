"""What an evaluation measures, in which order: settings, prompts and the list of units.

The order is by importance, since a run may have a time budget: the main table at temperature 0 on all prompts, then
the other temperatures, then the recording of alpha, then the sweeps: k, trees, adaptive lengths, concurrency. Within a
group (one prompt, one temperature) plain and every method take turns, rotating from prompt to prompt, so that a drift
of the machine hits them alike.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eval import adaptive, reference, shapes
from eval.decoding import RULES
from eval.drafters import DRAFTERS, SAMPLING, DrafterSettings
from eval.shapes import TreeSettings
from eval.vllm_server import ServingSettings
from heads.target import TargetSettings

BUILT_IN = (*DRAFTERS, "random", "replay", *reference.METHODS)


@dataclass
class EvalSettings(DrafterSettings):
    """Settings of `python -m eval`, beside those of the drafters without training."""

    name: str = "default"
    outputs: str = "outputs"
    mode: str = "run"  # run, or theory: print the expected-speedup table
    backend: str = "drafthead"  # our own loop, or an engine that serves exported folders: vllm, sglang
    serving: ServingSettings = field(default_factory=ServingSettings)  # how such an engine is reached
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
    tree: Any = "chain"  # what heads draft in the main table: a name or paths, see eval/shapes.py
    trees: TreeSettings = field(default_factory=TreeSettings)
    sweep_trees: list[Any] = field(default_factory=list)  # more of them, on sweep_prompts
    adaptive: str = "none"  # how deep heads draft in the main table: none (k), confidence, gain, heuristic, load
    sweep_adaptive: list[str] = field(default_factory=list)  # more of them, on sweep_prompts
    concurrency: list[int] = field(default_factory=lambda: [1])  # above 1: sequences decoded at once, a sweep
    concurrency_prompts: int = 8  # 0 = all; may be more than `prompts`
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
    """One decoding of a prompt, or of `count` prompts at once: kind "timed" or "alpha".

    `tree` is the setting as it was given (paths as a tuple).
    """

    kind: str
    prompt: int
    method: str
    k: int
    temperature: float
    proposal: str
    tree: Any = "chain"
    adaptive: str = "none"
    concurrency: int = 1
    count: int = 1


def check(settings: EvalSettings, limits: dict[str, int]) -> None:
    """Refuse settings that cannot be measured. limits: method -> most tokens it can draft.

    Raises ValueError naming the setting.
    """
    settings.check()
    wanted = [settings.k, *settings.sweep_k]
    for k in wanted:
        if k < 1:
            raise ValueError(f"k={k}: a draft has at least 1 token (plain decoding, k = 0, is always measured)")
        for method in settings.methods:
            if k > limits.get(method, k):
                raise ValueError(f"k={k} is above what {method!r} can draft ({limits[method]}): lower k or sweep_k")
    if settings.rule not in RULES:
        raise ValueError(f"rule={settings.rule!r}: choose from {', '.join(RULES)}")
    if max(settings.temperatures, default=0) > 0 and settings.heads:
        if settings.rule == "one-hot" and "sampled" in settings.proposals:
            raise ValueError("rule=one-hot judges greedy drafts: give proposals=[greedy]")
        if settings.tree == "dynamic" and "greedy" not in settings.proposals:
            raise ValueError("tree=dynamic has greedy drafts: add greedy to proposals")
    for tree in [settings.tree, *settings.sweep_trees]:
        shapes.check(tree, settings.trees)
    for kind in [settings.adaptive, *settings.sweep_adaptive]:
        if kind not in adaptive.KINDS:
            raise ValueError(f"adaptive={kind!r}: choose from {', '.join(adaptive.KINDS)}")
        if kind == "confidence" and not settings.min_confidence:
            raise ValueError("adaptive=confidence stops at min_confidence: give it, for example min_confidence=0.3")
        if kind == "load" and max(settings.concurrency, default=1) == 1:
            raise ValueError("adaptive=load needs a concurrency sweep: give it, for example concurrency=[1,2,4,8]")
    if not settings.concurrency or min(settings.concurrency) < 1:
        raise ValueError(f"concurrency={list(settings.concurrency)}: give numbers of sequences, at least 1")
    if not 0 <= settings.min_confidence <= 1:
        raise ValueError(f"min_confidence={settings.min_confidence}: give a number between 0 (always draft k) and 1")
    if settings.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={settings.max_new_tokens}: give at least 1")
    if not settings.temperatures or min(settings.temperatures) < 0:
        raise ValueError(f"temperatures={list(settings.temperatures)}: give at least one, none below 0")
    if min(settings.temperatures) > 0 and (own := [m for m in settings.methods if m in reference.METHODS]):
        raise ValueError(f"methods has {own[0]!r}, which is measured at temperature 0 only: add 0 to temperatures")
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
    drafting = [m for m in settings.methods if m in settings.heads or m in SAMPLING and m != "hybrid"]
    if "hybrid" in settings.methods and settings.hybrid.method not in drafting:
        raise ValueError(
            f"hybrid.method={settings.hybrid.method!r}: name a head or draft-model that is in methods; its drafts are "
            "used where no match is long"
        )


def plan(settings: EvalSettings, count: int) -> list[list[Unit]]:
    """Groups of units; a time budget is looked at between groups only, so that methods stay comparable."""
    groups = [*_main(settings, count), *_alpha(settings, count), *_sweeps(settings, count)]
    return [group for group in [*groups, *_concurrent(settings, count)] if group]


def main_tree(settings: EvalSettings) -> Any:
    """Hashable: paths become tuples."""
    return hashable(settings.tree)


def main_adaptive(settings: EvalSettings) -> str:
    """How deep heads draft in the main table. `min_confidence` alone means confidence; load shows in batches only."""
    if settings.adaptive == "none" and settings.min_confidence:
        return "confidence"
    return "none" if settings.adaptive == "load" else settings.adaptive


def main_row(settings: EvalSettings) -> tuple[str, str]:
    """Tree and adaptive length of the heads' rows in the main table, as records name them."""
    return shapes.label(settings.tree, settings.trees), main_adaptive(settings)


def hashable(tree: Any) -> Any:
    return tree if isinstance(tree, str) else tuple(tuple(path) for path in tree)


def units(
    settings: EvalSettings,
    kind: str,
    i: int,
    temperature: float,
    k: int,
    methods: Sequence[str],
    proposals: Sequence[str],
    tree: Any = "chain",
    adaptive: str = "none",
) -> list[Unit]:
    """Trees and adaptive lengths are the heads'; a dynamic tree's proposals are greedy; transformers' own loops are
    measured at temperature 0."""
    found = []
    if temperature > 0:
        methods = [m for m in methods if m not in reference.METHODS]
    for p in proposals:
        for m in methods:
            head = m in settings.heads
            if (p == "greedy" or head or m in SAMPLING) and not (p == "sampled" and tree == "dynamic"):
                found.append(
                    Unit(kind, i, m, k, temperature, p, tree if head else "chain", adaptive if head else "none")
                )
    return found


def _main(settings: EvalSettings, count: int) -> list[list[Unit]]:
    groups = []
    tree, adaptive = main_tree(settings), main_adaptive(settings)
    for temperature in sorted(settings.temperatures):
        for i in range(_most(settings, temperature, count)):
            proposals = ["greedy"] if temperature == 0 else settings.proposals
            methods = [m for m in settings.methods if not m.startswith("random") or i < settings.sweep_prompts]
            group = [Unit("timed", i, "plain", 0, temperature, "greedy")]
            group += units(settings, "timed", i, temperature, settings.k, methods, proposals, tree, adaptive)
            group += [  # a drafter without a law of its own still has its row where only sampled drafts are asked for
                Unit("timed", i, m, settings.k, temperature, "greedy")
                for m in methods
                if "greedy" not in proposals and m not in (*settings.heads, *SAMPLING, *reference.METHODS)
            ]
            turn = i % len(group)
            group = [*group[turn:], *group[:turn]]
            groups.append(sorted(group, key=lambda unit: unit.method == "replay"))  # needs plain's output
    return groups


def _alpha(settings: EvalSettings, count: int) -> list[list[Unit]]:
    heads = [m for m in settings.methods if m in settings.heads]
    return [
        units(settings, "alpha", i, temperature, settings.k, heads, ["greedy"])
        for temperature in (t for t in sorted(settings.temperatures) if t > 0)
        for i in range(min(settings.alpha_prompts, _most(settings, temperature, count)))
    ]


def _sweeps(settings: EvalSettings, count: int) -> list[list[Unit]]:
    """Over k, trees and adaptive lengths; what the main table has already is left out."""
    swept = [m for m in settings.methods if m not in ("replay", "random", "random-tokens", "hf-generate")]
    heads = [m for m in swept if m in settings.heads]
    shown = main_tree(settings), main_adaptive(settings)
    groups: list[list[Unit]] = []
    for temperature in sorted(settings.temperatures):
        for i in range(min(settings.sweep_prompts, _most(settings, temperature, count))):
            at = settings, "timed", i, temperature
            plain_k = [] if shown == ("chain", "none") else units(*at, settings.k, heads, ["greedy"])
            ks = [k for k in dict.fromkeys(settings.sweep_k) if k != settings.k]
            groups.append([*plain_k, *(u for k in ks for u in units(*at, k, swept, ["greedy"]))])
            trees = [t for t in dict.fromkeys(map(hashable, settings.sweep_trees)) if t not in ("chain", shown[0])]
            groups.append([u for t in trees for u in units(*at, settings.k, heads, ["greedy"], t)])
            kinds = [a for a in dict.fromkeys(settings.sweep_adaptive) if a not in ("none", "load", shown[1])]
            groups.append([u for a in kinds for u in units(*at, settings.k, heads, ["greedy"], "chain", a)])
    return groups


def _concurrent(settings: EvalSettings, count: int) -> list[list[Unit]]:
    """All methods at each concurrency on one set of prompts; drafts off above a load come last, lowest temperature."""
    count = min(settings.concurrency_prompts or count, count)
    methods = [m for m in settings.methods if not m.startswith("random") and m not in reference.METHODS]
    many = [c for c in sorted(set(settings.concurrency)) if c > 1]
    shown = main_tree(settings), main_adaptive(settings)
    groups: list[list[Unit]] = []

    def at(c: int, found: Sequence[Unit]) -> list[Unit]:
        return [dataclasses.replace(unit, concurrency=c, count=count) for unit in found]

    for temperature in sorted(settings.temperatures):
        proposals = settings.proposals if temperature else ["greedy"]
        own = units(settings, "timed", 0, temperature, settings.k, methods, proposals, *shown)
        groups += [at(c, [Unit("timed", 0, "plain", 0, temperature, "greedy"), *own]) for c in many]
    if "load" in (settings.adaptive, *settings.sweep_adaptive):
        heads, lowest = [m for m in methods if m in settings.heads], min(settings.temperatures)
        own = units(settings, "timed", 0, lowest, settings.k, heads, ["greedy"], shown[0], "load")
        groups += [at(c, own) for c in many]
    return groups


def _most(settings: EvalSettings, temperature: float, count: int) -> int:
    count = min(settings.prompts or count, count)
    return count if temperature == 0 else min(settings.sampled_prompts, count)


def measured(settings: EvalSettings, facts: dict[str, Any]) -> dict[str, Any]:
    """What the records depend on: a run folder holds records of one such set only."""
    held = dataclasses.asdict(settings)
    names = ["split", "rule", "max_new_tokens", "max_prompt_tokens", "top_k", "top_p", "min_p", "seed"]
    # not named where they are off: records of runs before there were such settings go on
    offs = [("min_confidence", 0.0), ("repetition_penalty", 1.0), ("trees", dataclasses.asdict(TreeSettings()))]
    offs += dataclasses.asdict(DrafterSettings()).items()
    names += [name for name, off in offs if held[name] != off]
    return {**{name: held[name] for name in names}, **facts}
