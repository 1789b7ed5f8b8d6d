"""What a chat template does, learnt by rendering sentinels: its assistant header, its end of turn, its tail.

For ChatML, rendering user + assistant("SENTINEL") gives

    <|im_start|>user\n..<|im_end|>\n<|im_start|>assistant\nSENTINEL<|im_end|>\n
                                   `------- header ------'        `-end--'`tail ends here

Nothing is assumed about the template's language: no pattern is written down here, only special-token strings of the
tokenizer are looked for in what the template itself wrote around our sentinel.
"""

import datetime
import json
import logging
import re
from typing import Any

from jinja2.exceptions import TemplateError

SENTINEL = "QXZSENTINELZXQ"
DATE = "2025-01-01"  # the day on which templates that print the date render, so that ids are the same on every day
RENDER_ERRORS = (TemplateError, TypeError, KeyError, ValueError, AttributeError, IndexError)
CLOCK = re.compile(r"""strftime_now\(\s*(?:format\s*=\s*)?(['"])(?P<format>.*?)\1\s*\)""")
log = logging.getLogger(__name__)


def pin_date(template: str, date: str) -> str:
    """The template with the day written in: `strftime_now("%d %b %Y")` -> `"01 Jan 2025"`.

    In its text, because the renderer lets no function of ours replace its clock. Raises ValueError for another date
    than YYYY-MM-DD; warns of a call that shows no format to write out.
    """
    try:
        day = datetime.datetime.fromisoformat(date)
    except ValueError as error:
        raise ValueError(f"data.date={date!r}: give a day like {DATE}") from error
    pinned = CLOCK.sub(lambda call: json.dumps(day.strftime(call["format"])), template)
    if "strftime_now(" in pinned:
        log.warning("this chat template prints the date in a way that cannot be pinned: two days give different data")
    else:
        log.warning("this chat template prints the date: rendered as on %s (data.date)", date)
    return pinned


class ChatFormat:
    """A tokenizer with its chat template, ready to render, encode and tell where an assistant turn ends.

    Raises ValueError when there is no template, or when it cannot render one user turn.
    """

    def __init__(self, tokenizer: Any, template: str | None = None, date: str = DATE, **kwargs: Any) -> None:
        self.tokenizer, self.template = tokenizer, template or tokenizer.chat_template
        if not isinstance(self.template, str):
            raise ValueError("the tokenizer has no chat template: use an instruct model or give a template file")
        self.kwargs = dict(kwargs)
        if "strftime_now" in self.template:
            self.template = pin_date(self.template, date)
        self.has_markers = "endgeneration" in self.template
        special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self.special = sorted(dict.fromkeys(special), key=len, reverse=True)
        self.openers: set[str] = set()
        self._learn()

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None = None, prompt: bool = False) -> str:
        """The conversation as text; `prompt` adds what serving puts before the answer. Raises RENDER_ERRORS."""
        rendered = self.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=self.template,
            tokenize=False,
            add_generation_prompt=prompt,
            **self.kwargs,
        )
        return str(rendered)

    def render_marked(
        self, messages: list[dict[str, Any]], tools: list[Any] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The conversation and the character spans of the template's own generation markers."""
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, spans = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=self.template,
            return_assistant_tokens_mask=True,
            **{**self.tokenizer.special_tokens_map, **self.kwargs},
        )
        return texts[0], [(a, b) for a, b in spans[0]]

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of rendered texts: special strings become their ids, nothing (no BOS) is put on top."""
        return self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]

    def end_length(self, text: str) -> int:
        """Characters of `text` up to and including a leading end-of-turn string; 0 when it does not start with one."""
        blank = len(text) - len(text.lstrip())
        for token in self.special:
            if text.startswith(token, blank):
                return 0 if token in self.openers else blank + len(token)
        return 0

    def last_end(self, text: str) -> int | None:
        """Characters of `text` up to its last special string, when only white space follows it."""
        stripped = text.rstrip()
        return next((len(stripped) for t in self.special if stripped.endswith(t) and t not in self.openers), None)

    def _learn(self) -> None:
        user = {"role": "user", "content": SENTINEL}
        answer = {"role": "assistant", "content": SENTINEL}
        try:
            before, prompt = self.render([user]), self.render([user], prompt=True)
        except RENDER_ERRORS as error:
            raise ValueError(f"the chat template cannot render a single user turn: {error}") from error
        if self.tokenizer.bos_token:
            self.openers.add(self.tokenizer.bos_token)
        headers = [prompt[len(before) :]] if prompt.startswith(before) else []
        self.openers.update(token for token in self.special for text in headers if text.lstrip().startswith(token))
        self.tail: str | None = None
        self.emitted_special_ids = self._special_in([before, prompt])
        try:
            whole = self.render([user, answer])
        except RENDER_ERRORS:
            whole = ""
        if whole.count(SENTINEL) == 2:
            at = whole.rindex(SENTINEL)
            self.tail = whole[at + len(SENTINEL) :]
            headers += [whole[len(before) : at]] if whole.startswith(before) else []
        self.emitted_special_ids |= self._special_in([whole])
        self._learn_tokens([h for h in dict.fromkeys(headers) if h])

    def _special_in(self, texts: list[str]) -> frozenset[int]:
        special = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return frozenset(special & {i for ids in self.encode(texts) for i in ids})

    def _learn_tokens(self, headers: list[str]) -> None:
        """Header token sequences (longest first) and end ids, to find turns in text that came already rendered."""
        self.header_ids = sorted(self.encode(headers), key=len, reverse=True) if headers else []
        end = self.tail[: self.end_length(self.tail)].strip() if self.tail else ""
        self.end_text = end
        self.end_ids = frozenset(self.encode([end])[0][:1]) if end else frozenset()
