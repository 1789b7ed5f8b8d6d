"""Where new entries of a draft cache go in decoding: rows of a batch subset, ragged counts, nodes of a draft tree.

A head only asks its cache for `positions(n)` and hands it `write(keys, values, layer)` (heads/layers.py). What it is
given in decoding is a `Placement`, which answers both for some rows and moves no pointer. Two of them, for a cache of
three sequences with lengths [7, 4, 9]:

    true_slots(cache, [0, 2], [3, 1])   entries 7..9 of row 0 and 9 of row 2 (10, 11 are padding: past the pointer, so
                                        never read, and overwritten by the next pass); `cache.extend` then moves it
    Drafts(cache, [0, 2])               the tree below them: level 1 at entries 7.. and 9.., level 2 behind it; each
                                        node sees the true entries and its own path, at the position of its depth
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from heads.layers import LayerCache


class Placement:
    """n new entries of S rows: `where` [S, n] entries, `at` [S, n] position ids, `seen` [S, 1, n, longest] bool."""

    def __init__(self, cache: LayerCache, rows: Sequence[int], starts: Sequence[int], at: Tensor, seen: Tensor) -> None:
        self.cache, self.rows, self.starts = cache, list(rows), list(starts)
        self.at, self.seen = at, seen

    def positions(self, n: int) -> Tensor:
        assert n == self.at.shape[1], f"{n} entries are written, {self.at.shape[1]} were placed"
        return self.at

    def write(self, keys: Tensor, values: Tensor, layer: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Place [S, KV, n, d]; returns keys, values [S, KV, longest, d] and the mask [S, 1, n, longest]."""
        n, longest = keys.shape[2], self.seen.shape[-1]
        held_keys, held_values = self.cache.room(keys, layer, longest)
        for i, (row, start) in enumerate(zip(self.rows, self.starts, strict=True)):
            held_keys[row, :, start : start + n] = keys[i]
            held_values[row, :, start : start + n] = values[i]
        return self._of(held_keys, longest), self._of(held_values, longest), self.seen.to(keys.device)

    def read(self, layer: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """What the rows hold, new entries left out: keys, values [S, KV, longest, d], mask [S, 1, 1, longest]."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        assert keys is not None and values is not None, "nothing written yet"
        lengths = self.cache.lengths[self.rows]
        longest = int(lengths.max())
        mask = torch.arange(longest) < lengths[:, None]
        return self._of(keys, longest), self._of(values, longest), mask[:, None, None].to(keys.device)

    def _of(self, held: Tensor, longest: int) -> Tensor:
        first, S = self.rows[0], len(self.rows)
        if self.rows == list(range(first, first + S)):
            return held[first : first + S, :, :longest]  # a view: the usual case needs no copy
        return held[self.rows, :, :longest]


def true_slots(cache: LayerCache, rows: Sequence[int], counts: Sequence[int]) -> Placement:
    """The next true entries of `rows`, causal, `counts` of them real and the rest padding at the right."""
    n, starts = max(counts), cache.lengths[list(rows)]
    at = starts[:, None] + torch.arange(n)
    longest = int(starts.max()) + n
    return Placement(cache, rows, starts.tolist(), at, (torch.arange(longest) <= at[:, :, None])[:, None])


class Drafts:
    """The drafted entries of a round, one block of a common width per level, behind the true entries of each row."""

    def __init__(self, cache: LayerCache, rows: Sequence[int]) -> None:
        self.cache, self.rows = cache, list(rows)
        self.starts = cache.lengths[self.rows].tolist()
        self.seen = torch.zeros(len(self.rows), 0, 0, dtype=torch.bool)  # [S, entries, entries] of this round
        self.previous = 0  # first entry of the level before
        self.depth = 0

    def level(self, rows: Sequence[int], sources: Sequence[Sequence[int]]) -> Placement:
        """One more level of the rows that still grow: sources[i][j] is the place, in row i's level before, of the node
        below which new node j hangs (any value on the first level: those hang below the true entries)."""
        kept = [self.rows.index(row) for row in rows]
        if len(kept) < len(self.rows):
            self.rows, self.starts = list(rows), [self.starts[i] for i in kept]
            self.seen = self.seen[kept]
        S, held, n = len(kept), self.seen.shape[1], max(map(len, sources))
        seen = torch.zeros(S, held + n, held + n, dtype=torch.bool)
        seen[:, :held, :held] = self.seen
        for i, found in enumerate(sources):
            if self.depth:
                seen[i, held : held + len(found), :held] = self.seen[i, [self.previous + j for j in found]]
        seen[:, range(held, held + n), range(held, held + n)] = True
        self.seen = seen
        placed = self._placed(held, n)
        self.previous, self.depth = held, self.depth + 1
        return placed

    def _placed(self, held: int, n: int) -> Placement:
        longest = max(self.starts) + held + n
        mask = torch.zeros(len(self.rows), 1, n, longest, dtype=torch.bool)
        for i, start in enumerate(self.starts):
            mask[i, :, :, :start] = True
            mask[i, 0, :, start : start + held + n] = self.seen[i, held:]
        at = torch.tensor(self.starts)[:, None] + torch.full((1, n), self.depth)
        return Placement(self.cache, self.rows, [start + held for start in self.starts], at, mask)
