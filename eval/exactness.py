"""Proof by enumeration that a verification rule emits the target's law: one node, V = 4, every branch, exact sums.

The rules of eval/verify.py themselves run, driven through all their uniforms: every threshold of the reference p and
q is a multiple of 1/N, so the midpoints of N cells stand for the whole interval [0, 1).
"""

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from eval import verify, verify_tree

P = tuple(Fraction(x, 10) for x in (4, 3, 2, 1))  # the reference of verification.md
Q = tuple(Fraction(x, 10) for x in (1, 5, 1, 3))
Node = Callable[[int, Tensor, Tensor, tuple[float, ...]], int]  # draft, p [V], q [V], uniforms -> emitted token


def floats(probs: Sequence[Fraction]) -> Tensor:
    return torch.tensor([float(x) for x in probs])


def law(
    node: Node, proposal: Sequence[Fraction], cells: Sequence[int], p: Sequence[Fraction] = P, q: Sequence[Fraction] = Q
) -> list[Fraction]:
    """Exact law of the emitted token: draft x with probability proposal[x], uniform i on cells[i] equal cells."""
    target, draft = floats(p), floats(q)
    weight = Fraction(1)
    for n in cells:
        weight /= n
    found = [Fraction(0)] * len(p)
    for x, chance in enumerate(proposal):
        if chance:
            for u in itertools.product(*([(i + 0.5) / n for i in range(n)] for n in cells)):
                found[node(x, target, draft, u)] += chance * weight
    return found


def total_variation(a: Sequence[Fraction], b: Sequence[Fraction] = P) -> Fraction:
    return sum((abs(x - y) for x, y in zip(a, b, strict=True)), Fraction(0)) / 2


def emit(verdict: verify.Verdict, draft: int) -> int:
    """First token a one-node round emits."""
    return draft if int(verdict.accepted) else int(verdict.own)


def rejection(x: int, p: Tensor, q: Tensor, u: tuple[float, ...]) -> int:
    return emit(verify.rejection(torch.tensor([[x]]), torch.stack([p, p])[None], q[None, None], torch.tensor([u])), x)


def one_hot(x: int, p: Tensor, q: Tensor, u: tuple[float, ...]) -> int:
    return emit(verify.chain_one_hot(torch.tensor([[x]]), torch.stack([p, p])[None], torch.tensor([u])), x)


def match(x: int, p: Tensor, q: Tensor, u: tuple[float, ...]) -> int:
    own = verify.sample(p, torch.tensor(u[0]))
    return emit(verify.match(torch.tensor([[x]]), own.expand(1, 2)), x)


def pair(x: int) -> list[int]:
    """Two drafted siblings coded as one number: 4 * first + second."""
    return list(divmod(x, 4))


def pairs(replacement: bool, q: Sequence[Fraction] = Q) -> list[Fraction]:
    """Law of two children drawn from q one after the other."""
    return [
        q[a] * q[b] if replacement else Fraction(0) if a == b else q[a] * q[b] / (1 - q[a])
        for a in range(len(q))
        for b in range(len(q))
    ]


def sibling_laws(children: Sequence[int], q: Tensor) -> Tensor:
    """What each child was drawn from, without replacement: q less the earlier children, renormalised."""
    laws = [q]
    for child in children[:-1]:
        left = laws[-1].clone()
        left[child] = 0
        laws.append(left / left.sum())
    return torch.stack(laws)


def siblings(children: Sequence[int], p: Tensor, laws: Tensor, u: Sequence[float]) -> int:
    """First token emitted by a node with these children, judged in this order under these laws."""
    rows = p.expand(len(children) + 1, len(p))
    verdict = verify_tree.rejection(children, [0] * len(children), rows, laws, torch.tensor(u))
    return children[verdict.path[0] - 1] if verdict.path else verdict.own


def without_replacement(x: int, p: Tensor, q: Tensor, u: tuple[float, ...]) -> int:
    return siblings(pair(x), p, sibling_laws(pair(x), q), u)


def with_replacement(x: int, p: Tensor, q: Tensor, u: tuple[float, ...]) -> int:
    return siblings(pair(x), p, torch.stack([q, q]), u)


def tree_one_hot(x: int, p: Tensor, q: Tensor, u: tuple[float, ...]) -> int:
    rows = p.expand(3, len(p))
    verdict = verify_tree.one_hot_children(pair(x), [0, 0], rows, torch.tensor(u))
    return pair(x)[verdict.path[0] - 1] if verdict.path else verdict.own


def tree_match(x: int, p: Tensor, q: Tensor, u: tuple[float, ...]) -> int:
    own = int(verify.sample(p, torch.tensor(u[0])))
    verdict = verify_tree.match(pair(x), [0, 0], lambda row, depth: own)
    return pair(x)[verdict.path[0] - 1] if verdict.path else verdict.own


ARGMAX_Q = [Fraction(int(x == max(range(4), key=lambda i: Q[i]))) for x in range(4)]
TOP2_Q = [Fraction(int(pair(x) == [1, 3])) for x in range(16)]
LOSSLESS: dict[str, tuple[Node, Sequence[Fraction], tuple[int, ...]]] = {
    "rejection": (rejection, Q, (30, 20)),  # ratios 1, 3/5, 1, 1/3; residual 3/4, 0, 1/4, 0; bonus tenths
    "one-hot": (one_hot, ARGMAX_Q, (10, 70)),  # accept 3/10; residual 4/7, 0, 2/7, 1/7
    "match": (match, ARGMAX_Q, (10,)),
    "strict": (match, Q, (10,)),
    "tree one-hot": (tree_one_hot, TOP2_Q, (10, 7, 3)),  # accept 3/10, then 1/7; residual 2/3, 0, 1/3, 0
    "tree match": (tree_match, TOP2_Q, (10,)),
    "tree strict": (tree_match, pairs(replacement=True), (10,)),
    # first as rejection; then 3/4, 0, 1/4, 0 left of p, all or nothing; what remains has twelfths and twentieths
    "tree without replacement": (without_replacement, pairs(replacement=False), (15, 1, 60)),
    "tree with replacement": (with_replacement, pairs(replacement=True), (15, 1, 16)),
}


TREE_RULES = {
    "one-hot": ("tree one-hot",),
    "match": ("tree match",),
    "strict": ("tree strict",),
    "rejection": ("tree without replacement", "tree with replacement"),
}


def rules_of(records: Sequence[dict[str, Any]]) -> list[str]:
    """What decided these records: their rules, and those rules' tree forms where there are trees."""
    found = {record["rule"] for record in records}
    for record in records:
        if record.get("tree", "chain") != "chain":
            found.update(TREE_RULES.get(record["rule"], ()))
    return sorted(found)


def check(rules: Sequence[str]) -> dict[str, float]:
    """Total variation to p of each lossless rule used (greedy has one branch and is left out): 0 when exact."""
    return {rule: float(total_variation(law(*LOSSLESS[rule]))) for rule in rules if rule in LOSSLESS}
