"""The permutation target (next token = perm[current]) and a block head that drafts it right by construction.

Row r of a block must say perm^r of its anchor, though rows share every weight and the LM head is the target's: they can
differ in position alone. So the tokens lie on an orbit on which perm is *linear*, E[perm(u)] = R E[u] with R a rotation
of order V, and attention head r of the only layer carries R^(r-1):

    queries of MASK rows, head r, turn with the position such that the anchor r rows back scores 1, one row off .54
    the own row scores .77 in every head, and carries nothing: where the anchor is not r rows back, it wins
    values of the anchor row: its token; output of head r: R^(r-1), read by the LM head as perm^r
    the context (features are zeroed) scores 0 and carries nothing

With 3 prompts of 48 new tokens and k = 3 a right head needs 36 rounds and has [36, 36, 36] drafts accepted.
"""

import math
from typing import Any

import pytest
import torch
from tiny import tiny_target
from torch import Tensor
from toys import head_input

from eval.drafters.head import drafter_for
from eval.generate import Decoding, generate
from heads.block import Block, BlockConfig
from heads.target import Target

V, H, K = 64, 64, 3
D = 32  # of the orbit and of an attention head
MARK, MASK = 32, 33  # hidden dimensions: 1 for every token; 1 for MASK
PROMPTS = [[5, 9, 3, 22, 41], [7, 60, 2], [33, 33, 1, 0, 12, 63, 8]]
SHARP = 12.0


def permutation() -> Tensor:
    """One long cycle over the tokens: perm[cycle[j]] = cycle[j + 1]."""
    cycle = torch.randperm(V, generator=torch.Generator().manual_seed(5))
    perm = torch.empty(V, dtype=torch.int64)
    perm[cycle] = cycle.roll(-1)
    return perm


def rotation() -> Tensor:
    """R [D, D]: 16 planes turning by 2 pi m / V with different odd m, so that R^V = I and no smaller power is."""
    R = torch.zeros(D, D, dtype=torch.float64)
    for plane in range(D // 2):
        angle = 2 * math.pi * (2 * plane + 1) / V
        x, y = 2 * plane, 2 * plane + 1
        R[x, x] = R[y, y] = math.cos(angle)
        R[y, x] = math.sin(angle)
        R[x, y] = -math.sin(angle)
    return R


def target_of() -> Target:
    """Attention and MLP write nothing; E[cycle[j]] = R^j e, and the LM head reads E[u] as perm(u)."""
    target = tiny_target("llama", V, layers=4, hidden_size=H, head_dim=D, num_key_value_heads=4)
    cycle = torch.randperm(V, generator=torch.Generator().manual_seed(5))
    E, at, R = torch.zeros(V, H), torch.tensor([1.0, 0.0] * (D // 2), dtype=torch.float64) / 4, rotation()
    for token in cycle.tolist():
        E[token, :D], E[token, MARK] = at.float(), 1.0
        at = R @ at
    with torch.no_grad():
        for layer in target.layers:
            layer.self_attn.o_proj.weight.zero_()  # type: ignore[union-attr,operator]
            layer.mlp.down_proj.weight.zero_()  # type: ignore[union-attr,operator]
        target.norm.weight.fill_(1.0)  # type: ignore[operator]
        target.model.get_input_embeddings().weight.copy_(E)
        target.head.weight[permutation()] = E
    target.eos_ids = frozenset()
    return target


def block_head(target: Target, from_anchor: bool = False) -> Block:
    """The construction above; with `from_anchor` row 0 says perm through its residual and head r carries R^r."""
    options: dict[str, Any] = {"from_anchor": from_anchor, "residual_feature": False, "init": "random"}
    config = BlockConfig(taps=[1], num_layers=1, block_size=K + 1, **options)
    head = Block(config, target.spec).attach(target).eval()
    attention, R, far = head.layers[0].self_attn, rotation().float(), D // 2 - 1
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.fill_(1.0 if parameter.dim() == 1 else 0.0)
        head.mask_embedding.zero_()[MASK] = 1.0
        attention.q_norm.weight.mul_(SHARP)  # type: ignore[union-attr,operator]
        attention.k_norm.weight.mul_(SHARP)  # type: ignore[union-attr,operator]
        for r in range(1, 4):  # attention head 0 stays silent
            query, key, value, output = (getattr(attention, f"{name}_proj").weight for name in ("q", "k", "v", "o"))
            near = [r * D, r * D + D // 2]  # plane 0 turns by 1 radian a position
            turn = torch.tensor([math.cos(r), math.sin(r)])  # undone r rows after the anchor
            query[near, MASK], key[near[0], MARK] = turn * torch.tensor([1.0, -1.0]), 1.0
            query[r * D + far, MARK] = 1.0  # the anchor row itself looks at MASK rows, which carry nothing
            key[near, MASK] = 0.77 * turn * torch.tensor([1.0, -1.0])
            key[r * D + far, MASK] = math.sqrt(1 - 0.77**2)
            value[r * D : (r + 1) * D, :D] = torch.eye(D)
            output[:D, r * D : (r + 1) * D] = torch.linalg.matrix_power(R, r if from_anchor else r - 1)
    return head


def counters(target: Target, head: Block) -> tuple[int, list[int]]:
    """(rounds, accepted drafts per position), as vLLM counts them; the output is checked to be the plain one."""
    rounds, accepted, perm = 0, [0] * K, permutation()
    for prompt in PROMPTS:
        found = generate(target, drafter_for(head, target), prompt, Decoding(k=K, max_new_tokens=48))
        chain = [prompt[-1]]
        for _ in range(48):
            chain.append(int(perm[chain[-1]]))
        assert found.output_ids == chain[1:]
        rounds += len(found.steps)
        accepted = [n + sum(a > i for _, a in found.steps) for i, n in enumerate(accepted)]
    return rounds, accepted


def test_perm_is_a_rotation_of_order_v() -> None:
    powers = [torch.linalg.matrix_power(rotation(), n) for n in range(1, V + 1)]
    assert torch.allclose(powers[-1], torch.eye(D, dtype=torch.float64))
    assert all(float((power - torch.eye(D)).abs().max()) > 0.01 for power in powers[:-1])


@pytest.mark.parametrize("from_anchor", [False, True])
def test_an_analytic_block_head_drafts_every_token_right(from_anchor: bool) -> None:
    target = target_of()
    assert counters(target, block_head(target, from_anchor)) == (36, [36, 36, 36])


@pytest.mark.parametrize("from_anchor", [False, True])
def test_a_head_read_one_row_off_is_seen(from_anchor: bool) -> None:
    """Row 0 says perm(anchor) in both modes (its residual), so that position 0 alone can be right by accident."""
    target = target_of()
    head = block_head(target, from_anchor)
    head.first = 1 - head.first
    assert counters(target, head)[1] == [0 if from_anchor else 72, 0, 0]


@pytest.mark.parametrize("from_anchor", [False, True])
def test_training_slots_of_the_analytic_head_predict_the_label(from_anchor: bool) -> None:
    """Slot t, step i -> x_{t+2+i} on teacher-forced text of the target."""
    target = target_of()
    head, text = block_head(target, from_anchor), [5]
    for _ in range(20):
        text.append(int(permutation()[text[-1]]))
    with torch.no_grad():
        hidden = head(head_input(target, head, torch.tensor([text]), torch.arange(17)[None]), K)
    for i, h in enumerate(hidden):
        assert head.logits(h, i).argmax(-1)[0].tolist() == text[2 + i : 19 + i], i
