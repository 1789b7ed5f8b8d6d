"""DFlash folders for vLLM: names and numbers of a block head, read back by independent code, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elsewhere import Loaded, folder_of, loadable_target
from safetensors.torch import load_file, save_file
from test_export import config_of
from test_export_formats import exported
from test_export_wrong import caught, one_tensor
from tiny_heads import drafted_logits, tiny_head, trained_logits
from torch import Tensor
from toys import largest_gap, tokens, weights
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

from eval.vllm_server import speculation
from heads.hub import load
from scripts import convert
from scripts.convert import ConvertRun
from scripts.layouts import Layout

DRAFT = [2, 3, 5, 8, 13]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return loadable_target(tmp_path_factory.mktemp("target"))


def head_of(loaded: Loaded, **settings: Any) -> Any:
    return tiny_head("block", loaded[0], wide=True, **settings)


def by_the_format(out: Path, taps: Tensor, anchor: Tensor, lm_head: Tensor) -> Tensor:
    """Draft logits [k, V] after the last of T slots, from the files alone: no code of this project.

    taps [T, n, H], the anchor's embedding [H].
    """
    w = {name: x.float() for name, x in load_file(out / "model.safetensors").items()}
    raw, config = config_of(out), LlamaConfig.from_pretrained(out)
    mask = torch.load(out / "mask_embedding.pt", weights_only=True)["embedding"].float()
    T, b, d = len(taps), raw["block_size"], config.head_dim
    heads, kv = config.num_attention_heads, config.num_key_value_heads

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps) * w[f"{name}.weight"]

    def turned(x: Tensor, layer: str, name: str, places: Tensor) -> Tensor:
        x = norm(F.linear(x, w[f"{layer}.{name}_proj.weight"]).view(len(x), -1, d), f"{layer}.{name}_norm")
        cos, sin = LlamaRotaryEmbedding(config)(x, places[None])
        return x * cos[0][:, None] + rotate_half(x) * sin[0][:, None]

    context = norm(F.linear(taps.flatten(1), w["fc.weight"]), "hidden_norm")
    before, own = torch.arange(T), torch.arange(T, T + b)
    x = torch.cat([anchor[None], mask.expand(b - 1, -1)])
    for i in range(raw["num_hidden_layers"]):
        layer, attn = f"layers.{i}", f"layers.{i}.self_attn"
        y = norm(x, f"{layer}.input_layernorm")
        query = turned(y, attn, "q", own)
        key = torch.cat([turned(context, attn, "k", before), turned(y, attn, "k", own)])
        value = F.linear(torch.cat([context, y]), w[f"{attn}.v_proj.weight"]).view(T + b, -1, d)
        key, value = (part.repeat_interleave(heads // kv, dim=1) for part in (key, value))
        weights = (torch.einsum("qhd,khd->hqk", query, key) / d**0.5).softmax(-1)
        x = x + F.linear(torch.einsum("hqk,khd->qhd", weights, value).flatten(1), w[f"{attn}.o_proj.weight"])
        z = norm(x, f"{layer}.post_attention_layernorm")
        gate, up, down = (w[f"{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        x = x + F.linear(F.silu(F.linear(z, gate)) * F.linear(z, up), down)
    return F.linear(norm(x, "norm"), w.get("lm_head.weight", lm_head))[1:]


@pytest.mark.parametrize("own_lm_head", [False, True])
def test_an_engine_that_reads_the_files_drafts_what_the_trained_head_drafts(
    tmp_path: Path, loaded: Loaded, own_lm_head: bool
) -> None:
    target = loaded[0]
    head = head_of(loaded, num_kv_heads=1, own_lm_head=own_lm_head, draft=DRAFT if own_lm_head else None)
    out = exported(tmp_path, loaded, head)
    ids, slot = tokens(1, 12, vocab_size=200), 9
    ours = torch.cat(drafted_logits(target, head, ids, slot))
    taps = [i + 1 for i in config_of(out)["dflash_config"]["target_layer_ids"]]
    states = target.forward(ids, taps=taps).taps
    assert states is not None
    theirs = by_the_format(out, states[0, : slot + 1], target.embed(ids)[0, slot + 1], target.lm_head()[0])
    assert float((ours - theirs).abs().max()) < 1e-4 and float(ours.std()) > 0.5


def test_files_and_config_are_those_that_vllm_reads(tmp_path: Path, loaded: Loaded) -> None:
    target = loaded[0]
    plain = exported(tmp_path, loaded, head_of(loaded, draft=DRAFT), "plain", dtype="bfloat16")
    own = exported(tmp_path, loaded, head_of(loaded, draft=DRAFT, own_lm_head=True), "own")
    config, names = config_of(plain), set(load_file(plain / "model.safetensors"))
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert config["num_hidden_layers"] == 2 and config["block_size"] == 5
    # the byte tokenizer has a token for each id: MASK stands at the end of an answer
    eos = min(target.spec.eos_ids)
    assert config["dflash_config"] == {"mask_token_id": eos, "target_layer_ids": [0, 1, 3]}
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.self_attn.q_norm.weight"} <= names
    assert not names & {"lm_head.weight", "embed_tokens.weight", "d2t", "t2d", "mask_embedding"}
    assert config["draft_vocab_size"] == config["vocab_size"] == target.spec.vocab_size
    found = torch.load(plain / "mask_embedding.pt", weights_only=True)
    assert found["mask_token_id"] == eos and found["embedding"].dtype == torch.bfloat16
    assert config_of(own)["draft_vocab_size"] == len(DRAFT)
    assert {"lm_head.weight", "d2t", "t2d"} <= set(load_file(own / "model.safetensors"))
    assert "mask_embedding.pt" in (plain / "manifest.json").read_text()
    card = (plain / "README.md").read_text()
    assert '"method": "dflash"' in card and '"num_speculative_tokens": 4' in card and "only with 4 drafts" in card
    assert "trained over 5 ids; the format has no draft vocabulary" in card
    assert "never drafted" in (own / "README.md").read_text()


def test_vllm_is_asked_for_as_many_drafts_as_the_block_has(tmp_path: Path, loaded: Loaded) -> None:
    out = exported(tmp_path, loaded, head_of(loaded))
    assert speculation(out, 4)["method"] == "dflash"
    with pytest.raises(ValueError, match="k=3: vLLM runs k . 1 rows of a block head.*blocks of 5: give k=4"):
        speculation(out, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"from_anchor": True}, "head.from_anchor=true: vLLM reads every block as the paper does"),
        ({"taps": [0, 2]}, r"taps \[0, 2\] hold 0, the embeddings: .*; train with taps from 1 to 5"),
        ({"taps": [2, 6]}, r"taps \[2, 6\] hold 6, the state after the last layer"),
    ],
)
def test_what_vllm_would_misread_is_refused(
    tmp_path: Path, loaded: Loaded, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        exported(tmp_path, loaded, head_of(loaded, **settings))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["sglang", "speculators"])
def test_other_engines_formats_are_refused(tmp_path: Path, loaded: Loaded, format: str) -> None:
    with pytest.raises(ValueError, match=f"format={format}: of the engines, vLLM serves block heads"):
        exported(tmp_path, loaded, head_of(loaded), format=format)


def other_mask(layout: Layout) -> None:
    layout.files.clear()


def shorter(layout: Layout) -> None:
    layout.config["block_size"] = 4


def taps_one_off(layout: Layout) -> None:
    layout.config["dflash_config"]["target_layer_ids"] = [1, 2, 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_mask, "mask_embedding"),
        (shorter, "the written folder says block_size=4, the head was trained with 5"),
        (taps_one_off, "the written folder says taps="),
        (one_tensor("fc.weight", lambda x: x.roll(32, 1)), "tensor fc.weight in the folder is not the trained one"),
        (one_tensor("layers.1.self_attn.k_norm.weight", torch.ones_like), "k_norm.weight in the folder is not"),
    ],
)
def test_mistakes_are_found_before_anything_is_kept(
    tmp_path: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch, change: Any, message: str
) -> None:
    caught(change, message, monkeypatch, lambda: exported(tmp_path, loaded, head_of(loaded)))
    assert not (tmp_path / "out").exists()


def test_a_folder_comes_back_as_the_head_it_was_and_leads_to_ours(tmp_path: Path, loaded: Loaded) -> None:
    target = loaded[0]
    head = head_of(loaded, anchors=7)
    out = exported(tmp_path, loaded, head)
    found = load(out, target=target).attach(target)
    assert largest_gap(weights(found), weights(head)) == 0.0 and found.config.anchors == 7
    ids = tokens(1, 9, vocab_size=200)
    pairs = zip(trained_logits(target, head, ids), trained_logits(target, found, ids), strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) == 0.0
    convert.main(ConvertRun(source=str(out), to=str(tmp_path / "ours"), target_id=loaded[1]["id"]))
    assert largest_gap(weights(load(tmp_path / "ours", target.spec)), weights(head)) == 0.0


def test_a_folder_of_its_authors_takes_mask_from_the_target(tmp_path: Path, loaded: Loaded) -> None:
    """No mask_embedding.pt, no manifest, RoPE in the old spelling, an MLP of another width than the target's."""
    target = loaded[0]
    head = head_of(loaded, layer={"intermediate_size": 48, "rope": {"rope_type": "default", "rope_theta": 777.0}})
    with torch.no_grad():
        head.mask_embedding.copy_(target.embed(torch.tensor([7]))[0])
    tensors = {name: x for name, x in weights(head).items() if name not in ("d2t", "t2d", "mask_embedding")}
    spec = target.spec
    config = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2, "block_size": 5,
        "hidden_size": spec.hidden_size, "intermediate_size": 48, "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads, "head_dim": spec.head_dim, "rms_norm_eps": spec.rms_norm_eps,
        "max_position_embeddings": spec.max_position_embeddings, "rope_theta": 777.0, "vocab_size": spec.vocab_size,
        "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 1, 3]},
    }  # fmt: skip
    theirs = folder_of(tmp_path / "theirs", config, tensors)
    found = load(theirs, target=target)
    assert found.config.layer == {"intermediate_size": 48, "rope": {"rope_type": "default", "rope_theta": 777.0}}
    assert largest_gap(weights(found), weights(head)) == 0.0
    with pytest.raises(ValueError, match="MASK is the target's embedding of id 7 .*: load it with its target"):
        load(theirs, target.spec)
    convert.main(ConvertRun(source=str(theirs), to=str(tmp_path / "ours"), target_id=loaded[1]["id"]))
    source = str(tmp_path / "ours")
    convert.main(ConvertRun(source=source, to=str(tmp_path / "back"), format="vllm", target_id=loaded[1]["id"]))
    assert largest_gap(weights(load(tmp_path / "back", target=target)), weights(head)) == 0.0


