"""Claim: a data folder is whole or absent, says what it was made for, and its features equal a live forward."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_target
from tiny_chat import CHATML, byte_tokenizer

from data import rows
from data.asking import RegenerateSettings
from data.build import CaptureSettings, DataSettings, build
from data.capture import capture
from data.records import DataError
from data.store import Contents, Store
from heads.spec import default_taps
from heads.target import Target


def new_target(seed: int = 0, template: str = CHATML) -> Target:
    return Target(tiny_target(vocab_size=264, layers=8, seed=seed).model, byte_tokenizer(template))


@pytest.fixture(scope="module")
def target() -> Target:
    return new_target()


def source(folder: Path, count: int = 12) -> Path:
    lines = [
        {"id": n, "route": f"r{n % 3}", "prompt": f"question {n}", "completion": f"answer {n}"} for n in range(count)
    ]
    lines += [lines[0], {"id": "x", "prompt": "no answer"}]
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return folder / "in.jsonl"


def settings_for(tmp_path: Path, **changes: Any) -> DataSettings:
    fields: dict[str, Any] = {"source": [str(source(tmp_path))], "heldout_share": 0.25, "max_length": 200}
    given = RegenerateSettings(enabled=False)
    return DataSettings(**{**fields, "regenerate": given, **changes})


def test_prompts_too_long_to_answer_are_lost_rows_among_all_that_were_read(target: Target, tmp_path: Path) -> None:
    turns = [["word " * 60], *([f"question {n}"] for n in range(5))]
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"turns": t}) for t in turns), encoding="utf-8")
    ask = RegenerateSettings(max_new_tokens=4)
    fields: dict[str, Any] = {"source": [str(tmp_path / "p.jsonl")], "heldout_share": 0.0, "regenerate": ask}
    counts = build(target, settings_for(tmp_path, **fields), tmp_path / "out")["counts"]
    assert (counts["read"], counts["kept"]) == (6, 5)
    with pytest.raises(DataError, match="1 of 6 rows dropped, more than data.min_kept_share=0.9"):
        build(target, settings_for(tmp_path, **fields, min_kept_share=0.9), tmp_path / "strict")


def test_given_answers_become_masked_rows_and_everything_is_counted(target: Target, tmp_path: Path) -> None:
    manifest = build(target, settings_for(tmp_path), tmp_path / "out")
    counts = manifest["counts"]
    assert (counts["read"], counts["kept"]) == (14, 12)
    assert counts["dropped"] == {"exact_repeat": 1, "no_assistant_content": 1}
    rejects = [json.loads(line) for line in (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()]
    assert [(r["line"], r["reason"]) for r in rejects] == [(13, "exact_repeat"), (14, "no_assistant_content")]
    train, held = (rows.load(tmp_path / "out", split, target.spec) for split in ("train", "heldout"))
    assert len(train) == counts["train"] and len(held) == counts["heldout"] and len(train) + len(held) == 12
    assert not {r.key for r in train} & {r.key for r in held}
    texts = [target.tokenizer.decode([r.ids[i] for i in r.supervised().nonzero()[:, 0]]) for r in [*train, *held]]
    assert sorted(texts) == sorted(f"answer {n}<|im_end|>" for n in range(12))
    counted = rows.counts(tmp_path / "out")
    assert int(counted.sum()) == counts["train_supervised"]
    assert set(manifest["special_ids"]) >= set(target.eos_ids)


def test_finished_folder_is_reused_and_a_changed_byte_is_noticed(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_for(tmp_path)
    first = build(target, settings, tmp_path / "out")
    capsys.readouterr()
    assert build(target, settings, tmp_path / "out") == first
    assert "up to date" in capsys.readouterr().err
    path, stat = Path(settings.source[0]), Path(settings.source[0]).stat()
    path.write_bytes(path.read_bytes().replace(b"question 3", b"question X"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    second = build(target, settings, tmp_path / "out")
    assert second["fingerprint"] != first["fingerprint"]
    (tmp_path / "out" / "train.jsonl").write_text("")  # a damaged file is made anew
    assert build(target, settings, tmp_path / "out") == second
    assert len(rows.load(tmp_path / "out", "train")) == second["counts"]["train"]


@pytest.mark.parametrize("change", [{"max_length": 150}, {"heldout_share": 0.5}, {"limit": 6}])
def test_each_setting_that_changes_rows_changes_the_fingerprint(
    target: Target, tmp_path: Path, change: dict[str, Any]
) -> None:
    first = build(target, settings_for(tmp_path), tmp_path / "a")
    assert build(target, settings_for(tmp_path, **change), tmp_path / "b")["fingerprint"] != first["fingerprint"]


def test_regenerated_folder_supervises_the_targets_own_ids(target: Target, tmp_path: Path) -> None:
    regenerate = RegenerateSettings(max_new_tokens=6, batch_size=4)
    manifest = build(target, settings_for(tmp_path, regenerate=regenerate, limit=8), tmp_path / "out")
    counts = manifest["counts"]
    assert counts["kept"] == 8 and counts["read"] == 8 + counts["limited"] + sum(counts["dropped"].values())
    answers = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    by_key = {a["key"]: a["turns"][0] for a in answers}
    for row in [r for split in ("train", "heldout") for r in rows.load(tmp_path / "out", split)]:
        turn = by_key[row.key]
        assert row.ids == turn["prompt_ids"] + turn["output_ids"]
        assert row.spans == [(len(turn["prompt_ids"]), len(row.ids))]


def test_a_set_without_supervision_or_with_too_many_lost_rows_stops(target: Target, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    settings = settings_for(tmp_path, source=[str(tmp_path / "bad.jsonl")])
    with pytest.raises(DataError, match=r"no supervised tokens.*bad\.jsonl:1"):
        build(target, settings, tmp_path / "out")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt: \n{"x": 1}\n')
    with pytest.raises(DataError, match=r"2 of 3 rows dropped.*bad\.jsonl:2"):
        build(target, settings, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_folder_for_another_target_or_template_is_refused_with_both_named(target: Target, tmp_path: Path) -> None:
    build(target, settings_for(tmp_path), tmp_path / "out")
    other = new_target(template=CHATML.replace("\n{% endfor", "\n\n{% endfor"))
    with pytest.raises(ValueError, match=f"template_hash {target.spec.template_hash}.*{other.spec.template_hash}"):
        rows.load(tmp_path / "out", "train", other.spec)
    with pytest.raises(ValueError, match="no finished data folder"):
        rows.load(tmp_path / "nothing", "train")
    with pytest.raises(ValueError, match="no such split"):
        rows.load(tmp_path / "out", "test")


@pytest.fixture
def made(target: Target, tmp_path: Path) -> Path:
    build(target, settings_for(tmp_path), tmp_path / "out")
    return tmp_path / "out"


def test_captured_features_equal_a_live_forward_exactly(target: Target, made: Path, tmp_path: Path) -> None:
    settings = CaptureSettings(shard_rows=4)
    store = Store(capture(target, settings, made, "train", tmp_path), target.spec, Contents(tuple(default_taps(8))))
    found = rows.load(made, "train")
    assert len(store) == len(found)
    for row in found:
        live = target.forward(torch.tensor([row.ids]), taps=[2, 4, 5])
        kept = store.row(row.index)
        assert live.taps is not None and kept.last is not None and kept.taps is not None
        assert torch.equal(kept.last, live.last[0]) and torch.equal(kept.taps, live.taps[0])


def test_interrupted_capture_gives_the_same_files_and_half_a_store_is_none(
    target: Target, made: Path, tmp_path: Path
) -> None:
    settings = CaptureSettings(taps=[1], shard_rows=3)
    folder = capture(target, settings, made, "train", tmp_path)
    whole = {p.name: p.read_bytes() for p in folder.iterdir()}
    shards = sorted(name for name in whole if name.startswith("shard"))
    assert len(shards) > 2
    for name in ("index.json", shards[-1], shards[1]):
        (folder / name).unlink()
    (folder / "shard-00001.tmp").write_bytes(whole[shards[1]][:100])
    before = (folder / shards[0]).stat().st_mtime_ns
    with pytest.raises(ValueError, match="no finished feature store"):
        Store(folder)
    assert capture(target, settings, made, "train", tmp_path) == folder
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == whole
    assert (folder / shards[0]).stat().st_mtime_ns == before


@pytest.mark.parametrize("change", [{"taps": [1, 2]}, {"dtype": "bfloat16"}])
def test_other_taps_or_dtype_are_another_store_and_stale_reads_are_refused(
    target: Target, made: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    folder = capture(target, CaptureSettings(taps=[1]), made, "train", tmp_path)
    assert capture(target, CaptureSettings(**{"taps": [1], **change}), made, "train", tmp_path) != folder
    with pytest.raises(ValueError, match=r"stale features: taps \[1\] stored, \[2\] asked"):
        Store(folder, target.spec, Contents((2,)))
    with pytest.raises(ValueError, match="stale features: rows"):
        Store(folder, rows_sha256="0" * 64)


def test_budget_and_overflow_stop_with_names(
    target: Target, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = sum(len(r.ids) for r in rows.load(made, "train"))
    with pytest.raises(ValueError, match="above data.capture.budget_gb=1e-06"):
        capture(target, CaptureSettings(budget_gb=1e-6), made, "train", tmp_path)
    assert f"({tokens * 32 * 4 * 4} bytes)" in capsys.readouterr().err
    assert not (tmp_path / "features").exists()
    large = new_target()
    large.model.get_decoder().norm.weight.mul_(1e6)
    with pytest.raises(ValueError, match=r"row 0 \(id .*\): last is not finite as float16"):
        capture(large, CaptureSettings(taps=[1], dtype="float16"), made, "train", tmp_path)
    capture(large, CaptureSettings(taps=[1], dtype="bfloat16"), made, "train", tmp_path)


def test_taps_outside_the_model_or_not_distinct_are_refused(target: Target, made: Path, tmp_path: Path) -> None:
    for taps in ([9], [-1, 2], [2, 2], [3, 1]):
        with pytest.raises(ValueError, match="distinct, ascending and inside 0..8"):
            capture(target, CaptureSettings(taps=taps), made, "train", tmp_path)
    with pytest.raises(ValueError, match="target of 2 layers"):
        default_taps(2)
