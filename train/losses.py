"""Distillation losses, one signature: (draft_logits [N, D], target_logits [N, D]) -> loss per position [N].

Teacher logits of a reduced vocabulary are the target's restricted to D: their softmax is the target's distribution over
the full vocabulary, restricted and renormalised. Masking, weighting and reduction happen in one caller (objective.py).
All in fp32 whatever the model's dtype.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def kl(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """KL(p || q) = sum_x p (log p - log q): soft cross-entropy less the teacher's entropy (Hinton 2015)."""
    log_q, log_p = draft_logits.float().log_softmax(-1), target_logits.float().log_softmax(-1)
    return F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)


def reverse_kl(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """KL(q || p): mode-seeking, pays for mass the target does not have (DistillSpec, arXiv 2310.08461)."""
    return kl(target_logits, draft_logits)


def cross_entropy(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """-log q(argmax p): the hard label is the target's own greedy choice (Medusa, arXiv 2401.10774, section 2.2)."""
    return F.cross_entropy(draft_logits.float(), target_logits.argmax(-1), reduction="none")


def total_variation(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """1 - sum_x min(p, q): the rejection probability itself (DistillSpec, section 3)."""
    return 0.5 * (draft_logits.float().softmax(-1) - target_logits.float().softmax(-1)).abs().sum(-1)


def neg_log_alpha(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """-log sum_x min(p, q): acceptance optimised directly, without the vanishing gradient of total variation."""
    q, p = draft_logits.float().softmax(-1), target_logits.float().softmax(-1)
    return -torch.minimum(p, q).sum(-1).clamp_min(1e-8).log()


Loss = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "kl": kl,
    "reverse_kl": reverse_kl,
    "cross_entropy": cross_entropy,
    "total_variation": total_variation,
    "neg_log_alpha": neg_log_alpha,
}
