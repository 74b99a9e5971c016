"""Networks that solve equations by their residual (physics-informed, Raissi et al. 2019): Burgers'
equation of first order, up to just before its shock, by `WithGradient`, and of second order, with
viscosity, by `db.compile`, against characteristics and the formula of Cole and Hopf."""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import doubleback as db
from examples import common

GRID = 201  # values of x at which solutions are compared; half as many of t


@dataclass(frozen=True)
class Equation:
    """∂u/∂t + u ∂u/∂x = ν ∂²u/∂x² for |x| ≤ 1, u(x, 0) = −sin πx, u(±1, t) = 0."""

    name: str
    viscosity: float
    end: float  # the last time
    way: str  # how it is trained here: WithGradient or db.compile


def inviscid() -> Equation:
    """The shock forms at t = 1/π."""
    return Equation("first order", 0.0, 0.25, "WithGradient")


def viscous(full: bool) -> Equation:
    return Equation("second order", (0.01 if full else 0.05) / math.pi, 1.0, "db.compile")


# ------------------------------------------------------------------------ reference solutions


def characteristics(x: Tensor, t: Tensor) -> Tensor:
    """ν = 0 before the shock: u(x, t) = −sin πξ, where ξ − t sin πξ = x, by bisection."""
    low, high = x - t, x + t
    for _ in range(60):
        middle = (low + high) / 2
        right = middle - t * torch.sin(math.pi * middle) > x
        low, high = torch.where(right, low, middle), torch.where(right, middle, high)
    return -torch.sin(math.pi * (low + high) / 2)


def cole_hopf(x: Tensor, t: Tensor, viscosity: float) -> Tensor:
    """u = −∫ sin(πy) f(y) e^{−z²} dz / ∫ f(y) e^{−z²} dz with y = x − z √(4νt) and
    f(y) = e^{−cos(πy)/(2πν)}, by the trapezoidal rule."""
    z = torch.linspace(-8, 8, 1601, dtype=torch.float64)
    y = x[:, None] - z * (4 * viscosity * t[:, None]).sqrt()
    weight = torch.softmax(-torch.cos(math.pi * y) / (2 * math.pi * viscosity) - z.square(), dim=1)
    return -(torch.sin(math.pi * y) * weight).sum(1)


def grid(end: float) -> tuple[Tensor, Tensor]:
    """(points,) x and t, one time after another."""
    t, x = torch.meshgrid(
        torch.linspace(0, end, GRID // 2 + 1, dtype=torch.float64),
        torch.linspace(-1, 1, GRID, dtype=torch.float64),
        indexing="ij",
    )
    return x.flatten(), t.flatten()


def reference(equation: Equation) -> Tensor:
    """(times, GRID)"""
    x, t = grid(equation.end)
    nu = equation.viscosity
    return (cole_hopf(x, t, nu) if nu else characteristics(x, t)).reshape(-1, GRID)


# ----------------------------------------------------------------------------------- training


class Solution(nn.Module):
    """u = −sin πx + t (1 − x²) N(x, t): what is given at the start and at the ends holds for any
    N. (B, 2) points (x, t) → (B, 1)."""

    def __init__(self, width: int, end: float) -> None:
        super().__init__()
        self.end = end
        self.net = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
            nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1),
        )  # fmt: skip

    def forward(self, points: Tensor) -> Tensor:
        x, t = points[:, :1], points[:, 1:] / self.end
        inner = self.net(torch.cat([x, 2 * t - 1], dim=1))
        return -torch.sin(math.pi * x) + t * (1 - x.square()) * inner


def stock(net: nn.Module, viscosity: float) -> Callable[[Tensor], Tensor]:
    """points → the mean squared residual, by plain autograd."""

    def loss(points: Tensor) -> Tensor:
        points = points.detach().requires_grad_()
        u = net(points)
        (g,) = torch.autograd.grad(u.sum(), points, create_graph=True)
        residual = g[:, 1:] + u * g[:, :1]
        if viscosity:
            (second,) = torch.autograd.grad(g[:, 0].sum(), points, create_graph=True)
            residual = residual - viscosity * second[:, :1]
        return residual.square().mean()

    return loss


def with_gradient(net: nn.Module) -> Callable[[Tensor], Tensor]:
    model = db.WithGradient(net)

    def loss(points: Tensor) -> Tensor:
        u, g = model(points)
        return (g[:, 1:] + u * g[:, :1]).square().mean()

    return loss


