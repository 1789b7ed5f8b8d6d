"""Offline prediction of acceptance: what a head's training form would accept on texts that are already there.

No generation: one target pass over prompt and output, then the head in its training form, every slot at once. Rounds
are replayed as decoding would make them: a mean over *all* slots would weigh long accepted stretches too much, since
fewer rounds start inside them.
"""

from collections.abc import Sequence
from typing import Any

import torch

from heads.layers import HeadInput
from heads.replay import accepted_runs, walk_rounds
from heads.target import Target


@torch.inference_mode()
def slot_runs(target: Target, head: Any, prompt: list[int], output: list[int], k: int) -> list[int]:
    """Accepted run (0..k) of a greedy chain drafted from each slot, the last prompt token first.

    Slot t drafts x_{t+2}, x_{t+3}, ...; a prompt of 7 and an output of 5 (x_7..x_11) have slots 6..9.
    """
    ids = torch.tensor([[*prompt, *output]], device=target.device)
    T = ids.shape[1]
    slots = torch.arange(len(prompt) - 1, T - 2, device=ids.device)
    if not len(slots):
        return []
    found = target.forward(ids, taps=head.taps)
    inputs = HeadInput(
        last=found.last,
        taps=found.taps,
        embeddings=target.embed(ids),
        positions=torch.arange(T, device=ids.device).unsqueeze(0),
        documents=torch.zeros(1, T, dtype=torch.long, device=ids.device),
        slots=slots.unsqueeze(0),
    )
    drafts = [head.to_target(head.logits(hidden[0], i).argmax(-1)) for i, hidden in enumerate(head(inputs, k))]
    where = slots[:, None] + 2 + torch.arange(k, device=ids.device)  # [S, k]
    correct = torch.stack(drafts, dim=-1) == ids[0, where.clamp(max=T - 1)]
    return accepted_runs(correct, where < T).tolist()


def joint_acceptance(runs: Sequence[Sequence[int]], k: int) -> list[float]:
    """joint[i]: share of replayed rounds of chains of k that accept more than i; `runs` as slot_runs gives them."""
    rounds = [a for text in runs for a, _ in walk_rounds([min(r, k) for r in text], len(text) + 1)]
    return [sum(a > i for a in rounds) / len(rounds) if rounds else 0.0 for i in range(k)]
