"""KV cache with one length per sequence: writing goes past the pointer, rolling back only moves it.

It acts as a transformers `Cache`. A pass over ids [B, T] writes T new entries at lengths[b] .. lengths[b]+T-1 of
sequence b and moves nothing; `keep` then says how much of it is real. Entries past the pointer are left as they are:
the next pass overwrites them, and the mask never shows them.

    lengths [7], pass of 5 ids (last token + 4 drafts) -> entries 7..11 written, lengths still [7]
    1 draft accepted -> keep([9]): entries 7, 8 are now part of the sequence; 9..11 are left-over
    next pass writes 9.. again
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from heads.masks import LayerMasks
from heads.target import Target


class KVCache(Cache):
    """Preallocated keys and values [B, kv heads, capacity, head dim] per layer; capacity doubles when it is short."""

    def __init__(self, batch: int = 1, capacity: int = 256) -> None:
        super().__init__(layers=[])
        self.lengths = [0] * batch
        self.capacity = capacity
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [B, kv heads, T, head dim] at the pointers; return views up to the longest written entry."""
        B, N, T, D = key_states.shape
        if B != len(self.lengths):
            raise ValueError(f"the cache holds {len(self.lengths)} sequences, the pass has {B}")
        end = max(self.lengths) + T
        if layer_idx == len(self.keys):
            # zeros, not empty: a masked NaN would still poison the row (0 * NaN)
            self.keys.append(key_states.new_zeros(B, N, self.capacity, D))
            self.values.append(value_states.new_zeros(B, N, self.capacity, value_states.shape[-1]))
        if end > self.keys[layer_idx].shape[2]:
            self._grow(layer_idx, end)
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        if len(set(self.lengths)) == 1:
            keys[:, :, end - T : end] = key_states
            values[:, :, end - T : end] = value_states
        else:
            rows = torch.arange(B, device=keys.device).unsqueeze(1)
            at = torch.tensor(self.lengths, device=keys.device).unsqueeze(1) + torch.arange(T, device=keys.device)
            keys[rows, :, at] = key_states.transpose(1, 2)
            values[rows, :, at] = value_states.transpose(1, 2)
        return keys[:, :, :end], values[:, :, :end]

    def keep(self, lengths: Sequence[int]) -> None:
        """Move the pointers: forward over what a pass wrote, or back."""
        written = self.keys[0].shape[2] if self.keys else 0
        assert len(lengths) == len(self.lengths), f"{len(lengths)} lengths for {len(self.lengths)} sequences"
        assert all(0 <= n <= written for n in lengths), f"lengths {lengths} outside the {written} entries held"
        self.lengths = list(lengths)

    def positions(self, T: int, device: torch.device | None = None) -> Tensor:
        """Position ids [B, T] of the next T tokens."""
        return torch.tensor(self.lengths, device=device).unsqueeze(1) + torch.arange(T, device=device)

    def mask(self, T: int, device: torch.device | None = None, window: int | None = None) -> Tensor:
        """What the next T tokens may see: bool [B, 1, T, longest + T]; entry j of sequence b at row t iff j <= own
        position (and within the last `window` positions, own one counted)."""
        at = self.positions(T, device).unsqueeze(-1)
        entry = torch.arange(max(self.lengths) + T, device=device)
        seen = entry <= at
        if window is not None:
            seen = seen & (entry > at - window)
        return seen.unsqueeze(1)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.lengths)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return max(self.lengths) + query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return max(self.lengths)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def _grow(self, layer_idx: int, needed: int) -> None:
        while self.capacity < needed:
            self.capacity *= 2
        for held in (self.keys, self.values):
            old = held[layer_idx]
            held[layer_idx] = old.new_zeros(*old.shape[:2], self.capacity, old.shape[3])
            held[layer_idx][:, :, : old.shape[2]] = old


class AttentionMasks:
    """The 4-D masks a target needs per pass: windowed where its layers are, in the form its attention takes."""

    def __init__(self, target: Target) -> None:
        self.layers = LayerMasks(target, "their state cannot roll back after a refused draft")
        if getattr(target.config, "num_kv_shared_layers", 0):
            raise ValueError(
                f"target {target.spec.name!r} shares KV between layers, which drafthead's cache does not hold"
            )

    def __call__(self, cache: KVCache, T: int, device: torch.device | None = None) -> Any:
        """Mask [B, 1, T, KV], a dict of them per layer type, or None where plain causal attention is the same."""
        layers = self.layers
        alone = len(set(cache.lengths)) == 1
        fits = not layers.slides or max(cache.lengths) + T <= (layers.window or 0)
        # one query over its whole cache, or a first pass: attention's own causal path is exact, and needs no mask
        if len(layers.kinds) == 1 and alone and fits and not layers.additive and (T == 1 or cache.lengths[0] == 0):
            return None
        return layers(lambda window: cache.mask(T, device, window))
