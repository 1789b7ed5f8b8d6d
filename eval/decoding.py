"""How a sequence is decoded, and what comes of it."""

from dataclasses import dataclass, field

from eval.adaptive import Gain
from eval.tree import Chain, Dynamic, Shape, depth_of
from eval.warpers import Warpers

RULES = ("auto", "greedy", "match", "one-hot", "rejection", "strict", "typical")
LOSSY = ("typical",)  # every other rule keeps the target's law exactly


@dataclass
class Decoding:
    """How a sequence is decoded. A token's law never depends on k, tree, rule or drafter, unless the rule is LOSSY."""

    k: int = 0  # draft tokens per round, 0 = plain; a tree's depth is its own
    max_new_tokens: int = 64
    warpers: Warpers = field(default_factory=Warpers)
    proposal: str = "greedy"  # greedy: most likely draft tokens; sampled: drawn from q through the same warpers
    rule: str = "auto"
    seed: int = 0
    record_alpha: bool = False  # needs q at every step: not in timed runs; chains only
    stop_strings: tuple[str, ...] = ()
    min_confidence: float = 0.0  # adaptive draft length of the heads (see Ask); 0 = always k
    tree: Shape | None = None  # None: a chain of k
    replacement: bool = False  # siblings of a sampled tree are drawn with replacement
    gain: Gain | None = None  # see eval/adaptive.py, for these three
    heuristic: bool = False
    most_live: int | None = None  # no drafts while more sequences than this are decoded at once; None = always

    def shape(self) -> Shape:
        return Chain(self.k) if self.tree is None else self.tree

    def depth(self) -> int:
        """Most tokens deep a round drafts, 0 = plain."""
        return depth_of(self.shape())

    def resolved_rule(self) -> str:
        """auto: greedy at temperature 0, rejection for sampled drafts, sample-and-match for deterministic ones."""
        if self.warpers.temperature == 0:
            return "greedy"
        if self.rule != "auto":
            return self.rule
        return "rejection" if self.proposal == "sampled" and self.depth() > 0 else "match"

    def check(self) -> None:
        """Raises ValueError for a combination that would not keep the target's law, or means nothing."""
        if self.rule not in RULES:
            raise ValueError(f"rule is {self.rule!r}: choose from {', '.join(RULES)}")
        if self.proposal == "sampled" and self.warpers.temperature > 0 and self.resolved_rule() == "one-hot":
            raise ValueError("rule one-hot judges deterministic drafts: use proposal greedy, or rule rejection")
        if self.proposal == "sampled" and isinstance(self.tree, Dynamic):
            raise ValueError("a dynamic tree keeps its most confident children: its proposals are greedy, not sampled")
        if self.record_alpha and self.tree is not None:
            raise ValueError("alpha is recorded on chains: leave the tree out")


@dataclass
class Generation:
    """A decoded sequence: ids, steps [[K_s, a_s]], seconds per part, why it ended ("eos", "length", "stop").

    K_s is how deep step s drafted and `nodes` how many tokens it drafted, the same on a chain. Seconds are this
    sequence's share: what a pass over n sequences took, divided by n, so that they add up to the time that went by.
    `wall_s` is the time from the start of its prefill to its end.
    """

    output_ids: list[int] = field(default_factory=list)
    steps: list[list[int]] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0
    wall_s: float = 0.0
    stop: str = "length"
    alpha_sum_min: list[list[float]] = field(default_factory=list)
    alpha_greedy: list[list[float]] = field(default_factory=list)
