"""A block head: what it computes in training equals what it drafts in one forward, in fp32 to 1e-4.

Weights are drawn wide (0.3), so that a wrong position, mask, row or key moves the logits; negative controls prove it.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_target
from torch import Tensor
from toys import batch_of, block, conversations, head_input, largest_gap, settings, tokens, train, weights

from eval.drafters.head import drafter_for
from eval.generate import Decoding, generate
from heads import block as block_file
from heads.base import shift, slot_mask
from heads.block import Block, BlockConfig, block_taps
from heads.hub import save_head
from heads.target import Target
from train.objective import Objective, slot_counts
from train.unroll import draw_slots, step_mask

T = 13
PROMPTS = [[5, 9, 3, 22, 41], [7], [33, 33, 1, 0, 12, 63, 8]]
TOLERANCE = 1e-4
DRAFT = [0, 1, 3, 8, 9, 40]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
KINDS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {}, {}),
    ("llama", {}, {"from_anchor": True, "num_layers": 3, "draft": DRAFT}),
    ("llama", {"num_key_value_heads": 4}, {"num_kv_heads": 1, "block_size": 2, "num_layers": 1}),
    ("llama", {"rope_parameters": LLAMA3}, {"num_kv_heads": 4, "own_lm_head": True, "draft": DRAFT}),
    ("qwen3", {}, {"taps": [3], "from_anchor": True}),
    ("gemma2", {}, {"own_lm_head": True}),
]


def trained(target: Target, head: Block, ids: Tensor) -> Tensor:
    """Training: logits [B, T-1, steps, D], all slots at once."""
    with torch.no_grad():
        hidden = head(head_input(target, head, ids), head.max_draft)
        return torch.stack([head.logits(h, i) for i, h in enumerate(hidden)], dim=2)


def drafted(target: Target, head: Block, ids: Tensor, slot: int) -> Tensor:
    """Decoding: the context is slots 0..slot, the anchor the token after it; logits [B, steps, D]."""
    output, cache = target.forward(ids, taps=head.taps), head.new_cache(ids.shape[0])
    assert output.taps is not None
    with torch.no_grad():
        head.absorb(cache, output.last[:, : slot + 1], output.taps[:, : slot + 1])
        anchor = target.embed(ids[:, slot + 1])
        return head.draft_logits(output.last[:, slot], head.max_draft, cache, anchor)


def largest_difference(target: Target, head: Block, ids: Tensor) -> float:
    found = trained(target, head, ids)
    return max(float((found[:, t] - drafted(target, head, ids, t)).abs().max()) for t in range(ids.shape[1] - 1))


@pytest.mark.parametrize(("kind", "overrides", "settings"), KINDS)
def test_training_equals_drafting(kind: str, overrides: dict[str, Any], settings: dict[str, Any]) -> None:
    target = tiny_target(kind, layers=5, **overrides)
    head, ids = block(target, std=0.3, **settings), tokens(2, T)
    found = trained(target, head, ids)
    assert found.shape == (2, T - 1, head.max_draft, head.draft_vocab_size)
    assert head.max_draft == head.config.block_size - (0 if head.config.from_anchor else 1)
    assert largest_difference(target, head, ids) < TOLERANCE
    assert float(found.std((0, 1)).min()) > 0.1, "logits too flat for this test to fail"


def test_pieces_rows_of_different_length_and_roll_back_change_nothing() -> None:
    """Two sequences in one cache, rejected slots thrown away, drafts in between: the same logits as from one piece."""
    target = tiny_target(layers=5)
    head, ids = block(target, std=0.3), tokens(2, T)
    found, output = trained(target, head, ids), target.forward(ids, taps=head.taps)
    last, taps = output.last, output.taps
    assert taps is not None
    cache, rows = head.new_cache(2), torch.arange(2)

    def check(newest: Tensor) -> None:
        assert cache.lengths.tolist() == (newest + 1).tolist()
        logits = head.draft_logits(last[rows, newest], 3, cache, target.embed(ids[rows, newest + 1]))
        assert torch.allclose(logits, found[rows, newest], atol=1e-5)
        assert cache.lengths.tolist() == (newest + 1).tolist(), "drafting leaves nothing behind"

    with torch.no_grad():
        head.absorb(cache, last[:, :4], taps[:, :4])
        check(torch.tensor([3, 3]))
        head.absorb(cache, last[:, 4:8], torch.flip(taps[:, 4:8], [0]))  # what was drafted there is refused,
        cache.crop(torch.tensor([4, 4]))
        head.absorb(cache, last[:, 4:8], taps[:, 4:8])
        cache.crop(torch.tensor([8, 5]))  # and row 1 keeps fewer
        check(torch.tensor([7, 4]))
        where = torch.tensor([[8, 9], [5, 6]])
        head.absorb(cache, last[rows[:, None], where], taps[rows[:, None], where])
        check(torch.tensor([9, 6]))


@pytest.mark.parametrize("from_anchor", [False, True])
def test_rows_read_one_too_early_or_late_would_show(from_anchor: bool) -> None:
    """The error of the first public ports: labels shifted by one row between training and drafting."""
    target = tiny_target(layers=5)
    head, ids = block(target, std=0.3, from_anchor=from_anchor), tokens(1, T)
    right = trained(target, head, ids)
    head.first = 1 - head.first
    wrong = torch.stack([drafted(target, head, ids, t) for t in range(T - 1)], dim=1)
    assert float((right[:, :, :2] - wrong[:, :, :2]).abs().max()) > 100 * TOLERANCE


@pytest.mark.parametrize("by", [-1, 1])
def test_features_one_slot_off_would_show(monkeypatch: pytest.MonkeyPatch, by: int) -> None:
    target = tiny_target(layers=5)
    head = block(target, std=0.3)
    monkeypatch.setattr(
        block_file, "slot_mask", lambda slots, documents: slot_mask((slots + by).clamp_min(0), documents)
    )
    assert largest_difference(target, head, tokens(1, T)) > 100 * TOLERANCE


def test_an_anchor_one_token_off_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(layers=5)
    head = block(target, std=0.3)
    monkeypatch.setattr(block_file, "shift", lambda x, by: shift(x, by - 1))
    assert largest_difference(target, head, tokens(1, T)) > 100 * TOLERANCE


def test_a_block_sees_the_past_its_anchor_and_no_more() -> None:
    """All rows of slot t depend on tokens up to t + 1 and on none after: changing x_8 leaves slots 0..6 as they are."""
    target = tiny_target(layers=5)
    head, ids = block(target, std=0.3), tokens(1, T)
    changed = ids.clone()
    changed[0, 8] = 2 + (ids[0, 8] - 1) % 62
    moved = (trained(target, head, ids) - trained(target, head, changed)).abs().amax(-1)[0] > 1e-6  # [T-1, steps]
    assert not bool(moved[:7].any()) and bool(moved[7:].all())


def test_rows_of_a_block_see_each_other_in_both_directions() -> None:
    target = tiny_target(layers=5)
    head, ids = block(target, std=0.3, num_layers=2), tokens(1, T)
    full = trained(target, head, ids)
    longer = block(target, std=0.3, num_layers=2, block_size=5)
    longer.load_state_dict(head.state_dict())
    assert float((trained(target, longer, ids)[:, :, 0] - full[:, :, 0]).abs().max()) > 100 * TOLERANCE


def test_a_slot_sees_nothing_of_another_document() -> None:
    """A conversation packed behind another one gives the logits it gives alone."""
    target = tiny_target(layers=5)
    head = block(target, std=0.3)
    first, second = tokens(1, 6), tokens(1, 7, seed=1)
    alone, other = head_input(target, head, second), head_input(target, head, first)
    packed = head_input(target, head, torch.cat([first, second], dim=1), slots=alone.slots + 6)
    assert other.taps is not None and alone.taps is not None
    packed.taps = torch.cat([other.taps, alone.taps], dim=1)  # the target saw them apart
    packed.last = torch.cat([other.last, alone.last], dim=1)
    packed.documents = torch.tensor([[0] * 6 + [1] * 7])
    packed.positions = torch.tensor([[*range(6), *range(7)]])
    with torch.no_grad():
        for one, two in zip(head(alone, 3), head(packed, 3), strict=True):
            assert torch.allclose(one, two, atol=1e-5)
        packed.documents = torch.zeros_like(packed.documents)
        assert float((head(alone, 3)[0] - head(packed, 3)[0]).abs().max()) > 100 * TOLERANCE


def test_slots_in_pieces_give_the_same_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are held for a bounded number of blocks at a time."""
    target = tiny_target(layers=5)
    head, ids = block(target, std=0.3), tokens(2, T)
    whole = trained(target, head, ids)
    monkeypatch.setattr(block_file, "_SCORES", 1)
    assert torch.allclose(trained(target, head, ids), whole, atol=1e-5)


