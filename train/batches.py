"""Token rows and features -> padded batches, in an order that depends on (seed, step) alone.

A batch is the *global* batch of one optimizer step; each rank takes its share, each share is cut into micro-batches. So
the same step trains on the same conversations for 1, 2 or 4 ranks and any accumulation.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


class FeatureStore(Protocol):
    def row(self, index: int) -> tuple[Tensor, Tensor | None]:
        """(last [T, H], taps [T, n, H] or None) of one token row."""


class PickedTaps:
    """A store narrowed to the taps one head reads, so that heads with other taps can share one capture."""

    def __init__(self, store: FeatureStore, stored: Sequence[int], wanted: Sequence[int]) -> None:
        if missing := sorted(set(wanted) - set(stored)):
            raise ValueError(f"captured features hold taps {list(stored)}, but the head reads {missing} too")
        self.store = store
        self.columns = [list(stored).index(tap) for tap in wanted]

    def row(self, index: int) -> tuple[Tensor, Tensor | None]:
        last, taps = self.store.row(index)
        return last, taps[:, self.columns] if self.columns and taps is not None else None


@dataclasses.dataclass
class Batch:
    """Right-padded conversations: ids, asst, documents, positions [B, T]; features when they were captured."""

    ids: Tensor
    asst: Tensor
    documents: Tensor
    positions: Tensor
    rows: list[int]
    last: Tensor | None = None
    taps: Tensor | None = None
    drawn: Tensor | None = None  # [B, T] bool: the only slots trained this step (a head with `max_slots`); None: all

    def to(self, device: torch.device) -> "Batch":
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        moved: dict[str, Any] = {name: value.to(device) for name, value in fields.items() if isinstance(value, Tensor)}
        return dataclasses.replace(self, **moved)


def collate(rows: list[dict[str, Any]], numbers: list[int], store: FeatureStore | None = None) -> Batch:
    """Rows {"ids", "spans"} -> Batch. Padding is known by position, never by value (pad may equal the end token)."""
    ids = [torch.tensor(row["ids"], dtype=torch.int64) for row in rows]
    asst = []
    for row in rows:
        mask = torch.zeros(len(row["ids"]), dtype=torch.bool)
        for start, end in row["spans"]:
            mask[start:end] = True
        asst.append(mask)
    B, T = len(rows), max(len(x) for x in ids)
    lengths = torch.tensor([len(x) for x in ids])
    inside = torch.arange(T) < lengths[:, None]
    batch = Batch(
        ids=pad_sequence(ids, batch_first=True),
        asst=pad_sequence(asst, batch_first=True),
        documents=torch.where(inside, torch.arange(B)[:, None], -1),
        positions=torch.arange(T).expand(B, T).contiguous(),
        rows=numbers,
    )
    if store is not None:
        features = [store.row(n) for n in numbers]
        batch.last = pad_sequence([last.float() for last, _ in features], batch_first=True)
        if features[0][1] is not None:
            batch.taps = pad_sequence([taps.float() for _, taps in features if taps is not None], batch_first=True)
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


def share(numbers: list[int], rank: int, world: int, micro_batch: int) -> list[list[int]]:
    """This rank's micro-batches of a global batch; every rank gets equally many (some may be empty)."""
    mine = numbers[rank::world]
    count = max(1, -(-len(numbers[::world]) // micro_batch))
    return [mine[i * micro_batch : (i + 1) * micro_batch] for i in range(count)]
