"""Claim: request logs, tables with their own column names and rows masked elsewhere are read as what they are."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from test_config_files import composed
from tiny import tiny_target
from tiny_chat import byte_tokenizer

from data import rows
from data.asking import RegenerateSettings
from data.build import DataSettings, build
from data.prompts import Columns, Row, read
from data.records import Bad, DataError
from heads.target import Target

QUESTION = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
REQUEST = {"model": "m", "messages": [QUESTION], "tools": [{"type": "function"}], "temperature": 0.2}
COMPLETION = {"id": "c", "choices": [{"index": 0, "message": ANSWER, "finish_reason": "stop"}], "usage": {}}
IDS = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_target(vocab_size=264, layers=2).model, byte_tokenizer())


def read_lines(folder: Path, values: list[Any], columns: Columns | None = None) -> list[Row | Bad]:
    (folder / "x.jsonl").write_text("\n".join(map(json.dumps, values)), encoding="utf-8")
    return list(read(folder / "x.jsonl", columns=columns))


def given(folder: Path, **changes: Any) -> DataSettings:
    off = RegenerateSettings(enabled=False)
    return DataSettings(**{"source": [str(folder / "x.jsonl")], "heldout_share": 0.0, "regenerate": off, **changes})


@pytest.mark.parametrize(
    "log, answered",
    [
        ({"request": REQUEST, "response": COMPLETION}, True),
        ({"request": json.dumps(REQUEST), "response": json.dumps(COMPLETION)}, True),
        ({"custom_id": "1", "method": "POST", "body": REQUEST}, False),  # a batch file
        ({"request": {"body": REQUEST}, "response": {"status_code": 200, "body": COMPLETION}}, True),
        ({"request": REQUEST, "response": {"error": {"message": "overloaded"}}}, False),
        ({"request": REQUEST, "response": None}, False),
        (REQUEST, False),
    ],
)
def test_served_requests_are_conversations(tmp_path: Path, log: dict[str, Any], answered: bool) -> None:
    (row,) = read_lines(tmp_path, [log])
    assert isinstance(row, Row)
    assert row.messages == ([QUESTION, ANSWER] if answered else [QUESTION])
    assert row.tools == REQUEST["tools"]


def test_a_log_keeps_its_id_and_route_and_a_broken_body_is_a_reason(tmp_path: Path) -> None:
    good, bad = read_lines(tmp_path, [{"id": 7, "route": "shop", "request": REQUEST}, {"request": '{"messages": ['}])
    assert isinstance(good, Row) and (good.id, good.route) == ("7", "shop")
    assert isinstance(bad, Bad) and (bad.line, bad.reason) == (2, "malformed_json")


def test_named_columns_of_csv_and_parquet_replace_every_other_conversation_field(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('question,prompt,kind\n"one, two",no,shop\n,no,shop\n', encoding="utf-8")
    columns = Columns(prompt="question", route="kind")
    first, second = read(tmp_path / "a.csv", columns=columns)
    assert isinstance(first, Row) and isinstance(second, Row)
    assert (first.messages, first.route) == ([{"role": "user", "content": "one, two"}], "shop")
    table = [{"question": "q", "reply": "a", "chat": json.dumps([QUESTION, ANSWER]), "text": "no"}]
    parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / "b.parquet")
    for named in (Columns(prompt="question", completion="reply"), Columns(messages="chat")):
        (row,) = read(tmp_path / "b.parquet", columns=named)
        assert isinstance(row, Row) and row.messages == [QUESTION, ANSWER] and row.text is None


def test_a_missing_column_names_those_that_are_there(tmp_path: Path) -> None:
    (bad,) = read_lines(tmp_path, [{"prompt": "q", "reply": "a"}], Columns(prompt="question"))
    assert isinstance(bad, Bad) and bad.reason == "missing_column"
    assert bad.detail == "no column 'question' among ['prompt', 'reply']"


def test_hub_data_sets_stream_the_named_split_config_and_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: dict[str, Any] = {}

    def load_dataset(name: str, config: str | None, split: str, streaming: bool) -> Iterator[dict[str, Any]]:
        asked.update(name=name, config=config, split=split, streaming=streaming)
        return iter([{"question": "q", "meta": None}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (row,) = read("owner/set", hub_split="test", hub_config="en", columns=Columns(prompt="question"))
    assert isinstance(row, Row) and row.messages == [QUESTION] and row.where == "owner/set:1"
    assert asked == {"name": "owner/set", "config": "en", "split": "test", "streaming": True}


@pytest.mark.parametrize(
    "fields, spans",
    [
        ({"loss_mask": [0, 0, 1, 1, 0]}, [(2, 4)]),
        ({"loss_mask": [True, False, False, True, True]}, [(0, 1), (3, 5)]),
        ({"labels": [-100, 6, -100, -100, 9]}, [(1, 2), (4, 5)]),
        ({"loss_mask": [0, 0, 1, 1, 1], "attention_mask": [0, 1, 1, 1, 0]}, [(1, 3)]),
        ({"spans": [[1, 2], [3, 5]]}, [(1, 2), (3, 5)]),  # a row of a data folder
    ],
)
def test_rows_with_their_own_mask_are_trained_as_masked(
    target: Target, tmp_path: Path, fields: dict[str, Any], spans: list[tuple[int, int]]
) -> None:
    read_lines(tmp_path, [{"input_ids": IDS, **fields}])
    build(target, given(tmp_path), tmp_path / "out")
    (row,) = rows.load(tmp_path / "out", "train")
    assert row.spans == spans
    assert row.ids == (IDS[1:4] if "attention_mask" in fields else IDS)


def test_answers_logged_as_token_ids_are_supervised_whole(target: Target, tmp_path: Path) -> None:
    read_lines(tmp_path, [{"prompt_ids": IDS[:2], "output_ids": IDS[2:], "finish": "stop"}])
    build(target, given(tmp_path), tmp_path / "out")
    (row,) = rows.load(tmp_path / "out", "train")
    assert (row.ids, row.spans) == (IDS, [(2, 5)])
    (bad,) = read_lines(tmp_path, [{"output_ids": IDS}])
    assert isinstance(bad, Bad) and bad.reason == "malformed_ids"


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"loss_mask": [0, 1]}, "malformed_ids"),
        ({"loss_mask": [0, 0, 2, 0, 0]}, "malformed_loss_mask"),
        ({"labels": [-100, 7, 8, 9, -100]}, "labels_not_aligned"),  # shifted one to the left
        ({"labels": ["a"] * 5}, "malformed_ids"),
        ({"spans": [[3, 6]]}, "malformed_spans"),
        ({"spans": [[3, 3]]}, "malformed_spans"),
        ({"spans": [3, 4]}, "malformed_spans"),
        ({}, "no_loss_mask"),
    ],
)
def test_a_mask_that_cannot_be_right_is_a_reason(tmp_path: Path, fields: dict[str, Any], reason: str) -> None:
    (bad,) = read_lines(tmp_path, [{"ids": IDS, **fields}])
    assert isinstance(bad, Bad) and bad.reason == reason


def test_a_whole_set_with_nothing_or_everything_supervised_is_refused(target: Target, tmp_path: Path) -> None:
    everything = [{"ids": [n, *IDS], "loss_mask": [1] * 6} for n in range(3)]
    read_lines(tmp_path, everything)
    with pytest.raises(DataError, match="every token of every row is supervised") as refused:
        build(target, given(tmp_path), tmp_path / "out")
    assert refused.value.code == "all_tokens_supervised_in_data_set"
    read_lines(tmp_path, [{"ids": [n, *IDS], "labels": [-100] * 6} for n in range(3)])
    with pytest.raises(DataError, match=r"no supervised tokens in the data set.*x\.jsonl:1") as refused:
        build(target, given(tmp_path), tmp_path / "out")
    assert refused.value.code == "no_supervised_tokens_in_data_set"
    read_lines(tmp_path, [*everything, {"ids": IDS, "loss_mask": [0, 0, 0, 0, 1]}])
    assert build(target, given(tmp_path), tmp_path / "out")["counts"]["kept"] == 4


def test_ids_of_another_tokenizer_are_dropped_by_name(target: Target, tmp_path: Path) -> None:
    read_lines(tmp_path, [{"ids": [5, 300], "loss_mask": [0, 1]}, {"ids": IDS, "loss_mask": [0, 0, 1, 1, 1]}])
    counts = build(target, given(tmp_path), tmp_path / "out")["counts"]
    assert counts["dropped"] == {"ids_outside_vocabulary": 1}


def test_raw_next_line_and_line_separators_stay_inside_their_record(tmp_path: Path) -> None:
    text = "a\u0085b\u2028c\u2029d"
    (tmp_path / "x.jsonl").write_text(f'{{"prompt": "{text}"}}\r\n{{"prompt": "e"}}', encoding="utf-8", newline="")
    (tmp_path / "x.csv").write_text(f"prompt\n{text}\ne\n", encoding="utf-8")
    for name in ("x.jsonl", "x.csv"):
        found = [row for row in read(tmp_path / name) if isinstance(row, Row)]
        assert [row.messages[0]["content"] for row in found] == [text, "e"]


def test_last_turn_only_supervises_the_last_answer_of_every_format(target: Target, tmp_path: Path) -> None:
    turns = [{"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "one"), ("user", "r"))]
    text = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
    values = [
        {"messages": [*turns, {"role": "assistant", "content": "two"}]},
        {"text": text.format("one") + text.format("two")},
        {"ids": [*b"one", 65, *b"two"], "loss_mask": [1, 1, 1, 0, 1, 1, 1]},
    ]
    read_lines(tmp_path, values)
    for last, wanted in ((False, ["one", "two"]), (True, ["two"])):
        build(target, given(tmp_path, last_turn_only=last), tmp_path / "out")
        for row in rows.load(tmp_path / "out", "train"):
            texts = [target.tokenizer.decode(row.ids[a:b]).removesuffix("<|im_end|>") for a, b in row.spans]
            assert texts == wanted


def test_every_new_setting_is_a_plain_override() -> None:
    words = ["data.columns.prompt=question", "data.date=2026-01-31", "data.last_turn_only=true"]
    words += ["data.evaluation_sets=[a.jsonl,b.csv]", "data.regenerate.server=http://localhost:8000/v1"]
    words += ["data.regenerate.samples=3", "data.regenerate.temperatures=[0.0,0.7,1.0]"]
    settings = composed("data", *words)[1].data
    settings.check()
    assert (settings.columns, settings.date, settings.last_turn_only) == (
        Columns(prompt="question"),
        "2026-01-31",
        True,
    )
    assert settings.evaluation_sets == ["a.jsonl", "b.csv"]
    assert settings.regenerate.server == "http://localhost:8000/v1"
    assert [settings.regenerate.temperature_of(n) for n in range(3)] == [0.0, 0.7, 1.0]
