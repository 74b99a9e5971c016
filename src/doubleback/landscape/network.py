"""A network captured for single examples, in float64, ready to be followed along a path.

The net is captured on one example and every node is run under `vmap`: any number of rows (pieces
of the path) goes through it, whatever batch size its `view`s were written for. Batch norm with
running statistics and PReLU become the products, sums and ReLU they are made of.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import BatchNorm, pytree
from ..capture import find_graph
from ..errors import InputError, OutputChoiceError
from ..graph import Graph, Meta, Node, Ref, draws, map_refs
from ..rules import Call, Rule, find_rule

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
    """fn(rows, shared) with every tensor in `rows` cut along its first axis; trees in, trees out.

    None is passed through on both sides. Without a tensor in `rows`, fn is called once.
    """
    leaves, spec = pytree.tree_flatten(rows)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if not places:
        return fn(rows, shared)
    form: list[Any] = []

    def one(*tensors: Tensor) -> tuple[Tensor, ...]:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        results, out_spec = pytree.tree_flatten(fn(pytree.tree_unflatten(filled, spec), shared))
        kept = [i for i, item in enumerate(results) if isinstance(item, Tensor)]
        form[:] = [out_spec, kept, len(results)]
        return tuple(results[i] for i in kept)

    found = torch.vmap(one)(*(leaves[i] for i in places))
    out_spec, kept, count = form
    results: list[Any] = [None] * count
    for place, tensor in zip(kept, found, strict=True):
        results[place] = tensor
    return pytree.tree_unflatten(results, out_spec)


# --------------------------------------------------------------------------- construction


def make_network(net: nn.Module, x: Tensor) -> Network:
    """Capture a float64 copy of `net` on the first example of x, and check that it treats
    examples one by one."""
    check_input(x)
    _refuse_coupled_layers(net)
    twin = copy.deepcopy(net).double().cpu()
    one = x[:1].detach().double().cpu()
    found, inputs = find_graph(twin, None, (one,), {})
    graph = lower(found)
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
