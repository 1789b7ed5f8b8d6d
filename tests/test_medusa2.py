"""Medusa-2: heads and adapters learn in the one loop, the base weights never; off is the base, merged is on."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train_resume import checkpoint_of, log_of, stop_after
from tiny import tiny_target
from torch import Tensor
from toys import batch_of, conversations, eagle3, largest_gap, loop_of, medusa, settings, tokens, weights

from data.rows import DataRow
from eval.drift import measure_drift
from eval.live import measure_acceptance
from heads.lora import Lora
from heads.target import Target
from train.batches import Batch
from train.joint import Joint, JointSettings
from train.loop import Loop, Stopped
from train.losses import LOSSES
from train.mixture import LossSettings
from train.track import read_log
from train.unroll import step_mask

MODES = ("joint", "self_distillation")
every_mode = pytest.mark.parametrize("mode", MODES)


def spread_adapters(lora: Lora, std: float = 0.05) -> None:
    """B away from its start, where an adapter does nothing and A takes no gradient."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in lora.tensors().items():
            if name.endswith(".b"):
                value.copy_(torch.randn(value.shape, generator=generator) * std)


def joint_of(mode: str, progress: float = 1.0, lambda0: float = 0.5, **loss: Any) -> Joint:
    torch.manual_seed(0)
    target = tiny_target(layers=3)
    joint = JointSettings(mode=mode, lora_r=4, lora_alpha=8.0, lambda0=lambda0)
    objective = Joint(medusa(target, std=0.2, num_heads=3), target, LossSettings(**loss), joint)
    spread_adapters(objective.lora)
    objective.progress = progress
    return objective


def gradients(objective: Joint, *batches: Batch) -> tuple[float, dict[str, Tensor]]:
    objective.zero_grad()
    counts, total = torch.stack([objective.counts(batch) for batch in batches]).sum(0), 0.0
    for batch in batches:
        loss, _ = objective(batch, counts)
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in objective.named_parameters() if p.grad is not None}


def rows_of(count: int) -> list[DataRow]:
    made = conversations(count, seed=9)
    return [DataRow(n, r["id"], "", "", r["ids"], [(a, b) for a, b in r["spans"]]) for n, r in enumerate(made)]


@every_mode
def test_gradient_reaches_every_adapter_and_head_and_no_base_weight(mode: str) -> None:
    objective = joint_of(mode)
    target = objective.target
    _, found = gradients(objective, batch_of(conversations(4)))
    names = {name for name, _ in objective.named_parameters()}
    assert found.keys() == names and all(bool(value.any()) for value in found.values())
    linears = 3 * 7  # q, k, v, o, gate, up, down of three layers
    assert sum(name.startswith("lora.") for name in names) == 2 * linears == len(objective.lora.tensors())
    base = {name: p for name, p in target.model.named_parameters() if not name.endswith((".a", ".b"))}
    assert len(base) > linears
    assert all(p.grad is None and not p.requires_grad for p in base.values())


def test_heads_pull_the_backbone_only_as_far_as_lambda_says() -> None:
    """The negative control of the ramp: at 0 the adapters' gradient is the target's own loss alone."""
    batch = batch_of(conversations(4))
    alone, both = (gradients(joint_of("joint", progress), batch)[1] for progress in (0.0, 1.0))
    assert not any(bool(value.any()) for name, value in alone.items() if name.startswith("head."))
    assert any(not torch.allclose(alone[name], both[name], atol=1e-6) for name in alone if name.startswith("lora."))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "phi3", "gpt_neox", "mixtral"])
def test_off_is_the_base_exactly_and_merged_is_on(kind: str) -> None:
    target, ids = tiny_target(kind, layers=3), tokens(2, 11)
    base = target.forward(ids, taps=(1,))
    lora = Lora(target, 4, 8.0)
    assert torch.equal(target.forward(ids).last, base.last), "an untrained adapter changes nothing"
    spread_adapters(lora)
    on = target.forward(ids).last
    assert float((on - base.last).abs().max()) > 1e-2
    with lora.off():
        off = target.forward(ids, taps=(1,))
    assert base.taps is not None and off.taps is not None
    assert torch.equal(off.last, base.last) and torch.equal(off.taps, base.taps)
    lora.merge()
    assert torch.allclose(target.forward(ids).last, on, atol=1e-5)
    assert not any(name.endswith((".a", ".b")) for name, _ in target.model.named_parameters())


