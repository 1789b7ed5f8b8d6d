"""Runs the plan: decodes unit after unit and appends a record for each; measures costs."""

import dataclasses
import time
import zlib
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from eval import metrics, reference, shapes
from eval.cache import AttentionMasks
from eval.decoding import LOSSY
from eval.drafter import Drafter, PerSequence
from eval.drafters import DRAFTERS, REMEMBERING
from eval.drafters.draft_model import DraftModel
from eval.drafters.head import drafter_for, pack, untrained
from eval.drafters.random import Random
from eval.drafters.replay import Replay
from eval.generate import Decoding, Generation, generate, generate_batch
from eval.measured import Measured
from eval.metrics import Record
from eval.plan import EvalSettings, Unit
from eval.records import RecordFile
from eval.results import break_even
from eval.tree import depth_of
from eval.verify import mix
from eval.warpers import Warpers
from heads.target import Target


class Bench:
    """A target, its prompts and the drafters that are compared on them."""

    def __init__(
        self,
        settings: EvalSettings,
        target: Target,
        heads: dict[str, Any],
        prompts: list[dict[str, Any]],
        known: Measured,
    ) -> None:
        self.settings, self.target, self.prompts, self.known = settings, target, prompts, known
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
        for name in sorted((m for m in settings.methods if m in DRAFTERS), key=lambda m: m == "hybrid"):
            if name not in REMEMBERING:
                self.drafters[name] = self._made(name)
        self.remembering: dict[Unit, Drafter] = {}
        self.assistant: Target | None = None
        if "hf-assisted" in settings.methods:
            own = self.drafters.get("draft-model")
            self.assistant = own.model if isinstance(own, DraftModel) else settings.draft_model.load(target)

    def _made(self, name: str) -> Drafter:
        return DRAFTERS[name](self.target, self.settings, self.drafters.__getitem__)

    def decoding(
        self, unit: Unit, prompt: int, records: Sequence[Record], max_new_tokens: int | None = None
    ) -> Decoding:
        s, chosen = self.settings, self.prompts[prompt]
        shape = self.known.shape(unit.method, unit.tree)
        load = unit.adaptive == "load"
        return Decoding(
            k=unit.k,
            max_new_tokens=max_new_tokens or s.max_new_tokens,
            warpers=Warpers(unit.temperature, s.top_k, s.top_p, s.min_p, repetition_penalty=s.repetition_penalty),
            proposal=unit.proposal,
            rule=s.rule if unit.method != "plain" else "auto",
            # prompts must not share their noise, methods must
            seed=mix(s.seed, zlib.crc32(f"{chosen['id']}/{chosen['turn']}".encode())),
            record_alpha=unit.kind == "alpha",
            # alpha is a mean over all positions, not over those the head is sure of
            min_confidence=s.min_confidence if unit.adaptive == "confidence" else 0.0,
            tree=shape,
            replacement=s.trees.replacement,
            gain=self.known.gain(self, unit.method) if unit.adaptive == "gain" else None,
            heuristic=unit.adaptive == "heuristic",
            most_live=break_even(records, unit.method, tree_of(unit, s)) if load else None,
        )

    def drafter(self, unit: Unit, records: Sequence[Record]) -> Drafter | None:
        if unit.method == "plain":
            return None
        if unit.method in REMEMBERING:
            # a memory of its own for each row of a table: it must never hold an answer to the prompt at hand
            row = dataclasses.replace(unit, prompt=0, count=1)
            if row not in self.remembering:
                self.remembering[row] = self._made(unit.method)
            return self.remembering[row]
        if unit.method != "replay":
            return self.drafters[unit.method]
        ids_of = {(prompt["id"], prompt["turn"]): tuple(prompt["ids"]) for prompt in self.prompts}
        known = {
            ids_of[r["id"], r["turn"]]: r["output_ids"]
            for r in records
            if r["method"] == "plain" and r["temperature"] == unit.temperature and (r["id"], r["turn"]) in ids_of
        }
        return PerSequence(lambda: Replay(known, self.target.spec.vocab_size))

    def warm_up(self, units: Sequence[Unit]) -> None:
        """A few tokens with every method, so that the first record does not pay for lazy set-up."""
        for unit in {unit.method: unit for unit in units}.values():
            plain = dataclasses.replace(unit, tree="chain", adaptive="none", kind="warm-up")
            decoding, ids = self.decoding(plain, 0, [], 8), self.prompts[0]["ids"][-16:]
            if unit.method in reference.METHODS:
                self.reference(unit.method, ids, decoding)
            else:
                generate(self.target, self.drafter(plain, []), ids, decoding, self.masks)

    def reference(self, method: str, ids: list[int], decoding: Decoding) -> Generation:
        """transformers' own decoding of a prompt."""
        assistant = self.assistant if method == "hf-assisted" else None
        return reference.generate(self.target, method, ids, decoding, assistant)


