"""The loss of a batch: invariant to padding and split, exactly zero without slots, gradient to the head alone."""

from typing import Any

import pytest
import torch
from tiny import tiny_target
from torch import Tensor
from toys import batch_of, conversations, eagle3, medusa, tokens, weights

from data.store import Features
from heads.target import Target
from train.batches import Batch, collate
from train.losses import LOSSES
from train.mixture import LossSettings
from train.objective import NonFiniteFeature, Objective, slot_counts
from train.optim import OptimSettings, build_optimizer

DRAFT = [2, 3, 5, 8, 13, 21, 34, 55]
HEADS: list[tuple[Any, dict[str, Any]]] = [
    (eagle3, {}),
    (eagle3, {"draft": DRAFT, "num_kv_heads": 1}),
    (medusa, {"num_heads": 3}),
    (medusa, {"num_heads": 3, "num_layers": 2, "shared_lm_head": False}),
    (medusa, {"num_heads": 3, "shared_lm_head": False, "draft": DRAFT}),
]


def objective_of(make: Any, options: dict[str, Any], loss: str = "kl") -> Objective:
    target = tiny_target(layers=4)
    return Objective(make(target, std=0.2, **options), target, LossSettings(terms={loss: 1.0}))


def counts_of(objective: Objective, *batches: Batch) -> Tensor:
    return torch.stack([slot_counts(b.asst, b.documents, objective.head.train_steps) for b in batches]).sum(0)


def gradients(objective: Objective, *batches: Batch) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one optimizer step over these micro-batches."""
    objective.zero_grad()
    counts, total = counts_of(objective, *batches), 0.0
    for batch in batches:
        loss, _ = objective(batch, counts)
        loss.backward()
        total += loss.item()
    none = torch.zeros(())
    return total, {n: none if p.grad is None else p.grad.clone() for n, p in objective.head.named_parameters()}


def close(a: tuple[float, dict[str, Tensor]], b: tuple[float, dict[str, Tensor]], atol: float = 1e-6) -> bool:
    same = all(torch.allclose(a[1][name], b[1][name], atol=atol, rtol=1e-4) for name in a[1])
    return same and a[0] == pytest.approx(b[0], rel=1e-5)


def test_a_mean_of_means_would_show() -> None:
    """Negative control: dividing each micro-batch by its own slots gives another gradient."""
    objective, rows = objective_of(*HEADS[0]), conversations(6)
    whole = gradients(objective, batch_of(rows))
    total = 0.0
    objective.zero_grad()
    for row in rows:
        batch = batch_of([row])
        loss, _ = objective(batch, counts_of(objective, batch))
        (loss / len(rows)).backward()
        total += loss.item() / len(rows)
    assert total != pytest.approx(whole[0], rel=1e-3)


@pytest.mark.parametrize("prompt", [1, 20])
def test_loss_does_not_depend_on_the_length_of_the_prompt(prompt: int) -> None:
    """Medusa reads one feature: the same answer features behind a longer prompt weigh the same."""
    objective = objective_of(*HEADS[2])
    ids = tokens(1, prompt + 8)
    asst = torch.zeros_like(ids, dtype=torch.bool)
    asst[:, prompt:] = True
    last = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(0))
    features = torch.cat([torch.zeros(1, prompt, 32), last], dim=1)
    ids[0, prompt:] = torch.arange(8)
    features[:, prompt - 1] = 1.0  # the slot of the last prompt token is trained
    batch = Batch(ids, asst, torch.zeros_like(ids), torch.arange(prompt + 8)[None], [0], last=features)
    loss, _ = objective(batch, counts_of(objective, batch))
    reference = objective_of(*HEADS[2])
    short = Batch(
        ids[:, prompt - 1 :],
        asst[:, prompt - 1 :],
        torch.zeros(1, 9),
        torch.arange(9)[None],
        [0],
        last=features[:, prompt - 1 :],
    )
    assert loss.item() == pytest.approx(reference(short, counts_of(reference, short))[0].item(), rel=1e-5)


@pytest.mark.parametrize("loss", ["kl", "neg_log_alpha"])
def test_loss_is_the_weighted_sum_of_its_steps(loss: str) -> None:
    """Against a loop over slots that states the convention: step i of slot t, taught at t+1+i, divided by the count."""
    objective = objective_of(eagle3, {"draft": DRAFT}, loss)
    head, target, batch = objective.head, objective.target, batch_of(conversations(3))
    counts = counts_of(objective, batch)
    total, metrics = objective(batch, counts)
    expected = 0.0
    for row in range(3):
        ids = batch.ids[row : row + 1]
        T = int((batch.documents[row] >= 0).sum())
        for t in range(T):
            for i in range(3):
                if t + 2 + i >= T or not bool(batch.asst[row, t + 1 : t + 3 + i].all()):
                    continue
                slots = torch.tensor([[t]])
                one = Batch(ids, batch.asst[row : row + 1], batch.documents[row : row + 1], batch.positions[:1], [row])
                inputs = objective.inputs(one, slots)
                draft = head.logits(head(inputs, i + 1)[i][0], i)
                teacher = target.logits(inputs.last[0, t + 1 + i, None])[:, DRAFT]
                expected += 0.8**i * LOSSES[loss](draft, teacher).item() / int(counts[i])
    assert total.item() == pytest.approx(expected, rel=1e-4)
    weighted = (metrics["loss"] / counts * 0.8 ** torch.arange(3)).sum()
    assert float(weighted) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_feature_that_is_not_finite_is_named_with_its_row(value: float) -> None:
    objective, rows = objective_of(eagle3, {}), conversations(4)
    for name, position in (("last", (2, 1)), ("taps", (2, 1, 0))):
        batch = collate(rows, [7, 3, 12, 5])
        output = objective.target.forward(batch.ids, taps=objective.head.taps)
        batch.last, batch.taps = output.last, output.taps
        getattr(batch, name)[position] = value
        with pytest.raises(NonFiniteFeature, match=f"'{name}' of data row 12 is not finite"):
            objective(batch, counts_of(objective, batch))


def test_captured_features_give_the_loss_of_a_live_target() -> None:
    class Store:
        def __init__(self, target: Target, rows: list[dict[str, Any]], taps: tuple[int, ...]) -> None:
            self.rows = [target.forward(torch.tensor([row["ids"]]), taps=taps) for row in rows]

        def row(self, index: int) -> Features:
            output = self.rows[index]
            return Features(output.last[0], None if output.taps is None else output.taps[0])

    for make, options in (HEADS[1], HEADS[2]):
        objective, rows = objective_of(make, options), conversations(4)
        store = Store(objective.target, rows, objective.head.taps)
        live = gradients(objective, batch_of(rows))
        assert close(live, gradients(objective, collate(rows, [0, 1, 2, 3], store)))


def test_the_target_is_untouched_by_training() -> None:
    objective, batch = objective_of(*HEADS[0]), batch_of(conversations(3))
    before = {name: value.clone() for name, value in objective.target.model.state_dict().items()}
    head_before = weights(objective.head)
    optimizer = build_optimizer(objective.parameters(), OptimSettings())
    gradients(objective, batch)
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in objective.target.model.state_dict().items())
    assert not torch.equal(head_before["fc.weight"], objective.head.fc.weight)
