"""The kept top m of a teacher: a distribution, the whole one at m = V, and what training makes of it."""

import math
from typing import Any

import pytest
import torch
from test_train_objective import DRAFT, HEADS, close, counts_of, gradients, objective_of
from tiny import tiny_target
from toys import Row, conversations, eagle3

from data.quantise import dequantise, quantise
from data.rows import DataRow
from data.store import Features
from data.teacher import TopM, teacher_logits, top_m
from heads.target import Target
from scripts import feature_formats
from train.batches import collate
from train.evaluate import evaluate
from train.losses import kl
from train.mixture import LossSettings
from train.objective import Objective


def logits(rows: int = 7, vocab_size: int = 40, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(0)) * spread


@pytest.mark.parametrize("rows", [None, [1, 5, 6, 20, 39]])
def test_all_of_the_vocabulary_kept_is_the_teacher_itself(rows: list[int] | None) -> None:
    whole, chosen = logits(), None if rows is None else torch.tensor(rows)
    rebuilt = teacher_logits(top_m(whole, 40), 40, chosen)
    p = whole.softmax(-1) if chosen is None else whole[:, chosen].softmax(-1)
    assert torch.allclose(rebuilt.softmax(-1), p, atol=1e-6)
    student = logits(7, rebuilt.shape[1], 1.0)
    assert torch.allclose(kl(student, rebuilt), kl(student, p.log()), atol=1e-5)


def test_the_distribution_is_the_one_of_the_docstring() -> None:
    p = torch.tensor([[0.05, 0.50, 0.30, 0.10, 0.05]])
    rebuilt = teacher_logits(top_m(p.log(), 2), 5)
    assert torch.allclose(rebuilt.exp(), torch.tensor([[0.2 / 3, 0.5, 0.3, 0.2 / 3, 0.2 / 3]]), atol=1e-6)
    part = teacher_logits(top_m(p.log(), 2), 5, torch.tensor([0, 1, 4]))
    assert torch.allclose(part.exp(), torch.tensor([[0.2 / 3, 0.5, 0.2 / 3]]), atol=1e-6)


@pytest.mark.parametrize("m", [1, 4, 39])
def test_the_top_m_is_exact_the_rest_is_even_and_the_gap_is_at_most_the_rest(m: int) -> None:
    p, kept = logits().softmax(-1), top_m(logits(), m)
    q = teacher_logits(kept, 40).exp()
    assert torch.allclose(q.sum(-1), torch.ones(7), atol=1e-5)
    ids = kept.ids.long()
    assert torch.allclose(q.gather(1, ids), p.gather(1, ids), atol=1e-6)
    assert torch.equal(q.argmax(-1), p.argmax(-1))
    rest = 1 - p.gather(1, ids).sum(-1)
    assert torch.allclose(kept.log_rest.exp(), rest, atol=1e-6)
    assert bool((0.5 * (p - q).abs().sum(-1) <= rest + 1e-6).all())


def test_a_mass_too_small_for_one_minus_the_sum_is_still_there() -> None:
    sure = torch.tensor([[40.0, 5.0, 0.0, 0.0]])
    kept = top_m(sure, 2)
    assert kept.log_rest.item() == pytest.approx(math.log(2) - 40.0, rel=1e-5)
    assert bool(torch.isfinite(kl(torch.zeros(1, 4), teacher_logits(kept, 4))).all())


def test_equal_logits_and_ids_above_sixteen_bits_are_kept() -> None:
    wide = torch.zeros(2, 70_000)
    wide[1, 69_999] = 5.0
    kept = top_m(wide, 3)
    assert kept.ids.dtype == torch.int32 and kept.ids[1, 0] == 69_999
    rebuilt = teacher_logits(kept, 70_000, torch.tensor([3, 69_999]))
    assert rebuilt[1, 1] - rebuilt[1, 0] == pytest.approx(5.0, abs=1e-4)


