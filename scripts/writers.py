"""Which head goes into which format: a new head is one entry, each format a writer or the reason why there is none."""

import dataclasses
from collections.abc import Callable
from typing import Any

from scripts import write_eagle1, write_eagle3
from scripts.layouts import ExportError, Layout, Made, cast
from scripts.write_block import dflash_layout
from scripts.write_medusa import medusa_layout

Writer = Callable[[Any, Made], Layout]

_MEDUSA = "Medusa is served by vLLM up to 0.32 alone"
_MTP = (
    "engines run MTP modules only inside the checkpoint of a model that was pretrained with one (DeepSeek-V3, "
    "Qwen3-Next, MiMo): none loads one for another target"
)
_BLOCK = "of the engines, vLLM serves block heads, as DFlash folders: use format=vllm"
_MLP = (
    "engines read an embedding table for each head of an MLP speculator, where this head projects the target's "
    "embeddings, and vLLM 0.32 has them switched off"
)
_LSTM = "no engine that is supported here serves LSTM speculators (Arctic Inference, a plugin of vLLM, has its own)"
_NATIVE = "use format=native to share it for drafthead itself, or train an EAGLE-3 head"
_ONLY_EAGLE3 = "the speculators format is written for EAGLE-3 alone: use format=vllm or sglang"


def _none(reason: str) -> dict[str, "Writer | str"]:
    return dict.fromkeys(("vllm", "sglang", "speculators"), f"{reason}; {_NATIVE}")


LAYOUTS: dict[str, dict[str, Writer | str]] = {
    "eagle3": {
        "vllm": write_eagle3.engine_layout,
        "sglang": write_eagle3.engine_layout,
        "speculators": write_eagle3.speculators_layout,
    },
    "eagle1": {
        "vllm": write_eagle1.engine_layout,
        "sglang": write_eagle1.engine_layout,
        "speculators": _ONLY_EAGLE3,
    },
    "medusa": {
        "vllm": medusa_layout,
        "sglang": f"{_MEDUSA}; SGLang never had it: use format=vllm, or train an EAGLE-3 head",
        "speculators": f"{_MEDUSA}, in its own format: use format=vllm",
    },
    "mtp": _none(_MTP),
    "block": {"vllm": dflash_layout, "sglang": _BLOCK, "speculators": _BLOCK},
    "mlp": _none(_MLP),
    "lstm": _none(_LSTM),
}


def layout(head: Any, made: Made) -> Layout:
    """The files of `head` in `made.format`. Raises ExportError with the reason where the format cannot hold it."""
    if made.format == "native":
        return Layout({**made.facts, "config": dataclasses.asdict(head.config)}, cast(head.state_dict(), made.dtype))
    writer = check_format(made.facts["kind"], made.format)
    return writer(head, made)


def check_format(kind: str, format: str) -> Writer:
    """The writer of a format other than native. Raises ExportError with the reason where there is none."""
    found = LAYOUTS[kind][format]
    if isinstance(found, str):
        raise ExportError(f"format={format}: {found}")
    return found
