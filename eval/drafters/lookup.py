"""Prompt lookup: what followed the most recent occurrence of the last n tokens, n = 3 down to 1. No training."""

from eval.drafter import Ask, Kept, Proposal, point_mass
from heads.target import TargetOutput


class Lookup:
    """Over prompt and output. Every gram is indexed once, so a proposal costs a few dictionary reads."""

    taps: tuple[int, ...] = ()
    max_draft = 64
    reads_rows = False

    def __init__(self, vocab_size: int, longest: int = 3) -> None:
        self.vocab_size, self.longest = vocab_size, longest
        self.history: list[int] = []
        self.follows: dict[tuple[int, ...], int] = {}  # gram -> index of the token after its latest occurrence

    def start(self, prompt: list[int], first: int, output: TargetOutput) -> None:
        self.history, self.follows = [], {}
        self._extend([*prompt, first])

    def propose(self, ask: Ask) -> Proposal:
        for n in range(min(self.longest, len(self.history)), 0, -1):
            at = self.follows.get(tuple(self.history[-n:]))
            if at is not None:
                return point_mass(self.history[at : at + ask.budget], self.vocab_size, ask)
        return point_mass([], self.vocab_size, ask)

    def commit(self, kept: Kept) -> None:
        self._extend(kept.tokens)

    def _extend(self, tokens: list[int]) -> None:
        for token in tokens:
            at = len(self.history)
            for n in range(1, min(self.longest, at) + 1):
                self.follows[tuple(self.history[at - n :])] = at
            self.history.append(token)
