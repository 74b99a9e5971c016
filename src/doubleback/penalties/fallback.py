"""A `Penalised` model by autograd's double backward: the oracle of `check`, and what runs where a
net cannot be captured."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..capture.calls import Arguments, follow, pick
from ..patch.mechanism import supported
from ..run.distributed import average, refuse_inside_forward, several
from .jacobian import SpectralNorm
from .oracle import autograd_penalty

if TYPE_CHECKING:
    from ..penalised import Penalised


def on_autograd(model: Penalised, call: Arguments, patch: bool = True) -> tuple[Any, Tensor]:
    """(result of the net, penalty); without `patch` all stock: the oracle."""

    def run(x: Sequence[Tensor]) -> Any:
        leaves = list(call.leaves)
        for i, t in zip(call.penalised, x, strict=True):
            leaves[i] = t
        args, kwargs = pytree.tree_unflatten(leaves, call.spec)
        return model.net(*args, **kwargs)

    def choose(result: Any) -> Tensor:
        out = _chosen(model, result)
        model.penalty.check(out.shape, call.x, *call.extra)
        return out

    seeds = None
    if patch and isinstance(model.penalty, SpectralNorm):
        # a call without gradients leaves v as it was
        carried = model._carried if torch.is_grad_enabled() else dict(model._carried)
        seeds = partial(model.penalty.oracle_seeds, carried=carried)
    patch = patch and supported(torch.__version__)
    return autograd_penalty(
        run, choose, call.x, model.penalty, call.extra, patch=patch, seeds=seeds
    )


def accumulate_on_autograd(
    model: Penalised, call: Arguments, loss: Any, target: Any, weight: float
) -> tuple[Any, Tensor, Tensor]:
    """(result, loss, penalty), their gradients added to the parameters'."""
    if several():
        refuse_inside_forward()
    with torch.enable_grad():
        result, penalty = on_autograd(model, call)
        out = _chosen(model, result)
        value = torch.zeros((), device=out.device)
        if loss is not None:
            loss.check(out.shape, target)
            value = loss.values(out, target).mean()
        (value + weight * penalty.sum()).backward()
    if several():
        average(model.net.parameters())
    found = (result, value, penalty)
    result, value, penalty = pytree.tree_map_only(Tensor, Tensor.detach, found)
    return result, value, penalty


def _chosen(model: Penalised, result: Any) -> Tensor:
    """The output that is penalised, be it in a record that PyTorch cannot take apart."""
    found = None if model.output is None else follow(result, model.output)
    if isinstance(found, Tensor):
        return found
    leaves, spec = pytree.tree_flatten(result)
    numbers = [i if isinstance(t, Tensor) else (t,) for i, t in enumerate(leaves)]
    return leaves[pick(numbers, spec, model.output)]
