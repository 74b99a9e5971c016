"""Fused attention: second derivatives for the backward of every kernel of
``F.scaled_dot_product_attention``, in blocks or in Triton, never an N×M matrix at once.

The backward gives (dq, dk, dv) = (∂O)*ξ. With cotangents (u_q, u_k, u_v) of these,

    ⟨u_q, dq⟩ + ⟨u_k, dk⟩ + ⟨u_v, dv⟩ = ⟨ξ, t⟩,    t the tangent of O along (u_q, u_k, u_v),

so ξ̄ = t, and q̄, k̄, v̄ are the curvature sources of ``kernels.attention``. O and the log-sum-exp are
functions of q, k, v here: their part is in q̄, k̄, v̄. The dropout of CUDA's kernels is had again from
the random state that they kept. Third derivatives, forward mode and a bias that itself takes a
gradient go through the unfused kernel, in memory N·M.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..dtypes import accumulation
from ..kernels import CUDNN, EFFICIENT, FLASH, Dropout, attention_second, recovered
from .node import Applied, Formula, Grads, again, plain, through

aten = torch.ops.aten


def _mask(a: dict[str, Any]) -> Tensor | None:
    return a.get("attn_mask", a.get("attn_bias"))


def _cotangent_name(a: dict[str, Any]) -> str:
    return "grad_out" if "grad_out" in a else "grad_out_"


def _dropout(backend: int, a: dict[str, Any]) -> Dropout | None:
    if a["dropout_p"] == 0:
        return None
    state = a["philox_seed"], a["philox_offset"]
    return recovered(backend, a["dropout_p"], a["query"], a["key"], a["value"], *state)


def _second(backend: int, call: Applied, cotangents: Grads) -> dict[str, Any]:
    a = call.arguments
    xi_name, names = _cotangent_name(a), ("query", "key", "value")
    bias = "attn_bias" in call.needed and call.needs("attn_bias")
    if bias or again(*a.values(), *cotangents):
        return through(partial(_composite, backend), call, cotangents)
    q, k, v = (a[name] for name in names)
    t, sources = attention_second(
        a[xi_name], cotangents[0], cotangents[1], cotangents[2], q, k, v, a["out"], a["logsumexp"],
        mask=_mask(a), is_causal=a["is_causal"], scale=a["scale"], enable_gqa=True,
        wanted=[call.needs(n) for n in names], tangent=call.needs(xi_name),
        dropout=_dropout(backend, a),
    )  # fmt: skip
    return {xi_name: t, **dict(zip(names, sources, strict=True))}


def _composite(backend: int, a: dict[str, Any]) -> tuple[Tensor | None, ...]:
    """The same backward by reverse mode through the unfused kernel."""
    q, k, v, mask = a["query"], a["key"], a["value"], _mask(a)
    group, dropout = q.shape[-3] // k.shape[-3], _dropout(backend, a)
    exact = accumulation(q.dtype)  # 1/(1 − p) is not rounded to 16 bits
    z = None if dropout is None else dropout.dense(k.shape[-2], exact)

    def out(q: Tensor, k: Tensor, v: Tensor, *bias: Tensor) -> Tensor:
        found, p = aten._scaled_dot_product_attention_math(
            q, k, v, bias[0] if bias else mask, 0.0, a["is_causal"], scale=a["scale"],
            enable_gqa=group > 1,
        )  # fmt: skip
        return found if z is None else (z * p).to(v.dtype) @ v.repeat_interleave(group, -3)

    wanted = a.get("grad_input_mask", (True, True, True))
    with_bias = len(wanted) == 4 and wanted[3]
    pull = torch.func.vjp(out, q, k, v, *([mask] if with_bias else []))[1]
    found = (*pull(a[_cotangent_name(a)]), None)[: len(wanted)]
    return tuple(g if w else None for g, w in zip(found, wanted, strict=True))


def _accepts(a: dict[str, Any]) -> bool:
    """Dense, of equal lengths in a batch, and with a dropout that can be had again."""
    tensors = (a["query"], a["key"], a["value"], a["out"], a["logsumexp"], _mask(a))
    ragged = a.get("cum_seq_q") is not None and a["cum_seq_q"].numel() > 0
    known = a["dropout_p"] == 0 or "philox_seed" in a
    return plain(*tensors) and not ragged and known and a["query"].dim() == 4


_WHY = "PyTorch has no second derivative; by blocks, without an N×M matrix"

FORMULAS = [
    Formula(
        name,
        "attention",
        _WHY,
        partial(_second, backend),
        _accepts,
        partial(_composite, backend),
        derived=("out", "logsumexp"),
    )
    for name, backend in (
        ("_scaled_dot_product_flash_attention_for_cpu_backward", FLASH),
        ("_scaled_dot_product_flash_attention_backward", FLASH),
        ("_scaled_dot_product_efficient_attention_backward", EFFICIENT),
        ("_scaled_dot_product_cudnn_attention_backward", CUDNN),
    )
]
