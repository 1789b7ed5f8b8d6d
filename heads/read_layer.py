"""The one decoder layer of EAGLE folders: its names, sizes and RoPE, whoever wrote them."""

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import LlamaConfig

from heads.layers import OWN_FIELDS, layer_config
from heads.parts import size
from heads.spec import TargetSpec


def our_names(folder: Path, tensors: dict[str, Tensor], layer: str) -> dict[str, Tensor]:
    """Names of the one layer begin with `layer`; buffers of RoPE, which old checkpoints hold, are left out.

    With "midlayer.": 'layers.0.mlp.up_proj.weight' -> 'midlayer.mlp.up_proj.weight', 'model.fc.weight' -> 'fc.weight'
    """
    found: dict[str, Tensor] = {}
    for name, value in tensors.items():
        ours = name.removeprefix("model.")
        if ours.endswith("rotary_emb.inv_freq"):
            continue
        for theirs in ("layers.0.", "midlayer."):
            if ours.startswith(theirs):
                ours = layer + ours.removeprefix(theirs)
                break
        if ours in found:
            raise ValueError(f"{folder}: tensor {ours} is there twice, under two names")
        found[ours] = value
    return found


def read_layer(folder: Path, config: dict[str, Any], layers: int | None = 1) -> LlamaConfig:
    """Configuration of the draft layer, as the engines read it: RoPE in either spelling, missing sizes derived.

    `layers` is how many of them there must be; None: any number.
    """
    raw = config.get("transformer_layer_config", config)
    for key in ("hidden_size", "intermediate_size", "num_attention_heads"):
        size(raw, key, folder)
    plain = {key: value for key, value in raw.items() if key not in ("architectures", "model_type", "auto_map")}
    layer = LlamaConfig.from_dict(plain)
    if layer.hidden_act != "silu" or layers not in (None, raw.get("num_hidden_layers", 1)):
        raise ValueError(
            f"{folder}/config.json: {raw.get('num_hidden_layers', 1)} layers with {layer.hidden_act}: heads of one "
            "layer with silu are read"
        )
    target_size = config.get("target_hidden_size") or layer.hidden_size
    if target_size != layer.hidden_size:
        raise ValueError(
            f"{folder}/config.json: target_hidden_size={target_size} is not hidden_size={layer.hidden_size}"
        )
    return layer


def own_sizes(layer: LlamaConfig, spec: TargetSpec) -> dict[str, Any]:
    """What the layer does not share with its target: {"rope": {...}, "intermediate_size": ...}."""
    theirs = sizes(layer_config(spec))
    return {key: value for key, value in sizes(layer).items() if value != theirs[key]}


def sizes(layer: LlamaConfig) -> dict[str, Any]:
    """The layer's own fields by the names of TargetSpec."""
    names = {"num_heads": "num_attention_heads"}
    found = {key: getattr(layer, names.get(key, key)) for key in OWN_FIELDS if key != "rope"}
    return {**found, "rope": {k: v for k, v in layer.rope_parameters.items() if k != "partial_rotary_factor"}}
