"""Jacobians of a stretch of the network, swept in one direction or the other (theory §5, §6).

A segment is the part of the graph between a value a and a value b that every path crosses. Its
Jacobian J = ∂b/∂a is swept by rows (cotangents e⟨i⟩ at b) or by columns (tangents e⟨k⟩ at a).
Dense layers at its ends are read, not multiplied:

    last layer, by rows        Kᵀ(W, e⟨i⟩) = W[i, :], and K□(q⟨i⟩, e⟨i⟩) fills row i
    first layer, by columns    K(W, e⟨k⟩) = W[:, k], and K□(e⟨k⟩, ζ⟨k⟩) fills column k
    first layer, by rows       ‖Wᵀζ‖² = ⟨ζ, Gζ⟩, G = WWᵀ, where that is less work
    last layer, by columns     ‖Wh‖² = ⟨h, Gh⟩, G = WᵀW

The *body* is what is left between the ends. Both sweeps yield a pair (z, t), t the
representer of z: ⟨z⟨i⟩, t⟨j⟩⟩ = (JJᵀ)_ij by rows, (JᵀJ)_ij by columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import sweeps
from ..counting import counted
from ..graph import Graph
from ..penalties import unit_vectors
from ..plan import Plan, Step, make_plan
from ..rules import add
from ..spaces import Euclidean, dual_square

Sources = dict[Any, Tensor]


@dataclass(frozen=True)
class End:
    """A dense layer y = x Wᵀ + b at an end of a segment: the values x, W and y."""

    x: int
    weight: int
    y: int


@dataclass(frozen=True, eq=False)
class Segment:
    """The Jacobian from `start` to `stop`: a body with, maybe, dense layers that are read.

    read: the layer that is read by rows (columns); gram: the layer whose Gram matrix stands for
    it. `trained`: the values that carry gradients.
    """

    body: Plan
    start: tuple[int, ...]
    stop: int
    by_rows: bool
    read: End | None
    gram: End | None
    trained: frozenset[int]
    space: Any
    watch: Callable | None = None

    @property
    def seeds(self) -> int:
        """How many rows or columns the Jacobian has."""
        values = (self.stop,) if self.by_rows else self.start
        return sum(width(self.body.graph, v) for v in values)

    @property
    def batch(self) -> int:
        return self.body.graph.shape(self.start[0])[0]

    # ---------------------------------------------------------------------------- by rows

    def rows(self, state: sweeps.State, index: Tensor) -> Tensor:
        """e⟨i⟩ for i in `index` at the end of the body."""
        if self.read is not None:
            picked = state.values[self.read.weight].index_select(0, index)
            rows = self.body.graph.shape(self.body.target)[0]  # a network may pool its examples
            return picked[:, None].expand(-1, rows, -1)
        return self._units(self.stop, index)

    def pull(
        self, state: sweeps.State, seeds: Tensor, keep: bool = True
    ) -> tuple[list[Tensor], list[Tensor]]:
        """(z, t): J*e⟨i⟩, or its image before a first layer that the Gram matrix stands for."""
        count = seeds.shape[0]
        found = sweeps.backward(self.body, state, seeds, keep=keep, seeds=count, watch=self.watch)
        z = [
            zero(self.body.graph, v, count) if u is None else u
            for v, u in zip(self.body.penalised, found, strict=True)
        ]
        if self.gram is None:
            return z, self._representers(z)
        counted(transpose=count, forward=count if keep else 0)
        return z, [z[0] @ state.values[self.gram_key]]

    def push_back(
        self,
        state: sweeps.State,
        index: Tensor | None,
        z: list[Tensor],
        q: list[Tensor],
        weighted: list[Tensor],
        sources: Sources,
    ) -> Tensor | None:
        """Tangents q = (2ḡ·mix) t back through the body: their end. `q` is used up, `sources`
        gains theirs.

        weighted: (2ḡ·mix) z, from which the Gram layer's source is made; nobody else reads it
        and z.
        """
        count = q[0].shape[0]
        start = dict(zip(self.body.penalised, q, strict=True))
        q.clear()
        h, _ = sweeps.tangent(
            self.body, state, start, seeds=count, watch=self.watch, sources=sources
        )
        if self.gram is not None:
            self._gram_source(sources, weighted[0], z[0])
        if self.read is not None and self.read.weight in self.trained and h is not None:
            assert index is not None
            counted(weight_adjoint=count)
            weight = state.values[self.read.weight]
            self._fill(sources, weight, 0, index, h.sum(1))
        return h

    # ------------------------------------------------------------------------- by columns

    def columns(self, state: sweeps.State, index: Tensor) -> Tensor:
        """e⟨k⟩ for k in `index` at the start of the body."""
        if self.read is not None:
            picked = state.values[self.read.weight].index_select(1, index).t()
            return picked[:, None].expand(-1, self.batch, -1)
        return self._units(self.start[0], index)

    def push(
        self, state: sweeps.State, seeds: Tensor, keep: bool = True
    ) -> tuple[Tensor, Tensor, dict[int, tuple]]:
        """(h, t, what moved): J e⟨k⟩, or its image before a last layer with a Gram matrix."""
        count = seeds.shape[0]
        start = {self.body.penalised[0]: seeds}
        h, moved = sweeps.push(self.body, state, start, seeds=count, keep=keep)
        if h is None:
            h = zero(self.body.graph, self.body.target, count)
        if self.gram is None:
            return h, h, moved
        counted(forward=count, transpose=count if keep else 0)
        return h, h @ state.values[self.gram_key], moved

    def pull_back(
        self,
        state: sweeps.State,
        index: Tensor,
        h: Tensor | None,
        w: Tensor,
        weighted: Tensor | None,
        moved: dict[int, tuple],
        sources: Sources,
    ) -> None:
        """Cotangents w = (2ḡ·mix) t back through the body; `sources` gains theirs. Only the Gram
        layer reads h and weighted."""
        count = w.shape[0]
        xi = sweeps.pull(self.body, state, w, moved, seeds=count, sources=sources)
        if self.gram is not None:
            assert weighted is not None and h is not None
            self._gram_source(sources, weighted, h)
        if self.read is not None and self.read.weight in self.trained and xi[0] is not None:
            counted(weight_adjoint=count)
            weight = state.values[self.read.weight]
            self._fill(sources, weight, 1, index, xi[0].sum(1).t())

    def _fill(
        self, sources: Sources, weight: Tensor, axis: int, index: Tensor, lines: Tensor
    ) -> None:
        """Add rows or columns to the source of the layer that was read."""
        assert self.read is not None
        before = sources.pop(self.read.weight, None)
        before = torch.zeros_like(weight) if before is None else before
        sources[self.read.weight] = before.index_add(axis, index, lines.to(weight.dtype))

    # ------------------------------------------------------------------------------- both

    def _units(self, value: int, index: Tensor) -> Tensor:
        meta = self.body.graph.values[value]
        assert meta is not None
        return unit_vectors(index, meta.shape, meta.dtype)

    def _representers(self, z: list[Tensor]) -> list[Tensor]:
        if isinstance(self.space, Euclidean):
            return z
        _, found = dual_square(self.space, [u.flatten(0, 1) for u in z])
        return [t.unflatten(0, (-1, self.batch)) for t in found]

    @property
    def gram_key(self) -> Any:
        """Where the Gram matrix is kept among the values, and its source among the sources."""
        assert self.gram is not None
        return GramKey(self.gram.weight, self.by_rows)

    def prepare(self, state: sweeps.State) -> dict[Any, Tensor]:
        """What every chunk of seeds reads: WWᵀ, or WᵀW by columns."""
        if self.gram is None:
            return {}
        weight = state.values[self.gram.weight]
        return {self.gram_key: weight @ weight.t() if self.by_rows else weight.t() @ weight}

    def _gram_source(self, sources: Sources, weighted: Tensor, z: Tensor) -> None:
        """Σ z′zᵀ; `finished` turns it into the weight's source."""
        assert self.gram is not None
        if self.gram.weight not in self.trained:
            return
        counted(weight_adjoint=z.shape[0])
        pairs = weighted.flatten(0, 1).t() @ z.flatten(0, 1)
        sources[self.gram_key] = add(sources.pop(self.gram_key, None), pairs)  # type: ignore[assignment]


