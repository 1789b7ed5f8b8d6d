"""Parts of the data stage in processes of their own, ended with SIGKILL at random moments, then run again.

    python tests/killed_run.py JSON     {"folder", "works": of "regenerate", "server", "capture", "kills", "seed"}

Each round starts from nothing, is killed at a random moment, every second one once more while it resumes, and is then
left to finish; rounds go on until there are so many kills. Prints for each work {"seconds": of a run left alone,
"files": its files, "killed": [{"round", "after_s", "found"}], "different": [...]}: `found` counts the bytes that lay
there at the kill, `different` names files that are not, byte for byte, those of the run left
alone. Forks instead of starting anew: loading torch takes seconds, a run of this target a second.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chat_server import ChatServer
from tiny import tiny_target
from tiny_chat import byte_tokenizer

from data.asking import RegenerateSettings
from data.build import CaptureSettings, DataSettings, build
from data.capture import capture
from data.template import ChatFormat
from heads.target import Target

CONVERSATIONS = 12


def regenerate(target: Target, source: Path, folder: Path, server: str | None) -> None:
    """A whole data folder, answers and manifest included."""
    asked = RegenerateSettings(temperature=0.9, max_new_tokens=24, batch_size=2, samples=2)
    asked.server, asked.server_model, asked.concurrency = server, "m", 3
    build(target, DataSettings(source=[str(source)], heldout_share=0.2, max_length=512, regenerate=asked), folder)


def features(target: Target, source: Path, folder: Path) -> None:
    """The features of a data folder that lies beside the source."""
    settings = CaptureSettings(taps=[0, 2], shard_rows=1)
    capture(target, settings, source.parent / "rows", "train", folder)


def given_rows(target: Target, source: Path) -> None:
    settings = DataSettings(source=[str(source)], heldout_share=0.2, regenerate=RegenerateSettings(enabled=False))
    build(target, settings, source.parent / "rows")


def forked(work: Callable[[], Any]) -> int:
    if (pid := os.fork()) == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return pid


def finish(work: Callable[[], Any]) -> float:
    """Run to the end in a process of its own; seconds."""
    began = time.perf_counter()
    assert os.waitpid(forked(work), 0)[1] == 0
    return time.perf_counter() - began


def killed(work: Callable[[], Any], after_s: float) -> bool:
    """Whether the process still ran when it was to be killed."""
    pid, until, status = forked(work), time.perf_counter() + after_s, (0, 0)
    while time.perf_counter() < until and status[0] == 0:
        time.sleep(0.001)
        status = os.waitpid(pid, os.WNOHANG)
    if status[0] == 0:
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status[1])


def serve(server: ChatServer) -> None:
    """Until the process that started this one is gone."""
    parent, server.timeout = os.getppid(), 0.2
    while os.getppid() == parent:
        server.handle_request()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def round_of(number: int, work: Callable[[], Any], folder: Path, seconds: float, draw: random.Random) -> list[Any]:
    """Kill, resume, leave the finished folder; what was killed when. A run quicker than its kill is none."""
    kills: list[Any] = []
    for longest in (seconds, seconds / 2)[: 1 + number % 2]:
        after = draw.uniform(0, longest)
        if killed(work, after):
            found = sum(map(len, contents(folder).values()))
            kills.append({"round": number, "after_s": round(after, 3), "found": found})
    finish(work)
    return kills


def proof(work: str, place: Path, wanted: int, draw: random.Random) -> dict[str, Any]:
    """At least `wanted` kills of one kind of work in `place`."""
    place.mkdir()
    target = Target(tiny_target(vocab_size=264, layers=2, max_position_embeddings=512).model, byte_tokenizer())
    source, url = place / "in.jsonl", None
    turns = [[f"prompt {n}"] + ["more"] * (n % 2) for n in range(CONVERSATIONS)]
    source.write_text("".join(json.dumps({"id": f"id{n}", "turns": asked}) + "\n" for n, asked in enumerate(turns)))
    if work == "capture":
        rows = [{"prompt": "p" * (20 + n), "completion": "c" * (40 + 3 * n)} for n in range(80)]
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        finish(lambda: given_rows(target, source))
    if work == "server":
        server = ChatServer(ChatFormat(byte_tokenizer()), exact=True)
        server.delay_s, url = 0.02, server.url
        serving = forked(lambda: serve(server))

    def into(folder: Path) -> Callable[[], None]:
        if work == "capture":
            return lambda: features(target, source, folder)
        return lambda: regenerate(target, source, folder, url)

    seconds = finish(into(place / "whole"))
    seconds = min(seconds, finish(into(place / "again")))  # the first waits for whatever is loaded once
    whole = contents(place / "whole")
    kills: list[Any] = []
    different: list[str] = []
    number, folder = 0, place / "cut"
    while len(kills) < wanted:
        number += 1
        kills += round_of(number, into(folder), folder, seconds, draw)
        there = contents(folder)
        names = sorted(whole.keys() | there.keys())
        different += [f"round {number}: {name}" for name in names if there.get(name) != whole.get(name)]
        shutil.rmtree(folder)
    if work == "server":
        os.kill(serving, signal.SIGKILL)
        os.waitpid(serving, 0)
    return {"seconds": round(seconds, 2), "files": sorted(whole), "killed": kills, "different": different}


def main() -> None:
    options = json.loads(sys.argv[1])
    draw = random.Random(options["seed"])
    results = {work: proof(work, Path(options["folder"], work), options["kills"], draw) for work in options["works"]}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
