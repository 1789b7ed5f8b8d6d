"""Runs the plan: decodes unit after unit and appends a record for each; measures costs."""

import dataclasses
import time
import zlib
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from eval import metrics, timing
from eval.cache import AttentionMasks
from eval.drafter import Drafter, PerSequence
from eval.drafters.head import drafter_for, pack, untrained
from eval.drafters.lookup import Lookup
from eval.drafters.random import Random
from eval.drafters.replay import Replay
from eval.generate import Decoding, generate
from eval.metrics import Record
from eval.plan import EvalSettings, Unit
from eval.records import RecordFile
from eval.verify import mix
from eval.warpers import Warpers
from heads.target import Target


class Bench:
    """A target, its prompts and the drafters that are compared on them."""

    def __init__(
        self, settings: EvalSettings, target: Target, heads: dict[str, Any], prompts: list[dict[str, Any]]
    ) -> None:
        self.settings, self.target, self.prompts = settings, target, prompts
        self.masks = AttentionMasks(target)
        V = target.spec.vocab_size
        self.drafters: dict[str, Drafter] = {}
        if "random" in settings.methods:
            model = heads[list(heads)[-1]] if heads else None
            self.drafters["random"] = (
                PerSequence(lambda: Random(V))
                if model is None
                else drafter_for(pack(untrained(model, target), target), target)
            )
        self.drafters |= {name: drafter_for(pack(head, target), target) for name, head in heads.items()}
        self.drafters["lookup"] = PerSequence(lambda: Lookup(V))
        self.drafters["random-tokens"] = PerSequence(lambda: Random(V))

    def decoding(self, unit: Unit, max_new_tokens: int | None = None) -> Decoding:
        s, prompt = self.settings, self.prompts[unit.prompt]
        return Decoding(
            k=unit.k,
            max_new_tokens=max_new_tokens or s.max_new_tokens,
            warpers=Warpers(unit.temperature, s.top_k, s.top_p, s.min_p, repetition_penalty=s.repetition_penalty),
            proposal=unit.proposal,
            rule=s.rule if unit.method != "plain" else "auto",
            # prompts must not share their noise, methods must
            seed=mix(s.seed, zlib.crc32(f"{prompt['id']}/{prompt['turn']}".encode())),
            record_alpha=unit.kind == "alpha",
            # alpha is a mean over all positions, not over those the head is sure of
            min_confidence=s.min_confidence if unit.kind == "timed" else 0.0,
        )

    def drafter(self, unit: Unit, plain: Sequence[int]) -> Drafter | None:
        if unit.method == "plain":
            return None
        if unit.method != "replay":
            return self.drafters[unit.method]
        return PerSequence(lambda: Replay(plain, self.target.spec.vocab_size))

    def warm_up(self, units: Sequence[Unit]) -> None:
        """A few tokens with every method, so that the first record does not pay for lazy set-up."""
        for unit in {unit.method: unit for unit in units}.values():
            generate(
                self.target,
                self.drafter(unit, [0] * 8),
                self.prompts[0]["ids"][-16:],
                self.decoding(unit, 8),
                self.masks,
            )


def record(bench: Bench, unit: Unit, held: Sequence[Record]) -> Record:
    """Decode one unit -> its record."""
    prompt, decoding = bench.prompts[unit.prompt], bench.decoding(unit)
    plain = next((r for r in held if r["method"] == "plain" and _same(r, prompt, unit)), None)
    drafter = bench.drafter(unit, plain["output_ids"] if plain else [])
    found = dataclasses.asdict(generate(bench.target, drafter, prompt["ids"], decoding, bench.masks))
    if unit.kind != "alpha":
        del found["alpha_sum_min"], found["alpha_greedy"]
    return {
        "kind": unit.kind,
        "id": prompt["id"],
        "route": prompt["route"],
        "turn": prompt["turn"],
        "method": unit.method,
        "rule": decoding.resolved_rule(),
        "proposal": unit.proposal,
        "k": unit.k,
        "temperature": unit.temperature,
        "seed": bench.settings.seed,
        "prompt_tokens": len(prompt["ids"]),
        "new_tokens": len(found["output_ids"]),
        "loop_share": metrics.loop_share(found["output_ids"]),
        **found,
    }


def _same(record: Record, prompt: dict[str, Any], unit: Unit) -> bool:
    return (record["id"], record["turn"], record["temperature"]) == (prompt["id"], prompt["turn"], unit.temperature)


def measure(bench: Bench, groups: Sequence[Sequence[Unit]], file: RecordFile) -> bool:
    """Decode what is not recorded yet; false when the time budget ended it before the plan did."""
    s = bench.settings

    def key(unit: Unit) -> tuple[Any, ...]:
        prompt = bench.prompts[unit.prompt]
        return (
            unit.kind, prompt["id"], prompt["turn"], unit.method, unit.k, unit.temperature, unit.proposal, s.seed,
        )  # fmt: skip

    missing = [[unit for unit in group if key(unit) not in file.done] for group in groups]
    missing = [group for group in missing if group]
    if missing:
        bench.warm_up([unit for group in missing for unit in group])
    end = time.monotonic() + 60 * s.minutes if s.minutes else None
    with tqdm(total=sum(map(len, missing)), desc="eval", unit="run", dynamic_ncols=True) as bar:
        for group in missing:
            if end is not None and time.monotonic() > end:
                return False
            for unit in group:
                file.append(record(bench, unit, file.rows))
                bar.set_postfix_str(f"{unit.method} k={unit.k} T={unit.temperature:g}", refresh=False)
                bar.update()
    return True


def costs(bench: Bench) -> dict[str, Any]:
    """cost.json: seconds of a target pass by tokens, of a draft step and of a round's fixed part by method."""
    s = bench.settings
    text = [token for prompt in bench.prompts for token in prompt["ids"]]
    text = (text * (s.cost_context // len(text) + 1))[: s.cost_context]
    found: dict[str, Any] = {"context": s.cost_context, "target_pass_s": timing.target_pass(bench.target, text)}
    found |= {"draft_step_s": {}, "draft_fixed_s": {}}
    for name in s.methods:
        if name in bench.drafters:
            step, fixed = timing.draft(bench.target, bench.drafters[name], text, s.k)
            found["draft_step_s"][name], found["draft_fixed_s"][name] = step, fixed
    return found
