"""A loopback OpenAI-compatible server for tests: deterministic answers, and faults on demand."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FAULTS = ("500", "429", "hang", "cut_json", "cut_connection", "no_choices")


class ChatServer(ThreadingHTTPServer):
    """Echoes the last user message with the number of messages before it.

    `faults` are used up one per request, in order; `always` names a fault for the requests whose last message holds
    `poison`. `exact` gives token ids of `tokenizer` and log probabilities, as vLLM does.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self, chat: Any = None, exact: bool = False, refuses_extras: bool = False, hang_s: float = 1.5
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.chat, self.exact, self.refuses_extras, self.hang_s = chat, exact, refuses_extras, hang_s
        self.faults: list[str] = []
        self.poison, self.always = "\0", "500"
        self.delay_s = 0.0
        self.asked: list[dict[str, Any]] = []
        self.keys: Counter[str | None] = Counter()
        self.prompt_ids: list[int] | None = None
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def reply(self, request: dict[str, Any]) -> dict[str, Any]:
        messages = request["messages"]
        text = f"{messages[-1]['content']} after {len(messages)} at {request['temperature']} seed {request['seed']}"
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop",
        }
        body: dict[str, Any] = {"choices": [choice]}
        if self.exact:
            ids = self.chat.encode([text])[0] + sorted(self.chat.end_ids)
            choice["token_ids"] = ids
            choice["logprobs"] = {"content": [{"token": "", "logprob": -0.5} for _ in ids]}
            body["prompt_token_ids"] = self.prompt_ids or self.chat.encode([self.chat.render(messages, prompt=True)])[0]
        return body


class _Handler(BaseHTTPRequestHandler):
    server: ChatServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        time.sleep(server.delay_s)
        with server.lock:
            server.asked.append({"path": self.path, **request})
            server.keys[self.headers.get("Authorization")] += 1
            poisoned = server.poison in request["messages"][-1]["content"]
            fault = server.always if poisoned else server.faults.pop(0) if server.faults else None
            body = json.dumps(server.reply(request)).encode()
        if server.refuses_extras and "return_token_ids" in request:
            self._send(400, b'{"error": "unknown field return_token_ids"}')
        elif fault in ("500", "429", "404"):
            self._send(int(fault), b'{"error": "not now"}')
        elif fault == "hang":
            time.sleep(server.hang_s)
            self.close_connection = True
        elif fault == "cut_json":
            self._send(200, body[: len(body) // 2])
        elif fault == "cut_connection":
            self._send(200, body[: len(body) // 2], length=len(body))
            self.close_connection = True
        elif fault == "no_choices":
            self._send(200, b'{"choices": []}')
        else:
            self._send(200, body)

    def _send(self, status: int, body: bytes, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Quiet."""


@contextmanager
def serving(server: ChatServer) -> Iterator[ChatServer]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
