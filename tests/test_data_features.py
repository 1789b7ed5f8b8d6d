"""A feature store says its size beforehand, keeps what it promises, is found for its very inputs, and by many hands."""

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_data_folder import new_target, settings_for
from test_train_command import run_of
from test_train_ranks import free_port
from tiny import tiny_target
from tiny_chat import byte_tokenizer

from conf.launch import LauncherSettings
from data import __main__ as command
from data import rows
from data.__main__ import DataRun
from data.asking import RegenerateSettings
from data.build import CaptureSettings, DataSettings, build
from data.capture import Ranks, capture, contents_of, folder_for
from data.quantise import dequantise, quantise
from data.store import Contents, PickedTaps, Store
from data.teacher import top_m
from heads.eagle3 import Eagle3Config
from heads.hub import load_head
from heads.medusa import MedusaConfig
from heads.target import Target, TargetParityError, TargetSettings
from train import __main__ as train_command
from train.features import check_store

FORMATS: list[dict[str, Any]] = [
    {}, {"dtype": "bfloat16"}, {"dtype": "float16", "taps": []}, {"dtype": "int8"},
    {"teacher": "top_m", "top_m": 5}, {"teacher": "top_m", "top_m": 3, "dtype": "int8"},
]  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Target:
    return new_target()


@pytest.fixture
def made(target: Target, tmp_path: Path) -> Path:
    """A data folder of twelve conversations."""
    build(target, settings_for(tmp_path), tmp_path / "out")
    return tmp_path / "out"


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("change", FORMATS)
def test_the_bytes_announced_are_the_bytes_written(
    target: Target,
    made: Path,
    tmp_path: Path,
    change: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = capture(target, CaptureSettings(**{"taps": [1, 3], **change}), made, "train", tmp_path)
    written = [t for path in sorted(folder.glob("*.safetensors")) for t in load_file(path).values()]
    size = sum(tensor.nbytes for tensor in written)
    assert f"({size} bytes)" in capsys.readouterr().err
    assert json.loads((folder / "index.json").read_text())["bytes"] == size


def test_int8_features_come_back_as_floats_close_to_a_live_pass(target: Target, made: Path, tmp_path: Path) -> None:
    store = Store(capture(target, CaptureSettings(taps=[1, 3], dtype="int8"), made, "train", tmp_path))
    for row in rows.load(made, "train"):
        kept, live = store.row(row.index), target.forward(torch.tensor([row.ids]), taps=[1, 3])
        for found, own in ((kept.last, live.last[0]), (kept.taps, live.taps[0] if live.taps is not None else None)):
            assert found is not None and own is not None and found.dtype == torch.float32
            assert torch.equal(found, dequantise(*quantise(own)))
            assert float((found - own).norm() / own.norm()) < 0.02


def test_a_kept_teacher_is_the_targets_and_the_heldout_rows_keep_their_last_state(
    target: Target,
    made: Path,
    tmp_path: Path,
) -> None:
    settings = CaptureSettings(taps=[1, 3], teacher="top_m", top_m=6)
    store = PickedTaps(Store(capture(target, settings, made, "train", tmp_path)), [3])
    for row in rows.load(made, "train"):
        kept, live = store.row(row.index), target.forward(torch.tensor([row.ids]), taps=[3])
        want = top_m(target.logits(live.last[0]), 6)
        assert kept.last is None and kept.top is not None and kept.taps is not None and live.taps is not None
        assert torch.equal(kept.taps, live.taps[0]) and torch.equal(kept.top.ids, want.ids)
        assert torch.allclose(kept.top.log_probs, want.log_probs, atol=1e-5)
        assert torch.allclose(kept.top.log_rest, want.log_rest, atol=1e-5)
    held = Store(capture(target, settings, made, "heldout", tmp_path))
    assert held.contents == Contents((1, 3)) and held.row(0).last is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "int4"}, "data.capture.dtype='int4': give one of float32, bfloat16, float16, int8"),
        ({"teacher": "first"}, "data.capture.teacher='first': give one of last, top_m"),
        ({"top_m": 0}, "data.capture.top_m=0"),
        ({"threads": 0}, "data.capture.threads=0"),
        ({"shard_rows": 0}, "data.capture.shard_rows=0"),
        ({"teacher": "top_m", "top_m": 265}, "data.capture.top_m=265 is above the 264 ids"),
        ({"teacher": "top_m", "taps": []}, "keeps no feature a head could read"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(
    target: Target,
    made: Path,
    tmp_path: Path,
    change: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        capture(target, CaptureSettings(**{"taps": [1], **change}), made, "train", tmp_path)
    assert not (tmp_path / "features").exists()


def test_a_feature_that_int8_cannot_hold_is_named(made: Path, tmp_path: Path) -> None:
    broken = new_target()
    broken.model.get_decoder().norm.weight.mul_(float("inf"))
    changes: list[dict[str, Any]] = [{"dtype": "int8"}, {"teacher": "top_m", "top_m": 4}]
    for change in changes:
        with pytest.raises(ValueError, match=r"row 0 \(id .*\): last is not finite"):
            capture(broken, CaptureSettings(**{"taps": [1], **change}), made, "train", tmp_path)


STALE: list[tuple[dict[str, Any], Contents, str]] = [
    ({}, Contents((1,), "int8"), "dtype float32 stored, int8 asked"),
    ({"dtype": "int8"}, Contents((1,)), "dtype int8 stored, float32 asked"),
    ({}, Contents((1,), top_m=4), "top_m None stored, 4 asked"),
    ({"teacher": "top_m", "top_m": 4}, Contents((1,), top_m=8), "top_m 4 stored, 8 asked"),
    ({"teacher": "top_m", "top_m": 4}, Contents((1,)), "top_m 4 stored, None asked"),
]


@pytest.mark.parametrize(("change", "asked", "message"), STALE)
def test_a_store_of_other_contents_is_another_folder_and_stale_reads_are_refused(
    target: Target,
    made: Path,
    tmp_path: Path,
    change: dict[str, Any],
    asked: Contents,
    message: str,
) -> None:
    folder = capture(target, CaptureSettings(**{"taps": [1], **change}), made, "train", tmp_path)
    assert folder_for(tmp_path, made, "train", target.spec, asked) != folder
    with pytest.raises(ValueError, match=f"stale features: {message}"):
        Store(folder, target.spec, asked)


@pytest.mark.parametrize("field", ["revision", "tokenizer_hash", "template_hash", "hidden_size", "dtype"])
def test_a_store_of_another_target_is_refused(target: Target, made: Path, tmp_path: Path, field: str) -> None:
    folder = capture(target, CaptureSettings(taps=[1]), made, "train", tmp_path)
    change: dict[str, Any] = {field: 7 if field == "hidden_size" else "other"}
    other = dataclasses.replace(target.spec, **change)
    with pytest.raises(ValueError, match=f"stale features: target {field} .* stored, (other|7) asked"):
        Store(folder, other, Contents((1,)))
    Store(folder, target.spec, Contents((1,)))


def test_each_input_of_a_capture_misses_the_cache_and_the_same_content_hits(tmp_path: Path) -> None:
    """`cache-key-inputs` in our own words: any input changed is another folder, the same bytes elsewhere are not."""
    source = Path(settings_for(tmp_path).source[0])
    content = source.read_bytes()

    def places(name: str, used: Target, read: Path = source, **capture_settings: Any) -> tuple[str, Path]:
        """Fingerprint of the rows made from the file as it is now, folder of their features."""
        settings = settings_for(tmp_path, max_length=longest - 1 if name == "length" else 200)
        source.write_bytes(content.replace(b"answer 3", b"answer X") if name == "edited" else content)
        settings.source = [str(read)]
        fingerprint = build(used, settings, tmp_path / name)["fingerprint"]
        contents = contents_of(CaptureSettings(**{"taps": [1, 3, 5], **capture_settings}), used.spec, "train")
        return fingerprint, folder_for(tmp_path, tmp_path / name, "train", used.spec, contents)

    one, moved, longest = new_target(), tmp_path / "moved.jsonl", 0
    moved.write_bytes(content)
    first = places("base", one)
    longest = max(len(row.ids) for row in rows.load(tmp_path / "base", "train"))
    assert places("again", one) == first
    assert places("moved", one, moved)[0] == first[0]
    spaced = one.tokenizer.chat_template.replace("\n", "\n\n", 1)
    other = Target(one.model, one.tokenizer, revision="another")
    changed = [places("edited", one), places("length", one), places("template", new_target(template=spaced))]
    changed.append(places("target", other))
    assert len({first, *changed}) == len({name for name, _ in (first, *changed)}) == 5
    kinds = ({"taps": [1, 2, 5]}, {"dtype": "bfloat16"}, {"dtype": "int8"}, {"teacher": "top_m"})
    formats = [places("base", one, **kind) for kind in kinds]
    formats.append(places("base", one, teacher="top_m", top_m=31))
    assert {name for name, _ in formats} == {first[0]}, "the rows are the same ones"
    assert len({folder for _, folder in (first, *changed, *formats)}) == 10


def test_ranks_deal_the_shards_and_the_first_writes_the_index_when_all_are_there(
    target: Target,
    made: Path,
    tmp_path: Path,
) -> None:
    settings = CaptureSettings(taps=[1], shard_rows=2)
    alone = files_of(capture(target, settings, made, "train", tmp_path / "alone"))
    assert len(alone) > 4
    place = tmp_path / "two"
    with pytest.raises(ValueError, match="shard-00001.safetensors.* did not arrive from another process"):
        capture(target, settings, made, "train", place, Ranks(0, 2))
    folder = next((place / "features").iterdir())
    assert sorted(files_of(folder)) == sorted(alone)[1::2], "every second shard and no index"

    def others_work() -> None:  # what the second process does until the first one's barrier
        capture(target, settings, made, "train", place, Ranks(0, 1))

    assert capture(target, settings, made, "train", place, Ranks(1, 2, others_work)) == folder
    assert files_of(folder) == alone


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved target and conversations with answers."""
    folder, tokenizer = tmp_path_factory.mktemp("ranks"), byte_tokenizer()
    tiny_target(vocab_size=272, layers=6).model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    lines = [{"id": n, "route": "r", "prompt": f"question {n}", "completion": f"answer {n}"} for n in range(24)]
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def run_for(place: Path, outputs: Path, **changes: Any) -> DataRun:
    settings = DataSettings(source=[str(place / "in.jsonl")], heldout_share=0.3, max_length=200)
    settings.regenerate = RegenerateSettings(enabled=False)
    settings.capture = CaptureSettings(**{"enabled": True, "taps": [1, 3, 5], "shard_rows": 3, **changes})
    target = TargetSettings(id=str(place / "target"))
    return DataRun("toy", str(outputs), target, settings, LauncherSettings(cpu=True))


def rank(place: str, outputs: str) -> None:
    """What each of the two processes runs."""
    command.main(run_for(Path(place), Path(outputs)))


def test_two_processes_write_the_bytes_of_one(place: Path, tmp_path: Path, root: Path, python: str) -> None:
    common = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}", "OMP_NUM_THREADS": "1"}
    common |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    code = f"import conftest, test_data_features; test_data_features.rank({str(place)!r}, {str(tmp_path / 'two')!r})"
    processes = [
        subprocess.Popen(
            [python, "-c", code], env={**common, "RANK": str(n), "LOCAL_RANK": str(n)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for n in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], str(outputs)[-4000:]
    command.main(run_for(place, tmp_path / "one"))
    found, alone = (
        {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
        for folder in (tmp_path / "two" / "features", tmp_path / "one" / "features")
    )
    assert found == alone and len(alone) > 6
    assert outputs[1][0] == "" and json.loads(outputs[0][0].splitlines()[-1])["features"].keys() == {"train", "heldout"}


def test_the_rows_are_made_before_several_processes_start(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = run_for(place, tmp_path)
    settings.launcher = LauncherSettings(2, cpu=True, multi_gpu=True)
    started: list[bool] = []

    def relaunch(launcher: LauncherSettings, module: str) -> int:
        assert (launcher.num_processes, module) == (2, "data")
        started.append((tmp_path / "data" / "toy" / "manifest.json").is_file())
        return 7

    monkeypatch.setattr(command, "processes_to_start", lambda launcher: launcher.num_processes)
    monkeypatch.setattr(command, "relaunch_if_needed", relaunch)
    assert command.main(settings) == 7
    assert started == [True] and not (tmp_path / "features").exists()


def trained(place: Path, outputs: Path, head: Any, **changes: Any) -> int:
    changes = {"features": "captured", "captured_taps": [1, 3, 5], "steps": 2, **changes}
    return train_command.main(run_of(place, outputs, head, dataset=str(outputs / "data" / "toy"), **changes))


EAGLE3 = Eagle3Config(taps=[1, 3], draft_vocab_size=40)


@pytest.mark.parametrize("kept", [{"dtype": "int8"}, {"teacher": "top_m", "top_m": 9}])
def test_the_train_command_reads_either_format(place: Path, tmp_path: Path, kept: dict[str, Any]) -> None:
    command.main(run_for(place, tmp_path, **kept))
    named = {f"captured_{name}": value for name, value in kept.items()}
    assert trained(place, tmp_path, EAGLE3, packing=True, pack_length=200, **named) == 0
    with pytest.raises(ValueError, match="no captured features .*data.capture.dtype=float32.*train.features=online"):
        trained(place, tmp_path, EAGLE3, name="other")


def test_a_head_that_reads_the_last_state_is_refused_where_none_is_kept(place: Path, tmp_path: Path) -> None:
    command.main(run_for(place, tmp_path, teacher="top_m", top_m=9))
    with pytest.raises(ValueError, match="head 'medusa' reads the target's last hidden state.*teacher=last"):
        trained(place, tmp_path, MedusaConfig(num_heads=2), captured_teacher="top_m", captured_top_m=9)
    with pytest.raises(ValueError, match="data.capture.teacher=top_m data.capture.top_m=8"):
        trained(place, tmp_path, EAGLE3, captured_teacher="top_m", captured_top_m=8)


def test_features_that_the_target_does_not_give_are_found_by_a_live_pass(place: Path, tmp_path: Path) -> None:
    command.main(run_for(place, tmp_path))
    target = Target.load(TargetSettings(id=str(place / "target")))
    contents = Contents((1, 3, 5))
    store = PickedTaps(
        Store(folder_for(tmp_path, tmp_path / "data/toy", "train", target.spec, contents)), contents.taps
    )
    found = [dataclasses.asdict(row) for row in rows.load(tmp_path / "data/toy", "train")]
    check_store(target, found, store, contents.taps)
    other = Target(tiny_target(vocab_size=272, layers=6, seed=3).model)
    with pytest.raises(TargetParityError, match="differ from a live pass"):
        check_store(other, found, store, contents.taps)


def test_the_draft_vocabulary_is_a_matter_of_the_run_and_nothing_of_it_is_picked_up_unasked(
    place: Path, tmp_path: Path
) -> None:
    """`cache-not-picked-up-unasked`: a run with 32 ids leaves no map behind that a run over all ids would find."""
    command.main(run_for(place, tmp_path))
    before = files_of(tmp_path / "data/toy")
    sizes: dict[str, int | None] = {"small": 32, "whole": None, "other": 40}
    for name, size in sizes.items():
        trained(place, tmp_path, Eagle3Config(taps=[1, 3], draft_vocab_size=size), name=name, steps=1)
    heads = {name: load_head(tmp_path / "train" / name) for name in sizes}
    assert {name: head.draft_vocab_size for name, head in heads.items()} == {"small": 32, "whole": 272, "other": 40}
    assert files_of(tmp_path / "data/toy") == before
    with pytest.raises(ValueError, match="holds a run with another head"):
        trained(place, tmp_path, Eagle3Config(taps=[1, 3], draft_vocab_size=40), name="small", steps=1)
