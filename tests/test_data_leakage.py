"""Claim: nothing that is trained on repeats what is held out or evaluated, word for word or 13 words long."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_target
from tiny_chat import byte_tokenizer

from data import rows
from data.asking import RegenerateSettings
from data.build import DataSettings, build
from data.leakage import Overlap, words
from data.prompts import Row
from heads.target import Target

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen"


def row(*users: str, **fields: Any) -> Row:
    return Row("f", 1, "x", "r", [{"role": "user", "content": text} for text in users], **fields)


@pytest.mark.parametrize(
    "held, trained, reason",
    [
        ("Rename t!", "Rename t!", "leak_exact"),
        ("Rename t!", "rename   T", "leak_normalised"),
        ("ﬁne Größe", "FINE GRÖSSE?", "leak_normalised"),
        (LONG, f"Please say {LONG}, and more", "leak_13gram"),
        (f"A {LONG} B", LONG.upper(), "leak_13gram"),
        ("我们明天去公园看红色的花和树", "他说:我们明天去公园看红色的花和", "leak_13gram"),
        (LONG.rsplit(" ", 1)[0], f"Please say {LONG}", None),  # 12 words in common
        (LONG, LONG.replace("seven", "7"), None),
        ("!?", "?!", None),
    ],
)
def test_overlap_is_found_and_named(held: str, trained: str, reason: str | None) -> None:
    overlap = Overlap()
    overlap.add(row(held))
    found = overlap.find(row(trained))
    assert (found[0] if found else None) == reason
    assert found is None or found[1] == "f:1"


def test_a_13_gram_never_runs_across_two_messages_and_words_are_folded() -> None:
    overlap = Overlap()
    overlap.add(row(LONG))
    start, end = LONG[:20], LONG[20:]
    assert overlap.find(row(start, end, "and more")) is None
    assert words("Größe: 2 m² İ") == ["grösse", "2", "m2", "i"]


def test_system_prompts_and_answers_are_not_compared_and_ids_only_whole() -> None:
    overlap = Overlap()
    system = {"role": "system", "content": LONG}
    overlap.add(Row("f", 1, "x", "r", [system, {"role": "user", "content": "a"}]))
    overlap.add(row(ids=list(range(40)), mask=[True] * 40))
    assert overlap.find(Row("f", 2, "y", "r", [system, {"role": "user", "content": "b"}])) is None
    assert overlap.find(row(ids=list(range(40)), mask=[True] * 40)) == ("leak_exact", "f:1")
    assert overlap.find(row(ids=list(range(41)), mask=[True] * 41)) is None


def test_leaks_leave_the_training_split_alone_and_are_counted_and_listed(tmp_path: Path) -> None:
    target = Target(tiny_target(vocab_size=264, layers=2).model, byte_tokenizer())
    lines = [{"prompt": f"question {n}", "completion": "a"} for n in range(30)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    settings = DataSettings(
        source=[str(tmp_path / "in.jsonl")], heldout_share=0.3, regenerate=RegenerateSettings(enabled=False)
    )
    first = build(target, settings, tmp_path / "out")
    assert not any(reason.startswith("leak") for reason in first["counts"]["dropped"])
    held = {r.source_line for r in _rows(tmp_path, "heldout")}
    trained = [n for n in range(30) if n + 1 not in held]
    again = [{"prompt": f"QUESTION {min(held) - 1}", "completion": "b"}]  # a held-out text, written otherwise
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, [*lines, *again])))
    evaluated = [{"turns": [f"question {trained[0]}"]}, {"id": 1}, {"turns": [f"Question: {trained[1]}"]}]
    (tmp_path / "eval.jsonl").write_text("\n".join(map(json.dumps, evaluated)))
    settings.evaluation_sets = [str(tmp_path / "eval.jsonl")]
    second = build(target, settings, tmp_path / "out")
    assert second["fingerprint"] != first["fingerprint"]
    dropped = second["counts"]["dropped"]
    rejects = [json.loads(line) for line in (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()]
    on_train = 0 if 31 in {r.source_line for r in _rows(tmp_path, "heldout")} else 1
    assert dropped == {"leak_exact": 1, "leak_normalised": 1 + on_train}
    assert [r["line"] for r in rejects][:2] == [trained[0] + 1, trained[1] + 1]
    assert rejects[0]["detail"] == f"the user text of {tmp_path / 'eval.jsonl'}:1"
    assert second["counts"]["read"] == 31 == second["counts"]["kept"] + sum(dropped.values())


def test_a_heldout_file_is_held_out_whole_and_kept_out_of_training(tmp_path: Path) -> None:
    target = Target(tiny_target(vocab_size=264, layers=2).model, byte_tokenizer())
    for name, numbers in (("train", range(10)), ("held", (3, 20, 21))):
        lines = [{"prompt": f"question {n}", "completion": f"{name}"} for n in numbers]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    settings = DataSettings(
        source=[str(tmp_path / "train.jsonl")],
        heldout_source=[str(tmp_path / "held.jsonl")],
        heldout_share=0.0,
        regenerate=RegenerateSettings(enabled=False),
    )
    counts = build(target, settings, tmp_path / "out")["counts"]
    assert (counts["train"], counts["heldout"], counts["dropped"]) == (9, 3, {"leak_exact": 1})
    sources = (tmp_path / "out" / "heldout.jsonl").read_text()
    assert sources.count("/held.jsonl:") == 3


class _Line:
    def __init__(self, source: str) -> None:
        self.source_line = int(source.rpartition(":")[2])


def _rows(folder: Path, split: str) -> list[_Line]:
    rows.manifest(folder / "out")
    return [_Line(json.loads(line)["source"]) for line in (folder / "out" / f"{split}.jsonl").read_text().splitlines()]
