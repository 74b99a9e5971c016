"""Sweeps flattened into one straight graph: replayed kernel by kernel, or compiled.

`make_fx` runs the sweeps once on fake tensors and records every operator they call. The flat
graph has no closures and no autograd left in it, so Inductor compiles it whole, although
AOTAutograd knows no double backward. Without a compiler the graph is replayed as straight-line
code, which spares the host the work of walking the plan.

Graphs for one size are kept by the shapes of their tensors (`Replay`). Where sizes change, the
sweeps are traced on tensors whose sizes are symbols. What the rules ask about sizes on the way (is
this one larger than that?) is kept as a guard: a flat graph serves every call whose sizes answer
all questions alike (`Variant`), and another one is made where they do not.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._torch import make_fx, pytree
from ..counting import Operations, recording, replayed
from ..errors import RuleError, let_through, untold
from ..graph import Graph, Node, OpenSizes, Size, collector_off, leaves, saving_hooks_off
from ..kernels import for_compiler
from ..plan import Plan
from . import inductor, straight_line
from .state import kind, remember
from .straight_line import record

# ------------------------------------------------------------------------- nested arguments
#
# PyTorch's pytrees open all containers here but these: what the sweeps pass at every call, nested
# tuples, lists and dictionaries of tensors, for which pytrees take longer than these few lines.
# Containers that are registered there are left to it.

Structure = tuple[type, Any, tuple["Structure", ...]] | None  # None: a leaf


class _Context:
    """What a registered container is made again from, besides its parts; it may have no hash."""

    def __init__(self, context: Any) -> None:
        self.context = context

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Context) and self.context == other.context

    def __hash__(self) -> int:
        return 0


def take(item: Any, leaves: list[Any]) -> Structure:
    """The structure of `item`, which can be hashed; what it holds is appended to `leaves`.

    >>> leaves = []
    >>> structure = take(({"a": 1}, [2, None]), leaves)
    >>> leaves
    [1, 2, None]
    >>> put(structure, iter([10, 20, 30]))
    ({'a': 10}, [20, 30])
    """
    kind = type(item)
    if kind is dict:
        return kind, tuple(item), tuple([take(part, leaves) for part in item.values()])
    if kind is tuple or kind is list or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        return kind, None, tuple([take(part, leaves) for part in item])
    if kind in pytree.SUPPORTED_NODES:
        parts, context = pytree.SUPPORTED_NODES[kind].flatten_fn(item)
        return kind, _Context(context), tuple([take(part, leaves) for part in parts])
    leaves.append(item)
    return None


def put(structure: Structure, leaves: Iterator[Any]) -> Any:
    """The item of this structure that holds `leaves`."""
    if structure is None:
        return next(leaves)
    kind, keys, parts = structure
    built = [put(part, leaves) for part in parts]
    if kind is dict:
        return dict(zip(keys, built, strict=True))
    if kind is list:
        return built
    if kind is tuple:
        return tuple(built)
    if isinstance(keys, _Context):
        return pytree.SUPPORTED_NODES[kind].unflatten_fn(built, keys.context)
    return kind(*built)


class Pack:
    """Nested arguments as a list of tensors, a key, and the way back. numbers: sizes that the graph
    takes besides, where they are open."""

    numbers: tuple = ()

    def __init__(self, item: Any) -> None:
        self.leaves: list[Any] = []
        self.structure = take(item, self.leaves)
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
        return put(self.structure, iter(filled))


# ------------------------------------------------------------------------------- one graph


@dataclass(frozen=True)
class Flat:
    """A flat graph. `run` takes a list of tensors and empties it, so that each input can be freed
    at its last use; it returns the tensors among the leaves of `fn`'s nested result.

    leaves: that result flattened: for a tensor the number of its place, for a tensor that is an
    input unchanged an `Input`, for anything else the constant itself in a 1-tuple.
    inputs, results: with open sizes, stand-ins without numbers, for tracing the next graph; number:
    of a phase, its place among those of its variant. recipe: how those results are had again that
    the next graph reads, where others are handed on in their place; public: how many leaves there
    are of the others.
    """

    run: Callable[[list[Any]], Sequence[Tensor]]
    spec: Structure
    leaves: Sequence[int | Input | tuple]
    operations: Operations
    inputs: Sequence[Tensor] = ()
    results: Sequence[Tensor] = ()
    number: int = 0
    recipe: inductor.Recipe | None = None
    public: int = 0

    def __call__(self, tensors: list[Any]) -> Any:
        """The nested result."""
        return self.nested(self.launch(tensors))

    def nested(self, results: Sequence[Tensor]) -> Any:
        filled = [results[x] if isinstance(x, int) else x[0] for x in self.leaves]  # type: ignore[index]
        return put(self.spec, iter(filled))

    def launch(self, tensors: list[Any]) -> Sequence[Tensor]:
        replayed(self.operations)
        return self.run(tensors)

    def parts(self, tensors: list[Any]) -> Iterator[list[Tensor | None]]:
        """The parts of a graph that was made with `in_parts`, each as soon as it is there."""
        there = put(self.spec, (x[0] for x in self.leaves))  # type: ignore[index]
        running: Any = self.launch(tensors)
        for places in there:
            next(running)
            yield _placed(tensors.pop(), places)  # nobody else holds them
        next(running, None)


def _placed(tensors: Sequence[Tensor], places: Sequence[bool]) -> list[Tensor | None]:
    given = iter(tensors)
    return [next(given) if one else None for one in places]


def in_parts(parts: Iterable[list[Tensor | None]]) -> list[list[bool]]:
    """For `flatten`: marks where each part is complete; returns which of its places hold a
    tensor."""
    present = []
    for part in parts:
        straight_line.HANDED([t for t in part if t is not None])
        present.append([t is not None for t in part])
    return present


@dataclass(frozen=True)
class Input:
    """Stands for the graph's input number `number` in a result."""

    number: int


