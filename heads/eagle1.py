"""EAGLE-1 (Li et al., arXiv 2401.15077): one layer that predicts the target's next feature, read by its own LM head.

    u_t^0 = layer(fc [emb(x_{t+1}); h_t])             h_t the target's last feature; u_t^0 stands for h_{t+1}
    u_t^j = layer(fc [emb(x_{t+1+j}); u_t^{j-1}])     predicts h_{t+1+j}, and x_{t+2+j} through the target's LM head

The layer has no norm on its input and the head none on its output: a feature is what the target's LM head reads.
Embeddings and LM head are the target's, frozen. Trained on smooth-L1 between u and the target's feature plus the
cross-entropy of the logits (section 4.2); `noise` is added to the target's features, U(-noise, noise) in their own
units, so that the head learns to live with its own errors. HASS (arXiv 2408.15766) is `train_steps` > 1: the head then
reads its own output in training as it will when it drafts; alignment and masks: heads/unrolled.py.

State-dict names are those vLLM and SGLang load (export-contract.md): `fc` has no bias, the embedding comes first.
"""

import dataclasses
from typing import Any, Self

import torch
from torch import Tensor, nn

from heads import starts, unrolled
from heads.base import Head
from heads.borrowed import BorrowedLMHead
from heads.layers import HeadInput, LayerCache, layer_config, rotary
from heads.spec import TargetSpec


@dataclasses.dataclass
class Eagle1Config:
    kind: str = "eagle1"
    draft_vocab_size: int | None = None
    num_kv_heads: int | None = None  # None: the target's
    train_steps: int = 1  # 1: the paper; HASS aligns 3
    noise: float = 0.1  # half-width of the uniform noise on true features, in training only
    init: str = "random"  # random (paper) | target, see heads/starts.py
    max_draft: int = 16
    layer: Any = None  # sizes and RoPE of the layer where they are not the target's (heads.hub.load)


class Eagle1(Head):
    """Raises ValueError for a wrong setting, or a reduced vocabulary without its map."""

    uses_cache = True
    regresses = True

    def __init__(self, config: Eagle1Config, spec: TargetSpec, vocab: tuple[Tensor, Tensor] | None = None) -> None:
        starts.check_init(config.init, starts.TARGET_STARTS)
        unrolled.check_steps("train_steps", config.train_steps)
        if config.noise < 0:
            raise ValueError(f"head.noise={config.noise} must be >= 0")
        super().__init__(config, spec, vocab, taps=(), max_draft=config.max_draft, train_steps=config.train_steps)
        self.layer_config = layer_config(spec, config.num_kv_heads, config.layer)
        H = spec.hidden_size
        self.fc = nn.Linear(2 * H, H, bias=False)
        self.layers = nn.ModuleList([unrolled.DecoderLayer(self.layer_config, H)])
        self.rotary = rotary(self.layer_config)
        unrolled.draw(self)
        self._lm_head: BorrowedLMHead | None = None

    @property
    def layer(self) -> unrolled.DecoderLayer:
        return self.layers[0]  # type: ignore[return-value]

    def attach(self, target: Any) -> Self:
        self._lm_head = BorrowedLMHead(self, target)
        return self

    def pack_lm_head(self) -> None:
        if self._lm_head is not None:
            self._lm_head.pack()

    def init_from(self, target: Any, ids: Tensor) -> None:
        starts.eagle1(self, target, ids)

    def mix(self, embedding: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """fc of both is what attention reads, un-normed, and the residual as well."""
        x = self.fc(torch.cat([embedding, feature], dim=-1).to(self.fc.weight.dtype))
        return x, x

    def forward(self, inputs: HeadInput, steps: int) -> list[Tensor]:
        """Predicted features of the first `steps` steps, each [B, S, H], at the slots of `inputs`."""
        feature = inputs.last.to(self.fc.weight.dtype)
        if self.training and self.config.noise:
            feature = feature + self.config.noise * (2 * torch.rand_like(feature) - 1)
        return unrolled.unroll(self, feature, inputs, steps)

    def advance(self, cache: LayerCache, feature: Tensor, embedding: Tensor, step: int = 0) -> Tensor:
        return unrolled.advance(self, cache, feature, embedding)

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """fp32 draft logits [..., D]."""
        assert self._lm_head is not None, "attach(target) first: the LM head is the target's"
        return self._lm_head(hidden)