@every_mode
def test_the_loss_is_the_targets_own_and_the_weighted_heads(mode: str) -> None:
    """Against a loop over positions: mean over t of the target's loss at x_{t+1}, heads at lambda0 sin(pi/2 s)."""
    objective = joint_of(mode, progress=1 / 3, terms={"cross_entropy": 1.0})
    head, target, batch = objective.head, objective.target, batch_of(conversations(3))
    loss, metrics = objective(batch, objective.counts(batch))
    on = target.forward(batch.ids).last
    with objective.lora.off():
        off = target.forward(batch.ids).last
    own: list[float] = []
    heads: list[list[float]] = [[], [], []]
    for row in range(3):
        T = int((batch.documents[row] >= 0).sum())
        for t in range(T - 1):
            if not bool(batch.asst[row, t + 1]):
                continue
            p, q = target.logits(off[row, t]).softmax(-1), target.logits(on[row, t]).softmax(-1)
            divergence = float((p * (p / q).log()).sum())
            own.append(-float(q[batch.ids[row, t + 1]].log()) if mode == "joint" else divergence)
            for i in range(3):
                if t + 2 + i < T and bool(batch.asst[row, t + 1 : t + 3 + i].all()):
                    draft = head.draft_logits(on[row, t, None], 3)[:, i]
                    teacher = target.logits(on[row, t + 1 + i, None])
                    heads[i].append(LOSSES["cross_entropy"](draft, teacher).item())
    expected = sum(own) / len(own)
    expected += 0.5 * math.sin(math.pi / 6) * sum(0.8**i * sum(found) / len(found) for i, found in enumerate(heads))
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    counts = objective.counts(batch)
    assert counts.tolist() == [*map(len, heads), len(own)]
    weighted = (metrics["loss"] / counts * torch.tensor(objective.weights())).sum()
    assert float(weighted) == pytest.approx(expected, rel=1e-4)


@every_mode
def test_split_padding_and_chunks_leave_the_gradient_as_it_is(mode: str) -> None:
    rows = conversations(5)
    whole = gradients(joint_of(mode, chunk=0), batch_of(rows))
    parts = gradients(joint_of(mode, chunk=0), batch_of(rows[:1]), batch_of(rows[1:]))
    chunked = gradients(joint_of(mode, chunk=3), batch_of(rows))
    for other in (parts, chunked):
        assert other[0] == pytest.approx(whole[0], rel=1e-5)
        assert all(torch.allclose(other[1][name], value, atol=2e-6, rtol=1e-4) for name, value in whole[1].items())


def joint_loop(folder: Path, mode: str = "joint", measure: Any = None, **changed: Any) -> Loop:
    target = tiny_target(layers=3)
    torch.manual_seed(5)
    head = medusa(target, std=0.1, num_heads=3)
    chosen = {"joint": JointSettings(mode=mode, lora_r=4), "steps": 6, "eval_every": 3, "save_every": 6, **changed}
    return loop_of(folder, target, head, measure=measure, **chosen)


def test_heads_learn_at_four_times_the_adapters_rate_and_the_ramp_is_a_sine(tmp_path: Path) -> None:
    loop = joint_loop(tmp_path, lr=1e-2)
    seen: list[tuple[float, set[float]]] = []
    inner = loop._apply

    def applying(*args: Any) -> None:
        rates = [{id(p): group["lr"] for p in group["params"]} for group in loop.optimizer.param_groups]
        of = {key: rate for group in rates for key, rate in group.items()}
        assert loop.lora is not None
        heads, adapters = ({of[id(p)] for p in part.parameters()} for part in (loop.head, loop.lora))
        assert len(heads) == len(adapters) == 1 and heads == {4 * rate for rate in adapters}
        seen.append((loop.objective.weights()[0], adapters))
        inner(*args)

    loop._apply = applying  # type: ignore[method-assign,assignment]
    loop.run()
    assert [ramp for ramp, _ in seen] == pytest.approx([0.2 * math.sin(math.pi / 2 * s / 6) for s in range(1, 7)])
    logged = [line["lr"] for line in read_log(tmp_path / "log.jsonl") if line["split"] == "train"]
    assert [rates for _, rates in seen] == [{rate} for rate in logged]


def test_the_weight_of_the_heads_is_the_published_one_unless_told() -> None:
    target = tiny_target(layers=2)
    for mode, wanted in zip(MODES, (0.2, 0.01), strict=True):
        assert Joint(medusa(target), target, LossSettings(), JointSettings(mode=mode, lora_r=1)).lambda0 == wanted


