"""What drafts: one Protocol for heads, models, n-grams and oracles. A chain for now: a tree of width 1.

Order of calls for a prompt x_0..x_{n-1} whose first new token is x_n:

    start([x_0..x_{n-1}], x_n, output)     output row t = the target's feature after consuming x_t
    propose(k) -> d_1..d_k
    (the target consumes x_n, d_1..d_k; a drafts are accepted, the target adds its own token y)
    commit([d_1..d_a, y], output)          a + 1 rows: features after x_n, d_1..d_a; row i is followed by tokens[i]
    propose(k) ...

So a drafter always holds features of everything but the newest token, and what it made of its own guesses is gone.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from eval.warpers import Warpers
from heads.target import TargetOutput


class Proposal(NamedTuple):
    """Drafted tokens [K'] (K' <= k, target ids) and q [K', V]: the law each was drawn from, or None when not asked.

    Under the one-hot and match rules q is never read by the verifier: those proposals are deterministic.
    """

    tokens: Tensor
    probs: Tensor | None


@dataclass
class Ask:
    """How a proposal is made."""

    sampled: bool  # draw from q (then `warpers` shape q and probs must be given), else the most likely token
    warpers: Warpers
    generator: torch.Generator
    with_probs: bool = False  # give q for greedy proposals too (alpha is being recorded)
    # heads stop before the token at which the product of the draft's top probabilities (before warpers) falls below
    # this; settled before that token is drawn, so that every rule stays exact. 0 = never
    min_confidence: float = 0.0


class Drafter(Protocol):
    """One sequence's draft state; `start` forgets the sequence before."""

    taps: tuple[int, ...]  # residual streams of the target that it reads
    max_draft: int  # most tokens one proposal can hold

    def start(self, prompt: list[int], first: int, output: TargetOutput) -> None: ...

    def propose(self, k: int, ask: Ask) -> Proposal: ...

    def commit(self, tokens: list[int], output: TargetOutput) -> None: ...


def empty() -> Proposal:
    return Proposal(torch.empty(0, dtype=torch.long), None)


def point_mass(tokens: list[int], vocab_size: int, ask: Ask) -> Proposal:
    """A deterministic proposal; where q is asked for it is one-hot, which makes the rejection rule the one-hot rule."""
    ids = torch.tensor(tokens, dtype=torch.long)
    probs = torch.nn.functional.one_hot(ids, vocab_size).float() if ask.sampled or ask.with_probs else None
    return Proposal(ids, probs)