def tree_of(unit: Unit, settings: EvalSettings) -> str:
    return shapes.label(unit.tree, settings.trees)


def records_of(bench: Bench, unit: Unit, held: Sequence[Record]) -> list[Record]:
    """Decode one unit -> a record per prompt of it."""
    places = range(unit.prompt, unit.prompt + unit.count)
    decodings = [bench.decoding(unit, place, held) for place in places]
    ids = [bench.prompts[place]["ids"] for place in places]
    if unit.method in reference.METHODS:
        found = [bench.reference(unit.method, own, decoding) for own, decoding in zip(ids, decodings, strict=True)]
    else:
        found = generate_batch(bench.target, bench.drafter(unit, held), ids, decodings, unit.concurrency, bench.masks)
    return [
        record(bench, unit, bench.prompts[place], decoding, generation)
        for place, decoding, generation in zip(places, decodings, found, strict=True)
    ]


def record(bench: Bench, unit: Unit, prompt: dict[str, Any], decoding: Decoding, generation: Generation) -> Record:
    found, rule = dataclasses.asdict(generation), decoding.resolved_rule()
    if unit.kind != "alpha":
        del found["alpha_sum_min"], found["alpha_greedy"]
    if tree_of(unit, bench.settings) == "chain":
        del found["nodes"]  # the steps say it
    return {
        "kind": unit.kind,
        "id": prompt["id"],
        "route": prompt["route"],
        "turn": prompt["turn"],
        "method": unit.method,
        "rule": rule,
        "lossy": rule in LOSSY,
        "proposal": unit.proposal,
        "k": decoding.depth(),
        "tree": tree_of(unit, bench.settings),
        "adaptive": unit.adaptive,
        "concurrency": unit.concurrency,
        "temperature": unit.temperature,
        "seed": bench.settings.seed,
        "prompt_tokens": len(prompt["ids"]),
        "new_tokens": len(found["output_ids"]),
        "loop_share": metrics.loop_share(found["output_ids"]),
        **found,
    }


def measure(bench: Bench, groups: Sequence[Sequence[Unit]], file: RecordFile) -> bool:
    """Decode what is not recorded yet; false when the time budget ended it before the plan did."""
    s = bench.settings

    def keys(unit: Unit) -> list[tuple[Any, ...]]:
        own = bench.prompts[unit.prompt : unit.prompt + unit.count]
        shape = bench.known.shape(unit.method, unit.tree)
        k = unit.k if shape is None else depth_of(shape)
        rest = unit.temperature, unit.proposal, s.seed, tree_of(unit, s), unit.adaptive, unit.concurrency
        return [(unit.kind, prompt["id"], prompt["turn"], unit.method, k, *rest) for prompt in own]

    missing = [[unit for unit in group if not file.done.issuperset(keys(unit))] for group in groups]
    missing = [group for group in missing if group]
    if missing:
        bench.warm_up([unit for group in missing for unit in group])
    end = time.monotonic() + 60 * s.minutes if s.minutes else None
    with tqdm(total=sum(map(len, missing)), desc="eval", unit="run", dynamic_ncols=True) as bar:
        for group in missing:
            if end is not None and time.monotonic() > end:
                return False
            for unit in group:
                for found in records_of(bench, unit, file.rows):
                    file.append(found)
                bar.set_postfix_str(f"{unit.method} k={unit.k} T={unit.temperature:g}", refresh=False)
                bar.update()
    return True
