"""A draft tree of one sequence while a head grows it, level by level: static trees (a chain is one) and dynamic ones.

A head gives rows of draft logits after the frontier's nodes; `expand` makes their children and the next frontier. What
a node's children are depends on its own path and generator only, so every sequence grows alike in any batch.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from eval.drafter import Ask, Proposal, empty
from eval.tree import Chain, Dynamic, StaticTree, chain, children
from eval.tree_dynamic import Growing
from eval.verify_tree import draw_children


class Growth(Protocol):
    frontier: list[int]  # rows of the tree whose children come next
    sources: list[int]  # the place of each one's parent in the frontier before

    @property
    def width(self) -> int:
        """How many of the most likely tokens the next expansion reads, 0 where it draws instead."""
        ...

    @property
    def confident(self) -> bool: ...

    def expand(self, tokens: Tensor, confidences: Tensor, laws: Callable[[], Tensor] | None) -> None:
        """tokens, confidences [F, width] after each node of the frontier; laws() [F, V] is q there, where it is read."""
        ...

    def frontier_tokens(self) -> list[int]: ...

    def proposal(self) -> Proposal: ...


def growth(ask: Ask) -> Growth:
    if isinstance(ask.shape, Dynamic):
        return DynamicGrowth(ask, ask.shape)
    return StaticGrowth(ask, chain(ask.budget) if isinstance(ask.shape, Chain) else ask.shape)


class StaticGrowth:
    """Children as the tree says: the ranks it names, or as many draws."""

    def __init__(self, ask: Ask, tree: StaticTree) -> None:
        self.ask, self.ranks, self.below = ask, tree.ranks, children(tree.parents)
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.laws: list[Tensor] = []
        self.static = [0]  # row of the given tree that each node of the frontier is
        self.frontier, self.sources, self.reached = [0], [0], [1.0]
        self.depth = 0
        if not self.below[0] or ask.budget < 1:
            self.frontier = []

    @property
    def width(self) -> int:
        """Where children are drawn, the top token is still what confidence is read from."""
        if self.ask.sampled:
            return 1
        return 1 + max(self.ranks[child - 1] for row in self.static for child in self.below[row])

    @property
    def confident(self) -> bool:
        return self.ask.min_confidence > 0

    def expand(self, tokens: Tensor, confidences: Tensor, laws: Callable[[], Tensor] | None) -> None:
        q = laws() if laws is not None else None
        top, likely = tokens.tolist(), confidences.tolist()
        self.depth += 1
        frontier, sources, static, reached = [], [], [], []
        for place, row in enumerate(self.frontier):
            before = self.reached[place]
            wanted = self.below[self.static[place]]
            if self.ask.sampled:
                assert q is not None
                # settled before anything is drawn: dropping a drawn child for what it is would change its law
                found = self._drawn(q[place], len(wanted)) if before * likely[place][0] >= self._floor() else []
                chances = [likely[place][0]] * len(found)
            else:
                ranks = [self.ranks[child - 1] for child in wanted]
                kept = [r for r in ranks if r < len(top[place]) and before * likely[place][r] >= self._floor()]
                wanted = [child for child, r in zip(wanted, ranks, strict=True) if r in kept]
                found, chances = [top[place][r] for r in kept], [likely[place][r] for r in kept]
                self.laws += [] if q is None else [q[place]] * len(found)
            for child, token, chance in zip(wanted, found, chances, strict=False):
                self.tokens.append(token)
                self.parents.append(row)
                if self.below[child] and self.depth < self.ask.budget:
                    frontier.append(len(self.tokens))
                    sources.append(place)
                    static.append(child)
                    reached.append(before * chance)
        self.frontier, self.sources, self.static, self.reached = frontier, sources, static, reached

    def _drawn(self, q: Tensor, count: int) -> list[int]:
        tokens, laws = draw_children(q, torch.rand(count, generator=self.ask.generator), self.ask.replacement)
        self.laws += list(laws)
        return tokens

    def _floor(self) -> float:
        return self.ask.min_confidence

    def frontier_tokens(self) -> list[int]:
        return [self.tokens[row - 1] for row in self.frontier]

    def proposal(self) -> Proposal:
        if not self.tokens:
            return empty()
        return Proposal(torch.tensor(self.tokens), self.parents, torch.stack(self.laws) if self.laws else None)


class DynamicGrowth:
    """EAGLE-2's tree of the draft's most confident paths."""

    confident = True

    def __init__(self, ask: Ask, shape: Dynamic) -> None:
        self.ask, self.width = ask, shape.top_k
        self.growing = Growing(min(shape.depth, ask.budget), shape.top_k, shape.total)

    @property
    def frontier(self) -> list[int]:
        return self.growing.frontier

    @property
    def sources(self) -> list[int]:
        return self.growing.sources

    def expand(self, tokens: Tensor, confidences: Tensor, laws: Callable[[], Tensor] | None) -> None:
        self.growing.offer(tokens, confidences, self.ask.min_confidence)

    def frontier_tokens(self) -> list[int]:
        return self.growing.frontier_tokens()

    def proposal(self) -> Proposal:
        tree = self.growing.finish()
        kept = sum(score >= self.ask.min_confidence for score in tree.scores)
        if kept < len(tree.tokens):
            tree = self.growing.finish(kept)
        return Proposal(torch.tensor(tree.tokens, dtype=torch.long), tree.parents, None)
