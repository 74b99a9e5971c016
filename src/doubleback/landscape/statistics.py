"""How rough a curve is: jumps and smooth variation of a batch mean, and how they scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .curves import Piecewise

GRID = 4097  # places at which the smooth part is sampled


@dataclass(frozen=True)
class Roughness:
    """The batch mean of a piecewise smooth function f on the span of its path.

    jumps: how many are higher than rounding; mean_height, largest: of |jump of the mean|, that is
    of one example's jump over M; jump_variation: Σ|jump|; smooth_variation: total variation of
    f minus its jumps, on a grid; size: largest minus smallest value.
    """

    examples: int
    jumps: int
    mean_height: float
    largest: float
    jump_variation: float
    smooth_variation: float
    size: float

    @property
    def ratio(self) -> float:
        """Jump variation over smooth variation."""
        if self.smooth_variation == 0:
            return float("inf") if self.jump_variation else 0.0
        return self.jump_variation / self.smooth_variation


def roughness(
    f: Piecewise, examples: Tensor | None = None, table: Tensor | None = None
) -> Roughness:
    """Of the mean over the batch, or over the `examples` with these numbers.

    table: `f.table` at equally spaced places of the span, where several batches share it.

    >>> from torch import nn
    >>> import doubleback as db
    >>> net = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1))
    >>> path = db.landscape.follow(net, torch.randn(8, 1), "0.weight[2,0]", (-2.0, 2.0))
    >>> slope = db.landscape.penalty(path, db.OutputGradient()).slope
    >>> roughness(slope, torch.arange(4)).jumps <= roughness(slope).jumps
    True
    """
    t, height = mean_jumps(f, examples)
    count = f.path.examples if examples is None else len(examples)
    scale = float(f.coefficients.abs().max())
    real = height.abs() * count > 1e-12 * scale
    t, height = t[real], height[real]
    grid = GRID if table is None else table.shape[1]
    places = torch.linspace(*f.path.span, grid, dtype=torch.float64)
    table = f.table(places) if table is None else table
    values = (table if examples is None else table[examples]).mean(0)
    climbed = torch.cat([height.new_zeros(1), torch.cumsum(height, 0)])
    smooth = values - climbed[torch.searchsorted(t, places, right=True)]
    variation = float((smooth[1:] - smooth[:-1]).abs().sum())
    rounding = 1e-14 * scale * grid  # what a sum over the grid makes of nothing
    return Roughness(
        count, len(t), float(height.abs().mean()) if len(t) else 0.0,
        float(height.abs().max()) if len(t) else 0.0, float(height.abs().sum()),
        variation if variation > rounding else 0.0, float(values.max() - values.min()),
    )  # fmt: skip


def mean_jumps(f: Piecewise, examples: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Places (in order) and heights of the jumps of the batch mean."""
    jumps = f.jumps()
    if examples is None:
        t, height = jumps.t, jumps.height / f.path.examples
    else:
        own = torch.isin(jumps.example, examples)
        t, height = jumps.t[own], jumps.height[own] / len(examples)
    order = torch.argsort(t)
    return t[order], height[order]


def mean_curve(f: Piecewise, grid: int = 513) -> tuple[Tensor, Tensor, Tensor]:
    """(t, left limit, right limit) of the batch mean at every jump and on a grid between."""
    at, height = mean_jumps(f)
    places = torch.linspace(*f.path.span, grid, dtype=torch.float64)
    t = torch.cat([places, at])
    right = f.mean(t)
    left = right - torch.cat([torch.zeros_like(places), height])
    order = torch.argsort(t, stable=True)
    return t[order], left[order], right[order]


def fit_exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The exponent a of values ≈ c·sizes^a, by least squares of the logarithms.

    >>> round(fit_exponent([1, 10, 100], [5.0, 0.5, 0.05]), 6)
    -1.0
    """
    pairs = [(s, v) for s, v in zip(sizes, values, strict=True) if v > 0]
    if len(pairs) < 2:
        return float("nan")
    x = torch.tensor([float(s) for s, _ in pairs], dtype=torch.float64).log()
    y = torch.tensor([float(v) for _, v in pairs], dtype=torch.float64).log()
    x = x - x.mean()
    return float((x * (y - y.mean())).sum() / x.square().sum())
