"""How deep a round drafts, where that is not a fixed k. Every way is settled by the past alone, so each is lossless.

confidence   a head stops where the product of its top probabilities falls below a setting (Ask.min_confidence)
gain         it stops where one more token costs more than it is expected to save (Gain)
heuristic    2 deeper after a round that was accepted whole, 1 less after any other (transformers' schedule)
load         no drafts while more sequences are decoded at once than speculation is worth (Decoding.most_live)
"""

from dataclasses import dataclass

KINDS = ("none", "confidence", "gain", "heuristic", "load")


@dataclass(frozen=True)
class Gain:
    """Measured seconds: target_pass_s[i] of a pass over i + 1 tokens, one draft level, a round's fixed draft part."""

    target_pass_s: tuple[float, ...]
    draft_step_s: float
    draft_fixed_s: float = 0.0

    def pass_s(self, nodes: int) -> float:
        """A pass over the newest token and `nodes` drafts; beyond the measured curve its last slope goes on."""
        curve = self.target_pass_s
        if nodes < len(curve):
            return max(curve[: nodes + 1])  # a curve that dips is noise
        slope = (max(curve) - curve[0]) / max(len(curve) - 1, 1)
        return max(curve) + slope * (nodes - len(curve) + 1)

    def floor(self, tau: float, nodes: int, depth: int, new_level: bool) -> float:
        """The chance of acceptance from which one more node pays.

        It costs the longer pass, and a draft step where it opens a level; accepted it saves the time of one token at
        the speed of the round as it stands: tau expected tokens from `nodes` drafts of `depth` levels, or of plain
        decoding where that is faster. Passes 1 s and .1 s per token more, steps .1 s, nothing drafted: .2 / 1 = .2.
        """
        so_far = self.pass_s(nodes) + (self.draft_fixed_s + depth * self.draft_step_s if depth else 0.0)
        speed = max(tau / so_far, 1 / self.pass_s(0))
        more = self.pass_s(nodes + 1) - self.pass_s(nodes) + (self.draft_step_s if new_level else 0.0)
        return more * speed


def next_depth(depth: int, drafted: int, accepted: int) -> int:
    """transformers' `heuristic` schedule (generation/candidate_generator.py): +2 when all were accepted, else -1."""
    if not drafted:
        return depth
    return depth + 2 if accepted == drafted else max(1, depth - 1)
