"""The configuration refuses what it does not know, in one line that says what was probably meant."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from conf import errors
from conf.entry import open_names, own_arguments, run
from eval.plan import EvalSettings


@dataclass
class TrainPart:
    lr: float = 1e-3
    steps: int = 10
    resume: str | None = None


@dataclass
class HeadsPart:
    taps: list[int] | None = None
    draft_vocab_size: int | None = 64


@dataclass
class Wide:
    width: int = 3


@dataclass
class Deep:
    depth: int = 7


@dataclass
class Run:
    name: str = "trial"
    train: TrainPart = field(default_factory=TrainPart)
    heads: HeadsPart = field(default_factory=HeadsPart)
    head: Any = None


SCHEMAS = {"head/wide": Wide, "head/deep": Deep}
PRIMARY = """
defaults:
  - demo_settings
  - common
  - head: wide
  - _self_
  - experiment: null
hydra:
  job:
    name: demo
train:
  lr: 2e-4
"""


@pytest.fixture
def conf(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A small config folder with groups; the working folder is a fresh one; logging is put back afterwards."""
    folder = tmp_path / "conf"
    files = {
        "demo.yaml": PRIMARY,
        "common.yaml": (root / "conf" / "common.yaml").read_text(),
        "head/wide.yaml": "defaults: [wide_settings, _self_]\nwidth: 5\n",
        "head/deep.yaml": "defaults: [deep_settings, _self_]\n",
        "experiment/quick/one.yaml": "# @package _global_\n# python -m demo\ndefaults:\n  - override /head: deep\n"
        "  - _self_\nname: quick\ntrain:\n  steps: 2\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield folder
    for handler in set(logger.handlers) - set(handlers):
        handler.close()
    logger.handlers[:] = handlers
    logger.setLevel(level)


def settings_of(conf: Path, *arguments: str) -> Run:
    """What a stage gets for these command-line arguments."""
    seen: list[Run] = []
    before = sys.argv
    sys.argv = ["demo", *arguments]
    try:
        run("demo", Run, seen.append, SCHEMAS, conf)
    finally:
        sys.argv = before
    return seen[0]


def refusal(conf: Path, capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 2) -> str:
    """The one line on standard error of a command that must be refused."""
    with pytest.raises(SystemExit) as stopped:
        settings_of(conf, *arguments)
    assert stopped.value.code == status
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("error: ")
    return lines[0]


def test_settings_are_dataclass_objects_merged_from_yaml_and_overrides(conf: Path) -> None:
    settings = settings_of(conf, "heads.taps=[1,3,5]")
    expected = Run(train=TrainPart(lr=2e-4), heads=HeadsPart(taps=[1, 3, 5]), head=Wide(width=5))
    assert settings == expected


def test_an_experiment_is_a_delta_that_may_choose_groups(conf: Path) -> None:
    settings = settings_of(conf, "experiment=quick/one", "head.depth=9")
    assert settings == Run(name="quick", train=TrainPart(lr=2e-4, steps=2), head=Deep(depth=9))


@pytest.mark.parametrize(
    ("argument", "nearest"),
    [
        ("train.no_such_key=1", "'"),
        ("train.step=3", "'train.steps'"),
        ("trian.lr=1", "'train.lr'"),
        ("lr=1", "'train.lr'"),
        ("haed=deep", "'head'"),
        ("head.widht=4", "'head.width'"),
        ("experimnet=quick/one", "'experiment'"),
        ("+train.stepz=3", "'train.steps'"),
    ],
)
def test_an_unknown_override_names_the_nearest_key(
    conf: Path, capsys: pytest.CaptureFixture[str], argument: str, nearest: str
) -> None:
    line = refusal(conf, capsys, argument)
    assert f"'{argument.lstrip('+').partition('=')[0]}'" in line
    assert nearest in line.partition("; the nearest known key is ")[2]


def test_an_unknown_key_in_yaml_names_file_and_nearest_key(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (conf / "demo.yaml").open("a") as file:
        file.write("  stepps: 3\n")
    line = refusal(conf, capsys)
    assert "conf/demo.yaml" in line and "'train.stepps'" in line and "'train.steps'" in line


def test_an_unknown_key_in_a_group_choice_names_file_and_nearest_key(
    conf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (conf / "head/deep.yaml").write_text("defaults: [deep_settings, _self_]\ndepht: 1\n")
    line = refusal(conf, capsys, "head=deep")
    assert "conf/head/deep.yaml" in line and "'head.depht'" in line and "'head.depth'" in line


@pytest.mark.parametrize("argument", ["train.lr=fast", "train.steps=1.5", "heads.taps=[a]", "train=3"])
def test_a_wrong_type_names_key_and_value(conf: Path, capsys: pytest.CaptureFixture[str], argument: str) -> None:
    assert argument in refusal(conf, capsys, argument)


def test_a_wrong_type_in_yaml_names_file_and_key(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (conf / "demo.yaml").open("a") as file:
        file.write("  steps: many\n")
    line = refusal(conf, capsys)
    assert "conf/demo.yaml" in line and "train.steps" in line and "many" in line


def test_an_unknown_choice_lists_the_choices(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(conf, capsys, "head=dep")
    assert line == "error: head=dep: no such choice; there is deep, wide"


def test_a_group_that_the_stage_does_not_use_is_named(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (conf / "other").mkdir()
    (conf / "other/one.yaml").write_text("a: 1\n")
    line = refusal(conf, capsys, "other=one")
    assert "conf/other" in line and "does not use" in line


@pytest.mark.parametrize("name", ["a=b", "a,b", "a#b", "a b", "a/b", ".."])
def test_a_run_name_that_needs_quoting_is_refused_before_a_folder_is_made(
    conf: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    line = refusal(conf, capsys, f"name='{name}'")
    assert line.startswith(f"error: name={name!r} cannot name a folder")
    assert not (conf.parent / "outputs").exists()


def test_the_run_folder_is_stage_and_name_without_a_timestamp(conf: Path) -> None:
    settings_of(conf, "name=mine")
    folders = {str(path.relative_to(conf.parent)) for path in conf.parent.glob("outputs/**/*")}
    expected = {"outputs/demo", "outputs/demo/mine", "outputs/demo/mine/.hydra", "outputs/demo/mine/demo.log"}
    assert {path for path in folders if not path.endswith(".yaml")} == expected
    assert Path.cwd() == conf.parent


def test_a_run_folder_that_cannot_be_made_is_one_error(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (conf.parent / "outputs").write_text("a file in the way")
    assert "outputs" in refusal(conf, capsys, status=1)


def failing_run(conf: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def main(settings: Run) -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["demo"])
    run("demo", Run, main, SCHEMAS, conf)


@pytest.mark.parametrize("error", [ValueError("row 3:\n no text"), FileNotFoundError(2, "No such file", "x.jsonl")])
def test_a_user_error_of_the_stage_is_one_line(
    conf: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with pytest.raises(SystemExit) as stopped:
        failing_run(conf, error, monkeypatch)
    assert stopped.value.code == 1
    assert capsys.readouterr().err == f"error: {' '.join(str(error).split())}\n"


def test_hydra_full_error_shows_the_traceback(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ValueError, match="row 3"):
        failing_run(conf, ValueError("row 3"), monkeypatch)


def test_a_programming_error_keeps_its_traceback(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError):
        failing_run(conf, KeyError("bug"), monkeypatch)


def test_an_interruption_is_one_line(
    conf: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as stopped:
        failing_run(conf, KeyboardInterrupt(), monkeypatch)
    assert stopped.value.code == 130
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_stage_does_not_see_our_error_switch(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(sys, "argv", ["demo"])
    seen: list[str | None] = []
    run("demo", Run, lambda settings: seen.append(os.environ.get("HYDRA_FULL_ERROR")), SCHEMAS, conf)
    assert seen == [None]


def test_the_status_a_stage_returns_is_the_exit_status(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["demo"])
    with pytest.raises(SystemExit) as stopped:
        run("demo", Run, lambda settings: 7, SCHEMAS, conf)
    assert stopped.value.code == 7


def test_flags_that_launchers_inject_are_dropped() -> None:
    assert own_arguments(["--local_rank=0", "train.lr=1"]) == ["train.lr=1"]
    assert own_arguments(["--local-rank", "1", "-m", "train.lr=1,2"]) == ["-m", "train.lr=1,2"]


def test_ranks_other_than_the_first_leave_the_config_copy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert own_arguments(["a=1"]) == ["a=1", "hydra.output_subdir=null"]


def test_new_names_in_a_dictionary_of_settings_need_no_plus() -> None:
    given = ["heads.mine=user/repo@main", "heads={a: b}", "headsize=3", "target.id=x", "+heads.c=d", "-m"]
    assert open_names(given, EvalSettings) == ["++heads.mine=user/repo@main", "++heads={a: b}", *given[2:]]


def test_known_keys_hold_nested_optional_and_group_keys(conf: Path) -> None:
    keys = errors.known_keys(Run, SCHEMAS, conf)
    assert {"name", "train.lr", "heads.taps", "head", "head.width", "head.depth", "experiment"} <= set(keys)


def test_override_cases_of_the_design_behave_as_stated(
    conf: Path, shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = json.loads((shared / "cases/config/hydra-overrides.json").read_text())["cases"]
    for case in cases:
        arguments, expect = case["argv"].split(), case["expect"]
        if isinstance(expect, str) and expect.startswith(("grammar error", "error that names")):
            line = refusal(conf, capsys, *arguments)
            assert ("quoted" in line) if expect.startswith("grammar") else ("train.no_such_key" in line)
            continue
        settings = settings_of(conf, *arguments)
        key = arguments[-1].partition("=")[0]
        value = getattr(getattr(settings, key.split(".")[0]), key.split(".")[1])
        if isinstance(expect, str) and expect.startswith("parses to"):
            expect = int(expect.split()[2].strip(";"))
        elif isinstance(expect, str) and expect.startswith("the injected flag"):
            expect = float(arguments[-1].partition("=")[2])
        assert value == expect, case


APP = """
import sys
from pathlib import Path
from test_config import Run, SCHEMAS
from conf.entry import run

def main(settings: Run) -> None:
    if settings.train.steps == 13:
        raise ValueError("13 is unlucky")
    print(settings.name, settings.train.steps, settings.head)

if __name__ == "__main__":
    run("demo", Run, main, SCHEMAS, Path("conf").resolve())
"""


def command(conf: Path, root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (conf.parent / "demo.py").write_text(APP)
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'tests'}"}
    line = [sys.executable, "demo.py", *arguments]
    return subprocess.run(line, cwd=conf.parent, env=environment, capture_output=True, text=True, timeout=120)


def test_help_and_cfg_show_the_whole_configuration(conf: Path, root: Path) -> None:
    shown = command(conf, root, "--help")
    assert shown.returncode == 0 and "draft_vocab_size: 64" in shown.stdout and "head: deep, " in shown.stdout
    printed = command(conf, root, "--cfg", "job", "head=deep")
    assert printed.returncode == 0 and "depth: 7" in printed.stdout and "lr: 0.0002" in printed.stdout


def test_a_sweep_gives_each_job_a_name_and_folder_and_keeps_stdout_for_the_stage(conf: Path, root: Path) -> None:
    swept = command(conf, root, "-m", "train.steps=1,2")
    assert swept.returncode == 0, swept.stderr
    assert swept.stdout == "trial-0 1 Wide(width=5)\ntrial-1 2 Wide(width=5)\n"
    assert (conf.parent / "outputs/demo/trial-1/.hydra/config.yaml").is_file()
    failed = command(conf, root, "-m", "train.steps=1,13")
    assert failed.returncode == 1 and failed.stderr.splitlines()[-1] == "error: 13 is unlucky"
    assert "Traceback" not in failed.stderr


def test_a_sweep_runs_through_submitit(conf: Path, root: Path) -> None:
    swept = command(conf, root, "-m", "train.steps=1,2", "hydra/launcher=submitit_local")
    assert swept.returncode == 0, swept.stderr
    logs = sorted((conf.parent / "outputs/demo/.submitit").glob("*/*.out"))
    assert ["trial-0 1 Wide(width=5)" in logs[0].read_text(), "trial-1 2" in logs[1].read_text()] == [True, True]
