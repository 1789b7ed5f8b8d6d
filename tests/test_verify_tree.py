"""Tree rules emit the target's law exactly; the wrong rules of verification.md are caught; walks are the right ones."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from eval import verify, verify_tree
from eval.exactness import (
    TOP2_Q,
    P,
    Q,
    floats,
    law,
    pair,
    pairs,
    sibling_laws,
    siblings,
    total_variation,
    without_replacement,
)
from eval.tree import children


def resorted(x: int, p: Tensor, q: Tensor, u: tuple[float, ...]) -> int:
    ordered = sorted(pair(x), key=lambda token: -float(q[token]))  # wrong: judged in another order than drawn
    return siblings(ordered, p, sibling_laws(ordered, q), u)


def not_renormalised(x: int, p: Tensor, q: Tensor, u: tuple[float, ...]) -> int:
    laws = torch.stack([q, q])
    laws[1, pair(x)[0]] = 0  # wrong: the rest of q sums to less than 1
    return siblings(pair(x), p, laws, u)


def resampled_from_full_p(x: int, p: Tensor, q: Tensor, u: tuple[float, ...]) -> int:
    for i, child in enumerate(pair(x)):
        if u[i] < p[child]:  # wrong: a refused child keeps its mass
            return child
    return int(verify.sample(p, torch.tensor(u[-1])))


@pytest.mark.parametrize(
    ("node", "proposal", "cells", "known"),
    [
        (resampled_from_full_p, TOP2_Q, (10, 10, 10), 0.222),
        (without_replacement, TOP2_Q, (15, 1, 60), 0.300),  # top-2 of q treated as samples of q
        (resorted, pairs(replacement=False), (15, 1, 60), 0.195),
        (not_renormalised, pairs(replacement=False), (15, 1, 16), 0.018),
    ],
)
def test_wrong_tree_rules_are_caught(
    node: object, proposal: Sequence[Fraction], cells: tuple[int, ...], known: float
) -> None:
    found = total_variation(law(node, proposal, cells))  # type: ignore[arg-type]
    assert float(found) == pytest.approx(known, abs=5e-4)


@pytest.mark.parametrize("replacement", [True, False])
def test_children_are_drawn_from_the_laws_that_are_returned(replacement: bool) -> None:
    found = [Fraction(0)] * 16
    for i, j in itertools.product(range(10), range(10 if replacement else 315)):
        u = torch.tensor([(i + 0.5) / 10, (j + 0.5) / (10 if replacement else 315)])
        tokens, laws = verify_tree.draw_children(floats(Q), u, replacement)
        assert torch.allclose(laws, torch.stack([floats(Q)] * 2) if replacement else sibling_laws(tokens, floats(Q)))
        found[4 * tokens[0] + tokens[1]] += Fraction(1, 100 if replacement else 3150)
    assert found == pairs(replacement)


def test_drawing_without_replacement_ends_with_the_vocabulary() -> None:
    tokens, laws = verify_tree.draw_children(torch.tensor([0.5, 0.0, 0.5]), torch.full((4,), 0.9), False)
    assert tokens == [2, 0] and laws.tolist() == [[0.5, 0.0, 0.5], [1.0, 0.0, 0.0]]


def quarters(*values: int) -> Tensor:
    return torch.tensor(values) / 4


PREFIX_P = {(): quarters(1, 2, 1), (0,): quarters(0, 1, 3), (1,): quarters(2, 1, 1), (2,): quarters(1, 1, 2)}
PREFIX_Q = {(): quarters(2, 1, 1), (0,): quarters(2, 2, 0), (1,): quarters(1, 1, 2), (2,): quarters(2, 1, 1)}


def test_a_sampled_tree_of_two_levels_has_the_targets_law_at_every_depth() -> None:
    """Two children at the root, one below each; every draw and every branch, in exact arithmetic.

    The first token must have law p, and the second, where the round got that far, p given the first.
    """
    parents = [0, 0, 1, 2]
    emitted: dict[tuple[int, ...], float] = defaultdict(float)
    cells = (2, 1, 2, 2, 4)  # ratios 0, 1/2 or at least 1; what is left of p in quarters
    grid = [[(i + 0.5) / n for i in range(n)] for n in cells]
    uniforms = [torch.tensor(u) for u in itertools.product(*grid)]
    for tokens in itertools.product(range(3), repeat=4):
        laws = torch.stack([PREFIX_Q[()], PREFIX_Q[()], PREFIX_Q[tokens[:1]], PREFIX_Q[tokens[1:2]]])
        chance = float(laws[range(4), list(tokens)].prod())
        if chance:
            rows = torch.stack([PREFIX_P[()], PREFIX_P[tokens[:1]], PREFIX_P[tokens[1:2]], *[quarters(1, 1, 2)] * 2])
            share = chance / len(uniforms)
            for u in uniforms:
                path, own = verify_tree.rejection(tokens, parents, rows, laws, u)
                emitted[(*(tokens[row - 1] for row in path), own)[:2]] += share
    assert sum(emitted.values()) == pytest.approx(1)
    for first in range(3):
        reached = sum(chance for text, chance in emitted.items() if text[0] == first)
        assert reached == pytest.approx(float(PREFIX_P[()][first]), abs=1e-6), first
        second = [emitted[first, token] for token in range(3)]
        if sum(second):
            shares = [chance / sum(second) for chance in second]
            assert shares == pytest.approx(PREFIX_P[(first,)].tolist(), abs=1e-6), first


def random_round(seed: int, nodes: int, vocab_size: int = 6) -> tuple[list[int], list[int], Tensor]:
    """Distinct siblings, random parents and distributions."""
    generator = torch.Generator().manual_seed(seed)
    parents = [int(torch.randint(i + 1, (), generator=generator)) for i in range(nodes)]
    draft = [0] * nodes
    for below in children(parents):
        order = torch.randperm(vocab_size, generator=generator).tolist()
        for child, token in zip(below, order * 2, strict=False):
            draft[child - 1] = token
    return draft, parents, torch.rand(nodes + 1, vocab_size, generator=generator).softmax(-1)


@pytest.mark.parametrize("seed", range(20))
def test_a_chain_is_a_tree_of_width_one(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    K, V = 4, 5
    p, q = torch.rand(K + 1, V, generator=generator).pow(4), torch.rand(K, V, generator=generator).pow(4)
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    draft = verify.sample(q, torch.rand(K, generator=generator))
    u, chain = torch.rand(K + 1, generator=generator), list(range(K))
    for ours, theirs in (
        (
            verify_tree.rejection(draft.tolist(), chain, p, q, u),
            verify.rejection(draft[None], p[None], q[None], u[None]),
        ),
        (
            verify_tree.one_hot_children(draft.tolist(), chain, p, u),
            verify.chain_one_hot(draft[None], p[None], u[None]),
        ),
        (
            verify_tree.sample_and_match(draft.tolist(), chain, p, seed, 9),
            verify.sample_and_match(draft[None], p[None], seed, 9),
        ),
    ):
        assert ours == (list(range(1, int(theirs.accepted) + 1)), int(theirs.own))


@pytest.mark.parametrize("seed", range(20))
def test_matching_emits_the_targets_own_tokens_whatever_the_tree(seed: int) -> None:
    draft, parents, p = random_round(seed, nodes=8)
    path, own = verify_tree.match(draft, parents, lambda row, depth: int(p[row].argmax()))
    row = 0
    for token, entered in zip([*(draft[i - 1] for i in path), own], [*path, None], strict=True):
        assert token == int(p[row].argmax())
        wanted = [child for child in children(parents)[row] if draft[child - 1] == token]
        assert wanted == ([] if entered is None else [entered])
        row = entered or 0


def test_typical_acceptance_takes_the_deepest_typical_path_and_is_not_lossless() -> None:
    p = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.8, 0.05, 0.05], [0.9, 0.05, 0.03, 0.02], [0.25] * 4, [0.25] * 4])
    draft, parents = [0, 1, 3, 0], [0, 0, 1, 2]  # rows 1 (0), 2 (1), 3 = 0 3 (p .05 < .09), 4 = 1 0 (p .9)
    assert verify_tree.typical_lossy(draft, parents, p, 0.9) == ([2, 4], 3)
    assert verify_tree.typical_lossy([3], [0], p[:2], 0.0).path == []  # .05 is below the threshold
    greedy = torch.eye(4)[[2, 1, 1]]
    assert verify_tree.typical_lossy([2, 3], [0, 1], greedy, 0.5) == ([1], 1)
    top = [Fraction(int(x == 1)) for x in range(4)]

    def node(x: int, p: Tensor, q: Tensor, u: tuple[float, ...]) -> int:
        path, own = verify_tree.typical_lossy([x], [0], torch.stack([p, p]), u[0])
        return x if path else own

    assert float(total_variation(law(node, top, (10,)))) == pytest.approx(float(1 - P[1])), "always the draft"
