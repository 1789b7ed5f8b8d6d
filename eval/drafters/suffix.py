"""Suffix decoding (Oliaro et al., arXiv 2411.04975; Arctic Inference): what followed the longest suffixes of the text.

Two sources: a tree of the request's own prompt and output, and a memory of finished outputs shared by all requests. For
every match length that occurs in either, the continuation is grown to at most length * factor + offset tokens, none
with an estimated path probability below `floor`; the one with the highest sum of path probabilities, its expected
accepted tokens, is proposed: a chain, or a tree of at most `nodes` tokens (suffix-tree, or a decoding with a dynamic
tree).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eval.drafter import Ask, Kept, Proposal, point_mass
from eval.drafters.suffix_tree import Guess, Node, SuffixTree, Text, grow_chain, grow_tree
from eval.tree import Dynamic
from heads.target import TargetOutput


@dataclass
class SuffixSettings:
    """depth and floor as in Arctic Inference; factor, offset: the paper's bound on the draft's length."""

    depth: int = 64  # most tokens of a match and its continuation
    factor: float = 1.0
    offset: float = 0.0
    floor: float = 0.1  # least estimated path probability of a drafted token
    nodes: int = 16  # most tokens of a tree (suffix-tree only)
    memory: int = 100_000  # most tokens of finished outputs that are remembered (suffix-memory only)
    corpus: str = ""  # data folder whose training answers the memory starts with (suffix-memory only)

    def check(self) -> None:
        """Raises ValueError naming the setting."""
        if self.depth < 2:
            raise ValueError(f"suffix.depth={self.depth}: give at least 2, a matched token and one after it")
        if self.factor < 0 or self.factor + self.offset < 1:
            raise ValueError(
                f"suffix.factor={self.factor} and suffix.offset={self.offset} draft nothing after a match of one "
                "token: give a factor of at least 0, and 1 or more together"
            )
        if not 0 <= self.floor <= 1:
            raise ValueError(f"suffix.floor={self.floor}: give a probability, 0 to 1")
        if self.nodes < 1:
            raise ValueError(f"suffix.nodes={self.nodes}: give at least 1")
        if self.memory < 0:
            raise ValueError(f"suffix.memory={self.memory}: give a number of tokens, 0 = nothing is remembered")


class Memory:
    """Suffix tree of finished outputs, bounded: the newest `most` tokens at least half of the time, never more.

    Two trees: when the young one holds half of what is allowed it becomes the old one, and the old one is dropped.
    """

    def __init__(self, most: int, depth: int = 64) -> None:
        self.most, self.depth = most, depth
        self.young, self.old = SuffixTree(depth), SuffixTree(depth)

    def add(self, output: Sequence[int]) -> None:
        """Remember an output; of a very long one, its last `most` / 2 tokens."""
        output = output[-(self.most // 2) :] if self.most > 1 else []
        if self.young.size + len(output) > self.most // 2:
            self.young, self.old = SuffixTree(self.depth), self.young
        text = Text()
        for token in output:
            self.young.append(text, token)

    def fill(self, outputs: Iterable[Sequence[int]]) -> "Memory":
        """Remember a prior corpus."""
        for output in outputs:
            self.add(output)
        return self


class Suffix:
    """One request's tree; `memory`, where given, is shared and fed with the output when the next request starts."""

    taps: tuple[int, ...] = ()
    max_draft = 64
    reads_rows = False

    def __init__(
        self,
        vocab_size: int,
        settings: SuffixSettings | None = None,
        memory: Memory | None = None,
        tree: bool = False,
    ) -> None:
        self.settings = settings or SuffixSettings()
        self.settings.check()
        self.vocab_size, self.memory, self.branches = vocab_size, memory, tree
        self.tree, self.text = SuffixTree(self.settings.depth), Text()
        self.prompt_length = 0
        self.matched, self.score = 0, 0.0  # of the last proposal: tokens of its match, its expected accepted tokens

    def start(self, prompt: list[int], first: int, output: TargetOutput) -> None:
        if self.memory is not None:
            self.memory.add(self.text.tokens[self.prompt_length :])
        self.tree, self.text, self.prompt_length = SuffixTree(self.settings.depth), Text(), len(prompt)
        for token in [*prompt, first]:
            self.tree.append(self.text, token)

    def propose(self, ask: Ask) -> Proposal:
        best, self.matched = Guess([], [], 0.0), 0
        for length, node, used in self._matches():
            guess = self._grow(length, node, used, ask)
            if guess.score > best.score:
                best, self.matched = guess, length
        self.score = best.score
        return point_mass(best.tokens, self.vocab_size, ask, best.parents)._replace(expected=best.score)

    def commit(self, kept: Kept) -> None:
        for token in kept.tokens:
            self.tree.append(self.text, token)

    def _matches(self) -> list[tuple[int, Node, int]]:
        """Where the last n tokens have occurred before: (n, node, used), the longest first, the request's own first."""
        active = self.text.active
        found = [(len(active) - i, node, node.length) for i, node in enumerate(active) if node.children]
        if self.memory is not None:
            for tree in (self.memory.young, self.memory.old):
                for n in range(1, min(self.settings.depth, len(self.text.tokens))):
                    place = tree.find(self.text.tokens[-n:])
                    if place is None:
                        break  # what does not occur occurs in no longer suffix
                    found.append((n, *place))
        return sorted(found, key=lambda match: -match[0])

    def _grow(self, length: int, node: Node, used: int, ask: Ask) -> Guess:
        most = int(length * self.settings.factor + self.settings.offset)
        if isinstance(ask.shape, Dynamic):
            deepest = min(ask.budget, ask.shape.depth)
            return grow_tree(node, used, min(most, ask.shape.total), deepest, self.settings.floor)
        if self.branches:
            return grow_tree(node, used, min(most, self.settings.nodes), ask.budget, self.settings.floor)
        return grow_chain(node, used, min(most, ask.budget), self.settings.floor)
