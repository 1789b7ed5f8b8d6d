"""One decoder layer over (embedding, feature), trained by unrolling its own drafting: EAGLE-1 / HASS, EAGLE-3 and MTP.

The heads differ in how the two inputs of a slot become what attention reads and what the residual carries (`mix`), and
in what the next step reads (`feed`). What they share is here once, for training and for drafting. Training-time test
(EAGLE-3, arXiv 2503.01840, section 3.2; harmonised context alignment in HASS, arXiv 2408.15766), slot t = 4, 3 steps:

    step j   reads             position id   sees keys                               predicts
    0        f_4, emb(x_5)     4             step 0 of slots 0..4                    x_6
    1        u_4^0, emb(x_6)   5             step 0 of slots 0..4, step 1 of slot 4  x_7
    2        u_4^1, emb(x_7)   6             ... and step 2 of slot 4                x_8

f is the feature of a true slot, u^j what step j made. Drafting writes the same keys into a cache.
"""

from typing import Protocol

from torch import Tensor, nn
from transformers import LlamaConfig

from heads.base import gather_slots, shift, slot_mask
from heads.layers import Attention, GatedMLP, HeadInput, LayerCache, RMSNorm, rotate, unrolled_attention


class OneLayer(Protocol):
    """What a head of one decoder layer gives to `unroll` and `advance`."""

    rotary: nn.Module

    @property
    def layer(self) -> "DecoderLayer": ...

    def mix(self, embedding: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Next-token embedding and feature [B, n, H] -> what attention reads [B, n, *], the residual [B, n, H]."""
        ...

    def feed(self, hidden: Tensor) -> Tensor: ...


class DecoderLayer(nn.Module):
    """A Llama block but for the norm of its input, which a head adds where it has one."""

    def __init__(self, config: LlamaConfig, input_size: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, input_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """What comes after attention: the first residual sum, then the MLP with the second one."""
        x = residual + attended
        return x + self.mlp(self.post_attention_layernorm(x))


def unroll(head: OneLayer, feature: Tensor, inputs: HeadInput, steps: int) -> list[Tensor]:
    """Hidden states u^0 .. u^{steps-1}, each [B, S, H], at the slots of `inputs`, teacher-forced.

    feature [B, T, H] is what true slots feed. Only slots are queried; step-0 keys come from every position (a slot must
    see the whole prefix).
    """
    layer, attn, slots = head.layer, head.layer.self_attn, inputs.slots
    read, residual = head.mix(shift(inputs.embeddings, 1), feature)
    cos, sin = head.rotary(residual, inputs.positions)
    keys = attn.expand(rotate(attn.split(read, attn.k_proj), cos, sin))
    values = attn.expand(attn.split(read, attn.v_proj))
    mask = slot_mask(slots, inputs.documents)
    positions = inputs.positions.gather(1, slots)
    read, residual = gather_slots(read, slots), gather_slots(residual, slots)
    own_keys: list[Tensor] = []
    own_values: list[Tensor] = []
    hidden: list[Tensor] = []
    for step in range(steps):
        cos, sin = head.rotary(residual, positions + step)
        if step:
            embedding = gather_slots(shift(inputs.embeddings, 1 + step), slots)
            read, residual = head.mix(embedding, head.feed(hidden[-1]))
            own_keys.append(attn.expand(rotate(attn.split(read, attn.k_proj), cos, sin)))
            own_values.append(attn.expand(attn.split(read, attn.v_proj)))
        query = rotate(attn.split(read, attn.q_proj), cos, sin)
        attended = attn.join(unrolled_attention(query, keys, values, mask, own_keys, own_values))
        hidden.append(layer.finish(residual, attended))
    return hidden


def advance(head: OneLayer, cache: LayerCache, feature: Tensor, embedding: Tensor) -> Tensor:
    """Cached drafting: consume n slots (feature and next-token embedding, both [B, n, H]) -> u [B, n, H]."""
    layer, attn = head.layer, head.layer.self_attn
    read, residual = head.mix(embedding, feature)
    cos, sin = head.rotary(residual, cache.positions(feature.shape[1]).to(feature.device))
    query = rotate(attn.split(read, attn.q_proj), cos, sin)
    keys, values, mask = cache.write(rotate(attn.split(read, attn.k_proj), cos, sin), attn.split(read, attn.v_proj))
    attended = nn.functional.scaled_dot_product_attention(query, attn.expand(keys), attn.expand(values), attn_mask=mask)
    return layer.finish(residual, attn.join(attended))


def check_steps(key: str, steps: int) -> None:
    """Raises ValueError for a head that would train no step."""
    if steps < 1:
        raise ValueError(f"head.{key}={steps} must be >= 1")


def draw(module: nn.Module, std: float = 0.02) -> None:
    """Every matrix N(0, std): where heads start unless their settings say otherwise."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=std)
