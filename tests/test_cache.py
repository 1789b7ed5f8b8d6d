"""The KV cache: per-sequence lengths, roll-back by pointer, left-over entries never read, windows honoured."""

from typing import Any

import pytest
import torch
from tiny import tiny_target

from eval.cache import AttentionMasks, KVCache, Trees
from heads.target import Target

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("qwen3", {}),
    ("gemma2", {"layers": 4, "sliding_window": 6}),  # every second layer slides
    ("llama", {"model_type": "mistral", "sliding_window": 6, "layers": 4}),
]


def tokens(n: int, seed: int = 0) -> list[int]:
    return torch.randint(2, 64, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(target: Target, cache: KVCache, rows: list[list[int]]) -> torch.Tensor:
    T = len(rows[0])
    return target.forward(
        torch.tensor(rows), cache=cache, positions=cache.positions(T), mask=AttentionMasks(target)(cache, T)
    ).last


@pytest.mark.parametrize(("kind", "overrides"), FAMILIES)
def test_chunks_through_the_cache_equal_one_pass(kind: str, overrides: dict[str, Any]) -> None:
    target = tiny_target(kind, **overrides)
    text = tokens(21)
    whole = target.forward(torch.tensor([text])).last
    cache, parts, at = KVCache(capacity=4), [], 0
    for n in (9, 1, 5, 1, 5):
        parts.append(run(target, cache, [text[at : at + n]]))
        at += n
        cache.keep([at])
    assert torch.allclose(torch.cat(parts, 1), whole, atol=2e-5)


@pytest.mark.parametrize(("kind", "overrides"), FAMILIES)
def test_ragged_batch_equals_single_runs(kind: str, overrides: dict[str, Any]) -> None:
    target = tiny_target(kind, **overrides)
    lengths, kept = [9, 4, 12], [3, 0, 1]
    texts = [tokens(n + 8, seed=n) for n in lengths]
    cache = KVCache(batch=3, capacity=8)
    run(target, cache, [t[:n] + [0] * (12 - n) for t, n in zip(texts, lengths, strict=True)])  # right padding
    cache.keep(lengths)
    for _ in range(2):  # rounds of 4 drafts with different acceptance
        at = cache.lengths
        found = run(target, cache, [t[n : n + 5] for t, n in zip(texts, at, strict=True)])
        for b, text in enumerate(texts):
            alone = target.forward(torch.tensor([text[: at[b] + 5]])).last[0, at[b] :]
            rows = min(5, len(text) - at[b])
            assert torch.allclose(found[b, :rows], alone[:rows], atol=1e-5), (b, at)
        cache.keep([n + min(a, 3) for n, a in zip(at, kept, strict=True)])
    assert cache.lengths == [15, 4, 14]


def test_rolling_back_forgets_and_left_over_entries_are_never_read() -> None:
    target = tiny_target()
    text = tokens(12)
    cache = KVCache(capacity=64)
    run(target, cache, [text[:8]])
    cache.keep([8])
    run(target, cache, [[7, 7, 7, 7, 7]])
    cache.keep([9 - 1])  # all refused
    for held in (*cache.keys, *cache.values):
        held[:, :, 8:] = torch.nan  # one sequence: not even in reach of the attention
    found = run(target, cache, [text[8:]])
    assert torch.allclose(found, target.forward(torch.tensor([text])).last[:, 8:], atol=1e-5)


def test_left_over_entries_of_a_ragged_batch_are_masked() -> None:
    target = tiny_target()
    long, short = tokens(12), tokens(7, seed=1)
    cache = KVCache(batch=2, capacity=64)
    run(target, cache, [long[:10], short[:5] + [0] * 5])
    cache.keep([10, 5])
    for held in (*cache.keys, *cache.values):
        held[1, :, 5:] = 1e4
    found = run(target, cache, [long[10:], short[5:]])
    assert torch.allclose(found[1], target.forward(torch.tensor([short])).last[0, 5:], atol=1e-5)


def test_mask_shows_the_prefix_and_the_window() -> None:
    cache = KVCache(batch=2)
    cache.lengths = [2, 0]
    seen = cache.mask(2)
    assert seen.shape == (2, 1, 2, 4)
    assert seen[0, 0].tolist() == [[True, True, True, False], [True, True, True, True]]
    assert seen[1, 0].tolist() == [[True, False, False, False], [True, True, False, False]]
    assert cache.mask(2, window=2)[0, 0].tolist() == [[False, True, True, False], [False, False, True, True]]
    assert cache.positions(2).tolist() == [[2, 3], [0, 1]]


def test_a_node_sees_the_sequence_and_its_path_within_the_window_of_its_depth() -> None:
    """Row 0 of the cache holds 3 entries and drafts [0, 0, 1], row 1 holds 1 and drafts nothing."""
    cache = KVCache(batch=2)
    cache.lengths = [3, 1]
    trees = Trees([[0, 0, 1], []])
    assert trees.positions(cache).tolist() == [[3, 4, 4, 5], [1, 1, 1, 1]]
    seen = trees.mask(cache)[:, 0].int().tolist()
    assert seen[0] == [[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 0, 1]]
    assert seen[1][0] == [1, 1, 0, 0, 0, 0, 0] and seen[1][3] == [1, 0, 0, 0, 1, 0, 0], "padding sees itself"
    windowed = trees.mask(cache, window=3)[0, 0].int().tolist()
    assert windowed[2] == [0, 0, 1, 1, 0, 1, 0], "position 4 sees 2, 3 and itself, though its entry is the sixth"
    assert windowed[3] == [0, 0, 0, 1, 1, 0, 1]


def test_the_accepted_path_moves_to_the_front() -> None:
    cache = KVCache(batch=2, capacity=8)
    entries = torch.arange(16.0).view(2, 1, 8, 1)
    cache.update(entries, entries, 0)
    cache.lengths = [2, 1]
    cache.accept(0, [2, 4])
    cache.accept(1, [1, 2])
    assert cache.lengths == [5, 4]
    assert cache.keys[0][0, 0, :5, 0].tolist() == [0, 1, 2, 4, 6]
    assert cache.values[0][1, 0, :4, 0].tolist() == [8, 9, 10, 11]
    cache.move(1, 0)
    assert cache.lengths == [4, 0] and cache.keys[0][0, 0, :4, 0].tolist() == [8, 9, 10, 11]


def test_a_pass_over_one_row_leaves_the_others_alone() -> None:
    cache = KVCache(batch=3, capacity=4)
    cache.update(torch.zeros(3, 1, 1, 2), torch.zeros(3, 1, 1, 2), 0)
    cache.keep([1, 1, 1])
    with cache.rows(1, 2):
        keys, _ = cache.update(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2), 0)
        cache.keep([3])
    assert keys.shape == (1, 1, 3, 2) and cache.lengths == [1, 3, 1]
    assert float(cache.keys[0][0].sum() + cache.keys[0][2].sum()) == 0


def test_growing_keeps_what_was_written() -> None:
    cache = KVCache(capacity=2)
    first = torch.randn(1, 1, 2, 3)
    cache.update(first, first, 0)
    cache.keep([2])
    keys, _ = cache.update(first, first, 0)
    assert torch.equal(keys, torch.cat([first, first], 2)) and cache.capacity == 4


def test_a_target_that_cannot_roll_back_is_refused_by_name() -> None:
    target = tiny_target()
    target.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ValueError, match="tiny-llama.*linear_attention"):
        AttentionMasks(target)
