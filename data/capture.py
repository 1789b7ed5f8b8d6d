"""Run the target once over the rows of a data folder and keep its hidden states, so that training need not run it.

One row at a time: the cached features are then bit for bit those of a live forward of that row (a batch would round its
matrix products differently), and on rows of a hundred tokens or more it is hardly slower. Several processes deal the
shards among themselves (`Ranks`) and write the bytes that one process writes. On CPU that holds for one number of
threads only, as a matrix product split in two adds up in another order: hence the setting `data.capture.threads`.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from data import rows
from data.build import CaptureSettings
from data.files import free_bytes, write_json
from data.quantise import quantise
from data.rows import DataRow
from data.store import DTYPES, Contents, shard_name
from data.teacher import TopM, top_m
from heads.spec import TargetSpec, check_taps, default_taps
from heads.target import Target

_CHUNK = 128  # positions whose logits exist at one moment: 128 * 150,000 ids * 4 bytes = 77 MB


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The processes that capture together; `wait` returns when all of them have called it."""

    index: int = 0
    count: int = 1
    wait: Callable[[], None] = lambda: None


ALONE = Ranks()


def contents_of(settings: CaptureSettings, spec: TargetSpec, split: str) -> Contents:
    """What the store of one split holds. Held-out rows always keep `last`: their figures need the target's whole p.

    Raises ValueError for taps outside the target, or more likely tokens than it has.
    """
    key, given = "data.capture.taps", settings.taps
    taps = tuple(default_taps(spec.num_layers, key)) if given is None else ()
    if given:  # none at all is enough for heads that read the last feature only
        taps = check_taps(given, spec.num_layers, key)
    kept = settings.top_m if settings.teacher == "top_m" and split != "heldout" else None
    if kept is not None and kept > spec.vocab_size:
        raise ValueError(f"data.capture.top_m={kept} is above the {spec.vocab_size} ids of target {spec.name!r}")
    if kept is not None and not taps:
        raise ValueError("data.capture.teacher=top_m without taps keeps no feature a head could read: give some taps")
    return Contents(taps, settings.dtype, kept)


def folder_for(outputs: str | Path, data_folder: str | Path, split: str, spec: TargetSpec, contents: Contents) -> Path:
    """Where the features of these very rows, target and contents lie or will lie: content-addressed."""
    return Path(outputs) / "features" / _identity(data_folder, split, spec, contents)["fingerprint"]


def capture(
    target: Target,
    settings: CaptureSettings,
    data_folder: str | Path,
    split: str,
    outputs: str | Path,
    ranks: Ranks = ALONE,
) -> Path:
    """Write (or find) the features of one split; returns the folder for `Store`.

    Raises ValueError for unusable settings, too many bytes, too little disk, or a feature that is not finite.
    """
    settings.check()
    contents = contents_of(settings, target.spec, split)
    data_rows = rows.load(data_folder, split, target.spec)
    identity = _identity(data_folder, split, target.spec, contents)
    folder = Path(outputs) / "features" / identity["fingerprint"]
    first = ranks.index == 0
    if (folder / "index.json").is_file():
        if first:
            print(f"capture: {folder} is up to date ({len(data_rows)} {split} rows), nothing to do", file=sys.stderr)
        return folder
    size = contents.token_bytes(target.spec.hidden_size) * sum(len(row.ids) for row in data_rows)
    if first:
        print(
            f"capture: {len(data_rows)} {split} rows take {size / 1e9:.3f} GB ({size} bytes) in {folder}",
            file=sys.stderr,
        )
    shards = [data_rows[i : i + settings.shard_rows] for i in range(0, len(data_rows), settings.shard_rows)]
    names = [_shard_identity(identity["fingerprint"], shard) for shard in shards]
    paths = [folder / shard_name(number) for number in range(len(shards))]
    missing = [n for n, path in enumerate(paths) if not _is_whole(path, names[n])]
    _check_room(size, size * len(missing) / len(shards), settings.budget_gb, folder, split)
    if first:  # what a killed run was writing: under our name or, before that, under one of the library's own
        for stray in [*folder.glob("*.tmp"), *folder.glob(".tmp*")]:
            stray.unlink()
    ranks.wait()  # no rank writes before all have seen what is missing: they would deal other shards
    folder.mkdir(parents=True, exist_ok=True)
    mine = tqdm(
        missing[ranks.index :: ranks.count], f"capture {split}", unit="shard", disable=not first, file=sys.stderr
    )
    with _threads(settings.threads):
        for number in mine:
            _write(paths[number], _tensors(target, shards[number], contents), names[number])
    ranks.wait()
    if first:
        if lost := [path.name for path, name in zip(paths, names, strict=True) if not _is_whole(path, name)]:
            raise ValueError(f"{folder}: {', '.join(lost)} did not arrive from another process; run the capture again")
        write_json(folder / "index.json", {**identity, "bytes": size, "rows": _places(shards)})
    ranks.wait()
    return folder


