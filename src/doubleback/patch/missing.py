"""Operators that PyTorch differentiates once, and not twice.

Each has its backward written in differentiable steps; the second derivative is reverse mode over
these, of any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .node import Applied, Formula, Grads, plain, through

aten = torch.ops.aten
Arguments = dict[str, Any]


def _by_steps(operator: str, family: str, steps: Callable[[Arguments], Tensor]) -> Formula:
    def second(call: Applied, cotangents: Grads) -> dict[str, Any]:
        return through(steps, call, cotangents)

    def accepts(a: Arguments) -> bool:
        tensors = (t for t in a.values() if isinstance(t, Tensor))
        # a sparse or rescaled "gradient" of a bag is not the derivative that is meant here
        unlike = a.get("sparse", False) or a.get("scale_grad_by_freq", False)
        return plain(*tensors) and not unlike

    return Formula(operator, family, _WHY, second, accepts, steps)


_WHY = "PyTorch has no second derivative"


# ------------------------------------------------------------------------- activations


def _hardsigmoid(a: Arguments) -> Tensor:
    """dx = ξ⊙B(1, x), with B's own rounding of 1/6"""
    x = a["self"].detach()
    return a["grad_output"] * aten.hardsigmoid_backward(torch.ones_like(x), x)


# ---------------------------------------------------------------------- margin losses

_MEAN, _SUM = 1, 2  # at::Reduction


def _spread(a: Arguments, examples: int) -> Tensor:
    """ξ per example, with the mean's 1/n."""
    xi = a["grad_output"]
    xi = xi / examples if a["reduction"] == _MEAN else xi
    return xi.expand(examples) if a["reduction"] in (_MEAN, _SUM) else xi.reshape(examples)


def _multi_margin(a: Arguments) -> Tensor:
    """With z_j = m − x_y + x_j of p ∈ {1, 2}: dx_j = ξ w_y p z_j^{p−1}[z_j > 0]/C for j ≠ y, and
    dx_y = −Σ_j dx_j."""
    x, target = a["self"], a["target"].reshape(-1, 1)
    rows = x.reshape(target.shape[0], -1)
    z = a["margin"] - rows.gather(1, target) + rows
    slope = torch.ones_like(z) if a["p"] == 1 else 2 * z
    others = torch.ones_like(z).scatter(1, target, 0.0)
    xi = _spread(a, len(rows)).unsqueeze(1) / rows.shape[1]
    if a["weight"] is not None:
        xi = xi * a["weight"][target]
    part = torch.where(z > 0, slope, 0.0) * others * xi
    return part.scatter_add(1, target, -part.sum(1, keepdim=True)).reshape(x.shape)


def _multilabel_margin(a: Arguments) -> Tensor:
    """With labels y (up to the first −1) and N the others: dx = ξ/C Σ_{y, j ∈ N} (e_j − e_y) where
    1 − x_y + x_j > 0."""
    x = a["self"]
    classes = x.shape[-1] if x.dim() else 1
    rows, labels = x.reshape(-1, classes), a["target"].reshape(-1, classes)
    others = a["is_target"].reshape(rows.shape) == 0
    live = (labels >= 0).cumprod(1).bool()
    index = labels.clamp(min=0)
    z = 1 - rows.gather(1, index).unsqueeze(2) + rows.unsqueeze(1)  # (example, label, class)
    active = (z > 0) & live.unsqueeze(2) & others.unsqueeze(1)
    active = active.to(x.dtype)
    slope = active.sum(1).scatter_add(1, index, -active.sum(2))
    return (slope * _spread(a, len(rows)).unsqueeze(1) / classes).reshape(x.shape)


# ----------------------------------------------------------------------- embedding bags

_BAG_MEAN, _BAG_MAX = 1, 2


