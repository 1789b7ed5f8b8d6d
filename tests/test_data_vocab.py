"""Claim: the draft vocabulary is the most frequent supervised ids, sorted, specials inside, as offsets."""

import pytest
import torch

from data.vocab import TokenCounter, build, check_size, coverage, coverages, filled


def counts_of(seen: dict[int, int], vocab_size: int = 20) -> torch.Tensor:
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for token, count in seen.items():
        counts[token] = count
    return counts


SEEN = {4: 7, 6: 7, 9: 3, 12: 1, 13: 1, 17: 1}


def kept(d2t: torch.Tensor) -> list[int]:
    return (d2t + torch.arange(len(d2t))).tolist()


def test_offsets_and_mask_agree() -> None:
    d2t, t2d = build(counts_of(SEEN), 4, special_ids=[2])
    assert d2t.dtype == torch.int64 and t2d.dtype == torch.bool
    assert kept(d2t) == [2, 4, 6, 9] == t2d.nonzero()[:, 0].tolist()
    assert d2t.tolist() == [2, 3, 4, 6]


def test_ties_go_to_the_lowest_id_and_fill_with_the_lowest_unused() -> None:
    assert kept(build(counts_of(SEEN), 2, [])[0]) == [4, 6]
    d2t, t2d = build(counts_of(SEEN), 9, [2])
    assert kept(d2t) == [0, 1, 2, 4, 6, 9, 12, 13, 17]
    assert filled(counts_of(SEEN), t2d) == 3


def test_full_vocabulary_is_the_identity_and_padding_rows_never_enter() -> None:
    d2t, t2d = build(counts_of({0: 1}), 20, [])
    assert not d2t.any() and t2d.all()
    assert max(kept(build(counts_of({19: 99, 18: 98}), 8, [19], tokenizer_size=17)[0])) < 17
    with pytest.raises(ValueError, match="can hold at most the 17"):
        build(counts_of({}), 18, [], tokenizer_size=17)


@pytest.mark.parametrize("size", [0, -1, 4.5, 21, "8x", True])
def test_impossible_size_is_refused_by_name_and_value(size: object) -> None:
    with pytest.raises(ValueError, match=f"draft_vocab_size={size!r}"):
        check_size(size, 20)


@pytest.mark.parametrize("size", [1, 20, None])
def test_possible_size_is_kept(size: int | None) -> None:
    assert check_size(size, 20) == size


def test_counter_counts_supervised_positions_only_and_coverage_follows() -> None:
    counter = TokenCounter(20)
    counter.add([1, 2, 3, 3, 5], [(1, 3), (4, 5)])
    counter.add([3, 3], [(0, 2)])
    assert counter.total().tolist() == counts_of({2: 1, 3: 3, 5: 1}).tolist()
    t2d = build(counter.total(), 1, [])[1]
    assert coverage(counter.total(), t2d) == pytest.approx(3 / 5)


def test_coverage_of_held_out_tokens_is_told_for_sizes_to_choose_from() -> None:
    counts, heldout = torch.zeros(5000, dtype=torch.int64), torch.zeros(5000, dtype=torch.int64)
    counts[:1500] = torch.arange(1500, 0, -1)  # at 1,024: ids 0..1022 and the special id; at 2,048: all of these
    heldout[[0, 1022, 1023, 4990]] = torch.tensor([50, 20, 20, 10])
    assert coverages(counts, heldout, [4995]) == {1024: 0.7, 2048: 0.9, 4096: 0.9}
    assert coverages(counts, heldout, [4995], tokenizer_size=1500) == {1024: 0.9}  # the special id lies outside
    assert coverages(counts, torch.zeros(5000, dtype=torch.int64), [4995]) == {}
