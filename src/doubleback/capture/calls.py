"""One call of a penalised module, taken apart: which arguments are the network's and which the
penalty's, what the graph starts from, and under which key it is kept."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack  # pyright: ignore
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from ..dtypes import accumulation
from ..errors import InputError, OutputChoiceError
from ..graph import Graph, map_refs
from ..plan.steps import Plan


@dataclass(frozen=True)
class Arguments:
    """One call, taken apart: the flattened arguments of the network and the penalty's own."""

    args: tuple
    kwargs: dict[str, Any]
    extra: tuple
    leaves: tuple
    spec: Any
    penalised: tuple[int, ...]

    @property
    def x(self) -> list[Tensor]:
        return [self.leaves[i] for i in self.penalised]

    @property
    def still(self) -> set[int]:
        """Places of tensors of which no gradient is asked."""
        leaves = enumerate(self.leaves)
        asked = {i for i, t in leaves if isinstance(t, Tensor) and t.requires_grad}
        return set(range(len(self.leaves))) - asked - set(self.penalised)

    @property
    def constants(self) -> tuple:
        """The penalty's own arguments, detached, as the sweeps read them."""
        if all(isinstance(t, Tensor) for t in self.extra):
            return tuple(t.detach() for t in self.extra)
        return pytree.tree_map_only(Tensor, lambda t: t.detach(), self.extra)

    @cached_property
    def asked(self) -> dict[int, Tensor]:
        """Those of the penalty's own tensors that ask for a gradient, by flattened place."""
        leaves = enumerate(pytree.tree_leaves(self.extra)) if self.extra else ()
        return {i: t for i, t in leaves if requires_grad(t)}

    def asks(self, position: int) -> bool:
        """Whether the penalty's argument at `position` asks for a gradient."""
        return requires_grad(self.extra[position])


def requires_grad(nested: Any) -> bool:
    """Whether any tensor in nested arguments requires grad."""
    if isinstance(nested, Tensor):
        return nested.requires_grad
    return any(isinstance(t, Tensor) and t.requires_grad for t in pytree.tree_leaves(nested))


def take_apart(
    net: nn.Module, wrt: Sequence[int | str], penalty: Any, args: tuple, kwargs: Mapping[str, Any]
) -> Arguments:
    """Split a call; an `InputError` where it does not fit `wrt` or the penalty."""
    if peek_interpreter_stack() is not None:
        raise InputError(
            "torch.func (grad, vmap, jvp, …) cannot transform a penalised model; call it outside "
            "and use backward() or torch.autograd.grad, or write the penalty with torch.func itself"
        )
    extras = penalty.extras
    if len(args) < extras:
        raise InputError(
            f"{type(penalty).__name__} takes the last {extras} positional argument(s); "
            f"the call has {len(args)}"
        )
    split = len(args) - extras
    own, extra = args[:split], args[split:]
    leaves, spec, spans = _flat(own, dict(kwargs))
    penalised = _penalised(net, wrt, extras, spans, leaves)
    _check_devices(net, [leaves[i] for i in penalised])
    return Arguments(own, dict(kwargs), extra, tuple(leaves), spec, penalised)


def _flat(own: tuple, kwargs: dict[str, Any]) -> tuple[Sequence[Any], Any, dict[Any, range]]:
    """The leaves of the network's arguments, their spec, and which leaves each argument holds."""
    if not kwargs and all(isinstance(t, Tensor) for t in own):
        return own, _spec(len(own)), {i: range(i, i + 1) for i in range(len(own))}
    leaves, spec = pytree.tree_flatten((own, kwargs))
    spans, start = {}, 0
    for key, part in [*enumerate(own), *kwargs.items()]:
        count = len(pytree.tree_leaves(part))
        spans[key] = range(start, start + count)
        start += count
    return leaves, spec, spans


@lru_cache
def _spec(count: int) -> Any:
    """That of `count` tensors by position."""
    return pytree.tree_flatten(((None,) * count, {}))[1]


