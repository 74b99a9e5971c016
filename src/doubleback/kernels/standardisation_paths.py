"""Three ways to compute the closed form of `standardisation`: stock kernels, plain tensor
operations that a compiler fuses, and few passes over memory for the CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .groups import HALF, Groups, Point, Three, cast, eager, layout

aten = torch.ops.aten


def times_weight(groups: Groups, t: Tensor, weight: Tensor | None) -> Tensor:
    """w⊙t, in place."""
    if weight is None:
        return t
    return groups.split(t).mul_(groups.spread(weight, t)).view(t.shape)


# Stock kernels -----------------------------------------------------------------------------------


def stock_arguments(
    groups: Groups, x: Tensor, weight: Tensor | None, bias: Tensor | None, fused: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x, w and b in a form that stock kernels take and with which they keep float32 statistics.

    For 16-bit x the CPU's kernels want float32 parameters (ones where there is no weight); CUDA's
    want x's dtype, batch norm either. Otherwise x itself is lifted: a cast that a compiler fuses.
    """
    weight, bias = (None if p is None else p.contiguous() for p in (weight, bias))
    if x.dtype not in HALF:
        return x, cast(weight, x), cast(bias, x)
    same = all(p is None or p.dtype == x.dtype for p in (weight, bias))
    if fused and not x.is_cpu and same:
        return x, weight, bias
    w, b = (None if p is None else p.float() for p in (weight, bias))
    if fused and x.is_cpu and not groups.rms and eager(x):  # fake kernels know no mixed dtypes
        ones = torch.ones(groups.shape or x.shape[1:2], dtype=torch.float32)
        return x, ones if w is None else w, b
    return x if fused and groups.kind == "batch" else x.float(), w, b


