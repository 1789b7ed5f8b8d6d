"""The hybrid drafts from a long match and leaves the rest to its model, by what both have kept so far."""

import torch

from eval.drafter import Ask, Kept, Proposal
from eval.drafters.hybrid import Hybrid, HybridSettings
from eval.drafters.suffix import Suffix
from eval.warpers import Warpers
from heads.target import TargetOutput

NOTHING = TargetOutput(torch.empty(1, 0, 0), None)


class Model:
    """Drafts 60, 61, .. for the slots it is asked for."""

    taps: tuple[int, ...] = (3,)
    max_draft = 5
    reads_rows = False

    def __init__(self) -> None:
        self.started: list[int] = []
        self.asked: list[list[int]] = []
        self.told: list[list[int]] = []

    def start(self, slot: int, prompt: list[int], first: int, output: TargetOutput) -> None:
        self.started.append(slot)

    def propose(self, slots: list[int], asks: list[Ask]) -> list[Proposal]:
        self.asked.append(slots)
        return [Proposal(torch.arange(60, 60 + ask.budget), list(range(ask.budget)), None) for ask in asks]

    def commit(self, slots: list[int], kept: list[Kept]) -> None:
        self.told.append(slots)


def asks(count: int) -> list[Ask]:
    return [Ask(4, False, Warpers(), torch.Generator()) for _ in range(count)]


def test_each_sequence_gets_the_source_that_promises_more() -> None:
    model = Model()
    drafter = Hybrid(model, lambda: Suffix(64))
    assert (drafter.taps, drafter.max_draft) == ((3,), 5)
    drafter.start(0, [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4], 5, NOTHING)  # a match of 5 tokens
    drafter.start(1, [10, 11, 12, 13, 10], 14, NOTHING)  # none
    drafter.start(2, [20, 21, 22], 20, NOTHING)  # of one token: 1 / 3 of a token expected, the model's 1 is more
    found = drafter.propose([0, 1, 2], asks(3))
    assert [p.tokens.tolist() for p in found] == [[6, 7, 8, 9], [60, 61, 62, 63], [60, 61, 62, 63]]
    assert model.started == [0, 1, 2] and model.asked == [[1, 2]]
    drafter.commit([0, 1, 2], [Kept([6, 7, 30], NOTHING), Kept([31], NOTHING), Kept([32], NOTHING)])
    assert model.told == [[0, 1, 2]], "the model reads every round, whoever drafted"


def test_a_source_that_disappoints_is_left() -> None:
    """A match of 7 tokens promises 4; nothing of it ever comes true, so the model takes over, and is measured too."""
    model = Model()
    drafter = Hybrid(model, lambda: Suffix(64), HybridSettings(model_accepts=1.0, doubt=2.0))
    text = [1, 2, 3, 4, 5, 6] * 2
    drafter.start(0, text, 1, NOTHING)
    sources = []
    held = drafter.slots[0]
    for _ in range(6):
        held.suffix.start(text, 1, NOTHING)
        before = len(model.asked)
        drafter.propose([0], asks(1))
        sources.append("model" if len(model.asked) > before else "match")
        drafter.commit([0], [Kept([50], NOTHING)])
    assert sources[:2] == ["match", "match"] and "model" in sources
    assert held.model.mean < 1.0, "the model's rounds were measured"
    drafter.start(0, text, 1, NOTHING)
    assert drafter.slots[0].model.mean == 1.0 and not drafter.slots[0].matches, "a request starts without a past"
