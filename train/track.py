"""Run log: one JSON object a line, and wandb beside it (offline unless the user is logged in).

Keys of a line with split "train" were measured on training batches, with split "heldout" on held-out conversations; the
two are never mixed, in wandb they stand under `train/` and `heldout/`.
"""

import json
import os
from pathlib import Path
from typing import Any, cast

from heads.hub import write_text

WANDB_MODES = ("auto", "online", "offline", "disabled")


class Track:
    """Appends to `folder/log.jsonl`; lines past `step` (an interrupted run's) are cut when a run resumes."""

    def __init__(self, folder: Path, name: str, settings: dict[str, Any], wandb_mode: str, step: int = 0) -> None:
        if wandb_mode not in WANDB_MODES:
            raise ValueError(f"train.wandb={wandb_mode!r} must be one of {', '.join(WANDB_MODES)}")
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "log.jsonl"
        lines = [line for line in read_log(self.path) if line["step"] <= step]
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in lines))
        self.run = None if wandb_mode == "disabled" else _wandb(folder, name, settings, wandb_mode)

    def log(self, step: int, split: str, values: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"step": step, "split": split, **values}) + "\n")
        if self.run is not None:
            self.run.log({f"{split}/{key}": value for key, value in _flat(values).items()}, step=step)

    def close(self) -> None:
        if self.run is not None:
            self.run.finish()


def read_log(path: Path) -> list[dict[str, Any]]:
    """Lines of a run log; a torn last line (the process was killed while writing it) is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8").split("\n") if path.is_file() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    flat = {}
    for key, value in values.items():
        if isinstance(value, list):
            flat.update({f"{key}_{i}": item for i, item in enumerate(value)})
        else:
            flat[key] = value
    return flat


def _wandb(folder: Path, name: str, settings: dict[str, Any], mode: str) -> Any:
    import wandb

    if mode == "auto":
        mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
    return wandb.init(
        project="drafthead",
        name=name,
        dir=str(folder),
        mode=cast(Any, mode),
        config=settings,
        settings={"silent": True},
    )
