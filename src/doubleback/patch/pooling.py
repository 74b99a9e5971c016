"""Average pooling of images that lie channels-last: PyTorch's CUDA kernel of its *first* derivative
is wrong where windows overlap or reach over the edge. The kernel for images in rows is right, so
that one runs, and its result is laid out as asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .node import Formula


def wrong(x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> bool:
    """Whether PyTorch would choose that kernel, for windows at which it is wrong."""
    if x.dim() != 4 or x.shape[1] == 1 or (x.is_contiguous() and x.stride(1) != 1):
        return False
    kernel = _both(kernel)
    return any(padding) or any(s < k for s, k in zip(_both(stride) or kernel, kernel, strict=True))


def _both(sizes: Sequence[int]) -> Sequence[int]:
    return [*sizes, *sizes] if len(sizes) == 1 else sizes


def in_rows(backward: Callable[..., Tensor], grad: Tensor, x: Tensor, *options: Any) -> Tensor:
    """The derivative of `backward`, of which x gives the shape alone, by its kernel for rows."""
    grad = grad.contiguous()
    unread = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return backward(grad, unread, *options).contiguous(memory_format=torch.channels_last)


def _kernel(formula: Formula, stock: Any) -> Callable:
    call_stock = stock.call_boxed

    def kernel(keyset, grad, x, kernel_size, stride, padding, *options):
        sizes = (kernel_size, stride, padding)
        if not wrong(x, *sizes):
            return call_stock(keyset, grad, x, *sizes, *options)
        return in_rows(lambda *args: call_stock(keyset, *args), grad, x, *sizes, *options)

    return kernel


FORMULAS = [
    Formula(
        "avg_pool2d_backward",
        "pooling",
        "PyTorch's CUDA kernel is wrong for channels-last images with overlapping windows",
        armed_by="patch",
        keys=("AutogradCUDA",),
        kernel=_kernel,
    )
]
