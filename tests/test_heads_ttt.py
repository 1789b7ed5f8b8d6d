"""What a head of any kind computes in training equals what it computes when it drafts, in fp32 to 1e-4.

Weights are drawn wide, so that a wrong position, mask or key moves the logits; the negative controls prove it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import tiny_target
from tiny_heads import STEPS, TINY_HEADS, VARIANTS, largest_difference, tiny_head, trained_logits
from torch import Tensor
from toys import head_input, medusa, tokens

from heads import recurrent, unrolled
from heads.base import shift, slot_mask
from heads.layers import LayerCache, unrolled_attention

T = 13
TOLERANCE = 1e-4
UNROLLED = ["eagle1", "eagle3", "mtp"]
SEQUENTIAL = [*UNROLLED, "mlp", "lstm"]
ROPE = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8}
TARGETS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),  # 4 query heads, 2 key/value heads
    ("llama", {"num_key_value_heads": 1}),
    ("llama", {"num_key_value_heads": 4, "head_dim": 12, "tie_word_embeddings": True}),
    ("llama", {"rope_parameters": {"rope_type": "linear", **ROPE}}),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ROPE}}),
    ("llama", {"rope_parameters": {"rope_type": "yarn", **ROPE}}),
    ("qwen3", {}),  # explicit head_dim, query and key norms
    ("gemma2", {}),  # soft-capped logits
]


@pytest.mark.parametrize(("family", "overrides"), TARGETS, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("kind", TINY_HEADS)
def test_step_j_equals_cached_drafting(kind: str, family: str, overrides: dict[str, Any]) -> None:
    target = tiny_target(family, layers=5, **overrides)
    assert largest_difference(target, tiny_head(kind, target, wide=True), tokens(1, T)) < TOLERANCE


@pytest.mark.parametrize("draft", [None, [1, 3, 8, 9, 40]])
@pytest.mark.parametrize(("kind", "settings"), [*((kind, {}) for kind in TINY_HEADS), *VARIANTS], ids=str)
def test_every_setting_drafts_as_it_trains(kind: str, settings: dict[str, Any], draft: list[int] | None) -> None:
    target, ids = tiny_target(layers=5), tokens(2, T)
    head = tiny_head(kind, target, wide=True, draft=draft, **settings)
    assert largest_difference(target, head, ids) < TOLERANCE
    found = trained_logits(target, head, ids)
    assert all(logits.shape == (2, T - 1, 64 if draft is None else 5) for logits in found)
    assert float(torch.stack([logits.std() for logits in found]).min()) > 0.3, "logits too flat for this test to fail"


def without_step(rotary: Any) -> Callable[..., Any]:
    """A wrong rotary: steps j > 0 keep the position id of step 0."""
    compute, first = rotary.forward, []

    def wrong(x: Tensor, position_ids: Tensor) -> Any:
        first.append(position_ids)
        return compute(x, position_ids if len(first) < 3 else first[1])

    return wrong


@pytest.mark.parametrize("kind", UNROLLED)
def test_a_wrong_position_id_would_show(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, ids = tiny_target(layers=5), tokens(1, T)
    head = tiny_head(kind, target, wide=True)
    right = trained_logits(target, head, ids)
    monkeypatch.setattr(head.rotary, "forward", without_step(head.rotary))
    wrong = trained_logits(target, head, ids)
    assert torch.equal(right[0], wrong[0])
    assert float((right[2] - wrong[2]).abs().max()) > 100 * TOLERANCE


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("kind", UNROLLED)
def test_a_mask_shifted_by_one_would_show(kind: str, by: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(layers=5)
    head = tiny_head(kind, target, wide=True)
    monkeypatch.setattr(unrolled, "slot_mask", lambda slots, documents: slot_mask((slots + by).clamp_min(0), documents))
    assert largest_difference(target, head, tokens(1, T)) > 100 * TOLERANCE


@pytest.mark.parametrize("kind", SEQUENTIAL)
def test_inputs_shifted_by_one_would_show(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding of x_t instead of x_{t+1}."""
    target = tiny_target(layers=5)
    head = tiny_head(kind, target, wide=True)
    for module in (unrolled, recurrent):
        monkeypatch.setattr(module, "shift", lambda x, by: shift(x, by - 1))
    assert largest_difference(target, head, tokens(1, T)) > 100 * TOLERANCE


