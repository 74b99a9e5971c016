"""Operators that normalise: layer, RMS, group, instance and batch norm, one closed form for all
(theory §2); softmax, log_softmax and logsumexp, closed forms from the probabilities (theory §4);
scaled dot-product attention as one node, by blocks, never an N×M matrix at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..dtypes import lifted_and_back
from ..graph import Ref
from ..kernels import (
    Groups,
    adds_onto,
    attention_backward,
    attention_forward,
    attention_second,
    attention_tangent,
    backward_now,
    batch_norm_now,
    fused_softmax,
    fusing,
    second_now,
    standardise,
)
from .structures import LOOP, VMAP, choose, generic
from .table import Call, PerExample, Rule, Structure, Tensors, aligned, alone, run, tangent_of

# ------------------------------------------------------------------------------------------ norms


aten = torch.ops.aten
_GENERIC = generic()


def _affine(call: Call, place: int) -> tuple[int | None, int | None]:
    """Slots of weight and bias among the tensor inputs."""
    given = [call.argument(place, "weight"), call.argument(place + 1, "bias")]
    weight, bias = (call.slot(ref) if isinstance(ref, Ref) else None for ref in given)
    return weight, bias


def standardisation(
    groups: Callable[[Call], Groups],
    place: int,
    eps: Callable[[Call], float | None],
    forward: Callable[[Call], tuple[Any, Any]] | None = None,
    per_example: PerExample | None = None,
) -> Rule:
    """y = w⊙x̂ + b. `place` is the position of the weight; statistics are kept by `forward`.

    A weight that itself depends on the penalised input is left to the generic rule.
    """

    def weight(call: Call) -> Tensor | None:
        slot = _affine(call, place)[0]
        return None if slot is None else call.inputs[slot]

    def run(call: Call) -> tuple[Any, Any]:
        w, b = (None if s is None else call.inputs[s] for s in _affine(call, place))
        y, mean, rstd = standardise(groups(call), _x(call), w, b, eps(call), fused=not fusing())
        return y, (mean, rstd)

    def spread(call: Call, x: Any, w: Any, b: Any = None) -> Tensors:
        slots: list[Tensor | None] = [None] * len(call.inputs)
        slots[0] = x
        for slot, grad in zip(_affine(call, place), (w, b), strict=True):
            if slot is not None:
                slots[slot] = grad
        return slots

    def pull(call: Call, y: Any, wanted: Sequence[bool], onto: Tensor | None = None) -> Tensors:
        slots = _affine(call, place)
        mask = (wanted[0], *(s is not None and wanted[s] for s in slots))
        mean, rstd = call.saved
        at = (_x(call), mean, rstd, weight(call))
        return spread(call, *backward_now(groups(call), _main(call, y), *at, mask, onto))

    def onto(call: Call, y: Any, wanted: Sequence[bool], waiting: Tensor) -> Tensors | None:
        return (
            pull(call, y, wanted, waiting) if adds_onto(groups(call), _x(call), waiting) else None
        )

    def tangent(call: Call, q: Tensors) -> Any:
        if _moves_parameters(q):
            return _GENERIC.tangent(call, q)
        nothing = (False,) * len(q)
        return three(call, None, q, nothing, True, nothing)[0]

    def both(
        call: Call, xi: Any, q: Tensors, wanted: Sequence[bool], need: bool
    ) -> tuple[Any, Tensors]:
        if _moves_parameters(q):
            return _GENERIC.both(call, xi, q, wanted, need)
        return three(call, xi, q, wanted, need, (False,) * len(q))[:2]

    def at_once(
        call: Call, xi: Any, q: Tensors, wanted: Sequence[bool], need: bool, pulled: Sequence[bool]
    ) -> tuple[Any, Tensors, Tensors] | None:
        return None if _moves_parameters(q) else three(call, xi, q, wanted, need, pulled)

    def three(
        call: Call, xi: Any, q: Tensors, wanted: Sequence[bool], need: bool, pulled: Sequence[bool]
    ) -> tuple[Any, Tensors, Tensors]:
        slot = _affine(call, place)[0]
        mask = (wanted[0], slot is not None and wanted[slot])
        mean, rstd = call.saved
        at = (_x(call), mean, rstd, weight(call))
        t, s_x, s_w, dx = second_now(
            groups(call), _main(call, xi), tangent_of(q), *at, mask, need, pulled[0]
        )
        rest = (None,) * (len(call.inputs) - 1)
        return (_pack(call, t) if need else None), spread(call, s_x, s_w), (dx, *rest)

    return Rule(
        Structure.STANDARDISATION, forward or run, pull, tangent, tangent_curvature=both,
        at_once=at_once, onto=onto, per_example=per_example,
    )  # fmt: skip


def _x(call: Call) -> Tensor:
    return call.value(0)


def _moves_parameters(q: Tensors) -> bool:
    return q[0] is None or any(part is not None for part in q[1:])


def _main(call: Call, y: Any) -> Any:
    """The cotangent of the normalised tensor; statistics returned beside it have none."""
    return y[0] if call.node.many and y is not None else y


def _pack(call: Call, t: Tensor | None) -> Any:
    return (t, *(None for _ in call.node.outputs[1:])) if call.node.many else t


def _batch_norm_forward(call: Call) -> tuple[Any, Any]:
    """With the batch's statistics, whatever else the operator takes: running ones or none."""
    w, b = (None if s is None else call.inputs[s] for s in _affine(call, 1))
    names = ("running_mean", "running_var") if len(call.node.outputs) == 5 else ()
    running = [call.tensor(3 + i, name) for i, name in enumerate(names)]
    training, momentum, eps = (
        call.argument(3 + len(names) + i, name)
        for i, name in enumerate(("training", "momentum", "eps"))
    )
    out = batch_norm_now(_x(call), w, b, running, momentum, eps) if training else None  # type: ignore[arg-type]
    out = call.apply(call.inputs) if out is None else out
    return out, (out[1], out[2])


