"""Hashes, atomic JSON and free disk space."""

import hashlib
import json
import os
import shutil
from pathlib import Path


def file_sha256(path: Path) -> str:
    """sha256 (hex) of a file's bytes. Raises ValueError when it is missing."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_json(path: Path, value: object) -> None:
    """Write JSON so that a reader sees the old file or the whole new one."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=1, ensure_ascii=False)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)


def free_bytes(folder: Path) -> int:
    """Free disk space where `folder` is or will be."""
    place = next(p for p in [folder, *folder.absolute().parents] if p.exists())
    return shutil.disk_usage(place).free
