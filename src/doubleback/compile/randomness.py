"""Random numbers of a region are drawn before it and handed to it: so forward, backward and second
derivative, however often they run, see the same ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._torch import TorchDispatchMode, pytree
from ..errors import CaptureError

aten = torch.ops.aten

# What is drawn depends on the sizes of the first argument alone, by operators that return it …
_LIKE = {
    aten.rand_like.default, aten.randn_like.default, aten.randint_like.default,
    aten.randint_like.low_dtype, aten.bernoulli.p,
}  # fmt: skip
# … or write it there
_WRITING = {
    aten.uniform_.default, aten.normal_.default, aten.exponential_.default,
    aten.geometric_.default, aten.log_normal_.default, aten.cauchy_.default,
    aten.random_.default, aten.random_.to, getattr(aten.random_, "from"),
    aten.bernoulli_.float,
}  # fmt: skip
_FROM_SIZES = {
    aten.rand.default, aten.randn.default, aten.randint.default, aten.randint.low,
    aten.randperm.default, aten.normal.float_float,
}  # fmt: skip
_FLOATS = {aten.rand.default, aten.randn.default, aten.normal.float_float}
_NORMAL = {aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor}


@dataclass(frozen=True)
class Draw:
    """One draw of a region: `make(*sizes)`, from sizes that may be open."""

    op: Any
    make: Callable[..., Tensor]
    sizes: tuple[Any, ...]


def is_random(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws: attention is tagged, too, and does so with dropout only."""
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return False
    for i, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            given = args[i] if i < len(args) else kwargs.get("dropout_p", argument.default_value)
            return given != 0
    return True


class _Randomness(TorchDispatchMode, ABC):
    """Sees each operator that draws."""

    @abstractmethod
    def meet(self, draw: Draw) -> Tensor:
        """What was drawn."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_random(func, args, kwargs):
            return func(*args, **kwargs)
        return self._drawn(func, args, kwargs)

    def _drawn(self, op: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if kwargs.get("generator") is not None:
            raise CaptureError(f"{op} draws from a generator of its own")
        if op is aten.native_dropout.default:
            x, p, train = args
            if train is False or p == 0:
                return x.clone(), torch.ones_like(x, dtype=torch.bool)
            if p == 1:
                return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
            kept = self.meet(_uniform(op, x, lambda u: u > p))
            return x * kept * (1.0 / (1.0 - p)), kept
        if op is aten.bernoulli.default:
            (probability,) = args
            uniform = self.meet(_uniform(op, probability, lambda u: u))
            return (uniform < probability).to(probability.dtype)
        if op is aten.bernoulli_.Tensor:
            x, probability = args
            uniform = self.meet(_uniform(op, x, lambda u: u))
            return x.copy_(uniform < probability)
        if op in _NORMAL:
            mean, std = (*args, 1.0)[:2]
            like = torch.broadcast_tensors(*(t for t in args if isinstance(t, Tensor)))[0]
            return mean + std * self.meet(_normal(op, like))
        if op in _WRITING:
            return args[0].copy_(self.meet(_of_like(op, args, kwargs)))
        if op in _LIKE:
            if op is not aten.bernoulli.p:
                kwargs = {**kwargs, "dtype": kwargs.get("dtype") or args[0].dtype}
            return self.meet(_of_like(op, args, kwargs))
        if op in _FROM_SIZES:
            if op in _FLOATS:  # Inductor knows one default only
                kwargs = {**kwargs, "dtype": kwargs.get("dtype") or torch.get_default_dtype()}
            return self.meet(_of_sizes(op, args, kwargs))
        raise CaptureError(f"{op} draws random numbers that depend on more than sizes")


class Recording(_Randomness):
    """Keeps a note of each draw, on tensors without numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[Draw] = []

    def meet(self, draw: Draw) -> Tensor:
        self.draws.append(draw)
        return draw.make(*draw.sizes)


class Replaying(_Randomness):
    """Hands out what was drawn before, in the same order."""

    def __init__(self, draws: Sequence[Draw], drawn: Sequence[Tensor]) -> None:
        super().__init__()
        self.rest = list(zip(draws, drawn, strict=True))

    def meet(self, draw: Draw) -> Tensor:
        if not self.rest or self.rest[0][0].op is not draw.op:
            raise CaptureError(f"{draw.op} draws where it did not before")
        return self.rest.pop(0)[1]


def _uniform(op: Any, x: Tensor, then: Callable[[Tensor], Tensor]) -> Draw:
    dtype = x.dtype if x.is_floating_point() else torch.float32
    device = x.device

    def make(*sizes: int) -> Tensor:
        return then(torch.rand(sizes, dtype=dtype, device=device))

    return Draw(op, make, tuple(x.shape))


def _normal(op: Any, x: Tensor) -> Draw:
    dtype, device = x.dtype, x.device
    return Draw(
        op, lambda *sizes: torch.randn(sizes, dtype=dtype, device=device), tuple(x.shape)
    )  # fmt: skip


def _of_like(op: Any, args: tuple, kwargs: dict[str, Any]) -> Draw:
    """Drawn on an empty tensor of the same sizes."""
    x, *rest = args
    dtype, device = x.dtype, x.device
    numbers, fill = _numbers((rest, kwargs))
    axes = x.dim()

    def make(*sizes: int) -> Tensor:
        rest, kwargs = fill(sizes[axes:])
        return op(torch.empty(sizes[:axes], dtype=dtype, device=device), *rest, **kwargs)

    return Draw(op, make, (*x.shape, *numbers))


def _of_sizes(op: Any, args: tuple, kwargs: dict[str, Any]) -> Draw:
    numbers, fill = _numbers((args, kwargs))

    def make(*sizes: int) -> Tensor:
        args, kwargs = fill(sizes)
        return op(*args, **kwargs)

    return Draw(op, make, numbers)


def _numbers(tree: Any) -> tuple[tuple, Callable[[Sequence[int]], Any]]:
    """Integers among arguments, any of which may be an open size, and the arguments from them."""
    leaves, spec = pytree.tree_flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if type(leaf) is int or _is_open(leaf)]
    numbers = tuple(leaves[i] for i in places)
    for i in places:
        leaves[i] = None

    def fill(sizes: Sequence[int]) -> Any:
        filled = list(leaves)
        for i, size in zip(places, sizes, strict=True):
            filled[i] = size
        return pytree.tree_unflatten(filled, spec)

    return numbers, fill


def _is_open(leaf: Any) -> bool:
    return isinstance(leaf, torch.SymInt)
