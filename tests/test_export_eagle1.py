"""EAGLE-1 folders for vLLM and SGLang, original checkpoints, and what goes wrong with them silently."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elsewhere import Loaded, eagle3_config, folder_of, loadable_target
from safetensors.torch import load_file
from test_export import config_of
from test_export_formats import exported
from test_export_wrong import caught, one_tensor
from tiny_heads import TINY_HEADS, VARIANTS, tiny_head, trained_logits
from torch import Tensor
from toys import largest_gap, tokens, weights
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from heads.hub import load
from heads.target import Target
from scripts import convert
from scripts.convert import ConvertRun
from scripts.writers import LAYOUTS


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return loadable_target(tmp_path_factory.mktemp("target"))


def head_of(target: Target, **settings: Any) -> Any:
    return tiny_head("eagle1", target, wide=True, **settings)


def by_the_contract(out: Path, features: Tensor, embeddings: Tensor) -> Tensor:
    """Predicted features [T, H] of one pass, from the files and the contract's words alone."""
    w = {name: x.float() for name, x in load_file(out / "model.safetensors").items()}
    config = LlamaConfig.from_pretrained(out)
    T, H = embeddings.shape
    heads, kv, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim

    def split(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"layers.0.self_attn.{name}_proj.weight"]).view(T, -1, d).transpose(0, 1)

    x = F.linear(torch.cat([embeddings, features], dim=-1), w["fc.weight"], w.get("fc.bias"))
    cos, sin = LlamaRotaryEmbedding(config)(x, torch.arange(T)[None])
    query, key = apply_rotary_pos_emb(split(x, "q")[None], split(x, "k")[None], cos, sin)
    key, value = (y.repeat_interleave(heads // kv, dim=-3) for y in (key[0], split(x, "v")))
    scores = query[0] @ key.transpose(-1, -2) / d**0.5 + torch.full((T, T), float("-inf")).triu(1)
    attended = (scores.softmax(-1) @ value).transpose(0, 1).reshape(T, heads * d)
    y = x + F.linear(attended, w["layers.0.self_attn.o_proj.weight"])
    z = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps)
    z = z * w["layers.0.post_attention_layernorm.weight"]
    gate, up, down = (w[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return y + F.linear(F.silu(F.linear(z, gate)) * F.linear(z, up), down)


@pytest.mark.parametrize("format", ["vllm", "sglang"])
def test_an_engine_that_follows_the_contract_computes_the_trained_heads_features(
    tmp_path: Path, loaded: Loaded, format: str
) -> None:
    target = loaded[0]
    head = head_of(target, num_kv_heads=1)
    out = exported(tmp_path, loaded, head, format=format)
    ids = tokens(1, 12, vocab_size=200)
    last, embeddings = target.forward(ids).last[:, :-1], target.embed(ids[:, 1:])
    with torch.no_grad():
        ours = head.advance(head.new_cache(), last, embeddings)[0]
    theirs = by_the_contract(out, last[0], embeddings[0])
    assert float((ours - theirs).abs().max()) < 1e-4 and float(ours.std()) > 0.5


def test_files_and_configs_are_those_of_the_contract(tmp_path: Path, loaded: Loaded) -> None:
    head = head_of(loaded[0])
    vllm, sglang = (exported(tmp_path, loaded, head, format, format=format) for format in ("vllm", "sglang"))
    assert config_of(vllm)["architectures"] == ["LlamaForCausalLM"]
    assert config_of(sglang)["architectures"] == ["LlamaForCausalLMEagle"]
    assert "bias" not in config_of(vllm) and config_of(vllm)["vocab_size"] == loaded[0].spec.vocab_size
    names = {"fc.weight", "layers.0.post_attention_layernorm.weight"}
    names |= {f"layers.0.self_attn.{part}_proj.weight" for part in "qkvo"}
    names |= {f"layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    assert set(load_file(vllm / "model.safetensors")) == names
    tensors = load_file(sglang / "model.safetensors")
    assert set(tensors) == names | {"fc.bias"} and not tensors["fc.bias"].any()
    card = (vllm / "README.md").read_text()
    assert '"method": "eagle"' in card and "format=sglang" in card and "# EAGLE-1 draft head" in card
    assert "--speculative-algorithm EAGLE " in (sglang / "README.md").read_text()


def test_a_reduced_vocabulary_becomes_whole_and_the_card_says_so(tmp_path: Path, loaded: Loaded) -> None:
    out = exported(tmp_path, loaded, head_of(loaded[0], draft=[2, 3, 5, 8]))
    assert "trained over 4 ids; the format has no draft vocabulary" in (out / "README.md").read_text()
    assert load(out).draft_vocab_size == loaded[0].spec.vocab_size


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("fc", "tensor fc.weight in the folder is not the trained one"),
        ("norm", "post_attention_layernorm.weight in the folder is not"),
    ],
)
def test_swapped_halves_of_fc_are_found(
    tmp_path: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch, what: str, message: str
) -> None:
    change = {
        "fc": one_tensor("fc.weight", lambda x: x.roll(32, 1)),
        "norm": one_tensor("layers.0.post_attention_layernorm.weight", torch.ones_like),
    }
    caught(change[what], message, monkeypatch, lambda: exported(tmp_path, loaded, head_of(loaded[0])))
    assert not (tmp_path / "out").exists()


def test_an_original_checkpoint_becomes_ours_and_goes_back(tmp_path: Path, loaded: Loaded) -> None:
    """With the target's embeddings, a zero bias and the RoPE buffers of old checkpoints, as a pickle."""
    target = loaded[0]
    head = head_of(target, layer={"rope": {"rope_type": "default", "rope_theta": 777.0}})
    config = {key: value for key, value in eagle3_config(target, head).items() if key != "draft_vocab_size"}
    config |= {"architectures": ["LlamaForCausalLM"], "rope_theta": 777.0}
    tensors = {name: value for name, value in weights(head).items() if name not in ("d2t", "t2d")}
    tensors["embed_tokens.weight"] = target.embed(torch.arange(target.spec.vocab_size)).clone()
    tensors |= {"fc.bias": torch.zeros(32), "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    theirs = folder_of(tmp_path / "theirs", config, tensors, "pytorch_model.bin")
    convert.main(ConvertRun(source=str(theirs), to=str(tmp_path / "ours"), target_id=loaded[1]["id"]))
    source = str(tmp_path / "ours")
    convert.main(ConvertRun(source=source, to=str(tmp_path / "back"), format="vllm", target_id=loaded[1]["id"]))
    found = load(tmp_path / "back", target=target).attach(target)
    assert largest_gap(weights(found), weights(head)) == 0.0
    ids = tokens(1, 9, vocab_size=200)
    pairs = zip(trained_logits(target, head, ids), trained_logits(target, found, ids), strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) == 0.0
    folder_of(theirs, config, {**tensors, "fc.bias": torch.ones(32)}, "pytorch_model.bin")
    with pytest.raises(ValueError, match="fc.bias is not zero"):
        load(theirs, target=target)
    folder_of(theirs, config, {**tensors, "layers.0.input_layernorm.weight": torch.ones(32)}, "pytorch_model.bin")
    with pytest.raises(ValueError, match="layers.0.input_layernorm.weight"):
        load(theirs, target=target)


@pytest.mark.parametrize(("kind", "settings"), [*((kind, {}) for kind in TINY_HEADS), *VARIANTS], ids=str)
def test_a_head_of_every_kind_goes_out_and_comes_back_in_our_own_format(
    tmp_path: Path, loaded: Loaded, kind: str, settings: dict[str, Any]
) -> None:
    target = loaded[0]
    head = tiny_head(kind, target, wide=True, draft=[2, 3, 5, 8, 13], **settings)
    out = exported(tmp_path, loaded, head, format="native")
    found = load(out, target=target).attach(target)
    ids = tokens(1, 9, vocab_size=200)
    pairs = zip(trained_logits(target, head, ids), trained_logits(target, found, ids), strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) == 0.0
    assert json.loads((out / "head.json").read_text())["kind"] == kind and (out / "README.md").is_file()


@pytest.mark.parametrize("format", ["vllm", "sglang", "speculators"])
@pytest.mark.parametrize("kind", ["mtp", "mlp", "lstm"])
def test_heads_that_no_engine_serves_are_refused_with_the_reason(
    tmp_path: Path, loaded: Loaded, kind: str, format: str
) -> None:
    reason = str(LAYOUTS[kind][format])
    with pytest.raises(ValueError, match=f"format={format}: ") as raised:
        exported(tmp_path, loaded, tiny_head(kind, loaded[0]), format=format)
    assert reason in str(raised.value) and "engine" in reason and not (tmp_path / "out").exists()


FLAGS = [{"norm_before_residual": True}, {"fc_norm": True, "norm_output": True}, {"norm_before_fc": True}]


@pytest.mark.parametrize("variant", FLAGS, ids=str)
def test_trained_variants_are_written_for_vllm_and_refused_for_sglang(
    tmp_path: Path, loaded: Loaded, variant: dict[str, Any]
) -> None:
    target = loaded[0]
    head = tiny_head("eagle3", target, wide=True, draft=[2, 3, 5, 8], **variant)
    ids = tokens(1, 9, vocab_size=200)
    for format in ("vllm", "speculators"):
        out = exported(tmp_path, loaded, head, format, format=format)
        assert {key: config_of(out).get(key) for key in variant} == variant
        pairs = zip(
            trained_logits(target, head, ids), trained_logits(target, load(out, target=target), ids), strict=True
        )
        assert max(float((a - b).abs().max()) for a, b in pairs) == 0.0
    assert "vLLM only: it was trained with" in (tmp_path / "vllm" / "README.md").read_text()
    with pytest.raises(ValueError, match="format=sglang: SGLang has no"):
        exported(tmp_path, loaded, head, format="sglang")
