"""Held-out evaluation of a head from features alone: what acceptance it will have, before any generation."""

import dataclasses

import torch
from torch import Tensor

from data.teacher import TopM
from heads.replay import accepted_runs, walk_rounds
from train.batches import Batch
from train.objective import Objective
from train.unroll import at_slots, pick_slots, step_mask

_CHUNK = 256  # slots whose logits exist at one moment: 256 * 49,152 * 4 bytes = 50 MB


@dataclasses.dataclass
class Tally:
    """Sums over slots and rounds; one per route, added up without loss (means are derived, never stored)."""

    slots: Tensor  # [K] slots whose step-i label exists
    joint: Tensor  # [K] of them, all steps 0..i right
    reach: Tensor  # [K] slots whose steps 0..i-1 were right and whose step i exists
    alpha: Tensor  # [K] sum over slots of sum_x min(p, q)
    alpha_greedy: Tensor  # [K] sum over slots of p(argmax q)
    rounds: Tensor  # [K] replayed rounds that accepted more than i
    round_count: int = 0
    emitted: int = 0

    @classmethod
    def empty(cls, steps: int) -> "Tally":
        joint, slots, reach, alpha, greedy, rounds = torch.zeros(6, steps, dtype=torch.float64).unbind(0)
        return cls(slots, joint, reach, alpha, greedy, rounds)

    def add(self, other: "Tally") -> None:
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def figures(self) -> dict[str, object]:
        """Names of metrics.md. `predicted_acceptance_length` is 1 + sum of the joint acceptance of replayed rounds."""
        rounds = max(1, self.round_count)
        return {
            "position_acceptance_joint": (self.joint / self.slots.clamp_min(1)).tolist(),
            "position_acceptance_conditional": (self.joint / self.reach.clamp_min(1)).tolist(),
            "alpha_sum_min": (self.alpha / self.slots.clamp_min(1)).tolist(),
            "alpha_greedy": (self.alpha_greedy / self.slots.clamp_min(1)).tolist(),
            "round_acceptance_joint": (self.rounds / rounds).tolist(),
            "predicted_acceptance_length": 1.0 + float(self.rounds.sum()) / rounds,
            "slots": int(self.slots[0]),
            "rounds": self.round_count,
        }


@torch.no_grad()
def evaluate(objective: Objective, batch: Batch, steps: int, max_tokens: int, alphas: bool = True) -> Tally:
    """Tally of one batch for chains of `steps` drafted tokens, answers cut at `max_tokens`.

    Out-of-vocabulary targets count as rejections; p is the target's full distribution at T = 1.
    """
    head, tally = objective.head, Tally.empty(steps)
    masks = torch.stack([step_mask(batch.asst, batch.documents, i) for i in range(steps)])
    slots, real = pick_slots(masks[0])
    inputs = objective.inputs(batch, slots)
    hidden = head(inputs, steps)
    exists = torch.stack([real & m.gather(1, slots) for m in masks], dim=-1)  # [B, S, K]
    correct = torch.zeros_like(exists)
    for i in range(steps):
        if not bool((chosen := exists[..., i]).any()):
            continue
        rows, taught = hidden[i][chosen], objective.teacher_rows(batch, inputs, slots, i, chosen)
        guesses = []
        for start in range(0, len(rows), _CHUNK):
            here = slice(start, start + _CHUNK)
            logits = head.logits(rows[here], i)
            guesses.append(head.to_target(logits.argmax(-1)))
            if alphas:
                sum_min, greedy = _alphas(objective, logits, guesses[-1], taught[here])
                tally.alpha[i] += sum_min
                tally.alpha_greedy[i] += greedy
        correct[..., i][chosen] = torch.cat(guesses) == at_slots(batch.ids, slots, 2 + i)[chosen]
    right = correct.cumprod(-1).bool()
    before = torch.cat([torch.ones_like(right[..., :1]), right[..., :-1]], dim=-1)
    tally.slots += exists.sum((0, 1)).cpu()
    tally.joint += (right & exists).sum((0, 1)).cpu()
    tally.reach += (before & exists).sum((0, 1)).cpu()
    _replay(tally, batch, slots, real, accepted_runs(correct.flatten(0, 1), exists.flatten(0, 1)), max_tokens)
    return tally


def _alphas(objective: Objective, logits: Tensor, guess: Tensor, taught: Tensor | TopM) -> tuple[float, float]:
    """Sums over slots of sum_x min(p, q) and of p(guess); p over the full vocabulary."""
    rows, p = objective.head.target_rows(), objective.target_logits(taught).softmax(-1)
    greedy = float(p.gather(1, guess[:, None]).sum())
    return float(torch.minimum(p if rows is None else p[:, rows], logits.softmax(-1)).sum()), greedy


def _replay(tally: Tally, batch: Batch, slots: Tensor, real: Tensor, runs: Tensor, max_tokens: int) -> None:
    """Walk each answer the way greedy chain decoding would: a run of consecutive slots is one answer."""
    K = tally.rounds.shape[0]
    runs = runs.view(slots.shape)
    for row in range(slots.shape[0]):
        where, lengths = slots[row][real[row]].tolist(), runs[row][real[row]].tolist()
        start = 0
        for n in range(1, len(where) + 1):
            if n < len(where) and where[n] == where[n - 1] + 1:
                continue
            for accepted, emitted in walk_rounds(lengths[start:n], max_tokens):
                tally.rounds[:accepted] += 1
                tally.round_count += 1
                tally.emitted += emitted
            start = n
    assert bool((tally.rounds <= tally.round_count).all()), (K, tally.rounds, tally.round_count)