def _penalised(
    net: nn.Module,
    wrt: Sequence[int | str],
    extras: int,
    spans: Mapping[Any, range],
    leaves: Sequence[Any],
) -> tuple[int, ...]:
    """Places of the penalised tensors among the flattened arguments."""
    found: list[int] = []
    for key in wrt:
        place = key
        if isinstance(key, int) and key < 0:
            raise InputError("wrt counts arguments from 0")
        if isinstance(key, str) and key not in spans:
            names = list(inspect.signature(net.forward).parameters)
            place = names.index(key) if key in names else key
        if place not in spans:
            raise InputError(
                f"wrt={key!r} names no argument of this call; it has {list(spans)} "
                f"(the last {extras} positional ones are the penalty's)"
            )
        found += [i for i in spans[place] if _can_be_penalised(leaves[i])]
    if not found:
        raise InputError(f"wrt={tuple(wrt)!r} holds no tensor")
    return tuple(found)


def _can_be_penalised(leaf: Any) -> bool:
    """False for what is no tensor; a tensor without derivatives or batch is an error."""
    if not isinstance(leaf, Tensor):
        return False
    if not leaf.is_floating_point():
        raise InputError(
            f"the penalised input must be floating point, not {leaf.dtype} of shape "
            f"{tuple(leaf.shape)}; choose another argument with wrt="
        )
    if leaf.dim() == 0:
        raise InputError("the penalised input needs a batch axis; it is a scalar")
    return True


def _check_devices(net: nn.Module, x: Sequence[Tensor]) -> None:
    state = next(net.parameters(), None)
    if state is None:
        state = next(net.buffers(), None)
    for t in x:
        if state is not None and t.device != state.device:
            raise InputError(
                f"x is on {t.device} and the network on {state.device}; move one of them"
            )


# -------------------------------------------------------------------------------- the key


def graph_key(net: nn.Module, call: Arguments, attributes: bool = True) -> Any:
    """What a captured graph depends on: shapes, dtypes, devices, modes, autocast, and the plain
    attributes of modules, unless these are left out."""
    device = call.x[0].device.type
    autocast = torch.is_autocast_enabled(device)
    leaves = tuple(
        (tuple(t.shape), t.dtype, t.device, t.requires_grad or i in call.penalised)
        if isinstance(t, Tensor)
        else _hashable(t)
        for i, t in enumerate(call.leaves)
    )
    mode = (autocast, torch.get_autocast_dtype(device) if autocast else None)
    try:
        return leaves, call.spec, _fingerprint(net, attributes), mode
    except RuntimeError as error:
        if not any(is_lazy(t) for t in (*net.parameters(), *net.buffers())):
            raise
        text = "a lazy module of the network has no shapes yet; call net(x) once before"
        raise InputError(text) from error


def _hashable(item: Any) -> Any:
    """What tells `item` apart from others, as part of a key."""
    try:
        hash(item)
    except TypeError:
        return repr(item)
    return (type(item), item)


def kind(leaf: Any) -> Any:
    """What a graph that was traced with `leaf` depends on."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype
    return _hashable(leaf)


CACHE_SIZE = 64  # graphs and programs kept per module, oldest out first


def remember(cache: dict, key: Any, item: Any) -> None:
    """Keep `item`, and let the oldest of too many go."""
    if len(cache) >= CACHE_SIZE:
        cache.pop(next(iter(cache)))
    cache[key] = item


PLAIN = frozenset((bool, int, float, str, FunctionType, BuiltinFunctionType, MethodType))
_KEYED = PLAIN | {Tensor}


def _fingerprint(net: nn.Module, attributes: bool) -> tuple:
    """Which modules the network is made of, their modes, hooks and plain attributes, and what
    their tensors look like."""
    found: list[Any] = []
    stack = [net]
    while stack:
        module = stack.pop()
        found.append((id(module), module.training, *module._forward_hooks, None))
        found.extend(module._forward_pre_hooks)
        if module._backward_pre_hooks or module._backward_hooks:
            found.extend((*module._backward_pre_hooks, *module._backward_hooks))
        if attributes:
            keyed = [v for v in module.__dict__.values() if type(v) in _KEYED]
            found.extend([(v.shape, v.dtype, v.device) if type(v) is Tensor else v for v in keyed])
        for tensors in (module._parameters, module._buffers):
            found.extend(
                [None if t is None else (t.shape, t.dtype, t.device) for t in tensors.values()]
            )
        stack.extend([m for m in module._modules.values() if m is not None])
    return tuple(found)


# ------------------------------------------------------------------- state and outputs


class Owner(NamedTuple):
    """Where a value that the graph starts from lies: under `name` in a module; written: the
    buffer's name in the network, where the network updates it."""

    module: nn.Module
    name: str
    value: int
    written: str | None


