"""GELU and SiLU: B(ξ, z) = g′(z)⊙ξ has the second derivative ξ̄ = B(u, z), z̄ = g″(z)⊙u⊙ξ, two
kernels where PyTorch runs a chain of ten. SiLU has a node of its own besides: under create_graph
PyTorch writes its first derivative out in small operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels import curvature
from .node import Applied, Formula, Grads, plain

aten = torch.ops.aten
Arguments = dict[str, Any]


def _accepts(a: Arguments) -> bool:
    return plain(*(t for t in a.values() if isinstance(t, Tensor)))


def _gelu(call: Applied, cotangents: Grads) -> dict[str, Any]:
    (u,), form = cotangents, call["approximate"]
    assert u is not None  # the only result
    xi, z, found = call["grad_output"], call["self"], {}
    if call.needs("grad_output"):
        found["grad_output"] = aten.gelu_backward(u, z, approximate=form)
    if call.needs("self"):
        found["self"] = curvature("gelu" if form == "none" else "gelu_tanh", z, u, xi)
    return found


def _silu_backward(call: Applied, cotangents: Grads) -> dict[str, Any]:
    (u,), found = cotangents, {}
    assert u is not None  # the only result
    xi, z = call["grad_output"], call["self"]
    if call.needs("grad_output"):
        found["grad_output"] = aten.silu_backward(u, z)
    if call.needs("self"):
        found["self"] = curvature("silu", z, u, xi)
    return found


def _silu_steps(a: Arguments) -> Tensor:
    """ξ⊙s(1 + z(1 − s)) with s = σ(z)"""
    z = a["self"]
    s = torch.sigmoid(z)
    return a["grad_output"] * (s * (1 + z * (1 - s)))


def _silu(call: Applied, cotangents: Grads) -> dict[str, Any]:
    return {"self": aten.silu_backward(cotangents[0], call["self"])}


FORMULAS = [
    Formula(
        "gelu_backward", "activation", "g″⊙u⊙ξ in one kernel, not a chain", _gelu, _accepts
    ),
    Formula(
        "silu_backward", "activation", "g″⊙u⊙ξ in one kernel", _silu_backward, _accepts,
        _silu_steps,
    ),
    Formula(
        "silu", "activation", "its backward under create_graph as one operator", _silu, _accepts
    ),
]  # fmt: skip
