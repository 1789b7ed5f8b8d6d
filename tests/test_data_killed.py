"""Claim: regeneration and capture killed with SIGKILL at random moments end in the files of a run left alone.

`python -m scripts.prove_kills` is the long version; docs/proofs/kills.txt is what it last printed.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

WORKS = ["regenerate", "server", "capture"]


def test_killed_runs_resume_to_the_same_files(root: Path, python: str, tmp_path: Path) -> None:
    options = {"folder": str(tmp_path), "works": WORKS, "kills": 2, "seed": 5}
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'tests'}"}
    environment |= dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1")
    command = [python, str(root / "tests" / "killed_run.py"), json.dumps(options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    for work in WORKS:
        result = results[work]
        assert result["different"] == [], work
        assert len(result["killed"]) >= 2
        assert any(kill["found"] > 100 for kill in result["killed"]), f"no kill fell into the work: {result['killed']}"
    for work in WORKS[:2]:
        lines = (tmp_path / work / "whole" / "answers.jsonl").read_text().splitlines()
        names = [(row["id"], row.get("sample", 0)) for row in map(json.loads, lines)]
        assert len(set(names)) == len(names) == 21  # 12 conversations, two samples of each; one of each of 3 held out
        assert [int(name[2:]) for name, _ in names] == sorted(int(name[2:]) for name, _ in names)
    assert any(name.endswith("index.json") for name in results["capture"]["files"])
