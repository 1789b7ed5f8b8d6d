"""KV cache with one length per sequence: writing goes past the pointer, rolling back only moves it.

It acts as a transformers `Cache`. A pass over ids [B, T] writes T new entries at lengths[b] .. lengths[b]+T-1 of
sequence b and moves nothing; `keep` then says how much of it is real. Entries past the pointer are left as they are:
the next pass overwrites them, and the mask never shows them.

    lengths [7], pass of 5 ids (last token + 4 drafts) -> entries 7..11 written, lengths still [7]
    1 draft accepted -> keep([9]): entries 7, 8 are now part of the sequence; 9..11 are left-over
    next pass writes 9.. again

A drafted tree is written the same way, one entry per node in row order; `accept` moves the nodes of the accepted path
to the front. A node's position is that of its depth, so entries and positions agree again once it is moved.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from eval.tree import ancestors, depths
from heads.target import Target

ROLLS_BACK = {"full_attention", "sliding_attention"}


class KVCache(Cache):
    """Preallocated keys and values [B, kv heads, capacity, head dim] per layer; capacity doubles when it is short.

    A pass covers the rows first..last-1 of the batch (`rows`): all of them, or one while a new prompt is read.
    """

    def __init__(self, batch: int = 1, capacity: int = 256) -> None:
        super().__init__(layers=[])
        self.lengths = [0] * batch
        self.first, self.last = 0, batch
        self.capacity = capacity
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._ragged: tuple[Tensor, Tensor] | None = None

    @contextlib.contextmanager
    def rows(self, first: int, last: int) -> Iterator["KVCache"]:
        """Passes inside cover these rows only."""
        held = self.first, self.last
        self.first, self.last = first, last
        try:
            yield self
        finally:
            self.first, self.last = held

    @property
    def active(self) -> list[int]:
        """Lengths of the rows a pass covers."""
        return self.lengths[self.first : self.last]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [B, kv heads, T, head dim] at the pointers; return views up to the longest written entry."""
        B, N, T, D = key_states.shape
        lengths = self.active
        if B != len(lengths):
            raise ValueError(f"the cache holds {len(lengths)} sequences, the pass has {B}")
        end = max(lengths) + T
        if layer_idx == len(self.keys):
            # zeros, not empty: a masked NaN would still poison the row (0 * NaN)
            batch = len(self.lengths)
            self.keys.append(key_states.new_zeros(batch, N, self.capacity, D))
            self.values.append(value_states.new_zeros(batch, N, self.capacity, value_states.shape[-1]))
        if end > self.keys[layer_idx].shape[2]:
            self._grow(layer_idx, end)
        keys, values = self.keys[layer_idx][self.first : self.last], self.values[layer_idx][self.first : self.last]
        if min(lengths) == end - T:
            keys[:, :, end - T : end] = key_states
            values[:, :, end - T : end] = value_states
        else:
            if layer_idx == 0 or self._ragged is None:  # the same for every layer of a pass
                rows = torch.arange(B, device=keys.device).unsqueeze(1)
                self._ragged = rows, self.positions(T, keys.device)
            rows, at = self._ragged
            keys[rows, :, at] = key_states.transpose(1, 2)
            values[rows, :, at] = value_states.transpose(1, 2)
        return keys[:, :, :end], values[:, :, :end]

    def keep(self, lengths: Sequence[int]) -> None:
        """Move the pointers of the rows a pass covers: forward over what it wrote, or back."""
        written = self.keys[0].shape[2] if self.keys else 0
        assert len(lengths) == len(self.active), f"{len(lengths)} lengths for {len(self.active)} sequences"
        assert all(0 <= n <= written for n in lengths), f"lengths {lengths} outside the {written} entries held"
        self.lengths[self.first : self.last] = lengths

    def accept(self, row: int, path: Sequence[int]) -> None:
        """Keep the newest token and the accepted nodes of a drafted tree, rows `path` of the pass from the top down.

        lengths [7], parents [0, 0, 1, 2], path [2, 4]: entry 7 stays, entries 9 and 11 move to 8 and 9, lengths [10].
        """
        start = self.lengths[row] + 1
        moved = next((i for i, node in enumerate(path) if node != i + 1), len(path))  # a chain moves nothing
        if moved < len(path):
            source = [start - 1 + node for node in path[moved:]]
            for held in (*self.keys, *self.values):
                held[row, :, start + moved : start + len(path)] = held[row, :, source]
        self.lengths[row] = start + len(path)

    def move(self, source: int, target: int) -> None:
        """Row `source` becomes row `target` (and is free)."""
        n = self.lengths[source]
        for held in (*self.keys, *self.values):
            held[target, :, :n] = held[source, :, :n]
        self.lengths[target], self.lengths[source] = n, 0

    def positions(self, T: int, device: torch.device | None = None) -> Tensor:
        """Position ids [B, T] of the next T tokens of a text."""
        return torch.tensor(self.active, device=device).unsqueeze(1) + torch.arange(T, device=device)

    def mask(self, T: int, device: torch.device | None = None, window: int | None = None) -> Tensor:
        """What the next T tokens of a text may see: bool [B, 1, T, longest + T]; entry j of sequence b at row t iff
        j <= own position (and within the last `window` positions, own one counted)."""
        at = self.positions(T, device).unsqueeze(-1)
        entry = torch.arange(max(self.active) + T, device=device)
        seen = entry <= at
        if window is not None:
            seen = seen & (entry > at - window)
        return seen.unsqueeze(1)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.active)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return max(self.active) + query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return max(self.active)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def _grow(self, layer_idx: int, needed: int) -> None:
        while self.capacity < needed:
            self.capacity *= 2
        for held in (self.keys, self.values):
            old = held[layer_idx]
            held[layer_idx] = old.new_zeros(*old.shape[:2], self.capacity, old.shape[3])
            held[layer_idx][:, :, : old.shape[2]] = old


