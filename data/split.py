"""Which rows are held out, decided by a hash of what the user wrote, before any answer exists.

The key never sees an answer, so regenerating with another seed or target keeps every conversation on its side, and two
conversations with the same user side can never stand on both sides.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Item:
    """What the split needs to know of a row: `unique` tells repeats, `key` decides the side."""

    unique: str
    key: str
    route: str


def assign(items: Iterable[Item], heldout_share: float, limit: int | None = None) -> dict[str, str]:
    """`unique` -> "train" | "heldout" for the rows that take part.

    With `limit`, that many rows, spread evenly over routes, in hash order, with heldout_share of them held out, and at
    least one. Where no row falls under the share, the lowest key is held out.
    """
    sides: dict[str, list[Item]] = {"train": [], "heldout": []}
    for item in items:
        sides["heldout" if is_heldout(item.key, heldout_share) else "train"].append(item)
    if heldout_share > 0 and not sides["heldout"] and len(sides["train"]) > 1:
        lowest = min(item.key for item in sides["train"])
        sides["heldout"] = [i for i in sides["train"] if i.key == lowest]
        sides["train"] = [i for i in sides["train"] if i.key != lowest]
    if limit is not None:
        heldout = min(len(sides["heldout"]), max(1, round(limit * heldout_share))) if heldout_share > 0 else 0
        sides = {
            "heldout": _balanced(sides["heldout"], heldout),
            "train": _balanced(sides["train"], max(0, limit - heldout)),
        }
    return {item.unique: side for side, chosen in sides.items() for item in chosen}


def _balanced(items: list[Item], count: int) -> list[Item]:
    """Round robin over routes, each in the order of another part of the hash than the one that made the split."""
    routes: dict[str, list[Item]] = {}
    for item in sorted(items, key=lambda i: (i.key[16:], i.unique)):
        routes.setdefault(item.route, []).append(item)
    rounds = max((len(r) for r in routes.values()), default=0)
    return [routes[r][n] for n in range(rounds) for r in sorted(routes) if n < len(routes[r])][:count]


def _digest(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
