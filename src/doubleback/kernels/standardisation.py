"""Standardisation: layer, group, batch, instance and RMS norm by one closed form (theory §2).

Over each group of m entries, x̂ = (x − μ)r with r = (var + ε)^(−1/2), and y = w⊙x̂ + b.
With P(u) = u − mean(u) − x̂·mean(u⊙x̂), which is self-adjoint (RMS norm: μ = 0 and no mean(u)),

    dy = w⊙rP(dx),    (∂y/∂x)*ξ = rP(w⊙ξ).

The second derivative along q, with g = w⊙ξ, a = mean(g⊙x̂), c = mean(q⊙x̂) and
φ = mean(g⊙rP(q)) = r(mean(g⊙q) − mean(g)mean(q) − ac), is

    s_x = ∂_x⟨ξ, w⊙rP(q)⟩ = −r²(cP(g) + aP(q)) − rφx̂,    s_w = Σ ξ⊙rP(q),

and dx = (∂y/∂x)*ξ comes out on the way.

All functions are pure functions of tensors. x may be float64, float32, bfloat16 or float16, and
the parameters may have another dtype than x; statistics are float32 (float64 for float64). Layer
and RMS norm return contiguous tensors, as the stock kernels do, the others x's memory format.
`fused` says how to compute: True with kernels launched now (Triton on CUDA), False with plain
tensor operations that a compiler can fuse, None to choose by `eager`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..dtypes import accumulation, is_half
from ..errors import InputError
from . import launch, standardisation_triton
from .launch import batched, eager

# Which entries are standardised together, and where derivatives are taken ------------------------


Three = tuple[Tensor | None, Tensor | None, Tensor | None]
Second = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]  # t_y, s_x, s_w, dx


@dataclass(frozen=True)
class Groups:
    """Which entries of x are standardised together, and how the weight is laid over them.

    | constructor     | x                  | one group        | weight            | μ, r       |
    | --------------- | ------------------ | ---------------- | ----------------- | ---------- |
    | `layer_norm(s)` | (…, *s)            | the last axes s  | s                 | (…, 1 … 1) |
    | `rms_norm(s)`   | (…, *s)            | the same, μ = 0  | s                 | (…, 1 … 1) |
    | `group_norm(G)` | (N, C, …)          | C/G channels     | C                 | (N, G)     |
    | `instance_norm` | (N, C, …)          | one channel      | C                 | (N, C)     |
    | `batch_norm`    | (N, C, …)          | channel, all N   | C                 | (C,)       |

    >>> Groups.group_norm(2).size(torch.empty(3, 4, 5, 5))
    50
    """

    kind: str  # "rows", "channels" or "batch"
    shape: tuple[int, ...] = ()  # rows: the normalised shape
    count: int = 0  # channels: groups per example; 0: one per channel
    rms: bool = False

    @classmethod
    def layer_norm(cls, normalized_shape: Sequence[int]) -> Groups:
        return cls("rows", tuple(normalized_shape))

    @classmethod
    def rms_norm(cls, normalized_shape: Sequence[int]) -> Groups:
        return cls("rows", tuple(normalized_shape), rms=True)

    @classmethod
    def group_norm(cls, num_groups: int) -> Groups:
        return cls("channels", count=num_groups)

    @classmethod
    def instance_norm(cls) -> Groups:
        return cls("channels")

    @classmethod
    def batch_norm(cls) -> Groups:
        return cls("batch")

    def per_example(self, x: Tensor) -> int:
        """Groups per example, of norms over channels."""
        channels = x.shape[1]
        count = self.count or channels
        if channels % count:
            raise InputError(
                f"group norm: {channels} channels of x {tuple(x.shape)} do not divide into "
                f"{count} groups; choose a divisor of {channels}"
            )
        return count

    def split(self, x: Tensor) -> Tensor:
        """View of x in which group axes are whole axes: (N, G, C/G, …) for norms over channels."""
        if self.kind != "channels":
            return x
        count = self.per_example(x)
        return x.view(x.shape[0], count, x.shape[1] // count, *x.shape[2:])

    def axes(self, x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Axes of the split x that a group spans: where the weight is constant, where it varies."""
        if self.kind == "rows":
            return (), tuple(range(x.dim() - len(self.shape), x.dim()))
        if self.kind == "channels":
            return tuple(range(3, x.dim() + 1)), (2,)
        return (0, *range(2, x.dim())), ()

    def size(self, x: Tensor) -> int:
        """m, the number of entries in a group."""
        view = self.split(x)
        return math.prod(view.shape[axis] for part in self.axes(x) for axis in part)

    def spread(self, values: Tensor, x: Tensor) -> Tensor:
        """Statistics, or a weight, as a tensor that broadcasts against the split x."""
        if self.kind == "rows":
            return values
        if self.kind == "batch":
            return values.view(-1, *[1] * (x.dim() - 2))
        count = self.per_example(x)
        shape = (1, count, x.shape[1] // count) if values.dim() == 1 else (*values.shape, 1)
        return values.view(*shape, *[1] * (x.dim() - 2))

    def layout(self, x: Tensor) -> torch.memory_format:
        """Channels-last for norms over channels where x is laid out so and not also contiguous."""
        if self.kind == "rows" or batched():
            return torch.contiguous_format
        for form in (torch.channels_last, torch.channels_last_3d):
            if not x.is_contiguous() and x.is_contiguous(memory_format=form):
                return form
        return torch.contiguous_format


class Point(NamedTuple):
    """Where derivatives are taken: x with its statistics, and the weight."""

    groups: Groups
    x: Tensor
    mean: Tensor | None
    rstd: Tensor
    weight: Tensor | None

    @classmethod
    def of(cls, groups, x, mean, rstd, weight) -> Point:
        dtype = accumulation(x.dtype)
        if mean is not None and mean.dtype != dtype:
            mean = mean.to(dtype)
        return cls(groups, x, mean, rstd if rstd.dtype == dtype else rstd.to(dtype), weight)

    @property
    def weight_shape(self) -> list[int]:
        return list(self.groups.shape or self.x.shape[1:2])

    def in_statistics_dtype(self) -> Point:
        x = self.x.to(self.rstd.dtype).contiguous(memory_format=self.groups.layout(self.x))
        return self._replace(x=x, weight=cast(self.weight, self.rstd))

    def like_x(self, u: Tensor) -> Tensor:
        return u.to(self.x.dtype).contiguous(memory_format=self.groups.layout(self.x))


def cast(value: Tensor | None, like: Tensor) -> Tensor | None:
    return None if value is None else value.to(like.dtype)


# Value, vjp, tangent and curvature source --------------------------------------------------------


aten = torch.ops.aten


def standardise(
    groups: Groups,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    *,
    fused: bool | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """y = w⊙x̂ + b with the statistics μ (None for RMS norm) and r.

    >>> import torch
    >>> x = torch.tensor([[1.0, 3.0]])
    >>> standardise(Groups.layer_norm([2]), x, None, None, 0.0)
    (tensor([[-1.,  1.]]), tensor([[2.]]), tensor([[1.]]))
    """
    fused = eager(x, weight, bias) if fused is None else fused
    held, w, b = stock_arguments(groups, x, weight, bias, fused)
    y, mean, rstd = stock_forward(groups, held, w, b, eps)
    if groups.kind == "channels" and is_half(held.dtype) and not x.is_cpu:
        # CUDA's group norm rounds its statistics to x's dtype, its batch norm does not
        rows = held.contiguous().view(1, rstd.numel(), -1)
        _, *statistics = stock_forward(Groups.batch_norm(), rows, None, None, eps)
        mean, rstd = (s.view(rstd.shape) for s in statistics)  # type: ignore[union-attr]
    return y.to(x.dtype), mean, rstd


def standardise_backward(
    groups: Groups,
    xi: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    wanted: Sequence[bool] = (True, True, True),
    *,
    onto: Tensor | None = None,
    fused: bool | None = None,
) -> Three:
    """dx = rP(w⊙ξ), dw = Σ ξ⊙x̂, db = Σ ξ; None for what is not wanted.

    Without a weight there is no dw; db then has x's dtype. `onto`: a tensor like x that dx is added
    to.
    """
    fused = eager(xi, x, weight) if fused is None else fused
    mask = [wanted[0], wanted[1] and weight is not None, wanted[2]]
    at = Point.of(groups, x, mean, rstd, weight)
    if fused and _summed_slowly(groups, x) and launch.available():
        return standardisation_triton.batch_backward(at, xi, mask, onto)
    if groups.rms and not (fused and x.is_cuda):  # RMS norm's backward kernel is CUDA only
        compute = rms_backward_on_cpu if fused and x.is_cpu else rms_backward_formula
        grads = compute(at.in_statistics_dtype(), xi, mask)
    else:
        held, w, _ = stock_arguments(groups, x, weight, None, fused)
        grads = stock_backward(at._replace(x=held, weight=w), xi, mask)
    dx, dw, db = (g if want else None for g, want in zip(grads, mask, strict=True))
    like = x if weight is None else weight
    dx = cast(dx, x)
    if dx is not None and onto is not None:
        dx = dx.add_(onto)
    return dx, cast(dw, like), cast(db, like)


# Entries from which on a batch norm by kernels of our own is quicker than by PyTorch's: where what
# is recorded now runs as a CUDA graph, and where each of their dozen launches waits for the host.
LARGE, LARGE_WHEN_LAUNCHED = 1 << 22, 1 << 25


def _summed_slowly(groups: Groups, x: Tensor) -> bool:
    """Whether PyTorch's kernel for the sums is so far from the memory's speed that ours pay: batch
    norm, channels-last, on a GPU."""
    if groups.kind != "batch" or not x.is_cuda or isinstance(x.numel(), torch.SymInt):
        return False
    graphed = launch.being_flattened() or torch.cuda.is_current_stream_capturing()
    large = x.numel() >= (LARGE if graphed else LARGE_WHEN_LAUNCHED)
    return large and groups.layout(x) != torch.contiguous_format


def standardise_second(
    groups: Groups,
    xi: Tensor | None,
    q: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    wanted: Sequence[bool] = (True, True),
    tangent: bool = True,
    *,
    pulled: bool = False,
    fused: bool | None = None,
) -> Second:
    """t_y = w⊙rP(q), the curvature sources s_x = ∂_x⟨ξ, t_y⟩ and s_w = ∂_w⟨ξ, t_y⟩, and, where
    `pulled` beside s_x, dx = rP(w⊙ξ).

    None for what is not wanted, and for s_w without a weight. xi may be None when neither
    source is wanted.
    """
    fused = eager(xi, q, x, weight) if fused is None else fused
    mask = [tangent, wanted[0], wanted[1] and weight is not None, pulled and wanted[0]]
    if xi is None and any(mask[1:]):
        raise InputError("standardise_second: s_x and s_w need the cotangent xi, which is None")
    if fused and mean is not None and mask[1] and _is_small(groups, xi, q, x, rstd, weight):
        at = Point(groups, x, mean, rstd, weight)
        return _SECOND_WHEN_SMALL[groups.kind](at, xi, q, mask)  # type: ignore[arg-type]
    at = Point.of(groups, x, mean, rstd, weight)
    if fused and x.is_cuda and x.numel() and launch.available():
        return standardisation_triton.second(at, xi, q, mask)
    compute = second_on_cpu if fused and x.is_cpu and x.numel() else second_formula
    t_y, s_x, s_w, dx = compute(at.in_statistics_dtype(), q if xi is None else xi, q, mask)
    s_w = None if weight is None else cast(s_w, weight)
    return cast(t_y, x), cast(s_x, x), s_w, cast(dx, x)


# Differentiable to any order ---------------------------------------------------------------------


def statistics(groups: Groups, x: Tensor, eps: float | Tensor) -> tuple[Tensor | None, Tensor]:
    """μ (None for RMS norm) and r = (var + ε)^(−1/2) as functions of x, in plain operations."""
    view = groups.split(x.to(accumulation(x.dtype)))
    within, across = groups.axes(x)
    axes, keep = within + across, groups.kind == "rows"

    def average(u: Tensor) -> Tensor:
        return u.mean(axes, keepdim=True)

    mean = None if groups.rms else average(view)
    var = average((view if mean is None else view - mean).square())
    shape = var.shape if keep else [n for i, n in enumerate(var.shape) if i not in axes]
    var = var.reshape(shape)
    return None if mean is None else mean.reshape(shape), (var + eps).rsqrt()


def affine(
    groups: Groups,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """w⊙x̂ + b from known statistics, in plain operations.

    >>> import torch
    >>> x = torch.tensor([[1.0, 3.0]])
    >>> affine(Groups.layer_norm([2]), x, torch.tensor([[2.0]]), torch.tensor([[1.0]]), None, None)
    tensor([[-1.,  1.]])
    """
    at = Point.of(groups, x, mean, rstd, weight).in_statistics_dtype()
    x_hat, _, w = spread(at)
    y = x_hat if weight is None else w * x_hat
    y = y if bias is None else y + groups.spread(bias.to(rstd.dtype), x)
    return y.reshape(x.shape).to(x.dtype)


def standardise_again(
    groups: Groups, xi: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dx = rP(w⊙ξ), dw = Σ ξ⊙x̂ and db = Σ ξ with μ and r as functions of x, in plain operations:
    derivatives of any order and mode are right. ε is read off `rstd`."""
    _, unscaled = statistics(groups, x, 0.0)
    eps = (rstd.to(unscaled.dtype).square().reciprocal() - unscaled.square().reciprocal()).detach()
    mean, r = statistics(groups, x, eps)
    at = Point.of(groups, x, mean, r, None).in_statistics_dtype()
    xi = at.like_x(xi)
    g = xi
    if weight is not None:
        g = (groups.split(xi) * groups.spread(weight.to(xi.dtype), x)).reshape(x.shape)
    dx, *_ = second_formula(at, g, g, [True, False, False, False])
    x_hat, _, _ = spread(at)
    dw, db = (parameter_sum(at, u) for u in (groups.split(xi) * x_hat, groups.split(xi)))
    like = x if weight is None else weight
    return dx.to(x.dtype), dw.to(like.dtype), db.to(like.dtype)  # type: ignore[union-attr]


# Ways to compute ---------------------------------------------------------------------------------


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
    if not is_half(x.dtype):
        return x, cast(weight, x), cast(bias, x)
    same = all(p is None or p.dtype == x.dtype for p in (weight, bias))
    if fused and not x.is_cpu and same:
        return x, weight, bias
    w, b = (None if p is None else p.to(accumulation(x.dtype)) for p in (weight, bias))
    if fused and x.is_cpu and not groups.rms and eager(x):  # fake kernels know no mixed dtypes
        ones = torch.ones(groups.shape or x.shape[1:2], dtype=torch.float32)
        return x, ones if w is None else w, b
    return x if fused and groups.kind == "batch" else x.to(accumulation(x.dtype)), w, b


def stock_forward(
    groups: Groups, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    form = groups.layout(x)
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
    form = groups.layout(x)
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


def second_formula(at: Point, xi: Tensor, q: Tensor, mask: Sequence[bool]) -> Second:
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
        return t_y, None, None, None
    xi_1, xi_x, xi_q = cell(xi), cell(xi * x_hat), cell(xi * q)
    s_x = s_w = dx = None
    if mask[1]:
        mean_g, a = zero if groups.rms else average(w * xi_1), average(w * xi_x)
        phi = r * (average(w * xi_q) - mean_g * mean_q - a * c)
        s_x = -r * (r * c * (w * xi - mean_g) + a * t + (phi - r * c * a) * x_hat)
        s_x = s_x.reshape(shape)
        dx = (r * (w * xi - mean_g - a * x_hat)).reshape(shape) if mask[3] else None
    if mask[2]:
        s_w = r * (xi_q - mean_q * xi_1 - c * xi_x) if within else xi * t
        s_w = parameter_sum(at, s_w)
    return t_y, s_x, s_w, dx


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


def second_on_cpu(at: Point, xi: Tensor, q: Tensor, mask: Sequence[bool]) -> Second:
    """`second_formula` in about ten passes over memory, with one tensor beside the results."""
    xi, q = at.like_x(xi), at.like_x(q)
    dx = None
    if mask[3]:
        pull = rms_backward_on_cpu if at.groups.rms else stock_backward
        weight = None if at.weight is None else at.weight.contiguous()
        dx, _, _ = pull(at._replace(weight=weight), xi, [True, False, False])
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
    return times_weight(at.groups, t, w) if mask[0] else None, s_x, s_w, dx


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


# Few calls, for small tensors on a CPU -----------------------------------------------------------
#
# With y = rP(g) beside t = rP(q), both by stock's backward: s_x = −r(cy + at + φx̂).


SMALL = 1 << 16  # entries up to which calls take more of the time than passes over memory


def _is_small(groups: Groups, xi, q: Tensor, x: Tensor, rstd: Tensor, weight) -> bool:
    if not x.is_cpu or groups.rms or groups.kind not in _SECOND_WHEN_SMALL or xi is None:
        return False
    count, dtype = x.numel(), x.dtype
    if isinstance(count, torch.SymInt) or not 0 < count <= SMALL or rstd.dtype is not dtype:
        return False
    same = xi.dtype is q.dtype is dtype and (weight is None or weight.dtype is dtype)
    alike = same and dtype in (torch.float32, torch.float64)
    return alike and x.is_contiguous() and xi.is_contiguous() and q.is_contiguous()


def _second_of_small_rows(at: Point, xi: Tensor, q: Tensor, mask: Sequence[bool]) -> Second:
    groups, x, mean, r, w = at
    shape = list(groups.shape)
    axes = list(range(x.dim() - len(shape), x.dim()))
    only_x = [True, False, False]
    t = aten.native_layer_norm_backward(q, x, shape, mean, r, None, None, only_x)[0]
    y = aten.native_layer_norm_backward(xi, x, shape, mean, r, w, None, only_x)[0]
    x_hat, g = (x - mean) * r, xi if w is None else xi * w  # type: ignore[operator]
    c, a, phi = ((u * v).mean(axes, True) for u, v in ((q, x_hat), (g, x_hat), (g, t)))
    s_x = torch.addcmul(c * y, a, t).addcmul_(phi, x_hat).mul_(-r)
    s_w = (xi * t).sum_to_size(shape) if mask[2] else None
    t_y = None if not mask[0] else t if w is None else t.mul_(w)
    return t_y, s_x, s_w, y if mask[3] else None


def _second_of_small_batch(at: Point, xi: Tensor, q: Tensor, mask: Sequence[bool]) -> Second:
    _, x, mean, r, w = at
    lay, axes = (-1, *[1] * (x.dim() - 2)), [0, *range(2, x.dim())]
    how = (x, None, None, None, mean, r, True, 0.0, [True, True, False])
    t, c, _ = aten.native_batch_norm_backward(q, *how)
    y, a, _ = aten.native_batch_norm_backward(xi, *how)
    phi = s_w = (xi * t).sum(axes)  # c, a and φ as sums yet, and without w
    by = r * (-len(r) / x.numel())
    by = by if w is None else by * w
    on_x = by * phi * r
    constant = (on_x * mean).neg_()  # type: ignore[operator]
    s_x = torch.addcmul(constant.view(lay), x, on_x.view(lay))
    s_x = s_x.addcmul_(t, (by * a).view(lay)).addcmul_(y, (by * c).view(lay))
    t_y = None if not mask[0] else t if w is None else t.mul_(w.view(lay))
    dx = None if not mask[3] else y if w is None else y.mul_(w.view(lay))
    return t_y, s_x, s_w if mask[2] else None, dx


_SECOND_WHEN_SMALL = {"rows": _second_of_small_rows, "batch": _second_of_small_batch}


# As one node of flattened sweeps -----------------------------------------------------------------

_groups = lru_cache(Groups)


def _launch(
    xi: Tensor | None, q: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor,
    weight: Tensor | None, kind: str, shape: Sequence[int], count: int, rms: bool,
    wanted: Sequence[bool], tangent: bool, pulled: bool,
) -> list[Tensor]:  # fmt: skip
    results = standardise_second(
        _groups(kind, tuple(shape), count, rms), xi, q, x, mean, rstd, weight, wanted, tangent,
        pulled=pulled, fused=True,
    )  # fmt: skip
    return [t for t in results if t is not None]


def _fake(xi, q, x, mean, rstd, weight, kind, shape, count, rms, wanted, tangent, pulled):
    form = Groups(kind, tuple(shape), count, rms).layout(x)

    def like_x(*needs: bool) -> list[Tensor]:
        return [torch.empty_like(x, memory_format=form) for need in needs if need]

    s_w = [torch.empty_like(weight)] if wanted[1] and weight is not None else []
    return [*like_x(tangent, wanted[0]), *s_w, *like_x(pulled and wanted[0])]


launch.opaque(
    "standardise_second(Tensor? xi, Tensor q, Tensor x, Tensor? mean, Tensor rstd, "
    "Tensor? weight, str kind, int[] shape, int count, bool rms, bool[] wanted, bool tangent, "
    "bool pulled) -> Tensor[]",
    _launch,
    _fake,
)


def _launch_backward(
    xi: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None,
    wanted: Sequence[bool], onto: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    at = (Groups.batch_norm(), xi, x, mean, rstd, weight)
    grads = standardise_backward(*at, wanted, onto=onto, fused=True)
    return [g for g in grads if g is not None]


def _fake_backward(xi, x, mean, rstd, weight, wanted, onto):
    shapes = []
    if wanted[0]:
        shapes.append(torch.empty_like(x, memory_format=Groups.batch_norm().layout(x)))
    like = x if weight is None else weight
    per_channel = (wanted[1] and weight is not None, wanted[2])
    return shapes + [like.new_empty(x.shape[1]) for want in per_channel if want]


launch.opaque(
    "batch_norm_backward(Tensor xi, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, "
    "bool[] wanted, Tensor? onto) -> Tensor[]",
    _launch_backward,
    _fake_backward,
)


def _launch_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, momentum: float, eps: float,
) -> list[Tensor]:  # fmt: skip
    # as it was recorded, wherever a kernel laid it out otherwise than it said it would
    x = x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    running = None
    if running_mean is not None and running_var is not None:
        running = (running_mean, running_var)
    if _summed_slowly(Groups.batch_norm(), x):
        return standardisation_triton.batch_forward(x, weight, bias, running, momentum, eps)
    if running is None:
        return aten._native_batch_norm_legit.no_stats(x, weight, bias, True, momentum, eps)
    return aten._native_batch_norm_legit_functional(x, weight, bias, *running, True, momentum, eps)


def _fake_forward(x, weight, bias, running_mean, running_var, momentum, eps):
    per_channel = x.new_empty(x.shape[1], dtype=accumulation(x.dtype))
    new = [torch.empty_like(t) for t in (running_mean, running_var) if t is not None]
    return [torch.empty_like(x), per_channel, torch.empty_like(per_channel), *new]


launch.opaque(
    "batch_norm_forward(Tensor x, Tensor? weight, Tensor? bias, Tensor? running_mean, "
    "Tensor? running_var, float momentum, float eps) -> Tensor[]",
    _launch_forward,
    _fake_forward,
)


def batch_norm_now(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running: Sequence[Tensor],
    momentum: float, eps: float,
) -> tuple[Tensor, ...] | None:  # fmt: skip
    """y, μ, r and the new running statistics of a batch norm in training, by kernels that are
    quicker than PyTorch's; None where they are not."""
    if launch.fusing() or not _summed_slowly(Groups.batch_norm(), x) or not launch.available():
        return None
    if not (_recorded() or eager(x, weight, bias)):
        return None
    run = torch.ops.doubleback.batch_norm_forward if _recorded() else _launch_forward
    mean, var = running or (None, None)
    return tuple(run(x, weight, bias, mean, var, momentum, eps))


def _recorded() -> bool:
    """Whether kernels are recorded now, each as one operator: without a GPU too, since tracing the
    twenty steps of a formula takes far longer than calling them by one more function."""
    return launch.being_flattened() and not launch.fusing()


def backward_now(
    groups: Groups, xi: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor,
    weight: Tensor | None, wanted: Sequence[bool], onto: Tensor | None = None,
) -> Three:  # fmt: skip
    """`standardise_backward` in the form that the sweeps need now."""
    own = _summed_slowly(groups, x) or (groups.kind == "batch" and x.is_cpu)
    if not (own and _recorded()):
        return standardise_backward(
            groups, xi, x, mean, rstd, weight, wanted, onto=onto, fused=not launch.fusing()
        )
    mask = (wanted[0], wanted[1] and weight is not None, wanted[2])
    at = (xi, x, mean, rstd, weight)
    grads = iter(torch.ops.doubleback.batch_norm_backward(*at, list(mask), onto))
    dx, dw, db = (next(grads) if want else None for want in mask)
    return dx, dw, db


def adds_onto(groups: Groups, x: Tensor, onto: Tensor) -> bool:
    """Whether `backward_now` adds to such a tensor in passing."""
    alike = onto.dtype is x.dtype and onto.shape == x.shape
    return alike and not launch.fusing() and _summed_slowly(groups, x) and launch.available()


def second_now(
    groups: Groups, xi: Tensor | None, q: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor,
    weight: Tensor | None, wanted: Sequence[bool], tangent: bool, pulled: bool = False,
) -> Second:  # fmt: skip
    """`standardise_second` in the form that the sweeps need now."""
    if not _recorded():
        return standardise_second(
            groups, xi, q, x, mean, rstd, weight, wanted, tangent, pulled=pulled,
            fused=not launch.fusing(),
        )  # fmt: skip
    results = torch.ops.doubleback.standardise_second(
        xi, q, x, mean, rstd, weight, groups.kind, list(groups.shape), groups.count, groups.rms,
        list(wanted), tangent, pulled,
    )  # fmt: skip
    rest = iter(results)
    mask = (tangent, wanted[0], wanted[1] and weight is not None, pulled and wanted[0])
    t_y, s_x, s_w, dx = (next(rest) if want else None for want in mask)
    return t_y, s_x, s_w, dx
