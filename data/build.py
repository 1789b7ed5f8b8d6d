"""The data folder: train and held-out rows, counts of supervised tokens, rejects; its manifest is written last.

sources --read--> rows --split by hash--> (answers by the target | the given answers) --> ids + spans --> files
"""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from data import answers, split
from data.asking import Limits, Prompt, RegenerateSettings, to_prompt, with_samples
from data.chat import Encoded, RowError, encode_row, truncate
from data.files import file_sha256, naming, write_json
from data.fingerprint import fingerprint, finished
from data.leakage import Overlap
from data.prompts import Columns, Row, read
from data.records import BLOCK_BYTES, Bad
from data.regenerate import Answers, forget
from data.store import DTYPES, TEACHERS
from data.tally import Tally
from data.template import DATE, ChatFormat
from data.writer import RowWriter
from heads.target import Target


@dataclasses.dataclass
class CaptureSettings:
    """Hidden states on disk; see data/capture.py and docs/features.md."""

    enabled: bool = False
    taps: list[int] | None = None  # null: [2, L//2, L-3]
    dtype: str = "float32"  # float32 | bfloat16 | float16 | int8
    teacher: str = "last"  # last: the last hidden state, logits are rebuilt | top_m: the top_m likeliest tokens
    top_m: int = 32
    budget_gb: float = 20.0
    shard_rows: int = 64
    threads: int | None = 1  # CPU threads of one process; another number rounds otherwise; null: as many as torch takes

    def check(self) -> None:
        """Refuse values that cannot be meant; what depends on the target is checked when it is there."""
        for name, known in (("dtype", tuple(DTYPES)), ("teacher", TEACHERS)):
            if getattr(self, name) not in known:
                raise ValueError(f"data.capture.{name}={getattr(self, name)!r}: give one of {', '.join(known)}")
        for name in ("top_m", "shard_rows", "threads"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"data.capture.{name}={value}: at least 1")


@dataclasses.dataclass
class DataSettings:
    """Where conversations come from and what becomes of them."""

    source: list[str] = dataclasses.field(default_factory=lambda: ["scripts/assets/prompts"])
    heldout_source: list[str] = dataclasses.field(default_factory=list)  # rows that are held out, all of them
    hub_split: str = "train"
    hub_config: str | None = None
    columns: Columns = dataclasses.field(default_factory=Columns)
    evaluation_sets: list[str] = dataclasses.field(default_factory=list)  # what they hold is kept out of training
    block_bytes: int = BLOCK_BYTES
    heldout_share: float = 0.1
    max_length: int = 1024
    last_turn_only: bool = False  # supervise the last answer of a conversation alone
    date: str = DATE  # for chat templates that print the day
    limit: int | None = None  # use only so many conversations, evenly over routes
    min_kept_share: float = 0.5  # stop when more rows than this allows are dropped
    answers: str | None = None  # answers made earlier (.jsonl, .gz, .xz), used for the prompts they fit
    answers_missing: str = "generate"  # generate | refuse: what to do for prompts that `answers` lacks
    regenerate: RegenerateSettings = dataclasses.field(default_factory=RegenerateSettings)
    capture: CaptureSettings = dataclasses.field(default_factory=CaptureSettings)

    def check(self) -> None:
        """Refuse values that cannot be meant."""
        if not self.source:
            raise ValueError("data.source is empty: name at least one file, folder or Hub dataset id")
        if not 0 <= self.heldout_share < 1:
            raise ValueError(f"data.heldout_share={self.heldout_share}: give a share from 0 to below 1")
        if self.max_length < 2 or (self.limit is not None and self.limit < 2):
            raise ValueError(f"data.max_length={self.max_length}, data.limit={self.limit}: both need to be at least 2")
        if self.answers_missing not in ("generate", "refuse"):
            raise ValueError(f"data.answers_missing={self.answers_missing!r}: give generate or refuse")
        self.regenerate.check()
        self.capture.check()


def build(target: Target, settings: DataSettings, folder: Path) -> dict[str, Any]:
    """Make (or find) the data folder; returns its manifest. Raises ValueError for unusable input or settings."""
    settings.check()
    identity = fingerprint(target, dataclasses.asdict(settings))
    if manifest := finished(folder, identity):
        forget(folder)  # a run that was killed between its manifest and this
        print(f"data: {folder} is up to date ({manifest['counts']['kept']} rows), nothing to do", file=sys.stderr)
        return manifest
    with naming(folder):
        return _make(target, settings, folder, identity)


def _make(target: Target, settings: DataSettings, folder: Path, identity: str) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").unlink(missing_ok=True)
    chat = ChatFormat(target.tokenizer, date=settings.date)
    writer = RowWriter(folder, target, Tally(", ".join(settings.source)))
    with writer:
        rows = _chosen(settings, writer)
        if settings.regenerate.enabled:
            _answered(target, chat, settings, rows, writer, folder)
        else:
            _as_given(chat, settings, rows, writer)
    counts = writer.finish(settings.min_kept_share)
    spec, special = target.spec, sorted({*target.eos_ids, *chat.end_ids, *chat.emitted_special_ids})
    manifest = {
        "kind": "data",
        "fingerprint": identity,
        "target": {k: getattr(spec, k) for k in ("name", "revision", "tokenizer_hash", "template_hash")},
        "settings": dataclasses.asdict(settings),
        "counts": counts,
        "special_ids": special,
        "draft_vocab_coverage": writer.coverage(special, spec.tokenizer_size),
        "files": {p.name: file_sha256(p) for p in sorted(folder.iterdir()) if p.is_file() and p.name in writer.names},
    }
    write_json(folder / "manifest.json", manifest)
    forget(folder)
    return manifest


