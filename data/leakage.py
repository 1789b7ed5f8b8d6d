"""Training rows that an evaluation would meet again: the same user text, the same words, or 13 words in a row.

    "Rename t to total!"  exact        the very characters of all user messages
    rename t to total     normalised   NFKC, case folded, word characters only
    13 words in a row     13gram       inside one user message; shorter messages are caught by the two above

Answers, system prompts and tools are not compared: a house's system prompt stands in every row it ever logged. Text
that came already rendered, and token ids, hold that prompt too, so of those only whole rows are compared.
"""

import hashlib
import re
import unicodedata
from array import array
from collections.abc import Iterator

import numpy as np

from data.prompts import Row

NGRAM = 13
# Scripts written without spaces: each character counts as a word, or a whole paragraph would be one.
_UNSPACED = "\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_WORD = re.compile(f"[{_UNSPACED}]|[^\\W{_UNSPACED}]+")


def words(text: str) -> list[str]:
    """`"Größe: 2 m²"` -> `["grösse", "2", "m2"]`."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


class Overlap:
    """What must not be trained on: 12 bytes for each text and each 13-gram, so that whole evaluation sets fit."""

    def __init__(self) -> None:
        self._new = (array("Q"), array("I"))  # hash, and which protected row it is of
        self._known = np.empty(0, dtype=np.uint64)
        self._owner = np.empty(0, dtype=np.uint32)
        self._files: dict[str, int] = {}
        self._places = (array("I"), array("Q"))  # file and line of each protected row

    def add(self, row: Row) -> None:
        """Protect `row`: it is held out or stands in an evaluation set."""
        for _, digest in _digests(row):
            self._new[0].append(digest)
            self._new[1].append(len(self._places[0]))
        self._places[0].append(self._files.setdefault(row.file, len(self._files)))
        self._places[1].append(row.line)

    def find(self, row: Row) -> tuple[str, str] | None:
        """(reason, where the protected row stands) when training on `row` would leak; the plainest reason first."""
        if self._new[0]:
            self._sort()
        digests = list(_digests(row)) if len(self._known) else []
        hashes = np.array([digest for _, digest in digests], dtype=np.uint64)
        at = np.searchsorted(self._known, hashes)
        found = np.flatnonzero(self._known[np.minimum(at, len(self._known) - 1)] == hashes) if digests else at
        if not len(found):
            return None
        owner = int(self._owner[at[found[0]]])
        file = list(self._files)[self._places[0][owner]]
        return f"leak_{digests[found[0]][0]}", f"{file}:{self._places[1][owner]}"

    def _sort(self) -> None:
        """Of equal hashes, the row that was added first keeps it."""
        hashes = np.concatenate([self._known, np.array(self._new[0])])
        owners = np.concatenate([self._owner, np.array(self._new[1])])
        self._known, first = np.unique(hashes, return_index=True)
        self._owner = owners[first]
        self._new = (array("Q"), array("I"))


def _digests(row: Row) -> Iterator[tuple[str, int]]:
    if row.ids is not None:
        yield "exact", _hash("exact", " ".join(map(str, row.ids)))
        return
    texts = [row.text] if row.text is not None else [m["content"] for m in row.messages if m["role"] == "user"]
    if not any(text.strip() for text in texts):
        return
    yield "exact", _hash("exact", "\0".join(texts))
    spoken = [words(text) for text in texts]
    if any(spoken):
        yield "normalised", _hash("normalised", " ".join(word for text in spoken for word in text))
    for text in spoken if row.text is None else []:
        for start in range(len(text) - NGRAM + 1):
            yield "13gram", _hash("13gram", " ".join(text[start : start + NGRAM]))


def _hash(kind: str, text: str) -> int:
    data = f"{kind}\0{text}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
