"""The repetition penalty sees each row's own prefix, so that plain and speculative decoding are one distribution."""

import pytest
import torch
from tiny import tiny_target
from toys import eagle3, medusa
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from eval.drafter import Drafter, PerSequence
from eval.drafters.head import drafter_for
from eval.drafters.lookup import Lookup
from eval.drafters.replay import Replay
from eval.generate import Decoding, generate
from eval.tree import ancestors
from eval.warpers import Warpers, biased, seen_by_row, warp

PROMPT = [5, 9, 3, 22, 41, 17, 30]


def test_a_row_has_seen_the_prefix_and_its_own_path_only() -> None:
    prefix = torch.zeros(10, dtype=torch.bool)
    prefix[5] = True
    rows = seen_by_row(prefix, [7, 8, 9], [0, 0, 1])
    assert [row.nonzero().flatten().tolist() for row in rows] == [[5], [5, 7], [5, 8], [5, 7, 9]]
    assert prefix.nonzero().tolist() == [[5]]


def test_every_node_of_a_tree_is_penalised_as_transformers_would_alone() -> None:
    draft, parents = [7, 8, 9, 7], [0, 0, 1, 2]
    logits = torch.randn(5, 10, generator=torch.Generator().manual_seed(0))
    prefix = torch.zeros(10, dtype=torch.bool)
    prefix[[5, 2]] = True
    found = biased(logits, Warpers(repetition_penalty=1.3), seen_by_row(prefix, draft, parents))
    reference = RepetitionPenaltyLogitsProcessor(1.3)
    for row, seen in enumerate(ancestors(parents)):
        text = [5, 2, *(draft[i] for i in range(4) if seen[i + 1])]
        assert torch.allclose(found[row], reference(torch.tensor([text]), logits[row : row + 1].clone())[0])


def test_a_penalty_of_zero_is_refused_and_a_prefix_is_needed() -> None:
    with pytest.raises(ValueError, match="repetition_penalty is 0.0"):
        Warpers(repetition_penalty=0.0).check()
    with pytest.raises(AssertionError, match="prefix"):
        warp(torch.zeros(3), Warpers(1.0, repetition_penalty=2.0))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalised_speculative_output_equals_plain(temperature: float) -> None:
    target = tiny_target(layers=4)
    target.eos_ids = frozenset()
    warpers = Warpers(temperature, repetition_penalty=1.8)
    plain = generate(target, None, PROMPT, Decoding(max_new_tokens=20, warpers=warpers)).output_ids
    unpenalised = generate(target, None, PROMPT, Decoding(max_new_tokens=20, warpers=Warpers(temperature))).output_ids
    assert plain != unpenalised
    drafters: dict[str, Drafter] = {
        "replay": PerSequence(lambda: Replay(plain, 64)),
        "lookup": PerSequence(lambda: Lookup(64)),
        "medusa": drafter_for(medusa(target, std=0.3), target),
        "eagle3": drafter_for(eagle3(target, std=0.3), target),
    }
    for name, drafter in drafters.items():
        found = generate(target, drafter, PROMPT, Decoding(k=4, max_new_tokens=20, warpers=warpers))
        assert found.output_ids == plain, name
        if name == "replay":
            assert [a for _, a in found.steps[:-1]] == [4] * (len(found.steps) - 1)
    if temperature:
        sampled = Decoding(3, 12, warpers, proposal="sampled", rule="rejection")
        assert len(generate(target, drafters["eagle3"], PROMPT, sampled).output_ids) == 12
