"""The target's distribution kept as its m most likely tokens, so that training needs neither `last` nor an LM head.

p is the target's softmax over all V ids. Kept are the top m of it and the log of the mass outside them; what stands in
for p is the distribution that spreads that mass evenly over the V - m other ids:

    p'(x) = p(x)                              for x among the top m
          = (1 - sum of the top m) / (V - m)  for every other x

    V = 5, m = 2    p  = [.05, .50, .30, .10, .05]
                    p' = [.067, .50, .30, .067, .067]

p' sums to 1, equals p at m = V, and is restricted to a draft vocabulary and renormalised as p would be. Its total
variation from p is at most the mass outside the top m. A top m alone, renormalised, would teach the head that nothing
else is ever said.
"""

import dataclasses
import math

import torch
from torch import Tensor


@dataclasses.dataclass
class TopM:
    """Rows of kept distributions, any leading shape [...]."""

    ids: Tensor  # int32 [..., m] target ids, most likely first
    log_probs: Tensor  # fp32 [..., m] log p of them, over the full vocabulary
    log_rest: Tensor  # fp32 [...] log of the mass outside them; -inf where there is none

    def __getitem__(self, index: Tensor | slice) -> "TopM":
        return TopM(self.ids[index], self.log_probs[index], self.log_rest[index])

    def to(self, device: torch.device) -> "TopM":
        return TopM(self.ids.to(device), self.log_probs.to(device), self.log_rest.to(device))


def top_m(logits: Tensor, m: int) -> TopM:
    """The m most likely tokens of fp32 logits [N, V]; m <= V."""
    V = logits.shape[-1]
    log_p = logits.float().log_softmax(-1)
    kept, ids = log_p.topk(m, dim=-1)
    if m == V:
        rest = torch.full(kept.shape[:-1], -math.inf, device=logits.device)
    else:  # summed over the others, not 1 - sum: that would lose a rest below 1e-7
        rest = log_p.scatter(-1, ids, -math.inf).logsumexp(-1)
    return TopM(ids.to(torch.int32), kept, rest)


def teacher_logits(kept: TopM, vocab_size: int, rows: Tensor | None = None) -> Tensor:
    """log p' [N, V], or of the draft vocabulary `rows` [D] alone (softmax renormalises it) [N, D]."""
    N, m = kept.ids.shape
    rest = kept.log_rest - math.log(max(1, vocab_size - m))
    ids = kept.ids.long()
    if rows is None:
        return rest[:, None].repeat(1, vocab_size).scatter(1, ids, kept.log_probs)
    D = rows.shape[0]
    column = torch.full((vocab_size,), D, device=ids.device)  # ids outside the draft vocabulary go to a column of waste
    column[rows] = torch.arange(D, device=ids.device)
    return rest[:, None].repeat(1, D + 1).scatter(1, column[ids], kept.log_probs)[:, :D]
