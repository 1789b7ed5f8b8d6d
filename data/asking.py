"""How the target is asked: settings of the sampling, the turns of a conversation it can answer alone, samples of each.

[system, u1, a1, u2]  ->  steps [[system, u1], [u2]]     answers the target's own, turn by turn
"""

import dataclasses
from dataclasses import dataclass
from urllib.parse import urlsplit

from data.chat import RowError, has_content, prompt_ids
from data.messages import Message
from data.prompts import Row
from data.template import ChatFormat

# Settings that change how fast answers come, not what they are: no part of a data folder's fingerprint.
TRANSPORT = ("server_key", "concurrency", "timeout_s", "retries", "wait_s")


@dataclass
class RegenerateSettings:
    """How the target answers. `temperature` 0 is greedy. Asked through `server`, the target answers there."""

    enabled: bool = True
    temperature: float = 0.7
    top_p: float = 0.95
    seed: int = 0
    max_new_tokens: int = 256
    batch_size: int = 32
    samples: int = 1  # answers per training prompt; a held-out prompt always gets one, sample 0
    temperatures: list[float] | None = None  # sample i is drawn at temperatures[i % n]; null: all at `temperature`
    server: str | None = None  # base URL of an OpenAI-compatible server, for example http://localhost:8000
    server_model: str | None = None  # its name of the target; null: target.id
    server_key: str = "DRAFTHEAD_SERVER_KEY"  # environment variable that holds the API key, where one is needed
    concurrency: int = 8  # conversations under way at once
    timeout_s: float = 120.0  # longest silence of the server before a request is given up
    retries: int = 5  # further tries after a failed request
    wait_s: float = 1.0  # pause before the first of them; doubles each time, up to a minute

    @property
    def in_process(self) -> bool:
        """Whether the target is run here: its weights are needed."""
        return self.enabled and self.server is None

    def temperature_of(self, sample: int) -> float:
        """The temperature that sample number `sample` of a prompt is drawn at."""
        return self.temperatures[sample % len(self.temperatures)] if self.temperatures else self.temperature

    def check(self) -> None:
        """Refuse values that cannot be sampled or asked with."""
        for name, good in (
            ("temperature", self.temperature >= 0),
            ("top_p", 0 < self.top_p <= 1),
            ("max_new_tokens", self.max_new_tokens >= 1),
            ("batch_size", self.batch_size >= 1),
            ("samples", self.samples >= 1),
            ("temperatures", self.temperatures is None or all(t >= 0 for t in self.temperatures)),
            ("concurrency", self.concurrency >= 1),
            ("timeout_s", self.timeout_s > 0),
            ("retries", self.retries >= 0),
            ("wait_s", self.wait_s >= 0),
        ):
            if not good:
                raise ValueError(f"data.regenerate.{name}={getattr(self, name)} is out of range")
        if self.temperatures is not None and not 1 <= len(self.temperatures) <= self.samples:
            raise ValueError(
                f"data.regenerate.temperatures={self.temperatures} with data.regenerate.samples={self.samples}: "
                "give from one temperature to one per sample"
            )
        if sum(self.temperature_of(n) == 0 for n in range(self.samples)) > 1:
            raise ValueError(
                f"data.regenerate.samples={self.samples}: several of them are greedy and would be equal; give "
                "data.regenerate.temperature above 0, or data.regenerate.temperatures with at most one 0"
            )
        if self.server is not None:
            _check_url(self.server)


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query or parts.fragment:  # not shown: it may hold a key
        raise ValueError(
            "data.regenerate.server: give a plain URL; an API key comes from the environment variable that "
            "data.regenerate.server_key names"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"data.regenerate.server={url}: give a URL like http://localhost:8000")


@dataclass(frozen=True)
class Prompt:
    """What is to be answered: `steps[i]` are the messages that come before answer i; `first_ids` the first prompt."""

    row: Row
    key: str
    split: str
    steps: list[list[Message]]
    first_ids: list[int]
    sample: int = 0

    @property
    def name(self) -> str:
        """Tells answers apart: the key of the conversation, with the number of any sample after the first."""
        return answer_name(self.key, self.sample)


def answer_name(key: str, sample: int) -> str:
    return key if sample == 0 else f"{key}/{sample}"


def with_samples(prompts: list[Prompt], samples: int) -> list[Prompt]:
    """Each training prompt `samples` times, side by side; held-out prompts once."""
    return [
        dataclasses.replace(prompt, sample=n)
        for prompt in prompts
        for n in range(samples if prompt.split == "train" else 1)
    ]


@dataclass(frozen=True)
class Limits:
    """Most prompt + new tokens the target can hold, and the length that training rows are cut to."""

    context: int
    max_length: int


def to_prompt(chat: ChatFormat, row: Row, key: str, split: str, limits: Limits) -> Prompt:
    """The turns of `row` that the target can answer on its own. Raises RowError when there is none."""
    if row.text is not None or row.ids is not None:
        raise RowError("rendered_text_has_no_turns", "pre-rendered text or ids cannot be answered anew; use messages")
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


def next_prompt(chat: ChatFormat, history: list[Message], prompt: Prompt) -> list[int] | None:
    """Ids that ask for the next answer; None where the template refuses the target's own: the dialog ends before it."""
    try:
        return prompt_ids(chat, history, prompt.row.tools)
    except RowError:
        return None
