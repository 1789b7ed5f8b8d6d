"""What holds of a head of every kind: how it is trained, what of it is saved, what it refuses."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_target
from tiny_heads import STEPS, TINY_HEADS, VARIANTS, drafted_logits, tiny_head
from torch import Tensor
from toys import batch_of, conversations, largest_gap, tokens, weights

from heads.hub import build_head, load_head, save_head
from heads.target import Target
from train.losses import kl
from train.mixture import LossSettings
from train.objective import Objective, slot_counts
from train.optim import OptimSettings, build_optimizer

DRAFT = [2, 3, 5, 8, 13, 21, 34, 55]
EVERY: list[tuple[str, dict[str, Any]]] = [*((kind, {}) for kind in TINY_HEADS), *VARIANTS]


def objective_of(kind: str, settings: dict[str, Any], **options: Any) -> Objective:
    target = tiny_target(layers=5)
    return Objective(tiny_head(kind, target, **options, **settings), target, LossSettings())


def counts_of(objective: Objective, batch: Any) -> Tensor:
    return slot_counts(batch.asst, batch.documents, objective.head.train_steps)


@pytest.mark.parametrize("draft", [None, DRAFT])
@pytest.mark.parametrize("kind", TINY_HEADS)
def test_the_loss_is_that_of_drafting_from_the_slots_of_the_table(kind: str, draft: list[int] | None) -> None:
    """Step i of slot t, drafted with a cache, against the target at t+1+i, where x_{t+1}..x_{t+2+i} are answer."""
    objective = objective_of(kind, {}, wide=True, draft=draft)
    batch = batch_of(conversations(2, longest=8))
    counts = counts_of(objective, batch)
    assert int(counts[1]) > 3
    expected = 0.0
    for row in range(2):
        T = int((batch.documents[row] >= 0).sum())
        ids, asst = batch.ids[row : row + 1, :T], batch.asst[row]
        last = objective.target.forward(ids).last[0]
        for t in range(T - 2):
            steps = [i for i in range(STEPS) if t + 2 + i < T and bool(asst[t + 1 : t + 3 + i].all())]
            if steps:
                logits = drafted_logits(objective.target, objective.head, ids, t)
            for i in steps:
                teacher = objective.target.logits(last[t + 1 + i, None])
                teacher = teacher if draft is None else teacher[:, draft]
                expected += 0.8**i * float(kl(logits[i], teacher)) / int(counts[i])
    assert objective(batch, counts)[0].item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("kind", "settings"), EVERY, ids=str)
def test_gradient_reaches_every_trainable_parameter_and_none_of_the_target(kind: str, settings: dict[str, Any]) -> None:
    objective = objective_of(kind, settings, wide=True)
    batch = batch_of(conversations(4))
    objective.head.train()
    objective(batch, counts_of(objective, batch))[0].backward()
    trainable = {name: p for name, p in objective.head.named_parameters() if p.requires_grad}
    assert [name for name, p in trainable.items() if p.grad is None or not bool(p.grad.any())] == []
    frozen = {name for name, p in objective.head.named_parameters() if not p.requires_grad}
    assert frozen == ({"lm_head.weight"} if settings.get("train_lm_head") is False else set())
    stepped = {id(p) for group in build_optimizer(objective.head.parameters(), OptimSettings()).param_groups
               for p in group["params"]}  # fmt: skip
    assert stepped == {id(p) for p in trainable.values()}
    assert all(p.grad is None and not p.requires_grad for p in objective.target.model.parameters())
    assert not objective.target.model.training


@pytest.mark.parametrize("kind", TINY_HEADS)
def test_a_head_overfits_one_batch(kind: str) -> None:
    objective, batch = objective_of(kind, {}), batch_of(conversations(2))
    objective.head.init_from(objective.target, batch.ids[:1])
    output = objective.target.forward(batch.ids, taps=objective.head.taps)
    batch.last, batch.taps = output.last, output.taps
    optimizer = build_optimizer(objective.parameters(), OptimSettings())
    counts, found = counts_of(objective, batch), []
    for step in range(40):
        for group in optimizer.param_groups:
            group["lr"] = 2e-2 * (1 - step / 40)
        optimizer.zero_grad()
        loss, _ = objective(batch, counts)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(objective.head.parameters(), 1.0)
        optimizer.step()
        found.append(loss.item())
    assert found[-1] < 0.2 * found[0], (found[0], found[-1])


@pytest.mark.parametrize(("kind", "settings"), EVERY, ids=str)
def test_save_and_load_give_the_same_head(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    target, ids = tiny_target(layers=5), tokens(1, 7)
    head = tiny_head(kind, target, wide=True, draft=DRAFT, **settings)
    save_head(tmp_path, head, target.spec, {"step": 3})
    again = load_head(tmp_path, target.spec).attach(target)
    assert again.config == head.config and largest_gap(weights(head), weights(again)) == 0.0
    for one, two in zip(drafted_logits(target, head, ids, 2), drafted_logits(target, again, ids, 2), strict=True):
        assert torch.equal(one, two)


def shapes(folder: Path) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in load_file(folder / "head.safetensors").items()}


H, M, Q, KV, D, V = 32, 64, 32, 8, len(DRAFT), 64
MAP = {"d2t": [D], "t2d": [V]}
LAYER = {
    "self_attn.q_proj.weight": [Q, H],
    "self_attn.k_proj.weight": [KV, H],
    "self_attn.v_proj.weight": [KV, H],
    "self_attn.o_proj.weight": [H, Q],
    "mlp.gate_proj.weight": [M, H],
    "mlp.up_proj.weight": [M, H],
    "mlp.down_proj.weight": [H, M],
    "post_attention_layernorm.weight": [H],
}


def saved(folder: Path, kind: str, **settings: Any) -> dict[str, list[int]]:
    target = tiny_target(layers=5)
    save_head(folder, tiny_head(kind, target, draft=DRAFT, **settings), target.spec, {})
    return shapes(folder)


def test_an_eagle1_folder_holds_what_engines_load_and_nothing_of_the_target(tmp_path: Path) -> None:
    """No bias, no input norm, no final norm, no LM head: vLLM refuses the one and misreads the other."""
    expected = {"fc.weight": [H, 2 * H], **{f"layers.0.{name}": shape for name, shape in LAYER.items()}}
    assert saved(tmp_path, "eagle1", num_kv_heads=1) == {**expected, **MAP}


def test_an_mtp_folder_holds_the_module_of_the_released_checkpoints(tmp_path: Path) -> None:
    names = ("enorm", "hnorm", "shared_head.norm", "mtp_block.input_layernorm")
    expected = {f"{name}.weight": [H] for name in names} | {"eh_proj.weight": [H, 2 * H]}
    expected |= {f"mtp_block.{name}": shape for name, shape in LAYER.items()}
    assert saved(tmp_path, "mtp", num_kv_heads=1) == {**expected, **MAP}


def test_eagle3_flags_bring_the_norms_of_the_speculators_format(tmp_path: Path) -> None:
    plain = saved(tmp_path, "eagle3")
    flags = {"norm_before_fc": True, "fc_norm": True, "norm_before_residual": True, "norm_output": True}
    added = {name: shape for name, shape in saved(tmp_path, "eagle3", **flags).items() if name not in plain}
    assert added == {"input_norm.weight": [3 * H], **{f"fc_norm.{i}.weight": [H] for i in range(3)}}


@pytest.mark.parametrize("kind", ["mlp", "lstm"])
def test_tied_recurrent_heads_do_not_grow_with_their_number(tmp_path: Path, kind: str) -> None:
    tied = {"tie_weights": True} if kind == "mlp" else {}
    few, many = (saved(tmp_path, kind, num_heads=n, **tied) for n in (2, 6))
    assert few == many
    assert saved(tmp_path, kind, own_lm_head=False, **tied).keys() == few.keys() - {"head.0.weight"} | {"out.weight"}


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("eagle1", {"init": "induction"}, "head.init='induction' must be one of random, target"),
        ("eagle1", {"train_steps": 0}, "head.train_steps=0 must be >= 1"),
        ("eagle1", {"noise": -0.1}, "head.noise=-0.1 must be >= 0"),
        ("eagle1", {"num_kv_heads": 3}, "head.num_kv_heads=3 does not divide"),
        ("eagle3", {"ttt_steps": 0}, "head.ttt_steps=0 must be >= 1"),
        ("mtp", {"init": "zero"}, "head.init='zero' must be one of random, target"),
        ("mtp", {"train_steps": 0}, "head.train_steps=0 must be >= 1"),
        ("mlp", {"num_heads": 0}, "head.num_heads=0"),
        ("mlp", {"init": "target", "inner_size": 24}, "head.init=target copies LM-head rows of width 32"),
        ("lstm", {"inner_size": 0}, "head.inner_size=0"),
    ],
)
def test_wrong_settings_are_refused_by_name(kind: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_head({"kind": kind, **TINY_HEADS[kind], **settings}, tiny_target(layers=5).spec, None)


@pytest.mark.parametrize("kind", TINY_HEADS)
def test_a_head_of_another_target_is_refused(tmp_path: Path, kind: str) -> None:
    target: Target = tiny_target(layers=5)
    save_head(tmp_path, tiny_head(kind, target), target.spec, {})
    with pytest.raises(ValueError, match="trained for target 'tiny-llama'"):
        load_head(tmp_path, dataclasses.replace(target.spec, vocab_size=65))
