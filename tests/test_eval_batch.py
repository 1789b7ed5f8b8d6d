"""Batches, refill and trees change no token: every sequence decodes as it does alone, whatever else is in the batch."""

import dataclasses
from typing import Any

import pytest
import torch
from guesser import guesser, slowly
from tiny import tiny_target
from toys import eagle3, medusa

from eval import cache, generate
from eval.cache import KVCache
from eval.drafter import Drafter, PerSequence
from eval.drafters.head import drafter_for
from eval.drafters.lookup import Lookup
from eval.generate import Decoding, generate_batch
from eval.tree import Dynamic, StaticTree, from_paths
from eval.warpers import Warpers
from heads.target import Target

VOCAB = 12  # small, so that heads of random weights are right now and then
PATHS = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0, 0]]
SHAPES: dict[str, Any] = {"chain": None, "static": from_paths(PATHS, 4, VOCAB), "dynamic": Dynamic(4, 3, 9)}
LENGTHS = (3, 11, 1, 6, 2, 17, 5)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


def decodings(**changes: Any) -> list[Decoding]:
    """Own budgets and seeds."""
    budgets = (9, 14, 1, 20, 3, 0, 12)
    return [Decoding(k=4, max_new_tokens=n, seed=i, **changes) for i, n in enumerate(budgets)]


def drafters(target: Target, answers: list[list[int]]) -> dict[str, Drafter]:
    known = {tuple(p): a for p, a in zip(prompts(), answers, strict=True)}
    return {
        "lookup": PerSequence(lambda: Lookup(VOCAB)),
        "guesser": guesser(known, VOCAB),
        "medusa": drafter_for(medusa(target, std=0.3), target),
        "eagle3": drafter_for(eagle3(target, std=0.3), target),
        "eagle3-reduced": drafter_for(eagle3(target, std=0.3, draft=[2, 3, 5, 6, 8, 9]), target),
    }


def outputs(target: Target, drafter: Drafter | None, settings: list[Decoding], concurrency: int) -> list[list[int]]:
    return [found.output_ids for found in generate_batch(target, drafter, prompts(), settings, concurrency)]


FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attn_implementation": "eager"}),
    ("qwen3", {}),
    ("llama", {"model_type": "mistral", "sliding_window": 5}),
    ("gemma2", {"sliding_window": 5}),  # every second layer slides
    ("llama", {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}),
]


@pytest.mark.parametrize(("kind", "overrides"), FAMILIES)
def test_greedy_answers_are_those_of_the_model_alone(kind: str, overrides: dict[str, Any]) -> None:
    target = tiny_target(kind, vocab_size=VOCAB, layers=4, **overrides)
    alone = [
        slowly(target, p, d.max_new_tokens, target.eos_ids)[0] for p, d in zip(prompts(), decodings(), strict=True)
    ]
    assert outputs(target, None, decodings(), 3) == alone
    deep = 0
    every = drafters(target, alone)
    for name in every if overrides == {} else ("guesser", "eagle3"):
        drafter = every[name]
        for shape, tree in SHAPES.items():
            settings = decodings(tree=tree)
            for concurrency in (1, 4) if kind == "llama" and name == "eagle3" else (4,):
                found = generate_batch(target, drafter, prompts(), settings, concurrency)
                assert [f.output_ids for f in found] == alone, (name, shape, concurrency)
                deep = max(deep, *(a for f in found for _, a in f.steps))
    assert deep >= 3, "paths of three nodes and more are what compaction is for"


@pytest.mark.parametrize(("rule", "proposal"), [("match", "greedy"), ("strict", "sampled")])
def test_sampled_answers_are_coupled_to_plain_ones(rule: str, proposal: str) -> None:
    target = tiny_target(vocab_size=VOCAB, layers=4)
    plain = outputs(target, None, decodings(warpers=Warpers(1.0)), 1)
    ends = target.eos_ids
    pairs = zip(prompts(), decodings(), strict=True)
    alone = [slowly(target, p, d.max_new_tokens, ends, 1.0, d.seed)[0] for p, d in pairs]
    assert plain == alone
    for name, drafter in drafters(target, plain).items():
        for shape, tree in SHAPES.items():
            if proposal == "sampled" and (shape == "dynamic" or name == "guesser"):
                continue
            settings = decodings(warpers=Warpers(1.0), tree=tree, rule=rule, proposal=proposal)
            for concurrency in (1, 8) if name == "eagle3" else (8,):
                assert outputs(target, drafter, settings, concurrency) == plain, (name, shape, concurrency)


@pytest.mark.parametrize(
    ("rule", "proposal", "replacement"),
    [
        ("rejection", "sampled", False),
        ("rejection", "sampled", True),
        ("one-hot", "greedy", False),
        ("typical", "greedy", False),
    ],
)
def test_rules_that_draw_give_the_same_answer_in_any_batch_and_order(
    rule: str, proposal: str, replacement: bool
) -> None:
    target = tiny_target(vocab_size=VOCAB, layers=4)
    for shape, tree in SHAPES.items():
        if proposal == "sampled" and shape == "dynamic":
            continue
        settings = decodings(warpers=Warpers(1.0), tree=tree, rule=rule, proposal=proposal, replacement=replacement)
        every = drafters(target, [[2] * 20] * len(LENGTHS))
        for name in ("medusa", "eagle3-reduced") if proposal == "sampled" else ("guesser",):
            drafter = every[name]
            alone = outputs(target, drafter, settings, 1)
            assert outputs(target, drafter, settings, 4) == alone, (name, shape)
            turned = generate_batch(target, drafter, prompts()[::-1], settings[::-1], 3)
            assert [found.output_ids for found in turned[::-1]] == alone, (name, shape)
            assert [len(ids) for ids in alone] != [0] * len(alone)