class Trees:
    """A pass over one drafted tree per sequence (eval/tree.py), each below its newest token; a chain is one of width 1.

    Trees of fewer than T - 1 nodes leave rows over: those see the sequence and themselves, and are never read.
    """

    def __init__(self, parents: Sequence[Sequence[int]]) -> None:
        self.T = 1 + max(map(len, parents))
        self.seen = torch.eye(self.T, dtype=torch.bool).repeat(len(parents), 1, 1)  # [B, T, T]
        self.depth = torch.zeros(len(parents), self.T, dtype=torch.long)
        for b, tree in enumerate(parents):
            n = len(tree) + 1
            self.seen[b, :n, :n] = ancestors(tree)
            self.depth[b, :n] = torch.tensor(depths(tree))

    def positions(self, cache: KVCache, device: torch.device | None = None) -> Tensor:
        """Position ids [B, T]: that of a node's depth, wherever its entry lies."""
        return (torch.tensor(cache.active).unsqueeze(1) + self.depth).to(device)

    def mask(self, cache: KVCache, device: torch.device | None = None, window: int | None = None) -> Tensor:
        """bool [B, 1, T, longest + T]: a row sees the sequence, its ancestors and itself, within `window` positions."""
        lengths, T = cache.active, self.T
        mask = torch.zeros(len(lengths), 1, T, max(lengths) + T, dtype=torch.bool)
        for b, n in enumerate(lengths):
            mask[b, :, :, :n] = True
            mask[b, 0, :, n : n + T] = self.seen[b]
            if window is not None:
                entry = torch.arange(mask.shape[-1])  # the position that each entry stands for
                entry[n : n + T] = n + self.depth[b]
                mask[b, 0] &= entry > (n + self.depth[b] - window).unsqueeze(1)
        return mask.to(device)


class AttentionMasks:
    """The 4-D masks a target needs per pass: windowed where its layers are, in the form its attention takes."""

    def __init__(self, target: Target) -> None:
        config, name = target.config, target.spec.name
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if bad := sorted(kinds - ROLLS_BACK):
            raise ValueError(
                f"target {name!r} has layers of type {', '.join(bad)}: their state cannot roll back after a refused "
                "draft; use a target with full or sliding-window attention only"
            )
        if getattr(config, "num_kv_shared_layers", 0):
            raise ValueError(f"target {name!r} shares KV between layers, which drafthead's cache does not hold")
        self.kinds = kinds
        self.window = getattr(config, "sliding_window", None)
        if "sliding_attention" in kinds and self.window is None:
            raise ValueError(f"target {name!r} has sliding-window layers but its config gives no sliding_window")
        self.uniform_window = None
        if not getattr(config, "layer_types", None) and getattr(config, "use_sliding_window", True):
            self.uniform_window = self.window  # Mistral: every layer
        self.additive = getattr(config, "_attn_implementation", "sdpa") == "eager"
        self.dtype = next(target.model.parameters()).dtype

    def __call__(self, cache: KVCache, rows: "int | Trees", device: torch.device | None = None) -> Any:
        """Mask of a pass over T tokens of text (int) or over drafted trees: [B, 1, T, KV], a dict of them per layer
        type, or None where plain causal attention is the same."""
        if len(self.kinds) > 1:
            return {kind: self._one(cache, rows, device, kind == "sliding_attention") for kind in sorted(self.kinds)}
        sliding = self.kinds == {"sliding_attention"} or self.uniform_window is not None
        T = rows if isinstance(rows, int) else rows.T
        lengths = cache.active
        alone = min(lengths) == max(lengths)
        fits = not sliding or max(lengths) + T <= (self.window or 0)
        # one query over its whole cache, or a first pass: attention's own causal path is exact, and needs no mask
        if alone and fits and not self.additive and (T == 1 or (isinstance(rows, int) and lengths[0] == 0)):
            return None
        mask = self._one(cache, rows, device, sliding)
        return {"sliding_attention": mask} if self.kinds == {"sliding_attention"} else mask

    def _one(self, cache: KVCache, rows: "int | Trees", device: torch.device | None, sliding: bool) -> Tensor:
        window = self.window if sliding else None
        return self.as_asked(
            cache.mask(rows, device, window) if isinstance(rows, int) else rows.mask(cache, device, window)
        )

    def as_asked(self, mask: Tensor) -> Tensor:
        """A mask, bool and true where seen, in the form the target's attention takes."""
        if not self.additive:
            return mask
        added = torch.zeros(mask.shape, dtype=self.dtype, device=mask.device)
        return added.masked_fill(~mask, torch.finfo(self.dtype).min)
