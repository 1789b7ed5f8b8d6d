"""EAGLE-3 folders made here or elsewhere: the layout of vLLM and SGLang, and the speculators format.

Both hold the same tensors; the layer is called `midlayer.` or `layers.0.` (always so in speculators folders). Its own
configuration (RoPE base, MLP width) counts, not that of the target: it was trained with that.

Tap ids stand in config.json twice, as ids of the state *entering* a layer (vLLM, speculators) and of layer *outputs*
(SGLang):

    eagle_aux_hidden_state_layer_ids [2, 15, 27]  =  eagle_config {"eagle_aux_hidden_state_layer_ids": [1, 14, 26]}
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from heads.parts import Parts, unknown_target
from heads.read_layer import our_names, own_sizes, read_layer, sizes
from heads.spec import TargetSpec, check_taps, default_taps

TAPS = "eagle_aux_hidden_state_layer_ids"
# Where a trained variant shows in config.json, and what holds when the key is missing (speculators, other folders).
FLAGS = {
    "norm_before_residual": (True, False),
    "norm_before_fc": (False, False),
    "fc_norm": (False, False),
    "norm_output": (False, False),
}


def is_one(tensors: dict[str, Tensor]) -> bool:
    """Queries that read twice the width of the residual stream are EAGLE-3's mark."""
    queries = [value for name, value in tensors.items() if name.endswith("self_attn.q_proj.weight")]
    outputs = [value for name, value in tensors.items() if name.endswith("self_attn.o_proj.weight")]
    return len(queries) == len(outputs) == 1 and queries[0].shape[1] == 2 * outputs[0].shape[0]


def read(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], spec: TargetSpec | None) -> Parts:
    """Raises ValueError naming the key or tensor that does not fit. Unknown tensors are kept: loading refuses them."""
    notices: list[str] = []
    named = our_names(folder, tensors, "midlayer.")
    borrowed = {name: named.pop(name) for name in ("embed_tokens.weight",) if name in named}
    layer = read_layer(folder, config)
    for name in ("fc.weight", "lm_head.weight"):
        if name not in named:
            raise ValueError(f"{folder}: tensor {name} is missing")
    H, width = named["fc.weight"].shape
    if width % H:
        raise ValueError(f"{folder}: fc.weight is [{H}, {width}], not a whole number of taps of width {H}")
    written = written_taps(folder, config, width // H)
    if spec is None:
        spec = described_target(folder, config, layer, written)
    taps = written if written is not None else default_taps(spec.num_layers, f"{folder}/config.json: {TAPS}")
    if written is None:
        notices.append(f"config.json names no taps: the default {taps} of {spec.num_layers} layers is taken")
    check_taps(taps, spec.num_layers, f"{folder}/config.json: {TAPS}")
    if spec.hidden_size != H:
        raise ValueError(f"{folder}: fc.weight is for hidden size {H}, target {spec.name!r} has {spec.hidden_size}")
    D = named["lm_head.weight"].shape[0]
    named |= vocabulary(folder, config, named, D, spec.vocab_size)
    own = own_sizes(layer, spec)
    settings: dict[str, Any] = {"kind": "eagle3", "taps": taps, "draft_vocab_size": None if D == spec.vocab_size else D}
    settings |= {"num_kv_heads": layer.num_key_value_heads, "layer": own or None, **flags(config)}
    return Parts(settings, spec, named, borrowed, notices)


def written_taps(folder: Path, config: dict[str, Any], count: int) -> list[int] | None:
    """Taps by either spelling, as ids of the state entering a layer; None where the folder names none."""
    entering = config.get(TAPS)
    outputs = (config.get("eagle_config") or {}).get(TAPS)
    shifted = [i + 1 for i in outputs] if outputs else None
    if entering and shifted and list(entering) != shifted:
        raise ValueError(
            f"{folder}/config.json: {TAPS}={list(entering)} and eagle_config's {outputs} (counted as layer "
            f"outputs, one less) name different taps"
        )
    taps = list(entering) if entering else shifted
    if taps is not None and len(taps) != count:
        raise ValueError(f"{folder}: fc.weight reads {count} taps, config.json names {len(taps)}: {taps}")
    return taps


def vocabulary(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], D: int, V: int) -> dict[str, Tensor]:
    """d2t and t2d, each rebuilt from the other where one is missing, the identity where D = V and there is none."""
    said = config.get("draft_vocab_size") or D
    if said != D:
        raise ValueError(f"{folder}: lm_head.weight has {D} rows, config.json says draft_vocab_size={said}")
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None and t2d is None:
        if D != V:
            raise ValueError(f"{folder}: tensors d2t and t2d are missing, the map of {D} draft ids to the target's {V}")
        return {"d2t": torch.zeros(V, dtype=torch.int64), "t2d": torch.ones(V, dtype=torch.bool)}
    if t2d is not None and t2d.shape != (V,):
        raise ValueError(f"{folder}: t2d has shape {list(t2d.shape)}, the target has {V} ids")
    if d2t is None:
        assert t2d is not None
        kept = t2d.bool().nonzero().squeeze(1)
        d2t = kept - torch.arange(len(kept))
    ids = d2t.to(torch.int64) + torch.arange(len(d2t))
    if len(ids) != D or int(ids.min()) < 0 or int(ids.max()) >= V:
        raise ValueError(
            f"{folder}: d2t maps {len(ids)} draft ids into {int(ids.min())}..{int(ids.max())}, not {D} into 0..{V - 1}"
        )
    rebuilt = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
    if int(rebuilt.sum()) != D or bool((ids.diff() <= 0).any()):
        raise ValueError(f"{folder}: d2t is not the offsets of {D} different target ids in ascending order")
    if t2d is not None and not torch.equal(rebuilt, t2d.bool()):
        raise ValueError(f"{folder}: d2t and t2d are not the same target ids: one of them is stale")
    return {"d2t": d2t.to(torch.int64), "t2d": rebuilt}


def flags(config: dict[str, Any]) -> dict[str, bool]:
    """Trained variants as settings of the head."""
    speculators = "speculators_model_type" in config
    found = {}
    for key, (there, elsewhere) in FLAGS.items():
        value = config.get(key)
        found[key] = (there if speculators else elsewhere) if value is None else bool(value)
    return found


def described_target(folder: Path, config: dict[str, Any], layer: LlamaConfig, taps: list[int] | None) -> TargetSpec:
    """What the folder itself says of its target. Raises ValueError where taps need the target's layer count."""
    if taps is None:
        raise ValueError(
            f"{folder}/config.json names no taps, and their default depends on the target: load it with its target"
        )
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    return unknown_target(
        folder,
        verifier.get("name_or_path"),
        architecture=(verifier.get("architectures") or ["unknown"])[0],
        hidden_size=layer.hidden_size,
        vocab_size=layer.vocab_size,
        num_layers=taps[-1] + 1,  # at least so many
        num_kv_heads=layer.num_key_value_heads,
        **sizes(layer),
    )
