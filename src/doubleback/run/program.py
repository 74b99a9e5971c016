"""The sweeps of a plan with a penalty, as functions of tensors: a `Program`. Its sweeps run node by
node (`FourSweeps`), or by flat graphs: for the sizes of one call (`FlattenedProgram`), or for all
sizes (`OpenProgram`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .. import sweeps
from .._torch import pytree
from ..graph import Graph, Node, memory
from ..kernels import had_again, taps_first
from ..plan import Plan, Stretch
from ..rules import add
from .flattening import Family, Flat, Input, Pack, Replay, Variant, in_parts, put

Gradients = list[Tensor | None]
Step = tuple[list[Tensor], Tensor, Tensor, Gradients, dict[int, Tensor]]


_Traced = Callable[[Any, Sequence[Tensor], Sequence[Any]], Any]  # of program, tensors, open sizes


class First(NamedTuple):
    """What the first two sweeps yield: outputs, penalty per example, buffers to write, and what
    the last two will need."""

    outputs: list[Tensor]
    values: Tensor
    mutated: dict[int, Tensor]
    state: Any


class Arrived(NamedTuple):
    """What the last two sweeps start from: what `first` left and the penalty's own arguments, and
    what arrived at the outputs, by number, and at the values. keep: `state` is read again later."""

    state: Any
    extra: Sequence[Any]
    outputs: Mapping[int, Tensor | None]
    values: Any
    keep: bool = False


class Program(ABC):
    """What computes a network's outputs with a penalty, and the gradients of both.

    leaves: the graph's values that the sweeps start from, by number; extra: the penalty's own
    arguments. decision: why it sweeps a Jacobian as it does; pulls: directions that are swept one
    by one, and backward sweeps by which each is found before, None where v is one direction;
    no_graph: why a CUDA graph cannot hold it; for_one_call: whether it is made anew at every call,
    which takes no time.
    """

    plan: Plan
    penalty: Any
    decision: Any = None
    pulls: tuple[int, int] | None = None
    no_graph: str | None = None
    for_one_call: bool = False

    @property
    def prelude(self) -> Sequence[Node]:
        """What runs before the sweeps, under autograd."""
        return self.plan.prelude

    @abstractmethod
    def first(self, leaves: Mapping[int, Tensor], extra: Sequence[Any], keep: bool = True) -> First:
        """Forward and backward sweep. `keep`: for a `last` to come."""

    @abstractmethod
    def last(self, arrived: Arrived) -> Gradients:
        """Tangent and second sweep: gradients of the penalised inputs, of the effective parameters
        and of those of the penalty's own tensors that ask for one."""

    @property
    def stretches(self) -> Sequence[Stretch]:
        """The second sweep in stretches that `parts` may be asked for; one, where its gradients
        are complete all at once."""
        return self.plan.stretches

    @abstractmethod
    def parts(self, stretches: Sequence[Stretch], arrived: Arrived) -> Iterator[Gradients]:
        """The gradients of `last` as they become complete: of the penalty's own tensors first, then
        of each stretch."""

    @abstractmethod
    def step(
        self, leaves: Mapping[int, Tensor], extra: Sequence[Any], loss: Any, target: Any,
        weight: Tensor | None,
    ) -> Step:  # fmt: skip
        """All four sweeps: (outputs, loss, penalty, gradients of loss + weight·penalty, buffers).

        The loss is the mean over the rows of the output, the penalty is reduced over those of the
        penalised input: of a network from atoms to molecules, one loss per molecule and one
        penalty per atom. Without a weight this is a plain training step: forward and second sweep
        alone.
        """

    @abstractmethod
    def results(self, values: Any) -> tuple[Tensor, ...]:
        """What is handed out of the values."""

    @abstractmethod
    def along(self, grads: Sequence[Tensor | None], batch: int) -> Any:
        """What arrived at the values, from what arrived at the results; None for nothing."""

    @abstractmethod
    def to_price(self, replay: Replay) -> Program:
        """The same program, to be run once on tensors without numbers: nothing is checked and
        nothing carried on. replay: flat graphs for it, where it has any."""


