"""One message of any common chat format to the form that chat templates expect."""

import json
from typing import Any

Message = dict[str, Any]
SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}
KEPT_KEYS = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking")


class Refused(Exception):
    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


def to_message(value: Any, index: int) -> Message:
    if isinstance(value, str):  # an element of `turns`
        return {"role": "user", "content": value}
    if not isinstance(value, dict):
        raise Refused("malformed_messages", f"message {index} is a {type(value).__name__}, not an object")
    role = value.get("role")
    if role is None and "from" in value:
        role = SHAREGPT_ROLES.get(str(value["from"]).lower())
        if role is None:
            raise Refused("unknown_role", f"message {index} is from {value['from']!r}")
    if not isinstance(role, str) or not role:
        raise Refused("malformed_messages", f"message {index} has no role")
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
            raise Refused("unsupported_content_part", f"message {index} has a part of type {kind!r}; only text is read")
        texts.append(text)
    return "".join(texts)


def _as_list(value: Any, name: str, index: int) -> list[Any]:
    if not isinstance(value, list):
        raise Refused("malformed_messages", f"{name} of message {index} is a {type(value).__name__}")
    return value


def _tool_call(call: Any, index: int) -> dict[str, Any]:
    """A tool call whose arguments are an object: templates dump them, so a JSON string would be encoded twice."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused("malformed_tool_call", f"a tool call of message {index} names no function")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except json.JSONDecodeError as error:
            raise Refused("tool_arguments_not_json", f"message {index}: {error}") from error
    if not isinstance(arguments, dict):
        raise Refused("tool_arguments_not_json", f"message {index}: tool arguments are no JSON object")
    kept = {k: v for k, v in call.items() if k in ("id", "type") and v is not None}
    return {**kept, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def to_tools(tools: Any) -> list[Any] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except json.JSONDecodeError as error:
            raise Refused("malformed_tools", str(error)) from error
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
        raise Refused("malformed_tools", "field 'tools' is not a list of objects")
    return tools
