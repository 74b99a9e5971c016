"""What moves along a path, and how: where operators bend, and degrees of polynomials.

A *kink* is one node that bends; a *unit* one coordinate of its output; its *region* a small integer
that is constant on a piece: how many thresholds lie below the input, or which entry wins the
maximum. On a piece every value is a polynomial in the path's coordinate: linear operators and kinks
keep the degree, a product adds degrees. Anything else that moves is refused, with its line.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import NotPiecewiseLinearError
from ..graph import Node, Ref
from ..operators import is_plain
from ..rules import Call, Rule, Structure
from .network import Network

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


# ------------------------------------------------------------------------------- degrees

MAX_DEGREE = 12  # a monomial basis on [−1, 1] keeps twelve digits up to here

_PASSED = (aten.detach.default, torch.ops.doubleback.stop_gradient.default)


@dataclass(frozen=True, eq=False)
class Motion:
    """Degrees along one path.

    degree: of every moving value; slope: of ξ = J*v for constant v (0 where J does not move);
    kinks: by node, those whose input moves.
    """

    degree: Mapping[int, int]
    slope: int
    kinks: Mapping[int, Kink]

    def moves(self, node: Node) -> bool:
        return any(v in self.degree for v in node.inputs)


def factors(rule: Rule, node: Node) -> tuple[int, int] | None:
    """The two inputs whose product the node takes; None for any other node."""
    if node.op is aten.einsum.default:
        plain = len(node.inputs) == 2 and is_plain(str(node.args[0]))
        return (0, 1) if plain else None
    if rule.structure is not Structure.BILINEAR:
        return None
    slots = range(len(node.inputs))
    return next(((i, j) for i in slots for j in slots if i < j and rule.curves(i, j)), None)


def partner(rule: Rule, node: Node, slot: int) -> int | None:
    """The other factor of the product that an input enters, None where it is only added."""
    pair = factors(rule, node)
    if pair is None or slot not in pair:
        return None
    return pair[1] if slot == pair[0] else pair[0]


def find_motion(network: Network, leaves: Mapping[int, int]) -> Motion:
    """Degrees of everything that the moving `leaves` (value → degree) reach."""
    degree, kinks, discrete = dict(leaves), {}, set()
    for node in network.nodes:
        for v in node.inputs:
            if v in discrete:
                raise NotPiecewiseLinearError(
                    f"{_name(node)} reads indices that change along this path"
                )
        if not any(v in degree for v in node.inputs):
            continue
        found, kink = _degree(network, node, degree)
        if kink is not None:
            kinks[node.index] = kink
        for v in node.outputs:
            if not network.differentiable(v):
                discrete.add(v)
            elif found > 0:
                degree[v] = found
        if found > MAX_DEGREE:
            raise NotPiecewiseLinearError(
                f"along this path {_name(node)} is a polynomial of degree {found}, "
                f"beyond {MAX_DEGREE}; move the parameters of fewer layers at a time"
            )
    return Motion(degree, _cotangent_degree(network, degree), kinks)


def _degree(network: Network, node: Node, degree: Mapping[int, int]) -> tuple[int, Kink | None]:
    rule = network.rules[node.index]
    moving = [i for i, v in enumerate(node.inputs) if v in degree]
    top = max(degree[node.inputs[i]] for i in moving)
    pair = factors(rule, node)
    if node.op in _PASSED or rule.structure is Structure.LINEAR:
        return top, None
    if node.op is aten.threshold.default:
        raise NotPiecewiseLinearError(
            f"{_name(node)} jumps in its value, not only in its derivative; use relu or clamp"
        )
    kink = find_kink(network.call(node, [None] * len(node.inputs)))
    if kink is not None:
        return top, kink
    if pair is not None:
        return max(top, sum(degree.get(node.inputs[i], 0) for i in pair)), None
    if rule.structure is Structure.BILINEAR:
        return top, None  # the other factor is a number
    if node.op is aten.div.Tensor and moving == [0] and isinstance(node.args[0], Ref):
        return top, None
    if node.op in (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf):
        return top, None  # the mask is a Boolean: it cannot move
    raise NotPiecewiseLinearError(
        f"{_name(node)} is not piecewise linear (it is "
        f"{'smooth or general' if rule.structure.curved else rule.structure.value}), and its input "
        "moves along this path. Breakpoints exist for (leaky) ReLU, abs, clamp and max-pool nets: "
        "replace it, end the network before it (logits, not probabilities), or choose a path "
        "behind it"
    )


def _name(node: Node) -> str:
    """'aten.tanh.default at net.py:7: torch.tanh(x), in module fc'."""
    inside = f", in module '{node.module}'," if node.module else ""
    return f"{node.op} at {node.source}{inside}"


def _cotangent_degree(network: Network, degree: Mapping[int, int]) -> int:
    xi = {network.out: 0}
    for node in reversed(network.nodes):
        known = [xi[v] for v in node.outputs if v in xi]
        if not known or node.op in _PASSED:
            continue
        rule = network.rules[node.index]
        for slot, v in enumerate(node.inputs):
            if v not in network.active:
                continue
            other = partner(rule, node, slot)
            gain = 0 if other is None else degree.get(node.inputs[other], 0)
            xi[v] = max(xi.get(v, 0), max(known) + gain)
    return xi.get(network.x, 0)


def passes_through(node: Node) -> bool:
    """Whether the node hands on values and stops derivatives only."""
    return node.op in _PASSED
