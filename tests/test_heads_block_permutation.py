"""A block head that drafts the permutation target right by construction (scripts/permutation_block.py).

With 3 prompts of 48 new tokens and k = 3 a right head needs 36 rounds and has [36, 36, 36] drafts accepted.
"""

import pytest
import torch
from toys import head_input

from eval.drafters.head import drafter_for
from eval.generate import Decoding, generate
from heads.block import Block
from heads.target import Target
from scripts.permutation import NEW_TOKENS, PROMPTS, SAID, K, permutation
from scripts.permutation_block import D, block_head, block_target, rotation


def counters(target: Target, head: Block) -> tuple[int, list[int]]:
    """(rounds, accepted drafts per position), as vLLM counts them; the output is checked to be the plain one."""
    rounds, accepted, perm = 0, [0] * K, permutation()
    for prompt in PROMPTS:
        found = generate(target, drafter_for(head, target), prompt, Decoding(k=K, max_new_tokens=NEW_TOKENS))
        chain = [prompt[-1]]
        for _ in range(NEW_TOKENS):
            chain.append(int(perm[chain[-1]]))
        assert found.output_ids == chain[1:]
        rounds += len(found.steps)
        accepted = [n + sum(a > i for _, a in found.steps) for i, n in enumerate(accepted)]
    return rounds, accepted


def test_perm_is_a_rotation_of_the_order_of_what_is_said() -> None:
    powers = [torch.linalg.matrix_power(rotation(), n) for n in range(1, len(SAID) + 1)]
    assert torch.allclose(powers[-1], torch.eye(D, dtype=torch.float64))
    assert all(float((power - torch.eye(D)).abs().max()) > 0.01 for power in powers[:-1])


@pytest.mark.parametrize("from_anchor", [False, True])
def test_an_analytic_block_head_drafts_every_token_right(from_anchor: bool) -> None:
    target = block_target()
    assert counters(target, block_head(target, from_anchor)) == (36, [36, 36, 36])


@pytest.mark.parametrize("from_anchor", [False, True])
def test_a_head_read_one_row_off_is_seen(from_anchor: bool) -> None:
    """Row 0 says perm(anchor) in both modes (its residual), so that position 0 alone can be right by accident."""
    target = block_target()
    head = block_head(target, from_anchor)
    head.first = 1 - head.first
    assert counters(target, head)[1] == [0 if from_anchor else 72, 0, 0]


@pytest.mark.parametrize("from_anchor", [False, True])
def test_training_slots_of_the_analytic_head_predict_the_label(from_anchor: bool) -> None:
    """Slot t, step i -> x_{t+2+i} on teacher-forced text of the target."""
    target = block_target()
    head, text = block_head(target, from_anchor), [5]
    for _ in range(20):
        text.append(int(permutation()[text[-1]]))
    with torch.no_grad():
        hidden = head(head_input(target, head, torch.tensor([text]), torch.arange(17)[None]), K)
    for i, h in enumerate(hidden):
        assert head.logits(h, i).argmax(-1)[0].tolist() == text[2 + i : 19 + i], i
