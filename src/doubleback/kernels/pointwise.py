"""g″ of smooth activations, the curvature source g″(z)⊙h⊙ξ in one kernel where there is one, and
what a mask lets through."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from . import pointwise_triton
from .groups import eager, statistics_dtype
from .mode import fusing

aten = torch.ops.aten


def gelu_second(x: Tensor) -> Tensor:
    """φ(x)(2 − x²)"""
    return torch.exp(-0.5 * x * x) * (2 - x * x) * (1 / math.sqrt(2 * math.pi))


def gelu_tanh_second(x: Tensor) -> Tensor:
    """Of ½x(1 + tanh u) with u = √(2/π)(x + 0.044715x³)."""
    c, a = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(c * (x + a * x * x * x))
    du, ddu = c * (1 + 3 * a * x * x), 6 * c * a * x
    return (1 - t * t) * (du + 0.5 * x * (ddu - 2 * t * du * du))


def silu_second(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s) * (2 + x * (1 - 2 * s))


SECOND: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu_second,
    "gelu_tanh": gelu_tanh_second,
    "silu": silu_second,
}


def curvature(name: str, z: Tensor, h: Tensor, xi: Tensor) -> Tensor:
    """g″(z)⊙h⊙ξ in z's dtype, computed in float32 for 16 bits.

    >>> z = torch.zeros(1)
    >>> curvature("silu", z, torch.ones(1), 2 * torch.ones(1))
    tensor([1.])
    """
    if eager(z, h, xi) and pointwise_triton.supports(name, z, h, xi):
        return pointwise_triton.curvature(name, z, h, xi)
    dtype = statistics_dtype(z)
    return (SECOND[name](z.to(dtype)) * h.to(dtype) * xi.to(dtype)).to(z.dtype)


def cleared(flat: Tensor, y: Tensor, zero: Tensor | float = 0.0) -> Tensor:
    """y, with zeros where `flat` is true.

    On a CPU PyTorch's `where` goes one entry after the other, and takes ten times as long as the
    vjp of hardtanh, which lets through what lies between its bounds.

    >>> cleared(torch.tensor([True, False]), torch.tensor([float("inf"), 2.0]))
    tensor([0., 2.])
    """
    if y.device.type != "cpu" or fusing():
        return torch.where(flat, zero, y)  # type: ignore[call-overload]
    return aten.hardtanh_backward(y, flat.view(torch.uint8).to(y.dtype), -1, 0.5)
