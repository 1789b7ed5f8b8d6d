"""Every lossless rule emits the target's law exactly; the well-known wrong rules are caught by the same test."""

from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from eval import verify
from eval.exactness import ARGMAX_Q, LOSSLESS, P, Q, check, floats, law, rejection, total_variation

TOP2_OF_Q = (1, 3)


def top2_one_hot(x: int, p: Tensor, q: Tensor, u: tuple[float, ...]) -> int:
    return verify.node_one_hot(list(TOP2_OF_Q), p, torch.tensor(u))


def top2_resampled_from_full_p(x: int, p: Tensor, q: Tensor, u: tuple[float, ...]) -> int:
    for i, child in enumerate(TOP2_OF_Q):
        if u[i] < p[child]:  # wrong: a refused child keeps its mass
            return child
    return int(verify.sample(p, torch.tensor(u[-1])))


def sampled_resampled_from_full_p(x: int, p: Tensor, q: Tensor, u: tuple[float, ...]) -> int:
    if u[0] < p[x] / q[x]:
        return x
    return int(verify.sample(p, torch.tensor(u[1])))  # wrong: the residual is forgotten


ONE = [Fraction(1), Fraction(0), Fraction(0), Fraction(0)]  # the node ignores the drafted token


@pytest.mark.parametrize("rule", sorted(LOSSLESS))
def test_lossless_rule_has_the_targets_law_exactly(rule: str) -> None:
    assert total_variation(law(*LOSSLESS[rule])) == 0


def test_top_two_children_one_hot_is_exact() -> None:
    # thresholds 3/10, then 1/7; all refused: 4/6 and 2/6
    assert total_variation(law(top2_one_hot, ONE, (10, 7, 3))) == 0


@pytest.mark.parametrize(
    ("node", "proposal", "cells", "known"),
    [
        (top2_resampled_from_full_p, ONE, (10, 10, 10), 0.222),
        (rejection, ARGMAX_Q, (5, 20), 0.300),  # argmax of q treated as a sample of q
        (sampled_resampled_from_full_p, Q, (30, 10), 0.160),
    ],
)
def test_wrong_rules_are_caught(
    node: object, proposal: Sequence[Fraction], cells: tuple[int, ...], known: float
) -> None:
    found = total_variation(law(node, proposal, cells))  # type: ignore[arg-type]
    assert float(found) == pytest.approx(known, abs=5e-4)


def test_the_enumeration_reports_what_it_ran() -> None:
    assert check(["greedy", "match", "rejection"]) == {"match": 0.0, "rejection": 0.0}


def test_expected_acceptance_is_one_minus_total_variation() -> None:
    p, q = floats(P), floats(Q)
    overlap, greedy = verify.alphas(torch.tensor([1]), torch.stack([p, p]), q[None])
    assert overlap[0] == pytest.approx(1 - float(total_variation(P, Q)))
    assert greedy[0] == pytest.approx(float(P[1]))


def bigrams(seed: int) -> tuple[Tensor, Tensor]:
    """A target's laws of the next of 4 tokens after each, and a draft's, which is half the target."""
    generator = torch.Generator().manual_seed(seed)
    target, other = (torch.rand(4, 4, generator=generator) for _ in range(2))
    target, other = target / target.sum(-1, keepdim=True), other / other.sum(-1, keepdim=True)
    return target, 0.48 * target + 0.52 * other


def speak(target: Tensor, draft: Tensor, n: int, generator: torch.Generator, biased: bool) -> Tensor:
    """n texts of 4 tokens after token 0, chains of 3 drafted and verified by rejection, batched."""
    texts, written = torch.zeros(n, 9, dtype=torch.long), torch.zeros(n, dtype=torch.long)
    rows = torch.arange(n)
    while (written < 4).any():
        chain = [texts[rows, written]]
        for _ in range(3):
            chain.append(verify.sample(draft[chain[-1]], torch.rand(n, generator=generator)))
        drafted, laws = torch.stack(chain[1:], 1), torch.stack([draft[c] for c in chain[:3]], 1)
        p = torch.stack([target[c] for c in chain], 1)
        accepted, own = verify.rejection(drafted, p, laws, torch.rand(n, 4, generator=generator))
        if biased:
            own = verify.sample(p[rows, accepted], torch.rand(n, generator=generator))
        run = torch.cat([drafted, own[:, None]], 1)
        run[rows, accepted] = own
        for i in range(4):
            live = (written < 4) & (i <= accepted)
            at = rows[live]
            texts[at, written[at] + 1] = run[at, i]
            written = written + live.long()
    return texts[:, 1:5]


def distance(texts: Tensor, target: Tensor) -> float:
    exact = torch.einsum("a,ab,bc,cd->abcd", target[0], target, target, target).flatten()
    codes = (texts * torch.tensor([64, 16, 4, 1])).sum(-1)
    return float((torch.bincount(codes, minlength=256) / len(texts) - exact).abs().sum() / 2)


def test_bigram_language_converges_to_the_joint_law_and_the_biased_sampler_stalls() -> None:
    target, draft = bigrams(seed=2)
    known = {1_000: 0.16, 10_000: 0.05, 100_000: 0.018, 400_000: 0.008}  # distance shrinks like 1 / sqrt(n)
    for n, wanted in known.items():
        found = distance(speak(target, draft, n, torch.Generator().manual_seed(n), biased=False), target)
        assert found == pytest.approx(wanted, rel=0.2), n
    for n in (100_000, 400_000):
        found = distance(speak(target, draft, n, torch.Generator().manual_seed(n), biased=True), target)
        assert found == pytest.approx(0.107, rel=0.05), "resampling from p after a rejection is biased"


def test_keyed_noise_draws_from_p_and_depends_on_seed_and_position_only() -> None:
    p = torch.tensor([0.5, 0.0, 0.3, 0.2])
    drawn = torch.tensor([verify.keyed_sample(p, 7, position) for position in range(20_000)])
    share = torch.bincount(drawn, minlength=4) / len(drawn)
    assert share[1] == 0 and torch.allclose(share, p, atol=0.012)
    assert verify.keyed_sample(p, 7, 11) == int(drawn[11])
    other = [verify.keyed_sample(p, 8, position) for position in range(100)]
    assert other != drawn[:100].tolist()
