"""The files of a data folder, written under temporary names and moved into place together."""

import contextlib
import dataclasses
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import IO, Any

from data.chat import Encoded
from data.files import save_tensors
from data.records import Bad, DataError
from data.tally import Tally
from data.vocab import TokenCounter, coverages
from heads.target import Target


class RowWriter:
    """Train, held-out and rejects files under temporary names, until `finish` moves them into place."""

    def __init__(self, folder: Path, target: Target, tally: Tally) -> None:
        self.folder, self.tally, self.limited, self.retokenised = folder, tally, 0, 0
        self.names = {"train.jsonl", "heldout.jsonl", "rejects.jsonl", "counts.safetensors"}
        self.counters = {side: TokenCounter(target.spec.vocab_size) for side in ("train", "heldout")}
        self.sides: Counter[str] = Counter()
        self.streams: dict[str, IO[str]] = {}
        self._open = contextlib.ExitStack()  # closes every stream, also where closing one fails: the disk may be full

    def __enter__(self) -> "RowWriter":
        for name in ("train", "heldout", "rejects"):
            path = self.folder / f"{name}.jsonl.tmp"
            self.streams[name] = self._open.enter_context(path.open("w", encoding="utf-8"))
        return self

    def __exit__(self, *error: object) -> None:
        with self._open:
            for stream in self.streams.values():
                stream.flush()
                os.fsync(stream.fileno())

    def drop(self, bad: Bad, counted: bool = True) -> None:
        """`counted` is false for a part of a conversation that is counted already: it is listed all the same."""
        if counted:
            self.tally.drop(bad)
        self.streams["rejects"].write(json.dumps(dataclasses.asdict(bad)) + "\n")

    def keep(self, row: Encoded, name: str, key: str, route: str, side: str, where: str, first: bool = True) -> None:
        """`first` is false for a further row of the same conversation: it is no further conversation read."""
        self.tally.kept(row)
        self.tally.read -= not first
        self.tally.kept_rows -= not first
        fields = {"id": name, "key": key, "route": route, "ids": row.ids, "spans": row.spans, "source": where}
        self.streams[side].write(json.dumps(fields) + "\n")
        self.sides[f"{side}"] += 1
        self.sides[f"{side}_tokens"] += len(row.ids)
        self.sides[f"{side}_supervised"] += row.supervised
        self.counters[side].add(row.ids, row.spans)

    def finish(self, min_kept_share: float) -> dict[str, Any]:
        """Check the set, move the files into place, return the counts for the manifest."""
        self.tally.check(min_kept_share)
        if not self.sides["train_supervised"]:
            raise DataError("no_training_rows", f"{self.tally.source}: no row is left for training")
        save_tensors(self.folder / "counts.safetensors", {"counts": self.counters["train"].total()})
        for name in ("train.jsonl", "heldout.jsonl", "rejects.jsonl"):
            os.replace(self.folder / f"{name}.tmp", self.folder / name)
        self.tally.read += self.limited  # read = kept + dropped + limited
        names = (f"{side}{part}" for side in ("train", "heldout") for part in ("", "_tokens", "_supervised"))
        counts = {**self.tally.as_dict(), "limited": self.limited, **{name: self.sides[name] for name in names}}
        return {**counts, "retokenised": self.retokenised} if self.retokenised else counts

    def coverage(self, special_ids: list[int], tokenizer_size: int) -> dict[str, float]:
        """What share of the held-out answers' tokens draft vocabularies of several sizes hold; printed as well."""
        train, heldout = (self.counters[side].total() for side in ("train", "heldout"))
        shares = coverages(train, heldout, special_ids, tokenizer_size)
        if shares:
            told = ", ".join(f"{size}: {share:.2%}" for size, share in shares.items())
            print(
                f"data: held-out answer tokens that a draft vocabulary of so many ids covers: {told}", file=sys.stderr
            )
        return {str(size): round(share, 4) for size, share in shares.items()}
