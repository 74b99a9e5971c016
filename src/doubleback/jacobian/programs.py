"""Penalties with many seeds as programs: forward sweep, then seeds in chunks, then one second
sweep (theory §5, §6).

    open    forward sweep
    part    for each chunk of seeds: backward and tangent sweep; penalty and sources add up
    close   second sweep, from the sources of all seeds and the gradients of the outputs

What is kept between the phases does not grow with the number of seeds. Each phase is a function
of tensors, so it is replayed or compiled like the four sweeps of a single seed.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import sweeps
from ..dtypes import accumulation, lifted
from ..errors import MemoryWarning
from ..graph import Graph
from ..plan import Plan, Stretch, make_plan
from ..rules import add
from ..run import Arrived, First, FlattenedProgram, Gradients, PhasedSweeps, Replay
from ..spaces import dual_square
from .strategies import Candidate, Columns, Sources, Waist, finished, weighted, zero

if TYPE_CHECKING:
    from ..penalties import Directions, SpectralNorm
    from .planner import Decision


@dataclass
class Swept:
    """What passes from `first` to `last`: the forward sweep's values, and the summed sources."""

    values: dict[int, Tensor]
    saved: dict[int, Any]
    sources: Sources
    bank: Tensor | None

    @property
    def state(self) -> sweeps.State:
        return sweeps.State(dict(self.values), dict(self.saved))


@dataclass(frozen=True, eq=False)
class Phases(PhasedSweeps):
    """What the programs of this module share: the phases `open` and `close`."""

    def to_price(self, replay: Replay) -> Phases:
        return replace(self, debug=False, replay=replay)

    def _open(self, leaves: Mapping[int, Tensor]) -> tuple[list[Tensor], dict[int, Tensor], Swept]:
        outputs, mutated, values, saved = self._opened(leaves)
        return outputs, mutated, Swept(values, saved, {}, None)

    def _close(
        self, swept: Swept, sources: Sources, factor: Tensor | None,
        grads: Mapping[int, Tensor | None], keep: bool, stretches: Sequence[Stretch],
    ) -> Iterator[Gradients]:  # fmt: skip
        def run(here: Phases, nested: Any) -> Iterator[Gradients]:
            values, saved, summed, by, given = nested
            gamma = finished(summed, values)
            if not keep:
                summed.clear()
            if by is not None:
                for v in gamma:
                    gamma[v] = _times(gamma[v], by)
            for v, grad in given.items():
                if grad is not None:
                    gamma[v] = add(gamma.get(v), grad)  # type: ignore[assignment]
            state = sweeps.State(dict(values), dict(saved)) if keep else sweeps.State(values, saved)
            return here._second_sweep(state, gamma, keep, stretches)

        seeds = {v: g for v, g in grads.items() if g is not None and v in self.plan.trained}
        nested = (swept.values, swept.saved, sources, factor, seeds)
        consume = () if keep else (swept.values, swept.saved, sources)
        return self.replay.parts(self, ("close", keep), run, nested, consume, len(stretches) > 1)

    def _last(
        self, arrived: Arrived, stretches: Sequence[Stretch]
    ) -> tuple[Gradients, Iterator[Gradients]]:
        state, _, grad_outputs, grad_values, keep = arrived
        factor, sources = None, {}
        if grad_values is not None:
            if self.penalty.reduction == "none":
                sources = self._again(state, grad_values)
            else:
                sources = state.sources
                factor = grad_values[0] / self._base(grad_values.shape[0])
        swept = self._close(state, sources, factor, grad_outputs, keep, stretches)
        return [None] * len(self.asked), swept

    def _base(self, batch: int) -> float:
        """The weight of each example in the reduced penalty."""
        return 1 / batch if self.penalty.reduction == "mean" else 1.0

    def _weight(self, leaves: Mapping[int, Tensor], out: Tensor) -> Tensor:
        """The same for every example: a row of the penalised input, whatever rows `out` has."""
        batch = leaves[self.plan.penalised[0]].shape[0]
        dtype = accumulation(out.dtype).to_real()
        return torch.full((batch,), self._base(batch), dtype=dtype, device=out.device)

    @abstractmethod
    def _again(self, swept: Swept, weight: Tensor) -> Sources:
        """The sources for other weights of the examples than those that `first` knew."""


