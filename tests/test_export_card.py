"""The model card states target, data, budget and measured rows; the command line works from settings to folder."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from test_export import DRAFT, run_folder
from tiny import tiny_target
from toys import eagle3

from scripts import export
from scripts.export import ExportRun

TRAIN = {"steps": 500, "batch_size": 2, "seed": 7, "optim": {"lr": 0.001}, "loss": {"terms": {}, "step_decay": 0.8}}
ROWS = [
    {"method": "plain", "k": 0, "temperature": 0.0, "proposal": "greedy", "route": "all", "prompts": 20, "tokens": 1280,
     "acceptance_length": 1.0, "speedup_decode": 1.0},
    {"method": "mine", "k": 4, "temperature": 0.0, "proposal": "greedy", "route": "all", "prompts": 20, "tokens": 1280,
     "rule": "greedy", "acceptance_length": 1.634, "acceptance_length_ci": [1.5, 1.8], "speedup_decode": 1.21},
    {"method": "mine", "k": 4, "temperature": 0.0, "proposal": "greedy", "route": "maths", "prompts": 3, "tokens": 180,
     "acceptance_length": 9.99, "speedup_decode": None},
    {"method": "rival", "k": 4, "temperature": 0.0, "proposal": "greedy", "route": "all", "acceptance_length": 8.88},
]  # fmt: skip


def trained(folder: Path, name: str = "tiny-llama") -> tuple[Path, dict[str, Any]]:
    """A run folder with log, and its provenance."""
    target = tiny_target(layers=6)
    target.spec = type(target.spec)(**{**vars(target.spec), "name": name})
    heldout = {"predicted_acceptance_length": 1.6172, "position_acceptance_joint": [0.4, 0.2]}
    run_folder(
        folder,
        target,
        eagle3(target, std=0.3, draft=DRAFT),
        train=TRAIN,
        data="f00d",
        heldout=heldout,
        step=300,
        tokens=45678,
    )
    lines = [{"step": 300, "split": "train", "seconds": 612.4}, {"step": 300, "split": "heldout", "loss": 1.0}]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder, json.loads((folder / "best" / "head.json").read_text())["provenance"]


def data_folder(outputs: Path) -> None:
    folder = outputs / "data" / "own"
    folder.mkdir(parents=True)
    counts = {"train": 540, "heldout": 60, "dropped": {"empty": 2, "too_long": 1}, "train_supervised": 61234}
    regenerate = {"enabled": True, "temperature": 0.0, "top_p": 1.0}
    manifest = {"kind": "data", "fingerprint": "f00d", "counts": counts, "settings": {"regenerate": regenerate}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    other = outputs / "data" / "another"
    other.mkdir()
    (other / "manifest.json").write_text(json.dumps({**manifest, "fingerprint": "beef"}))


def eval_folder(folder: Path, provenance: dict[str, Any], rows: Any = ROWS) -> Path:
    folder.mkdir(parents=True)
    (folder / "rows.json").write_text(json.dumps(rows))
    heads = {"mine": provenance, "rival": {"step": 1}}
    (folder / "manifest.json").write_text(
        json.dumps({"kind": "eval", "heads": heads, "settings": {"max_new_tokens": 64}})
    )
    return folder


def card_of(tmp_path: Path, **settings: Any) -> str:
    export.main(
        ExportRun(
            trained=str(tmp_path / "run"), out=str(tmp_path / "out"), outputs=str(tmp_path / "outputs"), **settings
        )
    )
    return (tmp_path / "out" / "README.md").read_text()


def test_the_card_states_target_data_budget_and_measured_rows(tmp_path: Path) -> None:
    _, provenance = trained(tmp_path / "run")
    data_folder(tmp_path / "outputs")
    measured = eval_folder(tmp_path / "outputs" / "eval" / "first", provenance)
    text = card_of(tmp_path, measured=str(measured), base_model="someone/tiny-llama")
    for stated in (
        "Target: `tiny-llama`, revision `none`",
        "folder `own`, fingerprint `f00d`, answers by the target itself, temperature 0, top-p 1",
        "540 for training, 60 held out, 3 dropped",
        "Supervised training tokens: 61,234",
        "step 300 of 500, the best by predicted acceptance length",
        "Trained positions up to that step: 45,678",
        "612 s",
        "lr 0.001; loss 1 kl; step weights 0.8^i; seed 7",
        "Draft vocabulary: 7 of 64 ids",
        "taps (state entering layer): 1, 2, 4",
        "| all | mine | 4 | 0 | greedy | greedy | 20 | 1280 | 1.63 | 1.50 to 1.80 | 1.21x |",
        "| maths | mine | 4 | 0 | - | greedy | 3 | 180 | 9.99 | - | - |",
        "| all | plain | 0 | 0 | - | greedy | 20 | 1280 | 1.00 | - | 1.00x |",
        "Predicted from held-out text at T = 0: 1.62",
        "vllm serve someone/tiny-llama --speculative-config",
        "--speculative-algorithm EAGLE3",
        "Head: apache-2.0",
    ):
        assert stated in text, stated
    assert "8.88" not in text, "not of other heads"


def test_the_front_matter_is_what_the_hub_reads(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    text = card_of(tmp_path, base_model="someone/tiny: llama", license="mit")
    front = OmegaConf.to_container(OmegaConf.create(text.split("---")[1]))
    assert front == {
        "license": "mit",
        "base_model": "someone/tiny: llama",
        "base_model_relation": "finetune",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-model", "eagle3"],
    }


def test_what_is_not_known_is_said_so(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    (tmp_path / "run" / "log.jsonl").unlink()
    text = card_of(tmp_path)
    assert "Not measured by decoding yet. Predicted" in text and "Data: fingerprint `f00d`" in text
    assert "None" not in text and "nan" not in text


def test_the_embedded_target_is_served_by_its_hub_id_and_its_four_bits_are_stated(tmp_path: Path) -> None:
    trained(tmp_path / "run", name="smollm2-135m")
    text = card_of(tmp_path)
    assert "vllm serve HuggingFaceTB/SmolLM2-135M-Instruct" in text and "in four bits" in text


def test_an_evaluation_of_another_head_or_an_unfinished_one_is_refused(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    other = eval_folder(tmp_path / "outputs" / "eval" / "other", {"step": 299})
    with pytest.raises(ValueError, match=r"this head is not among those evaluated there \(mine, rival\)"):
        card_of(tmp_path, measured=str(other))
    (other / "manifest.json").unlink()
    with pytest.raises(ValueError, match="no finished evaluation there"):
        card_of(tmp_path, measured=str(other))


def test_the_command_leaves_a_folder_of_published_files_only(tmp_path: Path, root: Path, python: str) -> None:
    trained(tmp_path / "run")
    line = [python, "-m", "scripts.export", f"trained={tmp_path / 'run'}", "name=toy", f"outputs={tmp_path}"]
    done = subprocess.run(line, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "export" / "toy"
    assert json.loads(done.stdout.splitlines()[-1])["out"] == str(out)
    files = ["README.md", "config.json", "manifest.json", "model.safetensors"]
    assert sorted(path.name for path in out.iterdir()) == files
