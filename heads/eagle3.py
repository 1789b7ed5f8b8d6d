"""EAGLE-3 (Li et al., arXiv 2503.01840): one layer on fused features, trained by unrolling its own drafting.

    g_t   = fc [tap_a(t); tap_b(t); tap_c(t)]                                fused feature of the target
    u_t^0 = layer(cat(norm(emb(x_{t+1})), norm(g_t)),       residual g_t)         predicts x_{t+2}
    u_t^j = layer(cat(norm(emb(x_{t+1+j})), norm(u_t^{j-1})), residual u_t^{j-1})   predicts x_{t+2+j}
    logits = lm_head(norm(u))                                                over D <= V tokens

Alignment, position ids and masks: conventions.md, "EAGLE-3 training-time test". Worked example, slot t = 4, J = 3:

    step j   reads            position id   sees keys                              predicts
    0        g_4, emb(x_5)    4             step 0 of slots 0..4                   x_6
    1        u_4^0, emb(x_6)  5             step 0 of slots 0..4, step 1 of slot 4  x_7
    2        u_4^1, emb(x_7)  6             ... and step 2 of slot 4               x_8

State-dict names are those vLLM and SGLang load (export-contract.md).
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from heads import starts
from heads.base import Head, gather_slots, shift, slot_mask
from heads.layers import (
    Attention,
    GatedMLP,
    HeadInput,
    LayerCache,
    RMSNorm,
    layer_config,
    rotary,
    rotate,
    unrolled_attention,
)
from heads.spec import TargetSpec, check_taps, default_taps


@dataclasses.dataclass
class Eagle3Config:
    kind: str = "eagle3"
    taps: list[int] | None = None  # None: [2, L // 2, L - 3]
    draft_vocab_size: int | None = None
    num_kv_heads: int | None = None  # None: the target's
    ttt_steps: int = 3  # J; the paper trains 7
    init: str = "induction"  # random (paper) | target | induction, see heads/starts.py
    max_draft: int = 16


class DraftLayer(nn.Module):
    """One decoder layer whose attention reads cat(norm(embedding), norm(feature)) and whose residual is the feature."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(H, eps)
        self.hidden_norm = RMSNorm(H, eps)
        self.self_attn = Attention(config, 2 * H)
        self.post_attention_layernorm = RMSNorm(H, eps)
        self.mlp = GatedMLP(H, config.intermediate_size)

    def mix(self, embedding: Tensor, feature: Tensor) -> Tensor:
        return torch.cat([self.input_layernorm(embedding), self.hidden_norm(feature)], dim=-1)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        x = residual + attended
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3(Head):
    """Raises ValueError for taps outside the target, a bad draft vocabulary, or a reduced one without its map."""

    uses_cache = True
    reads_last = False

    def __init__(self, config: Eagle3Config, spec: TargetSpec, vocab: tuple[Tensor, Tensor] | None = None) -> None:
        if config.init not in starts.STARTS:
            raise ValueError(f"head.init={config.init!r} must be one of {', '.join(starts.STARTS)}")
        if config.ttt_steps < 1:
            raise ValueError(f"head.ttt_steps={config.ttt_steps} must be >= 1")
        taps = check_taps(default_taps(spec.num_layers) if config.taps is None else config.taps, spec.num_layers)
        config = dataclasses.replace(config, taps=list(taps))
        super().__init__(config, spec, vocab, taps=taps, max_draft=config.max_draft, train_steps=config.ttt_steps)
        self.layer_config = layer_config(spec, config.num_kv_heads)
        H = spec.hidden_size
        self.fc = nn.Linear(len(self.taps) * H, H, bias=False)
        self.midlayer = DraftLayer(self.layer_config)
        self.norm = RMSNorm(H, spec.rms_norm_eps)
        self.lm_head = nn.Linear(H, self.draft_vocab_size, bias=False)
        self.rotary = rotary(self.layer_config)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def init_from(self, target: Any, ids: Tensor) -> None:
        """Replace the random start as `config.init` says; ids [1, T] are a text to measure the taps' scale on."""
        starts.apply(self, target, ids)

    def fuse(self, taps: Tensor) -> Tensor:
        """[B, n, taps, H] -> g [B, n, H]."""
        return self.fc(taps.flatten(-2).to(self.fc.weight.dtype))

    def feature(self, last: Tensor, taps: Tensor | None) -> Tensor:
        assert taps is not None, "EAGLE-3 reads taps"
        return self.fuse(taps)

    def forward(self, inputs: HeadInput, steps: int) -> list[Tensor]:
        """Hidden states u^0 .. u^{steps-1}, each [B, S, H], at the slots of `inputs`, teacher-forced.

        Only slots are queried; step-0 keys come from every position (a slot must see the whole prefix).
        """
        assert inputs.taps is not None, "EAGLE-3 reads taps"
        layer, attn = self.midlayer, self.midlayer.self_attn
        g = self.fuse(inputs.taps)
        cos, sin = self.rotary(g, inputs.positions)
        mixed = layer.mix(shift(inputs.embeddings, 1), g)
        keys = attn.expand(rotate(attn.split(mixed, attn.k_proj), cos, sin))
        values = attn.expand(attn.split(mixed, attn.v_proj))
        slots = inputs.slots
        mask = slot_mask(slots, inputs.documents)
        positions = inputs.positions.gather(1, slots)
        feature, mixed = gather_slots(g, slots), gather_slots(mixed, slots)
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        hidden: list[Tensor] = []
        for step in range(steps):
            cos, sin = self.rotary(feature, positions + step)
            if step:
                mixed = layer.mix(gather_slots(shift(inputs.embeddings, 1 + step), slots), feature)
                own_keys.append(attn.expand(rotate(attn.split(mixed, attn.k_proj), cos, sin)))
                own_values.append(attn.expand(attn.split(mixed, attn.v_proj)))
            query = rotate(attn.split(mixed, attn.q_proj), cos, sin)
            attended = attn.join(unrolled_attention(query, keys, values, mask, own_keys, own_values))
            feature = layer.finish(feature, attended)
            hidden.append(feature)
        return hidden

    def advance(self, cache: LayerCache, feature: Tensor, embedding: Tensor, step: int = 0) -> Tensor:
        """Cached drafting: consume n slots (feature and next-token embedding, both [B, n, H]) -> u [B, n, H].

        `feature` is `fuse(taps)` for the target's true slots and the previous u for the head's own.
        """
        layer, attn = self.midlayer, self.midlayer.self_attn
        mixed = layer.mix(embedding, feature)
        cos, sin = self.rotary(feature, cache.positions(feature.shape[1]).to(feature.device))
        query = rotate(attn.split(mixed, attn.q_proj), cos, sin)
        keys, values, mask = cache.write(
            rotate(attn.split(mixed, attn.k_proj), cos, sin), attn.split(mixed, attn.v_proj)
        )
        attended = nn.functional.scaled_dot_product_attention(
            query, attn.expand(keys), attn.expand(values), attn_mask=mask
        )
        return layer.finish(feature, attn.join(attended))

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """fp32 draft logits [..., D]."""
        return self.lm_head(self.norm(hidden)).float()
