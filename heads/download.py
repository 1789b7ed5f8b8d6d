"""Hub repositories as folders: "user/repo@revision" -> a folder in the Hub client's cache, every file checked.

The token comes from the environment or the Hub login, as for every Hub client; it is never read or printed here.
"""

import fnmatch
import hashlib
import re
from pathlib import Path

import httpx2
from huggingface_hub import get_token, snapshot_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(@\S+)?")
FACTS = ["config.json", "head.json", "manifest.json", "*.safetensors.index.json"]
TENSORS = ["*.safetensors"]
PICKLES = ["pytorch_model*.bin", "pytorch_model.bin.index.json", "medusa_lm_head.pt"]  # only where there is no other

_STATUS = {
    401: "the Hub does not accept the token, or there is none: log in with `hf auth login` or set HF_TOKEN",
    403: "the token may not do this: give it write access to this repository",
    404: "no such repository or revision, or this token cannot see it",
    409: "the Hub reports a conflict, another change is under way: run the command again",
    412: "the branch has moved on meanwhile: run the command again",
    429: "the Hub asks to slow down: wait some minutes and run the command again",
}


def locate(source: str | Path) -> Path:
    """The folder of `source`: a folder as it is, a Hub id `user/repo[@revision]` downloaded into the client's cache.

    Raises ValueError when there is neither, when the Hub refuses, or when a file does not have its own checksum.
    """
    folder = Path(source).expanduser()
    if folder.is_dir() or not REPOSITORY.fullmatch(str(source)) or str(source).startswith("."):
        return folder
    repo, _, revision = str(source).partition("@")
    found = _snapshot(repo, revision or None, FACTS + TENSORS)
    if not any(fnmatch.fnmatch(path.name, pattern) for path in found.iterdir() for pattern in TENSORS):
        found = _snapshot(repo, revision or None, FACTS + PICKLES)
    for path in sorted(found.iterdir()):
        _check_blob(path, str(source))
    return found


def commit_of(folder: Path) -> str | None:
    """The commit of a folder in the client's cache (`.../snapshots/<commit>`), None for any other folder."""
    return folder.name if folder.parent.name == "snapshots" and re.fullmatch("[0-9a-f]{40}", folder.name) else None


def _snapshot(repo: str, revision: str | None, patterns: list[str]) -> Path:
    name = f"{repo}@{revision}" if revision else repo
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))
    except (httpx2.HTTPError, OSError) as error:
        raise hub_error(f"no folder {name!r} here, and it could not be read from the Hub", error) from error


def _check_blob(path: Path, source: str) -> None:
    """The client compares sizes only; in its cache a file is named after its checksum (sha256, or git's for text)."""
    blob = path.resolve()
    if not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", blob.name):
        return  # a cache without links keeps no checksum
    digest = hashlib.sha256()
    if len(blob.name) == 40:
        digest = hashlib.sha1(f"blob {blob.stat().st_size}\0".encode(), usedforsecurity=False)
    with blob.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != blob.name:
        path.unlink()
        blob.unlink(missing_ok=True)
        raise ValueError(
            f"{source}: {path.name} was damaged on its way (its checksum is not the Hub's); it was removed from the "
            "cache, run the command again"
        )


def status_of(error: BaseException) -> int | None:
    """HTTP status of a Hub error or of what caused it, None where there was no answer."""
    while error.__cause__ is not None and not isinstance(error, HfHubHTTPError):
        error = error.__cause__
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def hub_error(what: str, error: BaseException) -> ValueError:
    """One sentence for whatever the Hub client raised; the token never stands in it."""
    status = status_of(error)
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, OfflineModeIsEnabled) or isinstance(error, OfflineModeIsEnabled):
        reason = "offline mode is on (HF_HUB_OFFLINE)"
    elif isinstance(error, GatedRepoError):
        reason = "it is gated: ask for access on its page"
    elif isinstance(error, RepositoryNotFoundError):
        reason = _STATUS[404]
    elif status is not None:
        reason = _STATUS.get(status, f"the Hub answered with {status}: try again later")
    elif isinstance(cause, httpx2.HTTPError):
        reason = f"the connection to the Hub failed ({type(cause).__name__}): run the command again"
    else:
        reason = " ".join(str(error).split("\n")[0].split()) or type(error).__name__
    if token := get_token():
        reason = reason.replace(token, "***")
    return ValueError(f"{what}: {reason}")
