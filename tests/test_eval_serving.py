"""`python -m eval backend=vllm`: what an engine tells becomes the records that our own loop writes, no more."""

import dataclasses
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from elsewhere import loadable_target
from engine_server import running
from test_export import exported
from toys import eagle3

from eval import metrics
from eval.drafter import PerSequence
from eval.drafters.replay import Replay
from eval.engines import Answer, Engine, rounds, spread
from eval.generate import Decoding, generate
from eval.plan import EvalSettings
from eval.serving import serve
from eval.vllm_server import ServingSettings, speculation
from heads.target import Target, TargetSettings
from scripts import compare_serving

K, BUDGET = 3, 12


@dataclasses.dataclass
class World:
    """A target, an exported head, a data folder, and what our own loop makes of its prompts."""

    place: Path
    target: Target
    head: Path
    data: Path
    prompts: list[list[int]]
    ours: list[Any]  # Generation at BUDGET, of each prompt
    facts: dict[str, Any]  # of an engine that decodes the same, in rounds that go on past the end

    def settings(self, name: str, **changed: Any) -> EvalSettings:
        serving = ServingSettings(**changed.pop("serving", {}))
        base: dict[str, Any] = {
            "name": name, "outputs": str(self.place), "backend": "vllm", "dataset": str(self.data), "k": K,
            "target": TargetSettings(id=str(self.place / "target")), "heads": {"mine": str(self.head)},
            "methods": ["mine"], "prompts": 0, "temperatures": [0.0], "max_new_tokens": BUDGET,
        }  # fmt: skip
        return EvalSettings(**{**base, **changed}, serving=serving)

    def records(self, name: str) -> list[dict[str, Any]]:
        lines = (self.place / "eval" / name / "records.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    place = tmp_path_factory.mktemp("serving")
    target, _ = loadable_target(place / "target")
    folder = exported(place, target, eagle3(target, std=0.3), with_target=False)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, 250, (6 + i,), generator=generator).tolist() for i in range(5)]

    def decoded(prompt: list[int], budget: int) -> Any:
        """By a drafter that is right more often than not: the random head of the folder accepts next to nothing."""
        drafts = [2 if i % 7 == sum(prompt) % 7 else token for i, token in enumerate(texts[tuple(prompt)])]
        drafter = PerSequence(lambda: Replay(drafts, target.spec.vocab_size))
        return generate(target, drafter, prompt, Decoding(k=K, max_new_tokens=budget))

    target.eos_ids = frozenset()
    longest = Decoding(max_new_tokens=BUDGET + K + 1)
    texts = {tuple(prompt): generate(target, None, prompt, longest).output_ids for prompt in prompts}
    # an end-of-turn token that one answer says in the middle
    said = texts[tuple(prompts[0])][:BUDGET]
    end = next(token for i, token in enumerate(said) if i > 4 and token not in said[:i])
    config = json.loads((place / "target" / "generation_config.json").read_text())
    (place / "target" / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": [end]}))
    longer = [decoded(prompt, BUDGET + K + 1) for prompt in prompts]
    target = Target.load(TargetSettings(id=str(place / "target"), packed=False))
    assert end in target.eos_ids
    ours = [decoded(prompt, BUDGET) for prompt in prompts]
    assert {own.stop for own in ours} == {"eos", "length"}
    answers = [[p, g.output_ids, [a for _, a in g.steps]] for p, g in zip(prompts, longer, strict=True)]
    data = data_folder(place / "data", target, prompts)
    return World(place, target, folder, data, prompts, ours, {"kind": "vllm", "k": K, "answers": answers})


def data_folder(folder: Path, target: Target, prompts: list[list[int]]) -> Path:
    folder.mkdir()
    made_for = {name: getattr(target.spec, name) for name in ("name", "revision", "tokenizer_hash", "template_hash")}
    (folder / "manifest.json").write_text(json.dumps({"kind": "data", "fingerprint": "f00d", "target": made_for}))
    rows = [
        {"id": str(i), "key": str(i), "route": "chat", "ids": [*ids, 2, 3], "spans": [[len(ids), len(ids) + 2]]}
        for i, ids in enumerate(prompts)
    ]
    (folder / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def executable(world: World, folder: Path, **changed: Any) -> Path:
    """Stands in for the Python that has vLLM: whatever it is asked to run, it is tests/engine_server.py."""
    (folder / "answers.json").write_text(json.dumps({**world.facts, **changed}))
    script = folder / "python"
    server = Path(__file__).with_name("engine_server.py")
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {server} {folder / "answers.json"} "$@"\n')
    script.chmod(0o755)
    return script


def alive(command: str) -> bool:
    """Whether a process runs whose command line holds `command`."""
    places = [Path("/proc") / name / "cmdline" for name in os.listdir("/proc") if name.isdigit()]
    texts = []
    for place in places:
        try:
            texts.append(place.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return any(command in text for text in texts)


def test_a_started_engine_gives_the_records_of_our_own_loop(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = executable(world, tmp_path)
    rows = serve(world.settings("started", serving={"python": str(python)}, threads=1))
    records = world.records("started")
    mine = [r for r in records if r["method"] == "mine"]
    assert [r["output_ids"] for r in mine] == [own.output_ids for own in world.ours]
    assert [r["steps"] for r in mine] == [own.steps for own in world.ours]
    assert [r["stop"] for r in mine] == [own.stop for own in world.ours]
    assert any(sum(r["engine_accepted_tokens_per_pos"]) > sum(a for _, a in r["steps"]) for r in mine), "a cut round"
    assert all("draft_s" not in r and r["engine"] == "vllm 0.0.test" and "steps_unordered" not in r for r in records)
    by = {(row["method"], row["route"]): row for row in rows}
    plain, own = by["plain", "all"], by["mine", "all"]
    assert plain["acceptance_length"] == 1 and own["draft_overhead"] is None and own["speedup_decode"] == 1.0
    counted = [{"new_tokens": len(g.output_ids), "steps": g.steps} for g in world.ours]
    assert own["acceptance_length"] == metrics.acceptance_length(counted)
    assert own["position_acceptance_joint"] == metrics.position_acceptance(counted)[0]
    assert capsys.readouterr().out.startswith("Self-checks passed: 6 of 6")
    folder = world.place / "eval" / "started"
    assert (folder / "report.html").is_file()
    assert json.loads((folder / "manifest.json").read_text())["engine"] == "vllm 0.0.test"

    called = json.loads((tmp_path / "answers.json.called").read_text())
    assert called[:4] == ["-m", "vllm.entrypoints.openai.api_server", "--model", str(world.place / "target")]
    assert {"--enforce-eager", "--no-enable-prefix-caching", "float32"} <= set(called)
    drafting = json.loads(called[called.index("--speculative-config") + 1])
    assert drafting == {"method": "eagle3", "model": str(world.head), "num_speculative_tokens": K}
    assert not alive(str(tmp_path)), "the server outlived its evaluation"

    # what is recorded is not asked for again: no server is started
    again = serve(world.settings("started", serving={"python": str(tmp_path / "none")}, threads=1))
    assert again == rows
    # but another k is
    with pytest.raises(ValueError, match="no such program"):
        serve(world.settings("started", serving={"python": str(tmp_path / "none")}, threads=1, k=K - 1))


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing the plots takes longer than everything else."""
    monkeypatch.setattr("eval.report.write", lambda *args: Path("none"))


@pytest.mark.usefixtures("no_report")
def test_a_running_vllm_that_tells_nothing_of_a_request_is_read_by_its_counters(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    server = running({**world.facts, "detailed": False})
    (row, *_) = serve(world.settings("counters", serving={"url": f"{server.url}/v1"}))
    assert capsys.readouterr().out.startswith("Self-checks passed: 5 of 5")
    records = world.records("counters")
    for r, own in zip(records, world.ours, strict=True):
        assert r["output_ids"] == own.output_ids and len(r["steps"]) == len(own.steps)
        assert r["steps_unordered"] and r["steps"] == sorted(r["steps"], reverse=True)
        assert "prefill_s" not in r and "decode_s" not in r and r["wall_s"] > 0
    assert row["speedup_decode"] is None and row["tokens_per_second"] is None
    counted = [{"new_tokens": len(g.output_ids), "steps": g.steps} for g in world.ours]
    assert row["acceptance_length"] == metrics.acceptance_length(counted)
    asked = server.asked[-1]
    assert asked["prompt"] == world.prompts[-1] and asked["temperature"] == 0 and asked["max_tokens"] == BUDGET
    assert asked["stop_token_ids"] == sorted(world.target.eos_ids)


@pytest.mark.usefixtures("no_report")
def test_a_running_sglang_is_read_by_its_answers(world: World) -> None:
    server = running({**world.facts, "kind": "sglang"})
    (row, *_) = serve(world.settings("sglang", backend="sglang", serving={"url": server.url}))
    assert [r["output_ids"] for r in world.records("sglang")] == [own.output_ids for own in world.ours]
    counted = [{"new_tokens": len(g.output_ids), "steps": g.steps} for g in world.ours]
    assert row["acceptance_length"] == metrics.acceptance_length(counted) and row["engine"] == "sglang 0.0.test"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"backend": "trt"}, "backend='trt': choose from drafthead, vllm, sglang"),
        ({"backend": "sglang"}, "serving.url=http"),
        ({"temperatures": [0.0, 1.0]}, r"temperatures=\[0.0, 1.0\] is not measured through an engine"),
        ({"tree": "dynamic"}, "tree=dynamic is not measured through an engine"),
        ({"methods": ["lookup"]}, "methods has 'lookup': backend=vllm serves heads"),
        ({"heads": {"mine": "RUN"}}, "config.json is missing: write one with `python -m scripts.export trained="),
        ({"serving": {"python": "/none/python"}}, "serving.python=/none/python: no such program; `make vllm`"),
        ({"serving": {"url": "http://127.0.0.1:9"}}, "127.0.0.1:9/version does not answer"),
        ({"serving": {"url": "http://x", "plain": False}, "methods": ["mine", "mine"]}, "name the one head"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_first(world: World, changed: dict[str, Any], words: str) -> None:
    if changed.get("heads") == {"mine": "RUN"}:
        changed = {**changed, "heads": {"mine": str(world.place / "run" / "best")}}
    with pytest.raises(ValueError, match=words):
        serve(world.settings("refused", **changed))


def test_a_server_that_does_not_come_up_is_told_with_its_last_words(world: World, tmp_path: Path) -> None:
    python = executable(world, tmp_path, dies=True)
    with pytest.raises(ValueError, match="status 1 before it answered.*No module named 'vllm'.*make vllm"):
        serve(world.settings("dead", serving={"python": str(python)}))
    python.write_text("#!/bin/sh\necho still loading\nsleep 60\n")
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"serving.startup_s=0.5 seconds.*still loading"):
        serve(world.settings("dead", serving={"python": str(python), "startup_s": 0.5}))
    assert time.monotonic() - began < 10 and not alive(str(tmp_path))


def test_a_port_in_use_is_refused(world: World, tmp_path: Path) -> None:
    python = executable(world, tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"serving.port={port} is in use"):
            serve(world.settings("port", serving={"python": str(python), "port": port}))


def test_an_engine_that_does_not_draft_or_is_shared_is_refused(world: World) -> None:
    with Engine("sglang", running({**world.facts, "k": 0}).url, 5) as engine:
        with pytest.raises(ValueError, match="does this SGLang draft"):
            engine.decode(world.prompts[1], BUDGET, [], drafts=True)
    server = running({**world.facts, "detailed": False})
    with Engine("vllm", server.url, 5) as engine:
        before = engine.counters()
        server.late = [0] * 40  # another client's rounds
        with pytest.raises(ValueError, match="do others use this server"):
            engine._counted(before, 11)


def test_rounds_past_the_end_of_an_answer_are_counted_as_our_own_loop_counts_them() -> None:
    five_left = Answer([0] * 6, "length", [[4, 1], [4, 4]])
    assert rounds(five_left, 6) == [[4, 1], [3, 3]]
    ended = Answer([0] * 4, "eos", [[4, 0], [4, 3]])  # of 4 tokens the second is the end
    assert rounds(ended, 64) == [[4, 0], [4, 2]]
    assert rounds(Answer([0] * 9, "eos", [[4, 3], [4, 3]]), 64) == [[4, 3], [4, 3]]
    assert spread([3, 2, 0], 2) == [[2, 1], [2, 1], [2, 0]] and spread([2, 2, 1], 2) == [[2, 2], [2, 1]]


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"architectures": ["Eagle3DraftModel"]}, "eagle3"),
        ({"architectures": ["LlamaForCausalLM"]}, "eagle"),
        ({"architectures": ["MedusaModel"], "model_type": "medusa", "medusa_num_heads": 3}, "medusa"),
    ],
)
def test_vllm_is_told_the_method_by_name(tmp_path: Path, config: dict[str, Any], method: str) -> None:
    """Left to itself it takes a folder called `eagle-3-mine` for EAGLE-1."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert speculation(tmp_path, 3) == {"method": method, "model": str(tmp_path), "num_speculative_tokens": 3}


def test_what_vllm_cannot_serve_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle"]}))
    with pytest.raises(ValueError, match="no method for architecture 'LlamaForCausalLMEagle'.*format=vllm"):
        speculation(tmp_path, 3)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "medusa", "medusa_num_heads": 3}))
    with pytest.raises(ValueError, match="k=4 is above the 3 heads"):
        speculation(tmp_path, 4)


def offline(world: World, name: str) -> Path:
    """A run folder as `python -m eval` leaves it, of what our own loop gave."""
    folder = world.place / "eval" / name
    folder.mkdir()
    mark = json.loads((world.place / "eval" / "started" / "measured.json").read_text())
    del mark["backend"]
    (folder / "measured.json").write_text(json.dumps(mark))
    served = [r for r in world.records("started") if r["method"] == "mine"]
    rows = [
        {**{k: v for k, v in r.items() if not k.startswith("engine")}, "output_ids": g.output_ids, "steps": g.steps}
        for r, g in zip(served, world.ours, strict=True)
    ]
    (folder / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_offline_and_served_are_set_side_by_side(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not (world.place / "eval" / "started").exists():
        serve(world.settings("started", serving={"python": str(executable(world, tmp_path))}, threads=1))
    ours, theirs, out = offline(world, "offline"), world.place / "eval" / "started", tmp_path / "table.txt"
    arguments = ["compare", "--offline", str(ours), "--served", str(theirs), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    capsys.readouterr()
    compare_serving.main()
    text = capsys.readouterr().out
    assert text == out.read_text() and "mine, k = 3, 5 prompts: agree" in text and "vllm 0.0.test" in text
    assert "difference 0.00%; answers equal token by token: 5 of 5; rounds equal one by one: 5 of 5" in text
    assert str(tmp_path) not in text

    def changed(**fields: Any) -> None:
        lines = [json.loads(line) for line in (ours / "records.jsonl").read_text().splitlines()]
        (ours / "records.jsonl").write_text("".join(json.dumps({**row, **fields}) + "\n" for row in lines))

    changed(output_ids=[1, 2, 3])
    with pytest.raises(SystemExit, match="or in a token"):
        compare_serving.main()
    assert "answers equal token by token: 0 of 5" in capsys.readouterr().out

    changed(steps=[[3, 0]] * 11)  # tau of 1
    with pytest.raises(SystemExit, match="differ by more than 2%"):
        compare_serving.main()
    assert "DIFFER" in capsys.readouterr().out

    mark = json.loads((ours / "measured.json").read_text())
    (ours / "measured.json").write_text(json.dumps({**mark, "max_new_tokens": 99, "data": "beef"}))
    with pytest.raises(SystemExit, match="measured with another data, max_new_tokens"):
        compare_serving.main()
    (ours / "measured.json").write_text(json.dumps({**mark, "heads": {"mine": {"step": 77}}}))
    with pytest.raises(SystemExit, match="mine is another head in"):
        compare_serving.main()
