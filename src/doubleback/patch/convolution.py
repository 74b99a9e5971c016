"""Convolution: the second derivative by K, Kᵀ and K□, each one call of its proper kernel.

`convolution_backward` gives dx = Kᵀ(θ, ξ), dθ = K□(x, ξ), db = Σξ. With cotangents u, τ, β of
these three,

    ⟨u, dx⟩ + ⟨τ, dθ⟩ + ⟨β, db⟩ = ⟨K(θ, u) + K(τ, x) + β, ξ⟩,

so ξ̄ = K(θ, u) + β + K(τ, x), x̄ = Kᵀ(τ, ξ), θ̄ = K□(u, ξ). All three are differentiable again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.groups import eager
from ..operators import Convolution
from .node import Call, Formula, Grads, plain


def _operator(call: Call) -> Convolution:
    return Convolution(
        tuple(call["stride"]),
        tuple(call["padding"]),
        tuple(call["dilation"]),
        call["transposed"],
        tuple(call["output_padding"]),
        call["groups"],
    )


def _second(call: Call, cotangents: Grads) -> dict[str, Any]:
    u, tau, beta = cotangents
    K, xi, x, weight = _operator(call), call["grad_output"], call["input"], call["weight"]
    found: dict[str, Any] = {}
    if call.needs("grad_output"):
        found["grad_output"] = _tangent(K, u, tau, beta, x, weight, xi)
    wanted = (call.needs("input") and tau is not None, call.needs("weight") and u is not None)
    if any(wanted):
        like, shape = x, weight.shape
        if _slow_when_contiguous(K, u, tau, xi, x, weight):
            u, tau, like = (_laid(t) for t in (u, tau, x))
            xi = xi.contiguous(memory_format=torch.channels_last)
        x_bar, weight_bar, _ = K.adjoints(u, tau, xi, x.shape, shape, (*wanted, False), like=like)
        found |= {"input": _like(x_bar, x), "weight": _like(weight_bar, weight)}
    return found


def _tangent(K: Convolution, u, tau, beta, x, weight, xi) -> Tensor | None:
    """K(θ, u) + β + K(τ, x)"""
    tangent = None
    if u is not None:
        tangent, beta = K.forward(weight, u, beta), None
    if tau is not None:
        part = K.forward(tau, x, beta)
        tangent, beta = part if tangent is None else tangent + part, None
    if beta is not None:
        tangent = beta.view(-1, *[1] * (xi.dim() - 2)).expand_as(xi)
    return tangent


def _laid(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous(memory_format=torch.channels_last)


def _like(t: Tensor | None, like: Tensor) -> Tensor | None:
    return t.contiguous() if t is not None and like.is_contiguous() else t


def _slow_when_contiguous(K: Convolution, u, tau, xi, x, weight) -> bool:
    """Filter gradients for which the CPU has a fast kernel for channels-last tensors alone: groups
    of a few channels, and depthwise filters beyond 3×3. Worth two copies."""
    if not (weight.is_cpu and weight.dim() == 4 and K.groups > 1 and eager(u, tau, xi, x, weight)):
        return False
    channels = min(x.shape[1], xi.shape[1]) // K.groups
    entries = weight.shape[2] * weight.shape[3]
    fast = channels >= 16 or (channels == 1 and entries <= 9)
    return weight.dtype in (torch.float32, torch.bfloat16) and not fast


def _accepts(a: dict[str, Any]) -> bool:
    return plain(a["grad_output"], a["input"], a["weight"]) and a["grad_output"].dim() > 2


FORMULAS = [
    Formula(
        "convolution_backward",
        "convolution",
        "weight gradient by the filter-gradient kernel, all groups at once",
        _second,
        _accepts,
    )
]
