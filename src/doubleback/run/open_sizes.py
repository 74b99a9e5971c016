"""Flat graphs for all sizes: the sweeps of a program with open sizes, flattened once.

The sweeps are traced on tensors whose sizes are symbols. What the rules ask about sizes on the way
(is this one larger than that?) is kept as a guard: a flat graph serves every call whose sizes
answer all questions alike, and another one is made where they do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .. import _torch, sweeps
from .._torch import FakeTensorMode, make_fx
from ..counting import recording
from ..graph import Graph, Node, compile_sizes
from ..kernels import for_compiler
from ..plan import Plan
from . import inductor, nested, straight_line
from .bridge import First
from .flattening import Flat, FlattenedProgram, Input, Pack, Replay, fresh, split

VARIANTS = 4  # flat graphs of one program that answer questions about sizes differently


class Family:
    """The flat graphs that the programs of one open graph share, whatever their sizes.

    plan: at any sizes; make(plan): the program over it; after: calls before graphs are made.
    """

    def __init__(
        self, graph: Graph, plan: Plan, make: Callable[[Plan], Any], compiler: bool | str,
        after: int | None,
    ) -> None:  # fmt: skip
        self.graph, self.plan, self.make = graph, plan, make
        self.compiler = compiler
        self.after = 0 if compiler else after
        self.calls = 0
        self.variants: list[Variant] = []
        self.reference = make(plan)

    def variant(self, numbers: Sequence[Any]) -> Variant | None:
        """The one whose guards hold for these numbers; None where sweeps run node by node."""
        self.calls += 1
        if self.after is None or self.calls <= self.after:
            return None
        for variant in self.variants:
            if len(variant.numbers) == len(numbers) and variant.fits(numbers):
                return variant
        if len(self.variants) >= VARIANTS or not all(type(n) is int and n > 1 for n in numbers):
            return None
        self.variants.append(Variant(self, numbers))
        return self.variants[-1]

    def program(self, numbers: Sequence[Any]) -> Any:
        """The program at these numbers, which may be symbols."""
        own = len(self.graph.symbols)
        return self.make(self.plan.at(self.graph.at(tuple(numbers[:own]))))

    def is_open(self, value: int) -> bool:
        """Whether a value's shape depends on the call's sizes."""
        meta = self.graph.values[value]
        return meta is not None and not all(type(n) is int for n in meta.shape)

    @cached_property
    def _prelude(self) -> Callable[[Sequence[Any]], Any]:
        nodes = [self.graph.nodes[n.index] for n in self.plan.prelude]
        fill = self.graph.filler([(n.args, n.kwargs) for n in nodes])

        def at(numbers: Sequence[Any]) -> list[Node]:
            filled = zip(nodes, fill(numbers), strict=True)
            return [replace(n, args=args, kwargs=kwargs) for n, (args, kwargs) in filled]

        return at

    def prelude_at(self, numbers: Sequence[Any]) -> Sequence[Node]:
        """What runs before the sweeps, at these numbers."""
        return self._prelude(numbers) if self.plan.prelude else ()

    def give_up(self) -> None:
        self.after = None


class Variant:
    """Flat graphs that hold for all sizes which answer the questions asked while they were made as
    the first call's did."""

    def __init__(self, family: Family, numbers: Sequence[int]) -> None:
        self.family = family
        self.env = _torch.ShapeEnv()
        self.fakes = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        self.numbers = [self._symbol(n, i) for i, n in enumerate(numbers)]
        self.flats: dict[Any, OpenFlat] = {}
        self._guards: tuple[int, Callable] = (-1, lambda *_: ())

    def _symbol(self, number: int, i: int) -> Any:
        source = _torch.ConstantSource(f"size_{i}")
        symbol = self.env.create_symbol(number, source, _torch.DimDynamic.DYNAMIC)
        return self.env.create_symintnode(symbol, hint=number, source=source)

    def fits(self, numbers: Sequence[int]) -> bool:
        """Whether these answer every question as the first ones did."""
        count = len(self.env.guards)
        if self._guards[0] != count:
            symbols = [n.node._expr for n in self.numbers]
            exprs = [guard.expr for guard in self.env.guards]
            self._guards = count, compile_sizes(exprs, symbols)
        return all(self._guards[1](*numbers))

    def get(
        self, key: Any, run: Callable[[Any, Sequence[Tensor]], Any], examples: Callable[[], list]
    ) -> OpenFlat | None:
        """The flat graph of run(program, tensors); examples(): the tensors without numbers."""
        flat = self.flats.get(key)
        if flat is None:
            try:
                flat = self.flats[key] = self._flatten(run, examples())
            except torch.OutOfMemoryError:
                raise
            except Exception:
                if self.family.compiler:
                    raise
                self.family.give_up()
        return flat

    @cached_property
    def metas(self) -> Sequence[Any]:
        """What is known of the graph's values, sizes being symbols."""
        own = len(self.family.graph.symbols)
        return self.family.graph.at(tuple(self.numbers[:own])).values

    def like(self, tensor: Tensor, shape: Sequence[Any]) -> Tensor:
        """A tensor without numbers: of symbolic shape, or of the shape and strides it has."""
        with self.fakes:
            if all(type(n) is int for n in shape):
                return torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
                )
            return torch.empty(tuple(shape), dtype=tensor.dtype, device=tensor.device)

    def _flatten(self, run: Callable[[Any, Sequence[Tensor]], Any], examples: list) -> OpenFlat:
        found: dict[str, Any] = {}
        count = len(self.numbers)

        def flat(*given: Any) -> list[Tensor]:
            numbers, tensors = given[:count], given[count:]
            leaves: list[Any] = []
            found["spec"] = nested.take(run(self.family.program(numbers), tensors), leaves)
            number = {id(t): i for i, t in enumerate(tensors)}
            found["leaves"] = places = []
            results: list[Tensor] = []
            for leaf in leaves:
                if not isinstance(leaf, Tensor):
                    places.append((leaf,))
                elif id(leaf) in number:
                    places.append(Input(number[id(leaf)]))
                else:
                    places.append(len(results))
                    results.append(leaf)
            return results

        compiler = self.family.compiler
        context = for_compiler() if compiler else nullcontext()
        with recording() as operations, torch.no_grad(), context:
            trace = make_fx(flat, tracing_mode="symbolic", _allow_non_fake_inputs=True)
            graph = trace(*self.numbers, *examples)
        results = next(n for n in graph.graph.nodes if n.op == "output").args[0]
        fakes = [
            examples[x.number] if isinstance(x, Input) else results[x].meta["val"]
            for x in found["leaves"]
            if not isinstance(x, tuple)
        ]
        straight_line.move_constants(graph)
        straight_line.clean(graph, for_compiler=bool(compiler))
        if compiler:
            run_flat = inductor.compiled_open(graph, self.fakes, [*self.numbers, *examples])
        else:
            run_flat = straight_line.boxed(graph)
        return OpenFlat(run_flat, found["spec"], found["leaves"], operations, examples, fakes)


