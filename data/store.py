"""Captured hidden states on disk: shards of whole rows in file order, read through memory maps.

outputs/features/<fingerprint>/shard-00000.safetensors   {"last": [N, H], "taps": [N, n, H]}   N tokens of several rows
                               index.json                where each row lies; written last, so its presence means whole
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from heads.spec import TargetSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Store:
    """Rows of features by position in the split. Only the pages that are read enter memory.

    Raises ValueError when the folder is unfinished, or holds another target, taps or rows than asked for.
    """

    def __init__(
        self,
        folder: str | Path,
        spec: TargetSpec | None = None,
        taps: Sequence[int] | None = None,
        rows_sha256: str | None = None,
    ) -> None:
        self.folder = Path(folder)
        path = self.folder / "index.json"
        if not path.is_file():
            raise ValueError(f"{folder}: no finished feature store (index.json is missing); run the capture again")
        self.index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        self.taps = tuple(self.index["taps"])
        self.dtype = DTYPES[self.index["dtype"]]
        self._check(spec, taps, rows_sha256)
        self._open: dict[int, Any] = {}

    def _check(self, spec: TargetSpec | None, taps: Sequence[int] | None, rows_sha256: str | None) -> None:
        here = self.index["target"]
        wanted: dict[str, tuple[object, object]] = {}
        if spec is not None:
            names = ("revision", "tokenizer_hash", "template_hash", "hidden_size")
            wanted = {f"target {name}": (here[name], getattr(spec, name)) for name in names}
        if taps is not None:
            wanted["taps"] = (list(self.taps), list(taps))
        if rows_sha256 is not None:
            wanted["rows"] = (self.index["rows_sha256"], rows_sha256)
        for name, (stored, asked) in wanted.items():
            if stored != asked:
                raise ValueError(
                    f"{self.folder}: stale features: {name} {stored} stored, {asked} asked for; capture them again"
                )

    def __len__(self) -> int:
        return len(self.index["rows"])

    def row(self, index: int) -> tuple[Tensor, Tensor]:
        """(last [T, H], taps [T, n, H]) of row `index`, in the stored dtype."""
        shard, start, end = self.index["rows"][index]
        if shard not in self._open:
            self._open[shard] = safe_open(self.folder / shard_name(shard), framework="pt")
        opened = self._open[shard]
        last = opened.get_slice("last")[start:end]
        if not self.taps:
            return last, last.new_empty(end - start, 0, last.shape[-1])
        return last, opened.get_slice("taps")[start:end]


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"
