"""A trained head as a drafter, for every head of heads/base.py: one that goes step by step, one that drafts in one go.

A step-by-step head with a cache, prompt of 7, chain of 4 (entry t = feature of slot t with the embedding of x_{t+1}):

    start     entries 0..6 from true features; the last one drafts d_1
    propose   d_1..d_3 are fed with the head's own features (entries 7..9); d_4 is not fed
    commit    from entry 7 again, one entry per kept token from the target's true features: after a full acceptance
              entries 7..11 = (g_7, d_1) .. (g_10, d_4), (g_11, own), so d_4 is fed, not skipped

All sequences of a batch are drafted together, one level of their trees per call of the head.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from eval.drafter import Ask, Drafter, Kept, Proposal
from eval.drafters.growth import Growth, growth
from eval.drafters.vocabulary import DraftVocabulary
from heads.packed import PackedLinear
from heads.placement import Drafts, Placement, true_slots
from heads.target import Target, TargetOutput


class HeadDrafter(ABC):
    """What both kinds share: a draft cache with a row per slot, and the tree of every sequence."""

    reads_rows = False

    def __init__(self, head: Any, target: Target) -> None:
        self.head, self.target, self.max_draft, self.taps = head.eval(), target, head.max_draft, head.taps
        self.vocabulary = DraftVocabulary(head, target)
        self.cache = head.new_cache(1)

    def start(self, slot: int, prompt: list[int], first: int, output: TargetOutput) -> None:
        self.cache.clear(slot)
        self._take([slot], [[*prompt[1:], first]], [output])

    def commit(self, slots: list[int], kept: list[Kept]) -> None:
        self._take(slots, [left.tokens for left in kept], [left.output for left in kept])

    @abstractmethod
    def propose(self, slots: list[int], asks: list[Ask]) -> list[Proposal]: ...

    @abstractmethod
    def _take(self, slots: list[int], tokens: list[list[int]], outputs: list[TargetOutput]) -> None:
        """Take in true slots: the tokens that follow them, and the target's rows."""

    def _slots(
        self, tokens: list[list[int]], outputs: list[TargetOutput]
    ) -> tuple[list[int], Tensor, Tensor, Tensor | None]:
        """Counts, tokens [S, n], last [S, n, H] and taps [S, n, k, H] of true slots, padded at the right."""
        if not self.head.uses_cache:  # only the newest slot is ever read
            tokens = [row[-1:] for row in tokens]
            outputs = [TargetOutput(o.last[:, -1:], None if o.taps is None else o.taps[:, -1:]) for o in outputs]
        counts = [len(row) for row in tokens]
        n = max(counts)
        ids = torch.tensor([row + [0] * (n - len(row)) for row in tokens], device=self.target.device)
        taps = [o.taps for o in outputs if o.taps is not None]
        return counts, ids, padded([o.last for o in outputs], n), padded(taps, n) if taps else None

    def _expand(self, growths: Sequence[Growth], logits: Tensor, asks: Sequence[Ask], rows: list[list[int]]) -> None:
        """Grow every tree by a level: logits [R, D], rows[i] the row of each of tree i's frontier nodes."""
        width = max(tree.width for tree in growths)
        tokens, confidences = self.vocabulary.top(logits, width, any(tree.confident for tree in growths))
        for tree, ask, own in zip(growths, asks, rows, strict=True):
            laws = None
            if ask.sampled or ask.with_probs:
                laws = partial(self._laws, logits, own, ask)
            tree.expand(tokens[own], confidences[own], laws)

    def _laws(self, logits: Tensor, rows: list[int], ask: Ask) -> Tensor:
        return self.vocabulary.probs(logits[rows], ask)


