"""The pictures of docs/penalties.md: the same small network trained without a penalty and with it.

    python tools/draw_penalties.py      # writes docs/pictures/*.png

Everything is trained here, from fixed seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from torch import Tensor, nn

import doubleback as db

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"
BLUE, ORANGE, INK = "#2563a8", "#e07b21", "#22272e"


def network(inputs: int, outputs: int, width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def train(net: nn.Module, loss: Callable[[], Tensor], steps: int = 400) -> None:
    optimiser = torch.optim.Adam(net.parameters(), lr=5e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()


def moons(count: int = 120, noise: float = 0.22) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    angle, side = math.pi * torch.rand(count), torch.arange(count) % 2
    x = torch.stack([angle.cos(), angle.sin()], 1) * (1.0 - 2.0 * side)[:, None]
    return x + side[:, None] * torch.tensor([1.0, 0.5]) + noise * torch.randn(count, 2), side


def plane(low: float = -2.0, high: float = 3.0, n: int = 90) -> tuple[Tensor, Tensor, Tensor]:
    a, b = torch.meshgrid(torch.linspace(low, high, n), torch.linspace(-1.6, 2.1, n), indexing="xy")
    return torch.stack([a.flatten(), b.flatten()], 1), a, b


def panels(titles: tuple[str, ...], equal: bool = True) -> tuple[Any, Any]:
    figure, axes = plt.subplots(1, len(titles), figsize=(7.6, 2.7), layout="constrained")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, fontsize=9, loc="left", color=INK)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
        if equal:
            axis.set_aspect("equal")
    return figure, axes


def save(figure: Any, name: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    figure.savefig(FOLDER / f"{name}.png", dpi=100, facecolor="white", metadata={"Software": None})
    plt.close(figure)


def loss_gradient() -> None:
    """The classifier's confidence."""
    x, y = moons()
    figure, axes = panels(("cross-entropy", "+ 0.1 · ‖∇ₓℓ‖²"))
    points, a, b = plane()
    for axis, weight in zip(axes, (0.0, 0.1), strict=True):
        net = network(2, 2)
        model = db.Penalised(net, db.LossGradient("cross_entropy"))

        def loss(model: Any = model, weight: float = weight) -> Tensor:
            out, penalty = model(x, y)
            return F.cross_entropy(out, y) + weight * penalty

        train(net, loss)
        with torch.no_grad():
            sure = net(points).softmax(1)[:, 1].reshape(a.shape)
        axis.contourf(a, b, sure, levels=12, cmap="RdBu_r", vmin=-0.2, vmax=1.2)
        axis.scatter(
            *x.T, c=[(BLUE, ORANGE)[i] for i in y.tolist()], s=7, edgecolors="white", lw=0.4
        )
    save(figure, "loss-gradient")


def jacobian() -> None:
    """How far the logits move when the input does."""
    x, y = moons()
    figure, axes = panels(("‖∂out/∂x‖_F, cross-entropy", "… + 0.01 · ‖∂out/∂x‖²_F"))
    points, a, b = plane()
    found = []
    for weight in (0.0, 0.01):
        net = network(2, 2)
        model = db.Penalised(net, db.Jacobian())

        def loss(model: Any = model, weight: float = weight) -> Tensor:
            out, penalty = model(x)
            return F.cross_entropy(out, y) + weight * penalty

        train(net, loss)
        with torch.no_grad():
            each = db.Penalised(net, db.Jacobian(reduction="none"))(points)[1]
        found.append(each.sqrt().reshape(a.shape))
    top = float(max(f.max() for f in found))
    for axis, norm in zip(axes, found, strict=True):
        drawn = axis.contourf(a, b, norm, levels=torch.linspace(0, top, 13), cmap="magma_r")
        axis.scatter(*x.T, c="white", s=4, alpha=0.7)
    figure.colorbar(drawn, ax=axes, shrink=0.9).ax.tick_params(labelsize=7)
    save(figure, "jacobian")


def spectral_norm() -> None:
    """Where circles of inputs go."""
    torch.manual_seed(0)
    x = 2 * torch.rand(256, 2) - 1
    goal = torch.stack([x[:, 0] + 0.4 * (3 * x[:, 1]).sin(), 0.4 * x[:, 1]], 1)
    figure, axes = panels(("circles of inputs, mapped", "… with σ₁ penalised"))
    angle = torch.linspace(0, 2 * math.pi, 60)
    circle = 0.11 * torch.stack([angle.cos(), angle.sin()], 1)
    for axis, weight in zip(axes, (0.0, 0.05), strict=True):
        net = network(2, 2)
        model = db.Penalised(net, db.SpectralNorm(iterations=3))

        def loss(model: Any = model, weight: float = weight) -> Tensor:
            out, penalty = model(x)
            return F.mse_loss(out, goal) + weight * penalty

        train(net, loss)
        for i in range(6):
            for j in range(6):
                centre = torch.tensor([i, j]) / 2.5 - 1
                with torch.no_grad():
                    axis.plot(*net(centre + circle).T, lw=1, color=BLUE)
        axis.set(xlim=(-1.6, 1.6), ylim=(-0.6, 0.6))
    save(figure, "spectral-norm")


