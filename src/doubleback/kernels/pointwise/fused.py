"""g″(z)⊙h⊙ξ on CUDA in one kernel: the curvature of a coordinate-wise g (theory §2).

Reads three tensors and writes one: 8 bytes per entry in bfloat16. Arithmetic is float32 for
16-bit tensors. Kinks follow autograd.

Functions marked y are given by their output: `curvature("tanh", y, h, xi)`.
"""

# pyright: reportInvalidTypeForm=false
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dtypes import accumulation
from ...errors import InputError
from ..launch import Launch, available, jit, look, planned, tl, triton

BLOCK = 1024
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def supports(name: str, *tensors: Tensor) -> bool:
    """Whether `curvature` can run: CUDA tensors of one shape, and Triton is there."""
    first = tensors[0]
    return (
        available()
        and name in TABLE
        and all(t.is_cuda and t.device == first.device for t in tensors)
        and all(t.dtype in DTYPES and t.shape == first.shape for t in tensors)
    )


def curvature(name: str, z: Tensor, h: Tensor, xi: Tensor, *params: float) -> Tensor:
    """g″(z)⊙h⊙ξ, laid out like z, in z's dtype.

    `TABLE` at the end of this file lists the names and their parameters:

    >>> curvature("softplus", z, h, xi, 1.0, 20.0)  # doctest: +SKIP
    """
    key = (name, params, look(z), look(h), look(xi))
    plan = planned(_plans, key, lambda: _CurvaturePlan.of(name, z, h, xi, *params))
    out = torch.empty_like(z)
    if plan.launch is not None:
        given = (z, h, xi)
        if plan.copies is not None:
            pairs = zip(given, plan.copies, strict=True)
            given = (torch.empty_like(out).copy_(t) if copy else t for t, copy in pairs)
        plan.launch(*given, out)
    return out


class _CurvaturePlan(NamedTuple):
    """How a call is launched, and which of z, h, ξ are first laid out like the result."""

    launch: Launch | None
    copies: tuple[bool, bool, bool] | None

    @classmethod
    def of(cls, name: str, z: Tensor, h: Tensor, xi: Tensor, *params: float) -> "_CurvaturePlan":
        _check(name, params)
        size, out = z.numel(), torch.empty_like(z)
        if not size:
            return cls(None, None)
        function, (a, b, c) = TABLE[name][0], three(params)
        wide = accumulation(z.dtype) == torch.float64
        launch = Launch(
            _curvature_kernel, (triton.cdiv(size, BLOCK),), (size,), SECOND=function, A=a, B=b, C=c,
            SIZE=BLOCK, ACC=tl.float64 if wide else tl.float32,
        )  # fmt: skip
        copies = tuple(not _same_layout(t, out) for t in (z, h, xi))
        return cls(launch, copies if any(copies) else None)


_plans: dict[Any, _CurvaturePlan] = {}


def _check(name: str, params: Sequence[float]) -> None:
    if name not in TABLE or len(params) != len(TABLE[name][1:]):
        known = "; ".join(" ".join((n, *rest)) for n, (_, *rest) in TABLE.items())
        raise InputError(
            f"curvature: no function {name!r} of {len(params)} parameters; known are {known}"
        )


def three(parameters: Sequence[float]) -> tuple[float, ...]:
    """The parameters of a g″, which takes three constants, used or not."""
    return (*(float(p) for p in parameters), 0.0, 0.0, 0.0)[:3]


def _same_layout(t: Tensor, out: Tensor) -> bool:
    """Whether entry k of t's memory is entry k of out's; `out` is dense."""
    strides = zip(t.shape, t.stride(), out.stride(), strict=True)
    return all(size == 1 or mine == its for size, mine, its in strides)


