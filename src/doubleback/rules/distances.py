"""Distances between points, which PyTorch differentiates once: the generic rule over formulas."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .structures import generic
from .table import Call, Rule, overload


def length(difference: Tensor, p: float) -> Tensor:
    """‖δ‖_p over the last axis, with derivatives of 0 where an entry, or the whole, is 0.

    >>> length(torch.tensor([[3.0, -4.0], [0.0, 0.0]]), 2.0)
    tensor([5., 0.])
    """
    size = difference.abs()
    if p == 0:
        return (size != 0).sum(-1).to(size.dtype) + 0 * size.sum(-1)
    if p == 1:
        return size.sum(-1)
    if p == math.inf:  # PyTorch gives each of several largest entries the whole derivative
        most = size.detach().amax(-1, keepdim=True)
        return most.squeeze(-1) + torch.where(size == most, size - size.detach(), 0.0).sum(-1)
    apart = size > 0
    size = torch.where(apart, size, 1.0)  # powers of 0 have no derivative to give
    total = torch.where(apart, size**p, 0.0).sum(-1)
    far = total > 0
    return torch.where(far, torch.where(far, total, 1.0) ** (1 / p), 0.0)


def _cdist(call: Call, inputs: Sequence[Any]) -> Tensor:
    """‖x_i − y_j‖_p of every pair; the sweeps read it once more, with all differences at hand."""
    x, y = inputs
    return length(x.unsqueeze(-2) - y.unsqueeze(-3), float(call.argument(2, "p", 2.0)))


def _pdist(call: Call, inputs: Sequence[Any]) -> Tensor:
    """‖x_i − x_j‖_p for i < j."""
    (x,) = inputs
    i, j = torch.triu_indices(len(x), len(x), 1, device=x.device)
    return length(x[i] - x[j], float(call.argument(1, "p", 2.0)))


def rules() -> Iterator[tuple[Any, Rule]]:
    table = {
        "cdist.default": generic(again=_cdist),
        "_cdist_forward.default": generic(again=_cdist),
        "pdist.default": generic(again=_pdist),
        "_pdist_forward.default": generic(again=_pdist),
    }
    for name, rule in table.items():
        op = overload(name)
        if op is not None:
            yield op, rule
