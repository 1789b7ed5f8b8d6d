"""The one decoder layer of a head as a plain Llama configuration."""

from typing import Any


def layer_facts(head: Any) -> dict[str, Any]:
    """Sizes of the one layer, and its RoPE in both spellings."""
    layer = head.layer_config
    # The layer turns all of head_dim; engines obey this key where transformers' Llama does not look at it.
    rope = {key: value for key, value in layer.rope_parameters.items() if key != "partial_rotary_factor"}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    same = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act")
    return {
        "num_hidden_layers": 1,
        **{key: getattr(layer, key) for key in (*same, "rms_norm_eps", "max_position_embeddings")},
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else scaling,
        "rope_parameters": rope,
    }
