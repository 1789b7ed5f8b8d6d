"""EAGLE-2's dynamic draft tree (Li et al., arXiv 2406.16858), as pure functions of the draft's confidences.

Expansion: each of the top_k frontier nodes offers its top_k children, and the top_k most confident of these (product of
confidences along the path) become the next frontier. Re-ranking: of all nodes offered, `total` are kept. The children
are deterministic, so the one-hot and match rules apply.

Scores are fp32 and ties go to the shallower node: a child's score is never above its parent's, so a kept node's parent
is kept. In fp16 scores tie by rounding and 3 to 17% of trees lose a parent. Worked example, top_k 2, depth 2, total 3:

    children of the root        a .6, b .3                      frontier a, b
    children of a, of b         aa .36, ab .12, ba .24, bb .03
    kept                        a .6, aa .36, b .3              tokens [a, b, aa], parents [0, 0, 1]
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eval.tree import depths

# (frontier tokens [F], index of each one's parent in the frontier before [F]) -> child tokens, confidences [F, top_k]
Advance = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class DynamicTree(NamedTuple):
    """Drafted tokens [N], parent rows [N] and path confidences [N], shallow nodes first."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]


def select(scores: Sequence[float], parents: Sequence[int], total: int) -> list[int]:
    """Drafts of the `total` highest scores, ascending; ties: the shallower, then the earlier draft."""
    depth = depths(parents)
    ranked = sorted(range(len(parents)), key=lambda i: (-scores[i], depth[i + 1], i))
    return sorted(ranked[:total])


def pruned(parents: Sequence[int], kept: Sequence[int]) -> list[int]:
    """Parent rows of the kept drafts among themselves. parents [0, 0, 2, 3], kept drafts 1, 2 -> [0, 1]."""
    row_of = {0: 0, **{old + 1: new + 1 for new, old in enumerate(kept)}}
    return [row_of[parents[i]] for i in kept]


class Growing:
    """A tree that grows level by level: `offer` the children of the frontier, best first, until it is empty.

    `frontier` are the rows whose children are asked for next; `sources` say below which node of the frontier before
    each of them hangs. Several grow in lock step, so that a draft model runs all trees of a batch at once.
    """

    def __init__(self, depth: int, top_k: int, total: int) -> None:
        self.depth, self.top_k, self.total = depth, top_k, total
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.scores: list[float] = []
        self.level = 0
        self.frontier, self.reached = [0] if depth > 0 else [], torch.ones(1)
        self.sources = [0]

    def offer(self, tokens: Tensor, confidences: Tensor, floor: float = 0.0) -> None:
        """Children of the frontier's F nodes, tokens and confidences (probabilities) [F, width]; the first top_k count.

        Nodes less likely than `floor` are not expanded.
        """
        width = min(self.top_k, tokens.shape[1])
        offered = (self.reached[:, None] * confidences[:, :width].float()).flatten()
        first_row = len(self.tokens) + 1
        self.tokens += tokens[:, :width].flatten().tolist()
        self.parents += [row for row in self.frontier for _ in range(width)]
        self.scores += offered.tolist()
        self.level += 1
        best = offered.sort(descending=True, stable=True).indices[: self.top_k]
        best = best[offered[best] >= floor] if self.level < self.depth else best[:0]
        self.frontier, self.reached = (first_row + best).tolist(), offered[best]
        self.sources = (best // width).tolist()

    def frontier_tokens(self) -> list[int]:
        return [self.tokens[row - 1] for row in self.frontier]

    def finish(self, total: int | None = None) -> DynamicTree:
        """The `total` best nodes (by default the tree's own number)."""
        kept = select(self.scores, self.parents, self.total if total is None else total)
        scores = [self.scores[i] for i in kept]
        return DynamicTree([self.tokens[i] for i in kept], pruned(self.parents, kept), scores)


def grow(tokens: Tensor, confidences: Tensor, advance: Advance, depth: int, top_k: int, total: int) -> DynamicTree:
    """Expand to `depth` levels from the root's children (tokens, confidences [1, >= top_k], best first), keep `total`.

    `advance` is called once per level but the last.
    """
    growing = Growing(depth, top_k, total)
    growing.offer(tokens, confidences)
    while growing.frontier:
        growing.offer(*advance(torch.tensor(growing.frontier_tokens()), torch.tensor(growing.sources)))
    return growing.finish()
