"""Medusa-2 (arXiv 2401.10774, section 2.2): heads and backbone learn together, the backbone through adapters.

    joint               L = CE(target's own logits, x_{t+1})          + lambda(s) * heads' loss
    self_distillation   L = KL(adapters off || adapters on), at t     + lambda(s) * heads' loss
    lambda(s) = lambda0 * sin(pi/2 * s / steps)                       s: the optimizer step, counted from 1

The target's own loss is a mean over the positions t whose next token the assistant produced, the heads' loss that of
objective.py; its teacher is the target as it is now (adapters on), through which no gradient flows. The rate of the
adapters is `train.optim.lr`, that of the heads `head_lr_times` as much. Start from heads that were trained on the
frozen target (`train.warm_start`): untrained ones would pull the backbone towards themselves.

The metrics get one more column, the last, for the target: its loss, and how often its likeliest token is x_{t+1}.
"""

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.lora import Lora
from heads.target import Target
from train.batches import Batch
from train.chunked import chunked_sum
from train.losses import kl
from train.mixture import LossSettings
from train.objective import Objective
from train.unroll import step_mask

LAMBDA0 = {"joint": 0.2, "self_distillation": 0.01}


@dataclasses.dataclass
class JointSettings:
    mode: str | None = None  # joint | self_distillation; null: the target stays frozen
    lora_r: int = 32
    lora_alpha: float = 16.0
    head_lr_times: float = 4.0  # rate of the heads, as a multiple of train.optim.lr, that of the adapters
    lambda0: float | None = None  # weight of the heads' loss at the last step; null: joint .2, self_distillation .01

    def __post_init__(self) -> None:
        if self.mode is not None and self.mode not in LAMBDA0:
            raise ValueError(f"train.joint.mode={self.mode!r} must be null or one of {', '.join(LAMBDA0)}")
        for name in ("lora_r", "lora_alpha", "head_lr_times", "lambda0"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"train.joint.{name}={value} must be a number above 0")


class Joint(Objective):
    """`forward(batch, counts)` as Objective's; counts [J + 1], the last of them positions of the target's own loss.

    Raises ValueError for a head that is no Medusa head and for a target that takes no adapter.
    """

    def __init__(self, head: Any, target: Target, settings: LossSettings, joint: JointSettings) -> None:
        assert joint.mode is not None, "without a mode the target is frozen: use Objective"
        if head.config.kind != "medusa":
            raise ValueError(
                f"train.joint.mode={joint.mode} trains Medusa heads with their target (Medusa-2), not a head of kind "
                f"{head.config.kind!r}: use head=medusa, or train.joint.mode=null"
            )
        super().__init__(head, target, settings)
        self.distils = joint.mode == "self_distillation"
        self.lambda0 = LAMBDA0[joint.mode] if joint.lambda0 is None else joint.lambda0
        self.lora: Lora = Lora(target, joint.lora_r, joint.lora_alpha)

    def ramp(self) -> float:
        """lambda(s), the weight of the heads' loss at this step."""
        return self.lambda0 * math.sin(math.pi / 2 * self.progress)

    def counts(self, batch: Batch) -> Tensor:
        own = step_mask(batch.asst, batch.documents, -1).sum()[None]
        return torch.cat([super().counts(batch), own])

    def weights(self) -> list[float]:
        return [*(self.ramp() * weight for weight in self.step_weights), 1.0]

    def forward(self, batch: Batch, counts: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        batch = self.features(batch)  # the one pass with gradient: heads and target read the same features
        heads, sums = super().forward(batch, counts[:-1])
        own, column = self._own(batch)
        sums = {name: torch.cat([value, column.get(name, value.new_zeros(1))]) for name, value in sums.items()}
        return self.ramp() * heads + own / counts[-1].clamp_min(1), sums

    def _own(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The target's own loss, summed over the positions of a batch, and its column of the metrics."""
        where = step_mask(batch.asst, batch.documents, -1)
        assert batch.last is not None, "joint training reads live features"
        rows, labels = batch.last[where], batch.ids.roll(-1, dims=1)[where]
        before = self._off(batch)[where] if self.distils else None
        sums = {name: torch.zeros(1, device=rows.device) for name in ("loss", "correct")}

        def piece(_: int, part: Tensor, start: int) -> Tensor:
            here = slice(start, start + len(part))
            with self._own_precision():
                logits = self.target.logits(part)
                if before is None:
                    loss = F.cross_entropy(logits, labels[here], reduction="sum")
                else:
                    loss = kl(logits, self.target.logits(before[here])).sum()
            sums["loss"] += loss.detach()
            sums["correct"] += (logits.detach().argmax(-1) == labels[here]).sum()
            return loss

        return chunked_sum(piece, [rows], [], self.settings.chunk), sums

    @torch.no_grad()
    def _off(self, batch: Batch) -> Tensor:
        """The last features [B, T, H] of the base target."""
        with self.lora.off():
            return self._live(batch).last
