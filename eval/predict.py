"""Offline prediction of acceptance: what a head's training form would accept on texts that are already there.

No generation: one target pass over prompt and output, then the head in its training form, every slot at once. Rounds
are replayed as decoding would make them: a mean over *all* slots would weigh long accepted stretches too much, since
fewer rounds start inside them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heads.layers import HeadInput
from heads.replay import accepted_runs, walk_rounds
from heads.target import Target


@torch.inference_mode()
def slot_runs(target: Target, head: Any, prompt: list[int], output: list[int], k: int) -> list[int]:
    """Accepted run (0..k) of a greedy chain drafted from each slot, the last prompt token first.

    Slot t drafts x_{t+2}, x_{t+3}, ...; a prompt of 7 and an output of 5 (x_7..x_11) have slots 6..9.
    """
    ids = torch.tensor([[*prompt, *output]], device=target.device)
    slots = torch.arange(len(prompt) - 1, ids.shape[1] - 2, device=ids.device)
    if not len(slots):
        return []
    inputs = teacher_forced(target, head, ids, slots)
    drafts = [head.to_target(head.logits(hidden[0], i).argmax(-1)) for i, hidden in enumerate(head(inputs, k))]
    truth, exists = following(ids[0], slots, k)
    return accepted_runs(torch.stack(drafts, dim=-1) == truth, exists).tolist()


@torch.inference_mode()
def rank_accuracies(
    target: Target, head: Any, texts: Sequence[tuple[list[int], int]], ranks: int = 10
) -> list[list[float]]:
    """accuracies[d][r]: share of slots at which the draft of depth d + 1 with rank r is the text's next token.

    texts: (token ids, where the answer starts). Earlier drafts of a path are taken as right, which is what the value of
    a tree node asks (eval/tree.py `grown`); depths are the head's `max_draft`. A token outside the head's vocabulary
    has no rank, so that a row may sum to less than 1.
    """
    depth = head.max_draft
    hits, seen = torch.zeros(depth, ranks), torch.zeros(depth, 1)
    for text, start in texts:
        ids = torch.tensor([text], device=target.device)
        for slots in torch.arange(start - 1, len(text) - 2, device=ids.device).split(SLOTS):
            truth, exists = following(ids[0], slots, depth)
            for i, hidden in enumerate(head(teacher_forced(target, head, ids, slots), depth)):
                logits = head.logits(hidden[0], i)
                drafts = head.to_target(logits.topk(min(ranks, logits.shape[-1]), dim=-1).indices)
                right = (drafts == truth[:, i : i + 1]) & exists[:, i : i + 1]
                hits[i, : right.shape[1]] += right.sum(0).cpu()
                seen[i] += exists[:, i].sum().cpu()
    return (hits / seen.clamp(min=1)).tolist()


SLOTS = 128  # logits of so many slots at once


def teacher_forced(target: Target, head: Any, ids: Tensor, slots: Tensor) -> HeadInput:
    """What the training form of a head reads of one text: ids [1, T], slots [S]."""
    T = ids.shape[1]
    found = target.forward(ids, taps=head.taps)
    return HeadInput(
        last=found.last,
        taps=found.taps,
        embeddings=target.embed(ids),
        positions=torch.arange(T, device=ids.device).unsqueeze(0),
        documents=torch.zeros(1, T, dtype=torch.long, device=ids.device),
        slots=slots.unsqueeze(0),
    )


def following(text: Tensor, slots: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The tokens that slot t drafts, x_{t+2}..x_{t+1+k}, and which of them exist: [S, k] each; text [T]."""
    where = slots[:, None] + 2 + torch.arange(k, device=text.device)
    return text[where.clamp(max=len(text) - 1)], where < len(text)


def joint_acceptance(runs: Sequence[Sequence[int]], k: int) -> list[float]:
    """joint[i]: share of replayed rounds of chains of k that accept more than i; `runs` as slot_runs gives them."""
    rounds = [a for text in runs for a, _ in walk_rounds([min(r, k) for r in text], len(text) + 1)]
    return [sum(a > i for a in rounds) / len(rounds) if rounds else 0.0 for i in range(k)]
