"""Uniform random tokens: the floor of any drafter (tau about 1)."""

import torch

from eval.drafter import Ask, Proposal
from heads.target import TargetOutput


class Random:
    taps: tuple[int, ...] = ()
    max_draft = 64

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self.generator = torch.Generator().manual_seed(seed)  # its own: guesses must not depend on the verifier's draws

    def start(self, prompt: list[int], first: int, output: TargetOutput) -> None: ...

    def propose(self, k: int, ask: Ask) -> Proposal:
        tokens = torch.randint(self.vocab_size, (k,), generator=self.generator)
        asked = ask.sampled or ask.with_probs
        return Proposal(tokens, torch.full((k, self.vocab_size), 1 / self.vocab_size) if asked else None)

    def commit(self, tokens: list[int], output: TargetOutput) -> None: ...
