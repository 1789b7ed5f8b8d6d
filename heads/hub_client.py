"""Calls of the Hub client: tried again while the Hub is busy or the connection breaks, and refused in one sentence."""

import hashlib
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import httpx2
from huggingface_hub import get_token
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

TRIES = 5
FIRST_WAIT_S = 2.0
PASSING = (408, 409, 412, 429, 500, 502, 503, 504)  # statuses that a second try may not meet again
_STATUS = {
    401: "the Hub does not accept the token, or there is none: log in with `hf auth login` or set HF_TOKEN",
    403: "the token may not do this: give it write access to this repository",
    404: "no such repository or revision, or this token cannot see it",
    409: "the Hub reports a conflict, another change is under way: run the command again",
    412: "the branch has moved on meanwhile: run the command again",
    429: "the Hub asks to slow down: wait some minutes and run the command again",
}

T = TypeVar("T")

logging.getLogger("httpx2").setLevel(logging.WARNING)  # the client's: a line for each request otherwise


def attempt(what: str, call: Callable[[], T]) -> T:
    """Try again with growing waits while the Hub is busy or the connection breaks. Raises ValueError at the end."""
    wait = FIRST_WAIT_S
    for left in reversed(range(TRIES)):
        try:
            return call()
        except (httpx2.HTTPError, OSError, RuntimeError, ValueError) as error:
            status = status_of(error)
            passing = status in PASSING if status is not None else broken_connection(error)
            if not passing or not left:
                raise hub_error(what, error) from error
            print(f"{hub_error(what, error)}; trying again in {wait:g} s", file=sys.stderr)
            time.sleep(wait)
            wait = min(2 * wait, 60.0)
    raise AssertionError("the last try returns or raises")


def broken_connection(error: BaseException | None) -> bool:
    """Whether a failure of the network lies in the chain of causes."""
    while error is not None:
        if isinstance(error, httpx2.TransportError):
            return True
        error = error.__cause__
    return False


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
    elif broken_connection(error):
        reason = f"the connection to the Hub failed ({str(cause).splitlines()[0]}): run the command again"
    else:
        reason = " ".join(str(cause).split("\n")[0].split()) or type(cause).__name__
    if token := get_token():
        reason = reason.replace(token, "***")
    return ValueError(f"{what}: {reason}")


def checksum(path: Path, like: str) -> str:
    """Of a file, as the Hub names its content: sha256 of large files (64 digits), git's blob id of others (40)."""
    digest = hashlib.sha256()
    if len(like) == 40:
        digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
