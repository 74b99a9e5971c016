"""Flat graphs by Inductor, with the lifetimes that the sweeps mean.

Left to itself, Inductor computes a value where it is read and not where it is written down, if
that spares a pass: it then holds the inputs of a sum from sweep to sweep, in float32 where the
sum would be bfloat16. And it computes what a later sweep needs as soon as its inputs are there, in
the same kernel, and holds that. Training step by step meets neither, since forward and backward
are two graphs. Here all sweeps are one, so two things are said to Inductor: what one sweep hands
to another is held as it is, and what stands far apart is not fused.
"""

from __future__ import annotations

import logging
import math
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .. import _torch
from .._torch import FakeTensorMode, OpOverload, TracingContext, pytree, tracing
from ..counting import flop_registry
from ..graph import draws, memory_of
from ..kernels import AGAIN, BOUNDARY, opaque
from .straight_line import HANDED

aten = torch.ops.aten

opaque("held(Tensor t) -> Tensor", Tensor.clone, lambda t: t.new_empty_strided(t.shape, t.stride()))
HELD = torch.ops.doubleback.held.default


def hold(module: torch.fx.GraphModule, recompute: bool | None) -> None:
    """Mark what passes from one sweep to another, as little of it as can be, and
    take the marks of where sweeps begin out. recompute: see `shorten`.

    Marked as well is what an index picks from: picked from its inputs, which may be wider, each of
    them would be held.
    """
    _sink(module.graph)
    graph, sweeps = shorten(module.graph, recompute)
    module.graph = graph
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, Tensor) or is_view(node):
            continue
        if not value.is_floating_point() and value.dtype is not torch.bool:
            continue  # integers are positions, which Inductor itself holds in fewer bytes
        own = sweeps[node]
        if any(sweeps[reader] > own or reader.target in _PICKS for reader in readers(node)):
            _mark(graph, node)
    module.recompile()


_PICKS = (aten.gather.default, aten.index.Tensor)


def _mark(graph: torch.fx.Graph, node: Node) -> None:
    with graph.inserting_after(node):
        mark = graph.call_function(HELD, (node,))
    mark.meta = dict(node.meta)
    node.replace_all_uses_with(mark, delete_user_cb=lambda user: user is not mark)


def decompositions() -> dict:
    """What Inductor writes out before it compiles: done beforehand, so that it is seen what can be
    computed again."""
    _choices()  # some of them look at Inductor's other modules, which are imported here
    return _torch.select_decomp_table()


def compiled(
    graph: torch.fx.GraphModule, compiler: bool | str, recompute: bool | None = False
) -> Callable:
    """The graph by Inductor, compiled when first called. Only the modes of `torch.compile` need
    Dynamo, which would trace the straight graph again and look at every input at every call."""
    hold(graph, recompute)
    if isinstance(compiler, str):
        return _by_dynamo(graph, compiler)
    if any(node.target is HANDED for node in graph.graph.nodes):
        return in_pieces(graph, lambda piece, _: _when_called(piece))
    return _when_called(graph)


def _when_called(graph: torch.fx.GraphModule) -> Callable:
    runs: dict[bool, Callable] = {}

    def call(tensors: list[Tensor]) -> Sequence[Tensor]:
        deterministic = torch.are_deterministic_algorithms_enabled()
        run = runs.get(deterministic)
        if run is None:
            run = runs[deterministic] = _by_inductor(graph, tensors)
        return run(tensors)

    return call


def _by_dynamo(graph: torch.fx.GraphModule, mode: str) -> Callable:
    run = heuristics()(torch.compile(graph, fullgraph=True, dynamic=False, mode=mode))

    def call(tensors: list[Tensor]) -> Sequence[Tensor]:
        given = tuple(tensors)
        tensors.clear()
        return run(*given)

    return call


def _by_inductor(graph: torch.fx.GraphModule, tensors: list[Tensor]) -> Callable:
    """Inductor on tensors without numbers, in the context in which Dynamo would call it: without
    a shape environment nothing would be found in, or put into, its caches on disk. The result
    takes a list and empties it, as graphs in a `GmWrapper` do: nobody else holds the inputs."""
    fakes = FakeTensorMode(shape_env=_torch.ShapeEnv())
    given = [fakes.from_tensor(t, static_shapes=True) for t in tensors]
    with tracing(TracingContext(fakes)), heuristics(), quiet():
        return _torch.compile_fx(_torch.GmWrapper(graph, list), given)


