"""Figure 1: the network, its gradient, and the classical penalty, over the input."""

from __future__ import annotations

import math

import torch

from doubleback import landscape as L
from doubleback.landscape import drawing

from .experiment import Experiment, Report, Table

SPAN = (-math.pi, math.pi)


def draw(experiment: Experiment) -> Report:
    report = Report(
        "figure-1-inputs",
        "The loss landscape in the input",
        "The network fitted to the sine. Grey lines are the boundaries of its affine regions, "
        "computed exactly. (a) Output. (b) Its derivative, constant on each region. (c) Gradient "
        "of the loss (z − y)², y = sin x₀. (d) Derivative of the classical penalty "
        "R_cdb = (∂ℓ/∂x₀)² along x₀. Circles are the two limits at a jump.",
    )
    net = experiment.net
    origin = torch.zeros(1, 1, dtype=torch.float64)
    path = L.follow(net, origin, L.InputLine(torch.ones(1, dtype=torch.float64)), SPAN)
    z, s = L.output(path).value, L.gradient(path).value
    _check(experiment, report, path, z, s)
    places = [b.t for b in path.breakpoints]
    figure, axes = drawing.panels(2, 2)
    grid = torch.linspace(*SPAN, 400, dtype=torch.float64)
    axes[0].plot(grid, torch.sin(grid), color=drawing.ORANGE, ls="--", lw=1.2, label="sin x₀")
    drawing.draw_pieces(axes[0], z, ends=False)
    axes[0].plot([], [], color=drawing.BLUE, label="network")
    axes[0].legend(loc="upper left")
    drawing.draw_pieces(axes[1], s)
    axes[1].plot(grid, torch.cos(grid), color=drawing.ORANGE, ls="--", lw=1.0, label="cos x₀")
    axes[1].legend(loc="lower center")
    for ax, value in ((axes[2], _loss_gradient), (axes[3], _penalty_slope)):
        for start, end in path.pieces_of(0):
            t = torch.linspace(start, end, 33, dtype=torch.float64)
            piece = path.find(torch.zeros(1, dtype=torch.long), t[16:17]).expand(33)
            ax.plot(t, value(t, z.on(piece, t), s.on(piece, t)), color=drawing.BLUE)
        ax.axhline(0, color=drawing.GREY, lw=0.5)
    titles = ("(a) output $z_L$", "(b) $∂z_L/∂x_0$", "(c) loss gradient $∂ℓ/∂x_0$",
              "(d) $∂R_{cdb}/∂x_0$")  # fmt: skip
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title)
        ax.set_xlabel("$x_0$")
        ax.set_xticks(
            [-math.pi, -math.pi / 2, 0, math.pi / 2, math.pi], ["−π", "−π/2", "0", "π/2", "π"]
        )
        drawing.draw_boundaries(ax, places)
    report.figure = figure
    left, right = s.jumps(), z.jumps()
    report.tables.append(
        Table(
            "Every region boundary",
            ("at x₀", "neuron", "jump of ∂z/∂x₀"),
            [
                (b.t, ", ".join(map(str, b.units)), float(h))
                for b, h in zip(path.breakpoints, left.height, strict=True)
            ],
        )
    )
    report.numbers = {
        "boundaries": places,
        "slopes": s.coefficients[:, 0].tolist(),
        "largest discontinuity of the output": right.largest,
        "training loss": experiment.loss,
    }
    return report


def _loss_gradient(t, z, s):
    return 2 * (z - torch.sin(t)) * s


def _penalty_slope(t, z, s):
    """d/dx₀ of 4(z − sin x₀)² s² on a piece, where s is constant."""
    return 8 * s.square() * (z - torch.sin(t)) * (s - torch.cos(t))


def _check(experiment: Experiment, report: Report, path: L.Path, z, s) -> None:
    net = experiment.net
    generator = torch.Generator().manual_seed(experiment.seed)
    share = torch.rand(len(path.start), 3, generator=generator, dtype=torch.float64)
    places = path.start[:, None] + (path.end - path.start)[:, None] * share
    leaf = places.reshape(-1, 1).requires_grad_()
    out = net(leaf)
    (slope,) = torch.autograd.grad(out.sum(), leaf)
    slope = slope.reshape(-1, 3)
    report.claim(
        bool((slope - slope[:, :1]).abs().max() <= 1e-12),
        "∂z/∂x₀ is the same at three random points of every region (autograd)",
    )
    piece = torch.arange(len(path.start))
    difference = max(
        float((s.coefficients[:, :1] - slope).abs().max()),
        float((z.on(piece[:, None], places.detach()) - out.detach().reshape(-1, 3)).abs().max()),
    )
    report.claim(difference <= 1e-10, f"curves equal autograd's; worst difference {difference:.0e}")
    report.claim(z.jumps().largest <= 1e-12, "the output is continuous")
    report.claim(s.jumps().largest > 1e-2, "its derivative jumps at region boundaries")
    t = path.start[1:]
    before, after = s.coefficients[:-1, 0], s.coefficients[1:, 0]
    gap = 4 * (z(t) - torch.sin(t)).square() * (after.square() - before.square())
    report.claim(bool(gap.abs().max() > 1e-6), "R_cdb jumps at region boundaries")
