"""Which rows are held out, decided by a hash of what the user wrote, before any answer exists.

The key never sees an answer, so regenerating with another seed or target keeps every conversation on its side, and two
conversations with the same user side can never stand on both sides.
"""

import hashlib
import json
from array import array

import numpy as np
from numpy.typing import NDArray

from data.prompts import Row


def user_key(row: Row) -> str:
    """sha256 (hex) of the conversation without its answers: system, user and tool messages, and the tools offered."""
    if row.text is not None:
        return _digest(["text", row.text])
    if row.ids is not None:  # its context alone: another answer to it stands on the same side
        return _digest(["ids", [i for i, own in zip(row.ids, row.mask or [], strict=True) if not own]])
    return _digest([[[m["role"], m["content"]] for m in row.messages if m["role"] != "assistant"], row.tools])


def whole_key(row: Row) -> str:
    """sha256 (hex) of the whole conversation: equal for exact repeats only."""
    return _digest([row.messages, row.tools, row.text, *([row.ids, row.mask] if row.ids is not None else [])])


def is_heldout(key: str, share: float) -> bool:
    """The first 60 bits of the key as a number in [0, 1), against `share`."""
    return int(key[:15], 16) / 16**15 < share


class Plan:
    """The side of every conversation of a source: `add` all of them, `decide`, then ask for one by its `unique` hash.

    17 bytes a conversation, 29 with a limit: a source of any length is planned without holding one of its rows. Hashes
    are cut to 64 bits; among a billion conversations the chance of any two being taken for a repeat is 3%.
    """

    def __init__(self, heldout_share: float, limit: int | None = None) -> None:
        self.heldout_share, self.limit = heldout_share, limit
        self.routes: dict[str, int] = {}
        codes = {"unique": "Q", "key": "Q", "given": "B", "order": "Q", "route": "I"}
        self._added = {name: array(code) for name, code in codes.items()}

    def add(self, unique: str, key: str, route: str, heldout: bool = False) -> None:
        """`unique` tells repeats, `key` decides the side (both hex); routes share a limit evenly.

        With `heldout` it is held out whatever its key, beside the share and the limit of the others.
        """
        self._added["unique"].append(_head(unique))
        self._added["key"].append(_head(key))
        self._added["given"].append(heldout)
        if self.limit is not None:
            self._added["order"].append(_head(key[16:]))  # another part of the hash than the one that makes the split
            self._added["route"].append(self.routes.setdefault(route, len(self.routes)))

    def decide(self) -> None:
        """Fix the sides. Of repeats, the first counts. Where no conversation falls under the share, the lowest key is
        held out. With `limit`, that many, evenly over routes, in hash order, heldout_share of them (at least one) held
        out.
        """
        columns = {name: np.array(values) for name, values in self._added.items()}
        self._added.clear()
        self.known, first = np.unique(columns["unique"], return_index=True)
        keys, given = columns["key"][first], columns["given"][first].astype(bool)
        heldout = ((keys >> 4) / 16**15 < self.heldout_share) & ~given  # is_heldout
        if self.heldout_share > 0 and not heldout.any() and (~given).sum() > 1:
            heldout = (keys == keys[~given].min()) & ~given
        self.taken = np.ones(len(keys), dtype=bool)
        if self.limit is not None:
            self.taken = given.copy()
            held = min(int(heldout.sum()), max(1, round(self.limit * self.heldout_share)))
            held = held if self.heldout_share > 0 else 0
            order, route = columns["order"][first], columns["route"][first]
            for side, count in ((heldout, held), (~heldout & ~given, max(0, self.limit - held))):
                chosen = np.flatnonzero(side)
                self.taken[chosen[self._balanced(order[chosen], route[chosen])[:count]]] = True
        self.heldout = heldout | given
        self._met = np.zeros(len(keys), dtype=bool)

    def _balanced(self, order: NDArray[np.uint64], route: NDArray[np.uint32]) -> NDArray[np.intp]:
        """Positions, round robin over routes by name: orders [7, 5, 9] of routes [b, b, a] -> [2, 1, 0]."""
        by_name = np.argsort(np.argsort(list(self.routes)))[route] if self.routes else route
        sorted_ = np.lexsort((order, by_name))  # ties keep the order of `known`
        starts = np.searchsorted(by_name[sorted_], by_name[sorted_])
        rounds = np.arange(len(order)) - starts
        return sorted_[np.lexsort((by_name[sorted_], rounds))]

    def place(self, unique: str) -> int:
        """Position of a conversation in the plan. Raises ValueError for one that was not added."""
        head = _head(unique)
        at = int(np.searchsorted(self.known, np.uint64(head)))
        if at == len(self.known) or int(self.known[at]) != head:
            raise ValueError("a source changed while it was read: run the command again")
        return at

    def side(self, unique: str) -> str | None:
        """ "train" or "heldout"; None for a conversation that the limit leaves out."""
        at = self.place(unique)
        return ("heldout" if self.heldout[at] else "train") if self.taken[at] else None

    def meet(self, unique: str) -> bool:
        """True the first time that this conversation is met, False for its repeats."""
        at = self.place(unique)
        first = not self._met[at]
        self._met[at] = True
        return first

    @property
    def holds_out(self) -> bool:
        """Whether any conversation is held out."""
        return bool((self.heldout & self.taken).any())

    @property
    def left_out(self) -> int:
        """How many conversations the limit leaves out."""
        return int((~self.taken).sum())


def _head(digest: str) -> int:
    return int(digest[:16], 16)


def _digest(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
