"""MTP, the multi-token prediction module of DeepSeek-V3 (arXiv 2412.19437, section 2.2), on a frozen target.

    x_t^j = eh_proj [RMSNorm(emb(x_{t+1+j})); RMSNorm(u_t^{j-1})]      u_t^{-1} = h_t, the target's last feature
    u_t^j = block(x_t^j)                                               a whole decoder block, input norm included
    logits = LM head of the target (RMSNorm(u_t^j))                    predicts x_{t+2+j}

The paper has one module per depth; here one serves every depth, reading its own output (FastMTP, arXiv 2509.18362, does
the same), and `train_steps` depths are trained together: a module trained on depth 1 alone degrades when it is reused.
Embeddings and LM head are the target's, frozen; the norm before the LM head is the module's own.

State-dict names follow the released checkpoints (`enorm`, `hnorm`, `eh_proj`, `shared_head.norm`; vLLM's
deepseek_mtp.py), which put the embedding first where the paper's formula puts it second. That file also blanks the
embedding at position 0; it is kept here, as every other head keeps it.
"""

import dataclasses
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from heads import starts, unrolled
from heads.base import Head
from heads.borrowed import BorrowedLMHead
from heads.layers import HeadInput, LayerCache, RMSNorm, layer_config, rotary
from heads.spec import TargetSpec


@dataclasses.dataclass
class MtpConfig:
    kind: str = "mtp"
    draft_vocab_size: int | None = None
    num_kv_heads: int | None = None  # None: the target's
    train_steps: int = 3  # depths trained; the paper has 1, FastMTP 3
    init: str = "random"  # random | target, see heads/starts.py
    max_draft: int = 16


class MtpBlock(unrolled.DecoderLayer):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, config.hidden_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Mtp(Head):
    """Raises ValueError for a wrong setting, or a reduced vocabulary without its map."""

    uses_cache = True

    def __init__(self, config: MtpConfig, spec: TargetSpec, vocab: tuple[Tensor, Tensor] | None = None) -> None:
        starts.check_init(config.init, starts.TARGET_STARTS)
        unrolled.check_steps("train_steps", config.train_steps)
        super().__init__(config, spec, vocab, taps=(), max_draft=config.max_draft, train_steps=config.train_steps)
        self.layer_config = layer_config(spec, config.num_kv_heads)
        H, eps = spec.hidden_size, spec.rms_norm_eps
        self.enorm, self.hnorm = RMSNorm(H, eps), RMSNorm(H, eps)
        self.eh_proj = nn.Linear(2 * H, H, bias=False)
        self.mtp_block = MtpBlock(self.layer_config)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(H, eps)})
        self.rotary = rotary(self.layer_config)
        unrolled.draw(self)
        self._lm_head: BorrowedLMHead | None = None

    @property
    def layer(self) -> unrolled.DecoderLayer:
        return self.mtp_block

    def attach(self, target: Any) -> Self:
        self._lm_head = BorrowedLMHead(self, target)
        return self

    def pack_lm_head(self) -> None:
        if self._lm_head is not None:
            self._lm_head.pack()

    def init_from(self, target: Any, ids: Tensor) -> None:
        starts.mtp(self, target, ids)

    def mix(self, embedding: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Attention reads the normed projection of both; the residual is the projection itself."""
        both = torch.cat([self.enorm(embedding), self.hnorm(feature)], dim=-1)
        x = self.eh_proj(both.to(self.eh_proj.weight.dtype))
        return self.mtp_block.input_layernorm(x), x

    def forward(self, inputs: HeadInput, steps: int) -> list[Tensor]:
        """Block outputs of the first `steps` depths, each [B, S, H], at the slots of `inputs`."""
        return unrolled.unroll(self, inputs.last, inputs, steps)

    def advance(self, cache: LayerCache, feature: Tensor, embedding: Tensor, step: int = 0) -> Tensor:
        return unrolled.advance(self, cache, feature, embedding)

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """fp32 draft logits [..., D]."""
        assert self._lm_head is not None, "attach(target) first: the LM head is the target's"
        return self._lm_head(self.shared_head["norm"](hidden))
