"""Head folders as others publish them, made from one of our heads: engine layout, speculators, original checkpoints."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny import tiny_target
from tiny_chat import byte_tokenizer
from torch import Tensor
from toys import weights

from heads.target import Target, TargetSettings

Loaded = tuple[Target, dict[str, Any]]


def loadable_target(folder: Path, layers: int = 6) -> Loaded:
    """A target that lies in `folder`, and the settings that load it again."""
    tokenizer = byte_tokenizer()
    tiny_target(vocab_size=len(tokenizer), layers=layers).model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = TargetSettings(id=str(folder))
    return Target.load(settings), dataclasses.asdict(settings)


def eagle3_tensors(head: Any) -> dict[str, Tensor]:
    """Names of the contract; a whole vocabulary has no map."""
    tensors = weights(head)
    if head.draft_vocab_size == head.vocab_size:
        del tensors["d2t"], tensors["t2d"]
    return tensors


def eagle3_config(target: Target, head: Any, **changed: Any) -> dict[str, Any]:
    """A config.json as published heads have it: RoPE in the old spelling, no head_dim, taps as given."""
    spec = target.spec
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "hidden_size": spec.hidden_size, "intermediate_size": spec.intermediate_size, "hidden_act": "silu",
        "num_attention_heads": spec.num_heads, "num_key_value_heads": spec.num_kv_heads, "head_dim": spec.head_dim,
        "rms_norm_eps": spec.rms_norm_eps, "max_position_embeddings": spec.max_position_embeddings,
        "rope_theta": 10000.0, "vocab_size": spec.vocab_size, "draft_vocab_size": head.draft_vocab_size,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", **changed,
    }  # fmt: skip


def speculators_config(target: Target, head: Any, **changed: Any) -> dict[str, Any]:
    layer = eagle3_config(target, head)
    del layer["draft_vocab_size"]
    verifier = {"name_or_path": "someone/tiny", "architectures": ["LlamaForCausalLM"]}
    return {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "speculators_version": "0.2.0",
        "transformer_layer_config": layer, "draft_vocab_size": head.draft_vocab_size, "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": list(head.taps), "target_hidden_size": target.spec.hidden_size,
        "speculators_config": {"algorithm": "eagle3", "verifier": verifier}, **changed,
    }  # fmt: skip


def as_layers(tensors: dict[str, Tensor], target: Target | None = None) -> dict[str, Tensor]:
    """`layers.0.` names, with the target's embeddings where it is given."""
    named = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
    embeddings = {} if target is None else {"embed_tokens.weight": target.model.get_input_embeddings().weight.detach()}
    return {**named, **{name: value.clone() for name, value in embeddings.items()}}


def halved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.to(torch.bfloat16) if x.is_floating_point() else x for name, x in tensors.items()}


def folder_of(
    folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str = "model.safetensors"
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: x.contiguous() for name, x in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder
