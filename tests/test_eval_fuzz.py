"""Random trees, prompts, ends, budgets, contexts and batches against decoding by whole passes without a cache.

python -m pytest -q -s tests/test_eval_fuzz.py                          a few hundred sequences
DRAFTHEAD_FUZZ=10000 python -m pytest -q -s tests/test_eval_fuzz.py     the proof of docs/proofs/fuzz.txt
"""

import dataclasses
import os
import random
from collections import Counter
from typing import Any

import pytest
from guesser import guesser, slowly
from tiny import tiny_target

from eval.cache import KVCache
from eval.generate import Decoding, generate_batch
from eval.warpers import Warpers
from heads.target import Target

VOCAB = 10
MOST = 14  # new tokens
SEQUENCES = int(os.environ.get("DRAFTHEAD_FUZZ", "200"))
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"model_type": "mistral", "sliding_window": 4}),
    ("gemma2", {"sliding_window": 5}),
]


def cases(target: Target, dice: random.Random, temperature: float) -> tuple[list[list[int]], list[Decoding]]:
    """Up to 8 different prompts, each with its own budget and seed."""
    prompts = {tuple(dice.randrange(VOCAB) for _ in range(dice.randint(1, 9))) for _ in range(8)}
    return [list(p) for p in sorted(prompts)], [
        Decoding(dice.randint(1, 6), dice.randint(0, MOST), Warpers(temperature), seed=dice.randrange(99))
        for _ in prompts
    ]


def ended(ids: list[int], budget: int, ends: frozenset[int]) -> tuple[list[int], str]:
    """An answer cut at its budget and after the first end-of-turn token, and why."""
    kept = ids[:budget]
    at = next((i for i, token in enumerate(kept) if token in ends), None)
    return (kept, "length") if at is None else (kept[: at + 1], "eos")


def fuzz(dice: random.Random, targets: list[Target], count: int) -> tuple[Counter[str], list[str]]:
    """What was seen, and every sequence that differs from the reference."""
    seen: Counter[str] = Counter()
    wrong: list[str] = []
    while seen["sequences"] < count:
        target = dice.choice(targets)
        context = dice.choice([12, 18, 256])
        target.spec = dataclasses.replace(target.spec, max_position_embeddings=context)
        target.eos_ids = frozenset(dice.sample(range(VOCAB), dice.randint(0, 2)))
        temperature = dice.choice([0.0, 1.0])
        prompts, settings = cases(target, dice, temperature)
        # the drafter knows how the answer would go on, so that drafts run over its end
        endless = [
            slowly(target, p, MOST, frozenset(), temperature, d.seed)[0] for p, d in zip(prompts, settings, strict=True)
        ]
        slow = [ended(ids, d.max_new_tokens, target.eos_ids) for ids, d in zip(endless, settings, strict=True)]
        known = {tuple(p): ids for p, ids in zip(prompts, endless, strict=True)}
        drafter = guesser(known, VOCAB, most=dice.choice([1, 4, 14]), right=dice.choice([0.0, 0.6, 0.97]))
        found = generate_batch(target, drafter, prompts, settings, dice.randint(1, len(prompts)))
        for prompt, decoding, ours, theirs in zip(prompts, settings, found, slow, strict=True):
            seen["sequences"] += 1
            seen["tokens"] += len(ours.output_ids)
            seen["rounds"] += len(ours.steps)
            seen["nodes"] += sum(ours.nodes)
            seen["accepted"] += sum(a for _, a in ours.steps)
            seen[f"ended by {theirs[1]}"] += 1
            if (ours.output_ids, ours.stop) != theirs:
                wrong.append(f"{target.spec.name} {prompt} {decoding}: {ours.output_ids} {ours.stop}, not {theirs}")
    return seen, wrong


def targets() -> list[Target]:
    return [tiny_target(kind, vocab_size=VOCAB, layers=2, **options) for kind, options in KINDS]


def test_fuzzed_sequences_are_those_of_whole_passes_without_cache() -> None:
    seen, wrong = fuzz(random.Random(5), targets(), SEQUENCES)
    print("".join(f"\n{name}: {number}" for name, number in sorted(seen.items())), f"\ndiffering: {len(wrong)}")
    assert not wrong, wrong[0]
    assert seen["accepted"] > seen["rounds"] / 4 and seen["nodes"] > seen["accepted"] > 0
    assert seen["ended by eos"] and seen["ended by length"]


def test_the_fuzz_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """One entry too few is kept after a full acceptance."""
    whole = KVCache.accept

    def forgetful(self: KVCache, row: int, path: list[int]) -> None:
        whole(self, row, path)
        self.lengths[row] -= len(path) > 1

    monkeypatch.setattr(KVCache, "accept", forgetful)
    assert fuzz(random.Random(5), targets()[:1], 24)[1]
