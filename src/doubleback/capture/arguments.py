"""One call of a penalised module, taken apart: which arguments are the network's and which the
penalty's, and which tensors among them are differentiated. And the weights of a plain network
for the module that wraps it: both name them alike but for a prefix."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._torch import peek_interpreter_stack, pytree
from ..errors import InputError, OutputChoiceError, nearest

Path = int | str | tuple


@dataclass(frozen=True)
class Arguments:
    """One call: the flattened arguments of the network and the penalty's own.

    penalised: places among `leaves` of the tensors that the penalty differentiates by.
    """

    extra: tuple
    leaves: tuple
    spec: Any
    penalised: tuple[int, ...]

    @property
    def x(self) -> list[Tensor]:
        return [self.leaves[i] for i in self.penalised]

    @property
    def constants(self) -> tuple:
        """The penalty's own arguments, detached, as the sweeps read them."""
        if all(isinstance(t, Tensor) for t in self.extra):
            return tuple(t.detach() for t in self.extra)
        return pytree.tree_map_only(Tensor, lambda t: t.detach(), self.extra)

    @cached_property
    def asked(self) -> dict[int, Tensor]:
        """The penalty's own tensors that ask for a gradient, by flattened place."""
        leaves = enumerate(pytree.tree_leaves(self.extra)) if self.extra else ()
        return {i: t for i, t in leaves if requires_grad(t)}

    @cached_property
    def aliases(self) -> list[Tensor]:
        """The penalised tensors as the network is to see them, tensors of their own: one which
        stands in two places, or another that was computed from it, stays another tensor."""
        return [(t.clone() if t.is_inference() else t).detach().requires_grad_() for t in self.x]

    def with_own(self, result: Any) -> Any:
        """A network's result with the caller's own tensors in the places of the aliases, which it
        may have returned as they are."""
        if isinstance(result, Tensor):
            own = [t for t, alias in zip(self.x, self.aliases, strict=True) if result is alias]
            return own[0] if own else result
        if type(result) in (tuple, list):
            return type(result)(self.with_own(part) for part in result)
        if type(result) is dict:
            return {key: self.with_own(part) for key, part in result.items()}
        return result

    def asks(self, position: int) -> bool:
        """Whether the penalty's argument at `position` asks for a gradient."""
        return requires_grad(self.extra[position])

    def for_autograd(self) -> Arguments:
        """The call with copies of inference tensors, which autograd cannot save."""
        return replace(self, leaves=usable(self.leaves), extra=usable(self.extra))

    def with_x(self, x: Sequence[Tensor]) -> tuple[tuple, dict[str, Any]]:
        """The network's arguments, with `x` in the places of the penalised tensors."""
        leaves = list(self.leaves)
        for i, t in zip(self.penalised, x, strict=True):
            leaves[i] = t
        return pytree.tree_unflatten(leaves, self.spec)


def usable(nested: Any) -> Any:
    """Nested arguments with copies of the inference tensors in it."""
    with torch.inference_mode(False):
        return pytree.tree_map_only(Tensor, lambda t: t.clone() if t.is_inference() else t, nested)


def requires_grad(nested: Any) -> bool:
    """Whether any tensor in nested arguments requires grad."""
    if isinstance(nested, Tensor):
        return nested.requires_grad
    return any(isinstance(t, Tensor) and t.requires_grad for t in pytree.tree_leaves(nested))


def take_apart(
    net: nn.Module, wrt: Any, extras: int, args: tuple, kwargs: Mapping[str, Any]
) -> Arguments:
    """Split a call, whose last `extras` positional arguments are not the network's; an
    `InputError` where it does not fit `wrt`."""
    if peek_interpreter_stack() is not None:
        raise InputError(
            "torch.func (grad, vmap, jvp, …) cannot transform a penalised model; call it outside "
            "and use backward() or torch.autograd.grad, or write the penalty with torch.func itself"
        )
    if len(args) < extras:
        raise InputError(
            f"the penalty takes the last {extras} positional argument(s) (labels, targets); the "
            f"call has {len(args)}. For the network's output alone, call model.net(…)"
        )
    split = len(args) - extras
    own, extra = args[:split], args[split:]
    if not kwargs and all(isinstance(t, Tensor) for t in own):
        leaves: Sequence[Any] = own
        spec = _spec(len(own))
    else:
        leaves, spec = pytree.tree_flatten((own, dict(kwargs)))
    _refuse_too_many(net, extras, len(own))
    penalised = _Places(net, extras, own, kwargs, leaves, spec).of(wrt)
    _check_devices(net, [leaves[i] for i in penalised])
    return Arguments(extra, tuple(leaves), spec, penalised)


