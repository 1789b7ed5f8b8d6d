"""Claim: python -m data loads the target's weights only where it runs them, and knows the same target without."""

import dataclasses
import json
from pathlib import Path

import pytest
from chat_server import ChatServer, serving
from tiny import tiny_target
from tiny_chat import byte_tokenizer

from data import rows
from data.__main__ import DataRun, main
from data.asking import RegenerateSettings
from data.build import DataSettings
from data.template import ChatFormat
from heads.target import Target, TargetSettings


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A target's folder, a generation config with an end id of its own included."""
    target, folder = tiny_target("qwen3", vocab_size=264, layers=2, max_position_embeddings=512), tmp_path / "model"
    target.model.generation_config.eos_token_id = [1, 9]
    target.model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def run_of(model: Path, place: Path, **regenerate: object) -> DataRun:
    lines = [{"prompt": f"question {n}", "completion": f"answer {n}"} for n in range(8)]
    (place / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = RegenerateSettings(**regenerate)  # type: ignore[arg-type]
    data = DataSettings(source=[str(place / "in.jsonl")], heldout_share=0.3, regenerate=asked)
    return DataRun(name="toy", outputs=str(place), target=TargetSettings(id=str(model)), data=data)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_target_without_weights_says_the_same_of_itself(tmp_path: Path, kind: str, tied: bool) -> None:
    made = tiny_target(kind, vocab_size=264, layers=2, tie_word_embeddings=tied)
    made.model.generation_config.eos_token_id = [1, 9]
    made.model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    settings = TargetSettings(id=str(tmp_path), dtype="bfloat16")
    whole, bare = Target.load(settings), Target.load(settings, weights=False)
    assert dataclasses.asdict(bare.spec) == dataclasses.asdict(whole.spec)
    assert bare.spec.tie_word_embeddings == tied and bare.eos_ids == whole.eos_ids >= {1, 9}
    assert {p.device.type for p in bare.model.parameters()} == {"meta"}


def test_given_answers_need_no_weights_and_make_the_folder_that_weights_would(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(model, tmp_path, enabled=False)
    main(run)
    manifest = rows.manifest(tmp_path / "data" / "toy", Target.load(run.target).spec)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["counts"] == manifest["counts"]
    assert manifest["counts"]["kept"] == 8
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)  # loading weights would fail
    main(run_of(model, tmp_path, enabled=False, seed=1))


def test_answers_of_a_server_need_no_weights_and_answers_made_here_do(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    (model / "model.safetensors").unlink()
    with serving(ChatServer(ChatFormat(byte_tokenizer()), exact=True)) as server:
        main(run_of(model, tmp_path, server=server.url, server_model="m"))
    assert (
        len(rows.load(tmp_path / "data" / "toy", "train")) + len(rows.load(tmp_path / "data" / "toy", "heldout")) == 8
    )
    with pytest.raises(ValueError, match="target.id='.*model' could not be loaded"):
        main(run_of(model, tmp_path))