def compiled_open(
    graph: torch.fx.GraphModule, fakes: FakeTensorMode, given: Sequence[Any], recompute: bool | None
) -> Callable:
    """The graph, traced with open sizes on these stand-ins, by Inductor."""
    hold(graph, recompute)

    def compile_(piece: torch.fx.GraphModule, given: Sequence[Any]) -> Callable:
        with tracing(TracingContext(fakes)), heuristics(), quiet():
            run = _torch.compile_fx(_torch.GmWrapper(piece, list), list(given))
        return laid_out(piece.graph, given, run)

    if any(node.target is HANDED for node in graph.graph.nodes):
        return in_pieces(graph, compile_)
    return compile_(graph, given)


def in_pieces(
    module: torch.fx.GraphModule, compile_: Callable[[torch.fx.GraphModule, list[Any]], Callable]
) -> Callable:
    """A graph that hands gradients over before its end, as `straight_line.boxed` would run it: a
    generator that lays them into the list of its inputs and waits. It is cut there, and each piece
    is compiled by itself; compile_: with stand-ins for its inputs."""
    number, pieces = 0, {}
    ends: list[Node] = []
    for node in module.graph.nodes:
        if node.target is HANDED:
            ends.append(node)
            number += 1
        elif node.target is operator.getitem:  # a part of what was computed before
            pieces[node] = pieces[node.args[0]]
        else:
            pieces[node] = -1 if node.op == "placeholder" else number
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    parts = [_Portion(k, end, pieces) for k, end in enumerate(ends)]
    later: set[Node] = set()
    for part in reversed(parts):
        part.hand_on(later)
        later |= set(part.reads)
    for part in parts:
        if part.results:
            given = [node.meta.get("val") for node in part.reads]
            part.run = compile_(part.graph_module(module), given)

    def generate(tensors: list[Any]) -> Iterator[None]:
        values = dict(zip(inputs, tensors, strict=True))
        tensors.clear()
        for part in parts:
            tensors.append(part(values))
            yield

    return generate


