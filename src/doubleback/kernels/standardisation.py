"""Standardisation: layer, group, batch, instance and RMS norm by one closed form (theory §2).

Over each group of m entries, x̂ = (x − μ)r with r = (var + ε)^(−1/2), and y = w⊙x̂ + b.
With P(u) = u − mean(u) − x̂·mean(u⊙x̂), which is self-adjoint (RMS norm: μ = 0 and no mean(u)),

    dy = w⊙rP(dx),    (∂y/∂x)*ξ = rP(w⊙ξ).

The second derivative along q, with g = w⊙ξ, a = mean(g⊙x̂), c = mean(q⊙x̂) and
φ = mean(g⊙rP(q)) = r(mean(g⊙q) − mean(g)mean(q) − ac), is

    s_x = ∂_x⟨ξ, w⊙rP(q)⟩ = −r²(cP(g) + aP(q)) − rφx̂,    s_w = Σ ξ⊙rP(q).

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

import torch
from torch import Tensor

from doubleback.errors import InputError

aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)


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
        return x.unflatten(1, (count, x.shape[1] // count))

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
        lead = (1, self.per_example(x)) if values.dim() == 1 else values.shape
        return values.view(*lead, -1, *[1] * (x.dim() - 2))


def statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def layout(groups: Groups, x: Tensor) -> torch.memory_format:
    """Channels-last for norms over channels where x is laid out so and not also contiguous."""
    if groups.kind == "rows":
        return torch.contiguous_format
    for form in (torch.channels_last, torch.channels_last_3d):
        if not x.is_contiguous() and x.is_contiguous(memory_format=form):
            return form
    return torch.contiguous_format


def eager(*tensors: Tensor | None) -> bool:
    """Whether these are plain tensors, computed with now and not recorded by a tracer."""
    if torch.compiler.is_compiling():
        return False
    mode = torch._C._TorchDispatchModeKey
    if any(torch._C._get_dispatch_mode(key) for key in (mode.FAKE, mode.FUNCTIONAL, mode.PROXY)):
        return False
    plain = (Tensor, torch.nn.Parameter)
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return all(t is None or (type(t) in plain and not wrapped(t)) for t in tensors)


# Stock kernels: forward and backward -----------------------------------------------------------


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

    >>> x = torch.tensor([[1.0, 3.0]])
    >>> standardise(Groups.layer_norm([2]), x, None, None, 0.0)
    (tensor([[-1.,  1.]]), tensor([[2.]]), tensor([[1.]]))
    """
    fused = eager(x, weight, bias) if fused is None else fused
    held, w, b = _stock_arguments(groups, x, weight, bias, fused)
    y, mean, rstd = _stock_forward(groups, held, w, b, eps)
    if rstd.dtype in _HALF and eps is not None:  # CUDA's group norm rounds them to x's dtype
        rows = held.contiguous().view(1, rstd.numel(), -1)
        mean, rstd = (s.view(rstd.shape) for s in torch.batch_norm_stats(rows, eps))
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
    fused: bool | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx = rP(w⊙ξ), dw = Σ ξ⊙x̂, db = Σ ξ; None for what is not wanted.

    Without a weight there is no dw; db then has x's dtype.
    """
    fused = eager(xi, x, weight) if fused is None else fused
    mask = [wanted[0], wanted[1] and weight is not None, wanted[2]]
    if groups.rms and not (fused and x.is_cuda):  # RMS norm's backward kernel is CUDA only
        compute = _rms_backward_on_cpu if fused and x.is_cpu else _rms_backward_formula
        dx, dw, db = compute(groups, xi, x, rstd, weight, mask)
    else:
        held, w, _ = _stock_arguments(groups, x, weight, None, fused)
        grads = _stock_backward(groups, xi.to(held.dtype), held, mean, rstd, w, mask)
        dx, dw, db = (g if want else None for g, want in zip(grads, mask, strict=True))
    like = x if weight is None else weight
    return _to(dx, x), _to(dw, like), _to(db, like)


def _to(value: Tensor | None, like: Tensor) -> Tensor | None:
    return None if value is None else value.to(like.dtype)


def _stock_arguments(
    groups: Groups, x: Tensor, weight: Tensor | None, bias: Tensor | None, fused: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x, w and b in dtypes that stock kernels take and with which they keep float32 statistics.

    For 16-bit x the CPU's kernels want float32 parameters (ones where there is no weight); CUDA's
    want x's dtype, batch norm either. Otherwise x itself is lifted: a cast that a compiler fuses.
    """
    parameters = [weight, bias]
    if x.dtype not in _HALF:
        return x, *(None if p is None else p.to(x.dtype) for p in parameters)
    same = all(p is None or p.dtype == x.dtype for p in parameters)
    if fused and not x.is_cpu and same:
        return x, weight, bias
    lifted = [None if p is None else p.float() for p in parameters]
    if fused and x.is_cpu and not groups.rms:
        shape = groups.shape or (x.shape[1],)
        ones = torch.ones(shape, dtype=torch.float32) if lifted[0] is None else lifted[0]
        return x, ones, lifted[1]
    if fused and groups.kind == "batch":
        return x, *lifted
    return x.float(), *lifted


