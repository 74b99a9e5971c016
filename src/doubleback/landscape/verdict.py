"""How rough a curve is, and what that means for training: jumps and smooth variation of a batch
mean, how they scale, and one paragraph for someone who trains with this penalty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .curves import Curve, Piecewise
from .network import leaky
from .paths import follow

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


SMALL, LARGE = 0.01, 0.1  # largest jump over the size of the curve: unseen below, felt above
LEAK = 0.1  # slope of the leaky ReLU that a verdict compares with


@dataclass(frozen=True)
class Verdict:
    """Roughness of the batch mean of R and of ∂R, and of single examples, along one path.

    share: largest jump of the mean of ∂R over the larger of its range and its value at rest;
    alone: the same for the worst single example; leaky: `share` of the same path with leaky ReLUs
    of slope 0.1 and the weights as they are (None: not asked for, or no ReLU); enough: a batch size
    at which share falls below 1 % if the highest jump of one example stays what it is here, so
    that the mean's falls like 1/M.
    """

    path: str
    span: tuple[float, float]
    examples: int
    value: Roughness
    slope: Roughness
    breakpoints_per_example: float
    share: float
    alone: float
    leaky: float | None
    enough: int
    nearest: float | None

    def __str__(self) -> str:
        s = self.slope
        if not s.jumps and not self.value.jumps:
            return (
                f"Along {self.path}, t from {self.span[0]:.4g} to {self.span[1]:.4g}, neither the "
                f"penalty nor its derivative jumps for any of the {self.examples} examples "
                f"({self.breakpoints_per_example:.3g} breakpoints per example, none felt by them): "
                "this direction is smooth for training."
            )
        text = (
            f"Along {self.path}, t from {self.span[0]:.4g} to {self.span[1]:.4g}, each example "
            f"meets {self.breakpoints_per_example:.3g} breakpoints on average; the mean over "
            f"{self.examples} has {self.value.jumps} jumps in R and {s.jumps} in ∂R. The largest "
            f"jump of the mean of ∂R is {s.largest:.3g}, {_percent(self.share)} of the curve's "
            f"size (for the worst example alone: {_percent(self.alone)}); jumps make up "
            f"{_percent(_part(s))} of the total variation of ∂R and {_percent(_part(self.value))} "
            "of R's. "
        )
        if self.nearest is not None:
            text += f"The nearest breakpoint lies {self.nearest:.2g} from the present value. "
        if self.share <= SMALL:
            text += f"At batch size {self.examples} the surface is smooth in practice."
        else:
            word = "visible" if self.share <= LARGE else "strong"
            text += (
                f"At batch size {self.examples} the jumps are {word}; a batch of about "
                f"{self.enough} would bring them below 1 % if no example jumps higher than these. "
            )
            if self.leaky is not None:
                text += (
                    f"With leaky ReLUs of slope {LEAK:g} and these weights the largest would be "
                    f"{_percent(self.leaky)}. "
                )
            text += "A smooth activation (softplus) has none, only steep places."
        if _part(self.value) > LARGE:
            text += (
                " R itself moves by jumps to a good part, which no gradient of it shows: watch the "
                "penalty's value, not only its gradient."
            )
        return text

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "text": str(self)}


def judge(curve: Curve) -> Verdict:
    """The verdict on a penalty's curve along its path.

    >>> from torch import nn
    >>> import doubleback as db
    >>> net = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> path = db.landscape.follow(net, torch.randn(64, 1), "0.weight[2,0]")
    >>> print(str(db.landscape.judge(db.landscape.penalty(path, db.OutputGradient())))[:5])
    Along
    """
    path = curve.value.path
    slope, value = roughness(curve.slope), roughness(curve.value)
    share = _share(curve, slope)
    leaky_share = None
    softer = leaky(path.network, LEAK) if share > SMALL else None
    if softer is not None:
        other = curve.again(follow(path.net, path.x, path.along, path.span, network=softer))
        leaky_share = _share(other, roughness(other.slope))
    rest = min(max(path.rest, path.span[0]), path.span[1])
    places = torch.tensor([b.t for b in path.breakpoints], dtype=torch.float64)
    return Verdict(
        str(path.along), path.span, path.examples, value, slope,
        len(path.breakpoints) / path.examples, share, _worst_example(curve), leaky_share,
        max(path.examples, round(path.examples * share / SMALL)),
        float((places - rest).abs().min()) if len(places) else None,
    )  # fmt: skip


def _share(curve: Curve, slope: Roughness) -> float:
    """The largest jump of the mean of ∂R over the size of that curve."""
    path = curve.slope.path
    rest = min(max(path.rest, path.span[0]), path.span[1])
    there = curve.slope.mean(torch.tensor([rest], dtype=torch.float64))
    size = max(slope.size, abs(float(there)))
    return slope.largest / size if size else 0.0


def _worst_example(curve: Curve) -> float:
    """Largest jump of one example's ∂R over the range of that example's curve."""
    left, right = curve.slope.ends
    path, jumps = curve.slope.path, curve.slope.jumps()
    low = torch.full((path.examples,), torch.inf, dtype=torch.float64)
    high = -low
    for end in (left, right):
        low.scatter_reduce_(0, path.example, end, "amin")
        high.scatter_reduce_(0, path.example, end, "amax")
    worst = torch.zeros(path.examples, dtype=torch.float64)
    worst.scatter_reduce_(0, jumps.example, jumps.height.abs(), "amax")
    size = high - low
    return float(torch.where(size > 0, worst / size, 0.0).max())


def _part(r: Roughness) -> float:
    total = r.jump_variation + r.smooth_variation
    return r.jump_variation / total if total else 0.0


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"
