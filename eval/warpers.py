"""Logits -> probabilities: the same warpers on the plain path, the verifier's p and the draft's q.

Order (transformers'): logit bias, repetition penalty, temperature, top-k, top-p, min-p, each on the survivors of the
one before.
"""

from collections.abc import Sequence
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
    # 1 = off; logits of tokens in the prefix: positive ones divided by it, negative ones multiplied (1909.05858, 4.1)
    repetition_penalty: float = 1.0

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
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}; give a positive number (1 = off)")


def biased(logits: Tensor, warpers: Warpers, seen: Tensor | None = None) -> Tensor:
    """Logits [..., V] in fp32, bias added, tokens `seen` (bool [..., V]) penalised; a copy only where any is asked."""
    logits = logits.float()
    if warpers.logit_bias:
        logits = logits.clone()
    for token, bias in warpers.logit_bias.items():
        if not 0 <= int(token) < logits.shape[-1]:
            raise ValueError(f"logit_bias names token {token}, the vocabulary has {logits.shape[-1]} entries")
        logits[..., int(token)] += bias
    if warpers.repetition_penalty != 1:
        assert seen is not None, "a repetition penalty needs to know each row's prefix"
        penalised = torch.where(logits > 0, logits / warpers.repetition_penalty, logits * warpers.repetition_penalty)
        logits = torch.where(seen, penalised, logits)
    return logits


def seen_by_row(prefix: Tensor, draft: Sequence[int], parents: Sequence[int]) -> Tensor:
    """Tokens in the prefix of every row of a target pass over a drafted tree (eval/tree.py): bool [N+1, V].

    `prefix` [V] marks prompt and output, newest token included; a row adds the drafts on its own path only.
    prefix {5}, draft [7, 8, 9], parents [0, 0, 1] -> {5}, {5, 7}, {5, 8}, {5, 7, 9}.
    """
    rows = [prefix]
    for token, parent in zip(draft, parents, strict=True):
        row = rows[parent].clone()
        row[token] = True
        rows.append(row)
    return torch.stack(rows)


def warp(logits: Tensor, warpers: Warpers, seen: Tensor | None = None) -> Tensor:
    """Logits [..., V] -> probabilities [..., V], fp32, sum 1. Temperature 0 gives a one-hot row (lowest id on ties).

    `seen`, bool [..., V]: the tokens of each row's own prefix; needed for a repetition penalty only.
    """
    logits = biased(logits, warpers, seen)
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
