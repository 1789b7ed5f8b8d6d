"""Where an export goes: a folder that is free or an earlier export, replaced as a whole; manifest.json is what makes
a folder whole.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from scripts.layouts import ExportError


def finished(out: Path, wanted: str) -> bool:
    """Whether `out` holds this very export, whole."""
    manifest = read_manifest(out)
    if manifest is None or manifest.get("fingerprint") != wanted:
        return False
    return all((out / name).is_file() and sha256(out / name) == digest for name, digest in manifest["files"].items())


def read_manifest(out: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
    return found if isinstance(found, dict) and found.get("kind") == "export" else None


def check_place(out: Path) -> None:
    """`out` must be free, empty, or an earlier export."""
    if out.exists() and not out.is_dir():
        raise ExportError(f"out={out} is a file; choose another folder")
    if out.is_dir() and any(out.iterdir()) and read_manifest(out) is None:
        raise ExportError(f"out={out} holds files that are no export; choose another folder or empty this one")


def sweep(out: Path) -> None:
    """Remove what an export killed half way left beside `out`: `<name>.<process>.tmp` of processes that are gone."""
    for path in out.parent.glob(f"{out.name}.*"):
        match = re.fullmatch(rf"{re.escape(out.name)}\.(\d+)\.(tmp|old)", path.name)
        if match and not Path(f"/proc/{match[1]}").exists():
            shutil.rmtree(path, ignore_errors=True)


def swap(temporary: Path, out: Path) -> None:
    """Put `temporary` in the place of `out`, which is whole before and after."""
    out.parent.mkdir(parents=True, exist_ok=True)
    old = out.with_name(f"{out.name}.{os.getpid()}.old")
    if out.exists():
        out.rename(old)
    temporary.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
