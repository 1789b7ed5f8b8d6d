"""Records of any common chat format to `Row`s, one form for everything after.

    {"messages": [{"role", "content"}...]}           OpenAI style, tool calls and tools included; request bodies
    {"request": {"messages"}, "response": {...}}     logs of served requests, the answer where there is one
    {"conversations": [{"from", "value"}...]}        ShareGPT
    {"turns": ["...", "..."]}                        user turns only; the target answers between them
    {"prompt": "..."}, {"prompt", "completion"}      one turn
    {"text": "..."}                                  already rendered by a chat template
    {"input_ids": [...], "loss_mask" or "labels"}    already tokenised and masked
    {"prompt_ids": [...], "output_ids": [...]}       the same, as a server logged it

Every record that is not a row comes out as `Bad` with its file, physical line and reason: rows read = rows + Bad.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.messages import Message, Refused, to_message, to_tools
from data.pretokenised import ID_FIELDS, ids_and_mask
from data.records import BLOCK_BYTES, SUFFIXES, Bad, DataError, records, without_nulls

FIELDS = ("messages", "conversations", "conversation", "turns", "prompt", "text", *ID_FIELDS)


@dataclass
class Columns:
    """What the fields are called in this data, where not as above: `data.columns.prompt=question`."""

    messages: str | None = None
    prompt: str | None = None
    completion: str | None = None
    text: str | None = None
    tools: str | None = None
    id: str | None = None
    route: str | None = None

    def rename(self, value: dict[str, Any]) -> dict[str, Any]:
        """The record under our names. A named conversation field is the only one: all others are put aside."""
        named = {ours: theirs for ours, theirs in dataclasses.asdict(self).items() if theirs is not None}
        if missing := [theirs for ours, theirs in named.items() if theirs not in value and ours != "tools"]:
            raise Refused("missing_column", f"no column {missing[0]!r} among {sorted(value)}")
        aside = {*FIELDS, "request", "body"} if {"messages", "prompt", "text"} & set(named) else set()
        rest = {name: found for name, found in value.items() if name not in aside}
        return {**rest, **{ours: value.get(theirs) for ours, theirs in named.items()}}


@dataclass(frozen=True)
class Row:
    """One conversation. `messages` is empty when the record holds none, or `text` or `ids` replace them."""

    file: str
    line: int
    id: str
    route: str
    messages: list[Message] = field(default_factory=list)
    tools: list[Any] | None = None
    text: str | None = None
    ids: list[int] | None = None  # replaces `messages` where the record was tokenised already, with its `mask`
    mask: list[bool] | None = None
    turn_by_turn: bool = False  # from `turns`: an answer is wanted after every user message, none is given

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"


def read(
    source: str | Path,
    block_bytes: int = BLOCK_BYTES,
    hub_split: str = "train",
    hub_config: str | None = None,
    columns: Columns | None = None,
) -> Iterator[Row | Bad]:
    """Rows of a file, of every data file of a folder (by name), or of a Hub dataset id, streaming.

    Raises DataError("empty_file") for a source without a single record and ValueError for a missing one.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.name.endswith(SUFFIXES))
        if not files:
            raise ValueError(f"{path}: the folder holds no data file ({', '.join(SUFFIXES)})")
        for file in files:
            yield from _rows(str(file), file.name, records(file, block_bytes), columns)
    elif path.exists() or path.name.endswith(SUFFIXES):
        yield from _rows(str(path), path.name, records(path, block_bytes), columns)
    else:
        yield from _rows(str(source), str(source), _hub(str(source), hub_split, hub_config), columns)


def _hub(name: str, split: str, config: str | None) -> Iterator[tuple[int, Any]]:
    import datasets

    number = 0
    try:
        for value in datasets.load_dataset(name, config, split=split, streaming=True):
            number += 1
            yield number, without_nulls(value)
    except Exception as error:  # the library raises a dozen types for a missing name, split or connection
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        where = f" (row {number + 1})" if number else ""
        raise ValueError(
            f"source {name!r} is neither a file nor a Hub dataset that could be read{where}: {reason}"
        ) from error


