"""The p of a penalty p(J*v): its value per example and its gradient q₀ = ∇p (theory §2).

A norm's `value(ξ)` takes one tensor per penalised input and returns one number per example,
differentiably; `measure(ξ)` returns that and the gradient.

‖ξ‖ is the dual norm of the inputs' space: what a perturbation of size one can change. The space
yields ‖ξ‖² and ½∇‖ξ‖², in a Hilbert space the representer of ξ; the norms below are functions of
the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..spaces import Euclidean, Space, dual_square, safe_sqrt


def _scaled(factor: Tensor, representers: Sequence[Tensor], xi: Sequence[Tensor]) -> list[Tensor]:
    """Each example's factor times its representer, in the dtypes of ξ."""
    return [
        (factor.reshape(-1, *(1,) * (u.dim() - 1)) * u).to(like.dtype)
        for u, like in zip(representers, xi, strict=True)
    ]


def _check_space(norm: Any) -> None:
    if not isinstance(norm.space, Space):
        raise InputError(
            f"{type(norm).__name__}'s space must be one of doubleback.spaces, or a subclass of "
            f"spaces.Space, not {norm.space!r}"
        )


@dataclass(frozen=True)
class SquaredNorm:
    """p(ξ) = ‖ξ‖², ∇p = 2ξ (twice its representer in a space other than Euclidean).

    >>> import torch
    >>> SquaredNorm().measure([torch.tensor([[3.0, 4.0]])])[0]
    tensor([25.])
    """

    space: Space = field(default_factory=Euclidean)

    def __post_init__(self) -> None:
        _check_space(self)

    def value(self, xi: Sequence[Tensor]) -> Tensor:
        return dual_square(self.space, xi)[0]

    def measure(self, xi: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        square, representers = dual_square(self.space, xi, wide=True)
        return square, [(2 * u).to(like.dtype) for u, like in zip(representers, xi, strict=True)]


@dataclass(frozen=True)
class Norm:
    """p(ξ) = ‖ξ‖, ∇p = ξ/‖ξ‖, and 0 where ξ = 0."""

    space: Space = field(default_factory=Euclidean)

    def __post_init__(self) -> None:
        _check_space(self)

    def value(self, xi: Sequence[Tensor]) -> Tensor:
        return safe_sqrt(dual_square(self.space, xi)[0])

    def measure(self, xi: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        square, representers = dual_square(self.space, xi, wide=True)
        norm = safe_sqrt(square)
        factor = torch.where(norm > 0, 1 / norm, 0)
        return norm, _scaled(factor, representers, xi)


@dataclass(frozen=True)
class Deviation:
    """p(ξ) = (‖ξ‖ − target)², or max(0, ‖ξ‖ − target)² if one-sided (WGAN-GP, WGAN-LP).

    >>> import torch
    >>> Deviation(target=1.0).measure([torch.tensor([[3.0, 4.0]])])[0]
    tensor([16.])
    """

    target: float = 1.0
    one_sided: bool = False
    space: Space = field(default_factory=Euclidean)

    def __post_init__(self) -> None:
        _check_space(self)

    def value(self, xi: Sequence[Tensor]) -> Tensor:
        excess = safe_sqrt(dual_square(self.space, xi)[0]) - self.target
        return (excess.clamp(min=0) if self.one_sided else excess).square()

    def measure(self, xi: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        square, representers = dual_square(self.space, xi, wide=True)
        norm = safe_sqrt(square)
        excess = norm - self.target
        if self.one_sided:
            excess = excess.clamp(min=0)
        factor = torch.where(norm > 0, 2 * excess / norm, 0)
        return excess.square(), _scaled(factor, representers, xi)


PER_EXAMPLE = (SquaredNorm, Norm, Deviation)  # example b of p depends on example b of ξ alone


@dataclass(frozen=True)
class Callback:
    """Any callable from an input-shaped tensor (a tuple for several inputs) to one number per
    example, which may depend on all of them; its gradient is taken by autograd, on the input's
    derivative alone."""

    p: Callable[..., Tensor]

    def value(self, xi: Sequence[Tensor]) -> Tensor:
        values = self.p(xi[0] if len(xi) == 1 else tuple(xi))
        batch = xi[0].shape[0]
        if not isinstance(values, Tensor) or tuple(values.shape) != (batch,):
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise InputError(
                f"p must return one number per example, shape ({batch},); it returned {shape}"
            )
        return values

    def measure(self, xi: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        with torch.enable_grad():
            leaves = [u.detach().requires_grad_() for u in xi]
            values = self.value(leaves)
            if not values.requires_grad:
                return values, [torch.zeros_like(u) for u in leaves]
            grads = torch.autograd.grad(values.sum(), leaves, allow_unused=True)
        return values.detach(), [
            torch.zeros_like(u) if g is None else g for u, g in zip(leaves, grads, strict=True)
        ]


def as_norm(p: Any) -> Any:
    """A norm as it is; a callable wrapped."""
    if hasattr(p, "measure"):
        return p
    if callable(p):
        return Callback(p)  # type: ignore[arg-type]
    raise InputError(
        f"norm must be SquaredNorm(), Norm(), Deviation() or a callable, not {type(p).__name__}"
    )
