"""Expected tokens and speedups of constant and of varying acceptance."""

import pytest
import torch

from eval import theory, verify


@pytest.mark.parametrize(
    ("alpha", "cost", "k", "known"), [(0.8, 0.05, 4, 2.80), (0.8, 0.05, 8, 3.09), (0.5, 0.2, 8, 0.77)]
)
def test_the_table_holds_the_known_speedups(alpha: float, cost: float, k: int, known: float) -> None:
    row = next(r for r in theory.rows() if (r["alpha"], r["draft_cost"], r["k"]) == (alpha, cost, k))
    assert round(row["speedup"], 2) == known
    assert f"{known:.2f}" in theory.table(theory.rows())


def test_best_k_for_good_drafts_at_low_cost_is_the_longest() -> None:
    speeds = {r["k"]: r["speedup"] for r in theory.rows() if (r["alpha"], r["draft_cost"]) == (0.8, 0.05)}
    assert max(speeds, key=lambda k: speeds[k]) == 8


def test_constant_acceptance_is_the_special_case_of_varying_acceptance() -> None:
    assert theory.tau_from_conditionals([0.7] * 5) == pytest.approx(theory.expected_tokens(0.7, 5))
    assert theory.tau_from_conditionals([0.5, 0.0, 1.0]) == 1.5
    assert theory.expected_tokens(1.0, 4) == 5
    assert theory.tau_from_conditionals([]) == 1


def test_measured_costs_replace_the_flat_pass() -> None:
    assert theory.predicted_speedup([0.5, 0.25], 2, 0.1, [1.0, 1.1, 1.3]) == pytest.approx(1.75 / 1.5)


@pytest.mark.parametrize("k", range(1, 9))
def test_a_toy_run_agrees_with_the_formula_within_one_percent(k: int) -> None:
    """Rejection sampling with alpha = .8 (p and q one fifth apart), 40,000 rounds."""
    p, q, n = torch.tensor([0.6, 0.4]), torch.tensor([0.8, 0.2]), 40_000
    generator = torch.Generator().manual_seed(k)
    draft = verify.sample(q.expand(n, k, 2), torch.rand(n, k, generator=generator))
    u = torch.rand(n, k + 1, generator=generator)
    accepted = verify.rejection(draft, p.expand(n, k + 1, 2), q.expand(n, k, 2), u).accepted
    assert float(accepted.float().mean()) + 1 == pytest.approx(theory.expected_tokens(0.8, k), rel=0.01)
