"""Which slots are trained, and on what: the mask table of conventions.md, against plain loops over its words."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_target
from torch import Tensor
from toys import batch_of, eagle3, head_input, tokens

from heads.layers import HeadInput
from heads.target import Target
from train.batches import Order, collate, epoch_order
from train.layout import Layout
from train.objective import slot_counts
from train.unroll import at_slots, pick_slots, step_mask


def supervised(spans: list[tuple[int, int]], length: int) -> Tensor:
    mask = torch.zeros(1, length, dtype=torch.bool)
    for start, end in spans:
        mask[0, start:end] = True
    return mask


def one_document(asst: Tensor) -> Tensor:
    return torch.zeros_like(asst, dtype=torch.int64)


def trained(asst: Tensor, step: int, documents: Tensor | None = None) -> list[int]:
    mask = step_mask(asst, one_document(asst) if documents is None else documents, step)
    assert mask.shape == asst.shape
    return mask[0].nonzero().flatten().tolist()


def by_the_table(asst: Tensor, documents: Tensor, step: int) -> list[int]:
    """'all of asst[t+1 .. t+2+j]', none of them in another document."""
    T = asst.shape[1]
    spans = {t: range(t + 1, t + 3 + step) for t in range(T) if t + 2 + step < T}
    return [t for t, span in spans.items() if all(asst[0, s] and documents[0, s] == documents[0, t] for s in span)]


def labels(ids: Tensor, asst: Tensor, step: int) -> list[int]:
    """Label of every position as the loss reads it, -100 where the slot is not trained."""
    mask = step_mask(asst, one_document(asst), step)
    slots, real = pick_slots(mask)
    found = torch.full_like(ids, -100)
    found[0, slots[0][real[0]]] = at_slots(ids, slots, 2 + step)[0][real[0]]
    return found[0].tolist()


def test_the_slot_of_the_last_prompt_token_is_trained_and_none_past_the_answer() -> None:
    """Prompt 0..4, answer 5..8: decoding starts to draft from slot 4; slot 7 would look past the end of the turn."""
    asst = supervised([(5, 9)], 12)
    assert [trained(asst, j) for j in range(4)] == [[4, 5, 6], [4, 5], [4], []]
    # the well-known off-by-one masks with asst[t]: it drops slot 4 and keeps two slots past the end
    assert asst[0].nonzero().flatten().tolist() == [5, 6, 7, 8]


def test_no_slot_looks_across_a_turn() -> None:
    asst = supervised([(2, 5), (6, 10)], 11)
    assert [trained(asst, j) for j in range(4)] == [[1, 2, 5, 6, 7], [1, 5, 6], [5], []]


def test_no_slot_looks_across_a_document() -> None:
    """Two documents packed in one row, the second one all answer: slot 3 predicts nothing of it."""
    asst, documents = supervised([(2, 8)], 8), torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
    assert [trained(asst, j, documents) for j in range(3)] == [[1, 4, 5], [4], []]


@pytest.mark.parametrize("seed", range(5))
def test_masks_are_what_the_table_says(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for T in (1, 2, 3, 4, 17):
        asst = torch.rand(1, T, generator=generator) < 0.8
        documents = (torch.rand(1, T, generator=generator) < 0.2).cumsum(1)
        for step in range(5):
            assert trained(asst, step, documents) == by_the_table(asst, documents, step)


def test_slots_are_left_packed_and_padding_is_marked() -> None:
    mask = torch.tensor([[0, 1, 0, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]).bool()
    slots, real = pick_slots(mask)
    assert slots.tolist() == [[1, 3, 4], [4, 0, 0], [0, 0, 0]]
    assert real.tolist() == [[True] * 3, [True, False, False], [False] * 3]
    values = torch.arange(10).view(2, 5)
    assert at_slots(values, slots[:2], 1).tolist() == [[2, 4, 4], [9, 6, 6]]
    assert at_slots(values[..., None].float(), slots[:2], 1)[..., 0].tolist() == [[2, 4, 4], [9, 6, 6]]


def test_medusa_head_k_is_trained_on_the_token_k_after_the_next() -> None:
    """Answers 2..4 and 6..7 of ten tokens: head 1 starts at the last prompt token, no head crosses position 5."""
    ids = torch.arange(20, 30)[None]
    asst = supervised([(2, 5), (6, 8)], 10)
    none = -100
    assert labels(ids, asst, 0) == [none, 23, 24, none, none, 27, none, none, none, none]
    assert labels(ids, asst, 1) == [none, 24, *[none] * 8]
    assert labels(ids, asst, 2) == [none] * 10


def test_padding_is_known_by_position_not_by_value() -> None:
    """The pad id equals the end token: the real end token keeps its loss, the padding never has any."""
    end = 9
    batch = batch_of([{"ids": [8, 5, 6, end], "spans": [[1, 4]]}, {"ids": [8, 5, 6, 5, 6, end], "spans": [[1, 6]]}])
    assert batch.asst.tolist() == [[False, True, True, True, False, False], [False, *[True] * 5]]
    assert batch.documents.tolist() == [[0, 0, 0, 0, -1, -1], [1] * 6]
    padded = batch.ids.clone()
    padded[0, 4:] = end
    assert slot_counts(batch.asst, batch.documents, 3).tolist() == [2 + 4, 1 + 3, 0 + 2]
    assert step_mask(batch.asst, batch.documents, 0)[0].tolist() == [True, True, False, False, False, False]


def rotary_positions(target: Target, ids: Tensor, steps: int) -> tuple[HeadInput, list[list[int]]]:
    head = eagle3(target)
    seen: list[list[int]] = []
    compute = head.rotary.forward

    def watched(x: Tensor, position_ids: Tensor) -> Any:
        seen.append(position_ids[0].tolist())
        return compute(x, position_ids)

    head.rotary.forward = watched
    inputs = head_input(target, head, ids)
    head(inputs, steps)
    return inputs, seen


def test_step_j_stands_j_positions_further_on() -> None:
    inputs, seen = rotary_positions(tiny_target(layers=4), tokens(1, 8), 3)
    assert seen[0] == list(range(8)), "step-0 keys of every position"
    assert seen[1:] == [[slot + j for slot in inputs.slots[0].tolist()] for j in range(3)]


def test_every_step_trains_on_the_same_rows_whatever_the_ranks_and_micro_batches() -> None:
    numbers = list(range(10))
    for world in (1, 2, 3, 4):
        for micro in (1, 2, 4, 16):
            shares = [Layout(micro).passes(numbers, [5] * 10, rank, world) for rank in range(world)]
            assert sorted(n for parts in shares for part in parts for line in part for n in line) == numbers
            assert len({len(parts) for parts in shares}) == 1, "every rank runs equally many passes"
            assert all(len(part) <= micro for parts in shares for part in parts)


def test_ten_rows_in_batches_of_four_are_three_steps_and_the_last_is_divided_by_its_own_slots() -> None:
    lengths = [5] * 10
    batches = [Order(lengths, 4, seed=0).at(step) for step in range(6)]
    assert sorted(len(batch) for batch in batches[:3]) == [2, 4, 4]
    assert sorted(sum(batches[:3], [])) == sorted(sum(batches[3:], [])) == list(range(10))
    short = min(batches[:3], key=len)
    batch = collate([{"ids": [7] * 5, "spans": [[1, 5]]} for _ in short], short)
    assert slot_counts(batch.asst, batch.documents, 2).tolist() == [6, 4]


def test_order_depends_on_seed_and_epoch_and_holds_each_row_once() -> None:
    lengths = torch.randint(3, 40, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    orders = [epoch_order(lengths, 4, seed, epoch) for seed in range(2) for epoch in range(2)]
    for order in orders:
        assert sorted(n for batch in order for n in batch) == list(range(50))
    assert len({str(order) for order in orders}) == 4
    assert epoch_order(lengths, 4, 0, 0) == orders[0]


def numeric(shared: Path, name: str) -> dict:
    return json.loads((shared / "cases" / "numeric" / f"{name}.json").read_text())


def test_case_eagle_mask_shift(shared: Path) -> None:
    case = numeric(shared, "eagle-mask-shift")
    found = set(trained(supervised([tuple(case["assistant_span"])], case["length"]), 0))
    assert found >= set(case["expect"]["must_supervise"])
    assert not found & set(case["expect"]["must_not_supervise"])


def test_case_medusa_labels(shared: Path) -> None:
    case = numeric(shared, "medusa-labels")
    ids, asst = torch.tensor([case["input_ids"]]), torch.tensor([case["loss_mask"]]).bool()
    for k in (1, 2, 3):
        assert labels(ids, asst, k - 1) == case["expect"][f"labels_head_{k}"]


def test_case_ttt_step_alignment(shared: Path) -> None:
    case = numeric(shared, "ttt-step-alignment")
    T, J, expect = case["length"], case["ttt_steps"], case["expect"]
    asst = torch.ones(1, T, dtype=torch.bool)
    _, seen = rotary_positions(tiny_target(layers=4), tokens(1, T), J)
    for j in range(J):
        slots = trained(asst, j)
        assert [slots[0], slots[-1]] == expect["valid_positions"][str(j)]
        assert labels(torch.arange(T)[None], asst, j)[0] == expect["labels_at_p0"][str(j)]
        assert expect["position_id_at_p"][str(j)] == ("p" if j == 0 else f"p+{seen[1 + j][0]}")


def test_case_pad_equals_eos(shared: Path) -> None:
    case = numeric(shared, "pad-equals-eos")
    spans = [[[n, n + 1] for n, on in enumerate(row) if on] for row in case["loss_mask"]]
    batch = batch_of([{"ids": ids, "spans": s} for ids, s in zip(case["rows"], spans, strict=True)])
    assert batch.asst.int().tolist() == case["expect"]["loss_mask"]
    assert (batch.documents >= 0).int().tolist() == case["expect"]["attention_mask"]
    real = batch.documents >= 0
    assert batch.ids[real].tolist() == torch.tensor(case["expect"]["input_ids"])[real].tolist()


def test_case_last_partial_window(shared: Path) -> None:
    case = numeric(shared, "last-partial-window")
    per_epoch = case["expect"]["optimizer_steps_per_epoch"]
    sizes = [len(Order([5] * case["micro_batches"], case["accumulation"], 0).at(n)) for n in range(per_epoch)]
    assert sorted(sizes, reverse=True) == case["expect"]["window_sizes"]


def test_case_resume_same_order(shared: Path) -> None:
    """The order is a function of the step alone, so stopping anywhere cannot change it; epochs differ."""
    case = numeric(shared, "resume-same-order")
    lengths, size, per_epoch = (
        list(range(4, 4 + case["samples"])),
        case["batch_size"],
        case["samples"] // case["batch_size"],
    )
    whole = [Order(lengths, size, case["seed"]).at(n) for n in range(per_epoch * case["epochs"])]
    for stop in case["interrupt_after_batches"]:
        resumed = [Order(lengths, size, case["seed"]).at(n) for n in range(stop, len(whole))]
        assert whole[:stop] + resumed == whole
    epochs = [sum(whole[e * per_epoch : (e + 1) * per_epoch], []) for e in range(case["epochs"])]
    assert all(sorted(ids) == list(range(case["samples"])) for ids in epochs)
    assert epochs[0] != epochs[1]
