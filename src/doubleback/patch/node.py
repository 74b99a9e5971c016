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
from torch import Tensor
from torch.autograd import forward_ad

from .._torch import (
    AutoDispatchBelowAutograd,
    OpOverload,
    SingleLevelFunction,
    after_autograd_keyset,
    enable_single_level_autograd_function,
    peek_interpreter_stack,
)
from ..kernels import batched

KEYS = ("AutogradCPU", "AutogradCUDA")
Grads = Sequence[Tensor | None]
_AFTER = after_autograd_keyset


class Applied:
    """The arguments of B by name, which of them need a cotangent, and B's results if kept."""

    __slots__ = ("arguments", "needed", "results")

    def __init__(
        self,
        arguments: dict[str, Any],
        needed: dict[str, bool],
        results: tuple[Tensor | None, ...] = (),
    ) -> None:
        self.arguments, self.needed, self.results = arguments, needed, results

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def needs(self, name: str) -> bool:
        return self.needed[name]


@dataclass(frozen=True)
class Formula:
    """The second derivative of one ATen operator.

    operator: its name, with the overload unless it is the default one.
    second: (call, cotangents of the results) → {argument name: cotangent}; may leave out zeros.
    accepts: whether `second` covers these arguments; the stock kernel serves the others.
    composite: the operator in differentiable steps, for forward mode; without one the stock kernel
        serves dual tensors.
    keeps: the results of the operator that `second` reads.
    derived: arguments that are functions of others (results of the forward operator), whose part
        is in the cotangents of these. They are constants of the node: an edge to the forward
        operator would run its backward on no gradient at all, of which cuDNN's attention makes
        whatever its memory held before.
    unread: arguments whose value no derivative reads: they are not kept, and may change in place
        before the backward pass, as in stock.
    armed_by: what registers it, "create_graph" or "forward_mode"; "patch": `db.patch()` itself.
    keys: where it is registered.
    kernel: makes its kernel from (formula, stock kernel), if not `derivative_kernel`.
    """

    operator: str
    family: str
    why: str
    second: Callable[[Applied, Grads], dict[str, Any]] | None = None
    accepts: Callable[[dict[str, Any]], bool] = lambda arguments: True
    composite: Callable[[dict[str, Any]], Any] | None = None
    keeps: tuple[int, ...] = ()
    derived: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    armed_by: str = "create_graph"
    keys: tuple[str, ...] = KEYS
    kernel: Callable[[Formula, Any], Callable] | None = None

    def overload(self) -> OpOverload | None:
        """The operator of this build of PyTorch, None where it has none."""
        name, _, variant = self.operator.partition(".")
        packet = getattr(torch.ops.aten, name, None)
        return getattr(packet, variant or "default", None)


def plain(*tensors: Any) -> bool:
    """Whether all are real, dense tensors."""
    for t in tensors:
        if t is not None and (t.layout != torch.strided or t.is_complex() or t.is_quantized):
            return False
    return True


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
    """The operator without this level of autograd; torch.func's levels below keep theirs."""
    keyset = keyset & _AFTER
    if peek_interpreter_stack() is None:
        with AutoDispatchBelowAutograd():
            return op.redispatch(keyset, *args, **kwargs)
    forward_mode = forward_ad._set_fwd_grad_enabled(True)
    with torch.enable_grad(), forward_mode, AutoDispatchBelowAutograd():
        return op.redispatch(keyset, *args, **kwargs)


def through(composite: Callable, call: Applied, cotangents: Grads) -> dict[str, Any]:
    """The second derivative by reverse mode over the operator in differentiable steps."""
    names = [name for name, needed in call.needed.items() if needed]
    present = [i for i, c in enumerate(cotangents) if c is not None]

    def results(*at: Tensor) -> tuple[Tensor, ...]:
        found = composite(call.arguments | dict(zip(names, at, strict=True)))
        found = found if isinstance(found, tuple) else (found,)
        return tuple(found[i] for i in present)

    pull = torch.func.vjp(results, *(call[name] for name in names))[1]
    return dict(zip(names, pull(tuple(cotangents[i] for i in present)), strict=True))


