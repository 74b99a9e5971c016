"""The numbers and the figure of docs/spaces.md.

    PYTHONPATH=src python benchmarks/spaces_figure.py                # measures and draws, minutes
    PYTHONPATH=src python benchmarks/spaces_figure.py --parts        # draws what was measured

grid: one functional of a function u on [0, 1], discretised on 32 … 512 cells; its squared gradient
norm in Euclidean coordinates, in L² and in H¹. critic: real digits against noisy ones, a critic
trained with a one-sided penalty on its gradient's norm in several spaces.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import shlex
import statistics
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import doubleback as db
import measuring
from doubleback.cli.shared import Images
from measuring import hardware, versions

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FIGURE = ROOT / "docs" / "spaces.png"
SIZES = (32, 64, 128, 256, 512)
FINE = 2048  # what the others are compared with


def facts() -> dict:
    return {
        "hardware": hardware("cpu"),
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": "python " + shlex.join(sys.argv),
    }


# ---------------------------------------------------------------------------- the same function


class Functional(nn.Module):
    """F(u) = Σ_c a_c ∫ tanh(∫ k_c(x − t) u(t) dt) dx with Gaussian kernels k_c, by the midpoint
    rule on n cells: the same functional of the same function on every grid."""

    def __init__(self, n: int):
        super().__init__()
        x = (torch.arange(n, dtype=torch.float64) + 0.5) / n
        widths, self.amplitudes = (0.05, 0.1, 0.2), (1.0, -2.0, 3.0)
        kernels = [torch.exp(-((x[:, None] - x) ** 2) / (2 * w**2)) / w for w in widths]
        self.register_buffer("kernels", torch.stack(kernels) / n)

    def forward(self, u: Tensor) -> Tensor:
        inner = torch.tanh(torch.einsum("cij,bj->bci", self.kernels, u)).mean(-1)
        return (inner * inner.new_tensor(self.amplitudes)).sum(1)


def function(n: int) -> Tensor:
    x = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    return torch.exp(-x) * torch.sin(2 * math.pi * x) + x


def grid() -> dict:
    """‖∇F(u)‖² for each space and size."""
    rows = []
    for n in (*SIZES, FINE):
        spaces = {
            "Euclidean": db.spaces.Euclidean(),
            "L²": db.spaces.Grid(1 / n),
            "H¹": db.spaces.Sobolev(1.0, 1 / n, "neumann"),
        }
        for name, space in spaces.items():
            model = db.Penalised(Functional(n), db.OutputGradient(norm=db.SquaredNorm(space)))
            with torch.no_grad():
                _, penalty = model(function(n)[None])
            rows.append({"points": n, "space": name, "penalty": float(penalty)})
    return {**facts(), "results": rows}


# -------------------------------------------------------------------------------------- critics

NOISE, BATCH, STEPS, WEIGHT = 0.5, 128, 600, 10.0
PIXEL = (1.0, 1.0)
CRITICS: dict[str, db.spaces.Space] = {
    "Euclidean": db.spaces.Euclidean(),
    "H¹": db.spaces.Sobolev(1.0, PIXEL, "neumann"),
    "H⁻¹": db.spaces.Sobolev(-1.0, PIXEL, "neumann"),
}


def critic(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.Softplus(), nn.Conv2d(32, 32, 3, padding=1),
        nn.Softplus(), nn.Flatten(), nn.Linear(32 * 64, 1),
    )  # fmt: skip


def train(space: db.spaces.Space, images: Tensor, seed: int) -> nn.Module:
    """max E D(real) − E D(noisy) subject to ‖∇D‖ ≤ 1 in the dual of the space, by a penalty on
    points between the two."""
    net = critic(seed)
    norm = db.Deviation(1.0, one_sided=True, space=space)
    model = db.Penalised(net, db.OutputGradient(norm=norm))
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.9))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        rows = torch.randint(len(images), (BATCH,), generator=generator)
        real = images[rows]
        noisy = real + NOISE * torch.randn(real.shape, generator=generator)
        share = torch.rand(BATCH, 1, 1, 1, generator=generator)
        optimiser.zero_grad()
        _, penalty = model(share * real + (1 - share) * noisy)
        (net(noisy).mean() - net(real).mean() + WEIGHT * penalty).backward()
        optimiser.step()
    return net


def cosines(n: int) -> tuple[Tensor, Tensor]:
    """(orthonormal DCT-II matrix, its frequencies in radians per pixel)."""
    k, j = torch.arange(n)[:, None], torch.arange(n)[None]
    matrix = torch.cos(math.pi * k * (j + 0.5) / n) * math.sqrt(2 / n)
    matrix[0] /= math.sqrt(2)
    return matrix, math.pi * torch.arange(n) / n


def judge(net: nn.Module, space: db.spaces.Space, images: Tensor, seed: int) -> dict:
    """On images not trained on: how well the critic tells noisy from real, how much of the noise
    one step of the best length removes, along its gradient and along the gradient's representer in
    the space, and which frequencies the gradient holds (share of energy per band of |ω|)."""
    generator = torch.Generator().manual_seed(1000 + seed)
    noisy = images + NOISE * torch.randn(images.shape, generator=generator)
    leaf = noisy.clone().requires_grad_()
    scores = net(leaf)
    (g,) = torch.autograd.grad(scores.sum(), leaf)
    with torch.no_grad():
        real = net(images)[:, 0]
        wins = (real[:, None] > scores[None, :, 0]).float().mean().item()
    matrix, omega = cosines(images.shape[-1])
    energy = (matrix @ g[:, 0] @ matrix.T).square().mean(0)
    radius = (omega[:, None] ** 2 + omega[None] ** 2).sqrt()
    bands = torch.linspace(0, math.pi * math.sqrt(2) + 1e-6, 8)
    shares = [
        float(energy[(radius >= a) & (radius < b)].sum() / energy.sum())
        for a, b in itertools.pairwise(bands)
    ]
    return {
        "real scored above noisy": wins,
        "noise removed along the gradient": removed(g, images - noisy),
        "noise removed along the representer": removed(space.riesz(g), images - noisy),
        "gradient energy below |ω| = π/2": float(energy[radius < math.pi / 2].sum() / energy.sum()),
        "mean |ω| of the gradient": float((energy * radius).sum() / energy.sum()),
        "bands": shares,
    }


def removed(step: Tensor, noise: Tensor) -> float:
    """1 − min_t ‖t step − noise‖² / ‖noise‖², one t for all images."""
    return float((step * noise).sum() ** 2 / (step.square().sum() * noise.square().sum()))


def critics(seeds: int) -> dict:
    digits = Images.load("digits", 0, torch.device("cpu"))
    rows = []
    for name, space in CRITICS.items():
        for seed in range(seeds):
            net = train(space, digits.train[0], seed)
            rows.append({"space": name, "seed": seed, **judge(net, space, digits.test[0], seed)})
            print(rows[-1])
    settings = {"noise": NOISE, "batch": BATCH, "steps": STEPS, "weight": WEIGHT}
    return {**facts(), "settings": settings, "results": rows}


# ------------------------------------------------------------------------------------- drawing

COLOURS = {"Euclidean": "#7f7f7f", "L²": "#1f77b4", "H¹": "#d62728", "H⁻¹": "#2ca02c"}


def draw() -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sampled = json.loads((RESULTS / "spaces-grid.json").read_text())["results"]
    trained = json.loads((RESULTS / "spaces-critic.json").read_text())["results"]
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(9.6, 2.8), layout="constrained")
    marks = {"Euclidean": "o", "L²": "s", "H¹": "^", "H⁻¹": "v"}

    def line(axis, name: str, x, y) -> None:
        hollow = {"ms": 7, "mfc": "none"} if name == "L²" else {"ms": 4}
        axis.plot(x, y, marks[name] + "-", color=COLOURS[name], label=name, lw=1.2, **hollow)

    for name in ("Euclidean", "L²", "H¹"):
        values = {row["points"]: row["penalty"] for row in sampled if row["space"] == name}
        line(left, name, SIZES, [values[n] / values[SIZES[0]] for n in SIZES])
        if name != "Euclidean":
            errors = [abs(values[n] / values[FINE] - 1) for n in SIZES]
            line(middle, name, SIZES, errors)
    guide = [1e-4 * (SIZES[0] / n) ** 2 for n in SIZES]
    middle.plot(SIZES, guide, ":", color="black", lw=1, label="∝ h²")
    left.set(xscale="log", yscale="log", xlabel="points of the grid", ylim=(0.04, 1.6))
    left.set_title("penalty, relative to 32 points", fontsize=9)
    left.set_yticks([1, 0.5, 0.25, 0.125, 0.0625], ["1", "1/2", "1/4", "1/8", "1/16"])
    left.set_yticks([], minor=True)
    middle.set(xscale="log", yscale="log", xlabel="points of the grid")
    middle.set_title(f"relative distance to {FINE} points", fontsize=9)
    for axis, place in ((left, "lower left"), (middle, "upper right")):
        axis.set_xticks(SIZES, [str(n) for n in SIZES])
        axis.set_xticks([], minor=True)
        axis.legend(frameon=False, loc=place)
    bands = torch.linspace(0, math.sqrt(2), 8)
    centres = ((bands[1:] + bands[:-1]) / 2).tolist()
    for name in CRITICS:
        runs = [row["bands"] for row in trained if row["space"] == name]
        mean = [100 * statistics.fmean(column) for column in zip(*runs, strict=True)]
        line(right, name, centres, mean)
    right.set(xlabel="frequency |ω| / π (per pixel)", ylim=(0, 60))
    right.set_title("critic's gradient: % of energy per band", fontsize=9)
    right.legend(frameon=False, loc="upper center", ncols=3, columnspacing=1.2, handlelength=1.5)
    figure.savefig(FIGURE, dpi=130)
    print(f"wrote {FIGURE.relative_to(ROOT)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="*", default=["grid", "critic"])
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    if "grid" in options.parts:
        measuring.write(RESULTS / "spaces-grid.json", grid())
    if "critic" in options.parts:
        measuring.write(RESULTS / "spaces-critic.json", critics(options.seeds))
    draw()


if __name__ == "__main__":
    main()
