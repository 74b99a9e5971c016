"""Sobolev spaces Hˢ of any real order on regular grids, diagonal in a Fourier basis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .._torch import disable_current_modes
from ..dtypes import accumulation, lifted
from ..errors import InputError
from ..kernels import compiling, library, recording
from .base import Space
from .grids import check_axes, check_trailing, spacings

BOUNDARIES = ("periodic", "neumann", "dirichlet")


@dataclass(frozen=True)
class Sobolev(Space):
    """Hˢ: ⟨u, v⟩ = ∫ (1 − Δ)ˢu · v, on the last `len(spacing)` axes, channels summed.

    G = (Πh) Q diag((1 + |ω|²)ˢ) Qᵀ with an orthonormal basis Q of n cells of width h:

    | boundary | basis (columns of Q) | ω |
    | --- | --- | --- |
    | "periodic" | e^{iω x}, FFT | 2πk / (nh), k = −n/2 … n/2 |
    | "neumann" | cos(ω x), DCT-II | πk / (nh), k = 0 … n−1 |
    | "dirichlet" | sin(ω x), DST-II | πk / (nh), k = 1 … n |

    Values sit at the centres of cells, x = (j + ½)h, so each axis has length nh and order 0 is
    `Grid(spacing)` exactly. ω are the frequencies of the continuous Laplacian, not those of its
    difference quotient, (2/h) sin(ωh/2): a basis function has its exact norm on every grid, so
    refinement converges as fast as the samples' Fourier coefficients do.

    order: any finite number. Penalties in Hˢ, s > 0, measure a gradient in the dual H⁻ˢ: they
        punish smooth directions and tolerate rough ones, more so the larger s.
    boundary: one of the three, or one per axis.

    >>> import math, torch
    >>> x = (torch.arange(64) + 0.5) / 64
    >>> wave = torch.sin(2 * math.pi * x)[None]  # ‖·‖² = (1 + (2π)²) / 2 in H¹
    >>> round(float(Sobolev(1.0, 1 / 64).inner(wave, wave)), 2)
    20.24
    """

    order: float
    spacing: float | tuple[float, ...]
    boundary: str | tuple[str, ...] = "periodic"

    def __post_init__(self) -> None:
        if not isinstance(self.order, (int, float)) or not math.isfinite(self.order):
            raise InputError(f"Sobolev's order must be a finite number, not {self.order!r}")
        steps = spacings("Sobolev", self.spacing)
        given = (self.boundary,) if isinstance(self.boundary, str) else tuple(self.boundary)
        ends = given * len(steps) if len(given) == 1 else given
        if len(ends) != len(steps):
            raise InputError(
                f"Sobolev has {len(given)} boundaries {given} for {len(steps)} spacings {steps}"
            )
        for end in ends:
            if end not in BOUNDARIES:
                raise InputError(f"Sobolev's boundary must be one of {BOUNDARIES}, not {end!r}")
        object.__setattr__(self, "order", float(self.order))
        object.__setattr__(self, "spacing", steps)
        object.__setattr__(self, "boundary", ends)

    def check(self, shape: Sequence[int]) -> None:
        check_axes(self, self.spacing, shape)  # type: ignore[arg-type]

    def _multiply(self, u: Tensor, sign: int) -> Tensor:
        """(Πh)^±1 Q diag((1 + |ω|²)^±s) Qᵀ u."""
        steps: Any = self.spacing
        check_trailing(self, steps, u)
        if 0 in u.shape:
            return u.clone()
        options = sign * self.order, steps, ",".join(self.boundary), math.prod(steps) ** sign
        if not compiling() and recording():
            # made now: a tensor that the first replay makes could lie in a CUDA graph's memory
            with disable_current_modes():
                _multiplier(
                    tuple(u.shape[-len(steps) :]), *options, accumulation(u.dtype), u.device
                )
        return torch.ops.doubleback.sobolev(u, *options)

    def riesz(self, g: Tensor) -> Tensor:
        return self._multiply(g, -1)

    def riesz_inverse(self, u: Tensor) -> Tensor:
        return self._multiply(u, 1)


# ----------------------------------------------------------------------------- as one operator
#
# One operator, so that flattened and compiled sweeps hold one node, without complex numbers, and
# find its multipliers in the cache. It is its own adjoint: so is its derivative.


def _sobolev(
    u: Tensor, order: float, spacing: Sequence[float], boundary: str, scale: float
) -> Tensor:
    """scale · Q diag((1 + |ω|²)^order) Qᵀ u.

    n cells with even (Neumann) or odd (Dirichlet) reflection are 2n periodic ones: cosines and
    sines are the periodic basis there, so one FFT serves all three boundaries.
    """
    n = len(spacing)
    axes = list(range(-n, 0))
    sizes = tuple(u.shape[-n:])
    wide = lifted(u)
    for axis, end in zip(axes, boundary.split(","), strict=True):
        if end != "periodic":
            mirrored = wide.flip(axis)
            wide = torch.cat([wide, mirrored if end == "neumann" else -mirrored], axis)
    spectrum = torch.fft.rfftn(wide, dim=axes)
    options = float(order), tuple(spacing), boundary, float(scale)
    spectrum *= _multiplier(sizes, *options, wide.dtype, wide.device)
    wide = torch.fft.irfftn(spectrum, s=wide.shape[-n:], dim=axes)
    for axis, size in zip(axes, sizes, strict=True):
        wide = wide.narrow(axis, 0, size)
    return torch.empty_like(u).copy_(wide)


@lru_cache(maxsize=64)
def _multiplier(
    sizes: tuple[int, ...],
    order: float,
    spacing: tuple[float, ...],
    boundary: str,
    scale: float,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """scale · (1 + |ω|²)^order on the half spectrum of the reflected grid."""
    n = len(sizes)
    square = torch.ones((), dtype=torch.float64)
    ends = boundary.split(",")
    for i, (size, h, end) in enumerate(zip(sizes, spacing, ends, strict=True)):
        full = size if end == "periodic" else 2 * size
        frequencies = torch.fft.rfftfreq if i == n - 1 else torch.fft.fftfreq
        omega = 2 * math.pi * frequencies(full, d=h, dtype=torch.float64)
        square = square + omega.square().reshape(-1, *(1,) * (n - 1 - i))
    return (scale * square**order).to(device=device, dtype=dtype)


def _keep(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.options = inputs[1:]


def _adjoint(ctx: Any, y: Tensor) -> tuple:
    return torch.ops.doubleback.sobolev(y, *ctx.options), None, None, None, None


library.define(
    "sobolev(Tensor u, float order, float[] spacing, str boundary, float scale) -> Tensor"
)
library.impl("sobolev", _sobolev, "CompositeExplicitAutograd")
torch.library.register_fake(
    "doubleback::sobolev",
    lambda u, order, spacing, boundary, scale: torch.empty_like(u),
    lib=library,
)
torch.library.register_autograd("doubleback::sobolev", _adjoint, setup_context=_keep, lib=library)
