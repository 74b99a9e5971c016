"""The tensors that a program starts from and writes to, and small caches of what was made."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import foreach_copy_, foreach_mul, preserve_version_counter
from ..dtypes import accumulation
from ..graph import Graph, Node, Ref, map_refs
from ..rules import drawn_in_place

CACHE_SIZE = 64  # graphs and programs kept per module, oldest out first


def remember(cache: dict, key: Any, item: Any) -> None:
    """Keep `item`, and let the oldest of too many go."""
    if len(cache) >= CACHE_SIZE:
        cache.pop(next(iter(cache)), None)
    cache[key] = item


class Itself:
    """An object as part of a key: that one, whatever it takes for equal to itself (a caller's
    dataclass), and kept alive, so that no other takes its place."""

    __slots__ = ("item",)

    def __init__(self, item: Any) -> None:
        self.item = item

    def __hash__(self) -> int:
        return id(self.item)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self.item is other.item


def kind(leaf: Any) -> Any:
    """What a graph that was traced with `leaf` depends on."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype
    try:
        hash(leaf)
    except TypeError:
        return repr(leaf)
    return type(leaf), leaf


def read_state(graph: Graph, inputs: Sequence[Any], copied: Collection[int]) -> dict[int, Tensor]:
    """Every value the graph starts from. copied: places of inputs that the network writes to and
    of which a backward to come needs the old numbers."""
    state = dict(graph.constants)
    state.update({v: t for v, t in zip(graph.inputs, inputs, strict=True) if v is not None})
    written: dict[int, Tensor] = {}
    for place in graph.mutations:
        value = graph.inputs[place]
        assert value is not None
        state[value] = inputs[place].detach()
        if place in copied:
            written[value] = state[value]
    if written:
        fresh = {value: torch.empty_like(t) for value, t in written.items()}
        copy_all(fresh.values(), written.values())
        state |= fresh
    return state


def write_state(graph: Graph, inputs: Sequence[Any], values: Mapping[int, Tensor]) -> None:
    """Batch norm statistics and the like, once per call, after all sweeps succeeded."""
    buffers = [inputs[place] for place in graph.mutations]
    new = [values[v] for v in graph.mutations.values()]
    places = {t.untyped_storage().data_ptr() for t in buffers}  # one may move into another
    new = [t.clone() if t.untyped_storage().data_ptr() in places else t for t in new]
    unnoticed = tuple([inputs[place] for place in graph.unnoticed])
    with torch.no_grad(), preserve_version_counter(unnoticed):
        copy_all(buffers, new)


def copy_all(into: Iterable[Tensor], tensors: Iterable[Tensor]) -> None:
    """Copy each tensor into its place, in one kernel for all of one dtype."""
    alike: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for old, new in zip(into, tensors, strict=True):
        olds, news = alike.setdefault((old.dtype, old.device, new.dtype), ([], []))
        olds.append(old)
        news.append(new)
    for olds, news in alike.values():
        foreach_copy_(olds, news)


def copies(tensors: list[Tensor]) -> Sequence[Tensor]:
    """A copy of each, in a few kernels for all of them."""
    return foreach_mul(tensors, 1.0) if tensors else ()


def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return x.clone().copy_(source, non_blocking)


def _put(part: Any) -> Any:
    def run(x: Tensor, source: Tensor, *where: Any, **more: Any) -> Tensor:
        whole = x.clone()
        part(whole, *where, **more).copy_(source)
        return whole

    return run


# Operators of functional programs that autograd has no formula for (of some at complex numbers
# alone), as it has one; what writes in place have become, where it draws in another order than
# they did; and views, since a kernel (channel_shuffle's) may lay its result out otherwise than the
# trace saw.
_AS_WRITTEN: dict[Any, Any] = {
    torch.ops.aten.copy.default: _copy,
    torch.ops.aten.slice_scatter.default: _put(torch.ops.aten.slice.Tensor),
    torch.ops.aten.select_scatter.default: _put(torch.ops.aten.select.int),
    torch.ops.aten.bernoulli.p: drawn_in_place,
    torch.ops.aten.view.default: torch.reshape,
    torch.ops.aten._unsafe_view.default: torch.reshape,
}


def run_prelude(nodes: Sequence[Node], state: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Nodes that do not depend on x, under ordinary autograd (weight norm, hypernetworks)."""
    values = dict(state)
    for node in nodes:
        args = [
            values[a.index] if type(a) is Ref
            else map_refs(a, lambda ref: values[ref.index]) if isinstance(a, list | tuple)
            else a
            for a in node.args
        ]  # fmt: skip
        kwargs = node.kwargs and map_refs(dict(node.kwargs), lambda ref: values[ref.index])
        run: Any = _AS_WRITTEN.get(node.op, node.op)
        out = run(*args, **kwargs)
        for v, part in zip(node.outputs, out if node.many else (out,), strict=True):
            values[v] = part
    return values


def scale(weight: float, x: Tensor) -> Tensor | None:
    """The penalty's weight as a tensor, so that it may change from call to call; None for zero."""
    if weight == 0:
        return None
    return torch.full((), weight, dtype=accumulation(x.dtype), device=x.device)


def behind(tensors: Iterable[Tensor]) -> Iterator[Any]:
    """Every node of autograd's graph that these tensors come from."""
    stack = [t.grad_fn for t in tensors if t.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        new = {parent for parent, _ in node.next_functions if parent is not None} - seen
        seen |= new
        stack.extend(new)
