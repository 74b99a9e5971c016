"""Scaled dot-product attention as one node, by blocks: never an N×M matrix at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..kernels.attention import (
    attention_backward,
    attention_forward,
    attention_second,
    attention_tangent,
)
from .structures import generic
from .table import Call, Rule, Structure, Tensors, overload

_GENERIC = generic()


def _options(call: Call) -> tuple[Tensor | None, bool, float | None, bool]:
    return (
        call.tensor(3, "attn_mask"),
        call.argument(5, "is_causal", False),
        call.argument(6, "scale", None),
        call.argument(7, "enable_gqa", False),
    )


def _qkv(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = call.inputs[:3]
    assert q is not None and k is not None and v is not None
    return q, k, v


def _attention() -> Rule:
    """O = softmax(scale·QKᵀ + mask) V; a mask that carries a derivative takes the generic
    rule on the unfused kernel, the one with a second derivative."""

    def forward(call: Call) -> tuple[Tensor, Any]:
        return attention_forward(*_qkv(call), *_options(call))

    def backward(call: Call, y: Tensor, wanted: Sequence[bool]) -> Tensors:
        if any(wanted[3:]):
            with sdpa_kernel(SDPBackend.MATH):
                return _GENERIC.backward(call, y, wanted)
        grads = attention_backward(
            y, *_qkv(call), call.out, call.saved, *_options(call), wanted[:3]
        )
        return (*grads, *(None for _ in call.inputs[3:]))

    def tangent(call: Call, q: Tensors) -> Tensor | None:
        if any(part is not None for part in q[3:]):
            with sdpa_kernel(SDPBackend.MATH):
                return _GENERIC.tangent(call, q)
        return attention_tangent(*q[:3], *_qkv(call), call.out, call.saved, *_options(call))

    def both(
        call: Call, xi: Tensor, q: Tensors, wanted: Sequence[bool], need: bool
    ) -> tuple[Any, Tensors]:
        if any(wanted[3:]) or any(part is not None for part in q[3:]):
            with sdpa_kernel(SDPBackend.MATH):
                return _GENERIC.both(call, xi, q, wanted, need)
        t, sources = attention_second(
            xi, *q[:3], *_qkv(call), call.out, call.saved, *_options(call), wanted[:3], need
        )
        return t, (*sources, *(None for _ in call.inputs[3:]))

    return Rule(
        Structure.GENERAL, forward, backward, tangent, tangent_curvature=both,
        reads=frozenset({"inputs", "output"}),
    )  # fmt: skip


def rules() -> Iterator[tuple[Any, Rule]]:
    op = overload("scaled_dot_product_attention.default")
    if op is not None:
        yield op, _attention()
