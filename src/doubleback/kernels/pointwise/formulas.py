"""g″ of smooth activations by name, and the curvature source g″(z)⊙h⊙ξ: in one Triton kernel where
there is one, else in plain tensor operations. And what a mask lets through.

A g″ that takes nothing but + − × ÷ is the same function in both; the others are written here for
tensors and in ``fused.py`` in Triton's language, which has no tanh and may call a sigmoid twice
where a tensor operation would be a pass over memory. Functions of y are given the output of g.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...dtypes import lifted
from .. import mode
from . import fused

aten = torch.ops.aten


def _gelu(x: Tensor, *_: float) -> Tensor:
    """φ(x)(2 − x²)"""
    return torch.exp(-0.5 * x * x) * (2 - x * x) * (1 / math.sqrt(2 * math.pi))


def _gelu_tanh(x: Tensor, *_: float) -> Tensor:
    """Of ½x(1 + tanh u) with u = √(2/π)(x + 0.044715x³)."""
    c, a = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(c * (x + a * x * x * x))
    du, ddu = c * (1 + 3 * a * x * x), 6 * c * a * x
    return (1 - t * t) * (du + 0.5 * x * (ddu - 2 * t * du * du))


def _silu(x: Tensor, *_: float) -> Tensor:
    """σ(1 − σ)(2 + x(1 − 2σ))"""
    s = torch.sigmoid(x)
    return s * (1 - s) * (2 + x * (1 - 2 * s))


def _mish(x: Tensor, *_: float) -> Tensor:
    """2t′ + xt″, t = tanh(log(1 + eˣ)), t′ = (1 − t²)σ."""
    s, t = torch.sigmoid(x), torch.tanh(torch.nn.functional.softplus(x))
    dt = (1 - t * t) * s
    return 2 * dt + x * (dt * (1 - s) - 2 * t * dt * s)


def _softplus(x: Tensor, beta: float, threshold: float, _: float) -> Tensor:
    """βσ(βx)(1 − σ(βx)) below the threshold"""
    s = torch.sigmoid(beta * x)
    return torch.where(beta * x >= threshold, 0, beta * s * (1 - s))


def _elu(x: Tensor, alpha: float, scale: float, inner: float) -> Tensor:
    """s·α·i²·exp(ix) for x < 0"""
    return torch.where(x >= 0, 0, alpha * scale * inner * inner * torch.exp(x * inner))


def _hardswish(x: Tensor, *_: float) -> Tensor:
    """⅓ for |x| < 3"""
    return (x.abs() < 3).to(x.dtype) / 3


SECOND: dict[str, Callable[..., Tensor]] = {
    **fused.ARITHMETIC,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": _silu,
    "mish": _mish,
    "softplus": _softplus,
    "logsigmoid": lambda x, *_: -torch.sigmoid(x) * torch.sigmoid(-x),
    "elu": _elu,
    "hardswish": _hardswish,
    "sin": lambda x, *_: -torch.sin(x),
    "cos": lambda x, *_: -torch.cos(x),
}


def second(name: str, v: Tensor, *parameters: float) -> Tensor:
    """g″ at v, in plain tensor operations.

    >>> second("elu", torch.zeros(1) - 1e-9, 2.0, 1.0, 1.0)
    tensor([2.])
    """
    return SECOND[name](v, *fused.three(parameters))


def curvature(name: str, z: Tensor, h: Tensor, xi: Tensor) -> Tensor:
    """g″(z)⊙h⊙ξ in z's dtype, computed in float32 for 16 bits.

    >>> z = torch.zeros(1)
    >>> curvature("silu", z, torch.ones(1), 2 * torch.ones(1))
    tensor([1.])
    """
    if mode.eager(z, h, xi) and fused.supports(name, z, h, xi):
        return fused.curvature(name, z, h, xi)
    return (second(name, lifted(z)) * lifted(h) * lifted(xi)).to(z.dtype)


def _launch(name: str, z: Tensor, h: Tensor, xi: Tensor, params: Sequence[float]) -> Tensor:
    return fused.curvature(name, z, h, xi, *params)


mode.opaque(
    "curvature(str name, Tensor z, Tensor h, Tensor xi, float[] params) -> Tensor",
    _launch,
    lambda name, z, h, xi, params: torch.empty_like(z),
)


def fused_curvature(name: str, z: Tensor, h: Tensor, xi: Tensor, *params: float) -> Tensor | None:
    """The same in the form that the sweeps need now; None where they write the formula out."""
    if mode.fusing() or not mode.on_cuda(z, h, xi) or not fused.supports(name, z, h, xi):
        return None
    if mode.recording():  # one node of the flattened sweeps
        return torch.ops.doubleback.curvature(name, z, h, xi, [float(p) for p in params])
    return fused.curvature(name, z, h, xi, *params)


def cleared(flat: Tensor, y: Tensor, zero: Tensor | float = 0.0) -> Tensor:
    """y, with zeros where `flat` is true.

    On a CPU PyTorch's `where` goes one entry after the other, and takes ten times as long as the
    vjp of hardtanh, which lets through what lies between its bounds.

    >>> cleared(torch.tensor([True, False]), torch.tensor([float("inf"), 2.0]))
    tensor([0., 2.])
    """
    if y.device.type != "cpu" or mode.fusing():
        return torch.where(flat, zero, y)  # type: ignore[call-overload]
    return aten.hardtanh_backward(y, flat.view(torch.uint8).to(y.dtype), -1, 0.5)
