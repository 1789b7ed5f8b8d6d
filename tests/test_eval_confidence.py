"""Adaptive draft length: a head stops where its path confidence falls below the setting; the output stays the same."""

import pytest
import torch
from tiny import tiny_target
from toys import eagle3, medusa

from eval.drafter import Ask
from eval.drafters.head import drafter_for
from eval.generate import Decoding, generate
from eval.warpers import Warpers
from heads.target import Target

PROMPT = [5, 9, 3, 22, 41, 17, 30]
HEADS = {"medusa": medusa, "eagle3": eagle3}


def silent() -> Target:
    target = tiny_target(layers=4)
    target.eos_ids = frozenset()
    return target


@pytest.mark.parametrize("kind", HEADS)
@torch.no_grad()
def test_the_draft_ends_before_the_token_that_makes_the_path_too_unlikely(kind: str) -> None:
    target = silent()
    drafter = drafter_for(HEADS[kind](target, std=0.3), target)
    drafter.start(0, PROMPT, 8, target.forward(torch.tensor([PROMPT]), taps=drafter.taps))
    generator = torch.Generator()
    (whole,) = drafter.propose([0], [Ask(4, False, Warpers(1.0), generator, with_probs=True)])
    assert whole.probs is not None
    # temperature 1 and no other warper: q is what confidence is read from
    reached = whole.probs.amax(-1).cumprod(0).tolist()
    for floor, wanted in ((0.0, 4), (reached[0] + 1e-4, 0), (reached[0] - 1e-4, 1), (reached[2] - 1e-6, 3)):
        (cold,) = drafter.propose([0], [Ask(4, False, Warpers(0.0), generator, min_confidence=floor)])
        assert len(cold.tokens) == wanted, (floor, reached)
        assert torch.equal(cold.tokens, whole.tokens[:wanted])


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("floor", [0.02, 0.3, 1.0])
def test_stopping_early_changes_no_token(kind: str, floor: float) -> None:
    target = silent()
    drafter = drafter_for(HEADS[kind](target, std=0.3), target)
    for warpers, proposal, rule in (
        (Warpers(), "greedy", "auto"),
        (Warpers(1.0), "greedy", "match"),
        (Warpers(1.0), "sampled", "strict"),
    ):
        plain = generate(target, None, PROMPT, Decoding(max_new_tokens=14, warpers=warpers, seed=3))
        found = generate(
            target, drafter, PROMPT, Decoding(4, 14, warpers, proposal, rule, seed=3, min_confidence=floor)
        )
        assert found.output_ids == plain.output_ids, (warpers, rule)
        drafted = [K for K, _ in found.steps]
        assert max(drafted) <= 4 and (floor < 1 or sum(drafted) == 0)
    sampled = Decoding(4, 14, Warpers(1.0), "sampled", "rejection", min_confidence=floor)
    assert len(generate(target, drafter, PROMPT, sampled).output_ids) == 14
