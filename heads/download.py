"""Hub repositories as folders: "user/repo@revision" -> a folder in the Hub client's cache, every file checked.

The token comes from the environment or the Hub login, as for every Hub client; it is never read or printed here.
"""

import fnmatch
import re
from pathlib import Path

from huggingface_hub import snapshot_download

from heads.hub_client import attempt, checksum
from heads.read_block import MASK_FILE

REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(@\S+)?")
FACTS = ["config.json", "head.json", "manifest.json", "*.safetensors.index.json"]
TENSORS = ["*.safetensors"]
BESIDE = [MASK_FILE]  # a pickle that comes with tensors
PICKLES = ["pytorch_model*.bin", "pytorch_model.bin.index.json", "medusa_lm_head.pt"]  # only where there is no other


def locate(source: str | Path) -> Path:
    """The folder of `source`: a folder as it is, a Hub id `user/repo[@revision]` downloaded into the client's cache.

    A Path is always a folder; so is a string that names one, or that no repository could bear.

    Raises ValueError when there is neither, when the Hub refuses, or when a file does not have its own checksum.
    """
    folder = Path(source).expanduser()
    if isinstance(source, Path) or folder.is_dir() or source.startswith(".") or not REPOSITORY.fullmatch(source):
        return folder
    repo, _, revision = source.partition("@")
    found = _snapshot(repo, revision or None, FACTS + TENSORS + BESIDE)
    if not any(fnmatch.fnmatch(path.name, pattern) for path in found.iterdir() for pattern in TENSORS):
        found = _snapshot(repo, revision or None, FACTS + PICKLES)
    for path in sorted(found.iterdir()):
        _check_blob(path, source)
    return found


def repository_of(folder: Path) -> tuple[str, str] | None:
    """(repository, commit) of a folder in the client's cache, None for any other folder.

    `.../models--user--repo/snapshots/<commit>` -> ("user/repo", commit)
    """
    name = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not name.startswith("models--"):
        return None
    return name.removeprefix("models--").replace("--", "/", 1), folder.name


def _snapshot(repo: str, revision: str | None, patterns: list[str]) -> Path:
    name = f"{repo}@{revision}" if revision else repo
    what = f"no folder {name!r} here, and it could not be read from the Hub"
    return Path(attempt(what, lambda: snapshot_download(repo, revision=revision, allow_patterns=patterns)))


def _check_blob(path: Path, source: str) -> None:
    """The client compares sizes only; in its cache a file is named after its checksum (sha256, or git's for text)."""
    blob = path.resolve()
    if not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", blob.name):
        return  # a cache without links keeps no checksum
    if checksum(blob, like=blob.name) != blob.name:
        path.unlink()
        blob.unlink(missing_ok=True)
        raise ValueError(
            f"{source}: {path.name} was damaged on its way (its checksum is not the Hub's); it was removed from the "
            "cache, run the command again"
        )
