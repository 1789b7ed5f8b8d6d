"""The loss of every kind of head: invariant to padding, packing, split and chunks; exactly zero without slots.

The heads are those of tiny_heads.py, so that a new kind is covered once it has its entry there.
"""

import dataclasses
from typing import Any

import pytest
import torch
from test_train_objective import close, gradients
from tiny import tiny_target
from tiny_heads import TINY_HEADS, tiny_head
from torch import nn
from toys import batch_of, conversations

from heads import HEADS
from train.batches import Batch, collate
from train.mixture import LossSettings
from train.objective import Objective

DRAFT = [2, 3, 5, 8, 13, 21, 34, 55]
CASES: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in HEADS),
    ("eagle3", {"draft": DRAFT}),
    ("mlp", {"draft": DRAFT}),
    ("medusa", {"shared_lm_head": False}),
    ("block", {"own_lm_head": True}),
]
every_case = pytest.mark.parametrize(
    ("kind", "options"), CASES, ids=lambda x: "-".join(x) if isinstance(x, dict) else x
)


def objective_of(kind: str, options: dict[str, Any], **loss: Any) -> Objective:
    """A head away from its start, in eval mode (no noise on its inputs); features count where the kind has them."""
    target = tiny_target(layers=5)
    head = tiny_head(kind, target, wide=True, **options)
    feature = {"smooth_l1": 0.5} if head.regresses else {}
    return Objective(head, target, LossSettings(**{"feature": feature, **loss})).eval()


def featured(objective: Objective, rows: list[dict[str, Any]]) -> Batch:
    return objective.features(batch_of(rows))


def padded(batch: Batch, by: int, value: int) -> Batch:
    """The same batch, `by` positions longer."""
    pad = nn.functional.pad
    ids, asst = pad(batch.ids, (0, by), value=value), pad(batch.asst, (0, by))
    T = ids.shape[1]
    return Batch(ids, asst, pad(batch.documents, (0, by), value=-1), torch.arange(T).expand(len(ids), T), batch.rows)


def packed(objective: Objective, rows: list[dict[str, Any]]) -> Batch:
    """All conversations in one line, positions starting anew with each, features as each has them alone."""
    alone = [featured(objective, [row]) for row in rows]

    def line(name: str) -> Any:
        values = [getattr(batch, name) for batch in alone]
        return None if values[0] is None else torch.cat(values, dim=1)

    names = ("ids", "asst", "positions", "last", "taps")
    documents = torch.cat([torch.full_like(batch.ids, n) for n, batch in enumerate(alone)], dim=1)
    return dataclasses.replace(
        alone[0], **{n: line(n) for n in names}, documents=documents, rows=list(range(len(rows)))
    )


def test_every_kind_has_a_small_head() -> None:
    assert TINY_HEADS.keys() == HEADS.keys()
    assert {kind for kind, _ in CASES} == HEADS.keys()


@every_case
def test_loss_and_gradient_depend_on_neither_padding_packing_nor_split(kind: str, options: dict[str, Any]) -> None:
    objective, rows = objective_of(kind, options), conversations(5, longest=8)
    whole = gradients(objective, batch_of(rows))
    assert whole[0] > 0.1 and max(float(g.abs().max()) for g in whole[1].values()) > 0.01
    for what, batches in {
        "padded": [padded(batch_of(rows), 7, 1)],
        "packed, features as captured": [packed(objective, rows)],
        "packed, the target run on packed lines": [collate(rows, list(range(len(rows))), sizes=[2, 3])],
        "split": [batch_of(part) for part in (rows[:1], rows[1:3], rows[3:])],
    }.items():
        assert close(whole, gradients(objective, *batches), atol=1e-5), what


@every_case
def test_loss_and_gradient_do_not_depend_on_the_chunk(kind: str, options: dict[str, Any]) -> None:
    terms, batch = {"kl": 1.0, "neg_log_alpha": 0.5}, batch_of(conversations(3))
    plain, lean = (gradients(objective_of(kind, options, terms=terms, chunk=chunk), batch) for chunk in (0, 5))
    assert lean[0] == pytest.approx(plain[0], abs=1e-5)
    assert all(torch.allclose(lean[1][name], plain[1][name], atol=1e-5, rtol=1e-4) for name in plain[1])


@pytest.mark.parametrize("kind", HEADS)
def test_a_packed_line_whose_documents_were_not_told_apart_would_show(kind: str) -> None:
    """Negative control: the same line as one document is another loss."""
    objective, rows = objective_of(kind, {}), conversations(5)
    line = packed(objective, rows)
    merged = dataclasses.replace(line, documents=torch.zeros_like(line.documents), asst=torch.ones_like(line.asst))
    apart = dataclasses.replace(line, asst=torch.ones_like(line.asst))
    assert not close(gradients(objective, apart), gradients(objective, merged))


@every_case
def test_a_batch_without_trained_slots_is_exactly_zero(kind: str, options: dict[str, Any]) -> None:
    objective = objective_of(kind, options)
    empty = batch_of([{"ids": [5, 6, 7, 8, 9], "spans": []}, {"ids": [5, 6, 7], "spans": [[2, 3]]}])
    loss, found = gradients(objective, empty)
    assert loss == 0.0 and all(not bool(g.any()) for g in found.values())
    rows = conversations(4)
    assert close(gradients(objective, batch_of(rows)), gradients(objective, empty, batch_of(rows), empty), atol=1e-5)
