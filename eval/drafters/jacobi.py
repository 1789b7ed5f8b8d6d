"""Lookahead's state as plain Python: the Jacobi window and the pool of n-grams it fills (Fu et al., arXiv 2402.02057).

Letters (paper, section 3): W columns, N the n-gram's length, G most guesses per token. The window holds N - 1 levels of
W guessed tokens; token (l, i) stands l + i + 1 places after the newest token and follows (l - 1, i), or (0, i - 1) at
level 0. One target pass answers what follows the last level; column i then spells an n-gram of N tokens:

    W 3, N 4        columns                               answers x y z after (2, 0), (2, 1), (2, 2)
    level 0      a  b  c      path of (2, 1): a b e h     n-grams a d g x, b e h y, c f i z: the pool now
    level 1      d  e  f      (root, a, b, then column 1) says that after a may come d g x
    level 2      g  h  i                                  next window: d e f / g h i / x y z
"""

from collections.abc import Sequence

Gram = tuple[int, ...]


class Pool:
    """Token -> what followed it, N - 1 tokens each, at most G, the latest first."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held: dict[int, list[Gram]] = {}

    def add(self, gram: Sequence[int]) -> None:
        """An n-gram: its first token is the key. One that is known becomes the latest."""
        first, rest = gram[0], tuple(gram[1:])
        known = [other for other in self.held.get(first, ()) if other != rest]
        self.held[first] = [rest, *known][: self.most]

    def after(self, token: int) -> list[Gram]:
        return self.held.get(token, [])


class Window:
    """Levels of guesses, oldest first. It starts with one level and gains one a round until it has N - 1."""

    def __init__(self, first: Sequence[int], levels: int) -> None:
        self.levels, self.most = [list(first)], levels

    def path(self, column: int) -> list[int]:
        """Tokens from the root to the last level of a column."""
        return [*self.levels[0][: column + 1], *(level[column] for level in self.levels[1:])]

    def move(self, answers: Sequence[int | None]) -> list[Gram]:
        """Take in what the target said after each column (None: not asked) -> the n-grams found.

        A column that was not asked repeats its newest token, so that the window stays whole.
        """
        grams: list[Gram] = []
        newest = [old if answer is None else answer for old, answer in zip(self.levels[-1], answers, strict=True)]
        if len(self.levels) == self.most:
            columns = zip(*self.levels, answers, strict=True)
            grams = [column for column in columns if column[-1] is not None]
            del self.levels[0]
        self.levels.append(newest)
        return grams


class Trie:
    """Paths from the root merged into a tree of distinct siblings: tokens and parent rows (eval/tree.py).

    A row's output depends on its path alone, so a path that several guesses share is computed once.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.rows: dict[tuple[int, int], int] = {}  # (parent row, token) -> row

    def add(self, path: Sequence[int]) -> int:
        """The row at which the path ends."""
        row = 0
        for token in path:
            if (row, token) not in self.rows:
                self.tokens.append(token)
                self.parents.append(row)
                self.rows[row, token] = len(self.tokens)
            row = self.rows[row, token]
        return row
