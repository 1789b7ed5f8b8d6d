"""Runs regeneration in processes of its own and ends them with SIGKILL at random moments: python killed_run.py JSON

JSON: {"folder", "seed", "kills", "server": URL or null}. Prints {"killed": [bytes of the partial file at each kill]}.
Forks instead of starting anew: loading torch takes seconds, a run of this target a second.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

from test_data_server import prompts
from tiny import tiny_target
from tiny_chat import byte_tokenizer

from data.asking import RegenerateSettings, with_samples
from data.regenerate import Answers
from data.template import ChatFormat
from heads.target import Target


def make(target: Target, folder: Path, server: str | None) -> None:
    settings = RegenerateSettings(temperature=0.9, max_new_tokens=24, batch_size=2, samples=2)
    settings.server, settings.server_model, settings.concurrency = server, "m", 3
    asked = with_samples(prompts(target, 12), 2)
    Answers(target, ChatFormat(target.tokenizer), settings, folder).make(asked)


def forked(target: Target, folder: Path, server: str | None) -> int:
    if (pid := os.fork()) == 0:
        try:
            make(target, folder, server)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return pid


def main() -> None:
    options = json.loads(sys.argv[1])
    model = tiny_target(vocab_size=264, layers=2, max_position_embeddings=512).model
    target = Target(model, byte_tokenizer())
    whole, cut, server = Path(options["folder"], "whole"), Path(options["folder"], "cut"), options["server"]
    assert os.waitpid(forked(target, whole, server), 0)[1] == 0
    moments = random.Random(options["seed"])
    size, partial = (whole / "answers.jsonl").stat().st_size, cut / "answers.partial.jsonl"
    killed = []
    for share in sorted(moments.uniform(0.05, 0.9) for _ in range(options["kills"])):
        pid, status = forked(target, cut, server), (0, 0)
        while status[0] == 0 and not (partial.exists() and partial.stat().st_size >= share * size):
            time.sleep(0.001)
            status = os.waitpid(pid, os.WNOHANG)
        if status[0] == 0:
            time.sleep(moments.uniform(0, 0.02))
            os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status[1]):
            killed.append(partial.stat().st_size if partial.exists() else 0)
    assert os.waitpid(forked(target, cut, server), 0)[1] == 0
    print(json.dumps({"killed": killed}))


if __name__ == "__main__":
    main()
