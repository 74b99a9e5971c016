"""A network captured for single examples, in float64, ready to be followed along a path; and what
moves along the path, and how.

The net is captured on one example and every node is run under `vmap`: any number of rows (pieces of
the path) goes through it, whatever batch size its `view`s were written for. Batch norm with running
statistics and PReLU become the products, sums and ReLU they are made of.

A *kink* is one node that bends; a *unit* one coordinate of its output; its *region* a small integer
that is constant on a piece: how many thresholds lie below the input, or which entry wins the
maximum. On a piece every value is a polynomial in the path's coordinate: linear operators and kinks
keep the degree, a product adds degrees. Anything else that moves is refused, with its line.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import BatchNorm
from ..capture import find_graph
from ..errors import InputError, NotPiecewiseLinearError, OutputChoiceError
from ..graph import Graph, Meta, Node, Ref, draws, map_refs
from ..operators import is_plain
from ..rules import Call, Rule, Structure, find_rule, vmap_nested

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Network:
    """The captured network of one example.

    x, out: value numbers of input and output; leaves: parameters, buffers and constants by value
    number, in float64; names: value number by qualified name; active: values that depend on x.
    """

    graph: Graph
    nodes: tuple[Node, ...]
    rules: Mapping[int, Rule]
    x: int
    out: int
    leaves: Mapping[int, Tensor]
    names: Mapping[str, int]
    active: frozenset[int]

    def call(self, node: Node, inputs: Sequence[Any], out: Any = None, saved: Any = None) -> Call:
        """The node as its rule sees it, on these tensor inputs."""
        metas = self.graph.values
        return Call(
            node, tuple(inputs), tuple(metas[v] for v in node.inputs),  # type: ignore[misc]
            out, saved, self.graph.shape(node.outputs[0]),
        )  # fmt: skip

    def forward(self, node: Node, inputs: Sequence[Any]) -> Call:
        """Run the node; `out` and `saved` of the returned call are what its derivatives read."""
        call = self.call(node, inputs)
        call.out, call.saved = self.rules[node.index].forward(call)
        return call

    def differentiable(self, value: int) -> bool:
        meta = self.graph.values[value]
        return meta is not None and meta.dtype.is_floating_point


def mapped(fn: Callable[..., Any], rows: Any, shared: Any = None) -> Any:
    """fn(rows, shared) with every tensor in `rows` cut along its first axis."""
    return vmap_nested(lambda part: fn(part, shared), rows)


# --------------------------------------------------------------------------- construction


def make_network(net: nn.Module, x: Tensor) -> Network:
    """Capture a float64 copy of `net` on the first example of x, and check that it treats
    examples one by one."""
    check_input(x)
    _refuse_coupled_layers(net)
    twin = copy.deepcopy(net).double().cpu()
    one = x[:1].detach().double().cpu()
    whole, inputs = find_graph(twin, None, (one,), {})
    graph = lower(whole)
    given = [(t, v) for t, v in zip(inputs, graph.inputs, strict=True) if v is not None]
    leaves = {value: tensor.detach() for tensor, value in given if tensor is not one}
    leaves |= {
        value: tensor.double() if tensor.is_floating_point() else tensor
        for value, tensor in graph.constants.items()
    }
    target = _single(graph)
    source = next((value for tensor, value in given if tensor is one), None)
    if source is None:
        raise InputError("the network does not read x")
    active = {source}
    for node in graph.nodes:
        if any(v in active for v in node.inputs):
            active.update(node.outputs)
    nodes = _needed(graph, target)
    _refuse_randomness(nodes)
    state = {id(t): name for name, t in (*twin.named_parameters(), *twin.named_buffers())}
    names = {state[id(t)]: value for t, value in given if id(t) in state}
    network = Network(
        graph, nodes, {n.index: find_rule(n.op) for n in nodes}, source, target, leaves, names,
        frozenset(active),
    )  # fmt: skip
    _check_examples_apart(network, twin, x[:8].detach().double().cpu())
    return network


def refreshed(network: Network, net: nn.Module) -> Network:
    """The same network with the parameters that `net` has now: training goes on, graphs stay."""
    state = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    fresh = {
        value: state[name].detach().to("cpu", network.leaves[value].dtype, copy=True)
        for name, value in network.names.items()
    }
    return replace(network, leaves={**network.leaves, **fresh})


def leaky(network: Network, slope: float) -> Network | None:
    """The same network with leaky ReLUs of this slope in place of its ReLUs; None where it has
    none."""
    nodes = tuple(
        replace(node, op=aten.leaky_relu.default, args=(*node.args[:1], slope))
        if node.op is aten.relu.default
        else node
        for node in network.nodes
    )
    if nodes == network.nodes:
        return None
    rules = {node.index: find_rule(node.op) for node in nodes}
    return replace(network, nodes=nodes, rules=rules)


def check_input(x: Any) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 1 or x.shape[0] < 1:
        shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"x must be a floating-point batch of shape (M, …), M ≥ 1, not {shape}")


def _single(graph: Graph) -> int:
    tensors = [v for v in graph.targets if isinstance(v, int)]
    if len(tensors) != 1:
        raise OutputChoiceError(
            f"the network returns {len(tensors)} tensors; wrap it so that it returns one"
        )
    return tensors[0]


def _needed(graph: Graph, target: int) -> tuple[Node, ...]:
    wanted, kept = {target}, []
    for node in reversed(graph.nodes):
        if any(v in wanted for v in node.outputs):
            kept.append(node)
            wanted.update(node.inputs)
    return tuple(reversed(kept))


def _refuse_coupled_layers(net: nn.Module) -> None:
    for name, module in net.named_modules():
        if not isinstance(module, BatchNorm):
            continue
        if module.running_mean is None:
            remedy = "build it with track_running_stats=True, train, and call net.eval()"
        elif module.training:
            remedy = "call net.eval() first"
        else:
            continue
        raise InputError(
            f"{type(module).__name__} '{name}' couples the examples of a batch by its statistics, "
            f"so that one example's landscape depends on the others; {remedy}"
        )


def _refuse_randomness(nodes: Iterable[Node]) -> None:
    for node in nodes:
        if node.op is aten.native_dropout.default or draws(node.op):
            raise InputError(f"{node.op} at {node.source} is random; call net.eval() first")


def _check_examples_apart(network: Network, twin: nn.Module, x: Tensor) -> None:
    """One by one or together: an example's output must be the same."""
    with torch.no_grad():
        together = twin(x)
    values = run_fixed(network, {})
    values[network.x] = x.unsqueeze(1)
    for node in network.nodes:
        if node.outputs[0] in network.active:
            run_rows(network, node, values)
    alone = values[network.out]
    same = together.shape[:1] == x.shape[:1] and torch.allclose(
        together.reshape(len(x), -1), alone.reshape(len(x), -1), rtol=1e-9, atol=1e-9
    )
    if not same:
        raise InputError(
            "the network couples the examples of a batch: the output of an example changes with "
            f"its companions (output {tuple(together.shape)} for input {tuple(x.shape)}); a "
            "landscape is defined for one example at a time"
        )


