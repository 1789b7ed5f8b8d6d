"""What heads, manifests and exports must know of a target, read from its model and tokenizer."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class TargetSpec:
    """What a head, a manifest or an export must know of its target; JSON-able with `dataclasses.asdict`."""

    name: str
    revision: str
    architecture: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tokenizer_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str
    rope: dict[str, Any]
    tie_word_embeddings: bool
    eos_ids: tuple[int, ...]
    tokenizer_hash: str
    template_hash: str
    dtype: str

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TargetSpec":
        return cls(**{**values, "eos_ids": tuple(values["eos_ids"])})

    def same_target(self, other: "TargetSpec") -> list[str]:
        """Names of the fields that differ and make a head useless on the other target (dtype and folder may differ)."""
        fields = ("revision", "hidden_size", "num_layers", "vocab_size", "tokenizer_hash", "template_hash", "rope")
        return [f for f in fields if getattr(self, f) != getattr(other, f)]


def read_spec(target: Any, name: str, revision: str) -> TargetSpec:
    config, tokenizer = target.config, target.tokenizer
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    return TargetSpec(
        name=name,
        revision=revision,
        architecture=type(target.model).__name__,
        model_type=config.model_type,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        num_layers=len(target.layers),
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=target.head.weight.shape[0],
        tokenizer_size=len(tokenizer) if tokenizer is not None else target.head.weight.shape[0],
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-6,
        hidden_act=getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None) or "silu",
        rope=json.loads(json.dumps(rope)),
        tie_word_embeddings=target.head.weight is target.model.get_input_embeddings().weight,
        eos_ids=_eos_ids(target),
        tokenizer_hash=_tokenizer_hash(tokenizer),
        template_hash=_hash(str(getattr(tokenizer, "chat_template", None))),
        dtype=str(next(target.model.parameters()).dtype).removeprefix("torch."),
    )


def default_taps(num_layers: int, key: str = "head.taps") -> list[int]:
    """[2, L // 2, L - 3]. Raises ValueError, naming the setting `key`, where these are not distinct and ascending."""
    taps = [2, num_layers // 2, num_layers - 3]
    if not 0 < taps[0] < taps[1] < taps[2] <= num_layers:
        raise ValueError(
            f"the default taps [2, L//2, L-3] are {taps} for a target of {num_layers} layers, not distinct and "
            f"ascending: set {key} explicitly, for example {key}=[0,1,2]"
        )
    return taps


def check_taps(taps: Sequence[int], num_layers: int, key: str = "head.taps") -> tuple[int, ...]:
    """At least one tap, distinct, ascending, inside 0..L. Raises ValueError naming the setting `key`."""
    if not taps or sorted(set(taps)) != list(taps) or taps[0] < 0 or taps[-1] > num_layers:
        raise ValueError(
            f"{key}={list(taps)} must be distinct, ascending and inside 0..{num_layers} (the target's layers)"
        )
    return tuple(taps)


def _eos_ids(target: Any) -> tuple[int, ...]:
    """Union of every end id the tokenizer, the config and the generation config know: any of them ends a turn."""
    sources = (target.tokenizer, target.config, getattr(target.model, "generation_config", None))
    found: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        found.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return tuple(sorted(found))


def _tokenizer_hash(tokenizer: Any) -> str:
    if tokenizer is None:
        return "none"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return _hash(backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items())))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