# ------------------------------------------------------------------- batch norm in eval


def _batch_norm_eval() -> Rule:
    """y = (x − μ) r w + b with the running μ and r = (var + ε)^(−1/2): bilinear in (x, w)."""

    def scale(call: Call, like: Tensor) -> tuple[Tensor, Tensor | None]:
        var = call.tensor(4, "running_var")
        eps = call.argument(6, "eps")
        shape = (1, -1, *(1,) * (like.dim() - 2))
        r = torch.rsqrt(var + eps).to(like.dtype).reshape(shape)  # type: ignore[operator]
        slot = _affine(call, 1)[0]
        w = None if slot is None else call.inputs[slot].to(like.dtype).reshape(shape)  # type: ignore[union-attr]
        return r, w

    def apply(call: Call, t: Tensor) -> Tensor:
        r, w = scale(call, t)
        return t * (r if w is None else r * w)

    def per_channel(t: Tensor) -> Tensor:
        return t.sum([i for i in range(t.dim()) if i != 1])

    def backward(call: Call, y: Any, wanted: Sequence[bool]) -> Tensors:
        y = y[0]
        grads: list[Tensor | None] = [None] * len(call.inputs)
        weight, bias = _affine(call, 1)
        if wanted[0]:
            grads[0] = apply(call, y)
        if weight is not None and wanted[weight]:
            mean = call.tensor(3, "running_mean").to(y.dtype)  # type: ignore[union-attr]
            r, _ = scale(call, y)
            centred = (_x(call) - mean.reshape(r.shape)) * r
            grads[weight] = per_channel(y * centred).to(call.metas[weight].dtype)
        if bias is not None and wanted[bias]:
            grads[bias] = per_channel(y).to(call.metas[bias].dtype)
        return grads

    def tangent(call: Call, q: Tensors) -> Any:
        if _moves_parameters(q):
            return _GENERIC.tangent(call, q)
        return _pack(call, apply(call, q[0]))  # type: ignore[arg-type]

    def both(
        call: Call, xi: Any, q: Tensors, wanted: Sequence[bool], need: bool
    ) -> tuple[Any, Tensors]:
        if _moves_parameters(q):
            return _GENERIC.both(call, xi, q, wanted, need)
        sources: list[Tensor | None] = [None] * len(call.inputs)
        weight = _affine(call, 1)[0]
        if weight is not None and wanted[weight]:
            r, _ = scale(call, xi[0])
            source = per_channel(xi[0] * q[0] * r)  # type: ignore[operator]
            sources[weight] = source.to(call.metas[weight].dtype)
        return (tangent(call, q) if need else None), sources

    return Rule(
        Structure.BILINEAR, lambda call: (call.apply(call.inputs), None), backward, tangent,
        tangent_curvature=both,
        curves=lambda i, j: i != j,
        seeded=choose(lambda call, q: LOOP if _moves_parameters(q) else VMAP),
        per_example=alone(),
        light=True,
    )  # fmt: skip


