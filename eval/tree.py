"""Shapes of draft trees, as pure functions: parents, ancestors, depths, static trees and the best one for a cost curve.

A tree of N drafted tokens is its `parents` [N]. Rows are those of the target pass: row 0 is the newest token (the root,
not drafted), row i + 1 is draft i. parents[i] is the *row* of draft i's parent, at most i: parents come first. A chain
of three is [0, 1, 2]. Worked example, parents [0, 0, 1, 1]:

    row 0 -+- row 1 -+- row 3        depths     [0, 1, 1, 2, 2]
           |         +- row 4        ancestors  row 3 sees rows 0, 1, 3; row 2 sees 0, 2
           +- row 2                  children   [[1, 2], [3, 4], [], [], []]
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Path = tuple[int, ...]

# EAGLE-1's tree (2401.15077, released code): 4 + 8 + 8 + 3 + 2 nodes.
EAGLE_25: tuple[Path, ...] = (
    (0,), (1,), (2,), (3,),
    (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0),
    (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2),
    (0, 0, 0, 0, 0), (0, 0, 0, 0, 1),
)  # fmt: skip


class StaticTree(NamedTuple):
    """A tree fixed before decoding: draft i is the ranks[i]-th most likely child of row parents[i]."""

    parents: list[int]
    ranks: list[int]


class Chain(NamedTuple):
    """A tree of width 1 and depth k."""

    k: int = 64


class Dynamic(NamedTuple):
    """A tree grown anew each round from the draft's confidences (eval/tree_dynamic.py)."""

    depth: int = 6
    top_k: int = 10
    total: int = 60  # nodes kept


Shape = Chain | StaticTree | Dynamic


def depth_of(shape: Shape) -> int:
    """Most tokens deep that a draft of this shape is."""
    if isinstance(shape, StaticTree):
        return max(depths(shape.parents))
    return shape.k if isinstance(shape, Chain) else shape.depth


def chain(k: int) -> StaticTree:
    return StaticTree(list(range(k)), [0] * k)


def check_parents(parents: Sequence[int]) -> None:
    """Raises ValueError where a parent does not come before its child."""
    for i, parent in enumerate(parents):
        if not 0 <= parent <= i:
            raise ValueError(f"tree: draft {i} has parent row {parent}; give a row of 0 (the newest token) to {i}")


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of rows 0..N: the place of a row's token after the newest one. [0, 0, 1] -> [0, 1, 1, 2]."""
    found = [0]
    for parent in parents:
        found.append(found[parent] + 1)
    return found


def ancestors(parents: Sequence[int]) -> Tensor:
    """What each row sees of the tree: bool [N+1, N+1], true at (r, s) when s is r or one of its ancestors."""
    seen = torch.eye(len(parents) + 1, dtype=torch.bool)
    for i, parent in enumerate(parents):
        seen[i + 1] |= seen[parent]
    return seen


def children(parents: Sequence[int]) -> list[list[int]]:
    """Child rows of rows 0..N, in drafting order."""
    found: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for i, parent in enumerate(parents):
        found[parent].append(i + 1)
    return found


def from_paths(paths: Sequence[Sequence[int]], max_depth: int, max_rank: int) -> StaticTree:
    """A user's tree: each node as the ranks on its way from the root, in any order.

    [[0], [1], [0, 2]] -> parents [0, 0, 1], ranks [0, 1, 2].
    max_depth: most tokens the head drafts; max_rank: size of its vocabulary. Raises ValueError naming the path.
    """
    found = sorted((tuple(int(rank) for rank in path) for path in paths), key=lambda path: (len(path), path))
    row_of: dict[Path, int] = {(): 0}
    for path in found:
        if not path:
            raise ValueError("tree: an empty path; the newest token is the root and is not listed")
        if path in row_of:
            raise ValueError(f"tree: path {list(path)} is given twice")
        if len(path) > max_depth:
            raise ValueError(f"tree: path {list(path)} is {len(path)} deep, the head drafts at most {max_depth} tokens")
        if min(path) < 0 or max(path) >= max_rank:
            raise ValueError(f"tree: path {list(path)} has a rank outside 0..{max_rank - 1}")
        if path[:-1] not in row_of:
            raise ValueError(f"tree: path {list(path)} has no parent; add {list(path[:-1])}")
        row_of[path] = len(row_of)
    return StaticTree([row_of[path[:-1]] for path in found], [path[-1] for path in found])


def grown(accuracies: Sequence[Sequence[float]], nodes: int) -> list[tuple[float, Path]]:
    """Medusa's sparse tree (2401.10774, appendix C): the `nodes` most valuable paths with their value, best first.

    accuracies[d][r]: measured share of positions at which the draft of depth d + 1 with rank r is the target's token.
    A node's value, the chance that it is accepted, is the product along its path (depths taken as independent). As no
    child is worth more than its parent, the best nodes form a tree: the one of highest tau of all trees of that size.
    Ties: the shallower node, then the lower ranks. Fewer come back where the table has fewer.
    """
    found: list[tuple[float, Path]] = []
    heap: list[tuple[float, int, Path]] = []

    def push(value: float, path: Path) -> None:
        if len(path) < len(accuracies):
            for rank, accuracy in enumerate(accuracies[len(path)]):
                if not 0 <= accuracy <= 1:
                    raise ValueError(f"accuracies[{len(path)}][{rank}] is {accuracy}; give shares between 0 and 1")
                heapq.heappush(heap, (-value * accuracy, len(path) + 1, (*path, rank)))

    push(1.0, ())
    while heap and len(found) < nodes:
        value, _, path = heapq.heappop(heap)
        found.append((-value, path))
        push(-value, path)
    return found


def sparse_tree(accuracies: Sequence[Sequence[float]], nodes: int) -> StaticTree:
    """The grown paths as a tree."""
    ranks = max((len(row) for row in accuracies), default=0)
    return from_paths([path for _, path in grown(accuracies, nodes)], len(accuracies), ranks)


class Best(NamedTuple):
    """The static tree that should be fastest, what it promises, and the depth it is drafted to."""

    tree: StaticTree
    depth: int
    acceptance_length: float
    speedup: float


def best_static_tree(
    accuracies: Sequence[Sequence[float]],
    target_pass_s: Sequence[float],
    draft_step_s: float,
    draft_fixed_s: float = 0.0,
) -> Best:
    """The tree of highest predicted speedup for measured acceptance and costs, all depths and sizes compared.

    target_pass_s[i] is a pass of i + 1 tokens, so a tree of N nodes costs target_pass_s[N]; one drafted to depth d
    costs d draft steps. Depth is bounded before growth, so every candidate is the best tree of its depth and size.
    Acceptance .5 per depth (rank 0 only), passes all 1 s, steps .1 s: depth 2, tau 1 + .5 + .25, speedup 1.75 / 1.2.
    """
    best = Best(StaticTree([], []), 0, 1.0, 1.0)
    for depth in range(1, len(accuracies) + 1):
        tau = 1.0
        paths: list[Path] = []
        for value, path in grown(accuracies[:depth], len(target_pass_s) - 1):
            tau += value
            paths.append(path)
            cost = draft_fixed_s + depth * draft_step_s + target_pass_s[len(paths)]
            if (speedup := tau * target_pass_s[0] / cost) > best.speedup:
                best = Best(from_paths(paths, depth, len(max(accuracies, key=len))), depth, tau, speedup)
    return best
