"""Several conversations in one row, without a token of padding between them.

    rows      A0 A1 A2 | B0 B1 | C0         packed to length 8
    ids       A0 A1 A2 B0 B1 C0 .  .
    documents 0  0  0  1  1  2  -1 -1       who may see whom: attention stays inside a document
    positions 0  1  2  0  1  0  0  0        each document starts at 0

Best fit: a row goes where the least room is left after it. Of a list in hand the longest come first (best-fit
decreasing: at most 11/9 of the fewest bins); from a stream they come as they come, into a bounded number of open bins.
"""

import bisect
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

Row = TypeVar("Row")


@dataclasses.dataclass
class Packed:
    """Rows of one or several documents: ids int64, asst bool, documents and positions int64, all [B, T].

    `documents` counts through the batch, padding is -1: padding is known by it, never by an id (pad may equal the end).
    """

    ids: Tensor
    asst: Tensor
    documents: Tensor
    positions: Tensor


def pack(
    rows: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]], sizes: Sequence[int], length: int | None = None
) -> Packed:
    """(ids, supervised spans) of each document -> lines of `sizes` documents, padded to `length` or to the longest.

    Three rows, sizes [2, 1] -> two lines: the first two rows in one, the third alone.
    """
    assert sum(sizes) == len(rows), (sizes, len(rows))
    ids = [torch.tensor(row, dtype=torch.int64) for row, _ in rows]
    asst = []
    for row, spans in rows:
        mask = torch.zeros(len(row), dtype=torch.bool)
        for start, end in spans:
            mask[start:end] = True
        asst.append(mask)
    numbers = [torch.full_like(row, n) for n, row in enumerate(ids)]
    positions = [torch.arange(len(row)) for row in ids]
    fields = [lines(ids, sizes), lines(asst, sizes), lines(numbers, sizes, -1), lines(positions, sizes)]
    if length is not None:
        room = length - fields[0].shape[1]
        fields = [torch.nn.functional.pad(f, (0, room), value=v) for f, v in zip(fields, (0, 0, -1, 0), strict=True)]
    return Packed(*fields)


def lines(rows: Sequence[Tensor], sizes: Sequence[int], fill: float = 0) -> Tensor:
    """Tensors [T_n, ...], `sizes` of them in each line -> [B, T, ...], filled up on the right."""
    joined, at = [], 0
    for size in sizes:
        joined.append(torch.cat(list(rows[at : at + size])) if size > 1 else rows[at])
        at += size
    return pad_sequence(joined, batch_first=True, padding_value=fill)


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Numbers of rows by bin of at most `capacity` tokens; ties by number, so that the same lengths give the same bins.

    Lengths [5, 3, 2, 6], capacity 8 -> [[0, 1], [3, 2]], in the order they are full. Raises ValueError for a row longer
    than `capacity`.
    """
    order = sorted(range(len(lengths)), key=lambda n: (-lengths[n], n))
    return list(stream(order, capacity, lengths.__getitem__, open_bins=max(1, len(lengths))))


def even_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """As few bins as `best_fit` finds, the longest of them as short as it can make it: lines are padded to that one.

    Eight rows of 190 tokens, capacity 1024: four and four, where best fit alone gives five and three.
    """
    if not lengths:
        return []
    found = best_fit(lengths, capacity)
    low, high = max(max(lengths), -(-sum(lengths) // len(found))), capacity
    while low < high:
        middle = (low + high) // 2
        tried = best_fit(lengths, middle)
        if len(tried) <= len(found):
            found, high = tried, middle
        else:
            low = middle + 1
    return found


def stream(
    rows: Iterable[Row], capacity: int, length: Callable[[Row], int], open_bins: int = 64
) -> Iterator[list[Row]]:
    """Rows -> groups of rows of at most `capacity` tokens together; each row comes out exactly once.

    Memory is `open_bins` groups: a full one is given out at once, the fullest when one more is needed. Raises
    ValueError for a row longer than `capacity`.
    """
    rooms: list[tuple[int, int]] = []  # (room left, number of the bin), ascending
    bins: dict[int, list[Row]] = {}
    made = 0
    for row in rows:
        size = length(row)
        if size > capacity:
            raise ValueError(f"a row of {size} tokens does not fit a packed row of {capacity}: raise that or cut it")
        at = bisect.bisect_left(rooms, (size, -1))
        if at < len(rooms):
            room, number = rooms.pop(at)
            bins[number].append(row)
        else:
            if len(rooms) == open_bins:
                yield bins.pop(rooms.pop(0)[1])
            room, number, made = capacity, made, made + 1
            bins[number] = [row]
        if room > size:
            bisect.insort(rooms, (room - size, number))
        else:
            yield bins.pop(number)
    yield from bins.values()


def pack_stream(
    rows: Iterable[tuple[Sequence[int], Sequence[Sequence[int]]]], length: int, open_bins: int = 64
) -> Iterator[Packed]:
    """(ids, supervised spans) of documents, one by one -> lines [1, length] of several of them, in constant memory."""
    for group in stream(rows, length, lambda row: len(row[0]), open_bins):
        yield pack(group, [len(group)], length)
