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

from collections.abc import Sequence

from torch import Tensor

from ..errors import InputError
from . import launch, standardisation_triton
from .groups import HALF, Groups, Point, Three, cast, eager, statistics_dtype
from .standardisation_paths import (
    parameter_sum,
    rms_backward_formula,
    rms_backward_on_cpu,
    second_formula,
    second_on_cpu,
    spread,
    stock_arguments,
    stock_backward,
    stock_forward,
    times_weight,
)


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
    if groups.kind == "channels" and held.dtype in HALF and not x.is_cpu:
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
    fused: bool | None = None,
) -> Three:
    """dx = rP(w⊙ξ), dw = Σ ξ⊙x̂, db = Σ ξ; None for what is not wanted.

    Without a weight there is no dw; db then has x's dtype.
    """
    fused = eager(xi, x, weight) if fused is None else fused
    mask = [wanted[0], wanted[1] and weight is not None, wanted[2]]
    at = Point.of(groups, x, mean, rstd, weight)
    if groups.rms and not (fused and x.is_cuda):  # RMS norm's backward kernel is CUDA only
        compute = rms_backward_on_cpu if fused and x.is_cpu else rms_backward_formula
        grads = compute(at.in_statistics_dtype(), xi, mask)
    else:
        held, w, _ = stock_arguments(groups, x, weight, None, fused)
        grads = stock_backward(at._replace(x=held, weight=w), xi, mask)
    dx, dw, db = (g if want else None for g, want in zip(grads, mask, strict=True))
    like = x if weight is None else weight
    return cast(dx, x), cast(dw, like), cast(db, like)


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
        only_x = (True, False, False)
        t, _, _ = standardise_backward(groups, q, x, mean, rstd, None, only_x, fused=True)
        return times_weight(groups, t, weight)  # type: ignore[arg-type]
    arguments = (groups, None, q, x, mean, rstd, weight, (False, False))
    return standardise_second(*arguments, fused=fused)[0]  # type: ignore[return-value]


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
) -> Three:
    """t_y = w⊙rP(q) with the curvature sources s_x = ∂_x⟨ξ, t_y⟩ and s_w = ∂_w⟨ξ, t_y⟩.

    None for what is not wanted, and for s_w without a weight. xi may be None when neither
    source is wanted.
    """
    fused = eager(xi, q, x, weight) if fused is None else fused
    mask = [tangent, wanted[0], wanted[1] and weight is not None]
    if xi is None and any(mask[1:]):
        raise InputError("standardise_second: s_x and s_w need the cotangent xi, which is None")
    at = Point.of(groups, x, mean, rstd, weight)
    if fused and x.is_cuda and x.numel() and launch.available():
        return standardisation_triton.second(at, xi, q, mask)
    compute = second_on_cpu if fused and x.is_cpu and x.numel() else second_formula
    t_y, s_x, s_w = compute(at.in_statistics_dtype(), q if xi is None else xi, q, mask)
    return cast(t_y, x), cast(s_x, x), None if weight is None else cast(s_w, weight)


# Differentiable to any order ---------------------------------------------------------------------


def statistics(groups: Groups, x: Tensor, eps: float | Tensor) -> tuple[Tensor | None, Tensor]:
    """μ (None for RMS norm) and r = (var + ε)^(−1/2) as functions of x, in plain operations."""
    view = groups.split(x.to(statistics_dtype(x)))
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
    dx, _, _ = second_formula(at, g, g, [True, False, False])
    x_hat, _, _ = spread(at)
    dw, db = (parameter_sum(at, u) for u in (groups.split(xi) * x_hat, groups.split(xi)))
    like = x if weight is None else weight
    return dx.to(x.dtype), dw.to(like.dtype), db.to(like.dtype)  # type: ignore[union-attr]
