"""Replay oracle: drafts the output that is already known. The upper bound of any chain drafter (tau = k + 1)."""

from collections.abc import Sequence

from eval.drafter import Ask, Proposal, point_mass
from heads.target import TargetOutput


class Replay:
    taps: tuple[int, ...] = ()
    max_draft = 64

    def __init__(self, output: Sequence[int], vocab_size: int) -> None:
        self.output, self.vocab_size = list(output), vocab_size
        self.done = 0

    def start(self, prompt: list[int], first: int, output: TargetOutput) -> None:
        self.done = 1

    def propose(self, k: int, ask: Ask) -> Proposal:
        return point_mass(self.output[self.done : self.done + k], self.vocab_size, ask)

    def commit(self, tokens: list[int], output: TargetOutput) -> None:
        self.done += len(tokens)
