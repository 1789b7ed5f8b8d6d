"""`launcher=cpu2` really starts two processes that work together, and signals and exit statuses come through."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from conf.launch import LAUNCHED_BY, LauncherSettings, launch_command, relaunch_if_needed

APP = """
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from conf.entry import run
from conf.launch import LauncherSettings, relaunch_if_needed


@dataclass
class Run:
    name: str = "ranks"
    task: str = "sum"
    launcher: LauncherSettings = field(default_factory=LauncherSettings)


def wait(rank: str) -> None:
    def leave(number, frame):
        Path(f"saved-{rank}").touch()
        sys.exit(0)

    signal.signal(signal.SIGTERM, leave)
    Path(f"ready-{rank}").touch()
    time.sleep(60)


def main(settings: Run) -> int | None:
    status = relaunch_if_needed(settings.launcher, "ranks")
    if status is not None:
        return status
    if settings.task == "fail":
        return 3
    if settings.task == "wait":
        wait(os.environ["RANK"])
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=settings.launcher.cpu)
    rank, size = accelerator.process_index, accelerator.num_processes
    total = accelerator.reduce(torch.tensor([rank + 1.0]), "sum").item()
    backend = torch.distributed.get_backend() if size > 1 else "none"
    Path(f"out-{rank}").write_text(f"{size} {backend} {total}")
    accelerator.end_training()
    return None


if __name__ == "__main__":
    run("ranks", Run, main, conf=Path("conf").resolve())
"""
PRIMARY = "defaults: [ranks_settings, common, launcher: single, _self_]\nhydra: {job: {name: ranks}}\n"


@pytest.fixture
def folder(tmp_path: Path, root: Path) -> Path:
    """A one-module stage whose launcher group is the project's own."""
    (tmp_path / "ranks.py").write_text(APP)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/ranks.yaml").write_text(PRIMARY)
    (tmp_path / "conf/common.yaml").write_text((root / "conf/common.yaml").read_text())
    (tmp_path / "conf/launcher").symlink_to(root / "conf/launcher")
    return tmp_path


def environment(root: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHED_BY}
    return {**kept, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}


def test_cpu2_gives_two_gloo_ranks_that_sum_a_number(folder: Path, root: Path) -> None:
    line = [sys.executable, "-m", "ranks", "launcher=cpu2"]
    done = subprocess.run(line, cwd=folder, env=environment(root), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [(folder / f"out-{rank}").read_text() for rank in (0, 1)] == ["2 gloo 3.0"] * 2


def test_accelerate_launch_works_from_outside_too(folder: Path, root: Path) -> None:
    overrides = ["launcher=cpu2", "name=outside"]
    line = launch_command(LauncherSettings(2, cpu=True, multi_gpu=True), 2, "ranks", overrides)
    done = subprocess.run(line, cwd=folder, env=environment(root), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (folder / "out-1").read_text() == "2 gloo 3.0"
    assert (folder / "outputs/ranks/outside/.hydra/config.yaml").is_file()


def test_a_failing_rank_fails_the_command(folder: Path, root: Path) -> None:
    line = [sys.executable, "-m", "ranks", "launcher=cpu2", "task=fail"]
    done = subprocess.run(line, cwd=folder, env=environment(root), capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "exitcode  : 3" in done.stderr


def test_sigterm_reaches_both_ranks(folder: Path, root: Path) -> None:
    line = [sys.executable, "-m", "ranks", "launcher=cpu2", "task=wait"]
    with subprocess.Popen(line, cwd=folder, env=environment(root), stderr=subprocess.DEVNULL) as process:
        try:
            _wait_for([folder / "ready-0", folder / "ready-1"])
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        finally:
            process.kill()
    assert (folder / "saved-0").exists() and (folder / "saved-1").exists()


def _wait_for(paths: list[Path]) -> None:
    for _ in range(600):
        if all(path.exists() for path in paths):
            return
        time.sleep(0.1)
    raise AssertionError(f"not there after a minute: {paths}")


@pytest.fixture
def unlaunched(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in LAUNCHED_BY:
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch


def test_one_process_is_not_launched_again(unlaunched: pytest.MonkeyPatch) -> None:
    assert relaunch_if_needed(LauncherSettings(), "train") is None


@pytest.mark.parametrize("marker", LAUNCHED_BY)
def test_a_process_that_was_launched_does_not_launch_again(unlaunched: pytest.MonkeyPatch, marker: str) -> None:
    unlaunched.setenv(marker, "1")
    assert relaunch_if_needed(LauncherSettings(2, multi_gpu=True), "train") is None


@pytest.mark.parametrize("choice", ["single", "cpu2", "gpu"])
def test_every_launcher_choice_states_every_setting(root: Path, choice: str) -> None:
    loaded = OmegaConf.load(root / "conf/launcher" / f"{choice}.yaml")
    schema = OmegaConf.structured(LauncherSettings)
    assert set(loaded) == set(schema)
    assert isinstance(OmegaConf.to_object(OmegaConf.merge(schema, loaded)), LauncherSettings)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"num_processes": 0}, "num_processes"),
        ({"num_processes": 2}, "multi_gpu"),
        ({"mixed_precision": "tf32"}, "bf16"),
    ],
)
def test_settings_that_cannot_launch_are_refused(settings: dict[str, object], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        LauncherSettings(**settings)  # type: ignore[arg-type]
