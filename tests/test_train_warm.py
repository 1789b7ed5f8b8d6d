"""A run may start from a trained head, its vocabulary map kept; what does not fit is refused with both sides named."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_target
from toys import largest_gap, vocabulary, weights

from heads.hub import build_head, save_head
from heads.target import Target
from train.warm import load_warm

DRAFT = [1, 3, 8, 9, 40, 63]  # no counts would give this map
EAGLE3: dict[str, Any] = {"kind": "eagle3", "taps": [1, 3, 5], "draft_vocab_size": len(DRAFT), "ttt_steps": 2}
MEDUSA: dict[str, Any] = {"kind": "medusa", "num_heads": 3, "shared_lm_head": False}


def saved(folder: Path, target: Target, settings: dict[str, Any]) -> Any:
    torch.manual_seed(7)
    reduced = settings.get("draft_vocab_size")
    head = build_head(settings, target.spec, vocabulary(DRAFT, target.spec.vocab_size) if reduced else None)
    save_head(folder, head, target.spec, {"note": "warm"})
    return head


@pytest.mark.parametrize("settings", [EAGLE3, MEDUSA], ids=["eagle3", "medusa"])
def test_a_warm_head_is_the_saved_one_map_included(tmp_path: Path, settings: dict[str, Any]) -> None:
    target = tiny_target(layers=6)
    source = saved(tmp_path / "best", target, settings)
    changed = {"ttt_steps": 5, "init": "random"} if settings is EAGLE3 else {"init": "random"}
    for folder in (tmp_path, tmp_path / "best"):  # a run folder and a head folder
        head = load_warm(str(folder), {**settings, **changed}, target)
        assert largest_gap(weights(head), weights(source)) == 0.0
    assert head.train_steps == (5 if settings is EAGLE3 else 3), "what changes no tensor may be another"


@dataclasses.dataclass
class Refusal:
    wanted: dict[str, Any]
    message: str


REFUSED = {
    "kind": Refusal(MEDUSA, "holds a head of kind 'eagle3', this run trains 'medusa'"),
    "whole vocabulary": Refusal({**EAGLE3, "draft_vocab_size": None}, "of 6 ids, this run asks for 64: .*_size=6$"),
    "vocabulary": Refusal({**EAGLE3, "draft_vocab_size": 8}, "of 6 ids, this run asks for 8"),
    "taps": Refusal({**EAGLE3, "taps": [0, 3, 5]}, r"taps \[1,3,5\],this run's reads \[0,3,5\]: .*head.taps=\[1,3,5\]"),
    "shapes": Refusal(
        {**EAGLE3, "num_kv_heads": 4}, r"k_proj.weight is \(16, 64\), this run's is \(32, 64\): set head."
    ),
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_a_head_that_does_not_fit_is_refused_with_both_sides_named(tmp_path: Path, what: str) -> None:
    target = tiny_target(layers=6)
    saved(tmp_path, target, EAGLE3)
    with pytest.raises(ValueError, match=REFUSED[what].message) as raised:
        load_warm(str(tmp_path), REFUSED[what].wanted, target)
    assert str(tmp_path) in str(raised.value) and "\n" not in str(raised.value)


def test_heads_missing_in_the_folder_are_named(tmp_path: Path) -> None:
    target = tiny_target(layers=6)
    saved(tmp_path, target, MEDUSA)
    with pytest.raises(ValueError, match=r"tensor medusa_heads.3.0.linear.bias is no, .*: set head.num_heads=3"):
        load_warm(str(tmp_path), {**MEDUSA, "num_heads": 4}, target)


def test_a_head_of_another_target_and_a_folder_without_a_head_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, tiny_target(layers=6), EAGLE3)
    with pytest.raises(ValueError, match="trained for target 'tiny-llama'.*num_layers"):
        load_warm(str(tmp_path), EAGLE3, tiny_target(layers=8))
    with pytest.raises(ValueError, match="no trained head here"):
        load_warm(str(tmp_path / "nothing"), EAGLE3, tiny_target(layers=6))
