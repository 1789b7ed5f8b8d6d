"""A target whose next token is perm[current], and analytic heads that draft it right by construction.

It proves that a layout is understood, not merely loaded: which half is the embedding, what step j reads and predicts.
With 3 prompts of 48 new tokens and k = 3 a right head needs 36 rounds and has [36, 36, 36] drafts accepted.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import tiny_target
from torch import Tensor
from toys import head_input

from eval.drafters.head import drafter_for
from eval.generate import Decoding, generate
from heads.eagle1 import Eagle1, Eagle1Config
from heads.eagle3 import Eagle3, Eagle3Config
from heads.medusa import Medusa, MedusaConfig
from heads.mtp import Mtp, MtpConfig
from heads.recurrent import Lstm, LstmConfig, Mlp, MlpConfig
from heads.target import Target

V, K = 64, 3
PROMPTS = [[5, 9, 3, 22, 41], [7, 60, 2], [33, 33, 1, 0, 12, 63, 8]]


def permutation(power: int = 1) -> Tensor:
    """perm^power of one long cycle over V tokens (power may be negative)."""
    cycle = torch.randperm(V, generator=torch.Generator().manual_seed(5))
    perm = torch.empty(V, dtype=torch.int64)
    perm[cycle] = cycle.roll(-power)
    return perm


def target_of() -> tuple[Target, Tensor]:
    """(target, its unit-norm embedding rows E): attention and MLP write nothing, lm_head[v] = E[perm^-1(v)]."""
    # one attention head: with several, another token's slice may match better than the token's own
    target = tiny_target("llama", V, layers=4, num_attention_heads=1, num_key_value_heads=1)
    E = torch.nn.functional.normalize(torch.randn(V, 32, generator=torch.Generator().manual_seed(6)), dim=-1)
    with torch.no_grad():
        for layer in target.layers:
            layer.self_attn.o_proj.weight.zero_()  # type: ignore[union-attr,operator]
            layer.mlp.down_proj.weight.zero_()  # type: ignore[union-attr,operator]
        target.norm.weight.fill_(1.0)  # type: ignore[operator]
        target.model.get_input_embeddings().weight.copy_(E)
        target.head.weight.copy_(E[permutation(-1)])
    target.eos_ids = frozenset()
    return target, E


def eagle3_head(target: Target, E: Tensor, swapped: bool = False) -> Eagle3:
    """fc = 0, q = k = 8[I|0], v = [I|-I], o = I, MLP 0, norms 1, lm_head = E[perm^-1]."""
    head = Eagle3(Eagle3Config(taps=[1, 2, 3]), target.spec)
    eye, zero = torch.eye(32), torch.zeros(32, 32)
    order = -1 if swapped else 1
    layer, attn = head.midlayer, head.midlayer.self_attn
    with torch.no_grad():
        head.fc.weight.zero_()
        attn.q_proj.weight.copy_(torch.cat([8 * eye, zero][::order], dim=1))
        attn.k_proj.weight.copy_(attn.q_proj.weight)
        attn.v_proj.weight.copy_(torch.cat([eye, -eye][::order], dim=1))
        attn.o_proj.weight.copy_(eye)
        layer.mlp.down_proj.weight.zero_()
        head.lm_head.weight.copy_(E[permutation(-1)])
    return head.attach(target).eval()


def medusa_head(target: Target, E: Tensor, wrong_third: bool = False) -> Medusa:
    """linear = 0, head i lm = E[perm^-(2+i)]."""
    head = Medusa(MedusaConfig(num_heads=K, shared_lm_head=False), target.spec)
    with torch.no_grad():
        for i in range(K):
            power = 2 + i + (1 if wrong_third and i == 2 else 0)
            head.medusa_heads[i][-1].weight.copy_(E[permutation(-power)])  # type: ignore[index]
    return head.attach(target).eval()


def eagle1_head(target: Target, E: Tensor, swapped: bool = False) -> Eagle1:
    """fc = [I|0], all else 0: the predicted feature is the embedding of the newest token."""
    head = Eagle1(Eagle1Config(), target.spec)
    eye, zero = torch.eye(32), torch.zeros(32, 32)
    with torch.no_grad():
        for parameter in head.layers.parameters():
            parameter.zero_()
        head.fc.weight.copy_(torch.cat([eye, zero][:: -1 if swapped else 1], dim=1))
    return head.attach(target).eval()


def mtp_head(target: Target, E: Tensor, swapped: bool = False) -> Mtp:
    """eh_proj = [I|0], o = 0, MLP 0, norms 1: the block hands on the embedding of the newest token."""
    head: Any = Mtp(MtpConfig(), target.spec)
    eye, zero = torch.eye(32), torch.zeros(32, 32)
    with torch.no_grad():
        head.mtp_block.self_attn.o_proj.weight.zero_()
        head.mtp_block.mlp.down_proj.weight.zero_()
        head.eh_proj.weight.copy_(torch.cat([eye, zero][:: -1 if swapped else 1], dim=1))
    return head.attach(target).eval()


def mlp_head(target: Target, E: Tensor, swapped: bool = False) -> Mlp:
    """W = 0, emb = [I; -I], LM head E[perm^-1] [I|-I]: GELU(x) - GELU(-x) = x, so the state is read as the token.

    Swapped: the first head reads the feature in place of the token, and drafts the newest token again.
    """
    head: Any = Mlp(MlpConfig(inner_size=64), target.spec)
    both = torch.cat([torch.eye(32), -torch.eye(32)])
    with torch.no_grad():
        for i in range(K):
            head.proj[i].weight.zero_()
            head.emb[i].weight.copy_(both)
            head.head[i].weight.copy_(E[permutation(-1)] @ both.T)
        if swapped:
            head.proj[0].weight.copy_(both)
            head.emb[0].weight.zero_()
    return head.attach(target).eval()


def lstm_head(target: Target, E: Tensor, swapped: bool = False) -> Lstm:
    """As the MLP, but that both GELUs are passed far out, where GELU is relu and relu(x) - relu(-x) = x.

    Gates read no token (input and output stand at one half); the forget gate reads minus the sum of the state: shut.
    """
    head: Any = Lstm(LstmConfig(inner_size=64, tie_embeddings=False), target.spec)
    both = torch.cat([torch.eye(32), -torch.eye(32)])
    with torch.no_grad():
        for matrix in (*head.proj, head.emb):
            matrix.weight.zero_()
        (head.proj[0] if swapped else head.emb).weight[64:128].copy_(both)
        head.proj[1].weight[192:].fill_(-100.0)
        head.cell_ln.weight.fill_(50.0)
        head.state_ln.weight.fill_(50.0)
        head.head[0].weight.copy_(E[permutation(-1)] @ both.T)
    return head.attach(target).eval()


def counters(target: Target, head: Any, length: int = 48) -> tuple[int, list[int]]:
    """(rounds, accepted drafts per position), as vLLM counts them."""
    rounds, accepted = 0, [0] * K
    for prompt in PROMPTS:
        found = generate(target, drafter_for(head, target), prompt, Decoding(k=K, max_new_tokens=length))
        chain = [prompt[-1]]
        for _ in range(length):
            chain.append(int(permutation()[chain[-1]]))
        assert found.output_ids == chain[1:]
        rounds += len(found.steps)
        accepted = [n + sum(a > i for _, a in found.steps) for i, n in enumerate(accepted)]
    return rounds, accepted


def test_the_permutation_is_one_cycle() -> None:
    perm, at, seen = permutation(), 0, set()
    while at not in seen:
        seen.add(at)
        at = int(perm[at])
    assert len(seen) == V
    assert torch.equal(permutation(2), perm[perm]) and torch.equal(permutation(-1)[perm], torch.arange(V))


STEPWISE: list[Callable[..., Any]] = [eagle1_head, eagle3_head, mtp_head, mlp_head, lstm_head]


@pytest.mark.parametrize("make", [*STEPWISE, medusa_head])
def test_analytic_heads_draft_every_token_right(make: Callable[..., Any]) -> None:
    target, E = target_of()
    assert counters(target, make(target, E)) == (36, [36, 36, 36])


@pytest.mark.parametrize("make", STEPWISE)
def test_swapped_inputs_are_seen(make: Callable[..., Any]) -> None:
    target, E = target_of()
    assert counters(target, make(target, E, swapped=True), 16) == (45, [0, 0, 0])


def test_a_wrong_third_head_is_seen() -> None:
    target, E = target_of()
    assert counters(target, medusa_head(target, E, wrong_third=True)) == (48, [48, 48, 0])


@pytest.mark.parametrize("make", [*STEPWISE, medusa_head])
def test_training_slots_of_an_analytic_head_predict_the_label(make: Callable[..., Any]) -> None:
    """Slot t, step i -> x_{t+2+i} on teacher-forced text of the target."""
    target, E = target_of()
    head = make(target, E)
    text = [5]
    for _ in range(20):
        text.append(int(permutation()[text[-1]]))
    ids = torch.tensor([text])
    with torch.no_grad():
        for i, hidden in enumerate(head(head_input(target, head, ids, torch.arange(17)[None]), K)):
            guess = head.to_target(head.logits(hidden, i).argmax(-1))
            assert guess[0].tolist() == text[2 + i : 19 + i], i
