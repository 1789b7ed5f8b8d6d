"""The shared number cases about loss: sums over all slots, masked batches, overflow, every head trained."""

import json
from pathlib import Path

import pytest
import torch
from test_train_objective import HEADS, counts_of, gradients, objective_of
from toys import batch_of, conversations, eagle3, medusa

from train.objective import NonFiniteFeature


def test_case_medusa_every_head_trained(shared: Path) -> None:
    case, labels = (
        json.loads((shared / "cases" / "numeric" / f"{name}.json").read_text())
        for name in ("medusa-every-head-trained", "medusa-labels")
    )
    objective = objective_of(medusa, {"num_heads": case["heads"]})
    spans = [[n, n + 1] for n, on in enumerate(labels["loss_mask"]) if on]
    batch = batch_of([{"ids": [i - 90 for i in labels["input_ids"]], "spans": spans}])
    _, found = gradients(objective, batch)
    assert counts_of(objective, batch).tolist() == [4, 2, 1]
    assert len(found) == 2 * case["heads"] and all(bool(g.any()) for g in found.values())


def test_cases_of_sums_over_all_slots(shared: Path) -> None:
    """`loss-gradient-accumulation`, `loss-across-ranks`: sums over the slots of the whole step, no means of means."""
    for name, part in (("loss-gradient-accumulation", "micro_batches"), ("loss-across-ranks", "ranks")):
        case = json.loads((shared / "cases" / "numeric" / f"{name}.json").read_text())
        sums = torch.tensor([x["loss_sum"] for x in case[part]])
        total = sum(x["tokens"] for x in case[part])
        assert float((sums / total).sum()) == pytest.approx(case["expect"]["loss"], abs=1e-6)
        # the objective divides in this way: a head whose loss per slot is known
        objective = objective_of(*HEADS[2])
        objective.mixture = {"kl": (lambda draft, teacher: torch.ones(len(draft)), 1.0)}
        objective.step_weights = [1.0, 0.0, 0.0]
        batch = batch_of(conversations(4))
        loss, metrics = objective(batch, torch.full((3,), total))
        assert loss.item() == pytest.approx(float(metrics["loss"][0]) / total, rel=1e-6)


def test_case_all_masked_batch(shared: Path) -> None:
    case = json.loads((shared / "cases" / "numeric" / "all-masked-batch.json").read_text())
    objective = objective_of(*HEADS[0])
    batch = batch_of([{"ids": [5] * len(mask), "spans": []} for mask in case["loss_mask"]])
    loss, found = gradients(objective, batch)
    assert bool(torch.isfinite(torch.tensor(loss))) and all(bool(torch.isfinite(g).all()) for g in found.values())
    assert counts_of(objective, batch).tolist() == [0, 0, 0]


def test_case_fp16_overflow(shared: Path) -> None:
    case = json.loads((shared / "cases" / "numeric" / "fp16-overflow.json").read_text())
    objective, rows = objective_of(eagle3, {}), conversations(2)
    for dtype, fails in ((torch.float16, True), (torch.bfloat16, False), (torch.float32, False)):
        batch = batch_of(rows)
        output = objective.target.forward(batch.ids, taps=objective.head.taps)
        assert output.taps is not None
        output.taps[1, 2, 0, 5] = case["feature_value"]
        batch.last, batch.taps = output.last, output.taps.to(dtype)
        if fails:
            with pytest.raises(NonFiniteFeature, match="'taps' of data row 1"):
                objective(batch, counts_of(objective, batch))
        else:
            assert bool(torch.isfinite(objective(batch, counts_of(objective, batch))[0]))
