"""One prompt through a serving engine: its token ids, and its own counts of what was drafted and accepted.

vLLM says every round of a request where it was started with `--per-request-spec-decode-metrics detailed`. Otherwise its
counters are read before and after the request, which says how many rounds accepted how much, in no order. SGLang says
the same of a request by itself.

Engines draft k tokens in every round and count what the head had right even where the answer ends before it. Our own
loop drafts no more than can still be emitted and counts what was emitted. `rounds` turns theirs into ours: k = 4, five
tokens are left, rounds accept 1 and then 4 of 4

    theirs [4, 1] [4, 4]     ours [4, 1] [3, 3]: after two tokens three are left, and all three were drafts
"""

import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

DRAFTS, DRAFTED, ACCEPTED = (
    f"vllm:spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens_per_pos")
)
METRIC = re.compile(r"^(\S+?)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")  # SGLang's new and old name for one thing


@dataclass
class Answer:
    """A decoded request. `steps` [[K, accepted]] as the engine counts them; seconds it does not tell are None."""

    output_ids: list[int]
    stop: str  # eos | length
    steps: list[list[int]] = field(default_factory=list)
    ordered: bool = True  # whether the steps are in the order they happened
    prefill_s: float | None = None
    decode_s: float | None = None
    wall_s: float = 0.0