def flatten(
    fn: Callable[..., Any],
    tensors: Sequence[Tensor],
    compiler: bool | str,
    pass_inputs: bool = False,
    variant: Variant | None = None,
    recompute: bool | None = False,
) -> Flat:
    """Trace `fn(tensors)`, which returns nested tensors and constants, and compile the trace.

    pass_inputs: fn returns (results, what it keeps for another graph): an input that is returned
    unchanged does not travel through the graph, and of what is kept as little as can be does, where
    there is a compiler. variant: for
    open sizes; then it is `fn(numbers, tensors)`, numbers being those of the open graph's symbols.
    recompute: what a compiler may compute again instead of holding it (`inductor.shorten`).
    """
    sizes = [] if variant is None else variant.numbers
    count = len(sizes)
    spec: list[Structure] = []
    places: list[Any] = []

    def flat(*given: Any) -> list[Tensor]:
        inner = given[count:]
        result = fn(inner) if variant is None else fn(given[:count], inner)
        leaves: list[Any] = []
        spec[:] = [take(result, leaves)]
        number = {id(t): i for i, t in enumerate(inner)} if pass_inputs else {}
        results: list[Tensor] = []
        places.clear()
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
    mode = "fake" if variant is None else "symbolic"
    with (
        _torch.compile_lock, recording() as operations, torch.no_grad(), context,
        collector_off(), saving_hooks_off(),
    ):  # fmt: skip
        # class weights and the like become constants of the graph, whose key knows them
        graph = None if compiler or variant is not None else _on_tape(flat, tensors)
        if graph is None:
            table = inductor.decompositions() if compiler else None
            trace = make_fx(
                flat, decomposition_table=table, tracing_mode=mode, _allow_non_fake_inputs=True
            )
            graph = trace(*sizes, *tensors)
    results = () if variant is None else _stand_ins(graph, tensors, places)
    straight_line.move_constants(graph)
    straight_line.clean(graph, for_compiler=bool(compiler))
    recipe, public = None, 0
    if compiler and pass_inputs:
        public = _count(spec[0][2][0])  # type: ignore[index]
        count = sum(isinstance(x, int) for x in places[:public])
        if count < sum(isinstance(x, int) for x in places):
            recipe = inductor.hand_less(graph, count, recompute)
    if not compiler:
        run = straight_line.boxed(graph)
    elif variant is None:
        run = inductor.compiled(graph, compiler, recompute)
    else:
        run = inductor.compiled_open(graph, variant.fakes, [*sizes, *tensors], recompute)
    inputs = () if variant is None else tensors
    return Flat(run, spec[0], places, operations, inputs, results, recipe=recipe, public=public)


def _on_tape(flat: Callable, tensors: Sequence[Tensor]) -> Any:
    """The graph of a function of plain tensors; None where more has to be followed than those."""
    handled = sys.exception()
    try:
        return record(flat, tensors)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        let_through(error, handled)
        return None


def _count(structure: Structure) -> int:
    """How many leaves there are."""
    return 1 if structure is None else sum(map(_count, structure[2]))


