"""The EAGLE-3 folder: names, shapes and numbers as engines load them, read back by independent code."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tiny import tiny_target
from torch import Tensor
from toys import eagle3, tokens
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from heads.hub import save_head
from heads.layers import LayerCache
from heads.target import Target
from scripts import export
from scripts.export import ExportRun

DRAFT = [0, 3, 4, 9, 15, 40, 63]
SCALED = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip


def run_folder(folder: Path, made_for: Target, head: Any, /, **provenance: Any) -> Path:
    """What `python -m train` leaves, as far as an export reads it."""
    save_head(folder / "best", head, made_for.spec, {"step": 2, "tokens": 30, **provenance})
    return folder


def exported(tmp_path: Path, target: Target, head: Any, **settings: Any) -> Path:
    out = tmp_path / "out"
    trained = run_folder(tmp_path / "run", target, head)
    export.main(ExportRun(**{"trained": str(trained), "out": str(out), "outputs": str(tmp_path), **settings}))
    return out


def config_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "config.json").read_text())


def by_the_contract(out: Path, features: Tensor, embeddings: Tensor) -> Tensor:
    """Draft logits [T, D] of one pass, from the files and the contract's words alone: no code of this project."""
    w = {name: x.float() for name, x in load_file(out / "model.safetensors").items()}
    config = LlamaConfig.from_pretrained(out)
    T, H = embeddings.shape
    heads, kv, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps) * w[name]

    def split(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"midlayer.self_attn.{name}_proj.weight"]).view(T, -1, d).transpose(0, 1)

    g = F.linear(features, w["fc.weight"])
    x = torch.cat([norm(embeddings, "midlayer.input_layernorm.weight"), norm(g, "midlayer.hidden_norm.weight")], dim=-1)
    cos, sin = LlamaRotaryEmbedding(config)(g, torch.arange(T)[None])
    query, key = apply_rotary_pos_emb(split(x, "q")[None], split(x, "k")[None], cos, sin)
    key, value = (y.repeat_interleave(heads // kv, dim=-3) for y in (key[0], split(x, "v")))
    scores = query[0] @ key.transpose(-1, -2) / d**0.5 + torch.full((T, T), float("-inf")).triu(1)
    attended = (scores.softmax(-1) @ value).transpose(0, 1).reshape(T, heads * d)
    y = g + F.linear(attended, w["midlayer.self_attn.o_proj.weight"])
    z = norm(y, "midlayer.post_attention_layernorm.weight")
    gate, up, down = (w[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    y = y + F.linear(F.silu(F.linear(z, gate)) * F.linear(z, up), down)
    return F.linear(norm(y, "norm.weight"), w["lm_head.weight"])


@pytest.mark.parametrize(
    ("kind", "overrides", "settings"),
    [
        ("llama", {}, {"draft": DRAFT}),
        ("llama", {"rope_parameters": SCALED, "tie_word_embeddings": True}, {"num_kv_heads": 1}),
        ("qwen3", {}, {"draft": DRAFT, "num_kv_heads": 4}),
        ("gemma2", {}, {"draft": DRAFT}),
    ],
)
def test_an_engine_that_follows_the_contract_computes_the_trained_heads_logits(
    tmp_path: Path, kind: str, overrides: dict[str, Any], settings: dict[str, Any]
) -> None:
    target = tiny_target(kind, layers=6, **overrides)
    head = eagle3(target, std=0.3, **settings)
    out = exported(tmp_path, target, head)
    ids = tokens(1, 12)
    config = config_of(out)
    taps = target.forward(ids, taps=config["eagle_aux_hidden_state_layer_ids"]).taps
    assert taps is not None
    embeddings = target.embed(ids[:, 1:])
    with torch.no_grad():
        ours = head.logits(head.advance(LayerCache(1), head.fuse(taps[:, :-1]), embeddings))
    theirs = by_the_contract(out, taps[0, :-1].flatten(1), embeddings[0])
    assert float((ours[0] - theirs).abs().max()) < 1e-4
    assert float(ours.std()) > 0.5


def test_files_and_config_are_those_of_the_contract(tmp_path: Path) -> None:
    target = tiny_target("qwen3", layers=6)
    out = exported(tmp_path, target, eagle3(target, std=0.3, draft=DRAFT))
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md",
        "config.json",
        "manifest.json",
        "model.safetensors",
    ]
    assert config_of(out) == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "vocab_size": 64,
        "draft_vocab_size": 7,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 3]},
    }
    modes = {path.stat().st_mode for path in out.iterdir()}
    assert len(modes) == 1, "an engine that runs as another user reads all of it or none"
    tensors = load_file(out / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64 and tensors["d2t"].tolist() == [n - i for i, n in enumerate(DRAFT)]
    assert tensors["t2d"].dtype == torch.bool and tensors["t2d"].nonzero().flatten().tolist() == DRAFT
    assert tensors["lm_head.weight"].shape == (7, 32) and tensors["fc.weight"].shape == (32, 96)
    assert "embed_tokens.weight" not in tensors, "a random one would be used as it is"


def test_a_whole_vocabulary_has_no_map(tmp_path: Path) -> None:
    target = tiny_target(layers=6)
    out = exported(tmp_path, target, eagle3(target, std=0.3))
    assert not {"d2t", "t2d"} & set(load_file(out / "model.safetensors"))
    assert config_of(out)["draft_vocab_size"] == config_of(out)["vocab_size"] == 64


def test_scaled_rope_survives_in_both_spellings(tmp_path: Path) -> None:
    target = tiny_target(layers=6, rope_parameters=SCALED)
    out = exported(tmp_path, target, eagle3(target, std=0.3))
    config = config_of(out)
    assert config["rope_parameters"] == SCALED and config["rope_theta"] == 500000.0
    assert config["rope_scaling"] == {key: value for key, value in SCALED.items() if key != "rope_theta"}
    read = AutoConfig.from_pretrained(out)
    assert torch.equal(LlamaRotaryEmbedding(read).inv_freq, target.decoder.rotary_emb.inv_freq)


def test_a_target_that_turns_half_of_each_head_does_not_make_engines_turn_half_of_the_drafts(tmp_path: Path) -> None:
    """Phi and GPT-NeoX rotate a part of head_dim; the draft layer is a plain Llama layer and rotates all of it."""
    target = tiny_target(layers=6, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    partial = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    target.spec = dataclasses.replace(target.spec, rope=partial)
    head = eagle3(target, std=0.3)
    assert len(head.rotary.inv_freq) == target.spec.head_dim // 2
    config = config_of(exported(tmp_path, target, head))
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert "partial_rotary_factor" not in json.dumps(config)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_rounded_once_and_maps_are_left_alone(tmp_path: Path, dtype: str) -> None:
    target = tiny_target(layers=6)
    head = eagle3(target, std=0.3, draft=DRAFT)
    out = exported(tmp_path, target, head, dtype=dtype)
    tensors = load_file(out / "model.safetensors")
    assert torch.equal(tensors["fc.weight"], head.fc.weight.to(getattr(torch, dtype)))
    assert tensors["d2t"].dtype == torch.int64 and config_of(out)["torch_dtype"] == dtype
    assert 0 < json.loads((out / "manifest.json").read_text())["round_trip_difference"] < 0.5


def test_the_same_command_again_changes_nothing_and_other_settings_replace_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tiny_target(layers=6)
    head = eagle3(target, std=0.3)
    out = exported(tmp_path, target, head)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    exported(tmp_path, target, head)
    assert "up to date, skipped" in capsys.readouterr().err
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
    exported(tmp_path, target, head, dtype="bfloat16")
    assert config_of(out)["torch_dtype"] == "bfloat16"
    (out / "model.safetensors").write_bytes(b"damaged")
    exported(tmp_path, target, head, dtype="bfloat16")
    assert load_file(out / "model.safetensors")["norm.weight"].dtype == torch.bfloat16
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"], "nothing temporary is left"
