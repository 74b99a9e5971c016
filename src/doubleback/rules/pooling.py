"""Pooling and resampling. Averages and interpolation are linear; a maximum keeps its indices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..operators import AveragePool
from .seeded import fold
from .structures import linear
from .table import Call, Rule, Structure, Tensors, alone, overload, tangent_of

aten = torch.ops.aten


def _max_pool(n: int) -> Rule:
    """y = u at the index of each window's maximum: a gather by the indices of the forward sweep."""
    pool = {1: aten.max_pool2d_with_indices, 2: aten.max_pool2d_with_indices,
            3: aten.max_pool3d_with_indices}[n]  # fmt: skip

    def options(call: Call) -> list[Any]:
        def sizes(value: Any) -> list[int]:
            items = [value] if isinstance(value, int) else list(value)
            return items * n if len(items) == 1 else items

        kernel = sizes(call.argument(1, "kernel_size"))
        stride = call.argument(2, "stride", ()) or kernel
        found = [kernel, sizes(stride), sizes(call.argument(3, "padding", 0)),
                 sizes(call.argument(4, "dilation", 1))]  # fmt: skip
        if n == 1:  # a row of height one
            found = [[fill, *part] for fill, part in zip((1, 1, 0, 1), found, strict=True)]
        return [*found, call.argument(5, "ceil_mode", False)]

    def forward(call: Call) -> tuple[Any, Tensor]:
        x = call.inputs[0]
        assert x is not None
        y, index = pool(x.unsqueeze(-2) if n == 1 else x, *options(call))
        y = y.squeeze(-2) if n == 1 else y
        saved = index.squeeze(-2) if n == 1 else index
        if call.node.many:
            return (y, saved), saved
        return y, saved

    return _by_indices(forward, spatial=n)


def _adaptive_max_pool(n: int) -> Rule:
    def forward(call: Call) -> tuple[Any, Tensor]:
        y, index = call.apply(call.inputs)
        return (y, index), index

    return _by_indices(forward, spatial=n)


def _images(n: int) -> Callable[[Call], bool]:
    """Whether the input has a batch and a channel axis before its n spatial ones."""
    return lambda call: len(call.metas[0].shape) == n + 2


def _by_indices(forward: Any, spatial: int) -> Rule:
    """q_y = q[index]; ξ_u scatters back; indices count inside each spatial plane."""

    def first(call: Call, y: Any) -> Tensor:
        return y[0] if call.node.many else y

    def order(t: Tensor) -> tuple[list[int], list[int], int]:
        """A permutation under which t is contiguous with its spatial axes side by side, its
        inverse, and the first spatial axis there: nothing is copied channels-last either."""
        n = t.dim()
        dims = list(range(n))
        if t.is_contiguous() or n < spatial + 2:
            return dims, dims, n - spatial
        channel = n - spatial - 1
        there = [*dims[:channel], *dims[channel + 1 :], channel]
        back = [there.index(i) for i in dims]
        return there, back, channel

    def planes(t: Tensor, there: Sequence[int], axis: int) -> Tensor:
        return t.permute(list(there)).flatten(axis, axis + spatial - 1)

    def backward(call: Call, y: Any, wanted: Sequence[bool]) -> Tensors:
        y, index = first(call, y), call.saved
        there, back, axis = order(index)
        shape = [call.metas[0].shape[i] for i in there]
        size = 1
        for s in shape[axis : axis + spatial]:
            size *= s
        zero = y.new_zeros(*shape[:axis], size, *shape[axis + spatial :])
        flat = zero.scatter_add(axis, planes(index, there, axis), planes(y, there, axis))
        return (flat.reshape(shape).permute(back),)

    def tangent(call: Call, q: Tensors) -> Any:
        t, index = q[0], call.saved
        assert t is not None
        there, back, axis = order(index)
        out = planes(t, there, axis).gather(axis, planes(index, there, axis))
        out = out.reshape([index.shape[i] for i in there]).permute(back)
        return (out, None) if call.node.many else out

    return linear(
        backward=backward, tangent=tangent, forward=forward,
        structure=Structure.PIECEWISE_LINEAR, per_example=alone(where=_images(spatial)),
    )  # fmt: skip


def _average_pool(n: int) -> Rule:
    """y = the mean of each window."""

    def operator(call: Call) -> AveragePool:
        def sizes(value: Any) -> tuple[int, ...]:
            items = (value,) if isinstance(value, int) else tuple(value)
            return items * n if len(items) == 1 else items

        get = call.argument
        return AveragePool(
            sizes(get(1, "kernel_size")), sizes(get(2, "stride", ())), sizes(get(3, "padding", 0)),
            get(4, "ceil_mode", False), get(5, "count_include_pad", True),
            get(6, "divisor_override"),
        )  # fmt: skip

    rule = linear(
        lambda call, y: operator(call).transpose(None, y, call.metas[0].shape),
        tangent=lambda call, q: operator(call).forward(None, tangent_of(q)),
        forward=lambda call: (operator(call).forward(None, call.value(0)), None),
    )
    return replace(rule, seeded=fold(0, _images(n)))


def rules() -> Iterator[tuple[Any, Rule]]:
    averages = {
        1: ["adaptive_avg_pool1d.default", "upsample_nearest1d.vec", "upsample_nearest1d.default",
            "_upsample_nearest_exact1d.vec", "upsample_linear1d.vec", "upsample_linear1d.default"],
        2: ["adaptive_avg_pool2d.default", "_adaptive_avg_pool2d.default",
            "upsample_nearest2d.vec", "upsample_nearest2d.default",
            "_upsample_nearest_exact2d.vec", "upsample_bilinear2d.vec",
            "upsample_bilinear2d.default", "upsample_bicubic2d.vec", "upsample_bicubic2d.default",
            "_upsample_bilinear2d_aa.vec", "_upsample_bicubic2d_aa.vec"],
        3: ["adaptive_avg_pool3d.default", "_adaptive_avg_pool3d.default",
            "upsample_nearest3d.vec", "upsample_nearest3d.default",
            "_upsample_nearest_exact3d.vec", "upsample_trilinear3d.vec",
            "upsample_trilinear3d.default"],
    }  # fmt: skip
    maxima = {
        1: ["max_pool1d.default"],
        2: ["max_pool2d.default", "max_pool2d_with_indices.default"],
        3: ["max_pool3d.default", "max_pool3d_with_indices.default"],
    }
    table: list[tuple[Rule, list[str]]] = [
        (linear(per_example=alone(where=_images(n))), names) for n, names in averages.items()
    ]
    table += [(_max_pool(n), names) for n, names in maxima.items()]
    table += [(_average_pool(n), [f"avg_pool{n}d.default"]) for n in (1, 2, 3)]
    table += [(_adaptive_max_pool(n), [f"adaptive_max_pool{n}d.default"]) for n in (1, 2, 3)]
    for rule, names in table:
        for name in names:
            op = overload(name)
            if op is not None:
                yield op, rule
