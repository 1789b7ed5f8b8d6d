"""The target answers each user turn in turn; exact ids are kept, and an interrupted run goes on where it stopped.

    <partial file>   header line, then one line per finished conversation, appended as they come (fsync)
    answers.jsonl    all of them in row order, written when the last is there; `forget` then removes the partial file,
                     once nothing can be lost any more

A resumed run gives the same bytes as an uninterrupted one: the batches are planned from all prompts, a torn last line
is cut, and a batch that lost any row is decoded again whole, because the rounding of a matrix product depends on its
row count. A server is asked conversation by conversation, for those that are missing.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from data import local
from data.asking import Prompt, RegenerateSettings, answer_name
from data.progress import Progress
from data.server import Server
from data.template import ChatFormat
from heads.target import Target


def partial_file(folder: Path) -> Path:
    return folder / "answers.partial.jsonl"


def forget(folder: Path) -> None:
    """Remove the partial file of a data folder that is whole; a folder without one may be read-only."""
    if (partial := partial_file(folder)).exists():
        partial.unlink()


class Answers:
    """Answers of one target to a list of prompts, in `folder`."""

    def __init__(self, target: Target, chat: ChatFormat, settings: RegenerateSettings, folder: Path) -> None:
        settings.check()
        self.target, self.chat, self.settings, self.folder = target, chat, settings, folder
        self.partial, self.final = partial_file(folder), folder / "answers.jsonl"
        # a revision or template that changed must never continue an old file
        self.origin = {
            "target": target.spec.name,
            "revision": target.spec.revision,
            "tokenizer_hash": target.spec.tokenizer_hash,
            "template_hash": target.spec.template_hash,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "seed": settings.seed,
            "max_new_tokens": settings.max_new_tokens,
        }
        if settings.server is not None:
            self.origin["server_model"] = settings.server_model or target.spec.name

    def origin_of(self, sample: int) -> dict[str, Any]:
        """What the answers of this sample number were made by."""
        return {**self.origin, "temperature": self.settings.temperature_of(sample)}

    def make(self, prompts: list[Prompt], given: dict[str, dict[str, Any]] | None = None) -> Path:
        """Answer every prompt that is not among the `given` answers (by name); returns answers.jsonl in row order."""
        given = given or {}
        todo = [p for p in prompts if p.name not in given]
        done = self._resume(todo)
        if any(p.name not in done for p in todo):
            if self.settings.server is None:
                self._decode(todo, done)
            else:
                self._ask(todo, done)
        _write_lines(self.final, ({**given.get(p.name, done.get(p.name, {})), "split": p.split} for p in prompts))
        return self.final

    def _decode(self, todo: list[Prompt], done: dict[str, dict[str, Any]]) -> None:
        batches = local.batches(todo, self.settings)
        left = [batch for batch in batches if any(p.name not in done for p in batch)]
        with Progress(len(todo), len(todo) - sum(map(len, left))) as progress:
            for batch in left:
                turns = local.answer(self.target, self.chat, self.settings, batch, progress.tokens)
                rows = [self._row(p, t) for p, t in zip(batch, turns, strict=True) if p.name not in done]
                progress.rows(len(batch))
                self._append(rows, done)

    def _ask(self, todo: list[Prompt], done: dict[str, dict[str, Any]]) -> None:
        left = [p for p in todo if p.name not in done]
        with (
            Progress(len(todo), len(todo) - len(left)) as progress,
            Server(self.target, self.chat, self.settings) as server,
        ):
            for prompt, turns in server.answers(left):
                progress.tokens(sum(len(turn["output_ids"]) for turn in turns))
                progress.rows(1)
                self._append([self._row(prompt, turns)], done)
        retokenised = sum("retokenised" in row for row in done.values())
        if retokenised:
            print(
                f"regenerate: {retokenised} of {len(todo)} conversations came as text without token ids and were "
                "tokenised here: their ids may differ from those the server sampled",
                file=sys.stderr,
            )

    def _row(self, prompt: Prompt, turns: list[dict[str, Any]]) -> dict[str, Any]:
        row: dict[str, Any] = {"id": prompt.row.id, "key": prompt.key, "route": prompt.row.route, "split": prompt.split}
        if prompt.sample:
            row["sample"] = prompt.sample
        if any("retokenised" in turn for turn in turns):
            row["retokenised"] = True
        kept = [{k: v for k, v in turn.items() if k != "retokenised"} for turn in turns]
        return {**row, "turns": kept, **self.origin_of(prompt.sample)}

    def _header(self, prompts: list[Prompt]) -> dict[str, str]:
        asked = [[p.name, p.split, p.row.id, p.first_ids] for p in prompts]
        plan = [self.origin, self.settings.temperatures, self.settings.batch_size, asked]
        return {"plan": hashlib.sha256(json.dumps(plan).encode()).hexdigest()}

    def _resume(self, prompts: list[Prompt]) -> dict[str, dict[str, Any]]:
        """Finished answers of the partial file, whose torn end is cut off; a file of another plan is begun anew."""
        self.folder.mkdir(parents=True, exist_ok=True)
        header = json.dumps(self._header(prompts)).encode() + b"\n"
        content = self.partial.read_bytes() if self.partial.is_file() else b""
        if not content.startswith(header):
            temporary = self.partial.with_suffix(".tmp")
            temporary.write_bytes(header)
            os.replace(temporary, self.partial)
            return {}
        whole = content[: content.rindex(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(self.partial, len(whole))
        rows = map(json.loads, whole[len(header) :].splitlines())
        done = {answer_name(row["key"], row.get("sample", 0)): row for row in rows}
        print(f"regenerate: {len(done)} of {len(prompts)} conversations are answered already", file=sys.stderr)
        return done

    def _append(self, rows: list[dict[str, Any]], done: dict[str, dict[str, Any]]) -> None:
        with self.partial.open("ab") as stream:
            stream.write(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
            stream.flush()
            os.fsync(stream.fileno())
        done.update({answer_name(row["key"], row.get("sample", 0)): row for row in rows})


def _write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    temporary = path.with_suffix(path.suffix + ".tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        for row in rows:
            stream.write(json.dumps(row) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
