"""Heads that others published are loaded as they were trained, or refused by the name of what does not fit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from elsewhere import as_layers, eagle3_config, eagle3_tensors, folder_of, halved, speculators_config
from safetensors.torch import load_file, save_file
from tiny import tiny_target
from toys import eagle3, head_input, largest_gap, medusa, tokens, weights

from heads.hub import load, origin, read_facts, save_head
from heads.target import Target

DRAFT = [0, 3, 4, 9, 15, 40, 63]
OUTPUTS = {"eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(layers=6)


def same_logits(target: Target, ours: Any, theirs: Any) -> bool:
    inputs = head_input(target, ours, tokens(1, 12))
    with torch.no_grad():
        pairs = zip(ours(inputs, 2), theirs(inputs, 2), strict=True)
        return all(torch.allclose(ours.logits(a, i), theirs.logits(b, i), atol=1e-5) for i, (a, b) in enumerate(pairs))


def engine(target: Target, head: Any, folder: Path) -> Path:
    return folder_of(
        folder, eagle3_config(target, head, eagle_aux_hidden_state_layer_ids=[1, 2, 4]), eagle3_tensors(head)
    )


def engine_outputs(target: Target, head: Any, folder: Path) -> Path:
    """SGLang's spelling alone, `layers.0.` names, and only one half of the map."""
    tensors = as_layers(eagle3_tensors(head))
    tensors.pop("t2d", None)
    return folder_of(folder, eagle3_config(target, head, **OUTPUTS), tensors)


def original(target: Target, head: Any, folder: Path) -> Path:
    """A pickle, read with weights_only; `model.` before each name."""
    tensors = {f"model.{name}": value for name, value in eagle3_tensors(head).items()}
    config = eagle3_config(target, head, architectures=["LlamaForCausalLM"], **OUTPUTS)
    return folder_of(folder, config, tensors, "pytorch_model.bin")


def speculators(target: Target, head: Any, folder: Path) -> Path:
    return folder_of(folder, speculators_config(target, head), as_layers(eagle3_tensors(head), target))