def output_gradient() -> None:
    """A critic between two clouds."""
    torch.manual_seed(0)
    real, fake = torch.randn(128, 2) * 0.3 + 1.2, torch.randn(128, 2) * 0.3 - 0.2
    figure, axes = panels(("critic", "+ 10 · (‖∇ₓ out‖ − 1)²"))
    points, a, b = plane()
    for axis, weight in zip(axes, (0.0, 10.0), strict=True):
        net = network(2, 1)
        model = db.Penalised(net, db.OutputGradient(norm=db.Deviation(1.0)))

        def loss(net: nn.Module = net, model: Any = model, weight: float = weight) -> Tensor:
            mix = torch.rand(128, 1)
            _, penalty = model(mix * real + (1 - mix) * fake)
            return net(fake).mean() - net(real).mean() + weight * penalty

        train(net, loss, 150)
        with torch.no_grad():
            score = net(points).reshape(a.shape)
        drawn = axis.contourf(a, b, score, levels=14, cmap="viridis")
        axis.scatter(*real.T, c=ORANGE, s=4)
        axis.scatter(*fake.T, c="white", s=4)
        figure.colorbar(drawn, ax=axis, shrink=0.85).ax.tick_params(labelsize=7)
    save(figure, "output-gradient")


def gradient_match() -> None:
    """A function from few values, and from few values with slopes."""
    x = torch.linspace(-2, 2, 7)[:, None]
    truth = lambda t: (2.5 * t).sin() * torch.exp(-0.3 * t * t)  # noqa: E731
    at = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(truth(at).sum(), at)
    t = torch.linspace(-2.3, 2.3, 200)[:, None]
    figure, axes = panels(("seven values", "seven values and slopes"), equal=False)
    for axis, weight in zip(axes, (0.0, 1.0), strict=True):
        net = network(1, 1)
        model = db.Penalised(net, db.GradientMatch())

        def loss(model: Any = model, weight: float = weight) -> Tensor:
            out, penalty = model(x, slope)
            return F.mse_loss(out, truth(x)) + weight * penalty

        train(net, loss, 800)
        axis.plot(t, truth(t), color="#9aa3ad", lw=3, label="truth")
        axis.plot(t, net(t).detach(), color=BLUE, lw=1.4, label="network")
        axis.scatter(x, truth(x), color=ORANGE, zorder=3, s=16)
        axis.set_ylim(-1.4, 1.4)
    axes[0].legend(fontsize=7, frameon=False)
    save(figure, "gradient-match")


def bilinear_form() -> None:
    """A vector field and its divergence."""
    torch.manual_seed(0)
    x = 3 * torch.rand(256, 2) - 1.5
    goal = torch.stack([-x[:, 1] + 0.6 * x[:, 0], x[:, 0] + 0.6 * x[:, 1]], 1)
    figure, axes = panels(("a field that grows", "… with (div)² penalised"))
    a, b = torch.meshgrid(
        torch.linspace(-1.4, 1.4, 13), torch.linspace(-1.4, 1.4, 13), indexing="xy"
    )
    points = torch.stack([a.flatten(), b.flatten()], 1)
    for axis, weight in zip(axes, (0.0, 10.0), strict=True):
        net = network(2, 2)
        model = db.Penalised(net, db.BilinearForm(reduction="none"))

        def loss(model: Any = model, weight: float = weight) -> Tensor:
            signs = torch.randint(2, (2, *x.shape)) * 2.0 - 1
            (out, first), (_, second) = (model(x, s, s) for s in signs)
            # two independent estimates: their product has the mean (div)²
            return F.mse_loss(out, goal) + weight * (first * second).mean()

        train(net, loss)
        with torch.no_grad():
            along = net(points)
        axis.quiver(*points.T, *along.T, color=BLUE, width=0.005)
    save(figure, "bilinear-form")


def log_det() -> None:
    """A grid through a residual block y = x + g(x), and how areas change."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            slope = 1.0  # layer by layer below one: σ of each weight at most 0.95
            for layer in self.inner:
                if isinstance(layer, nn.Linear):
                    weight = layer.weight / (torch.linalg.matrix_norm(layer.weight, 2) / 0.95)
                    x = F.linear(x, weight, layer.bias)
                else:
                    x = layer(x)
            return slope * x

    torch.manual_seed(0)
    x = 2.4 * torch.rand(512, 2) - 1.2
    goal = torch.stack([x[:, 0] * (1 + 0.5 * x[:, 1]), x[:, 1] * (1 - 0.5 * x[:, 0])], 1) * 1.25
    figure, axes = panels(("log det(I + J) of x + g(x)", "… its square penalised"))
    line = torch.linspace(-1.2, 1.2, 25)
    a, b = torch.meshgrid(line, line, indexing="ij")
    points = torch.stack([a.flatten(), b.flatten()], 1)
    exact = db.LogDet(None, terms=60, roulette=0, reduction="none")
    for axis, weight in zip(axes, (0.0, 1.0), strict=True):
        net = Block()
        each = db.Penalised(net, db.LogDet(1, terms=6, roulette=0.5, reduction="none"))

        def loss(each: Any = each, weight: float = weight) -> Tensor:
            out, first = each(x)
            # two independent estimates: their product has the mean (log det)²
            square = (first * each(x)[1]).mean() if weight else 0.0
            return F.mse_loss(x + out, goal) + weight * square

        train(net, loss, 150)
        with torch.no_grad():
            out, volume = db.Penalised(net, exact)(points)
        u, v = (points + out).T.reshape(2, *a.shape)
        drawn = axis.pcolormesh(
            u, v, volume.reshape(a.shape), cmap="RdBu_r", vmin=-1, vmax=1, shading="gouraud"
        )
        axis.plot(u, v, color=INK, lw=0.5)
        axis.plot(u.T, v.T, color=INK, lw=0.5)
        axis.set(xlim=(-2.4, 2.4), ylim=(-2.4, 2.4))
    figure.colorbar(drawn, ax=axes, shrink=0.9).ax.tick_params(labelsize=7)
    save(figure, "log-det")


def main() -> None:
    for draw in (loss_gradient, jacobian, spectral_norm, output_gradient, gradient_match,
                 bilinear_form, log_det):  # fmt: skip
        draw()


if __name__ == "__main__":
    main()
