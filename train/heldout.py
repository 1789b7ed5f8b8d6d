"""Figures over the held-out conversations, shared among all ranks: predicted acceptance and loss."""

import dataclasses
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from train.batches import FeatureStore, collate
from train.evaluate import Tally, evaluate
from train.objective import Objective


@torch.no_grad()
def heldout_figures(
    objective: Objective,
    rows: list[dict[str, Any]],
    store: FeatureStore | None,
    k: int,
    max_tokens: int,
    micro_batch: int,
    accelerator: Accelerator,
) -> dict[str, Any]:
    """Names of `Tally.figures` for chains of k, and the `loss` training minimises; the same on every rank."""
    head = objective.head
    mine = list(range(accelerator.process_index, len(rows), accelerator.num_processes))
    tally, sums = Tally.empty(k), torch.zeros(2, len(objective.weights()), dtype=torch.float64)
    head.eval()
    for start in range(0, len(mine), micro_batch):
        part = mine[start : start + micro_batch]
        batch = objective.features(collate([rows[n] for n in part], part, store).to(accelerator.device))
        tally.add(evaluate(objective, batch, k, max_tokens))
        counts = objective.counts(batch)
        _, metrics = objective(batch, counts)
        sums += torch.stack([metrics["loss"].double().cpu(), counts.double().cpu()])
    head.train()
    for field in dataclasses.fields(tally):
        value = getattr(tally, field.name)
        total = _sum(torch.as_tensor(value, dtype=torch.float64), accelerator)
        setattr(tally, field.name, total if isinstance(value, Tensor) else int(total))
    loss, counts = _sum(sums, accelerator)
    return {**tally.figures(), "loss": objective.weighted(loss / counts.clamp_min(1))}


def _sum(value: Tensor, accelerator: Accelerator) -> Tensor:
    """Sum over the ranks, on the CPU."""
    return accelerator.reduce(value.to(accelerator.device), reduction="sum").cpu()
