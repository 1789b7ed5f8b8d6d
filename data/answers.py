"""Answer rows (see data/regenerate.py): an existing file read back, and rows turned into training ids."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.asking import Prompt, answer_name
from data.records import open_bytes
from data.regenerate import Answers


def load_given(path: Path, answers: Answers, prompts: list[Prompt]) -> dict[str, dict[str, Any]]:
    """Answers of an existing file (.jsonl, .gz, .xz) to these prompts, by name; rows of other prompts are ignored.

    A row whose first prompt ids are not ours, or that answers another number of turns, does not fit: it is counted
    on standard error and left out. Raises ValueError when one is of another target, template, temperature or top_p.
    """
    if not path.is_file():
        raise ValueError(f"data.answers={path}: no such file")
    wanted = {p.name: p for p in prompts}
    found: dict[str, dict[str, Any]] = {}
    misfits = 0
    with open_bytes(path) as stream:
        for number, line in enumerate(stream, start=1):
            try:
                row = json.loads(line)
                name = answer_name(row["key"], row.get("sample", 0))
                prompt = wanted.get(name)
                if prompt is None:
                    continue
                first = row["turns"][0]["prompt_ids"]
                ours = {
                    k: v for k, v in answers.origin_of(prompt.sample).items() if k not in ("seed", "max_new_tokens")
                }
                theirs = {k: row.get(k) for k in ours}
            except (json.JSONDecodeError, KeyError, IndexError, TypeError) as error:
                raise ValueError(f"data.answers={path}, line {number}: not an answer row ({error!r})") from error
            if theirs != ours:
                names = ", ".join(f"{k}: {theirs[k]!r} there, {ours[k]!r} here" for k in ours if theirs[k] != ours[k])
                raise ValueError(f"data.answers={path}, line {number}: made under other settings ({names})")
            if first == prompt.first_ids and len(row["turns"]) == len(prompt.steps):
                found[name] = row
            else:
                misfits += 1
    if misfits:
        print(f"data: {misfits} answers of {path} do not fit their prompts' ids or turns, left out", file=sys.stderr)
    return found


def training_rows(answer: dict[str, Any]) -> Iterator[tuple[str, list[int], list[tuple[int, int]]]]:
    """(id, ids, spans) of an answered conversation, made of the exact ids that were sent and sampled.

    One row where each prompt continues the ids so far; where it does not (the template rewrites history, or the text of
    an answer tokenises otherwise than it was sampled), a new row per such turn, because re-tokenising would train on
    ids the target never produced.
    """
    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    begun = 0
    for number, turn in enumerate(answer["turns"]):
        prompt, output = turn["prompt_ids"], turn["output_ids"]
        if ids and prompt[: len(ids)] != ids:
            yield _row_id(answer, begun), ids, spans
            spans, begun = [], number
        ids = prompt + output
        spans = [*spans, (len(prompt), len(ids))]
    if spans:
        yield _row_id(answer, begun), ids, spans


def _row_id(answer: dict[str, Any], turn: int) -> str:
    """`x`, third turn begun anew `x#3`, second sample `x/1`, both `x/1#3`."""
    name = answer_name(str(answer["id"]), answer.get("sample", 0))
    return name if turn == 0 else f"{name}#{turn + 1}"
