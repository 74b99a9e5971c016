"""Fused Triton kernels as operators of the library `doubleback`, so that flattened sweeps hold
each as one node."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from . import mode, pointwise_triton
from .groups import Groups, layout
from .standardisation import standardise_second

# -------------------------------------------------------------------- g″⊙h⊙ξ in one pass


def _curvature(name: str, z: Tensor, h: Tensor, xi: Tensor, params: Sequence[float]) -> Tensor:
    return pointwise_triton.curvature(name, z, h, xi, *params)


mode.opaque(
    "curvature(str name, Tensor z, Tensor h, Tensor xi, float[] params) -> Tensor",
    _curvature,
    lambda name, z, h, xi, params: torch.empty_like(z),
)


def curvature(name: str, z: Tensor, h: Tensor, xi: Tensor, *params: float) -> Tensor | None:
    """The fused source where Triton runs; None where the caller writes the formula out."""
    if mode.fusing() or not mode.on_cuda(z, h, xi) or not pointwise_triton.supports(name, z, h, xi):
        return None
    if mode.recording():
        return torch.ops.doubleback.curvature(name, z, h, xi, [float(p) for p in params])
    return pointwise_triton.curvature(name, z, h, xi, *params)


# ------------------------------------------------------------------------ standardisation


_groups = lru_cache(Groups)


def _second(
    xi: Tensor | None, q: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor,
    weight: Tensor | None, kind: str, shape: Sequence[int], count: int, rms: bool,
    wanted: Sequence[bool], tangent: bool,
) -> list[Tensor]:  # fmt: skip
    found = standardise_second(
        _groups(kind, tuple(shape), count, rms), xi, q, x, mean, rstd, weight, wanted, tangent,
        fused=True,
    )  # fmt: skip
    return [t for t in found if t is not None]


def _second_fake(xi, q, x, mean, rstd, weight, kind, shape, count, rms, wanted, tangent):
    form = layout(Groups(kind, tuple(shape), count, rms), x)
    found = [torch.empty_like(x, memory_format=form) for need in (tangent, wanted[0]) if need]
    if wanted[1] and weight is not None:
        found.append(torch.empty_like(weight))
    return found


mode.opaque(
    "standardise_second(Tensor? xi, Tensor q, Tensor x, Tensor? mean, Tensor rstd, "
    "Tensor? weight, str kind, int[] shape, int count, bool rms, bool[] wanted, bool tangent) "
    "-> Tensor[]",
    _second,
    _second_fake,
)


def second(
    groups: Groups, xi: Tensor | None, q: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor,
    weight: Tensor | None, wanted: Sequence[bool], tangent: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """`standardise_second` in the form that the sweeps need now."""
    if not (mode.recording() and mode.on_cuda(x) and not mode.fusing()):
        return standardise_second(
            groups, xi, q, x, mean, rstd, weight, wanted, tangent, fused=not mode.fusing()
        )
    results = torch.ops.doubleback.standardise_second(
        xi, q, x, mean, rstd, weight, groups.kind, list(groups.shape), groups.count, groups.rms,
        list(wanted), tangent,
    )  # fmt: skip
    found = iter(results)
    has_weight = wanted[1] and weight is not None
    t_y = next(found) if tangent else None
    s_x = next(found) if wanted[0] else None
    return t_y, s_x, next(found) if has_weight else None
