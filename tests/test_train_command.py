"""`python -m train` from a data folder to a head and an export: skipped when done, refused when it would mislead."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_target
from tiny_chat import byte_tokenizer
from toys import largest_gap, vocabulary, weights

from conf.launch import LauncherSettings
from data.asking import RegenerateSettings
from data.build import DataSettings, build
from heads.eagle3 import Eagle3Config
from heads.hub import build_head, load_head, read_facts, save_head
from heads.medusa import MedusaConfig
from heads.target import Target, TargetParityError, TargetSettings
from scripts import export
from scripts.export import ExportRun
from train import __main__ as command
from train.__main__ import TrainRun
from train.settings import TrainSettings
from train.track import read_log

STEPS: dict[str, Any] = {
    "steps": 3, "batch_size": 4, "micro_batch_size": 2, "eval_every": 2, "eval_rows": 0, "save_every": 2,
    "predict_tokens": 8, "live_prompts": 0, "wandb": "disabled",
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a saved target whose vocabulary is padded (263 ids of 272) and a finished data folder."""
    folder, tokenizer = tmp_path_factory.mktemp("line"), byte_tokenizer()
    tiny_target(vocab_size=272, layers=6).model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    lines = [{"id": n, "route": "r", "prompt": f"question {n}", "completion": f"answer {n}"} for n in range(24)]
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    settings = DataSettings(source=[str(folder / "in.jsonl")], heldout_share=0.3, max_length=200)
    settings.regenerate = RegenerateSettings(enabled=False)
    build(Target.load(TargetSettings(id=str(folder / "target"))), settings, folder / "data")
    return folder


def run_of(place: Path, outputs: Path, head: Any = None, **changes: Any) -> TrainRun:
    head = head or Eagle3Config(taps=[1, 3, 5], draft_vocab_size=40)
    own: dict[str, Any] = {n: changes.pop(n) for n in ("name", "dataset", "fresh", "target") if n in changes}
    settings: dict[str, Any] = {
        "name": "toy",
        "outputs": str(outputs),
        "dataset": str(place / "data"),
        "target": TargetSettings(id=str(place / "target")),
        "launcher": LauncherSettings(cpu=True),
        **own,
    }
    return TrainRun(head=head, train=TrainSettings(**{**STEPS, **changes}), **settings)


@pytest.mark.parametrize(
    "head", [Eagle3Config(taps=[1, 3, 5], draft_vocab_size=40), MedusaConfig(num_heads=3)], ids=["eagle3", "medusa"]
)
def test_the_command_leaves_a_head_that_loads_and_exports(place: Path, tmp_path: Path, head: Any) -> None:
    assert command.main(run_of(place, tmp_path, head)) == 0
    run = tmp_path / "train" / "toy"
    assert {"best", "checkpoints", "log.jsonl", "manifest.json", "run.json"} <= {path.name for path in run.iterdir()}
    target = Target.load(TargetSettings(id=str(place / "target")))
    trained = load_head(run, target.spec)
    assert trained.config.kind == head.kind
    made = read_facts(run)["provenance"]
    assert made["data"] == json.loads((place / "data" / "manifest.json").read_text())["fingerprint"]
    assert made["target"]["id"] == str(place / "target")
    assert json.loads((run / "manifest.json").read_text())["state"]["step"] == 3
    export.main(ExportRun(trained=str(run), out=str(tmp_path / "out"), outputs=str(tmp_path)))
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_run_may_be_selected_by_decoding_and_stopped_early(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live = {"live_prompts": 2, "live_tokens": 6, "live_temperatures": [0.0, 1.0], "patience": 1}
    run = run_of(place, tmp_path, steps=40, eval_every=2, save_every=40, **live)
    run.train.optim.lr = 1e-12  # nothing is learned: the second selection is no better
    assert command.main(run) == 0
    made = json.loads((tmp_path / "train" / "toy" / "manifest.json").read_text())
    assert (made["selected_by"], made["stopped_early"], made["state"]["step"]) == ("live", True, 2)
    assert made["best"]["step"] == 0 and len(made["best"]["live"]["acceptance_lengths"]) == 2
    lines = [(line["step"], line["split"]) for line in read_log(tmp_path / "train" / "toy" / "log.jsonl")]
    assert lines == [(0, "heldout"), (0, "live"), (1, "train"), (2, "train"), (2, "heldout"), (2, "live")]
    told = capsys.readouterr().err
    assert "stopped at step 2 of 40: no better head in 1 selections" in told
    assert "best from step 0: measured acceptance length" in told
    command.main(run)
    assert "up to date, skipped" in capsys.readouterr().err


def test_the_draft_vocabulary_holds_every_special_id_and_none_that_pads_the_model(place: Path, tmp_path: Path) -> None:
    command.main(run_of(place, tmp_path, Eagle3Config(taps=[1, 3, 5], draft_vocab_size=263)))
    kept = load_head(tmp_path / "train" / "toy").target_rows().tolist()
    special = json.loads((place / "data" / "manifest.json").read_text())["special_ids"]
    assert set(special) <= set(kept) and max(kept) == 262


def test_the_same_command_again_is_skipped_and_other_settings_are_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.main(run_of(place, tmp_path))
    first = weights(load_head(tmp_path / "train" / "toy"))
    lines = read_log(tmp_path / "train" / "toy" / "log.jsonl")
    capsys.readouterr()
    command.main(run_of(place, tmp_path, micro_batch_size=4))  # another split of the same steps
    assert "up to date, skipped" in capsys.readouterr().err
    assert read_log(tmp_path / "train" / "toy" / "log.jsonl") == lines
    with pytest.raises(ValueError, match=r"holds a run with another train: .*fresh=true"):
        command.main(run_of(place, tmp_path, seed=5))
    command.main(run_of(place, tmp_path, seed=5, fresh=True))
    assert largest_gap(first, weights(load_head(tmp_path / "train" / "toy"))) > 0


@dataclasses.dataclass
class Refusal:
    changes: dict[str, Any]
    message: str


REFUSED = {
    "no data": Refusal({"dataset": "nowhere"}, "no finished data folder"),
    "no target": Refusal({"target": TargetSettings(id="./nowhere")}, "no model folder there"),
    "default taps on few layers": Refusal({"head": Eagle3Config()}, "target of 6 layers"),
    "taps outside": Refusal({"head": Eagle3Config(taps=[1, 3, 9])}, r"head.taps=\[1, 3, 9\]"),
    "vocabulary too large": Refusal({"head": MedusaConfig(draft_vocab_size=273)}, "draft_vocab_size=273"),
    "no heads": Refusal({"head": MedusaConfig(num_heads=0)}, "head.num_heads=0"),
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_bad_input_is_one_error_before_a_run_folder_is_made(place: Path, tmp_path: Path, what: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[what].message) as raised:
        command.main(run_of(place, tmp_path, **REFUSED[what].changes))
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "train" / "toy" / "run.json").exists()


def test_data_of_another_target_is_refused_and_both_are_named(place: Path, tmp_path: Path) -> None:
    tiny_target(vocab_size=272, layers=6, seed=4).model.save_pretrained(tmp_path / "other")
    byte_tokenizer().save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="made for target 'target' .* this run's target is 'other'"):
        command.main(run_of(place, tmp_path, target=TargetSettings(id=str(tmp_path / "other"))))