def read_state(
    owners: Sequence[Owner],
    graph: Graph,
    leaves: Sequence[Any],
    copies: bool,
) -> dict[int, Tensor]:
    """Every value the graph starts from. copies: of buffers that the network updates, so that the
    update does not reach what is kept of them for a backward to come."""
    state = dict(graph.constants)
    updated = {}
    for module, name, value, written in owners:
        tensor = getattr(module, name)
        state[value] = tensor if written is None else tensor.detach()
        if written is not None:
            updated[value] = state[value]
    if copies and updated:
        fresh = {value: torch.empty_like(t) for value, t in updated.items()}
        copy_all(fresh.values(), updated.values())
        state |= fresh
    for value, leaf in zip(graph.inputs, leaves, strict=True):
        if value is not None:
            state[value] = leaf
    return state


def copy_all(into: Iterable[Tensor], tensors: Iterable[Tensor]) -> None:
    """Copy each tensor into its place, in one kernel for all of one dtype."""
    alike: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for old, new in zip(into, tensors, strict=True):
        olds, news = alike.setdefault((old.dtype, old.device, new.dtype), ([], []))
        olds.append(old)
        news.append(new)
    for olds, news in alike.values():
        torch._foreach_copy_(olds, news)  # type: ignore[attr-defined]


def copies(tensors: list[Tensor]) -> Sequence[Tensor]:
    """A copy of each, in a few kernels for all of them."""
    return torch._foreach_mul(tensors, 1.0) if tensors else ()  # type: ignore[attr-defined]


def run_prelude(plan: Plan, state: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Nodes that do not depend on x, under ordinary autograd (weight norm, hypernetworks)."""
    values = dict(state)
    for node in plan.prelude:
        args = map_refs(node.args, lambda ref: values[ref.index])
        kwargs = map_refs(dict(node.kwargs), lambda ref: values[ref.index])
        out = node.op(*args, **kwargs)
        for v, part in zip(node.outputs, out if node.many else (out,), strict=True):
            values[v] = part
    return values


def scale(weight: float, x: Tensor) -> Tensor | None:
    """The penalty's weight as a tensor, so that it may change from call to call; None for zero."""
    if weight == 0:
        return None
    return torch.full((), weight, dtype=accumulation(x.dtype).to_real(), device=x.device)


def choose(graph: Graph, choice: Any) -> int:
    place = pick(graph.outputs, graph.out_spec, choice)
    return graph.outputs[place]


def pick(outputs: Sequence[Any], spec: Any, choice: Any) -> int:
    """The flattened position of the penalised output."""
    tensors = [i for i, item in enumerate(outputs) if not isinstance(item, tuple)]
    if choice is None:
        if len(tensors) == 1:
            return tensors[0]
        raise OutputChoiceError(
            f"the network returns {len(tensors)} tensors; choose the penalised one with output= "
            "(an index, a key, or a path such as ('head', 0))"
        )
    found = follow(pytree.tree_unflatten(list(range(len(outputs))), spec), choice)
    if not isinstance(found, int) or found not in tensors:
        raise OutputChoiceError(f"output={choice!r} is not one tensor of the network's result")
    return found


def follow(tree: Any, choice: Any) -> Any:
    """What lies under an index, a key, the name of a field, or a path of them."""
    for key in choice if isinstance(choice, tuple) else (choice,):
        field = isinstance(key, str) and not isinstance(tree, Mapping) and hasattr(tree, key)
        try:
            tree = getattr(tree, key) if field else tree[key]
        except (KeyError, IndexError, TypeError) as error:
            raise OutputChoiceError(f"output={choice!r} does not exist: {error!r}") from error
    return tree
