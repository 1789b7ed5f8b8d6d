"""What greedy chain decoding with a head would accept on a text that is already there: no generation needed.

On text the target itself wrote greedily, replayed rounds are the rounds decoding would make.
"""

import torch
from torch import Tensor


def accepted_runs(correct: Tensor, exists: Tensor) -> Tensor:
    """Length of the accepted run from each slot: correct, exists [N, K] -> [N] (0..K)."""
    return (correct & exists).to(torch.int64).cumprod(-1).sum(-1)


def walk_rounds(runs: list[int], max_tokens: int) -> list[tuple[int, int]]:
    """Replay greedy chain decoding over one answer: [(accepted, emitted)] per verification round.

    `runs[n]` is the accepted run when the round starts with n tokens after the first already emitted; an answer of m
    tokens (the first comes from prefill) has m - 1 entries. A round emits its run and one token more, within the
    answer and within `max_tokens`. Averaging 1 + run over *all* slots instead would weigh easy stretches too much:
    rounds start more often where runs are short.

        answer of 5 tokens, runs [2, 0, 0, 1] -> rounds (2, 3), (1, 1): 4 tokens after the first in 2 rounds
    """
    rounds = []
    at, end = 0, min(len(runs), max_tokens - 1)
    while at < end:
        emitted = min(runs[at] + 1, end - at)
        rounds.append((min(runs[at], end - at), emitted))
        at += emitted
    return rounds
