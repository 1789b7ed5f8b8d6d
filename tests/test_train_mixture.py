"""A loss of several terms is what its weights say: per term, per step, per feature; what makes no sense is refused."""

import math
from typing import Any

import pytest
import torch
from test_train_objective import counts_of, gradients
from tiny import tiny_target
from toys import batch_of, conversations, eagle3, medusa, settings

from train.losses import LOSSES
from train.mixture import LossSettings
from train.objective import Objective
from train.unroll import at_slots, pick_slots, step_mask

WEIGHTS = {"kl": 0.3, "neg_log_alpha": 1.5, "top_m": 0.25}


def objective_of(**changed: Any) -> Objective:
    target = tiny_target(layers=4)
    head = eagle3(target, std=0.2)
    return Objective(head, target, LossSettings(**changed))


def single(name: str, weights: list[float]) -> float:
    objective = objective_of(terms={name: 1.0}, step_weights=weights)
    return gradients(objective, batch_of(conversations(4)))[0]


def test_the_default_is_kl_with_weights_of_four_fifths() -> None:
    names, weights = LossSettings().mixture(), LossSettings().weights(3)
    assert list(names) == ["kl"] and names["kl"] == (LOSSES["kl"], 1.0)
    assert weights == pytest.approx([1.0, 0.8, 0.64])


def test_terms_add_up_with_their_weights_and_those_of_weight_zero_are_left_out() -> None:
    steps = [0.5, 0.0, 2.0]
    objective = objective_of(terms={**WEIGHTS, "cross_entropy": 0.0}, step_weights=steps)
    loss, _ = gradients(objective, batch_of(conversations(4)))
    assert loss == pytest.approx(sum(w * single(name, steps) for name, w in WEIGHTS.items()), rel=1e-5)
    assert objective.terms == list(WEIGHTS)


@pytest.mark.parametrize("step", range(3))
def test_each_step_counts_with_its_own_weight(step: int) -> None:
    alone = [float(i == step) for i in range(3)]
    part = single("kl", alone)
    assert part > 0.1
    others = [1.0 - x for x in alone]
    assert single("kl", [1.0, 1.0, 1.0]) - single("kl", others) == pytest.approx(part, rel=1e-4)
    assert single("kl", [3.0 * x for x in alone]) == pytest.approx(3.0 * part, rel=1e-5)


def test_step_weights_are_spelled_as_a_decay_a_gamma_or_a_list() -> None:
    assert LossSettings(step_decay=0.5).weights(3) == [1.0, 0.5, 0.25]
    assert LossSettings(step_decay=0.0).weights(3) == [1.0, 0.0, 0.0]
    gamma = LossSettings(position_gamma=7.0).weights(15)
    assert gamma == pytest.approx([math.exp(-(k - 1) / 7.0) for k in range(1, 16)])
    assert LossSettings(step_weights=[1, 0.1]).weights(2) == [1, 0.1]
    with pytest.raises(ValueError, match="step_weights has 2 numbers for a head that trains 3 steps"):
        objective_of(step_weights=[1.0, 0.5])


def test_a_warmer_teacher_is_the_softmax_of_divided_logits() -> None:
    objective = objective_of(teacher_temperature=2.0, step_weights=[1.0, 0.0, 0.0])
    batch = batch_of(conversations(2))
    loss, metrics = objective(batch, counts_of(objective, batch))
    slots, real = pick_slots(step_mask(batch.asst, batch.documents, 0))
    inputs = objective.inputs(batch, slots)
    draft = objective.head.logits(objective.head(inputs, 1)[0], 0)
    teacher = objective.target.logits(at_slots(inputs.last, slots, 1)) / 2.0
    assert loss.item() == pytest.approx(LOSSES["kl"](draft, teacher)[real].mean().item(), rel=1e-5)
    cold = objective_of(step_weights=[1.0, 0.0, 0.0])
    assert cold(batch, counts_of(cold, batch))[0].item() != pytest.approx(loss.item(), rel=1e-2)


def regressing(**changed: Any) -> Objective:
    """EAGLE-3 does not regress features; its shapes would do."""
    target = tiny_target(layers=4)
    head = eagle3(target, std=0.2)
    head.regresses = True
    return Objective(head, target, LossSettings(**changed))