def changed(**dflash: Any) -> Any:
    return lambda config: config["dflash_config"].update(dflash)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(causal=True), "dflash_config.causal=True: such block heads are not read"),
        (changed(target_layer_ids=None), "dflash_config.target_layer_ids=None must be a list of layers"),
        (changed(target_layer_ids=[0, 1]), r"fc.weight is \[32, 96\], not \[32, 64\] for the 2 layers"),
        (changed(mask_token_id=9), "mask_embedding.pt: holds no vector of MASK .it is for id"),
        (lambda config: config.update(layer_types=["sliding_attention"]), "layer_types has sliding_attention"),
        (lambda config: config.pop("block_size"), "block_size=None must be a positive whole number"),
        (lambda config: config.update(vocab_size=99), "for a target of hidden size 32 and 99 ids"),
    ],
)
def test_folders_that_cannot_be_read_say_why(tmp_path: Path, loaded: Loaded, change: Any, message: str) -> None:
    out = exported(tmp_path, loaded, head_of(loaded))
    (out / "manifest.json").unlink()
    config = config_of(out)
    change(config)
    folder_of(out, config, load_file(out / "model.safetensors"))
    with pytest.raises(ValueError, match=message):
        load(out, target=loaded[0])


def test_a_damaged_mask_and_a_missing_tensor_are_named(tmp_path: Path, loaded: Loaded) -> None:
    out = exported(tmp_path, loaded, head_of(loaded))
    (out / "mask_embedding.pt").write_bytes(b"no pickle")
    with pytest.raises(ValueError, match="mask_embedding.pt: holds no vector of MASK"):
        load(out, target=loaded[0])
    (out / "mask_embedding.pt").unlink()
    config = config_of(out)
    config["dflash_config"]["mask_token_id"] = 999
    folder_of(out, config, load_file(out / "model.safetensors"))
    with pytest.raises(ValueError, match="mask_token_id=999 must be an id of the target, below 263"):
        load(out, target=loaded[0])
    out = exported(tmp_path, loaded, head_of(loaded), "more")
    tensors = load_file(out / "model.safetensors")
    del tensors["layers.1.mlp.up_proj.weight"]
    save_file(tensors, out / "model.safetensors")
    with pytest.raises(ValueError, match="layers.1.mlp.up_proj.weight"):
        load(out, target=loaded[0])
