"""What an export refuses in one sentence, and that a refusal or a failure leaves what was there before."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_export import DRAFT, config_of, exported, run_folder
from tiny import tiny_target
from toys import eagle3, spread

from heads.eagle3 import Eagle3, Eagle3Config
from heads.target import Target
from scripts import export
from scripts.export import ExportRun


def damaged(tmp_path: Path, head: Eagle3, target: Target, change: Any) -> Path:
    """A run folder whose tensors or facts were altered by hand."""
    folder = run_folder(tmp_path / "run", target, head)
    tensors = load_file(folder / "best" / "head.safetensors")
    facts = json.loads((folder / "best" / "head.json").read_text())
    change(tensors, facts)
    save_file(tensors, folder / "best" / "head.safetensors")
    (folder / "best" / "head.json").write_text(json.dumps(facts))
    return folder


def without(*names: str) -> Any:
    return lambda tensors, facts: [tensors.pop(name) for name in names]


REFUSED: dict[str, tuple[Any, str]] = {
    "no map": (without("d2t"), r"head.safetensors: d2t is missing, the map of 7 draft ids to the target's 64"),
    "no map at all": (without("d2t", "t2d"), r"d2t is missing"),
    "a map out of order": (lambda tensors, facts: tensors["d2t"].copy_(tensors["d2t"].flip(0)), "d2t and t2d"),
    "maps that disagree": (lambda tensors, facts: tensors.update(t2d=tensors["t2d"].roll(1)), "d2t and t2d"),
    "fc of another width": (
        lambda tensors, facts: tensors.update({"fc.weight": tensors["fc.weight"][:, :64].contiguous()}), "fc.weight"),
    "taps that fc does not fit": (lambda tensors, facts: facts["config"].update(taps=[1, 2]), "fc.weight"),
    "a missing tensor": (without("norm.weight"), "norm.weight"),
}  # fmt: skip


@pytest.mark.parametrize("what", list(REFUSED))
def test_a_damaged_head_is_refused_in_one_sentence_and_nothing_is_written(tmp_path: Path, what: str) -> None:
    change, message = REFUSED[what]
    target = tiny_target(layers=6)
    folder = damaged(tmp_path, eagle3(target, std=0.3, draft=DRAFT), target, change)
    with pytest.raises(ValueError, match=message) as raised:
        export.main(ExportRun(trained=str(folder), out=str(tmp_path / "out")))
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists() and sorted(p.name for p in tmp_path.iterdir()) == ["run"]


def test_a_folder_that_holds_no_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no trained head here"):
        export.main(ExportRun(trained=str(tmp_path), out=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def with_taps(target: Target, taps: list[int]) -> Eagle3:
    return spread(Eagle3(Eagle3Config(taps=taps), target.spec), 0.3).eval()


def test_taps_that_engines_cannot_read_are_refused(tmp_path: Path) -> None:
    target = tiny_target(layers=6)
    for taps, message in (
        ([0, 2, 4], "SGLang cannot tap"),
        ([1, 2, 6], "no engine captures it"),
        ([1, 2], "exactly three"),
    ):
        with pytest.raises(ValueError, match=message):
            exported(tmp_path, target, with_taps(target, taps), format="sglang")
    out = exported(tmp_path, target, with_taps(target, [0, 2, 4]), format="vllm")
    assert config_of(out)["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4]
    assert config_of(out)["eagle_config"] == {"use_aux_hidden_state": True}


def test_a_weight_that_overflows_float16_is_named(tmp_path: Path) -> None:
    target = tiny_target(layers=6)
    head = eagle3(target, std=0.3)
    with torch.no_grad():
        head.norm.weight[3] = 70000.0
    with pytest.raises(ValueError, match="tensor norm.weight is not finite in float16"):
        exported(tmp_path, target, head, dtype="float16")
    exported(tmp_path, target, head, dtype="bfloat16")


def test_wrong_settings_and_places_are_refused(tmp_path: Path) -> None:
    target = tiny_target(layers=6)
    head = eagle3(target, std=0.3)
    with pytest.raises(ValueError, match="dtype='int8' must be one of float32"):
        exported(tmp_path, target, head, dtype="int8")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds files that are no export"):
        exported(tmp_path, target, head, out=str(tmp_path / "mine"))
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "mine"
    with pytest.raises(ValueError, match="is a file"):
        exported(tmp_path, target, head, out=str(tmp_path / "mine" / "thesis.txt"))
    with pytest.raises(ValueError, match="cannot write to"):
        exported(tmp_path, target, head, out=str(tmp_path / "mine" / "thesis.txt" / "below"))


def test_a_failure_half_way_leaves_the_earlier_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(layers=6)
    out = exported(tmp_path, target, eagle3(target, std=0.3))
    before = (out / "model.safetensors").read_bytes()

    def wrong(folder: Path, layout: Any, format: str) -> None:
        layout.tensors["midlayer.self_attn.q_proj.weight"] = layout.tensors["midlayer.self_attn.q_proj.weight"].roll(
            32, 1
        )
        write(folder, layout, format)

    write = export.write_layout
    monkeypatch.setattr(export, "write_layout", wrong)  # the halves of q swapped: it loads, and drafts nonsense
    with pytest.raises(ValueError, match="self_attn.q_proj.weight in the folder is not the trained one"):
        exported(tmp_path, target, eagle3(target, std=0.2))
    assert (out / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_case_vocab_reduced_without_mapping(shared: Path, tmp_path: Path) -> None:
    case = json.loads((shared / "cases" / "numeric" / "vocab-reduced-without-mapping.json").read_text())
    V, D = case["target_vocab"], case["draft_vocab_size"]
    target = tiny_target(vocab_size=V, layers=6)
    folder = damaged(tmp_path, eagle3(target, std=0.3, draft=list(range(D))), target, without("d2t", "t2d"))
    with pytest.raises(ValueError, match=f"map of {D} draft ids to the target's {V}"):
        export.main(ExportRun(trained=str(folder), out=str(tmp_path / "out")))
