"""What every draft head is: the contract between a head, the training objective and the decoding engine.

Two sides that agree by test: `forward` over whole sequences (training) equals drafting with a cache (decoding).

    training   forward(HeadInput, steps) -> hidden states [B, S, *] of each step at the slots; logits(hidden, step)
    drafting   either step by step (EAGLE, MTP, recurrent heads):
                   hidden = advance(cache, feature(last, taps), embeddings)      true slots: the target's rows
                   hidden = advance(cache, feed(hidden), embed(d_i), step=i)     its own: d_i drafted from step i - 1
               or the whole chain in one go (`parallel`: Medusa, block heads):
                   absorb(cache, last, taps)                                     what the head keeps of true slots
                   draft_logits(last, steps, cache, embedding)                   [B, steps, D] after the newest slot

In decoding `cache` is a placement on the head's cache (heads/placement.py): rows of a batch, nodes of a tree. A head
asks it for `positions(n)`, hands it `write(keys, values, layer)`, and attends by the mask it gets back.

A *slot* t is a position whose next token x_{t+1} is known; step i drafted from slot t predicts x_{t+2+i}.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn

from heads.layers import LayerCache, map_buffers
from heads.spec import TargetSpec


class Head(nn.Module):
    """Sizes, taps and the vocabulary map (`d2t` offsets [D], `t2d` bool [V]: buffers saved with the head).

    Raises ValueError for a draft vocabulary that does not fit the target or that comes without its map.
    """

    parallel = False  # drafts all steps at once
    uses_cache = False  # keeps something of every true slot, not of the newest only
    regresses = False  # the hidden state of step i at slot t stands for the target's last feature at t + 1 + i
    reads_last = True  # `forward` reads HeadInput.last; False: taps alone, so that captures without it will do
    max_slots: int | None = None  # slots trained per conversation and step, drawn at random; None: all

    d2t: Tensor
    t2d: Tensor

    def __init__(
        self,
        config: Any,
        spec: TargetSpec,
        vocab: tuple[Tensor, Tensor] | None,
        *,
        taps: tuple[int, ...],
        max_draft: int,
        train_steps: int,
    ) -> None:
        super().__init__()
        self.config, self.taps, self.max_draft, self.train_steps = config, taps, max_draft, train_steps
        d2t, t2d = map_buffers(vocab, config.draft_vocab_size, spec.vocab_size)
        self.register_buffer("d2t", d2t)
        self.register_buffer("t2d", t2d)
        self.vocab_size, self.draft_vocab_size = spec.vocab_size, d2t.shape[0]

    def attach(self, target: Any) -> Self:
        """Borrow what the head shares with its target (LM head, embeddings); never saved with the head."""
        return self

    def pack_lm_head(self) -> None:
        """Where the LM head is borrowed: take the CPU's fast path to it (heads/packed.py). For drafting only."""

    def init_from(self, target: Any, ids: Tensor) -> None:
        """Start from the target's weights where the settings say so; ids [1, T] are a text to measure scales on."""

    def new_cache(self, batch: int = 1) -> LayerCache:
        """An empty draft cache for `batch` sequences."""
        return LayerCache(batch)

    def feature(self, last: Tensor, taps: Tensor | None) -> Tensor:
        """What a true slot feeds, from the target's rows: last [B, n, H], taps [B, n, k, H] -> [B, n, H]."""
        return last

    def feed(self, hidden: Tensor) -> Tensor:
        """What the next step reads as its feature, from the hidden state of the step before."""
        return hidden

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft ids -> target ids."""
        return draft_ids + self.d2t[draft_ids]

    def target_rows(self) -> Tensor | None:
        """Target ids of the draft vocabulary, or None when it is the whole one."""
        return None if self.draft_vocab_size == self.vocab_size else self.t2d.nonzero().squeeze(1)

    def borrow_lm_head(self, target: Any) -> tuple[Tensor, Tensor | None]:
        """The target's LM-head rows of the draft vocabulary, detached: weight [D, H] and bias [D] or None."""
        weight, bias = target.lm_head(self.target_rows())
        return weight.detach(), None if bias is None else bias.detach()


def gather_slots(values: Tensor, slots: Tensor) -> Tensor:
    """values [B, T, N] at slots [B, S] -> [B, S, N]."""
    return values.gather(1, slots[..., None].expand(-1, -1, values.shape[-1]))


def shift(x: Tensor, by: int) -> Tensor:
    """Left shift along T with zero fill: [x0, x1, x2] by 1 -> [x1, x2, 0]."""
    return torch.cat([x[:, by:], torch.zeros_like(x[:, :by])], dim=1)


def slot_mask(slots: Tensor, documents: Tensor) -> Tensor:
    """[B, 1, S, T] bool: slot t sees position s when s <= t and both lie in the same document."""
    T = documents.shape[1]
    same = documents.gather(1, slots)[:, :, None] == documents[:, None, :]
    return (same & (torch.arange(T, device=slots.device) <= slots[:, :, None]))[:, None]
