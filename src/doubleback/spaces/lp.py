"""Banach spaces Lᵖ: not Hilbert for p ≠ 2, but with a dual norm and its gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..dtypes import lifted
from ..errors import InputError
from .base import Euclidean, Space, Weighted, per_example, safe_sqrt
from .grids import Grid


@dataclass(frozen=True)
class Lp(Space):
    """Lᵖ: ‖u‖ = (Σ wᵢ|uᵢ|ᵖ)^{1/p}, max|uᵢ| for p = ∞; weights w from `measure`.

    A penalty measures the derivative g in the dual norm, 1/p + 1/p′ = 1, r = g/w:

        ‖g‖_* = sup {Σ gᵢuᵢ : ‖u‖ ≤ 1} = (Σ wᵢ|rᵢ|^{p′})^{1/p′}

    So p = ∞, perturbations bounded in every coordinate as in fast-gradient-sign attacks, gives
    Σ|gᵢ|; p = 1, sparse perturbations, gives max|rᵢ|. Several inputs are measured as one vector.

    p: from 1 to infinity. measure: `Euclidean()` (w = 1), `Weighted` or `Grid`.
    At kinks derivatives are autograd's: 0 where rᵢ = 0; a maximum that is reached several times
    shares its derivative evenly.

    >>> import torch
    >>> Lp(float("inf")).dual_norm(torch.tensor([[3.0, -4.0]]))
    tensor([7.])
    """

    p: float
    measure: Space = field(default_factory=Euclidean)

    def __post_init__(self) -> None:
        if not isinstance(self.p, (int, float)) or not self.p >= 1:
            raise InputError(f"Lp needs 1 ≤ p ≤ ∞, not p = {self.p!r}")
        if not isinstance(self.measure, (Euclidean, Weighted, Grid)):
            raise InputError(
                f"Lp's measure must be Euclidean, Weighted or Grid, not {self.measure}"
            )

    @property
    def conjugate(self) -> float:
        """p′ = p / (p − 1)."""
        if self.p == 1:
            return math.inf
        return 1.0 if self.p == math.inf else self.p / (self.p - 1)

    @property
    def hilbert(self) -> bool:
        return self.p == 2

    def check(self, shape: Sequence[int]) -> None:
        self.measure.check(shape)

    def _hilbert(self) -> Space:
        if self.p != 2:
            raise InputError(
                f"{self} has no inner product and no Riesz map; use it in SquaredNorm, Norm or "
                "Deviation, or take p = 2"
            )
        return self.measure

    def riesz(self, g: Tensor) -> Tensor:
        return self._hilbert().riesz(g)

    def riesz_inverse(self, u: Tensor) -> Tensor:
        return self._hilbert().riesz_inverse(u)

    def norm(self, u: Tensor, batch_dims: int = 1) -> Tensor:
        """‖u‖."""
        return _norm([lifted(u)], self.measure, float(self.p), batch_dims)

    def dual_norm(self, g: Tensor, batch_dims: int = 1) -> Tensor:
        """‖g‖_*."""
        return _norm([self.measure.riesz(lifted(g))], self.measure, self.conjugate, batch_dims)

    def dual_square(self, gradients: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """(‖g‖²_*, ½∇‖g‖²_*): the gradient is the duality map, Σ gᵢjᵢ = ‖j‖² = ‖g‖²_*."""
        if self.p == 2:
            return super().dual_square(gradients)
        densities = [self.measure.riesz(lifted(g)) for g in gradients]
        size = _norm(densities, self.measure, self.conjugate, 1)
        return size.square(), self._duality_map(densities, size)

    def _duality_map(self, densities: Sequence[Tensor], size: Tensor) -> list[Tensor]:
        """n·∂n/∂g with n = ‖g‖_*: n sign(r) (|r|/n)^{p′−1}, and for p′ = ∞ n sign(r)/w at the
        maxima, shared among them."""
        q = self.conjugate

        def spread(t: Tensor, like: Tensor) -> Tensor:
            return t.reshape(-1, *(1,) * (like.dim() - 1))

        if q == math.inf:
            hits = [(r.abs() == spread(size, r)).to(r.dtype) for r in densities]
            count = torch.stack([per_example(hit) for hit in hits]).sum(0)
            return [
                self.measure.riesz(spread(size / count, r) * r.sign() * hit)
                for r, hit in zip(densities, hits, strict=True)
            ]
        positive = torch.where(size > 0, size, 1)
        found = []
        for r in densities:
            direction = r.sign()
            if q != 1:
                direction = direction * (r.abs() / spread(positive, r)) ** (q - 1)
            found.append(direction * spread(size, r))
        return found


def _norm(parts: Sequence[Tensor], measure: Space, p: float, batch_dims: int) -> Tensor:
    """(Σ w|u|ᵖ)^{1/p} over several tensors, differentiably and without overflow: with m = max|u|,
    held constant, it is m (Σ w(|u|/m)ᵖ)^{1/p}."""
    flat = [u.abs().reshape(*u.shape[:batch_dims], -1) for u in parts]
    largest: Any = torch.cat(flat, -1).amax(-1)
    if p == math.inf:
        return largest
    if p == 2:
        return safe_sqrt(_sums([u.square() for u in parts], measure, batch_dims))
    scale = largest.detach()
    scale = torch.where(scale > 0, scale, 1)
    scaled = [u.abs() / scale.reshape(*scale.shape, *(1,) * (u.dim() - batch_dims)) for u in parts]
    total = _sums([u**p for u in scaled], measure, batch_dims)
    positive = total > 0
    root = torch.where(positive, total, 1) ** (1 / p)
    return scale * torch.where(positive, root, 0)


def _sums(powers: Sequence[Tensor], measure: Space, batch_dims: int) -> Tensor:
    """Σ w·power."""
    sums = [per_example(measure.riesz_inverse(u), batch_dims) for u in powers]
    return torch.stack(sums).sum(0)