def objective_loss(target: Target, head: Block, drawn: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    batch = batch_of(conversations(4))
    batch.drawn = drawn
    counts = slot_counts(batch.asst, batch.documents, head.train_steps, drawn)
    return Objective(head, target, settings().loss)(batch, counts)


def test_only_drawn_slots_are_trained_and_counted() -> None:
    """2 slots a conversation: the loss is that of those slots, divided by their number, whatever the rest."""
    target = tiny_target(layers=5)
    head, batch = block(target, std=0.2), batch_of(conversations(4))
    every = step_mask(batch.asst, batch.documents, 0)
    drawn = draw_slots(every, batch.documents, 2, batch.rows, seed=0, step=3)
    assert drawn.sum(1).tolist() == [2, 2, 2, 2] and not bool((drawn & ~every).any())
    assert torch.equal(drawn, draw_slots(every, batch.documents, 2, batch.rows, seed=0, step=3))
    assert not torch.equal(drawn, draw_slots(every, batch.documents, 2, batch.rows, seed=0, step=4))
    again = draw_slots(
        every[2:], batch.documents[2:] - 2, 2, batch.rows[2:], seed=0, step=3
    )  # another share of the same step
    assert torch.equal(again, drawn[2:])
    loss, metrics = objective_loss(target, head, drawn)
    counts = slot_counts(batch.asst, batch.documents, 3, drawn)
    assert counts[0] == 8 and int(counts[2]) <= 8
    parts, weight = [objective_loss(target, head, part) for part in single_slots(drawn)], head_weights()
    means = sum(part["loss"] for _, part in parts) / counts
    assert torch.allclose(metrics["loss"] / counts, means, atol=1e-5)
    assert loss.item() == pytest.approx(float((means * weight).sum()), rel=1e-5)


def test_a_run_trains_the_same_drawn_slots_in_any_micro_batches(tmp_path: Path) -> None:
    found = []
    for size in (4, 1):
        target = tiny_target(layers=5)
        head = block(target, std=0.1, anchors=2)
        loop, state = train(tmp_path / str(size), target=target, head=head, micro_batch_size=size, steps=3)
        found.append(weights(loop.head))
        assert state.tokens == 3 * 4 * 2  # steps, conversations, slots
    assert largest_gap(*found) < 1e-5


def single_slots(drawn: Tensor) -> list[Tensor]:
    parts = []
    for row, place in drawn.nonzero().tolist():
        one = torch.zeros_like(drawn)
        one[row, place] = True
        parts.append(one)
    return parts


def head_weights() -> Tensor:
    return 0.8 ** torch.arange(3)


def test_a_folder_holds_the_mask_embedding_and_nothing_of_the_target(tmp_path: Path) -> None:
    """Embeddings are the target's, and so is the LM head unless the head has its own."""
    target = tiny_target(layers=5)
    for own in (False, True):
        save_head(tmp_path, block(target, draft=DRAFT, own_lm_head=own), target.spec, {})
        names = set(load_file(tmp_path / "head.safetensors"))
        assert {"mask_embedding", "fc.weight", "layers.1.self_attn.k_norm.weight", "d2t", "t2d"} <= names
        assert ("lm_head.weight" in names) is own and not any("embed_tokens" in name for name in names)


@pytest.mark.parametrize("settings", [{}, {"from_anchor": True, "own_lm_head": True, "draft": DRAFT}])
def test_greedy_decoding_with_it_is_plain_decoding(settings: dict[str, Any]) -> None:
    """Drafts are mostly refused here; where all are accepted: test_heads_block_permutation.py."""
    target = tiny_target(layers=5)
    plain = [generate(target, None, prompt, Decoding(k=0, max_new_tokens=24)).output_ids for prompt in PROMPTS]
    head = block(target, std=0.3, **settings)
    for prompt, ids in zip(PROMPTS, plain, strict=True):
        found = generate(target, drafter_for(head, target), prompt, Decoding(k=3, max_new_tokens=24))
        assert found.output_ids == ids and len(found.steps) > 1


def test_default_taps_are_the_outputs_of_layers_spread_over_the_target() -> None:
    """Qwen3-8B's published ids are layer outputs 1, 9, 17, 25, 33 (36 layers); a tap is one more."""
    assert block_taps(36) == [2, 10, 18, 26, 34]
    assert block_taps(30) == [2, 9, 15, 21, 28]
    assert block_taps(6) == [2, 3, 4] and block_taps(5) == [2, 3] and block_taps(2) == [2]
    assert Block(BlockConfig(), tiny_target(layers=8).spec).taps == (2, 3, 4, 5, 6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 1}, "head.block_size=1 must be at least 2"),
        ({"num_layers": 0}, "head.num_layers=0 must be at least 1"),
        ({"anchors": 0}, "head.anchors=0 must be at least 1"),
        ({"init": "zero"}, "head.init='zero' must be one of random, target"),
        ({"taps": [9]}, "head.taps=.9. must be distinct"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        block(tiny_target(layers=5), **settings)
