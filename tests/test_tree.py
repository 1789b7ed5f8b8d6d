"""Tree shapes: parents before children, kept nodes keep their parents, grown trees are the best of their size."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eval import tree, tree_dynamic
from eval.tree import EAGLE_25, from_paths

ACCURACIES = [[0.6, 0.2, 0.1], [0.5, 0.3], [0.4]]


def test_depths_ancestors_and_children_of_the_worked_example() -> None:
    parents = [0, 0, 1, 1]
    tree.check_parents(parents)
    assert tree.depths(parents) == [0, 1, 1, 2, 2]
    assert tree.children(parents) == [[1, 2], [3, 4], [], [], []]
    assert [row.nonzero().flatten().tolist() for row in tree.ancestors(parents)] == [
        [0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4]
    ]  # fmt: skip


def test_the_ancestors_of_a_chain_are_the_causal_mask() -> None:
    assert torch.equal(tree.ancestors([0, 1, 2]), torch.ones(4, 4).tril().bool())
    assert tree.depths([]) == [0] and tree.ancestors([]).tolist() == [[True]]


@pytest.mark.parametrize("parents", [[1], [0, 3], [0, -1]])
def test_a_parent_after_its_child_is_refused(parents: list[int]) -> None:
    with pytest.raises(ValueError, match=f"draft {len(parents) - 1} has parent row {parents[-1]}"):
        tree.check_parents(parents)


def test_eagles_tree_has_25_nodes_in_five_levels() -> None:
    found = from_paths(EAGLE_25, max_depth=5, max_rank=4)
    depths = tree.depths(found.parents)[1:]
    assert [depths.count(d) for d in range(1, 6)] == [4, 8, 8, 3, 2]


def test_a_users_tree_is_sorted_into_parents_and_ranks() -> None:
    assert from_paths([[0, 2], [1], [0]], 2, 3) == ([0, 0, 1], [0, 1, 2])


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([[0], [1, 0]], r"\[1, 0\] has no parent; add \[1\]"),
        ([[0], [0, 0], [0, 0, 0]], "3 deep, the head drafts at most 2"),
        ([[0], [0]], "given twice"),
        ([[7]], r"\[7\] has a rank outside 0..3"),
        ([[]], "empty path"),
    ],
)
def test_a_users_tree_that_cannot_be_drafted_is_refused_by_path(paths: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_paths(paths, max_depth=2, max_rank=4)


def value(path: tree.Path) -> float:
    product = 1.0
    for depth, rank in enumerate(path):
        product *= ACCURACIES[depth][rank]
    return product


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_the_grown_tree_is_the_best_of_all_trees_of_its_size(nodes: int) -> None:
    everything = [path for d in (1, 2, 3) for path in itertools.product(*(range(len(a)) for a in ACCURACIES[:d]))]
    closed = [
        chosen
        for chosen in itertools.combinations(everything, nodes)
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen)
    ]
    found = tree.grown(ACCURACIES, nodes)
    assert sum(v for v, _ in found) == pytest.approx(max(sum(map(value, chosen)) for chosen in closed))
    tree.check_parents(tree.sparse_tree(ACCURACIES, nodes).parents)


def test_growth_ends_with_the_table_and_refuses_what_is_no_share() -> None:
    assert len(tree.grown(ACCURACIES, 100)) == 3 + 6 + 6
    with pytest.raises(ValueError, match=r"accuracies\[0\]\[1\] is 1.2"):
        tree.grown([[0.5, 1.2]], 3)


def test_the_best_tree_follows_the_cost_curve() -> None:
    flat = tree.best_static_tree(ACCURACIES, [1.0] * 17, draft_step_s=0.0)
    assert len(flat.tree.parents) == 15 and flat.acceptance_length == pytest.approx(1 + 0.9 + 0.72 + 0.288)
    dear = tree.best_static_tree(ACCURACIES, [1.0 + i for i in range(17)], draft_step_s=0.1)
    assert (dear.tree.parents, dear.speedup) == ([], 1.0), "nothing pays when every token costs a pass"
    chain = tree.best_static_tree([[0.5], [0.5]], [1.0] * 3, draft_step_s=0.1)
    assert (chain.tree.parents, chain.depth, chain.acceptance_length) == ([0, 1], 2, 1.75)
    assert chain.speedup == pytest.approx(1.75 / 1.2)
    steps = tree.best_static_tree(ACCURACIES, [1.0] * 4 + [9.0] * 9, draft_step_s=0.01)
    assert len(steps.tree.parents) == 3, "a jump of the curve ends the tree"


def test_the_dynamic_tree_of_the_worked_example() -> None:
    def advance(tokens: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert (tokens.tolist(), slots.tolist()) == ([1, 2], [0, 0])
        return torch.tensor([[3, 4], [5, 6]]), torch.tensor([[0.6, 0.2], [0.8, 0.1]])

    found = tree_dynamic.grow(torch.tensor([[1, 2]]), torch.tensor([[0.6, 0.3]]), advance, 2, 2, 3)
    assert (found.tokens, found.parents) == ([1, 2, 3], [0, 0, 1])
    assert found.scores == pytest.approx([0.6, 0.3, 0.36])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 30),
    st.lists(st.sampled_from([0.0, 1e-30, 0.5, 0.9, 1.0]), min_size=4),
)
def test_a_kept_nodes_parent_is_always_kept(depth: int, top_k: int, total: int, shares: list[float]) -> None:
    """Confidences of 1 (ties) and tiny ones (underflow to equal zeros) are where parents get lost."""
    turns = itertools.cycle(shares)

    def offer(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        held = torch.tensor([next(turns) for _ in range(rows * top_k)]).view(rows, top_k)
        return torch.arange(top_k).expand(rows, top_k), held.sort(-1, descending=True).values

    widths: list[int] = []

    def advance(tokens: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert int(slots.max()) < (widths[-1] if widths else 1)
        widths.append(len(tokens))
        return offer(len(tokens))

    found = tree_dynamic.grow(*offer(1), advance, depth, top_k, total)
    tree.check_parents(found.parents)  # a lost parent has no row: KeyError before this
    offered = top_k + sum(width * top_k for width in widths)
    assert len(found.tokens) == min(total, offered) and len(widths) == depth - 1
    assert max(tree.depths(found.parents)) <= depth
    for i, parent in enumerate(found.parents):
        assert parent == 0 or found.scores[i] <= found.scores[parent - 1]
