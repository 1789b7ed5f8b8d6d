"""The best head is the one whose measured acceptance is best; a run that finds no better one stops; both resume."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train_evaluate import answered, rough
from tiny import tiny_target
from toys import eagle3, largest_gap, loop_of, medusa, weights

from eval.drafters.head import drafter_for
from eval.generate import Decoding, generate
from eval.live import measure_acceptance
from heads.hub import load_head, read_facts
from heads.target import Target
from scripts.permutation import eagle3_head, medusa_head, permutation_target
from train import checkpoint
from train.loop import Loop, Stopped
from train.select import choose_prompts
from train.settings import TrainSettings
from train.track import read_log


class Scripted:
    """Acceptance lengths to give in turn, whatever the head does."""

    def __init__(self, *lengths: float) -> None:
        self.lengths, self.calls = list(lengths), []  # type: ignore[var-annotated]

    def __call__(
        self, target: Target, head: Any, prompts: Sequence[list[int]], k: int, temperature: float, seed: int,
        max_new_tokens: int,
    ) -> dict[str, Any]:  # fmt: skip
        self.calls.append((len(prompts), k, temperature, seed, max_new_tokens))
        length = self.lengths.pop(0)
        return {"acceptance_length": length, "position_acceptance_joint": [length - 1], "rounds": 7}


def loop_with(folder: Path, measure: Any, **changed: Any) -> Loop:
    live = {"steps": 8, "eval_every": 2, "save_every": 8, "live_prompts": 3, "live_tokens": 8}
    return loop_of(folder, measure=measure, **{**live, **changed})


def live_lines(folder: Path) -> dict[int, float]:
    lines = read_log(folder / "log.jsonl")
    return {line["step"]: line["acceptance_length"] for line in lines if line["split"] == "live"}


def test_the_head_with_the_best_measured_acceptance_is_kept_whatever_was_predicted(tmp_path: Path) -> None:
    measure = Scripted(1.0, 1.5, 1.9, 1.2, 1.8)
    loop = loop_with(tmp_path, measure)
    kept: dict[int, Any] = {}
    inner = loop._evaluate

    def evaluating(*args: Any) -> None:
        inner(*args)
        kept[loop.state.step] = weights(loop.head)

    loop._evaluate = evaluating  # type: ignore[method-assign,assignment]
    state = loop.run()
    assert state.best == 1.9 and state.waited == 2
    assert live_lines(tmp_path) == {0: 1.0, 2: 1.5, 4: 1.9, 6: 1.2, 8: 1.8}
    note = read_facts(tmp_path)["provenance"]
    assert (note["step"], note["selected_by"], note["live"]["acceptance_length"]) == (4, "live", 1.9)
    assert "predicted_acceptance_length" in note["heldout"], "both figures are told"
    assert largest_gap(weights(load_head(tmp_path)), kept[4]) == 0.0
    assert measure.calls == [(3, 4, 1.0, 0, 8)] * 5


def test_without_live_runs_the_predicted_acceptance_selects(tmp_path: Path) -> None:
    loop_with(tmp_path, None, live_prompts=0).run()
    note = read_facts(tmp_path)["provenance"]
    assert note["selected_by"] == "heldout" and "live" not in note
    assert live_lines(tmp_path) == {}


def test_the_mean_over_the_temperatures_selects_and_each_is_told(tmp_path: Path) -> None:
    measure = Scripted(1.0, 1.2, 2.0, 1.0)
    loop_with(tmp_path, measure, steps=2, live_temperatures=[0.0, 0.7]).run()
    (first, last) = (line for line in read_log(tmp_path / "log.jsonl") if line["split"] == "live")
    assert first["acceptance_length"] == pytest.approx(1.1) and last["acceptance_length"] == pytest.approx(1.5)
    assert last["acceptance_lengths"] == [2.0, 1.0] and last["temperatures"] == [0.0, 0.7]
    assert last["position_acceptance_joint"] == [[1.0], [0.0]] and last["rounds"] == [7, 7]
    assert [call[2] for call in measure.calls] == [0.0, 0.7] * 2


def test_live_runs_may_be_rarer_than_evaluations_and_then_they_alone_select(tmp_path: Path) -> None:
    loop_with(tmp_path, Scripted(1.0, 1.4, 1.3), steps=6, live_every=4).run()
    assert live_lines(tmp_path) == {0: 1.0, 4: 1.4, 6: 1.3}, "the last step always has one"
    heldout = [line["step"] for line in read_log(tmp_path / "log.jsonl") if line["split"] == "heldout"]
    assert heldout == [0, 2, 4, 6]
    assert read_facts(tmp_path)["provenance"]["step"] == 4


def test_a_run_without_a_better_head_stops_and_is_saved(tmp_path: Path) -> None:
    loop = loop_with(tmp_path, Scripted(1.0, 1.5, 1.5, 1.4), steps=100, save_every=100, patience=2)
    state = loop.run()
    assert (state.step, state.best, state.waited, loop.exhausted) == (6, 1.5, 2, True)
    found = checkpoint.latest(tmp_path / "checkpoints")
    assert found is not None and found.name == "step-0000006"
    assert read_facts(tmp_path)["provenance"]["step"] == 2
    again = loop_with(tmp_path, Scripted(), steps=100, save_every=100, patience=2)
    assert again.run().step == 6, "nothing is left to do"


def test_best_and_patience_survive_a_stop(tmp_path: Path) -> None:
    """A worse head after the stop neither replaces the best one nor starts the waiting anew."""
    loop = loop_with(tmp_path, Scripted(1.0, 1.8, 1.2), steps=100, save_every=100, patience=3)
    inner = loop._step

    def stepping(*args: Any) -> dict[str, Any]:
        if loop.state.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(*args)

    loop._step = stepping  # type: ignore[method-assign,assignment]
    with pytest.raises(Stopped, match="stopped at step 5"):
        loop.run()
    assert (loop.state.best, loop.state.waited) == (1.8, 1)
    state = loop_with(tmp_path, Scripted(1.7, 1.6), steps=100, save_every=100, patience=3).run()
    assert (state.step, state.best, state.waited) == (8, 1.8, 3)
    assert read_facts(tmp_path)["provenance"]["step"] == 2
    assert live_lines(tmp_path) == {0: 1.0, 2: 1.8, 4: 1.2, 6: 1.7, 8: 1.6}


@pytest.mark.parametrize("make", [eagle3, medusa])
def test_a_live_run_leaves_training_as_it_was(tmp_path: Path, make: Any) -> None:
    """Weights, random state and mode: with and without live runs the same head comes out, bit for bit."""
    heads = []
    for prompts in (0, 2):
        target = tiny_target(layers=4)
        head = make(target, std=0.1)
        loop = loop_with(tmp_path / str(prompts), measure_acceptance, target=target, head=head, live_prompts=prompts)
        loop.run()
        assert head.training
        heads.append(weights(head))
    assert largest_gap(*heads) == 0.0
    assert all(1.0 <= length <= 5.0 for length in live_lines(tmp_path / "2").values())


@pytest.mark.parametrize("make", [eagle3_head, medusa_head])
def test_what_is_measured_is_what_decoding_gives(make: Any) -> None:
    target, embeddings = permutation_target()
    head = rough(make(target, embeddings)).train()
    prompts = [row["ids"][: row["spans"][0][0]] for row in answered(target, 2)]
    found = measure_acceptance(target, head, prompts, 3, 0.0, 0, 20)
    steps = [
        step
        for prompt in prompts
        for step in generate(target, drafter_for(head, target), prompt, Decoding(k=3, max_new_tokens=20)).steps
    ]
    joint = [sum(a > i for _, a in steps) / sum(K > i for K, _ in steps) for i in range(3)]
    assert found["rounds"] == len(steps)
    assert found["position_acceptance_joint"] == pytest.approx(joint)
    assert 1.3 < found["acceptance_length"] < 3.9
    sampled = measure_acceptance(target, head.train(), prompts, 3, 1.0, 0, 20)
    assert sampled == measure_acceptance(target, head, prompts, 3, 1.0, 0, 20), "a seed repeats"
    assert sampled != measure_acceptance(target, head, prompts, 3, 1.0, 1, 20)
    assert head.training, "left in the mode it came in"


def test_an_answer_that_ends_at_once_counts_as_plain_decoding() -> None:
    target, embeddings = permutation_target()
    found = measure_acceptance(target, eagle3_head(target, embeddings), [[5, 9]], 3, 0.0, 0, 1)
    assert found == {"acceptance_length": 1.0, "position_acceptance_joint": [], "rounds": 0}


def test_prompts_take_turns_over_the_routes_and_leave_room_for_the_answer() -> None:
    rows = [
        {"ids": [n] * 9, "spans": [[2, 4], [4 + n, 9]], "route": route}
        for n, route in enumerate(["a", "a", "b", "c", "b"])
    ]
    assert choose_prompts(rows, 3, 100) == [[0] * 4, [2] * 6, [3] * 7]
    assert choose_prompts(rows, 99, 6) == [[0] * 4, [2] * 6, [1] * 5]
    for unusable in ([], [{"ids": [1, 2], "spans": []}], rows):
        with pytest.raises(ValueError, match="no held-out prompt of at most 3 tokens .* train.live_prompts=0"):
            choose_prompts(unusable, 3, 3)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"live_prompts": -1}, "train.live_prompts=-1"),
        ({"patience": -1}, "train.patience=-1"),
        ({"live_tokens": 1}, "train.live_tokens=1"),
        ({"eval_every": 10, "live_every": 15}, "train.live_every=15 must be a multiple of eval_every=10"),
        ({"live_every": 0}, "train.live_every=0"),
        ({"live_temperatures": []}, "train.live_temperatures"),
        ({"live_temperatures": [-1.0]}, "train.live_temperatures"),
    ],
)
def test_settings_of_selection_that_make_no_sense_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainSettings(**changed)


def test_a_held_out_split_without_a_usable_prompt_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no held-out prompt of at most 2 tokens"):
        loop_with(tmp_path, Scripted(), live_tokens=254)
    assert not (tmp_path / "log.jsonl").exists()


def test_torch_random_state_is_not_moved_by_a_live_run() -> None:
    target, embeddings = permutation_target()
    head = eagle3_head(target, embeddings)
    before = torch.get_rng_state()
    measure_acceptance(target, head, [[5, 9, 3]], 2, 1.0, 0, 8)
    assert torch.equal(before, torch.get_rng_state())
