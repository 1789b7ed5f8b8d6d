"""What an exported folder holds, and what is known while it is made.

vllm         config.json + model.safetensors; EAGLE-3 folders serve SGLang too
sglang       the same, refused where SGLang would misread it
speculators  the vllm-project format: `vllm serve FOLDER` is enough
native       our own head.json + head.safetensors, for `python -m eval`, warm start and later export
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from heads.hub import LMHead
from heads.spec import TargetSpec

FORMATS = ("vllm", "sglang", "speculators", "native")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WEIGHTS = "model.safetensors"


class ExportError(ValueError):
    """A head that engines would refuse, or worse, load and draft nonsense with."""


@dataclasses.dataclass
class Layout:
    """config.json (native: head.json) and the tensors beside it, in the dtype they are written in."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    files: dict[str, bytes] = dataclasses.field(default_factory=dict)  # more of them, by name


@dataclasses.dataclass
class Made:
    """What an export knows beside the head itself."""

    facts: dict[str, Any]  # head.json
    spec: TargetSpec
    format: str
    dtype: str
    base: str  # Hub id or folder of the target, to serve with
    draft_tokens: int  # suggested to engines
    lm_head: LMHead | None = None  # of the target, where it is loaded
    embeddings: Tensor | None = None  # [V, H] of the target, where it is loaded


def cast(tensors: dict[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """Floating tensors in `dtype`. Raises ExportError naming one that overflows."""
    found = {}
    for name, value in tensors.items():
        found[name] = value.detach().to(DTYPES[dtype]) if value.is_floating_point() else value.detach()
        if value.is_floating_point() and not bool(torch.isfinite(found[name]).all()):
            raise ExportError(f"tensor {name} is not finite in {dtype}: export in bfloat16 or float32")
    return found