class _Portion:
    """The part of a graph that ends where gradients are handed over, by `end`.

    reads: what it takes of inputs and earlier pieces; results: gradients and what later pieces
    read; dropped: what nobody reads after it.
    """

    def __init__(self, number: int, end: Node, pieces: dict[Node, int]) -> None:
        self.handed: list[Node] = list(end.args[0])  # type: ignore[arg-type]
        self.run: Callable[[list[Any]], Sequence[Any]] = lambda _: ()
        own = [n for n, k in pieces.items() if k == number and n.op == "call_function"]
        self.body: dict[Node, None] = {}  # in order
        self.reads: list[Node] = []
        self._take([*own, *self.handed], set(own))
        self.own = set(own)

    def _take(self, nodes: Sequence[Node], own: set[Node]) -> None:
        """Into the body, behind what they are computed from. What an earlier piece computed is
        read; views, sizes and constants, which cost nothing, are had again."""
        for node in nodes:
            if node in self.body or node in self.reads:
                continue
            if node.op == "placeholder" or (node not in own and not _free(node)):
                self.reads.append(node)
            else:
                self._take(node.all_input_nodes, own)
                self.body[node] = None

    def hand_on(self, later: set[Node]) -> None:
        """later: all that later pieces read."""
        self.kept = [n for n in self.body if n in self.own and n in later]
        self.dropped = [n for n in self.reads if n not in later]
        self.results = [*self.handed, *self.kept]

    def graph_module(self, module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        graph = Graph()
        new: dict[Node, Node] = {}
        for node in (*self.reads, *self.body):
            if node.op in ("placeholder", "get_attr") or node in self.body:
                new[node] = graph.node_copy(node, new.__getitem__)
            else:
                new[node] = graph.placeholder(node.name)
                new[node].meta = dict(node.meta)
        graph.output([new[n] for n in self.results])
        return torch.fx.GraphModule(module, graph)

    def __call__(self, values: dict[Node, Any]) -> list[Tensor]:
        """The gradients; `values` is left with what later pieces read."""
        given = [values[n] for n in self.reads]
        for node in self.dropped:
            del values[node]
        results = list(self.run(given))
        values.update(zip(self.kept, results[len(self.handed) :], strict=True))
        return results[: len(self.handed)]


def _free(node: Node) -> bool:
    """Whether it costs nothing to have it again: a constant, a view, a size."""
    value = node.meta.get("val")
    return node.op == "get_attr" or is_view(node) or isinstance(value, int | torch.SymInt)


def laid_out(graph: Graph, given: Sequence[Any], run: Callable) -> Callable:
    """`run`, with its tensors laid out in memory as these stand-ins are, which it was compiled for.

    What Inductor hands on may lie inside of something longer, as the inputs of a concatenation do,
    where the graph that reads it was traced with a tensor by itself.
    """
    written = _written_to(graph)
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    orders: list[tuple[int, list[int], list[int]]] = []
    plain: list[int] = []
    for i, (node, stand_in) in enumerate(zip(inputs, given, strict=True)):
        if not isinstance(stand_in, Tensor) or node in written:
            continue
        order = _order(stand_in)
        if order == list(range(stand_in.dim())):
            plain.append(i)
        elif order is not None:
            orders.append((i, order, sorted(order, key=order.__getitem__)))

    def call(tensors: list[Any]) -> Sequence[Any]:
        for i in plain:
            if not tensors[i].is_contiguous():
                tensors[i] = tensors[i].contiguous()
        for i, order, back in orders:
            turned = tensors[i].permute(order)
            if not turned.is_contiguous():
                tensors[i] = turned.contiguous().permute(back)
        return run(tensors)

    return call


def _order(stand_in: Tensor) -> list[int] | None:
    """Its axes from the slowest to the fastest; None where its numbers have gaps or overlap."""
    sizes, strides = _shape(stand_in), [_number(n) for n in stand_in.stride()]
    order = sorted(range(len(sizes)), key=lambda d: (-strides[d], d))
    count = 1
    for d in reversed(order):
        if sizes[d] != 1 and strides[d] != count:
            return None
        count *= sizes[d]
    return order


@contextmanager
def heuristics() -> Iterator[None]:
    """A context in which Inductor knows the mark, leaves things in their order, fuses only what
    stands close together, and lays tensors out as the trace did: with rows made longer for speed,
    a kernel of its own that follows its input's strides returns others than were traced."""
    options = {"reorder_for_locality": False, "comprehensive_padding": False}
    with (
        sound(),
        _torch.V.set_choices_handler(_choices()),
        _torch.inductor_config.patch(options),
    ):
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """A context in which PyTorch does not speak of its own calls while it compiles: no warnings,
    and no word that a graph with open sizes cannot be kept in the cache on disk."""
    log = logging.getLogger("torch._inductor.codecache")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


@contextmanager
def sound() -> Iterator[None]:
    """A context in which Inductor keeps readers of a tensor behind its writers (an index_add, a
    scatter), and writes into no memory that is seen from several places.

    To fuse two loops on a CPU, PyTorch changes the ranges of one and finds out anew what it reads,
    by the names that tensors had before anything was written into them: a reader that comes after a
    scatter then counts as one before it, and may run before it. Before 2.13 it also forgets that a
    writer waits for the readers of the old values. Names and waits are put right. Before 2.13 the
    settings are those of all threads, too, so that one at a time compiles.

    And where nobody reads a tensor again, it writes into it instead of a copy, without a look at
    its strides: into an expanded one (as vmap makes of zeros) it adds for all of its rows at once.
    Nor does it look at what it writes: of a part of the same tensor it reads what was written.

    The derivative of average pooling it divides by the whole window, also where `ceil_mode` lets a
    window reach beyond the padding and the mean is that of a part: PyTorch's kernel is called then.
    """
    _keep_names()
    _keep_copies()
    _keep_divisors()
    turn = _torch.compile_lock if _torch.before(2, 13) else nullcontext()
    with turn, _torch.inductor_config.patch(SOUND):
        yield


# Six less than usual, so that no graph from before is found in the caches on disk.
SOUND = {"max_fusion_size": 58}


@cache
def _keep_names() -> None:
    node = _torch.SchedulerNode
    original = node.recompute_size_and_body

    def recompute(self: Any, *args: Any, **kwargs: Any) -> None:
        reads = self.read_writes.reads
        waits = [dep for dep in reads if isinstance(dep, (_torch.WeakDep, _torch.StarDep))]
        original(self, *args, **kwargs)
        dependencies = self.read_writes.with_read(type(reads)(waits))
        self.set_read_writes(dependencies.rename(self.mutation_renames))

    node.recompute_size_and_body = recompute  # type: ignore[method-assign]


@cache
def _keep_copies() -> None:
    for op, how in list(_torch.inplaceable_ops.items()):

        def check(node: Node, how: Any = how) -> bool:
            written = pytree.tree_leaves([node.args[i] for i in how.mutated_args])
            others = [arg for i, arg in enumerate(node.args) if i not in how.mutated_args]
            read = {memory_of(part) for part in pytree.tree_leaves((others, node.kwargs))}
            safe = not any(_overlaps(part) or memory_of(part) in read for part in written)
            return how.extra_check(node) and safe

        _torch.inplaceable_ops[op] = replace(how, extra_check=check)


@cache
def _keep_divisors() -> None:
    for op in (aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default):
        _keep_divisor(op)


def _keep_divisor(op: Any) -> None:
    written_out = _torch.lowerings[op]
    own_kernel = _torch.fallback_handler(op, add_to_fallback_set=False)

    @_torch.register_lowering(op, type_promotion_kind=None)
    def pull(y, x, kernel, stride, padding, ceil, padding_counts, divisor=None):
        partial = ceil and padding_counts and divisor is None
        way = own_kernel if partial else written_out
        return way(y, x, kernel, stride, padding, ceil, padding_counts, divisor)


def _overlaps(node: Any) -> bool:
    """Whether several entries of a tensor may lie in one place. An open size counts as two."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, Tensor):
        return False
    pairs = zip(value.stride(), value.shape, strict=True)
    known = [(step, n) if type(n) is int else (step, 2) for step, n in pairs if type(step) is int]
    reach = 0  # of the axes so far
    for step, n in sorted(known):
        if n > 1 and step <= reach:
            return True
        reach += step * (n - 1)
    return False


@cache
def _choices() -> Any:
    ir = _torch.inductor_ir

    @_torch.register_lowering(HELD, type_promotion_kind=None)
    def held(t):
        t.realize()
        layout = t.maybe_get_layout()
        if isinstance(layout, ir.FlexibleLayout):
            order = ir.get_stride_order(_torch.V.graph.current_node.meta["val"].stride())
            t = ir.ExternKernel.require_stride_order(t, order)
        return t

    class Choices(_torch.InductorChoices):
        """Nodes that stand far apart are not fused."""

        @staticmethod
        def can_fuse_vertical(scheduler, node1, node2, shared_data_score):
            return not scheduler.are_long_distant_nodes(node1, node2)

    return Choices()


# -------------------------------------------------------------------------- held, or computed again
#
# A flat graph for a compiler holds all sweeps. Written out, a norm and an activation are chains of
# operators that pass over memory as one kernel, and most of what they compute on the way can be had
# again from what is held anyway, inside the kernel that reads it, where holding it costs a pass to
# write, a pass to read, and its memory in between. So at each boundary between sweeps the least set
# of values is found that the later sweeps can be computed from, by a minimum cut through the graph
# whose capacities are bytes. Products, sums over many numbers and random numbers are never computed
# twice. What would have to be written down again, for a product to read it, costs passes over
# memory: of that as much is computed again as keeps the estimated time within a few percent.


# Passes over memory that Inductor fuses with what stands before them, besides pointwise operators.
_SUMS = {
    aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.amax.default,
    aten.amin.default, aten.var_mean.correction, aten.var.correction, aten.prod.dim_int,
    aten.any.default, aten.any.dim, aten.all.default, aten.argmax.default,
}  # fmt: skip
_COPIES = {
    aten._to_copy.default, aten.clone.default, aten.full.default, aten.scalar_tensor.default,
    aten.full_like.default, aten.ones_like.default, aten.zeros_like.default, aten.arange.default,
    aten.where.self, aten.masked_fill.Scalar, aten.masked_fill.Tensor,
}  # fmt: skip
LONGEST = 24  # operators in a chain that is computed again
SLOWER = 0.06  # by how much computing again may raise the estimated time
# Of matrix products and convolutions, in the time that one byte takes to or from a GPU's memory;
# decides whether a light value is computed again instead of being read.
PRODUCT_FLOPS_PER_BYTE = 128


def is_view(node: Node) -> bool:
    if node.target is operator.getitem:
        return is_view(node.args[0])  # type: ignore[arg-type]
    if not isinstance(node.target, OpOverload):
        return False
    op: Any = node.target
    results = [result.alias_info for result in op._schema.returns]
    return any(alias is not None and not alias.is_write for alias in results)


def readers(node: Node) -> Iterator[Node]:
    """Who reads a value, itself or through views."""
    for user in node.users:
        if is_view(user):
            yield from readers(user)
        else:
            yield user


def number_sweeps(graph: Graph) -> dict[Node, int]:
    """The sweep of each node, and the marks of where sweeps begin taken out."""
    sweep = 0
    numbers: dict[Node, int] = {}
    for node in list(graph.nodes):
        if node.target is BOUNDARY:
            sweep += 1
            graph.erase_node(node)
        elif node.target is operator.getitem:  # a part of what was computed before
            numbers[node] = numbers[node.args[0]]  # type: ignore[index]
        else:
            numbers[node] = sweep
    return numbers


def shorten(graph: Graph, recompute: bool | None) -> tuple[Graph, dict[Node, int]]:
    """The graph in which what passes from sweep to sweep and can be had again is replaced by what
    it is had from, and the sweep of each node.

    recompute: whether that may take passes of its own over memory, for a product to read it. None:
    for as large a share of such values as keeps the estimated time (`traffic`) within `SLOWER`.
    """
    if recompute is not None:
        return _cut(graph, float(recompute))
    least = _cut(deepcopy(graph), 0.0)
    most = (1 + SLOWER) * traffic(*least)
    cut = _cut(deepcopy(graph), 1.0)
    if traffic(*cut) <= most:
        return cut
    low, step, best = 0.0, 0.5, least
    while step > 0.1:  # eighths
        cut = _cut(deepcopy(graph), low + step)
        if traffic(*cut) <= most:
            low, best = low + step, cut
        step /= 2
    return best


def _cut(graph: Graph, share: float) -> tuple[Graph, dict[Node, int]]:
    """share: of the values whose computing again costs passes over memory, how many of them."""
    sweeps = number_sweeps(graph)
    costly: dict[Node, bool] = {}
    for boundary in range(max(sweeps.values(), default=0) - 1, -1, -1):
        _Cut(graph, sweeps, boundary, share, costly).apply()
    graph.eliminate_dead_code()
    return graph, sweeps


def traffic(graph: Graph, sweeps: dict[Node, int]) -> float:
    """What a step costs in bytes to and from memory, products' operations counted as bytes.

    All that reads a value and waits for the same sums and products does so in one pass.
    """
    levels: dict[Node, int] = {}  # sums and products before a node, one after another
    sources: dict[Node, set[Node]] = {}  # what a node is read from, through what is not written
    passes: set[tuple[Node, int, int]] = set()
    total = 0.0
    for node in graph.nodes:
        level = max((levels[n] for n in node.all_input_nodes), default=0)
        read = set().union(*(sources[n] for n in node.all_input_nodes))
        if node.op == "placeholder" or node.op == "get_attr":
            levels[node], sources[node] = 0, {node}
            continue
        if node.op == "output":
            break
        if is_view(node) or node.target is operator.getitem:
            levels[node], sources[node] = level, read
            continue
        if _fuses(node):
            written = node.target in _SUMS or any(
                not _fuses(reader) or sweeps[reader] > sweeps[node] for reader in readers(node)
            )
            if written:
                total += _bytes(node)
                passes |= {(n, sweeps[node], level) for n in read}
            levels[node] = level + (node.target in _SUMS)
            sources[node] = {node} if written else read
            continue
        total += _operations(node) / PRODUCT_FLOPS_PER_BYTE + _bytes(node)
        total += sum(map(_bytes, {_shown(n) for n in node.all_input_nodes}))
        levels[node], sources[node] = level + 1, {node}
    return total + sum(_bytes(node) for node, _, _ in passes)


def _operations(node: Node) -> int:
    """How many operations a product takes, at the sizes that the graph was made at: a question
    about an open size would close it."""
    formula = flop_registry().get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0

    def sized(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty(_shape(value), device="meta")
        if isinstance(value, list | tuple):
            return type(value)(map(sized, value))
        return _number(value)

    args: Any = map_arg(node.args, lambda n: sized(n.meta["val"]))
    kwargs: Any = map_arg(node.kwargs, lambda n: sized(n.meta["val"]))
    try:
        return int(formula(*args, **kwargs, out_val=sized(node.meta["val"])))
    except Exception:  # PyTorch's formulas know fewer shapes than its kernels do: grouped queries
        return 0


def _light(node: Node) -> bool:
    """Whether it may be computed again: one pass over memory, in the kernel of its reader."""
    if node.op != "call_function":
        return False
    if is_view(node):
        return True
    op: Any = node.target
    if not isinstance(op, OpOverload) or draws(op) or op._schema.is_mutable:
        return False
    return torch.Tag.pointwise in op.tags or op in _COPIES


def _picks(node: Node) -> bool:
    """Whether it picks entries by whole numbers: they are fewer where they come from, of a network
    on a graph."""
    if node.target not in _PICKED:
        return False
    given = [n.meta.get("val") for n in node.all_input_nodes[1:]]
    return all(not isinstance(t, Tensor) or t.dtype in (torch.int32, torch.int64) for t in given)


_PICKED = (*_PICKS, aten.index_select.default, aten.embedding.default)


def _fuses(node: Node) -> bool:
    """Whether it reads its inputs without their being written down first."""
    return _light(node) or node.target in _SUMS


def _bytes(node: Node) -> int:
    value = node.meta.get("val")
    if isinstance(value, list | tuple):  # of an operator with several results
        return sum(map(_size, value))
    return _size(value)


def _size(value: Any) -> int:
    if not isinstance(value, Tensor):
        return 0
    return math.prod(_shape(value)) * value.element_size()


def _shape(value: Tensor) -> list[int]:
    """Open sizes as they were when the graph was made."""
    return [_number(size) for size in value.shape]


def _number(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        hint = value.node.hint
        return 1 if hint is None else int(hint)
    return value


def _shown(node: Node) -> Node:
    """What a view shows."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _written_to(graph: Graph) -> set[Node]:
    """Values that an operator writes to."""
    written: set[Node] = set()
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable or node.target in (AGAIN, BOUNDARY):
            continue
        for i, argument in enumerate(schema.arguments):
            if argument.is_write:
                given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
                parts = given if isinstance(given, list | tuple) else [given]
                written |= {_shown(n) for n in parts if isinstance(n, Node)}
    return written


class _Cut:
    """What the sweeps after `boundary` read of those up to it."""

    def __init__(
        self, graph: Graph, sweeps: dict[Node, int], boundary: int, share: float,
        costly: dict[Node, bool], picks: bool = False,
    ) -> None:  # fmt: skip
        """picks: entries that were picked by indices may be picked again."""
        self.graph, self.sweeps, self.boundary = graph, sweeps, boundary
        self.share, self.picks = share, picks
        self.costly = costly  # nodes that cost passes, and whether they are computed again
        self.written = _written_to(graph)
        self.results = {_shown(n) for n in graph.output_node().all_input_nodes}  # held anyway
        self.again: set[Node] = set()  # nodes that may be computed again
        self.lengths: dict[Node, int] = {}

    def early(self, node: Node) -> bool:
        return self.sweeps[node] <= self.boundary

    def read_late(self) -> list[Node]:
        return [
            node
            for node in self.graph.nodes
            if node.op == "call_function"
            and self.early(node)
            and any(not self.early(user) and user.op != "output" for user in node.users)
        ]

    def _look(self, node: Node) -> None:
        """Decide whether a node may be computed again, once its inputs are decided."""
        length = max((self.lengths.get(n, 0) for n in node.all_input_nodes), default=0)
        length += 0 if is_view(node) else 1
        light = _light(node) or (self.picks and _picks(node))
        if not light or length > LONGEST or self._is_costly(node):
            return
        if any(_shown(n) in self.written for n in (node, *node.all_input_nodes)):
            return  # it would read other numbers later
        self.again.add(node)
        self.lengths[node] = length

    def _is_costly(self, node: Node) -> bool:
        """Whether it would be written down once more for a later reader, or is written down anyway
        (a residual stream, which a product reads and the next layer adds to), and is not of the
        share that is computed again all the same. Views are judged by what they show."""
        if self.share == 1 or is_view(node):
            return False
        here = [n for n in readers(node) if self.early(n)]
        late = [n for n in readers(node) if not self.early(n)]
        product = any(not _fuses(n) for n in here)
        if any(n.target is HELD for n in late):  # handed on: who reads it here will there
            costs = product
        else:
            stream = product and any(_light(n) for n in here)
            costs = stream or not all(_fuses(n) for n in late)
        if not costs:
            return False
        if node not in self.costly:  # every second, every fourth, …
            count = len(self.costly)
            self.costly[node] = int((count + 1) * self.share) > int(count * self.share)
        return not self.costly[node]

    def _least(self, ends: list[Node]) -> set[Node]:
        """The values to hold: a minimum cut between what must be held and what is read."""
        import networkx

        net = networkx.DiGraph()
        seen: set[Node] = set()
        stack = list(ends)
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            inside, outside = (node, 0), (node, 1)
            if is_view(node) and node in self.again:
                net.add_edge(inside, outside)  # what it shows is held
            else:
                # of equals, the one that is read: a little more for each step before it
                far = 1 + 0.01 * (LONGEST - self.lengths.get(node, 0))
                size = 0 if node in self.results else _bytes(node)
                net.add_edge(inside, outside, capacity=size * far)
            if node not in self.again:
                net.add_edge("source", inside)
                continue
            for n in node.all_input_nodes:
                if n.op == "call_function":
                    net.add_edge((n, 1), inside)
                    stack.append(n)
        for node in ends:
            net.add_edge((node, 1), "sink")
        if "source" not in net:
            return set()
        flow = networkx.algorithms.flow.boykov_kolmogorov
        _, (near, _) = networkx.minimum_cut(net, "source", "sink", flow_func=flow)
        return {node for node in seen if (node, 0) in near and (node, 1) not in near}

    def apply(self) -> None:
        for node in self.graph.nodes:
            if node.op == "call_function" and self.early(node):
                self._look(node)
        ends = self.read_late()
        held = self._least(ends)
        copies: dict[tuple[Node, int], Node] = {}

        def again(node: Node, sweep: int, reader: Node) -> Node:
            """The node, or its copy in a later sweep."""
            if node.op != "call_function" or not self.early(node) or node in held:
                return node
            copy = copies.get((node, sweep))
            if copy is None:
                inputs = {n: again(n, sweep, reader) for n in node.all_input_nodes}
                with self.graph.inserting_before(reader):
                    copy = self.graph.node_copy(node, lambda n: inputs[n])
                copies[node, sweep] = copy
                self.sweeps[copy] = sweep
            return copy

        for reader in [n for n in self.graph.nodes if not self.early(n)]:
            if reader.op == "output":
                continue  # results are there already
            sweep = self.sweeps[reader]
            new = {n: again(n, sweep, reader) for n in reader.all_input_nodes}
            for old, copy in new.items():
                if old is not copy:
                    reader.replace_input_with(old, copy)


# ----------------------------------------------------------------- from one graph to the next
#
# Where the first two sweeps and the last two are two graphs, what the one hands to the other is
# found likewise: the least set of values that all of it can be had again from. The second graph
# then begins with having it again, each reader for itself.


AFTER = 1.5  # what the last two sweeps cost, by those before them


@dataclass(frozen=True, eq=False)
class Recipe:
    """How a graph's last results are had again: a module from some of the graph's inputs (`inputs`,
    by place) and from what it hands on in their place, without numbers (`held`), to these
    results."""

    module: torch.fx.GraphModule
    inputs: tuple[int, ...]
    held: tuple[Tensor, ...]

    def __call__(self, given: Sequence[Any]) -> Sequence[Tensor]:
        return self.module(*given)


def hand_less(module: torch.fx.GraphModule, count: int, recompute: bool | None) -> Recipe | None:
    """Replace all results but the first `count`, which another graph will read, by less to hold;
    None, and nothing is changed, where there is no less. recompute: see `shorten`."""
    shares = (1.0, 0.75, 0.5, 0.25, 0.0) if recompute is None else (float(recompute),)
    most = SLOWER * (1 + AFTER) * traffic(module.graph, dict.fromkeys(module.graph.nodes, 0))
    for share in shares:
        graph = deepcopy(module.graph)
        handed = _HandedOn(graph, count, share)
        if share == shares[-1] or handed.extra <= most:
            return handed.split(module)
    return None


class _HandedOn:
    """A graph whose results after the first `count` are had again, as far as that pays."""

    def __init__(self, graph: Graph, count: int, share: float) -> None:
        self.graph, self.count = graph, count
        output = graph.output_node()
        results: list[Node] = list(output.args[0])  # type: ignore[arg-type]
        sweeps = dict.fromkeys(graph.nodes, 0)
        self.ends = results[count:]
        with graph.inserting_before(output):
            self.reads = [graph.call_function(HELD, (n,)) for n in self.ends]
        output.args = (results[:count],)
        sweeps.update(dict.fromkeys([*self.reads, output], 1))
        cut = _Cut(graph, sweeps, 0, share, {}, picks=True)
        cut.results = set()  # which are the caller's: copies of them would be held
        cut.apply()
        self.late = [n for n, sweep in sweeps.items() if sweep and n is not output]
        again = {n: read.args[0] for n, read in zip(self.ends, self.reads, strict=True)}
        written = [
            n for n, late in again.items() if n is not late and not all(map(_fuses, readers(n)))
        ]
        self.extra = sum(2 * _bytes(n) for n in written)

    def split(self, module: torch.fx.GraphModule) -> Recipe | None:
        """Take what is had again out of the graph, into a recipe; `module` becomes the rest, which
        returns what the recipe starts from. None where that is no less than the results."""
        late = set(self.late)
        order = [n for n in self.graph.nodes if n in late]
        inputs: dict[Node, None] = {}
        held: dict[Node, None] = {}
        sizes: dict[Node, None] = {}

        def take(node: Node) -> bool:
            """Note a node of the rest that the recipe reads; whether it can be handed over."""
            if node.op == "placeholder":
                inputs[node] = None
            elif isinstance(node.meta.get("val"), Tensor) and node.op == "call_function":
                held[node] = None
            elif node.op == "get_attr" or isinstance(node.meta.get("val"), int | torch.SymInt):
                if not all(map(take, node.all_input_nodes)):
                    return False
                sizes[node] = None
            else:  # several results at once
                return False
            return True

        for node in order:
            if not all(take(n) for n in node.all_input_nodes if n not in late):
                return None
        if sum(map(_bytes, held)) >= sum(map(_bytes, dict.fromkeys(self.ends))):
            return None
        recipe = Graph()
        new: dict[Node, Node] = {}
        for node in (*inputs, *held):
            new[node] = recipe.placeholder(node.name)
        for node in (*sizes, *order):
            if node.target is not HELD:
                new[node] = recipe.node_copy(node, new.__getitem__)
        recipe.output([new[read.args[0]] for read in self.reads])  # type: ignore[index]
        places = {n: i for i, n in enumerate(self.graph.find_nodes(op="placeholder"))}
        made = torch.fx.GraphModule(module, recipe)
        output = self.graph.output_node()
        public = list(output.args[0])  # type: ignore[arg-type]
        shown = {_shown(n) for n in public}
        handed = []
        for node in held:
            if _shown(node) in shown:  # the caller may write to it
                with self.graph.inserting_before(output):
                    copy = self.graph.call_function(aten.clone.default, (node,))
                copy.meta = dict(node.meta)
                node = copy
            handed.append(node)
        output.args = ([*public, *handed],)
        for node in reversed(order):
            self.graph.erase_node(node)
        self.graph.eliminate_dead_code()
        module.graph = self.graph
        module.recompile()
        return Recipe(made, tuple(places[n] for n in inputs), tuple(n.meta["val"] for n in held))


def _sink(graph: Graph) -> None:
    """What stands before the mark `AGAIN` is had again by each sweep that reads it, where it is
    read first."""
    mark = next((n for n in graph.nodes if n.target is AGAIN), None)
    if mark is None:
        return
    sweep = 0
    sweeps: dict[Node, int] = {}
    for node in graph.nodes:
        if node is mark or (sweep and node.target is BOUNDARY):
            sweep += 1
        sweeps[node] = sweeps[node.args[0]] if node.target is operator.getitem else sweep  # type: ignore[index]
    graph.erase_node(mark)
    del sweeps[mark]
    _Cut(graph, sweeps, 0, 1.0, {}, picks=True).apply()
    graph.eliminate_dead_code()
