"""DFlash folders made here or elsewhere: block heads in the layout of vLLM (`DFlashDraftModel`).

    fc.weight [H, n H], hidden_norm.weight, norm.weight, layers.{i}.* with q_norm and k_norm; lm_head.weight, d2t and
    t2d where the head has an LM head of its own

Tap ids name layer outputs, one less than ours. MASK is the vector in `mask_embedding.pt`, or, in the folders of its
authors, where that file is missing, the target's embedding of `mask_token_id`, which is taken from the target.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads.parts import Parts, check_sizes, size, unknown_target
from heads.read_eagle3 import vocabulary
from heads.read_layer import own_sizes, read_layer, sizes
from heads.spec import TargetSpec, check_taps

MASK_FILE = "mask_embedding.pt"


def is_one(tensors: dict[str, Tensor]) -> bool:
    """Normed queries beside a fused feature: no other head has both."""
    return {"fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight"} <= tensors.keys()


def read(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], spec: TargetSpec | None) -> Parts:
    """Raises ValueError naming the key or tensor that does not fit. Unknown tensors are kept: loading refuses them."""
    named = dict(tensors)
    borrowed = {name: named.pop(name) for name in ("embed_tokens.weight",) if name in named}
    dflash = config.get("dflash_config") or {}
    for key in ("use_swa", "causal", "attention_sink_bias", "attention_value_scale"):
        if dflash.get(key):
            raise ValueError(f"{folder}/config.json: dflash_config.{key}={dflash[key]}: such block heads are not read")
    if "sliding_attention" in (config.get("layer_types") or ()):
        raise ValueError(f"{folder}/config.json: layer_types has sliding_attention: such block heads are not read")
    layer = read_layer(folder, config, layers=None)
    outputs = dflash.get("target_layer_ids")
    if not isinstance(outputs, list) or not outputs:
        raise ValueError(f"{folder}/config.json: dflash_config.target_layer_ids={outputs!r} must be a list of layers")
    taps, H = [i + 1 for i in outputs], layer.hidden_size
    if tensors["fc.weight"].shape != (H, len(taps) * H):
        raise ValueError(
            f"{folder}: fc.weight is {list(tensors['fc.weight'].shape)}, not [{H}, {len(taps) * H}] for the "
            f"{len(taps)} layers that config.json names"
        )
    if spec is None:
        facts = {"num_kv_heads": layer.num_key_value_heads, "num_layers": taps[-1] + 1, **sizes(layer)}
        spec = unknown_target(folder, hidden_size=H, vocab_size=layer.vocab_size, **facts)
    check_sizes(folder, H, layer.vocab_size, spec)
    check_taps(taps, spec.num_layers, f"{folder}/config.json: dflash_config.target_layer_ids + 1")
    own = "lm_head.weight" in named
    D = len(named["lm_head.weight"]) if own else spec.vocab_size
    named |= vocabulary(folder, config, named, D, spec.vocab_size)
    settings = {
        "kind": "block", "taps": taps, "draft_vocab_size": None if D == spec.vocab_size else D,
        "num_layers": size(config, "num_hidden_layers", folder), "block_size": size(config, "block_size", folder),
        "from_anchor": bool(dflash.get("sample_from_anchor")), "own_lm_head": own,
        "num_kv_heads": layer.num_key_value_heads, "layer": own_sizes(layer, spec) or None, "init": "random",
    }  # fmt: skip
    mask = read_mask(folder, dflash)
    if mask is None:
        mask_id = dflash.get("mask_token_id")
        if not isinstance(mask_id, int) or not 0 <= mask_id < spec.vocab_size:
            raise ValueError(
                f"{folder}/config.json: dflash_config.mask_token_id={mask_id!r} must be an id of the target, below "
                f"{spec.vocab_size}: its embedding is MASK, since there is no {MASK_FILE}"
            )
        return Parts(settings, spec, named, borrowed, mask_id=mask_id)
    return Parts(settings, spec, {**named, "mask_embedding": mask}, borrowed)


def read_mask(folder: Path, dflash: dict[str, Any]) -> Tensor | None:
    """The vector of MASK, where the folder has it; read with `weights_only`, so that no code in it runs."""
    path = folder / MASK_FILE
    if not path.is_file():
        return None
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(found, dict):
            if found.get("mask_token_id", dflash.get("mask_token_id")) != dflash.get("mask_token_id"):
                raise ValueError(f"it is for id {found['mask_token_id']}, config.json names another")
            found = found["embedding"]
        return found.reshape(-1)
    except Exception as error:  # pickle, zip and torch each raise classes of their own
        reason = " ".join(str(error).split())[:120]
        raise ValueError(f"{path}: holds no vector of MASK ({reason}); copy it again") from error