def _identity(data_folder: str | Path, split: str, spec: TargetSpec, contents: Contents) -> dict[str, Any]:
    names = ("name", "revision", "tokenizer_hash", "template_hash", "hidden_size", "dtype")
    identity: dict[str, Any] = {
        "kind": "features",
        "target": {name: getattr(spec, name) for name in names},
        "split": split,
        "rows_sha256": rows.manifest(data_folder, spec)["files"][f"{split}.jsonl"],
        **contents.identity(),
    }
    text = json.dumps(identity, sort_keys=True)
    return {**identity, "fingerprint": hashlib.sha256(text.encode()).hexdigest()[:20]}


def _check_room(size: int, missing: float, budget_gb: float, folder: Path, split: str) -> None:
    """`size` bytes in all count against the budget, those still `missing` against the disk."""
    if size > budget_gb * 1e9:
        raise ValueError(
            f"capture of {split} needs {size / 1e9:.3f} GB, above data.capture.budget_gb={budget_gb}: raise it, use "
            "data.capture.dtype=bfloat16 or int8, fewer taps or data.limit"
        )
    if missing > free_bytes(folder):
        raise ValueError(f"capture of {split} needs {missing / 1e9:.3f} GB more, the disk of {folder} has less left")


def _places(shards: list[list[DataRow]]) -> list[tuple[int, int, int]]:
    """(shard, first token, end) per row: rows of 3 and 2 tokens -> (0, 0, 3), (0, 3, 5)."""
    places = []
    for number, shard in enumerate(shards):
        at = 0
        for row in shard:
            places.append((number, at, at + len(row.ids)))
            at += len(row.ids)
    return places


def _shard_identity(fingerprint: str, shard: list[DataRow]) -> dict[str, str]:
    # one key only: safetensors writes several in a random order, and equal shards must be equal bytes
    return {"identity": f"{fingerprint} " + ",".join(f"{row.index}:{len(row.ids)}" for row in shard)}


def _is_whole(path: Path, identity: dict[str, str]) -> bool:
    """Whether an earlier run, or another process, finished this very shard: it takes its name only when it is whole."""
    if not path.is_file():
        return False
    try:
        with safe_open(path, framework="pt") as opened:
            return opened.metadata() == identity
    except SafetensorError:  # cut short, by a full disk or a lost machine
        return False


def _tensors(target: Target, shard: list[DataRow], contents: Contents) -> dict[str, Tensor]:
    """What one shard holds, rows one after the other."""
    found: dict[str, list[Tensor]] = {}
    for row in shard:
        output = target.forward(torch.tensor([row.ids], device=target.device), taps=contents.taps)
        one = {} if output.taps is None else _vectors(output.taps[0], contents.dtype, row, "taps")
        if contents.top_m is None:
            one |= _vectors(output.last[0], contents.dtype, row, "last")
        else:
            _check_finite(output.last[0], output.last[0], row, "last", target.spec.dtype)
            parts = [top_m(target.logits(part), contents.top_m) for part in output.last[0].split(_CHUNK)]
            one |= _top(parts)
        for name, tensor in one.items():
            found.setdefault(name, []).append(tensor)
    return {name: torch.cat(parts) for name, parts in found.items()}


def _top(parts: list[TopM]) -> dict[str, Tensor]:
    named = {"top_ids": [p.ids for p in parts], "top_log_probs": [p.log_probs for p in parts]}
    named["top_rest"] = [p.log_rest for p in parts]
    return {name: torch.cat(tensors).cpu() for name, tensors in named.items()}


def _vectors(features: Tensor, dtype: str, row: DataRow, name: str) -> dict[str, Tensor]:
    if dtype == "int8":
        values, scale = quantise(features)
        _check_finite(scale, features, row, name, dtype)
        return {name: values.cpu(), f"{name}_scale": scale.cpu()}
    stored = features.to("cpu", DTYPES[dtype])
    _check_finite(stored, features, row, name, dtype)
    return {name: stored}


def _check_finite(stored: Tensor, features: Tensor, row: DataRow, name: str, dtype: str) -> None:
    if not torch.isfinite(stored).all():
        largest = float(features.abs().max())
        raise ValueError(
            f"row {row.index} (id {row.id}): {name} is not finite as {dtype} (largest value {largest:.4g}): "
            "use data.capture.dtype=bfloat16 or float32"
        )


def _write(path: Path, tensors: dict[str, Tensor], identity: dict[str, str]) -> None:
    """One shard, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    try:
        save_file(tensors, temporary, metadata=identity)
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
    except (SafetensorError, OSError) as error:
        temporary.unlink(missing_ok=True)
        raise ValueError(
            f"{path}: the shard cannot be written ({error}); the same command goes on from there"
        ) from error
    os.replace(temporary, path)


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
