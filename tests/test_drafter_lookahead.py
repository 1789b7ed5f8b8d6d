"""Lookahead moves its window as a slow Jacobi simulation does, keeps the right pool, and stays inside its bounds."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_target

from eval.drafter import Ask, Kept, PerSequence
from eval.drafters.jacobi import Pool, Trie, Window
from eval.drafters.lookahead import Lookahead, LookaheadSettings
from eval.generate import Decoding, generate
from eval.tree import check_parents, children
from eval.warpers import Warpers
from heads.target import Target, TargetOutput

PROMPT = [5, 9, 3, 22, 41, 17, 30]
NOTHING = TargetOutput(torch.empty(1, 0, 0), None)


def silent(**sizes: Any) -> Target:
    target = tiny_target(layers=3, **sizes)
    target.eos_ids = frozenset()
    return target


class Spy(Lookahead):
    """Keeps the state after every round: levels, pool, tokens of the round."""

    def __init__(self, *args: Any, **changed: Any) -> None:
        super().__init__(*args, **changed)
        self.seen: list[tuple[list[list[int]], dict[int, list[tuple[int, ...]]], list[int]]] = []
        self.first: tuple[list[list[int]], list[int]] = [], []

    def start(self, prompt: list[int], first: int, output: TargetOutput) -> None:
        super().start(prompt, first, output)
        self.first, self.seen = ([list(level) for level in self.window.levels], [*prompt, first]), []

    def commit(self, kept: Kept) -> None:
        super().commit(kept)
        self.seen.append(([list(x) for x in self.window.levels], dict(self.pool.held), kept.tokens))


def answers(target: Target, text: list[int], levels: list[list[int]], earlier: bool) -> list[int]:
    """What the target says after each column, every path computed alone as plain text."""
    found = []
    for i in range(len(levels[0])):
        start = levels[0][: i + 1] if earlier else levels[0][i : i + 1]
        path = [*start, *(level[i] for level in levels[1:])]
        found.append(int(target.logits(target.forward(torch.tensor([[*text, *path]])).last[0, -1]).argmax()))
    return found


def simulated(target: Target, spy: Spy, N: int, G: int, earlier: bool = True) -> bool:
    """Whether the drafter went through the states of a simulation that keeps every n-gram ever seen, oldest first."""
    levels, text = spy.first
    grams = [tuple(text[i : i + N]) for i in range(len(text) - N + 1)]
    for seen_levels, seen_pool, tokens in spy.seen:
        said = answers(target, text, levels, earlier)
        if len(levels) == N - 1:
            grams += [(*(level[i] for level in levels), said[i]) for i in range(len(said))]
        levels = [*levels[-(N - 2) :], said] if N > 2 else [said]
        for token in tokens:
            text = [*text, token]
            grams.append(tuple(text[-N:]))
        pool: dict[int, list[tuple[int, ...]]] = {}
        for gram in reversed(grams):
            held = pool.setdefault(gram[0], [])
            if gram[1:] not in held and len(held) < G:
                held.append(gram[1:])
        if levels != seen_levels or pool != seen_pool:
            return False
    return True


@pytest.mark.parametrize(("W", "N", "G"), [(4, 4, 3), (3, 2, 2), (1, 3, 1), (5, 3, 7)])
def test_window_and_pool_equal_a_slow_simulation(W: int, N: int, G: int) -> None:
    target = silent(seed=W)
    spy = Spy(64, 256, LookaheadSettings(W, N, G))
    generate(target, PerSequence(lambda: spy), PROMPT, Decoding(k=N - 1, max_new_tokens=16))
    assert len(spy.seen) > 3 and simulated(target, spy, N, G)
    if W > 1:
        assert not simulated(target, spy, N, G, earlier=False), "columns do see the earlier ones of level 0"


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_output_is_that_of_plain_decoding(kind: str) -> None:
    target = silent(kind=kind, **({"sliding_window": 6} if kind == "gemma2" else {}))
    for warpers, rule in ((Warpers(), "auto"), (Warpers(1.0), "match")):
        plain = generate(target, None, PROMPT, Decoding(max_new_tokens=24, warpers=warpers))
        drafter = PerSequence(lambda: Lookahead(64, 256, LookaheadSettings(3, 4, 3)))
        found = generate(target, drafter, PROMPT, Decoding(k=3, max_new_tokens=24, warpers=warpers, rule=rule))
        assert found.output_ids == plain.output_ids


def test_all_guesses_accepted_gives_a_token_more() -> None:
    """The pool knows the whole answer: every round accepts N - 1 guesses and draws the bonus token."""
    target, N = silent(), 5
    plain = generate(target, None, PROMPT, Decoding(max_new_tokens=22)).output_ids
    drafter = Lookahead(64, 256, LookaheadSettings(2, N, 30))
    text = [*PROMPT, *plain]

    class Knowing(PerSequence):
        def start(self, *args: Any) -> None:
            super().start(*args)
            for i in range(len(text) - N + 1):
                drafter.pool.add(text[i : i + N])

    found = generate(target, Knowing(lambda: drafter), PROMPT, Decoding(k=N - 1, max_new_tokens=21))
    assert found.output_ids == plain[:21]
    assert [a for _, a in found.steps] == [N - 1] * 4


def test_no_row_is_placed_beyond_the_context() -> None:
    target = silent(max_position_embeddings=24)
    plain = generate(target, None, PROMPT, Decoding(max_new_tokens=40)).output_ids
    placed = []
    forward = target.forward

    def watched(*args: Any, **kwargs: Any) -> TargetOutput:
        placed.append(int(kwargs["positions"].max()))
        return forward(*args, **kwargs)

    target.forward = watched  # type: ignore[method-assign]
    drafter = PerSequence(lambda: Lookahead(64, 24, LookaheadSettings(6, 4, 3)))
    found = generate(target, drafter, PROMPT, Decoding(k=3, max_new_tokens=40))
    assert found.output_ids == plain and max(placed) == 23


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=8))
def test_a_trie_has_distinct_siblings_and_holds_every_path(paths: list[list[int]]) -> None:
    trie = Trie()
    ends = [trie.add(path) for path in paths]
    check_parents(trie.parents)
    for path, row in zip(paths, ends, strict=True):
        spelled = []
        while row:
            spelled.append(trie.tokens[row - 1])
            row = trie.parents[row - 1]
        assert spelled[::-1] == path
    assert all(len({trie.tokens[c - 1] for c in row}) == len(row) for row in children(trie.parents))
    assert len(trie.tokens) == len({tuple(path[: n + 1]) for path in paths for n in range(len(path))})


def test_the_pool_keeps_the_latest_guesses_of_each_token() -> None:
    pool = Pool(2)
    for gram in ([7, 1, 2], [7, 3, 4], [8, 5, 5], [7, 1, 2], [7, 6, 6]):
        pool.add(gram)
    assert pool.after(7) == [(6, 6), (1, 2)] and pool.after(8) == [(5, 5)] and pool.after(9) == []


def test_a_column_that_was_not_asked_repeats_itself() -> None:
    window = Window([1, 2], 2)
    assert window.move([3, 4]) == [] and window.levels == [[1, 2], [3, 4]]
    assert window.move([5, None]) == [(1, 3, 5)] and window.levels == [[3, 4], [5, 4]]


def test_settings_without_meaning_are_refused() -> None:
    for name, value in (("window", 0), ("level", 1), ("guesses", 0)):
        with pytest.raises(ValueError, match=f"lookahead.{name}={value}"):
            Lookahead(64, 64, LookaheadSettings(**{name: value}))


def test_guesses_are_cut_to_the_budget() -> None:
    drafter = Lookahead(64, 256, LookaheadSettings(1, 5, 2))
    drafter.start([1, 2, 3, 4, 5, 6, 1], 2, NOTHING)
    drafter.pool.add([2, 50, 51, 52, 53])
    tokens = drafter.propose(Ask(2, False, Warpers(), torch.Generator())).tokens.tolist()
    assert 51 in tokens and 52 not in tokens
