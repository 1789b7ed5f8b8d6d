"""records.jsonl: one line per decoded (method, k, temperature, proposal, prompt), appended as it is measured.

An interrupted run goes on from it: a torn last line is cut off, what is there is not decoded again.
"""

import json
import os
from pathlib import Path
from typing import Any

from eval import metrics
from eval.metrics import Record
from heads.hub import write_json

KEY = ("kind", "id", "turn", "method", "k", "temperature", "proposal", "seed")
LATER = ("tree", "adaptive", "concurrency")  # as well, since there are such


def unit(record: Record) -> tuple[Any, ...]:
    return (*(record[name] for name in KEY), *(record.get(name, metrics.LATER[name]) for name in LATER))


class RecordFile:
    """Append-only; `rows` holds everything that was read or appended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Record] = []
        if path.is_file():
            data = path.read_bytes()
            whole = data.rfind(b"\n") + 1
            for number, line in enumerate(data[:whole].splitlines(), start=1):
                try:
                    self.rows.append(json.loads(line))
                except ValueError as error:
                    raise ValueError(
                        f"{path}:{number}: not a record ({error}); delete the file to start over"
                    ) from error
            if whole < len(data):
                with path.open("r+b") as stream:
                    stream.truncate(whole)
        self.done = {unit(row) for row in self.rows}

    def append(self, record: Record) -> None:
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        self.rows.append(record)
        self.done.add(unit(record))


def claim(folder: Path, settings: dict[str, Any]) -> None:
    """Make the run folder and mark what its records are of; refuse to mix them with those of other settings.

    Raises ValueError naming the settings that differ, or a folder that cannot be written.
    """
    mark = folder / "measured.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if mark.is_file():
            held = json.loads(mark.read_text(encoding="utf-8"))
            differing = sorted(k for k in {*held, *settings} if held.get(k) != settings.get(k))
            if differing:
                raise ValueError(
                    f"{folder} holds records made with another {', '.join(differing)}: choose another name="
                )
        else:
            write_json(mark, settings)
        (folder / "manifest.json").unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(
            f"cannot write into {folder} ({error.strerror}): choose an output folder you may write"
        ) from error
