"""EAGLE-1 folders made here or elsewhere: the layouts of vLLM and SGLang, and original checkpoints.

The tensors are the same, `fc.weight` [H, 2H] reading the embedding first, one layer without input norm, no norm and no
LM head of its own. SGLang's wants a `fc.bias`, which is zero: original checkpoints may have trained one, which vLLM
drops without a word, and which is refused here.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads.parts import Parts, check_sizes, unknown_target
from heads.read_layer import our_names, own_sizes, read_layer, sizes
from heads.spec import TargetSpec


def is_one(tensors: dict[str, Tensor]) -> bool:
    """fc reads two vectors, attention one."""
    fc = [value for name, value in tensors.items() if name.removeprefix("model.") == "fc.weight"]
    queries = [value for name, value in tensors.items() if name.endswith("self_attn.q_proj.weight")]
    return len(fc) == len(queries) == 1 and fc[0].shape[1] == 2 * fc[0].shape[0] == 2 * queries[0].shape[1]


def read(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], spec: TargetSpec | None) -> Parts:
    """Raises ValueError naming the key or tensor that does not fit. Unknown tensors are kept: loading refuses them."""
    named = our_names(folder, tensors, "layers.0.")
    borrowed: dict[str, Tensor] = {}
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if name in named:
            borrowed[name] = named.pop(name)
    bias = named.pop("fc.bias", None)
    if bias is not None and bool(bias.any()):
        raise ValueError(f"{folder}: fc.bias is not zero: vLLM drops it, and heads trained with one are not read here")
    layer = read_layer(folder, config)
    H = layer.hidden_size
    if spec is None:
        facts = {"num_kv_heads": layer.num_key_value_heads, **sizes(layer)}
        spec = unknown_target(folder, hidden_size=H, vocab_size=layer.vocab_size, **facts)
    check_sizes(folder, H, layer.vocab_size, spec)
    V = spec.vocab_size
    named |= {"d2t": torch.zeros(V, dtype=torch.int64), "t2d": torch.ones(V, dtype=torch.bool)}
    settings: dict[str, Any] = {"kind": "eagle1", "draft_vocab_size": None, "layer": own_sizes(layer, spec) or None}
    settings["num_kv_heads"] = layer.num_key_value_heads
    return Parts(settings, spec, named, borrowed)
