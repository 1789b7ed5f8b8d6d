"""`bash scripts/quickstart.sh --fast`: the whole line on the embedded target, as a user runs it."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def quickstart(outputs: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OUTPUTS": str(outputs), "WANDB_MODE": "offline"}
    if "PYTEST_XDIST_WORKER" not in os.environ:  # beside another worker, more threads than cores wait for each other
        environment.pop("OMP_NUM_THREADS", None)  # the tests' single thread is for tiny targets
    command = ["bash", str(ROOT / "scripts" / "quickstart.sh"), *flags]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.timeout(1000)
def test_fast_line_trains_measures_exports_and_skips_what_is_done(tmp_path: Path) -> None:
    done = quickstart(tmp_path, "--fast")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Self-checks passed" in done.stdout and f"report: {tmp_path}/eval/quickstart_fast/report.html" in done.stdout
    rows = json.loads((tmp_path / "eval" / "quickstart_fast.out").read_text().splitlines()[-1])["rows"]
    assert {row["method"] for row in rows} == {"plain", "lookup", "medusa", "eagle3", "random"}
    assert {row["temperature"] for row in rows} == {0.0, 1.0}
    assert (tmp_path / "export" / "quickstart_fast" / "config.json").is_file()
    again = quickstart(tmp_path, "--fast")
    assert again.returncode == 0 and again.stderr.count("up to date") >= 4, again.stderr[-3000:]


def test_unknown_flag_is_refused_with_the_usage(tmp_path: Path) -> None:
    refused = quickstart(tmp_path, "--fastt")
    assert refused.returncode == 2 and "unknown flag '--fastt'" in refused.stderr and "usage:" in refused.stderr
