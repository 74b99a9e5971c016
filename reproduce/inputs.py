"""Figure 2: the network, its gradient, and the classical penalty, over the input."""

from __future__ import annotations

import math

import torch

from doubleback import landscape as L
from doubleback.landscape import drawing

from .experiment import Checked, Experiment

SPAN = (-math.pi, math.pi)


def draw(experiment: Experiment) -> Checked:
    report = Checked(
        "figure-2-inputs",
        "Figure 2: the loss landscape in the input",
        "The network fitted to the sine. Grey lines are the boundaries of its affine regions, "
        "computed exactly. (a) Output. (b) Its derivative, constant on each region. (c) Gradient "
        "of the loss (z − y)², y = sin x₀. (d) The classical penalty R_cdb = (∂ℓ/∂x₀)² itself "
        "(not in the paper). Circles are the two limits at a jump.",
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
    for ax, value in ((axes[2], _loss_gradient), (axes[3], _penalty)):
        _draw(ax, path, z, s, value)
        ax.axhline(0, color=drawing.GREY, lw=0.5)
    titles = ("(a) output $z_L$", "(b) $∂z_L/∂x_0$", "(c) loss gradient $∂ℓ/∂x_0$",
              "(d) penalty $R_{cdb}$")  # fmt: skip
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
        drawing.Table(
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


def _penalty(t, z, s):
    return _loss_gradient(t, z, s).square()


def _draw(ax, path: L.Path, z: L.Piecewise, s: L.Piecewise, value) -> None:
    """A function of x₀, z and s on each piece, and its two limits at each boundary."""
    before = None
    for piece in range(len(path.start)):
        t = torch.linspace(float(path.start[piece]), float(path.end[piece]), 65).double()
        on = torch.full((65,), piece)
        y = value(t, z.on(on, t), s.on(on, t))
        ax.plot(t, y, color=drawing.BLUE, solid_capstyle="butt")
        if before is not None:
            drawing.draw_jump(ax, float(t[0]), before, float(y[0]), drawing.BLUE)
        before = float(y[-1])


def _check(experiment: Experiment, report: Checked, path: L.Path, z, s) -> None:
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
    largest, error = _jumps(net, path, z, s)
    report.claim(
        error <= 1e-6, f"its limits at a boundary are autograd's from both sides; worst {error:.0e}"
    )
    report.claim(largest > 1e-6, f"R_cdb jumps at region boundaries, by up to {largest:.2g}")


def _jumps(net, path: L.Path, z: L.Piecewise, s: L.Piecewise) -> tuple[float, float]:
    """(the largest jump of R_cdb, how far autograd's limits from either side differ from ours)."""
    t, here = path.start[1:], torch.arange(1, len(path.start))
    gap = min(1e-6, float((path.end - path.start).min()) / 5)

    def truth(places):
        leaf = places[:, None].clone().requires_grad_()
        loss = (net(leaf) - torch.sin(leaf.detach())).square()  # y is a label: held
        return torch.autograd.grad(loss.sum(), leaf)[0][:, 0].square()

    sides, error = [], 0.0
    for piece, side in ((here - 1, -1), (here, 1)):
        ours = _penalty(t, z.on(piece, t), s.on(piece, t))
        limit = 2 * truth(t + side * gap) - truth(t + 2 * side * gap)
        error = max(error, float((ours - limit).abs().max()))
        sides.append(ours)
    return float((sides[1] - sides[0]).abs().max()), error
