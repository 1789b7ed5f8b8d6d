"""One round of one sequence: the target's rows, the drafted tree and the rule -> the accepted path, the own token."""

from collections.abc import Sequence

import torch
from torch import Tensor

from eval import verify, verify_tree
from eval.decoding import Decoding
from eval.drafter import Proposal
from eval.verify_tree import TreeVerdict
from eval.warpers import Warpers, biased, seen_by_row, warp


class Rows:
    """p after every row of a pass, warped when it is asked for: a walk down a tree of 60 nodes reads a few rows only.

    logits [N+1, V]; `prefix` [V] marks the tokens before the newest one's successor (penalties), None where none asks.
    """

    def __init__(self, logits: Tensor, proposal: Proposal, warpers: Warpers, prefix: Tensor | None) -> None:
        self.logits, self.warpers, self.prefix = logits, warpers, prefix
        self.draft, self.parents = proposal.tokens.tolist(), proposal.parents

    def __getitem__(self, row: int) -> Tensor:
        """p [V] of a row, on the CPU."""
        return warp(self.logits[row], self.warpers, self._seen(row)).cpu()

    def best(self, row: int) -> int:
        """The most likely token after a row."""
        return int(biased(self.logits[row], self.warpers, self._seen(row)).argmax())

    def all(self) -> Tensor:
        """p [N+1, V] of every row."""
        seen = None if self.prefix is None else seen_by_row(self.prefix, self.draft, self.parents)
        return warp(self.logits, self.warpers, seen).cpu()

    def _seen(self, row: int) -> Tensor | None:
        if self.prefix is None or row == 0:
            return self.prefix
        seen = self.prefix.clone()
        while row:
            seen[self.draft[row - 1]] = True
            row = self.parents[row - 1]
        return seen


def judge(
    proposal: Proposal,
    logits: Tensor,
    decoding: Decoding,
    generator: torch.Generator,
    position: int,
    prefix: Tensor | None = None,
    best: Sequence[int] | None = None,
) -> tuple[TreeVerdict, Tensor | None]:
    """Verify one drafted tree: logits [N+1, V] -> (verdict, p [N+1, V] where alpha is recorded, else None).

    `position` is the place in the sequence of the tokens of depth 1; `prefix` as in Rows; `best` [N+1] the arg-max of
    the logits where it is known already.
    """
    rule = decoding.resolved_rule()
    rows = Rows(logits, proposal, decoding.warpers, prefix)
    draft, parents = rows.draft, rows.parents
    if rule == "greedy":
        known = best if prefix is None and not decoding.warpers.logit_bias else None
        return verify_tree.match(draft, parents, lambda row, _: rows.best(row) if known is None else known[row]), None
    every = rows.all() if decoding.record_alpha or rule == "typical" else None
    p = rows if every is None else every
    if rule in ("match", "strict"):
        return verify_tree.sample_and_match(draft, parents, p, decoding.seed, position), every
    if rule == "typical":
        assert every is not None
        return verify_tree.typical_lossy(draft, parents, every, float(torch.rand((), generator=generator))), every
    u = torch.rand(len(draft) + 1, generator=generator)
    laws = proposal.probs if rule == "rejection" else None
    return verify_tree.rejection(draft, parents, p, laws, u), every


def alphas(proposal: Proposal, target_probs: Tensor | None, accepted: int) -> tuple[list[float], list[float]] | None:
    """sum_x min(p, q) and p(argmax q) of a chain, or None where they are not recorded.

    A position counts where its prefix was accepted: elsewhere p is conditioned on text that is not emitted.
    """
    if target_probs is None or proposal.probs is None or not len(proposal.tokens):
        return None
    overlap, greedy = verify.alphas(proposal.tokens, target_probs, proposal.probs)
    return [round(x, 5) for x in overlap[: accepted + 1]], [round(x, 5) for x in greedy[: accepted + 1]]
