"""The slow oracle: a penalty, and a whole `Penalised` model, by stock autograd's double backward
(`create_graph=True`), with the same interface. Networks that cannot be captured run here;
`check` compares against it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .._torch import pytree
from ..capture import Arguments, choose_output
from ..errors import refuse_unused
from ..patch import patched, supported
from ..run import average, refuse_inside_forward, several
from .one_seed import Penalty

if TYPE_CHECKING:
    from ..penalised import Penalised


Way = Literal["stock", "patched", "bare"]


def derivatives(way: Way) -> AbstractContextManager:
    """Whose second derivatives autograd uses inside. "stock": PyTorch's, with attention on its
    unfused kernel, the only one that has any; "patched": the library's, fused attention's among
    them, where this version of PyTorch can be patched; "bare": PyTorch's as they are, for networks
    that are known to need no others."""
    if way == "bare":
        return nullcontext()
    if way == "patched" and supported(torch.__version__):
        return patched()
    return sdpa_kernel(SDPBackend.MATH)


def autograd_penalty(
    run: Callable[[Sequence[Tensor]], Any],
    choose: Callable[[Any], Tensor],
    x: Sequence[Tensor],
    penalty: Penalty,
    extra: Sequence[Any],
    way: Way = "stock",
    seeds: Callable[..., Sequence[Tensor]] | None = None,
    unused: Callable[[Tensor], None] | None = None,
) -> tuple[Any, Tensor]:
    """(result of the network, penalty), both differentiable as autograd makes them.

    run(x) calls the network, choose(result) picks the penalised output. way: see `derivatives`.
    seeds: in place of the penalty's own `oracle_seeds`. unused: called with an input that the
    output does not depend on.
    """
    seeds = seeds or penalty.oracle_seeds
    graph = torch.is_grad_enabled()
    with torch.enable_grad(), derivatives(way):
        # a place of its own for each: what is penalised is the derivative in this argument, also
        # where another argument was computed from the same tensor
        leaves = [_again(t) if t.requires_grad else t.detach().requires_grad_() for t in x]
        result = run(leaves)
        out = choose(result)
        total, summed = None, None
        if way == "bare" and out.requires_grad:
            summed = penalty.quick_total(out, *extra)
        if summed is not None:
            total = penalty.value(pulled(summed, leaves, None, graph, unused), *extra)
        else:
            for v in seeds(out, leaves, *extra) if out.requires_grad else [None]:
                value = penalty.value(pulled(out, leaves, v, graph, unused), *extra)
                total = value if total is None else total + value
        assert total is not None
        value = penalty.reduce(total)
    if not graph:
        result, value = pytree.tree_map_only(Tensor, lambda t: t.detach(), (result, value))
    return result, value


def _again(t: Tensor) -> Tensor:
    """The same numbers as another tensor; sparse ones have no views."""
    return t.view_as(t) if t.layout is torch.strided else t.clone()


def pulled(
    out: Tensor,
    leaves: Sequence[Tensor],
    v: Tensor | None,
    graph: bool,
    unused: Callable[[Tensor], None] | None = None,
) -> list[Tensor]:
    """J*v by autograd, the gradient of a scalar `out` for None; zeros where the output does not
    depend on the input, unless that is refused."""
    xi: Sequence[Tensor | None] = (None,) * len(leaves)
    if out.requires_grad:
        xi = torch.autograd.grad(
            out, leaves, v, create_graph=graph, retain_graph=True, allow_unused=True
        )
    for t, u in zip(leaves, xi, strict=True):
        if u is None and unused is not None:
            unused(t)
    return [torch.zeros_like(t) if u is None else u for t, u in zip(leaves, xi, strict=True)]


def on_autograd(model: Penalised, call: Arguments, way: Way = "patched") -> tuple[Any, Tensor]:
    """(result of the net, penalty); "stock" is the oracle."""

    def run(x: Sequence[Tensor]) -> Any:
        args, kwargs = call.with_x(x)
        return model.net(*args, **kwargs)

    def choose(result: Any) -> Tensor:
        out = choose_output(result, model.output)
        model.penalty.check(out.shape, call.x, *call.extra)
        return out

    seeds = None
    if way == "bare":
        seeds = model.penalty.quick_seeds
    elif way == "patched":
        # a call without gradients leaves v as it was
        carried = model._carried if torch.is_grad_enabled() else dict(model._carried)
        seeds = model.penalty.seeds_from(carried)
    return autograd_penalty(
        run,
        choose,
        call.x,
        model.penalty,
        call.extra,
        way=way,
        seeds=seeds,
        unused=None if model.allow_unused else partial(refuse_unused, model.wrt),
    )


def accumulate_on_autograd(
    model: Penalised, call: Arguments, loss: Any, target: Any, weight: float, way: Way = "patched"
) -> tuple[Any, Tensor, Tensor]:
    """(result, loss, penalty), their gradients added to the parameters'."""
    if several():
        refuse_inside_forward()
    with torch.enable_grad():
        result, penalty = on_autograd(model, call, way)
        out = choose_output(result, model.output)
        value = torch.zeros((), device=out.device)
        if loss is not None:
            if not model.penalty.shares(loss):  # whose labels were checked with the penalty's
                loss.check(out.shape, target)
            value = loss.values(out, target).mean()
        total = value + weight * penalty.sum()
        if total.requires_grad:  # an output that depends on nothing has no gradient to add
            total.backward()
    if several():
        average(model.net.parameters())
    told = (result, value, penalty)
    result, value, penalty = pytree.tree_map_only(Tensor, Tensor.detach, told)
    return result, value, penalty
