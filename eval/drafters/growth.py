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
    @property
    def frontier(self) -> list[int]:
        """Rows of the tree whose children come next."""
        ...

    @property
    def sources(self) -> list[int]:
        """The place of each one's parent in the frontier before."""
        ...

    @property
    def width(self) -> int:
        """How many of the most likely tokens the next expansion reads, 0 where it draws instead."""
        ...

    @property
    def confident(self) -> bool: ...

    def expand(self, tokens: Tensor, confidences: Tensor, laws: Callable[[], Tensor] | None) -> None:
        """tokens, confidences [F, width] after each node of the frontier; laws() [F, V] is q there, if it is read."""
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
        self.expected = 0.0
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
        return self.ask.min_confidence > 0 or self.ask.gain is not None

    def expand(self, tokens: Tensor, confidences: Tensor, laws: Callable[[], Tensor] | None) -> None:
        q = laws() if laws is not None else None
        top, likely = tokens.tolist(), confidences.tolist()
        nodes, self.opened = [*zip(self.frontier, self.static, self.reached, strict=True)], len(self.tokens)
        self.frontier, self.sources, self.static, self.reached = [], [], [], []
        for place, (row, static, reached) in enumerate(nodes):
            wanted = self.below[static]
            if self.ask.sampled:
                assert q is not None
                # settled before anything is drawn: dropping a drawn child for what it is would change its law
                if self._pays(reached * likely[place][0]):
                    drawn = self._drawn(q[place], len(wanted))
                    for child, token in zip(wanted, drawn, strict=False):
                        self._add(token, row, child, place, reached * likely[place][0])
                continue
            for child in wanted:
                rank = self.ranks[child - 1]
                if rank < len(top[place]) and self._pays(reached * likely[place][rank]):
                    self._add(top[place][rank], row, child, place, reached * likely[place][rank])
                    self.laws += [] if q is None else [q[place]]
        self.depth += 1

    def _add(self, token: int, parent: int, static: int, place: int, reached: float) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.expected += reached
        if self.below[static] and self.depth + 1 < self.ask.budget:
            self.frontier.append(len(self.tokens))
            self.sources.append(place)
            self.static.append(static)
            self.reached.append(reached)

    def _drawn(self, q: Tensor, count: int) -> list[int]:
        tokens, laws = draw_children(q, torch.rand(count, generator=self.ask.generator), self.ask.replacement)
        self.laws += list(laws)
        return tokens

    def _pays(self, chance: float) -> bool:
        """Whether a node is worth drafting whose path is accepted with this probability, by the draft's own account."""
        if chance < self.ask.min_confidence:
            return False
        if self.ask.gain is None:
            return True
        nodes, trust = len(self.tokens), self.ask.trust
        floor = self.ask.gain.floor(1 + trust * self.expected, nodes, self.depth, nodes == self.opened)
        return trust * chance >= floor

    def frontier_tokens(self) -> list[int]:
        return [self.tokens[row - 1] for row in self.frontier]

    def proposal(self) -> Proposal:
        if not self.tokens:
            return empty()
        laws = torch.stack(self.laws) if self.laws else None
        return Proposal(torch.tensor(self.tokens), self.parents, laws, self.expected if self.confident else 0.0)


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
        if self.ask.gain is not None and self.growing.frontier:
            # a level more costs a step, and can at most be as likely as all its nodes' parents together
            floor = self.ask.gain.floor(1.0, 0, self.growing.level, new_level=True)
            if self.ask.trust * float(self.growing.reached.sum()) < floor:
                self.growing.frontier = []

    def frontier_tokens(self) -> list[int]:
        return self.growing.frontier_tokens()

    def proposal(self) -> Proposal:
        tree = self.growing.finish()
        paying = self._paying(tree.scores)
        if paying < len(tree.tokens):
            tree = self.growing.finish(paying)
        return Proposal(torch.tensor(tree.tokens, dtype=torch.long), tree.parents, None, sum(tree.scores))

    def _paying(self, scores: list[float]) -> int:
        """How many nodes are worth verifying, best first."""
        tau = 1.0
        for n, score in enumerate(sorted(scores, reverse=True)):
            floor, chance = self.ask.min_confidence, score
            if self.ask.gain is not None and score >= floor:
                floor, chance = self.ask.gain.floor(tau, n, self.growing.level, False), self.ask.trust * score
            if chance < floor:
                return n
            tau += chance
        return len(scores)