class GramKey(NamedTuple):
    """The Gram matrix of a weight, WWᵀ (by rows) or WᵀW."""

    weight: int
    by_rows: bool


def finished(sources: Sources, values: Mapping[Any, Tensor]) -> Sources:
    """Sources by value. ∇_W of Σ⟨z′, WWᵀz⟩ with z′, z fixed and Σz′zᵀ symmetric is (Σ z′zᵀ) W;
    for WᵀW it is W (Σ z′zᵀ)."""
    found = {key: part for key, part in sources.items() if not isinstance(key, GramKey)}
    for key, pairs in sources.items():
        if isinstance(key, GramKey):
            weight = values[key.weight]
            source = pairs @ weight if key.by_rows else weight @ pairs
            found[key.weight] = add(found.get(key.weight), source)  # type: ignore[assignment]
    return found


def width(graph: Graph, value: int) -> int:
    """Entries of one example."""
    return math.prod(graph.shape(value)[1:])


def zero(graph: Graph, value: int, *seeds: int) -> Tensor:
    meta = graph.values[value]
    assert meta is not None
    return torch.zeros((*seeds, *meta.shape), dtype=meta.dtype, device=meta.device)


# ---------------------------------------------------------------------------- construction


def make_segment(
    plan: Plan,
    start: tuple[int, ...],
    stop: int,
    *,
    by_rows: bool,
    space: Any = None,
    unit_seeds: bool = True,
    carries: bool = False,
    gram: bool = True,
    watch: Callable | None = None,
) -> Segment:
    """The segment from `start` to `stop` of a plan's graph, with the ends it allows.

    unit_seeds: whether the seeds are unit vectors, so that a layer can be read;
    carries: whether tangents are wanted at the end, for seeds that vary with the output;
    gram: whether a Gram matrix may stand for a layer, where that saves multiplications.
    """
    space = Euclidean() if space is None else space
    first = first_dense(plan, start[0], stop) if len(start) == 1 else None
    last = _last_dense(plan, stop, start)
    near, far = (last, first) if by_rows else (first, last)
    read = near if unit_seeds else None
    pays = (
        far is not None
        and far != read
        and gram
        and isinstance(space, Euclidean)
        and _gram_pays(plan, far, by_rows, width(plan.graph, stop if by_rows else start[0]))
    )
    stands = far if pays else None
    head, tail = (stands, read) if by_rows else (read, stands)
    body = make_plan(
        plan.graph,
        start if head is None else (head.y,),
        stop if tail is None else tail.x,
        plan.wanted,
        varying_seed=not by_rows or read is not None or carries,
    )
    if not by_rows:
        body = _trimmed(body, read is not None)
    return Segment(body, start, stop, by_rows, read, stands, plan.trained, space, watch)


