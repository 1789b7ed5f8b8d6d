"""Adaptive draft length: each schedule is what it says, and changes no token."""

from typing import Any

import pytest
import torch
from guesser import guesser, slowly
from tiny import tiny_target
from toys import eagle3, medusa

from eval.adaptive import Gain, next_depth
from eval.drafter import Ask, Proposal
from eval.drafters.growth import growth
from eval.drafters.head import drafter_for
from eval.generate import Decoding, generate_batch
from eval.metrics import break_even
from eval.tree import Chain, Dynamic, Shape, from_paths
from eval.warpers import Warpers
from heads.target import Target

VOCAB = 12
PROMPTS = [[5, 9, 3], [7], [2, 4, 8, 10, 3, 3], [6, 5]]
SLOPE = Gain(tuple(1 + 0.1 * i for i in range(9)), draft_step_s=0.1)


def test_one_more_node_pays_from_the_chance_that_its_cost_asks() -> None:
    assert SLOPE.floor(1.0, 0, 0, new_level=True) == pytest.approx(0.2)  # .1 pass + .1 step, at 1 token a second
    assert SLOPE.floor(1.0, 3, 1, new_level=False) == pytest.approx(
        0.1
    )  # slower than plain so far: plain's speed counts
    assert SLOPE.floor(2.8, 3, 1, new_level=False) == pytest.approx(0.1 * 2.8 / 1.4)
    assert SLOPE.pass_s(20) == pytest.approx(3.0), "the curve's slope goes on"
    assert Gain((1.0, 0.9, 1.2), 0.0).pass_s(1) == 1.0, "a dip is noise"


def grown(shape: Shape, gain: Gain | None, chances: list[list[float]], trust: float = 1.0) -> Proposal:
    """The tree that grows where level d offers tokens 1, 2, ... with confidences chances[d] after every node."""
    ask = Ask(len(chances), False, Warpers(), torch.Generator(), shape=shape, gain=gain, trust=trust)
    tree = growth(ask)
    for row in chances:
        if tree.frontier:
            F = len(tree.frontier)
            tree.expand(torch.arange(1, len(row) + 1).expand(F, -1), torch.tensor([row]).expand(F, -1), None)
    return tree.proposal()


def test_a_chain_ends_before_the_token_that_is_not_worth_its_cost() -> None:
    """Costs .2 s a token. 0 -> 1: .6 >= .2; tau 1.6 in 1.2 s; 1 -> 2: .3 >= .2 * 1.33; tau 1.9 in 1.4 s; then
    .15 < .2 * 1.36."""
    chances = [[0.6], [0.5], [0.5], [0.5]]
    assert grown(Chain(4), SLOPE, chances).tokens.tolist() == [1, 1]
    assert grown(Chain(4), SLOPE, chances).expected == pytest.approx(0.9)
    assert len(grown(Chain(4), None, chances).tokens) == 4
    assert len(grown(Chain(4), SLOPE, chances, trust=0.3).tokens) == 0, ".18 < .2: the draft promises too much"
    assert len(grown(Chain(4), Gain((1.0,) * 9, 0.0), chances).tokens) == 4, "what costs nothing is always worth it"


def test_a_tree_keeps_the_nodes_that_pay() -> None:
    paths = from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]], 3, 9)
    chances = [[0.6, 0.3, 0.05], [0.6, 0.05, 0.0], [0.2, 0.1, 0.0]]
    found = grown(paths, SLOPE, chances)
    assert (found.tokens.tolist(), found.parents) == ([1, 2, 1, 1], [0, 0, 1, 2])
    dynamic = grown(Dynamic(3, 3, 9), SLOPE, chances)
    assert dynamic.tokens.tolist()[:2] == [1, 2] and 2 <= len(dynamic.tokens) < 9
    assert len(grown(Dynamic(3, 3, 9), None, chances).tokens) == 9


def test_the_heuristic_schedule_is_transformers() -> None:
    depth, seen = 4, []
    for drafted, accepted in ((4, 4), (6, 2), (5, 5), (7, 0), (0, 0), (6, 1), (1, 0), (1, 0)):
        depth = next_depth(depth, drafted, accepted)
        seen.append(depth)
    assert seen == [6, 5, 7, 6, 6, 5, 4, 3] and next_depth(1, 1, 0) == 1


def silent() -> Target:
    target = tiny_target(vocab_size=VOCAB, layers=4)
    target.eos_ids = frozenset()
    return target


WAYS: dict[str, dict[str, Any]] = {
    "gain": {"gain": SLOPE},
    "confidence": {"min_confidence": 0.3},
    "heuristic": {"heuristic": True},
    "load": {"most_live": 2},
    "all": {"gain": SLOPE, "min_confidence": 0.1, "heuristic": True, "most_live": 3},
}


@pytest.mark.parametrize("way", WAYS)
def test_adaptive_lengths_change_no_token(way: str) -> None:
    target = silent()
    head = {"eagle3": eagle3, "medusa": medusa}["medusa" if way == "heuristic" else "eagle3"](target, std=0.3)
    drafter = drafter_for(head, target)
    for temperature, proposal, rule in ((0.0, "greedy", "auto"), (1.0, "greedy", "match"), (1.0, "sampled", "strict")):
        alone = [slowly(target, p, 8, frozenset(), temperature, i)[0] for i, p in enumerate(PROMPTS)]
        for tree in (None, from_paths([[0], [1], [0, 0]], 2, VOCAB)):
            settings = [
                Decoding(3, 8, Warpers(temperature), proposal, rule, seed=i, tree=tree, **WAYS[way])
                for i in range(len(PROMPTS))
            ]
            found = generate_batch(target, drafter, PROMPTS, settings, 3)
            assert [f.output_ids for f in found] == alone, (temperature, rule, tree)


def test_drafts_stop_above_the_load_and_come_back_below_it() -> None:
    target = silent()
    alone = {tuple(p): slowly(target, p, 20, frozenset())[0] for p in PROMPTS[:3]}
    settings = [Decoding(2, n, most_live=2) for n in (6, 20, 20)]
    found = generate_batch(target, guesser(alone, VOCAB, right=0.5), PROMPTS[:3], settings, 3)
    assert sum(found[0].nodes) == 0 and len(found[0].steps) == 5
    assert sum(found[1].nodes[:5]) == 0 and sum(found[1].nodes[5:]) > 0
    (never,) = generate_batch(target, guesser(alone, VOCAB), PROMPTS[:1], [Decoding(2, 9, most_live=0)], 1)
    assert sum(never.nodes) == 0


def test_a_depth_grown_by_the_schedule_stays_within_what_the_head_drafts() -> None:
    target = silent()
    drafter = drafter_for(medusa(target, std=0.3, num_heads=3), target)
    (found,) = generate_batch(target, drafter, [[5, 9]], [Decoding(3, 20, heuristic=True)], 1)
    assert {K for K, _ in found.steps} <= {1, 2, 3}


def test_break_even_lies_between_the_measured_loads() -> None:
    assert break_even([(1, 1.4), (4, 1.1), (8, 0.9)]) == pytest.approx(6)
    assert break_even([(8, 0.9), (1, 0.95)]) == 0 and break_even([(1, 1.2), (8, None)]) is None
