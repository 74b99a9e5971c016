"""The ways to sweep ‖J‖²_F and its gradient, and the stretches of the network that they sweep
(theory §5, §6).

A segment is the part of the graph between a value a and a value b that every path crosses. Its
Jacobian J = ∂b/∂a is swept by rows (cotangents e⟨i⟩ at b) or by columns (tangents e⟨k⟩ at a). Dense
layers at its ends are read, not multiplied:

    last layer, by rows        Kᵀ(W, e⟨i⟩) = W[i, :], and K□(q⟨i⟩, e⟨i⟩) fills row i
    first layer, by columns    K(W, e⟨k⟩) = W[:, k], and K□(e⟨k⟩, ζ⟨k⟩) fills column k
    first layer, by rows       ‖Wᵀζ‖² = ⟨ζ, Gζ⟩, G = WWᵀ, where that is less work
    last layer, by columns     ‖Wh‖² = ⟨h, Gh⟩, G = WᵀW

The *body* is what is left between the ends. Both sweeps yield a pair (z, t), t the representer of
z: ⟨z⟨i⟩, t⟨j⟩⟩ = (JJᵀ)_ij by rows, (JᵀJ)_ij by columns.

The ways; what each costs is for `planner` to say:

    rows      C cotangents e⟨i⟩, or directions vᵢ: Σ‖J*vᵢ‖²
    columns   dim x tangents e⟨k⟩: Σ‖J e⟨k⟩‖²
    waist     J = AB where every path crosses a layer of width k: ‖AB‖² = ⟨AᵀA, BBᵀ⟩, k columns
              of A and k rows of B
    diagonal  J = diag(g′)W, one dense layer under a coordinate-wise g: Σ_i g′(z_i)²‖W_i‖²

Each candidate's `part(state, bank, weight, sources)` sweeps the seeds of one slice of its bank,
returns the penalty per example and adds the curvature sources for the gradient of Σ_b
weight_b·penalty_b. Without a weight there is no gradient, and the tangents are not swept.
`prepare(state)` yields what all parts share; `at(graph)` is the same candidate at other sizes,
`kind` tells it from others for the same network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .. import sweeps
from ..counting import counted
from ..graph import Graph
from ..plan import Plan, Step, make_plan
from ..rules import add, softmax_curvature, softmax_derivative
from ..spaces import Euclidean, dual_square, per_example

if TYPE_CHECKING:
    from ..penalties import Jacobian

# --------------------------------------------------------------------------------------- segments


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

    def at(self, graph: Graph) -> Segment:
        """The same segment at other sizes."""
        return replace(self, body=self.body.at(graph))

    @property
    def kind(self) -> tuple:
        return self.start, self.stop, self.by_rows, self.read, self.gram

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
        pulled = sweeps.backward(self.body, state, seeds, keep=keep, seeds=count, watch=self.watch)
        z = [
            zero(self.body.graph, v, count) if u is None else u
            for v, u in zip(self.body.penalised, pulled, strict=True)
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
        _, representers = dual_square(self.space, [u.flatten(0, 1) for u in z])
        return [t.unflatten(0, (-1, self.batch)) for t in representers]

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
    plain = {key: part for key, part in sources.items() if not isinstance(key, GramKey)}
    for key, pairs in sources.items():
        if isinstance(key, GramKey):
            weight = values[key.weight]
            source = pairs @ weight if key.by_rows else weight @ pairs
            plain[key.weight] = add(plain.get(key.weight), source)  # type: ignore[assignment]
    return plain


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


# ------------------------------------------------------------------------------------- strategies


def _summed(pairs: Tensor) -> Tensor:
    """(seeds, batch, …) → one number per example, in float32 at least."""
    seeds, batch = pairs.shape[:2]
    return per_example(pairs.flatten(0, 1)).reshape(seeds, batch).sum(0)


def weighted(t: Tensor, weight: Tensor) -> Tensor:
    """weight_b·t⟨i⟩_b; a weight is not rounded to 16 bits before it multiplies."""
    return (weight.reshape(1, -1, *(1,) * (t.dim() - 2)) * t).to(t.dtype)


def _doubled(t: Tensor, weight: Tensor) -> Tensor:
    """The same with 2·weight_b, of ∇‖·‖²."""
    return weighted(t, 2 * weight)


def _join(sources: Sources, value: int, part: Tensor | None) -> None:
    if part is not None:
        sources[value] = add(sources.pop(value, None), part)  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class _OneSegment:
    """What rows and columns of one segment have in common."""

    name: ClassVar[str]
    divisible: ClassVar[bool] = True

    segment: Segment

    @property
    def kind(self) -> tuple:
        return self.name, self.segment.kind

    def at(self, graph: Graph) -> Any:
        return replace(self, segment=self.segment.at(graph))

    def prepare(self, state: sweeps.State) -> dict[Any, Tensor]:
        return self.segment.prepare(state)


@dataclass(frozen=True, eq=False)
class Rows(_OneSegment):
    """Cotangents, one per output or direction."""

    name = "rows"

    penalty: Jacobian
    target: int

    @property
    def seeds(self) -> int:
        return self.penalty.seed_count(self.segment.body.graph.shape(self.target))

    def bank(self, state: sweeps.State) -> Tensor:
        return self.penalty.bank(state.values[self.target])

    def part(
        self, state: sweeps.State, bank: Tensor, weight: Tensor | None, sources: Sources
    ) -> Tensor:
        segment, out = self.segment, state.values[self.target]
        if self.penalty.unit_seeds:
            seeds = segment.rows(state, bank)
        else:
            seeds = self.penalty.vectors(out, bank)
        z, t = segment.pull(state, seeds, keep=weight is not None)
        values = torch.stack([_summed(a * b) for a, b in zip(z, t, strict=True)]).sum(0)
        scale = self.penalty.scale(out.shape)
        values = values * scale if scale != 1 else values
        if weight is None:
            return values
        q = [_doubled(part, weight * scale) for part in t]
        mixed = [_doubled(part, weight * scale) for part in z] if segment.gram else []
        index = bank if self.penalty.unit_seeds else None
        del seeds, t
        if not segment.gram:
            z = []
        h = segment.push_back(state, index, z, q, mixed, sources)
        if self.penalty.varying and h is not None and self.target in segment.trained:
            _join(sources, self.target, self.penalty.head_of(out, bank, h))
        return values


@dataclass(frozen=True, eq=False)
class Columns(_OneSegment):
    """Tangents, one per input coordinate; softmax: of the class probabilities of the output."""

    name = "columns"

    softmax: bool
    target: int

    @property
    def seeds(self) -> int:
        return self.segment.seeds

    def bank(self, state: sweeps.State) -> Tensor:
        return torch.arange(self.seeds, device=state.values[self.target].device)

    def part(
        self, state: sweeps.State, bank: Tensor, weight: Tensor | None, sources: Sources
    ) -> Tensor:
        h, z, t, moved = self.push(state, bank, weight is not None)
        values = _summed(z * t)
        if weight is not None:
            along = [_doubled(t, weight), _doubled(h, weight) if self.segment.gram else None]
            end = [h] if self.reads_end else []
            del h, z, t
            self.pull_back(state, bank, end, along, moved, sources)
        return values

    def push(
        self, state: sweeps.State, bank: Tensor, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor, dict[int, tuple]]:
        """(h, z, t, what moved): the end of the segment, and ⟨z⟨i⟩, t⟨j⟩⟩ = (JᵀJ)_ij."""
        h, t, moved = self.segment.push(state, self.segment.columns(state, bank), keep)
        if not self.softmax:
            return h, h, t, moved
        u = softmax_derivative(state.values[self.target].softmax(-1), h)
        return h, u, u, moved

    @property
    def reads_end(self) -> bool:
        """Whether `pull_back` needs h."""
        return self.softmax or self.segment.gram is not None

    def pull_back(
        self, state: sweeps.State, bank: Tensor, end: list[Tensor], along: list[Tensor | None],
        moved: dict[int, tuple], sources: Sources,
    ) -> None:  # fmt: skip
        """Cotangents back, along = [(2ḡ·mix) t, (2ḡ·mix) h or None]; end = [h] where it is read.
        Both are used up."""
        w, weighted = along
        along.clear()
        assert w is not None
        h, head = end.pop() if end else None, None
        if self.softmax:
            s = state.values[self.target].softmax(-1)
            if self.target in self.segment.trained:
                assert h is not None
                head = softmax_curvature(s, w, h, -1).sum(0)
            w = softmax_derivative(s, w)
        self.segment.pull_back(state, bank, h, w, weighted, moved, sources)
        _join(sources, self.target, head)


@dataclass(frozen=True, eq=False)
class Waist:
    """Rows of the part before a narrow layer, columns of the part behind it."""

    before: Segment
    behind: Columns
    name: str = "waist"
    divisible: bool = False

    @property
    def kind(self) -> tuple:
        return self.name, self.before.kind, self.behind.kind

    def at(self, graph: Graph) -> Waist:
        return replace(self, before=self.before.at(graph), behind=self.behind.at(graph))

    @property
    def seeds(self) -> int:
        return self.before.seeds

    def bank(self, state: sweeps.State) -> Tensor:
        return self.behind.bank(state)

    def prepare(self, state: sweeps.State) -> dict[Any, Tensor]:
        return {**self.before.prepare(state), **self.behind.prepare(state)}

    def part(
        self, state: sweeps.State, bank: Tensor, weight: Tensor | None, sources: Sources
    ) -> Tensor:
        keep = weight is not None
        h, z, t, moved = self.behind.push(state, bank, keep)
        m = _products(z, t)
        rows, representers = self.before.pull(state, self.before.rows(state, bank), keep)
        n = sum(_products(a, b) for a, b in zip(rows, representers, strict=True))
        assert isinstance(n, Tensor)
        values = per_example(m * n)
        if weight is None:
            return values
        gram = self.behind.segment.gram
        along = [_doubled(_mix(n, t), weight), _doubled(_mix(n, h), weight) if gram else None]
        end = [h] if self.behind.reads_end else []
        if not self.before.gram:
            rows = []
        del h, z, t, n
        self.behind.pull_back(state, bank, end, along, moved, sources)
        q = [_doubled(_mix(m, part), weight) for part in representers]
        mixed = [_doubled(_mix(m, part), weight) for part in rows] if self.before.gram else []
        del representers
        self.before.push_back(state, bank, rows, q, mixed, sources)
        return values


def _products(a: Tensor, b: Tensor) -> Tensor:
    """⟨a⟨i⟩, b⟨j⟩⟩ per example: (batch, k, k)."""
    left, right = (t.flatten(2).transpose(0, 1) for t in (a, b))
    return left @ right.transpose(1, 2)


def _mix(m: Tensor, t: Tensor) -> Tensor:
    """Σ_j m_ij t⟨j⟩ per example, m symmetric."""
    mixed = (m.to(t.dtype) @ t.flatten(2).transpose(0, 1)).transpose(0, 1)
    return mixed.reshape(t.shape)


@dataclass(frozen=True, eq=False)
class Diagonal:
    """The contractive auto-encoder's closed form: no work per seed."""

    body: Plan
    weight: int
    target: int
    trained: frozenset[int]
    name: str = "diagonal"
    divisible: bool = False
    seeds: int = 1

    @property
    def kind(self) -> tuple:
        return (self.name,)

    def at(self, graph: Graph) -> Diagonal:
        return replace(self, body=self.body.at(graph))

    def bank(self, state: sweeps.State) -> Tensor:
        return torch.zeros(1, dtype=torch.long, device=state.values[self.target].device)

    def prepare(self, state: sweeps.State) -> dict[Any, Tensor]:
        return {}

    def part(
        self, state: sweeps.State, bank: Tensor, weight: Tensor | None, sources: Sources
    ) -> Tensor:
        matrix, out = state.values[self.weight], state.values[self.target]
        ones = torch.ones_like(out)
        (a,) = sweeps.backward(self.body, state, ones, keep=weight is not None)
        assert a is not None
        squares = matrix.square().sum(1)
        values = per_example(a.square() * squares)
        if weight is None:
            return values
        along = _doubled(a[None], weight)[0]
        q = along * squares
        sweeps.tangent(self.body, state, {self.body.penalised[0]: q}, sources=sources)
        if self.weight in self.trained:
            _join(sources, self.weight, (along * a).sum(0)[:, None] * matrix)
        return values


