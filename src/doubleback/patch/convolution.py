"""Convolution: the second derivative by K, Kᵀ and K□, each one call of its proper kernel.

`convolution_backward` gives dx = Kᵀ(θ, ξ), dθ = K□(x, ξ), db = Σξ. With cotangents u, τ, β of
these three,

    ⟨u, dx⟩ + ⟨τ, dθ⟩ + ⟨β, db⟩ = ⟨K(θ, u) + K(τ, x) + β, ξ⟩,

so ξ̄ = K(θ, u) + β + K(τ, x), x̄ = Kᵀ(τ, ξ), θ̄ = K□(u, ξ). All three are differentiable again.

Where only dx is asked for, as by a gradient penalty, it is itself a (transposed) convolution of ξ
with θ, and the double backward is that convolution's first: PyTorch's own node, with the same
kernels and no Python. cuDNN computes both alike; depthwise kernels have no transposed form, and
CPUs compute the two by different kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._torch import peek_interpreter_stack
from ..kernels import eager
from ..operators import Convolution
from .node import Applied, Formula, Grads, derivative_kernel, plain

aten = torch.ops.aten


def _operator(call: Applied) -> Convolution:
    return Convolution(
        tuple(call["stride"]),
        tuple(call["padding"]),
        tuple(call["dilation"]),
        call["transposed"],
        tuple(call["output_padding"]),
        call["groups"],
    )


def _second(call: Applied, cotangents: Grads) -> dict[str, Any]:
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


def kernel(formula: Formula, stock: Any) -> Callable:
    """`derivative_kernel`, with dx alone as a convolution of its own."""
    general = derivative_kernel(formula, stock)

    def run(keyset, *args, **kwargs):
        if kwargs or args[-1] != [True, False, False] or not _is_one_convolution(*args[:-1]):
            return general(keyset, *args, **kwargs)
        xi, x, weight, _, stride, padding, dilation, transposed, _, groups = args[:-1]
        missing = _missing(xi, x, weight, stride, padding, dilation, transposed)
        options = (stride, padding, dilation, not transposed, missing, groups)
        return aten.convolution.default(xi, weight, None, *options), None, None

    return run


def _is_one_convolution(
    xi, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups
) -> bool:
    """Whether dx is computed by the kernel of a convolution of ξ, here and now."""
    return (
        torch.is_grad_enabled()
        and _by_cudnn(xi, x, weight)
        and groups == 1
        and len(stride) == len(padding) == len(dilation) == xi.dim() - 2
        and not torch.is_autocast_enabled(weight.device.type)
        and forward_ad._current_level < 0
        and peek_interpreter_stack() is None
        and not (transposed and any(p >= s for p, s in zip(output_padding, stride, strict=True)))
    )


def _by_cudnn(*tensors: Tensor) -> bool:
    return (
        torch.backends.cudnn.enabled
        and all(t.is_cuda and t.dtype == tensors[0].dtype for t in tensors)
        and plain(*tensors)
        and tensors[0].dim() == 4
        and tensors[0].numel() > 0
    )


def _missing(xi, x, weight, stride, padding, dilation, transposed) -> list[int]:
    """Rows and columns of x that a strided convolution did not reach: dx has them too."""
    if transposed:
        return [0] * len(stride)
    return [
        size - ((n - 1) * s - 2 * p + d * (k - 1) + 1)
        for size, n, k, s, p, d in zip(
            x.shape[2:], xi.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
        )
    ]


def _accepts(a: dict[str, Any]) -> bool:
    return plain(a["grad_output"], a["input"], a["weight"]) and a["grad_output"].dim() > 2


FORMULAS = [
    Formula(
        "convolution_backward",
        "convolution",
        "weight gradient by the filter-gradient kernel, all groups at once",
        _second,
        _accepts,
        kernel=kernel,
    )
]