class Kept:
    """Features of a capture with or without the last hidden state."""

    def __init__(self, target: Target, rows: list[Row], taps: tuple[int, ...], m: int | None) -> None:
        self.rows = []
        for row in rows:
            output = target.forward(torch.tensor([row["ids"]]), taps=taps)
            last, top = output.last[0], None if m is None else top_m(target.logits(output.last[0]), m)
            self.rows.append(
                Features(last if m is None else None, None if output.taps is None else output.taps[0], top)
            )

    def row(self, index: int) -> Features:
        return self.rows[index]


@pytest.mark.parametrize("options", [{}, {"draft": DRAFT}])
@pytest.mark.parametrize("sizes", [None, [2, 2]])
def test_training_needs_no_last_hidden_state_when_the_whole_teacher_is_kept(
    options: dict[str, Any], sizes: list[int] | None
) -> None:
    objective, rows = objective_of(HEADS[0][0], options), conversations(4)
    stores = [Kept(objective.target, rows, objective.head.taps, m) for m in (None, 64, 2)]
    batches = [collate(rows, [0, 1, 2, 3], store, sizes) for store in stores]
    whole, kept, cut = (gradients(objective, batch) for batch in batches)
    assert batches[1].last is None and counts_of(objective, batches[1])[0] > 0
    assert close(whole, kept)
    assert not close(whole, cut), "two tokens of the teacher are not all of it"


def test_a_kept_teacher_moves_and_is_cut_with_its_rows() -> None:
    kept = top_m(logits(), 3)
    part = kept[2:4].to(torch.device("cpu"))
    assert isinstance(part, TopM) and torch.equal(part.ids, kept.ids[2:4]) and part.log_rest.shape == (2,)


def test_int8_vectors_are_off_by_half_a_step_at_most() -> None:
    x = logits(50, 64)
    x[3], x[4, 7] = 0.0, 1000.0  # a vector of zeros, an outlier channel
    values, scale = quantise(x)
    assert values.dtype == torch.int8 and scale.dtype == torch.float32 and scale.shape == (50,)
    back = dequantise(values, scale)
    assert bool(((back - x).abs() <= scale[:, None] * 0.5001).all())
    assert torch.equal(back[3], x[3]) and back[4, 7] == pytest.approx(1000.0)
    assert bool((back[4, :7] == 0).all()), "an outlier channel of a vector takes the others of it along"
    assert float((back[5] - x[5]).norm() / x[5].norm()) < 0.02, "and none of another vector"
    worked, step = quantise(torch.tensor([0.5, -2.0, 1.0]))
    assert worked.tolist() == [32, -127, 64] and float(step) == pytest.approx(2 / 127)


def test_quantising_bfloat16_is_quantising_its_values() -> None:
    x = logits(5, 16).to(torch.bfloat16)
    one, two = quantise(x), quantise(x.float())
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


def test_the_table_of_formats_is_right_where_the_answer_is_known() -> None:
    target = tiny_target(layers=4)
    head = eagle3(target, std=0.2, draft=DRAFT)
    data = [DataRow(n, row["id"], "", "", row["ids"], row["spans"]) for n, row in enumerate(conversations(3))]
    formats, teachers = feature_formats.measure(target, head, data, 3, [2, 64])
    exact, int8 = formats["float32"], formats["int8"]
    assert exact["bytes"] == 4 * 32 * 4 and int8["bytes"] == 4 * (32 + 4)
    assert exact["feature_error"] == exact["teacher_kl"] == 0.0 and exact["teacher_top1_same"] == 1.0
    assert 0.002 < int8["feature_error"] < 0.02 and int8["teacher_kl"] > formats["float16"]["teacher_kl"] > 0
    assert teachers[64]["kl"] == pytest.approx(0, abs=1e-6) and teachers[64]["rest"] == 0
    assert teachers[2]["rest"] >= teachers[2]["total_variation"] > 0.05 and teachers[2]["kl_draft_vocabulary"] > 0
    batch = collate(conversations(3), [0, 1, 2])
    tally = evaluate(Objective(head, target, LossSettings()), batch, 3, 64)
    assert exact["predicted_acceptance_length"] == tally.figures()["predicted_acceptance_length"]