Candidate = Rows | Columns | Waist | Diagonal


def candidates(plan: Plan, penalty: Jacobian, watch: Any = None) -> tuple[list[Candidate], dict]:
    """(those that apply, why the others do not by name)."""
    ways: list[Candidate] = [_rows(plan, penalty, watch)]
    why: dict[str, str] = {}
    reason = _exact_euclidean(plan, penalty)
    for name, make in (("columns", _columns), ("waist", _waist), ("diagonal", _diagonal)):
        made = reason or make(plan, penalty, watch)
        if isinstance(made, str):
            why[name] = made
        else:
            ways.append(made)
    return ways, why


def _rows(plan: Plan, penalty: Jacobian, watch: Any) -> Rows:
    segment = make_segment(
        plan, plan.penalised, plan.target, by_rows=True, space=penalty.space,
        unit_seeds=penalty.unit_seeds, carries=penalty.varying, watch=watch,
    )  # fmt: skip
    return Rows(segment, penalty, plan.target)


def _exact_euclidean(plan: Plan, penalty: Jacobian) -> str | None:
    if not penalty.whole:
        return "only some outputs or directions count"
    if not isinstance(penalty.space, Euclidean):
        return "the input's space is not Euclidean"
    if len(plan.penalised) != 1:
        return "several inputs are penalised"
    return coupling(plan)


