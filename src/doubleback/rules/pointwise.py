"""Operators on single entries and on pairs of them: coordinate-wise functions by g′, g″ and the
stock kernel for g′⊙y where PyTorch has one; sums, differences, quotients, choices and
reductions; distances between points, which PyTorch differentiates once: the generic rule over
formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..graph import Node, Ref
from ..kernels import cleared, fusing, second
from .structures import VMAP, broadcast_adjoint, coordinatewise, generic, linear
from .table import Call, Rule, Structure, Tensors, add, aligned, alone, light, named, run, sum_to

aten = torch.ops.aten

SELU_ALPHA, SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


Kernel = Callable[[Call], tuple[str, tuple]]  # the name of a g″ in kernels.pointwise, parameters


def _kernel(name: str, *parameters: Any) -> Kernel:
    return lambda call: (name, parameters)


def _named(
    of: str,
    first: Callable[[Call, Tensor], Tensor],
    kernel: Kernel,
    fused: Callable[[Call, Tensor, Tensor], Tensor] | None = None,
) -> Rule:
    """A function whose g″ stands in kernels.pointwise."""

    def bend(call: Call, v: Tensor) -> Tensor:
        name, parameters = kernel(call)
        return second(name, v, *parameters)

    return coordinatewise(of, first, bend, fused=fused, kernel=kernel)


# --------------------------------------------------------------------------- rectifiers


def _relu_family() -> dict[str, Rule]:
    """Piecewise linear: the mask is read off a value that is kept anyway, input or output, and
    kept itself where none is."""

    def piece(
        of: str,
        fused: Callable[[Call, Tensor, Tensor], Tensor],
        *,
        either: bool | Callable[[Node], bool] = False,
        binary: bool = False,
        flat: Callable[[Call, Tensor], Tensor] | None = None,
    ) -> Rule:
        """fused(call, y, v) → g′⊙y, with v the input or the output (`of`), or `either`.
        binary: g′ is 0 or 1; flat(call, v): where it is 0, if that is simply said."""

        def first(call: Call, v: Tensor) -> Tensor:
            return fused(call, torch.ones_like(v), v)

        def forms(node: Node) -> list[Rule]:
            on = either(node) if callable(either) else either
            return [output, *masked] if on else masked

        output = coordinatewise("output", first, None, fused=fused)
        masked = [_masked(of, flat or (lambda call, v: first(call, v) == 0))] if binary else []
        return replace(coordinatewise(of, first, None, fused=fused), forms=forms)

    def bounds(call: Call) -> tuple[Any, Any]:
        return call.argument(1, "min_val", -1), call.argument(2, "max_val", 1)

    def rising(node: Node) -> bool:
        return node.argument(1, "negative_slope", 0.01) >= 0

    def clamped(call: Call, y: Tensor, x: Tensor) -> Tensor:
        name = call.node.op._schema.name
        low = call.argument(1, "min") if name != "aten::clamp_max" else None
        high = call.argument(1 if name == "aten::clamp_max" else 2, "max")
        inside = torch.ones_like(x, dtype=torch.bool)
        if low is not None:
            inside = inside & (x >= low)
        if high is not None:
            inside = inside & (x <= high)
        return cleared(~inside, y)

    return {
        "relu.default": piece(
            "output",
            lambda c, y, v: aten.threshold_backward(y, v, 0),
            binary=True,
            flat=lambda c, v: v <= 0,
        ),
        "relu6.default": piece(
            "input", lambda c, y, v: aten.hardtanh_backward(y, v, 0, 6), either=True, binary=True
        ),
        "leaky_relu.default": piece(
            "input",
            lambda c, y, v: aten.leaky_relu_backward(
                y, v, c.argument(1, "negative_slope", 0.01), False
            ),
            either=rising,
        ),
        "hardtanh.default": piece(
            "input",
            lambda c, y, v: aten.hardtanh_backward(y, v, *bounds(c)),
            either=True,
            binary=True,
        ),
        # written out: the stock kernel multiplies by 1/6 in float32 whatever the dtype
        "hardsigmoid.default": piece("input", lambda c, y, v: cleared(~(v.abs() < 3), y / 6)),
        "threshold.default": piece(
            "input",
            lambda c, y, v: aten.threshold_backward(y, v, c.argument(1, "threshold")),
            binary=True,
        ),
        "hardshrink.default": piece(
            "input",
            lambda c, y, v: aten.hardshrink_backward(y, v, c.argument(1, "lambd", 0.5)),
            either=True,
            binary=True,
        ),
        "softshrink.default": piece(
            "input",
            lambda c, y, v: aten.softshrink_backward(y, v, c.argument(1, "lambd", 0.5)),
            binary=True,
        ),
        "prelu.default": _prelu(),
        "rrelu.default": _rrelu(),
        "abs.default": piece("input", lambda c, y, v: y * torch.sign(v)),
        "clamp.default": piece("input", clamped, binary=True),
        "clamp_min.default": piece("input", clamped, binary=True),
        "clamp_max.default": piece("input", clamped, binary=True),
    }


def _masked(of: str, flat: Callable[[Call, Tensor], Tensor]) -> Rule:
    """g′ is 0 or 1, and where it is 0 is kept, in place of what tells: a byte for every entry."""

    def forward(call: Call) -> tuple[Tensor, tuple[Tensor, Any]]:
        out = call.apply(call.inputs)
        # on a GPU made once: `where` would at every call
        zero = out.new_zeros(()) if out.is_cuda and not fusing() else 0
        return out, (flat(call, out if of == "output" else call.value(0)), zero)

    def fused(call: Call, y: Tensor, saved: Any) -> Tensor:
        mask, zero = saved
        return cleared(mask, y, zero)

    return coordinatewise(
        "saved", lambda call, saved: torch.where(saved[0], saved[1], 1.0), None, fused=fused,
        forward=forward,
    )  # fmt: skip


def _rrelu() -> Rule:
    """y = a⊙x with the slopes a of the forward sweep: 1 above zero, drawn or fixed below."""

    def forward(call: Call) -> tuple[Tensor, Tensor]:
        x = call.value(0)
        low, high = call.argument(1, "lower", 0.125), call.argument(2, "upper", 1 / 3)
        if not call.argument(3, "training", False):
            slope = torch.where(x > 0, 1, torch.full_like(x, (low + high) / 2))
            return x * slope, slope
        x = x.contiguous()  # kernels fill the noise in this order, whatever its strides
        slope = torch.ones_like(x)
        return aten.rrelu_with_noise(x, slope, low, high, True), slope

    return linear(
        lambda call, y: y * call.saved,
        tangent=lambda call, q: q[0] * call.saved,
        forward=forward,
        structure=Structure.PIECEWISE_LINEAR,
    )


def _prelu() -> Rule:
    """y = x for x > 0, w x below: bilinear in (w, x) on each side, so s_w = Σ ξ⊙q[x ≤ 0]."""

    def laid(call: Call, w: Tensor) -> Tensor:
        dims = len(call.metas[0].shape)
        return w.reshape(-1, *(1,) * (dims - 2)) if w.numel() > 1 and dims > 1 else w

    def factor(call: Call) -> Tensor:
        return torch.where(call.value(0) > 0, 1, laid(call, call.value(1)))

    def below(call: Call, t: Tensor) -> Tensor:
        return torch.where(call.value(0) > 0, 0, t)

    def per_weight(call: Call, t: Tensor) -> Tensor:
        shape = call.metas[1].shape
        target = laid(call, t.new_empty(()).expand(shape)).shape
        return sum_to(t, target).reshape(shape)

    def backward(call: Call, y: Tensor, wanted: Sequence[bool]) -> Tensors:
        x = call.value(0)
        return (
            y * factor(call) if wanted[0] else None,
            per_weight(call, below(call, y * x)) if wanted[1] else None,
        )

    def tangent(call: Call, q: Tensors) -> Tensor | None:
        out = None if q[0] is None else q[0] * factor(call)
        if q[1] is not None:
            out = add(out, below(call, laid(call, q[1]) * call.value(0)))
        return out

    def curvature(call: Call, xi: Tensor, q: Tensors, wanted: Sequence[bool]) -> Tensors:
        s_x = s_w = None
        if wanted[0] and q[1] is not None:
            s_x = below(call, xi * laid(call, q[1]))
        if wanted[1] and q[0] is not None:
            s_w = per_weight(call, below(call, xi * q[0]))
        return s_x, s_w

    return Rule(
        Structure.BILINEAR, run, backward, tangent, curvature, curves=lambda i, j: i != j,
        seeded=VMAP, per_example=alone(where=lambda call: len(call.metas[0].shape) > 1),
        light=True,
    )  # fmt: skip


# ------------------------------------------------------------------- smooth activations


def _gelu() -> Rule:
    """x Φ(x), or its tanh form."""

    def tanh_form(call: Call) -> bool:
        return call.node.kwargs.get("approximate", "none") == "tanh"

    def first(call: Call, x: Tensor) -> Tensor:
        return aten.gelu_backward(torch.ones_like(x), x, approximate=_form(call))

    def _form(call: Call) -> str:
        return "tanh" if tanh_form(call) else "none"

    return _named(
        "input", first, lambda call: ("gelu_tanh" if tanh_form(call) else "gelu", ()),
        lambda call, y, x: aten.gelu_backward(y, x, approximate=_form(call)),
    )  # fmt: skip


def _elu(parameters: Callable[[Call], tuple[float, float, float]]) -> Rule:
    """s·x for x > 0, s·α(e^{ix} − 1) below; ELU, SELU and CELU differ in (α, s, i)."""

    def first(call: Call, x: Tensor) -> Tensor:
        alpha, scale, inner = parameters(call)
        return torch.where(x > 0, scale, alpha * scale * inner * torch.exp(x * inner))

    return _named(
        "input", first, lambda call: ("elu", parameters(call)),
        lambda call, y, x: aten.elu_backward(y, *parameters(call), False, x),
    )  # fmt: skip


def _alpha(call: Call) -> float:
    return call.argument(1, "alpha", 1)


def _softplus() -> Rule:
    """log(1 + e^{βx})/β, linear beyond the threshold."""

    def parameters(call: Call) -> tuple[float, float]:
        return call.argument(1, "beta", 1), call.argument(2, "threshold", 20)

    def fused(call: Call, y: Tensor, x: Tensor) -> Tensor:
        return aten.softplus_backward(y, x, *parameters(call))

    return _named(
        "input", lambda call, x: fused(call, torch.ones_like(x), x),
        lambda call: ("softplus", parameters(call)), fused,
    )  # fmt: skip


def _smooth_activations() -> dict[str, Rule]:
    def ones(backward: Callable) -> Callable[[Call, Tensor], Tensor]:
        return lambda call, v: backward(torch.ones_like(v), v)

    def known(of: str, backward: Callable, name: str) -> Rule:
        return _named(of, ones(backward), _kernel(name), lambda call, y, v: backward(y, v))

    return {
        "gelu.default": _gelu(),
        "elu.default": _elu(
            lambda c: (c.argument(1, "alpha", 1), c.argument(2, "scale", 1),
                       c.argument(3, "input_scale", 1))
        ),
        "selu.default": _elu(lambda c: (SELU_ALPHA, SELU_SCALE, 1)),
        "celu.default": _elu(lambda c: (_alpha(c), 1, 1 / _alpha(c))),
        "silu.default": known("input", aten.silu_backward, "silu"),
        "mish.default": known("input", aten.mish_backward, "mish"),
        "softplus.default": _softplus(),
        "sigmoid.default": known("output", aten.sigmoid_backward, "sigmoid"),
        "tanh.default": known("output", aten.tanh_backward, "tanh"),
        "hardswish.default": known("input", aten.hardswish_backward, "hardswish"),
        "log_sigmoid.default": _named(
            "input", lambda c, x: torch.sigmoid(-x), _kernel("logsigmoid")
        ),
    }  # fmt: skip


# -------------------------------------------------------------------------- elementary


def _pow() -> Rule:
    """xᵖ for a constant p; x⁰ and x¹ have no curvature, not even at 0."""

    def power(x: Tensor, factor: float, p: float) -> Tensor:
        return torch.zeros_like(x) if factor == 0 else factor * torch.pow(x, p)

    def exponent(call: Call) -> float:
        return call.argument(1, "exponent")

    return coordinatewise(
        "input",
        lambda c, x: power(x, exponent(c), exponent(c) - 1),
        lambda c, x: power(x, exponent(c) * (exponent(c) - 1), exponent(c) - 2),
    )


def _of_value(g: Callable[[Tensor], Tensor], call: Call, v: Tensor) -> Tensor:
    return g(v)


def _elementary() -> dict[str, Rule]:
    """(of, g′, g″) for the functions of a calculus table; g″ None: by its name in
    kernels.pointwise, where it has a fused kernel."""
    table: dict[str, tuple] = {
        "exp": ("output", lambda y: y, None),
        "expm1": ("output", lambda y: y + 1, lambda y: y + 1),
        "exp2": ("output", lambda y: math.log(2) * y, lambda y: math.log(2) ** 2 * y),
        "log": ("input", lambda x: 1 / x, None),
        "log2": ("input", lambda x: 1 / (x * math.log(2)),
                 lambda x: -1 / (x * x * math.log(2))),
        "log10": ("input", lambda x: 1 / (x * math.log(10)),
                  lambda x: -1 / (x * x * math.log(10))),
        "log1p": ("input", lambda x: 1 / (1 + x), lambda x: -1 / (1 + x) ** 2),
        "sqrt": ("output", lambda y: 0.5 / y, None),
        "rsqrt": ("output", lambda y: -0.5 * y**3, None),
        "reciprocal": ("output", lambda y: -y * y, None),
        "square": ("input", lambda x: 2 * x, lambda x: torch.full_like(x, 2)),
        "sin": ("input", torch.cos, None),
        "cos": ("input", lambda x: -torch.sin(x), None),
        "tan": ("output", lambda y: 1 + y * y, lambda y: 2 * y * (1 + y * y)),
        "asin": ("input", lambda x: torch.rsqrt(1 - x * x),
                 lambda x: x * torch.rsqrt(1 - x * x) ** 3),
        "acos": ("input", lambda x: -torch.rsqrt(1 - x * x),
                 lambda x: -x * torch.rsqrt(1 - x * x) ** 3),
        "atan": ("input", lambda x: 1 / (1 + x * x), lambda x: -2 * x / (1 + x * x) ** 2),
        "sinh": ("input", torch.cosh, torch.sinh),
        "cosh": ("input", torch.sinh, torch.cosh),
        "asinh": ("input", lambda x: torch.rsqrt(1 + x * x),
                  lambda x: -x * torch.rsqrt(1 + x * x) ** 3),
        "atanh": ("input", lambda x: 1 / (1 - x * x), lambda x: 2 * x / (1 - x * x) ** 2),
        "erf": ("input", lambda x: 2 / math.sqrt(math.pi) * torch.exp(-x * x),
                lambda x: -4 / math.sqrt(math.pi) * x * torch.exp(-x * x)),
    }  # fmt: skip
    rules = {}
    for name, (of, first, bend) in table.items():
        slope = partial(_of_value, first)
        rules[f"{name}.default"] = (
            _named(of, slope, _kernel(name))
            if bend is None
            else coordinatewise(of, slope, partial(_of_value, bend))
        )
    rules["pow.Tensor_Scalar"] = _pow()
    rules["pow.Scalar"] = coordinatewise(
        "output",
        lambda c, y: math.log(c.argument(0, "self")) * y,
        lambda c, y: math.log(c.argument(0, "self")) ** 2 * y,
    )
    return rules


def _coordinatewise() -> Iterator[tuple[str, Rule]]:
    for family in (_relu_family(), _smooth_activations(), _elementary()):
        yield from family.items()


# ------------------------------------------------------------------ sums and differences


def _combination(coefficients: Callable[[Call], Sequence[float]]) -> Rule:
    """y = c₀u₀ + c₁u₁ (+ a constant), with broadcasting and type promotion."""

    def scaled(t: Tensor, factor: float) -> Tensor:
        return t if factor == 1 else t * factor

    def of_tensors(call: Call) -> list[float]:
        factors = coefficients(call)
        operands = (call.argument(0, "self"), call.argument(1, "other"))
        return [c for c, arg in zip(factors, operands, strict=True) if isinstance(arg, Ref)]

    def backward(call: Call, y: Tensor, wanted: Sequence[bool]) -> Tensors:
        return [
            broadcast_adjoint(call, i, scaled(y, c)) if want else None
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


def _coefficients(sign: int, reverse: bool = False) -> Callable[[Call], Sequence[float]]:
    def find(call: Call) -> Sequence[float]:
        alpha = call.node.kwargs.get("alpha", call.argument(2, "alpha", 1))
        return (-alpha, 1) if reverse else (1, sign * alpha)

    return find


# ---------------------------------------------------------------------------- quotients


def _div() -> Rule:
    """y = u/w: dy = (q_u − y q_w)/w; s_u = −ξ q_w/w², s_w = ξ(2 y q_w − q_u)/w². w may be a number,
    u not (see `plan.py`): then the only input bends."""

    def constant(call: Call) -> Any:
        other = call.argument(1, "other")
        return None if isinstance(other, Ref) else other

    def backward(call: Call, y: Tensor, wanted: Sequence[bool]) -> Tensors:
        if constant(call) is not None:
            return (y / constant(call),)
        scaled = y / call.value(1)
        return (
            broadcast_adjoint(call, 0, scaled) if wanted[0] else None,
            broadcast_adjoint(call, 1, -scaled * call.out) if wanted[1] else None,
        )

    def tangent(call: Call, q: Tensors) -> Tensor | None:
        if constant(call) is not None:
            return q[0] / constant(call)  # type: ignore[operator]
        top = q[0]
        if q[1] is not None:
            top = add(top, -call.out * q[1])
        return (top / call.value(1)).expand(call.shape) if top is not None else None

    def curvature(call: Call, xi: Tensor, q: Tensors, wanted: Sequence[bool]) -> Tensors:
        if constant(call) is not None:
            return (None,)
        w = call.value(1)
        scaled = xi / (w * w)
        q_u, q_w = q
        s_w = None
        if wanted[1]:
            inner = add(None if q_w is None else 2 * call.out * q_w, None if q_u is None else -q_u)
            s_w = broadcast_adjoint(call, 1, scaled * inner) if inner is not None else None
        s_u = None
        if wanted[0] and q_w is not None:
            s_u = broadcast_adjoint(call, 0, -scaled * q_w)
        return s_u, s_w

    return Rule(
        Structure.GENERAL, run, backward, tangent, curvature,
        reads=frozenset({"inputs", "output"}),
        reads_inputs=lambda live: (False, True)[: len(live)],
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


def _arithmetic() -> Iterator[tuple[str, Rule]]:
    table = {
        light(_combination(_coefficients(1))): ["add.Tensor", "add.Scalar"],
        light(_combination(_coefficients(-1))): ["sub.Tensor", "sub.Scalar"],
        light(_combination(_coefficients(-1, reverse=True))): ["rsub.Scalar", "rsub.Tensor"],
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
    yield from named(table.items())


# -------------------------------------------------------------------------------------- distances


def length(difference: Tensor, p: float) -> Tensor:
    """‖δ‖_p over the last axis, with derivatives of 0 where an entry, or the whole, is 0.

    >>> length(torch.tensor([[3.0, -4.0], [0.0, 0.0]]), 2.0)
    tensor([5., 0.])
    """
    size = difference.abs()
    if p == 0:
        return (size != 0).sum(-1).to(size.dtype) + 0 * size.sum(-1)
    if p == 1:
        return size.sum(-1)
    if p == math.inf:  # PyTorch gives each of several largest entries the whole derivative
        most = size.detach().amax(-1, keepdim=True)
        return most.squeeze(-1) + torch.where(size == most, size - size.detach(), 0.0).sum(-1)
    apart = size > 0
    size = torch.where(apart, size, 1.0)  # powers of 0 have no derivative to give
    total = torch.where(apart, size**p, 0.0).sum(-1)
    far = total > 0
    return torch.where(far, torch.where(far, total, 1.0) ** (1 / p), 0.0)


def _cdist(call: Call, inputs: Sequence[Any]) -> Tensor:
    """‖x_i − y_j‖_p of every pair; the sweeps read it once more, with all differences at hand."""
    x, y = inputs
    return length(x.unsqueeze(-2) - y.unsqueeze(-3), float(call.argument(2, "p", 2.0)))


def _pdist(call: Call, inputs: Sequence[Any]) -> Tensor:
    """‖x_i − x_j‖_p for i < j."""
    (x,) = inputs
    i, j = torch.triu_indices(len(x), len(x), 1, device=x.device)
    return length(x[i] - x[j], float(call.argument(1, "p", 2.0)))


def _distances() -> Iterator[tuple[str, Rule]]:
    table = {
        "cdist.default": generic(again=_cdist),
        "_cdist_forward.default": generic(again=_cdist),
        "pdist.default": generic(again=_pdist),
        "_pdist_forward.default": generic(again=_pdist),
    }
    yield from table.items()


def rules() -> Iterator[tuple[str, Rule]]:
    return chain(_coordinatewise(), _arithmetic(), _distances())
