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


def grow(tokens: Tensor, confidences: Tensor, advance: Advance, depth: int, top_k: int, total: int) -> DynamicTree:
    """Expand to `depth` levels from the root's children (tokens, confidences [1, >= top_k], best first), keep `total`.

    Confidences are probabilities, 0 to 1. `advance` is called once per level but the last.
    """
    frontier = torch.zeros(1, dtype=torch.long)  # rows of the tree
    reached = torch.ones(1)  # their scores
    found: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    for level in range(depth):
        width = min(top_k, tokens.shape[1])
        offered = (reached[:, None] * confidences[:, :width].float()).flatten()
        first_row = len(found) + 1
        found += tokens[:, :width].flatten().tolist()
        parents += frontier.repeat_interleave(width).tolist()
        scores += offered.tolist()
        if level + 1 < depth:
            best = offered.sort(descending=True, stable=True).indices[:top_k]
            frontier, reached = first_row + best, offered[best]
            tokens, confidences = advance(tokens[:, :width].flatten()[best], best // width)
    kept = select(scores, parents, total)
    return DynamicTree([found[i] for i in kept], pruned(parents, kept), [scores[i] for i in kept])
