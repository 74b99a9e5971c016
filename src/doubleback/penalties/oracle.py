"""The slow oracle: stock autograd with `create_graph=True`, with the same interface.

Networks that cannot be captured run here; `check` compares against it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .._torch import pytree
from ..patch import patched, supported
from .one_seed import Penalty

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
        leaves = [t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in x]
        result = run(leaves)
        out = choose(result)
        total = None
        for v in seeds(out, leaves, *extra) if out.requires_grad else [None]:
            value = penalty.value(pulled(out, leaves, v, graph, unused), *extra)
            total = value if total is None else total + value
        assert total is not None
        value = penalty.reduce(total)
    if not graph:
        result, value = pytree.tree_map_only(Tensor, lambda t: t.detach(), (result, value))
    return result, value


def pulled(
    out: Tensor,
    leaves: Sequence[Tensor],
    v: Tensor | None,
    graph: bool,
    unused: Callable[[Tensor], None] | None = None,
) -> list[Tensor]:
    """J*v by autograd; zeros where the output does not depend on the input, unless that is
    refused."""
    xi: Sequence[Tensor | None] = (None,) * len(leaves)
    if v is not None:
        xi = torch.autograd.grad(
            out, leaves, v, create_graph=graph, retain_graph=True, allow_unused=True
        )
    for t, u in zip(leaves, xi, strict=True):
        if u is None and unused is not None:
            unused(t)
    return [torch.zeros_like(t) if u is None else u for t, u in zip(leaves, xi, strict=True)]
