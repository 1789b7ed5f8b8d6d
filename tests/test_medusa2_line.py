"""Medusa-2 from the command to the export: best/ brings the adapter, what comes after decodes the tuned target."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_train_command import place, run_of  # noqa: F401  (place is a fixture)
from toys import tokens
from transformers import AutoModelForCausalLM

from eval import __main__ as evaluation
from eval.plan import EvalSettings
from heads.hub import load_head, read_facts
from heads.medusa import MedusaConfig
from heads.spec import TargetSpec
from heads.target import Target, TargetSettings
from heads.tuned import load_adapted, merge
from scripts import export
from scripts.export import ExportRun
from train import __main__ as command
from train.__main__ import TrainRun
from train.joint import JointSettings
from train.settings import TrainSettings

HEAD = MedusaConfig(num_heads=3)


@pytest.fixture(scope="module")
def line(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """`outputs` with train/first, heads on the frozen target, and train/toy, both tuned from there."""
    outputs = tmp_path_factory.mktemp("medusa2")
    assert command.main(run_of(place, outputs, HEAD, name="first")) == 0
    assert command.main(tuning(place, outputs)) == 0
    return outputs


def tuning(place: Path, outputs: Path) -> TrainRun:  # noqa: F811
    """Enough steps that heads and target agree more often than the untuned ones, which best/ would keep."""
    few: dict[str, Any] = {"steps": 16, "eval_every": 8, "save_every": 16, "eval_rows": 3}
    joint = JointSettings("joint", lora_r=4)
    run = run_of(place, outputs, HEAD, warm_start=str(outputs / "train" / "first"), joint=joint, **few)
    run.train.optim.lr = 1e-2
    return run


def settings_of(place: Path) -> TargetSettings:  # noqa: F811
    return TargetSettings(id=str(place / "target"))


def eval_settings(place: Path, outputs: Path, **changes: Any) -> EvalSettings:  # noqa: F811
    few: dict[str, Any] = {
        "outputs": str(outputs), "target": settings_of(place), "dataset": str(place / "data"), "methods": ["medusa"],
        "heads": {"medusa": str(outputs / "train" / "toy")}, "prompts": 3, "sampled_prompts": 1, "sweep_prompts": 1,
        "alpha_prompts": 1, "k": 2, "sweep_k": [2], "max_new_tokens": 8, "cost_context": 8,
        "temperatures": [0.0],
    }  # fmt: skip
    return EvalSettings(**{**few, **changes})


def test_best_holds_head_and_adapter_and_the_manifest_says_of_which_base(line: Path, place: Path) -> None:  # noqa: F811
    run, base = line / "train" / "toy", Target.load(settings_of(place)).spec
    facts = read_facts(run)
    assert facts["provenance"]["step"] > 0
    assert {path.name for path in (run / "best").iterdir()} == {"head.json", "head.safetensors", "adapter.safetensors"}
    adapter = facts["adapter"]
    assert (adapter["r"], adapter["alpha"]) == (4, 16.0) and TargetSpec.from_dict(adapter["base"]) == base
    assert facts["target"]["revision"] == f"{base.revision}+lora-{adapter['digest']}"
    assert json.loads((run / "manifest.json").read_text())["adapter"] == adapter
    assert "adapter" not in read_facts(line / "train" / "first")
    made = json.loads((run / "run.json").read_text())["train"]["joint"]
    assert (made["mode"], made["lora_r"]) == ("joint", 4)
    assert "joint" not in json.loads((line / "train" / "first" / "run.json").read_text())["train"]


def test_the_tuned_target_is_the_base_with_the_adapter_and_each_refuses_the_others_head(
    line: Path, place: Path  # noqa: F811
) -> None:  # fmt: skip
    facts, ids = read_facts(line / "train" / "toy"), tokens(1, 9, vocab_size=200)
    base = Target.load(settings_of(place))
    target, lora = load_adapted(settings_of(place), facts)
    on = target.forward(ids).last
    assert float((on - base.forward(ids).last).abs().max()) > 1e-3
    merge(target, lora, packed=True)
    assert torch.allclose(target.forward(ids).last, on, atol=1e-5)
    load_head(line / "train" / "toy", target.spec)
    with pytest.raises(ValueError, match=r"trained for target 'target\+adapter', not 'target' .*revision"):
        load_head(line / "train" / "toy", base.spec)
    with pytest.raises(ValueError, match=r"trained for target 'target', not 'target\+adapter' .*revision"):
        load_head(line / "train" / "first", target.spec)


def test_the_same_command_again_is_skipped(line: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    run = tuning(place, line)
    command.main(run)
    assert "up to date, skipped" in capsys.readouterr().err
    run.train.joint.lambda0 = 0.1
    with pytest.raises(ValueError, match="holds a run with another train"):
        command.main(run)


def test_evaluation_decodes_the_tuned_target_and_tells_its_drift(
    line: Path, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    told: dict[str, Any] = {}
    monkeypatch.setattr("eval.report.write", lambda *args: told.update(args[4]) or Path("none"))
    evaluation.evaluate(eval_settings(place, line))
    out = capsys.readouterr().out
    assert out.startswith("Self-checks passed"), "and with them: output equal to plain decoding of the tuned target"
    manifest = json.loads((line / "eval" / "default" / "manifest.json").read_text())
    drift = manifest["drift"]
    assert drift["kl_base_tuned"] > 0 and 0 <= drift["greedy_agreement"] < 1 and drift["conversations"] == 3
    assert manifest["target"].startswith("target+adapter@") and drift["base"].startswith("target@")
    assert told["drift"] == drift and told["target"] == "target+adapter"
    (words,) = told["caveats"]
    assert words in out and words.startswith("Lossless here means relative to the tuned target, not to target@")
    assert f"{drift['kl_base_tuned']:.4f} nats a token" in words

    with pytest.raises(ValueError, match=r"'target', not 'target\+adapter'"):
        both = {"medusa": str(line / "train" / "toy"), "first": str(line / "train" / "first")}
        evaluation.evaluate(eval_settings(place, line, heads=both, methods=["medusa", "first"], name="both"))


def test_the_export_brings_the_merged_target_and_the_card_says_so(line: Path, place: Path) -> None:  # noqa: F811
    out = line / "out"
    plan = ExportRun(trained=str(line / "train" / "toy"), out=str(out), outputs=str(line))
    export.main(plan)
    files = json.loads((out / "manifest.json").read_text())["files"]
    assert {"model.safetensors", "config.json", "target/model.safetensors", "target/config.json"} <= files.keys()
    ids = tokens(1, 9, vocab_size=200)
    tuned = merge(*load_adapted(settings_of(place), read_facts(line / "train" / "toy")), packed=False)
    written = AutoModelForCausalLM.from_pretrained(out / "target")
    with torch.no_grad():
        assert torch.allclose(written(input_ids=ids).logits, tuned.logits(tuned.forward(ids).last), atol=1e-5)
    lm_head = load_file(out / "model.safetensors")["lm_head.weight"]
    assert torch.equal(lm_head, written.get_output_embeddings().weight), "the heads read the very rows of that target"
    assert Target.load(TargetSettings(id=str(out / "target"))).tokenizer.chat_template, "it serves as it is"
    card = (out / "README.md").read_text()
    assert "# Medusa-2 draft head for target" in card and "vllm serve PATH_OF_THIS_FOLDER/target" in card
    assert "lossless means relative to it" in card and "drift from target was not measured" in card

    with pytest.raises(ValueError, match="push=me/heads: .* push it with format=native"):
        export.main(dataclasses.replace(plan, push="me/heads"))
    (out / "target" / "config.json").write_text("{}")
    export.main(plan)
    assert json.loads((out / "target" / "config.json").read_text()) != {}, "a damaged folder is written again"


def test_a_native_export_keeps_the_adapter_and_is_read_as_the_run_is(line: Path, place: Path) -> None:  # noqa: F811
    out = line / "native"
    export.main(ExportRun(trained=str(line / "train" / "toy"), out=str(out), outputs=str(line), format="native"))
    files = json.loads((out / "manifest.json").read_text())["files"]
    assert sorted(files) == ["README.md", "adapter.safetensors", "head.json", "head.safetensors"]
    again, ids = load_adapted(settings_of(place), read_facts(out))[0], tokens(1, 9, vocab_size=200)
    tuned = load_adapted(settings_of(place), read_facts(line / "train" / "toy"))[0]
    assert torch.equal(again.forward(ids).last, tuned.forward(ids).last)
    load_head(out, again.spec)
    assert "the adapter in this folder makes of it" in (out / "README.md").read_text()
    with pytest.raises(ValueError, match="adapter of this head is missing: use its run folder"):
        load_adapted(settings_of(place), {**read_facts(out), "folder": str(line / "out")})


def test_an_adapter_that_is_not_the_heads_own_is_refused(line: Path, place: Path, tmp_path: Path) -> None:  # noqa: F811
    shutil.copytree(line / "train" / "toy" / "best", tmp_path / "best")
    facts = {**read_facts(tmp_path), "adapter": {**read_facts(tmp_path)["adapter"], "alpha": 8.0}}
    with pytest.raises(ValueError, match="not the adapter this head was trained with"):
        load_adapted(settings_of(place), facts)
    other = {**facts["adapter"]["base"], "revision": "another"}
    with pytest.raises(ValueError, match="trained on target 'target', not 'target' .*revision.*set target.id"):
        load_adapted(settings_of(place), {**facts, "adapter": {**facts["adapter"], "base": other}})
    (tmp_path / "best" / "adapter.safetensors").unlink()
    with pytest.raises(ValueError, match="adapter of this head is missing"):
        load_adapted(settings_of(place), facts)


def test_what_is_no_setting_of_a_frozen_run_leaves_its_fingerprint(place: Path, tmp_path: Path) -> None:  # noqa: F811
    run, manifest = run_of(place, tmp_path, HEAD), {"fingerprint": "data"}
    before = command.run_facts(run, manifest)["fingerprint"]
    assert isinstance(run.train, TrainSettings)
    run.train.joint = dataclasses.replace(run.train.joint, lora_r=8)
    assert command.run_facts(run, manifest)["fingerprint"] == before
    run.train.joint.mode = "joint"
    assert command.run_facts(run, manifest)["fingerprint"] != before