@dataclass(frozen=True, eq=False)
class JacobianProgram(Phases):
    """‖J‖²_F by one of the candidates, `chunk` seeds at a time; decision: why so; joined: whether
    `step` may take its phases together."""

    candidate: Candidate = field(kw_only=True)
    chunk: list[int] = field(kw_only=True)
    decision: Decision | None = field(default=None, kw_only=True)
    joined: bool = field(default=True, kw_only=True)

    @property
    def kind(self) -> Any:
        return self.candidate.kind

    def at(self, graph: Graph) -> JacobianProgram:
        return replace(self, plan=self.plan.at(graph), candidate=self.candidate.at(graph))

    def first(self, leaves: Mapping[int, Tensor], extra: Sequence[Any], keep: bool = True) -> First:
        outputs, mutated, swept = self._open(leaves)
        out = swept.values[self.plan.target]
        counted = isinstance(self.candidate, (Columns, Waist))  # by sizes, not off the output
        here = self.replay.here(self) if counted else self
        swept.bank = here.candidate.bank(swept.state)
        now = keep and self.penalty.reduction != "none"
        values, swept.sources = self._sweep(swept, self._weight(leaves, out) if now else None)
        return First(outputs, values, mutated, swept if keep else None)

    def step(self, leaves, extra, loss, target, weight) -> tuple:
        """All phases in one flat graph while every seed is swept at once; else phase by phase."""
        seeds = self.candidate.seeds
        if self.debug or self.for_one_call or not self.joined or self.chunk[0] < seeds:
            return super().step(leaves, extra, loss, target, weight)
        try:
            return self._whole.step(leaves, extra, loss, target, weight)
        except torch.OutOfMemoryError:
            self._halve(seeds)
            return super().step(leaves, extra, loss, target, weight)

    @cached_property
    def _whole(self) -> FlattenedProgram:
        phases = replace(self, replay=Replay(False, None), joined=False)
        return FlattenedProgram(phases, self.replay)

    def _shared(self, state: sweeps.State) -> dict[Any, Tensor]:
        return self.candidate.prepare(state)

    def _again(self, swept: Swept, weight: Tensor) -> Sources:
        return self._sweep(swept, weight)[1]

    def _sweep(self, swept: Swept, weight: Tensor | None) -> tuple[Tensor, Sources]:
        """Every seed, chunk by chunk; when a chunk does not fit, all over with half of it."""
        bank = swept.bank
        assert bank is not None
        total: Tensor | None = None
        sources: Sources = {}
        done = 0
        while done < bank.shape[0]:
            size = min(self.chunk[0], bank.shape[0] - done)
            try:
                values, sources = self._part(swept, bank[done : done + size], weight, sources)
            except torch.OutOfMemoryError:
                self._halve(size)
                total, sources, done = None, {}, 0
                continue
            total = add(total, values)
            done += size
        assert total is not None
        return total, sources

    def _part(
        self, swept: Swept, bank: Tensor, weight: Tensor | None, sources: Sources
    ) -> tuple[Tensor, Sources]:
        """One chunk: (its share of the penalty, `sources` with its own added)."""

        def run(here: JacobianProgram, nested: Any) -> Any:
            values, saved, seeds, by, into = nested
            state = sweeps.State(dict(values), dict(saved))
            return here.candidate.part(state, seeds, by, into), into

        key = ("part", bank.shape[0], weight is None, not sources)
        nested = (swept.values, swept.saved, bank, weight, sources)
        return self.replay(self, key, run, nested, (sources,))

    def _halve(self, size: int) -> None:
        if size == 1 or not self.candidate.divisible:
            raise
        warned = len(self.chunk) > 1
        self.chunk[:] = [max(1, size // 2), size]
        torch.cuda.empty_cache()
        if not warned:
            warnings.warn(
                f"{size} seeds at a time did not fit into the device's memory; going on with "
                f"{self.chunk[0]} (set Jacobian(chunk=...) to choose)",
                MemoryWarning, stacklevel=2,
            )  # fmt: skip


@dataclass(frozen=True, eq=False)
class SpectralProgram(Phases):
    """σ₁ by power iteration. `carried` keeps v between calls."""

    penalty: SpectralNorm
    carried: dict[Any, Tensor] = field(kw_only=True)
    pushing: Plan = field(kw_only=True)

    @classmethod
    def build(
        cls, plan: Plan, penalty: SpectralNorm, debug: bool, replay: Replay, carried: dict
    ) -> SpectralProgram:
        pushing = make_plan(
            plan.graph, plan.penalised, plan.target, frozenset(), varying_seed=True, like=plan
        )
        return cls(plan, penalty, debug, replay=replay, carried=carried, pushing=pushing)

    def at(self, graph: Graph) -> SpectralProgram:
        return replace(self, plan=self.plan.at(graph), pushing=self.pushing.at(graph))

    def to_price(self, replay: Replay) -> SpectralProgram:
        return replace(self, debug=False, replay=replay, carried={})

    def first(self, leaves: Mapping[int, Tensor], extra: Sequence[Any], keep: bool = True) -> First:
        outputs, mutated, swept = self._open(leaves)
        out = swept.values[self.plan.target]
        swept.bank = self._direction(swept, out, keep)
        now = keep and self.penalty.reduction != "none"
        values, swept.sources = self._measure(swept, self._weight(leaves, out) if now else None)
        return First(outputs, values, mutated, swept if keep else None)

    def _direction(self, swept: Swept, out: Tensor, keep: bool) -> Tensor:
        """v after this call's iterations, from the last call's v where there is one."""
        penalty = self.penalty
        v = penalty.begin(out, self.carried)

        def run(here: SpectralProgram, nested: Any) -> Tensor:
            values, saved, w = nested
            state = sweeps.State(dict(values), dict(saved))
            for _ in range(penalty.iterations):
                w = penalty.normalised(here._round(state, w), w)
            return w

        v = self.replay(self, "improve", run, (swept.values, swept.saved, v))
        if keep:
            penalty.carry(self.carried, out, v)
        return v

    def _round(self, state: sweeps.State, v: Tensor) -> Tensor:
        """J J* v, adjoints taken in the penalty's spaces."""
        penalty = self.penalty
        xi = self._pulled(state, v, keep=False)
        _, along = dual_square(penalty.domain, xi)
        start = {x: q[None] for x, q in zip(self.plan.penalised, along, strict=True)}
        h, _ = sweeps.push(self.pushing, state, start, seeds=1, keep=False)
        return torch.zeros_like(v) if h is None else h[0]

    def _pulled(self, state: sweeps.State, v: Tensor, keep: bool) -> list[Tensor]:
        penalty = self.penalty
        xi = sweeps.backward(self.plan, state, penalty.covector(v), keep=keep)
        graph = self.plan.graph
        return [
            zero(graph, x) if u is None else u for x, u in zip(self.plan.penalised, xi, strict=True)
        ]

    def _measure(self, swept: Swept, weight: Tensor | None) -> tuple[Tensor, Sources]:
        def run(here: SpectralProgram, nested: Any) -> tuple[Tensor, Sources]:
            values, saved, v, by = nested
            state = sweeps.State(dict(values), dict(saved))
            xi = here._pulled(state, v, keep=by is not None)
            measured, q = here.penalty.measure(xi)
            if by is None:
                return measured, {}
            along = here.penalty.weighted(q, xi, by)
            start = dict(zip(here.plan.penalised, along, strict=True))
            return measured, sweeps.tangent(here.plan, state, start)[1]

        key = ("measure", weight is None)
        return self.replay(self, key, run, (swept.values, swept.saved, swept.bank, weight))

    def _again(self, swept: Swept, weight: Tensor) -> Sources:
        return self._measure(swept, weight)[1]


@dataclass
class Along(Swept):
    """The same with directions: what belongs to each, and ∇p there where the penalty's own
    arguments ask for a gradient."""

    directions: tuple[Tensor, ...] = ()
    q: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class DirectionsProgram(Phases):
    """Σ_i p_i(J*v⟨i⟩) over directions that are fixed before they are measured, `chunk` at a time.

    pull    J*z, as often as the penalty needs it to find its directions
    part    for each chunk of directions: backward and tangent sweep
    """

    penalty: Directions

    @property
    def pulls(self) -> tuple[int, int]:
        shape = self.plan.graph.shape(self.plan.target)
        return self.penalty.count(shape), self.penalty.drawn_rounds()

    def to_price(self, replay: Replay) -> DirectionsProgram:
        return replace(self, debug=False, replay=replay, penalty=self.penalty.cheap())

    def first(self, leaves: Mapping[int, Tensor], extra: Sequence[Any], keep: bool = True) -> First:
        penalty = self.penalty
        outputs, mutated, opened = self._open(leaves)
        swept = Along(opened.values, opened.saved, {}, None)
        out = swept.values[self.plan.target]
        swept.directions, total = self._improved(swept, penalty.start(out, *extra))
        now = keep and penalty.reduction != "none"
        if now or penalty.valued:
            weight = self._weight(leaves, out) if now else None
            values, swept.sources = self._sweep(swept, weight)
            total = values if total is None else total + values
        assert total is not None
        return First(outputs, total, mutated, swept if keep else None)

    def _last(
        self, arrived: Arrived, stretches: Sequence[Stretch]
    ) -> tuple[Gradients, Iterator[Gradients]]:
        own, swept = super()._last(arrived, stretches)
        state, values = arrived.state, arrived.values
        if self.asked and values is not None:
            own = self.penalty.own(self.asked, state.q, state.directions, values, *arrived.extra)
        return own, swept

    def _improved(self, swept: Along, bank: tuple[Tensor, ...]) -> tuple[tuple, Tensor | None]:
        """(the directions, what finding them adds to each example's value), part by part, with the
        same number of rounds for all."""
        penalty = self.penalty
        rounds = penalty.drawn_rounds()
        improved = [
            penalty.improved(tuple(t[one] for t in bank), self._puller(swept), rounds)
            for one in self._parts(bank[0].shape[0])
        ]
        if len(improved) == 1:
            return improved[0]
        joined = tuple(torch.cat(parts) for parts in zip(*(b for b, _ in improved), strict=True))
        values = [value for _, value in improved if value is not None]
        return joined, torch.stack(values).sum(0) if values else None

    def _puller(self, swept: Along) -> Callable[[Tensor], Tensor]:
        def run(here: DirectionsProgram, nested: Any) -> Tensor:
            values, saved, z = nested
            return here._pulled(sweeps.State(dict(values), dict(saved)), z, keep=False)[0]

        given = swept.values, swept.saved
        return lambda z: self.replay(self, ("pull", z.shape[0]), run, (*given, z))

    def _pulled(self, state: sweeps.State, z: Tensor, keep: bool) -> list[Tensor]:
        """J*z⟨i⟩; a single direction goes without an axis of its own, as in the four sweeps."""
        plan, count = self.plan, z.shape[0]
        alone = count == 1
        xi = sweeps.backward(
            plan, state, z[0] if alone else z, keep=keep, watch=self.watch,
            seeds=None if alone else count,
        )  # fmt: skip
        return [
            zero(plan.graph, x, count) if u is None else u[None] if alone else u
            for x, u in zip(plan.penalised, xi, strict=True)
        ]

    def _parts(self, count: int) -> list[slice]:
        size = self.penalty.chunk or count
        return [slice(i, min(i + size, count)) for i in range(0, count, size)]

    def _sweep(self, swept: Along, weight: Tensor | None) -> tuple[Tensor, Sources]:
        total: Tensor | None = None
        sources: Sources = {}
        gradients: list[list[Tensor]] = []
        for one in self._parts(swept.directions[0].shape[0]):
            bank = tuple(t[one] for t in swept.directions)
            values, sources, q = self._part(swept, bank, weight, sources)
            total = add(total, values)
            gradients.append(q)
        assert total is not None
        if self.asked:
            swept.q = [torch.cat(parts) for parts in zip(*gradients, strict=True)]
        return total, sources

    def _part(
        self, swept: Along, bank: tuple[Tensor, ...], weight: Tensor | None, sources: Sources
    ) -> tuple[Tensor, Sources, list[Tensor]]:
        """One chunk: (its share of the penalty, `sources` with its own added, ∇p if asked for)."""

        def run(here: DirectionsProgram, nested: Any) -> Any:
            values, saved, given, by, into = nested
            state = sweeps.State(dict(values), dict(saved))
            xi = here._pulled(state, given[0], keep=by is not None)
            measured, q = here.penalty.measured(xi, given)
            own = q if here.asked else []
            if by is not None:
                here._pushed(state, [weighted(u, by) for u in q], into)
            return measured, into, own

        key = ("part", weight is None, not sources)
        nested = (swept.values, swept.saved, bank, weight, sources)
        return self.replay(self, key, run, nested, (sources,))

    def _pushed(self, state: sweeps.State, q: list[Tensor], sources: Sources) -> None:
        count, watch = q[0].shape[0], self.watch
        alone = count == 1
        start = {x: u[0] if alone else u for x, u in zip(self.plan.penalised, q, strict=True)}
        sweeps.tangent(
            self.plan, state, start, watch=watch, seeds=None if alone else count, sources=sources
        )

    def _again(self, swept: Swept, weight: Tensor) -> Sources:
        assert isinstance(swept, Along)
        return self._sweep(swept, weight)[1]


def _times(t: Tensor, factor: Tensor) -> Tensor:
    """factor·t; a factor of float32 is not rounded to 16 bits before it multiplies."""
    wide = lifted(t)
    return (wide * factor.to(wide.dtype)).to(t.dtype)
