"""The target's LM head as a draft head borrows it: never trained, never saved with the head."""

from typing import Any, Self

import torch.nn.functional as F
from torch import Tensor

from heads.base import Head


class BorrowedLMHead:
    """hidden [..., H] -> the target's own fp32 logits [..., D] over the draft vocabulary: bias, scale, soft-cap too."""

    def __init__(self, head: Head, target: Any) -> None:
        self.weight, self.bias = head.borrow_lm_head(target)
        # an exported LM head stands in for a target that is not loaded: nothing more is known of its logits
        self.finish = getattr(target, "finish_logits", Tensor.float)

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.finish(F.linear(hidden.to(self.weight.dtype), self.weight, self.bias))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copied head borrows from the same target: copying would take the whole target along."""
        return self