@lru_cache
def _spec(count: int) -> Any:
    """The structure of a call with `count` tensors by position and nothing else."""
    return pytree.tree_flatten(((None,) * count, {}))[1]


@dataclass(frozen=True)
class _Places:
    """Where `wrt` points: into which of the flattened arguments."""

    net: nn.Module
    extras: int
    own: tuple
    kwargs: Mapping[str, Any]
    leaves: Sequence[Any]
    spec: Any

    def of(self, wrt: Any) -> tuple[int, ...]:
        places: list[int] = []
        for path in self._paths(wrt):
            more = self._one(path)
            if set(more).intersection(places):
                raise InputError(f"wrt={wrt!r} names an input twice: {path!r} is among the others")
            places += more
        if not places:
            raise InputError(f"wrt={wrt!r} holds no tensor")
        for i in places:
            _can_be_penalised(self.leaves[i])
        return tuple(places)

    def _paths(self, wrt: Any) -> Sequence[Path]:
        """A list holds several; a tuple too if each of its items names an argument, otherwise it is
        one path into an argument."""
        if isinstance(wrt, list):
            return wrt
        if not isinstance(wrt, tuple):
            return (wrt,)
        several = all(isinstance(item, tuple) or self._names(item) for item in wrt)
        return wrt if several else (wrt,)

    def _names(self, key: Any) -> bool:
        if isinstance(key, str):
            return key in self.kwargs or key in _names(self.net)
        return isinstance(key, int) and key < len(self.own)

    def _one(self, path: Path) -> list[int]:
        keys = path if isinstance(path, tuple) else (path,)
        if keys == (0,) and self.leaves is self.own and self.own:  # by far the most frequent
            return [0]
        numbered = pytree.tree_unflatten(list(range(len(self.leaves))), self.spec)
        part = self._argument(keys[0], *numbered)
        for position, key in enumerate(keys[1:], start=1):
            if isinstance(part, int):
                _refuse_path(path, self.leaves[part], key, [*_names(self.net), *self.kwargs])
            part = _inside(part, key, path, keys[:position])
        places = pytree.tree_leaves(part)
        return [i for i in places if isinstance(i, int) and isinstance(self.leaves[i], Tensor)]

    def _argument(self, key: Any, own: tuple, kwargs: Mapping[str, Any]) -> Any:
        """An argument of the network by position, by keyword or by its parameter's name."""
        if isinstance(key, bool) or not isinstance(key, (int, str)):
            raise InputError(
                f"wrt={key!r} is neither a position nor a name of an argument; several are a list "
                "of these, and a path into an argument is a tuple"
            )
        if isinstance(key, int) and key < 0:
            raise InputError("wrt counts arguments from 0")
        names = _names(self.net)
        if key in kwargs:
            return kwargs[str(key)]
        place = names.index(key) if key in names else key
        if isinstance(place, int) and place < len(own):
            return own[place]
        here = [*names[: len(own)], *kwargs]
        if self.extras and not here:
            raise InputError(
                f"the penalty takes the last {self.extras} positional argument(s) (labels, targets "
                "or directions), and nothing is left for the network: model(x, y). For the "
                "network's output alone, as in evaluation, call model.net(x)"
            )
        raise InputError(
            f"wrt={key!r} names no argument of this call; it has {here or 'none'}"
            f"{nearest(key, [n for n in (*names, *kwargs) if n != key])}"
            + (f" (the last {self.extras} positional ones are the penalty's)" * bool(self.extras))
        )


