"""Claim: every case of the shared folder comes out as its expected.json says, with default and with 60-byte blocks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import show_mask

CASES = Path(__file__).resolve().parents[2] / "shared" / "cases"
FILES = json.loads((CASES / "expected.json").read_text(encoding="utf-8"))["files"] if CASES.is_dir() else []
pytestmark = pytest.mark.skipif(not FILES, reason="the shared cases are not beside this checkout")


@pytest.mark.parametrize("block_bytes", [None, 60])
@pytest.mark.parametrize("case", FILES, ids=lambda case: f"{Path(case['file']).stem}-{case['template']}")
def test_shared_case(case: dict[str, Any], block_bytes: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(CASES / case["file"]), "--json", "--tokenizer", str(CASES / "tokenizer-bytes")]
    arguments += ["--template", str(CASES / "templates" / f"{case['template']}.json")]
    arguments += ["--max-length", str(case["max_length"])] if "max_length" in case else []
    status = show_mask.main(arguments + (["--block-bytes", str(block_bytes)] if block_bytes else []))
    output = capsys.readouterr()
    got = [json.loads(line) for line in output.out.splitlines()]
    assert len(got) == len(case["rows"])
    for row, expected in zip(got, case["rows"], strict=True):
        wanted = {name: value for name, value in expected.items() if name != "supervised_optional"}
        assert {name: row[name] for name in wanted} == wanted
    assert status == (1 if "load_error" in case else 0)
    assert case.get("load_error", "") in output.err and (not status or case["file"] in output.err)


def test_bos_of_the_template_stands_once_and_history_is_not_trained_on() -> None:
    from transformers import AutoTokenizer

    from data.chat import encode_row
    from data.prompts import Row, read
    from data.template import ChatFormat

    tokenizer = AutoTokenizer.from_pretrained(CASES / "tokenizer-bytes")

    def encoded(file: str, template: str) -> list[list[int]]:
        text = json.loads((CASES / "templates" / f"{template}.json").read_text(encoding="utf-8"))["chat_template"]
        chat = ChatFormat(tokenizer, text)
        return [encode_row(chat, row).ids for row in read(CASES / "data" / file) if isinstance(row, Row)]

    for ids in encoded("multi-turn.jsonl", "chatml-with-bos"):
        assert ids[0] == 257 and ids.count(257) == 1
    assert "add them" not in tokenizer.decode(encoded("think-in-history.jsonl", "chatml-drops-earlier-think")[0])
    first, second, _ = (
        tokenizer.decode(i) for i in encoded("tools-null-content-different-schemas.jsonl", "chatml-tools")
    )
    assert "order_id" not in first and "null" not in first and "city" not in second


def test_numeric_vocabulary_cases() -> None:
    from data.vocab import build, check_size

    def numbers(name: str) -> dict[str, Any]:
        text = (CASES / "numeric" / f"vocab-{name}.json").read_text(encoding="utf-8")
        return dict(json.loads(text))

    case = numbers("d2t-offsets")
    counts = torch.zeros(case["target_vocab"], dtype=torch.int64)
    counts[case["kept_target_ids"]] = 1
    d2t, t2d = build(counts, len(case["kept_target_ids"]), [])
    assert d2t.tolist() == case["expect"]["d2t_offsets"]
    assert t2d.nonzero()[:, 0].tolist() == case["expect"]["t2d_true_at"] and len(t2d) == case["expect"]["t2d_length"]
    assert {str(i): int(i + d2t[i]) for i in range(len(d2t))} == case["expect"]["draft_to_target"]

    case = numbers("larger-than-seen")
    counts = torch.zeros(case["target_vocab"], dtype=torch.int64)
    for token, count in case["counts"].items():
        counts[int(token)] = count
    for wanted in (case, case["smaller"]):
        kept = build(counts, wanted["draft_vocab_size"], case["special_ids"])[1].nonzero()[:, 0].tolist()
        assert set(wanted["expect"]["must_contain"]) <= set(kept) and len(kept) == wanted["draft_vocab_size"]
    assert 0 in build(counts, 8, case["special_ids"])[1].nonzero()[:, 0].tolist()

    case = numbers("size-invalid")
    for size in case["bad_draft_vocab_sizes"]:
        with pytest.raises(ValueError, match="draft_vocab_size"):
            check_size(size, case["target_vocab"])
    assert [check_size(size, case["target_vocab"]) for size in case["ok"]] == case["ok"]
