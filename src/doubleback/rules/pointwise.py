"""Coordinate-wise functions: g′, g″, and the stock kernel for g′⊙y where PyTorch has one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..graph import Node
from ..kernels import cleared, fusing, second
from .seeded import VMAP
from .structures import coordinatewise, linear
from .table import Call, Rule, Structure, Tensors, add, alone, overload, run, sum_to

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
    found = {}
    for name, (of, first, bend) in table.items():
        slope = partial(_of_value, first)
        found[f"{name}.default"] = (
            _named(of, slope, _kernel(name))
            if bend is None
            else coordinatewise(of, slope, partial(_of_value, bend))
        )
    found["pow.Tensor_Scalar"] = _pow()
    found["pow.Scalar"] = coordinatewise(
        "output",
        lambda c, y: math.log(c.argument(0, "self")) * y,
        lambda c, y: math.log(c.argument(0, "self")) ** 2 * y,
    )
    return found


def rules() -> Iterator[tuple[Any, Rule]]:
    for family in (_relu_family(), _smooth_activations(), _elementary()):
        for name, rule in family.items():
            op = overload(name)
            if op is not None:
                yield op, rule
