"""A trained head on disk: `head.safetensors` + `head.json` (written last). Never pickle.

`head.json` holds the kind, the settings, the target's facts and the provenance; a reader refuses another target.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from heads import HEADS
from heads.spec import TargetSpec


def build_head(settings: dict[str, Any], spec: TargetSpec, vocab: tuple[torch.Tensor, torch.Tensor] | None) -> Any:
    """A fresh head from `{"kind": ..., **fields}`. Raises ValueError naming a wrong kind or field."""
    kind = settings.get("kind")
    if kind not in HEADS:
        raise ValueError(f"head.kind={kind!r} is not a head: choose one of {sorted(HEADS)}")
    head_class, config_class = HEADS[kind]
    known = [f.name for f in dataclasses.fields(config_class)]
    if extra := sorted(set(settings) - set(known)):
        raise ValueError(f"head.{extra[0]} is not a setting of {kind}: it has {', '.join(known)}")
    return head_class(config_class(**settings), spec, vocab)


def write_json(path: Path, value: Any) -> None:
    """Write JSON under a temporary name, then rename: a reader never sees half a file."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def save_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """safetensors under a temporary name, then rename."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, temporary)
    temporary.replace(path)


def save_head(folder: Path, head: Any, spec: TargetSpec, provenance: dict[str, Any]) -> None:
    """Write a head folder; head.json, written last, makes it whole."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "head.json").unlink(missing_ok=True)
    save_tensors(folder / "head.safetensors", head.state_dict())
    facts = {
        "kind": head.config.kind,
        "config": dataclasses.asdict(head.config),
        "target": dataclasses.asdict(spec),
        "provenance": provenance,
    }
    write_json(folder / "head.json", facts)


def read_facts(folder: Path) -> dict[str, Any]:
    """head.json of a head folder (or of a run folder's `best/`). Raises ValueError when there is none."""
    for candidate in (folder, folder / "best"):
        if (candidate / "head.json").is_file():
            return {**json.loads((candidate / "head.json").read_text(encoding="utf-8")), "folder": str(candidate)}
    raise ValueError(f"{folder}: no trained head here (head.json is missing); train one with `python -m train`")


def load_head(folder: Path | str, spec: TargetSpec | None = None) -> Any:
    """Strictly load a head folder (its vocabulary map included).

    Raises ValueError when the folder holds no head, the head belongs to another target than `spec`, or tensors differ.
    """
    facts = read_facts(Path(folder))
    own = TargetSpec.from_dict(facts["target"])
    if spec is not None and (differing := own.same_target(spec)):
        raise ValueError(
            f"{folder}: this head was trained for target {own.name!r}, not {spec.name!r} (they differ in "
            f"{', '.join(differing)}): evaluate it with its own target or train a head for this one"
        )
    path = Path(facts["folder"]) / "head.safetensors"
    tensors = load_file(path)
    vocab = (tensors["d2t"], tensors["t2d"]) if {"d2t", "t2d"} <= tensors.keys() else None
    head = build_head({"kind": facts["kind"], **facts["config"]}, own, vocab)
    try:
        head.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        raise ValueError(f"{path}: tensors do not fit head.json: {' '.join(str(error).split())}") from error
    return head.eval()