def ways(net: nn.Module, equation: Equation, inductor: bool) -> dict[str, Callable]:
    """The same loss in several ways, stock's and the one to train by among them."""
    plain = stock(net, equation.viscosity)
    made = {"stock": plain, "db.compile": db.compile(plain, compiler="eager")}
    if not equation.viscosity:
        made["WithGradient"] = with_gradient(net)
    elif inductor:
        made["Inductor"] = db.compile(plain)
    return made


def train(
    loss: Callable, net: Solution, count: int, steps: int, seed: int, device: torch.device
) -> list[float]:
    """Adam on points that are drawn anew at each step; every tenth loss."""
    optimiser = torch.optim.Adam(net.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 5e-3, steps)
    generator = torch.Generator().manual_seed(seed)
    curve = []
    for i in range(steps):
        points = torch.rand(count, 2, generator=generator).to(device)
        points = torch.stack([2 * points[:, 0] - 1, net.end * points[:, 1]], dim=1)
        optimiser.zero_grad()
        value = loss(points)
        value.backward()
        optimiser.step()
        schedule.step()
        if i % 10 == 0:
            curve.append(value.item())
    return curve


def milliseconds(
    losses: dict[str, Callable], net: Solution, count: int, repeats: int, device: torch.device
) -> dict[str, float]:
    """Value and gradient, the ways in turn and in changing order: lower quartiles, since whatever
    else runs on the machine can only add to a time."""
    clock, order = common.clock(device), list(losses)
    times: dict[str, list[float]] = {name: [] for name in losses}
    for turn in range(repeats + 5):  # the first five capture, and are not counted
        points = torch.rand(count, 2, device=device)
        order.append(order.pop(0))
        for name in order:
            net.zero_grad()
            start = clock()
            losses[name](points).backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn >= 5:
                times[name].append(1e3 * (clock() - start))
    return {
        name: statistics.quantiles(taken, n=4)[0] if len(taken) > 1 else taken[0]
        for name, taken in times.items()
    }


@dataclass(frozen=True)
class Found:
    error: float  # ‖u − reference‖ / ‖reference‖ over the grid
    most: float  # the largest |u − reference|
    front: float  # share of |x| < 0.1 in the squared error
    residual: float  # mean squared residual at the last steps
    times: dict[str, float]  # ms of value and gradient, by way
    values: Tensor  # (times, GRID)


def solve(
    equation: Equation, width: int, count: int, steps: int, seed: int, device: torch.device,
    inductor: bool = False, repeats: int = 0,
) -> Found:  # fmt: skip
    torch.manual_seed(seed)
    net = Solution(width, equation.end).to(device)
    losses = ways(net, equation, inductor)
    times = milliseconds(losses, net, count, repeats, device) if repeats else {}
    curve = train(losses[equation.way], net, count, steps, seed, device)
    points = torch.stack(grid(equation.end), dim=1).float().to(device)
    with torch.no_grad():
        values = net(points).double().cpu().reshape(-1, GRID)
    truth, middle = reference(equation), torch.linspace(-1, 1, GRID).abs() < 0.1
    return Found(
        error=((values - truth).norm() / truth.norm()).item(),
        front=((values - truth)[:, middle].square().sum() / (values - truth).square().sum()).item(),
        most=(values - truth).abs().max().item(),
        residual=statistics.fmean(curve[-10:]),
        times=times,
        values=values,
    )


# ------------------------------------------------------------------------------------- report


def draw(found: dict[Equation, Found]):
    figure, axes = common.panels(3, 2, width=12, height=6.2, width_ratios=[1.2, 1, 1.2])
    colours = (common.GREEN, common.BLUE, common.PURPLE, common.ORANGE)
    for (equation, one), (solution, slices, off) in zip(
        found.items(), (axes[:3], axes[3:]), strict=True
    ):
        truth, line = reference(equation), torch.linspace(-1, 1, GRID)
        times = torch.linspace(0, equation.end, len(truth))
        levels = torch.linspace(-1.05, 1.05, 15)
        shown = solution.contourf(times, line, one.values.T, levels, cmap="RdBu_r", extend="both")
        solution.set(xlabel="t", ylabel="x", title=f"{equation.name}: learned u(x, t)")
        figure.colorbar(shown, ax=solution, ticks=(-1, -0.5, 0, 0.5, 1))
        for part, colour in zip((0, 1 / 3, 2 / 3, 1), colours, strict=True):
            row = round(part * (len(truth) - 1))
            slices.plot(line, truth[row], color=common.GREY, lw=4, alpha=0.5)
            slices.plot(line, one.values[row], color=colour, lw=1.3)
            slices.plot([], [], color=colour, label=f"t = {part * equation.end:.2f}")
        slices.set(xlabel="x", title="u at four times (grey: reference)")
        slices.legend(fontsize=8)
        error = (one.values - truth).abs().clamp_min(1e-6).log10()
        levels = torch.linspace(-4, -1, 7)
        shown = off.contourf(times, line, error.T, levels, cmap="magma", extend="both")
        off.set(xlabel="t", title="log₁₀ |u − reference|")
        figure.colorbar(shown, ax=off, ticks=(-4, -3, -2, -1))
    return figure