def _bag_weights(a: Arguments) -> Tensor:
    """dW_v = Σ_{i: index_i = v} c_i ξ_{bag(i)}, or of the largest entry of each bag."""
    xi = a["grad"]
    zeros = xi.new_zeros(a["num_weights"], xi.shape[1])
    if a["mode"] == _BAG_MAX:
        filled = (a["bag_size"] > 0).unsqueeze(1)
        return zeros.scatter_add(0, a["maximum_indices"], torch.where(filled, xi, 0.0))
    indices, bags = a["indices"], _bags(a)
    c = xi.new_ones(len(indices)) if a["per_sample_weights"] is None else a["per_sample_weights"]
    if a["mode"] == _BAG_MEAN:
        c = c / a["bag_size"][bags]
    c = torch.where(indices == a["padding_idx"], 0.0, c)
    return zeros.index_add(0, indices, c.unsqueeze(1) * xi[bags])


def _bag_samples(a: Arguments) -> Tensor:
    """dc_i = ⟨ξ_{bag(i)}, W_{index_i}⟩"""
    indices = a["indices"]
    products = (a["grad"][_bags(a)] * a["weight"][indices]).sum(1)
    return torch.where(indices == a["padding_idx"], 0.0, products)


def _bags(a: Arguments) -> Tensor:
    """bag(i), from the bags' first places where the forward left it out."""
    indices, bags = a["indices"], a["offset2bag"]
    if bags.numel() == indices.numel():
        return bags
    starts = a["offsets"][a["offsets"] < len(indices)].long()
    begun = torch.zeros(len(indices), dtype=torch.long, device=indices.device)
    return begun.index_add(0, starts, torch.ones_like(starts)).cumsum(0) - 1


# ---------------------------------------------------------------------------- distances


def _slope(difference: Tensor, p: float) -> Tensor:
    """∂‖δ‖_p/∂δ over the last axis, 0 where the distance is not differentiable by itself."""
    if p == 0:
        return torch.zeros_like(difference)
    if p == 1:
        return difference.sign()
    size = difference.abs()
    if p == math.inf:
        return difference.sign() * (size == size.amax(-1, keepdim=True))
    apart = size > 0
    size = torch.where(apart, size, 1.0)  # powers of 0 have no derivative to give
    total = torch.where(apart, size**p, 0.0).sum(-1, keepdim=True)
    total = torch.where(total > 0, total, 1.0)
    slope = difference.sign() * size ** (p - 1) * total ** (1 / p - 1)
    return torch.where(apart, slope, 0.0)


def _cdist(a: Arguments) -> Tensor:
    """dx_i = Σ_j ξ_ij ∂‖x_i − y_j‖_p"""
    if a["x1"].numel() == 0 or a["x2"].numel() == 0:
        return torch.zeros_like(a["x1"])
    difference = a["x1"].unsqueeze(-2) - a["x2"].unsqueeze(-3)
    return (a["grad"].unsqueeze(-1) * _slope(difference, a["p"])).sum(-2)


def _pdist(a: Arguments) -> Tensor:
    """dx_i = Σ_{j > i} ξ_ij ∂‖x_i − x_j‖_p − Σ_{j < i} …"""
    x = a["self"]
    i, j = torch.triu_indices(len(x), len(x), 1, device=x.device)
    part = a["grad"].unsqueeze(-1) * _slope(x[i] - x[j], a["p"])
    return torch.zeros_like(x).index_add(0, i, part).index_add(0, j, -part)


FORMULAS = [
    _by_steps("hardsigmoid_backward", "activation", _hardsigmoid),
    _by_steps("multi_margin_loss_backward", "loss", _multi_margin),
    _by_steps("multilabel_margin_loss_backward", "loss", _multilabel_margin),
    _by_steps("_embedding_bag_backward", "embedding", _bag_weights),
    _by_steps("_embedding_bag_dense_backward", "embedding", _bag_weights),
    _by_steps("_embedding_bag_per_sample_weights_backward", "embedding", _bag_samples),
    _by_steps("_cdist_backward", "distance", _cdist),
    _by_steps("_pdist_backward", "distance", _pdist),
]
