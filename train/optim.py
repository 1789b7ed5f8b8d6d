"""AdamW with linear warm-up and cosine decay, stepped once per optimizer step whatever the number of processes."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


@dataclasses.dataclass
class OptimSettings:
    lr: float = 1e-3
    warmup_share: float = 0.05  # of all optimizer steps
    final_share: float = 0.0  # learning rate at the end, as a share of lr
    betas: list[float] = dataclasses.field(default_factory=lambda: [0.9, 0.95])
    weight_decay: float = 0.01  # on matrices only, never on norms or biases
    clip: float = 1.0  # largest gradient norm


def build_optimizer(
    parameters: Iterable[nn.Parameter],
    settings: OptimSettings,
    adapters: Iterable[nn.Parameter] = (),
    times: float = 1.0,
) -> torch.optim.AdamW:
    """AdamW over the trainable parameters (fp32 masters), fused where torch has it.

    The rate of a group is that of the schedule * its "times": `times` for the head's `parameters`, 1 for `adapters`.
    """
    groups = [*_groups(parameters, settings, times), *_groups(adapters, settings, 1.0)]
    beta1, beta2 = settings.betas
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=settings.lr, betas=(beta1, beta2), fused=True)


def _groups(parameters: Iterable[nn.Parameter], settings: OptimSettings, times: float) -> list[dict[str, Any]]:
    trainable = [p for p in parameters if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.dim() > 1], "weight_decay": settings.weight_decay, "times": times},
        {"params": [p for p in trainable if p.dim() <= 1], "weight_decay": 0.0, "times": times},
    ]


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group its rate where the schedule stands at `lr`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["times"]


def learning_rate(step: int, steps: int, settings: OptimSettings) -> float:
    """Rate of 0-based optimizer step `step` of `steps`: peak at the end of warm-up, `final_share` at the end."""
    warmup = max(1, round(settings.warmup_share * steps))
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    progress = (step + 1 - warmup) / max(1, steps - warmup)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return settings.lr * (settings.final_share + (1.0 - settings.final_share) * cosine)
