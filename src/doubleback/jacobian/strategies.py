"""The ways to sweep ‖J‖²_F and its gradient: what each costs is for `pricing` to say.

    rows      C cotangents e⟨i⟩, or directions vᵢ: Σ‖J*vᵢ‖²
    columns   dim x tangents e⟨k⟩: Σ‖J e⟨k⟩‖²
    waist     J = AB where every path crosses a layer of width k: ‖AB‖² = ⟨AᵀA, BBᵀ⟩, k columns
              of A and k rows of B
    diagonal  J = diag(g′)W, one dense layer under a coordinate-wise g: Σ_i g′(z_i)²‖W_i‖²

Each candidate's `part(state, bank, weight, sources)` sweeps the seeds of one slice of its bank,
returns the penalty per example and adds the curvature sources for the gradient of
Σ_b weight_b·penalty_b. Without a weight there is no gradient, and the tangents are not swept.
`prepare(state)` yields what all parts share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import sweeps
from ..penalties import Jacobian
from ..plan import Plan, make_plan
from ..rules import add, softmax_curvature, softmax_derivative
from ..spaces import Euclidean, per_example
from .segments import Segment, Sources, first_dense, make_segment, width


def _summed(pairs: Tensor) -> Tensor:
    """(seeds, batch, …) → one number per example, in float32 at least."""
    seeds, batch = pairs.shape[:2]
    return per_example(pairs.flatten(0, 1)).reshape(seeds, batch).sum(0)


def _weighted(t: Tensor, weight: Tensor) -> Tensor:
    """2·weight_b·t⟨i⟩_b; a weight is not rounded to 16 bits before it multiplies."""
    return ((2 * weight).reshape(1, -1, *(1,) * (t.dim() - 2)) * t).to(t.dtype)


def _join(sources: Sources, value: int, part: Tensor | None) -> None:
    if part is not None:
        sources[value] = add(sources.pop(value, None), part)  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class Rows:
    """Cotangents, one per output or direction."""

    segment: Segment
    penalty: Jacobian
    target: int
    name: str = "rows"
    divisible: bool = True

    @property
    def seeds(self) -> int:
        return self.penalty.seed_count(self.segment.body.graph.shape(self.target))

    def bank(self, state: sweeps.State) -> Tensor:
        return self.penalty.bank(state.values[self.target])

    def prepare(self, state: sweeps.State) -> dict[Any, Tensor]:
        return self.segment.prepare(state)

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
        q = [_weighted(part, weight * scale) for part in t]
        mixed = [_weighted(part, weight * scale) for part in z] if segment.gram else []
        index = bank if self.penalty.unit_seeds else None
        del seeds, t
        if not segment.gram:
            z = []
        h = segment.push_back(state, index, z, q, mixed, sources)
        if self.penalty.varying and h is not None and self.target in segment.trained:
            _join(sources, self.target, self.penalty.head_of(out, bank, h))
        return values


@dataclass(frozen=True, eq=False)
class Columns:
    """Tangents, one per input coordinate; softmax: of the class probabilities of the output."""

    segment: Segment
    softmax: bool
    target: int
    name: str = "columns"
    divisible: bool = True

    @property
    def seeds(self) -> int:
        return self.segment.seeds

    def bank(self, state: sweeps.State) -> Tensor:
        return torch.arange(self.seeds, device=state.values[self.target].device)

    def prepare(self, state: sweeps.State) -> dict[Any, Tensor]:
        return self.segment.prepare(state)

    def part(
        self, state: sweeps.State, bank: Tensor, weight: Tensor | None, sources: Sources
    ) -> Tensor:
        h, z, t, moved = self.push(state, bank, weight is not None)
        values = _summed(z * t)
        if weight is not None:
            along = [_weighted(t, weight), _weighted(h, weight) if self.segment.gram else None]
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
        along = [_weighted(_mix(n, t), weight), _weighted(_mix(n, h), weight) if gram else None]
        end = [h] if self.behind.reads_end else []
        if not self.before.gram:
            rows = []
        del h, z, t, n
        self.behind.pull_back(state, bank, end, along, moved, sources)
        q = [_weighted(_mix(m, part), weight) for part in representers]
        mixed = [_weighted(_mix(m, part), weight) for part in rows] if self.before.gram else []
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
        along = _weighted(a[None], weight)[0]
        q = along * squares
        sweeps.tangent(self.body, state, {self.body.penalised[0]: q}, sources=sources)
        if self.weight in self.trained:
            _join(sources, self.weight, (along * a).sum(0)[:, None] * matrix)
        return values


Candidate = Rows | Columns | Waist | Diagonal


def candidates(plan: Plan, penalty: Jacobian, watch: Any = None) -> tuple[list[Candidate], dict]:
    """(those that apply, why the others do not by name)."""
    found: list[Candidate] = [_rows(plan, penalty, watch)]
    why: dict[str, str] = {}
    reason = _exact_euclidean(plan, penalty)
    for name, make in (("columns", _columns), ("waist", _waist), ("diagonal", _diagonal)):
        made = reason or make(plan, penalty, watch)
        if isinstance(made, str):
            why[name] = made
        else:
            found.append(made)
    return found, why


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
