"""Convolution: the second derivative by K, Kᵀ and K□, each one call of its proper kernel.

`convolution_backward` gives dx = Kᵀ(θ, ξ), dθ = K□(x, ξ), db = Σξ. With cotangents u, τ, β of
these three,

    ⟨u, dx⟩ + ⟨τ, dθ⟩ + ⟨β, db⟩ = ⟨K(θ, u) + K(τ, x) + β, ξ⟩,

so ξ̄ = K(θ, u) + β + K(τ, x), x̄ = Kᵀ(τ, ξ), θ̄ = K□(u, ξ). All three are differentiable again.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

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
        x_bar, weight_bar, _ = K.adjoints(
            u, tau, xi, x.shape, weight.shape, (*wanted, False), like=x
        )
        found |= {"input": x_bar, "weight": weight_bar}
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
