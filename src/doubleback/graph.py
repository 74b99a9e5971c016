"""The captured network as small immutable records: values, nodes, and who reads what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is the graph's value number `index`."""

    index: int


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
    """A flat, functional program.

    inputs: value per flattened call argument (None for an argument that is no tensor);
    state: value of each parameter, buffer or constant by qualified name;
    outputs: flattened results, a value number or a constant wrapped in a 1-tuple;
    mutations: buffer name → value that the network writes into it;
    attributes: those of the constants that are tensors of modules, though no buffers, by name.
    """

    nodes: tuple[Node, ...]
    values: tuple[Meta | None, ...]
    inputs: tuple[int | None, ...]
    state: Mapping[str, int]
    constants: Mapping[int, Tensor]
    outputs: tuple[Any, ...]
    out_spec: Any
    mutations: Mapping[str, int]
    attributes: Mapping[str, int]

    def shape(self, value: int) -> tuple[int, ...]:
        meta = self.values[value]
        assert meta is not None
        return meta.shape


def map_refs(tree: Any, fn: Callable[[Ref], Any]) -> Any:
    """Replace every `Ref` in nested arguments by `fn(ref)`."""
    if isinstance(tree, Ref):
        return fn(tree)
    if isinstance(tree, tuple):
        return tuple(map_refs(item, fn) for item in tree)
    if isinstance(tree, list):
        return [map_refs(item, fn) for item in tree]
    if isinstance(tree, dict):
        return {key: map_refs(item, fn) for key, item in tree.items()}
    return tree


def refs(tree: Any) -> Iterable[int]:
    """Value numbers in nested arguments, in flattened order."""
    if isinstance(tree, Ref):
        yield tree.index
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from refs(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from refs(item)


def draws(op: Any) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())
