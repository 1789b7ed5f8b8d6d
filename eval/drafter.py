"""What drafts: one Protocol for heads, models, n-grams and oracles, over all sequences of a batch.

A *slot* is one place in the batch; a sequence keeps its slot until it ends, then the next prompt starts in it. Order of
calls for a prompt x_0..x_{n-1} whose first new token is x_n:

    start(slot, [x_0..x_{n-1}], x_n, output)       output row t = the target's feature after consuming x_t
    propose([slot, ...], [ask, ...]) -> proposals  d_1..d_N, a tree below x_n (a chain is a tree of width 1)
    (the target consumes x_n, d_1..d_N; a path of drafts e_1..e_a is accepted, the target adds its own token y)
    commit([slot, ...], [kept, ...])               tokens [e_1..e_a, y]; features after x_n, e_1..e_a
    propose(...)

So a drafter always holds features of everything but the newest token, and what it made of its own guesses is gone.
A proposal must depend on its own sequence and its own generator only: then a sequence decodes alike in any batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from eval.adaptive import Gain
from eval.cache import KVCache
from eval.tree import Chain, Shape
from eval.warpers import Warpers
from heads.target import TargetOutput


class Proposal(NamedTuple):
    """Drafted tokens [N] (target ids) below the newest token, and q: the law each was drawn from.

    `parents` are rows as in eval/tree.py: row 0 is the newest token, row i + 1 is draft i; a chain is [0, 1, 2, ...].
    `probs` [N, V] is the law draft i was drawn from given its earlier siblings, or None where it is not asked for: the
    one-hot and match rules never read it, those proposals are deterministic and siblings then differ.
    """

    tokens: Tensor
    parents: list[int]
    probs: Tensor | None
    expected: float = 0.0  # how many of its tokens the drafter expects to be accepted, where it knows


@dataclass
class Ask:
    """How the next proposal of one sequence is made."""

    budget: int  # most tokens deep: the shape's depth, or what may still be emitted
    sampled: bool  # draw from q (then `warpers` shape q and probs must be given), else the most likely tokens
    warpers: Warpers
    generator: torch.Generator
    with_probs: bool = False  # give q for greedy proposals too (alpha is being recorded)
    shape: Shape = field(default_factory=Chain)  # a drafter that can only chain drafts a chain of `budget`
    # heads stop before the token at which the product of the draft's top probabilities (before warpers) falls below
    # this; settled before that token is drawn, so that every rule stays exact. 0 = never
    min_confidence: float = 0.0
    gain: Gain | None = None  # heads stop where one more token is not worth its cost
    trust: float = 1.0  # accepted so far over expected so far: what a confidence is worth in this sequence
    replacement: bool = False  # siblings of a sampled tree: with or without replacement


@dataclass
class Kept:
    """What a round left of one sequence: `tokens`, and the target's rows that each of them followed.

    Three drafts, the first accepted: tokens [d_1, y], output rows (after x_n, after d_1).
    """

    tokens: list[int]  # accepted drafts from the top down, then the target's own token
    output: TargetOutput  # rows [1, len(tokens)]: row i is followed by tokens[i]
    rows: Tensor | None = None  # [N + 1] the target's most likely token after every row, where the drafter reads_rows


class Drafter(Protocol):
    """Draft state of all sequences of a batch, one per slot."""

    taps: tuple[int, ...]  # residual streams of the target that it reads
    max_draft: int  # most tokens deep that one proposal can be
    reads_rows: bool  # wants Kept.rows

    def start(self, slot: int, prompt: list[int], first: int, output: TargetOutput) -> None:
        """A new sequence in `slot`; what the slot held is forgotten."""
        ...

    def propose(self, slots: list[int], asks: list[Ask]) -> list[Proposal]: ...

    def commit(self, slots: list[int], kept: list[Kept]) -> None: ...


@runtime_checkable
class SharesCache(Protocol):
    """A drafter that reads the target's KV cache and writes past its pointers, where the next pass writes again."""

    def share(self, cache: KVCache, rows: Callable[[], dict[int, int]]) -> None:
        """Called before the first prompt is read; `rows` gives the row in the cache of every slot."""
        ...


def share(drafter: object, cache: KVCache, rows: Callable[[], dict[int, int]]) -> None:
    """Hand the target's cache to a drafter that reads it."""
    if isinstance(drafter, SharesCache):
        drafter.share(cache, rows)


class OneDrafter(Protocol):
    """Draft state of a single sequence, for drafters without a model of their own; `start` forgets the one before."""

    taps: tuple[int, ...]
    max_draft: int
    reads_rows: bool

    def start(self, prompt: list[int], first: int, output: TargetOutput) -> None: ...

    def propose(self, ask: Ask) -> Proposal: ...

    def commit(self, kept: Kept) -> None: ...


class PerSequence:
    """A Drafter made of one OneDrafter per slot; `make` is called once for each slot that is used."""

    def __init__(self, make: Callable[[], OneDrafter]) -> None:
        self.make = make
        first = make()
        self.taps, self.max_draft, self.reads_rows = first.taps, first.max_draft, first.reads_rows
        self.held: dict[int, OneDrafter] = {0: first}

    def start(self, slot: int, prompt: list[int], first: int, output: TargetOutput) -> None:
        if slot not in self.held:
            self.held[slot] = self.make()
        self.held[slot].start(prompt, first, output)

    def propose(self, slots: list[int], asks: list[Ask]) -> list[Proposal]:
        return [self.held[slot].propose(ask) for slot, ask in zip(slots, asks, strict=True)]

    def commit(self, slots: list[int], kept: list[Kept]) -> None:
        for slot, left in zip(slots, kept, strict=True):
            self.held[slot].commit(left)


def empty() -> Proposal:
    return Proposal(torch.empty(0, dtype=torch.long), [], None)


def point_mass(tokens: list[int], vocab_size: int, ask: Ask, parents: list[int] | None = None) -> Proposal:
    """A deterministic proposal, a chain unless `parents` says otherwise.

    Where q is asked for it is one-hot, which makes the rejection rule the one-hot rule.
    """
    ids = torch.tensor(tokens, dtype=torch.long)
    probs = torch.nn.functional.one_hot(ids, vocab_size).float() if ask.sampled or ask.with_probs else None
    return Proposal(ids, list(range(len(tokens))) if parents is None else parents, probs)