def _columns(
    plan: Plan, penalty: Jacobian, watch: Any, start: tuple[int, ...] | None = None
) -> Columns:
    softmax = penalty.of == "softmax"
    segment = make_segment(
        plan, start or plan.penalised, plan.target, by_rows=False, gram=not softmax, watch=watch
    )
    return Columns(segment, softmax, plan.target)


def _waist(plan: Plan, penalty: Jacobian, watch: Any) -> Waist | str:
    cut = _narrowest(plan)
    if cut is None:
        return "no layer between input and output is narrower than both"
    before = make_segment(plan, plan.penalised, cut, by_rows=True, watch=watch)
    return Waist(before, _columns(plan, penalty, watch, (cut,)))


def _narrowest(plan: Plan) -> int | None:
    """The narrowest value of shape (batch, k) that every path crosses, k below both ends."""
    graph = plan.graph
    narrow = min(width(graph, plan.penalised[0]), width(graph, plan.target))
    last = {v: i for i, s in enumerate(plan.steps) for v in s.node.inputs}
    open_values = set(plan.penalised)
    best = None
    for i, step in enumerate(plan.steps):
        if any(step.pull):
            open_values.update(step.node.outputs)
        open_values = {v for v in open_values if last.get(v, -1) > i}
        if len(open_values) == 1:
            (v,) = open_values
            if width(graph, v) < narrow:
                best, narrow = v, width(graph, v)
    return best