def _stock_forward(
    groups: Groups, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    if groups.rms:
        y, rstd = aten._fused_rms_norm(x.contiguous(), list(groups.shape), weight, eps)
        return y, None, rstd
    if groups.kind == "rows":
        return aten.native_layer_norm(x.contiguous(), list(groups.shape), weight, bias, eps)
    form = layout(groups, x)
    x = x.contiguous(memory_format=form)
    if groups.kind == "batch":
        return aten._native_batch_norm_legit.no_stats(x, weight, bias, True, 0.0, eps)
    x = x if x.is_cpu else x.contiguous()  # CUDA's group norm knows no other layout
    y, mean, rstd = aten.native_group_norm(x, weight, bias, *_extents(groups, x), eps)
    return y.contiguous(memory_format=form), mean, rstd


def _stock_backward(
    groups: Groups,
    xi: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if groups.kind == "rows":
        xi, x, shape = xi.contiguous(), x.contiguous(), list(groups.shape)
        like = x.new_empty(shape) if weight is None else weight  # stands for the bias
        if not groups.rms:
            return aten.native_layer_norm_backward(xi, x, shape, mean, rstd, weight, like, mask)
        dx, dw = aten._fused_rms_norm_backward(xi, x, shape, rstd, weight, mask[:2])
        return dx, dw, xi.sum_to_size(shape) if mask[2] else None
    form = layout(groups, x)
    xi, x = xi.contiguous(memory_format=form), x.contiguous(memory_format=form)
    if groups.kind == "batch":
        return aten.native_batch_norm_backward(
            xi, x, weight, None, None, mean, rstd, True, 0.0, mask
        )
    if not x.is_cpu:  # CUDA's group norm: contiguous, all of one dtype
        xi, x, mean, rstd = xi.contiguous(), x.contiguous(), mean.to(x.dtype), rstd.to(x.dtype)  # type: ignore[union-attr]
    dx, dw, db = aten.native_group_norm_backward(
        xi, x, mean, rstd, weight, *_extents(groups, x), mask
    )
    return dx.contiguous(memory_format=form) if mask[0] else None, dw, db


def _extents(groups: Groups, x: Tensor) -> tuple[int, int, int, int]:
    """N, C, entries per channel, groups."""
    return x.shape[0], x.shape[1], math.prod(x.shape[2:]), groups.per_example(x)


# Tangent and curvature -------------------------------------------------------------------------


def standardise_tangent(
    groups: Groups,
    q: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    *,
    fused: bool | None = None,
) -> Tensor:
    """t_y = w⊙rP(q), the tangent of y along q.

    P is self-adjoint, so on the CPU this is the stock backward kernel applied to q.
    """
    fused = eager(q, x, weight) if fused is None else fused
    if fused and x.is_cpu and not groups.rms:
        t, _, _ = standardise_backward(groups, q, x, mean, rstd, None, (True, False, False))
        assert t is not None
        if weight is not None:
            groups.split(t).mul_(groups.spread(weight, x))
        return t
    t_y, _, _ = standardise_second(
        groups, None, q, x, mean, rstd, weight, (False, False), fused=fused
    )
    assert t_y is not None
    return t_y


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
    fused: bool | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """t_y = w⊙rP(q) with the curvature sources s_x = ∂_x⟨ξ, t_y⟩ and s_w = ∂_w⟨ξ, t_y⟩.

    None for what is not wanted, and for s_w without a weight. xi may be None when neither
    source is wanted.
    """
    fused = eager(xi, q, x, weight) if fused is None else fused
    mask = [tangent, wanted[0], wanted[1] and weight is not None]
    if xi is None and any(mask[1:]):
        raise InputError("standardise_second: s_x and s_w need the cotangent xi")
    if fused and x.is_cuda and x.numel():
        from doubleback.kernels import standardisation_triton

        if standardisation_triton.available():
            return standardisation_triton.second(groups, xi, q, x, mean, rstd, weight, mask)
    compute = _second_on_cpu if fused and x.is_cpu and x.numel() else _second_formula
    t_y, s_x, s_w = compute(groups, q if xi is None else xi, q, x, mean, rstd, weight, mask)
    return _to(t_y, x), _to(s_x, x), s_w if weight is None else _to(s_w, weight)


# Plain tensor operations, for compilers to fuse -------------------------------------------------

Three = tuple[Tensor | None, Tensor | None, Tensor | None]


def _lifted(
    groups: Groups, x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """x̂, r and w (1 where there is none) in the statistics' dtype, laid out to broadcast."""
    dtype = statistics_dtype(x)
    r = groups.spread(rstd.to(dtype), x)
    w = torch.ones_like(r) if weight is None else groups.spread(weight.to(dtype), x)
    centred = groups.split(x.to(dtype))
    if mean is not None:
        centred = centred - groups.spread(mean.to(dtype), x)
    return centred * r, r, w


def _parameter_sum(groups: Groups, u: Tensor, x: Tensor) -> Tensor:
    """Σ over all entries that share a weight, in the weight's shape."""
    shape = groups.shape or (x.shape[1],)
    return u.sum_to_size(groups.spread(u.new_empty(shape), x).shape).view(shape)


def _rms_backward_formula(
    groups: Groups,
    xi: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    mask: Sequence[bool],
) -> Three:
    """dx = r(g − x̂·mean(g⊙x̂)) with g = w⊙ξ, dw = Σ ξ⊙x̂, db = Σ ξ."""
    xi, x = xi.contiguous().to(statistics_dtype(x)), x.contiguous()
    x_hat, r, w = _lifted(groups, x, None, rstd, weight)
    dx = dw = None
    if mask[0]:
        g = xi * w
        a = (g * x_hat).mean(groups.axes(x)[1], keepdim=True)
        dx = torch.addcmul(g, a, x_hat, value=-1) * r
    if mask[1]:
        dw = _parameter_sum(groups, xi * x_hat, x)
    return dx, dw, _parameter_sum(groups, xi, x) if mask[2] else None


def _second_formula(
    groups: Groups,
    xi: Tensor,
    q: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    mask: Sequence[bool],
) -> Three:
    """t_y = w⊙t with t = rP(q), s_x = −r(rc(g − mean(g)) + at + (φ − rca)x̂), s_w = Σ ξ⊙t.

    φ and s_w come from Σξ, Σξ⊙x̂ and Σξ⊙q, so that all sums read (ξ, q, x) in one pass.
    """
    shape, form = x.shape, layout(groups, x)
    xi, q, x = (u.contiguous(memory_format=form) for u in (xi, q, x))
    x_hat, r, w = _lifted(groups, x, mean, rstd, weight)
    xi, q = (groups.split(u.to(r.dtype)) for u in (xi, q))
    within, across = groups.axes(x)
    m = groups.size(x)

    def cell(u: Tensor) -> Tensor:  # over that part of a group on which w is constant
        return u.sum(within, keepdim=True) if within else u

    def average(u: Tensor) -> Tensor:  # over groups, from cells
        return (u.sum(across, keepdim=True) if across else u) / m

    zero = torch.zeros_like(r)
    c, mean_q = average(cell(q * x_hat)), zero if groups.rms else average(cell(q))
    t = (q - mean_q - c * x_hat) * r
    s_x = s_w = None
    if mask[1] or mask[2]:
        xi_1, xi_x, xi_q = cell(xi), cell(xi * x_hat), cell(xi * q)
    if mask[1]:
        mean_g, a = zero if groups.rms else average(w * xi_1), average(w * xi_x)
        phi = r * (average(w * xi_q) - mean_g * mean_q - a * c)
        s_x = -r * (r * c * (w * xi - mean_g) + a * t + (phi - r * c * a) * x_hat)
    if mask[2]:
        s_w = r * (xi_q - mean_q * xi_1 - c * xi_x) if within else xi * t
        s_w = _parameter_sum(groups, s_w, x)
    t_y = (w * t).reshape(shape) if mask[0] else None
    return t_y, None if s_x is None else s_x.reshape(shape), s_w


# Few passes over memory, for the CPU -------------------------------------------------------------


def _cell_sums(
    groups: Groups, u: Tensor, v: Tensor, mean: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Σ u⊙(v − μ)r and Σ u over cells: the dw and db of a stock batch norm backward, one pass.

    A cell is a row, a channel of one example, or a channel; the sums broadcast like `rstd`,
    with the C/G channels of a group on one more axis for norms over channels.
    """
    mean = torch.zeros_like(rstd) if mean is None else mean

    def sums(u: Tensor, v: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        arguments = (u, v, None, None, None, mean.reshape(-1), rstd.reshape(-1), True, 0.0)
        return aten.native_batch_norm_backward(*arguments, [False, True, True])[1:]

    if groups.kind == "batch":
        return sums(u, v, mean, rstd)
    if groups.kind == "rows":
        rows = (1, rstd.numel(), -1)
        dots, totals = sums(u.view(rows), v.view(rows), mean, rstd)
        return dots.view(rstd.shape), totals.view(rstd.shape)
    shape = groups.split(v).shape[:3]
    mean, rstd = (s.unsqueeze(-1).expand(shape) for s in (mean, rstd))
    if v.is_contiguous():
        cells = (1, shape.numel(), -1)
        dots, totals = sums(u.view(cells), v.view(cells), mean, rstd)
    else:  # channels-last: example by example
        one_by_one = zip(u.split(1), v.split(1), mean, rstd, strict=True)
        dots, totals = (torch.cat(s) for s in zip(*(sums(*e) for e in one_by_one), strict=True))
    return dots.view(shape), totals.view(shape)


def _rms_backward_on_cpu(
    groups: Groups,
    xi: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    mask: Sequence[bool],
) -> Three:
    dtype, shape = statistics_dtype(x), list(groups.shape)
    xi, x = (u.to(dtype).contiguous() for u in (xi, x))
    like = x.new_empty(shape) if weight is None else weight.to(dtype)
    dx = None
    if mask[0]:
        g = xi if weight is None else xi * like
        a = _group_mean(groups, _cell_sums(groups, g, x, None, rstd)[0], x)
        dx = _projected(groups, g, x, None, rstd, a)
    zero = torch.zeros_like(rstd)  # layer norm's Σ ξ⊙x̂ and Σ ξ, without its mean
    sums = aten.native_layer_norm_backward(
        xi, x, shape, zero, rstd, like, like, [False, mask[1], mask[2]]
    )
    return dx, sums[1] if mask[1] else None, sums[2] if mask[2] else None


def _second_on_cpu(
    groups: Groups,
    xi: Tensor,
    q: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    mask: Sequence[bool],
) -> Three:
    """`_second_formula` in about ten passes over memory, with one tensor beside the results.

    s_x is summed up as k₀ + k₁x + k₂t + k₃(w⊙ξ) with one coefficient each per group.
    """
    dtype, rows = statistics_dtype(x), groups.kind == "rows"
    form = layout(groups, x)
    xi, q, x = (u.to(dtype).contiguous(memory_format=form) for u in (xi, q, x))
    w = None if weight is None else weight.to(dtype)
    c = _group_mean(groups, _cell_sums(groups, q, x, mean, rstd)[0], x)
    t = _projected(groups, q, x, mean, rstd, c)
    s_x = s_w = None
    if mask[1] or mask[2]:
        g = xi * w if rows and w is not None else xi  # elsewhere w multiplies the sums
        dots, _ = _cell_sums(groups, g, t, None, torch.ones_like(rstd))
    if mask[2] and rows:
        zero, one = torch.zeros_like(rstd), torch.ones_like(rstd)
        arguments = (xi, t, list(groups.shape), zero, one, w, w, [False, True, False])
        s_w = aten.native_layer_norm_backward(*arguments)[1]  # Σ ξ⊙t over rows
    elif mask[2]:
        s_w = dots.view(-1, x.shape[1]).sum(0)
    if mask[1]:
        s_x = _source_on_cpu(groups, g, dots, t, x, mean, rstd, w, c)
    t_y = t if w is None else groups.split(t).mul_(groups.spread(w, x)).view(x.shape)
    return t_y if mask[0] else None, s_x, s_w


def _group_mean(groups: Groups, cells: Tensor, x: Tensor, w: Tensor | None = None) -> Tensor:
    """mean(w⊙u) over groups from the sums of u over cells, shaped like the statistics."""
    if groups.kind == "channels":
        cells = cells if w is None else cells * w.view(cells.shape[1:])
        cells = cells.sum(-1)
    elif groups.kind == "batch" and w is not None:
        cells = cells * w
    return cells / groups.size(x)


def _projected(
    groups: Groups, q: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, c: Tensor
) -> Tensor:
    """rP(q): the stock backward kernel where there is one."""
    if groups.rms:
        return (q * rstd).addcmul_(x, -rstd.square() * c)
    t, _, _ = _stock_backward(groups, q, x, mean, rstd, None, [True, False, False])
    assert t is not None
    return t


def _source_on_cpu(
    groups: Groups,
    g: Tensor,
    dots: Tensor,
    t: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    w: Tensor | None,
    c: Tensor,
) -> Tensor:
    """s_x = −r(rc(g − mean(g)) + at + (φ − rca)x̂) from the sums `dots` of g⊙t."""
    a, mean_g = (_group_mean(groups, u, x, w) for u in _cell_sums(groups, g, x, mean, rstd))
    phi = _group_mean(groups, dots, x, w)
    on_g = -rstd.square() * c
    on_x = -rstd.square() * (phi - rstd * c * a)
    constant = torch.zeros_like(on_x) if mean is None else -(on_g * mean_g + on_x * mean)

    def lay(values: Tensor) -> Tensor:
        trailing = 0 if groups.kind == "rows" else groups.split(x).dim() - values.dim()
        trailing -= groups.kind == "batch"
        return values.view(*values.shape, *[1] * trailing)

    s_x = torch.addcmul(lay(constant), groups.split(x), lay(on_x))
    s_x.addcmul_(groups.split(t), lay(-rstd * a))
    if w is not None and groups.kind == "batch":
        on_g = on_g * w
    elif w is not None and groups.kind == "channels":
        on_g = on_g.unsqueeze(-1) * w.view(dots.shape[1:])
    return s_x.addcmul_(groups.split(g), lay(on_g)).view(x.shape)
