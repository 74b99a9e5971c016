"""Sums, differences, quotients, choices and reductions of activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..graph import Ref
from ..kernels import cleared
from .seeded import VMAP
from .structures import broadcast_adjoint, linear
from .table import Call, Rule, Structure, Tensors, add, aligned, alone, light, overload, run

# ------------------------------------------------------------------ sums and differences


def _combination(coefficients: Callable[[Call], Sequence[float]]) -> Rule:
    """y = c₀u₀ + c₁u₁ (+ a constant), with broadcasting and type promotion."""

    def scaled(t: Tensor, factor: float) -> Tensor:
        return t if factor == 1 else t * factor

    def of_tensors(call: Call) -> list[float]:
        found = coefficients(call)
        operands = (call.argument(0, "self"), call.argument(1, "other"))
        return [c for c, arg in zip(found, operands, strict=True) if isinstance(arg, Ref)]

    def backward(call: Call, y: Tensor, wanted: Sequence[bool]) -> Tensors:
        return [
            broadcast_adjoint(call, i, scaled(y, c)).to(call.metas[i].dtype) if want else None
            for i, (c, want) in enumerate(zip(of_tensors(call), wanted, strict=True))
        ]

    def tangent(call: Call, q: Tensors) -> Tensor | None:
        out = None
        for part, c in zip(q, of_tensors(call), strict=True):
            if part is not None:
                out = add(out, scaled(part, c))
        if out is not None and tuple(out.shape) != call.shape:
            out = out.expand(call.shape)
        return out

    return linear(backward=backward, tangent=tangent, per_example=aligned())


def _alpha(sign: int, reverse: bool = False) -> Callable[[Call], Sequence[float]]:
    def find(call: Call) -> Sequence[float]:
        alpha = call.node.kwargs.get("alpha", call.argument(2, "alpha", 1))
        return (-alpha, 1) if reverse else (1, sign * alpha)

    return find


# ---------------------------------------------------------------------------- quotients


def _div() -> Rule:
    """y = u/w: dy = (q_u − y q_w)/w; s_u = −ξ q_w/w², s_w = ξ(2 y q_w − q_u)/w²."""

    def constant(call: Call) -> Any:
        other = call.argument(1, "other")
        return None if isinstance(other, Ref) else other

    def backward(call: Call, y: Tensor, wanted: Sequence[bool]) -> Tensors:
        if constant(call) is not None:
            return (y / constant(call),)
        w = call.value(len(call.inputs) - 1)
        scaled = y / w
        if len(call.inputs) == 1:  # a number divided by a tensor
            return (-scaled * call.out,)
        return (
            broadcast_adjoint(call, 0, scaled) if wanted[0] else None,
            broadcast_adjoint(call, 1, -scaled * call.out) if wanted[1] else None,
        )

    def tangent(call: Call, q: Tensors) -> Tensor | None:
        if constant(call) is not None:
            return q[0] / constant(call)  # type: ignore[operator]
        w = call.value(len(call.inputs) - 1)
        top = q[0] if len(q) == 2 else None
        if q[-1] is not None:
            top = add(top, -call.out * q[-1])
        return (top / w).expand(call.shape) if top is not None else None

    def curvature(call: Call, xi: Tensor, q: Tensors, wanted: Sequence[bool]) -> Tensors:
        if constant(call) is not None:
            return (None,)
        w = call.value(len(call.inputs) - 1)
        scaled = xi / (w * w)
        q_u, q_w = (q[0] if len(q) == 2 else None), q[-1]
        s_w = None
        if wanted[-1]:
            inner = add(None if q_w is None else 2 * call.out * q_w, None if q_u is None else -q_u)
            s_w = broadcast_adjoint(call, len(q) - 1, scaled * inner) if inner is not None else None
        if len(q) == 1:
            return (s_w,)
        s_u = None
        if wanted[0] and q_w is not None:
            s_u = broadcast_adjoint(call, 0, -scaled * q_w)
        return s_u, s_w

    return Rule(
        Structure.GENERAL, run, backward, tangent, curvature,
        reads=frozenset({"inputs", "output"}),
        reads_inputs=lambda live: (False, True) if len(live) == 2 else (True,),
        curves=lambda i, j: (i, j) != (0, 0),
        seeded=VMAP,
        per_example=aligned(),
    )  # fmt: skip


def _div_scalar() -> Rule:
    """y = u/c for a number c."""

    def scale(call: Call, t: Tensor) -> Tensor:
        return t / call.argument(1, "other")

    return linear(scale, tangent=lambda call, q: scale(call, q[0]), per_example=alone())  # type: ignore[arg-type]


# ------------------------------------------------------------------------------ choices


def _where() -> Rule:
    """y = c ? u : w; linear in both, with the mask of the forward sweep."""

    def sides(call: Call) -> list[int]:
        return [i for i, a in enumerate(call.node.args[1:]) if isinstance(a, Ref)]

    def backward(call: Call, y: Tensor, wanted: Sequence[bool]) -> Tensors:
        grads: list[Tensor | None] = [None] * len(call.inputs)
        mask = call.inputs[0]
        for slot, side in zip(range(1, len(call.inputs)), sides(call), strict=True):
            if wanted[slot]:
                part = cleared(~mask if side == 0 else mask, y)  # type: ignore[operator, arg-type]
                grads[slot] = broadcast_adjoint(call, slot, part)
        return grads

    def tangent(call: Call, q: Tensors) -> Tensor:
        mask, parts = call.inputs[0], [0.0, 0.0]
        for slot, side in zip(range(1, len(call.inputs)), sides(call), strict=True):
            if q[slot] is not None:
                parts[side] = q[slot]  # type: ignore[call-overload]
        out = torch.where(mask, *parts)  # type: ignore[call-overload]
        return out.expand(call.shape)

    return linear(backward=backward, tangent=tangent, structure=Structure.PIECEWISE_LINEAR)


def _extremum(larger: bool) -> Rule:
    """y = max(u, w) or min(u, w); a tie gives each side one half, as autograd does."""

    def share(call: Call) -> Tensor:
        u, w = call.inputs
        wins = u > w if larger else u < w  # type: ignore[operator]
        return torch.where(u == w, 0.5, wins.to(torch.get_default_dtype()))  # type: ignore[call-overload]

    def backward(call: Call, y: Tensor, wanted: Sequence[bool]) -> Tensors:
        s = share(call).to(y.dtype)
        return (
            broadcast_adjoint(call, 0, y * s) if wanted[0] else None,
            broadcast_adjoint(call, 1, y * (1 - s)) if wanted[1] else None,
        )

    def tangent(call: Call, q: Tensors) -> Tensor | None:
        s = share(call)
        out = None
        for part, factor in zip(q, (s, 1 - s), strict=True):
            if part is not None:
                out = add(out, part * factor.to(part.dtype))
        return out

    return linear(
        backward=backward, tangent=tangent, structure=Structure.PIECEWISE_LINEAR,
        reads=frozenset({"inputs"}),
    )  # fmt: skip


def _masked_fill() -> Rule:
    """y = u where the mask is off, a constant elsewhere."""

    def clear(call: Call, t: Tensor) -> Tensor:
        return t.masked_fill(call.tensor(1, "mask"), 0)  # type: ignore[arg-type]

    def tangent(call: Call, q: Tensors) -> Tensor:
        return clear(call, q[0].expand(call.shape))  # type: ignore[union-attr]

    return linear(lambda call, y: broadcast_adjoint(call, 0, clear(call, y)), tangent=tangent)


# --------------------------------------------------------------------------- reductions


def _axes(call: Call, position: int = 1) -> tuple[int, ...]:
    n = len(call.metas[0].shape)
    dim = call.argument(position, "dim", None)
    if dim is None or dim == [] or dim == ():
        return tuple(range(n))
    dims = (dim,) if isinstance(dim, int) else dim
    return tuple(sorted(d % n for d in dims)) if n else ()


def _restore(call: Call, y: Tensor, position: int = 1) -> Tensor:
    """Put the reduced axes back, as axes of size one."""
    shape = call.metas[0].shape
    axes = _axes(call, position)
    return y.reshape([1 if i in axes else size for i, size in enumerate(shape)])


def _sum(mean: bool) -> Rule:
    """Σu or its mean over some axes; the transpose expands."""

    def transpose(call: Call, y: Tensor) -> Tensor:
        shape = call.metas[0].shape
        y = _restore(call, y)
        if mean:
            count = 1
            for axis in _axes(call):
                count *= shape[axis]
            y = y / count
        return y.to(call.metas[0].dtype).expand(shape)

    return linear(transpose)


def _amax() -> Rule:
    """y = max or min over axes; ties share the derivative equally."""

    def share(call: Call) -> Tensor:
        hit = (call.value(0) == _restore(call, call.out)).to(call.metas[0].dtype)
        return hit / hit.sum(_axes(call), keepdim=True)

    def backward(call: Call, y: Tensor, wanted: Sequence[bool]) -> Tensors:
        return (_restore(call, y) * share(call).to(y.dtype),)

    def tangent(call: Call, q: Tensors) -> Tensor:
        t = q[0]
        out = (t * share(call).to(t.dtype)).sum(_axes(call), keepdim=True)  # type: ignore[union-attr]
        return out.reshape(call.out.shape)

    return linear(
        backward=backward, tangent=tangent, structure=Structure.PIECEWISE_LINEAR,
        reads=frozenset({"inputs", "output"}),
    )  # fmt: skip


def _chosen() -> Rule:
    """(values, indices) = max, min, sort, topk, … along one axis: a gather by the indices."""

    def forward(call: Call) -> tuple[Any, Any]:
        values, indices = call.apply(call.inputs)
        return (values, indices), indices

    def axis(call: Call) -> int:
        name = call.node.op._schema.name
        return call.argument(2 if name in ("aten::topk", "aten::kthvalue") else 1, "dim", -1)

    def indices(call: Call) -> tuple[Tensor, bool]:
        index = call.saved
        squeezed = index.dim() < len(call.metas[0].shape)
        return (index.unsqueeze(axis(call)) if squeezed else index), squeezed

    def backward(call: Call, y: Any, wanted: Sequence[bool]) -> Tensors:
        index, squeezed = indices(call)
        part = y[0].unsqueeze(axis(call)) if squeezed else y[0]
        base = part.new_zeros(call.metas[0].shape)
        return (base.scatter_add(axis(call), index, part),)

    def tangent(call: Call, q: Tensors) -> Any:
        index, squeezed = indices(call)
        out = q[0].gather(axis(call), index)  # type: ignore[union-attr]
        return (out.squeeze(axis(call)) if squeezed else out), None

    return linear(
        backward=backward, tangent=tangent, forward=forward,
        structure=Structure.PIECEWISE_LINEAR,
    )  # fmt: skip


def rules() -> Iterator[tuple[Any, Rule]]:
    table = {
        light(_combination(_alpha(1))): ["add.Tensor", "add.Scalar"],
        light(_combination(_alpha(-1))): ["sub.Tensor", "sub.Scalar"],
        light(_combination(_alpha(-1, reverse=True))): ["rsub.Scalar", "rsub.Tensor"],
        light(_div()): ["div.Tensor"],
        light(_div_scalar()): ["div.Scalar"],
        light(linear(lambda call, y: y * call.argument(1, "other"), per_example=alone())): [
            "mul.Scalar"
        ],
        light(linear(lambda call, y: -y, per_example=alone())): ["neg.default"],
        light(_where()): ["where.self", "where.ScalarOther", "where.ScalarSelf"],
        _extremum(True): ["maximum.default"],
        _extremum(False): ["minimum.default"],
        light(_masked_fill()): ["masked_fill.Scalar"],
        _sum(False): ["sum.default", "sum.dim_IntList"],
        _sum(True): ["mean.default", "mean.dim"],
        _amax(): ["amax.default", "amin.default"],
        _chosen(): ["max.dim", "min.dim", "sort.default", "topk.default", "median.dim",
                    "kthvalue.default"],
    }  # fmt: skip
    for rule, names in table.items():
        for name in names:
            op = overload(name)
            if op is not None:
                yield op, rule
