"""Everything needed to go on bit for bit: weights, optimizer state, RNG, counters. safetensors + JSON, never pickle."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from heads.hub import save_tensors, write_json
from heads.lora import Lora
from heads.tuned import ADAPTER


def save(
    folder: Path,
    step: int,
    head: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    lora: Lora | None = None,
) -> None:
    """Write `folder/step-<n>` (state.json last), then drop older checkpoints: one is whole at any moment."""
    final = folder / f"step-{step:07d}"
    temporary = folder / f"{final.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_tensors(temporary / "head.safetensors", head.state_dict())
    if lora is not None:
        save_tensors(temporary / ADAPTER, lora.tensors())
    tensors = {f"{i}.{key}": value for i, slots in _slots(optimizer) for key, value in slots.items()}
    save_tensors(temporary / "optimizer.safetensors", {**tensors, "rng": torch.get_rng_state()})
    write_json(temporary / "state.json", {**state, "step": step})
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    for old in folder.glob("step-*"):
        if old != final:
            shutil.rmtree(old, ignore_errors=True)


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint under `folder`, or None."""
    whole = [
        path for path in sorted(folder.glob("step-*")) if (path / "state.json").is_file() and path.suffix != ".tmp"
    ]
    return whole[-1] if whole else None


def read_state(path: Path) -> dict[str, Any]:
    return json.loads((path / "state.json").read_text(encoding="utf-8"))


def restore(
    path: Path, head: torch.nn.Module, optimizer: torch.optim.Optimizer, lora: Lora | None = None
) -> dict[str, Any]:
    """Load a checkpoint into `head`, its target's adapters and `optimizer`, set the RNG, return its state."""
    head.load_state_dict(load_file(path / "head.safetensors"), strict=True)
    if lora is not None:
        lora.load(load_file(path / ADAPTER))
    tensors = load_file(path / "optimizer.safetensors")
    torch.set_rng_state(tensors.pop("rng"))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for name, value in tensors.items():
        index, key = name.split(".", 1)
        parameter = parameters[int(index)]
        # The step counter stays where torch keeps it; the moments live beside their parameter.
        optimizer.state[parameter][key] = value if value.dim() == 0 else value.to(parameter.device)
    return read_state(path)


def _slots(optimizer: torch.optim.Optimizer) -> list[tuple[int, dict[str, torch.Tensor]]]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [(i, optimizer.state[p]) for i, p in enumerate(parameters) if p in optimizer.state]
