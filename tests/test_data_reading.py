"""Claim: rows read = rows kept + rows dropped, each drop with reason and physical line, whatever the block size."""

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from data.prompts import Row, read
from data.records import Bad, DataError

USER = {"role": "user", "content": "q"}


def rows_of(path: Path, content: bytes, block_bytes: int = 1 << 20) -> list[Row | Bad]:
    path.write_bytes(content)
    return list(read(path, block_bytes))


def contents(found: list[Row | Bad]) -> list[list[str]]:
    return [[m["content"] for m in row.messages] for row in found if isinstance(row, Row)]


NASTY = (
    b'\xef\xbb\xbf{"id": 1, "prompt": "a"}\r\n\r\n  \t\n'
    + b'{"id": "2", "conversations": [{"from": "human", "value": "b"}]}\n'
    + '{"id": 3.5, "turns": ["c\u2028d", "e\u0085f"]}\n'.encode()
    + b'{"prompt": \n[1, 2]\n{"messages": "x"}\n\xff\n{"neither": 1}\n{"id": null, "prompt": "last"}'
)


@pytest.mark.parametrize("block_bytes", [1, 7, 60, 1 << 20])
def test_mixed_broken_file_gives_the_same_rows_for_every_block_size(tmp_path: Path, block_bytes: int) -> None:
    found = rows_of(tmp_path / "x.jsonl", NASTY, block_bytes)
    assert contents(found) == [["a"], ["b"], ["c\u2028d", "e\u0085f"], ["last"]]
    assert [(r.line, r.id) for r in found if isinstance(r, Row)] == [(1, "1"), (4, "2"), (5, "3.5"), (11, "x.jsonl:11")]
    assert [(b.line, b.reason) for b in found if isinstance(b, Bad)] == [
        (6, "malformed_json"),
        (7, "not_an_object"),
        (8, "malformed_messages"),
        (9, "invalid_utf8"),
        (10, "unknown_row_format"),
    ]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    prompts=st.lists(st.text(st.characters(codec="utf-8"), max_size=20), min_size=1, max_size=6),
    block_bytes=st.integers(1, 40),
    indent=st.sampled_from([None, 1]),
)
def test_json_lines_and_json_array_hold_the_same_rows(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[str], block_bytes: int, indent: int | None
) -> None:
    folder = tmp_path_factory.mktemp("r")
    values = [{"prompt": p} for p in prompts]
    lines = "\n".join(json.dumps(v, ensure_ascii=False) for v in values).encode("utf-8", "surrogatepass")
    array = json.dumps(values, ensure_ascii=False, indent=indent).encode()
    assert contents(rows_of(folder / "x.jsonl", lines, block_bytes)) == [[p] for p in prompts]
    found = rows_of(folder / "x.json", array, block_bytes)
    assert contents(found) == [[p] for p in prompts]
    wanted = [1] * len(prompts) if indent is None else [2 + 3 * n for n in range(len(prompts))]
    assert [row.line for row in found] == wanted


def test_broken_json_array_names_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"x\.json: malformed JSON array at line 3"):
        rows_of(tmp_path / "x.json", b'[{"prompt": "a"},\n{"prompt": "b"},\n{"prompt": ', 5)


@pytest.mark.parametrize("content", [b"", b"\n \n\t\n", b"\xef\xbb\xbf\n"])
def test_a_file_without_records_is_one_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DataError, match=r"x\.jsonl: empty file") as refused:
        rows_of(tmp_path / "x.jsonl", content)
    assert refused.value.code == "empty_file"


