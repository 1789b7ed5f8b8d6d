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
from collections.abc import Iterator

from data.prompts import Row

NGRAM = 13
# Scripts written without spaces: each character counts as a word, or a whole paragraph would be one.
_UNSPACED = "\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_WORD = re.compile(f"[{_UNSPACED}]|[^\\W{_UNSPACED}]+")


def words(text: str) -> list[str]:
    """`"Größe: 2 m²"` -> `["grösse", "2", "m2"]`."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


class Overlap:
    """What must not be trained on. Holds 8 bytes of hash per text and per 13-gram, and where each came from."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, bytes], str] = {}

    def add(self, row: Row) -> None:
        """Protect `row`: it is held out or stands in an evaluation set."""
        for kind, digest in _digests(row):
            self.seen.setdefault((kind, digest), row.where)

    def find(self, row: Row) -> tuple[str, str] | None:
        """(reason, where the protected row stands) when training on `row` would leak; the plainest reason first."""
        for kind, digest in _digests(row):
            if where := self.seen.get((kind, digest)):
                return f"leak_{kind}", where
        return None


def _digests(row: Row) -> Iterator[tuple[str, bytes]]:
    if row.ids is not None:
        yield "exact", _hash(" ".join(map(str, row.ids)))
        return
    texts = [row.text] if row.text is not None else [m["content"] for m in row.messages if m["role"] == "user"]
    if not any(text.strip() for text in texts):
        return
    yield "exact", _hash("\0".join(texts))
    spoken = [words(text) for text in texts]
    if any(spoken):
        yield "normalised", _hash(" ".join(word for text in spoken for word in text))
    for text in spoken if row.text is None else []:
        for start in range(len(text) - NGRAM + 1):
            yield "13gram", _hash(" ".join(text[start : start + NGRAM]))


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
