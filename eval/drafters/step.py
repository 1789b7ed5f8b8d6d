"""A chain that a language model drafts in the target's ids, one row of logits at a time."""

import torch
from torch import Tensor

from eval.drafter import Ask, Proposal
from eval.drafters.growth import StaticGrowth
from eval.tree import chain
from eval.warpers import warp


class Step:
    """One sequence's chain of at most ask.budget tokens, drawn or most likely, with q where it is asked for."""

    def __init__(self, ask: Ask, vocab_size: int) -> None:
        self.ask, self.vocab_size, self.most = ask, vocab_size, ask.budget
        self.tree = StaticGrowth(ask, chain(max(ask.budget, 0)))

    def take(self, logits: Tensor) -> int | None:
        """Draft a token from logits [real], ids that both models have -> the id to feed next, None at the end."""
        logits = logits.float()
        sure = logits.softmax(-1).amax() if self.tree.confident else torch.ones(())
        wanted = self.ask.sampled or self.ask.with_probs
        self.tree.expand(logits.argmax().view(1, 1), sure.view(1, 1), (lambda: self._law(logits)) if wanted else None)
        following = self.tree.frontier_tokens()
        return following[0] if following else None

    def proposal(self) -> Proposal:
        return self.tree.proposal()

    def _law(self, logits: Tensor) -> Tensor:
        """q [1, V], through the target's warpers; zero on ids that one of the models lacks."""
        full = logits.new_full((1, self.vocab_size), -torch.inf)
        full[0, : len(logits)] = logits
        return warp(full, self.ask.warpers).cpu()