def run_fixed(network: Network, moving: Mapping[int, Any]) -> dict[int, Tensor]:
    """Leaves and whatever follows from them alone, except what `moving` leaves reach."""
    values = {v: t for v, t in network.leaves.items() if v not in moving}
    for node in network.nodes:
        if all(v in values for v in node.inputs):
            out = network.forward(node, [values[v] for v in node.inputs]).out
            values.update(zip(node.outputs, out if node.many else (out,), strict=True))
    return values


def run_rows(network: Network, node: Node, values: dict[int, Tensor]) -> None:
    """One node on rows (values that depend on x) and shared values (all others)."""
    rows = [values[v] if v in network.active else None for v in node.inputs]
    shared = [None if v in network.active else values[v] for v in node.inputs]

    def one(rows: Sequence, shared: Sequence) -> Any:
        inputs = [a if a is not None else b for a, b in zip(rows, shared, strict=True)]
        out = network.forward(node, inputs).out
        return tuple(out) if node.many else (out,)

    values.update(zip(node.outputs, mapped(one, rows, shared), strict=True))


# -------------------------------------------------------------------------------- lowering

_SYNONYMS = {aten.max.other: aten.maximum.default, aten.min.other: aten.minimum.default}


def lower(graph: Graph) -> Graph:
    """Batch norm by running statistics and PReLU as elementary nodes; `zeros_like` and its kind,
    which read a shape and no value, as constants.

    y = ((x − μ) r) w + b with r = (var + ε)^(−1/2);   y = x⁺ + w (x − x⁺).
    """
    into = _Lowered(list(graph.values), [], dict(graph.constants))
    for node in graph.nodes:
        if _reads_shape_only(node):
            blank = into.blank(Ref(node.inputs[0]), "cpu")
            args = map_refs(node.args, lambda _, blank=blank: blank)
            into.constants[node.outputs[0]] = node.op(*args, **node.kwargs)
        elif node.op is aten._native_batch_norm_legit_no_training.default:
            _batch_norm(node, into)
        elif node.op is aten.prelu.default:
            _prelu(node, into)
        else:
            op = _SYNONYMS.get(node.op, node.op)
            into.nodes.append(replace(node, index=len(into.nodes), op=op))
    return replace(
        graph, nodes=tuple(into.nodes), values=tuple(into.values), constants=into.constants
    )


