"""Replay oracle: drafts the output that is already known. The upper bound of any chain drafter (tau = k + 1)."""

from collections.abc import Mapping, Sequence

from eval.drafter import Ask, Kept, Proposal, point_mass
from heads.target import TargetOutput


class Replay:
    """`output` is one sequence's known answer, or the answers of several by their prompt."""

    taps: tuple[int, ...] = ()
    max_draft = 64
    reads_rows = False

    def __init__(self, output: Sequence[int] | Mapping[tuple[int, ...], Sequence[int]], vocab_size: int) -> None:
        self.known, self.vocab_size = output, vocab_size
        self.output: list[int] = []
        self.done = 0

    def start(self, prompt: list[int], first: int, output: TargetOutput) -> None:
        known = self.known
        self.output = list(known.get(tuple(prompt), ()) if isinstance(known, Mapping) else known)
        self.done = 1

    def propose(self, ask: Ask) -> Proposal:
        return point_mass(self.output[self.done : self.done + ask.budget], self.vocab_size, ask)

    def commit(self, kept: Kept) -> None:
        self.done += len(kept.tokens)