def poisoned(held: KVCache) -> None:
    """What no row may read: everything past each pointer, as far as a pass of 12 rows shows it to attention."""
    for row, n in enumerate(held.lengths):
        for layer in (*held.keys, *held.values):
            layer[row, :, n:] = 1e9


def test_left_over_entries_are_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused drafts, padding, and sequences that ended: overwritten with 1e9 after every round, to no effect."""
    target = tiny_target(vocab_size=VOCAB, layers=4)
    plain = outputs(target, None, decodings(), 1)
    head = eagle3(target, std=0.3)
    rounds = 0

    def spoiling(self: generate.Batch) -> None:
        nonlocal rounds
        whole(self)
        poisoned(self.cache)
        own = self.drafter.cache  # type: ignore[union-attr]
        for row, n in enumerate(own.lengths.tolist()):
            own.keys[0][row, :, n:] = own.values[0][row, :, n:] = 1e9
        rounds += 1

    whole = generate.Batch.round
    monkeypatch.setattr(generate.Batch, "round", spoiling)
    for tree in SHAPES.values():
        assert outputs(target, drafter_for(head, target), decodings(tree=tree), 3) == plain
    assert rounds > 20
    wrong = cache.Trees.mask
    monkeypatch.setattr(cache.Trees, "mask", lambda self, *args, **kwargs: wrong(self, *args, **kwargs) | True)
    with_all = outputs(target, drafter_for(head, target), decodings(tree=SHAPES["static"]), 3)
    assert with_all != plain, "a mask that shows everything must be caught"


def test_keeping_the_wrong_entries_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(vocab_size=VOCAB, layers=4)
    plain = outputs(target, None, decodings(), 1)

    def in_place(self: KVCache, row: int, path: list[int]) -> None:
        self.lengths[row] += 1 + len(path)  # wrong for a path that is no chain

    monkeypatch.setattr(KVCache, "accept", in_place)
    known = {tuple(p): a for p, a in zip(prompts(), plain, strict=True)}
    assert outputs(target, guesser(known, VOCAB), decodings(), 3) != plain


def test_concurrency_is_kept_while_prompts_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(vocab_size=VOCAB, layers=4)
    target.eos_ids = frozenset()
    live: list[int] = []
    whole = generate.Batch.round

    def counting(self: generate.Batch) -> None:
        live.append(len(self.live))
        whole(self)

    monkeypatch.setattr(generate.Batch, "round", counting)
    settings = [Decoding(max_new_tokens=n) for n in (5, 9, 3, 8, 6, 7, 4)]
    found = generate_batch(target, None, prompts(), settings, 3)
    assert [len(f.output_ids) for f in found] == [d.max_new_tokens for d in settings]
    tail = live.index(2) if 2 in live else len(live)
    assert (
        live == sorted(live, reverse=True)
        and live[0] == 3
        and tail >= sum(n - 1 for n in (5, 9, 3, 8, 6, 7, 4)) // 3 - 4
    )
    assert all(f.wall_s >= f.prefill_s > 0 for f in found)


def test_ends_budgets_and_a_full_context_hold_inside_a_tree() -> None:
    target = tiny_target(vocab_size=VOCAB, layers=4, max_position_embeddings=24)
    target.eos_ids = frozenset({4, 9})
    answers = [slowly(target, p, 40, target.eos_ids) for p in prompts()]
    known = {tuple(p): a for p, (a, _) in zip(prompts(), answers, strict=True)}
    settings = [Decoding(k=5, max_new_tokens=40) for _ in LENGTHS]
    found = generate_batch(target, guesser(known, VOCAB, right=0.95), prompts(), settings, 4)
    assert [(f.output_ids, f.stop) for f in found] == answers
    assert {reason for _, reason in answers} == {"eos", "length"}, "both kinds of end are there to be seen"
    for f in found:
        assert len(f.nodes) == len(f.steps) and all(a <= K <= n for (K, a), n in zip(f.steps, f.nodes, strict=True))


def test_bad_batches_are_refused_before_anything_is_decoded() -> None:
    target = tiny_target(vocab_size=VOCAB, layers=4)
    with pytest.raises(ValueError, match="concurrency=0"):
        generate_batch(target, None, [[3]], [Decoding()], 0)
    with pytest.raises(ValueError, match="prompt of 0 tokens"):
        generate_batch(target, None, [[3], []], [Decoding(), Decoding()], 2)
    sampled = Decoding(4, warpers=Warpers(1.0), proposal="sampled")
    for bad, message in (
        (dataclasses.replace(sampled, tree=Dynamic()), "dynamic tree"),
        (dataclasses.replace(sampled, rule="one-hot"), "deterministic drafts"),
        (dataclasses.replace(sampled, rule="best"), "rule is 'best'"),
        (dataclasses.replace(sampled, tree=StaticTree([0], [0]), record_alpha=True), "recorded on chains"),
    ):
        with pytest.raises(ValueError, match=message):
            generate_batch(target, None, [[3]], [bad], 1)


def test_no_prompts_give_no_answers() -> None:
    assert generate_batch(tiny_target(layers=4), None, [], [], 4) == []