def _diagonal(plan: Plan, penalty: Jacobian, watch: Any) -> Diagonal | str:
    if penalty.of != "output":
        return "softmax is not coordinate-wise"
    end = first_dense(plan, plan.penalised[0], plan.target)
    if end is None:
        return "the input does not go through one dense layer alone"
    body = make_plan(plan.graph, (end.y,), plan.target, plan.wanted, varying_seed=False)
    for step in body.steps:
        moving = [v for v, on in zip(step.node.inputs, step.pull, strict=True) if on]
        if any(step.pull) and not (step.rule.diagonal and len(moving) == 1):
            return f"{step.node.op} behind the first layer is not coordinate-wise"
    return Diagonal(body, end.weight, plan.target, plan.trained)


# --------------------------------------------------------------------- example by example


def coupling(plan: Plan) -> str | None:
    """Why one example's output may depend on another's input; None where that is excluded.

    Operators declare that they work example by example along their first axis, or are taken to
    couple.
    """
    graph = plan.graph
    batch = graph.shape(plan.penalised[0])[0]
    for step in plan.steps:
        if not any(step.pull):
            continue
        node = step.node
        moving = [v for v, on in zip(node.inputs, step.pull, strict=True) if on]
        along = all(graph.shape(v)[:1] == (batch,) for v in (*moving, node.outputs[0]))
        call = sweeps.call_of(plan, step, sweeps.State({}))
        if not (along and step.rule.separates(call, step.pull)):
            return f"{node} may couple the examples of a batch"
    return None


def unit_vectors(index: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """e⟨i⟩ for each i in `index`, counted in one example of a batch of `shape`, the same for every
    example: (len(index), *shape)."""
    batch, *one = shape
    positions = torch.arange(math.prod(one), device=index.device)
    hot = (positions == index[:, None]).to(dtype)
    return hot.reshape(-1, 1, *one).expand(-1, batch, *one)
