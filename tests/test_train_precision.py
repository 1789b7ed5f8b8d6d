"""bf16 training keeps fp32 masters: every norm weight moves, and the loss follows fp32's."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from tiny import tiny_target
from toys import batch_of, conversations, eagle3, train

from train.mixture import LossSettings
from train.objective import Objective
from train.track import read_log

STEPS = 200


@pytest.fixture(autouse=True)
def one_accelerator_a_test() -> Iterator[None]:
    """Accelerate keeps the precision of the process's first Accelerator."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def curve(folder: Path, precision: str) -> tuple[list[float], torch.nn.Module]:
    """Losses of 200 steps from the paper's random start, whose norm weights are exactly 1."""
    AcceleratorState._reset_state(reset_partial_state=True)
    target = tiny_target(layers=4)
    torch.manual_seed(0)
    head = eagle3(target, init="random", ttt_steps=1)
    assert bool((head.norm.weight == 1).all())
    few = {"steps": STEPS, "eval_every": STEPS, "save_every": STEPS, "lr": 3e-3, "batch_size": 2}
    loop, _ = train(folder, target=target, head=head, rows=conversations(24, longest=7), precision=precision, **few)
    return [line["loss"] for line in read_log(folder / "log.jsonl") if line["split"] == "train"], loop.head


def test_bf16_follows_the_loss_of_fp32_and_moves_every_norm_weight(tmp_path: Path) -> None:
    (whole, _), (half, head) = (curve(tmp_path / precision, precision) for precision in ("no", "bf16"))
    gaps = [abs(a - b) / a for a, b in zip(whole, half, strict=True)]
    assert 0 < max(gaps) < 0.01, f"the largest of {STEPS} gaps is {max(gaps):.2%}"
    assert sum(whole[-20:]) < 0.7 * sum(whole[:20]), "a curve that falls"
    assert {p.dtype for p in head.parameters()} == {torch.float32}
    norms = [p for name, p in head.named_parameters() if "norm" in name]
    assert len(norms) == 4 and not any(bool((p == 1.0).any()) for p in norms)


def test_under_bf16_the_target_answers_as_it_does_alone() -> None:
    target = tiny_target(layers=4)
    head = eagle3(target)
    objective, batch = Objective(head, target, LossSettings()), batch_of(conversations(3))
    alone = objective.features(batch)
    assert alone.last is not None and alone.taps is not None
    with torch.autocast("cpu", torch.bfloat16):
        autocast = objective.features(batch)
        assert autocast.last is not None and autocast.taps is not None
        taught, drafted = objective.teacher_logits(autocast.last[0]), head.logits(autocast.last[0])
    assert torch.equal(alone.last, autocast.last) and torch.equal(alone.taps, autocast.taps)
    assert torch.equal(taught, objective.teacher_logits(alone.last[0]))
    assert not torch.equal(drafted, head.logits(alone.last[0])), "the head computes in bfloat16: this test can fail"


def test_case_bf16_weights_need_fp32_master(shared: Path) -> None:
    case = json.loads((shared / "cases" / "numeric" / "bf16-weights-need-fp32-master.json").read_text())
    head = eagle3(tiny_target(layers=4))
    lost = head.norm.weight.detach().to(torch.bfloat16)
    optimizer = torch.optim.SGD([head.norm.weight], lr=-case["update_per_step"])
    for _ in range(case["steps"]):
        head.norm.weight.grad = torch.ones_like(head.norm.weight)
        optimizer.step()
        lost += case["update_per_step"]
    assert head.norm.weight.dtype == torch.float32, "parameters are their own masters, autocast makes the copies"
    assert head.norm.weight[0].item() == pytest.approx(case["expect"]["master"], abs=1e-6)
    assert head.norm.weight[0].to(torch.bfloat16).item() == case["expect"]["bf16_copy"]
    assert lost[0].item() == case["wrong_without_master"]