@dataclass
class _Lowered:
    """A graph that is being written anew, with more and simpler nodes."""

    values: list[Meta | None]
    nodes: list[Node]
    constants: dict[int, Tensor]

    def blank(self, ref: Ref, device: str = "meta") -> Tensor:
        meta = self.values[ref.index]
        assert meta is not None
        return torch.zeros(meta.shape, dtype=meta.dtype, device=device)

    def emit(self, of: Node, op: Any, *args: Any, last: bool = False) -> Ref:
        """Append op(*args) in place of the node `of`; the `last` part gives its output."""
        if last:
            value = of.outputs[0]
        else:
            result = op(*map_refs(args, self.blank))
            self.values.append(Meta(tuple(result.shape), result.dtype, torch.device("cpu")))
            value = len(self.values) - 1
        inputs = tuple(a.index for a in args if isinstance(a, Ref))
        self.nodes.append(
            Node(len(self.nodes), of.name, op, args, {}, inputs, (value,), False, of.source,
                 of.module)
        )  # fmt: skip
        return Ref(value)


def _reads_shape_only(node: Node) -> bool:
    name = node.op._schema.name.removeprefix("aten::")
    blank = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
    return name in blank and len(node.inputs) == 1


def _batch_norm(node: Node, into: _Lowered) -> None:
    x, weight, bias, mean, var, _, eps = node.args
    emit = partial(into.emit, node)
    shape = [-1, *(1,) * (into.blank(x).dim() - 2)]

    def lay(ref: Ref) -> Ref:
        return emit(aten.reshape.default, ref, shape)

    rate = emit(aten.rsqrt.default, emit(aten.add.Scalar, lay(var), eps))
    y = emit(aten.sub.Tensor, x, lay(mean))
    y = emit(aten.mul.Tensor, y, rate, last=weight is None and bias is None)
    if weight is not None:
        y = emit(aten.mul.Tensor, y, lay(weight), last=bias is None)
    if bias is not None:
        emit(aten.add.Tensor, y, lay(bias), last=True)


def _prelu(node: Node, into: _Lowered) -> None:
    x, weight = node.args
    emit, dims = partial(into.emit, node), into.blank(x).dim()
    spread = into.blank(weight).numel() > 1 and dims > 1
    laid = emit(aten.reshape.default, weight, [-1, *(1,) * (dims - 2)] if spread else [1])
    above = emit(aten.relu.default, x)
    below = emit(aten.mul.Tensor, emit(aten.sub.Tensor, x, above), laid)
    emit(aten.add.Tensor, above, below, last=True)


# ----------------------------------------------------------------------------------------- motion


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
    assert flat.shape == (math.prod(outs), math.prod(widths))
    first = flat.gather(1, valid.int().argmax(1, keepdim=True))
    index = torch.where(valid, flat, first)

    def gather(inputs: Sequence[Tensor]) -> Tensor:
        planes = inputs[0].flatten(-n)
        return planes[..., index].reshape(*call.shape, -1)

    return Rivals(gather)


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
        highest, kink = _degree(network, node, degree)
        if kink is not None:
            kinks[node.index] = kink
        for v in node.outputs:
            if not network.differentiable(v):
                discrete.add(v)
            elif highest > 0:
                degree[v] = highest
        if highest > MAX_DEGREE:
            raise NotPiecewiseLinearError(
                f"along this path {_name(node)} is a polynomial of degree {highest}, "
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