@jit
def _curvature_kernel(
    z_ptr, h_ptr, xi_ptr, out_ptr, n,
    SECOND: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
    ACC: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    live = at < n
    z = tl.load(z_ptr + at, mask=live, other=1).to(ACC)
    h = tl.load(h_ptr + at, mask=live, other=0).to(ACC)
    xi = tl.load(xi_ptr + at, mask=live, other=0).to(ACC)
    tl.store(out_ptr + at, SECOND(z, A, B, C) * h * xi, mask=live)


# g″ ----------------------------------------------------------------------------------------------


@jit
def _gelu(z, a, b, c):
    """(2 − z²)·exp(−z²/2)/√(2π)"""
    value = (2 - z * z) * tl.exp(-0.5 * z * z) * 0.3989422804014327
    return tl.where(tl.abs(z) > 64, 0, value)


@jit
def _gelu_tanh(z, a, b, c):
    """(1 − t²)(u′ + ½zu″ − ztu′²), t = tanh(u), u = √(2/π)(z + 0.044715z³)"""
    u = 0.7978845608028654 * (z + 0.044715 * z * z * z)
    slope = 0.7978845608028654 * (1 + 0.134145 * z * z)
    s = tl.sigmoid(2 * u)
    bent = 0.5 * 0.7978845608028654 * 0.26829 * z * z
    value = 4 * s * tl.sigmoid(-2 * u) * (slope + bent - z * (2 * s - 1) * slope * slope)
    return tl.where(tl.abs(z) > 32, 0, value)


@jit
def _silu(z, a, b, c):
    """σ(1 − σ)(2 + z(1 − 2σ))"""
    s = tl.sigmoid(z)
    return s * tl.sigmoid(-z) * (2 + z * (1 - 2 * s))


@jit
def _softplus(z, beta, threshold, c):
    """βσ(βz)(1 − σ(βz)) below the threshold"""
    value = beta * tl.sigmoid(beta * z) * tl.sigmoid(-beta * z)
    return tl.where(beta * z >= threshold, 0, value)


@jit
def _logsigmoid(z, a, b, c):
    """−σ(z)σ(−z)"""
    return -tl.sigmoid(z) * tl.sigmoid(-z)


@jit
def _mish(z, a, b, c):
    """2t′ + zt″, t = tanh(log(1 + eᶻ)): t′ = (1 − t²)σ, t″ = (1 − t²)σ(1 − σ − 2tσ)"""
    e = tl.exp(tl.where(z > 40, 40.0, z))
    whole = e * e + 2 * e + 2  # t = 1 − 2/whole, 1 − t² = 4((1 + e)/whole)²
    ratio = (1 + e) / whole
    s = tl.sigmoid(z)
    bend = 1 - s - 2 * (1 - 2 / whole) * s
    value = 4 * ratio * ratio * s * (2 + z * bend)
    return tl.where(z > 40, 0, value)


@jit
def _elu(z, alpha, scale, input_scale):
    """scale·α·κ²·exp(κz) for z < 0, κ the input scale"""
    value = scale * alpha * input_scale * input_scale * tl.exp(input_scale * z)
    return tl.where(z >= 0, 0, value)


@jit
def _hardswish(z, a, b, c):
    """⅓ for |z| < 3"""
    return tl.where(tl.abs(z) < 3, 1, 0).to(z.dtype) / 3


@jit
def _sin(z, a, b, c):
    """−sin(z)"""
    return -tl.sin(z)


@jit
def _cos(z, a, b, c):
    """−cos(z)"""
    return -tl.cos(z)


# Those of + − × ÷ alone serve tensors as well.


def _sigmoid(y, a, b, c):
    """y(1 − y)(1 − 2y)"""
    return y * (1 - y) * (1 - 2 * y)


def _tanh(y, a, b, c):
    """−2y(1 − y²)"""
    return -2 * y * (1 - y * y)


def _exp(y, a, b, c):
    """y"""
    return y


def _log(z, a, b, c):
    """−1/z²"""
    return -1 / (z * z)


def _sqrt(y, a, b, c):
    """−1/(4y³)"""
    return -0.25 / (y * y * y)


def _rsqrt(y, a, b, c):
    """¾y⁵"""
    return 0.75 * y * y * y * y * y


def _reciprocal(y, a, b, c):
    """2y³"""
    return 2 * y * y * y


ARITHMETIC: dict[str, Any] = {
    "sigmoid": _sigmoid,  # y
    "tanh": _tanh,  # y
    "exp": _exp,  # y
    "log": _log,
    "sqrt": _sqrt,  # y
    "rsqrt": _rsqrt,  # y
    "reciprocal": _reciprocal,  # y
}

# name: (g″, names of its parameters); y: from the output of g
TABLE: dict[str, tuple[Any, ...]] = {
    **{name: (jit(second),) for name, second in ARITHMETIC.items()},
    "gelu": (_gelu,),
    "gelu_tanh": (_gelu_tanh,),
    "silu": (_silu,),
    "softplus": (_softplus, "beta", "threshold"),
    "logsigmoid": (_logsigmoid,),
    "mish": (_mish,),
    "elu": (_elu, "alpha", "scale", "input_scale"),
    "hardswish": (_hardswish,),
    "sin": (_sin,),
    "cos": (_cos,),
}