def shards(target: Target, head: Any, folder: Path) -> Path:
    tensors = eagle3_tensors(head)
    engine(target, head, folder)
    (folder / "model.safetensors").unlink()
    names = {name: f"model-0000{1 + (name > 'm')}-of-00002.safetensors" for name in tensors}
    for file in set(names.values()):
        save_file({name: tensors[name].contiguous() for name in tensors if names[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


@pytest.mark.parametrize("made", [engine, engine_outputs, original, speculators, shards])
@pytest.mark.parametrize("draft", [None, DRAFT])
def test_a_published_eagle3_head_drafts_as_it_was_trained(
    tmp_path: Path, target: Target, made: Callable[..., Path], draft: list[int] | None, capsys: Any
) -> None:
    head = eagle3(target, std=0.3, draft=draft)
    folder = made(target, head, tmp_path / "theirs")
    found = load(folder, target=target)
    assert found.taps == (1, 2, 4) and same_logits(target, head, found)
    assert capsys.readouterr().err == "", "nothing had to be taken for granted"
    assert load(folder).taps == (1, 2, 4), "and without its target"


def test_half_precision_is_read_into_float32(tmp_path: Path, target: Target) -> None:
    head = eagle3(target, std=0.3)
    config = eagle3_config(target, head, eagle_aux_hidden_state_layer_ids=[1, 2, 4])
    found = load(folder_of(tmp_path, config, halved(eagle3_tensors(head))), target.spec)
    assert found.fc.weight.dtype == torch.float32
    assert torch.equal(found.fc.weight, head.fc.weight.bfloat16().float())


def test_the_heads_own_rope_and_mlp_count_and_survive_saving(tmp_path: Path, target: Target) -> None:
    """Published heads often keep a RoPE base of 10000 beside a target with another one."""
    layer = {"rope": {"rope_type": "default", "rope_theta": 777.0}, "intermediate_size": 48}
    head = eagle3(target, std=0.3, layer=layer)
    assert not torch.equal(head.rotary.inv_freq, eagle3(target).rotary.inv_freq)
    config = eagle3_config(
        target, head, eagle_aux_hidden_state_layer_ids=[1, 2, 4], rope_theta=777.0, intermediate_size=48
    )
    found = load(folder_of(tmp_path / "theirs", config, eagle3_tensors(head)), target=target)
    assert found.config.layer == layer and same_logits(target, head, found)
    save_head(tmp_path / "ours", found, target.spec, {})
    assert same_logits(target, head, load(tmp_path / "ours", target=target))


def test_a_layer_of_its_own_has_known_sizes_only(target: Target) -> None:
    for layer, message in (({"width": 3}, "head.layer.width is no size"), ("wide", "must be null or sizes by name")):
        with pytest.raises(ValueError, match=message):
            eagle3(target, layer=layer)


def test_missing_taps_are_the_default_and_said_so(tmp_path: Path, capsys: Any) -> None:
    target = tiny_target(layers=8)
    head = eagle3(target, std=0.3)
    folder = folder_of(tmp_path, eagle3_config(target, head), eagle3_tensors(head))
    assert load(folder, target=target).taps == (2, 4, 5)
    assert "names no taps: the default [2, 4, 5] of 8 layers is taken" in capsys.readouterr().err
    with pytest.raises(ValueError, match="names no taps, and their default depends on the target"):
        load(folder)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("file", ["model.safetensors", "medusa_lm_head.pt"])
def test_a_published_medusa_head_drafts_as_it_was_trained(
    tmp_path: Path, target: Target, shared: bool, file: str
) -> None:
    head = medusa(target, std=0.3, num_heads=2, shared_lm_head=shared)
    tensors = {name: value for name, value in weights(head).items() if name.startswith("medusa_heads.")}
    config: dict[str, Any] = {"medusa_num_heads": 2, "medusa_num_layers": 1}
    if file.endswith(".pt"):
        tensors = {name.removeprefix("medusa_heads."): value for name, value in tensors.items()}
    if shared:
        tensors["lm_head.weight"] = target.lm_head()[0].clone()
        config["original_lm_head"] = True
    folder = folder_of(tmp_path, config, tensors, file)
    found = load(folder, target=target).attach(target)
    assert found.config.shared_lm_head == shared and same_logits(target, head, found)
    if shared:
        with pytest.raises(ValueError, match="lm_head.weight is not the target's"):
            load(folder, target=tiny_target(layers=6, seed=5))


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda config, tensors: tensors.update({name: change(tensors[name])})


WRONG: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], Any], str]] = {
    "an unknown tensor": (lambda c, t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(8)}), "q_norm.weight"),
    "a missing tensor": (lambda c, t: t.pop("midlayer.mlp.up_proj.weight"), "midlayer.mlp.up_proj.weight"),
    "no fc": (lambda c, t: t.pop("fc.weight"), "tensor fc.weight is missing"),
    "half of the LM head": (changed("lm_head.weight", lambda x: x[:3]), "lm_head.weight has 3 rows"),
    "no map": (lambda c, t: (t.pop("d2t"), t.pop("t2d")), "d2t and t2d are missing, the map of 7 draft ids to the"),
    "a stale map": (changed("t2d", lambda x: x.roll(1)), "one of them is stale"),
    "a map that leaves the vocabulary": (changed("d2t", lambda x: x + 60), "d2t maps 7 draft ids into"),
    "taps that disagree": (lambda c, t: c.update(OUTPUTS | {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}),
                           "name different taps"),
    "taps that do not fit fc": (lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[1, 2]), "fc.weight reads 3"),
    "taps outside the target": (lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 9]), "inside 0..6"),
    "random embeddings": (lambda c, t: t.update({"embed_tokens.weight": torch.randn(64, 32)}),
                          "embed_tokens.weight is not the target's"),
    "another hidden size": (lambda c, t: c.update(target_hidden_size=64), "target_hidden_size=64"),
    "two layers": (lambda c, t: c.update(num_hidden_layers=2), "heads of one layer"),
    "no sizes": (lambda c, t: c.pop("hidden_size"), "hidden_size=None must be a positive whole number"),
    "something else": (lambda c, t: [t.pop(name) for name in list(t) if "self_attn" in name], "no head that is known"),
}  # fmt: skip


