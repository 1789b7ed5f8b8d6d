"""Placed entries of a draft cache: every node of a tree is drafted as its path alone would be, in any batch of rows."""

from typing import Any

import torch
from tiny import tiny_target
from torch import Tensor
from toys import eagle3, tokens

from heads.layers import LayerCache
from heads.placement import Drafts, true_slots
from heads.target import Target

LENGTHS = [7, 3, 11]
# (parents' places in the level before, tokens) of two levels, rows 0 and 2 of the cache
LEVELS = [([[0, 0], [0, 0, 0]], [[5, 9], [8, 3, 22]]), ([[0, 1, 1], [2]], [[4, 6, 7], [30]])]


def features(target: Target, head: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    output = target.forward(ids, taps=head.taps)
    return head.feature(output.last, output.taps)[:, :-1], target.embed(ids)[:, 1:]


@torch.no_grad()
def test_nodes_of_a_ragged_batch_are_drafted_as_their_paths_alone() -> None:
    target = tiny_target(layers=4)
    head: Any = eagle3(target, std=0.3)
    ids = tokens(3, 13)
    feature, embedding = features(target, head, ids)
    cache = LayerCache(3)
    hidden = head.advance(true_slots(cache, [0, 1, 2], LENGTHS), feature[:, :11], embedding[:, :11])
    cache.extend([0, 1, 2], LENGTHS)
    assert cache.lengths.tolist() == LENGTHS
    rows = [0, 2]
    last = [hidden[row, LENGTHS[row] - 1] for row in rows]
    drafts = Drafts(cache, rows)
    paths: list[list[tuple[list[int], Tensor]]] = [[([], own)] for own in last]
    for step, (sources, drawn) in enumerate(LEVELS, start=1):
        n = max(map(len, drawn))
        parents = [[paths[i][j][1] for j in own + [0] * (n - len(own))] for i, own in enumerate(sources)]
        before = torch.stack([torch.stack(nodes) for nodes in parents])
        padded = torch.tensor([own + [0] * (n - len(own)) for own in drawn])
        found = head.advance(drafts.level(rows, sources), before, target.embed(padded), step=step)
        paths = [
            [([*paths[i][s][0], t], found[i, j]) for j, (s, t) in enumerate(zip(sources[i], drawn[i], strict=True))]
            for i in range(2)
        ]
        for row, nodes in zip(rows, paths, strict=True):
            for path, node in nodes:
                assert torch.allclose(node, alone(target, head, ids[row], LENGTHS[row], path), atol=1e-5), (row, path)
    assert cache.lengths.tolist() == LENGTHS, "drafts move no pointer"


def alone(target: Target, head: Any, ids: Tensor, length: int, path: list[int]) -> Tensor:
    """The head's output after a path, drafted as a chain in a cache of its own."""
    feature, embedding = features(target, head, ids[None, : length + 1])
    cache = LayerCache(1)
    hidden = head.advance(cache, feature, embedding)[:, -1:]
    for step, token in enumerate(path, start=1):
        hidden = head.advance(cache, hidden, target.embed(torch.tensor([[token]])), step=step)
    return hidden[0, 0]


def test_a_cleared_row_starts_anew_and_the_cache_grows_by_rows() -> None:
    cache = LayerCache(1)
    entries = torch.ones(1, 2, 3, 4)
    true_slots(cache, [0], [3]).write(entries, entries)
    cache.extend([0], [3])
    cache.clear(2)
    assert cache.lengths.tolist() == [3, 0, 0]
    one = entries[:, :, :1]
    keys, _, seen = true_slots(cache, [2, 0], [1, 1]).write(torch.cat([2 * one, one]), torch.cat([one, one]))
    assert keys.shape == (2, 2, 4, 4) and seen[:, 0, 0].tolist() == [[True, False, False, False], [True] * 4]
    assert keys[1, 0, :, 0].tolist() == [1, 1, 1, 1] and keys[0, 0, :, 0].tolist() == [2, 0, 0, 0]
    cache.clear(0)
    assert cache.lengths.tolist() == [0, 0, 0]
    _, values, mask = true_slots(cache, [0, 1], [1, 1]).read()
    assert values.shape[2] == 0 and mask.shape == (2, 1, 1, 0)
