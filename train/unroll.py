"""Which slots are trained at which step, and on what: pure index work shared by every head.

Step i drafted from slot t predicts x_{t+2+i} (Medusa head i + 1, EAGLE-3 test-time step i), is taught by the target's
distribution at position t+1+i, and is trained when x_{t+1} .. x_{t+2+i} are all tokens the assistant produced, in one
document. Worked example, `asst` over 8 positions, J = 2:

    position   0  1  2  3  4  5  6  7
    asst       .  .  .  A  A  A  .  .        prompt 0..2, answer 3..5 (5 ends the turn)
    step 0     .  .  x  x  .  .  .  .        slot 2 = last prompt token: where decoding starts to draft
    step 1     .  .  x  .  .  .  .  .        slot 2 predicts x_5 = the end of the turn
"""

import torch
from torch import Tensor


def step_mask(asst: Tensor, documents: Tensor, step: int) -> Tensor:
    """[B, T] bool: slot t is trained at `step` (asst, documents [B, T])."""
    B, T = asst.shape
    span = step + 2
    mask = torch.zeros_like(asst)
    if T <= span:
        return mask
    ok = documents[:, span:] == documents[:, :-span]
    for offset in range(1, span + 1):
        ok = ok & asst[:, offset : T - span + offset]
    mask[:, : T - span] = ok
    return mask


def pick_slots(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Slots [B, S] of a step-0 mask [B, T], left-packed, and which are real [B, S] (padding repeats position 0)."""
    B, T = mask.shape
    count = mask.sum(1)
    S = max(1, int(count.max()))
    order = torch.argsort((~mask).to(torch.int8), dim=1, stable=True)[:, :S]
    real = torch.arange(S, device=mask.device) < count[:, None]
    return order * real, real


def at_slots(values: Tensor, slots: Tensor, offset: int) -> Tensor:
    """values [B, T, ...] at position slot + offset -> [B, S, ...]; past the end the last one (callers mask it)."""
    where = (slots + offset).clamp_max(values.shape[1] - 1)
    if values.dim() == 2:
        return values.gather(1, where)
    return values.gather(1, where[..., None].expand(-1, -1, values.shape[-1]))


def accepted_runs(correct: Tensor, exists: Tensor) -> Tensor:
    """Length of the accepted run from each slot: correct, exists [N, K] -> [N] (0..K)."""
    return (correct & exists).to(torch.int64).cumprod(-1).sum(-1)


def walk_rounds(runs: list[int], max_tokens: int) -> list[tuple[int, int]]:
    """Replay greedy chain decoding over one answer: [(accepted, emitted)] per verification round.

    `runs[n]` is the accepted run when the round starts with n tokens after the first already emitted; an answer of m
    tokens (the first comes from prefill) has m - 1 entries. A round emits its run and one token more, within the
    answer and within `max_tokens`. Averaging 1 + run over *all* slots instead would weigh easy stretches too much: rounds start
    more often where runs are short.

        answer of 5 tokens, runs [2, 0, 0, 1] -> rounds (2, 3), (1, 1): 4 tokens after the first in 2 rounds
    """
    rounds = []
    at, end = 0, min(len(runs), max_tokens - 1)
    while at < end:
        emitted = min(runs[at] + 1, end - at)
        rounds.append((min(runs[at], end - at), emitted))
        at += emitted
    return rounds
