"""Pieces shared by draft heads: RMSNorm, gated MLP, attention over a draft cache, RoPE from the target.

Letters (conventions.md): B batch, T positions, S trained slots, H hidden, D draft vocabulary. A *slot* t is a position
whose next token x_{t+1} is known; step i drafted from slot t predicts x_{t+2+i}, for every head of the project.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from heads.spec import TargetSpec

# What a draft layer may have of its own, by the names of TargetSpec.
OWN_FIELDS = ("intermediate_size", "num_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope")


@dataclasses.dataclass
class HeadInput:
    """What a head sees of a batch of conversations in training.

    `documents` numbers the conversation of each position (padding: -1), so that no slot looks across a boundary.
    """

    last: Tensor  # [B, T, H] the target's last feature; [B, T, 0] where the head does not read it and none was kept
    taps: Tensor | None  # [B, T, n, H]
    embeddings: Tensor  # [B, T, H] of x_t itself: a head shifts them
    positions: Tensor  # [B, T] int64, restarting at 0 with each document
    documents: Tensor  # [B, T] int64
    slots: Tensor  # [B, S] int64 positions to draft from, padded by repeating a valid index


class RMSNorm(nn.Module):
    """x / rms(x) * weight in fp32 (Zhang & Sennrich 2019); parameter name `weight`, as engines load it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(x.dtype)


