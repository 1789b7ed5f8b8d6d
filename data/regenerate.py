"""The target answers each user turn in turn; exact ids are kept, and an interrupted run goes on where it stopped.

    <partial file>   header line, then one line per finished conversation, appended batch by batch (fsync)
    answers.jsonl    all of them in row order, written when the last is there

A resumed run gives the same bytes as an uninterrupted one: the batches are planned from all prompts, a torn last line
is cut, and a batch that lost any row is decoded again whole, because the rounding of a matrix product depends on its
row count.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from data.chat import RowError, has_content, prompt_ids
from data.generate import generate, uniforms
from data.prompts import Message, Row
from data.template import ChatFormat
from heads.target import Target


@dataclass
class RegenerateSettings:
    """How the target answers. `temperature` 0 is greedy."""

    enabled: bool = True
    temperature: float = 0.7
    top_p: float = 0.95
    seed: int = 0
    max_new_tokens: int = 256
    batch_size: int = 32

    def check(self) -> None:
        """Refuse values that cannot be sampled with."""
        for name, good in (
            ("temperature", self.temperature >= 0),
            ("top_p", 0 < self.top_p <= 1),
            ("max_new_tokens", self.max_new_tokens >= 1),
            ("batch_size", self.batch_size >= 1),
        ):
            if not good:
                raise ValueError(f"data.regenerate.{name}={getattr(self, name)} is out of range")


@dataclass(frozen=True)
class Prompt:
    """What is to be answered: `steps[i]` are the messages that come before answer i; `first_ids` the first prompt."""

    row: Row
    key: str
    split: str
    steps: list[list[Message]]
    first_ids: list[int]


@dataclass(frozen=True)
class Limits:
    """Most prompt + new tokens the target can hold, and the length that training rows are cut to."""

    context: int
    max_length: int


def to_prompt(chat: ChatFormat, row: Row, key: str, split: str, limits: Limits) -> Prompt:
    """The turns of `row` that the target can answer on its own. Raises RowError when there is none."""
    if row.text is not None:
        raise RowError("rendered_text_has_no_turns", "a pre-rendered text cannot be answered anew; use messages")
    steps = answerable(row.messages, row.turn_by_turn)
    if not steps:
        raise RowError("no_user_turn", "there is no user turn to answer")
    ids = prompt_ids(chat, steps[0], row.tools)
    if len(ids) >= limits.max_length:
        raise RowError("no_supervised_tokens_after_truncation", f"the prompt has {len(ids)} tokens")
    if len(ids) >= limits.context:
        raise RowError("prompt_longer_than_context", f"{len(ids)} prompt tokens leave no room for an answer")
    return Prompt(row, key, split, steps, ids)


def answerable(messages: list[Message], turn_by_turn: bool = False) -> list[list[Message]]:
    """Messages before each answer: `[sys, u1, a1, u2] -> [[sys, u1], [u2]]`, `[u1, u2] -> [[u1, u2]]`.

    With `turn_by_turn` an answer follows every user message: `[u1, u2] -> [[u1], [u2]]`.

    Stops at the first answer that calls a tool: its reply would answer another call than the target's own.
    """
    steps: list[list[Message]] = []
    pending: list[Message] = []
    for message in messages:
        if message["role"] == "assistant":
            if any(m["role"] == "user" for m in pending):
                steps.append(pending)
                pending = []
            if message.get("tool_calls"):
                return steps
            if not steps and has_content(message):
                pending.append(message)  # a greeting before the first user turn is part of the prompt
        else:
            pending.append(message)
            if turn_by_turn and message["role"] == "user":
                steps.append(pending)
                pending = []
    return [*steps, pending] if any(m["role"] == "user" for m in pending) else steps


class Answers:
    """Answers of one target to a list of prompts, in `folder`."""

    def __init__(self, target: Target, chat: ChatFormat, settings: RegenerateSettings, folder: Path) -> None:
        settings.check()
        self.target, self.chat, self.settings, self.folder = target, chat, settings, folder
        self.partial, self.final = folder / "answers.partial.jsonl", folder / "answers.jsonl"
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

    def make(self, prompts: list[Prompt], given: dict[str, dict[str, Any]] | None = None) -> Path:
        """Answer every prompt that is not among the `given` answers (by key); returns answers.jsonl in row order."""
        given = given or {}
        todo = [p for p in prompts if p.key not in given]
        done = self._resume(todo)
        batches = self._batches(todo)
        left = [batch for batch in batches if any(p.key not in done for p in batch)]
        if left:
            with _Progress(sum(map(len, batches)), sum(map(len, batches)) - sum(map(len, left))) as progress:
                for batch in left:
                    self._append([row for row in self._answer(batch, progress) if row["key"] not in done], done)
        _write_lines(self.final, ({**given.get(p.key, done.get(p.key, {})), "split": p.split} for p in prompts))
        self.partial.unlink(missing_ok=True)
        return self.final

    def _batches(self, prompts: list[Prompt]) -> list[list[Prompt]]:
        """Conversations of as many turns and about as long prompts together; ties by key, never by file order."""
        order = sorted(prompts, key=lambda p: (-len(p.steps), -len(p.first_ids), p.key))
        size = self.settings.batch_size
        return [order[i : i + size] for i in range(0, len(order), size)]

    def _answer(self, batch: list[Prompt], progress: "_Progress") -> Iterator[dict[str, Any]]:
        settings, limit = self.settings, self.target.spec.max_position_embeddings
        history: list[list[Message]] = [[] for _ in batch]
        turns: list[list[dict[str, Any]]] = [[] for _ in batch]
        for turn in range(max(len(p.steps) for p in batch)):
            asked, ids = [], []
            for i, prompt in enumerate(batch):
                if turn < len(prompt.steps) and len(turns[i]) == turn:
                    history[i] += prompt.steps[turn]
                    known = prompt.first_ids if turn == 0 else self._next_prompt(history[i], prompt)
                    if known is not None and len(known) < limit:
                        asked.append(i)
                        ids.append(known)
            if not asked:
                break
            draws = [uniforms(settings.seed, batch[i].key, turn, settings.max_new_tokens) for i in asked]
            room = min(settings.max_new_tokens, limit - max(map(len, ids)))
            outputs = generate(self.target, ids, draws, settings.temperature, settings.top_p, room, progress.tokens)
            for i, prompt_ids_, output in zip(asked, ids, outputs, strict=True):
                stopped = output[-1] in self.target.eos_ids
                turns[i].append(
                    {"prompt_ids": prompt_ids_, "output_ids": output, "finish": "stop" if stopped else "length"}
                )
                text = self.chat.tokenizer.decode(output[:-1] if stopped else output)
                history[i].append({"role": "assistant", "content": text})
        progress.rows(len(batch))
        for prompt, answered in zip(batch, turns, strict=True):
            row = {"id": prompt.row.id, "key": prompt.key, "route": prompt.row.route, "split": prompt.split}
            yield {**row, "turns": answered, **self.origin}

    def _next_prompt(self, history: list[Message], prompt: Prompt) -> list[int] | None:
        try:
            return prompt_ids(self.chat, history, prompt.row.tools)
        except RowError:
            return None  # the template refuses the target's own answer: the conversation ends before it

    def _header(self, prompts: list[Prompt]) -> dict[str, str]:
        plan = [self.origin, self.settings.batch_size, [[p.key, p.split, p.row.id, p.first_ids] for p in prompts]]
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
        done = {row["key"]: row for row in map(json.loads, whole[len(header) :].splitlines())}
        print(f"regenerate: {len(done)} of {len(prompts)} conversations are answered already", file=sys.stderr)
        return done

    def _append(self, rows: list[dict[str, Any]], done: dict[str, dict[str, Any]]) -> None:
        with self.partial.open("ab") as stream:
            stream.write(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
            stream.flush()
            os.fsync(stream.fileno())
        done.update({row["key"]: row for row in rows})


class _Progress:
    """Conversations done, tokens per second and time left, on standard error."""

    def __init__(self, total: int, done: int) -> None:
        self.bar: Any = tqdm(
            total=total, initial=done, desc="regenerate", unit="conversation", file=sys.stderr, mininterval=1.0
        )
        self.count = 0

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()

    def tokens(self, count: int) -> None:
        self.count += count
        elapsed = self.bar.format_dict["elapsed"]
        self.bar.set_postfix_str(f"{self.count} tokens, {self.count / max(elapsed, 1e-9):.0f} tokens/s", refresh=False)
        self.bar.update(0)

    def rows(self, count: int) -> None:
        self.bar.update(count)


def _write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    temporary = path.with_suffix(path.suffix + ".tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        for row in rows:
            stream.write(json.dumps(row) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
