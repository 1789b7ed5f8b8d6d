"""int8 vectors with one scale each: a quarter of float32, half of bfloat16.

    x      [0.5, -2.0, 1.0]        scale = max|x| / 127 = 0.01575
    int8   [32, -127, 64]          x' = int8 * scale = [0.504, -2.0, 1.008]

One vector is what one layer leaves at one token, so an outlier token does not coarsen its neighbours. An outlier
channel does: the others share the step max|x| / 127, on residual streams some percent of their size (docs/features.md).
"""

import torch
from torch import Tensor


def quantise(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """vectors [..., H] -> int8 [..., H] and fp32 scales [...]; a vector of zeros has scale 0."""
    vectors = vectors.float()
    scale = vectors.abs().amax(-1) / 127
    step = torch.where(scale > 0, scale, 1.0)[..., None]
    return (vectors / step).round().clamp(-127, 127).to(torch.int8), scale


def dequantise(values: Tensor, scale: Tensor) -> Tensor:
    """int8 [..., H], scales [...] -> fp32 [..., H]."""
    return values.float() * scale[..., None]
