"""The fastest float32 linear on CPU for each number of rows."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """A frozen float32 linear on CPU that takes the faster path for its number of rows.

    `F.linear` re-packs its weight at each call, which makes a verification pass of 2 to 32 rows dear: those use oneDNN
    pre-packed weights. One row (plain decoding, a draft step) is a matrix-vector product and many rows (prefill) hide
    the packing: both are fastest through `F.linear`. The weight is held twice.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # buffers, so that they move with the model; the packed copy serves on CPU only
        self.register_buffer("weight", weight.detach(), persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)
        # 8 rows: the blocking oneDNN picks for a verification pass; other row counts run on the same packing.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous(), 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // self.in_features
        if 2 <= rows <= 32 and x.device.type == "cpu":
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)
