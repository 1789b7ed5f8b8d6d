"""EAGLE-3 (Li et al., arXiv 2503.01840): one layer on fused features, trained by unrolling its own drafting.

    g_t   = fc [tap_a(t); tap_b(t); tap_c(t)]                                fused feature of the target, 1..n taps
    u_t^0 = layer(cat(norm(emb(x_{t+1})), norm(g_t)),       residual g_t)         predicts x_{t+2}
    u_t^j = layer(cat(norm(emb(x_{t+1+j})), norm(u_t^{j-1})), residual u_t^{j-1})   predicts x_{t+2+j}
    logits = lm_head(norm(u))                                                over D <= V tokens

Alignment, position ids and masks: heads/unrolled.py. State-dict names are those vLLM and SGLang load
(export-contract.md). The flags are those of the speculators format, as vLLM's llama_eagle3.py computes them:

    norm_before_fc         one RMSNorm over all taps together before fc                  input_norm.weight [n H]
    fc_norm                one RMSNorm per tap before fc (EAGLE-3.1); after the other    fc_norm.{i}.weight [H]
    norm_before_residual   the residual is norm(feature), not the feature
    norm_output            what the next step reads is norm(u), the vector the LM head reads (EAGLE-3.1)

`train_lm_head: false` freezes `lm_head` at the target's rows, as speculators does: it is saved, and never stepped.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from heads import starts, unrolled
from heads.base import Head
from heads.layers import HeadInput, LayerCache, RMSNorm, layer_config, rotary
from heads.spec import TargetSpec, check_taps, default_taps


@dataclasses.dataclass
class Eagle3Config:
    kind: str = "eagle3"
    taps: list[int] | None = None  # None: [2, L // 2, L - 3]
    draft_vocab_size: int | None = None
    num_kv_heads: int | None = None  # None: the target's
    ttt_steps: int = 3  # J; the paper trains 7
    init: str = "induction"  # random (paper) | target | induction, see heads/starts.py
    train_lm_head: bool = True
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    max_draft: int = 16
    layer: Any = None  # sizes and RoPE of the layer where they are not the target's (heads.hub.load)


class DraftLayer(unrolled.DecoderLayer):
    """One decoder layer whose attention reads cat(norm(embedding), norm(feature))."""

    def __init__(self, config: LlamaConfig) -> None:
        H, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(config, 2 * H)
        self.input_layernorm = RMSNorm(H, eps)
        self.hidden_norm = RMSNorm(H, eps)


class Eagle3(Head):
    """Raises ValueError for taps outside the target, a bad draft vocabulary, or a reduced one without its map."""

    uses_cache = True
    reads_last = False

    def __init__(self, config: Eagle3Config, spec: TargetSpec, vocab: tuple[Tensor, Tensor] | None = None) -> None:
        starts.check_init(config.init, starts.STARTS)
        unrolled.check_steps("ttt_steps", config.ttt_steps)
        taps = check_taps(default_taps(spec.num_layers) if config.taps is None else config.taps, spec.num_layers)
        config = dataclasses.replace(config, taps=list(taps))
        super().__init__(config, spec, vocab, taps=taps, max_draft=config.max_draft, train_steps=config.ttt_steps)
        self.layer_config = layer_config(spec, config.num_kv_heads, config.layer)
        H, n, eps = spec.hidden_size, len(taps), self.layer_config.rms_norm_eps
        self.input_norm = RMSNorm(n * H, eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList([RMSNorm(H, eps) for _ in taps]) if config.fc_norm else None
        self.fc = nn.Linear(n * H, H, bias=False)
        self.midlayer = DraftLayer(self.layer_config)
        self.norm = RMSNorm(H, eps)
        self.lm_head = nn.Linear(H, self.draft_vocab_size, bias=False)
        self.rotary = rotary(self.layer_config)
        unrolled.draw(self)
        self.lm_head.weight.requires_grad_(config.train_lm_head)

    @property
    def layer(self) -> unrolled.DecoderLayer:
        return self.midlayer

    def init_from(self, target: Any, ids: Tensor) -> None:
        """Replace the random start as `config.init` says; ids [1, T] are a text to measure the taps' scale on."""
        starts.eagle3(self, target, ids)

    def before_fc(self, taps: Tensor) -> Tensor:
        """[B, n, taps, H] -> what `fc` reads, in the same shape."""
        if self.input_norm is not None:
            taps = self.input_norm(taps.flatten(-2)).view(taps.shape)
        if self.fc_norm is not None:
            taps = torch.stack([norm(tap) for norm, tap in zip(self.fc_norm, taps.unbind(-2), strict=True)], dim=-2)
        return taps

    def fuse(self, taps: Tensor) -> Tensor:
        """[B, n, taps, H] -> g [B, n, H]."""
        return self.fc(self.before_fc(taps).flatten(-2).to(self.fc.weight.dtype))

    def feature(self, last: Tensor, taps: Tensor | None) -> Tensor:
        assert taps is not None, "EAGLE-3 reads taps"
        return self.fuse(taps)

    def feed(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden) if self.config.norm_output else hidden

    def mix(self, embedding: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Attention reads both, normed; the residual is the feature, before its norm or after."""
        normed = self.midlayer.hidden_norm(feature)
        read = torch.cat([self.midlayer.input_layernorm(embedding), normed], dim=-1)
        return read, normed if self.config.norm_before_residual else feature

    def forward(self, inputs: HeadInput, steps: int) -> list[Tensor]:
        """Hidden states u^0 .. u^{steps-1}, each [B, S, H], at the slots of `inputs`, teacher-forced."""
        return unrolled.unroll(self, self.feature(inputs.last, inputs.taps), inputs, steps)

    def advance(self, cache: LayerCache, feature: Tensor, embedding: Tensor, step: int = 0) -> Tensor:
        """`feature` is `fuse(taps)` for the target's true slots and `feed(u)` of the step before for the head's own."""
        return unrolled.advance(self, cache, feature, embedding)

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """fp32 draft logits [..., D]."""
        return self.lm_head(self.norm(hidden)).float()
