"""Losses against closed forms, in fp32 whatever comes in; the learning-rate schedule; the optimizer's parameters."""

import json
import math
from pathlib import Path

import pytest
import torch
from tiny import tiny_target
from torch import Tensor, nn
from toys import eagle3, medusa

from train.losses import FEATURE_LOSSES, LOSSES, top_m
from train.mixture import LossSettings
from train.objective import Objective
from train.optim import OptimSettings, build_optimizer, learning_rate

Q, P = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]
# draft q, target p: sums written out
CLOSED = {
    "kl": 0.25 * math.log(0.25 / 0.5) + 0.5 * math.log(0.5 / 0.25),
    "reverse_kl": 0.5 * math.log(0.5 / 0.25) + 0.25 * math.log(0.25 / 0.5),
    "cross_entropy": -math.log(0.25),
    "total_variation": 1 - (0.25 + 0.25 + 0.25),
    "neg_log_alpha": -math.log(0.75),
    "js": 0.5 * (0.25 * math.log(0.25 / 0.375) + 0.5 * math.log(0.5 / 0.375)) * 2,
    "top_m": -(0.5 * math.log(0.25) + 0.25 * math.log(0.5) + 0.25 * math.log(0.25)),
}
KEEP_THE_ENTROPY = {"cross_entropy", "top_m"}


def logs(probabilities: list[float], shift: float = 0.0) -> Tensor:
    return torch.tensor([probabilities]).log() + shift


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_losses_equal_their_closed_form(name: str) -> None:
    found = LOSSES[name](logs(Q, 3.0), logs(P, -2.0))
    assert found.shape == (1,)
    assert float(found) == pytest.approx(CLOSED[name], abs=1e-6)


@pytest.mark.parametrize("name", sorted(set(LOSSES) - KEEP_THE_ENTROPY))
def test_losses_are_zero_when_the_draft_is_the_target_and_positive_else(name: str) -> None:
    draft, target = torch.randn(20, 7), torch.randn(20, 7)
    assert torch.allclose(LOSSES[name](target, target), torch.zeros(20), atol=1e-6)
    assert bool((LOSSES[name](draft, target) > 0).all())


def test_gradient_of_kl_is_q_minus_p() -> None:
    draft, target = torch.randn(5, 7, requires_grad=True), torch.randn(5, 7)
    LOSSES["kl"](draft, target).sum().backward()
    assert draft.grad is not None
    assert torch.allclose(draft.grad, draft.detach().softmax(-1) - target.softmax(-1), atol=1e-6)


def test_top_m_reads_the_most_likely_tokens_of_the_target_and_no_others() -> None:
    """Over all of D it is the soft cross-entropy; over one token, p_max times the hard one."""
    draft, target = torch.randn(6, 12), torch.randn(6, 12)
    p, log_q = target.softmax(-1), draft.log_softmax(-1)
    assert torch.allclose(LOSSES["top_m"](draft, target), top_m(draft, target, 10))
    assert torch.allclose(top_m(draft, target, 99), -(p * log_q).sum(-1), atol=1e-6)
    hard = LOSSES["cross_entropy"](draft, target)
    assert torch.allclose(top_m(draft, target, 1), p.amax(-1) * hard, atol=1e-6)
    assert float((top_m(draft, target, 3) - top_m(draft, target, 99)).abs().max()) > 0.1


def test_smooth_l1_is_half_a_square_below_one_and_linear_above_meaned_over_h() -> None:
    found = FEATURE_LOSSES["smooth_l1"](torch.tensor([[0.5, -3.0, 0.0, 1.0]]), torch.zeros(1, 4))
    assert float(found) == pytest.approx((0.5 * 0.5**2 + (3.0 - 0.5) + 0.0 + 0.5) / 4)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_losses_are_computed_in_fp32_and_finite_at_extremes(name: str) -> None:
    draft = torch.tensor([[60.0, -60.0, 0.0]], dtype=torch.bfloat16, requires_grad=True)
    target = torch.tensor([[-60.0, 60.0, 0.0]], dtype=torch.bfloat16)
    loss = LOSSES[name](draft, target)
    loss.sum().backward()
    assert loss.dtype == torch.float32 and bool(torch.isfinite(loss).all())
    assert draft.grad is not None and bool(torch.isfinite(draft.grad).all())


