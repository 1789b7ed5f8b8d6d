"""Sums over many positions whose logits never exist all at once, gradients included.

One position of a 128k vocabulary is half a megabyte of fp32 logits; 8,000 positions are 4 GB, and a loss keeps several
tensors of that size until its backward pass. Here each chunk's gradient is taken while its logits exist, and only the
gradients of the hidden states [N, H] and of the head's parameters are kept (as Liger-Kernel's fused cross-entropy does,
arXiv 2410.10989), so that no logits are computed twice either.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# (step, rows [n, H] of that step's hidden states, number of the first row) -> their loss, a scalar
Piece = Callable[[int, Tensor, int], Tensor]


def chunked_sum(piece: Piece, hidden: Sequence[Tensor], parameters: Sequence[Tensor], chunk: int) -> Tensor:
    """Sum of `piece` over all rows of all steps, at most `chunk` rows at a time (0: a step at a time).

    `parameters` are those that `piece` may read. Rows that fit one chunk together are left to autograd.
    """
    whole = chunk == 0 or sum(map(len, hidden)) <= chunk
    if torch.is_grad_enabled() and not whole:
        return _ChunkedSum.apply(piece, chunk, len(hidden), *hidden, *parameters)
    total = torch.zeros((), device=hidden[0].device)
    for step, rows in enumerate(hidden):
        for start, part in _parts(rows, len(rows) if whole else chunk):
            total = total + piece(step, part, start)
    return total


def _parts(rows: Tensor, chunk: int) -> list[tuple[int, Tensor]]:
    return [(start, rows[start : start + chunk]) for start in range(0, len(rows), max(1, chunk))]


class _ChunkedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, piece: Piece, chunk: int, steps: int, *tensors: Tensor) -> Tensor:
        hidden, parameters = tensors[:steps], tensors[steps:]
        total = torch.zeros((), device=hidden[0].device)
        rows_grad = [torch.zeros_like(rows) for rows in hidden]
        own_grad: list[Tensor | None] = [None] * len(parameters)
        for step, rows in enumerate(hidden):
            for start, part in _parts(rows, chunk):
                with torch.enable_grad():
                    leaf = part.detach().requires_grad_()
                    value = piece(step, leaf, start)
                first, *found = torch.autograd.grad(value, [leaf, *parameters], allow_unused=True)
                rows_grad[step][start : start + len(part)] = first
                for i, gradient in enumerate(found):
                    if gradient is not None:
                        held = own_grad[i]
                        own_grad[i] = gradient.clone() if held is None else held.add_(gradient)
                total += value.detach()
        ctx.save_for_backward(*rows_grad, *own_grad)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        return None, None, None, *(None if g is None else g * upstream for g in ctx.saved_tensors)
