"""Analytic heads draft the permutation target right (scripts/permutation.py), and wrong ones do not.

With 3 prompts of 48 new tokens and k = 3 a right head needs 36 rounds and has [36, 36, 36] drafts accepted.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from toys import head_input

from eval.drafters.head import drafter_for
from eval.generate import Decoding, generate
from heads.mtp import Mtp, MtpConfig
from heads.recurrent import Lstm, LstmConfig, Mlp, MlpConfig
from heads.target import Target
from scripts.permutation import (
    NEW_TOKENS,
    PROMPTS,
    SAID,
    H,
    K,
    V,
    eagle1_head,
    eagle3_head,
    medusa_head,
    permutation,
    permutation_target,
)


def mtp_head(target: Target, E: Tensor, swapped: bool = False) -> Mtp:
    """eh_proj = [I|0], o = 0, MLP 0, norms 1: the block hands on the embedding of the newest token."""
    head: Any = Mtp(MtpConfig(), target.spec)
    eye, zero = torch.eye(H), torch.zeros(H, H)
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
    both = torch.cat([torch.eye(H), -torch.eye(H)])
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
    both = torch.cat([torch.eye(H), -torch.eye(H)])
    with torch.no_grad():
        for matrix in (*head.proj, head.emb):
            matrix.weight.zero_()
        (head.proj[0] if swapped else head.emb).weight[64:128].copy_(both)
        head.proj[1].weight[192:].fill_(-100.0)
        head.cell_ln.weight.fill_(50.0)
        head.state_ln.weight.fill_(50.0)
        head.head[0].weight.copy_(E[permutation(-1)] @ both.T)
    return head.attach(target).eval()


def counters(target: Target, head: Any, length: int = NEW_TOKENS) -> tuple[int, list[int]]:
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
    perm, at, seen = permutation(), SAID[0], set()
    while at not in seen:
        seen.add(at)
        at = int(perm[at])
    assert seen == set(SAID)
    assert torch.equal(permutation(2), perm[perm]) and torch.equal(permutation(-1)[perm], torch.arange(V))


STEPWISE: list[Callable[..., Any]] = [eagle1_head, eagle3_head, mtp_head, mlp_head, lstm_head]
REDUCED = partial(eagle3_head, reduced=True)


@pytest.mark.parametrize("make", [*STEPWISE, medusa_head, REDUCED])
def test_analytic_heads_draft_every_token_right(make: Callable[..., Any]) -> None:
    target, E = permutation_target()
    assert counters(target, make(target, E)) == (36, [36, 36, 36])


@pytest.mark.parametrize("make", STEPWISE)
def test_swapped_inputs_are_seen(make: Callable[..., Any]) -> None:
    target, E = permutation_target()
    assert counters(target, make(target, E, swapped=True), 16) == (45, [0, 0, 0])


def test_a_wrong_third_head_is_seen() -> None:
    target, E = permutation_target()
    assert counters(target, medusa_head(target, E, wrong_third=True)) == (48, [48, 48, 0])


@pytest.mark.parametrize("make", [*STEPWISE, medusa_head])
def test_training_slots_of_an_analytic_head_predict_the_label(make: Callable[..., Any]) -> None:
    """Slot t, step i -> x_{t+2+i} on teacher-forced text of the target."""
    target, E = permutation_target()
    head = make(target, E)
    text = [5]  # said by the permutation
    for _ in range(20):
        text.append(int(permutation()[text[-1]]))
    ids = torch.tensor([text])
    with torch.no_grad():
        for i, hidden in enumerate(head(head_input(target, head, ids, torch.arange(17)[None]), K)):
            guess = head.to_target(head.logits(hidden, i).argmax(-1))
            assert guess[0].tolist() == text[2 + i : 19 + i], i
