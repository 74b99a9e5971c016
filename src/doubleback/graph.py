"""The captured network as small immutable records: values, nodes, and who reads what."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from . import _torch
from ._torch import is_functorch_wrapped_tensor

T = TypeVar("T")


def memory(t: Tensor) -> int:
    """Equal for tensors that share memory. A sparse tensor, and one that a transform of torch.func
    has wrapped, do not tell theirs and count as alone in it."""
    hidden = t.layout is not torch.strided or is_functorch_wrapped_tensor(t)
    return id(t) if hidden else t.untyped_storage()._cdata


def memory_of(node: Any) -> int:
    """The same for the value of a node of a traced graph; what is no tensor counts as alone."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return memory(value) if isinstance(value, Tensor) else id(node)


def saving_hooks_off() -> AbstractContextManager:
    """A caller's hooks on saved tensors (a checkpoint's) are not for tensors without numbers."""
    none = _torch.top_saved_tensors_hooks(True) is None
    return nullcontext() if none else saved_tensors_hooks(lambda t: t, lambda t: t)


@contextmanager
def collector_off() -> Iterator[None]:
    """While a graph is made: of the many objects that this takes few are garbage, and Python's
    collector would look through all of them again and again."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is the graph's value number `index`."""

    index: int


@dataclass(frozen=True, slots=True)
class Size:
    """A number that is known when the program runs: an expression in sizes of its inputs."""

    expr: Any