def test_feature_regression_compares_step_i_at_slot_t_with_the_feature_at_t_plus_1_plus_i() -> None:
    weights = [1.0, 0.5, 0.0]
    objective = regressing(terms={"kl": 0.1}, feature={"smooth_l1": 2.0}, step_weights=weights)
    batch = batch_of(conversations(3))
    counts = counts_of(objective, batch)
    loss, metrics = objective(batch, counts)
    slots, _ = pick_slots(step_mask(batch.asst, batch.documents, 0))
    inputs = objective.inputs(batch, slots)
    expected = 0.0
    for row in range(3):
        for t in range(batch.ids.shape[1]):
            one = torch.tensor([[t]]).expand(3, 1)
            for i in range(2):
                if not bool(step_mask(batch.asst, batch.documents, i)[row, t]):
                    continue
                hidden = objective.head(objective.inputs(batch, one), i + 1)[i][row, 0]
                gap = hidden - inputs.last[row, t + 1 + i]
                huber = torch.where(gap.abs() < 1, 0.5 * gap**2, gap.abs() - 0.5).mean()
                expected += weights[i] * 2.0 * huber.item() / int(counts[i])
    plain = objective_of(terms={"kl": 0.1}, step_weights=weights)
    assert loss.item() - plain(batch, counts)[0].item() == pytest.approx(expected, rel=1e-4)
    shares = torch.tensor(weights) / counts
    assert float((2.0 * metrics["smooth_l1"] * shares).sum()) == pytest.approx(expected, rel=1e-4)
    assert float((metrics["loss"] * shares).sum()) == pytest.approx(loss.item(), rel=1e-4)


@pytest.mark.parametrize("make", [eagle3, medusa])
def test_a_head_that_does_not_regress_features_refuses_a_weight_for_it(make: Any) -> None:
    target = tiny_target(layers=4)
    with pytest.raises(ValueError, match=r"train.loss.feature=.*'smooth_l1'.* is not trained to predict"):
        Objective(make(target), target, LossSettings(feature={"smooth_l1": 0.1}))
    Objective(make(target), target, LossSettings(feature={"smooth_l1": 0.0}))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"terms": {"mse": 1.0}}, r"train.loss.terms='mse' must be one of .*kl"),
    "unknown feature": ({"feature": {"kl": 1.0}}, "train.loss.feature='kl' must be one of smooth_l1"),
    "negative": ({"terms": {"kl": -1.0}}, "train.loss.terms.kl=-1.0"),
    "not a number": ({"terms": {"kl": float("nan")}}, "train.loss.terms.kl=nan"),
    "nothing": ({"terms": {"kl": 0.0}}, "no weight above 0"),
    "two spellings": ({"step_weights": [1.0], "position_gamma": 4.0}, "are both set"),
    "decay": ({"step_decay": -0.1}, "train.loss.step_decay=-0.1"),
    "gamma": ({"position_gamma": 0.0}, "train.loss.position_gamma=0.0"),
    "no step": ({"step_weights": [0.0, 0.0]}, "not only 0"),
    "empty list": ({"step_weights": []}, "not only 0"),
    "temperature": ({"teacher_temperature": 0.0}, "train.loss.teacher_temperature=0.0"),
    "m": ({"top_m": 0}, "train.loss.top_m=0"),
    "chunk": ({"chunk": -1}, "chunk=-1"),
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_losses_that_make_no_sense_are_refused_by_name(what: str) -> None:
    changed, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        LossSettings(**changed)


def test_a_run_logs_the_terms_of_its_loss_beside_the_sum(tmp_path: Any) -> None:
    from toys import train

    from train.track import read_log

    assert settings(loss={"terms": WEIGHTS}).loss.terms == WEIGHTS
    train(tmp_path, steps=2, loss={"terms": WEIGHTS, "step_decay": 0.5})
    for line in read_log(tmp_path / "log.jsonl"):
        if line["split"] == "train":
            per_step = [sum(w * line[f"loss_{name}"][i] for name, w in WEIGHTS.items()) for i in range(3)]
            assert line["step_loss"] == pytest.approx(per_step, rel=1e-5)
            assert line["loss"] == pytest.approx(sum(0.5**i * x for i, x in enumerate(per_step)), rel=1e-5)
