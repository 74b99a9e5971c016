"""Sweeps flattened into one straight graph: replayed kernel by kernel, or compiled.

`make_fx` runs the sweeps once on fake tensors and records every operator they call. The flat
graph has no closures and no autograd left in it, so Inductor compiles it whole, although
AOTAutograd knows no double backward. Without a compiler the graph is replayed as straight-line
code, which spares the host the work of walking the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import sweeps
from .._torch import make_fx
from ..counting import Operations, recording, replayed
from ..errors import RuleError
from ..kernels import for_compiler
from ..plan import Plan
from . import inductor, nested, straight_line
from .bridge import First, Program
from .state import kind, remember

# ------------------------------------------------------------------------------- graphs


@dataclass(frozen=True)
class Flat:
    """A flat graph. `run` takes a list of tensors and empties it, so that each input can be freed
    at its last use; it returns the tensors among the leaves of `fn`'s nested result.

    leaves: that result flattened: for a tensor the number of its place, for a tensor that is an
    input unchanged an `Input`, for anything else the constant itself in a 1-tuple.
    """

    run: Callable[[list[Tensor]], Sequence[Tensor]]
    spec: nested.Structure
    leaves: Sequence[int | Input | tuple]
    operations: Operations

    def __call__(self, tensors: list[Tensor]) -> Any:
        """The nested result."""
        results = self.launch(tensors)
        found = [results[x] if isinstance(x, int) else x[0] for x in self.leaves]  # type: ignore[index]
        return nested.put(self.spec, iter(found))

    def launch(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        replayed(self.operations)
        return self.run(tensors)


@dataclass(frozen=True)
class Input:
    """Stands for the graph's input number `number` in a result."""

    number: int


def flatten(
    fn: Callable[[Sequence[Tensor]], Any],
    tensors: Sequence[Tensor],
    compiler: bool | str,
    pass_inputs: bool = False,
) -> Flat:
    """Trace `fn(tensors)`, which returns nested tensors and constants, and compile the trace.

    pass_inputs: an input that is returned unchanged does not travel through the graph.
    """
    found: dict[str, Any] = {}

    def flat(*given: Tensor) -> list[Tensor]:
        leaves: list[Any] = []
        found["spec"] = nested.take(fn(given), leaves)
        number = {id(t): i for i, t in enumerate(given)} if pass_inputs else {}
        results: list[Tensor] = []
        found["leaves"] = places = []
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                places.append((leaf,))
            elif id(leaf) in number:
                places.append(Input(number[id(leaf)]))
            else:
                places.append(len(results))
                results.append(leaf)
        return results

    context = for_compiler() if compiler else nullcontext()
    with recording() as operations, torch.no_grad(), context:
        # class weights and the like become constants of the graph, whose key knows them
        trace = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)
        graph = trace(*tensors)
    straight_line.move_constants(graph)
    straight_line.clean(graph, for_compiler=bool(compiler))
    run = inductor.compiled(graph, compiler) if compiler else straight_line.boxed(graph)
    return Flat(run, found["spec"], found["leaves"], operations)


# ------------------------------------------------------------------------------ program


@dataclass
class FlatState:
    """What passes from a flat `first` to a flat `last`: the tensors of a `sweeps.State`."""

    tensors: list[Tensor]
    flat: Flat
    key: Any

    def rebuild(self, tensors: Sequence[Tensor]) -> sweeps.State:
        """The nested state, as the trace of `first` left it."""
        values = iter(tensors)
        leaves = (x[0] if isinstance(x, tuple) else next(values) for x in self.flat.leaves)
        return sweeps.State(*nested.put(self.flat.spec, leaves)[-1])


