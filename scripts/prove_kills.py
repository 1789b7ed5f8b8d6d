"""Prove that the data stage survives kill -9 at random moments of regeneration, in process and served, and of capture.

    python -m scripts.prove_kills [--kills 20] [--seed 0] [--out docs/proofs/kills.txt]

Every round ends one process of a tiny in-process target with SIGKILL at a random moment (every second round once more
while it resumes), runs it again to the end and compares every file, byte for byte, with a run left alone. Exit status 1
when any differs. Minutes; the tests hold a small version.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from heads.hub import write_text

ROOT = Path(__file__).resolve().parents[1]
WORKS = {
    "regenerate": "answers by the target in process, and the data folder around them",
    "server": "the same through a loopback server, three conversations at once",
    "capture": "hidden states of a data folder, one row a shard",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.prove_kills", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="at least so many for each kind of work")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--out", type=Path, help="write the result there as well")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        results = run(Path(folder), options.kills, options.seed)
    lines = [f"python -m scripts.prove_kills --kills {options.kills} --seed {options.seed}", ""]
    for work, what in WORKS.items():
        lines += [f"{work}: {what}", *table(results[work]), ""]
    text = "\n".join(lines)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_text(options.out, text)
    print(text)
    return int(any(result["different"] for result in results.values()))


def run(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """What tests/killed_run.py found, by kind of work. Its progress lines go to standard error."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    environment |= dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1") | {"TOKENIZERS_PARALLELISM": "false"}
    options = {"folder": str(folder), "works": list(WORKS), "kills": kills, "seed": seed}
    command = [sys.executable, str(ROOT / "tests" / "killed_run.py"), json.dumps(options)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def table(result: dict[str, Any]) -> list[str]:
    """Lines of one kind of work: each kill, then what differs."""
    kills = result["killed"]
    rounds = len({kill["round"] for kill in kills})
    kinds = sorted({Path(name).name if "shard" not in name else "shard-*" for name in result["files"]})
    lines = [f"  left alone: {result['seconds']} s, {len(result['files'])} files: {', '.join(kinds)}"]
    for kill in kills:
        lines.append(
            f"  round {kill['round']:2d}: killed after {kill['after_s']:6.3f} s, {kill['found']:7d} bytes there"
        )
    verdict = "none differs" if not result["different"] else ", ".join(result["different"])
    return [*lines, f"  {len(kills)} kills in {rounds} rounds; of the files of every round {verdict}"]


if __name__ == "__main__":
    sys.exit(main())
