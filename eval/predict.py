"""Offline prediction of the acceptance length: a head's joint accuracies over texts that are already there.

No generation: one target pass over prompt and output, then the head in its training form, every slot at once.
"""

from collections.abc import Sequence
from typing import Any

import torch

from heads.layers import HeadInput
from heads.target import Target


@torch.inference_mode()
def joint_accuracy(target: Target, head: Any, texts: Sequence[tuple[list[int], list[int]]], k: int) -> list[float]:
    """joint[i] = share of slots whose first i + 1 greedy drafts all equal the text. texts: (prompt, output) ids.

    Slots start at the last prompt token: slot t drafts x_{t+2}, x_{t+3}, ...; a slot counts at step i where the text
    reaches that far. Example: prompt of 7, output of 5 (x_7..x_11): step 0 has slots 6..9, step 1 slots 6..8.
    """
    hits, seen = torch.zeros(k), torch.zeros(k)
    for prompt, output in texts:
        text, first = [*prompt, *output], len(prompt) - 1
        if len(output) < 2:
            continue
        ids = torch.tensor([text], device=target.device)
        T = ids.shape[1]
        found = target.forward(ids, taps=head.taps)
        slots = torch.arange(first, T - 2)
        inputs = HeadInput(
            last=found.last,
            taps=found.taps,
            embeddings=target.embed(ids),
            positions=torch.arange(T).unsqueeze(0),
            documents=torch.zeros(1, T, dtype=torch.long),
            slots=slots.unsqueeze(0),
        )
        right = torch.ones(len(slots), dtype=torch.bool)
        for step, hidden in enumerate(head(inputs, k)):
            reach = slots + 2 + step < T
            drafted = head.to_target(head.logits(hidden[0], step).argmax(-1))
            right = right & reach & (drafted == ids[0, (slots + 2 + step).clamp(max=T - 1)])
            hits[step] += right.sum()
            seen[step] += reach.sum()
    return [h / s if s else 0.0 for h, s in zip(hits.tolist(), seen.tolist(), strict=True)]