def _rows(
    file: str, label: str, source: Iterable[tuple[int, Any] | Bad], columns: Columns | None = None
) -> Iterator[Row | Bad]:
    empty = True
    for record in source:
        empty = False
        if isinstance(record, Bad):
            yield record
            continue
        line, value = record
        try:
            renamed = columns.rename(value) if columns is not None and isinstance(value, dict) else value
            yield to_row(file, label, line, renamed)
        except Refused as refused:
            yield Bad(file, line, refused.reason, refused.detail)
    if empty:
        raise DataError("empty_file", f"{file}: empty file: it holds no record")


def to_row(file: str, label: str, line: int, value: Any) -> Row:
    """One record to a Row; raises Refused with the reason."""
    if not isinstance(value, dict):
        raise Refused("not_an_object", f"the record is a {type(value).__name__}, not a JSON object")
    value = _served(value)
    messages, text = _conversation(value)
    ids, mask = (None, None) if _field(value) not in ID_FIELDS else ids_and_mask(value)
    if messages and isinstance(system := value.get("system"), str) and system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    given = value.get("id")
    return Row(
        file=file,
        line=line,
        id=f"{label}:{line}" if given is None or isinstance(given, bool | dict | list) else str(given),
        route=str(value.get("route") or value.get("category") or "default"),
        messages=messages,
        tools=to_tools(value.get("tools")),
        text=text,
        ids=ids,
        mask=mask,
        turn_by_turn=_field(value) == "turns",
    )


def _served(value: dict[str, Any]) -> dict[str, Any]:
    """A logged request with its answer as one conversation; other records as they are.

    {"request" or "body": {"messages", "tools"}, "response": {"choices": [{"message"}]}}, either also as a JSON string
    or inside a `body` (batch files). An answer that is missing or failed leaves the request without one.
    """
    if _field(value) is not None:
        return value
    request = _body(value.get("request")) or _body(value.get("body"))
    if not request or not isinstance(request.get("messages"), list):
        return value
    choices = (_body(value.get("response")) or {}).get("choices")
    message = (
        choices[0].get("message") if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None
    )
    messages = [*request["messages"], *([message] if isinstance(message, dict) else [])]
    names = {"id": value.get("id", value.get("custom_id"))} | {k: value[k] for k in ("route", "category") if k in value}
    return {"messages": messages, "tools": request.get("tools"), **names}


def _body(value: Any) -> dict[str, Any] | None:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise Refused("malformed_json", f"a logged body is no JSON: {error}") from error
    if isinstance(value, dict) and "messages" not in value and isinstance(value.get("body"), dict | str):
        return _body(value["body"])
    return value if isinstance(value, dict) else None


def _field(value: dict[str, Any]) -> str | None:
    """The field that holds the conversation: the first that is there and not null."""
    return next((name for name in FIELDS if value.get(name) is not None), None)


def _conversation(value: dict[str, Any]) -> tuple[list[Message], str | None]:
    if name := _field(value):
        found = value[name]
        if name in ID_FIELDS:
            return [], None
        if name not in ("text", "prompt") and isinstance(found, str) and found.lstrip().startswith("["):
            found = _list_in_text(name, found)  # a CSV or Parquet column
        if name == "text" or (name == "prompt" and isinstance(found, str)):
            if not isinstance(found, str):
                raise Refused("malformed_text", f"field {name!r} is not a string")
            if name == "text":
                return [], found
            return [{"role": "user", "content": found}, *_completion(value)], None
        if not isinstance(found, list):
            raise Refused("malformed_messages", f"field {name!r} is a {type(found).__name__}, not a list")
        if name == "turns" and not all(isinstance(t, str) for t in found):
            raise Refused("malformed_turns", "every element of 'turns' must be a string")
        return [to_message(m, i) for i, m in enumerate(found)] + (_completion(value) if name == "prompt" else []), None
    raise Refused("unknown_row_format", f"none of {', '.join(FIELDS)} among {sorted(value)}")


def _list_in_text(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise Refused("malformed_messages", f"field {name!r} is a string that is no JSON: {error}") from error


def _completion(value: dict[str, Any]) -> list[Message]:
    for name in ("completion", "response"):
        if isinstance(found := value.get(name), str):
            return [{"role": "assistant", "content": found}]
        if isinstance(found, list):
            return [to_message(m, i) for i, m in enumerate(found)]
    return []
