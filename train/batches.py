"""Token rows and features -> padded batches, in an order that depends on (seed, step) alone.

A batch is the *global* batch of one optimizer step; train/layout.py lays it out in forward passes. So the same step
trains on the same conversations for 1, 2 or 4 ranks, any accumulation, packed or not.
"""

import dataclasses
from typing import Any, Protocol

import torch
from torch import Tensor

from data.packing import lines, pack
from data.store import Features
from data.teacher import TopM


class FeatureStore(Protocol):
    def row(self, index: int) -> Features:
        """last [T, H] or the teacher's top m, taps [T, n, H] or None, of one token row."""


@dataclasses.dataclass
class Batch:
    """Right-padded lines of one or several conversations: ids, asst, documents, positions [B, T].

    `documents` numbers the conversations, so that `rows[documents[b, t]]` is the data row of a position (padding: -1).
    Features are there when they were captured: last [B, T, H] or the teacher's `top`, taps [B, T, n, H].
    """

    ids: Tensor
    asst: Tensor
    documents: Tensor
    positions: Tensor
    rows: list[int]
    last: Tensor | None = None
    taps: Tensor | None = None
    top: TopM | None = None
    packed: bool = False  # some line holds several conversations
    drawn: Tensor | None = None  # [B, T] bool: the only slots trained this step (a head with `max_slots`); None: all

    def to(self, device: torch.device) -> "Batch":
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        moved: dict[str, Any] = {k: v.to(device) for k, v in fields.items() if isinstance(v, Tensor | TopM)}
        return dataclasses.replace(self, **moved)


def collate(
    rows: list[dict[str, Any]],
    numbers: list[int],
    store: FeatureStore | None = None,
    sizes: list[int] | None = None,
) -> Batch:
    """Rows {"ids", "spans"} -> Batch of lines that hold `sizes` rows each; None: a line for every row."""
    sizes = sizes or [1] * len(rows)
    packed = pack([(row["ids"], row["spans"]) for row in rows], sizes)
    batch = Batch(**vars(packed), rows=numbers, packed=max(sizes) > 1)
    if store is None:
        return batch
    features = [store.row(n) for n in numbers]
    last = [f.last.float() for f in features if f.last is not None]
    taps = [f.taps.float() for f in features if f.taps is not None]
    top = [f.top for f in features if f.top is not None]
    batch.last = lines(last, sizes) if last else None
    batch.taps = lines(taps, sizes) if taps else None
    if top:
        ids, log_probs, rest = ([getattr(t, f.name) for t in top] for f in dataclasses.fields(TopM))
        batch.top = TopM(lines(ids, sizes), lines(log_probs, sizes), lines(rest, sizes))
    return batch


def epoch_order(lengths: list[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Batches of row numbers of one epoch: shuffled, rows of similar length together, each row exactly once."""
    generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    window = 8 * batch_size  # sort inside windows only: little padding, yet a different mix each epoch
    batches = []
    for start in range(0, len(order), window):
        part = sorted(order[start : start + window], key=lambda n: lengths[n])
        batches += [part[i : i + batch_size] for i in range(0, len(part), batch_size)]
    shuffle = torch.randperm(len(batches), generator=generator).tolist()
    return [batches[i] for i in shuffle]


class Order:
    """Row numbers by optimizer step (0-based); epochs follow each other with no gap.

    The running epoch's order is kept: shuffling every row at every step would grow with the data.
    """

    def __init__(self, lengths: list[int], batch_size: int, seed: int) -> None:
        self.lengths, self.batch_size, self.seed = lengths, batch_size, seed
        self._epoch = -1
        self._batches: list[list[int]] = []

    def at(self, step: int) -> list[int]:
        epoch, place = divmod(step, -(-len(self.lengths) // self.batch_size))
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, epoch_order(self.lengths, self.batch_size, self.seed, epoch)
        return self._batches[place]