def test_missing_file_and_empty_folder_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.jsonl: no such data file"):
        list(read(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match="holds no data file"):
        list(read(tmp_path))


def test_folder_compressed_csv_and_parquet_are_read_in_name_order(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,other\nfrom csv,1\n", encoding="utf-8")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "from gzip"}\n'))
    rows = [{"messages": [USER], "meta": {"x": 1}}, {"messages": [{**USER, "name": "n"}], "meta": None}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    found = list(read(tmp_path))
    assert contents(found) == [["from csv"], ["from gzip"], ["q"], ["q"]]
    assert [row.messages[0].get("name") for row in found if isinstance(row, Row)] == [None, None, None, "n"]
    assert "name" not in found[2].messages[0]  # type: ignore[union-attr]


def test_a_csv_row_that_cannot_be_read_costs_no_other_row(tmp_path: Path) -> None:
    long = "x" * 300_000
    table = f'\ufeffprompt,kind\r\n"two\nlines",a\r\n\r\n{long},b\r\n'.encode() + b"\xff,c\r\nlast,d"
    found = rows_of(tmp_path / "x.csv", table)
    assert contents(found) == [["two\nlines"], [long], ["last"]]
    assert [row.line for row in found] == [2, 5, 6, 7]
    assert [(b.line, b.reason) for b in found if isinstance(b, Bad)] == [(6, "invalid_utf8")]
    found = rows_of(tmp_path / "x.csv", b'prompt,kind\na,b\n"never closed,b\nc,d\n')
    assert contents(found) == [["a"]]
    assert [(b.line, b.reason, b.detail) for b in found if isinstance(b, Bad)] == [
        (3, "malformed_csv", "unexpected end of data")
    ]


def damaged(whole: bytes, kind: str) -> bytes:
    """Cut in the middle, or with a byte of its end turned over."""
    return whole[: len(whole) // 2] if kind == "cut" else whole[:-6] + bytes([whole[-6] ^ 255]) + whole[-5:]


@pytest.mark.parametrize("kind", ["cut", "turned"])
@pytest.mark.parametrize("suffix", ["jsonl.gz", "json.gz", "jsonl.xz", "parquet"])
def test_a_damaged_file_is_one_error_that_names_it(tmp_path: Path, suffix: str, kind: str) -> None:
    values = [{"prompt": f"question {n} {n**9}"} for n in range(300)]
    path = tmp_path / f"x.{suffix}"
    if suffix == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(values), path)
    else:
        lines = "\n".join(map(json.dumps, values)) if suffix.startswith("jsonl") else json.dumps(values)
        path.write_bytes((gzip if suffix.endswith("gz") else lzma).compress(lines.encode()))
    assert len(list(read(path))) == 300
    path.write_bytes(damaged(path.read_bytes(), kind))
    with pytest.raises(DataError, match=rf"{path}: the file is cut short or damaged") as refused:
        list(read(path))
    assert refused.value.code == "damaged_file" and "\n" not in str(refused.value)


def test_a_json_array_of_another_encoding_is_one_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"x\.json: the file is cut short or damaged .*utf-8"):
        rows_of(tmp_path / "x.json", '[{"prompt": "Grüße"}]'.encode("latin-1"))


def one(tmp_path: Path, value: dict[str, Any]) -> Row | Bad:
    return rows_of(tmp_path / "x.jsonl", json.dumps(value).encode())[0]


def test_content_parts_null_and_tool_calls_become_what_templates_expect(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Oslo"}'}}
    parts = [{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}]
    answer = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "why", "extra": None}
    row = one(
        tmp_path, {"messages": [{"role": "user", "content": parts}, answer], "tools": json.dumps([{"type": "f"}])}
    )
    assert isinstance(row, Row)
    assert row.tools == [{"type": "f"}]
    assert row.messages[0]["content"] == "in parts"
    assert row.messages[1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "why",
        "tool_calls": [{**call, "function": {"name": "f", "arguments": {"city": "Oslo"}}}],
    }


BROKEN = {
    "tool_arguments_not_json": {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]},
    "malformed_tool_call": {"role": "assistant", "tool_calls": [{"function": {}}]},
    "unsupported_content_part": {"role": "user", "content": [{"type": "image_url"}]},
    "unknown_role": {"from": "nobody", "value": "x"},
    "malformed_messages": {"content": "no role"},
}


@pytest.mark.parametrize("reason", BROKEN)
def test_a_bad_message_drops_its_row_with_a_reason(tmp_path: Path, reason: str) -> None:
    bad = one(tmp_path, {"messages": [USER, BROKEN[reason]]})
    assert isinstance(bad, Bad)
    assert (bad.line, bad.reason) == (1, reason)


def test_prompt_with_completion_and_sharegpt_with_system_are_conversations(tmp_path: Path) -> None:
    pair = one(tmp_path, {"prompt": "q", "completion": "a", "category": "maths"})
    assert isinstance(pair, Row)
    assert ([m["role"] for m in pair.messages], pair.route) == (["user", "assistant"], "maths")
    given_system = one(tmp_path, {"system": "s", "conversations": [{"from": "human", "value": "q"}]})
    assert isinstance(given_system, Row)
    assert [m["role"] for m in given_system.messages] == ["system", "user"]
