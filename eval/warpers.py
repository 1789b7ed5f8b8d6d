"""Logits -> probabilities: the same warpers on the plain path, the verifier's p and the draft's q.

Order (transformers'): logit bias, temperature, top-k, top-p, min-p, each on the survivors of the one before.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

TOP_P_SLACK = 1e-6  # fp32 cumulative sums: .5 + .3 must count as .8, or the nucleus gains a token


@dataclass
class Warpers:
    """How a distribution is made from logits. temperature 0 = greedy (one-hot at the highest biased logit)."""

    temperature: float = 0.0
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off
    min_p: float = 0.0  # 0 = off; keep tokens with at least this share of the most likely one
    logit_bias: dict[int, float] = field(default_factory=dict)  # token id -> added to its logit

    def check(self) -> None:
        """Refuse values that mean nothing, before any work."""
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}; give 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; give 0 (off) or a positive count")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; give a number above 0 and at most 1 (1 = off)")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}; give a number between 0 (off) and 1")


def biased(logits: Tensor, warpers: Warpers) -> Tensor:
    """Logits [..., V] in fp32 with the bias added (a copy only when there is one)."""
    logits = logits.float()
    if not warpers.logit_bias:
        return logits
    logits = logits.clone()
    for token, bias in warpers.logit_bias.items():
        if not 0 <= int(token) < logits.shape[-1]:
            raise ValueError(f"logit_bias names token {token}, the vocabulary has {logits.shape[-1]} entries")
        logits[..., int(token)] += bias
    return logits


def warp(logits: Tensor, warpers: Warpers) -> Tensor:
    """Logits [..., V] -> probabilities [..., V], fp32, sum 1. Temperature 0 gives a one-hot row (lowest id on ties)."""
    logits = biased(logits, warpers)
    if warpers.temperature == 0:
        return one_hot(logits.argmax(-1), logits.shape[-1])
    logits = logits / warpers.temperature
    if 0 < warpers.top_k < logits.shape[-1]:
        kth = logits.topk(warpers.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    probs = logits.softmax(-1)
    if warpers.top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        drop = torch.zeros_like(probs, dtype=torch.bool).scatter(-1, order, before >= warpers.top_p - TOP_P_SLACK)
        probs = probs.masked_fill(drop, 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    if warpers.min_p > 0:
        probs = probs.masked_fill(probs < warpers.min_p * probs.amax(-1, keepdim=True), 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def one_hot(tokens: Tensor, vocab_size: int) -> Tensor:
    """Token ids [...] -> point masses [..., V], fp32."""
    return torch.nn.functional.one_hot(tokens, vocab_size).float()
