"""Batched decoding by the target: one prefill, then one token a step for every unfinished answer of the batch.

Randomness is keyed by (seed, row key, turn): an answer's draws do not depend on which other rows share its batch.
Finished answers leave the batch at once: beyond a few rows a step costs in proportion to its rows.
"""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from heads.target import Target

NUCLEUS_GUESSES = (256, 4096)  # tried before sorting the whole vocabulary, which costs as much as the target's layers
CHUNK = 64


def uniforms(seed: int, key: str, turn: int, count: int) -> Tensor:
    """`count` float64 draws in [0, 1) that belong to one answer alone."""
    digest = hashlib.sha256(f"{seed}:{key}:{turn}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.rand(count, generator=generator, dtype=torch.float64)


def sample(logits: Tensor, draws: Tensor, temperature: float, top_p: float) -> Tensor:
    """Token ids [B] from fp32 logits [B, V] by inverse CDF at `draws` [B]; temperature 0 is the argmax.

    top_p keeps the smallest set of most probable tokens whose mass reaches top_p.
    """
    if temperature == 0:
        return logits.argmax(-1)
    probs = torch.softmax(logits.float() / temperature, dim=-1)
    if top_p >= 1:
        return _inverse_cdf(probs, draws)
    tokens = torch.empty_like(probs[:, 0], dtype=torch.long)
    rows = torch.arange(len(probs), device=probs.device)
    for guess in (*NUCLEUS_GUESSES, probs.shape[-1]):
        values, candidates = probs[rows].topk(min(guess, probs.shape[-1]), dim=-1)
        before = values.double().cumsum(-1) - values
        enough = (before[:, -1] + values[:, -1] >= top_p) | (guess >= probs.shape[-1])
        drawn = _inverse_cdf(values * (before < top_p), draws.to(probs.device)[rows])
        tokens[rows] = torch.where(enough, candidates.gather(-1, drawn[:, None])[:, 0], 0)
        rows = rows[~enough]
        if not len(rows):
            break
    return tokens


def _inverse_cdf(weights: Tensor, draws: Tensor) -> Tensor:
    """Index [B] of the first cumulative weight above draw * total; a weight of zero is never drawn."""
    cumulative = weights.double().cumsum(-1)
    target = (draws.to(weights.device) * cumulative[:, -1])[:, None]
    found = torch.searchsorted(cumulative, target, right=True)[:, 0]
    last = (weights > 0).double().cumsum(-1).argmax(-1)  # rounding may put the target on the total itself
    return torch.minimum(found, last)


class _RoomyLayer(DynamicLayer):
    """Keys and values with spare room: appending a token copies that token, not the whole cache."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        B, heads, T, dim = key_states.shape
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.length, self.room = 0, key_states.new_empty(2, B, heads, T + CHUNK, dim)
        if self.length + T > self.room.shape[3]:
            grown = self.room.new_empty(2, B, heads, self.length + T + CHUNK, dim)
            grown[:, :, :, : self.length] = self.room[:, :, :, : self.length]
            self.room = grown
        self.room[0, :, :, self.length : self.length + T] = key_states
        self.room[1, :, :, self.length : self.length + T] = value_states
        self.length += T
        self._show()
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        self.room = self.room[:, indices]
        self._show()

    def _show(self) -> None:
        self.keys, self.values = self.room[0, :, :, : self.length], self.room[1, :, :, : self.length]


def _cache(target: Target) -> DynamicCache:
    cache = DynamicCache(config=target.config)
    if all(type(layer) is DynamicLayer for layer in cache.layers):
        cache.layers = [_RoomyLayer() for _ in cache.layers]
    return cache


@torch.inference_mode()
def generate(
    target: Target,
    prompts: list[list[int]],
    draws: list[Tensor],
    temperature: float,
    top_p: float,
    max_new_tokens: int,
    on_step: Callable[[int], None] = lambda tokens: None,
) -> list[list[int]]:
    """Exact output ids of each prompt, the end-of-turn id included where one was produced within max_new_tokens.

    `draws[i]` holds the max_new_tokens uniforms of row i. Ids above the tokenizer's (a padded vocabulary) are not
    drawn: no text could hold them.
    """
    lengths = torch.tensor([len(p) for p in prompts])
    widest = int(lengths.max())
    ids = torch.tensor([[0] * (widest - len(p)) + p for p in prompts], device=target.device)
    mask = (torch.arange(widest) >= (widest - lengths)[:, None]).to(target.device).long()
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    cache = _cache(target)
    outputs: list[list[int]] = [[] for _ in prompts]
    active = torch.arange(len(prompts))
    for step in range(max_new_tokens):
        last = target.forward(ids, cache=cache, positions=positions, mask=mask).last[:, -1]
        logits = target.logits(last)[:, : target.spec.tokenizer_size]
        tokens = sample(logits, torch.stack([draws[i][step] for i in active.tolist()]), temperature, top_p).cpu()
        for row, token in zip(active.tolist(), tokens.tolist(), strict=True):
            outputs[row].append(token)
        on_step(len(active))
        going = torch.tensor([token not in target.eos_ids for token in tokens.tolist()])
        if not going.all():
            kept = going.nonzero()[:, 0]
            if not len(kept):
                break
            cache.batch_select_indices(kept.to(target.device))
            active, tokens, mask, positions = active[kept], tokens[kept], mask[kept], positions[kept]
        ids = tokens[:, None].to(target.device)
        mask = torch.cat([mask, mask.new_ones(len(active), 1)], dim=1)
        positions = positions[:, -1:] + 1
    return outputs
