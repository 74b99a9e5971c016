"""The paper's experiment: a 1–8–5–1 ReLU network fitted to sin on [−π, π], and its two parameters.

Everything is float64 on one thread of random numbers, so that a seed fixes every number.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import doubleback as db
from doubleback import landscape as L
from doubleback.landscape import drawing

POINTS, BATCH, STEPS = 1500, 256, 1500
ATTEMPTS = 5  # networks trained, of which the best is taken
SEED = 3
OURS = "ours, not in the paper"
PLACE = 1.022  # the paper's x₀
NODE, CDB = db.OutputGradient(), db.LossGradient("mse")


class ClaimError(db.DoublebackError, AssertionError):
    """A statement of the paper does not hold for these numbers."""


class Checked(drawing.Report):
    """A figure's report whose claims are checked as they are written."""

    def claim(self, holds: bool, text: str) -> None:
        """Record a statement; raise where it is false."""
        if not holds:
            raise ClaimError(f"{self.name}: not so: {text}")
        self.claims.append(text)


def sine_network(act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    return nn.Sequential(nn.Linear(1, 8), act(), nn.Linear(8, 5), act(), nn.Linear(5, 1)).double()


def sine_data(seed: int) -> tuple[Tensor, Tensor]:
    """1500 points, uniform on [−π, π], and their sines: (1500, 1) each."""
    generator = torch.Generator().manual_seed(seed)
    x = (2 * torch.rand(POINTS, 1, generator=generator, dtype=torch.float64) - 1) * math.pi
    return x, torch.sin(x)


def train(net: nn.Module, x: Tensor, y: Tensor, steps: int) -> float:
    """Full-batch Adam on the squared loss, with a falling rate; returns the final loss."""
    optimiser = torch.optim.Adam(net.parameters(), lr=0.03)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        optimiser.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        optimiser.step()
        schedule.step()
    return float((net(x) - y).square().mean().detach())


def fitted(
    seed: int, act: Callable[[], nn.Module] = nn.ReLU, attempts: int = ATTEMPTS, steps: int = STEPS
) -> tuple[nn.Sequential, float]:
    """The best of a few networks trained from different initial weights: a ReLU network this
    small often loses half of its units on the way."""
    x, y = sine_data(seed)
    best: tuple[nn.Sequential, float] | None = None
    with torch.random.fork_rng(devices=[]):
        for attempt in range(attempts):
            torch.manual_seed(1000 * seed + attempt)
            net = sine_network(act)
            loss = train(net, x, y, steps)
            if best is None or loss < best[1]:
                best = net, loss
    assert best is not None
    return best


@dataclass
class Experiment:
    """The trained network, the example x₀, a weight and a bias of the second hidden layer, a
    batch of 256, and the four paths that the figures share."""

    seed: int
    net: nn.Sequential
    loss: float
    x: Tensor
    y: Tensor
    example: int
    unit: int
    source: int
    batch: Tensor
    paths: dict[str, L.Path]

    @property
    def x0(self) -> Tensor:
        return self.x[self.example : self.example + 1]

    @property
    def y0(self) -> Tensor:
        return self.y[self.example : self.example + 1]

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.net.parameters())

    def curves(self, key: str) -> dict[str, L.Curve]:
        """R_node and R_cdb along a path: 'w', 'b' for x₀ alone, 'w batch', 'b batch'."""
        path = self.paths[key]
        y = self.y[self.batch] if "batch" in key else self.y0
        return {"node": L.penalty(path, NODE), "cdb": L.penalty(path, CDB, y)}

    def sample_of(self, key: str, example: int) -> float:
        """The x of an example of a path."""
        return float(self.paths[key].x[example, 0])


def prepare(seed: int, steps: int = STEPS) -> Experiment:
    """Train, then choose w: the weight of the second hidden layer whose jump in ∂_w R_node at x₀
    is highest; b is the bias of the same neuron."""
    x, y = sine_data(seed)
    net, loss = fitted(seed, steps=steps)
    example = int((x[:, 0] - PLACE).abs().argmin())
    x0 = x[example : example + 1]
    unit, source = choose(net, x0)
    generator = torch.Generator().manual_seed(seed + 1)
    batch = torch.randperm(POINTS, generator=generator)[:BATCH]
    weight, bias = L.Coordinate("2.weight", (unit, source)), L.Coordinate("2.bias", (unit,))
    network = L.follow(net, x0, bias).network
    paths = {
        key + more: L.follow(net, points, along, span_around(net, along), network=network)
        for key, along in (("w", weight), ("b", bias))
        for more, points in (("", x0), (" batch", x[batch]))
    }
    return Experiment(seed, net, loss, x, y, example, unit, source, batch, paths)


