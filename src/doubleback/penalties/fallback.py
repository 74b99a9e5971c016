"""A `Penalised` model by autograd's double backward: the oracle of `check`, and what runs where a
net cannot be captured."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._torch import pytree
from ..capture import Arguments, choose_output
from ..errors import refuse_unused
from ..run import average, refuse_inside_forward, several
from .many_seeds import SpectralNorm
from .oracle import Way, autograd_penalty

if TYPE_CHECKING:
    from ..penalised import Penalised


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
    elif way == "patched" and isinstance(model.penalty, SpectralNorm):
        # a call without gradients leaves v as it was
        carried = model._carried if torch.is_grad_enabled() else dict(model._carried)
        seeds = partial(model.penalty.oracle_seeds, carried=carried)
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
    found = (result, value, penalty)
    result, value, penalty = pytree.tree_map_only(Tensor, Tensor.detach, found)
    return result, value, penalty
