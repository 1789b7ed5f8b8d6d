"""The target's LM head as a draft head borrows it: never trained, never saved with the head."""

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.base import Head
from heads.packed import PackedLinear


class BorrowedLMHead:
    """hidden [..., H] -> the target's own fp32 logits [..., D] over the draft vocabulary: bias, scale, soft-cap too."""

    def __init__(self, head: Head, target: Any) -> None:
        self.weight, self.bias = head.borrow_lm_head(target)
        # an exported LM head stands in for a target that is not loaded: nothing more is known of its logits
        self.finish = getattr(target, "finish_logits", Tensor.float)
        self.packed: PackedLinear | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        if self.packed is not None:
            return self.finish(self.packed(hidden))
        return self.finish(F.linear(hidden.to(self.weight.dtype), self.weight, self.bias))

    def pack(self) -> None:
        """Take the CPU's fast path (heads/packed.py) where there is one. For drafting only."""
        if self.weight.dtype == torch.float32 and self.weight.device.type == "cpu":
            self.packed = PackedLinear(self.weight, self.bias)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copied head borrows from the same target: copying would take the whole target along."""
        return self
