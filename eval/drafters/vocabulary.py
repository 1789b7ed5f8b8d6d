"""Draft logits over D tokens -> target ids, confidences, and the law of sampled drafts over V."""

from typing import Any

import torch
from torch import Tensor

from eval.drafter import Ask
from eval.warpers import warp
from heads.target import Target


class DraftVocabulary:
    """q is zero outside D, and zero on ids the tokenizer does not have."""

    def __init__(self, head: Any, target: Target) -> None:
        self.vocab_size = head.vocab_size
        self.ids = head.to_target(torch.arange(head.draft_vocab_size, device=head.d2t.device)).cpu()  # [D], ascending
        self.real = int((self.ids < target.spec.tokenizer_size).sum())  # padding rows of the embedding come last

    def top(self, logits: Tensor, width: int, confident: bool) -> tuple[Tensor, Tensor]:
        """Rows [R, D] -> the `width` most likely target ids [R, width], best first, and their probabilities before any
        warper, fp32 on the CPU; all 1 where they are not asked for."""
        logits = logits[..., : self.real]
        if width == 1 and not confident:
            tokens = self.ids[logits.argmax(-1, keepdim=True).cpu()]
            return tokens, torch.ones(tokens.shape)
        best, at = logits.topk(min(width, self.real), dim=-1)
        if confident:
            best = (best - logits.logsumexp(-1, keepdim=True)).exp()
        return self.ids[at.cpu()], best.cpu() if confident else torch.ones(at.shape)

    def probs(self, logits: Tensor, ask: Ask) -> Tensor:
        """The law sampled drafts come from, through the same warpers as the target's p: fp32 [..., V] on the CPU."""
        logits = logits.float().cpu()
        full = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        full[..., self.ids[: self.real]] = logits[..., : self.real]
        return warp(full, ask.warpers)
