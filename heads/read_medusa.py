"""Medusa folders: the layout of vLLM up to 0.32 (0.33 removed Medusa, SGLang never had it) and original checkpoints.

medusa_heads.{i}.{l}.linear.{weight,bias}   residual block l of head i        (original files: {i}.{l}.linear.*)
medusa_heads.{i}.{blocks}.weight            its own LM head [V, H]
lm_head.weight                              one for all heads, the target's, with "original_lm_head": true
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads.parts import Parts, check_sizes, size, unknown_target
from heads.spec import TargetSpec

_NAME = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)")


def is_one(tensors: dict[str, Tensor]) -> bool:
    return any(_NAME.fullmatch(name) for name in tensors)


def read(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], spec: TargetSpec | None) -> Parts:
    """Raises ValueError naming the key or tensor that does not fit. Unknown tensors are kept: loading refuses them."""
    notices = []
    named = {_our_name(name): value for name, value in tensors.items()}
    lm_head = named.pop("lm_head.weight", None)
    K = size(config, "medusa_num_heads", folder)
    blocks = size({"medusa_num_layers": 1, **config}, "medusa_num_layers", folder)
    shared = f"medusa_heads.0.{blocks}.weight" not in named
    if shared and not config.get("original_lm_head") and lm_head is None:
        raise ValueError(f"{folder}: tensor medusa_heads.0.{blocks}.weight is missing, the LM head of the first head")
    first = named.get("medusa_heads.0.0.linear.weight")
    if first is None:
        raise ValueError(f"{folder}: tensor medusa_heads.0.0.linear.weight is missing")
    if not any(name.endswith("linear.bias") for name in named):
        notices.append("its residual blocks have no bias: read as zero")
        for i in range(K):
            named |= {f"medusa_heads.{i}.{n}.linear.bias": torch.zeros(len(first)) for n in range(blocks)}
    rows = lm_head if shared else named[f"medusa_heads.0.{blocks}.weight"]
    H = first.shape[0]
    if spec is None:
        V = size(config, "vocab_size", folder) if rows is None else len(rows)
        spec = unknown_target(folder, config.get("base_model_name_or_path"), hidden_size=H, vocab_size=V)
    check_sizes(folder, H, spec.vocab_size if rows is None else len(rows), spec)
    V = spec.vocab_size
    named |= {"d2t": torch.zeros(V, dtype=torch.int64), "t2d": torch.ones(V, dtype=torch.bool)}
    settings = {"kind": "medusa", "num_heads": K, "num_layers": blocks, "shared_lm_head": shared}
    settings["draft_vocab_size"] = None  # the format has none
    borrowed = {} if lm_head is None else {"lm_head.weight": lm_head}
    return Parts(settings, spec, named, borrowed, notices)


def _our_name(name: str) -> str:
    """'0.0.linear.weight', 'medusa_head.0.0.linear.weight' -> 'medusa_heads.0.0.linear.weight'."""
    match = _NAME.fullmatch(name)
    return f"medusa_heads.{match[1]}.{match[2]}.{match[3] or ''}{match[4]}" if match else name
