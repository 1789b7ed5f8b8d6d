"""Block head (DFlash: Chen, Liang & Liu, arXiv 2602.06036): one forward drafts a whole block from an anchor.

    g_t   = norm(fc [tap_a(t); tap_b(t); ...])            fused feature of a true slot: extra keys and values of *every*
                                                          layer, k = rope(norm(K g_t)), v = V g_t, at position t
    block = [emb(x_{t+1}), MASK, ..., MASK]               b rows at positions t+1 .. t+b; sees g_0..g_t and, in both
                                                          directions, itself
    logits = lm_head(norm(block rows after all layers))   the target's own frozen LM head unless `own_lm_head`

Worked example, slot t = 4 (x_5 known, x_6 drafted first), block_size b = 4:

    row   reads      position id   predicts, from_anchor = false (paper)   predicts, from_anchor = true
    0     emb(x_5)   5             -                                       x_6 = step 0
    1     MASK       6             x_6 = step 0                            x_7 = step 1
    2     MASK       7             x_7 = step 1                            x_8 = step 2
    3     MASK       8             x_8 = step 2                            x_9 = step 3

In the paper a row predicts the token of its own position, so that row 0 predicts nothing and b rows draft b - 1 tokens
(z-lab/dflash, model/dflash.py: `[:, -block_size+1:]`; SpecForge core/dflash.py: "position k predicts token anchor+k").
With `from_anchor` each row predicts the token after its position and b rows draft b tokens (`sample_from_anchor` of
vllm-project/speculators and of DeepSpec's checkpoints). A head trained for one and read as the other accepts nothing.

The whole block always runs, however few steps are asked for: its rows see each other, so a shorter block would be
another function than the one trained. One learned MASK vector serves all rows: positions reach attention through RoPE,
and vectors per row were measured worse by P-EAGLE (arXiv 2602.01469). Loss weight of step i: exp(-i / gamma), gamma =
7 / 5 / 4 for b = 16 / 10 / 8, which is `train.loss.step_decay` = exp(-1 / gamma) = .8669 / .8187 / .7788.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from heads import starts, unrolled
from heads.base import Head, gather_slots, shift, slot_mask
from heads.borrowed import BorrowedLMHead
from heads.layers import Attention, GatedMLP, HeadInput, LayerCache, RMSNorm, layer_config, rotary, rotate
from heads.spec import TargetSpec, check_taps

_SCORES = 2**27  # attention scores held at once outside training: 512 MB in fp32


@dataclasses.dataclass
class BlockConfig:
    kind: str = "block"
    taps: list[int] | None = None  # None: what leaves up to 5 layers, uniform in [1, L - 3]
    num_layers: int = 2  # the paper trains 5 for targets of 4B and 8B
    block_size: int = 5  # rows of a block; the paper 16, 10 or 8
    from_anchor: bool = False  # true: row 0 predicts too, which vLLM does not read
    draft_vocab_size: int | None = None
    num_kv_heads: int | None = None  # None: the target's
    own_lm_head: bool = False  # train an LM head over the draft vocabulary instead of borrowing the target's rows
    anchors: int | None = None  # slots a step trains of a conversation, drawn at random; None: all; the paper 512
    init: str = "target"  # random (paper) | target, see heads/starts.py
    layer: Any = None  # sizes and RoPE of the layers where they are not the target's (heads.hub.load)


class BlockAttention(Attention):
    """Attention of block rows over the context's keys and the block's own; queries and keys normed (Qwen3)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, config.hidden_size)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, n, H] -> keys, values [B, KV, n, d]."""
        return rotate(self.k_norm(self.split(x, self.k_proj)), cos, sin), self.split(x, self.v_proj)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, mask: Tensor, block: int
    ) -> Tensor:
        """x [B, S * block, H], context keys and values [B, KV, T, d], mask [B, 1, S, T] -> [B, S * block, H]."""
        query = rotate(self.q_norm(self.split(x, self.q_proj)), *rope)
        own = [self.expand(kv).unflatten(2, (-1, block)) for kv in self.keys_values(x, *rope)]
        query = query.unflatten(2, (-1, block))
        return self.join(block_attention(query, self.expand(keys), self.expand(values), mask, *own).flatten(2, 3))


class BlockLayer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, mask: Tensor, block: int
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, keys, values, mask, block)
        return x + self.mlp(self.post_attention_layernorm(x))


class Block(Head):
    """Raises ValueError for bad taps, sizes below 1 (block_size below 2), an unknown `init`, or a bad vocabulary."""

    parallel = True
    uses_cache = True

    def __init__(self, config: BlockConfig, spec: TargetSpec, vocab: tuple[Tensor, Tensor] | None = None) -> None:
        starts.check_init(config.init, starts.TARGET_STARTS)
        for name, least in (("num_layers", 1), ("block_size", 2), ("anchors", 1)):
            if (value := getattr(config, name)) is not None and value < least:
                raise ValueError(f"head.{name}={value} must be at least {least}")
        taps = check_taps(block_taps(spec.num_layers) if config.taps is None else config.taps, spec.num_layers)
        config = dataclasses.replace(config, taps=list(taps))
        self.first = 0 if config.from_anchor else 1  # the row that predicts step 0
        steps = config.block_size - self.first
        super().__init__(config, spec, vocab, taps=taps, max_draft=steps, train_steps=steps)
        self.max_slots = config.anchors
        self.layer_config = layer_config(spec, config.num_kv_heads, config.layer)
        H, eps = spec.hidden_size, spec.rms_norm_eps
        self.fc = nn.Linear(len(taps) * H, H, bias=False)
        self.hidden_norm = RMSNorm(H, eps)
        self.mask_embedding = nn.Parameter(0.02 * torch.randn(H))
        self.layers = nn.ModuleList(BlockLayer(self.layer_config) for _ in range(config.num_layers))
        self.norm = RMSNorm(H, eps)
        self.lm_head = nn.Linear(H, self.draft_vocab_size, bias=False) if config.own_lm_head else None
        self.rotary = rotary(self.layer_config)
        unrolled.draw(self)
        self._lm_head: BorrowedLMHead | None = None

    def attach(self, target: Any) -> Self:
        self._lm_head = None if self.config.own_lm_head else BorrowedLMHead(self, target)
        return self

    def pack_lm_head(self) -> None:
        if self._lm_head is not None:
            self._lm_head.pack()

    def init_from(self, target: Any, ids: Tensor) -> None:
        starts.block(self, target, ids)

    def feature(self, last: Tensor, taps: Tensor | None) -> Tensor:
        """taps [B, n, k, H] -> g [B, n, H], already normed: layers project it as it is."""
        assert taps is not None, "a block head reads taps"
        return self.hidden_norm(self.fc(taps.flatten(-2).to(self.fc.weight.dtype)))

    def forward(self, inputs: HeadInput, steps: int) -> list[Tensor]:
        """Hidden states of steps 0 .. steps-1, each [B, S, H], at the slots of `inputs`: one block per slot."""
        g = self.feature(inputs.last, inputs.taps)
        rope = self.rotary(g, inputs.positions)
        context = [layer.self_attn.keys_values(g, *rope) for layer in self.layers]  # type: ignore[union-attr,operator]
        anchors = gather_slots(shift(inputs.embeddings, 1), inputs.slots).to(self.mask_embedding.dtype)
        positions = inputs.positions.gather(1, inputs.slots) + 1
        mask = slot_mask(inputs.slots, inputs.documents)
        (B, T), b = inputs.positions.shape, self.config.block_size
        n = max(1, _SCORES // (B * self.layer_config.num_attention_heads * b * (T + b)))  # blocks at once
        pieces = zip(anchors.split(n, 1), positions.split(n, 1), mask.split(n, 2), strict=True)
        rows = torch.cat([self._rows(x, p, context, m) for x, p, m in pieces], dim=1)
        return list(rows[:, :, self.first : self.first + steps].unbind(2))

    def new_cache(self, batch: int = 1) -> LayerCache:
        return LayerCache(batch, self.config.num_layers)

    def absorb(self, cache: LayerCache, last: Tensor, taps: Tensor | None) -> None:
        """Add n true slots (taps [B, n, k, H]) to the context: their keys and values in every layer."""
        g = self.feature(last, taps)
        rope = self.rotary(g, cache.positions(g.shape[1]).to(g.device))
        for i, layer in enumerate(self.layers):
            keys, values = layer.self_attn.keys_values(g, *rope)  # type: ignore[union-attr,operator]
            cache.write(keys, values, i)

    def draft_logits(
        self, last: Tensor, steps: int, cache: LayerCache | None = None, embedding: Tensor | None = None
    ) -> Tensor:
        """fp32 logits [B, steps, D] after the newest slot, from the anchor's `embedding` [B, H]; `last` is not read.

        Leaves nothing in `cache`.
        """
        assert cache is not None and embedding is not None, "a block head drafts from its context and an anchor"
        held = [cache.read(i) for i in range(len(self.layers))]
        context = [(keys, values) for keys, values, _ in held]
        anchor = embedding[:, None].to(self.mask_embedding.dtype)
        rows = self._rows(anchor, cache.positions(1).to(anchor.device), context, held[0][2])
        return self.logits(rows[:, 0, self.first : self.first + steps])

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """fp32 draft logits [..., D]."""
        hidden = self.norm(hidden)
        if self.lm_head is not None:
            return self.lm_head(hidden).float()
        assert self._lm_head is not None, "attach(target) first: the LM head is the target's"
        return self._lm_head(hidden)

    def _rows(
        self, anchors: Tensor, positions: Tensor, context: Sequence[tuple[Tensor, Tensor]], mask: Tensor
    ) -> Tensor:
        """Blocks from anchor embeddings [B, S, H] at positions [B, S], mask [B, 1, S, T] -> [B, S, b, H]."""
        B, S, H = anchors.shape
        b = self.config.block_size
        x = torch.cat([anchors[:, :, None], self.mask_embedding.expand(B, S, b - 1, H)], dim=2).flatten(1, 2)
        rope = self.rotary(x, (positions[..., None] + torch.arange(b, device=x.device)).flatten(1))
        for layer, (keys, values) in zip(self.layers, context, strict=True):
            x = layer(x, rope, keys, values, mask, b)
        return x.unflatten(1, (S, b))


def block_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, own_keys: Tensor, own_values: Tensor
) -> Tensor:
    """Rows of block s see context positions through mask[:, :, s] and all rows of their own block, never another's.

    query, own_keys, own_values [B, h, S, b, d], keys, values [B, h, T, d], mask [B, 1, S, T] bool -> [B, h, S, b, d].
    Softmax in fp32. Memory is that of the scores, B h S b (T + b): `anchors` bounds S in training.
    """
    B, h, S, b, d = query.shape
    scores = (query.flatten(2, 3) @ keys.transpose(-1, -2)).unflatten(2, (S, b)).float()
    scores = scores.masked_fill(~mask[:, :, :, None], float("-inf"))
    own = (query @ own_keys.transpose(-1, -2)).float()
    weights = (torch.cat([scores, own], dim=-1) * d**-0.5).softmax(-1).to(values.dtype)
    T = keys.shape[2]
    attended = (weights[..., :T].flatten(2, 3) @ values).unflatten(2, (S, b))
    return attended + weights[..., T:] @ own_values


def block_taps(num_layers: int, most: int = 5) -> list[int]:
    """Taps after up to 5 layers uniform in [1, L - 3] (z-lab/dflash, build_target_layer_ids), fewer where L is small.

    The published ids name layers whose *output* is read (`hidden_states[id + 1]`); a tap names the layer it enters, so
    it is one more: L = 36 -> ids [1, 9, 17, 25, 33] -> taps [2, 10, 18, 26, 34]; L = 5 -> [2, 3]; L <= 4 -> [2].
    """
    last = max(1, num_layers - 3)
    count = min(most, last)
    return [1 + round(1 + i * (last - 1) / max(1, count - 1)) for i in range(count)]
