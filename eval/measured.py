"""What is measured of heads and target apart from decoding: rank accuracies, costs, and the trees these favour.

Each is measured when it is first asked for, once a run.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from eval import shapes, timing
from eval.adaptive import Gain
from eval.plan import EvalSettings
from eval.predict import rank_accuracies
from eval.tree import Best, Shape, best_static_tree
from heads.target import Target

SIZES = (*range(1, 17), 24, 32, 48, 64)  # tokens of a target pass


class Measured:
    """heads: in their training form. texts: (token ids, where the answer starts), not decoded in this run where there
    are others."""

    def __init__(
        self, settings: EvalSettings, target: Target, heads: dict[str, Any], texts: Sequence[tuple[list[int], int]]
    ) -> None:
        self.settings, self.target, self.heads, self.texts = settings, target, heads, texts
        self._accuracies: dict[str, list[list[float]]] = {}
        self._costs: dict[str, Any] | None = None
        self._shapes: dict[Any, Shape | None] = {}

    def accuracies(self, name: str) -> list[list[float]]:
        if name not in self._accuracies:
            self._accuracies[name] = rank_accuracies(self.target, self.heads[name], self.texts)
        return self._accuracies[name]

    def shape(self, name: str, tree: Any) -> Shape | None:
        """The shape of a tree setting for a head; None for a chain."""
        if tree == "chain":
            return None
        if (name, tree) not in self._shapes:
            head = self.heads[name]
            accuracies = self.accuracies(name) if tree == "sparse" else None
            self._shapes[name, tree] = shapes.shape(
                tree, self.settings.trees, head.max_draft, head.draft_vocab_size, accuracies
            )
        return self._shapes[name, tree]

    def costs(self, bench: Any) -> dict[str, Any]:
        """cost.json: seconds of a target pass by tokens, of a draft step and of a round's fixed part by method."""
        if self._costs is None:
            s = self.settings
            text = [token for prompt in bench.prompts for token in prompt["ids"]]
            text = (text * (s.cost_context // len(text) + 1))[: s.cost_context]
            passes = timing.target_pass(self.target, text, self.sizes())
            found: dict[str, Any] = {"context": s.cost_context, "target_pass_s": passes}
            found |= {"draft_step_s": {}, "draft_fixed_s": {}}
            for name in s.methods:
                if name in bench.drafters:
                    step, fixed = timing.draft(self.target, bench.drafters[name], text, s.k)
                    found["draft_step_s"][name], found["draft_fixed_s"][name] = step, fixed
            self._costs = found
        return self._costs

    def sizes(self) -> list[int]:
        """Passes as long as a tree of this run are measured only where it has trees."""
        trees = [tree for tree in (self.settings.tree, *self.settings.sweep_trees) if tree != "chain"]
        return list(SIZES) if trees else [n for n in SIZES if n <= 16]

    def gain(self, bench: Any, name: str) -> Gain:
        cost = self.costs(bench)
        fixed = cost["draft_fixed_s"].get(name, 0.0)
        return Gain(curve(cost), cost["draft_step_s"].get(name, 0.0), fixed)

    def trees(self, cost: dict[str, Any]) -> dict[str, Any]:
        """trees.json: each head's rank accuracies, and the static tree that they and the costs favour."""
        found = {}
        for name in self.heads:
            if name not in cost["draft_step_s"]:
                continue
            accuracies = self.accuracies(name)
            best = best_static_tree(
                accuracies, curve(cost), cost["draft_step_s"][name], cost["draft_fixed_s"].get(name, 0.0)
            )
            found[name] = {"rank_accuracies": accuracies, "best": described(best)}
        return found


def described(best: Best) -> dict[str, Any]:
    """The best tree as JSON: its paths (usable as `tree=`), and what it promises."""
    paths: list[list[int]] = [[]]
    for parent, rank in zip(best.tree.parents, best.tree.ranks, strict=True):
        paths.append([*paths[parent], rank])
    return {
        "paths": paths[1:],
        "nodes": len(paths) - 1,
        "depth": best.depth,
        "acceptance_length": best.acceptance_length,
        "speedup": best.speedup,
    }


def curve(cost: dict[str, Any]) -> tuple[float, ...]:
    """Seconds of a pass of 1, 2, 3, ... tokens, read between the sizes that were measured."""
    sizes = sorted(int(n) for n in cost["target_pass_s"])
    seconds = [cost["target_pass_s"][str(n)] for n in sizes]
    return tuple(float(x) for x in np.interp(range(1, sizes[-1] + 1), sizes, seconds))


def texts(rows: Sequence[Any], chosen: Sequence[dict[str, Any]], most: int = 12, longest: int = 512) -> list[Any]:
    """(ids, start of the last answer) of up to `most` rows, those that are decoded in this run last.

    A text is cut to `longest` tokens; one whose answer starts later is left out.
    """
    taken = {prompt["key"] for prompt in chosen}
    found = [row for row in rows if row.spans and 0 < row.spans[-1][0] < min(longest, len(row.ids)) - 2]
    found.sort(key=lambda row: row.key in taken)
    return [(list(row.ids[:longest]), row.spans[-1][0]) for row in found[:most]]
