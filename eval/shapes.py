"""The trees of an evaluation by name: what `tree=` may be, and the shape a head drafts for it.

chain        k tokens, one after the other
eagle25      EAGLE-1's 25 nodes
sparse       the `nodes` most valuable nodes by the head's measured rank accuracies (Medusa's growth)
dynamic      EAGLE-2: `depth` levels of `top_k`, of which `total` nodes are kept
[[0], [1], [0, 0]]    paths: each node as the ranks on its way from the newest token
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eval.tree import EAGLE_25, Dynamic, Shape, from_paths, sparse_tree

NAMES = ("chain", "eagle25", "sparse", "dynamic")


@dataclass
class TreeSettings:
    """Sizes of the trees that have some; depths are cut to what a head can draft."""

    nodes: int = 25  # sparse
    depth: int = 6  # dynamic
    top_k: int = 10  # dynamic: children per node, and nodes expanded per level
    total: int = 60  # dynamic: nodes kept
    replacement: bool = False  # siblings of sampled drafts are drawn with replacement


def check(tree: Any, settings: TreeSettings) -> None:
    """Raises ValueError for a name that is none, paths that make no tree, or sizes below 1."""
    for name in ("nodes", "depth", "top_k", "total"):
        if getattr(settings, name) < 1:
            raise ValueError(f"trees.{name}={getattr(settings, name)}: give at least 1")
    if isinstance(tree, str):
        if tree not in NAMES:
            raise ValueError(f"tree={tree!r}: choose from {', '.join(NAMES)}, or give paths like [[0],[1],[0,0]]")
    elif not isinstance(tree, (list, tuple)) or not tree or not all(isinstance(path, (list, tuple)) for path in tree):
        raise ValueError(f"tree={tree!r}: give a name ({', '.join(NAMES)}) or paths like [[0],[1],[0,0]]")
    else:
        from_paths(tree, 64, 10**9)


def label(tree: Any, settings: TreeSettings) -> str:
    """What a record calls the tree; trees of other sizes have other names. [[0], [1], [0, 0]] -> "3 paths 4d6a80cd"."""
    if tree == "sparse":
        return f"sparse {settings.nodes}"
    if tree == "dynamic":
        return f"dynamic {settings.depth}/{settings.top_k}/{settings.total}"
    if isinstance(tree, str):
        return tree
    return f"{len(tree)} paths {zlib.crc32(str([list(path) for path in tree]).encode()):08x}"


def shape(
    tree: Any,
    settings: TreeSettings,
    max_draft: int,
    vocab_size: int,
    accuracies: Sequence[Sequence[float]] | None = None,
) -> Shape | None:
    """The shape a head of `max_draft` steps and `vocab_size` draft tokens drafts; None for a chain.

    accuracies: the head's rank accuracies, which a sparse tree is grown on. Raises ValueError for paths that the head
    cannot draft.
    """
    if tree == "chain":
        return None
    if tree == "dynamic":
        return Dynamic(min(settings.depth, max_draft), settings.top_k, settings.total)
    if tree == "eagle25":
        return from_paths([path for path in EAGLE_25 if len(path) <= max_draft], max_draft, vocab_size)
    if tree == "sparse":
        assert accuracies is not None, "a sparse tree is grown on measured accuracies"
        return sparse_tree(accuracies[:max_draft], settings.nodes)
    return from_paths(tree, max_draft, vocab_size)
