"""Hilbert spaces of input derivatives: inner product, norm, Riesz map (theory §7).

A penalty measures the derivative J*v, a Euclidean gradient g, in the space X of inputs: with
⟨u, v⟩_X = uᵀGv the representer is G⁻¹g and its squared norm gᵀG⁻¹g.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import InputError


def per_example(t: Tensor) -> Tensor:
    """Sum over all but the first axis, in float32 at least."""
    wide = t.float() if t.dtype in (torch.bfloat16, torch.float16) else t
    return wide.reshape(wide.shape[0], -1).sum(1)


@dataclass(frozen=True)
class Euclidean:
    """⟨u, v⟩ = Σ uᵢvᵢ per example; the Riesz map is the identity.

    >>> import torch
    >>> Euclidean().inner(torch.ones(2, 3), torch.ones(2, 3))
    tensor([3., 3.])
    """

    def riesz(self, g: Tensor) -> Tensor:
        """The representer of the functional u ↦ Σ gᵢuᵢ."""
        return g

    def inner(self, u: Tensor, v: Tensor) -> Tensor:
        if u.dtype in (torch.bfloat16, torch.float16):
            u, v = u.float(), v.float()
        return per_example(u * v)

    def norm(self, u: Tensor) -> Tensor:
        return self.inner(u, u).sqrt()


@dataclass(frozen=True, eq=False)
class Weighted:
    """⟨u, v⟩ = Σ wᵢuᵢvᵢ with positive weights, such as the quadrature weights of a grid.

    The weight broadcasts against one example.

    >>> import torch
    >>> space = Weighted(torch.tensor([2.0, 4.0]))
    >>> space.riesz(torch.ones(1, 2))
    tensor([[0.5000, 0.2500]])
    """

    weight: Tensor

    def __post_init__(self) -> None:
        if not bool((self.weight > 0).all()):
            raise InputError(
                "Weighted needs positive weights; the smallest of shape "
                f"{tuple(self.weight.shape)} is {float(self.weight.min()):g}"
            )

    def _like(self, u: Tensor) -> Tensor:
        try:
            torch.broadcast_shapes(self.weight.shape, u.shape[1:])
        except RuntimeError:
            raise InputError(
                f"weights of shape {tuple(self.weight.shape)} do not broadcast against one "
                f"example of shape {tuple(u.shape[1:])}"
            ) from None
        return self.weight.to(device=u.device, dtype=u.dtype)

    def riesz(self, g: Tensor) -> Tensor:
        return g / self._like(g)

    def inner(self, u: Tensor, v: Tensor) -> Tensor:
        return Euclidean().inner(u, v * self._like(v))

    def norm(self, u: Tensor) -> Tensor:
        return self.inner(u, u).sqrt()


Space = Euclidean | Weighted


def dual_square(space: Space, gradients: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """(‖representer‖² summed over several inputs, the representers)."""
    total: Tensor | None = None
    representers = []
    for g in gradients:
        representer = space.riesz(g)
        square = Euclidean().inner(g, representer)
        total = square if total is None else total + square
        representers.append(representer)
    assert total is not None
    return total, representers
