"""What a folder of another format amounts to: the pieces a head of this project is built from."""

import dataclasses
from pathlib import Path
from typing import Any

from torch import Tensor

from heads.spec import TargetSpec


@dataclasses.dataclass
class Parts:
    """A head read from a folder; `tensors` bear the names of our state dict."""

    settings: dict[str, Any]  # {"kind": ..., fields of its settings dataclass}
    spec: TargetSpec
    tensors: dict[str, Tensor]
    borrowed: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # the target's own: embeddings, LM head
    notices: list[str] = dataclasses.field(default_factory=list)  # what was taken for granted
    mask_id: int | None = None  # a block head's MASK vector is the target's embedding of this id, and not in the folder


def unknown_target(folder: Path, name: str | None = None, **known: Any) -> TargetSpec:
    """Facts of a target that only its head describes; "unknown" wherever the folder is silent."""
    nothing: dict[str, Any] = {
        "name": name or f"unknown-target-of-{folder.name}", "revision": "unknown", "architecture": "unknown",
        "model_type": "unknown", "intermediate_size": 1, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1,
        "head_dim": 1, "max_position_embeddings": 1, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope": {},
        "tie_word_embeddings": False, "eos_ids": (), "tokenizer_hash": "unknown", "template_hash": "unknown",
        "dtype": "unknown", "tokenizer_size": known["vocab_size"],
    }  # fmt: skip
    return TargetSpec(**{**nothing, **known})


def size(config: dict[str, Any], key: str, folder: Path) -> int:
    """A positive whole number. Raises ValueError naming file and key."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{folder}/config.json: {key}={value!r} must be a positive whole number")
    return value


def check_sizes(folder: Path, H: int, V: int, spec: TargetSpec) -> None:
    """Raises ValueError when a head of hidden size H and V ids is for another target than `spec`."""
    if (H, V) != (spec.hidden_size, spec.vocab_size):
        raise ValueError(
            f"{folder}: this head is for a target of hidden size {H} and {V} ids, {spec.name!r} has "
            f"{spec.hidden_size} and {spec.vocab_size}"
        )
