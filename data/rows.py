"""Rows of a data folder for training and evaluation, refused when they were made for another target."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from heads.spec import TargetSpec


@dataclass(frozen=True)
class DataRow:
    """ids [T]; spans of supervised token positions, end exclusive; `index` is its position in the file."""

    index: int
    id: str
    key: str
    route: str
    ids: list[int]
    spans: list[tuple[int, int]]

    def supervised(self) -> Tensor:
        """bool [T]: `asst[t]` of the conventions."""
        mask = torch.zeros(len(self.ids), dtype=torch.bool)
        for start, end in self.spans:
            mask[start:end] = True
        return mask


def manifest(folder: str | Path, spec: TargetSpec | None = None) -> dict[str, Any]:
    """The manifest of a finished data folder. Raises ValueError when there is none or it is for another target."""
    path = Path(folder) / "manifest.json"
    if not path.is_file():
        raise ValueError(f"{folder}: no finished data folder (manifest.json is missing); run python -m data first")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if found.get("kind") != "data":
        raise ValueError(f"{path}: this manifest is of kind {found.get('kind')!r}, not 'data'")
    if spec is not None:
        _check_target(str(folder), found["target"], spec)
    return found


def _check_target(folder: str, made_for: dict[str, str], spec: TargetSpec) -> None:
    # The name may differ (a folder or a Hub id of the same files); what the rows depend on may not.
    for field in ("revision", "tokenizer_hash", "template_hash"):
        if made_for[field] != getattr(spec, field):
            raise ValueError(
                f"{folder} was made for target {made_for['name']!r} ({field} {made_for[field]}), but this run's target "
                f"is {spec.name!r} ({field} {getattr(spec, field)}): run python -m data for it"
            )


def load(folder: str | Path, split: str, spec: TargetSpec | None = None) -> list[DataRow]:
    """Rows of "train" or "heldout" in file order.

    Raises ValueError when the folder is not finished, belongs to another target, or the split is empty.
    """
    rows = list(stream(folder, split, spec))
    if not rows:
        raise ValueError(f"{folder}: the {split} split is empty; raise data.heldout_share or give more conversations")
    return rows


def stream(folder: str | Path, split: str, spec: TargetSpec | None = None) -> Iterator[DataRow]:
    """The rows of `load` one by one, none of them held; an empty split gives none."""
    manifest(folder, spec)
    path = Path(folder) / f"{split}.jsonl"
    if not path.is_file():
        raise ValueError(f"{path}: no such split; a data folder holds train.jsonl and heldout.jsonl")
    with path.open(encoding="utf-8") as lines:
        for index, line in enumerate(lines):
            row = json.loads(line)
            spans = [(a, b) for a, b in row["spans"]]
            yield DataRow(index, row["id"], row["key"], row["route"], row["ids"], spans)


def counts(folder: str | Path) -> Tensor:
    """int64 [V]: how often each target id is supervised in the training split."""
    return load_file(Path(folder) / "counts.safetensors")["counts"]
