"""Quantities along a followed path as piecewise polynomials: outputs, gradients, penalties.

On each piece a quantity is sampled at Chebyshev–Lobatto nodes, both ends included, with the
pattern of the piece held fixed. Where its degree is known the polynomial through the samples *is*
the quantity (`exact`); otherwise it is an interpolant, of degree eight where pieces are few and
long and of degree two where they are many and short, and exact at both ends, so that jump heights
are exact in any case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..penalties import (
    Jacobian,
    LossGradient,
    OutputGradient,
    Penalty,
    SpectralNorm,
    SquaredError,
    SquaredNorm,
)
from .jets import Jets
from .paths import Path, moving_leaves
from .roots import horner

SMOOTH = ((16, 8), (64, 4), (math.inf, 2))  # up to so many pieces per example, this degree
HIGHEST = 16  # degree up to which a polynomial is recovered from its samples
BUDGET = 2**22  # numbers in the widest value of one chunk of samples


@dataclass(frozen=True, eq=False)
class Jumps:
    """Differences of one-sided limits, one per breakpoint: example (J,), t (J,), height (J,);
    `piece` is the piece to the left."""

    example: Tensor
    t: Tensor
    height: Tensor
    piece: Tensor

    def __len__(self) -> int:
        return len(self.t)

    @property
    def largest(self) -> float:
        return float(self.height.abs().max()) if len(self) else 0.0


@dataclass(frozen=True, eq=False)
class Piecewise:
    """A polynomial per piece: coefficients (P, K) in u ∈ [−1, 1], which runs along the piece."""

    path: Path
    coefficients: Tensor
    exact: bool

    def __call__(self, t: Tensor, example: int | Tensor = 0) -> Tensor:
        """The value at each t, for one example or for one example per t."""
        t = torch.as_tensor(t, dtype=torch.float64)
        which = torch.as_tensor(example).expand(t.shape)
        return self.on(self.path.find(which, t), t)

    def on(self, piece: Tensor, t: Tensor) -> Tensor:
        """The value at t of a given piece's polynomial."""
        start, end = self.path.start[piece], self.path.end[piece]
        u = (2 * t - start - end) / (end - start)
        return horner(self.coefficients[piece].unbind(-1), u)

    @property
    def ends(self) -> tuple[Tensor, Tensor]:
        """Limits at both ends of every piece."""
        signs = (-1.0) ** torch.arange(self.coefficients.shape[1], dtype=torch.float64)
        return self.coefficients @ signs, self.coefficients.sum(1)

    def jumps(self) -> Jumps:
        """Height of every jump, right limit minus left limit."""
        left, right = self.ends
        path = self.path
        piece = (path.example[1:] == path.example[:-1]).nonzero().squeeze(1)
        height = left[piece + 1] - right[piece]
        return Jumps(path.example[piece], path.end[piece], height, piece)

    def table(self, t: Tensor) -> Tensor:
        """Every example at each t: (M, T)."""
        parts = []
        for chunk in torch.arange(self.path.examples).split(max(1, BUDGET // max(len(t), 1))):
            found = self(t.repeat(len(chunk)), chunk.repeat_interleave(len(t)))
            parts.append(found.reshape(len(chunk), -1))
        return torch.cat(parts)

    def mean(self, t: Tensor) -> Tensor:
        """The average over the batch at each t."""
        return self.table(t).mean(0)


@dataclass(frozen=True, eq=False)
class Curve:
    """A quantity and its derivative along the path; `again(other)` is the same quantity along
    another path of the same examples."""

    name: str
    value: Piecewise
    slope: Piecewise
    again: Callable[[Path], Curve]


def output(path: Path, index: int | tuple[int, ...] = 0) -> Curve:
    """One entry of the network's output."""
    place = _index(path, index)

    def sample(jets: Jets, example: Tensor) -> tuple[Tensor, Tensor]:
        z, dz = jets.out
        return z[(slice(None), *place)], dz[(slice(None), *place)]

    degree = path.motion.degree.get(path.network.out, 0)
    return _curve(path, f"output {index}", sample, degree, lambda other: output(other, index))


def gradient(
    path: Path, index: int | tuple[int, ...] = 0, direction: Tensor | None = None
) -> Curve:
    """The derivative of one output entry in the input: ⟨∇ₓ out⟨index⟩, d⟩.

    direction: of one example's shape; may be left out where an example is a single number.
    """
    place = _index(path, index)
    if direction is None:
        if path.x[0].numel() != 1:
            raise InputError(
                f"an example has shape {tuple(path.x.shape[1:])}: choose a direction of that shape"
            )
        direction = torch.ones_like(path.x[0])
    if direction.shape != path.x.shape[1:]:
        raise InputError(
            f"the direction has shape {tuple(direction.shape)}, an example "
            f"{tuple(path.x.shape[1:])}"
        )
    along = direction.detach().double().flatten()

    def sample(jets: Jets, example: Tensor) -> tuple[Tensor, Tensor]:
        z, _ = jets.out
        v = torch.zeros_like(z)
        v[(slice(None), *place)] = 1.0
        xi, dxi = jets.pull(v, None)
        return xi.flatten(1) @ along, dxi.flatten(1) @ along

    def again(other: Path) -> Curve:
        return gradient(other, index, direction)

    return _curve(path, f"gradient of output {index}", sample, path.motion.slope, again)


def penalty(path: Path, of: Penalty, *extra: Tensor) -> Curve:
    """R(t) = p(J*v) of every example and its derivative along the path.

    of: `OutputGradient`, `LossGradient`, an exact `Jacobian`, or any whose v does not depend on
    the output; extra: labels or targets of the whole batch, as in `Penalised`. Squared norms of a
    linear output's gradients and of the squared error's are polynomials on each piece (`exact`).

    >>> from torch import nn
    >>> import doubleback as db
    >>> net = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1))
    >>> path = db.landscape.follow(net, torch.randn(8, 1), "0.bias[2]")
    >>> float(db.landscape.penalty(path, db.OutputGradient()).slope.coefficients.abs().max())
    0.0
    """
    _refuse_unknown(of)
    shape = (path.examples, *path.network.graph.shape(path.network.out)[1:])
    of.check(shape, [path.x], *extra)
    extra = tuple(e.double() if e.is_floating_point() else e for e in extra)

    def sample(jets: Jets, example: Tensor) -> tuple[Tensor, Tensor]:
        z, dz = jets.out
        own = tuple(e[example] for e in extra)
        total = (0.0, 0.0)
        for v, dv in _seeds(of, z, dz, *own):
            xi, dxi = jets.pull(v, dv)
            value, (q,) = of.measure([xi], *own)
            total = total[0] + value, total[1] + (q * dxi).flatten(1).sum(1)
        return total  # type: ignore[return-value]

    def again(other: Path) -> Curve:
        return penalty(other, of, *extra)

    return _curve(path, repr(of), sample, _degree(path, of), again)


def _refuse_unknown(of: Penalty) -> None:
    """A landscape is a function of weights and inputs: nothing drawn at random, no iteration."""
    takes = "a landscape takes OutputGradient, LossGradient or an exact Jacobian"
    if isinstance(of, SpectralNorm):
        raise InputError(
            f"SpectralNorm finds its direction by iteration, from a random one; {takes}"
        )
    if isinstance(of, Jacobian):
        if of.projections is not None:
            raise InputError(
                f"Jacobian(projections={of.projections}) draws random directions; {takes}: leave "
                "projections out"
            )
    elif of.varying and not isinstance(of, LossGradient):
        raise InputError(
            f"{type(of).__name__} has a v that depends on the output in a way that is not known "
            f"here; {takes}"
        )


def _seeds(of: Penalty, z: Tensor, dz: Tensor, *own: Tensor) -> Iterator[tuple[Tensor, Any]]:
    """Every v and its derivative along the path, ∂v/∂out·∂out. Each v that varies is a gradient in
    the output, so that ∂v/∂out is symmetric and the penalty's head, its adjoint, gives it."""
    if not isinstance(of, Jacobian):
        yield of.seed(z, *own), of.head(z, dz, *own) if of.varying else None
        return
    for one in of.bank(z).split(1):
        yield of.vectors(z, one)[0], of.head_of(z, one, dz[None])


def _degree(path: Path, of: Penalty) -> int | None:
    if type(of.norm) is not SquaredNorm:
        return None
    if isinstance(of, OutputGradient) or (isinstance(of, Jacobian) and not of.varying):
        return 2 * path.motion.slope
    if isinstance(of, LossGradient) and isinstance(of.loss, SquaredError):
        return 2 * (path.motion.slope + path.motion.degree.get(path.network.out, 0))
    return None


def _index(path: Path, index: int | tuple[int, ...]) -> tuple[int, ...]:
    place = (index,) if isinstance(index, int) else tuple(index)
    shape = path.network.graph.shape(path.network.out)[1:]
    if len(place) != len(shape) or not all(-n <= i < n for i, n in zip(place, shape, strict=True)):
        raise InputError(f"output index {index!r} does not fit one example's output, {shape}")
    return place


Sample = Callable[[Jets, Tensor], tuple[Tensor, Tensor]]


def _curve(
    path: Path, name: str, sample: Sample, degree: int | None, again: Callable[[Path], Curve]
) -> Curve:
    exact = degree is not None and degree <= HIGHEST
    if degree is None:
        per_example = len(path.start) / path.examples
        degree = next(order for most, order in SMOOTH if per_example <= most)
    count = min(degree, HIGHEST) + 1
    angles = math.pi * torch.linspace(0, 1, count, dtype=torch.float64)
    nodes = -torch.cos(angles) if count > 1 else torch.zeros(1, dtype=torch.float64)
    values, slopes = sample_pieces(path, sample, nodes)
    fit = torch.linalg.inv(_vandermonde(nodes)).T
    slope_coefficients = slopes @ fit
    if exact and count > 1:  # one degree less: the last coefficient is rounding
        slope_coefficients = slope_coefficients[:, :-1]
    return Curve(
        name,
        Piecewise(path, values @ fit, exact),
        Piecewise(path, slope_coefficients, exact),
        again,
    )


def _vandermonde(nodes: Tensor) -> Tensor:
    return nodes[:, None] ** torch.arange(len(nodes))


def sample_pieces(path: Path, sample: Sample, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """A quantity and its derivative in t at the same relative places of every piece: (P, K)."""
    network, count = path.network, len(nodes)
    lo, hi = path.normalised(path.start), path.normalised(path.end)
    mid, half = (lo + hi) / 2, (hi - lo) / 2
    at = (mid[:, None] + half[:, None] * nodes).flatten()
    moving = moving_leaves(network, path.x, path.along, path.centre, path.radius)
    rows = torch.arange(len(lo)).repeat_interleave(count)
    width = max(m.bytes // 8 for m in network.graph.values if m is not None)
    size = max(1, BUDGET // width)
    parts: list[Any] = []
    with torch.no_grad():
        for row, place in zip(rows.split(size), at.split(size), strict=True):
            example = path.example[row]
            jets = Jets(network, path.motion, path.x, moving, example, mid[row], place)
            parts.append(sample(jets, example))
    value = torch.cat([v for v, _ in parts]).reshape(-1, count)
    slope = torch.cat([d for _, d in parts]).reshape(-1, count)
    return value, slope / path.radius
