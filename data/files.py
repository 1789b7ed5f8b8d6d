"""Hashes, atomic JSON, free disk space, and one error for a disk that is full."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def file_sha256(path: Path) -> str:
    """sha256 (hex) of a file's bytes. Raises ValueError when it is missing."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_json(path: Path, value: object) -> None:
    """Write JSON so that a reader sees the old file or the whole new one. Raises OSError naming the file."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            json.dump(value, stream, indent=1, ensure_ascii=False)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:  # a full disk does not say which file
        raise OSError(error.errno, error.strerror, str(path)) from error
    os.replace(temporary, path)


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write small tensors to a safetensors file so that a reader sees the old file or the whole new one.

    As bytes: the library's own writing leaves a file of a random name behind when it is killed. Raises OSError.
    """
    temporary = path.with_suffix(path.suffix + ".tmp")
    with temporary.open("wb") as stream:
        stream.write(save(dict(tensors)))
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)


@contextlib.contextmanager
def naming(folder: Path) -> Iterator[None]:
    """A full disk says neither which one it is nor what to do: an OSError that does."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise OSError(
            f"{folder} could not be written ({error.strerror}): make room, then run the same command again; it goes on "
            "from the answers that were finished"
        ) from error


def free_bytes(folder: Path) -> int:
    """Free disk space where `folder` is or will be."""
    place = next(p for p in [folder, *folder.absolute().parents] if p.exists())
    return shutil.disk_usage(place).free