@dataclass(frozen=True)
class OpenFlat(Flat):
    """With stand-ins without numbers of its inputs and its results, from which the next graph is
    traced."""

    examples: Sequence[Tensor] = ()
    fakes: Sequence[Tensor] = ()


@dataclass
class OpenState:
    """What passes from `first` to `last`: the tensors of a `sweeps.State`, by a flat graph; extras:
    stand-ins of the penalty's own tensors."""

    tensors: list[Tensor]
    flat: OpenFlat
    key: Any
    variant: Variant
    numbers: Sequence[int]
    extras: Sequence[Tensor]

    def rebuild(self, tensors: Sequence[Tensor]) -> sweeps.State:
        values = iter(tensors)
        leaves = (x[0] if isinstance(x, tuple) else next(values) for x in self.flat.leaves)
        return sweeps.State(*nested.put(self.flat.spec, leaves)[-1])


class _Given:
    """Tensors that a flat graph takes: those of the graph's values `leaves` first, then others,
    whose sizes are numbers of their own."""

    def __init__(self, family: Family, own: tuple, leaves: Mapping[int, Tensor], rest: Any) -> None:
        self.pack = Pack((dict(leaves), *rest))
        self.leaves = list(leaves)
        self.open = [family.is_open(v) for v in leaves]
        tensors = self.pack.tensors
        self.tensors = [
            t.contiguous() if i >= len(self.open) or self.open[i] else t
            for i, t in enumerate(tensors)
        ]
        self.others = self.tensors[len(self.open) :]
        self.numbers = (*own, *(n for t in self.others for n in t.shape))

    @property
    def key(self) -> Any:
        """What a graph depends on besides open sizes."""
        closed = [
            (t.shape, t.stride(), t.dtype) if not open_ else (t.dim(), t.dtype)
            for t, open_ in zip(self.tensors, self.open, strict=False)
        ]
        others = [(t.dim(), t.dtype) for t in self.others]
        pack = self.pack
        places, numbers = tuple(pack.places), tuple(pack.others)
        return pack.structure, places, numbers, tuple(closed), tuple(others)

    def examples(self, variant: Variant) -> list[Tensor]:
        """The same without numbers."""
        shapes: list[Any] = [variant.metas[v].shape for v in self.leaves]
        sizes = iter(variant.numbers[len(variant.family.graph.symbols) :])
        shapes += [tuple(next(sizes) for _ in t.shape) for t in self.others]
        return [variant.like(t, shape) for t, shape in zip(self.tensors, shapes, strict=True)]