class GatedMLP(nn.Module):
    """down(silu(gate x) * up x), no biases."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LayerCache:
    """Keys and values of a head's layers with a length per sequence: rolling back moves a pointer.

    Entries past a row's length are left over from rejected drafts; the attention mask never reads them.
    """

    def __init__(self, batch: int = 1, layers: int = 1) -> None:
        self.lengths = torch.zeros(batch, dtype=torch.int64)
        self.keys: list[Tensor | None] = [None] * layers  # each [B, KV, capacity, d]
        self.values: list[Tensor | None] = [None] * layers

    def positions(self, n: int) -> Tensor:
        """Position ids [B, n] of the next n entries."""
        return self.lengths[:, None] + torch.arange(n)

    def write(self, keys: Tensor, values: Tensor, layer: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Append n entries to every row; returns keys, values [B, KV, longest, d] and the mask [B, 1, n, longest].

        The pointers move with the last layer's write: all layers of one pass see the same lengths.
        """
        B, KV, n, d = keys.shape
        longest = int(self.lengths.max()) + n
        held_keys, held_values = self.room(keys, layer, longest)
        where = self.positions(n)
        rows = torch.arange(B)[:, None]
        held_keys[rows, :, where] = keys.transpose(1, 2)
        held_values[rows, :, where] = values.transpose(1, 2)
        if layer == len(self.keys) - 1:
            self.lengths = self.lengths + n
        mask = (torch.arange(longest) <= where[:, None, :, None]).to(keys.device)
        return held_keys[:, :, :longest], held_values[:, :, :longest], mask

    def extend(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Move the pointers of `rows` over entries that were placed (heads/placement.py)."""
        self.lengths[list(rows)] += torch.tensor(counts)

    def clear(self, row: int) -> None:
        """Forget one row's sequence; the cache gets rows enough to have it."""
        if row >= len(self.lengths):
            more = row + 1 - len(self.lengths)
            self.lengths = torch.cat([self.lengths, self.lengths.new_zeros(more)])
            for held in (self.keys, self.values):
                held[:] = [x if x is None else torch.cat([x, x.new_zeros(more, *x.shape[1:])]) for x in held]
        self.lengths[row] = 0

    def read(self, layer: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """What is held, leaving it as it is: keys, values [B, KV, longest, d], mask [B, 1, 1, longest] of real entries.

        At least one entry must have been written.
        """
        keys, values, longest = self.keys[layer], self.values[layer], int(self.lengths.max())
        assert keys is not None and values is not None, "nothing written yet"
        mask = (torch.arange(longest) < self.lengths[:, None]).to(keys.device)
        return keys[:, :, :longest], values[:, :, :longest], mask[:, None, None]

    def crop(self, lengths: Tensor) -> None:
        """Roll every row back to `lengths` [B]."""
        self.lengths = torch.minimum(self.lengths, lengths)

    def room(self, like: Tensor, layer: int, longest: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, all rows, with room for `longest` entries shaped like [*, KV, *, d]."""
        held_keys, held_values = self.keys[layer], self.values[layer]
        if held_keys is None or held_values is None or held_keys.shape[2] < longest:
            B, KV, d = len(self.lengths), like.shape[1], like.shape[3]
            capacity = max(64, 2 * longest)
            keys, values = like.new_zeros(B, KV, capacity, d), like.new_zeros(B, KV, capacity, d)
            if held_keys is not None and held_values is not None:
                keys[:, :, : held_keys.shape[2]] = held_keys
                values[:, :, : held_values.shape[2]] = held_values
            self.keys[layer], self.values[layer] = held_keys, held_values = keys, values
        return held_keys, held_values


class Attention(nn.Module):
    """Grouped-query attention whose q, k, v read inputs of width `input_size` (2H for EAGLE-3)."""

    def __init__(self, config: LlamaConfig, input_size: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.q_proj = nn.Linear(input_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)

    def split(self, x: Tensor, projection: nn.Linear) -> Tensor:
        """[B, n, input] -> [B, heads of that projection, n, head_dim]."""
        B, n, _ = x.shape
        return projection(x).view(B, n, -1, self.head_dim).transpose(1, 2)

    def expand(self, kv: Tensor) -> Tensor:
        """Repeat each key/value head for its group of query heads."""
        return kv.repeat_interleave(self.heads // self.kv_heads, dim=1)

    def join(self, attended: Tensor) -> Tensor:
        B, heads, n, d = attended.shape
        return self.o_proj(attended.transpose(1, 2).reshape(B, n, heads * d))


def unrolled_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, own_keys: list[Tensor], own_values: list[Tensor]
) -> Tensor:
    """Training-time-test attention of step j (EAGLE-3, arXiv 2503.01840, section 3.2).

    Slot t sees step-0 keys of slots 0..t through `mask` and, of each step 1..j, only the key of its own slot:

        query [B, h, S, d], keys/values [B, h, T, d], mask [B, 1, S, T], own_* j tensors [B, h, S, d] -> [B, h, S, d]
    """
    scale = query.shape[-1] ** -0.5
    scores = (query @ keys.transpose(-1, -2)).float() * scale
    scores = scores.masked_fill(~mask, float("-inf"))
    T = scores.shape[-1]
    own = [((query * key).sum(-1, keepdim=True)).float() * scale for key in own_keys]
    weights = torch.cat([scores, *own], dim=-1).softmax(-1).to(values.dtype)
    attended = weights[..., :T] @ values
    for i, value in enumerate(own_values):
        attended = attended + weights[..., T + i, None] * value
    return attended


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of one tensor [B, h, n, d] by cos, sin [B, n, d]."""
    return apply_rotary_pos_emb(x, x, cos, sin)[0]


def layer_config(spec: TargetSpec, num_kv_heads: int | None = None, layer: dict[str, Any] | None = None) -> LlamaConfig:
    """The Llama configuration of a one-layer draft: sizes, RoPE base and scaling and context length of its target.

    `layer` replaces fields of `spec` (heads made elsewhere often have their own RoPE base or MLP width). Raises
    ValueError for a field that no draft layer has, or key/value heads that do not divide the query heads.
    """
    if layer is not None:
        if not isinstance(layer, dict):
            raise ValueError(f"head.layer={layer!r} must be null or sizes by name: {', '.join(OWN_FIELDS)}")
        if wrong := sorted(set(layer) - set(OWN_FIELDS)):
            raise ValueError(f"head.layer.{wrong[0]} is no size of a draft layer: it has {', '.join(OWN_FIELDS)}")
        spec = dataclasses.replace(spec, **layer)
    rope = dict(spec.rope.get("full_attention") or spec.rope) or {"rope_type": "default", "rope_theta": 10000.0}
    kv_heads = num_kv_heads or spec.num_kv_heads
    if spec.num_heads % kv_heads:
        raise ValueError(f"head.num_kv_heads={kv_heads} does not divide the {spec.num_heads} attention heads")
    return LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=kv_heads,
        head_dim=spec.head_dim,
        hidden_act="silu",
        max_position_embeddings=spec.max_position_embeddings,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=None,
        eos_token_id=list(spec.eos_ids) or None,
    )


def rotary(config: LlamaConfig) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(config)


def map_buffers(vocab: tuple[Tensor, Tensor] | None, draft_size: int | None, vocab_size: int) -> tuple[Tensor, Tensor]:
    """(d2t, t2d) of a head; identity maps for the full vocabulary.

    Raises ValueError when a reduced vocabulary comes without its map: 'the first D ids' is never right.
    """
    if draft_size is not None and (
        not isinstance(draft_size, int) or isinstance(draft_size, bool) or not 1 <= draft_size <= vocab_size
    ):
        raise ValueError(f"head.draft_vocab_size={draft_size!r} must be null or a whole number in 1..{vocab_size}")
    if draft_size is None or draft_size == vocab_size:
        return torch.zeros(vocab_size, dtype=torch.int64), torch.ones(vocab_size, dtype=torch.bool)
    if vocab is None:
        raise ValueError(
            f"head.draft_vocab_size={draft_size} is below the target's {vocab_size} but no vocabulary map was given: "
            "build it from the data's counts, or load the head's own"
        )
    d2t, t2d = vocab
    if d2t.shape != (draft_size,) or t2d.shape != (vocab_size,) or int(t2d.sum()) != draft_size:
        raise ValueError(f"vocabulary map has shapes {tuple(d2t.shape)}, {tuple(t2d.shape)} for D={draft_size}")
    return d2t.to(torch.int64), t2d.to(torch.bool)
