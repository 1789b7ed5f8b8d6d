"""Claim: through a server every prompt is answered once and in order, whatever the server does in between."""

import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_server import FAULTS, ChatServer, serving
from tiny import tiny_target
from tiny_chat import byte_tokenizer

from data.answers import load_given
from data.asking import Limits, Prompt, RegenerateSettings, to_prompt, with_samples
from data.build import DataSettings, build
from data.prompts import to_row
from data.regenerate import Answers, forget
from data.server import ServerError
from data.template import ChatFormat
from heads.target import Target


@pytest.fixture(scope="module")
def target() -> Target:
    model = tiny_target(vocab_size=264, layers=2, max_position_embeddings=512).model
    tokenizer = byte_tokenizer()
    model.config.eos_token_id = tokenizer.eos_token_id
    return Target(model, tokenizer)


@pytest.fixture
def server(target: Target, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.delenv("DRAFTHEAD_SERVER_KEY", raising=False)
    with serving(ChatServer(ChatFormat(target.tokenizer))) as started:
        yield started


def settings_for(server: ChatServer, **changes: Any) -> RegenerateSettings:
    fields = {"server_model": "m", "temperature": 0.5, "timeout_s": 0.6, "wait_s": 0.001, "concurrency": 3}
    return RegenerateSettings(**{"server": server.url, **fields, **changes})


def prompts(target: Target, count: int = 9) -> list[Prompt]:
    chat = ChatFormat(target.tokenizer)
    turns = [[f"prompt {n}"] + ["more"] * (n % 2) for n in range(count)]
    rows = [to_row("f", "f", n, {"id": f"id{n}", "turns": ts}) for n, ts in enumerate(turns)]
    return [to_prompt(chat, row, f"{n:064x}", "train", Limits(512, 512)) for n, row in enumerate(rows)]


def answers(target: Target, folder: Path, settings: RegenerateSettings) -> Answers:
    return Answers(target, ChatFormat(target.tokenizer), settings, folder)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_dialogs_go_on_turn_by_turn_with_the_servers_own_answers(
    target: Target, server: ChatServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = rows_of(answers(target, tmp_path, settings_for(server)).make(prompts(target)))
    assert [row["id"] for row in made] == [f"id{n}" for n in range(9)]
    first, second = made[1]["turns"]
    text = target.tokenizer.decode(first["output_ids"])
    assert text.startswith("prompt 1 after 1 at 0.5 seed ") and text.endswith("<|im_end|>")
    whole = target.tokenizer.decode(second["prompt_ids"] + second["output_ids"])
    assert text + "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\nmore after 3" in whole
    assert all(row["retokenised"] for row in made) and "9 of 9 conversations came as text" in capsys.readouterr().err
    assert len({request["seed"] for request in server.asked}) == 13  # one for each turn of each dialog
    assert {request["path"] for request in server.asked} == {"/v1/chat/completions"}


def test_token_ids_and_log_probabilities_are_kept_where_the_server_gives_them(
    target: Target, server: ChatServer, tmp_path: Path
) -> None:
    plain = rows_of(answers(target, tmp_path / "text", settings_for(server)).make(prompts(target)))
    server.exact = True
    exact = rows_of(answers(target, tmp_path / "ids", settings_for(server)).make(prompts(target)))
    for row, other in zip(exact, plain, strict=True):
        assert "retokenised" not in row
        assert [t["output_ids"] for t in row["turns"]] == [t["output_ids"] for t in other["turns"]]
        assert all(t["logprobs"] == [-0.5] * len(t["output_ids"]) for t in row["turns"])


def test_a_server_with_another_template_is_refused(target: Target, server: ChatServer, tmp_path: Path) -> None:
    server.exact, server.prompt_ids = True, [1, 2, 3]
    with pytest.raises(ServerError, match="reads 3 prompt ids that are not the target's"):
        answers(target, tmp_path, settings_for(server)).make(prompts(target, 1))


def test_a_server_that_does_not_know_the_extra_fields_is_asked_without(
    target: Target, server: ChatServer, tmp_path: Path
) -> None:
    server.refuses_extras = True
    made = rows_of(answers(target, tmp_path, settings_for(server, concurrency=1)).make(prompts(target)))
    assert len(made) == 9 and all(row["turns"] for row in made)
    assert sum("return_token_ids" in request for request in server.asked) == 1


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_tried_again_and_no_row_is_lost_repeated_or_reordered(
    target: Target, server: ChatServer, tmp_path: Path, fault: str
) -> None:
    whole = answers(target, tmp_path / "whole", settings_for(server)).make(prompts(target)).read_bytes()
    server.faults = [fault] * 3
    assert answers(target, tmp_path / "faulty", settings_for(server)).make(prompts(target)).read_bytes() == whole
    assert not server.faults


@pytest.mark.parametrize("fault, tries", [(fault, 3) for fault in FAULTS] + [("404", 1)])
def test_a_fault_that_stays_is_one_error_and_the_next_run_goes_on(
    target: Target, server: ChatServer, tmp_path: Path, fault: str, tries: int
) -> None:
    whole = answers(target, tmp_path / "whole", settings_for(server)).make(prompts(target)).read_bytes()
    server.asked.clear()
    server.poison, server.always = "prompt 4", fault
    failing = answers(target, tmp_path / "cut", settings_for(server, retries=2))
    with pytest.raises(ServerError) as refused:
        failing.make(prompts(target))
    message = str(refused.value)
    assert f"{server.url}/v1/chat/completions did not answer prompt id4 (f:4): " in message and "\n" not in message
    assert sum(r["messages"][-1]["content"] == "prompt 4" and "logprobs" in r for r in server.asked) == tries
    assert not failing.final.exists()
    done = {row["id"] for row in rows_of(failing.partial)[1:]}
    assert done >= {"id0"} and "id4" not in done
    server.poison = "\0"
    server.asked.clear()
    assert failing.make(prompts(target)).read_bytes() == whole
    assert not done & {f"id{r['messages'][0]['content'].split()[1]}" for r in server.asked}


def test_an_unreachable_server_is_one_error_that_names_it(target: Target, server: ChatServer, tmp_path: Path) -> None:
    settings = dataclasses.replace(settings_for(server, retries=1), server="http://127.0.0.1:9/api/v3")
    with pytest.raises(ServerError, match=r"http://127\.0\.0\.1:9/api/v3/chat/completions .* ConnectError .*2 times"):
        answers(target, tmp_path, settings).make(prompts(target))


def test_any_cut_of_the_partial_file_is_made_good(target: Target, server: ChatServer, tmp_path: Path) -> None:
    made_by = answers(target, tmp_path, settings_for(server))
    whole = made_by.make(prompts(target)).read_bytes()
    forget(tmp_path)
    server.poison = "prompt 8"
    with pytest.raises(ServerError):
        answers(target, tmp_path, settings_for(server, retries=0)).make(prompts(target))
    partial = made_by.partial.read_bytes()
    server.poison = "\0"
    for cut in random.Random(1).sample(range(len(partial)), 6):
        made_by.final.unlink(missing_ok=True)
        made_by.partial.write_bytes(partial[:cut])
        assert made_by.make(prompts(target)).read_bytes() == whole


def test_the_key_comes_from_the_environment_and_stands_in_no_file(
    target: Target, server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_KEY", "sesame")
    server.poison = "prompt 1"
    with pytest.raises(ServerError) as refused:
        answers(target, tmp_path, settings_for(server, server_key="SHOP_KEY", retries=0)).make(prompts(target, 2))
    assert set(server.keys) == {"Bearer sesame"} and "sesame" not in str(refused.value)
    assert not any(b"sesame" in path.read_bytes() for path in tmp_path.iterdir())
    for url in ("http://user:sesame@host/v1", "http://host/v1?api-key=sesame"):
        with pytest.raises(ValueError, match="plain URL") as named:
            RegenerateSettings(server=url).check()
        assert "sesame" not in str(named.value)
    with pytest.raises(ValueError, match="server=host:8000: give a URL like"):
        RegenerateSettings(server="host:8000").check()


def test_the_data_folder_counts_retokenised_rows_and_ignores_transport_settings(
    target: Target, server: ChatServer, tmp_path: Path
) -> None:
    lines = [json.dumps({"prompt": f"question {n}"}) for n in range(6)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    settings = DataSettings(source=[str(tmp_path / "in.jsonl")], heldout_share=0.3, regenerate=settings_for(server))
    manifest = build(target, settings, tmp_path / "out")
    assert manifest["counts"]["retokenised"] == manifest["counts"]["kept"] == 6
    settings.regenerate.concurrency, settings.regenerate.retries = 1, 0
    assert build(target, settings, tmp_path / "out") == manifest


def test_server_answers_serve_as_given_answers_of_the_same_settings_only(
    target: Target, server: ChatServer, tmp_path: Path
) -> None:
    settings = settings_for(server, samples=2, temperatures=[0.5, 0.9])
    asked = with_samples(prompts(target, 3), 2)
    made = answers(target, tmp_path, settings)
    file = made.make(asked)
    assert sorted(load_given(file, made, asked)) == sorted(prompt.name for prompt in asked)
    other = answers(target, tmp_path, settings_for(server, samples=2, temperatures=[0.5, 0.9], server_model="n"))
    with pytest.raises(ValueError, match="server_model: 'm' there, 'n' here"):
        load_given(file, other, asked)
