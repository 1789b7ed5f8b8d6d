"""Distillation losses, one signature: (draft_logits [N, D], target_logits [N, D]) -> loss per position [N].

Feature losses have the same one with features [N, H] in place of logits. Teacher logits of a reduced vocabulary are the
target's restricted to D: their softmax is the target's distribution over the full vocabulary, restricted and
renormalised. Masking, weighting and reduction happen in one caller (objective.py). All in fp32 whatever the model's
dtype. Formulas beside each other, and when to use which: docs/training.md.
"""

import math
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


def js(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """(KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2: symmetric, at most log 2 (DistillSpec, section 3)."""
    log_q, log_p = draft_logits.float().log_softmax(-1), target_logits.float().log_softmax(-1)
    log_m = torch.logaddexp(log_q, log_p) - math.log(2)
    both = [F.kl_div(log_m, log_x, log_target=True, reduction="none").sum(-1) for log_x in (log_p, log_q)]
    return 0.5 * (both[0] + both[1])


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


def top_m(draft_logits: Tensor, target_logits: Tensor, m: int = 10) -> Tensor:
    """-sum of p log q over the target's m most likely tokens, p not renormalised (HASS, arXiv 2408.15766, section 3.1).

    Zero nowhere: like a cross-entropy it keeps the teacher's entropy.
    """
    top, where = target_logits.float().softmax(-1).topk(min(m, target_logits.shape[-1]), dim=-1)
    return -(top * draft_logits.float().log_softmax(-1).gather(-1, where)).sum(-1)


def smooth_l1(draft_features: Tensor, target_features: Tensor) -> Tensor:
    """Huber loss with threshold 1, mean over H: the feature regression of EAGLE-1 (arXiv 2401.15077, section 4.2)."""
    return F.smooth_l1_loss(draft_features.float(), target_features.float(), reduction="none").mean(-1)


Loss = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "kl": kl,
    "reverse_kl": reverse_kl,
    "js": js,
    "cross_entropy": cross_entropy,
    "total_variation": total_variation,
    "neg_log_alpha": neg_log_alpha,
    "top_m": top_m,
}
FEATURE_LOSSES: dict[str, Loss] = {"smooth_l1": smooth_l1}