@dataclass(frozen=True)
class Request:
    """What a penalty makes its program for.

    plan(): the plan at this call's sizes; asked: the places of those among the penalty's own
    tensors that ask for a gradient; carried: what earlier calls left for later ones; known: whether
    no loss beside the penalty is a caller's code; whole(make): the program `make(plan)`, with all
    of its sweeps flattened together; phased(make, flat, exact): `make(plan, replay)`, of phases
    that are flattened one by one if `flat`; exact: made for the very sizes of a call.
    """

    plan: Callable[[], Plan]
    asked: tuple[int, ...]
    debug: bool
    carried: dict[Any, Tensor]
    known: bool
    whole: Callable[[Callable[[Plan], FourSweeps]], Program]
    phased: Callable[[Callable[[Plan, Replay], Any], bool, bool], Program]


# ----------------------------------------------------------------------------- node by node


@dataclass(frozen=True, eq=False)
class FourSweeps(Program):
    """The sweeps of one plan with its penalty, as functions of tensors.

    asked: the places of those tensors among the penalty's flattened extras that ask for a gradient.
    """

    kind: ClassVar[Any] = None  # which of several programs for one plan, where there are such

    plan: Plan
    penalty: Any
    debug: bool = False
    asked: tuple[int, ...] = field(default=(), kw_only=True)

    def at(self, graph: Graph) -> Any:
        """The same program at other sizes."""
        return replace(self, plan=self.plan.at(graph))

    def to_price(self, replay: Any) -> Any:
        return replace(self, debug=False)

    @property
    def watch(self) -> sweeps.Watch | None:
        """What looks at every node's result while one is debugging."""
        return sweeps.finite_watch(self.plan) if self.debug else None

    def first(self, leaves: Mapping[int, Tensor], extra: Sequence[Any], keep: bool = True) -> First:
        plan, penalty, watch = self.plan, self.penalty, self.watch
        state = sweeps.forward(plan, self._laid_out(leaves), watch)
        outputs = [self._usual(state.values[v]) for v in plan.outputs]
        mutated = {name: state.values[v] for name, v in plan.mutations.items()}
        seed = penalty.seed(state.values[plan.target], *extra)
        rows = self._rows(seed, plan.target)
        xi = sweeps.backward(plan, state, seed, keep=keep, watch=watch, seeds=rows)
        front = () if rows is None else (rows,)
        xi = [
            leaves[v].new_zeros(*front, *leaves[v].shape) if u is None else u
            for v, u in zip(plan.penalised, xi, strict=True)
        ]
        values = self._measured(state, xi, extra)
        return First(outputs, values, mutated, state if keep else None)

    def _rows(self, t: Tensor, value: int) -> int | None:
        """How many cotangents or tangents t holds along an axis in front of those that the value
        has; None for one, without such an axis."""
        return None

    def _measured(self, state: sweeps.State, xi: list[Tensor], extra: Sequence[Any]) -> Any:
        """p per example; what the tangents will start from goes into the state."""
        penalty = self.penalty.at(state.values[self.plan.target], *extra)
        values, state.q0 = penalty.measure(xi, *extra)
        if self.asked or self.penalty.coupled:
            state.xi[sweeps.INPUTS] = xi
        return values

    def _start(self, state: sweeps.State, along: Any, extra: Sequence[Any]) -> dict[int, Tensor]:
        """q₀ at each penalised input, for what arrived at the values."""
        xi = state.xi.get(sweeps.INPUTS, ())
        penalty = self.penalty.at(state.values.get(self.plan.target), *extra)
        q0 = penalty.weighted(state.q0, xi, along, *extra)
        return dict(zip(self.plan.penalised, q0, strict=True))

    def results(self, values: Any) -> tuple[Tensor, ...]:
        return (self.penalty.reduce(values),)

    def along(self, grads: Sequence[Tensor | None], batch: int) -> Any:
        return None if grads[0] is None else self.penalty.unreduce(grads[0], batch)

    def last(self, arrived: Arrived) -> Gradients:
        own, swept = self._last(arrived, self.plan.whole)
        return [*next(swept), *own]

    def parts(self, stretches: Sequence[Stretch], arrived: Arrived) -> Iterator[Gradients]:
        own, swept = self._last(arrived, stretches)
        yield own
        yield from swept

    def _last(
        self, arrived: Arrived, stretches: Sequence[Stretch]
    ) -> tuple[Gradients, Iterator[Gradients]]:
        """(the gradients of what is `asked`; those of each stretch, as it is swept).

        With q₀ = ḡ⊙∇p and h the tangent of the output, the second sweep starts from the
        outputs' gradients plus the head (∂v/∂out)* h plus the curvature sources.
        """
        state, extra, grad_outputs, grad_values, keep = arrived
        plan, penalty, watch = self.plan, self.penalty, self.watch
        gamma: dict[int, Tensor] = {}
        own: Gradients = [None] * len(self.asked)
        if grad_values is not None:
            xi = state.xi.get(sweeps.INPUTS, ())
            start = self._start(state, grad_values, extra)
            if not keep:
                state.q0 = []
            rows = next((self._rows(q, v) for v, q in start.items()), None)
            h, gamma = sweeps.tangent(plan, state, start, keep=keep, watch=watch, seeds=rows)
            if self.asked:
                out = state.values[plan.target]
                own = penalty.pull(self.asked, out, h, xi, grad_values, *extra)
            if plan.needs_head_tangent and h is not None and plan.target in plan.trained:
                head = penalty.head(state.values[plan.target], h, *extra)
                join(gamma, plan.target, head)
        self._join_outputs(gamma, grad_outputs)
        return own, self._second_sweep(state, gamma, keep, stretches)

    def _join_outputs(self, gamma: dict[int, Tensor], grads: Mapping[int, Tensor | None]) -> None:
        """Add what arrived at the outputs."""
        for v, grad in grads.items():
            if v in self.plan.trained:
                join(gamma, v, grad)

    def _second_sweep(
        self, state: sweeps.State, gamma: dict, keep: bool, stretches: Sequence[Stretch]
    ) -> Iterator[Gradients]:
        """The gradients of each stretch."""
        plan, watch = self.plan, self.watch
        for stretch in stretches:
            gamma = sweeps.second(plan, state, gamma, keep=keep, watch=watch, steps=stretch.steps)
            grads = [gamma.pop(v, None) if v in plan.trained else None for v in stretch.values]
            # each in memory of its own: callers may write to what they are handed
            taken = set() if stretch is stretches[-1] else {memory(t) for t in gamma.values()}
            for i, g in enumerate(grads):
                if g is not None:
                    grads[i] = self._usual(g.clone() if memory(g) in taken else g)
                    taken.add(memory(g))
            yield grads

    def _laid_out(self, leaves: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
        """Images and filters in the layouts of the plan."""
        plan = self.plan
        if not plan.channels_last and not plan.taps_first:
            return leaves
        laid = dict(leaves)
        for v, t in leaves.items():
            if v in plan.channels_last:
                laid[v] = t.contiguous(memory_format=torch.channels_last)
            elif v in plan.taps_first:
                laid[v] = taps_first(t)
        return laid

    def _usual(self, t: Tensor) -> Tensor:
        """Back to the usual layout."""
        laid = self.plan.channels_last or self.plan.taps_first
        return t.contiguous() if laid and t.dim() == 4 else t

    def step(
        self, leaves: Mapping[int, Tensor], extra: Sequence[Any], loss: Any, target: Any,
        weight: Tensor | None,
    ) -> Step:  # fmt: skip
        plan, penalty = self.plan, self.penalty
        values = None
        if weight is None:
            state = sweeps.forward(plan, self._laid_out(leaves))
            outputs = [self._usual(state.values[v]) for v in plan.outputs]
            mutated = {name: state.values[v] for name, v in plan.mutations.items()}
        else:
            outputs, values, mutated, state = self.first(leaves, extra)
            assert state is not None
        out = state.values[plan.target]
        loss_value, grad_out = loss_gradient(penalty, loss, out, target, extra)
        grad_values = None
        penalty_value = torch.zeros((), device=out.device)
        if values is not None and weight is not None:
            penalty_value = penalty.reduce(values)
            per_value = weight.to(values.dtype).expand_as(values)
            mean = penalty.reduction == "mean"
            grad_values = per_value / values.numel() if mean else per_value
        grads = self.last(Arrived(state, extra, {plan.target: grad_out}, grad_values))
        return outputs, loss_value, penalty_value, grads, mutated


def loss_gradient(
    penalty: Any, loss: Any, out: Tensor, target: Any, extra: Sequence[Any]
) -> tuple[Tensor, Tensor | None]:
    """(the mean of the losses, its gradient in the output)."""
    if loss is None:
        return torch.zeros((), device=out.device), None
    losses = loss.values(out, target)
    gradient = penalty.seed(out, *extra) if penalty.shares(loss) else loss.gradient(out, target)
    return losses.mean(), gradient / losses.numel()


def join(gamma: dict[int, Tensor], value: int, grad: Tensor | None) -> None:
    if grad is not None:
        gamma[value] = add(gamma.get(value), grad)  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class GradientProgram(FourSweeps):
    """The sweeps of a network that returns ξ₀ = J*v itself: one value for each penalised input, and
    what arrives there is q₀. `penalty` is what knows v; where there are several, ξ₀ and q₀ have
    one row for each."""

    def _rows(self, t: Tensor, value: int) -> int | None:
        meta = self.plan.graph.values[value]
        assert meta is not None
        return t.shape[0] if t.dim() > len(meta.shape) else None

    def _measured(self, state: sweeps.State, xi: list[Tensor], extra: Sequence[Any]) -> Any:
        kept = pytree.tree_leaves((state.values, state.xi))
        held = {memory(t) for t in kept if isinstance(t, Tensor)}
        # a copy of what is held: it is the caller's, who may write to it
        return [u.clone() if memory(u) in held else u for u in map(self._usual, xi)]

    def _start(self, state: sweeps.State, along: Any, extra: Sequence[Any]) -> dict[int, Tensor]:
        metas = self.plan.graph.values
        return {
            v: q.to(metas[v].dtype)  # type: ignore[union-attr]
            for v, q in zip(self.plan.penalised, along, strict=True)
            if q is not None
        }

    def results(self, values: Any) -> tuple[Tensor, ...]:
        return tuple(values)

    def along(self, grads: Sequence[Tensor | None], batch: int) -> Any:
        return None if all(g is None for g in grads) else list(grads)


@dataclass(frozen=True, eq=False)
class PhasedSweeps(FourSweeps):
    """Sweeps that something else happens between: phases, each by a flat graph of its own."""

    replay: Replay = field(default_factory=lambda: Replay(False, None), kw_only=True)

    @property
    def for_one_call(self) -> bool:
        return self.replay.for_one_call

    @property
    def prelude(self) -> Sequence[Node]:
        return self.replay.prelude(self.plan)

    @property
    def stretches(self) -> Sequence[Stretch]:
        return _stretches(self.plan, self.replay.compiler)

    def _opened(self, leaves: Mapping[int, Tensor]) -> tuple[list, dict, dict, dict]:
        """The forward sweep: (outputs, buffers to write, the graph's values, what rules saved)."""
        self.replay.tick()
        leaves = self.replay.leaves(leaves)

        def run(here: PhasedSweeps, given: Mapping[int, Tensor]) -> Any:
            plan = here.plan
            state = sweeps.forward(plan, here._laid_out(given), here.watch)
            state.values.update(here._shared(state))
            own = {id(t) for t in given.values()}
            fresh = {v: t for v, t in state.values.items() if id(t) not in own}
            passed = [v for v, t in state.values.items() if id(t) in own]
            # clones: what the caller receives is not to alias an input
            outputs = [
                t.clone() if id(t) in own else t
                for t in (here._usual(state.values[v]) for v in plan.outputs)
            ]
            mutated = {place: state.values[v] for place, v in plan.mutations.items()}
            return outputs, mutated, fresh, passed, state.saved

        outputs, mutated, fresh, passed, saved = self.replay(self, "open", run, leaves)
        return outputs, mutated, {**fresh, **{v: leaves[v] for v in passed}}, saved

    def _shared(self, state: sweeps.State) -> dict[Any, Tensor]:
        """What later phases read beside the network's values."""
        return {}


# --------------------------------------------------------------------------- by flat graphs


@dataclass
class FlatState:
    """What passes from a flat `first` to a flat `last`: the tensors of a `sweeps.State`, or what
    they are had again from.

    graphs: where both graphs are kept; numbers: the open sizes; leaves: how many inputs of `first`
    were values of the network's graph; outside: inputs of `first` among the tensors.
    """

    tensors: list[Tensor]
    flat: Flat
    key: Any
    graphs: Any
    numbers: tuple
    leaves: int
    outside: Sequence[Tensor] = ()

    def rebuild(self, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> sweeps.State:
        """The nested state, as the trace of `first` left it; numbers: the open sizes."""
        flat = self.flat
        if flat.recipe is None:
            values = iter(tensors)
            leaves = (x[0] if isinstance(x, tuple) else next(values) for x in flat.leaves)
            return sweeps.State(*put(flat.spec, leaves)[-1])
        count = len(numbers)
        kept = flat.leaves[flat.public :]
        inputs = [x.number for x in kept if isinstance(x, Input)]
        given = iter(tensors[len(inputs) :])
        inside = [numbers[i] if i < count else next(given) for i in flat.recipe.inputs]
        again = flat.recipe([*inside, *given])
        had_again(again)
        own, same = iter(again), iter(tensors)
        leaves = (
            x[0] if isinstance(x, tuple) else next(same if isinstance(x, Input) else own)
            for x in kept
        )
        return sweeps.State(*put(flat.spec[2][1], leaves))  # type: ignore[index]

    def stand_ins(self) -> list[Tensor]:
        """The same tensors without numbers."""
        flat, count = self.flat, len(self.numbers)
        if flat.recipe is None:
            return list(flat.results)
        places = [x.number for x in flat.leaves[flat.public :] if isinstance(x, Input)]
        places += [i - count for i in flat.recipe.inputs if i >= count]
        return [*(flat.inputs[i] for i in places), *flat.recipe.held]


class FlatProgram(Program):
    """A program whose sweeps run by flat graphs, once there are any.

    reference: one whose sweeps run node by node, at any sizes; compiler: whether flat graphs are
    compiled, or a mode of `torch.compile`.
    """

    def __init__(self, reference: Any, compiler: bool | str) -> None:
        self.reference, self.compiler = reference, compiler
        self.plan, self.penalty = reference.plan, reference.penalty

    @property
    @abstractmethod
    def program(self) -> Any:
        """The one whose sweeps run node by node, at this call's sizes."""

    @property
    def stretches(self) -> Sequence[Stretch]:
        return _stretches(self.plan, self.compiler)

    def results(self, values: Any) -> tuple[Tensor, ...]:
        return self.reference.results(values)

    def along(self, grads: Sequence[Tensor | None], batch: int) -> Any:
        return self.reference.along(grads, batch)

    @abstractmethod
    def _enter(self, leaves: Mapping[int, Tensor], *rest: Any) -> tuple[Any, Pack] | None:
        """Count a call: (where its flat graphs are, its arguments packed), None where the sweeps
        run node by node."""

    @abstractmethod
    def _pack(self, arrived: Arrived) -> Pack:
        """The arguments of `last`, packed, but for the state."""

    @abstractmethod
    def _flat(
        self, graphs: Any, key: Any, run: _Traced, given: Pack,
        state: FlatState | None = None, pass_inputs: bool = False,
    ) -> Flat | None:  # fmt: skip
        """The flat graph of `run(program, tensors, open sizes)`; tensors: those given and those of
        the state.
        None where the sweeps cannot be flattened."""

    def to_price(self, replay: Replay) -> FlattenedProgram:
        return FlattenedProgram(self.program, replay)

    def first(self, leaves: Mapping[int, Tensor], extra: Sequence[Any], keep: bool = True) -> First:
        entered = self._enter(leaves, tuple(extra))
        if entered is None:
            return self.program.first(leaves, extra, keep)
        graphs, given = entered
        plan = self.plan

        def run(program: Any, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> Any:
            values, more = given.rebuild(tensors)
            outputs, measured, mutated, state = program.first(values, more, keep)
            kept = (state.values, state.saved, state.xi, state.q0) if keep else ()
            # clones: what the caller receives is not to alias an input or what is kept
            outputs = [_fresh(t, tensors) for t in outputs]
            written = [_fresh(mutated[n], tensors) for n in plan.mutations]
            return (outputs, measured, written), kept

        key = ("first", keep, given.key)
        flat = self._flat(graphs, key, run, given, pass_inputs=True)
        if flat is None:
            return self.program.first(leaves, extra, keep)
        here = given.tensors
        results = flat.launch([*given.numbers, *here])
        recipe, public = flat.recipe, flat.leaves
        if recipe is not None:
            public = flat.leaves[: flat.public]
        tensors = [
            results[x] if type(x) is int else here[x.number]  # type: ignore[union-attr]
            for x in public
            if type(x) is not tuple
        ]
        outputs, values, mutated = _split(plan, flat.spec, tensors)
        state = None
        if keep:
            outside: list[Tensor] = []
            if recipe is not None:
                count = len(given.numbers)
                same = [x.number for x in flat.leaves[flat.public :] if isinstance(x, Input)]
                outside = [here[i] for i in same]
                outside += [here[i - count] for i in recipe.inputs if i >= count]
                tensors = [*outside, *results[len(results) - len(recipe.held) :]]
            state = FlatState(tensors, flat, key, graphs, given.numbers, len(leaves), outside)
        return First(outputs, values, mutated, state)

    def last(self, arrived: Arrived) -> Gradients:
        flat, given = self._found("last", lambda program, here: program.last(here), arrived)
        return self.program.last(given) if flat is None else flat(given)

    def parts(self, stretches: Sequence[Stretch], arrived: Arrived) -> Iterator[Gradients]:
        def run(program: Program, here: Arrived) -> Any:
            return in_parts(program.parts(stretches, here))

        flat, given = self._found("parts", run, arrived)
        by_nodes = flat is None
        yield from self.program.parts(stretches, given) if by_nodes else flat.parts(given)

    def _found(
        self, name: str, run: Callable[[Program, Arrived], Any], arrived: Arrived
    ) -> tuple[Flat | None, Any]:
        """(the flat graph of run(program, arrived), what it takes); where there is none, (None,
        what a program takes whose sweeps run node by node). Unless it is kept, the state holds
        nothing from here on."""
        state = arrived.state
        if not isinstance(state, FlatState):
            return None, arrived
        given = self._pack(arrived)
        count = len(given.tensors)

        def flattened(program: Program, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> Any:
            inner = state.rebuild(tensors[count:], numbers)
            return run(program, Arrived(inner, *given.rebuild(tensors[:count])))

        flat = self._flat(state.graphs, (name, state.key, given.key), flattened, given, state)
        if flat is None:
            return None, arrived._replace(state=state.rebuild(state.tensors, state.numbers))
        tensors = [*state.numbers, *given.tensors, *state.tensors]
        given.tensors.clear()
        if not arrived.keep:
            state.tensors.clear()
        return flat, tensors

    def step(
        self, leaves: Mapping[int, Tensor], extra: Sequence[Any], loss: Any, target: Any,
        weight: Tensor | None,
    ) -> Step:  # fmt: skip
        entered = self._enter(leaves, tuple(extra), target, weight)
        if entered is None:
            return self.program.step(leaves, extra, loss, target, weight)
        graphs, given = entered

        def run(program: Any, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> Any:
            values, more, y, by = given.rebuild(tensors)
            return program.step(values, more, loss, y, by)

        key = ("step", None if loss is None else loss.fingerprint(), given.key)
        flat = self._flat(graphs, key, run, given)
        if flat is None:
            return self.program.step(leaves, extra, loss, target, weight)
        return flat([*given.numbers, *given.tensors])


class FlattenedProgram(FlatProgram):
    """By flat graphs for the sizes of its own calls, kept in `replay`."""

    def __init__(self, program: Program, replay: Replay) -> None:
        super().__init__(program, replay.compiler)
        self.replay = replay

    @property
    def program(self) -> Program:
        return self.reference

    @property
    def prelude(self) -> Sequence[Node]:
        return self.reference.prelude

    def _enter(self, leaves: Mapping[int, Tensor], *rest: Any) -> tuple[Any, Pack] | None:
        return (self.replay, Pack((dict(leaves), *rest))) if self.replay.tick() else None

    def _pack(self, arrived: Arrived) -> Pack:
        return Pack((tuple(arrived.extra), _there(arrived.outputs), arrived.values))

    def _flat(
        self, graphs: Replay, key: Any, run: _Traced, given: Pack,
        state: FlatState | None = None, pass_inputs: bool = False,
    ) -> Flat | None:  # fmt: skip
        tensors = given.tensors if state is None else given.tensors + state.tensors
        return graphs.get(key, lambda here: run(self.reference, here, ()), tensors, pass_inputs)


class _OpenPack(Pack):
    """The tensors that a flat graph for all sizes takes: those of the graph's values `leaves`
    first, then others, whose sizes are numbers of their own, but for 0 and 1: a graph that serves
    those serves no others (a column of targets)."""

    def __init__(self, family: Family, own: tuple, leaves: Mapping[int, Tensor], rest: Any) -> None:
        super().__init__((dict(leaves), *rest))
        self.leaf_values = list(leaves)
        self.open = [v in family.open_values for v in leaves]
        self.tensors = [
            t.contiguous() if i >= len(self.open) or self.open[i] else t
            for i, t in enumerate(self.tensors)
        ]
        self.rest = self.tensors[len(self.open) :]
        self.numbers = (*own, *(n for t in self.rest for n in t.shape if n > 1))

    @property
    def key(self) -> Any:
        """What a graph depends on besides open sizes."""
        closed = [
            (t.shape, t.stride(), t.dtype) if not open_ else (t.dim(), t.dtype)
            for t, open_ in zip(self.tensors, self.open, strict=False)
        ]
        rest = [(tuple([min(n, 2) for n in t.shape]), t.dtype) for t in self.rest]
        return self.structure, tuple(self.places), tuple(self.others), tuple(closed), tuple(rest)

    def stand_ins(self, variant: Variant) -> list[Tensor]:
        """The same without numbers."""
        shapes: list[Any] = [variant.metas[v].shape for v in self.leaf_values]
        sizes = iter(variant.numbers[len(variant.family.graph.symbols) :])
        shapes += [tuple([next(sizes) if n > 1 else n for n in t.shape]) for t in self.rest]
        return [variant.like(t, shape) for t, shape in zip(self.tensors, shapes, strict=True)]


class _OpenGradients(Pack):
    """What a flat `last` for all sizes takes: the penalty's own arguments, and what arrived at the
    outputs and values of the `first` that left `state`."""

    def __init__(self, arrived: Arrived, plan: Plan) -> None:
        grads = {v: g.contiguous() for v, g in _there(arrived.outputs).items()}
        values = arrived.values
        if isinstance(values, Tensor):
            values = values.contiguous()
        elif values is not None:
            values = [None if g is None else g.contiguous() for g in values]
        super().__init__((tuple(arrived.extra), grads, values))
        self.state, self.grads, self.plan = arrived.state, grads, plan
        self.values = [values] if isinstance(values, Tensor) else values or []

    @property
    def key(self) -> Any:
        return self.structure, tuple(self.places), tuple(self.others)

    def stand_ins(self, variant: Variant) -> list[Tensor]:
        """The same without numbers, and the state of `first`."""
        flat = self.state.flat
        own = [variant.like(g, variant.metas[v].shape) for v, g in self.grads.items()]
        measured = flat.results[len(self.plan.outputs) :]
        own += [
            variant.like(g, like.shape)
            for g, like in zip(self.values, measured, strict=False)
            if g is not None
        ]
        return [*flat.inputs[self.state.leaves :], *own, *self.state.stand_ins()]


class OpenProgram(FlatProgram):
    """One call's program, by flat graphs for all sizes, which its family keeps.

    numbers: of the open graph's symbols in this call.
    """

    no_graph = (
        "sizes change from call to call, and a CUDA graph holds the memory of one; keep them the "
        "same (the last batch too: drop_last=True)"
    )
    for_one_call = True

    def __init__(self, family: Family, numbers: tuple) -> None:
        super().__init__(family.reference, family.compiler)
        self.family, self.numbers = family, numbers

    @cached_property
    def program(self) -> Any:
        return self.family.program(self.numbers)

    @property
    def prelude(self) -> Sequence[Node]:
        return self.family.prelude_at(self.numbers)

    def _enter(self, leaves: Mapping[int, Tensor], *rest: Any) -> tuple[Any, Pack] | None:
        given = _OpenPack(self.family, self.numbers, leaves, rest)
        variant = self.family.variant(given.numbers)
        return None if variant is None else (variant, given)

    def _pack(self, arrived: Arrived) -> Pack:
        return _OpenGradients(arrived, self.plan)

    def _flat(
        self, graphs: Variant, key: Any, run: _Traced, given: Any,
        state: FlatState | None = None, pass_inputs: bool = False,
    ) -> Flat | None:  # fmt: skip
        program = self.family.program
        return graphs.get(
            key, lambda numbers, tensors: run(program(numbers), tensors, numbers),
            partial(given.stand_ins, graphs), pass_inputs,
        )  # fmt: skip


def _stretches(plan: Plan, compiler: bool | str) -> Sequence[Stretch]:
    """One, where a mode of `torch.compile` takes each graph as a whole."""
    return plan.whole if isinstance(compiler, str) else plan.stretches


def _there(grads: Mapping[int, Tensor | None]) -> dict[int, Tensor]:
    return {v: g for v, g in grads.items() if g is not None}


def _split(plan: Plan, spec: Any, tensors: Sequence[Tensor]) -> tuple[list, Any, dict]:
    """(outputs, values, buffers to write) from the flat results of a `first`, whose nested form is
    ((outputs, values, buffers), state)."""
    several = spec[2][0][2][1]  # the structure of the values; None: one tensor
    start = len(plan.outputs)
    end = start + (1 if several is None else len(several[2]))
    values = tensors[start] if several is None else list(tensors[start:end])
    written = tensors[end : end + len(plan.mutations)]
    return list(tensors[:start]), values, dict(zip(plan.mutations, written, strict=True))


def _fresh(result: Tensor, given: Sequence[Tensor]) -> Tensor:
    """An output that is an input unchanged, as a copy."""
    return result.clone() if any(result is t for t in given) else result
