"""Tiny targets built in-process: random weights, fixed seed, well under a second each."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from heads.target import Target

_SMALL_HEAD: dict[str, Any] = {"head_dim": 8, "query_pre_attn_scalar": 8}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "qwen2": {},  # biases on q, k, v
    "qwen3": {"head_dim": 16},  # explicit head_dim, norms on q and k
    "mistral": {"head_dim": 8, "sliding_window": 6},  # every layer windowed
    "gemma2": {**_SMALL_HEAD, "final_logit_softcapping": 20.0},  # 1 + w norms, scaled embeddings, windows in turn
    "gemma3": {**_SMALL_HEAD, "model_type": "gemma3_text", "sliding_window": 6},  # two RoPE bases
    "phi3": {},  # fused qkv
    "gpt_neox": {},  # LayerNorm, parallel residual, rotary on a quarter of each head
    "gpt2": {"n_inner": 64},  # learned positions
    "mixtral": {**_EXPERTS, "num_local_experts": 4},
    "qwen3_moe": {**_EXPERTS, "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32},
}
KINDS = tuple(_FAMILY)


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
    config = {"model_type": kind, **sizes, **_FAMILY[kind], **overrides}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # norms away from their start value, so that forgetting one shows
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return Target(model, name=f"tiny-{kind}")
