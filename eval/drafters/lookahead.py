"""Lookahead decoding (Fu et al., arXiv 2402.02057): n-grams from the target's own Jacobi iterations. No training.

Every pass verifies the pool's guesses for the newest token and, in the same tree, moves a window of Jacobi guesses one
step: its n-grams fill the pool. N-grams of the prompt and of the output go in as well, as the authors' code can do.
All rows count as drafts: a pass has up to (W + G) (N - 1) of them, which pays only where a pass of many rows costs
little more than one of one row.
"""

from dataclasses import dataclass

import torch

from eval.drafter import Ask, Kept, Proposal, point_mass
from eval.drafters.jacobi import Pool, Trie, Window
from eval.verify import mix
from heads.target import TargetOutput


@dataclass
class LookaheadSettings:
    """The paper's W, N, G; the defaults are those of the authors' code for small models."""

    window: int = 7  # columns guessed at once
    level: int = 5  # tokens of an n-gram, its key counted: guesses are level - 1 tokens
    guesses: int = 7  # n-grams verified a round

    def check(self) -> None:
        """Raises ValueError naming the setting."""
        for name, least in (("window", 1), ("level", 2), ("guesses", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"lookahead.{name}={getattr(self, name)}: give at least {least}")


class Lookahead:
    """One sequence's window and pool. `context`: positions the target has; no row is placed beyond them."""

    taps: tuple[int, ...] = ()
    reads_rows = True

    def __init__(self, vocab_size: int, context: int, settings: LookaheadSettings | None = None) -> None:
        self.settings = settings or LookaheadSettings()
        self.settings.check()
        self.vocab_size, self.context = vocab_size, context
        self.max_draft = max(64, self.settings.window + self.settings.level)
        self.history: list[int] = []
        self.pool = Pool(self.settings.guesses)
        self.window = Window([], 1)
        self.ends: list[int | None] = []  # row of each column's newest guess in the last proposal

    def start(self, prompt: list[int], first: int, output: TargetOutput) -> None:
        s = self.settings
        generator = torch.Generator().manual_seed(mix(0, len(prompt)))
        picked = torch.randint(len(prompt), (s.window,), generator=generator).tolist()
        self.window = Window([prompt[i] for i in picked], s.level - 1)
        self.pool, self.history, self.ends = Pool(s.guesses), [], []
        self._read([*prompt, first])

    def propose(self, ask: Ask) -> Proposal:
        trie = Trie()
        for guess in self.pool.after(self.history[-1]):
            trie.add(guess[: ask.budget])
        room = self.context - len(self.history)  # a row d deep stands at position len(history) - 1 + d
        paths = [self.window.path(i) for i in range(self.settings.window)]
        self.ends = [trie.add(path) if len(path) <= room else None for path in paths]
        return point_mass(trie.tokens, self.vocab_size, ask, trie.parents)

    def commit(self, kept: Kept) -> None:
        assert kept.rows is not None, "lookahead reads the target's token after every row"
        said = kept.rows.tolist()
        if any(end is not None for end in self.ends):
            for gram in self.window.move([None if end is None else said[end] for end in self.ends]):
                self.pool.add(gram)
        self.ends = []
        self._read(kept.tokens)

    def _read(self, tokens: list[int]) -> None:
        """Append to the text; every n-gram that it completes goes into the pool."""
        N = self.settings.level
        for token in tokens:
            self.history.append(token)
            if len(self.history) >= N:
                self.pool.add(self.history[-N:])
