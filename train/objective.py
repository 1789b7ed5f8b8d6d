"""Head + frozen target -> loss of a batch: the only place where masking, weighting and reduction happen."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from data.teacher import TopM
from data.teacher import teacher_logits as top_m_logits
from heads.layers import HeadInput
from heads.lora import Lora
from heads.masks import LayerMasks, document_masks
from heads.target import Target, TargetOutput
from train.batches import Batch
from train.chunked import chunked_sum
from train.losses import Loss
from train.mixture import LossSettings
from train.unroll import at_slots, pick_slots, step_mask


class NonFiniteFeature(ValueError):
    """A captured feature overflowed (float16 above 65504) or is NaN."""


class Objective(nn.Module):
    """`forward(batch, counts)` -> (loss, metrics); counts [J] are the trained slots of the whole optimizer step.

    The loss of step i is the sum over its trained slots / counts[i], so that padding, prompt length, accumulation and
    the number of ranks leave the gradient unchanged. A batch without trained slots gives exactly zero.

    metrics: "loss" and "correct", and by name the terms of a loss of several, unweighted: [J] sums over this batch.
    A head with `regresses = True` also has its hidden state of step i at slot t compared with the target's last feature
    at t + 1 + i. Raises ValueError where `settings.feature` is asked of a head that does not.
    """

    def __init__(self, head: Any, target: Target, settings: LossSettings) -> None:
        super().__init__()
        self.head = head
        self._target = [
            target
        ]  # in a list: the frozen target is no submodule, so no optimizer and no checkpoint sees it
        self.settings = settings
        self.mixture, self.regression = settings.mixture(), settings.regression()
        self.step_weights = settings.weights(head.train_steps)
        self.lora: Lora | None = None  # adapters that learn with the head (train/joint.py)
        self.progress = 0.0  # share of the run that is done when the step under way ends
        self.terms = [*self.mixture, *self.regression] if len(self.mixture) + len(self.regression) > 1 else []
        self.figures = ["loss", "correct", *self.terms]  # names of the metrics
        if self.regression and not head.regresses:
            raise ValueError(
                f"train.loss.feature={settings.feature}: a head of kind {head.config.kind!r} is not trained to predict "
                "the target's features; leave train.loss.feature empty"
            )
        self._rows = head.target_rows()
        weight, bias = target.lm_head(self._rows)
        self._teacher = (weight.detach(), bias)
        self._masks: LayerMasks | None = None

    @property
    def target(self) -> Target:
        return self._target[0]

    def counts(self, batch: Batch) -> Tensor:
        """Trained slots of a batch by column of the metrics: [J], one column for each step of the head."""
        return slot_counts(batch.asst, batch.documents, self.head.train_steps, batch.drawn)

    def weights(self) -> list[float]:
        """Weight of each column in the loss."""
        return self.step_weights

    def features(self, batch: Batch) -> Batch:
        """The batch with the target's features, from a live pass where none were captured.

        Raises NonFiniteFeature naming the tensor and the data row.
        """
        if batch.last is None and batch.top is None:
            output = self._live(batch)
            batch = dataclasses.replace(batch, last=output.last, taps=output.taps)
        for name, tensor in (("last", batch.last), ("taps", batch.taps)):
            if tensor is not None and not torch.isfinite(tensor).all():
                line, at = (~torch.isfinite(tensor)).flatten(2).any(2).nonzero()[0].tolist()
                document = int(batch.documents[line, : at + 1].max())  # of padding: the last one before it
                raise NonFiniteFeature(
                    f"feature tensor {name!r} of data row {batch.rows[document]} is not finite ({tensor.dtype}): "
                    "use target.dtype=bfloat16 or float32"
                )
        return batch

    def inputs(self, batch: Batch, slots: Tensor) -> HeadInput:
        """What the head sees of a batch at its slots."""
        batch = self.features(batch)
        embeddings = self.target.embed(batch.ids)
        # a capture without `last` has none; heads that read it were refused before the run
        last = embeddings.new_empty(*batch.ids.shape, 0) if batch.last is None else batch.last
        return HeadInput(last, batch.taps, embeddings, batch.positions, batch.documents, slots)

    def _live(self, batch: Batch) -> TargetOutput:
        """A pass of the target; documents packed into one line see themselves alone, at positions of their own."""
        grad = self.lora is not None
        with self._own_precision():
            if not batch.packed:
                return self.target.forward(batch.ids, taps=self.head.taps, grad=grad)
            if self._masks is None:
                self._masks = LayerMasks(self.target, "train.packing cannot keep packed conversations apart in them")
            mask = document_masks(self._masks, batch.documents)
            return self.target.forward(batch.ids, taps=self.head.taps, positions=batch.positions, mask=mask, grad=grad)

    def _own_precision(self) -> torch.autocast:
        """Mixed precision is the head's: the target answers as it does when it serves, in `target.dtype`."""
        return torch.autocast(self._teacher[0].device.type, enabled=False)

    def teacher_rows(self, batch: Batch, inputs: HeadInput, slots: Tensor, step: int, chosen: Tensor) -> Tensor | TopM:
        """What teaches `step` at the chosen slots [B, S]: N last features [N, H], or as many kept distributions."""
        if batch.top is None:
            return at_slots(inputs.last, slots, 1 + step)[chosen]
        ids, log_probs, rest = (at_slots(x, slots, 1 + step)[chosen] for x in vars(batch.top).values())
        return TopM(ids, log_probs, rest)

    def teacher_logits(self, rows: Tensor | TopM) -> Tensor:
        """The target's logits over the draft vocabulary [N, D], rebuilt from last features [N, H] or kept top m."""
        if isinstance(rows, TopM):
            return top_m_logits(rows, self.head.vocab_size, self._rows)
        with self._own_precision():
            return self.target.finish_logits(nn.functional.linear(rows.to(self._teacher[0].dtype), *self._teacher))

    def target_logits(self, rows: Tensor | TopM) -> Tensor:
        """The same over the target's whole vocabulary [N, V]."""
        if isinstance(rows, TopM):
            return top_m_logits(rows, self.head.vocab_size)
        return self.target.logits(rows)

    def forward(self, batch: Batch, counts: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        steps = counts.shape[0]
        masks = [step_mask(batch.asst, batch.documents, i, batch.drawn) for i in range(steps)]
        slots, real = pick_slots(masks[0])
        inputs = self.inputs(batch, slots)
        hidden = self.head(inputs, steps)
        # Zero, yet it touches every parameter: DDP waits for all gradients, also of a rank without trained slots.
        touched = [self.head.logits(h[:1, :1], i).sum() * 0.0 for i, h in enumerate(hidden)]
        chosen = [real & mask.gather(1, slots) for mask in masks]
        drafted = [h[where] for h, where in zip(hidden, chosen, strict=True)]
        taught = [self.teacher_rows(batch, inputs, slots, i, where) for i, where in enumerate(chosen)]
        labels = [at_slots(batch.ids, slots, 2 + i)[where] for i, where in enumerate(chosen)]
        shares = [weight / count for weight, count in zip(self.step_weights, counts.clamp_min(1).tolist(), strict=True)]
        sums = {name: torch.zeros(steps, device=slots.device) for name in self.figures}

        def piece(step: int, rows: Tensor, start: int) -> Tensor:
            """Weighted loss of some slots of one step; their logits live here only."""
            here = slice(start, start + len(rows))
            draft = self.head.logits(rows, step)
            with torch.no_grad():
                teacher = self.teacher_logits(taught[step][here]) / self.settings.teacher_temperature
                sums["correct"][step] += (self.head.to_target(draft.argmax(-1)) == labels[step][here]).sum()
            return shares[step] * self._add(self.mixture, draft, teacher, sums, step)

        parameters = [p for p in self.head.parameters() if p.requires_grad]
        loss = sum(touched, torch.zeros((), device=slots.device))
        loss = loss + chunked_sum(piece, drafted, parameters, self.settings.chunk)
        if self.regression:
            for i, (rows, feature) in enumerate(zip(drafted, taught, strict=True)):
                assert isinstance(feature, Tensor), "heads that regress features read them"
                loss = loss + shares[i] * self._add(self.regression, rows, feature, sums, i)
        return loss, sums

    def weighted(self, per_step: Tensor) -> float:
        """The loss of a mean per column."""
        return sum(w * x for w, x in zip(self.weights(), per_step.tolist(), strict=True))

    def _add(
        self, losses: dict[str, tuple[Loss, float]], draft: Tensor, wanted: Tensor, sums: dict[str, Tensor], step: int
    ) -> Tensor:
        """Weighted sum of `losses` over rows of one step; what each gave is added to `sums`."""
        total = torch.zeros((), device=draft.device)
        for name, (loss, weight) in losses.items():
            found = loss(draft, wanted).sum()
            total = total + weight * found
            if name in self.terms:
                sums[name][step] += found.detach()
        sums["loss"][step] += total.detach()
        return total


def slot_counts(asst: Tensor, documents: Tensor, steps: int, drawn: Tensor | None = None) -> Tensor:
    """[steps] trained slots per step of a batch."""
    return torch.stack([step_mask(asst, documents, i, drawn).sum() for i in range(steps)])
