"""Figure A, ours: the exact linear regions of a network of two inputs, coloured by its gradient."""

from __future__ import annotations

import math

import torch
from torch import nn

from doubleback.landscape import Window, drawing, partition

from .experiment import OURS, Checked, Experiment

SPAN = (-math.pi, math.pi)


def draw(experiment: Experiment) -> Checked:
    report = Checked(
        "figure-A-regions",
        "Figure A: linear regions in two dimensions",
        "A 2–12–12–1 ReLU network fitted to sin x·sin y on [−π, π]²: every linear region in the "
        "window, computed exactly, with ‖∇z‖ as colour. R_node is constant on each.",
        OURS,
    )
    net, loss = _fitted(experiment.seed)
    found = partition(net, Window.of_inputs(SPAN, SPAN))
    table = found.table()
    _check(experiment.seed, report, net, found)
    figure, axes = drawing.panels(1, width=4.6, height=3.8)
    drawing.draw_polytopes(figure, axes[0], found, "$‖∇z‖$")
    axes[0].set_xlabel("$x$")
    axes[0].set_ylabel("$y$")
    axes[0].set_title(f"{len(found.regions)} linear regions")
    report.figure = figure
    report.tables.append(drawing.Table("Regions", ("", "value"), list(table.items())))
    report.numbers = {**table, "training loss": loss,
                      "norms": sorted(r.norm for r in found.regions)}  # fmt: skip
    return report


def _fitted(seed: int) -> tuple[nn.Sequential, float]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(
            nn.Linear(2, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 1)
        ).double()
        x = (2 * torch.rand(1500, 2, dtype=torch.float64) - 1) * math.pi
        y = torch.sin(x).prod(1, keepdim=True)
        optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
        for _ in range(1000):
            optimiser.zero_grad()
            loss = (net(x) - y).square().mean()
            loss.backward()
            optimiser.step()
    return net, float(loss.detach())


def _check(seed: int, report: Checked, net: nn.Module, found) -> None:
    table = found.table()
    gap = abs(table["sum of areas"] - table["area of the window"])
    report.claim(gap <= 1e-9, "the regions' areas add up to the window's")
    worst = 0.0
    generator = torch.Generator().manual_seed(seed)
    for region in found.regions:
        share = torch.rand(3, len(region.corners), generator=generator, dtype=torch.float64)
        leaf = (share / share.sum(1, keepdim=True)) @ region.corners
        leaf.requires_grad_()
        (g,) = torch.autograd.grad(net(leaf).sum(), leaf)
        worst = max(
            worst, float((g - torch.tensor(region.gradient, dtype=torch.float64)).abs().max())
        )
    report.claim(
        worst <= 1e-10,
        f"autograd finds the same gradient at three random points of each; worst {worst:.0e}",
    )
