"""Captured hidden states on disk: shards of whole rows in file order, read through memory maps.

outputs/features/<fingerprint>/shard-00000.safetensors   N tokens of several rows; see below
                               index.json                where each row lies; written last, so its presence means whole

    last [N, H], taps [N, n, H]             float32, bfloat16, float16 or int8
    last_scale [N], taps_scale [N, n]       fp32, with int8 only (data/quantise.py)
    top_ids, top_log_probs [N, m], top_rest [N]     in place of `last` where the teacher is the top m (data/teacher.py)
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from data.quantise import dequantise
from data.teacher import TopM
from heads.spec import TargetSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}
TEACHERS = ("last", "top_m")


@dataclasses.dataclass(frozen=True)
class Contents:
    """What a store keeps of every token. `top_m` None: the last hidden state; a number: so many likely tokens."""

    taps: tuple[int, ...]
    dtype: str = "float32"
    top_m: int | None = None

    def token_bytes(self, hidden_size: int) -> int:
        """Bytes of one token: float32, three taps and `last`, H = 576 -> 4 * 576 * 4 = 9216."""
        vectors = len(self.taps) + (self.top_m is None)
        vector = hidden_size * DTYPES[self.dtype].itemsize + (4 if self.dtype == "int8" else 0)
        return vectors * vector + (0 if self.top_m is None else 8 * self.top_m + 4)

    def identity(self) -> dict[str, Any]:
        """What of it makes two stores different ones."""
        kept = {} if self.top_m is None else {"top_m": self.top_m}
        return {"taps": list(self.taps), "dtype": self.dtype, **kept}


@dataclasses.dataclass(frozen=True)
class Features:
    """One row, T tokens: last [T, H] or, where the store holds none, `top`; taps [T, n, H] or None."""

    last: Tensor | None
    taps: Tensor | None
    top: TopM | None = None


class Store:
    """Rows of features by position in the split. Only the pages that are read enter memory.

    Raises ValueError when the folder is unfinished, or holds another target, contents or rows than asked for.
    """

    def __init__(
        self,
        folder: str | Path,
        spec: TargetSpec | None = None,
        contents: Contents | None = None,
        rows_sha256: str | None = None,
    ) -> None:
        self.folder = Path(folder)
        path = self.folder / "index.json"
        if not path.is_file():
            raise ValueError(f"{folder}: no finished feature store (index.json is missing); run the capture again")
        self.index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        self._check(spec, contents, rows_sha256)
        self.contents = Contents(tuple(self.index["taps"]), self.index["dtype"], self.index.get("top_m"))
        self._open: dict[int, Any] = {}

    def _check(self, spec: TargetSpec | None, contents: Contents | None, rows_sha256: str | None) -> None:
        here = self.index["target"]
        wanted: dict[str, tuple[object, object]] = {}
        if spec is not None:
            names = ("revision", "tokenizer_hash", "template_hash", "hidden_size", "dtype")
            wanted = {f"target {name}": (here[name], getattr(spec, name)) for name in names}
        if contents is not None:
            whole = dataclasses.asdict(contents) | {"taps": list(contents.taps)}
            wanted |= {name: (self.index.get(name), value) for name, value in whole.items()}
        if rows_sha256 is not None:
            wanted["rows"] = (self.index["rows_sha256"], rows_sha256)
        for name, (stored, asked) in wanted.items():
            if stored != asked:
                raise ValueError(
                    f"{self.folder}: stale features: {name} {stored} stored, {asked} asked for; capture them again"
                )

    def __len__(self) -> int:
        return len(self.index["rows"])

    def row(self, index: int) -> Features:
        """Features of row `index`: floats in the stored dtype, int8 as float32."""
        shard, start, end = self.index["rows"][index]
        if shard not in self._open:
            self._open[shard] = safe_open(self.folder / shard_name(shard), framework="pt")

        def read(name: str) -> Tensor:
            return self._open[shard].get_slice(name)[start:end]

        def vectors(name: str) -> Tensor:
            values = read(name)
            return dequantise(values, read(f"{name}_scale")) if values.dtype == torch.int8 else values

        taps = vectors("taps") if self.contents.taps else None
        if self.contents.top_m is None:
            return Features(vectors("last"), taps)
        return Features(None, taps, TopM(read("top_ids"), read("top_log_probs"), read("top_rest")))


class PickedTaps:
    """A store narrowed to the taps one head reads, so that heads with other taps can share one capture."""

    def __init__(self, store: Store, wanted: Sequence[int]) -> None:
        stored = store.contents.taps
        if missing := sorted(set(wanted) - set(stored)):
            raise ValueError(f"captured features hold taps {list(stored)}, but the head reads {missing} too")
        self.store = store
        self.columns = [stored.index(tap) for tap in wanted]

    def row(self, index: int) -> Features:
        found = self.store.row(index)
        taps = found.taps[:, self.columns] if self.columns and found.taps is not None else None
        return dataclasses.replace(found, taps=taps)


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"
