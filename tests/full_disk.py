"""A data folder and a feature store on a disk that is too small, then with room, then read-only: full_disk.py FOLDER

Runs as root of its own user namespace (`unshare -rm`), so that it can mount a tmpfs. Prints {"errors": by step, "same":
whether the files after all of it are those of a run that never met a full disk}.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from killed_run import contents
from tiny import tiny_target
from tiny_chat import byte_tokenizer

from data.asking import RegenerateSettings
from data.build import CaptureSettings, DataSettings, build
from data.capture import capture
from heads.target import Target


def mount(place: Path, options: str) -> None:
    kind = [] if "remount" in options else ["-t", "tmpfs"]
    subprocess.run(["mount", *kind, "-o", options, "none", str(place)], check=True)


def main() -> None:
    target = Target(tiny_target(vocab_size=264, layers=2, max_position_embeddings=512).model, byte_tokenizer())
    home, disk = Path(sys.argv[1], "home"), Path(sys.argv[1], "disk")
    home.mkdir()
    disk.mkdir()
    source = home / "in.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"question {n} " * 12}) + "\n" for n in range(24)))
    asked = RegenerateSettings(max_new_tokens=6, batch_size=4)
    settings = DataSettings(source=[str(source)], heldout_share=0.2, max_length=400, regenerate=asked)
    errors: dict[str, str | None] = {}

    def tried(step: str, work: Callable[[], Any]) -> None:
        try:
            work()
            errors[step] = None
        except (ValueError, OSError) as error:
            errors[step] = str(error)

    def features(folder: Path) -> None:
        with patch("data.capture.free_bytes", lambda folder: 1 << 60):  # the disk is filled after the check
            capture(target, CaptureSettings(taps=[1], shard_rows=2), folder / "rows", "train", folder)

    build(target, settings, home / "whole" / "rows")
    features(home / "whole")
    for kilobytes in (16, 64):
        mount(disk, f"size={kilobytes}k" if kilobytes == 16 else f"remount,size={kilobytes}k")
        tried(f"rows on {kilobytes} kB", lambda: build(target, settings, disk / "rows"))
        errors["manifest"] = "there" if (disk / "rows" / "manifest.json").exists() else None
    mount(disk, "remount,size=512k")
    tried("rows with room", lambda: build(target, settings, disk / "rows"))
    tried("features on 512 kB", lambda: features(disk))
    errors["index"] = "there" if list(disk.rglob("index.json")) else None
    mount(disk, "remount,size=64m")
    tried("features with room", lambda: features(disk))
    same = contents(disk) == contents(home / "whole")
    mount(disk, "remount,ro")
    tried("finished rows, read-only", lambda: build(target, settings, disk / "rows"))
    tried("new rows, read-only", lambda: build(target, settings, disk / "other"))
    print(json.dumps({"errors": errors, "same": same}))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
