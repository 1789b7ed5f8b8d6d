"""A suffix tree of token ids with counts, cut at a depth: what followed the last 1..depth tokens, and how often.

SuffixDecoding (Oliaro et al., arXiv 2411.04975, section 3); grown token by token as in Arctic Inference's tree. Edges
are slices of the texts: n tokens cost at most 2n nodes whatever the depth, and one token at most `depth` steps.

Every suffix of a text (the last 1..depth tokens) that still grows is *active* and ends at a node, never inside an edge.
A node's count is the number of occurrences of its path. Worked example, text [7, 8, 7, 9, 7]:

    root -+- 7 (3) -+- 8 7 9 7 (1)          after [7] came 8 once and 9 once: a chance of 1/2 each
          |         +- 9 7 (1)              after [9, 7] nothing is known: only the text's end was there
          +- 8 7 9 7 (1)
          +- 9 7 (1)
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple


class Node:
    """The end of the path that spells tokens[start : start + length] after its parent's."""

    __slots__ = ("children", "count", "length", "parent", "start", "tokens")

    def __init__(self, count: int, parent: "Node | None", tokens: list[int], start: int, length: int) -> None:
        self.count, self.parent = count, parent
        self.tokens, self.start, self.length = tokens, start, length
        self.children: dict[int, Node] = {}  # by first token; the newest branch last


class Text:
    """One sequence that grows: its tokens, and the nodes its suffixes end at, longest first."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.active: list[Node] = []


class Guess(NamedTuple):
    """Drafted tokens with parent rows (eval/tree.py) and the sum of their estimated path probabilities."""

    tokens: list[int]
    parents: list[int]
    score: float


class SuffixTree:
    """Suffixes of at most `depth` tokens of every text that was appended to it; texts may grow in turn."""

    def __init__(self, depth: int = 64) -> None:
        self.depth = depth
        self.size = 0  # tokens held
        self.root = Node(0, None, [], 0, 0)

    def append(self, text: Text, token: int) -> None:
        root, active, at = self.root, text.active, len(text.tokens)
        root.count += 1
        self.size += 1
        text.tokens.append(token)
        active.append(root)
        if len(active) > self.depth:
            del active[0]
        for i, node in enumerate(active):
            child = node.children.get(token)
            if child is None:
                if node.count == 1 and node is not root:
                    node.length += 1  # a leaf of this text alone: its edge grows
                else:
                    node.children[token] = active[i] = Node(1, node, text.tokens, at, 1)
            elif node.count == child.count + 1 and node is not root:
                active[i] = _advance(node, child)
            else:
                active[i] = node.children[token] = _enter(node, child)

    def find(self, tokens: Sequence[int]) -> tuple[Node, int] | None:
        """Where a path ends: (node, tokens of its edge that are used), or None when it does not occur."""
        node, used = self.root, 0
        for token in tokens:
            if used == node.length:
                child = node.children.get(token)
                if child is None:
                    return None
                node, used = child, 1
            elif node.tokens[node.start + used] == token:
                used += 1
            else:
                return None
        return node, used


def _advance(node: Node, child: Node) -> Node:
    """Move a suffix that ends at `node` one token on where all others already go to `child`: the border moves along.

    A child's edge is always an occurrence of its whole path, so the tokens before its start are the parent's edge.
    """
    if child.length == 1:  # the two become one node; the child is kept, as other texts' suffixes may end there
        assert node.parent is not None
        child.count += 1
        child.start, child.length, child.parent = child.start - node.length, child.length + node.length, node.parent
        node.parent.children[child.tokens[child.start]] = child
        return child
    node.tokens, node.start, node.length = child.tokens, child.start - node.length, node.length + 1
    child.start, child.length = child.start + 1, child.length - 1
    node.children = {child.tokens[child.start]: child}
    return node


def _enter(node: Node, child: Node) -> Node:
    """Move a suffix from `node` one token into `child`, whose edge is split when it is longer."""
    if child.length == 1:
        child.count += 1
        return child
    middle = Node(child.count + 1, node, child.tokens, child.start, 1)
    child.start, child.length, child.parent = child.start + 1, child.length - 1, middle
    middle.children[child.tokens[child.start]] = child
    return middle


def _next(node: Node, used: int) -> list[tuple[float, int, Node, int]]:
    """What may follow: (estimated probability, token, node, used), most likely first, the newest first on ties.

    Occurrences at which a text ended say nothing about what follows and do not count.
    """
    if used < node.length:
        return [(1.0, node.tokens[node.start + used], node, used + 1)]
    total = sum(child.count for child in node.children.values())
    newest_first = sorted(reversed(node.children.items()), key=lambda item: -item[1].count)
    return [(child.count / total, token, child, 1) for token, child in newest_first]


def grow_chain(node: Node, used: int, most: int, floor: float) -> Guess:
    """The most frequent continuation, at most `most` tokens, until its estimated path probability is below `floor`."""
    tokens: list[int] = []
    reached, score = 1.0, 0.0
    while len(tokens) < most:
        if used < node.length:
            token, used = node.tokens[node.start + used], used + 1
        else:
            following = _next(node, used)
            if not following or reached * following[0][0] < floor:
                break
            chance, token, node, used = following[0]
            reached *= chance
        tokens.append(token)
        score += reached
    return Guess(tokens, list(range(len(tokens))), score)


def grow_tree(node: Node, used: int, most: int, deepest: int, floor: float) -> Guess:
    """The `most` tokens of highest estimated path probability, none below `floor` or deeper than `deepest`.

    Greedy growth (paper, algorithm 1): no child is likelier than its parent, so the best tokens form a tree.
    """
    tokens: list[int] = []
    parents: list[int] = []
    score = 0.0
    heap: list[tuple[float, int, int, int, Node, int, int]] = []
    serial = 0

    def offer(reached: float, row: int, depth: int, node: Node, used: int) -> None:
        nonlocal serial
        for chance, token, child, after in _next(node, used) if depth < deepest else []:
            if reached * chance < floor:
                break
            heapq.heappush(heap, (-reached * chance, depth + 1, serial, token, child, after, row))
            serial += 1

    offer(1.0, 0, 0, node, used)
    while heap and len(tokens) < most:
        reached, depth, _, token, child, after, row = heapq.heappop(heap)
        tokens.append(token)
        parents.append(row)
        score -= reached
        offer(-reached, len(tokens), depth, child, after)
    return Guess(tokens, parents, score)
