"""Where gradients of the target are known, fitting them too needs far fewer samples: Sobolev
training (Czarnecki et al. 2017) on a smooth function of two variables."""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import doubleback as db
from examples import common

KINDS = ("without", "with")
GRID = 60


def target(x: Tensor) -> tuple[Tensor, Tensor]:
    """Franke's function, four bumps on [−1, 1]²: (B, 1), and its gradient (B, 2)."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        a, b = 4.5 * (x[:, 0] + 1), 4.5 * (x[:, 1] + 1)
        value = (
            0.75 * torch.exp(-((a - 2).square() + (b - 2).square()) / 4)
            + 0.75 * torch.exp(-(a + 1).square() / 49 - (b + 1) / 10)
            + 0.5 * torch.exp(-((a - 7).square() + (b - 3).square()) / 4)
            - 0.2 * torch.exp(-(a - 4).square() - (b - 7).square())
        )
        (gradient,) = torch.autograd.grad(value.sum(), x)
    return value.detach()[:, None], gradient


def grid(device: torch.device) -> Tensor:
    line = torch.linspace(-1, 1, GRID, device=device)
    return torch.cartesian_prod(line, line).flip(1)


def points_of(count: int, seed: int) -> Tensor:
    """Points that fill the square evenly, in an order that does so at every length."""
    engine = torch.quasirandom.SobolEngine(2, scramble=True, seed=seed)
    return 2 * engine.draw(count) - 1


def network() -> nn.Module:
    width = 64
    return nn.Sequential(
        nn.Linear(2, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
    )


@dataclass(frozen=True)
class Found:
    value: float  # root mean square error over a grid, relative to that of the best constant
    gradient: float  # the same of the gradient, relative to its own size
    field: Tensor  # (GRID, GRID)


def train(with_gradient: bool, x: Tensor, steps: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    net = network().to(x.device)
    model = db.Penalised(net, db.GradientMatch())
    value, gradient = target(x)
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        optimiser.zero_grad()
        if with_gradient:
            out, mismatch = model(x, gradient)  # mean of ‖∇f − target‖²
            loss = (out - value).square().mean() + 0.1 * mismatch
        else:
            loss = (net(x) - value).square().mean()
        loss.backward()
        optimiser.step()
        schedule.step()
    return net


def measure(net: nn.Module, device: torch.device) -> Found:
    x = grid(device).requires_grad_()
    out = net(x)
    (slope,) = torch.autograd.grad(out.sum(), x)
    value, gradient = target(x)
    error = (out.detach() - value).square().mean() / value.var()
    mismatch = (slope - gradient).square().mean() / gradient.square().mean()
    field = out.detach().reshape(GRID, GRID).cpu()
    return Found(error.sqrt().item(), mismatch.sqrt().item(), field)


def experiment(
    steps: int, sizes: tuple[int, ...], seeds: list[int], device: torch.device
) -> dict[int, dict[str, list[Found]]]:
    found: dict[int, dict[str, list[Found]]] = {n: {k: [] for k in KINDS} for n in sizes}
    for seed in seeds:
        points = points_of(max(sizes), seed)
        for n in sizes:
            for kind in KINDS:
                net = train(kind == "with", points[:n].to(device), steps, seed)
                found[n][kind].append(measure(net, device))
    return found


def average(runs: list[Found], value: str) -> float:
    return statistics.fmean(getattr(r, value) for r in runs)


def draw(found: dict[int, dict[str, list[Found]]], seed: int):
    figure, axes = common.panels(4, width=12, height=3.1, width_ratios=[1, 1, 1, 1.35])
    shown = sorted(found)[min(1, len(found) - 1)]
    fields = {
        "target": target(grid(torch.device("cpu")))[0].reshape(GRID, GRID),
        f"values of {shown} samples": found[shown]["without"][0].field,
        f"values and gradients of {shown}": found[shown]["with"][0].field,
    }
    points = points_of(shown, seed)
    for axis, (name, field) in zip(axes, fields.items(), strict=False):
        axis.imshow(field, origin="lower", extent=(-1, 1, -1, 1), vmin=0, vmax=1.2, cmap="viridis")
        if name != "target":
            axis.scatter(*points.T, s=10, color="white", edgecolor=common.INK, lw=0.5)
        axis.set(xticks=[], yticks=[])
        axis.set_title(name, fontsize=9)
    for kind, colour in zip(KINDS, (common.ORANGE, common.BLUE), strict=True):
        for value, style in (("value", "o-"), ("gradient", "s--")):
            means = [100 * average(found[n][kind], value) for n in found]
            axes[3].loglog(list(found), means, style, color=colour, ms=4,
                           label=f"{value}, {kind} gradients")  # fmt: skip
    axes[3].set(title="Relative error, %", xlabel="number of samples")
    axes[3].set_xticks(list(found), [str(n) for n in found])
    axes[3].minorticks_off()
    axes[3].legend(fontsize=7)
    return figure


def report(found: dict[int, dict[str, list[Found]]], seed: int) -> common.Report:
    rows = []
    for n, kinds in found.items():
        cells = [
            common.spread([100 * getattr(r, value) for r in kinds[kind]], "{:.1f}")
            for value in ("value", "gradient")
            for kind in KINDS
        ]
        rows.append((str(n), *cells))
    columns = ("samples", "error of values %, without", "with gradients",
               "error of gradients %, without", "with gradients")  # fmt: skip
    made = common.Report(
        "Franke's function: relative errors on a grid, fitted without and with gradients",
        columns,
        rows,
        draw(found, seed),
    )
    better = [
        n for n, kinds in found.items()
        if all(average(kinds["with"], v) < average(kinds["without"], v)
               for v in ("value", "gradient"))
    ]  # fmt: skip
    told = f"for {len(better)} of {len(found)} numbers of samples"
    made.claim(
        len(better) == len(found),
        f"gradients in the loss lower the errors of values and of gradients {told}",
        f"gradients in the loss lower both errors only {told}",
    )
    sizes = sorted(found)
    worth = [
        (n, m) for n in sizes for m in sizes
        if m > n and average(found[n]["with"], "value") < average(found[m]["without"], "value")
    ]  # fmt: skip
    n, m = max(worth, key=lambda pair: pair[1] / pair[0], default=(1, 1))
    made.claim(
        m > 3 * n,
        f"{n} samples with gradients (three numbers each) fit better than {m} without",
        "no number of samples with gradients fits better than more than three times as many "
        "without",
    )
    made.numbers = {
        str(n): {k: [{"value": r.value, "gradient": r.gradient} for r in kinds[k]] for k in KINDS}
        for n, kinds in found.items()
    }
    return made


def run(arguments: argparse.Namespace) -> common.Report:
    seeds = [arguments.seed + i for i in range(10 if arguments.full else 2)]
    sizes = (16, 32, 64, 128, 256)
    found = experiment(6000 if arguments.full else 1500, sizes, seeds, arguments.device)
    return report(found, arguments.seed)


if __name__ == "__main__":
    sys.exit(common.main("sobolev", __doc__, run))
