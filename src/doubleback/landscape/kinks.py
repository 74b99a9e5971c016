"""Where piecewise linear operators bend: thresholds of coordinates, rivals of a maximum.

A *kink* is one node; a *unit* one coordinate of its output; its *region* a small integer that is
constant on a piece: how many thresholds lie below the input, or which entry wins the maximum.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..graph import Node
from ..rules import Call

aten = torch.ops.aten


@dataclass(frozen=True)
class Thresholds:
    """g bends where its input crosses one of these numbers (ReLU: 0)."""

    at: tuple[float, ...]


@dataclass(frozen=True)
class Rivals:
    """y = max over the last axis of `candidates(inputs)`, of shape (*output, W); `sign` −1: min."""

    candidates: Callable[[Sequence[Tensor]], Tensor]
    sign: int = 1


Kink = Thresholds | Rivals


def find_kink(call: Call) -> Kink | None:
    """The bends of one node, or None where its operator is no kink that is known here."""
    make = _TABLE.get(call.node.op)
    return None if make is None else make(call)


def layer_of(node: Node, producers: Mapping[int, Node], leaves: Mapping[int, str]) -> str:
    """The name under which the units of a kink are reported: the module that made its input, or
    the parameter that is its input."""
    value = node.inputs[0]
    producer = producers.get(value)
    if producer is None:
        return leaves.get(value, "input")
    return producer.module or producer.name


# ------------------------------------------------------------------------- coordinate-wise


def _fixed(*at: float) -> Callable[[Call], Kink]:
    return lambda call: Thresholds(at)


def _hardtanh(call: Call) -> Kink:
    return Thresholds(
        (float(call.argument(1, "min_val", -1)), float(call.argument(2, "max_val", 1)))
    )


def _clamp(call: Call) -> Kink:
    name = call.node.op._schema.name
    low = call.argument(1, "min") if name != "aten::clamp_max" else None
    high = call.argument(1 if name == "aten::clamp_max" else 2, "max")
    if name == "aten::clamp_min":
        high = None
    return Thresholds(tuple(sorted(float(b) for b in (low, high) if b is not None)))


# -------------------------------------------------------------------------------- maxima


def _extremum(sign: int) -> Callable[[Call], Kink]:
    def pair(inputs: Sequence[Tensor]) -> Tensor:
        return torch.stack(torch.broadcast_tensors(*inputs), -1)

    return lambda call: Rivals(pair, sign)


def _along_axes(sign: int) -> Callable[[Call], Kink]:
    def make(call: Call) -> Kink:
        n = len(call.metas[0].shape)
        dim = call.argument(1, "dim", ())
        axes = [d % n for d in ([dim] if isinstance(dim, int) else dim)] or list(range(n))
        kept = [i for i in range(n) if i not in axes]

        def last(inputs: Sequence[Tensor]) -> Tensor:
            return inputs[0].permute(*kept, *axes).flatten(len(kept)).reshape(*call.shape, -1)

        return Rivals(last, sign)

    return make


def _max_pool(n: int) -> Callable[[Call], Kink]:
    """Windows of ⌊stride·i − padding + dilation·k⌋; places outside repeat the window's first."""

    def sizes(value: int | Sequence[int]) -> list[int]:
        items = [value] if isinstance(value, int) else list(value)
        return items * n if len(items) == 1 else items

    def make(call: Call) -> Kink:
        kernel = sizes(call.argument(1, "kernel_size"))
        stride = sizes(call.argument(2, "stride", ()) or kernel)
        padding = sizes(call.argument(3, "padding", 0))
        dilation = sizes(call.argument(4, "dilation", 1))
        places = [
            torch.arange(out)[:, None] * stride[d] - padding[d]
            + torch.arange(kernel[d])[None, :] * dilation[d]
            for d, out in enumerate(call.shape[-n:])
        ]  # fmt: skip
        return _windows(call, places)

    return make


def _adaptive_max_pool(n: int) -> Callable[[Call], Kink]:
    """Window i runs from ⌊i·in/out⌋ to ⌈(i+1)·in/out⌉."""

    def make(call: Call) -> Kink:
        places = []
        for out, size in zip(call.shape[-n:], call.metas[0].shape[-n:], strict=True):
            spans = [(i * size // out, -(-(i + 1) * size // out)) for i in range(out)]
            width = max(b - a for a, b in spans)
            places.append(
                torch.tensor([[a + k if a + k < b else -1 for k in range(width)] for a, b in spans])
            )
        return _windows(call, places)

    return make


def _windows(call: Call, places: Sequence[Tensor]) -> Kink:
    """places[d]: (out_d, k_d), positions along spatial axis d, outside the range where padded."""
    n = len(places)
    space = call.metas[0].shape[-n:]
    outs, widths = [p.shape[0] for p in places], [p.shape[1] for p in places]
    flat, valid = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1, dtype=torch.bool)
    for p, size in zip(places, space, strict=True):
        inside = (p >= 0) & (p < size)
        flat = (flat[:, None, :, None] * size + p[None, :, None, :]).flatten(0, 1).flatten(1)
        valid = (valid[:, None, :, None] & inside[None, :, None, :]).flatten(0, 1).flatten(1)
    assert flat.shape == (_product(outs), _product(widths))
    first = flat.gather(1, valid.int().argmax(1, keepdim=True))
    index = torch.where(valid, flat, first)

    def gather(inputs: Sequence[Tensor]) -> Tensor:
        planes = inputs[0].flatten(-n)
        return planes[..., index].reshape(*call.shape, -1)

    return Rivals(gather)


def _product(items: Sequence[int]) -> int:
    return list(itertools.accumulate(items, lambda a, b: a * b))[-1]


_TABLE: dict = {
    aten.relu.default: _fixed(0.0),
    aten.leaky_relu.default: _fixed(0.0),
    aten.abs.default: _fixed(0.0),
    aten.relu6.default: _fixed(0.0, 6.0),
    aten.hardsigmoid.default: _fixed(-3.0, 3.0),
    aten.hardtanh.default: _hardtanh,
    aten.clamp.default: _clamp,
    aten.clamp_min.default: _clamp,
    aten.clamp_max.default: _clamp,
    aten.rrelu.default: _fixed(0.0),
    aten.maximum.default: _extremum(1),
    aten.minimum.default: _extremum(-1),
    aten.amax.default: _along_axes(1),
    aten.amin.default: _along_axes(-1),
    aten.max.dim: _along_axes(1),
    aten.min.dim: _along_axes(-1),
    aten.max_pool1d.default: _max_pool(1),
    aten.max_pool2d.default: _max_pool(2),
    aten.max_pool3d.default: _max_pool(3),
    aten.max_pool2d_with_indices.default: _max_pool(2),
    aten.max_pool3d_with_indices.default: _max_pool(3),
    aten.adaptive_max_pool1d.default: _adaptive_max_pool(1),
    aten.adaptive_max_pool2d.default: _adaptive_max_pool(2),
    aten.adaptive_max_pool3d.default: _adaptive_max_pool(3),
}