@dataclass(frozen=True, eq=False)
class OpenProgram:
    """One call's program, whose sweeps run by the flat graphs of its family.

    numbers: of the open graph's symbols in this call; make(): the program at these, for sweeps that
    run node by node.
    """

    family: Family
    numbers: tuple
    make: Callable[[], Any]

    @cached_property
    def program(self) -> Any:
        return self.make()

    @property
    def plan(self) -> Plan:
        """At some sizes: which values there are, and what becomes of them, is the same at all."""
        return self.family.plan

    @property
    def prelude(self) -> Sequence[Node]:
        return self.family.prelude_at(self.numbers)

    @property
    def penalty(self) -> Any:
        return self.family.reference.penalty

    def results(self, values: Any) -> tuple[Tensor, ...]:
        return self.family.reference.results(values)

    def along(self, grads: Sequence[Tensor | None], batch: int) -> Any:
        return self.family.reference.along(grads, batch)

    def to_price(self, replay: Replay) -> FlattenedProgram:
        return FlattenedProgram(self.program, replay)

    def first(self, leaves: Mapping[int, Tensor], extra: Sequence[Any], keep: bool = True) -> First:
        given = _Given(self.family, self.numbers, leaves, (tuple(extra),))
        plan, variant = self.plan, self.family.variant(given.numbers)
        if variant is None:
            return self.program.first(leaves, extra, keep)

        def run(program: Any, tensors: Sequence[Tensor]) -> Any:
            values, more = given.pack.rebuild(tensors)
            outputs, per_example, mutated, state = program.first(values, more, keep)
            kept = (state.values, state.saved, state.xi, state.q0) if keep else ()
            outputs = [fresh(t, tensors) for t in outputs]
            updates = [fresh(mutated[n], tensors) for n in plan.mutations]
            return (outputs, per_example, updates), kept

        key = ("first", keep, given.key)
        flat = variant.get(key, run, lambda: given.examples(variant))
        if flat is None:
            return self.program.first(leaves, extra, keep)
        results = flat.launch([*given.numbers, *given.tensors])
        tensors = [
            given.tensors[x.number] if isinstance(x, Input) else results[x]
            for x in flat.leaves
            if not isinstance(x, tuple)
        ]
        outputs, values, mutated = split(plan, flat.spec, tensors)
        state = None
        if keep:
            extras = flat.examples[len(given.open) :]
            state = OpenState(tensors, flat, key, variant, given.numbers, extras)
        return First(outputs, values, mutated, state)

    def last(
        self,
        state: Any,
        extra: Sequence[Any],
        grad_outputs: Mapping[int, Tensor | None],
        grad_values: Any,
        keep: bool = False,
    ) -> list[Tensor | None]:
        if not isinstance(state, OpenState):
            return self.program.last(state, extra, grad_outputs, grad_values, keep)
        variant = state.variant
        grads = {v: g.contiguous() for v, g in grad_outputs.items() if g is not None}
        values = grad_values
        if values is not None:
            several = not isinstance(values, Tensor)
            measured = [None if g is None else g.contiguous() for g in values] if several else None
            values = values.contiguous() if measured is None else measured
        pack = Pack((tuple(extra), grads, values))
        here = len(pack.tensors)

        def run(program: Any, given: Sequence[Tensor]) -> Any:
            more, seeds, weights = pack.rebuild(given[:here])
            return program.last(state.rebuild(given[here:]), more, seeds, weights)

        def examples() -> list[Tensor]:
            own = [variant.like(g, variant.metas[v].shape) for v, g in grads.items()]
            arrived = [values] if isinstance(values, Tensor) else values or []
            own += [
                variant.like(g, like.shape)
                for g, like in zip(
                    arrived, state.flat.fakes[len(self.plan.outputs) :], strict=False
                )
                if g is not None
            ]
            return [*state.extras, *own, *state.flat.fakes]

        places, others = tuple(pack.places), tuple(pack.others)
        key = ("last", state.key, pack.structure, places, others)
        flat = variant.get(key, run, examples)
        if flat is None:
            whole = state.rebuild(state.tensors)
            return self.program.last(whole, extra, grad_outputs, grad_values, keep)
        tensors = [*state.numbers, *pack.tensors, *state.tensors]
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
        given = _Given(self.family, self.numbers, leaves, (tuple(extra), target, weight))
        variant = self.family.variant(given.numbers)
        if variant is None:
            return self.program.step(leaves, extra, loss, target, weight)

        def run(program: Any, tensors: Sequence[Tensor]) -> Any:
            values, more, y, by = given.pack.rebuild(tensors)
            return program.step(values, more, loss, y, by)

        key = ("step", None if loss is None else loss.fingerprint(), given.key)
        flat = variant.get(key, run, lambda: given.examples(variant))
        if flat is None:
            return self.program.step(leaves, extra, loss, target, weight)
        return flat([*given.numbers, *given.tensors])
