"""The tables of docs/comparison.md from what an evaluation and training runs leave."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import compare_table


def row(method: str, temperature: float = 0.0, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "route": "all", "sweep": False, "method": method, "temperature": temperature, "k": 2, "concurrency": 1,
        "prompts": 3, "acceptance_length": 1.25, "position_acceptance_joint": [0.2, 0.05], "acceptance_rate": 0.125,
        "speedup_decode": 0.9,
    }  # fmt: skip
    return found | more


def written(outputs: Path) -> None:
    folder, run = outputs / "eval" / "compare", outputs / "train" / "compare-eagle3"
    folder.mkdir(parents=True)
    run.mkdir(parents=True)
    rows = [
        row("plain"), row("eagle3"), row("eagle3", concurrency=8, prompts=60, acceptance_length=1.5),
        row("lookup", acceptance_length=1.1), row("eagle3", sweep=True, k=1), row("eagle3", route="code"),
        row("eagle3", 1.0, acceptance_length=1.375),
    ]  # fmt: skip
    cost = {
        "target_pass_s": {"1": 0.010, "2": 0.011, "3": 0.012},
        "draft_step_s": {"eagle3": 0.001}, "draft_fixed_s": {"eagle3": 0.002},
    }  # fmt: skip
    for name, value in (("rows", rows), ("cost", cost), ("manifest", {"heads": {"eagle3": {}}})):
        (folder / f"{name}.json").write_text(json.dumps(value))
    held = {"split": "heldout", "position_acceptance_joint": [0.3, 0.1], "alpha_sum_min": [0.25, 0.2]}
    lines = [{**held, "step": 0, "predicted_acceptance_length": 1.0}, {"step": 1, "split": "train", "loss": 2.0}]
    lines += [{**held, "step": 2, "predicted_acceptance_length": length} for length in (1.1, 1.4)]
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_measured_rows_are_those_of_most_prompts_and_speed_that_of_one(tmp_path: Path) -> None:
    written(tmp_path)
    lines = compare_table.measured(tmp_path / "eval" / "compare").splitlines()
    assert len(lines) == 2 + 3
    # drafting a round: 2 + 2 x 1 ms of a pass of 10; it pays from (12 + 4) / 10 tokens on
    assert lines[2] == "| 0 | eagle3 | 60 | 1.500 | .200 .050 | 0.125 | 4.0 ms (0.40) | 1.60 | 0.90× |"
    assert lines[3] == "| 0 | lookup | 3 | 1.100 | .200 .050 | 0.125 | 0.0 ms (0.00) | – | 0.90× |"
    assert lines[4].startswith("| 1 | eagle3 | 3 | 1.375 |")
    assert all(line.count("|") == lines[0].count("|") for line in lines)


def test_replayed_lines_are_the_selections_of_a_run_the_last_of_each_step(tmp_path: Path) -> None:
    written(tmp_path)
    lines = compare_table.replayed(tmp_path, ["eagle3"]).splitlines()
    assert lines[2:] == [
        "| eagle3 | 0 | 1.000 | .300 .100 | .250 .200 |",
        "| eagle3 | 2 | 1.400 | .300 .100 | .250 .200 |",
    ]


def test_a_missing_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path)
    for wanted, missing in ((["--runs", "mtp"], "compare-mtp/log.jsonl"), (["other"], "other/rows.json")):
        monkeypatch.setattr(sys, "argv", ["compare_table", str(tmp_path), *wanted])
        with pytest.raises(SystemExit):
            compare_table.main()
        assert f"{missing} is missing" in capsys.readouterr().err
