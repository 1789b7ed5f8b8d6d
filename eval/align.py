"""Drafting for a target with another model's tokenizer: exact text alignment and re-tokenisation.

The draft model reads the target's text in its own ids and goes on in these; what it wrote becomes target ids again:

    target ids   [ The][ cat]            text " The cat"           draft ids [ Th][e][ cat]
    drafted      [ s][at][ on]           text " sat on"            target ids [ sat][ on] -> proposed [ sat]

A target token is proposed when it is whole, that is when text was drafted behind it ([ on] could still become [ one]),
and when the context with it decodes to exactly the text that was drafted. The draft is then a function of the prefix,
so the one-hot and match rules apply. The idea is transformers' universal assisted generation's; the check is exact.
"""

from collections.abc import Sequence
from typing import Any

# What a tokenizer must give back unchanged: spaces, lines, case, accents, digits, other scripts, code.
PROBES = (
    " a",
    "A b  c",
    "x\n\n  y\tz",
    "Zoë's naïve café",
    "No. 1234.50",
    "日本語と한국어",
    "ok 🙂 done",
    "def f(x):\n    return x[0]",
)
TAIL = 24  # tokens before the newest text that may be cut differently once more text follows
CUT = "\ufffd"  # how a decoder shows a character of which not all bytes are there


def same_ids(target_tokenizer: Any, draft_tokenizer: Any) -> bool:
    """Whether every id of the two means the same token (or neither model has a tokenizer: ids are all there is)."""
    if target_tokenizer is None or draft_tokenizer is None:
        return target_tokenizer is None and draft_tokenizer is None
    ours, theirs = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    return ours == theirs and encode(target_tokenizer, PROBES[3]) == encode(draft_tokenizer, PROBES[3])


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


class Bridge:
    """Between a target's ids and a draft model's ids, by text.

    Raises ValueError where a tokenizer does not give back the text it was given: no alignment would be exact.
    """

    def __init__(self, target_tokenizer: Any, draft_tokenizer: Any, draft_name: str) -> None:
        for whose, tokenizer in (("target", target_tokenizer), (f"draft model {draft_name!r}", draft_tokenizer)):
            if tokenizer is None:
                raise ValueError(
                    f"draft_model: the {whose} has no tokenizer, the other model has one: their ids cannot be aligned; "
                    "give a draft model with the target's tokenizer"
                )
            changed = next((text for text in PROBES if decode(tokenizer, encode(tokenizer, text)) != text), None)
            if changed is not None:
                raise ValueError(
                    f"draft_model: the two models have different tokenizers and that of the {whose} does not give back "
                    f"{changed!r} unchanged, so their texts cannot be aligned exactly; give a draft model with the "
                    "target's tokenizer or a byte-level one"
                )
        self.target, self.draft = target_tokenizer, draft_tokenizer


class Aligned:
    """One sequence in both models' ids. `ready` is false while its text ends inside a character: nothing is drafted."""

    def __init__(self, bridge: Bridge, target_ids: Sequence[int]) -> None:
        self.target, self.draft = bridge.target, bridge.draft
        self.target_ids: list[int] = list(target_ids)
        self.draft_ids: list[int] = []
        self.done = 0  # target ids whose text is in draft_ids
        self.ready = self._rebuild()

    def extend(self, target_ids: Sequence[int]) -> None:
        """Take in the target's new tokens; only the last few draft ids before them can change."""
        self.target_ids += target_ids
        window = self.target_ids[max(self.done - TAIL, 0) :]
        before = decode(self.target, window[: min(self.done, TAIL)])
        after = decode(self.target, window)
        tail = decode(self.draft, self.draft_ids[-TAIL:])
        if not self.done or CUT in tail or not after.startswith(before):
            self.ready = self._rebuild()
            return
        text = tail + after[len(before) :]
        ids = encode(self.draft, text)
        self.ready = not after.endswith(CUT) and decode(self.draft, ids) == text
        if self.ready:
            self.draft_ids[-TAIL:] = ids
            self.done = len(self.target_ids)

    def whole(self, drafted: Sequence[int], ended: bool = False) -> list[int]:
        """Whole target tokens that the drafted ids spell; the last one too where the draft `ended` the turn."""
        tail = self.draft_ids[-TAIL:]
        known, text = decode(self.draft, tail), decode(self.draft, [*tail, *drafted])
        if not text.startswith(known):
            return []
        added = text[len(known) :].split(CUT)[0]
        held = self.target_ids[-TAIL:]
        before = decode(self.target, held)
        together = encode(self.target, before + added)
        found = together[len(held) :] if together[: len(held)] == held else encode(self.target, added)
        if not ended:
            found = found[:-1]
        while found and not (before + added).startswith(decode(self.target, [*held, *found])):
            found = found[:-1]
        return found

    def _rebuild(self) -> bool:
        text = decode(self.target, self.target_ids)
        self.draft_ids = encode(self.draft, text)
        self.done = len(self.target_ids)
        if text.endswith(CUT) or decode(self.draft, self.draft_ids) != text:
            self.done = 0
        return self.done > 0
