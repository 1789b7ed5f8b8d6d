"""Records of any common chat format to `Row`s, one form for everything after.

    {"messages": [{"role", "content"}...]}           OpenAI style, tool calls and tools included; served request logs
    {"conversations": [{"from", "value"}...]}        ShareGPT
    {"turns": ["...", "..."]}                        user turns only; the target answers between them
    {"prompt": "..."}, {"prompt", "completion"}      one turn
    {"text": "..."}                                  already rendered by a chat template

Every record that is not a row comes out as `Bad` with its file, physical line and reason: rows read = rows + Bad.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.records import BLOCK_BYTES, SUFFIXES, Bad, DataError, records, without_nulls

Message = dict[str, Any]
SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}
KEPT_KEYS = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Row:
    """One conversation. `messages` is empty exactly when the record holds none; `text` replaces it when rendered."""

    file: str
    line: int
    id: str
    route: str
    messages: list[Message] = field(default_factory=list)
    tools: list[Any] | None = None
    text: str | None = None
    turn_by_turn: bool = False  # from `turns`: an answer is wanted after every user message, none is given

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"


class _Refused(Exception):
    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


def read(
    source: str | Path, block_bytes: int = BLOCK_BYTES, hub_split: str = "train", hub_config: str | None = None
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
            yield from _rows(str(file), file.name, records(file, block_bytes))
    elif path.exists() or path.name.endswith(SUFFIXES):
        yield from _rows(str(path), path.name, records(path, block_bytes))
    else:
        yield from _rows(str(source), str(source), _hub(str(source), hub_split, hub_config))


def _hub(name: str, split: str, config: str | None) -> Iterator[tuple[int, Any]]:
    import datasets

    try:
        stream = datasets.load_dataset(name, config, split=split, streaming=True)
    except Exception as error:  # the library raises a dozen types for a missing name, split or connection
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"source {name!r} is neither a file nor a Hub dataset that could be read: {reason}") from error
    for number, value in enumerate(stream, start=1):
        yield number, without_nulls(value)


def _rows(file: str, label: str, source: Iterable[tuple[int, Any] | Bad]) -> Iterator[Row | Bad]:
    empty = True
    for record in source:
        empty = False
        if isinstance(record, Bad):
            yield record
            continue
        line, value = record
        try:
            yield to_row(file, label, line, value)
        except _Refused as refused:
            yield Bad(file, line, refused.reason, refused.detail)
    if empty:
        raise DataError("empty_file", f"{file}: empty file: it holds no record")


def to_row(file: str, label: str, line: int, value: Any) -> Row:
    """One record to a Row; raises `_Refused` with the reason."""
    if not isinstance(value, dict):
        raise _Refused("not_an_object", f"the record is a {type(value).__name__}, not a JSON object")
    messages, text = _conversation(value)
    if messages and isinstance(system := value.get("system"), str) and system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    given = value.get("id")
    return Row(
        file=file,
        line=line,
        id=f"{label}:{line}" if given is None or isinstance(given, bool | dict | list) else str(given),
        route=str(value.get("route") or value.get("category") or "default"),
        messages=messages,
        tools=_tools(value.get("tools")),
        text=text,
        turn_by_turn=_field(value) == "turns",
    )


def _field(value: dict[str, Any]) -> str | None:
    """The field that holds the conversation: the first that is there and not null."""
    names = ("messages", "conversations", "conversation", "turns", "prompt", "text")
    return next((name for name in names if value.get(name) is not None), None)


def _conversation(value: dict[str, Any]) -> tuple[list[Message], str | None]:
    if name := _field(value):
        found = value[name]
        if name == "text" or (name == "prompt" and isinstance(found, str)):
            if not isinstance(found, str):
                raise _Refused("malformed_text", f"field {name!r} is not a string")
            if name == "text":
                return [], found
            return [{"role": "user", "content": found}, *_completion(value)], None
        if not isinstance(found, list):
            raise _Refused("malformed_messages", f"field {name!r} is a {type(found).__name__}, not a list")
        if name == "turns" and not all(isinstance(t, str) for t in found):
            raise _Refused("malformed_turns", "every element of 'turns' must be a string")
        return [_message(m, i) for i, m in enumerate(found)] + (_completion(value) if name == "prompt" else []), None
    raise _Refused("unknown_row_format", f"none of messages, conversations, turns, prompt, text among {sorted(value)}")


def _completion(value: dict[str, Any]) -> list[Message]:
    for name in ("completion", "response"):
        if isinstance(found := value.get(name), str):
            return [{"role": "assistant", "content": found}]
        if isinstance(found, list):
            return [_message(m, i) for i, m in enumerate(found)]
    return []


def _message(value: Any, index: int) -> Message:
    if isinstance(value, str):  # an element of `turns`
        return {"role": "user", "content": value}
    if not isinstance(value, dict):
        raise _Refused("malformed_messages", f"message {index} is a {type(value).__name__}, not an object")
    role = value.get("role")
    if role is None and "from" in value:
        role = SHAREGPT_ROLES.get(str(value["from"]).lower())
        if role is None:
            raise _Refused("unknown_role", f"message {index} is from {value['from']!r}")
    if not isinstance(role, str) or not role:
        raise _Refused("malformed_messages", f"message {index} has no role")
    content = value["content"] if "content" in value else value.get("value")
    message: Message = {"role": role, "content": _content(content, index)}
    message |= {k: value[k] for k in KEPT_KEYS if value.get(k) is not None}
    if calls := value.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call, index) for call in _as_list(calls, "tool_calls", index)]
    return message


def _content(content: Any, index: int) -> str:
    """String as is, null as nothing, text parts joined in order."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in _as_list(content, "content", index):
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise _Refused(
                "unsupported_content_part", f"message {index} has a part of type {kind!r}; only text is read"
            )
        texts.append(text)
    return "".join(texts)


def _as_list(value: Any, name: str, index: int) -> list[Any]:
    if not isinstance(value, list):
        raise _Refused("malformed_messages", f"{name} of message {index} is a {type(value).__name__}")
    return value


def _tool_call(call: Any, index: int) -> dict[str, Any]:
    """A tool call whose arguments are an object: templates dump them, so a JSON string would be encoded twice."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _Refused("malformed_tool_call", f"a tool call of message {index} names no function")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except json.JSONDecodeError as error:
            raise _Refused("tool_arguments_not_json", f"message {index}: {error}") from error
    if not isinstance(arguments, dict):
        raise _Refused("tool_arguments_not_json", f"message {index}: tool arguments are no JSON object")
    kept = {k: v for k, v in call.items() if k in ("id", "type") and v is not None}
    return {**kept, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tools(tools: Any) -> list[Any] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except json.JSONDecodeError as error:
            raise _Refused("malformed_tools", str(error)) from error
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
        raise _Refused("malformed_tools", "field 'tools' is not a list of objects")
    return tools
