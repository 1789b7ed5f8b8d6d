"""The suffix tree where its match promises more, the head (or any model) elsewhere: by expected accepted tokens.

Both read every round. The suffix tree's promise is the sum of its path probabilities, times the share of such promises
that were kept so far at matches of about that length; the model's is its mean of accepted tokens so far. Both shares
start from `doubt` imaginary rounds, and start anew with every request: a proposal depends on its own sequence only.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from eval.cache import KVCache
from eval.drafter import Ask, Drafter, Kept, Proposal, share
from eval.drafters.suffix import Suffix
from heads.target import TargetOutput


@dataclass
class HybridSettings:
    """method: whose drafts are used where no match is long, by its name in `methods`."""

    method: str = ""
    model_accepts: float = 1.0  # tokens a round of the model's drafts is worth before anything was measured
    doubt: float = 4.0  # rounds that what is expected beforehand counts as

    def check(self) -> None:
        """Raises ValueError naming the setting."""
        if self.model_accepts < 0 or self.doubt <= 0:
            raise ValueError(
                f"hybrid.model_accepts={self.model_accepts}, hybrid.doubt={self.doubt}: give at least 0 and above 0"
            )


@dataclass
class Share:
    """Accepted tokens per unit promised, starting from what is expected beforehand."""

    accepted: float
    promised: float

    def add(self, accepted: float, promised: float) -> None:
        self.accepted += accepted
        self.promised += promised

    @property
    def mean(self) -> float:
        return self.accepted / self.promised


@dataclass
class Slot:
    """One request: its suffix tree, what both sources have kept, and the share the last round will count for."""

    suffix: Suffix
    model: Share
    matches: dict[int, Share] = field(default_factory=dict)  # by the match length's number of bits: 1, 2-3, 4-7, ..
    last: tuple[Share, float] | None = None


class Hybrid:
    """Drafts of all slots; `make` gives the suffix drafter of a slot."""

    def __init__(self, model: Drafter, make: Callable[[], Suffix], settings: HybridSettings | None = None) -> None:
        self.settings = settings or HybridSettings()
        self.settings.check()
        self.model, self.make = model, make
        self.taps, self.max_draft, self.reads_rows = model.taps, model.max_draft, model.reads_rows
        self.slots: dict[int, Slot] = {}

    def share(self, cache: KVCache, rows: Callable[[], dict[int, int]]) -> None:
        share(self.model, cache, rows)

    def start(self, slot: int, prompt: list[int], first: int, output: TargetOutput) -> None:
        s = self.settings
        suffix = self.slots[slot].suffix if slot in self.slots else self.make()
        suffix.start(prompt, first, output)
        self.slots[slot] = Slot(suffix, Share(s.model_accepts * s.doubt, s.doubt))
        self.model.start(slot, prompt, first, output)

    def propose(self, slots: list[int], asks: list[Ask]) -> list[Proposal]:
        found: dict[int, Proposal] = {}
        rest: list[int] = []
        for slot, ask in zip(slots, asks, strict=True):
            held = self.slots[slot]
            proposal = held.suffix.propose(ask)
            share = self._match_share(held)
            if share is not None and held.suffix.score * share.mean >= min(held.model.mean, ask.budget):
                found[slot], held.last = proposal, (share, held.suffix.score)
            else:
                rest.append(slot)
                held.last = held.model, 1.0
        if rest:
            asked = dict(zip(slots, asks, strict=True))
            found |= zip(rest, self.model.propose(rest, [asked[slot] for slot in rest]), strict=True)
        return [found[slot] for slot in slots]

    def commit(self, slots: list[int], kept: list[Kept]) -> None:
        for slot, left in zip(slots, kept, strict=True):
            held = self.slots[slot]
            if held.last is not None:
                share, promised = held.last
                share.add(len(left.tokens) - 1, promised)
                held.last = None
            held.suffix.commit(left)
        self.model.commit(slots, kept)

    def _match_share(self, held: Slot) -> Share | None:
        """The share for a match as long as the last proposal's; None without a match.

        Beforehand a match of n tokens is taken to keep n / (n + 2) of its promise.
        """
        n = held.suffix.matched
        if n == 0:
            return None
        doubt = self.settings.doubt
        return held.matches.setdefault(n.bit_length(), Share(doubt * n / (n + 2), doubt))
