"""EAGLE-3 folders: one layout that vLLM and SGLang load, and the speculators format.

Tap ids: this project and vLLM count the state *entering* layer i, SGLang the output of layer i: i - 1.

    taps [2, 15, 27]  ->  eagle_aux_hidden_state_layer_ids [2, 15, 27] (vLLM), eagle_config [1, 14, 26] (SGLang)

Read in vLLM 0.32 / 0.33 and SGLang 0.5.23.
"""

import torch

from heads.base import Head
from heads.eagle3 import Eagle3
from heads.read_eagle3 import FLAGS, TAPS
from scripts.layouts import ExportError, Layout, Made, cast
from scripts.write_layer import layer_facts

SPECULATORS_VERSION = "0.3.0"  # of the format's config.json that is written here


def engine_layout(head: Eagle3, made: Made) -> Layout:
    """Raises ExportError for taps, maps or variants that engines load without complaint and misread."""
    sglang = made.format == "sglang"
    check_taps(head, made.spec.num_layers, sglang)
    check_map(head)
    variants = trained_variants(head)
    if sglang and (trained := [key for key, value in variants.items() if value]):
        raise ExportError(f"format=sglang: SGLang has no {trained[0]} and would draft nonsense; use format=vllm")
    taps = list(head.taps)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **layer_facts(head),
        "vocab_size": head.vocab_size,
        "draft_vocab_size": head.draft_vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": made.dtype,
        **{key: value for key, value in variants.items() if value},
        TAPS: taps,
        # SGLang counts layer outputs and so cannot tap the embeddings, tap 0: such a folder is for vLLM alone
        "eagle_config": {"use_aux_hidden_state": True} | ({TAPS: [i - 1 for i in taps]} if taps[0] > 0 else {}),
    }
    return Layout(config, cast(written_tensors(head), made.dtype))


def speculators_layout(head: Eagle3, made: Made) -> Layout:
    """The same tensors under `layers.0.`, with the target's embeddings, which this format carries along."""
    check_taps(head, made.spec.num_layers, sglang=False)
    check_map(head)
    assert made.embeddings is not None, "the format carries the target's embeddings: it is loaded for this"
    layer = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **layer_facts(head)}
    proposal = {"proposal_type": "greedy", "speculative_tokens": made.draft_tokens}
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "transformer_layer_config": {**layer, "vocab_size": head.vocab_size, "tie_word_embeddings": False},
        "draft_vocab_size": head.draft_vocab_size,
        **trained_variants(head),
        "target_hidden_size": made.spec.hidden_size,
        TAPS: list(head.taps),
        "tie_word_embeddings": False,
        "torch_dtype": made.dtype,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": made.base, "architectures": [made.spec.architecture]},
        },
    }
    tensors = {name.replace("midlayer.", "layers.0."): value for name, value in written_tensors(head).items()}
    return Layout(config, cast({**tensors, "embed_tokens.weight": made.embeddings}, made.dtype))


def trained_variants(head: Eagle3) -> dict[str, bool]:
    """Every flag of the formats, as this head was trained."""
    return {key: bool(getattr(head.config, key)) for key in FLAGS}


def written_tensors(head: Eagle3) -> dict[str, torch.Tensor]:
    tensors = head.state_dict()
    if head.draft_vocab_size == head.vocab_size:
        del tensors["d2t"], tensors["t2d"]  # vLLM raises when a whole vocabulary comes with a map
    return tensors


def check_taps(head: Eagle3, layers: int, sglang: bool) -> None:
    """Engines sort and de-duplicate tap ids and never compare them with `fc`."""
    taps, (rows, columns) = head.taps, head.fc.weight.shape
    if len(taps) != 3 or columns != 3 * rows:
        raise ExportError(
            f"fc.weight is [{rows}, {columns}] and there are {len(taps)} taps {list(taps)}: engines read exactly three "
            f"taps of width {rows}; train with three taps"
        )
    if sglang and taps[0] == 0:
        raise ExportError(
            f"taps {list(taps)} hold 0, the embeddings, which SGLang cannot tap (it counts layer outputs): train with "
            "taps from 1 on, or use format=vllm"
        )
    if taps[-1] >= layers:
        raise ExportError(
            f"taps {list(taps)} hold {taps[-1]}, the state after the last of {layers} layers: no engine captures it; "
            f"train with taps below {layers}"
        )


def check_map(head: Head) -> None:
    """The draft ids must be distinct target ids in ascending order, and t2d the same set."""
    ids = head.to_target(torch.arange(head.draft_vocab_size))
    inside = bool(((ids >= 0) & (ids < head.vocab_size)).all())
    if not inside or not torch.equal(ids, head.t2d.nonzero().squeeze(1)):
        raise ExportError("tensors d2t and t2d are not the same ascending target ids: the head folder is damaged")
