"""Reads an exported folder back, as anyone would, and proves that it holds the trained head.

Engines load most mistakes without a word: taps one off, a stale map, another RoPE base, a flipped variant flag. So the
settings are compared by name, each tensor by name, and then the logits, rounding to the written dtype apart.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads import formats
from heads.hub import LMHead, build, load_head
from heads.layers import HeadInput
from heads.medusa import Medusa
from heads.parts import Parts
from scripts.layouts import DTYPES, ExportError, Made, cast

# Settings of a head that say how it computes, whatever its kind; the others (init, loss steps) are training's.
COMPUTES = (
    "taps", "num_heads", "num_layers", "shared_lm_head", "norm_before_residual", "norm_before_fc", "fc_norm",
    "norm_output", "block_size", "from_anchor", "own_lm_head", "inner_size", "scale_input",
    "tie_weights", "tie_embeddings",
)  # fmt: skip
STEPS, SLOTS = 3, 48


@torch.no_grad()
def verify(folder: Path, head: Any, made: Made, target: Any = None, untrained: bool = False) -> float:
    """Compare the written head with the trained one; returns the largest difference of logits, rounding included.

    With `target` the features are its own on a text, else random. Raises ExportError naming what differs.
    """
    try:
        written = read_back(folder, made)
    except ExportError:
        raise
    except ValueError as error:
        raise ExportError(f"the written folder cannot be read back: {error}") from error
    check_settings(written, head)
    check_trained_settings(head, made)
    check_rope(written, head)
    rounded = copy.deepcopy(head)
    rounded.load_state_dict(as_float32(cast(head.state_dict(), made.dtype)))
    check_tensors(written, rounded)
    if not untrained:
        check_norms(written)
    if made.lm_head is not None:  # borrowed: in the folder's precision where it lies in the folder, else as it is
        along = isinstance(head, Medusa) and made.format != "native"
        rounded.attach(LMHead(made.lm_head.weight.to(DTYPES[made.dtype]).float()) if along else made.lm_head)
        written = written if along else written.attach(made.lm_head)
    return compare(written, rounded, head, features(head, made, target))


def read_back(folder: Path, made: Made) -> Any:
    """A fresh head from the written files alone, loaded strictly."""
    if made.format == "native":
        return load_head(folder, made.spec)
    check_map_files(folder)
    parts = formats.read(folder, made.spec)
    check_carried(parts, made)
    return build(folder, parts)


def check_map_files(folder: Path) -> None:
    """Our reader rebuilds half a map, engines do not: vLLM then takes the first D ids, and SGLang the same."""
    config, tensors = formats.read_json(folder / "config.json"), formats.read_tensors(folder)
    if "draft_vocab_size" not in config or "lm_head.weight" not in tensors:
        return
    V = config.get("transformer_layer_config", config)["vocab_size"]
    reduced = len(tensors["lm_head.weight"]) < V
    for name in ("d2t", "t2d"):
        if (name in tensors) != reduced:
            why = (
                f"the map of {len(tensors['lm_head.weight'])} draft ids to {V}" if reduced else "vLLM refuses it there"
            )
            raise ExportError(f"tensor {name} is {'missing' if reduced else 'there with a whole vocabulary'}: {why}")


def check_carried(parts: Parts, made: Made) -> None:
    """Tensors of the target that lie in the folder are used as they are: they must be the target's, bit for bit."""
    theirs = {
        "embed_tokens.weight": made.embeddings if made.format == "speculators" else None,
        "lm_head.weight": None if made.lm_head is None else made.lm_head.weight,
    }
    for name, value in parts.borrowed.items():
        expected = theirs[name]
        if expected is None:
            raise ExportError(f"tensor {name} does not belong into this folder: engines take the target's own")
        if not torch.equal(value, expected.to(value.dtype)):
            raise ExportError(f"tensor {name} is not the target's")


def check_settings(written: Any, head: Any) -> None:
    for name in COMPUTES:
        theirs, own = getattr(written.config, name, None), getattr(head.config, name, None)
        if theirs != own:
            raise ExportError(f"the written folder says {name}={theirs}, the head was trained with {own}")


