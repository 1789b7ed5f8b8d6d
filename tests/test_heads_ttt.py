"""What a head computes in training equals what it computes when it drafts, in fp32 to 1e-4.

Weights are drawn wide (0.3), so that a wrong position, mask or key moves the logits; the negative controls prove it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import tiny_target
from torch import Tensor
from toys import eagle3, head_input, medusa, tokens

from heads import eagle3 as eagle3_file
from heads.base import shift, slot_mask
from heads.eagle3 import Eagle3
from heads.layers import LayerCache, unrolled_attention
from heads.target import Target

J, T = 4, 13
TOLERANCE = 1e-4


def unrolled(target: Target, head: Eagle3, ids: Tensor) -> list[Tensor]:
    """Training: logits [B, T-1, D] of each step, all slots at once."""
    with torch.no_grad():
        return [head.logits(hidden, j) for j, hidden in enumerate(head(head_input(target, head, ids), J))]


def drafted(target: Target, head: Eagle3, ids: Tensor, slot: int) -> list[Tensor]:
    """Decoding: prefill slots 0..slot, then feed the head its own output; the tokens are the same ones."""
    output, cache = target.forward(ids, taps=head.taps), LayerCache(ids.shape[0])
    assert output.taps is not None
    with torch.no_grad():
        hidden = head.advance(cache, head.fuse(output.taps[:, : slot + 1]), target.embed(ids[:, 1 : slot + 2]))[:, -1:]
        logits = [head.logits(hidden[:, 0])]
        for j in range(1, J):
            if slot + 1 + j >= ids.shape[1]:
                break
            hidden = head.advance(cache, hidden, target.embed(ids[:, slot + 1 + j, None]))
            logits.append(head.logits(hidden[:, 0], j))
    return logits


def largest_difference(target: Target, head: Eagle3, ids: Tensor) -> float:
    trained, gap = unrolled(target, head, ids), 0.0
    for slot in range(ids.shape[1] - 1):
        for j, logits in enumerate(drafted(target, head, ids, slot)):
            gap = max(gap, float((trained[j][:, slot] - logits).abs().max()))
    return gap


@pytest.mark.parametrize(
    ("kind", "overrides", "settings"),
    [
        ("llama", {}, {}),
        ("llama", {"num_key_value_heads": 4}, {"num_kv_heads": 1}),
        ("llama", {}, {"num_kv_heads": 4, "draft": [1, 3, 8, 9, 40]}),
        ("qwen3", {}, {}),
        ("gemma2", {}, {"num_kv_heads": 1}),
    ],
)
def test_step_j_equals_cached_drafting(kind: str, overrides: dict[str, Any], settings: dict[str, Any]) -> None:
    target = tiny_target(kind, layers=5, **overrides)
    head = eagle3(target, std=0.3, **settings)
    ids = tokens(2, T)
    assert largest_difference(target, head, ids) < TOLERANCE
    spread = torch.stack([logits.std() for logits in unrolled(target, head, ids)])
    assert float(spread.min()) > 0.5, "logits too flat for this test to fail"


def without_step(head: Eagle3) -> Callable[..., Any]:
    """A wrong rotary: steps j > 0 keep the position id of step 0."""
    compute, first = head.rotary.forward, []

    def wrong(x: Tensor, position_ids: Tensor) -> Any:
        first.append(position_ids)
        return compute(x, position_ids if len(first) < 3 else first[1])

    return wrong


def test_a_wrong_position_id_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(layers=5)
    head = eagle3(target, std=0.3)
    ids = tokens(1, T)
    right = unrolled(target, head, ids)
    monkeypatch.setattr(head.rotary, "forward", without_step(head))
    wrong = unrolled(target, head, ids)
    assert torch.equal(right[0], wrong[0])
    assert float((right[2] - wrong[2]).abs().max()) > 100 * TOLERANCE


@pytest.mark.parametrize("by", [-1, 1])
def test_a_mask_shifted_by_one_would_show(monkeypatch: pytest.MonkeyPatch, by: int) -> None:
    target = tiny_target(layers=5)
    head = eagle3(target, std=0.3)
    monkeypatch.setattr(
        eagle3_file, "slot_mask", lambda slots, documents: slot_mask((slots + by).clamp_min(0), documents)
    )
    assert largest_difference(target, head, tokens(1, T)) > 100 * TOLERANCE


def test_inputs_shifted_by_one_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding of x_t instead of x_{t+1}."""
    target = tiny_target(layers=5)
    head = eagle3(target, std=0.3)
    monkeypatch.setattr(eagle3_file, "shift", lambda x, by: shift(x, by - 1))
    assert largest_difference(target, head, tokens(1, T)) > 100 * TOLERANCE


