"""Tiny targets built in-process: random weights, fixed seed, well under a second each."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from heads.target import Target

_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "gemma2": {"model_type": "gemma2", "head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 20.0},
}


def tiny_target(kind: str = "llama", vocab_size: int = 64, layers: int = 8, seed: int = 0, **overrides: Any) -> Target:
    """A random `kind` decoder of width 32; weights scaled up so that its distributions are far from uniform."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
        "tie_word_embeddings": False,
    }
    config = {**sizes, **_FAMILY[kind], **overrides}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # norms away from their start value, so that forgetting one shows
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return Target(model, name=f"tiny-{kind}")