@dataclass(frozen=True, slots=True)
class Meta:
    """What is known of a value before anything runs."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def differentiable(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex

    @property
    def bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One call of an ATen operator.

    `inputs` are the tensor arguments in flattened order (lists such as cat's included);
    `outputs` one value per returned tensor. `module` is the qualified name of the submodule
    whose forward made the call, "" for the network's own.
    """

    index: int
    name: str
    op: Any
    args: tuple
    kwargs: Mapping[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    many: bool
    source: str
    module: str = ""

    def __str__(self) -> str:
        return f"{self.op} ({self.name})"

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by position or by name; tensors are `Ref`s."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)


@dataclass(frozen=True, eq=False)
class Graph:
    """A flat, functional program of the tensors that a call hands to it: the network's parameters,
    buffers and arguments alike, in the order in which the capture found them.

    inputs: the value of each, None for what is no tensor (a size, a number);
    constants: values that are part of the program;
    outputs: a value number each, or what is no tensor in a 1-tuple;
    targets: those outputs of the network that a penalty may be about;
    mutations: place among `inputs` → the value that the network writes there;
    names: where each input was found, as Python code;
    symbols: of a program with open sizes, where each symbol's number is read off: (place,) for an
    input that is a number, (place, axis) for a tensor's size, (place, "item") for its only entry;
    a `Ref` in the place's place for a value that the program computes (edges chosen by a mask);
    assumed: what PyTorch took for granted of sizes that numbers decide, as conditions on symbols (a
    tensor that a mask chose is as long as the one it is added to);
    returned: place among `outputs` → place among `inputs`, where the network returns, or keeps as
    an attribute, a tensor that it wrote to (`self.total += …`);
    asserted: what to say where one of the last outputs, conditions beyond the network's own, is
    not true.
    """

    nodes: tuple[Node, ...]
    values: tuple[Meta | None, ...]
    inputs: tuple[int | None, ...]
    constants: Mapping[int, Tensor]
    outputs: tuple[Any, ...]
    targets: tuple[Any, ...]
    mutations: Mapping[int, int]
    names: tuple[str, ...] = ()
    symbols: Mapping[Any, tuple] = field(default_factory=dict)
    returned: Mapping[int, int] = field(default_factory=dict)
    assumed: tuple[Any, ...] = ()
    asserted: tuple[str, ...] = ()

    def shape(self, value: int) -> tuple[int, ...]:
        meta = self.values[value]
        assert meta is not None
        return meta.shape

    @cached_property
    def _sizes(self) -> tuple[list[Size], Callable[..., Sequence[Any]]]:
        """Every open number in the program, and the function that computes them all."""
        metas = [size for meta in self.values if meta is not None for size in meta.shape]
        trees = (metas, [(n.args, n.kwargs) for n in self.nodes], self.outputs)
        sizes = list(dict.fromkeys(leaves(trees, Size)))
        return sizes, compile_sizes([size.expr for size in sizes], list(self.symbols))

    def read_symbols(self, given: Sequence[Any]) -> tuple:
        """The symbols' numbers for these inputs."""
        if not self.deciding:
            return tuple(_read(given[where[0]], *where[1:]) for where in self.symbols.values())
        numbers = [
            None if isinstance(where[0], Ref) else _read(given[where[0]], *where[1:])
            for where in self.symbols.values()
        ]
        known = {v: t for v, t in zip(self.inputs, given, strict=True) if v is not None}
        values = {**self.constants, **known}
        with torch.no_grad():
            for node, fill in zip(self.deciding, self._deciding_arguments, strict=True):
                args, kwargs = map_refs(fill(numbers), lambda ref: values[ref.index])
                out = node.op(*args, **kwargs)
                values.update(zip(node.outputs, out if node.many else (out,), strict=True))
                for i, where in enumerate(self.symbols.values()):
                    if isinstance(where[0], Ref) and where[0].index in node.outputs:
                        numbers[i] = _read(values[where[0].index], *where[1:])
        return tuple(numbers)

    def holds(self, numbers: Sequence[Any]) -> bool:
        """Whether all that is assumed is so at these numbers."""
        return not self.assumed or all(self._conditions(*numbers))

    @cached_property
    def _conditions(self) -> Callable[..., Sequence[Any]]:
        return compile_sizes(self.assumed, list(self.symbols))

    def open_symbols(self) -> set[Any]:
        """Every symbol that occurs in an open size."""
        metas = [meta.shape for meta in self.values if meta is not None]
        trees = (metas, [(n.args, n.kwargs) for n in self.nodes], self.outputs)
        return {symbol for size in leaves(trees, Size) for symbol in size.expr.free_symbols}

    @cached_property
    def unnoticed(self) -> tuple[int, ...]:
        """Places of inputs that batch norm writes to, which autograd does not count as a change: a
        graph that was made before stays good, as its backward pass reads none of them."""
        norms = [node for node in self.nodes if "_native_batch_norm_legit" in str(node.op)]
        made = {value for node in norms for value in node.outputs}
        return tuple(place for place, value in self.mutations.items() if value in made)

    @cached_property
    def deciding(self) -> tuple[Node, ...]:
        """The nodes on which open sizes depend, in order: they run once before all else."""
        wanted = {where[0].index for where in self.symbols.values() if isinstance(where[0], Ref)}
        nodes = []
        for node in reversed(self.nodes if wanted else ()):
            if wanted.intersection(node.outputs):
                wanted.update(node.inputs)
                nodes.append(node)
        return tuple(reversed(nodes))

    @cached_property
    def _deciding_arguments(self) -> list[Callable[[Sequence[Any]], Any]]:
        return [self.filler((n.args, dict(n.kwargs))) for n in self.deciding]

    def filler(self, tree: Any) -> Callable[[Sequence[Any]], Any]:
        """A function from the symbols' numbers to this part of the program without open sizes."""
        sizes = list(dict.fromkeys(leaves(tree, Size)))
        if not sizes:
            return lambda numbers: tree
        compute = compile_sizes([size.expr for size in sizes], list(self.symbols))

        def fill(numbers: Sequence[Any]) -> Any:
            bound = dict(zip(sizes, compute(*numbers), strict=True))
            return map_leaves(tree, lambda leaf: bound[leaf] if type(leaf) is Size else leaf)

        return fill

    @cached_property
    def _ends(self) -> Callable[[Sequence[Any]], Any]:
        shapes = tuple(self.shape(v) if isinstance(v, int) else () for v in self.targets)
        return self.filler((self.outputs, shapes))

    def ends_at(self, numbers: Sequence[Any]) -> tuple[tuple, tuple]:
        """(outputs, the targets' shapes) at these numbers."""
        return self._ends(numbers)

    def at(self, numbers: Sequence[Any]) -> Graph:
        """The program for these numbers of its symbols (see `read_symbols`), without open sizes."""
        if not self.symbols:
            return self
        sizes, compute = self._sizes
        bound = dict(zip(sizes, compute(*numbers), strict=True))

        def fill(tree: Any) -> Any:
            return map_leaves(tree, lambda leaf: bound[leaf] if type(leaf) is Size else leaf)

        values = tuple(
            meta if meta is None or all(type(s) is int for s in meta.shape)
            else replace(meta, shape=fill(meta.shape))
            for meta in self.values
        )  # fmt: skip
        nodes = tuple(
            replace(n, args=fill(n.args), kwargs=fill(n.kwargs)) if open_ else n
            for n, open_ in zip(self.nodes, self._open_nodes, strict=True)
        )
        return replace(
            self, nodes=nodes, values=values, outputs=fill(self.outputs), symbols={}, assumed=()
        )

    @cached_property
    def _open_nodes(self) -> list[bool]:
        return [any(True for _ in leaves((n.args, n.kwargs), Size)) for n in self.nodes]


def _read(item: Any, where: Any = None) -> Any:
    if where is None:
        return item
    return item.item() if where == "item" else item.shape[where]


def compile_sizes(exprs: Sequence[Any], symbols: Sequence[Any]) -> Callable[..., Sequence[Any]]:
    """One function of the symbols' numbers that computes all of these expressions. A symbol may
    stand for several numbers, which are equal then, and a number may have none."""
    printer = _torch.PythonPrinter()
    given = [f"s{i}" for i in range(len(symbols))]
    names = {s: name for s, name in zip(symbols, given, strict=True) if s.is_symbol}
    parts = [printer.doprint(expr.xreplace(_renamed(names))) for expr in exprs]
    code = f"lambda {', '.join(given)}: ({' '.join(p + ',' for p in parts)})"
    return eval(code, {"math": math, "torch": torch})


def many(numbers: Sequence[Any]) -> bool:
    """Whether all sizes are more than one, as is taken for granted of a symbol."""
    return all(n > 1 for n in numbers if isinstance(n, int))


class OpenSizes:
    """Sizes as symbols of our own, for a graph that is to serve calls of several sizes.

    What is asked about the symbols while the graph is made (is this one larger than that?) is kept
    as a guard: the graph serves every call whose sizes answer all questions alike (`fits`).
    numbers: the symbols, in the place of the sizes that were given; fakes: the mode of fake tensors
    whose shapes are made of them.
    """

    def __init__(self, numbers: Sequence[Any]) -> None:
        self.env = _torch.ShapeEnv()
        self.fakes = _torch.FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        self.numbers = [self._symbol(n, i) for i, n in enumerate(numbers)]
        self.symbols = [n.node._expr for n in self.numbers]
        self._guards: tuple[int, Callable] = (-1, lambda *_: ())

    def _symbol(self, number: Any, i: int) -> Any:
        source = _torch.ConstantSource(f"size_{i}")
        if isinstance(number, float):
            symbol = self.env.create_unspecified_symbol(number, source)
            return self.env.create_symfloatnode(symbol, hint=number, source=source)
        symbol = self.env.create_symbol(number, source, _torch.DimDynamic.DYNAMIC)
        return self.env.create_symintnode(symbol, hint=number, source=source)

    def fits(self, numbers: Sequence[Any]) -> bool:
        """Whether these answer every question as the first ones did."""
        count = len(self.env.guards)
        if self._guards[0] != count:
            self._guards = count, compile_sizes([g.expr for g in self.env.guards], self.symbols)
        return many(numbers) and all(self._guards[1](*numbers))

    def forget_callers(self) -> None:
        """Let go of the stack at which each symbol arose that numbers decide. It holds the code of
        all callers; caches of PyTorch's hold the environment for ever, and with that code what
        Dynamo compiled for it."""
        self.env.var_to_stack.clear()
        self.env.deferred_runtime_asserts.clear()


def _renamed(names: Mapping[Any, str]) -> dict:
    """Symbols under names that are Python's and keep what is known of them."""
    import sympy

    return {s: sympy.Symbol(name, **s.assumptions0) for s, name in names.items()}


def map_leaves(tree: Any, fn: Callable[[Any], Any]) -> Any:
    """Replace every leaf of nested arguments by `fn(leaf)`."""
    if isinstance(tree, tuple):
        return tuple(map_leaves(item, fn) for item in tree)
    if isinstance(tree, list):
        return [map_leaves(item, fn) for item in tree]
    if isinstance(tree, dict):
        return {key: map_leaves(item, fn) for key, item in tree.items()}
    return fn(tree)


def map_refs(tree: Any, fn: Callable[[Ref], Any]) -> Any:
    """Replace every `Ref` in nested arguments by `fn(ref)`."""
    return map_leaves(tree, lambda leaf: fn(leaf) if isinstance(leaf, Ref) else leaf)


def leaves(tree: Any, kind: type[T]) -> Iterator[T]:
    """What is of one kind among nested arguments, in flattened order."""
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from leaves(item, kind)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from leaves(item, kind)


_UNTOLD = frozenset(
    ("_unsafe_view", "einsum", "pixel_shuffle", "pixel_unshuffle", "type_as", "unsafe_split",
     "unsafe_split_with_sizes")
)  # fmt: skip


def shares(op: Any) -> bool:
    """Whether what an operator yields may lie in the memory of its first input: views, and those
    that return a view, or the input itself, where there is nothing to do, of which their schema
    does not tell."""
    schema = op._schema
    return schema.name.split("::")[-1] in _UNTOLD or any(r.alias_info for r in schema.returns)


def draws(op: Any) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())