def test_own_keys_of_earlier_steps_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(layers=5)
    head = eagle3(target, std=0.3)
    attention = unrolled_attention
    monkeypatch.setattr(
        eagle3_file,
        "unrolled_attention",
        lambda q, k, v, mask, keys, values: attention(q, k, v, mask, keys[-1:], values[-1:]),
    )
    assert largest_difference(target, head, tokens(1, T)) > 100 * TOLERANCE


def test_a_slot_sees_nothing_after_its_step() -> None:
    """Step j of slot t may depend on tokens up to t+1+j: changing a later one leaves it as it is."""
    target = tiny_target(layers=5)
    head = eagle3(target, std=0.3)
    ids = tokens(1, T)
    changed = ids.clone()
    changed[0, 8] = 2 + (ids[0, 8] - 1) % 62
    for j, (before, after) in enumerate(zip(unrolled(target, head, ids), unrolled(target, head, changed), strict=True)):
        moved = (before - after).abs().amax(-1)[0] > 1e-6
        assert not bool(moved[: 7 - j].any()) and bool(moved[7 - j :].all()), j


def test_a_slot_sees_nothing_of_another_document() -> None:
    """A conversation packed behind another one gives the logits it gives alone."""
    target = tiny_target(layers=5)
    head = eagle3(target, std=0.3)
    first, second = tokens(1, 6), tokens(1, 7, seed=1)
    alone = head_input(target, head, second)
    packed = head_input(target, head, torch.cat([first, second], dim=1), slots=alone.slots + 6)
    other = head_input(target, head, first)
    assert other.taps is not None and alone.taps is not None
    packed.taps = torch.cat([other.taps, alone.taps], dim=1)  # the target saw them apart
    packed.documents = torch.tensor([[0] * 6 + [1] * 7])
    packed.positions = torch.tensor([[*range(6), *range(7)]])
    with torch.no_grad():
        for one, two in zip(head(alone, J), head(packed, J), strict=True):
            assert torch.allclose(one, two, atol=1e-5)
        packed.documents = torch.zeros_like(packed.documents)
        assert float((head(alone, J)[0] - head(packed, J)[0]).abs().max()) > 100 * TOLERANCE


def test_feeding_slots_in_pieces_and_rolling_back_changes_nothing() -> None:
    """Two sequences with different lengths in one cache, own features thrown away between rounds."""
    target = tiny_target(layers=5)
    head = eagle3(target, std=0.3)
    ids = tokens(2, T)
    taps = target.forward(ids, taps=head.taps).taps
    assert taps is not None
    g, embeddings = head.fuse(taps), shift(target.embed(ids), 1)
    with torch.no_grad():
        whole = head.advance(LayerCache(2), g[:, :12], embeddings[:, :12])
        cache = LayerCache(2)
        head.advance(cache, g[:, :5], embeddings[:, :5])
        hidden = head.advance(cache, g[:, 5:9], embeddings[:, 5:9])
        head.advance(cache, hidden[:, -1:], embeddings[:, :1])  # a draft that is refused
        cache.crop(torch.tensor([9, 7]))  # row 1 goes back two slots further
        pieces = torch.stack([torch.cat([x[0, 9:12], x[1, 7:10]]) for x in (g, embeddings)]).view(2, 2, 3, -1)
        found = head.advance(cache, pieces[0], pieces[1])
    assert cache.lengths.tolist() == [12, 10]
    assert torch.allclose(found[0], whole[0, 9:12], atol=1e-5)
    assert torch.allclose(found[1], whole[1, 7:10], atol=1e-5)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("draft", [None, [0, 1, 5, 33]])
def test_medusa_in_training_equals_medusa_drafting(shared: bool, draft: list[int] | None) -> None:
    target = tiny_target("gemma2", layers=4)
    head = medusa(target, std=0.3, num_heads=3, num_layers=2, shared_lm_head=shared, draft=draft)
    ids = tokens(2, 9)
    inputs = head_input(target, head, ids)
    with torch.no_grad():
        trained = torch.stack([head.logits(hidden, i) for i, hidden in enumerate(head(inputs, 3))], dim=2)
        drafted = torch.stack([head.draft_logits(inputs.last[:, t], 3) for t in range(8)], dim=1)
    assert trained.shape == (2, 8, 3, 64 if draft is None else 4)
    assert torch.allclose(trained, drafted, atol=1e-5)
    assert float((trained[:, :, 0] - trained[:, :, 2]).abs().max()) > 0.1, "heads are not one and the same"