class Engine:
    """A server that decodes greedily, one prompt at a time. Raises ValueError naming the URL when it does not."""

    def __init__(self, kind: str, url: str, timeout_s: float) -> None:
        self.kind, self.url = kind, url.rstrip("/").removesuffix("/v1")
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it says a line for every request
        self.client = httpx.Client(timeout=timeout_s, trust_env=False)
        if kind == "vllm":
            self.version = f"vllm {self._get('/version')['version']}"
            self.model = self._get("/v1/models")["data"][0]["id"]
        else:
            self.version = f"sglang {self._get('/server_info')['version']}"

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()

    def decode(self, ids: Sequence[int], new_tokens: int, eos_ids: Sequence[int], drafts: bool) -> Answer:
        """Greedy answer to `ids`; `drafts` whether the server drafts, so that it must count."""
        began = time.perf_counter()
        ask = self._vllm if self.kind == "vllm" else self._sglang
        found = ask(list(ids), new_tokens, list(eos_ids), drafts)
        found.wall_s = time.perf_counter() - began
        return found

    def counters(self) -> dict[str, list[int]]:
        """vLLM's counters: rounds, draft tokens, and accepted ones by position."""
        found: dict[str, list[int]] = {DRAFTS: [0], DRAFTED: [0], ACCEPTED: []}
        for name, labels, value in METRIC.findall(self._send("GET", "/metrics").text):
            if name in (DRAFTS, DRAFTED):
                found[name][0] += int(float(value))
            elif name == ACCEPTED and (place := re.search(r'position="(\d+)"', labels)):
                longer = int(place[1]) + 1 - len(found[name])
                found[name] += [0] * longer
                found[name][int(place[1])] += int(float(value))
        return found

    def settled(self) -> dict[str, list[int]]:
        """The counters once they stand still: they lag behind an answer by a moment."""
        held = self.counters()
        while True:
            time.sleep(0.2)
            now = self.counters()
            if now == held:
                return now
            held = now

    def _vllm(self, ids: list[int], new_tokens: int, eos_ids: list[int], drafts: bool) -> Answer:
        before = self.counters() if drafts else {}
        asked = {"model": self.model, "prompt": ids, "max_tokens": new_tokens, "temperature": 0.0, "top_p": 1.0}
        asked |= {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "stop_token_ids": eos_ids, "n": 1}
        reply = self._post("/v1/completions", {**asked, "return_token_ids": True, "add_special_tokens": False})
        choice = reply["choices"][0]
        if choice.get("token_ids") is None:
            raise ValueError(f"{self.url} gives no token ids: vLLM 0.10.2 or newer is needed")
        if choice.get("prompt_token_ids", ids) != ids:
            raise ValueError(f"{self.url} read other prompt ids than it was sent: is it another kind of server?")
        told = reply.get("metrics") or {}
        found = Answer(choice["token_ids"], "length" if choice["finish_reason"] == "length" else "eos")
        found.prefill_s, found.decode_s = (
            None if (ms := told.get(name)) is None else ms / 1000
            for name in ("time_to_first_token_ms", "generation_time_ms")
        )
        rounds = told.get("speculative_decoding") or {}
        if rounds.get("per_step_accepted") is not None:
            steps = zip(rounds["per_step_drafted"], rounds["per_step_accepted"], strict=True)
            found.steps = [list(step) for step in steps]
        elif drafts and len(found.output_ids) > 1:
            found.steps, found.ordered = self._counted(before, len(found.output_ids) - 1), False
        return found

    def _counted(self, before: dict[str, list[int]], emitted: int) -> list[list[int]]:
        """Rounds of one request from the counters around it. They may lag behind the answer by a moment: all are in
        when rounds and accepted drafts account for every token that was emitted."""
        end = time.monotonic() + 10
        while True:
            after = self.counters()
            accepted = [
                n - before[ACCEPTED][i] if i < len(before[ACCEPTED]) else n for i, n in enumerate(after[ACCEPTED])
            ]
            rounds, drafted = (after[name][0] - before[name][0] for name in (DRAFTS, DRAFTED))
            if rounds and rounds + sum(accepted) >= emitted:
                break
            if time.monotonic() > end:
                raise ValueError(
                    f"{self.url} counted {rounds} rounds and {sum(accepted)} accepted drafts for {emitted} tokens: "
                    "does it draft, and was it started without --disable-log-stats?"
                )
            time.sleep(0.05)
        if rounds > emitted or drafted % rounds:
            raise ValueError(f"{self.url} counted {rounds} rounds for {emitted} tokens: do others use this server?")
        return spread([rounds, *accepted], drafted // rounds)

    def _sglang(self, ids: list[int], new_tokens: int, eos_ids: list[int], drafts: bool) -> Answer:
        sampling = {"temperature": 0.0, "max_new_tokens": new_tokens, "stop_token_ids": eos_ids}
        reply = self._post("/generate", {"input_ids": ids, "sampling_params": sampling})
        told = reply["meta_info"]
        found = Answer(reply["output_ids"], "length" if told["finish_reason"]["type"] == "length" else "eos")
        counts = next((told[name] for name in HISTOGRAMS if told.get(name)), None)
        if drafts and len(found.output_ids) > 1:
            if counts is None:
                raise ValueError(f"{self.url} tells no {HISTOGRAMS[0]}: does this SGLang draft?")
            at_least = [sum(counts[i:]) for i in range(len(counts))]
            proposed = told.get("spec_num_proposed_drafts")
            found.steps = spread(at_least, proposed // at_least[0] if proposed else len(counts) - 1)
            found.ordered = False
        return found

    def _get(self, path: str) -> dict[str, Any]:
        return dict(self._send("GET", path).json())

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return dict(self._send("POST", path, json=body).json())

    def _send(self, method: str, path: str, **more: Any) -> httpx.Response:
        try:
            reply = self.client.request(method, self.url + path, **more)
        except httpx.HTTPError as error:
            raise ValueError(f"{self.url}{path} does not answer ({type(error).__name__}): is the server up?") from error
        if reply.status_code != 200:
            raise ValueError(f"{self.url}{path} answered {reply.status_code}: {' '.join(reply.text.split())[:300]}")
        return reply


def spread(at_least: Sequence[int], k: int) -> list[list[int]]:
    """Steps from how many accepted at least 0, 1, 2 ... drafts, longest first: [3, 2, 0], 2 -> [2,1] [2,1] [2,0]."""
    return [[k, sum(n > step for n in at_least[1:])] for step in range(at_least[0])]


def rounds(answer: Answer, budget: int) -> list[list[int]]:
    """The answer's steps by our own counting (see above). Without an order the last one is not known: as they are."""
    if not answer.ordered:
        return answer.steps
    found, emitted, total = [], 1, len(answer.output_ids)
    for drafted, accepted in answer.steps:
        left, really = budget - emitted, min(accepted + 1, total - emitted)
        found.append([min(drafted, left), min(accepted, really)])
        emitted += really
    return found
