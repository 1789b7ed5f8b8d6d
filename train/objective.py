"""Head + frozen target -> loss of a batch: the only place where masking, weighting and reduction happen."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from heads.layers import HeadInput
from heads.target import Target
from train.batches import Batch
from train.losses import LOSSES
from train.unroll import at_slots, pick_slots, step_mask


@dataclasses.dataclass
class LossSettings:
    name: str = "kl"
    step_decay: float = 0.8  # weight of step i is decay^i
    teacher_temperature: float = 1.0


class NonFiniteFeature(ValueError):
    """A captured feature overflowed (float16 above 65504) or is NaN."""


class Objective(nn.Module):
    """`forward(batch, counts)` -> (loss, metrics); counts [J] are the trained slots of the whole optimizer step.

    The loss of step i is the sum over its trained slots / counts[i], so that padding, prompt length, accumulation and
    the number of ranks leave the gradient unchanged. A batch without trained slots gives exactly zero.
    """

    def __init__(self, head: Any, target: Target, settings: LossSettings) -> None:
        super().__init__()
        if settings.name not in LOSSES:
            raise ValueError(f"train.loss.name={settings.name!r} must be one of {sorted(LOSSES)}")
        self.head = head
        self._target = [
            target
        ]  # in a list: the frozen target is no submodule, so no optimizer and no checkpoint sees it
        self.settings, self.loss = settings, LOSSES[settings.name]
        rows = head.target_rows()
        weight, bias = target.lm_head(rows)
        self._rows = rows
        self._teacher = (weight.detach(), bias)

    @property
    def target(self) -> Target:
        return self._target[0]

    def inputs(self, batch: Batch, slots: Tensor) -> HeadInput:
        """Head inputs from captured features, or from a live pass of the target when there are none."""
        target = self.target
        last, taps = batch.last, batch.taps
        if last is None:
            output = target.forward(batch.ids, taps=self.head.taps)
            last, taps = output.last, output.taps
        for name, tensor in (("last", last), ("taps", taps)):
            if tensor is not None and not torch.isfinite(tensor).all():
                bad = (~torch.isfinite(tensor)).flatten(1).any(1).nonzero()[0].item()
                raise NonFiniteFeature(
                    f"feature tensor {name!r} of data row {batch.rows[int(bad)]} is not finite ({tensor.dtype}): "
                    "use target.dtype=bfloat16 or float32"
                )
        return HeadInput(last, taps, target.embed(batch.ids), batch.positions, batch.documents, slots)

    def teacher_logits(self, last: Tensor) -> Tensor:
        """The target's logits over the draft vocabulary, [N, H] -> [N, D]."""
        return self.target.finish_logits(nn.functional.linear(last.to(self._teacher[0].dtype), *self._teacher))

    def forward(self, batch: Batch, counts: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        steps = counts.shape[0]
        masks = [step_mask(batch.asst, batch.documents, i, batch.drawn) for i in range(steps)]
        slots, real = pick_slots(masks[0])
        inputs = self.inputs(batch, slots)
        hidden = self.head(inputs, steps)
        # Zero, yet it touches every parameter: DDP waits for all gradients, also of a rank without trained slots.
        touched = [self.head.logits(h[:1, :1], i).sum() * 0.0 for i, h in enumerate(hidden)]
        loss = sum(touched, torch.zeros((), device=slots.device))
        losses, correct = torch.zeros(steps), torch.zeros(steps)
        for i in range(steps):
            chosen = real & masks[i].gather(1, slots)
            if not bool(chosen.any()):
                continue
            draft = self.head.logits(hidden[i][chosen], i)
            with torch.no_grad():
                teacher = self.teacher_logits(at_slots(inputs.last, slots, 1 + i)[chosen])
            per_slot = self.loss(draft, teacher / self.settings.teacher_temperature)
            loss = loss + self.settings.step_decay**i * per_slot.sum() / counts[i].clamp_min(1)
            labels = at_slots(batch.ids, slots, 2 + i)[chosen]
            losses[i] = per_slot.detach().sum()
            correct[i] = (self.head.to_target(draft.argmax(-1)) == labels).sum()
        return loss, {"loss": losses, "correct": correct}


def slot_counts(asst: Tensor, documents: Tensor, steps: int, drawn: Tensor | None = None) -> Tensor:
    """[steps] trained slots per step of a batch."""
    return torch.stack([step_mask(asst, documents, i, drawn).sum() for i in range(steps)])