def check_trained_settings(head: Any, made: Made) -> None:
    """Training's own record of the head against head.json: one of them was changed by hand where they differ."""
    trained = made.facts["provenance"].get("head") or {}
    if trained.get("kind") != made.facts["kind"]:
        return
    for name in COMPUTES:
        own = getattr(head.config, name, None)
        if trained.get(name) is not None and trained[name] != own:
            raise ExportError(f"head.json says {name}={own}, its training's record {trained[name]}: it was changed")


def check_rope(written: Any, head: Any) -> None:
    """A head that turns positions at another pace than it was trained with loses its drafts with the distance."""
    theirs, own = getattr(written, "rotary", None), getattr(head, "rotary", None)
    if own is not None and (theirs is None or not torch.equal(theirs.inv_freq, own.inv_freq)):
        raise ExportError("the written folder's RoPE is not the one the head was trained with")


def check_tensors(written: Any, rounded: Any) -> None:
    """`rounded` is the trained head in the precision of the folder. Formats without a draft vocabulary have no map."""
    expected, whole = rounded.state_dict(), is_widened(written, rounded)
    for name, value in written.state_dict().items():
        if whole and name in ("d2t", "t2d"):
            continue
        own = expected[name]
        if value.shape != own.shape:
            raise ExportError(f"tensor {name} is {list(value.shape)} in the folder and {list(own.shape)} as trained")
        if not torch.equal(value, own):
            raise ExportError(f"tensor {name} in the folder is not the trained one")


def check_norms(written: Any) -> None:
    """Norm weights that are all exactly 1.0 were never trained, or trained in bfloat16, where small steps vanish."""
    norms = {name: value for name, value in written.state_dict().items() if "norm" in name and value.dim() == 1}
    if norms and all(bool((value == 1).all()) for value in norms.values()):
        raise ExportError(
            f"all {len(norms)} norm weights are exactly 1.0: the head is untrained, or its norms were rounded away by "
            "training or exporting in half precision; export dtype=float32 after training with fp32 masters, or set "
            "untrained=true if this is meant"
        )


def is_widened(written: Any, head: Any) -> bool:
    """Whether the format has no draft vocabulary, so that a head trained over a reduced one drafts from all ids.

    Such heads borrow the target's LM head; the others have rows of their own for their ids, and keep their map.
    """
    borrows = head.config.kind in ("medusa", "eagle1") or (head.config.kind == "block" and head.lm_head is None)
    return borrows and written.draft_vocab_size > head.draft_vocab_size


def compare(written: Any, rounded: Any, head: Any, inputs: HeadInput) -> float:
    rows = head.target_rows() if is_widened(written, head) else None
    gap = 0.0
    for ours, exact, theirs in zip(*(logits(each, inputs) for each in (head, rounded, written)), strict=True):
        theirs = theirs if rows is None else theirs[..., rows]
        if not torch.allclose(exact, theirs, atol=1e-5, rtol=1e-5):
            raise ExportError("the written head gives other logits than the trained one")
        gap = max(gap, float((ours - theirs).abs().max()))
    return gap


def logits(head: Any, inputs: HeadInput) -> list[Tensor]:
    return [head.logits(hidden, i) for i, hidden in enumerate(head(inputs, min(STEPS, head.max_draft)))]


def features(head: Any, made: Made, target: Any = None) -> HeadInput:
    """What the head reads: the target's own features where it is loaded, else fixed random ones."""
    T = SLOTS + STEPS
    generator = torch.Generator().manual_seed(0)
    positions, documents = torch.arange(T)[None], torch.zeros(1, T, dtype=torch.int64)
    slots = torch.arange(SLOTS)[None]
    if target is not None:
        ids = torch.randint(made.spec.tokenizer_size, (1, T), generator=generator)
        out = target.forward(ids, taps=head.taps)
        taps = None if out.taps is None else out.taps.float()
        return HeadInput(out.last.float(), taps, target.embed(ids).float(), positions, documents, slots)
    H, count = made.spec.hidden_size, len(head.taps)
    last, embeddings = (torch.randn(1, T, H, generator=generator) for _ in range(2))
    taps = torch.randn(1, T, count, H, generator=generator) if count else None
    return HeadInput(last, taps, embeddings, positions, documents, slots)


def as_float32(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()}