def test_an_output_folder_that_cannot_be_written_is_named(place: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match="cannot write to .*choose another `outputs` folder"):
        command.main(run_of(place, tmp_path / "file"))


def test_a_wrong_teacher_stops_the_run_before_the_first_step(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "finish_logits", lambda self, logits: logits.float() * 1.1)
    with pytest.raises(TargetParityError, match="teacher parity failed"):
        command.main(run_of(place, tmp_path))
    assert not (tmp_path / "train" / "toy" / "best").exists()


@pytest.mark.parametrize("precision", ["fp16", "fp8"])
def test_precisions_that_need_loss_scaling_are_refused_before_anything_is_read(
    place: Path, tmp_path: Path, precision: str
) -> None:
    run = run_of(place, tmp_path, dataset="nowhere")
    run.launcher = LauncherSettings(cpu=True, mixed_precision=precision)
    with pytest.raises(ValueError, match=f"launcher.mixed_precision={precision} .*use bf16"):
        command.main(run)


def warm_source(folder: Path, target: Target) -> Any:
    """A saved EAGLE-3 head over six ids that no counts would choose."""
    settings = {"kind": "eagle3", "taps": [1, 3, 5], "draft_vocab_size": 6}
    head = build_head(settings, target.spec, vocabulary([1, 3, 8, 9, 40, 63], target.spec.vocab_size))
    save_head(folder, head, target.spec, {"note": "warm"})
    return head


def test_a_warm_start_keeps_the_map_of_its_head_through_a_resume(place: Path, tmp_path: Path) -> None:
    target = Target.load(TargetSettings(id=str(place / "target")))
    source = warm_source(tmp_path / "source", target)
    run = run_of(place, tmp_path, Eagle3Config(taps=[1, 3, 5], draft_vocab_size=6), warm_start=str(tmp_path / "source"))
    run.train.optim.lr = 1e-6  # the head hardly moves: its start shows
    assert command.main(run) == 0
    folder = tmp_path / "train" / "toy"
    trained = load_head(folder, target.spec)
    assert torch.equal(trained.d2t, source.d2t) and largest_gap(weights(trained), weights(source)) < 1e-4
    assert read_facts(folder)["provenance"]["train"]["warm_start"] == str(tmp_path / "source")

    (folder / "manifest.json").unlink()  # killed between the last checkpoint and the manifest
    (tmp_path / "source").rename(tmp_path / "moved")
    assert command.main(run) == 0, "the checkpoint has all it takes"
    assert json.loads((folder / "manifest.json").read_text())["state"]["step"] == 3


def test_a_warm_start_that_does_not_fit_is_refused_before_a_run_folder_is_made(place: Path, tmp_path: Path) -> None:
    warm_source(tmp_path / "source", Target.load(TargetSettings(id=str(place / "target"))))
    with pytest.raises(ValueError, match="train.warm_start=.* this run trains 'medusa'"):
        command.main(run_of(place, tmp_path, MedusaConfig(), warm_start=str(tmp_path / "source")))
    assert not (tmp_path / "train" / "toy").exists()