def _stand_ins(
    graph: torch.fx.GraphModule, tensors: Sequence[Tensor], places: Sequence[Any]
) -> list[Tensor]:
    """The tensors among the results, without numbers."""
    results: Any = next(n for n in graph.graph.nodes if n.op == "output").args[0]
    return [
        tensors[x.number] if isinstance(x, Input) else results[x].meta["val"]
        for x in places
        if not isinstance(x, tuple)
    ]


def _kept(
    cache: dict[Any, Flat], key: Any, make: Callable[[], Flat], refused: Callable[[Exception], None]
) -> Flat | None:
    """The graph under `key`, made when first asked for; where it cannot be made, None after
    `refused` was told why, unless that raises."""
    flat = cache.get(key)
    if flat is not None:
        return flat
    handled = sys.exception()
    try:
        flat = make()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        let_through(error, handled)
        refused(error)
        return None
    remember(cache, key, flat)
    return flat


# ----------------------------------------------------------------------------- for one size


class Replay:
    """Flat graphs by key, made when first asked for; the latest are kept, since a number among the
    arguments that is new at every call makes a graph of its own.

    With a compiler from the first call on; otherwise after `after` calls, node by node until then.
    """

    for_one_call = False

    def __init__(
        self, compiler: bool | str, after: int | None, recompute: bool | None = False
    ) -> None:
        self.compiler, self.recompute = compiler, recompute
        self.after = 0 if compiler else after
        self.calls = 0
        self._flat: dict[Any, Flat] = {}

    def tick(self) -> bool:
        """Count one more call; whether graphs are to be used from now on."""
        self.calls += 1
        return self.ready

    def prelude(self, plan: Plan) -> Sequence[Node]:
        """What runs before the sweeps of this call."""
        return plan.prelude

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

        def make() -> Flat:
            with untold():
                return flatten(fn, tensors, self.compiler, pass_inputs, recompute=self.recompute)

        def refused(error: Exception) -> None:
            if self.compiler:
                raise RuleError(
                    f"the sweeps cannot be flattened for compile={self.compiler!r}: {error}; "
                    "use compile=False"
                ) from error
            self.after = None

        return _kept(self._flat, key, make, refused)

    def leaves(self, leaves: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """What a program starts from, as its phases take it."""
        return dict(leaves)

    def __call__(
        self, program: Any, key: Any, fn: Callable[[Any, Any], Any], item: Any,
        consume: Sequence[dict] = (),
    ) -> Any:  # fmt: skip
        """fn(program, item), flat where graphs are used. consume: dictionaries in `item` that may
        be emptied, so that their tensors are freed at their last use."""
        graph_and_inputs = self._find(program, key, fn, item)
        if graph_and_inputs is None:
            return fn(self.here(program), item)
        flat, tensors = graph_and_inputs
        for part in consume:
            part.clear()
        return self._launch(flat, tensors)

    def _launch(self, flat: Flat, tensors: list[Any]) -> Any:
        return flat(tensors)

    def parts(
        self, program: Any, key: Any, fn: Callable[[Any, Any], Iterator[list]], item: Any,
        consume: Sequence[dict] = (), several: bool = True,
    ) -> Iterator[list]:  # fmt: skip
        """The same of an fn that yields lists of gradients: several, or one."""
        if not several:
            yield self(program, key, lambda here, given: next(fn(here, given)), item, consume)
            return
        flattened = lambda here, given: in_parts(fn(here, given))  # noqa: E731
        graph_and_inputs = self._find(program, (key, "in parts"), flattened, item)
        if graph_and_inputs is None:
            yield from fn(self.here(program), item)
            return
        flat, tensors = graph_and_inputs
        for part in consume:
            part.clear()
        yield from flat.parts(tensors)

    def here(self, program: Any) -> Any:
        """The program at this call's sizes."""
        return program

    def _find(self, program: Any, key: Any, fn: Callable, item: Any) -> tuple[Flat, list] | None:
        """(the flat graph of fn(program, item), what it takes); None where there is none."""
        if not self.ready:
            return None
        pack = Pack(item)
        run = lambda tensors: fn(program, pack.rebuild(tensors))  # noqa: E731
        flat = self.get((key, pack.key), run, pack.tensors)
        return None if flat is None else (flat, pack.tensors)


# --------------------------------------------------------------------------- for all sizes


VARIANTS = 4  # flat graphs of one program that answer questions about sizes differently
PHASES = 32  # flat graphs of a program's phases that one of these holds


class Family:
    """The flat graphs that the programs of one open graph share, whatever their sizes.

    reference: one of these programs, at any sizes; after: calls before graphs are made; phased:
    whether the program has its phases flattened one by one (`OpenReplay`). Where these cannot be
    for all sizes, a compiler's are for each size (`fixed`).
    """

    def __init__(
        self, graph: Graph, reference: Any, compiler: bool | str, after: int | None,
        recompute: bool | None, phased: bool = False,
    ) -> None:  # fmt: skip
        self.graph, self.reference, self.phased = graph, reference, phased
        self.programs: dict[Any, Any] = {}  # others, by about which sizes they were made for
        self.fixed = Replay(compiler, None, recompute)
        self.compiler, self.recompute = compiler, recompute
        self.after = 0 if compiler else after
        self.calls = 0
        self.variants: list[Variant] = []

    @property
    def plan(self) -> Plan:
        return self.reference.plan

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
        return self.reference.at(self.graph_at(numbers))

    def graph_at(self, numbers: Sequence[Any]) -> Graph:
        return self.graph.at(tuple(numbers[: len(self.graph.symbols)]))

    @cached_property
    def shapes(self) -> Callable[[Sequence[Any]], Sequence[tuple]]:
        """A function from numbers to the shapes that a tensor from outside may have: those of the
        target, with and without its axes joined, of the swept inputs and of the other outputs, and
        a column of each."""
        plan, shape = self.plan, self.graph.shape
        own = [shape(v) for v in (plan.target, *plan.penalised, *plan.outputs)]
        joined = [
            (s[0], math.prod(s[1:])) for s in own[:1] if s and all(type(n) is int for n in s[1:])
        ]
        columns = [s[:1] for s in own if s]
        moving = [s for s in (*own, *joined, *columns) if any(type(n) is not int for n in s)]
        return self.graph.filler(tuple(dict.fromkeys(moving)))

    @cached_property
    def open_values(self) -> frozenset[int]:
        """The graph's values whose shapes depend on the call's sizes."""
        metas = enumerate(self.graph.values)
        return frozenset(
            v for v, m in metas if m is not None and any(type(n) is not int for n in m.shape)
        )

    @cached_property
    def _prelude(self) -> Callable[[Sequence[Any]], Any]:
        nodes = [self.graph.nodes[n.index] for n in self.plan.prelude]
        trees = [(n.args, n.kwargs) for n in nodes]
        places = [i for i, tree in enumerate(trees) if any(True for _ in leaves(tree, Size))]
        fill = self.graph.filler([trees[i] for i in places])

        def at(numbers: Sequence[Any]) -> list[Node]:
            filled = list(nodes)
            for i, (args, kwargs) in zip(places, fill(numbers), strict=True):
                filled[i] = replace(nodes[i], args=args, kwargs=kwargs)
            return filled

        return at

    def prelude_at(self, numbers: Sequence[Any]) -> Sequence[Node]:
        """What runs before the sweeps, at these numbers."""
        return self._prelude(numbers) if self.plan.prelude else ()

    def give_up(self) -> None:
        """Node by node from now on."""
        self.after = None


class Variant(OpenSizes):
    """Flat graphs of a family that serve all sizes which `fits` says yes to."""

    def __init__(self, family: Family, numbers: Sequence[int]) -> None:
        super().__init__(numbers)
        self.family = family
        self._flat: dict[Any, Flat] = {}
        self.made: list[Flat] = []  # those of phases

    def get(
        self,
        key: Any,
        fn: Callable[[Sequence[Any], Sequence[Tensor]], Any],
        stand_ins: Callable[[], list[Tensor]],
        pass_inputs: bool = False,
    ) -> Flat | None:
        """The flat graph of fn(numbers, tensors); stand_ins(): the tensors without numbers. None as
        for `Replay.get`."""
        family = self.family

        def make() -> Flat:
            return flatten(fn, stand_ins(), family.compiler, pass_inputs, self, family.recompute)

        def refused(error: Exception) -> None:
            if family.compiler and not family.phased:
                raise error
            family.give_up()

        return _kept(self._flat, key, make, refused)

    def phase(
        self, key: Any, fn: Callable[[Sequence[Any], Sequence[Tensor]], Any],
        tensors: Sequence[Tensor], origins: Sequence[Any],
    ) -> Flat | None:  # fmt: skip
        """The flat graph of a program's phase; origins: see `OpenReplay`."""
        flat = self._flat.get(key)
        if flat is None and len(self.made) < PHASES:
            pairs = list(zip(tensors, origins, strict=True))
            flat = self.get(key, fn, lambda: [self._stand_in(*pair) for pair in pairs])
            if flat is not None:
                flat = self._flat[key] = replace(flat, number=len(self.made))
                self.made.append(flat)
        return flat

    def _stand_in(self, tensor: Tensor, origin: Any) -> Tensor:
        """A tensor without numbers for one of this origin."""
        kind, *rest = origin
        if kind == "result":
            return self.made[rest[0]].results[rest[1]]
        if kind == "leaf":
            return self.like(tensor, self.metas[rest[0]].shape)
        if kind == "closed":
            return self.like(tensor, tensor.shape)
        front, number = rest[:2]
        return self.like(tensor, (*front, *self.shapes[number]))

    @cached_property
    def shapes(self) -> Sequence[Any]:
        """The shapes that a tensor from outside may have, sizes being symbols."""
        return self.family.shapes(self.numbers)

    @cached_property
    def metas(self) -> Sequence[Any]:
        """What is known of the graph's values, sizes being symbols."""
        return self.family.graph_at(self.numbers).values

    def like(self, tensor: Tensor, shape: Sequence[Any]) -> Tensor:
        """A tensor without numbers: of symbolic shape, or of the shape and strides it has."""
        with self.fakes:
            if all(type(n) is int for n in shape):
                return torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
                )
            return torch.empty(tuple(shape), dtype=tensor.dtype, device=tensor.device)


