"""Medusa (Cai et al., arXiv 2401.10774, section 2.1): K residual heads on the target's last feature.

    head k (k = 1..K):   logits_k(t) = W2_k (h_t + SiLU(W1_k h_t + b_k))   predicts x_{t+1+k}

Step i of this project is head k = i + 1. W1 = 0 and b = 0 at start and W2 a copy of the LM head, so that each head
begins as the LM head itself. With `shared_lm_head` only the residual blocks are trained and W2 stays the target's LM
head (all heads of a round then cost one K-row product); own LM heads cost K * D * H parameters.
"""

import dataclasses
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.base import Head, gather_slots
from heads.layers import HeadInput, LayerCache
from heads.packed import PackedLinear
from heads.spec import TargetSpec


@dataclasses.dataclass
class MedusaConfig:
    kind: str = "medusa"
    num_heads: int = 5
    num_layers: int = 1  # residual blocks per head; never shared between blocks
    shared_lm_head: bool = True
    draft_vocab_size: int | None = None
    init: str = "target"  # own LM heads: 'target' copies the LM head (the paper), 'random' starts them at N(0, 0.02)


class ResBlock(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class Medusa(Head):
    """K residual heads. Raises ValueError for K < 1, an unknown `init`, or a reduced vocabulary without its map."""

    parallel = True

    def __init__(self, config: MedusaConfig, spec: TargetSpec, vocab: tuple[Tensor, Tensor] | None = None) -> None:
        if config.num_heads < 1 or config.num_layers < 1:
            raise ValueError(f"head.num_heads={config.num_heads} and head.num_layers={config.num_layers} must be >= 1")
        if config.init not in ("target", "random"):
            raise ValueError(f"head.init={config.init!r} must be 'target' or 'random'")
        super().__init__(config, spec, vocab, taps=(), max_draft=config.num_heads, train_steps=config.num_heads)
        self.medusa_heads = nn.ModuleList()
        for _ in range(config.num_heads):
            blocks: list[nn.Module] = [ResBlock(spec.hidden_size) for _ in range(config.num_layers)]
            if not config.shared_lm_head:
                blocks.append(nn.Linear(spec.hidden_size, self.draft_vocab_size, bias=False))
                nn.init.normal_(blocks[-1].weight, std=0.02)  # type: ignore[arg-type]
            self.medusa_heads.append(nn.Sequential(*blocks))
        self._lm_head: tuple[Tensor, Tensor | None] | None = None
        self._packed: PackedLinear | None = None

    def attach(self, target: Any) -> Self:
        """Borrow the target's LM-head rows (never saved with the head)."""
        self._lm_head = self.borrow_lm_head(target)
        return self

    def pack_lm_head(self) -> None:
        if self.config.shared_lm_head and self._lm_head is not None:
            self._packed = PackedLinear(*self._lm_head)

    def init_from(self, target: Any, ids: Tensor) -> None:
        """Start own LM heads as copies of the target's rows (the paper's start); a shared one has nothing to copy."""
        if self.config.init == "target" and not self.config.shared_lm_head:
            weight, _ = target.lm_head(self.target_rows())
            with torch.no_grad():
                for head in self.medusa_heads:
                    head[-1].weight.copy_(weight)  # type: ignore[index]

    def forward(self, inputs: HeadInput, steps: int) -> list[Tensor]:
        """Hidden states [B, S, H] of the first `steps` heads at the slots of `inputs`."""
        h = gather_slots(inputs.last, inputs.slots)
        return [self.hidden(h, i) for i in range(steps)]

    def hidden(self, last: Tensor, step: int) -> Tensor:
        for block in self.medusa_heads[step][: self.config.num_layers]:  # type: ignore[index]
            last = block(last)
        return last

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """fp32 draft logits [..., D]."""
        if not self.config.shared_lm_head:
            return self.medusa_heads[step][-1](hidden).float()  # type: ignore[index]
        if self._packed is not None:
            return self._packed(hidden).float()
        assert self._lm_head is not None, "attach(target) first: the LM head is the target's"
        return F.linear(hidden, *self._lm_head).float()

    def absorb(self, cache: LayerCache, last: Tensor, taps: Tensor | None) -> None:
        """Medusa keeps nothing of true slots: all heads of a round read the newest feature alone."""

    def draft_logits(
        self, last: Tensor, steps: int, cache: LayerCache | None = None, embedding: Tensor | None = None
    ) -> Tensor:
        """Logits [B, steps, D] of one round from the last feature [B, H]: all heads read the same h_t."""
        hidden = torch.stack([self.hidden(last, i) for i in range(steps)], dim=1)
        if self.config.shared_lm_head:
            return self.logits(hidden, 0)
        return torch.stack([self.logits(hidden[:, i], i) for i in range(steps)], dim=1)
