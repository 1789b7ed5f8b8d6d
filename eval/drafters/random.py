"""Uniform random tokens: the floor of any drafter (tau about 1)."""

import torch

from eval.drafter import Ask, Kept, Proposal
from eval.verify import mix
from heads.target import TargetOutput


class Random:
    taps: tuple[int, ...] = ()
    max_draft = 64
    reads_rows = False

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self.vocab_size, self.seed = vocab_size, seed
        self.generator = torch.Generator()  # its own: guesses must not depend on the verifier's draws

    def start(self, prompt: list[int], first: int, output: TargetOutput) -> None:
        self.generator.manual_seed(mix(self.seed, len(prompt)))

    def propose(self, ask: Ask) -> Proposal:
        K = ask.budget
        tokens = torch.randint(self.vocab_size, (K,), generator=self.generator)
        asked = ask.sampled or ask.with_probs
        probs = torch.full((K, self.vocab_size), 1 / self.vocab_size) if asked else None
        return Proposal(tokens, list(range(K)), probs)

    def commit(self, kept: Kept) -> None: ...