def place_of(net: nn.Module, key: int | str, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """The position or keyword of the argument that `key` names, by either or by its parameter's
    name; None where there is none of that name."""
    if isinstance(key, int):
        return key if 0 <= key < len(args) else None
    names = _names(net)
    return key if key in kwargs else names.index(key) if key in names else None


def _names(net: nn.Module) -> list[str]:
    forward = net.forward
    return _parameters(getattr(forward, "__func__", forward), hasattr(forward, "__func__"))


@lru_cache
def _parameters(forward: Any, method: bool) -> list[str]:
    """The names of what forward takes by position, less a method's first, whatever it is called."""
    parameters = inspect.signature(forward).parameters.values()
    names = [p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]
    return names[1:] if method else names


@lru_cache
def _most_positional(forward: Any) -> float:
    """How many arguments a method `forward` takes by position, `self` aside."""
    kinds = [p.kind for p in inspect.signature(forward).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return float("inf")
    return sum(k <= inspect.Parameter.POSITIONAL_OR_KEYWORD for k in kinds) - 1


def _refuse_too_many(net: nn.Module, extras: int, given: int) -> None:
    """A label for a penalty that takes none would go to the network."""
    forward = getattr(net.forward, "__func__", None)
    most = _most_positional(forward) if isinstance(forward, FunctionType) else float("inf")
    if given <= most:
        return
    told = f"{type(net).__name__} takes {most} by position, and this call hands it {given}"
    if extras:
        raise InputError(f"{told} besides the {extras} of the penalty")
    raise InputError(
        f"{told}: the penalty takes no label or target of its own. Leave it out; for a loss beside "
        "the penalty, accumulate(x, y, loss=…)"
    )


def _refuse_path(path: Any, leaf: Any, key: Any, names: Sequence[str]) -> NoReturn:
    kind = type(leaf).__name__
    if isinstance(leaf, Tensor):
        known = f", and {key!r} names no argument{nearest(key, names)}" * (key not in names)
    else:
        known = (
            " that PyTorch's pytrees know: hand over a dictionary, or, for a dataclass, say "
            f"torch.utils._pytree.register_dataclass({kind}) once"
        )
    raise InputError(f"wrt={path!r} leads into a {kind}, which is no container{known}")


def _inside(tree: Any, key: Any, path: Any, before: Sequence[Any]) -> Any:
    """What lies under a key, an index or a field's name."""
    if isinstance(key, str) and not isinstance(tree, Mapping):
        if hasattr(tree, key):
            return getattr(tree, key)
    else:
        try:
            return tree[key]
        except (KeyError, IndexError, TypeError):
            pass
    names = list(tree) if isinstance(tree, Mapping) else [n for n in dir(tree) if n[0] != "_"]
    raise InputError(
        f"wrt={path!r}: there is no {key!r} in {type(tree).__name__} {list(before)!r}"
        f"{nearest(key, names)}"
    )


def _can_be_penalised(leaf: Tensor) -> None:
    if is_distributed(leaf):
        raise InputError(
            f"the penalised input of shape {tuple(leaf.shape)} is a DTensor; hand over what is "
            "here of it, x.to_local(), or x.full_tensor()"
        )
    if not leaf.is_floating_point():
        raise InputError(
            f"the penalised input must be floating point, not {leaf.dtype} of shape "
            f"{tuple(leaf.shape)}; choose another argument with wrt="
        )
    if leaf.dim() == 0:
        raise InputError("the penalised input needs a batch axis; it is a scalar")


def _check_devices(net: nn.Module, x: Sequence[Tensor]) -> None:
    state = next(net.parameters(), None)
    if state is None:
        state = next(net.buffers(), None)
    if state is not None:
        refuse_distributed((state,))
    if is_sharded(type(net)):  # whose parameters a call of its own may have left whole
        raise InputError(f"the network is sharded; {_WRAP}")
    if state is not None and is_lazy(state):
        raise InputError("a lazy module of the network has no shapes yet; call net(x) once before")
    for t in x:
        if state is not None and t.device != state.device:
            raise InputError(
                f"x is on {t.device} and the network on {state.device}; move one of them"
            )


# ------------------------------------------------------------------------------- outputs


def tensors_in(result: Any, choice: Any) -> list[Tensor]:
    """The tensor that `choice` names in a network's result; without a choice all that are there.
    TorchDynamo runs through this too, so it is plain Python."""
    if choice is None:
        tensors: list[Tensor] = []
        _collect(result, tensors)
        return tensors
    keys = choice if isinstance(choice, tuple) else (choice,)
    for key in keys:
        named = isinstance(result, Mapping)
        if isinstance(key, str) and not named and _nameless(result):
            raise KeyError(key)  # an attribute that is not there TorchDynamo does not see
        if isinstance(key, int) and isinstance(result, Tensor):
            length = result.shape[0] if result.dim() else 0
            if not -length <= key < length:
                raise IndexError(key)
        attribute = isinstance(key, str) and not named
        result = getattr(result, key) if attribute else result[key]  # type: ignore[reportArgumentType]
    return [result]


def _nameless(result: Any) -> bool:
    return isinstance(result, (Tensor, Mapping)) or type(result) in (tuple, list)


NO_SUCH = (KeyError, IndexError, TypeError, AttributeError)  # of a choice that leads nowhere


def names_in(result: Any, choice: Any) -> list[str]:
    """What is told of a choice that is no tensor: the part of it that leads nowhere and the names
    that it could have been; or nothing, what it leads to, and the names in there. Plain Python,
    too."""
    keys: tuple[Any, ...] = choice if isinstance(choice, tuple) else (choice,)
    for key in keys:
        names = _names_of(result)
        if isinstance(key, int) and isinstance(result, (tuple, list)):
            names = [*range(-len(result), len(result))]
        if key in names and (isinstance(result, Mapping) or not isinstance(key, str)):
            result = result[key]
        elif isinstance(key, str) and not _nameless(result) and hasattr(result, key):
            result = getattr(result, key)
        else:
            return [str(key), *[str(name) for name in names if not isinstance(name, int)]]
    return ["", type(result).__name__, *[str(name) for name in _names_of(result)]]


def _names_of(result: Any) -> list[Any]:
    if isinstance(result, Mapping):
        return list(result)
    if isinstance(result, Tensor):
        return []
    if hasattr(result, "__dataclass_fields__"):
        return list(result.__dataclass_fields__)
    return list(result._fields) if hasattr(result, "_fields") else []


def no_output(choice: Any, names: Sequence[str]) -> OutputChoiceError:
    """What is said then."""
    if names[0]:
        return OutputChoiceError(f"output={choice!r} does not exist{nearest(names[0], names[1:])}")
    inside = f"; in it are {', '.join(map(repr, names[2:]))}" if names[2:] else ""
    return OutputChoiceError(f"output={choice!r} is a {names[1]}, no tensor{inside}")


def check_choice(choice: Any) -> None:
    """Refuse what can choose no output of any network."""
    for key in choice if isinstance(choice, tuple) else (choice,):
        if isinstance(key, bool) or getattr(key, "__hash__", None) is None:
            raise OutputChoiceError(
                f"output={choice!r}: an output is chosen by an index, a key or an attribute's "
                "name, or by a tuple of these, a path"
            )


def _collect(item: Any, tensors: list[Tensor]) -> None:
    if isinstance(item, Tensor):
        tensors.append(item)
    elif isinstance(item, Mapping):
        for part in item.values():
            _collect(part, tensors)
    elif isinstance(item, (tuple, list)):
        for part in item:
            _collect(part, tensors)
    elif hasattr(item, "__dataclass_fields__"):
        for name in item.__dataclass_fields__:
            _collect(getattr(item, name), tensors)


def choose_output(result: Any, choice: Any) -> Tensor:
    """The one penalised tensor of a network's result."""
    try:
        tensors = tensors_in(result, choice)
    except NO_SUCH as error:
        raise no_output(choice, names_in(result, choice)) from error
    if choice is not None and not isinstance(tensors[0], Tensor):
        raise no_output(choice, names_in(result, choice))
    only_one(tensors, choice)
    return tensors[0]


def only_one(tensors: Sequence[Any], choice: Any) -> None:
    """Raise unless there is exactly one tensor."""
    if choice is None and not tensors:
        raise OutputChoiceError("the network returns no tensor")
    if choice is None and len(tensors) != 1:
        raise OutputChoiceError(
            f"the network returns {len(tensors)} tensors; choose the penalised one with output= "
            "(an index, a key, or a path such as ('head', 0))"
        )
    if len(tensors) != 1 or not isinstance(tensors[0], (Tensor, int)):
        raise OutputChoiceError(f"output={choice!r} is not one tensor of the network's result")


def plain(t: Tensor) -> bool:
    """An ordinary strided tensor, as opposed to a sparse, quantised or distributed one."""
    return type(t) in _KINDS and t.layout is torch.strided and not t.is_quantized


def refuse_distributed(tensors: Iterable[Tensor]) -> None:
    """Parameters in pieces on several machines are put together by their own module's hooks, which
    the sweeps would not meet."""
    for t in tensors:
        if is_distributed(t):
            raise InputError(
                f"the network holds a distributed parameter of shape {tuple(t.shape)}; {_WRAP}. "
                "Layers split between processes (tensor parallelism) are not supported"
            )


_WRAP = "wrap the other way round: fully_shard(Penalised(net, …)), and shard no layer inside"


@lru_cache
def is_sharded(kind: type) -> bool:
    """Whether `fully_shard` made this class."""
    return any(base.__name__ == "FSDPModule" for base in kind.__mro__)


def is_distributed(t: Tensor) -> bool:
    return type(t).__name__ == "DTensor"


_KINDS = (Tensor, nn.Parameter, nn.Buffer)


# ---------------------------------------------------------------------------------------- weights


def accept_plain_keys(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *others: Any
) -> None:
    """A hook before `load_state_dict` of a module that holds a network as `net`: where the keys are
    those of the network itself (`0.weight`), they become the module's (`net.0.weight`).

    >>> import torch, doubleback as db
    >>> net = torch.nn.Linear(3, 2)
    >>> db.Penalised(net, db.OutputGradient(0)).load_state_dict(net.state_dict())
    <All keys matched successfully>
    """
    own = module.get_submodule("net").state_dict(keep_vars=True)
    wrapped = any(f"{prefix}net.{name}" in state_dict for name in own)
    plain = [name for name in own if prefix + name in state_dict]
    if wrapped or not plain:
        return
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[f"{prefix}net.{key.removeprefix(prefix)}"] = state_dict.pop(key)
