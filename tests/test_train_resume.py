"""N steps, a stop and N steps more equal 2N steps bit for bit; SIGTERM saves and leaves; bad steps are skipped."""

import os
import signal
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_target
from toys import conversations, default_signals, eagle3, largest_gap, loop_of, medusa, train, weights

from heads.hub import load_head, read_facts
from train import checkpoint
from train.loop import Loop, Stopped
from train.settings import TrainSettings
from train.track import Track, read_log

STEPS: dict[str, Any] = {"steps": 8, "eval_every": 3, "save_every": 8}


def heads_of(name: str) -> Any:
    target = tiny_target(layers=4)
    return target, eagle3(target, std=0.1) if name == "eagle3" else medusa(target, std=0.1, shared_lm_head=False)


def log_of(folder: Path) -> list[dict[str, Any]]:
    """Log lines without wall-clock time."""
    return [{k: v for k, v in line.items() if k != "seconds"} for line in read_log(folder / "log.jsonl")]


def checkpoint_of(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    found = checkpoint.latest(folder / "checkpoints")
    assert found is not None
    state = {k: v for k, v in checkpoint.read_state(found).items() if k != "seconds"}
    return state, load_file(found / "head.safetensors"), load_file(found / "optimizer.safetensors")


def stop_after(loop: Loop, step: int) -> None:
    """SIGTERM to this process while `step` is under way."""
    inner = loop._step

    def stepping(*args: Any) -> dict[str, Any]:
        if loop.state.step + 1 == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(*args)

    loop._step = stepping  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
@pytest.mark.parametrize("stop", [1, 3, 6])
def test_stop_and_resume_equals_an_uninterrupted_run_bit_for_bit(tmp_path: Path, kind: str, stop: int) -> None:
    target, head = heads_of(kind)
    whole, state = train(tmp_path / "whole", target=target, head=head, **STEPS)
    assert state.step == 8

    target, head = heads_of(kind)
    first = loop_of(tmp_path / "parts", target=target, head=head, **STEPS)
    stop_after(first, stop)
    before = default_signals()
    with pytest.raises(Stopped, match=f"stopped at step {stop}"):
        first.run()
    assert default_signals() == before, "handlers are put back"

    torch.manual_seed(123)  # another process would have another RNG
    target, head = heads_of(kind)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(1.0)  # and another start
    second, state = train(tmp_path / "parts", target=target, head=head, **STEPS)

    assert largest_gap(weights(whole.head), weights(second.head)) == 0.0
    for one, two in zip(checkpoint_of(tmp_path / "whole")[1:], checkpoint_of(tmp_path / "parts")[1:], strict=True):
        assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert checkpoint_of(tmp_path / "whole")[0] == checkpoint_of(tmp_path / "parts")[0]
    assert log_of(tmp_path / "whole") == log_of(tmp_path / "parts")
    best = [load_head(tmp_path / name) for name in ("whole", "parts")]
    assert largest_gap(weights(best[0]), weights(best[1])) == 0.0
    assert read_facts(tmp_path / "whole")["provenance"] == read_facts(tmp_path / "parts")["provenance"]


def test_every_stop_was_a_whole_checkpoint_and_only_the_newest_is_kept(tmp_path: Path) -> None:
    train(tmp_path, **{**STEPS, "save_every": 3})
    folders = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert folders == ["step-0000008"]
    (tmp_path / "checkpoints" / "step-0000009.tmp").mkdir()  # killed while writing
    (tmp_path / "checkpoints" / "step-0000010").mkdir()  # no state.json
    found = checkpoint.latest(tmp_path / "checkpoints")
    assert found is not None and found.name == "step-0000008"
    assert checkpoint.latest(tmp_path / "nothing") is None


def test_a_checkpoint_holds_the_head_and_no_target_tensor(tmp_path: Path) -> None:
    loop, _ = train(tmp_path, **{**STEPS, "steps": 2})
    _, head, optimizer = checkpoint_of(tmp_path)
    assert set(head) == set(loop.head.state_dict())
    parameters = [p for p in loop.head.parameters() if p.requires_grad]
    assert set(optimizer) == {"rng"} | {
        f"{i}.{k}" for i in range(len(parameters)) for k in ("step", "exp_avg", "exp_avg_sq")
    }


def test_a_run_killed_without_a_checkpoint_starts_its_log_anew(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(
        '{"step": 0, "split": "heldout"}\n{"step": 1, "split": "train"}\n{"step": 2, "spl'
    )
    train(tmp_path, **{**STEPS, "steps": 2})
    assert [(line["step"], line["split"]) for line in log_of(tmp_path)] == [
        (0, "heldout"),
        (1, "train"),
        (2, "train"),
        (2, "heldout"),
    ]


def test_train_and_heldout_values_are_never_mixed(tmp_path: Path) -> None:
    train(tmp_path, **STEPS)
    lines = log_of(tmp_path)
    assert [line["step"] for line in lines if line["split"] == "train"] == list(range(1, 9))
    assert [line["step"] for line in lines if line["split"] == "heldout"] == [0, 3, 6, 8]
    only_heldout = {"position_acceptance_joint", "predicted_acceptance_length", "alpha_sum_min"}
    assert all(not only_heldout & set(line) for line in lines if line["split"] == "train")
    assert all(only_heldout <= set(line) and "lr" not in line for line in lines if line["split"] == "heldout")


def test_best_is_the_head_with_the_best_predicted_acceptance(tmp_path: Path) -> None:
    train(tmp_path, **{**STEPS, "lr": 0.05})
    tries = {n["step"]: n["predicted_acceptance_length"] for n in log_of(tmp_path) if n["split"] == "heldout"}
    note = read_facts(tmp_path)["provenance"]
    assert note["heldout"]["predicted_acceptance_length"] == max(tries.values())
    assert tries[note["step"]] == max(tries.values())
    assert note["note"] == "toy" and note["tokens"] >= 0


def poison(loop: Loop, bad_steps: set[int]) -> None:
    inner = loop.objective.forward

    def forward(*args: Any) -> Any:
        loss, metrics = inner(*args)
        if torch.is_grad_enabled() and loop.state.step + 1 in bad_steps:
            loss, metrics["loss"] = loss * float("nan"), metrics["loss"] * float("nan")
        return loss, metrics

    loop.objective.forward = forward  # type: ignore[method-assign,assignment]


def test_a_step_that_is_not_finite_is_skipped_and_counted(tmp_path: Path) -> None:
    loop = loop_of(tmp_path, **STEPS)
    poison(loop, {1})
    seen: list[dict[str, torch.Tensor]] = [weights(loop.head)]
    inner = loop._apply

    def applying(*args: Any) -> None:
        inner(*args)
        seen.append(weights(loop.head))

    loop._apply = applying  # type: ignore[method-assign,assignment]
    state = loop.run()
    assert state.skipped == 1 and state.bad_in_a_row == 0 and state.step == 8
    assert largest_gap(seen[0], seen[1]) == 0.0 and largest_gap(seen[1], seen[2]) > 0.0
    assert all(bool(torch.isfinite(value).all()) for value in weights(loop.head).values())
    assert [line["skipped"] for line in log_of(tmp_path) if line["split"] == "train"][:2] == [1, 1]


def test_too_many_bad_steps_in_a_row_stop_the_run(tmp_path: Path) -> None:
    loop = loop_of(tmp_path, **STEPS, max_bad_steps=3)
    poison(loop, {2, 4, 5, 6, 7})
    with pytest.raises(ValueError, match=r"not finite for 3 steps in a row \(step 6\).*train.optim.lr"):
        loop.run()


def test_a_step_without_any_trained_slot_leaves_the_head_alone(tmp_path: Path) -> None:
    """Answers of one token have no slot; momentum and weight decay must not move the head on such a step."""
    rows = [{"id": str(n), "ids": [5, 6, 7, 8], "spans": [[3, 4]]} for n in range(8)]
    loop = loop_of(tmp_path, rows=rows, steps=2)
    before = weights(loop.head)
    loop.run()
    assert largest_gap(before, weights(loop.head)) == 0.0


def test_log_lines_after_the_checkpoint_are_cut(tmp_path: Path) -> None:
    track = Track(tmp_path, "toy", {}, "disabled")
    for step in (1, 2, 3):
        track.log(step, "train", {"loss": 1.0 / step})
    track.close()
    Track(tmp_path, "toy", {}, "disabled", step=2).close()
    assert [line["step"] for line in read_log(tmp_path / "log.jsonl")] == [1, 2]
    with pytest.raises(ValueError, match="train.wandb='sometimes'"):
        Track(tmp_path, "toy", {}, "sometimes")


def test_a_log_survives_an_end_while_its_lines_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    track = Track(tmp_path, "toy", {}, "disabled")
    for step in (1, 2, 3):
        track.log(step, "train", {"loss": 1.0 / step})

    def killed(path: Path, *_: Any, **__: Any) -> None:
        raise KeyboardInterrupt(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)  # the last moment at which the old file is all there is
        with pytest.raises(KeyboardInterrupt):
            Track(tmp_path, "toy", {}, "disabled", step=2)
    assert [line["step"] for line in read_log(tmp_path / "log.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("name", "value"),
    [("steps", 0), ("batch_size", 0), ("micro_batch_size", -1), ("predict_k", 0), ("predict_tokens", 1)],
)
def test_settings_that_make_no_sense_are_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"train.{name}={value}"):
        TrainSettings(**{name: value})  # type: ignore[arg-type]


GOLDEN = [
    3.3266, 2.8654, 3.1797, 2.9272, 2.6637, 2.8177, 2.3132, 2.7300, 2.5360, 2.3766,
    2.6350, 2.2542, 2.5953, 2.2264, 2.2010, 2.1944, 2.5592, 2.1815, 2.1798, 2.5552,
]  # fmt: skip


def test_twenty_steps_give_the_losses_they_always_gave(tmp_path: Path) -> None:
    """A change that is meant to leave the arithmetic alone shows the same numbers; one that is not updates the list.

    Each parameter starts from a draw of its own name, so that the order of construction does not count.
    """
    target = tiny_target(layers=4)
    head = eagle3(target)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            draw = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
            parameter.copy_((parameter.dim() == 1) + 0.1 * draw)
    train(tmp_path, target=target, head=head, rows=conversations(12), steps=20, eval_every=20, lr=5e-3)
    losses = [line["loss"] for line in log_of(tmp_path) if line["split"] == "train"]
    assert losses == pytest.approx(GOLDEN, abs=3e-3)  # other processors round otherwise
