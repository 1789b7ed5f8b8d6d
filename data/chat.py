"""Conversation to token ids and the spans the assistant produced (end of turn included), verified token by token.

    <|im_start|> user \n 2 + 2 ? <|im_end|> \n <|im_start|> assistant \n 4 <|im_end|> \n
                                                                         `---------'   one span: [start, end)

The start of a turn is the end of what serving sends before it (the rendering of the messages before, with generation
prompt); its end follows from rendering with and without the turn, or from the template's own generation markers. Both
must be token boundaries: encoding the text up to there gives a prefix of the row's ids, or the row is rejected.
Control strings inside user text become control ids, as in every serving engine, but can never be supervised, because
no span is found by looking for markers. An answer that holds an end-of-turn string would be cut there at serving:
rejected. The end of turn of an empty answer is not supervised.
"""

from dataclasses import dataclass, field
from typing import Any

from data.messages import Message
from data.prompts import Row
from data.template import RENDER_ERRORS, SENTINEL, ChatFormat

Span = tuple[int, int]


class RowError(ValueError):
    """A row without usable supervision; `reason` is a stable name, `detail` a sentence."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


@dataclass
class Encoded:
    """ids [T] and supervised spans, end exclusive, ascending and disjoint."""

    ids: list[int]
    spans: list[Span]
    skipped_turns: int = 0  # answers whose prompt in this text is not what serving sends: context only, never trained
    truncated: bool = False
    texts: list[str] = field(default_factory=list)

    @property
    def supervised(self) -> int:
        return sum(b - a for a, b in self.spans)


def encode_row(chat: ChatFormat, row: Row, max_length: int | None = None, last_turn_only: bool = False) -> Encoded:
    """Ids and spans of one conversation, or of its last answer alone. Raises RowError when it cannot be used."""
    if row.ids is not None:
        encoded = encode_ids(chat, row.ids, row.mask or [])
    else:
        encoded = _encode_text(chat, row.text) if row.text is not None else _encode_messages(chat, row, last_turn_only)
    if last_turn_only:
        encoded.spans, encoded.texts = encoded.spans[-1:], encoded.texts[-1:]
    return encoded if max_length is None else truncate(encoded, max_length)


def truncate(encoded: Encoded, max_length: int) -> Encoded:
    """The first `max_length` tokens with their spans; a row of exactly that length is not truncated."""
    if len(encoded.ids) <= max_length:
        return encoded
    spans = [(a, min(b, max_length)) for a, b in encoded.spans if a < max_length]
    if not spans:
        raise RowError("no_supervised_tokens_after_truncation", f"the answer starts past max_length={max_length}")
    return Encoded(encoded.ids[:max_length], spans, encoded.skipped_turns, truncated=True)


def prompt_ids(chat: ChatFormat, messages: list[Message], tools: list[Any] | None = None) -> list[int]:
    """What serving sends for the next assistant turn. Raises RowError when the template refuses the messages."""
    try:
        return chat.encode([chat.render(messages, tools, prompt=True)])[0]
    except RENDER_ERRORS as error:
        raise RowError("template_rejected_row", str(error)) from error


def has_content(message: Message) -> bool:
    """Whether an assistant message holds more than white space. If not, it is context and not supervised at all."""
    return message["role"] == "assistant" and bool(message["content"].strip() or message.get("tool_calls"))


def encode_ids(chat: ChatFormat, ids: list[int], mask: list[bool]) -> Encoded:
    """Ids and mask made elsewhere: each run of supervised tokens is a span."""
    size = len(chat.tokenizer)
    if outside := [i for i in ids if not 0 <= i < size]:
        raise RowError("ids_outside_vocabulary", f"id {outside[0]} with a tokenizer of {size} ids")
    edges = [t for t in range(len(ids) + 1) if (t > 0 and mask[t - 1]) != (t < len(ids) and mask[t])]
    if not edges:
        raise RowError("no_supervised_tokens", "the row's own mask supervises nothing")
    return Encoded(ids, list(zip(edges[::2], edges[1::2], strict=True)))


def _encode_messages(chat: ChatFormat, row: Row, last_turn_only: bool = False) -> Encoded:
    turns = [i for i, message in enumerate(row.messages) if has_content(message)]
    if not turns:
        raise RowError("no_assistant_content", "no assistant message holds any content")
    try:
        text, marked = chat.render_marked(row.messages, row.tools) if chat.has_markers else ("", [])
        text = text or chat.render(row.messages, row.tools)
    except RENDER_ERRORS as error:
        raise RowError("template_rejected_row", str(error)) from error
    found: list[Span | None]
    if marked:
        found = _marked_spans(chat, row, text, marked)
    else:
        found = [_turn_span(chat, row, text, i) for i in turns]
    if last_turn_only:
        found = found[-1:]
    spans = [span for span in found if span is not None]
    skipped = len(found) - len(spans)
    if not spans:
        raise RowError("unstable_boundary", "no answer follows the prompt that serving would send for it")
    for a, b in spans:
        answer = text[a:b].removesuffix(chat.end_text)
        if chat.end_text and chat.end_text in answer:
            raise RowError("end_of_turn_inside_answer", f"the answer itself holds {chat.end_text!r}")
    ids, token_spans = _to_tokens(chat, text, spans)
    return Encoded(ids, token_spans, skipped, texts=[text[a:b] for a, b in spans])


def _marked_spans(chat: ChatFormat, row: Row, text: str, marked: list[Span]) -> list[Span | None]:
    """Generation markers as spans that end with the end of turn, wherever the template's author put the tag.

    A span begins where the prompt that serving sends ends, wherever the tag stands; None where serving sends no prompt
    that this text begins with: a template that rewrites history.
    """
    turns = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
    asked = [_try_render(chat, row.messages[:i], row.tools, prompt=True) for i in turns]
    starts = [len(prompt) for prompt in asked if prompt is not None and text.startswith(prompt)]
    spans: list[Span | None] = []
    earliest = 0
    for a, b in marked:
        end = chat.last_end(text[a:b])
        b = a + end if end is not None else b + chat.end_length(text[b:])
        if text[a:b].strip() != chat.end_text:  # an empty turn
            start = max((start for start in starts if earliest <= start < b), default=None)
            spans.append(None if start is None else (start, b))
        earliest = b
    return spans


def _turn_span(chat: ChatFormat, row: Row, text: str, turn: int) -> Span | None:
    """Characters of `text` that the assistant produced in message `turn`; None when serving sends another prompt.

    Raises RowError when the start is sound and the end cannot be found.
    """
    try:
        prompt = chat.render(row.messages[:turn], row.tools, prompt=True)
    except RENDER_ERRORS:
        return None  # a greeting before any user turn: serving never asks for it
    if not text.startswith(prompt):
        return None
    start = len(prompt)
    last = turn == len(row.messages) - 1
    until = text if last else _try_render(chat, row.messages[: turn + 1], row.tools)
    if until is not None and text.startswith(until) and len(until) > start:
        if chat.tail is not None and until.endswith(chat.tail) and len(until) - len(chat.tail) >= start:
            return start, len(until) - len(chat.tail) + chat.end_length(chat.tail)
        end = chat.last_end(until[start:])
        if end is not None:
            return start, start + end
    end_at = _end_by_sentinel(chat, row, text, turn, start)
    if end_at is None:
        raise RowError("unstable_boundary", f"the end of the answer in message {turn} cannot be told")
    return start, end_at


def _end_by_sentinel(chat: ChatFormat, row: Row, text: str, turn: int, start: int) -> int | None:
    """End of the turn in a template that rewrites history: what follows a sentinel in its place follows it too."""
    changed = [*row.messages]
    changed[turn] = {"role": "assistant", "content": SENTINEL}
    other = _try_render(chat, changed, row.tools)
    if other is None or other.count(SENTINEL) != 1:
        return None
    after = other[other.index(SENTINEL) + len(SENTINEL) :]
    content_end = len(text) - len(after)
    if not text.endswith(after) or content_end < start:
        return None
    return content_end + chat.end_length(after)


def _try_render(chat: ChatFormat, messages: list[Message], tools: list[Any] | None, prompt: bool = False) -> str | None:
    try:
        return chat.render(messages, tools, prompt)
    except RENDER_ERRORS:
        return None


def _to_tokens(chat: ChatFormat, text: str, spans: list[Span]) -> tuple[list[int], list[Span]]:
    """Character spans to token spans, each boundary proven by encoding the text up to it."""
    cuts = [cut for span in spans for cut in span]
    ids, *prefixes = chat.encode([text, *(text[:cut] for cut in cuts)])
    for cut, prefix in zip(cuts, prefixes, strict=True):
        if ids[: len(prefix)] != prefix:
            raise RowError("unstable_boundary", f"a token reaches across the turn boundary at character {cut}")
    counts = [len(prefix) for prefix in prefixes]
    return ids, list(zip(counts[::2], counts[1::2], strict=True))


def _encode_text(chat: ChatFormat, text: str) -> Encoded:
    """Rendered text: turns lie between the template's own header tokens and its end token (or the end of the text)."""
    ids = chat.encode([text])[0]
    spans, at = [], 0
    while at < len(ids):
        header = next((h for h in chat.header_ids if h == ids[at : at + len(h)]), None)
        if header is None:
            at += 1
            continue
        start = at + len(header)
        end = next((i + 1 for i in range(start, len(ids)) if ids[i] in chat.end_ids), len(ids))
        if end - start > 1 or (end > start and ids[start] not in chat.end_ids):
            spans.append((start, end))
        at = max(end, start)
    if not spans:
        raise RowError("no_supervised_tokens", "the text holds no assistant header of this chat template")
    return Encoded(ids, spans)