def report(runs: dict[Equation, list[Found]]) -> common.Report:
    def spent(equation: Equation, way: str) -> str:
        times = [f.times[way] for f in runs[equation] if way in f.times]
        return f"{statistics.median(times):.2f}" if times else ""

    def gain(equation: Equation, way: str) -> float:
        """How many times as fast as stock."""
        return statistics.median(f.times["stock"] / f.times[way] for f in runs[equation])

    rows: list[Sequence[str]] = [
        (
            f"{e.name}, ν = {e.viscosity * math.pi:g}{'/π' if e.viscosity else ''}, to t = {e.end}",
            common.spread([100 * f.error for f in found], "{:.2f}"),
            common.spread([f.most for f in found], "{:.3f}"),
            common.spread([f.residual for f in found], "{:.1e}"),
            spent(e, "stock"),
            spent(e, "WithGradient"),
            spent(e, "db.compile"),
            spent(e, "Inductor"),
        )
        for e, found in runs.items()
    ]
    columns = ("Burgers' equation", "L2 error, %", "largest error", "squared residual",
               "step by stock autograd, ms", "WithGradient", "db.compile, eager",
               "db.compile, Inductor")  # fmt: skip
    made = common.Report(
        "Burgers' equation from −sin πx, by its residual alone",
        columns,
        rows,
        draw({equation: found[0] for equation, found in runs.items()}),
    )
    for equation, found in runs.items():
        error = statistics.fmean(f.error for f in found)
        front = statistics.fmean(f.front for f in found)
        against = "Cole and Hopf's formula" if equation.viscosity else "characteristics"
        made.claim(
            error < 0.02,
            f"{equation.name}: {100 * error:.2f} % in L2 from {against}, "
            f"{100 * front:.0f} % of its square at the front, |x| < 0.1",
            f"{equation.name}: {100 * error:.1f} % in L2 from {against}, above 2 %",
        )
    first, second = runs
    if not runs[second][0].times:
        return made
    gains = {
        "first order, WithGradient": gain(first, "WithGradient"),
        "second order, db.compile": gain(second, "db.compile"),
    }
    told = "; ".join(f"{name} {g:.2f} times as fast" for name, g in gains.items())
    made.claim(
        min(gains.values()) > 1.05,
        f"without a compiler a step is faster than by stock autograd: {told}",
        f"without a compiler a step on this small network is not faster than by stock autograd for "
        f"both equations: {told}",
    )
    if "Inductor" in runs[second][0].times:
        g = gain(second, "Inductor")
        made.claim(
            g > 1.05,
            f"compiled whole by Inductor, third derivatives included, it is {g:.1f} times as fast",
            f"compiled by Inductor it is not faster either ({g:.2f} times)",
        )
    made.notes.append(
        "steps are value and gradient without the optimiser: lower quartiles (on a CPU of the "
        "processor's time), all ways in turn on the same points; both are trained without a "
        "compiler, by WithGradient and db.compile"
    )
    made.numbers = {
        e.name: [{k: v for k, v in vars(f).items() if k != "values"} for f in found]
        for e, found in runs.items()
    }
    return made


def run(arguments: argparse.Namespace) -> common.Report:
    full = arguments.full
    seeds = range(arguments.seed, arguments.seed + (3 if full else 1))
    width, count = (64, 4000) if full else (32, 500)
    lengths = {inviscid(): 20_000 if full else 3000, viscous(full): 40_000 if full else 5000}
    inductor = any(map(shutil.which, ("c++", "g++", "clang++")))  # Inductor needs a compiler
    runs = {
        equation: [
            solve(equation, width, count, steps, seed, arguments.device, inductor, repeats=200)
            for seed in seeds
        ]
        for equation, steps in lengths.items()
    }
    return report(runs)


if __name__ == "__main__":
    sys.exit(common.main("physics", __doc__, run))
