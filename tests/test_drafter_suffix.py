"""The suffix tree counts what brute force counts; guesses follow its frequencies; memory is bounded and shared."""

import random
from collections import Counter
from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.drafter import Ask, Kept
from eval.drafters.suffix import Memory, Suffix, SuffixSettings
from eval.drafters.suffix_tree import Node, SuffixTree, Text, grow_chain, grow_tree
from eval.tree import Dynamic, check_parents, children, depths
from eval.warpers import Warpers
from heads.target import TargetOutput

NOTHING = TargetOutput(torch.empty(1, 0, 0), None)


def ask(budget: int, **changed: object) -> Ask:
    return Ask(budget, False, Warpers(), torch.Generator(), **changed)  # type: ignore[arg-type]


def counted(texts: Sequence[Sequence[int]], depth: int) -> dict[tuple[int, ...], int]:
    """Occurrences of every run of 1..depth tokens."""
    found: Counter[tuple[int, ...]] = Counter()
    for text in texts:
        for start in range(len(text)):
            found.update(tuple(text[start:end]) for end in range(start + 1, min(start + depth, len(text)) + 1))
    return dict(found)


def spelled(tree: SuffixTree) -> dict[tuple[int, ...], int]:
    """Path -> count of everything the tree holds, its inner structure checked on the way."""
    found: dict[tuple[int, ...], int] = {}

    def visit(node: Node, path: tuple[int, ...]) -> None:
        edge = tuple(node.tokens[node.start : node.start + node.length])
        assert len(edge) == node.length and (node is tree.root or node.length > 0)
        for n in range(1, len(edge) + 1):
            found[path + edge[:n]] = node.count
        for token, child in node.children.items():
            assert child.parent is node and child.tokens[child.start] == token
            visit(child, path + edge)

    visit(tree.root, ())
    return found


TOKENS = st.lists(st.integers(0, 3), max_size=30)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=50), st.integers(1, 7))
def test_the_tree_counts_what_brute_force_counts_while_texts_grow_in_turn(
    appended: list[tuple[int, int]], depth: int
) -> None:
    tree, texts = SuffixTree(depth), [Text() for _ in range(3)]
    for which, token in appended:
        tree.append(texts[which], token)
    assert spelled(tree) == counted([text.tokens for text in texts], depth)
    assert tree.size == len(appended)


@settings(max_examples=200, deadline=None)
@given(TOKENS, st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_find_agrees_with_substring_search(tokens: list[int], wanted: list[int]) -> None:
    tree, text = SuffixTree(8), Text()
    for token in tokens:
        tree.append(text, token)
    occurs = any(tokens[i : i + len(wanted)] == wanted for i in range(len(tokens)))
    assert (tree.find(wanted) is not None) == occurs


def brute_chances(texts: Sequence[Sequence[int]], match: Sequence[int], path: Sequence[int]) -> float:
    """Product over the path of count(next) / count(any next), by scanning the texts."""
    reached, held = 1.0, list(match)
    for token in path:
        n = len(held)
        after = Counter(t[i + n] for t in texts for i in range(len(t) - n) if list(t[i : i + n]) == held)
        reached *= after[token] / sum(after.values())
        held.append(token)
    return reached


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=25), st.integers(1, 6), st.sampled_from([0.0, 0.1, 0.4]))
def test_guesses_have_the_frequencies_of_the_text(tokens: list[int], most: int, floor: float) -> None:
    tree, text = SuffixTree(64), Text()
    for token in tokens:
        tree.append(text, token)
    match = tokens[-1:]
    place = tree.find(match)
    assert place is not None
    for guess in (grow_chain(*place, most, floor), grow_tree(*place, most, 4, floor)):
        check_parents(guess.parents)
        paths: list[list[int]] = [[]]
        for token, parent in zip(guess.tokens, guess.parents, strict=True):
            paths.append([*paths[parent], token])
        chances = [brute_chances([tokens], match, path) for path in paths[1:]]
        assert all(chance >= floor - 1e-12 for chance in chances) and len(chances) <= most
        assert abs(guess.score - sum(chances)) < 1e-9
    below = children(guess.parents)
    assert all(len({guess.tokens[c - 1] for c in row}) == len(row) for row in below), "siblings are distinct"
    assert max(depths(guess.parents)) <= 4
    assert chances == sorted(chances, reverse=True), "the likeliest nodes first"


