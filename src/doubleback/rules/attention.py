"""Scaled dot-product attention as one node, by blocks: never an N×M matrix at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..kernels import (
    attention_backward,
    attention_forward,
    attention_second,
    attention_tangent,
)
from .structures import generic
from .table import Call, Rule, Structure, Tensors, aligned, overload

_GENERIC = generic()


def _options(call: Call) -> dict[str, Any]:
    return {
        "mask": call.tensor(3, "attn_mask"),
        "is_causal": call.argument(5, "is_causal", False),
        "scale": call.argument(6, "scale", None),
        "enable_gqa": call.argument(7, "enable_gqa", False),
    }


def _qkv(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    return call.value(0), call.value(1), call.value(2)


def _point(call: Call) -> dict[str, Any]:
    """Where the derivative is taken, by the kernels' names."""
    q, k, v = _qkv(call)
    return {"q": q, "k": k, "v": v, "out": call.out, "residual": call.saved, **_options(call)}


def _attention() -> Rule:
    """O = softmax(scale·QKᵀ + mask) V; a mask that carries a derivative takes the generic
    rule on the unfused kernel, the one with a second derivative."""

    def forward(call: Call) -> tuple[Tensor, Any]:
        q, k, v = _qkv(call)
        return attention_forward(q, k, v, **_options(call))

    def backward(call: Call, y: Tensor, wanted: Sequence[bool]) -> Tensors:
        if any(wanted[3:]):
            with sdpa_kernel(SDPBackend.MATH):
                return _GENERIC.backward(call, y, wanted)
        grads = attention_backward(y, **_point(call), wanted=wanted[:3])
        return (*grads, *(None for _ in call.inputs[3:]))

    def tangent(call: Call, q: Tensors) -> Tensor | None:
        if any(part is not None for part in q[3:]):
            with sdpa_kernel(SDPBackend.MATH):
                return _GENERIC.tangent(call, q)
        return attention_tangent(q[0], q[1], q[2], **_point(call))

    def both(
        call: Call, xi: Tensor, q: Tensors, wanted: Sequence[bool], need: bool
    ) -> tuple[Any, Tensors]:
        if any(wanted[3:]) or any(part is not None for part in q[3:]):
            with sdpa_kernel(SDPBackend.MATH):
                return _GENERIC.both(call, xi, q, wanted, need)
        t, sources = attention_second(
            xi, q[0], q[1], q[2], **_point(call), wanted=wanted[:3], tangent=need
        )
        return t, (*sources, *(None for _ in call.inputs[3:]))

    return Rule(
        Structure.GENERAL, forward, backward, tangent, tangent_curvature=both,
        reads=frozenset({"inputs", "output"}),
        per_example=aligned(lambda call: len(call.shape) > 2),
    )  # fmt: skip


def rules() -> Iterator[tuple[Any, Rule]]:
    op = overload("scaled_dot_product_attention.default")
    if op is not None:
        yield op, _attention()
