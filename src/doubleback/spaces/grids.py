"""Functions sampled on a regular grid: L² by quadrature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import InputError
from .base import Space

RULES = ("midpoint", "trapezoid")


def spacings(name: str, spacing: float | Sequence[float]) -> tuple[float, ...]:
    """One positive number per spatial axis."""
    numbers = (spacing,) if isinstance(spacing, (int, float)) else tuple(spacing)
    if not numbers or not all(
        isinstance(h, (int, float)) and not isinstance(h, bool) and math.isfinite(h) and h > 0
        for h in numbers
    ):
        raise InputError(
            f"{name}'s spacing must be a positive number, or one per spatial axis, not {spacing!r}"
        )
    return tuple(float(h) for h in numbers)


def check_axes(space: Space, spacing: tuple[float, ...], shape: Sequence[int]) -> None:
    """One example is (*grid) or (channels, *grid)."""
    n = len(spacing)
    if len(shape) not in (n, n + 1):
        raise InputError(
            f"{space} has {n} spatial {'axis' if n == 1 else 'axes'}, but one example of shape "
            f"{tuple(shape)} has {len(shape)} axes; it may have {n}, or {n + 1} with channels "
            "first: give one spacing per spatial axis"
        )


def check_trailing(space: Space, spacing: tuple[float, ...], u: Tensor) -> None:
    """At least as many axes as the grid has; those before are channels and batch."""
    if u.dim() < len(spacing):
        raise InputError(
            f"{space} has {len(spacing)} spatial axes, a tensor of shape {tuple(u.shape)} has "
            f"{u.dim()}"
        )


@dataclass(frozen=True)
class Grid(Space):
    """L² by quadrature: ⟨u, v⟩ = Σ wᵢuᵢvᵢ ≈ ∫ u v, on the last `len(spacing)` axes.

    spacing: the step h of the grid, one per spatial axis; channels before them are summed.
    rule: "midpoint", values at the centres of cells, w = h; "trapezoid", values at nodes with
        the first and last on the boundary, w = h inside and h/2 there. Both have error O(h²).

    >>> import torch
    >>> x = (torch.arange(100) + 0.5) / 100
    >>> round(float(Grid(1 / 100).inner(x[None], x[None])), 4)  # ∫₀¹ x² = 1/3
    0.3333
    """

    spacing: float | tuple[float, ...]
    rule: str = "midpoint"

    def __post_init__(self) -> None:
        object.__setattr__(self, "spacing", spacings("Grid", self.spacing))
        if self.rule not in RULES:
            raise InputError(f"Grid's rule must be one of {RULES}, not {self.rule!r}")

    @property
    def _steps(self) -> tuple[float, ...]:
        return self.spacing  # type: ignore[return-value]

    def check(self, shape: Sequence[int]) -> None:
        check_axes(self, self._steps, shape)

    def _ends(self, u: Tensor) -> list[Tensor]:
        """Per axis 1 inside and ½ at both ends, shaped to multiply u."""
        check_trailing(self, self._steps, u)
        if self.rule == "midpoint":
            return []
        found = []
        for axis in range(-len(self._steps), 0):
            size = u.shape[axis]
            if size < 2:
                raise InputError(
                    f"{self} needs at least 2 points on each axis; shape is {tuple(u.shape)}"
                )
            inside = torch.ones(size - 2, dtype=u.dtype, device=u.device)
            found.append(pad(inside, (1, 1), value=0.5).reshape(-1, *(1,) * (-1 - axis)))
        return found

    def riesz(self, g: Tensor) -> Tensor:
        for factor in self._ends(g):
            g = g / factor
        return g / math.prod(self._steps)

    def riesz_inverse(self, u: Tensor) -> Tensor:
        for factor in self._ends(u):
            u = u * factor
        return u * math.prod(self._steps)
