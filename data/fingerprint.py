"""What a data folder depends on, as one hash; a finished folder of the same hash is not made again."""

import hashlib
import json
from pathlib import Path
from typing import Any

from data.asking import TRANSPORT
from data.files import file_sha256
from data.records import SUFFIXES
from heads.target import Target

FORMAT = 2  # raise it when the same settings would give other rows


def fingerprint(target: Target, settings: dict[str, Any]) -> str:
    """Hash of everything the rows depend on: contents of the files (not their names), settings, target, template."""
    values = {k: v for k, v in settings.items() if k not in ("block_bytes", "capture")}
    values["regenerate"] = {k: v for k, v in settings["regenerate"].items() if k not in TRANSPORT}
    values["regenerate"]["server"] = settings["regenerate"]["server"] is not None  # the same server may move
    for name in ("source", "evaluation_sets"):
        values[name] = [_source_hash(source) for source in settings[name]]
    answers = settings["answers"]
    values["answers"] = file_sha256(Path(answers).expanduser()) if answers else None
    spec = target.spec
    values["target"] = [spec.name, spec.revision, spec.tokenizer_hash, spec.template_hash, spec.dtype, FORMAT]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _source_hash(source: str) -> list[str]:
    path = Path(source).expanduser()
    if path.is_dir():
        return [file_sha256(p) for p in sorted(path.iterdir()) if p.name.endswith(SUFFIXES)]
    return [file_sha256(path)] if path.is_file() else [source]


def finished(folder: Path, fingerprint: str) -> dict[str, Any] | None:
    """The manifest of a folder that is whole and was made under this fingerprint."""
    path = folder / "manifest.json"
    if not path.is_file():
        return None
    manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    whole = all((folder / n).is_file() and file_sha256(folder / n) == sha for n, sha in manifest["files"].items())
    return manifest if manifest["fingerprint"] == fingerprint and whole else None
