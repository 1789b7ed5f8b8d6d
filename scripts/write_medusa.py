"""Medusa as vLLM up to 0.32 loads it. 0.33 removed Medusa; SGLang never had it."""

from heads.medusa import Medusa
from scripts.layouts import ExportError, Layout, Made, cast


def medusa_layout(head: Medusa, made: Made) -> Layout:
    """Raises ExportError for what the format cannot say.

    The format has no draft vocabulary (`token_map` is broken there): a shared LM head is written whole.
    """
    V = made.spec.vocab_size
    tensors = {name: value for name, value in head.state_dict().items() if name.startswith("medusa_heads.")}
    if head.config.shared_lm_head:
        assert made.lm_head is not None, "a shared LM head is the target's: it is loaded for this"
        if made.lm_head.bias is not None:
            raise ExportError("the target's LM head has a bias, which the Medusa format cannot hold: export EAGLE-3")
        tensors["lm_head.weight"] = made.lm_head.weight
    elif head.draft_vocab_size < V:
        raise ExportError(
            f"own Medusa LM heads over {head.draft_vocab_size} of {V} ids cannot be expressed: the format has no draft "
            "vocabulary; train with head.shared_lm_head=true or head.draft_vocab_size=null"
        )
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": made.spec.hidden_size,
        "vocab_size": V,
        # vLLM takes any key that holds both "num" and "heads" for K: there must be no second one
        "medusa_num_heads": head.config.num_heads,
        "medusa_num_layers": head.config.num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": head.config.shared_lm_head,
        "torch_dtype": made.dtype,
    }
    return Layout(config, cast(tensors, made.dtype))