@pytest.mark.parametrize("kind", UNROLLED)
def test_own_keys_of_earlier_steps_are_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(layers=5)
    head = tiny_head(kind, target, wide=True)
    monkeypatch.setattr(
        unrolled,
        "unrolled_attention",
        lambda q, k, v, mask, keys, values: unrolled_attention(q, k, v, mask, keys[-1:], values[-1:]),
    )
    assert largest_difference(target, head, tokens(1, T)) > 100 * TOLERANCE


@pytest.mark.parametrize("kind", SEQUENTIAL)
def test_a_slot_sees_its_step_and_nothing_after_it(kind: str) -> None:
    """Step j of slot t reads tokens up to t+1+j: a changed token 8 shows at step j from slot 7 - j on."""
    target, ids = tiny_target(layers=5), tokens(1, T)
    head = tiny_head(kind, target, wide=True)
    changed = ids.clone()
    changed[0, 8] = 2 + (ids[0, 8] - 1) % 62
    for j, (before, after) in enumerate(
        zip(trained_logits(target, head, ids), trained_logits(target, head, changed), strict=True)
    ):
        moved = (before - after).abs().amax(-1)[0] > 1e-6
        assert not bool(moved[: 7 - j].any()) and bool(moved[7 - j :].all()), j


@pytest.mark.parametrize("kind", TINY_HEADS)
def test_a_slot_sees_nothing_of_another_document(kind: str) -> None:
    """A conversation packed behind another one gives the logits it gives alone."""
    target = tiny_target(layers=5)
    head = tiny_head(kind, target, wide=True)
    first, second = tokens(1, 6), tokens(1, 7, seed=1)
    other, alone = head_input(target, head, first), head_input(target, head, second)
    packed = head_input(target, head, torch.cat([first, second], dim=1), slots=alone.slots + 6)
    packed.last = torch.cat([other.last, alone.last], dim=1)  # the target saw them apart
    if other.taps is not None and alone.taps is not None:
        packed.taps = torch.cat([other.taps, alone.taps], dim=1)
    packed.documents = torch.tensor([[0] * 6 + [1] * 7])
    packed.positions = torch.tensor([[*range(6), *range(7)]])
    with torch.no_grad():
        for one, two in zip(head(alone, STEPS), head(packed, STEPS), strict=True):
            assert torch.allclose(one, two, atol=TOLERANCE)
        packed.documents = torch.zeros_like(packed.documents)
        gap = float((head(alone, STEPS)[0] - head(packed, STEPS)[0]).abs().max())
    assert gap > 100 * TOLERANCE if head.uses_cache else gap < 1e-5, "heads without a cache read one slot only"


@pytest.mark.parametrize("kind", UNROLLED)
def test_feeding_slots_in_pieces_and_rolling_back_changes_nothing(kind: str) -> None:
    """Two sequences with different lengths in one cache, own features thrown away between rounds."""
    target, ids = tiny_target(layers=5), tokens(2, T)
    head = tiny_head(kind, target, wide=True)
    output = target.forward(ids, taps=head.taps)
    with torch.no_grad():
        feature, embeddings = head.feature(output.last, output.taps), shift(target.embed(ids), 1)
        whole = head.advance(LayerCache(2), feature[:, :12], embeddings[:, :12])
        cache = LayerCache(2)
        head.advance(cache, feature[:, :5], embeddings[:, :5])
        hidden = head.advance(cache, feature[:, 5:9], embeddings[:, 5:9])
        head.advance(cache, head.feed(hidden[:, -1:]), embeddings[:, :1])  # a draft that is refused
        cache.crop(torch.tensor([9, 7]))  # row 1 goes back two slots further
        pieces = torch.stack([torch.cat([x[0, 9:12], x[1, 7:10]]) for x in (feature, embeddings)]).view(2, 2, 3, -1)
        found = head.advance(cache, pieces[0], pieces[1])
    assert cache.lengths.tolist() == [12, 10]
    assert torch.allclose(found[0], whole[0, 9:12], atol=TOLERANCE)
    assert torch.allclose(found[1], whole[1, 7:10], atol=TOLERANCE)


@pytest.mark.parametrize("shared", [True, False])
def test_medusa_heads_are_not_one_and_the_same(shared: bool) -> None:
    target = tiny_target("gemma2", layers=4)
    head = medusa(target, std=0.3, num_heads=3, num_layers=2, shared_lm_head=shared)
    found = trained_logits(target, head, tokens(2, 9), 3)
    assert float((found[0] - found[2]).abs().max()) > 0.1
