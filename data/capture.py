"""Run the target once over the rows of a data folder and keep its hidden states, so that training need not run it.

One row at a time: the cached features are then bit for bit those of a live forward of that row (a batch would round its
matrix products differently), and on rows of a hundred tokens or more it is hardly slower.
"""

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from data import rows
from data.build import CaptureSettings
from data.files import free_bytes, write_json
from data.rows import DataRow
from data.store import DTYPES, shard_name
from heads.spec import TargetSpec, check_taps, default_taps
from heads.target import Target


def folder_for(
    outputs: str | Path, data_folder: str | Path, split: str, spec: TargetSpec, taps: Sequence[int], dtype: str
) -> Path:
    """Where the features of these very rows, target, taps and dtype lie or will lie: content-addressed."""
    return Path(outputs) / "features" / _identity(data_folder, split, spec, taps, dtype)["fingerprint"]


def capture(
    target: Target, settings: CaptureSettings, data_folder: str | Path, split: str, outputs: str | Path
) -> Path:
    """Write (or find) the features of one split; returns the folder for `Store`.

    Raises ValueError for an unknown dtype, wrong taps, too many bytes, too little disk, or a non-finite feature.
    """
    if settings.dtype not in DTYPES:
        raise ValueError(f"data.capture.dtype={settings.dtype!r}: give one of {', '.join(DTYPES)}")
    if settings.shard_rows < 1:
        raise ValueError(f"data.capture.shard_rows={settings.shard_rows}: at least 1")
    layers = target.spec.num_layers
    key = "data.capture.taps"
    if settings.taps is None:
        taps = default_taps(layers, key)
    else:  # none at all is enough for heads that read the last feature only
        taps = list(check_taps(settings.taps, layers, key)) if settings.taps else []
    data_rows = rows.load(data_folder, split, target.spec)
    identity = _identity(data_folder, split, target.spec, taps, settings.dtype)
    folder = Path(outputs) / "features" / identity["fingerprint"]
    if (folder / "index.json").is_file():
        print(f"capture: {folder} is up to date ({len(data_rows)} {split} rows), nothing to do", file=sys.stderr)
        return folder
    width = (1 + len(taps)) * target.spec.hidden_size * DTYPES[settings.dtype].itemsize
    size = width * sum(len(row.ids) for row in data_rows)
    _check_room(size, settings.budget_gb, folder, split, len(data_rows))
    folder.mkdir(parents=True, exist_ok=True)
    shards = [data_rows[i : i + settings.shard_rows] for i in range(0, len(data_rows), settings.shard_rows)]
    for number, shard in enumerate(tqdm(shards, desc=f"capture {split}", unit="shard", file=sys.stderr)):
        _write_shard(target, shard, taps, settings.dtype, folder / shard_name(number), identity["fingerprint"])
    write_json(folder / "index.json", {**identity, "bytes": size, "rows": _places(shards)})
    return folder


def _identity(data_folder: str | Path, split: str, spec: TargetSpec, taps: Sequence[int], dtype: str) -> dict[str, Any]:
    names = ("name", "revision", "tokenizer_hash", "template_hash", "hidden_size", "dtype")
    identity: dict[str, Any] = {
        "kind": "features",
        "target": {name: getattr(spec, name) for name in names},
        "split": split,
        "rows_sha256": rows.manifest(data_folder, spec)["files"][f"{split}.jsonl"],
        "taps": list(taps),
        "dtype": dtype,
    }
    text = json.dumps(identity, sort_keys=True)
    return {**identity, "fingerprint": hashlib.sha256(text.encode()).hexdigest()[:20]}


def _check_room(size: int, budget_gb: float, folder: Path, split: str, count: int) -> None:
    print(f"capture: {count} {split} rows will take {size / 1e9:.3f} GB ({size} bytes) in {folder}", file=sys.stderr)
    if size > budget_gb * 1e9:
        raise ValueError(
            f"capture of {split} needs {size / 1e9:.3f} GB, above data.capture.budget_gb={budget_gb}: raise it, use "
            "data.capture.dtype=bfloat16, fewer taps or data.limit"
        )
    if size > free_bytes(folder):
        raise ValueError(f"capture of {split} needs {size / 1e9:.3f} GB, the disk of {folder} has less left")


def _places(shards: list[list[DataRow]]) -> list[tuple[int, int, int]]:
    """(shard, first token, end) per row: rows of 3 and 2 tokens -> (0, 0, 3), (0, 3, 5)."""
    places = []
    for number, shard in enumerate(shards):
        at = 0
        for row in shard:
            places.append((number, at, at + len(row.ids)))
            at += len(row.ids)
    return places


def _write_shard(
    target: Target, shard: list[DataRow], taps: list[int], dtype: str, path: Path, fingerprint: str
) -> None:
    """One shard, whole or not at all; one that an earlier, interrupted run finished with as many rows is kept."""
    # one key only: safetensors writes several in a random order, and equal shards must be equal bytes
    identity = {"identity": f"{fingerprint} " + ",".join(f"{row.index}:{len(row.ids)}" for row in shard)}
    if path.is_file():
        with safe_open(path, framework="pt") as opened:
            if opened.metadata() == identity:
                return
    last, tapped = [], []
    for row in shard:
        output = target.forward(torch.tensor([row.ids], device=target.device), taps=taps)
        last.append(_stored(output.last[0], dtype, row, "last"))
        if output.taps is not None:
            tapped.append(_stored(output.taps[0], dtype, row, f"taps {taps}"))
    tensors = {"last": torch.cat(last), **({"taps": torch.cat(tapped)} if tapped else {})}
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary, metadata=identity)
    os.replace(temporary, path)


def _stored(features: Tensor, dtype: str, row: DataRow, name: str) -> Tensor:
    stored = features.to("cpu", DTYPES[dtype])
    if not torch.isfinite(stored).all():
        largest = float(features.abs().max())
        raise ValueError(
            f"row {row.index} (id {row.id}): {name} is not finite as {dtype} (largest value {largest:.4g}): "
            "use data.capture.dtype=bfloat16 or float32"
        )
    return stored
