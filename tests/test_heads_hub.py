"""A head folder: strict, atomic, refused for another target; what a head owns and what it only borrows."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_target
from toys import eagle3, largest_gap, medusa, weights

from heads.eagle3 import Eagle3, Eagle3Config
from heads.hub import build_head, load_head, read_facts, save_head
from heads.medusa import Medusa, MedusaConfig
from heads.spec import check_taps, default_taps

DRAFT = [0, 3, 4, 9, 15]


@pytest.mark.parametrize("make", [eagle3, medusa])
@pytest.mark.parametrize("draft", [None, DRAFT])
def test_save_and_load_give_the_same_head(tmp_path: Path, make: type, draft: list[int] | None) -> None:
    target = tiny_target(layers=5)
    head = make(target, std=0.3, draft=draft)
    save_head(tmp_path / "best", head, target.spec, {"step": 3})
    assert sorted(path.name for path in (tmp_path / "best").iterdir()) == ["head.json", "head.safetensors"]
    for folder in (tmp_path, tmp_path / "best"):
        again = load_head(folder, target.spec)
        assert largest_gap(weights(head), weights(again)) == 0.0
        assert again.config == head.config and again.taps == head.taps
        assert read_facts(folder)["provenance"] == {"step": 3}


def test_a_medusa_folder_holds_no_tensor_of_the_target(tmp_path: Path) -> None:
    target = tiny_target(layers=5)
    save_head(tmp_path, medusa(target, num_heads=2), target.spec, {})
    names = set(load_file(tmp_path / "head.safetensors"))
    assert names == {f"medusa_heads.{i}.0.linear.{part}" for i in range(2) for part in ("weight", "bias")} | {
        "d2t",
        "t2d",
    }


def test_eagle3_tensors_bear_the_names_engines_load() -> None:
    head = eagle3(tiny_target(layers=5), draft=DRAFT, num_kv_heads=1)
    H, M, Q, KV, D, V = 32, 64, 32, 8, 5, 64
    expected = {
        "fc.weight": [H, 3 * H],
        "midlayer.self_attn.q_proj.weight": [Q, 2 * H],
        "midlayer.self_attn.k_proj.weight": [KV, 2 * H],
        "midlayer.self_attn.v_proj.weight": [KV, 2 * H],
        "midlayer.self_attn.o_proj.weight": [H, Q],
        "midlayer.mlp.gate_proj.weight": [M, H],
        "midlayer.mlp.up_proj.weight": [M, H],
        "midlayer.mlp.down_proj.weight": [H, M],
        "midlayer.input_layernorm.weight": [H],
        "midlayer.hidden_norm.weight": [H],
        "midlayer.post_attention_layernorm.weight": [H],
        "norm.weight": [H],
        "lm_head.weight": [D, H],
        "d2t": [D],
        "t2d": [V],
    }
    assert {name: list(value.shape) for name, value in head.state_dict().items()} == expected


def test_a_folder_that_is_no_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no trained head here"):
        load_head(tmp_path)


def test_a_head_of_another_target_is_refused_and_both_are_named(tmp_path: Path) -> None:
    target, other = tiny_target(layers=5), tiny_target("qwen3", layers=6)
    save_head(tmp_path, eagle3(target), target.spec, {})
    with pytest.raises(ValueError, match=r"'tiny-llama', not 'tiny-qwen3'.*num_layers"):
        load_head(tmp_path, other.spec)
    assert load_head(tmp_path, dataclasses.replace(target.spec, dtype="bfloat16", name="elsewhere")).taps == (1, 2, 4)


def test_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    target = tiny_target(layers=5)
    save_head(tmp_path, eagle3(target), target.spec, {})
    tensors = load_file(tmp_path / "head.safetensors")
    del tensors["fc.weight"]
    save_file(tensors, tmp_path / "head.safetensors")
    with pytest.raises(ValueError, match=r"head.safetensors: tensors do not fit head.json.*fc.weight"):
        load_head(tmp_path)


def test_an_interrupted_save_leaves_no_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """head.json goes first and comes last: a reader never pairs new tensors with old facts."""
    target = tiny_target(layers=5)
    save_head(tmp_path, eagle3(target), target.spec, {})

    def broken(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("heads.hub.save_tensors", broken)
    with pytest.raises(OSError, match="disk full"):
        save_head(tmp_path, eagle3(target), target.spec, {})
    with pytest.raises(ValueError, match="no trained head"):
        load_head(tmp_path)


def test_wrong_settings_are_refused_by_name() -> None:
    spec = tiny_target(layers=5).spec
    with pytest.raises(ValueError, match=r"head.kind='eagle9'.*eagle3"):
        build_head({"kind": "eagle9"}, spec, None)
    with pytest.raises(ValueError, match="head.widht is not a setting of medusa"):
        build_head({"kind": "medusa", "widht": 3}, spec, None)
    with pytest.raises(ValueError, match="head.num_kv_heads=3 does not divide the 4"):
        Eagle3(Eagle3Config(taps=[1, 2], num_kv_heads=3), spec)
    with pytest.raises(ValueError, match="head.num_heads=0"):
        Medusa(MedusaConfig(num_heads=0), spec)
    for broken in (Eagle3Config(taps=[1, 2, 3], init="zero"), MedusaConfig(init="zero")):
        with pytest.raises(ValueError, match="head.init='zero'"):
            build_head(dataclasses.asdict(broken), spec, None)


@pytest.mark.parametrize("size", [0, -1, 65, 4.5, "8x", True])
@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_an_invalid_draft_vocabulary_is_refused(kind: str, size: object) -> None:
    taps = {"taps": [1, 2, 3]} if kind == "eagle3" else {}
    with pytest.raises(ValueError, match=r"head.draft_vocab_size=.*1\.\.64"):
        build_head({"kind": kind, "draft_vocab_size": size, **taps}, tiny_target(layers=5).spec, None)


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_a_reduced_vocabulary_without_its_map_is_refused(kind: str) -> None:
    taps = {"taps": [1, 2, 3]} if kind == "eagle3" else {}
    spec = tiny_target(layers=5).spec
    with pytest.raises(ValueError, match="no vocabulary map was given"):
        build_head({"kind": kind, "draft_vocab_size": 5, **taps}, spec, None)
    wrong = torch.zeros(5, dtype=torch.int64), torch.zeros(64, dtype=torch.bool)
    with pytest.raises(ValueError, match="vocabulary map"):
        build_head({"kind": kind, "draft_vocab_size": 5, **taps}, spec, wrong)


def test_draft_ids_map_to_the_kept_target_ids() -> None:
    target = tiny_target(vocab_size=20, layers=5)
    head = eagle3(target, draft=DRAFT)
    assert head.d2t.tolist() == [0, 2, 2, 6, 11]
    assert head.to_target(torch.arange(5)).tolist() == DRAFT
    rows = head.target_rows()
    assert rows is not None and rows.tolist() == DRAFT
    assert eagle3(target).target_rows() is None
    assert eagle3(target).to_target(torch.arange(20)).tolist() == list(range(20))


def test_default_taps_are_refused_where_they_are_not_distinct_and_ascending() -> None:
    assert default_taps(32) == [2, 16, 29] and default_taps(30) == [2, 15, 27] and default_taps(8) == [2, 4, 5]
    for layers in (1, 2, 4, 5, 6):
        with pytest.raises(ValueError, match=f"target of {layers} layers.*head.taps"):
            default_taps(layers)
    for taps in ([], [2, 2], [3, 1], [-1, 2], [1, 7]):
        with pytest.raises(ValueError, match=r"distinct, ascending and inside 0\.\.6"):
            check_taps(taps, 6)
    assert check_taps([0, 6], 6) == (0, 6)


def test_head_json_names_target_and_settings(tmp_path: Path) -> None:
    target = tiny_target(layers=5)
    save_head(tmp_path, eagle3(target, draft=DRAFT), target.spec, {"step": 9})
    facts = json.loads((tmp_path / "head.json").read_text())
    assert facts["kind"] == "eagle3" and facts["config"]["taps"] == [1, 2, 4]
    assert facts["target"]["name"] == "tiny-llama" and facts["target"]["revision"] == "none"
