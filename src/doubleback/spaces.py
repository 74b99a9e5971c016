"""Spaces of inputs, outputs and parameters: inner products, norms, Riesz maps (theory §7).

A penalty measures the derivative J*v, a Euclidean gradient g, in the space X of inputs: with
⟨u, v⟩_X = uᵀGv the representer is G⁻¹g and its squared norm gᵀG⁻¹g.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.optim import Optimizer

from ._torch import compiling, disable_current_modes
from .dtypes import accumulation, lifted
from .errors import InputError
from .kernels import being_flattened, library

__all__ = [
    "Euclidean",
    "Grid",
    "Lp",
    "Product",
    "Sobolev",
    "Space",
    "Weighted",
    "dual_square",
    "parameter_spaces",
    "per_example",
    "safe_sqrt",
]


def per_example(t: Tensor, batch_dims: int = 1) -> Tensor:
    """Sum over all but the first `batch_dims` axes, in float32 at least."""
    wide = lifted(t)
    axes = wide.dim() - batch_dims
    if axes < 1:
        return wide.reshape(*wide.shape[:batch_dims], prod(wide.shape[batch_dims:])).sum(-1)
    return (wide if axes == 1 else wide.flatten(batch_dims)).sum(-1)


def safe_sqrt(square: Tensor) -> Tensor:
    """√s with derivative 0 at s = 0, where autograd alone would give infinity. NaN stays NaN."""
    zero = square <= 0
    return torch.where(zero, 0, torch.where(zero, 1, square).sqrt())


class Space(ABC):
    """A Hilbert space of tensors with ⟨u, v⟩ = uᵀGv, G symmetric and positive definite.

    A space of your own defines two methods, both linear and inverse to each other; they keep
    shape, dtype and device, and treat leading axes as a batch:

        riesz(g) = G⁻¹g           from a Euclidean gradient to its representer
        riesz_inverse(u) = Gu     from an element to the functional ⟨u, ·⟩ as a Euclidean gradient

    so that Σᵢ gᵢvᵢ = ⟨riesz(g), v⟩ for every v. All else follows, also the operator norm between
    two spaces: the adjoint of J: X → Y is J* = X.riesz ∘ Jᵀ ∘ Y.riesz_inverse. A tensor that they
    hold, they read as `self.constant(tensor, like=g)`.

    >>> import torch
    >>> class Damped(Space):  # ⟨u, v⟩ = 4 Σ uᵢvᵢ
    ...     def riesz(self, g):
    ...         return g / 4
    ...     def riesz_inverse(self, u):
    ...         return 4 * u
    >>> Damped().norm(torch.ones(2, 9))
    tensor([6., 6.])
    """

    @property
    def hilbert(self) -> bool:
        """Whether the norm comes from an inner product, so that sums of squares do not depend on
        the directions that they are taken in."""
        return True

    @abstractmethod
    def riesz(self, g: Any) -> Any:
        """G⁻¹g, the representer of the functional u ↦ Σ gᵢuᵢ."""

    @abstractmethod
    def riesz_inverse(self, u: Any) -> Any:
        """Gu, the Euclidean gradient of the functional ⟨u, ·⟩."""

    def inner(self, u: Any, v: Any, batch_dims: int = 1) -> Tensor:
        """uᵀGv, one number for each index of the first `batch_dims` axes (0: one number)."""
        return per_example(lifted(u) * self.riesz_inverse(lifted(v)), batch_dims)

    def norm(self, u: Any, batch_dims: int = 1) -> Tensor:
        """√⟨u, u⟩."""
        return safe_sqrt(self.inner(u, u, batch_dims))

    def check(self, shape: Sequence[int]) -> None:
        """Raise an `InputError` where one example of this shape is no element of the space."""
        return None

    @staticmethod
    def constant(tensor: Tensor, like: Tensor) -> Tensor:
        """A tensor of the space's own in dtype and on the device of `like`, in a form that
        flattened and compiled sweeps can hold."""
        return torch.ops.aten.lift_fresh(tensor).to(device=like.device, dtype=like.dtype)

    def dual_square(self, gradients: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """(Σ ‖g‖²_*, the representers) over several inputs, each in this space; per example.

        The dual norm is ‖g‖_* = sup {Σ gᵢuᵢ : ‖u‖ ≤ 1} = √(gᵀG⁻¹g), and half the gradient of
        its square is G⁻¹g. 16-bit gradients are answered in float32.
        """
        squares, representers = [], []
        for g in gradients:
            g = lifted(g)
            representers.append(self.riesz(g))
            squares.append(per_example(g * representers[-1]))
        return sum(squares[1:], squares[0]), representers


def dual_square(
    space: Space, gradients: Sequence[Tensor], wide: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """`space.dual_square` after a check of the gradients' shapes; axis 0 is the batch, of the same
    size in each.

    wide: leave the representers of 16-bit gradients in float32, for what is still to come.
    """
    if any(g.shape[:1] != gradients[0].shape[:1] for g in gradients[1:]):
        shapes = [tuple(g.shape) for g in gradients]
        raise InputError(
            f"a norm per example needs gradients of one leading size, not of shapes {shapes}"
        )
    if isinstance(space, Product):
        space.check_count(gradients)
    else:
        for g in gradients:
            space.check(tuple(g.shape[1:]))
    square, representers = space.dual_square(gradients)
    if wide:
        return square, representers
    return square, [u.to(g.dtype) for u, g in zip(representers, gradients, strict=True)]


@dataclass(frozen=True)
class Euclidean(Space):
    """⟨u, v⟩ = Σ uᵢvᵢ; the Riesz map is the identity.

    >>> import torch
    >>> Euclidean().inner(torch.ones(2, 3), torch.ones(2, 3))
    tensor([3., 3.])
    """

    def riesz(self, g: Tensor) -> Tensor:
        return g

    def riesz_inverse(self, u: Tensor) -> Tensor:
        return u


@dataclass(frozen=True, eq=False)
class Weighted(Space):
    """⟨u, v⟩ = Σ wᵢuᵢvᵢ with positive weights, such as the quadrature weights of a grid.

    The weight, a tensor or a number, broadcasts against one example. It is best kept on the
    inputs' device and in their dtype: any other is converted in every call.

    >>> import torch
    >>> space = Weighted(torch.tensor([2.0, 4.0]))
    >>> space.riesz(torch.ones(1, 2))
    tensor([[0.5000, 0.2500]])
    """

    weight: Tensor | float

    def __post_init__(self) -> None:
        weight = torch.as_tensor(self.weight).detach()
        if not weight.is_floating_point():
            weight = weight.to(torch.get_default_dtype())
        if weight.numel() == 0 or not bool(((weight > 0) & weight.isfinite()).all()):
            smallest = f"; the smallest is {float(weight.min()):g}" if weight.numel() else ""
            raise InputError(
                "Weighted needs positive weights, all finite, not these of shape "
                f"{tuple(weight.shape)}{smallest}"
            )
        object.__setattr__(self, "weight", weight)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Weighted):
            return NotImplemented
        mine, theirs = self.weight, other.weight
        return mine.shape == theirs.shape and bool((mine.cpu() == theirs.cpu()).all())  # type: ignore[union-attr]

    def __hash__(self) -> int:
        return hash((Weighted, tuple(self.weight.shape)))  # type: ignore[union-attr]

    def __repr__(self) -> str:
        weight: Tensor = self.weight  # type: ignore[assignment]
        low, high = float(weight.min()), float(weight.max())
        return f"Weighted(shape {tuple(weight.shape)}, {low:g} … {high:g})"

    def check(self, shape: Sequence[int]) -> None:
        weight: Tensor = self.weight  # type: ignore[assignment]
        try:
            fits = torch.broadcast_shapes(weight.shape, tuple(shape)) == tuple(shape)
        except RuntimeError:
            fits = False
        if not fits:
            raise InputError(
                f"weights of shape {tuple(weight.shape)} do not broadcast against one "
                f"example of shape {tuple(shape)}"
            )

    def _like(self, u: Tensor) -> Tensor:
        self.check(u.shape)
        return self.constant(self.weight, like=u)  # type: ignore[arg-type]

    def riesz(self, g: Tensor) -> Tensor:
        return g / self._like(g)

    def riesz_inverse(self, u: Tensor) -> Tensor:
        return u * self._like(u)


class Product(Space):
    """X₁ × … × X_n for several inputs: ⟨u, v⟩ = Σ ⟨u_k, v_k⟩, elements are tuples of tensors.

    >>> import torch
    >>> space = Product(Euclidean(), Weighted(3.0))
    >>> pair = torch.ones(2, 4), torch.ones(2, 5)
    >>> space.inner(pair, pair)
    tensor([19., 19.])
    """

    def __init__(self, *spaces: Space) -> None:
        for space in spaces:
            if not isinstance(space, Space):
                raise InputError(f"Product takes spaces, not {space!r}")
        if not spaces:
            raise InputError("Product needs at least one space")
        self.spaces = spaces

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Product) and self.spaces == other.spaces

    def __hash__(self) -> int:
        return hash((Product, self.spaces))

    def __repr__(self) -> str:
        return f"Product({', '.join(map(repr, self.spaces))})"

    @property
    def hilbert(self) -> bool:
        return all(space.hilbert for space in self.spaces)

    def _pairs(self, parts: Any) -> list[tuple[Any, Any]]:
        if not isinstance(parts, (tuple, list)) or len(parts) != len(self.spaces):
            given = len(parts) if isinstance(parts, (tuple, list)) else type(parts).__name__
            raise InputError(f"{self} has {len(self.spaces)} factors, its element has {given}")
        return list(zip(self.spaces, parts, strict=True))

    def check_count(self, gradients: Sequence[Tensor]) -> None:
        """Raise unless there is an input for each factor, of a shape that the factor takes."""
        if len(gradients) != len(self.spaces):
            shapes = [tuple(g.shape) for g in gradients]
            raise InputError(
                f"{self} has {len(self.spaces)} factors, but {len(gradients)} inputs are "
                f"penalised, of shapes {shapes}; choose them with wrt="
            )
        for space, g in zip(self.spaces, gradients, strict=True):
            space.check(tuple(g.shape[1:]))

    def riesz(self, g: Any) -> tuple:
        return tuple(space.riesz(part) for space, part in self._pairs(g))

    def riesz_inverse(self, u: Any) -> tuple:
        return tuple(space.riesz_inverse(part) for space, part in self._pairs(u))

    def inner(self, u: Any, v: Any, batch_dims: int = 1) -> Tensor:
        pairs = zip(self._pairs(u), v, strict=True)
        return torch.stack([s.inner(a, b, batch_dims) for (s, a), b in pairs]).sum(0)

    def dual_square(self, gradients: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        squares = [space.dual_square([g]) for space, g in self._pairs(list(gradients))]
        total: Any = sum(square for square, _ in squares)
        return total, [u for _, parts in squares for u in parts]


# Spaces of parameters ----------------------------------------------------------------------------


def parameter_spaces(optimizer: Optimizer, spaces: Mapping[Tensor, Space]) -> Optimizer:
    """The same optimiser, stepping with the gradients' representers in the given spaces.

    ∇^Θ ℓ = G_Θ⁻¹ ∇ℓ: the direction of steepest descent depends on what a unit step of a parameter
    means. In a Sobolev space of filters it is smoothed, in a weighted space scaled entry by entry.

    optimizer: any optimiser that holds the parameters; it is returned, so schedulers, `GradScaler`
        and closures work as before. spaces: parameter → space; others keep their gradients.

    Only the step sees the representers: `.grad` holds the Euclidean gradient again afterwards.
    Weight decay, momentum and the like act on the representer, as the optimiser defines them;
    gradients are clipped before, in the Euclidean norm.

    >>> import torch, doubleback as db
    >>> net = torch.nn.Conv2d(3, 8, 7)
    >>> smooth = db.spaces.Sobolev(1.0, spacing=(1.0, 1.0), boundary="neumann")
    >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> optimizer = db.parameter_spaces(optimizer, {net.weight: smooth})
    """
    held = [p for group in optimizer.param_groups for p in group["params"]]
    chosen: list[tuple[Tensor, Space]] = []
    for parameter, space in spaces.items():
        if not isinstance(space, Space):
            raise InputError(f"parameter_spaces needs a space for each parameter, not {space!r}")
        if not any(parameter is p for p in held):
            raise InputError(
                f"the optimiser does not hold the parameter of shape {tuple(parameter.shape)} "
                f"that {space} is for"
            )
        with torch.no_grad():  # a space that does not fit is known before the first step
            space.riesz(torch.zeros_like(parameter))
        chosen.append((parameter, space))
    euclidean: list[tuple[Tensor, Tensor]] = []

    def represent() -> None:
        euclidean.clear()
        with torch.no_grad():
            for parameter, space in chosen:
                if parameter.grad is not None:
                    euclidean.append((parameter, parameter.grad))
                    parameter.grad = space.riesz(parameter.grad)

    def before(_: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0]: the optimiser
        if closure is None:
            represent()
            return None

        def represented() -> Any:
            result = closure()
            represent()
            return result

        if len(args) > 1:
            return (args[0], represented, *args[2:]), kwargs
        return args, {**kwargs, "closure": represented}

    def after(*_: Any) -> None:
        for parameter, gradient in euclidean:
            parameter.grad = gradient
        euclidean.clear()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return optimizer


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

    def check(self, shape: Sequence[int]) -> None:
        check_axes(self, self.spacing, shape)  # type: ignore[arg-type]

    def _ends(self, u: Tensor) -> list[Tensor]:
        """Per axis 1 inside and ½ at both ends, shaped to multiply u."""
        steps: Any = self.spacing
        check_trailing(self, steps, u)
        if self.rule == "midpoint":
            return []
        factors = []
        for axis in range(-len(steps), 0):
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
        return g / math.prod(self.spacing)  # type: ignore[arg-type]

    def riesz_inverse(self, u: Tensor) -> Tensor:
        for factor in self._ends(u):
            u = u * factor
        return u * math.prod(self.spacing)  # type: ignore[arg-type]


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
        if not compiling() and being_flattened():
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
