"""Measure the data stage: tokens per second on one core, and whether its memory grows with the number of rows.

    python -m scripts.bench_data [--rows 10000 100000] [--tokens 500] [--folder outputs/bench-data]

Writes conversations of about so many tokens (multi-turn, seeded, the words of scripts/assets/prompts in random order),
then, for each size in a process of its own held to one core, runs what `python -m data data=given-answers` runs on the
embedded target's tokenizer and template: read, split, check for leakage, render, mask, write; then packs the training
rows into lines of 2,048 tokens. The last line of standard output is a JSON object. Exit status 1 when a figure misses
its bound: 20,000 tokens/s, 1.5 GB, no growth.

`tokens_per_s` are per second of that core's time, `wall_tokens_per_s` per second of the clock, which also counts what
else runs on the machine. `rss_mb` is the peak of the whole process, libraries included; `build_mb` the peak
while it built.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPTS = Path(__file__).parent / "assets" / "prompts"
LEAST_TOKENS_PER_S, MOST_RSS_MB, MOST_GROWTH = 20_000, 1500, 0.05  # the last: of the peak, from least to most rows
LINE = 2048  # tokens of a packed line
TOKENS_PER_WORD = 1.4  # of these words under the embedded tokenizer
TURN_TOKENS = 10  # what the template writes around a question and its answer
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench_data", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000], help="sizes to measure")
    parser.add_argument("--tokens", type=int, default=500, help="about so many tokens a conversation")
    parser.add_argument(
        "--folder", type=Path, default=Path("outputs/bench-data"), help="where the files go for a while"
    )
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)  # the process of its own: build this file
    options = parser.parse_args(arguments)
    if options.measure:
        print(json.dumps(measure(options.measure, options.folder)))
        return 0
    results = [in_own_process(rows, options.tokens, options.folder) for rows in sorted(set(options.rows))]
    growth = results[-1]["build_mb"] / results[0]["build_mb"] - 1
    met = {
        "tokens_per_s": all(result["tokens_per_s"] >= LEAST_TOKENS_PER_S for result in results),
        "rss": all(result["rss_mb"] <= MOST_RSS_MB for result in results),
        "growth": growth <= MOST_GROWTH,
    }
    print(json.dumps({"runs": results, "build_growth": round(growth, 4), "met": met}))
    return 0 if all(met.values()) else 1


def in_own_process(rows: int, tokens: int, folder: Path) -> dict[str, Any]:
    """What `measure` finds for a file of so many rows; the files are removed again."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / f"{rows}.jsonl"
    write_conversations(source, rows, tokens)
    print(f"bench: {rows} conversations, {source.stat().st_size / 1e6:.0f} MB", file=sys.stderr)
    command = [sys.executable, "-m", "scripts.bench_data", "--measure", str(source), "--folder", str(folder)]
    try:
        done = subprocess.run(command, env={**os.environ, **ONE_THREAD}, stdout=subprocess.PIPE, text=True, check=True)
    finally:
        source.unlink()
    result = json.loads(done.stdout.splitlines()[-1])
    print(f"bench: {result}", file=sys.stderr)
    return dict(result)


def write_conversations(path: Path, rows: int, tokens: int, seed: int = 0) -> None:
    """Conversations of 1 to 4 questions, some with a system prompt, no two alike."""
    draw = random.Random(seed)
    words = [word for file in sorted(PROMPTS.glob("*.jsonl")) for word in _words(file)]
    with path.open("w", encoding="utf-8") as stream:
        for number in range(rows):
            turns = draw.randint(1, 4)
            wanted = int((tokens * draw.uniform(0.8, 1.2) - TURN_TOKENS * turns) / TOKENS_PER_WORD)
            messages = [{"role": "system", "content": "You are a helpful assistant."}] if draw.random() < 0.3 else []
            for _ in range(turns):
                question = draw.randint(wanted // turns // 5, wanted // turns // 2)
                for role, length in (("user", question), ("assistant", wanted // turns - question)):
                    messages.append({"role": role, "content": " ".join(draw.choices(words, k=length))})
            stream.write(json.dumps({"id": number, "messages": messages}, ensure_ascii=False) + "\n")


def _words(file: Path) -> list[str]:
    """Words of the user texts of a prompt file, with their punctuation."""
    texts = [text for line in file.read_text(encoding="utf-8").splitlines() for text in json.loads(line)["turns"]]
    return [word for text in texts for word in text.split()]


def measure(source: Path, folder: Path) -> dict[str, Any]:
    """Build a data folder of `source` on one core; tokens per second of the building, peak memory in MB."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from data import rows
    from data.asking import RegenerateSettings
    from data.build import DataSettings, build
    from data.packing import pack_stream
    from heads.target import Target, TargetSettings

    settings = DataSettings(
        source=[str(source)], heldout_share=0.05, max_length=LINE, regenerate=RegenerateSettings(enabled=False)
    )
    target = Target.load(TargetSettings(), weights=False)  # as that command does
    loaded = _status_mb("VmHWM")
    Path("/proc/self/clear_refs").write_text("5")  # the kernel's peak begins anew
    began, used = time.perf_counter(), time.process_time()
    counts = build(target, settings, folder / "out")["counts"]
    train = ((row.ids, row.spans) for row in rows.stream(folder / "out", "train"))
    lines = sum(len(packed.ids) for packed in pack_stream(train, LINE))
    seconds, used = time.perf_counter() - began, time.process_time() - used
    peak = _status_mb("VmHWM")
    shutil.rmtree(folder / "out")
    return {
        "rows": counts["kept"],
        "tokens": counts["tokens"],
        "supervised": counts["supervised"],
        "seconds": round(seconds, 1),
        "cpu_seconds": round(used, 1),
        "packed_lines": lines,
        "tokens_per_s": round(counts["tokens"] / used),
        "wall_tokens_per_s": round(counts["tokens"] / seconds),
        "rss_mb": max(loaded, peak),
        "build_mb": peak,
    }


def _status_mb(name: str) -> int:
    """A memory line of this process (kB in /proc/self/status) in MB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) // 1024


if __name__ == "__main__":
    sys.exit(main())