class DerivativeNode(SingleLevelFunction):
    """B in the graph. One level of autograd: torch.func's transforms bring a level each."""

    @staticmethod
    def forward(ctx, site, keyset, arguments, args, kwargs, *tensors):
        result = below(site.op, keyset, args, kwargs)
        ctx.site, ctx.options = site, {name: arguments[name] for name in site.options}
        unread = site.formula.unread
        kept = (None if n in unread else t for n, t in zip(site.tensors, tensors, strict=True))
        ctx.save_for_backward(*kept, *(result[i] for i in site.formula.keeps))
        ctx.set_materialize_grads(False)
        return result

    @staticmethod
    def backward(ctx, *cotangents):
        site, saved, needs = ctx.site, ctx.saved_tensors, ctx.needs_input_grad[5:]
        names = site.tensors
        grads: dict[str, Any] = {}
        if any(c is not None for c in cotangents):
            arguments = {**ctx.options, **dict(zip(names, saved, strict=False))}
            call = Applied(arguments, dict(zip(names, needs, strict=True)), saved[len(names) :])
            if last():
                with AutoDispatchBelowAutograd():
                    grads = site.formula.second(call, cotangents)
            else:
                grads = site.formula.second(call, cotangents)
        found = [grads.get(n) if need else None for n, need in zip(names, needs, strict=True)]
        return (None, None, None, None, None, *found)


def last() -> bool:
    """Whether no derivative of any kind can be taken of what is computed now, and of one cotangent
    alone."""
    return (
        not torch.is_grad_enabled()
        and forward_ad._current_level < 0
        and peek_interpreter_stack() is None
        and not batched()
    )


@dataclass(frozen=True)
class Placement:
    """A formula at its operator, whose arguments are told apart once."""

    formula: Formula
    op: Any
    positional: tuple[str, ...]
    tensors: tuple[str, ...]
    derived: tuple[int, ...]
    options: tuple[str, ...]
    defaults: dict[str, Any]

    @classmethod
    def of(cls, formula: Formula, op: Any) -> Placement:
        schema = op._schema.arguments
        tensors = tuple(a.name for a in schema if "Tensor" in str(a.type))
        return cls(
            formula,
            op,
            tuple(a.name for a in schema if not a.kwarg_only),
            tensors,
            tuple(tensors.index(name) for name in formula.derived if name in tensors),
            tuple(a.name for a in schema if a.name not in tensors),
            {a.name: a.default_value for a in schema if a.has_default_value()},
        )

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """By name, with the defaults, which a dispatcher leaves out."""
        return {**self.defaults, **dict(zip(self.positional, args, strict=False)), **kwargs}


def derivative_kernel(formula: Formula, stock: Any) -> Callable:
    """The autograd kernel of the operator, in front of `stock`.

    Every call of the operator comes here, so what most calls need is asked first.
    """
    site, apply = Placement.of(formula, formula.overload()), getattr(DerivativeNode, "apply")  # noqa: B009
    call_stock, accepts, names = stock.call_boxed, formula.accepts, site.tensors

    def kernel(keyset, *args, **kwargs):
        differentiable = torch.is_grad_enabled()
        if not differentiable and forward_ad._current_level < 0:
            return call_stock(keyset, *args, **kwargs)
        arguments = site.arguments(args, kwargs)
        tensors = [arguments[name] for name in names]
        dual = is_dual(*tensors)
        differentiated = differentiable and any(t is not None and t.requires_grad for t in tensors)
        if (dual and formula.composite is None) or not (dual or differentiated):
            return call_stock(keyset, *args, **kwargs)
        if not accepts(arguments):
            return call_stock(keyset, *args, **kwargs)
        if dual:
            return formula.composite(arguments)  # type: ignore[misc]
        for i in site.derived:
            tensors[i] = tensors[i].detach()
        if peek_interpreter_stack() is None:
            return apply(site, keyset, arguments, args, kwargs, *tensors)
        with enable_single_level_autograd_function():
            return apply(site, keyset, arguments, args, kwargs, *tensors)

    return kernel
