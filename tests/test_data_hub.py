"""Claim: a Hub dataset is streamed by the real library with the split, configuration and columns that were named."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet
from tiny import tiny_target
from tiny_chat import byte_tokenizer

from data import rows
from data.asking import RegenerateSettings
from data.build import DataSettings, build
from data.prompts import Columns, Row, read
from data.records import Bad
from heads.target import Target

CARD = """---
configs:
- config_name: chats
  default: true
  data_files:
  - {split: train, path: chats/train-*.parquet}
  - {split: validation, path: chats/validation.parquet}
- config_name: others
  data_files:
  - {split: train, path: chats/validation.parquet}
---
"""


def conversation(question: str, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset repository in a folder: its id resolves to that folder, everything after that is the library's own."""
    repository = tmp_path / "repository"
    (repository / "chats").mkdir(parents=True)
    (repository / "README.md").write_text(CARD)
    for part in range(2):
        chats = [
            {"dialog": conversation(f"q{part}{n}", f"a{part}{n}"), "kind": "k", "meta": {"x": n} if n else None}
            for n in range(3)
        ]
        table = pyarrow.Table.from_pylist(chats)
        parquet.write_table(table, repository / "chats" / f"train-{part}.parquet")
    held = pyarrow.Table.from_pylist([{"dialog": conversation("held", "out"), "kind": "k", "meta": {"x": 1}}])
    parquet.write_table(held, repository / "chats" / "validation.parquet")
    pairs = [{"question": f"q{n}", "reply": f"a{n}", "text": "no"} for n in range(4)]
    (tmp_path / "pairs").mkdir()
    (tmp_path / "pairs" / "data.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    folders = {"owner/set": str(repository), "owner/pairs": str(tmp_path / "pairs")}
    library = datasets.load_dataset

    def load_dataset(name: str, config: str | None, **options: Any) -> Any:
        return library(folders.get(name, name), config, **options)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return repository


def questions(found: list[Row | Bad]) -> list[str]:
    assert all(isinstance(row, Row) for row in found), found
    return [row.messages[0]["content"] for row in found if isinstance(row, Row)]


def test_default_configuration_and_split_and_named_columns(hub: Path) -> None:
    found = list(read("owner/set", columns=Columns(messages="dialog", route="kind")))
    assert questions(found) == ["q00", "q01", "q02", "q10", "q11", "q12"]
    first = found[0]
    assert isinstance(first, Row) and (first.route, first.where, first.id) == ("k", "owner/set:1", "owner/set:1")
    assert first.messages == conversation("q00", "a00")  # no key that the columnar file filled up with null
    held = list(read("owner/set", hub_split="validation", columns=Columns(messages="dialog")))
    assert questions(held) == ["held"]


def test_another_configuration(hub: Path) -> None:
    assert questions(list(read("owner/set", hub_config="others", columns=Columns(messages="dialog")))) == ["held"]


def test_json_lines_with_prompt_and_completion_columns_and_no_card(hub: Path) -> None:
    columns = Columns(prompt="question", completion="reply")
    found = list(read("owner/pairs", columns=columns))
    assert [row.messages for row in found if isinstance(row, Row)] == [conversation(f"q{n}", f"a{n}") for n in range(4)]


@pytest.mark.parametrize(
    "options, problem",
    [({"hub_split": "test"}, "test"), ({"hub_split": "train[:4]"}, "Available splits"), ({"hub_config": "no"}, "no")],
)
def test_a_missing_split_or_configuration_is_one_error(hub: Path, options: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=f"source 'owner/set' .*{problem}") as refused:
        list(read("owner/set", **options))  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)


def test_a_connection_that_breaks_in_the_middle_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaking(*args: Any, **options: Any) -> Any:
        yield {"prompt": "q"}
        raise RuntimeError("connection reset\nby peer")

    monkeypatch.setattr(datasets, "load_dataset", breaking)
    found = read("owner/set")
    assert isinstance(next(found), Row)
    with pytest.raises(ValueError, match=r"source 'owner/set' .* could be read \(row 2\): connection reset$"):
        next(found)


def test_a_set_that_is_not_there_is_one_error() -> None:
    with pytest.raises(ValueError, match="source 'nobody/nothing' is neither a file nor a Hub dataset"):
        list(read("nobody/nothing"))


def test_a_data_folder_is_built_from_it(hub: Path, tmp_path: Path) -> None:
    target = Target(tiny_target(vocab_size=264, layers=2).model, byte_tokenizer())
    settings = DataSettings(
        source=["owner/set"],
        columns=Columns(messages="dialog"),
        heldout_share=0.0,
        regenerate=RegenerateSettings(enabled=False),
    )
    assert build(target, settings, tmp_path / "out")["counts"]["kept"] == 6
    texts = [
        target.tokenizer.decode(row.ids[a:b]) for row in rows.load(tmp_path / "out", "train") for a, b in row.spans
    ]
    assert texts == [f"a{part}{n}<|im_end|>" for part in range(2) for n in range(3)]
