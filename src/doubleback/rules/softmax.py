"""softmax, log_softmax and logsumexp: closed forms from the probabilities (theory §4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..dtypes import lifted_and_back
from .seeded import VMAP
from .table import Call, Rule, Structure, Tensors, overload, tangent_of

aten = torch.ops.aten


def softmax_derivative(s: Tensor, v: Tensor) -> Tensor:
    """S v = s⊙(v − ⟨s,v⟩) over the last axis, S = diag(s) − ssᵀ; S is symmetric."""
    return s * (v - (s * v).sum(-1, keepdim=True))


def softmax_curvature(s: Tensor, v: Tensor, h: Tensor, dim: int) -> Tensor:
    """∂_u⟨v, S h⟩ with S = diag(s) − ssᵀ, s = softmax(u):

    s⊙v⊙h − ⟨s,v⟩ s⊙h − ⟨s,h⟩ s⊙v − ⟨s, v⊙h⟩ s + 2⟨s,v⟩⟨s,h⟩ s
    = s⊙(a⊙b − ⟨s, a⊙b⟩) with a = v − ⟨s,v⟩, b = h − ⟨s,h⟩.
    """
    wide, back = lifted_and_back(s)
    a = v - (wide * v).sum(dim, keepdim=True)
    b = h - (wide * h).sum(dim, keepdim=True)
    ab = a * b
    return back(wide * (ab - (wide * ab).sum(dim, keepdim=True)))


def _dim(call: Call) -> int:
    return call.argument(1, "dim")


def _softmax() -> Rule:
    """S is symmetric: one kernel, S y = s⊙(y − ⟨s,y⟩), serves backward and tangent."""

    def apply(call: Call, y: Tensor) -> Tensor:
        out = call.out
        result = aten._softmax_backward_data(y.to(out.dtype), out, _dim(call), out.dtype)
        return result

    def backward(call: Call, y: Tensor, wanted: Sequence[bool]) -> Tensors:
        return (apply(call, y).to(call.metas[0].dtype),)

    def tangent(call: Call, q: Tensors) -> Tensor:
        return apply(call, tangent_of(q))

    def curvature(call: Call, xi: Tensor, q: Tensors, wanted: Sequence[bool]) -> Tensors:
        source = softmax_curvature(call.out, xi, tangent_of(q), _dim(call))
        return (source.to(call.metas[0].dtype),)

    return _general(backward, tangent, curvature)


def _log_softmax() -> Rule:
    """y = u − lse(u), s = eʸ: dy·q = q − ⟨s,q⟩, source −Σξ · s⊙(q − ⟨s,q⟩)."""

    def backward(call: Call, y: Tensor, wanted: Sequence[bool]) -> Tensors:
        out = call.out
        grad = aten._log_softmax_backward_data(y.to(out.dtype), out, _dim(call), out.dtype)
        return (grad.to(call.metas[0].dtype),)

    def tangent(call: Call, q: Tensors) -> Tensor:
        wide, back = lifted_and_back(call.out)
        return back(tangent_of(q) - (wide.exp() * tangent_of(q)).sum(_dim(call), keepdim=True))

    def curvature(call: Call, xi: Tensor, q: Tensors, wanted: Sequence[bool]) -> Tensors:
        dim = _dim(call)
        wide, _ = lifted_and_back(call.out)
        s = wide.exp()
        inner = tangent_of(q) - (s * tangent_of(q)).sum(dim, keepdim=True)
        total = xi.to(s.dtype).sum(dim, keepdim=True)
        return ((-total * s * inner).to(call.metas[0].dtype),)

    return _general(backward, tangent, curvature)


def _logsumexp() -> Rule:
    """y = lse(u), ∇ = s = softmax(u): dy·q = ⟨s,q⟩, source ξ·s⊙(q − ⟨s,q⟩)."""

    def dims(call: Call) -> list[int]:
        dim = call.argument(1, "dim")
        return [dim] if isinstance(dim, int) else list(dim)

    def keep(call: Call, t: Tensor) -> Tensor:
        if call.argument(2, "keepdim", False):
            return t
        n = len(call.metas[0].shape)
        for dim in sorted(d % n for d in dims(call)):
            t = t.unsqueeze(dim)
        return t

    def weights(call: Call) -> Tensor:
        return torch.exp(call.value(0) - keep(call, call.out))

    def backward(call: Call, y: Tensor, wanted: Sequence[bool]) -> Tensors:
        return (keep(call, y) * weights(call),)

    def tangent(call: Call, q: Tensors) -> Tensor:
        kept = call.argument(2, "keepdim", False)
        return (weights(call) * tangent_of(q)).sum(dims(call), keepdim=kept)

    def curvature(call: Call, xi: Tensor, q: Tensors, wanted: Sequence[bool]) -> Tensors:
        s = weights(call)
        return (
            keep(call, xi)
            * s
            * (tangent_of(q) - (s * tangent_of(q)).sum(dims(call), keepdim=True)),
        )

    return _general(backward, tangent, curvature, reads=frozenset({"inputs", "output"}))


def _logcumsumexp() -> Rule:
    """y_i = log Σ_{j≤i} e^{u_j}. With P_ij = e^{u_j − y_i} for j ≤ i: dy·q = Pq and, ξ and q
    fixed, source (Pᵀξ)⊙q − Pᵀ(ξ⊙Pq).

    As in the operator itself no power of e leaves its logarithm before it is summed: positive and
    negative numbers are summed apart. (PyTorch's backward does so too, by a logarithm of ξ, which
    has no derivative where ξ = 0.)
    """

    def axis(call: Call) -> int:
        return call.argument(1, "dim")

    def signed(along: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
        """along(log t⁺) − along(log t⁻), log 0 = −∞."""
        return along(t.clamp(min=0).log()) - along((-t).clamp(min=0).log())

    def push(call: Call, q: Tensor) -> Tensor:
        u, out, dim = call.value(0), call.out, axis(call)
        empty = out == -torch.inf  # nothing but zeros was summed

        def along(logs: Tensor) -> Tensor:
            sums = (u + logs).logcumsumexp(dim)
            return (sums - out.masked_fill(empty, 0)).exp().masked_fill(empty, 0)

        return signed(along, q)

    def pull(call: Call, y: Tensor) -> Tensor:
        u, out, dim = call.value(0), call.out, axis(call)
        empty = out == -torch.inf

        def along(logs: Tensor) -> Tensor:
            parts = (logs - out.masked_fill(empty, 0)).masked_fill(empty, -torch.inf)
            return (parts.flip(dim).logcumsumexp(dim).flip(dim) + u).exp()

        return signed(along, y)

    def curvature(call: Call, xi: Tensor, q: Tensors, wanted: Sequence[bool]) -> Tensors:
        h = tangent_of(q)
        return (pull(call, xi) * h - pull(call, xi * push(call, h)),)

    return _general(
        lambda call, y, wanted: (pull(call, y),),
        lambda call, q: push(call, tangent_of(q)),
        curvature,
        reads=frozenset({"inputs", "output"}),
    )


def _general(
    backward: Callable,
    tangent: Callable,
    curvature: Callable,
    reads: frozenset[str] = frozenset({"output"}),
) -> Rule:
    from .table import run

    return Rule(
        Structure.GENERAL, run, backward, tangent, curvature, reads=reads, seeded=VMAP, light=True
    )


def rules() -> Iterator[tuple[Any, Rule]]:
    names = {
        "softmax.int": _softmax(),
        "_softmax.default": _softmax(),
        "_safe_softmax.default": _softmax(),
        "log_softmax.int": _log_softmax(),
        "_log_softmax.default": _log_softmax(),
        "logsumexp.default": _logsumexp(),
        "logcumsumexp.default": _logcumsumexp(),
    }
    for name, rule in names.items():
        op = overload(name)
        if op is not None:
            yield op, rule
