"""Block heads as vLLM loads them: DFlash folders, method `dflash` (read and run in vLLM 0.32).

Tap ids name layer *outputs* there, one less than ours. The MASK row lies beside the tensors in `mask_embedding.pt`, in
place of the target's embedding of one id, which nothing may ever draft from: an id without a token, or one that ends an
answer.

    taps [2, 8, 15], block_size 5  ->  "dflash_config": {"target_layer_ids": [1, 7, 14], "mask_token_id": 2}, and
                                       num_speculative_tokens must be 4: vLLM runs as many rows as it drafts, and one
"""

import io

import torch

from heads.block import Block
from heads.read_block import MASK_FILE
from heads.spec import TargetSpec
from scripts.layouts import ExportError, Layout, Made, cast
from scripts.write_eagle3 import check_map
from scripts.write_layer import layer_facts


def dflash_layout(head: Block, made: Made) -> Layout:
    """Raises ExportError for what vLLM has not, or reads otherwise without a word.

    A head that borrows the target's LM head drafts from all ids there, whatever it was trained over.
    """
    check_rows(head)
    check_taps(head, made.spec.num_layers)
    check_map(head)
    mask_id = mask_token_id(made.spec)
    tensors = cast(head.state_dict(), made.dtype)
    mask, whole = tensors.pop("mask_embedding"), head.lm_head is None or head.draft_vocab_size == head.vocab_size
    if whole:
        del tensors["d2t"], tensors["t2d"]
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **layer_facts(head),
        "num_hidden_layers": head.config.num_layers,
        "vocab_size": head.vocab_size,
        "draft_vocab_size": head.vocab_size if whole else head.draft_vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": made.dtype,
        "block_size": head.config.block_size,
        "dflash_config": {"mask_token_id": mask_id, "target_layer_ids": [i - 1 for i in head.taps]},
    }
    file = io.BytesIO()
    torch.save({"embedding": mask.clone(), "mask_token_id": mask_id}, file)
    return Layout(config, tensors, {MASK_FILE: file.getvalue()})


def check_rows(head: Block) -> None:
    if head.config.from_anchor:
        raise ExportError(
            "head.from_anchor=true: vLLM reads every block as the paper does, row 0 drafting nothing, and would take "
            "each draft one row off; train with head.from_anchor=false, or use format=native"
        )


def check_taps(head: Block, layers: int) -> None:
    if head.taps[0] == 0 or head.taps[-1] >= layers:
        wrong = "0, the embeddings" if head.taps[0] == 0 else f"{layers}, the state after the last layer"
        raise ExportError(
            f"taps {list(head.taps)} hold {wrong}: DFlash folders count the outputs of the layers before the last; "
            f"train with taps from 1 to {layers - 1}"
        )


def mask_token_id(spec: TargetSpec) -> int:
    """An id no draft begins from: one without a token where the vocabulary is padded, else the end of an answer."""
    if spec.tokenizer_size < spec.vocab_size:
        return spec.vocab_size - 1
    if spec.eos_ids:
        return min(spec.eos_ids)
    raise ExportError(
        f"target {spec.name!r} has a token for each of its {spec.vocab_size} ids and names none that ends an answer: "
        "there is no id that can stand for MASK; use format=native"
    )