@pytest.mark.parametrize("what", list(WRONG))
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, target: Target, what: str) -> None:
    change, message = WRONG[what]
    head = eagle3(target, std=0.3, draft=DRAFT)
    config = eagle3_config(target, head, eagle_aux_hidden_state_layer_ids=[1, 2, 4])
    tensors = eagle3_tensors(head)
    change(config, tensors)
    folder = folder_of(tmp_path / "theirs", config, tensors)
    with pytest.raises(ValueError, match=message) as raised:
        load(folder, target=target)
    assert "\n" not in str(raised.value) and "theirs" in str(raised.value)


def test_speculators_residual_default_is_true(tmp_path: Path, target: Target) -> None:
    head = eagle3(target, std=0.3)
    config = speculators_config(target, head)
    del config["norm_before_residual"]
    found = load(folder_of(tmp_path, config, as_layers(eagle3_tensors(head), target)), target=target)
    assert found.config.norm_before_residual and not same_logits(target, head, found)
    assert not load(engine(target, head, tmp_path / "engine"), target=target).config.norm_before_residual


class Sprung:
    """What a hostile pickle does when it is loaded the usual way."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("sprung"),))


def test_a_pickle_that_carries_code_is_not_run(tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    head = eagle3(target, std=0.3)
    tensors: Any = {**eagle3_tensors(head), "trap": Sprung()}
    folder = folder_of(tmp_path / "theirs", eagle3_config(target, head), tensors, "pytorch_model.bin")
    with pytest.raises(ValueError, match="pytorch_model.bin: not a plain file of tensors"):
        load(folder, target=target)
    assert not (tmp_path / "sprung").exists()


def test_damaged_files_are_named(tmp_path: Path, target: Target) -> None:
    folder = engine(target, eagle3(target, std=0.3), tmp_path / "theirs")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="model.safetensors: damaged or cut short"):
        load(folder, target=target)
    (folder / "config.json").write_text('{"hidden_size": ')
    with pytest.raises(ValueError, match="config.json: damaged, not JSON"):
        load(folder, target=target)
    save_head(tmp_path / "ours", eagle3(target), target.spec, {})
    (tmp_path / "ours" / "head.json").write_text("[1]")
    with pytest.raises(ValueError, match="head.json: holds a list"):
        load(tmp_path / "ours")
    (tmp_path / "ours" / "head.json").write_text('{"kind": "eagle3", "config": {}, "target": {}}')
    with pytest.raises(ValueError, match="head.json: 'provenance' is missing"):
        load(tmp_path / "ours")
    (tmp_path / "ours" / "head.json").write_text('{"kind": "eagle3", "config": {}, "target": {}, "provenance": {}}')
    with pytest.raises(ValueError, match="head.json: the target's facts are damaged"):
        load(tmp_path / "ours")


def test_where_a_head_comes_from_is_recorded(tmp_path: Path, target: Target) -> None:
    folder = engine(target, eagle3(target, std=0.3), tmp_path / "theirs")
    made = origin(folder)
    assert made["imported"] == "theirs" and len(made["tensors"]) == 16
    facts = read_facts(folder, target.spec)
    assert facts["kind"] == "eagle3" and facts["provenance"] == made and facts["target"]["name"] == "tiny-llama"
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "norm.weight": tensors["norm.weight"] + 1}, folder / "model.safetensors")
    assert origin(folder) != made
    found = load(folder)
    assert largest_gap(weights(found), weights(load(folder, target.spec))) == 0.0
