"""A drafter of random trees that is right now and then, and decoding without cache, batch or draft to compare with."""

import random
from collections.abc import Mapping, Sequence

import torch

from eval.drafter import Ask, Drafter, Kept, PerSequence, Proposal
from heads.target import Target, TargetOutput


class Guesser:
    """Trees of 0..`most` nodes with distinct siblings; a node on the true path has the true next token as a child with
    probability `right`. `answers`: prompt -> what the target will say, as far as known."""

    taps: tuple[int, ...] = ()
    max_draft = 64
    reads_rows = False

    def __init__(
        self, answers: Mapping[tuple[int, ...], Sequence[int]], vocab_size: int, most: int = 12, right: float = 0.7
    ) -> None:
        self.answers, self.vocab_size, self.most, self.right = answers, vocab_size, most, right
        self.random = random.Random(0)
        self.answer: list[int] = []
        self.done = 0

    def start(self, prompt: list[int], first: int, output: TargetOutput) -> None:
        self.random.seed(str(prompt))
        self.answer, self.done = list(self.answers.get(tuple(prompt), ())), 1

    def commit(self, kept: Kept) -> None:
        assert kept.output.last.shape[:2] == (1, len(kept.tokens))
        self.done += len(kept.tokens)

    def propose(self, ask: Ask) -> Proposal:
        tokens: list[int] = []
        parents: list[int] = []
        depth, true = [0], [True]  # of every row
        below: list[list[int]] = [[]]
        for _ in range(self.random.randint(0, self.most)):
            parent = max(self.random.choices(range(len(depth)), k=self.random.randint(1, 3)))  # rather a deep one
            at = self.done + depth[parent]
            known = self.answer[at] if true[parent] and at < len(self.answer) else None
            right = known is not None and known not in below[parent] and self.random.random() < self.right
            left = [t for t in range(self.vocab_size) if t not in below[parent] and t != known]
            if depth[parent] == ask.budget or not (left or right):
                continue
            token = known if right and known is not None else self.random.choice(left)
            below[parent].append(token)
            tokens.append(token)
            parents.append(parent)
            depth.append(depth[parent] + 1)
            true.append(right)
            below.append([])
        return Proposal(torch.tensor(tokens, dtype=torch.long), parents, None)


def guesser(answers: Mapping[tuple[int, ...], Sequence[int]], vocab_size: int, **options: float) -> Drafter:
    return PerSequence(lambda: Guesser(answers, vocab_size, **options))  # type: ignore[arg-type]


MASK = 2**64 - 1


def key(seed: int, position: int) -> int:
    """The seed of the noise at a position: splitmix64 over both, written anew."""
    x = (seed * 11400714819323198485 + position * 13787848793156543929 + 10723151780598845931) & MASK
    x = ((x ^ (x >> 30)) * 13787848793156543929) & MASK
    x = ((x ^ (x >> 27)) * 10723151780598845931) & MASK
    return (x ^ (x >> 31)) & (2**63 - 1)


@torch.no_grad()
def slowly(
    target: Target, prompt: list[int], budget: int, ends: frozenset[int], temperature: float = 0.0, seed: int = 0
) -> tuple[list[int], str]:
    """The answer and why it ends: one whole pass of the model per token, no cache, no mask, no draft."""
    text: list[int] = []
    room = min(budget, target.spec.max_position_embeddings - len(prompt))
    while len(text) < room:
        logits = target.model(torch.tensor([[*prompt, *text]])).logits[0, -1].float()
        if temperature:
            noise = torch.rand(
                len(logits), dtype=torch.float64,
                generator=torch.Generator().manual_seed(key(seed, len(prompt) + len(text))),
            )  # fmt: skip
            token = int(((logits / temperature).softmax(-1).double().log() - noise.log().neg().log()).argmax())
        else:
            token = int(logits.argmax())
        text.append(token)
        if token in ends:
            return text, "eos"
    return text, "length"
