"""Spaces of functions that are sampled on a regular grid: L² by quadrature; the Banach spaces Lᵖ,
not Hilbert for p ≠ 2, but with a dual norm and its gradient; Sobolev spaces Hˢ of any real order,
diagonal in a Fourier basis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._torch import disable_current_modes
from ..dtypes import accumulation, lifted
from ..errors import InputError
from ..kernels import compiling, library, recording
from .base import Euclidean, Space, Weighted, per_example, safe_sqrt

# L² by quadrature --------------------------------------------------------------------------------


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
        factors = []
        for axis in range(-len(self._steps), 0):
            size = u.shape[axis]
            if size < 2:
                raise InputError(
                    f"{self} needs at least 2 points on each axis; shape is {tuple(u.shape)}"
                )
            inside = torch.ones(size - 2, dtype=u.dtype, device=u.device)
            factors.append(pad(inside, (1, 1), value=0.5).reshape(-1, *(1,) * (-1 - axis)))
        return factors

    def riesz(self, g: Tensor) -> Tensor:
        for factor in self._ends(g):
            g = g / factor
        return g / math.prod(self._steps)

    def riesz_inverse(self, u: Tensor) -> Tensor:
        for factor in self._ends(u):
            u = u * factor
        return u * math.prod(self._steps)


# Lᵖ ----------------------------------------------------------------------------------------------


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
        images = []
        for r in densities:
            direction = r.sign()
            if q != 1:
                direction = direction * (r.abs() / spread(positive, r)) ** (q - 1)
            images.append(direction * spread(size, r))
        return images


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
    zero = total <= 0  # not where it is NaN
    root = torch.where(zero, 1, total) ** (1 / p)
    return scale * torch.where(zero, 0, root)


def _sums(powers: Sequence[Tensor], measure: Space, batch_dims: int) -> Tensor:
    """Σ w·power."""
    sums = [per_example(measure.riesz_inverse(u), batch_dims) for u in powers]
    return torch.stack(sums).sum(0)


# Hˢ ----------------------------------------------------------------------------------------------


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
