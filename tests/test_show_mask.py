"""Claim: show_mask prints what is under the loss, in colour or as JSON, with statistics of the whole set."""

import json
from pathlib import Path

import pytest
from rich.console import Console
from tiny_chat import CHATML, byte_tokenizer

from data.chat import encode_row
from data.prompts import Row
from data.template import ChatFormat
from scripts import show_mask

TURNS = [("user", "q"), ("assistant", "one"), ("user", "r"), ("assistant", "two")]
LINES = [
    {"messages": [{"role": role, "content": content} for role, content in TURNS]},
    {"messages": [{"role": "user", "content": "nobody answers"}]},
    {"prompt": "p", "completion": "c" * 60},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def show(file: Path, tokenizer: str, *options: str) -> int:
    return show_mask.main([str(file), "--tokenizer", tokenizer, *options])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return tmp_path / "x.jsonl"


def test_json_holds_one_object_for_each_line(file: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(file, tokenizer, "--json") == 0
    first, second, third = map(json.loads, capsys.readouterr().out.splitlines())
    assert set(first) == {"line", "keep", "reason", "n_tokens", "n_supervised", "spans", "supervised"}
    assert (first["line"], first["keep"], first["supervised"]) == (1, True, ["one<|im_end|>", "two<|im_end|>"])
    assert first["n_supervised"] == sum(b - a for a, b in first["spans"]) == 8
    assert (second["line"], second["keep"], second["reason"]) == (2, False, "no_assistant_content")
    assert set(second) >= set(first) and second["spans"] == []
    assert third["n_supervised"] == 61


def test_last_turn_only_and_max_length(file: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]) -> None:
    show(file, tokenizer, "--json", "--last-turn-only", "--max-length", "45")
    first, _, third = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["reason"] == "no_supervised_tokens_after_truncation"
    assert third["n_tokens"] == 45 and third["n_supervised"] < 61
    show(file, tokenizer, "--json", "--last-turn-only")
    assert json.loads(capsys.readouterr().out.splitlines()[0])["supervised"] == ["two<|im_end|>"]


def test_the_date_of_a_template_is_the_one_given(
    file: Path, tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dated.jinja").write_text("{{ strftime_now('%d %b %Y') }}" + CHATML)
    template = ["--template", str(tmp_path / "dated.jinja")]
    lengths = {}
    for day in ("2026-07-09", "2031-12-24"):
        assert show(file, tokenizer, *template, "--date", day) == 0
        lengths[day] = capsys.readouterr().out
    assert "09 Jul 2026" in lengths["2026-07-09"] and "24 Dec 2031" in lengths["2031-12-24"]
    assert show(file, tokenizer, *template, "--date", "soon") == 1
    assert capsys.readouterr().err == "error: data.date='soon': give a day like 2025-01-01\n"


def test_supervised_text_is_green_and_context_dim() -> None:
    chat = ChatFormat(byte_tokenizer())
    console = Console(force_terminal=True, color_system="standard", soft_wrap=True, highlight=False, width=200)
    encoded = encode_row(chat, Row("f", 1, "x", "r", [{"role": role, "content": text} for role, text in TURNS]))
    with console.capture() as shown:
        show_mask._show(console, chat, 1, encoded)
    green, dim, plain = "\x1b[1;32m", "\x1b[2m", "\x1b[0m"
    assert f"{green}one<|im_end|>{plain}" in shown.get() and f"{green}two<|im_end|>{plain}" in shown.get()
    assert f"{dim}<|im_start|>user" in shown.get() and f"{green}q" not in shown.get()


def test_statistics_cover_the_whole_set_not_only_what_is_shown(
    file: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show(file, tokenizer, "--show", "1") == 0
    out = capsys.readouterr().out
    assert "line 1: 8 of" in out and "line 3" not in out
    cells = {tuple(part.strip() for part in line.split("│")[1:3]) for line in out.splitlines() if "│" in line}
    assert {("read", "3"), ("kept", "2"), ("dropped: no_assistant_content", "1"), ("rows truncated", "0")} <= cells
    assert any(name == "supervised tokens" and count.startswith("69 (") for name, count in cells)


def test_a_set_without_supervision_ends_in_an_error(
    tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "[USER] q [BOT] a"}\n')
    assert show(tmp_path / "x.jsonl", tokenizer) == 1
    captured = capsys.readouterr()
    assert (
        "error: no_supervised_tokens_in_data_set: " in captured.err and "dropped: no_supervised_tokens" in captured.out
    )
    assert show(tmp_path / "none.jsonl", tokenizer) == 1
    assert "no such data file" in capsys.readouterr().err
