"""The target answers behind an OpenAI-compatible server (vLLM, SGLang, llama.cpp, a gateway): chat completions.

Where the server gives token ids (vLLM: `return_token_ids`), they are kept as they were sampled, with their log
probabilities; the prompt ids it reports must be ours, or its template, tokenizer or date is not the target's. Elsewhere
the answer's text is tokenised here and the turn is marked `retokenised`.
"""

import hashlib
import os
import random
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any
from urllib.parse import urlsplit

import httpx

from data.asking import Prompt, RegenerateSettings, next_prompt
from data.messages import Message
from data.template import ChatFormat
from heads.target import Target

EXTRAS = {"return_token_ids": True, "logprobs": True}  # left out for a server that refuses to know them
AGAIN = (408, 409, 425, 429)  # and every 5xx: worth another try
LONGEST_WAIT_S = 60.0


class ServerError(ValueError):
    """A prompt that the server did not answer; names the URL, the prompt, and what went wrong."""


class _Again(Exception):
    def __init__(self, problem: str, wait_s: float = 0.0) -> None:
        super().__init__(problem)
        self.wait_s = wait_s


class Server:
    """Asks one server for the answers of many conversations at once."""

    def __init__(self, target: Target, chat: ChatFormat, settings: RegenerateSettings) -> None:
        self.target, self.chat, self.settings = target, chat, settings
        base = str(settings.server).rstrip("/")
        self.url = f"{base if urlsplit(base).path else base + '/v1'}/chat/completions"
        key = os.environ.get(settings.server_key)
        self.client = httpx.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(settings.timeout_s, pool=None),
            limits=httpx.Limits(max_connections=settings.concurrency),
        )
        ends = sorted(chat.end_ids & target.eos_ids) or sorted(target.eos_ids)
        self.end_id = ends[0] if ends else None
        self.stopping, self.tokenising = threading.Event(), threading.Lock()
        self.extras, self.other_lengths = dict(EXTRAS), 0

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()
        if self.other_lengths:
            print(
                f"regenerate: for {self.other_lengths} prompts {self.url} counted another number of tokens than this "
                "target's template and tokenizer give: is it the same model?",
                file=sys.stderr,
            )

    def answers(self, prompts: list[Prompt]) -> Iterator[tuple[Prompt, list[dict[str, Any]]]]:
        """(prompt, turns) as they come in. The first failure ends it with a ServerError once those under way are in."""
        failed: BaseException | None = None
        with ThreadPoolExecutor(self.settings.concurrency) as pool:
            asked = {pool.submit(self._conversation, prompt): prompt for prompt in prompts}
            try:
                for future in as_completed(asked):
                    if future.cancelled():
                        continue
                    if (error := future.exception()) is None:
                        yield asked[future], future.result()
                    elif failed is None:
                        failed = error
                        self._stop(asked)
            finally:
                self._stop(asked)
        if failed is not None:
            raise failed

    def _stop(self, asked: dict[Any, Prompt]) -> None:
        self.stopping.set()
        for future in asked:
            future.cancel()

    def _conversation(self, prompt: Prompt) -> list[dict[str, Any]]:
        history: list[Message] = []
        turns: list[dict[str, Any]] = []
        limit = self.target.spec.max_position_embeddings
        for number, step in enumerate(prompt.steps):
            history += step
            with self.tokenising:
                ids = prompt.first_ids if number == 0 else next_prompt(self.chat, history, prompt)
            if ids is None or len(ids) >= limit:
                break
            room = min(self.settings.max_new_tokens, limit - len(ids))
            body = self._ask(prompt, self._payload(prompt, number, history, room))
            with self.tokenising:
                turn = self._turn(prompt, ids, body)
                if turn is None:
                    break
                turns.append(turn)
                own = turn["output_ids"]
                ended = own[-1] in self.target.eos_ids
                text = self.chat.tokenizer.decode(own[:-1] if ended else own)
                history.append({"role": "assistant", "content": text})
        return turns

    def _payload(self, prompt: Prompt, number: int, messages: list[Message], room: int) -> dict[str, Any]:
        digest = hashlib.sha256(f"{self.settings.seed}:{prompt.name}:{number}".encode()).digest()
        payload = {
            "model": self.settings.server_model or self.target.spec.name,
            "messages": messages,
            "temperature": self.settings.temperature_of(prompt.sample),
            "top_p": self.settings.top_p,
            "max_tokens": room,
            "seed": int.from_bytes(digest[:4], "big") >> 1,
        }
        return payload | ({"tools": prompt.row.tools} if prompt.row.tools else {})

    def _ask(self, prompt: Prompt, payload: dict[str, Any]) -> dict[str, Any]:
        """The server's answer; a failed request is tried again with growing pauses."""
        tries, problem = 0, ""
        while tries <= self.settings.retries:
            try:
                return self._post(prompt, payload)
            except _Again as again:
                tries, problem = tries + 1, str(again)
                pause = min(self.settings.wait_s * 2 ** (tries - 1) * random.uniform(0.5, 1.0), LONGEST_WAIT_S)
                if tries <= self.settings.retries and self.stopping.wait(max(pause, again.wait_s)):
                    break
        raise self._error(prompt, f"{problem}; tried {tries} times")

    def _post(self, prompt: Prompt, payload: dict[str, Any]) -> dict[str, Any]:
        extras = self.extras
        response = self._send({**payload, **extras})
        if extras and response.status_code in (400, 422):
            response = self._send(payload)
            if response.status_code == 200:
                self.extras = {}
        status, said = response.status_code, " ".join(response.text[:200].split())
        if status in AGAIN or status >= 500:
            raise _Again(f"HTTP {status} {said}", _retry_after(response))
        if status != 200:
            raise self._error(prompt, f"HTTP {status} {said}")
        try:
            body = response.json()
        except ValueError as error:
            raise _Again(f"the answer is not JSON, perhaps cut: {said!r}") from error
        choices = body.get("choices") if isinstance(body, dict) else None
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise _Again(f"the answer holds no choice: {said!r}")
        return dict(body)

    def _send(self, payload: dict[str, Any]) -> httpx.Response:
        try:
            return self.client.post(self.url, json=payload)
        except httpx.HTTPError as error:
            raise _Again(f"{type(error).__name__} {error}".rstrip()) from error

    def _turn(self, prompt: Prompt, ids: list[int], body: dict[str, Any]) -> dict[str, Any] | None:
        """One answered turn; None where ids of what the target said can neither be had nor made."""
        choice = body["choices"][0]
        message, usage = choice.get("message") or {}, body.get("usage") or {}
        if isinstance(read := body.get("prompt_token_ids"), list):
            if read != ids:
                raise self._error(
                    prompt,
                    f"it reads {len(read)} prompt ids that are not the target's {len(ids)}: its model, chat "
                    "template, tokenizer or date differs",
                )
        elif usage.get("prompt_tokens", len(ids)) != len(ids):
            self.other_lengths += 1
        output = choice.get("token_ids")
        exact = isinstance(output, list) and bool(output) and all(isinstance(i, int) for i in output)
        if not exact:
            text = message.get("content")
            if not isinstance(text, str) or any(
                message.get(k) for k in ("tool_calls", "reasoning_content", "reasoning")
            ):
                return None
            output = self.chat.encode([text])[0] if text else []
            if self.target.eos_ids & set(output):
                return None  # an end of turn spelt out in the text: where the answer ended cannot be told
        if any(not 0 <= i < self.target.spec.vocab_size for i in output):
            raise self._error(prompt, "it gives token ids outside the target's vocabulary: another model?")
        stopped = choice.get("finish_reason") in ("stop", "tool_calls")
        if stopped and self.end_id is not None and (not output or output[-1] not in self.target.eos_ids):
            output = [*output, self.end_id]  # the end of turn is part of the answer, though servers tend to cut it
        if not output:
            return None
        turn = {"prompt_ids": ids, "output_ids": output, "finish": "stop" if stopped else "length"}
        logprobs = _logprobs(choice)
        if exact and logprobs is not None and len(logprobs) in (len(output), len(output) - 1):
            turn["logprobs"] = logprobs + [None] * (len(output) - len(logprobs))
        return turn if exact else {**turn, "retokenised": True}

    def _error(self, prompt: Prompt, problem: str) -> ServerError:
        return ServerError(
            f"data.regenerate.server: {self.url} did not answer prompt {prompt.row.id} ({prompt.row.where}): "
            f"{problem}; answers so far are kept, the same command goes on from them"
        )


def _retry_after(response: httpx.Response) -> float:
    """Seconds the server asks to be left alone, at most a minute; 0 where it does not say."""
    try:
        return min(max(float(response.headers.get("Retry-After", 0)), 0.0), LONGEST_WAIT_S)
    except ValueError:  # a date: our own pause will do
        return 0.0


def _logprobs(choice: dict[str, Any]) -> list[float | None] | None:
    entries = (choice.get("logprobs") or {}).get("content")
    return [entry["logprob"] for entry in entries] if isinstance(entries, list) else None