class Replay:
    """Flat graphs by key, made when first asked for; the latest are kept, since a number among the
    arguments that is new at every call makes a graph of its own.

    With a compiler from the first call on; otherwise after `after` calls, node by node until then.
    """

    def __init__(self, compiler: bool | str, after: int | None) -> None:
        self.compiler = compiler
        self.after = 0 if compiler else after
        self.calls = 0
        self._flat: dict[Any, Flat] = {}

    def tick(self) -> bool:
        """Count one more call; whether graphs are to be used from now on."""
        self.calls += 1
        return self.ready

    @property
    def ready(self) -> bool:
        return self.after is not None and self.calls > self.after

    def get(
        self,
        key: Any,
        fn: Callable[[Sequence[Tensor]], Any],
        tensors: list[Tensor],
        pass_inputs: bool = False,
    ) -> Flat | None:
        """The flat graph for `key`; None where this network's sweeps cannot be flattened (an
        operator that needs real numbers), which a compiler's user is told and others need not
        know: they go on node by node."""
        flat = self._flat.get(key)
        if flat is None:
            try:
                flat = flatten(fn, tensors, self.compiler, pass_inputs)
                remember(self._flat, key, flat)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if self.compiler:
                    raise RuleError(
                        f"the sweeps cannot be flattened for compile={self.compiler!r}: {error}; "
                        "use compile=False"
                    ) from error
                self.after = None
        return flat

    def __call__(
        self, key: Any, fn: Callable[[Any], Any], item: Any, consume: Sequence[dict] = ()
    ) -> Any:
        """fn(item), flat where graphs are used. consume: dictionaries in `item` that may be
        emptied, so that their tensors are freed at their last use."""
        if not self.ready:
            return fn(item)
        pack = Pack(item)
        given = (key, pack.key)
        flat = self.get(given, lambda tensors: fn(pack.rebuild(tensors)), pack.tensors)
        if flat is None:
            return fn(item)
        for part in consume:
            part.clear()
        return flat(pack.tensors)


@dataclass(frozen=True)
class Request:
    """What a penalty makes its program for.

    plan(): the plan at this call's sizes; asked: the places of those among the penalty's own
    tensors that ask for a gradient; replay: flat graphs for parts of the program; carried: what
    earlier calls left for later ones; known: whether no loss beside the penalty is a caller's code;
    whole(make): the program `make(plan)`, with all of its sweeps flattened together.
    """

    plan: Callable[[], Plan]
    asked: tuple[int, ...]
    debug: bool
    replay: Replay
    carried: dict[Any, Tensor]
    known: bool
    whole: Callable[[Callable[[Plan], Program]], Any]