def choose(net: nn.Sequential, x0: Tensor) -> tuple[int, int]:
    """(neuron, its input) with the highest jump in ∂_w R_node, of those whose bias has one too."""
    network, best, chosen = None, -1.0, (0, 0)
    for i in range(5):
        along = L.Coordinate("2.bias", (i,))
        path = L.follow(net, x0, along, span_around(net, along), network=network)
        network = path.network
        if not path.breakpoints:
            continue
        for j in range(8):
            along = L.Coordinate("2.weight", (i, j))
            path = L.follow(net, x0, along, span_around(net, along), network=network)
            found = L.penalty(path, NODE).slope.jumps().largest
            if found > best:
                best, chosen = found, (i, j)
    return chosen


def span_around(net: nn.Module, along: L.Coordinate) -> tuple[float, float]:
    """Two and a half to either side of the trained value, rounded to a tenth."""
    middle = round(float(dict(net.named_parameters())[along.name][along.index].detach()), 1)
    return middle - 2.5, middle + 2.5


# ------------------------------------------------------------------------------------ checks


def autograd_slope(net: nn.Module, along: L.Coordinate, t: float, x: Tensor, y: Tensor, of: str):
    """(R, ∂R/∂t, ∂z/∂x at the first example) of the batch mean, by float64 autograd alone."""
    state = {name: p.detach().clone() for name, p in net.named_parameters()}
    state[along.name][along.index] = t
    state[along.name].requires_grad_()
    leaf = x.detach().clone().requires_grad_()
    z = torch.func.functional_call(net, state, (leaf,))
    (s,) = torch.autograd.grad(z.sum(), leaf, create_graph=True)
    xi = s if of == "node" else s * 2 * (z - y)
    value = xi.square().sum(1).mean()
    slope = 0.0
    if value.requires_grad:
        (g,) = torch.autograd.grad(value, state[along.name], allow_unused=True)
        slope = 0.0 if g is None else float(g[along.index])
    return float(value.detach()), slope, float(s[0, 0].detach())


def engine(net: nn.Module, along: L.Coordinate, of: str) -> Callable:
    """(t, x, y) → the same value and derivative from `Penalised`, on a copy of the net."""
    model = db.Penalised(copy.deepcopy(net), NODE if of == "node" else CDB, flatten_after=None)
    parameter = dict(model.net.named_parameters())[along.name]

    def slope(t: float, x: Tensor, y: Tensor) -> tuple[float, float]:
        with torch.no_grad():
            parameter[along.index] = t
        _, value = model(x, *((y,) if of == "cdb" else ()))
        (g,) = torch.autograd.grad(value, parameter, allow_unused=True)
        return float(value.detach()), 0.0 if g is None else float(g[along.index])

    return slope


def worst_error(experiment: Experiment, key: str, curve: L.Curve, of: str) -> float:
    """Largest relative difference from autograd and from the engine, at a random point of every
    piece of x₀'s path, or at twenty random points of the batch's."""
    path = experiment.paths[key]
    generator = torch.Generator().manual_seed(experiment.seed)
    assert isinstance(path.along, L.Coordinate)
    if "batch" in key:
        lo, hi = path.span
        places = lo + (hi - lo) * torch.rand(20, generator=generator, dtype=torch.float64)
        x, y = path.x, experiment.y[experiment.batch]
    else:
        share = torch.rand(len(path.start), generator=generator, dtype=torch.float64)
        places = path.start + (path.end - path.start) * share
        x, y = experiment.x0, experiment.y0
    values, slopes = curve.value.mean(places), curve.slope.mean(places)
    worst, sweeps = 0.0, engine(experiment.net, path.along, of)
    for t, value, slope in zip(places.tolist(), values.tolist(), slopes.tolist(), strict=True):
        truth = autograd_slope(experiment.net, path.along, t, x, y, of)[:2]
        for other in (truth, sweeps(t, x, y)):
            for ours, theirs in zip((value, slope), other, strict=True):
                worst = max(worst, abs(ours - theirs) / (1 + abs(theirs)))
    return worst


def jump_rows(experiment: Experiment, key: str, f: L.Piecewise, most: int = 12) -> list[tuple]:
    """The highest jumps: place, height, neuron, sample."""
    path, jumps = experiment.paths[key], f.jumps()
    size = path.examples
    order = jumps.height.abs().argsort(descending=True)[:most]
    rows = []
    for k in order.tolist():
        b = path.breakpoints[k]
        rows.append(
            (b.t, float(jumps.height[k]) / size, ", ".join(map(str, b.units)), b.example,
             experiment.sample_of(key, b.example))
        )  # fmt: skip
    return rows


JUMP_HEADS = ("at", "height", "neuron", "sample", "its x₀")
