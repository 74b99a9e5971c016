"""One ATen operator with a derivative of our own, as a node of PyTorch's graph.

Mostly it is a backward operator d = B(ξ, x, θ, …); its `Formula` maps cotangents of d to those of
B's arguments, which is a second derivative. `derivative_kernel` makes the function that stands in
front of the operator's autograd kernel: where no derivative of B is asked for, the stock kernel
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import _C, Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

KEYS = ("AutogradCPU", "AutogradCUDA")
Grads = Sequence[Tensor | None]


@dataclass(frozen=True)
class Call:
    """The arguments of B by name, which of them need a cotangent, and B's results if kept."""

    arguments: dict[str, Any]
    needed: dict[str, bool]
    results: tuple[Tensor | None, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def needs(self, *names: str) -> bool:
        return any(self.needed[name] for name in names)


@dataclass(frozen=True)
class Formula:
    """The second derivative of one ATen operator.

    operator: its name, with the overload unless it is the default one.
    second: (call, cotangents of the results) → {argument name: cotangent}; may leave out zeros.
    accepts: whether `second` covers these arguments; the stock kernel serves the others.
    composite: the operator in differentiable steps, for forward mode; without one the stock kernel
        serves dual tensors.
    keeps: the results of the operator that `second` reads.
    armed_by: what registers it, "create_graph" or "forward_mode".
    keys: where it is registered.
    kernel: makes its kernel from (formula, stock kernel), if not `derivative_kernel`.
    """

    operator: str
    family: str
    why: str
    second: Callable[[Call, Grads], dict[str, Any]] | None = None
    accepts: Callable[[dict[str, Any]], bool] = lambda arguments: True
    composite: Callable[[dict[str, Any]], Any] | None = None
    keeps: tuple[int, ...] = ()
    armed_by: str = "create_graph"
    keys: tuple[str, ...] = KEYS
    kernel: Callable[[Formula, Any], Callable] | None = None

    def overload(self) -> torch._ops.OpOverload | None:
        """The operator of this build of PyTorch, None where it has none."""
        name, _, variant = self.operator.partition(".")
        packet = getattr(torch.ops.aten, name, None)
        return getattr(packet, variant or "default", None)


def plain(*tensors: Any) -> bool:
    """Whether all are real, dense tensors."""
    return all(
        t is None or (t.layout == torch.strided and not t.is_complex() and not t.is_quantized)
        for t in tensors
    )


def is_dual(*tensors: Any) -> bool:
    """Whether a tensor carries a forward-mode tangent at the current level."""
    if forward_ad._current_level < 0:
        return False
    return any(
        isinstance(t, Tensor) and forward_ad.unpack_dual(t, level=0).tangent is not None
        for t in tensors
    )


def again(*tensors: Any) -> bool:
    """Whether derivatives will be taken of what is computed now from these tensors."""
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
        return True
    return is_dual(*tensors)


def below(op: Any, keyset: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The operator itself, without this level of autograd; levels below keep their grad mode."""
    with (
        torch.enable_grad(),
        forward_ad._set_fwd_grad_enabled(True),
        _C._AutoDispatchBelowAutograd(),
    ):
        return op.redispatch(keyset & _C._after_autograd_keyset, *args, **kwargs)


def through(composite: Callable, call: Call, cotangents: Grads) -> dict[str, Any]:
    """The second derivative by reverse mode over the operator in differentiable steps."""
    names = [name for name, needed in call.needed.items() if needed]
    present = [i for i, c in enumerate(cotangents) if c is not None]

    def results(*at: Tensor) -> tuple[Tensor, ...]:
        found = composite(call.arguments | dict(zip(names, at, strict=True)))
        found = found if isinstance(found, tuple) else (found,)
        return tuple(found[i] for i in present)

    pull = torch.func.vjp(results, *(call[name] for name in names))[1]
    return dict(zip(names, pull(tuple(cotangents[i] for i in present)), strict=True))


class Node(_SingleLevelFunction):
    """B in the graph. One level of autograd: torch.func's transforms bring a level each."""

    @staticmethod
    def forward(ctx, formula, op, keyset, names, kwargs, *args):
        result = below(op, keyset, args, kwargs)
        results = result if isinstance(result, tuple) else (result,)
        ctx.formula, ctx.names = formula, (*names[: len(args)], *kwargs)
        values = (*args, *kwargs.values())
        ctx.places = [i for i, value in enumerate(values) if isinstance(value, Tensor)]
        ctx.values = [None if isinstance(value, Tensor) else value for value in values]
        kept = (results[i] for i in formula.keeps)
        ctx.save_for_backward(*(values[i] for i in ctx.places), *kept)
        ctx.set_materialize_grads(False)
        return result

    @staticmethod
    def backward(ctx, *cotangents):
        lead, positional = 5, len(ctx.needs_input_grad) - 5
        if all(c is None for c in cotangents):
            return (None,) * (lead + positional)
        saved, values = ctx.saved_tensors, list(ctx.values)
        for place, tensor in zip(ctx.places, saved, strict=False):
            values[place] = tensor
        needed = dict.fromkeys(ctx.names, False)
        needed |= dict(zip(ctx.names, ctx.needs_input_grad[lead:], strict=False))
        arguments = dict(zip(ctx.names, values, strict=True))
        call = Call(arguments, needed, tuple(saved[len(ctx.places) :]))
        grads = ctx.formula.second(call, cotangents)
        found = (grads.get(name) if needed[name] else None for name in ctx.names[:positional])
        return (*(None for _ in range(lead)), *found)


def derivative_kernel(formula: Formula, stock: Any) -> Callable:
    """The autograd kernel of the operator, in front of `stock`."""
    op, apply = formula.overload(), getattr(Node, "apply")  # noqa: B009
    assert op is not None  # asked for by the patcher
    schema = op._schema.arguments
    names = [a.name for a in schema if not a.kwarg_only]
    defaults = {a.name: a.default_value for a in schema if a.has_default_value()}

    def kernel(keyset, *args, **kwargs):
        if forward_ad._current_level >= 0 and is_dual(*args, *kwargs.values()):
            arguments = defaults | dict(zip(names, args, strict=False)) | kwargs
            if formula.composite is not None and formula.accepts(arguments):
                return formula.composite(arguments)
            return stock.call_boxed(keyset, *args, **kwargs)
        if not (_C.is_grad_enabled() and _C._any_requires_grad(*args, **kwargs)):
            return stock.call_boxed(keyset, *args, **kwargs)
        arguments = defaults | dict(zip(names, args, strict=False)) | kwargs
        if not formula.accepts(arguments):
            return stock.call_boxed(keyset, *args, **kwargs)
        args = tuple(arguments[name] for name in names)
        kwargs = {k: v for k, v in arguments.items() if k not in names}
        with enable_single_level_autograd_function():
            return apply(formula, op, keyset, names, kwargs, *args)

    return kernel