def stock_forward(
    groups: Groups, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    form = layout(groups, x)
    x = x.contiguous(memory_format=form)
    if groups.rms:
        y, rstd = aten._fused_rms_norm(x, list(groups.shape), weight, eps)
        return y, None, rstd
    if groups.kind == "rows":
        return aten.native_layer_norm(x, list(groups.shape), weight, bias, eps)
    if groups.kind == "batch":
        return aten._native_batch_norm_legit.no_stats(x, weight, bias, True, 0.0, eps)
    x = x if x.is_cpu else x.contiguous()  # CUDA's group norm knows no other layout
    y, mean, rstd = aten.native_group_norm(x, weight, bias, *_extents(groups, x), eps)
    return y.contiguous(memory_format=form), mean, rstd


def stock_backward(at: Point, xi: Tensor, mask: list[bool]) -> Three:
    groups, x, mean, rstd, weight = at
    form = layout(groups, x)
    xi, x = at.like_x(xi), at.like_x(x)
    if groups.kind == "rows":
        shape = list(groups.shape)
        like = x.new_empty(shape) if weight is None else weight  # stands for the bias
        if not groups.rms:
            return aten.native_layer_norm_backward(xi, x, shape, mean, rstd, weight, like, mask)
        dx, dw = aten._fused_rms_norm_backward(xi, x, shape, rstd, weight, mask[:2])
        return dx, dw, xi.sum_to_size(shape) if mask[2] else None
    if groups.kind == "batch":
        arguments = (xi, x, weight, None, None, mean, rstd, True, 0.0, mask)
        return aten.native_batch_norm_backward(*arguments)
    if weight is None and mask[2]:  # group norm's kernel gives db beside a weight only
        weight = x.new_ones(x.shape[1])
    if not x.is_cpu:  # CUDA's group norm: contiguous, and all of one dtype
        xi, x, mean, rstd = xi.contiguous(), x.contiguous(), cast(mean, x), rstd.to(x.dtype)
    arguments = (xi, x, mean, rstd, weight, *_extents(groups, x), mask)
    dx, dw, db = aten.native_group_norm_backward(*arguments)
    return dx.contiguous(memory_format=form) if mask[0] else None, dw, db


def _extents(groups: Groups, x: Tensor) -> tuple[int, int, int, int]:
    """N, C, entries per channel, groups."""
    return x.shape[0], x.shape[1], math.prod(x.shape[2:]), groups.per_example(x)


# Plain tensor operations, for compilers to fuse; x in the statistics' dtype ----------------------


def spread(at: Point) -> tuple[Tensor, Tensor, Tensor]:
    """x̂, r and w (1 where there is none), laid out to broadcast."""
    groups, x, mean, rstd, weight = at
    r = groups.spread(rstd, x)
    w = torch.ones_like(r) if weight is None else groups.spread(weight, x)
    centred = groups.split(x)
    if mean is not None and not groups.rms:
        centred = centred - groups.spread(mean, x)
    return centred * r, r, w


def parameter_sum(at: Point, u: Tensor) -> Tensor:
    """Σ over all entries that share a weight, in the weight's shape."""
    shape = at.weight_shape
    return u.sum_to_size(at.groups.spread(u.new_empty(shape), at.x).shape).view(shape)


def rms_backward_formula(at: Point, xi: Tensor, mask: Sequence[bool]) -> Three:
    """dx = r(g − x̂·mean(g⊙x̂)) with g = w⊙ξ, dw = Σ ξ⊙x̂, db = Σ ξ."""
    xi = at.like_x(xi)
    x_hat, r, w = spread(at)
    _, row = at.groups.axes(at.x)
    g = xi * w
    dx = r * (g - x_hat * (g * x_hat).mean(row, keepdim=True)) if mask[0] else None
    dw = parameter_sum(at, xi * x_hat) if mask[1] else None
    return dx, dw, parameter_sum(at, xi) if mask[2] else None


def second_formula(at: Point, xi: Tensor, q: Tensor, mask: Sequence[bool]) -> Three:
    """t_y = w⊙t with t = rP(q), s_x = −r(rc(g − mean(g)) + at + (φ − rca)x̂), s_w = Σ ξ⊙t.

    φ and s_w come from Σξ, Σξ⊙x̂ and Σξ⊙q, so that all sums read (ξ, q, x) in one pass.
    """
    groups, shape = at.groups, at.x.shape
    x_hat, r, w = spread(at)
    xi, q = (groups.split(at.like_x(u)) for u in (xi, q))
    within, across = groups.axes(at.x)

    def cell(u: Tensor) -> Tensor:  # over that part of a group on which w is constant
        return u.sum(within, keepdim=True) if within else u

    def average(u: Tensor) -> Tensor:  # over groups, from cells
        return (u.sum(across, keepdim=True) if across else u) / groups.size(at.x)

    zero = torch.zeros_like(r)
    c, mean_q = average(cell(q * x_hat)), zero if groups.rms else average(cell(q))
    t = (q - mean_q - c * x_hat) * r
    t_y = (w * t).reshape(shape) if mask[0] else None
    if not any(mask[1:]):
        return t_y, None, None
    xi_1, xi_x, xi_q = cell(xi), cell(xi * x_hat), cell(xi * q)
    s_x = s_w = None
    if mask[1]:
        mean_g, a = zero if groups.rms else average(w * xi_1), average(w * xi_x)
        phi = r * (average(w * xi_q) - mean_g * mean_q - a * c)
        s_x = -r * (r * c * (w * xi - mean_g) + a * t + (phi - r * c * a) * x_hat)
        s_x = s_x.reshape(shape)
    if mask[2]:
        s_w = r * (xi_q - mean_q * xi_1 - c * xi_x) if within else xi * t
        s_w = parameter_sum(at, s_w)
    return t_y, s_x, s_w


# Few passes over memory, for the CPU; x in the statistics' dtype ---------------------------------


def _cell_sums(at: Point, u: Tensor) -> tuple[Tensor, Tensor]:
    """Σ u⊙x̂ and Σ u over cells: the dw and db of a stock batch norm backward, in one pass.

    A cell is a row, a channel of one example, or a channel. The sums are shaped like the
    statistics, with the C/G channels of a group on one more axis for norms over channels.
    """
    groups, x, mean, rstd, _ = at
    mean = torch.zeros_like(rstd) if mean is None else mean

    def sums(u: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        # contiguous: the stock kernel reads statistics of stride 0 beyond their end
        mean, rstd = (s.reshape(-1).contiguous() for s in (mean, rstd))
        arguments = (u, x, None, None, None, mean, rstd, True, 0.0)
        return aten.native_batch_norm_backward(*arguments, [False, True, True])[1:]

    if groups.kind == "batch":
        return sums(u, x, mean, rstd)
    if groups.kind == "channels":
        shape = groups.split(x).shape[:3]
        mean, rstd = (s.unsqueeze(-1).expand(shape) for s in (mean, rstd))
    if x.is_contiguous():
        cells = (1, rstd.numel(), -1)
        dots, totals = sums(u.view(cells), x.view(cells), mean, rstd)
    else:  # channels-last: example by example
        one_by_one = zip(u.split(1), x.split(1), mean, rstd, strict=True)
        dots, totals = (torch.cat(s) for s in zip(*(sums(*e) for e in one_by_one), strict=True))
    return dots.view(rstd.shape), totals.view(rstd.shape)


def _group_mean(at: Point, cells: Tensor, weighted: bool = False) -> Tensor:
    """mean(u) or mean(w⊙u) over groups, from the sums of u over cells."""
    if weighted and at.weight is not None:
        cells = cells * at.weight.view(cells.shape[1:] if cells.dim() == 3 else cells.shape)
    return (cells.sum(-1) if at.groups.kind == "channels" else cells) / at.groups.size(at.x)


def _row_sums(at: Point, xi: Tensor, mask: list[bool]) -> tuple[Tensor, Tensor]:
    """Σ ξ⊙x̂ and Σ ξ over rows: the dw and db of a stock layer norm backward, with μ = 0."""
    like = xi.new_empty(at.weight_shape)
    arguments = (xi, at.x, at.weight_shape, torch.zeros_like(at.rstd), at.rstd, like, like)
    return aten.native_layer_norm_backward(*arguments, [False, *mask])[1:]


def _projected(at: Point, q: Tensor, c: Tensor | None) -> Tensor:
    """rP(q): the stock backward kernel where there is one, else from c."""
    if c is not None and at.groups.rms:
        return (q * at.rstd).addcmul_(at.x, -at.rstd.square() * c)
    t, _, _ = stock_backward(at._replace(weight=None), q, [True, False, False])
    return t  # type: ignore[return-value]


def rms_backward_on_cpu(at: Point, xi: Tensor, mask: list[bool]) -> Three:
    xi, dx = at.like_x(xi), None
    if mask[0]:
        g = xi if at.weight is None else xi * at.weight
        dx = _projected(at, g, _group_mean(at, _cell_sums(at, g)[0]))
    return dx, *_row_sums(at, xi, mask[1:])


def second_on_cpu(at: Point, xi: Tensor, q: Tensor, mask: Sequence[bool]) -> Three:
    """`second_formula` in about ten passes over memory, with one tensor beside the results."""
    xi, q = at.like_x(xi), at.like_x(q)
    rows, w = at.groups.kind == "rows", at.weight
    c = _group_mean(at, _cell_sums(at, q)[0]) if mask[1] or at.groups.rms else None
    t = _projected(at, q, c)
    s_x = s_w = None
    if mask[1] or mask[2]:
        unit = at._replace(x=t, mean=None, rstd=torch.ones_like(at.rstd))  # sums of …⊙t
        g = xi * w if rows and w is not None else xi  # elsewhere w multiplies the sums
        dots, _ = _cell_sums(unit, g)
        if mask[2]:
            s_w = _row_sums(unit, xi, [True, False])[0] if rows else dots.view(-1, at.x.shape[1])
            s_w = s_w if rows else s_w.sum(0)
        if c is not None and mask[1]:
            s_x = _source_on_cpu(at, g, dots, t, c)
    return times_weight(at.groups, t, w) if mask[0] else None, s_x, s_w


def _source_on_cpu(at: Point, g: Tensor, dots: Tensor, t: Tensor, c: Tensor) -> Tensor:
    """s_x = −r(rc(g − mean(g)) + at + (φ − rca)x̂) as k₀ + k₁x + k₂t + k₃g; `dots`: Σ g⊙t."""
    groups, x, mean, r, w = at
    per_cell = groups.kind != "rows"  # then g is ξ still, and w multiplies what it is summed to
    a, mean_g = (_group_mean(at, u, per_cell) for u in _cell_sums(at, g))
    phi = _group_mean(at, dots, per_cell)
    on_g, on_x = -r.square() * c, -r.square() * (phi - r * c * a)
    constant = torch.zeros_like(on_x) if mean is None else -(on_g * mean_g + on_x * mean)
    if w is not None and per_cell:
        on_g = on_g * w if groups.kind == "batch" else on_g.unsqueeze(-1) * w.view(dots.shape[1:])

    def lay(values: Tensor) -> Tensor:
        trailing = groups.split(x).dim() - values.dim() - (groups.kind == "batch")
        return values.view(*values.shape, *[1] * trailing)

    s_x = torch.addcmul(lay(constant), groups.split(x), lay(on_x))
    s_x = s_x.addcmul_(groups.split(t), lay(-r * a)).addcmul_(groups.split(g), lay(on_g))
    return s_x.view(x.shape)
