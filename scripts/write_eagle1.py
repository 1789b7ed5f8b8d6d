"""EAGLE-1 folders: the same tensors for vLLM and SGLang, two configurations.

vLLM takes `LlamaForCausalLM` with method `eagle`; a `bias: true` in its config would give acceptance 0 without an
error. SGLang takes `LlamaForCausalLMEagle` and a `fc.bias`, which is zero: heads are trained without one.
"""

import torch

from heads.eagle1 import Eagle1
from scripts.layouts import Layout, Made, cast
from scripts.write_layer import layer_facts


def engine_layout(head: Eagle1, made: Made) -> Layout:
    """The format has no draft vocabulary: engines draft with the target's whole LM head."""
    sglang = made.format == "sglang"
    tensors = {name: value for name, value in head.state_dict().items() if name not in ("d2t", "t2d")}
    if sglang:
        tensors["fc.bias"] = torch.zeros(made.spec.hidden_size)
    config = {
        "architectures": ["LlamaForCausalLMEagle" if sglang else "LlamaForCausalLM"],
        "model_type": "llama",
        **layer_facts(head),
        "vocab_size": made.spec.vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": made.dtype,
    }
    return Layout(config, cast(tensors, made.dtype))
