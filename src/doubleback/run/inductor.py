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
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from .. import _torch
from .._torch import FakeTensorMode, TracingContext, tracing
from ..kernels import opaque
from .lifetimes import is_view, number_sweeps, readers, shorten

aten = torch.ops.aten

opaque("held(Tensor t) -> Tensor", Tensor.clone, lambda t: t.new_empty_strided(t.shape, t.stride()))
HELD = torch.ops.doubleback.held.default


def hold(module: torch.fx.GraphModule, recompute: bool) -> None:
    """Mark what passes from one sweep to another, as little of it as can be (`lifetimes.py`), and
    take the marks of where sweeps begin out.

    Marked as well is what an index picks from: picked from its inputs, which may be wider, each of
    them would be held.
    """
    graph = module.graph
    sweeps = number_sweeps(graph)
    shorten(graph, sweeps, recompute)
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
    computed again (`lifetimes.py`)."""
    _choices()  # some of them look at Inductor's other modules, which are imported here
    return _torch.select_decomp_table()


def compiled(
    graph: torch.fx.GraphModule, compiler: bool | str, recompute: bool = False
) -> Callable:
    """The graph by Inductor, compiled when first called. Only the modes of `torch.compile` need
    Dynamo, which would trace the straight graph again and look at every input at every call."""
    hold(graph, recompute)
    if isinstance(compiler, str):
        return _by_dynamo(graph, compiler)
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
    with tracing(TracingContext(fakes)), heuristics():
        return _torch.compile_fx(_torch.GmWrapper(graph, list), given)


def compiled_open(
    graph: torch.fx.GraphModule, fakes: FakeTensorMode, given: Sequence[Any], recompute: bool
) -> Callable:
    """The graph, traced with open sizes on these stand-ins, by Inductor."""
    hold(graph, recompute)
    with tracing(TracingContext(fakes)), heuristics():
        return _torch.compile_fx(_torch.GmWrapper(graph, list), list(given))


@contextmanager
def heuristics() -> Iterator[None]:
    """A context in which Inductor knows the mark, leaves things in their order, and fuses only
    what stands close together."""
    in_order = _torch.inductor_config.patch(reorder_for_locality=False)
    with sound(), _torch.V.set_choices_handler(_choices()), in_order:
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
    scatter).

    To fuse two loops on a CPU, PyTorch changes the ranges of one and finds out anew what it reads,
    by the names that tensors had before anything was written into them: a reader that comes after a
    scatter then counts as one before it, and may run before it. Before 2.13 it also forgets that a
    writer waits for the readers of the old values. Names and waits are put right.
    """
    _keep_names()
    with _torch.inductor_config.patch(SOUND):
        yield


# One less than usual, so that no graph from before is found in the caches on disk.
SOUND = {"max_fusion_size": 63}


@cache
def _keep_names() -> None:
    node = _torch.SchedulerNode
    original = node.recompute_size_and_body

    def recompute(self: Any, *args: Any, **kwargs: Any) -> None:
        reads = self.read_writes.reads
        waits = [dep for dep in reads if isinstance(dep, (_torch.WeakDep, _torch.StarDep))]
        original(self, *args, **kwargs)
        found = self.read_writes.with_read(type(reads)(waits))
        self.set_read_writes(found.rename(self.mutation_renames))

    node.recompute_size_and_body = recompute  # type: ignore[method-assign]


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
        @staticmethod
        def can_fuse_vertical(scheduler, node1, node2, shared_data_score):
            return not scheduler.are_long_distant_nodes(node1, node2)

    return Choices()
