"""Claim: regeneration killed with SIGKILL at random moments ends in the same bytes as a run left alone."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from chat_server import ChatServer, serving
from tiny_chat import byte_tokenizer

from data.template import ChatFormat


@pytest.mark.parametrize("through_server", [False, True], ids=["in-process", "server"])
def test_killed_runs_resume_to_the_same_file(root: Path, python: str, tmp_path: Path, through_server: bool) -> None:
    with serving(ChatServer(ChatFormat(byte_tokenizer()), exact=True)) as server:
        server.delay_s = 0.02
        options = {"folder": str(tmp_path), "seed": 5, "kills": 4, "server": server.url if through_server else None}
        environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'tests'}"}
        environment |= dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1")
        command = [python, str(root / "tests" / "killed_run.py"), json.dumps(options)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    killed = json.loads(done.stdout.splitlines()[-1])["killed"]
    assert killed and max(killed) > 100, f"no kill fell into the work: {killed}"
    whole = (tmp_path / "whole" / "answers.jsonl").read_bytes()
    assert (tmp_path / "cut" / "answers.jsonl").read_bytes() == whole
    keys = [(row["id"], row.get("sample", 0)) for row in map(json.loads, whole.splitlines())]
    assert keys == [(f"id{n}", sample) for n in range(12) for sample in range(2)]