class FlattenedProgram:
    """A `Program` whose sweeps run flat, with the same interface."""

    def __init__(self, program: Program, replay: Replay) -> None:
        self.program = program
        self.replay = replay

    @property
    def plan(self) -> Plan:
        return self.program.plan

    @property
    def prelude(self) -> Sequence[Any]:
        return self.program.prelude

    @property
    def penalty(self) -> Any:
        return self.program.penalty

    def results(self, values: Any) -> tuple[Tensor, ...]:
        return self.program.results(values)

    def along(self, grads: Sequence[Tensor | None], batch: int) -> Any:
        return self.program.along(grads, batch)

    def to_price(self, replay: Replay) -> FlattenedProgram:
        return FlattenedProgram(self.program, replay)

    def first(self, leaves: Mapping[int, Tensor], extra: Sequence[Any], keep: bool = True) -> First:
        if not self.replay.tick():
            return self.program.first(leaves, extra, keep)
        plan, pack = self.plan, Pack((dict(leaves), tuple(extra)))

        def run(given: Sequence[Tensor]) -> Any:
            values, more = pack.rebuild(given)
            outputs, measured, mutated, state = self.program.first(values, more, keep)
            kept = (state.values, state.saved, state.xi, state.q0) if keep else ()
            # clones: what the caller receives is not to alias an input or what is kept
            outputs = [fresh(t, given) for t in outputs]
            return (outputs, measured, [fresh(mutated[n], given) for n in plan.mutations]), kept

        key = ("first", keep, pack.key)
        flat = self.replay.get(key, run, pack.tensors, pass_inputs=True)
        if flat is None:
            return self.program.first(leaves, extra, keep)
        given = pack.tensors
        results = flat.launch(list(given))
        tensors = [
            given[x.number] if isinstance(x, Input) else results[x]
            for x in flat.leaves
            if not isinstance(x, tuple)
        ]
        outputs, values, mutated = split(plan, flat.spec, tensors)
        return First(outputs, values, mutated, FlatState(tensors, flat, key) if keep else None)

    def last(
        self,
        state: Any,
        extra: Sequence[Any],
        grad_outputs: Mapping[int, Tensor | None],
        grad_values: Tensor | None,
        keep: bool = False,
    ) -> list[Tensor | None]:
        if not isinstance(state, FlatState):
            return self.program.last(state, extra, grad_outputs, grad_values, keep)
        pack = Pack((tuple(extra), dict(grad_outputs), grad_values))
        here = len(pack.tensors)

        def run(given: Sequence[Tensor]) -> Any:
            more, seeds, weights = pack.rebuild(given[:here])
            return self.program.last(state.rebuild(given[here:]), more, seeds, weights)

        tensors = pack.tensors + state.tensors
        key = ("last", state.key, pack.key)
        flat = self.replay.get(key, run, tensors)
        if flat is None:
            whole = state.rebuild(state.tensors)
            return self.program.last(whole, extra, grad_outputs, grad_values, keep)
        if not keep:
            state.tensors.clear()
        return flat(tensors)

    def step(
        self,
        leaves: Mapping[int, Tensor],
        extra: Sequence[Any],
        loss: Any,
        target: Any,
        weight: Tensor | None,
    ) -> tuple[list[Tensor], Tensor, Tensor, list[Tensor | None], dict[int, Tensor]]:
        if not self.replay.tick():
            return self.program.step(leaves, extra, loss, target, weight)
        pack = Pack((dict(leaves), tuple(extra), target, weight))

        def run(given: Sequence[Tensor]) -> Any:
            values, more, y, by = pack.rebuild(given)
            return self.program.step(values, more, loss, y, by)

        key = ("step", None if loss is None else loss.fingerprint(), pack.key)
        flat = self.replay.get(key, run, pack.tensors)
        if flat is None:
            return self.program.step(leaves, extra, loss, target, weight)
        return flat(pack.tensors)


def split(plan: Plan, spec: Any, tensors: Sequence[Tensor]) -> tuple[list, Any, dict]:
    """(outputs, values, buffers to write) from the flat results of a `first`, whose nested form is
    ((outputs, values, buffers), state)."""
    several = spec[2][0][2][1]  # the structure of the values; None: one tensor
    start = len(plan.outputs)
    end = start + (1 if several is None else len(several[2]))
    values = tensors[start] if several is None else list(tensors[start:end])
    written = tensors[end : end + len(plan.mutations)]
    return list(tensors[:start]), values, dict(zip(plan.mutations, written, strict=True))


def fresh(result: Tensor, given: Sequence[Tensor]) -> Tensor:
    """An output that is an input unchanged, as a copy."""
    return result.clone() if any(result is t for t in given) else result


class Pack:
    """Nested arguments as a list of tensors, a key, and the way back."""

    def __init__(self, item: Any) -> None:
        self.leaves: list[Any] = []
        self.structure = nested.take(item, self.leaves)
        self.places = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        self.tensors = [self.leaves[i] for i in self.places]
        self.others = [kind(x) for x in self.leaves if x is not None and not isinstance(x, Tensor)]
        for i in self.places:  # the list alone holds them, so that they can be freed
            self.leaves[i] = None

    @property
    def key(self) -> Any:
        """Which values are there, under which names, how they are laid out, and what is no tensor,
        which becomes part of the graph."""
        kinds = tuple([kind(t) for t in self.tensors])
        return self.structure, tuple(self.places), kinds, tuple(self.others)

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        filled = list(self.leaves)
        for i, t in zip(self.places, tensors, strict=True):
            filled[i] = t
        return nested.put(self.structure, iter(filled))