class OpenReplay(Replay):
    """The flat graphs of one call's phases, for all sizes; its family keeps them.

    What a phase takes is a value of the graph, a result of an earlier phase, or comes from outside
    (a caller's v, seeds, weights). How the sizes of the first two depend on the open ones is known.
    The others have one of a few shapes (`Family.shapes`), with an axis of seeds in front or not;
    which, is found from this call's numbers and part of the graph's key, so that it is never
    assumed.
    """

    for_one_call = True

    def __init__(self, family: Family, numbers: tuple) -> None:
        super().__init__(family.compiler, None, family.recompute)
        self.family, self.numbers = family, numbers
        self.variant: Variant | None = None
        self._here: Any = None  # the program at these numbers, once it is needed
        self._origins: dict[int, tuple[weakref.ref[Tensor], Any]] = {}  # by id

    def tick(self) -> bool:
        self.variant = self.family.variant(self.numbers)
        return self.ready

    @property
    def ready(self) -> bool:
        return self.variant is not None

    def prelude(self, plan: Plan) -> Sequence[Node]:
        return self.family.prelude_at(self.numbers)

    def here(self, program: Any) -> Any:
        if self._here is None:
            self._here = program.at(self.family.graph_at(self.numbers))
        return self._here

    def leaves(self, leaves: Mapping[int, Tensor]) -> dict[int, Tensor]:
        sized = self.family.open_values
        taken = {v: t.contiguous() if v in sized else t for v, t in leaves.items()}
        for v, t in taken.items():
            known = t.dtype if v in sized else kind(t)
            self._origins[id(t)] = weakref.ref(t), ("leaf", v, known)
        return taken

    def _find(self, program: Any, key: Any, fn: Callable, item: Any) -> tuple[Flat, list] | None:
        variant = self.variant
        if self.family.after is None:  # given up
            return self.family.fixed._find(self.here(program), key, fn, item)
        if variant is None:
            return None
        pack = Pack(item)
        tensors, origins = [], []
        for t in pack.tensors:
            ref, origin = self._origins.get(id(t), (None, None))
            if ref is None or ref() is not t:
                t = t.contiguous()
                origin = self._outside(t)
            tensors.append(t)
            origins.append(origin)
        own = (pack.structure, tuple(pack.places), tuple(pack.others), tuple(origins))
        key = (key, program.kind, own)

        def run(numbers: Sequence[Any], given: Sequence[Tensor]) -> Any:
            return fn(program.at(self.family.graph_at(numbers)), pack.rebuild(given))

        flat = variant.phase(key, run, tensors, origins)
        if flat is not None:
            return flat, [*self.numbers, *tensors]
        return self._find(program, key, fn, item) if self.family.after is None else None

    def _outside(self, t: Tensor) -> tuple:
        """The origin of a tensor that is no value and no result."""
        shape = tuple(t.shape)
        if t.is_floating_point():
            for i, like in enumerate(self._shapes):
                count = len(shape) - len(like)
                if 0 <= count <= 1 and shape[count:] == like:
                    return "like", shape[:count], i, t.dtype
        return "closed", shape, t.dtype

    @cached_property
    def _shapes(self) -> Sequence[tuple]:
        return self.family.shapes(self.numbers)

    def _launch(self, flat: Flat, tensors: list[Any]) -> Any:
        results = flat.launch(tensors)
        for i, t in enumerate(results):
            self._origins[id(t)] = weakref.ref(t), ("result", flat.number, i)
        return flat.nested(results)