class StepDrafter(HeadDrafter):
    """EAGLE, MTP, recurrent heads. `cache.lengths` = sequence length - 1 after start and after every commit."""

    def __init__(self, head: Any, target: Target) -> None:
        super().__init__(head, target)
        self.hidden: dict[int, Tensor] = {}  # slot -> [1, *] output of the newest true slot

    def _take(self, slots: list[int], tokens: list[list[int]], outputs: list[TargetOutput]) -> None:
        counts, ids, last, taps = self._slots(tokens, outputs)
        placed = true_slots(self.cache, slots, counts)
        hidden = self.head.advance(placed, self.head.feature(last, taps), self.target.embed(ids))
        self.cache.extend(slots, [len(row) for row in tokens])
        for i, slot in enumerate(slots):
            self.hidden[slot] = hidden[i, counts[i] - 1 : counts[i]]

    def propose(self, slots: list[int], asks: list[Ask]) -> list[Proposal]:
        growths = [growth(ask) for ask in asks]
        drafts, step = Drafts(self.cache, slots), 0
        live = [i for i, tree in enumerate(growths) if tree.frontier]
        hidden = torch.stack([self.hidden[slots[i]] for i in live]) if live else torch.empty(0)  # [S, 1, *]
        while live:
            F = hidden.shape[1]
            logits = self.head.logits(hidden.flatten(0, 1), step)
            rows = [list(range(at * F, at * F + len(growths[i].frontier))) for at, i in enumerate(live)]
            self._expand([growths[i] for i in live], logits, [asks[i] for i in live], rows)
            places = [at for at, i in enumerate(live) if growths[i].frontier]
            live, step = [live[at] for at in places], step + 1
            if live:
                placed = drafts.level([slots[i] for i in live], [growths[i].sources for i in live])
                hidden = self._level(hidden[places], [growths[i] for i in live], placed, step)
        return [tree.proposal() for tree in growths]

    def _level(self, hidden: Tensor, trees: Sequence[Growth], placed: Placement, step: int) -> Tensor:
        """Feed one level of drafted nodes: hidden [S, F', *] of the level before -> [S, F, *]."""
        n = max(len(tree.frontier) for tree in trees)
        parents = torch.tensor([tree.sources + [0] * (n - len(tree.sources)) for tree in trees])
        tokens = [tree.frontier_tokens() for tree in trees]
        ids = torch.tensor([row + [0] * (n - len(row)) for row in tokens], device=self.target.device)
        before = hidden[torch.arange(len(trees))[:, None], parents]
        return self.head.advance(placed, self.head.feed(before), self.target.embed(ids), step=step)


class ParallelDrafter(HeadDrafter):
    """Medusa, block heads: one row of logits per depth, the same whatever is drafted before it."""

    def __init__(self, head: Any, target: Target) -> None:
        super().__init__(head, target)
        self.last: dict[int, Tensor] = {}  # slot -> [H] feature of the newest slot
        self.newest: dict[int, int] = {}  # slot -> newest token

    def _take(self, slots: list[int], tokens: list[list[int]], outputs: list[TargetOutput]) -> None:
        if self.head.uses_cache:
            counts, _, last, taps = self._slots(tokens, outputs)
            self.head.absorb(true_slots(self.cache, slots, counts), last, taps)
        self.cache.extend(slots, [len(row) for row in tokens])
        for slot, row, output in zip(slots, tokens, outputs, strict=True):
            self.last[slot], self.newest[slot] = output.last[0, -1], row[-1]

    def propose(self, slots: list[int], asks: list[Ask]) -> list[Proposal]:
        growths = [growth(ask) for ask in asks]
        steps = min(self.max_draft, max(ask.budget for ask in asks))
        newest = torch.tensor([self.newest[slot] for slot in slots], device=self.target.device)
        placed = true_slots(self.cache, slots, [1] * len(slots))
        last = torch.stack([self.last[slot] for slot in slots])
        logits = self.head.draft_logits(last, steps, placed, self.target.embed(newest))  # [S, steps, D]
        for step in range(steps):
            live = [i for i, tree in enumerate(growths) if tree.frontier]
            if not live:
                break
            rows = [[place] * len(growths[i].frontier) for place, i in enumerate(live)]
            self._expand([growths[i] for i in live], logits[live, step], [asks[i] for i in live], rows)
        return [tree.proposal() for tree in growths]


def padded(rows: Sequence[Tensor], n: int) -> Tensor:
    """Tensors [1, m, ...] with m <= n -> [S, n, ...], zeros at the right."""
    if len(rows) == 1:
        return rows[0]
    found = rows[0].new_zeros(len(rows), n, *rows[0].shape[2:])
    for held, row in zip(found, rows, strict=True):
        held[: row.shape[1]] = row[0]
    return found


def drafter_for(head: Any, target: Target) -> Drafter:
    """The drafter of a head that is attached to its target."""
    return ParallelDrafter(head, target) if head.parallel else StepDrafter(head, target)


def packable(head: nn.Module, target: Target) -> bool:
    return target.device.type == "cpu" and all(p.dtype == torch.float32 for p in head.parameters())


def pack(head: Any, target: Target) -> Any:
    """Give a head's linears (float32, CPU) the target's fast path, so that neither side of a speedup is handicapped.

    The head drafts only from here on: its weights no longer appear in a state dict.
    """
    if not packable(head, target):
        return head
    for module in list(head.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and name != "fc":  # its weight's dtype is read; one small product
                setattr(module, name, PackedLinear(child.weight, child.bias))
    head.pack_lm_head()
    return head


def untrained(head: Any, target: Target, seed: int = 0) -> Any:
    """A head of the same configuration and vocabulary with random weights: the floor a trained one must beat."""
    vocab = (head.d2t, head.t2d) if head.draft_vocab_size < head.vocab_size else None
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        fresh = type(head)(head.config, target.spec, vocab)
        with torch.no_grad():
            for parameter in fresh.parameters():
                if parameter.dim() > 1:
                    nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return fresh.attach(target).eval()
