"""Several conversations in one line train what they train apart: features, loss, gradient, weights after some steps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train_objective import DRAFT, HEADS, counts_of, gradients, objective_of
from tiny import KINDS, tiny_target
from tiny_heads import TINY_HEADS, tiny_head
from toys import Row, batch_of, conversations, eagle3, largest_gap, loop_of, medusa, weights

from data.packing import best_fit, even_fit, pack, pack_stream, stream
from data.store import Features
from heads.masks import LayerMasks, document_masks
from heads.target import Target, TargetOutput, TargetParityError
from train.batches import Batch, Order, collate
from train.features import check_packing
from train.layout import Layout
from train.mixture import LossSettings
from train.objective import Objective
from train.settings import TrainSettings
from train.track import read_log

FAMILIES: dict[str, dict[str, Any]] = {
    **{kind: {"kind": kind} for kind in KINDS},
    "llama, eager attention": {"attn_implementation": "eager"},
    "gemma2, every second layer slides": {"kind": "gemma2", "sliding_window": 6},
}


def target_of(name: str) -> Target:
    options = dict(FAMILIES[name])
    attention = options.pop("attn_implementation", None)
    target = tiny_target(layers=4, **options)
    if attention:
        target.model.set_attn_implementation(attention)
    return target


def packed_batch(rows: list[Row], sizes: list[int]) -> Batch:
    return collate(rows, list(range(len(rows))), sizes=sizes)


def packed_pass(target: Target, batch: Batch, mask: Any) -> TargetOutput:
    return target.forward(batch.ids, taps=(1, 2, 4), positions=batch.positions, mask=mask)


def of_documents(values: torch.Tensor, batch: Batch) -> list[torch.Tensor]:
    """values [B, T, ...] -> one tensor a conversation, in the order of the rows."""
    return [values[batch.documents == n] for n in range(len(batch.rows))]


@pytest.mark.parametrize("family", list(FAMILIES))
def test_features_of_packed_conversations_are_those_of_conversations_apart(family: str) -> None:
    target, rows = target_of(family), conversations(6)
    batch, layers = packed_batch(rows, [3, 2, 1]), LayerMasks(target, "")
    parted = packed_pass(target, batch, document_masks(layers, batch.documents))
    mixed = packed_pass(target, batch, document_masks(layers, torch.zeros_like(batch.documents)))
    assert parted.taps is not None
    gaps = []
    both = (of_documents(values, batch) for values in (parted.last, parted.taps, mixed.last))
    for row, last, taps, other in zip(rows, *both, strict=True):
        alone = target.forward(torch.tensor([row["ids"]]), taps=(1, 2, 4))
        assert alone.taps is not None
        assert float((last - alone.last[0]).abs().max()) < 1e-5
        assert float((taps - alone.taps[0]).abs().max() / alone.taps.abs().max()) < 1e-5
        gaps.append(float((other - alone.last[0]).abs().max()))
    assert max(gaps) > 1e-2, "under a mask that knows no documents they see each other"


def test_document_masks_by_hand() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, -1]])
    full = document_masks(LayerMasks(tiny_target(), ""), documents)
    slides = document_masks(LayerMasks(target_of("mistral"), ""), documents.repeat(1, 3))
    assert isinstance(full, torch.Tensor) and isinstance(slides, torch.Tensor)
    assert full[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    assert slides[0, 0, 8].nonzero().flatten().tolist() == [6, 7, 8], "document 0 again, outside the window of 6"


def test_a_target_whose_layers_no_mask_can_part_is_refused() -> None:
    target = tiny_target()
    target.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ValueError, match="tiny-llama.*linear_attention: train.packing cannot keep"):
        check_packing(target, conversations(2))


def test_a_target_that_mixes_packed_conversations_is_found_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(layers=4)
    check_packing(target, conversations(4))
    forward = target.forward
    monkeypatch.setattr(target, "forward", lambda ids, positions=None, mask=None: forward(ids))
    with pytest.raises(TargetParityError, match="'tiny-llama' gives packed conversations other features"):
        check_packing(target, conversations(4))


class Kept:
    """Features of each row from a pass of its own, as a capture holds them."""

    def __init__(self, target: Target, rows: list[Row], taps: tuple[int, ...]) -> None:
        self.outputs = [target.forward(torch.tensor([row["ids"]]), taps=taps) for row in rows]

    def row(self, index: int) -> Features:
        output = self.outputs[index]
        return Features(output.last[0], None if output.taps is None else output.taps[0])


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("make", "options"), HEADS)
def test_loss_and_gradient_of_packed_conversations_are_those_of_padded_ones(
    make: Any, options: dict[str, Any], captured: bool
) -> None:
    objective, rows = objective_of(make, options), conversations(6)
    store = Kept(objective.target, rows, objective.head.taps) if captured else None
    counts = counts_of(objective, batch_of(rows))
    padded = gradients(objective, collate(rows, list(range(6)), store))
    for sizes in ([3, 2, 1], [6]):
        batch = collate(rows, list(range(6)), store, sizes)
        assert torch.equal(counts_of(objective, batch), counts), "every step trains the same slots"
        packed = gradients(objective, batch)
        assert packed[0] == pytest.approx(padded[0], rel=1e-6, abs=1e-6)
        assert all(float((packed[1][n] - padded[1][n]).abs().max()) < 1e-5 for n in padded[1])
    joined = {"ids": sum((r["ids"] for r in rows), []), "spans": [[0, sum(len(r["ids"]) for r in rows)]]}
    assert counts_of(objective, batch_of([joined]))[0] > counts[0], "one document of all would train across borders"


@pytest.mark.parametrize("draft", [None, DRAFT])
@pytest.mark.parametrize("kind", TINY_HEADS)
def test_a_head_of_every_kind_trains_alike_packed_and_padded(kind: str, draft: list[int] | None) -> None:
    target, rows = tiny_target(layers=5), conversations(6)
    objective = Objective(tiny_head(kind, target, wide=True, draft=draft), target, LossSettings())
    padded, packed = (gradients(objective, packed_batch(rows, sizes)) for sizes in ([1] * 6, [4, 2]))
    assert packed[0] == pytest.approx(padded[0], rel=1e-6, abs=1e-6)
    largest = max(float(g.abs().max()) for g in padded[1].values())
    assert all(float((packed[1][n] - padded[1][n]).abs().max()) < 1e-5 * max(1, largest) for n in padded[1])


@pytest.mark.parametrize("layout", [Layout(2, pack_length=60), Layout(9, max_tokens=70), Layout(9, 90, 45)])
def test_any_layout_of_a_step_gives_the_gradient_of_one_padded_batch(layout: Layout) -> None:
    objective, rows = objective_of(*HEADS[1]), conversations(9)
    lengths, whole = [len(row["ids"]) for row in rows], gradients(objective, batch_of(rows))
    parts = []
    for part in layout.passes(list(range(9)), lengths):
        numbers = [n for line in part for n in line]
        parts.append(collate([rows[n] for n in numbers], numbers, sizes=[len(line) for line in part]))
    found = gradients(objective, *parts)
    assert len(parts) > 1
    assert found[0] == pytest.approx(whole[0], rel=1e-6, abs=1e-6)
    assert all(float((found[1][n] - whole[1][n]).abs().max()) < 1e-5 for n in whole[1])


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_a_packed_run_trains_the_head_a_padded_run_trains(tmp_path: Path, kind: str) -> None:
    target, found, shares = tiny_target(layers=4), [], []
    packing = {"packing": True, "pack_length": 64, "micro_batch_size": 2}
    changes: list[dict[str, Any]] = [{}, packing, {"max_tokens": 80}]
    for n, change in enumerate(changes):
        head = eagle3(target, std=0.1) if kind == "eagle3" else medusa(target, std=0.1, num_heads=3)
        loop = loop_of(tmp_path / str(n), target, head, lr=1e-3, **{"batch_size": 6, "micro_batch_size": 6, **change})
        loop.run()
        found.append(weights(loop.head))
        steps = [line for line in read_log(tmp_path / str(n) / "log.jsonl") if line["split"] == "train"]
        shares.append(sum(line["padding_share"] for line in steps) / len(steps))
    assert largest_gap(found[0], found[1]) < 1e-5 and largest_gap(found[0], found[2]) < 1e-5
    assert 0 < shares[1] < shares[0] and 0 < shares[2] < shares[0]


def test_the_layouts_of_the_docstring() -> None:
    lengths = [9, 7, 5, 4, 3, 2]
    numbers = list(range(6))

    def sizes(layout: Layout) -> list[list[list[int]]]:
        return [[[lengths[n] for n in line] for line in part] for part in layout.passes(numbers, lengths)]

    assert sizes(Layout(3)) == [[[9], [7], [5]], [[4], [3], [2]]]
    assert sizes(Layout(3, max_tokens=16)) == [[[9]], [[7], [5]], [[4], [3], [2]]]
    assert sizes(Layout(2, pack_length=12)) == [[[9, 2], [7, 4]], [[5, 3]]]


def test_every_row_is_in_one_line_of_one_rank_and_no_line_or_pass_is_too_long() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 60, (200,), generator=generator).tolist()
    for world in (1, 2, 3):
        for layout in (Layout(3, pack_length=64), Layout(3, 128, 64), Layout(3, max_tokens=100), Layout(3)):
            order, seen = Order(lengths, 23, seed=1), []
            for step in range(9):  # one epoch
                ranks = [layout.passes(order.at(step), lengths, rank, world) for rank in range(world)]
                assert len({len(passes) for passes in ranks}) == 1
                assert ranks == [layout.passes(order.at(step), lengths, rank, world) for rank in range(world)]
                for part in [part for passes in ranks for part in passes]:
                    totals = [sum(lengths[n] for n in line) for line in part]
                    assert max(totals, default=0) <= (layout.pack_length or 60)
                    assert len(part) * max(totals, default=0) <= (layout.max_tokens or 10**6)
                    assert len(part) <= (3 if layout.max_tokens is None else 200)
                    seen += [n for line in part for n in line]
            assert sorted(seen) == list(range(200))


def test_a_run_that_starts_anew_at_any_step_goes_on_as_if_it_had_not_stopped() -> None:
    lengths, layout = [4 + n % 11 for n in range(26)], Layout(2, pack_length=24)

    def run(start: int) -> list[Any]:
        order = Order(lengths, 5, seed=7)
        return [layout.passes(order.at(step), lengths) for step in range(start, 18)]  # three epochs of six steps

    whole = run(0)
    assert all(run(stop) == whole[stop:] for stop in range(18))
    assert whole[:6] != whole[6:12] != whole[12:]


@pytest.mark.parametrize(("field", "value"), [("pack_length", 20), ("max_tokens", 20)])
def test_a_conversation_that_fits_no_line_is_named(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"train.{field}=20 is below the 21 tokens of training row 1"):
        Layout(4, **{field: value}).check([5, 21, 7])
    Layout(4, **{field: 21}).check([5, 21, 7])


def test_a_token_budget_below_a_packed_line_is_refused() -> None:
    with pytest.raises(ValueError, match="train.max_tokens=100 must be null or at least train.pack_length"):
        TrainSettings(packing=True, pack_length=128, max_tokens=100)
    with pytest.raises(ValueError, match="train.max_tokens=0"):
        TrainSettings(max_tokens=0)
    assert TrainSettings(max_tokens=100).layout() == Layout(8, 100, None)


def test_best_fit_wastes_little_and_stays_inside() -> None:
    assert best_fit([5, 3, 2, 6], 8) == [[0, 1], [3, 2]]
    assert best_fit([], 8) == []
    lengths = torch.randint(20, 400, (500,), generator=torch.Generator().manual_seed(3)).tolist()
    bins = best_fit(lengths, 1024)
    assert sorted(n for one in bins for n in one) == list(range(500))
    assert max(sum(lengths[n] for n in one) for one in bins) <= 1024
    assert sum(lengths) / (1024 * len(bins)) > 0.98
    assert bins == best_fit(lengths, 1024)
    even = even_fit(lengths, 1024)
    assert len(even) <= len(bins) and sorted(n for one in even for n in one) == list(range(500))
    assert even_fit([190] * 8, 1024) == [[0, 1, 2, 3], [4, 5, 6, 7]] and even_fit([], 8) == []
    with pytest.raises(ValueError, match="a row of 9 tokens does not fit a packed row of 8"):
        best_fit([3, 9], 8)


def test_a_stream_is_packed_in_constant_memory() -> None:
    taken = 0
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(20, 900, (3000,), generator=generator).tolist()

    def rows() -> Iterator[tuple[int, int]]:
        nonlocal taken
        for n, length in enumerate(lengths):
            taken += 1
            yield n, length

    given: list[int] = []
    held, groups = 0, 0
    for group in stream(rows(), 1024, lambda row: row[1], open_bins=16):
        held = max(held, taken - len(given))
        given += [n for n, _ in group]
        groups += 1
        assert sum(length for _, length in group) <= 1024
    assert sorted(given) == list(range(3000))
    assert held < 16 * 1024 / 20
    assert sum(lengths) / (1024 * groups) > 0.9


def test_packed_rows_of_the_docstring() -> None:
    rows: list[tuple[list[int], list[list[int]]]] = [([5, 6, 7], [[1, 3]]), ([8, 9], []), ([4], [[0, 1]])]
    packed, streamed = pack(rows, [3], length=8), list(pack_stream(iter(rows), 8))
    assert len(streamed) == 1
    assert all(torch.equal(a, b) for a, b in zip(vars(packed).values(), vars(streamed[0]).values(), strict=True))
    assert packed.ids.tolist() == [[5, 6, 7, 8, 9, 4, 0, 0]]
    assert packed.asst.int().tolist() == [[0, 1, 1, 0, 0, 1, 0, 0]]
    assert packed.documents.tolist() == [[0, 0, 0, 1, 1, 2, -1, -1]]
    assert packed.positions.tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]
    assert pack(rows, [2, 1]).documents.tolist() == [[0, 0, 0, 1, 1], [2, -1, -1, -1, -1]]