def _sizes(value: Any) -> list[int]:
    return [value] if isinstance(value, int) else list(value)


def _within_examples(call: Call) -> bool:
    """Whether the normalised axes leave out the first."""
    return len(call.metas[0].shape) > len(_sizes(call.argument(1, "normalized_shape")))


def _norms() -> Iterator[tuple[str, Rule]]:
    table = {
        "layer_norm.default": standardisation(
            lambda c: Groups.layer_norm(_sizes(c.argument(1, "normalized_shape"))), 2,
            lambda c: c.argument(4, "eps", 1e-5), per_example=alone(where=_within_examples),
        ),
        "rms_norm.default": standardisation(
            lambda c: Groups.rms_norm(_sizes(c.argument(1, "normalized_shape"))), 2,
            lambda c: c.argument(3, "eps", None), per_example=alone(where=_within_examples),
        ),
        "group_norm.default": standardisation(
            lambda c: Groups.group_norm(c.argument(1, "num_groups")), 2,
            lambda c: c.argument(4, "eps", 1e-5), per_example=alone(),
        ),
        "instance_norm.default": standardisation(
            lambda c: Groups.instance_norm(), 1, lambda c: c.argument(7, "eps", 1e-5),
            per_example=alone(),
        ),
        "_native_batch_norm_legit_functional.default": standardisation(
            lambda c: Groups.batch_norm(), 1, lambda c: c.argument(7, "eps"), _batch_norm_forward
        ),
        "_native_batch_norm_legit.no_stats": standardisation(
            lambda c: Groups.batch_norm(), 1, lambda c: c.argument(5, "eps"), _batch_norm_forward
        ),
        "_native_batch_norm_legit_no_training.default": _batch_norm_eval(),
    }  # fmt: skip
    yield from table.items()


# ---------------------------------------------------------------------------------------- softmax


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

    def both(
        call: Call, xi: Tensor, q: Tensors, wanted: Sequence[bool], need: bool
    ) -> tuple[Tensor | None, Tensors]:
        fused = fused_softmax(call.out, xi, tangent_of(q), _dim(call), need)
        if fused is None:
            sources = curvature(call, xi, q, wanted)
            return tangent(call, q) if need else None, sources
        return fused[0], (fused[1].to(call.metas[0].dtype),)

    return replace(_general(backward, tangent, curvature), tangent_curvature=both)


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

    return Rule(
        Structure.GENERAL, run, backward, tangent, curvature, reads=reads, seeded=VMAP, light=True
    )


def _softmaxes() -> Iterator[tuple[str, Rule]]:
    table = {
        "softmax.int": _softmax(),
        "_softmax.default": _softmax(),
        "_safe_softmax.default": _softmax(),
        "log_softmax.int": _log_softmax(),
        "_log_softmax.default": _log_softmax(),
        "logsumexp.default": _logsumexp(),
        "logcumsumexp.default": _logcumsumexp(),
    }
    yield from table.items()


# -------------------------------------------------------------------------------------- attention


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


def rules() -> Iterator[tuple[str, Rule]]:
    return chain(_norms(), _softmaxes(), [("scaled_dot_product_attention.default", _attention())])
