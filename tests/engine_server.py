"""A loopback server that answers as vLLM or SGLang do, from a file of answers: stands in for the engine in tests.

    python tests/engine_server.py answers.json -m vllm.entrypoints.openai.api_server ... --port 8000

answers.json: {"kind": "vllm" | "sglang", "k", "detailed", "answers": [[prompt ids, output ids, drafts accepted by each
round]]}. As in the engines every round drafts k tokens, and what was accepted past the end of an answer counts. With
`detailed` false vLLM tells nothing of a request, and its counters come a moment late.
"""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PREFIX = "vllm:spec_decode_num_"


class EngineServer(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, facts: dict[str, Any], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.kind, self.k, self.detailed = facts["kind"], facts["k"], facts.get("detailed", True)
        self.answers = {tuple(ids): (output, accepted) for ids, output, accepted in facts["answers"]}
        self.rounds: list[int] = []  # drafts accepted by every round so far
        self.late: list[int] = []  # not in the counters yet
        self.asked: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def decode(self, ids: list[int], budget: int, stops: list[int]) -> tuple[list[int], str, list[int]]:
        """(output ids, why it ended, drafts accepted by each round)."""
        # whatever else is asked (a warm-up) is answered with one token, which needs no round
        output, accepted = self.answers.get(tuple(ids), ([2], []))
        kept = output[:budget]
        ends = [i for i, token in enumerate(kept) if token in stops]
        kept = kept[: ends[0] + 1] if ends else kept
        emitted = 1
        rounds: list[int] = []
        while emitted < len(kept):
            rounds.append(accepted[len(rounds)] if self.k else 0)
            emitted += rounds[-1] + 1
        return kept, "stop" if ends else "length", rounds

    def completion(self, asked: dict[str, Any]) -> dict[str, Any]:
        output, stop, rounds = self.decode(asked["prompt"], asked["max_tokens"], asked["stop_token_ids"])
        choice = {"token_ids": output, "prompt_token_ids": asked["prompt"], "finish_reason": stop}
        metrics: dict[str, Any] = {"time_to_first_token_ms": 20.0, "generation_time_ms": 10.0 * len(output)}
        if self.k:
            told = {"per_step_accepted": rounds, "per_step_drafted": [self.k] * len(rounds)}
            self.rounds += self.late
            self.late = []
            if self.detailed:
                self.rounds += rounds
                metrics["speculative_decoding"] = told if rounds else {}
            else:
                self.late = rounds
        return {"choices": [choice], "metrics": metrics if self.detailed else None}

    def metrics(self) -> str:
        held, self.rounds, self.late = self.rounds, self.rounds + self.late, []
        labels = 'engine="0",model_name="target"'
        lines = [f"{PREFIX}drafts_total{{{labels}}} {len(held)}.0"]
        lines += [f"{PREFIX}draft_tokens_total{{{labels}}} {self.k * len(held)}.0"]
        for i in range(self.k):
            count = sum(a > i for a in held)
            lines.append(f'{PREFIX}accepted_tokens_per_pos_total{{{labels},position="{i}"}} {count}.0')
        return "# TYPE of each\n" + "\n".join(lines) + "\n"

    def generated(self, asked: dict[str, Any]) -> dict[str, Any]:
        sampling = asked["sampling_params"]
        output, stop, rounds = self.decode(asked["input_ids"], sampling["max_new_tokens"], sampling["stop_token_ids"])
        told: dict[str, Any] = {"finish_reason": {"type": stop}, "spec_verify_ct": len(rounds)}
        if self.k:
            told["spec_num_proposed_drafts"] = self.k * len(rounds)
            told["spec_correct_drafts_histogram"] = [sum(a == i for a in rounds) for i in range(self.k + 1)]
        return {"output_ids": output, "meta_info": told}


class _Handler(BaseHTTPRequestHandler):
    server: EngineServer

    def do_GET(self) -> None:
        if self.path == "/metrics":
            return self._send(200, self.server.metrics().encode())
        known = {
            "/health": {},
            "/version": {"version": "0.0.test"},
            "/server_info": {"version": "0.0.test"},
            "/v1/models": {"data": [{"id": "target"}]},
        }
        self._send(200 if self.path in known else 404, json.dumps(known.get(self.path)).encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        reply = self.server.completion if self.path == "/v1/completions" else self.server.generated
        self._send(200, json.dumps(reply(asked)).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


def running(facts: dict[str, Any]) -> EngineServer:
    server = EngineServer(facts)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


if __name__ == "__main__":
    facts = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(f"{sys.argv[1]}.called").write_text(json.dumps(sys.argv[2:]), encoding="utf-8")
    if "--speculative-config" not in sys.argv:
        facts["k"] = 0
    if facts.get("dies"):
        sys.exit("ModuleNotFoundError: No module named 'vllm'")
    EngineServer(facts, int(sys.argv[sys.argv.index("--port") + 1])).serve_forever()