def test_the_teacher_of_a_reduced_vocabulary_is_the_restricted_renormalised_target() -> None:
    """softmax over D of the logits at D = p over V, restricted to D, divided by its mass."""
    target, draft = tiny_target("gemma2", layers=4), [0, 3, 9, 40]
    head = eagle3(target, draft=draft)
    last = torch.randn(6, 32)
    taught = Objective(head, target, LossSettings()).teacher_logits(last).softmax(-1)
    full = target.logits(last).softmax(-1)[:, draft]
    assert torch.allclose(taught, full / full.sum(-1, keepdim=True), atol=1e-6)


def test_warm_up_is_linear_and_cosine_ends_at_its_floor() -> None:
    settings = OptimSettings(lr=2e-3, warmup_share=0.1, final_share=0.25)
    rates = [learning_rate(step, 100, settings) for step in range(100)]
    assert rates[:10] == pytest.approx([2e-4 * (n + 1) for n in range(10)])
    assert max(rates) == pytest.approx(2e-3) and rates.index(max(rates)) == 9
    assert all(a >= b for a, b in zip(rates[9:], rates[10:], strict=False))
    assert rates[54] == pytest.approx(2e-3 * (0.25 + 0.75 * 0.5)), "half way down after half of the decay"
    assert rates[-1] == pytest.approx(5e-4)
    assert learning_rate(0, 1, settings) > 0


def test_case_scheduler_steps(shared: Path) -> None:
    """One schedule step per optimizer step: it is a function of the step, so ranks and accumulation cannot move it.

    The case decays linearly, this project by cosine: peak and end are the same.
    """
    case = json.loads((shared / "cases" / "numeric" / "scheduler-steps.json").read_text())
    steps = case["optimizer_steps"]
    settings = OptimSettings(lr=case["peak_lr"], warmup_share=case["warmup_steps"] / steps)
    assert learning_rate(9, steps, settings) == pytest.approx(case["expect"]["lr_after_step_10"])
    assert learning_rate(99, steps, settings) == pytest.approx(case["expect"]["lr_after_step_100"], abs=1e-9)
    assert learning_rate(24, steps, settings) > 0.9 * case["peak_lr"]


@pytest.mark.parametrize("make", [eagle3, medusa])
def test_the_optimizer_holds_the_head_parameters_and_nothing_else(make: type) -> None:
    target = tiny_target(layers=4)
    objective = Objective(make(target), target, LossSettings())
    optimizer = build_optimizer(objective.parameters(), OptimSettings())
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in objective.head.parameters() if p.requires_grad}
    assert not held & {id(p) for p in target.model.parameters()}
    assert set(objective.state_dict()) == {f"head.{name}" for name in objective.head.state_dict()}


def test_norms_and_biases_are_not_decayed_and_frozen_parameters_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    model[2].weight.requires_grad_(False)
    groups = build_optimizer(model.parameters(), OptimSettings(weight_decay=0.1)).param_groups
    decayed = {group["weight_decay"]: [tuple(p.shape) for p in group["params"]] for group in groups}
    assert decayed == {0.1: [(3, 3)], 0.0: [(3,), (3,), (3,), (2,)]}


def test_masters_are_fp32_so_that_small_updates_are_not_lost() -> None:
    target = tiny_target(layers=4)
    head = eagle3(target)
    assert {p.dtype for p in head.parameters()} == {torch.float32}
    small = OptimSettings(lr=1e-4, weight_decay=0.0)
    optimizer = build_optimizer([head.norm.weight], small)
    for _ in range(200):
        head.norm.weight.grad = torch.ones_like(head.norm.weight)
        optimizer.step()
    assert torch.allclose(head.norm.weight, torch.full((32,), 0.98), atol=1e-4)
    lost = torch.ones(32, dtype=torch.bfloat16)
    for _ in range(200):
        lost -= 1e-4
    assert bool((lost == 1.0).all()), "the fault this guards against"
