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

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._torch import FakeTensorMode, make_fx, pytree
from ..counting import Operations, recording, replayed
from ..errors import RuleError, let_through, untold
from ..graph import Graph, Node, compile_sizes
from ..kernels import for_compiler
from ..plan import Plan
from . import inductor, straight_line
from .state import kind, remember

# ------------------------------------------------------------------------- nested arguments
#
# The sweeps pass nested tuples, lists and dictionaries of tensors at every call, and PyTorch's
# pytrees take several times as long for them as these few lines. Containers that are registered
# there are left to it.

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
    inputs, results: with open sizes, stand-ins without numbers, for tracing the next graph.
    """

    run: Callable[[list[Any]], Sequence[Tensor]]
    spec: Structure
    leaves: Sequence[int | Input | tuple]
    operations: Operations
    inputs: Sequence[Tensor] = ()
    results: Sequence[Tensor] = ()

    def __call__(self, tensors: list[Any]) -> Any:
        """The nested result."""
        results = self.launch(tensors)
        filled = [results[x] if isinstance(x, int) else x[0] for x in self.leaves]  # type: ignore[index]
        return put(self.spec, iter(filled))

    def launch(self, tensors: list[Any]) -> Sequence[Tensor]:
        replayed(self.operations)
        return self.run(tensors)

    def parts(self, tensors: list[Any]) -> Iterator[list[Tensor | None]]:
        """Of a graph made by `in_parts`: each part as soon as it is there."""
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
    """For `flatten`: mark where each part is complete; which of its places hold a tensor."""
    there = []
    for part in parts:
        straight_line.HANDED([t for t in part if t is not None])
        there.append([t is not None for t in part])
    return there


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

    pass_inputs: an input that is returned unchanged does not travel through the graph. variant: for
    open sizes; then it is `fn(program, tensors)`, program being the variant's at open sizes.
    recompute: what a compiler may compute again instead of holding it (`inductor.shorten`).
    """
    sizes = [] if variant is None else variant.numbers
    count = len(sizes)
    spec: list[Structure] = []
    places: list[Any] = []

    def flat(*given: Any) -> list[Tensor]:
        inner = given[count:]
        result = fn(inner) if variant is None else fn(variant.program(given[:count]), inner)
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
    with _torch.compile_lock, recording() as operations, torch.no_grad(), context:
        # class weights and the like become constants of the graph, whose key knows them
        table = inductor.decompositions() if compiler else None
        trace = make_fx(
            flat, decomposition_table=table, tracing_mode=mode, _allow_non_fake_inputs=True
        )
        graph = trace(*sizes, *tensors)
    results = () if variant is None else _stand_ins(graph, tensors, places)
    straight_line.move_constants(graph)
    straight_line.clean(graph, for_compiler=bool(compiler))
    if not compiler:
        run = straight_line.boxed(graph)
    elif variant is None:
        run = inductor.compiled(graph, compiler, recompute)
    else:
        run = inductor.compiled_open(graph, variant.fakes, [*sizes, *tensors], recompute)
    return Flat(run, spec[0], places, operations, () if variant is None else tensors, results)


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


# ----------------------------------------------------------------------------- for one size


class Replay:
    """Flat graphs by key, made when first asked for; the latest are kept, since a number among the
    arguments that is new at every call makes a graph of its own.

    With a compiler from the first call on; otherwise after `after` calls, node by node until then.
    """

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
            handled = sys.exception()
            try:
                with untold():
                    flat = flatten(
                        fn, tensors, self.compiler, pass_inputs, recompute=self.recompute
                    )
                remember(self._flat, key, flat)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                let_through(error, handled)
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

    def parts(
        self, key: Any, fn: Callable[[Any], Iterator[list]], item: Any,
        consume: Sequence[dict] = (), several: bool = True,
    ) -> Iterator[list]:  # fmt: skip
        """The same of an fn that yields lists of gradients: several, or one."""
        if not self.ready:
            yield from fn(item)
            return
        if not several:
            yield self(key, lambda given: next(fn(given)), item, consume)
            return
        pack = Pack(item)
        given = (key, "in parts", pack.key)
        flat = self.get(given, lambda tensors: in_parts(fn(pack.rebuild(tensors))), pack.tensors)
        if flat is None:
            yield from fn(item)
            return
        for part in consume:
            part.clear()
        yield from flat.parts(pack.tensors)


# --------------------------------------------------------------------------- for all sizes


VARIANTS = 4  # flat graphs of one program that answer questions about sizes differently


class Family:
    """The flat graphs that the programs of one open graph share, whatever their sizes.

    plan: at any sizes; make(plan): the program over it; after: calls before graphs are made.
    """

    def __init__(
        self, graph: Graph, plan: Plan, make: Callable[[Plan], Any], compiler: bool | str,
        after: int | None, recompute: bool | None,
    ) -> None:  # fmt: skip
        self.graph, self.plan, self.make = graph, plan, make
        self.compiler, self.recompute = compiler, recompute
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
        self._flat: dict[Any, Flat] = {}
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
        self,
        key: Any,
        fn: Callable[[Any, Sequence[Tensor]], Any],
        stand_ins: Callable[[], list[Tensor]],
        pass_inputs: bool = False,
    ) -> Flat | None:
        """The flat graph of fn(program, tensors); stand_ins(): the tensors without numbers. None as
        for `Replay.get`."""
        flat = self._flat.get(key)
        if flat is None:
            handled = sys.exception()
            try:
                family = self.family
                flat = flatten(
                    fn, stand_ins(), family.compiler, pass_inputs, self, family.recompute
                )
                remember(self._flat, key, flat)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                let_through(error, handled)
                if self.family.compiler:
                    raise
                self.family.give_up()
        return flat

    def program(self, numbers: Sequence[Any]) -> Any:
        """The program at these numbers, which may be symbols."""
        return self.family.program(numbers)

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
