"""A block head that drafts the permutation target (scripts/permutation.py) right by construction.

Row r of a block must say perm^r of its anchor, though rows share every weight and the LM head is the target's: they can
differ in position alone. So the tokens that are ever said lie on an orbit on which perm is *linear*, E[perm(u)] =
R E[u] with R a rotation of their number, and attention head r of the only layer carries R^(r-1):

    queries of MASK rows, head r, turn with the position such that the anchor r rows back scores 1, one row off .54
    the own row scores .77 in every head, and carries nothing: where the anchor is not r rows back, it wins
    values of the anchor row: its token; output of head r: R^(r-1), read by the LM head as perm^r
    the context (features are zeroed) scores 0 and carries nothing

Of the ids that are never said, id 0 ends an answer and stands for MASK in a DFlash folder; where that has no vector of
its own, id 0 reads as the first token that is said, and nearly every draft is wrong. The others have an embedding of 0.
"""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from heads.block import Block, BlockConfig
from heads.target import Target
from scripts.permutation import SAID, K, V, permutation, speaking

H, D = 64, 32  # width; of the orbit and of an attention head
MARK, MASK = 32, 33  # hidden dimensions: 1 for every token; 1 for MASK
SHARP = 12.0


def rotation() -> Tensor:
    """R [D, D]: 16 planes turning by 2 pi m / 64 with different odd m, so that R^64 = I and no smaller power is."""
    R = torch.zeros(D, D, dtype=torch.float64)
    for plane in range(D // 2):
        angle = 2 * math.pi * (2 * plane + 1) / len(SAID)
        x, y = 2 * plane, 2 * plane + 1
        R[x, x] = R[y, y] = math.cos(angle)
        R[y, x] = math.sin(angle)
        R[x, y] = -math.sin(angle)
    return R


def block_target() -> Target:
    """Attention and MLP write nothing; E[perm^j(u)] = R^j e, and the LM head reads E[u] as perm(u)."""
    E, R, perm = torch.zeros(V, H), rotation(), permutation()
    token, at = SAID[0], torch.tensor([1.0, 0.0] * (D // 2), dtype=torch.float64) / 4
    for _ in SAID:
        E[token, :D], E[token, MARK] = at.float(), 1.0
        token, at = int(perm[token]), R @ at
    E[0] = E[SAID[0]]
    target = speaking(E, num_attention_heads=4, num_key_value_heads=4, head_dim=D, eos_token_id=0)
    target.spec = dataclasses.replace(target.spec, eos_ids=(0,))
    with torch.no_grad():
        target.head.weight[0] = 0.0
    return target


def block_head(target: Target, from_anchor: bool = False, **settings: Any) -> Block:
    """The construction above; with `from_anchor` row 0 says perm through its residual and head r carries R^r.

    With an LM head of its own it drafts from the ids that are said, a reduced vocabulary.
    """
    options: dict[str, Any] = {"from_anchor": from_anchor, "init": "random", **settings}
    kept = torch.tensor(SAID)
    vocabulary = None
    if options.get("own_lm_head"):
        options["draft_vocab_size"] = len(kept)
        vocabulary = kept - torch.arange(len(kept)), torch.zeros(V, dtype=torch.bool).index_fill(0, kept, True)
    config = BlockConfig(taps=[1], num_layers=1, block_size=K + 1, **options)
    head = Block(config, target.spec, vocabulary).attach(target).eval()
    with torch.no_grad():
        carry(head, from_anchor)
        if head.lm_head is not None:
            head.lm_head.weight.copy_(target.head.weight[kept])
    return head


@torch.no_grad()
def carry(head: Block, from_anchor: bool) -> None:
    """Weights by which row r says perm^r of the anchor, or with `from_anchor` perm^(r + 1)."""
    attention, R, far = head.layers[0].self_attn, rotation().float(), D // 2 - 1
    for parameter in head.parameters():
        parameter.fill_(1.0 if parameter.dim() == 1 else 0.0)
    head.mask_embedding.zero_()[MASK] = 1.0
    attention.q_norm.weight.mul_(SHARP)  # type: ignore[union-attr,operator]
    attention.k_norm.weight.mul_(SHARP)  # type: ignore[union-attr,operator]
    for r in range(1, K + 1):  # attention head 0 stays silent
        query, key, value, output = (getattr(attention, f"{name}_proj").weight for name in ("q", "k", "v", "o"))
        near = [r * D, r * D + D // 2]  # plane 0 turns by 1 radian a position
        turn = torch.tensor([math.cos(r), math.sin(r)])  # undone r rows after the anchor
        query[near, MASK], key[near[0], MARK] = turn * torch.tensor([1.0, -1.0]), 1.0
        query[r * D + far, MARK] = 1.0  # the anchor row itself looks at MASK rows, which carry nothing
        key[near, MASK] = 0.77 * turn * torch.tensor([1.0, -1.0])
        key[r * D + far, MASK] = math.sqrt(1 - 0.77**2)
        value[r * D : (r + 1) * D, :D] = torch.eye(D)
        output[:D, r * D : (r + 1) * D] = torch.linalg.matrix_power(R, r if from_anchor else r - 1)