@every_mode
def test_stop_and_resume_equals_an_uninterrupted_run_bit_for_bit(tmp_path: Path, mode: str) -> None:
    """Live runs included: decoding between steps leaves training as it was."""
    live = {"live_prompts": 2, "live_tokens": 6, "measure": measure_acceptance}
    whole = joint_loop(tmp_path / "whole", mode, **live)
    base = {name: value.clone() for name, value in whole.target.model.state_dict().items()}
    whole.run()
    first = joint_loop(tmp_path / "parts", mode, **live)
    stop_after(first, 4)
    with pytest.raises(Stopped, match="stopped at step 4"):
        first.run()
    second = joint_loop(tmp_path / "parts", mode, **live)
    assert whole.lora is not None and second.lora is not None
    spread_adapters(second.lora)  # another start
    second.run()
    assert largest_gap(weights(whole.head), weights(second.head)) == 0.0
    assert largest_gap(weights(whole.lora), weights(second.lora)) == 0.0
    for one, two in zip(checkpoint_of(tmp_path / "whole")[1:], checkpoint_of(tmp_path / "parts")[1:], strict=True):
        assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert log_of(tmp_path / "whole") == log_of(tmp_path / "parts")
    after = whole.target.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in base.items() if not name.endswith((".a", ".b")))
    assert any(bool(value.any()) for name, value in whole.lora.tensors().items() if name.endswith(".b"))


def test_joint_training_teaches_the_target_its_data_and_distillation_does_not(tmp_path: Path) -> None:
    """The last column of a step is the target's own: accuracy on the data rises when trained on, else it stays put."""
    gains = []
    for mode in MODES:
        few = {"rows": conversations(4), "steps": 12, "eval_every": 12, "save_every": 12}
        joint_loop(tmp_path / mode, mode, **few).run()
        lines = [line for line in read_log(tmp_path / mode / "log.jsonl") if line["split"] == "train"]
        assert all(len(line["accuracy"]) == len(line["step_loss"]) == 4 for line in lines)
        gains.append(lines[-1]["accuracy"][-1] - lines[0]["accuracy"][-1])
    assert gains[0] > 0.1 > abs(gains[1])


def test_drift_is_zero_for_an_untrained_adapter_and_above_after_training(tmp_path: Path) -> None:
    loop = joint_loop(tmp_path)
    assert loop.lora is not None
    before = measure_drift(loop.target, loop.lora, rows_of(4))
    loop.run()
    after = measure_drift(loop.target, loop.lora, rows_of(4))
    assert (before["kl_base_tuned"], before["greedy_agreement"]) == (0.0, 1.0)
    assert after["kl_base_tuned"] > 1e-4 and after["greedy_agreement"] <= 1.0
    assert before["tokens"] == sum(b - a for row in rows_of(4) for a, b in row.spans) and before["conversations"] == 4


def test_drift_is_the_mean_divergence_over_answer_tokens() -> None:
    target, rows = tiny_target(layers=3), rows_of(3)
    lora = Lora(target, 4, 8.0)
    spread_adapters(lora, 0.3)
    kl, same = [], []
    for row in rows:
        ids = torch.tensor([row.ids])
        q = target.logits(target.forward(ids).last)[0].softmax(-1)
        with lora.off():
            p = target.logits(target.forward(ids).last)[0].softmax(-1)
        for t in range(len(row.ids) - 1):
            if any(a <= t + 1 < b for a, b in row.spans):
                kl.append(float((p[t] * (p[t] / q[t]).log()).sum()))
                same.append(float(p[t].argmax() == q[t].argmax()))
    found = measure_drift(target, lora, rows)
    assert found["kl_base_tuned"] == pytest.approx(sum(kl) / len(kl), rel=1e-4)
    assert found["greedy_agreement"] == pytest.approx(sum(same) / len(same)) and found["greedy_agreement"] < 1


def test_the_targets_own_slots_are_one_before_the_heads() -> None:
    """prompt 0..2, answer 3..5: positions 2..4 predict x_3..x_5."""
    asst = torch.tensor([[False] * 3 + [True] * 3 + [False]])
    assert step_mask(asst, torch.zeros(1, 7), -1)[0].nonzero().flatten().tolist() == [2, 3, 4]


def packed_target() -> Target:
    target = tiny_target(layers=2)
    target.pack()
    return target


def test_what_cannot_be_tuned_is_refused_by_name(tmp_path: Path) -> None:
    refused: Sequence[tuple[Any, str]] = [
        (lambda: settings(joint=JointSettings(mode="joint"), features="captured"), "features=online"),
        (lambda: JointSettings(mode="both"), "train.joint.mode='both' must be null or one of joint"),
        (lambda: JointSettings(lora_r=0), "train.joint.lora_r=0"),
        (lambda: JointSettings(lambda0=-1.0), "train.joint.lambda0=-1"),
        (lambda: Lora(packed_target(), 4, 8.0), "target.packed=false"),
        (lambda: Lora(tiny_target("gpt2", layers=2), 4, 8.0), "shows no nn.Linear"),
        (lambda: joint_with_eagle3(tmp_path), "not a head of kind 'eagle3': use head=medusa"),
    ]
    for make, message in refused:
        with pytest.raises(ValueError, match=message):
            make()


def joint_with_eagle3(folder: Path) -> None:
    target = tiny_target(layers=4)
    loop_of(folder, target, eagle3(target), joint=JointSettings(mode="joint"))
