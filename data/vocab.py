"""The reduced draft vocabulary: which target ids a draft head may propose, chosen from the tokens that carry loss.

    kept = [0, 3, 4, 9, 15] of V = 20     d2t = kept - arange(5) = [0, 2, 2, 6, 11]     t2d[kept] = True

Offsets, not absolute ids: serving engines compute `draft_id + d2t[draft_id]`, and zeros mean the identity.
"""

from array import array
from collections.abc import Iterable

import torch
from torch import Tensor


def check_size(size: object, vocab_size: int) -> int | None:
    """`draft_vocab_size` as an int, or None for the full vocabulary. Raises ValueError naming field and value."""
    if size is None:
        return None
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= vocab_size:
        raise ValueError(
            f"draft_vocab_size={size!r}: give a whole number from 1 to {vocab_size} (the target's vocabulary), or null"
        )
    return size


class TokenCounter:
    """Counts [V] of supervised tokens, O(V + tokens): ids are gathered and counted 2^16 at a time."""

    def __init__(self, vocab_size: int) -> None:
        self.counts = torch.zeros(vocab_size, dtype=torch.int64)
        self._waiting = array("q")

    def add(self, ids: list[int], spans: Iterable[tuple[int, int]]) -> None:
        for start, end in spans:
            self._waiting.extend(ids[start:end])
        if len(self._waiting) >= 1 << 16:
            self.total()

    def total(self) -> Tensor:
        """Counts int64 [V] so far."""
        if self._waiting:
            waiting = torch.frombuffer(self._waiting, dtype=torch.int64)
            self.counts += torch.bincount(waiting, minlength=len(self.counts))
            self._waiting = array("q")
        return self.counts


def build(
    counts: Tensor, size: int, special_ids: Iterable[int], tokenizer_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """(d2t int64 offsets [D], t2d bool [V]) of the `size` most frequent ids of counts [V], sorted by target id.

    Specials are always inside; ties go to the lowest id, and unused ids, lowest first, fill a size larger than the
    number of tokens seen. Ids at or above `tokenizer_size` (rows that pad the model's vocabulary) never are.
    """
    (V,) = counts.shape
    usable = min(V, tokenizer_size or V)
    check_size(size, V)
    specials = sorted({i for i in special_ids if 0 <= i < usable})
    if not len(specials) <= size <= usable:
        raise ValueError(
            f"draft_vocab_size={size}: it must hold the {len(specials)} special ids and can hold at most the "
            f"{usable} ids of the tokenizer"
        )
    ranked = counts[:usable].clone()
    ranked[specials] = torch.iinfo(torch.int64).max
    kept = ranked.argsort(descending=True, stable=True)[:size].sort().values
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[kept] = True
    return kept - torch.arange(size), t2d


def coverages(
    counts: Tensor, heldout: Tensor, special_ids: Iterable[int], tokenizer_size: int | None = None
) -> dict[int, float]:
    """Size -> coverage of held-out tokens [V] by the vocabulary that `build` makes of counts [V], for choosing a size.

    Powers of two from 1,024 that the tokenizer exceeds; none where nothing is held out.
    """
    usable, specials = min(len(counts), tokenizer_size or len(counts)), list(special_ids)
    sizes = [size for power in range(10, 20) if len(specials) <= (size := 1 << power) < usable]
    if not int(heldout.sum()):
        return {}
    return {size: coverage(heldout, build(counts, size, specials, tokenizer_size)[1]) for size in sizes}


def filled(counts: Tensor, t2d: Tensor) -> int:
    """How many ids of the draft vocabulary never occurred: reported, because they only cost time."""
    return int((counts[t2d] == 0).sum())


def coverage(counts: Tensor, t2d: Tensor) -> float:
    """Share of the counted tokens that the draft vocabulary can propose; 1.0 when nothing was counted."""
    total = int(counts.sum())
    return int(counts[t2d].sum()) / total if total else 1.0