def _chosen(settings: DataSettings, writer: RowWriter) -> Iterator[tuple[Row, str, str]]:
    """(row, key, split) of the rows that take part, in file order; the others are written to the rejects.

    Three passes over the source: the first proves that all of it can be read, before any work starts, and plans the
    split; the second knows what is held out; only the third works on rows, and never holds more than one.
    """
    unique = split.user_key if settings.regenerate.enabled else split.whole_key
    plan = split.Plan(settings.heldout_share, settings.limit)
    trial = Tally(writer.tally.source)
    for sources, given in ((settings.heldout_source, True), (settings.source, False)):
        for row in _read(settings, sources):
            if isinstance(row, Bad):
                trial.drop(row)
            else:
                trial.read += 1
                plan.add(unique(row), split.user_key(row), row.route, given)
    trial.check_share(settings.min_kept_share)
    plan.decide()
    writer.limited = plan.left_out
    held = _protected(settings, plan, unique)
    for row in _read(settings, [*settings.source, *settings.heldout_source]):
        if isinstance(row, Bad):
            writer.drop(row)
        elif not plan.meet(name := unique(row)):
            writer.drop(Bad(row.file, row.line, "exact_repeat", f"id {row.id}"))
        elif (side := plan.side(name)) is not None:
            leak = held.find(row) if side == "train" else None
            if leak is not None:
                writer.drop(Bad(row.file, row.line, leak[0], f"the user text of {leak[1]}"))
            else:
                yield row, split.user_key(row), side


def _read(settings: DataSettings, sources: Iterable[str]) -> Iterator[Row | Bad]:
    for source in sources:
        yield from read(source, settings.block_bytes, settings.hub_split, settings.hub_config, settings.columns)


def _protected(settings: DataSettings, plan: split.Plan, unique: Callable[[Row], str]) -> Overlap:
    """Everything that training must not see: the rows held out and the evaluation sets (under our own field names)."""
    held = Overlap()
    for row in _read(settings, [*settings.source, *settings.heldout_source]) if plan.holds_out else ():
        if isinstance(row, Row) and plan.side(unique(row)) == "heldout":
            held.add(row)
    for source in settings.evaluation_sets:
        unread = 0
        for row in read(source, settings.block_bytes):
            if isinstance(row, Row):
                held.add(row)
            else:
                unread += 1
        if unread:
            print(f"data: {unread} rows of evaluation set {source} cannot be read or protected", file=sys.stderr)
    return held


def _as_given(
    chat: ChatFormat, settings: DataSettings, rows: Iterable[tuple[Row, str, str]], writer: RowWriter
) -> None:
    for row, key, side in rows:
        try:
            encoded = encode_row(chat, row, settings.max_length, settings.last_turn_only)
            writer.keep(encoded, row.id, key, row.route, side, row.where)
        except RowError as error:
            writer.drop(Bad(row.file, row.line, error.reason, error.detail))


def _answered(
    target: Target,
    chat: ChatFormat,
    settings: DataSettings,
    rows: Iterable[tuple[Row, str, str]],
    writer: RowWriter,
    folder: Path,
) -> None:
    limits = Limits(target.spec.max_position_embeddings, settings.max_length)
    prompts: list[Prompt] = []
    for row, key, side in rows:
        try:
            prompts.append(to_prompt(chat, row, key, side, limits))
        except RowError as error:
            writer.drop(Bad(row.file, row.line, error.reason, error.detail))
    writer.tally.check_share(settings.min_kept_share, waiting=len(prompts))
    prompts = with_samples(prompts, settings.regenerate.samples)
    made_by = Answers(target, chat, settings.regenerate, folder)
    given = answers.load_given(Path(settings.answers).expanduser(), made_by, prompts) if settings.answers else {}
    if given or settings.answers:
        print(f"data: {len(given)} of {len(prompts)} prompts are answered in {settings.answers}", file=sys.stderr)
    if settings.answers_missing == "refuse" and len(given) < len(prompts):
        raise ValueError(
            f"data.answers={settings.answers} lacks {len(prompts) - len(given)} of {len(prompts)} prompts, and "
            "data.answers_missing=refuse"
        )
    made = made_by.make(prompts, given)
    writer.names.add(made.name)
    with made.open(encoding="utf-8") as stream:
        for prompt, line in zip(prompts, stream, strict=True):
            _keep_answer(prompt, json.loads(line), settings, writer)


def _keep_answer(prompt: Prompt, answer: dict[str, Any], settings: DataSettings, writer: RowWriter) -> None:
    kept = False
    first = prompt.sample == 0  # a conversation is counted as read with its first sample
    found = list(answers.training_rows(answer))
    for name, ids, spans in [(n, i, s[-1:]) for n, i, s in found[-1:]] if settings.last_turn_only else found:
        with contextlib.suppress(RowError):  # a later turn past max_length; its conversation is kept by its first
            encoded = truncate(Encoded(ids, spans), settings.max_length)
            writer.keep(encoded, name, prompt.key, prompt.row.route, prompt.split, prompt.row.where, first and not kept)
            kept = True
    if answer.get("retokenised"):
        writer.retokenised += 1
    if not kept:
        reason = "no_supervised_tokens_after_truncation" if found else "no_answer"
        writer.drop(Bad(prompt.row.file, prompt.row.line, reason, f"sample {prompt.sample}" * (not first)), first)
