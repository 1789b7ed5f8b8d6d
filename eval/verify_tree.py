"""The verification rules of a drafted tree, as pure functions. Trees are `parents` [N] (eval/tree.py).

Letters (conventions.md): N nodes, V target vocabulary. `draft` [N] are the drafted tokens; row r of `target_probs`
[N+1, V] is the target's distribution p after the path to row r; row i of `draft_probs` [N, V] is the law draft i was
really sampled from, given its earlier siblings. Siblings are judged in drafting order.

Worked example, draft [7, 8, 9, 5], parents [0, 0, 1, 2]; 7 is refused, 8 and then 5 accepted:

    row 0 -+- row 1 (7) - row 3 (9)      path [2, 4]: 8, 5; own is drawn from row 4;
           +- row 2 (8) - row 4 (5)      the round emits [8, 5, own]

A chain is the tree [0, 1, 2, ...], and these rules are then those of eval/verify.py.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from eval import verify
from eval.tree import ancestors, children, depths
from eval.warpers import one_hot


class PerRow(Protocol):
    """p after each row: a tensor [N+1, V], or something that makes a row when it is asked for."""

    def __getitem__(self, row: int, /) -> Tensor: ...


class TreeVerdict(NamedTuple):
    """Outcome of one round: the accepted rows (1..N) from the top down, and the one token the target adds."""

    path: list[int]
    own: int


def match(draft: Sequence[int], parents: Sequence[int], token_at: Callable[[int, int], int]) -> TreeVerdict:
    """Follow the target's own tokens down the tree as long as they are drafted.

    `token_at(row, depth)` is the target's token after a row; it is asked only for rows that are reached. With the
    argmax of p this is greedy decoding; with a draw from p it is sample-and-match, the law of the one-hot rule for any
    tree that does not depend on the draw; with a sampled draft, strict match.
    """
    below = children(parents)
    path: list[int] = []
    while True:
        row = path[-1] if path else 0
        own = token_at(row, len(path))
        entered = next((child for child in below[row] if draft[child - 1] == own), None)
        if entered is None:
            return TreeVerdict(path, own)
        path.append(entered)


def sample_and_match(
    draft: Sequence[int], parents: Sequence[int], target_probs: PerRow, seed: int, position: int
) -> TreeVerdict:
    """`match` with keyed draws: the tokens of plain sampling, whatever tree drafts. position: that of depth 1."""
    return match(draft, parents, lambda row, depth: verify.keyed_sample(target_probs[row], seed, position + depth))


def node_rejection(tokens: Sequence[int], laws: Tensor, target_probs: Tensor, u: Sequence[float]) -> tuple[int, Tensor]:
    """Recursive rejection at one node: tokens [C], laws [C, V], p [V], uniforms [C] -> (accepted child or -1, p left).

    Accept child i with probability min(1, p_i(x)/q_i(x)), else p_{i+1} = norm(max(0, p_i - q_i)); exact only when
    child i was drawn from laws[i] given the children before it, and judged in the order of drawing.
    """
    p = target_probs
    for i, x in enumerate(tokens):
        if u[i] * laws[i, x] < p[x]:
            return i, p
        p = verify.residual(p, laws[i])
    return -1, p


def rejection(
    draft: Sequence[int], parents: Sequence[int], target_probs: PerRow, draft_probs: Tensor | None, u: Tensor
) -> TreeVerdict:
    """Sampled children: u [N+1] uniforms, u[i] for draft i, u[N] for the token after the path.

    With replacement every law of a node is q; without, q less the earlier siblings, renormalised (`draw_children`).
    `draft_probs` None: every draft is a point mass.
    """
    below, uniforms = children(parents), u.tolist()
    path: list[int] = []
    while True:
        row = path[-1] if path else 0
        drafts, p = [child - 1 for child in below[row]], target_probs[row]
        tokens = [draft[i] for i in drafts]
        laws = point_masses(tokens, len(p)) if draft_probs is None else draft_probs[drafts]
        accepted, left = node_rejection(tokens, laws, p, [uniforms[i] for i in drafts])
        if accepted < 0:
            return TreeVerdict(path, int(verify.sample(left, u[-1])))
        path.append(below[row][accepted])


def one_hot_children(draft: Sequence[int], parents: Sequence[int], target_probs: PerRow, u: Tensor) -> TreeVerdict:
    """Deterministic, distinct children: each is a point mass, accepted with p'(c), else p'(c) = 0 and renormalise."""
    return rejection(draft, parents, target_probs, None, u)


def point_masses(tokens: Sequence[int], vocab_size: int) -> Tensor:
    return one_hot(torch.tensor(list(tokens), dtype=torch.long), vocab_size)


def draw_children(q: Tensor, u: Tensor, replacement: bool) -> tuple[list[int], Tensor]:
    """Draw len(u) children of one node from q [V] -> tokens, laws [C, V]: what each was really drawn from.

    Without replacement stops early when q has no token left.
    """
    tokens: list[int] = []
    laws: list[Tensor] = []
    left = q
    for uniform in u:
        total = left.sum()
        if total <= 0:
            break
        laws.append(left / total)
        tokens.append(int(verify.sample(laws[-1], uniform)))
        if not replacement:
            left = left.clone()
            left[tokens[-1]] = 0
    return tokens, torch.stack(laws) if laws else q.new_empty(0, len(q))


def typical_lossy(
    draft: Sequence[int],
    parents: Sequence[int],
    target_probs: Tensor,
    u: float,
    epsilon: float = 0.09,
    delta: float = 0.3,
) -> TreeVerdict:
    """Medusa's typical acceptance (2401.10774, section 2.3.1). LOSSY: the output does not have the target's law.

    Accept x iff p(x) > min(epsilon, delta * exp(-H(p))) and its ancestors are accepted; the deepest path is kept (the
    earliest row on ties) and its next token drawn from p. At temperature 0 it is greedy decoding.
    """
    entropy = torch.special.entr(target_probs).sum(-1)
    threshold = (delta * torch.exp(-entropy)).clamp(max=epsilon)
    rows = torch.tensor(list(parents), dtype=torch.long)
    kept = target_probs[rows, torch.tensor(list(draft), dtype=torch.long)] > threshold[rows]
    seen = ancestors(parents)
    kept = torch.cat([kept.new_ones(1), kept])
    whole = (~seen | kept).all(-1)  # true where the row and all rows above it are kept
    depth = depths(parents)
    last = max(range(len(depth)), key=lambda row: (depth[row] if whole[row] else -1, -row))
    path = [row for row in range(1, last + 1) if seen[last, row]]
    return TreeVerdict(path, int(verify.sample(target_probs[last], torch.tensor(u))))
