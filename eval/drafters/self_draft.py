"""The target drafts for itself with a sparse view of its own KV cache (MagicDec: Chen et al., arXiv 2408.11049).

A draft step is a pass of the target that sees only the first `sinks` entries (attention sinks: Xiao et al., arXiv
2309.17453) and the last `window`. It writes its keys past the pointer of the target's cache, where the verification
pass writes the same positions again with full attention: nothing is kept of them.

Drafting costs a pass of the target less the attention it leaves out, so it pays where reading the KV cache is most of a
pass: long contexts and large batches. For sequence length n = 10, sinks 2, window 4 (the new entry counted):

    entries   0 1 2 3 4 5 6 7 8 9 10      10: the token that is fed
    seen      x x . . . . . x x x x
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from eval.cache import AttentionMasks, KVCache
from eval.drafter import Ask, Kept, Proposal
from eval.drafters.step import Step
from heads.target import Target, TargetOutput


@dataclass
class SelfDraftSettings:
    """MagicDec's budget: entries at the front and at the end that a draft step sees."""

    sinks: int = 4
    window: int = 252

    def check(self) -> None:
        """Raises ValueError naming the setting."""
        if self.sinks < 0 or self.window < 1:
            raise ValueError(
                f"self_draft.sinks={self.sinks}, self_draft.window={self.window}: give 0 or more and 1 or more"
            )


class SelfDraft:
    """Chains of all slots. `share` is called with the target's cache before the first prompt is read."""

    taps: tuple[int, ...] = ()
    max_draft = 64
    reads_rows = False

    def __init__(self, target: Target, settings: SelfDraftSettings | None = None) -> None:
        self.settings = settings or SelfDraftSettings()
        self.settings.check()
        self.target, self.masks = target, AttentionMasks(target)
        self.real = min(target.spec.tokenizer_size, target.spec.vocab_size)
        self.newest: dict[int, int] = {}
        self.cache: KVCache | None = None
        self.rows: Callable[[], dict[int, int]] = dict

    def share(self, cache: KVCache, rows: Callable[[], dict[int, int]]) -> None:
        """The target's cache, and what gives the row in it of every slot."""
        self.cache, self.rows = cache, rows

    def start(self, slot: int, prompt: list[int], first: int, output: TargetOutput) -> None:
        self.newest[slot] = first

    def propose(self, slots: list[int], asks: list[Ask]) -> list[Proposal]:
        assert self.cache is not None, "the self-draft reads the target's cache"
        rows = self.rows()
        steps = {rows[slot]: Step(ask, self.target.spec.vocab_size) for slot, ask in zip(slots, asks, strict=True)}
        feed = {rows[slot]: self.newest[slot] for slot, ask in zip(slots, asks, strict=True) if ask.budget > 0}
        true_lengths = list(self.cache.lengths)
        while feed:
            logits = self._read(feed)
            taken = {row: steps[row].take(logits[row]) for row in feed}
            feed = {row: token for row, token in taken.items() if token is not None}
        self.cache.lengths = true_lengths
        return [steps[rows[slot]].proposal() for slot in slots]

    def commit(self, slots: list[int], kept: list[Kept]) -> None:
        for slot, left in zip(slots, kept, strict=True):
            self.newest[slot] = left.tokens[-1]

    def _read(self, feed: dict[int, int]) -> dict[int, Tensor]:
        """One sparse pass: row -> fed token in, row -> logits [real] out. Rows between them are padding."""
        assert self.cache is not None
        first, last, device = min(feed), max(feed) + 1, self.target.device
        ids = torch.tensor([[feed.get(row, 0)] for row in range(first, last)], device=device)
        with self.cache.rows(first, last) as cache:
            view = SparseView(cache, self.settings.sinks, self.settings.window)
            positions = cache.positions(1, device).clamp(max=self.target.spec.max_position_embeddings - 1)  # of padding
            mask = self._mask(view.seen(device))
            output = self.target.forward(ids, cache=view, positions=positions, mask=mask)
        for row in feed:
            self.cache.lengths[row] += 1
        logits = self.target.logits(output.last[[row - first for row in feed], 0])[:, : self.real]
        return dict(zip(feed, logits, strict=True))

    def _mask(self, seen: Tensor) -> Any:
        """The mask in the form the target's attention takes; the view is the same for its layers of every kind."""
        return self.masks.layers(lambda window: seen)


class SparseView(Cache):
    """Writes one entry per row into a KV cache; gives back its first `sinks` and last `window` entries."""

    def __init__(self, cache: KVCache, sinks: int, window: int) -> None:
        super().__init__(layers=[])
        self.cache, longest = cache, max(cache.active) + 1
        lengths = torch.tensor(cache.active).unsqueeze(1)
        self.whole = longest <= sinks + window  # nothing to leave out
        if self.whole:
            self.valid = torch.arange(longest) <= lengths
            return
        # row by row: the sinks, then the window, whose entries below the sinks (short rows) are masked
        tail = lengths - window + 1 + torch.arange(window)
        self.entries = torch.cat([torch.arange(sinks).expand(len(lengths), sinks), tail], 1)  # [B, sinks + window]
        self.valid = torch.cat([torch.arange(sinks) <= lengths, tail >= sinks], 1)
        self.start = int(tail[0, 0]) if len(set(cache.active)) == 1 else None  # one window for all rows: slices do
        self.sinks, self.window = sinks, window
        self.entries = self.entries.clamp(min=0)

    def seen(self, device: torch.device) -> Tensor:
        """bool [B, 1, 1, entries given back]."""
        return self.valid[:, None, None].to(device)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self.cache.update(key_states, value_states, layer_idx)
        return (keys, values) if self.whole else (self._view(keys), self._view(values))

    def _view(self, held: Tensor) -> Tensor:
        """[B, kv heads, longest, head dim] -> [B, kv heads, sinks + window, head dim]."""
        if self.start is not None:
            return torch.cat([held[:, :, : self.sinks], held[:, :, self.start : self.start + self.window]], 2)
        rows = torch.arange(len(held), device=held.device)[:, None]
        return held[rows, :, self.entries.to(held.device)].transpose(1, 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.valid.shape[1] - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.valid.shape[1], 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.cache.get_query_offset(layer_idx)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1