def test_the_draft_is_bounded_by_the_match() -> None:
    """After 7 8 9 came 1 2 3 4: a match of 3 allows 3 tokens, one of a single token one."""
    drafter = Suffix(64)
    drafter.start([7, 8, 9, 1, 2, 3, 4, 50, 7, 8], 9, NOTHING)
    assert drafter.propose(ask(8)).tokens.tolist() == [1, 2, 3]
    assert (drafter.matched, drafter.score) == (3, 3.0)
    drafter.commit(Kept([60, 50], NOTHING))
    assert drafter.propose(ask(8)).tokens.tolist() == [7]
    longer = Suffix(64, SuffixSettings(factor=2.0, offset=1.0))
    longer.start([7, 8, 9, 1, 2, 3, 4, 50, 7, 8], 9, NOTHING)
    assert longer.propose(ask(4)).tokens.tolist() == [1, 2, 3, 4], "the budget holds"
    assert longer.propose(ask(9)).tokens.tolist() == [1, 2, 3, 4, 50, 7, 8]


def test_the_more_frequent_continuation_wins_and_ties_go_to_the_newest() -> None:
    drafter = Suffix(64)
    drafter.start([5, 1, 5, 2, 5, 1, 5, 3], 5, NOTHING)
    assert drafter.propose(ask(1)).tokens.tolist() == [1]
    drafter.start([5, 1, 5, 2], 5, NOTHING)
    assert drafter.propose(ask(1)).tokens.tolist() == [2]


def test_trees_branch_where_the_text_did() -> None:
    """After 5 6 came 1 9 and 2 8, once each: both, the newest first, then what followed them."""
    text, wide = [5, 6, 1, 9, 40, 5, 6, 2, 8, 41, 5], SuffixSettings(factor=2.0)
    for drafter, shape in ((Suffix(64, wide, tree=True), {}), (Suffix(64, wide), {"shape": Dynamic(4, 4, 16)})):
        drafter.start(text, 6, NOTHING)
        found = drafter.propose(ask(4, **shape))
        assert (found.tokens.tolist(), found.parents, found.expected) == ([2, 1, 8, 9], [0, 0, 1, 2], 2.0)
    drafter = Suffix(64, wide)
    drafter.start(text, 6, NOTHING)
    assert drafter.propose(ask(4)).tokens.tolist() == [2, 8, 41, 5]


def test_unlikely_tokens_are_left_out() -> None:
    """After 5 came 1..20 once each: every path has a chance of .05, below .1."""
    drafter = Suffix(64)
    drafter.start([token for i in range(1, 21) for token in (5, 30 + i)], 5, NOTHING)
    assert drafter.propose(ask(4)).tokens.tolist() == []
    brave = Suffix(64, SuffixSettings(floor=0.0))
    brave.start([token for i in range(1, 21) for token in (5, 30 + i)], 5, NOTHING)
    assert brave.propose(ask(4)).tokens.tolist() == [50]


def test_memory_serves_other_requests_once_one_is_finished() -> None:
    memory = Memory(1000)
    first, second = Suffix(64, memory=memory), Suffix(64, memory=memory)
    first.start([1, 2], 40, NOTHING)
    first.commit(Kept([41, 42, 43, 44], NOTHING))
    second.start([3, 4, 40], 41, NOTHING)
    assert second.propose(ask(4)).tokens.tolist() == [], "the first request is still running"
    first.start([9, 9], 8, NOTHING)
    assert second.propose(ask(4)).tokens.tolist() == [42, 43]
    assert memory.young.find([1]) is None, "prompts are not remembered"


def test_memory_is_bounded_and_keeps_the_newest() -> None:
    memory, rng = Memory(200, 8), random.Random(0)
    for turn in range(100):
        memory.add([rng.randrange(50) for _ in range(rng.randrange(30))] + [100 + turn])
        assert memory.young.size + memory.old.size <= 200
        for tree in (memory.young, memory.old):
            assert nodes(tree.root) <= 2 * tree.size + 1
        assert memory.young.find([100 + turn]) is not None
    assert memory.young.find([100]) is None and memory.old.find([100]) is None
    memory.add(list(range(1000)))
    assert memory.young.find([999]) is not None and memory.young.size == 100
    none = Memory(0).fill([[1, 2, 3]])
    assert none.young.size == 0


def nodes(node: Node) -> int:
    return 1 + sum(nodes(child) for child in node.children.values())


def test_a_prior_corpus_is_drafted_from() -> None:
    drafter = Suffix(64, memory=Memory(1000).fill([[20, 21, 22, 23], [20, 21, 30]]))
    drafter.start([1, 20], 21, NOTHING)
    assert drafter.propose(ask(4)).tokens.tolist() in ([22, 23], [30])
