"""Folders that others made, or that serving engines load: which head lies in one, and what it needs to be built here.

`read` gives the parts of a head (settings, target facts, tensors under our names); `heads.hub.load` builds it. What a
folder holds is read off its tensors, because published configs name their architecture in a dozen ways:

    fc.weight + self_attn.q_proj of width 2H              EAGLE-3, engine layout or speculators format
    fc.weight [H, 2H] + self_attn.q_proj of width H       EAGLE-1
    medusa_heads.0.0.linear.weight, 0.0.linear.weight     Medusa
    fc.weight + hidden_norm.weight + self_attn.q_norm     block head, DFlash layout

A new head is one entry of READERS.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from heads import read_block, read_eagle1, read_eagle3, read_medusa
from heads.parts import Parts
from heads.spec import TargetSpec

# kind -> (whether these tensors are one, reader of config and tensors)
READERS: dict[str, tuple[Callable[..., bool], Callable[..., Parts]]] = {
    "block": (read_block.is_one, read_block.read),
    "medusa": (read_medusa.is_one, read_medusa.read),
    "eagle3": (read_eagle3.is_one, read_eagle3.read),
    "eagle1": (read_eagle1.is_one, read_eagle1.read),
}

_WEIGHTS = ("model.safetensors", "medusa_lm_head.safetensors", "pytorch_model.bin", "medusa_lm_head.pt")


def read(folder: Path, spec: TargetSpec | None = None) -> Parts:
    """The head in a folder of another format; `spec` is the target it shall draft for, None what the folder says.

    Raises ValueError naming the file, key or tensor that is missing, unknown or does not fit.
    """
    config = read_json(folder / "config.json")
    tensors = read_tensors(folder)
    made = own_facts(folder)
    if spec is None and made is not None:
        spec = TargetSpec.from_dict(made["target"])
    for is_one, reader in READERS.values():
        if is_one(tensors):
            parts = reader(folder, config, tensors, spec)
            if made is not None and made["kind"] == parts.settings["kind"]:
                parts.settings = {**made["config"], **parts.settings}  # what training knew and the format does not say
            return parts
    raise ValueError(
        f"{folder}: these tensors are no head that is known here ({', '.join(sorted(tensors)[:4])} ...): EAGLE in "
        "the layouts of vLLM and SGLang, speculators folders, Medusa and DFlash are read"
    )


def is_head_folder(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(_weight_files(folder))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ValueError naming the file."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file; a head folder holds config.json and its tensors")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: damaged, not JSON ({error}); copy it again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: holds a {type(found).__name__} where a JSON object belongs; copy it again")
    return found


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder; pickles are read with `weights_only`, so that no code in them runs.

    Raises ValueError naming the file that is missing or damaged.
    """
    files = list(_weight_files(folder))
    if not files:
        raise ValueError(f"{folder}: no tensors here (model.safetensors or pytorch_model.bin)")
    tensors: dict[str, Tensor] = {}
    for path in files:
        if not path.is_file():
            raise ValueError(f"{path}: missing, though the index beside it names it; copy it again")
        found = load_tensors(path) if path.suffix == ".safetensors" else _unpickled(path)
        if twice := sorted(found.keys() & tensors.keys()):
            raise ValueError(f"{path}: tensor {twice[0]} lies in another file as well")
        tensors |= found
    return tensors


def load_tensors(path: Path) -> dict[str, Tensor]:
    """A safetensors file. Raises ValueError naming it when it is damaged or cut short."""
    try:
        return load_file(path)
    except Exception as error:  # safetensors raises a class of its own, which it does not export for all cases
        raise ValueError(f"{path}: damaged or cut short, not safetensors ({error}); copy it again") from error


def _weight_files(folder: Path) -> list[Path]:
    """The files of the first layout that is there; an index names its shards."""
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (folder / name).is_file():
            shards = read_json(folder / name).get("weight_map", {})
            return [folder / shard for shard in sorted(set(shards.values()))]
    return next(([folder / name] for name in _WEIGHTS if (folder / name).is_file()), [])


def _unpickled(path: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch each raise classes of their own
        reason = " ".join(str(error).split())[:120]
        raise ValueError(f"{path}: not a plain file of tensors, and nothing else is unpickled ({reason})") from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(f"{path}: holds other things than named tensors; save the head's state_dict alone")
    return found


def fingerprint(folder: Path) -> str:
    """Of the tensor files' bytes."""
    digest = hashlib.sha256()
    for path in _weight_files(folder):
        with path.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]


def own_facts(folder: Path) -> dict[str, Any] | None:
    """What head.json said of one of our own exports: its manifest carries it along."""
    path = folder / "manifest.json"
    found = read_json(path).get("head_facts") if path.is_file() else None
    return found if isinstance(found, dict) else None