def _dense(plan: Plan, step: Step) -> End | None:
    """y = x Wᵀ + b with x of shape (batch, n) and W, b that do not depend on the input."""
    node = step.node
    if node.op._schema.name != "aten::linear" or len(plan.graph.shape(node.inputs[0])) != 2:
        return None
    if any(v not in plan.leaves for v in node.inputs[1:]):
        return None
    return End(node.inputs[0], node.inputs[1], node.outputs[0])


def first_dense(plan: Plan, start: int, stop: int) -> End | None:
    """The dense layer that alone reads `start`, maybe under another shape."""
    value = start
    for _ in plan.steps:
        users = [s for s in plan.steps if value in s.node.inputs]
        if len(users) != 1 or value == stop:
            return None
        step = users[0]
        end = _dense(plan, step)
        if end is not None:
            return end if end.x == value else None
        same = step.rule.same_entries and step.node.inputs == (value,)
        keeps_batch = plan.graph.shape(step.node.outputs[0])[:1] == plan.graph.shape(start)[:1]
        if not (same and keeps_batch):
            return None
        value = step.node.outputs[0]
    return None


def _last_dense(plan: Plan, stop: int, start: tuple[int, ...]) -> End | None:
    """The dense layer whose output is `stop`, if the input reaches it."""
    if stop in start:
        return None
    for step in plan.steps:
        if stop in step.node.outputs and any(step.pull):
            return _dense(plan, step)
    return None


def _gram_pays(plan: Plan, end: End, by_rows: bool, seeds: int) -> bool:
    """Per seed and example 2n² (Gz and zzᵀ) against 3nm (Kᵀ, K and K□), and G once: n²m."""
    out, into = plan.graph.shape(end.weight)
    n, m = (out, into) if by_rows else (into, out)
    examples = seeds * plan.graph.shape(end.x)[0]
    return 2 * n * n + 2 * n * n * m / examples < 3 * n * m


def _trimmed(body: Plan, need_start: bool) -> Plan:
    """Without the cotangents that no source reads: by columns, ξ at the start itself is wanted
    only to fill the columns of a layer that was read."""
    wanted = set(body.penalised) if need_start else set()
    steps = []
    for step in body.steps:
        pull = tuple(on and v in wanted for on, v in zip(step.pull, step.node.inputs, strict=True))
        if any(pull) or step.curves:
            wanted.update(step.node.outputs)
        steps.append(replace(step, pull=pull))
    return replace(body, steps=tuple(steps))
