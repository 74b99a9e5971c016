"""Where derivatives of the target are known, fitting them too needs far fewer samples: Sobolev
training (Czarnecki et al. 2017) of a smooth function of two variables with its gradients, and of a
student with a teacher's outputs and Jacobian, exact or along one random direction a step."""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import doubleback as db
from examples import common

KINDS = ("without", "with")
GRID = 60
STUDENTS = ("outputs", "Jacobian", "1 projection")  # what a student is taught


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


# ------------------------------------------------------------------------------- distillation


def classifier(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), nn.Softplus(), nn.Linear(width, width), nn.Softplus(),
        nn.Linear(width, 10),
    )  # fmt: skip


def teacher_of(data: common.Images, steps: int, seed: int) -> nn.Module:
    """Trained on all labels of the training digits."""
    torch.manual_seed(seed)
    x, y = data.train
    net = classifier(128).to(x.device)
    optimiser = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.1)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimiser.step()
    return net.requires_grad_(False)


def distil(kind: str, teacher: nn.Module, x: Tensor, steps: int, seed: int) -> nn.Module:
    """A student that sees what the teacher says of a few digits, no labels."""
    torch.manual_seed(seed)
    net = classifier(64).to(x.device)
    model = db.Penalised(net, db.JacobianMatch(1 if kind == "1 projection" else None))
    told, pull = torch.func.vjp(teacher, x)  # T*v without writing T down
    optimiser = torch.optim.Adam(net.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    jacobian = torch.func.vmap(torch.func.jacrev(lambda one: teacher(one[None])[0]))(x)
    target = jacobian if kind == "Jacobian" else (lambda v: pull(v)[0])
    for _ in range(steps):
        optimiser.zero_grad()
        if kind == "outputs":
            loss = (net(x) - told).square().sum(1).mean()
        else:
            out, mismatch = model(x, target)  # mean of ‖∂out/∂x − T‖²_F, or an estimate of it
            loss = (out - told).square().sum(1).mean() + 0.3 * mismatch
        loss.backward()
        optimiser.step()
        schedule.step()
    return net


@dataclass(frozen=True)
class Student:
    value: float  # relative root mean square error of the outputs on test digits
    gradient: float  # the same of the Jacobian
    accuracy: float


def compare(net: nn.Module, teacher: nn.Module, data: common.Images) -> Student:
    x, y = data.test

    def jacobian(of: nn.Module) -> Tensor:
        return torch.func.vmap(torch.func.jacrev(lambda one: of(one[None])[0]))(x[:200])

    with torch.no_grad():
        out, told = net(x), teacher(x)
        ours, theirs = jacobian(net), jacobian(teacher)
    return Student(
        ((out - told).square().mean() / told.var()).sqrt().item(),
        ((ours - theirs).norm() / theirs.norm()).item(),
        (out.argmax(1) == y).float().mean().item(),
    )


def distillation(
    steps: int, sizes: tuple[int, ...], seeds: list[int], device: torch.device
) -> tuple[dict[int, dict[str, list[Student]]], float]:
    """What students learned, and the first teacher's accuracy."""
    found: dict[int, dict[str, list[Student]]] = {n: {k: [] for k in STUDENTS} for n in sizes}
    scores = []
    for seed in seeds:
        data = common.load_images("digits", None, seed, device)
        teacher = teacher_of(data, 200, seed)
        scores.append((teacher(data.test[0]).argmax(1) == data.test[1]).float().mean().item())
        for n in sizes:
            for kind in STUDENTS:
                net = distil(kind, teacher, data.train[0][:n], steps, seed)
                found[n][kind].append(compare(net, teacher, data))
    return found, scores[0]


def average(runs: list[Any], value: str) -> float:
    return statistics.fmean(getattr(r, value) for r in runs)


def draw(
    found: dict[int, dict[str, list[Found]]], taught: dict[int, dict[str, list[Student]]], seed: int
):
    figure, axes = common.panels(5, width=14, height=3.0, width_ratios=[1, 1, 1, 1.35, 1.35])
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
    for kind, colour in zip(STUDENTS, (common.ORANGE, common.BLUE, common.GREEN), strict=True):
        for value, style in (("value", "o-"), ("gradient", "s--")):
            means = [100 * average(taught[n][kind], value) for n in taught]
            name = {"value": kind, "gradient": f"{kind}: Jacobian's error"}[value]
            axes[4].loglog(list(taught), means, style, color=colour, ms=4, label=name)
    axes[4].set_title("Students of a teacher, error in %", fontsize=9)
    axes[4].set(xlabel="digits shown")
    axes[4].set_xticks(list(taught), [str(n) for n in taught])
    axes[4].set_yticks([10, 20, 50], ["10", "20", "50"])
    axes[4].minorticks_off()
    axes[4].legend(fontsize=6, loc="upper right", bbox_to_anchor=(1, 0.86))
    axes[3].set_title("Franke's function, error in %", fontsize=9)
    axes[3].set(xlabel="number of samples")
    axes[3].set_xticks(list(found), [str(n) for n in found])
    axes[3].minorticks_off()
    axes[3].legend(fontsize=7)
    return figure


def report(
    found: dict[int, dict[str, list[Found]]], taught: dict[int, dict[str, list[Student]]],
    score: float, seed: int,
) -> common.Report:  # fmt: skip
    rows = []
    for n, kinds in found.items():
        cells = [
            common.spread([100 * getattr(r, value) for r in kinds[kind]], "{:.1f}")
            for value in ("value", "gradient")
            for kind in KINDS
        ]
        rows.append((f"Franke's function, {n}", *cells[:2], "", *cells[2:], ""))
    for n, kinds in taught.items():
        cells = [
            common.spread([100 * getattr(r, value) for r in kinds[kind]], "{:.1f}")
            for value in ("value", "gradient")
            for kind in STUDENTS
        ]
        rows.append((f"teacher of digits, {n}", *cells))
    columns = ("target, samples", "error of values %, without", "with derivatives", "1 projection",
               "error of derivatives %, without", "with derivatives", "1 projection")  # fmt: skip
    made = common.Report(
        "Relative errors on a grid and on test digits, fitted without and with derivatives",
        columns,
        rows,
        draw(found, taught, seed),
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
        if m > n and max(r.value for r in found[n]["with"])
        < min(r.value for r in found[m]["without"])
    ]  # fmt: skip
    n, m = max(worth, key=lambda pair: pair[1] / pair[0], default=(1, 1))
    made.claim(
        m > 3 * n,
        f"{n} samples with gradients (three numbers each) fit better than {m} without, with each "
        f"of {len(found[sizes[0]]['with'])} seeds",
        "no number of samples with gradients fits better than more than three times as many "
        "without",
    )
    for kind in STUDENTS[1:]:
        gains = [
            average(kinds["outputs"], v) / average(kinds[kind], v)
            for kinds in taught.values() for v in ("value", "gradient")
        ]  # fmt: skip
        made.claim(
            min(gains) > 1,
            f"students taught a teacher's Jacobian ({kind}) are nearer to it in outputs and in "
            f"Jacobian for every number of digits ({min(gains):.1f} to {max(gains):.1f} times)",
            f"students taught a teacher's Jacobian ({kind}) are not nearer to it in outputs and in "
            f"Jacobian for every number of digits ({min(gains):.1f} to {max(gains):.1f} times)",
        )
    least = min(taught)
    told = ", ".join(
        f"{kind} {100 * average(taught[least][kind], 'accuracy'):.1f} %" for kind in STUDENTS
    )
    made.notes.append(
        f"the students' accuracy on test digits after {least} without labels: {told}; the "
        f"teacher's {100 * score:.1f} %"
    )
    made.numbers = {
        "teacher": {
            str(n): {k: [vars(r) for r in kinds[k]] for k in STUDENTS}
            for n, kinds in taught.items()
        }
    } | {
        str(n): {k: [{"value": r.value, "gradient": r.gradient} for r in kinds[k]] for k in KINDS}
        for n, kinds in found.items()
    }
    return made


def run(arguments: argparse.Namespace) -> common.Report:
    seeds = [arguments.seed + i for i in range(10 if arguments.full else 2)]
    sizes = (16, 32, 64, 128, 256)
    full, device = arguments.full, arguments.device
    found = experiment(6000 if full else 1500, sizes, seeds, device)
    taught = distillation(1500 if full else 300, (30, 100, 300), seeds, device)
    return report(found, *taught, arguments.seed)


if __name__ == "__main__":
    sys.exit(common.main("sobolev", __doc__, run))
