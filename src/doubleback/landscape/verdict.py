"""What the jumps along a path mean for someone who trains with this penalty, in one paragraph."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from .curves import Curve
from .statistics import Roughness, roughness

SMALL, LARGE = 0.01, 0.1  # largest jump over the size of the curve: unseen below, felt above


@dataclass(frozen=True)
class Verdict:
    """Roughness of the batch mean of R and of ∂R, and of single examples, along one path.

    share: largest jump of the mean of ∂R over the larger of its range and its value at rest;
    alone: the same for the worst single example; enough: a batch size at which share falls below
    1 %, as jumps fall like 1/M.
    """

    path: str
    span: tuple[float, float]
    examples: int
    value: Roughness
    slope: Roughness
    breakpoints_per_example: float
    share: float
    alone: float
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
                f"At batch size {self.examples} the jumps are {word}: a batch of about "
                f"{self.enough}, a leaky ReLU, or softplus would bring them below 1 %."
            )
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
    rest = torch.tensor([min(max(path.rest, path.span[0]), path.span[1])], dtype=torch.float64)
    size = max(slope.size, abs(float(curve.slope.mean(rest))))
    share = slope.largest / size if size else 0.0
    alone = _worst_example(curve)
    places = torch.tensor([b.t for b in path.breakpoints], dtype=torch.float64)
    return Verdict(
        str(path.along), path.span, path.examples, value, slope,
        len(path.breakpoints) / path.examples, share, alone,
        max(path.examples, round(path.examples * share / SMALL)),
        float((places - rest).abs().min()) if len(places) else None,
    )  # fmt: skip


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
