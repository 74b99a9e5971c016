"""Products: dense layers, convolutions, matrix products, gating, einsum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..graph import Node, Ref
from ..kernels import Gate, fused_gate, times
from ..operators import Convolution, Dense, LocallyConnected, einsum_adjoint, einsum_parts, is_plain
from .structures import bilinear, broadcast_adjoint, fold, generic
from .table import Call, Rule, Tensors, Three, aligned, named, sum_to

aten = torch.ops.aten
DENSE = Dense()


def _layer(rule: Rule) -> Rule:
    """A layer whose K, Kᵀ and K□ report for themselves: those of `operators`."""
    return replace(rule, layer=(0, 1))


# ------------------------------------------------------------------------------- dense


def _linear() -> Rule:
    """y = x Wᵀ + b."""

    def bias(call: Call, y: Tensor) -> Tensor:
        return y.reshape(-1, y.shape[-1]).sum(0).reshape(call.metas[2].shape)

    rule = bilinear(
        product=lambda call, x, weight: DENSE.forward(weight, x),
        adjoint0=lambda call, weight, y: DENSE.transpose(weight, y),
        adjoint1=lambda call, x, y: DENSE.weight_adjoint(x, y),
        bias=bias,
        offset=lambda call, b: b.expand(*call.metas[0].shape[:-1], b.shape[-1]),
        forward=lambda call: (
            DENSE.forward(call.inputs[1], call.inputs[0], (*call.inputs, None)[2]),  # type: ignore[arg-type]
            None,
        ),
        seeded=fold(0, lambda call: len(call.metas[0].shape) > 1),
    )
    return _layer(rule)


# ------------------------------------------------------------------------- convolution


def _sizes(value: Any, n: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * n
    return tuple(value) * n if len(value) == 1 else tuple(value)


def _operator(call: Call) -> Convolution:
    return convolution_of(call.node, len(call.metas[1].shape) - 2)


def convolution_of(node: Node, n: int) -> Convolution:
    """The `Convolution` in n dimensions that a node stands for, whichever overload it is."""
    name = node.op._schema.name.removeprefix("aten::")
    get = node.argument
    if name == "convolution":
        stride, padding, dilation = get(3, "stride"), get(4, "padding"), get(5, "dilation")
        transposed, extra, groups = get(6, "transposed"), get(7, "output_padding"), get(8, "groups")
        return Convolution(
            _sizes(stride, n), _sizes(padding, n), _sizes(dilation, n), transposed,
            _sizes(extra, n), groups,
        )  # fmt: skip
    stride, padding = _sizes(get(3, "stride", 1), n), get(4, "padding", 0)
    if name.startswith("conv_transpose"):
        return Convolution(
            stride, _sizes(padding, n), _sizes(get(7, "dilation", 1), n), True,
            _sizes(get(5, "output_padding", 0), n), get(6, "groups", 1),
        )  # fmt: skip
    dilation, groups = _sizes(get(5, "dilation", 1), n), get(6, "groups", 1)
    return Convolution(stride, _sizes(padding, n), dilation, False, (), groups)


def _unbatched(call: Call) -> bool:
    return len(call.metas[0].shape) == len(call.metas[1].shape) - 1


def _convolution() -> Rule:
    """y = K(θ, x) + b; an example without a batch axis gets one."""

    def batched(call: Call, t: Tensor) -> Tensor:
        return t[None] if _unbatched(call) else t

    def back(call: Call, t: Tensor) -> Tensor:
        return t[0] if _unbatched(call) else t

    def product(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return back(call, _operator(call).forward(weight, batched(call, x), bias))

    def x_shape(call: Call) -> tuple[int, ...]:
        shape = call.metas[0].shape
        return (1, *shape) if _unbatched(call) else shape

    def pull(call: Call, y: Tensor, wanted: Sequence[bool]) -> Tensors:
        mask = (wanted[0], wanted[1], len(wanted) > 2 and wanted[2])
        x, weight = call.inputs[:2]
        grads = _operator(call).adjoints(
            None if x is None else batched(call, x), weight, batched(call, y),
            x_shape(call), call.metas[1].shape, mask,
        )  # fmt: skip
        laid = (back(call, grads[0]) if mask[0] else None, *grads[1:])
        return tuple(g if m else None for g, m in zip(laid, mask, strict=True))[: len(wanted)]

    def adjoint0(call: Call, weight: Tensor, y: Tensor) -> Tensor:
        x = call.inputs[0]
        like = None if x is None else batched(call, x)
        return back(call, _operator(call).transpose(weight, batched(call, y), x_shape(call), like))

    def adjoint1(call: Call, x: Tensor, y: Tensor) -> Tensor:
        shape = call.metas[1].shape
        return _operator(call).weight_adjoint(batched(call, x), batched(call, y), shape)

    def forward(call: Call) -> tuple[Tensor, None]:
        x, weight = call.inputs[0], call.inputs[1]
        assert x is not None and weight is not None
        return product(call, x, weight, (*call.inputs, None)[2]), None

    def offset(call: Call, b: Tensor) -> Tensor:
        return b.reshape(-1, *(1,) * (len(call.metas[1].shape) - 2))

    rule = bilinear(
        product, adjoint0, adjoint1, forward=forward, backward=pull, offset=offset,
        seeded=fold(0, lambda call: not _unbatched(call)),
    )  # fmt: skip
    return _layer(rule)


# ------------------------------------------------------------------- locally connected


def _locally_connected() -> Rule:
    """y = K(θ, x), a filter of its own at every place."""

    def operator(call: Call) -> LocallyConnected:
        stride, padding, dilation = (
            call.argument(i, name) for i, name in ((2, "stride"), (3, "padding"), (4, "dilation"))
        )
        return LocallyConnected(tuple(stride), tuple(padding), tuple(dilation))

    def product(call: Call, x: Tensor, weight: Tensor) -> Tensor:
        return operator(call).forward(weight, x)

    rule = bilinear(
        product=product,
        adjoint0=lambda call, weight, y: operator(call).transpose(weight, y, call.metas[0].shape),
        adjoint1=lambda call, x, y: operator(call).weight_adjoint(x, y, call.metas[1].shape),
        forward=lambda call: (product(call, call.value(0), call.value(1)), None),
        seeded=fold(0, lambda call: True),
    )
    return _layer(rule)


# --------------------------------------------------------------------- matrix products


def _matmul_adjoint0(call: Call, b: Tensor, y: Tensor) -> Tensor:
    """⟨a b, y⟩ = ⟨a, y bᵀ⟩ with every vector form and broadcasting of `matmul`."""
    a_shape = call.metas[0].shape
    if len(a_shape) == 1 and b.dim() == 1:
        return y * b
    if len(a_shape) == 1:
        return sum_to((b @ y.unsqueeze(-1)).squeeze(-1), a_shape)
    if b.dim() == 1:
        return sum_to(y.unsqueeze(-1) * b, a_shape)
    return sum_to(times(y, b.transpose(-2, -1)), a_shape)


def _matmul_adjoint1(call: Call, a: Tensor, y: Tensor) -> Tensor:
    """⟨a b, y⟩ = ⟨b, aᵀ y⟩."""
    b_shape = call.metas[1].shape
    if a.dim() == 1 and len(b_shape) == 1:
        return y * a
    if a.dim() == 1:
        return sum_to(a.unsqueeze(-1) * y.unsqueeze(-2), b_shape)
    if len(b_shape) == 1:
        return sum_to((a.transpose(-2, -1) @ y.unsqueeze(-1)).squeeze(-1), b_shape)
    if len(b_shape) == 2 and a.dim() > 2:  # fold the batch into one product
        return a.reshape(-1, a.shape[-1]).t() @ y.reshape(-1, y.shape[-1])
    return sum_to(a.transpose(-2, -1) @ y, b_shape)


def _matmul() -> Rule:
    """y = a b; with a weight on the right this is a dense layer, and is counted as one."""

    def by_weight(call: Call) -> bool:
        return len(call.metas[0].shape) > 1 and len(call.metas[1].shape) == 2

    return bilinear(
        lambda call, a, b: times(a, b), _matmul_adjoint0, _matmul_adjoint1,
        seeded=fold(0, by_weight), layer=True,
    )  # fmt: skip


def _addmm() -> Rule:
    """y = β c + α a b (addmm, baddbmm, addmv): inputs (c, a, b), reordered to (a, b, c)."""
    product = _matmul()

    def scaled(call: Call, name: str) -> float:
        return call.node.kwargs.get(name, 1)

    def turned(call: Call) -> Call:
        order = (1, 2)
        return Call(
            call.node,
            tuple(call.inputs[i] for i in order),
            tuple(call.metas[i] for i in order),
        )

    def backward(call: Call, y: Tensor, wanted: Sequence[bool]) -> Tensors:
        scaled_y = y * scaled(call, "alpha") if scaled(call, "alpha") != 1 else y
        a, b = product.backward(turned(call), scaled_y, wanted[1:])
        c = broadcast_adjoint(call, 0, y * scaled(call, "beta")) if wanted[0] else None
        return c, a, b

    def tangent(call: Call, q: Tensors) -> Tensor | None:
        out = product.tangent(turned(call), q[1:])
        out = out * scaled(call, "alpha") if out is not None else None
        if q[0] is None:
            return out
        shift = q[0] * scaled(call, "beta")
        return out + shift if out is not None else shift.expand(_matmul_shape(call))

    def curvature(call: Call, xi: Tensor, q: Tensors, wanted: Sequence[bool]) -> Tensors:
        assert product.curvature is not None
        xi = xi * scaled(call, "alpha") if scaled(call, "alpha") != 1 else xi
        return None, *product.curvature(turned(call), xi, q[1:], wanted[1:])

    return Rule(
        structure=product.structure,
        forward=product.forward,
        backward=backward,
        tangent=tangent,
        curvature=curvature,
        reads_inputs=lambda live: (False, live[2], live[1]),
        curves=lambda i, j: (i, j) in ((1, 2), (2, 1)),
        seeded=fold(1, lambda call: len(call.metas[1].shape) == len(call.metas[2].shape) == 2),
        layer=(1, 2),
    )


def _matmul_shape(call: Call) -> tuple[int, ...]:
    a, b = call.metas[1].shape, call.metas[2].shape
    return (*a[:-1], b[-1]) if len(b) > 1 else a[:-1]


# ------------------------------------------------------------------------------ gating


def _mul() -> Rule:
    """y = a ⊙ b with broadcasting, or a scalar multiple, which is linear."""

    def adjoint(position: int):
        return lambda call, other, y: broadcast_adjoint(call, position, y * other).to(
            call.metas[position].dtype
        )

    two = bilinear(lambda call, a, b: a * b, adjoint(0), adjoint(1), per_example=aligned())

    def scalar(call: Call) -> Any:
        return next(arg for arg in call.node.args if not isinstance(arg, Ref))

    def fused(
        call: Call, y: Tensor | None, q: Tensors, tangent: bool, bend: Sequence[bool],
        pulled: Sequence[bool],
    ) -> Gate | None:  # fmt: skip
        """(t, sₐ, s_b, ξₐ, ξ_b) by one kernel, without broadcasting; None where there is none."""
        left, right = call.metas
        if left.device.type != "cuda" or left.dtype is not right.dtype:
            return None
        if tuple(left.shape) != tuple(right.shape):
            return None
        bent = (bend[0] and q[1] is not None, bend[1] and q[0] is not None)
        reads_a = (tangent and q[1] is not None) or pulled[1]
        reads_b = (tangent and q[0] is not None) or pulled[0]
        values = (call.value(0) if reads_a else None, call.value(1) if reads_b else None)
        return fused_gate((*values, *q, y), (tangent, *bent, *pulled))

    def at_once(
        call: Call, xi: Tensor, q: Tensors, wanted: Sequence[bool], need: bool,
        pulled: Sequence[bool],
    ) -> Three | None:  # fmt: skip
        found = fused(call, xi, q, need, wanted, pulled) if len(call.inputs) == 2 else None
        return None if found is None else (found[0], found[1:3], found[3:])

    def backward(call: Call, y: Tensor, wanted: Sequence[bool]) -> Tensors:
        if len(call.inputs) == 1:
            return (y * scalar(call),)
        if all(wanted):
            found = fused(call, y, (None, None), False, (False, False), wanted)
            if found is not None:
                return found[3:]
        return two.backward(call, y, wanted)

    def tangent(call: Call, q: Tensors) -> Any:
        if len(call.inputs) == 1:
            return q[0] * scalar(call)  # type: ignore[operator]
        return two.tangent(call, q)

    def curvature(call: Call, xi: Tensor, q: Tensors, wanted: Sequence[bool]) -> Tensors:
        if len(call.inputs) == 1:
            return (None,)
        assert two.curvature is not None
        return two.curvature(call, xi, q, wanted)

    def reads_inputs(live: Sequence[bool]) -> Sequence[bool]:
        return (False,) if len(live) == 1 else (live[1], live[0])

    return replace(
        two, backward=backward, tangent=tangent, curvature=curvature, reads_inputs=reads_inputs,
        at_once=at_once, light=True,
    )  # fmt: skip


def _einsum() -> Rule:
    """y = einsum("a,b->c", u, w): the adjoint in one operand is an einsum with the other."""

    fallback = generic()

    def plain(call: Call) -> bool:
        equation = str(call.argument(0, "equation"))
        return len(call.inputs) == 2 == len(einsum_parts(equation)[0]) and is_plain(equation)

    def product(call: Call, a: Tensor, b: Tensor) -> Tensor:
        return torch.einsum(call.argument(0, "equation"), a, b)

    def adjoint(position: int):
        def pull(call: Call, other: Tensor, y: Tensor) -> Tensor:
            shape = call.metas[position].shape
            return einsum_adjoint(str(call.argument(0, "equation")), position, shape, [other], y)

        return pull

    two = bilinear(product, adjoint(0), adjoint(1), layer=True)

    def pick(call: Call) -> Rule:
        return two if plain(call) else fallback

    return Rule(
        structure=fallback.structure,
        forward=two.forward,
        backward=lambda call, y, wanted: pick(call).backward(call, y, wanted),
        tangent=lambda call, q: pick(call).tangent(call, q),
        tangent_curvature=lambda call, xi, q, wanted, need: pick(call).both(
            call, xi, q, wanted, need
        ),
        layer=two.layer,
    )


def rules() -> Iterator[tuple[str, Rule]]:
    dense, convolution, matmul, addmm, gate = (
        _linear(), _convolution(), _matmul(), _addmm(), _mul(),
    )  # fmt: skip
    table = {
        dense: ["linear.default"],
        convolution: [
            "conv1d.default", "conv2d.default", "conv3d.default",
            "convolution.default",
            "conv_transpose1d.default", "conv_transpose2d.input", "conv_transpose3d.input",
        ],
        matmul: ["matmul.default", "mm.default", "bmm.default", "mv.default", "dot.default"],
        addmm: ["addmm.default", "baddbmm.default", "addmv.default"],
        gate: ["mul.Tensor"],
        _einsum(): ["einsum.default"],
    }  # fmt: skip
    yield from named(table.items())
    yield "locally_connected.default", _locally_connected()
