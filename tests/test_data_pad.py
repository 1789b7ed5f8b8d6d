"""Claim: rows, masks and answers do not depend on the tokenizer's pad token: none, its own, or the end of turn."""

import json
from pathlib import Path

import pytest
import torch
from tiny import tiny_target
from tiny_chat import SPECIAL, byte_tokenizer

from data import rows
from data.asking import RegenerateSettings
from data.build import DataSettings, build
from heads.target import Target


def target_with(pad: str | None) -> Target:
    model = tiny_target(vocab_size=264, layers=2, max_position_embeddings=512).model
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = pad
    model.config.pad_token_id = tokenizer.pad_token_id
    model.config.eos_token_id = tokenizer.eos_token_id
    return Target(model, tokenizer)


def data_files(target: Target, folder: Path, regenerate: RegenerateSettings) -> dict[str, bytes]:
    lines = [{"prompt": "q" * (1 + 7 * n), "completion": f"answer {n}"} for n in range(6)]
    source = folder.parents[1] / "in.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    build(target, DataSettings(source=[str(source)], heldout_share=0.3, regenerate=regenerate), folder)
    return {name: (folder / name).read_bytes() for name in ("train.jsonl", "heldout.jsonl", "counts.safetensors")}


@pytest.mark.parametrize("regenerate", [False, True])
def test_the_pad_token_changes_no_row_and_the_end_of_turn_keeps_its_loss(tmp_path: Path, regenerate: bool) -> None:
    asked = RegenerateSettings(enabled=regenerate, max_new_tokens=8, batch_size=3)
    made = {}
    for name, pad in (("none", None), ("own", SPECIAL[3]), ("end", "<|im_end|>")):
        (tmp_path / name).mkdir()
        target = target_with(pad)
        assert target.tokenizer.pad_token == pad
        made[name] = data_files(target, tmp_path / name / "out", asked)
    assert made["none"] == made["own"] == made["end"]
    end = byte_tokenizer().eos_token_id
    train = rows.load(tmp_path / "end" / "out", "train")
    if not regenerate:
        assert all(row.ids[row.spans[-1][1] - 1] == end for row in train)
    ends = sum(int((torch.tensor(row.ids)[row.supervised()] == end).sum()) for row in train)
    assert int(rows.counts(tmp_path / "end" / "out")[end]) == ends and (ends > 0 or regenerate)
