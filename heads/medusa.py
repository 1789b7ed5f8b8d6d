"""Medusa-1 (Cai et al., arXiv 2401.10774, section 2.1): K residual heads on the target's last feature.

    head k (k = 1..K):   logits_k(t) = W2_k (h_t + SiLU(W1_k h_t + b_k))   predicts x_{t+1+k}

Step i of this project is head k = i + 1. W1 = 0 and b = 0 at start and W2 a copy of the LM head, so that each head
begins as the LM head itself. With `shared_lm_head` only the residual blocks are trained and W2 stays the target's LM
head (all heads of a round then cost one K-row product); own LM heads cost K * D * H parameters.
"""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.layers import HeadInput, map_buffers
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


class Medusa(nn.Module):
    """K residual heads. Raises ValueError for K < 1, an unknown `init`, or a reduced vocabulary without its map."""

    taps: tuple[int, ...] = ()
    uses_cache = False

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: MedusaConfig, spec: TargetSpec, vocab: tuple[Tensor, Tensor] | None = None) -> None:
        super().__init__()
        if config.num_heads < 1 or config.num_layers < 1:
            raise ValueError(f"head.num_heads={config.num_heads} and head.num_layers={config.num_layers} must be >= 1")
        if config.init not in ("target", "random"):
            raise ValueError(f"head.init={config.init!r} must be 'target' or 'random'")
        self.config, self.max_draft, self.train_steps = config, config.num_heads, config.num_heads
        d2t, t2d = map_buffers(vocab, config.draft_vocab_size, spec.vocab_size)
        self.register_buffer("d2t", d2t)
        self.register_buffer("t2d", t2d)
        self.vocab_size, self.draft_vocab_size = spec.vocab_size, d2t.shape[0]
        self.medusa_heads = nn.ModuleList()
        for _ in range(config.num_heads):
            blocks: list[nn.Module] = [ResBlock(spec.hidden_size) for _ in range(config.num_layers)]
            if not config.shared_lm_head:
                blocks.append(nn.Linear(spec.hidden_size, self.draft_vocab_size, bias=False))
                nn.init.normal_(blocks[-1].weight, std=0.02)  # type: ignore[arg-type]
            self.medusa_heads.append(nn.Sequential(*blocks))
        self._lm_head: tuple[Tensor, Tensor | None] | None = None

    def attach(self, target: Any) -> "Medusa":
        """Borrow the target's LM-head rows (never saved with the head)."""
        weight, bias = target.lm_head(self.target_rows())
        self._lm_head = (weight.detach(), None if bias is None else bias.detach())
        return self

    def init_from(self, target: Any, ids: Tensor) -> None:
        """Start own LM heads as copies of the target's rows (the paper's start); a shared one has nothing to copy."""
        if self.config.init == "target" and not self.config.shared_lm_head:
            weight, _ = target.lm_head(self.target_rows())
            with torch.no_grad():
                for head in self.medusa_heads:
                    head[-1].weight.copy_(weight)  # type: ignore[index]

    def forward(self, inputs: HeadInput, steps: int) -> list[Tensor]:
        """Hidden states [B, S, H] of the first `steps` heads at the slots of `inputs`."""
        h = inputs.last.gather(1, inputs.slots[..., None].expand(-1, -1, inputs.last.shape[-1]))
        return [self.hidden(h, i) for i in range(steps)]

    def hidden(self, last: Tensor, step: int) -> Tensor:
        for block in self.medusa_heads[step][: self.config.num_layers]:  # type: ignore[index]
            last = block(last)
        return last

    def logits(self, hidden: Tensor, step: int) -> Tensor:
        """fp32 draft logits [..., D]."""
        if not self.config.shared_lm_head:
            return self.medusa_heads[step][-1](hidden).float()  # type: ignore[index]
        assert self._lm_head is not None, "attach(target) first: the LM head is the target's"
        return F.linear(hidden, *self._lm_head).float()

    def draft_logits(self, last: Tensor, steps: int) -> Tensor:
        """Logits [B, steps, D] of one round from the last feature [B, H]: all heads read the same h_t."""
        hidden = torch.stack([self.hidden(last, i) for i in range(steps)], dim=1)
        if self.config.shared_lm_head:
            return self.logits(hidden, 0)
        return torch.stack([self.logits(hidden[:, i], i) for i in range(steps)], dim=1)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        return draft_ids + self.d2t[draft_ids]

    def target_rows(self) -> Tensor | None:
        """Target ids of the draft vocabulary, or None when it is the whole one."""
        return None if self.draft_vocab_size == self.vocab_size else self.t2d.nonzero().squeeze(1)
