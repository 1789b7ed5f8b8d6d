"""Two gloo ranks train what one process trains, to 1e-6: whatever the split, also when a rank has nothing to do."""

import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_target
from tiny_heads import tiny_head
from torch import Tensor
from toys import conversations, largest_gap, loop_of, medusa, spread, weights

from eval.live import measure_acceptance
from heads import HEADS
from train.joint import JointSettings
from train.loop import Stopped
from train.track import read_log

QUIET: dict[str, dict[str, Any]] = {"eagle1": {"noise": 0.0}}  # noise on features is drawn by each rank for itself
CHUNKS = {"loss": {"chunk": 5}}
# name -> (head kind, settings); one launch of two ranks runs them all
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "even": ("eagle3", {"batch_size": 4, "micro_batch_size": 4}),
    "accumulated": ("eagle3", {"batch_size": 5, "micro_batch_size": 1}),
    "one row a step": ("eagle3", {"batch_size": 1, "micro_batch_size": 1}),
    "own lm heads, one row a step": ("medusa", {"batch_size": 1, "micro_batch_size": 1}),
    "with its target": ("medusa", {"batch_size": 3, "micro_batch_size": 2, "joint": JointSettings("joint", lora_r=4)}),
    "with live runs": ("eagle3", {"batch_size": 4, "live_prompts": 2, "eval_every": 1}),
    **{f"kind {kind}": (f"tiny {kind}", {"batch_size": 3, "micro_batch_size": 2, **CHUNKS}) for kind in HEADS},
}
STEPS = 3


def loop_named(name: str, folder: Path, **changed: Any) -> Any:
    kind, settings = RUNS[name]
    target = tiny_target(layers=4)
    torch.manual_seed(0)
    head = medusa(target, std=0.1, shared_lm_head=False, num_heads=3) if kind == "medusa" else None
    if kind.startswith("tiny "):
        target = tiny_target(layers=6)
        kind = kind.removeprefix("tiny ")
        head = spread(tiny_head(kind, target, **QUIET.get(kind, {})), 0.1)
    # a long row without an answer: some ranks and micro-batches have no trained slot, of step 2 more often
    rows = [*conversations(7, longest=6), {"id": "no answer", "ids": list(range(2, 22)), "spans": [[18, 20]]}]
    chosen = {"steps": STEPS, "lr": 1e-3, "live_tokens": 6, **settings, **changed}
    return loop_of(folder, target, head, rows, measure_acceptance, **chosen)


def trained(loop: Any) -> dict[str, Tensor]:
    """Everything that learns: the head and, where there are any, its target's adapters."""
    adapters = {} if loop.lora is None else {f"lora.{name}": value for name, value in weights(loop.lora).items()}
    return {**weights(loop.head), **adapters}


def worker(folder: str) -> None:
    """What each rank runs; rank 0 leaves the weights of every run."""
    rank = int(os.environ["RANK"])
    for name in RUNS:
        loop = loop_named(name, Path(folder) / name)
        loop.run()
        if rank == 0:
            save_file(trained(loop), Path(folder) / f"{name}.safetensors")
    stopped = loop_named("even", Path(folder) / "stopped", steps=4)
    inner = stopped._step

    def stepping(*args: Any) -> Any:
        if rank == 1 and stopped.state.step == 1:  # only one rank is told
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(*args)

    stopped._step = stepping
    try:
        stopped.run()
    except Stopped as stop:
        (Path(folder) / f"stopped-{rank}").write_text(str(stop))
    resumed = loop_named("even", Path(folder) / "stopped", steps=4)
    resumed.run()
    if rank == 0:
        save_file(weights(resumed.head), Path(folder) / "resumed.safetensors")
    torch.distributed.destroy_process_group()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory, root: Path, python: str) -> Path:
    """The folder two ranks left."""
    folder = tmp_path_factory.mktemp("ranks")
    paths = f"{root}{os.pathsep}{root / 'tests'}"
    common = {
        **os.environ,
        "PYTHONPATH": paths,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    code = f"import conftest, test_train_ranks; test_train_ranks.worker({str(folder)!r})"
    ranks = [
        subprocess.Popen(
            [python, "-c", code], env={**common, "RANK": str(n), "LOCAL_RANK": str(n), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for n in range(2)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)[-4000:]
    return folder


@pytest.mark.parametrize("name", list(RUNS))
def test_two_ranks_train_what_one_process_trains(launched: Path, tmp_path: Path, name: str) -> None:
    loop = loop_named(name, tmp_path)
    start = trained(loop)
    loop.run()
    assert largest_gap(load_file(launched / f"{name}.safetensors"), trained(loop)) < 1e-6
    assert largest_gap(start, trained(loop)) > 1e-4
    for one, two in zip(read_log(tmp_path / "log.jsonl"), read_log(launched / name / "log.jsonl"), strict=True):
        assert one.keys() == two.keys()
        assert one.get("rounds") == two.get("rounds")
        for figure in one.keys() & {"loss", "predicted_acceptance_length", "acceptance_length"}:
            assert one[figure] == pytest.approx(two[figure], rel=1e-5)


def test_a_signal_to_one_rank_stops_all_at_the_same_step_and_the_run_goes_on_from_there(
    launched: Path, tmp_path: Path
) -> None:
    messages = [(launched / f"stopped-{rank}").read_text() for rank in range(2)]
    assert messages == ["stopped at step 2; the same command goes on from there"] * 2
    loop = loop_named("even", tmp_path, steps=4)
    loop.run()
    assert largest_gap(load_file(launched / "resumed.safetensors"), weights(loop.head)) < 1e-6
    steps = [(line["step"], line["split"]) for line in read_log(launched / "stopped" / "log.jsonl")]
    assert steps == [(0, "heldout"), (1, "train"), (2, "train"), (3, "train"), (4, "train"), (4, "heldout")]
