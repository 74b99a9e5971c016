"""Penalties on the input gradient and the Jacobian make a classifier robust: LeNet under FGSM and
PGD, against plain training, weight decay and adversarial training."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import doubleback as db
from examples import common

# ε of the attacks: pixels lie in [0, 1]; images of 8×8 have fewer pixels to share an ℓ₂ step
EPSILONS = {8: {"linf": (0.05, 0.1, 0.2), "l2": (0.3, 0.6, 1.0)},
            28: {"linf": (0.05, 0.1, 0.2), "l2": (0.5, 1.0, 2.0)}}  # fmt: skip
BATCH = 100
WEIGHTS = (0.01, 0.03, 0.1, 0.3, 1.0)  # of a penalty, to choose from


@dataclass(frozen=True)
class Method:
    name: str
    penalty: Any = None  # one of doubleback's
    weight: float | None = 0.0  # None: chosen on images held out from training
    decay: float = 0.0
    attack: float = 0.0  # ε of adversarial training


def methods() -> tuple[Method, ...]:
    return (
        Method("plain"),
        Method("weight decay", decay=0.5),
        Method("double backpropagation", db.LossGradient("cross_entropy"), None),
        Method("Jacobian, exact", db.Jacobian(), None),
        Method("Jacobian, 1 projection", db.Jacobian(projections=1), None),
        Method("spectral norm", db.SpectralNorm(iterations=1), None),
        Method("adversarial training", attack=0.1),
    )


def lenet(side: int) -> nn.Module:
    """LeNet's two convolutions and its dense layers with tanh; small images are pooled once."""
    pool = 2 if side >= 20 else 1
    left = (side // pool // 2) ** 2
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(pool),
        nn.Conv2d(6, 16, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(16 * left, 84), nn.Tanh(), nn.Linear(84, 10),
    )  # fmt: skip


def attack(net: nn.Module, x: Tensor, y: Tensor, size: float, norm: str, steps: int) -> Tensor:
    """Projected gradient ascent of the loss in the ball of radius `size`; one step is FGSM."""
    rate = size if steps == 1 else 2.5 * size / steps
    moved = x.clone()
    for _ in range(steps):
        moved.requires_grad_()
        (g,) = torch.autograd.grad(F.cross_entropy(net(moved), y, reduction="sum"), moved)
        with torch.no_grad():
            if norm == "linf":
                delta = (moved + rate * g.sign() - x).clamp(-size, size)
            else:
                length = g.flatten(1).norm(dim=1).clamp_min(1e-12)[:, None, None, None]
                delta = moved + rate * g / length - x
                length = delta.flatten(1).norm(dim=1).clamp_min(1e-12)[:, None, None, None]
                delta = delta * (size / length).clamp(max=1)
            moved = (x + delta).clamp(0, 1)
    return moved.detach()


def train(method: Method, data: common.Images, epochs: int, seed: int) -> nn.Module:
    images, labels = data.train
    torch.manual_seed(seed)
    net = lenet(data.side).to(images.device)
    model = None if method.penalty is None else db.Penalised(net, method.penalty)
    optimiser = torch.optim.AdamW(net.parameters(), weight_decay=method.decay)
    steps = epochs * (len(labels) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, steps)
    shuffle = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for rows in common.batches(len(labels), BATCH, shuffle):
            x, y = images[rows], labels[rows]
            if method.attack:
                x = attack(net, x, y, method.attack, "linf", 5)
            optimiser.zero_grad()
            if model is None:
                F.cross_entropy(net(x), y).backward()
            else:
                shared = isinstance(method.penalty, db.LossGradient)
                loss = None if shared else "cross_entropy"
                model.accumulate(x, y, loss=loss, weight=method.weight or 0.0)
            optimiser.step()
            schedule.step()
    return net


@dataclass(frozen=True)
class Found:
    clean: float
    fgsm: tuple[float, ...]  # accuracy for each ε of ℓ∞
    pgd: tuple[float, ...]
    pgd_l2: tuple[float, ...]
    jacobian: float  # mean ‖J‖_F on test images
    radius: float  # median ℓ₂ distance to another class, were the network linear
    certified: float  # median ℓ₂ radius within which no other class can win


def measure(net: nn.Module, data: common.Images, count: int, steps: int) -> Found:
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    x, y = data.test
    few, truth = x[:count], y[:count]

    def accuracy(images: Tensor, labels: Tensor) -> float:
        return (net(images).argmax(1) == labels).float().mean().item()

    def under(norm: str, steps: int) -> tuple[float, ...]:
        sizes = EPSILONS[data.side][norm]
        return tuple(accuracy(attack(net, few, truth, e, norm, steps), truth) for e in sizes)

    jacobian = torch.func.vmap(torch.func.jacrev(lambda one: net(one[None])[0]))(few).flatten(2)
    return Found(
        clean=accuracy(x, y),
        fgsm=under("linf", 1),
        pgd=under("linf", steps),
        pgd_l2=under("l2", steps),
        jacobian=jacobian.flatten(1).norm(dim=1).mean().item(),
        radius=linear_radius(net(few), truth, jacobian).median().item(),
        certified=certified_radius(net, few, truth).median().item(),
    )


def linear_radius(out: Tensor, labels: Tensor, jacobian: Tensor) -> Tensor:
    """How far x may move in ℓ₂ before another class wins, were the network linear from here on:
    min over k of (out_y − out_k) / ‖J_y − J_k‖, 0 where the class is wrong already."""
    rows = torch.arange(len(out), device=out.device)
    margin = out[rows, labels, None] - out
    slope = (jacobian[rows, labels, None] - jacobian).norm(dim=2)
    radius = torch.where(slope > 0, margin / slope.clamp_min(1e-12), torch.inf)
    radius[rows, labels] = torch.inf
    return radius.amin(1).clamp_min(0)


def operator_norm(layer: nn.Module, shape: torch.Size) -> tuple[float, torch.Size]:
    """(largest singular value of a layer's linear part on inputs of such a shape, its output's
    shape), from the layer's matrix. tanh and reshaping do not increase distances: 1."""
    if not isinstance(layer, (nn.Linear, nn.Conv2d, nn.AvgPool2d)):
        with torch.no_grad():
            return 1.0, layer(torch.zeros(1, *shape)).shape[1:]
    size = math.prod(shape)
    with torch.no_grad():
        units = torch.eye(size + 1)[:, :size].reshape(size + 1, *shape)  # the last one is zero
        images = layer.cpu().double()(units.double())
        matrix = (images[:-1] - images[-1]).flatten(1)
        layer.float()
    gram = matrix @ matrix.T if size <= matrix.shape[1] else matrix.T @ matrix
    return math.sqrt(torch.linalg.eigvalsh(gram)[-1].item()), images.shape[1:]


def certified_radius(net: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """How far x may move in ℓ₂ before another class can win, whatever the network does on the way:
    min over k of (out_y − out_k) / (‖W_y − W_k‖ Π σ), W the last layer's weight and σ the operator
    norms of the layers before it; 0 where the class is wrong already."""
    layers, device = list(net), x.device  # type: ignore[call-overload]
    with torch.no_grad():
        out = net(x).cpu()
    slope, shape = 1.0, x.shape[1:]
    net.cpu()
    for layer in layers[:-1]:
        norm, shape = operator_norm(layer, shape)
        slope *= norm
    weight = layers[-1].weight.detach()
    net.to(device)
    rows, labels = torch.arange(len(out)), labels.cpu()
    steep = slope * (weight.cpu()[labels, None] - weight.cpu()).norm(dim=2)
    radius = torch.where(steep > 0, (out[rows, labels, None] - out) / steep, torch.inf)
    return radius.amin(1).clamp_min(0)


# -------------------------------------------------------------------- time to the same robustness


def race(
    data: common.Images, epochs: int, seed: int, weight: float, count: int = 500
) -> dict[str, list[tuple[float, float]]]:
    """(seconds of training so far, accuracy under PGD-10) after each epoch, for the Jacobian
    penalty by the library, by stock autograd with a loop over the classes, and from one random
    projection by the library and by autograd as Hoffman et al. do it. All train in turn, batch by
    batch, so that a busy machine is as busy for each."""
    images, labels = data.train
    x, y = data.test[0][:count], data.test[1][:count]
    size = EPSILONS[data.side]["linf"][1]
    steps = epochs * (len(labels) // BATCH)
    ways = {name: _runner(make, data.side, images.device, weight, steps, seed)
            for name, make in PENALTIES.items()}  # fmt: skip
    spent = dict.fromkeys(ways, 0.0)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    shuffle = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for rows in common.batches(len(labels), BATCH, shuffle):
            for name, (_, step) in ways.items():
                start = time.perf_counter()
                step(images[rows], labels[rows])
                if images.is_cuda:
                    torch.cuda.synchronize()
                spent[name] += time.perf_counter() - start
        for name, (net, _) in ways.items():
            moved = attack(net, x, y, size, "linf", 10)
            right = (net(moved).argmax(1) == y).float().mean().item()
            found[name].append((spent[name], right))
    return found


def by_library(projections: int | None, net: nn.Module, weight: float) -> Callable:
    model = db.Penalised(net, db.Jacobian(projections=projections))
    return lambda x, y: model.accumulate(x, y, loss="cross_entropy", weight=weight)


def by_autograd(projections: int | None, net: nn.Module, weight: float) -> Callable:
    """The same penalty with `create_graph=True`: a backward pass for each class, or for each of a
    few random directions on the sphere (Hoffman et al. 2019)."""

    def step(x: Tensor, y: Tensor) -> None:
        x = x.clone().requires_grad_()
        out = net(x)
        classes = out.shape[1]
        if projections is None:
            seeds, scale = torch.eye(classes, device=x.device)[:, None].expand(-1, *out.shape), 1.0
        else:
            seeds = F.normalize(torch.randn(projections, *out.shape, device=x.device), dim=2)
            scale = classes / projections
        total = torch.zeros((), device=x.device)
        for v in seeds:
            (g,) = torch.autograd.grad(out, x, v, create_graph=True)
            total = total + scale * g.square().sum() / len(x)
        (F.cross_entropy(out, y) + weight * total).backward()

    return step


PENALTIES: dict[str, Callable[[nn.Module, float], Callable]] = {
    "doubleback, exact": lambda net, weight: by_library(None, net, weight),
    "stock autograd, exact": lambda net, weight: by_autograd(None, net, weight),
    "doubleback, 1 projection": lambda net, weight: by_library(1, net, weight),
    "Hoffman et al., 1 projection": lambda net, weight: by_autograd(1, net, weight),
}


def _runner(
    make: Callable, side: int, device: torch.device, weight: float, steps: int, seed: int
) -> tuple[nn.Module, Callable[[Tensor, Tensor], None]]:
    torch.manual_seed(seed)
    net = lenet(side).to(device)
    accumulate = make(net, weight)
    optimiser = torch.optim.AdamW(net.parameters(), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, steps)

    def step(x: Tensor, y: Tensor) -> None:
        optimiser.zero_grad()
        accumulate(x, y)
        optimiser.step()
        schedule.step()

    return net, step


def first_at(curve: list[tuple[float, float]], level: float) -> float | None:
    """The seconds of training after which an epoch's end first showed this accuracy."""
    return next((seconds for seconds, right in curve if right >= level), None)


# --------------------------------------------------------------------------------- the experiment


def choose(data: common.Images, epochs: int, seed: int, names: tuple[str, ...]) -> dict[str, float]:
    """The weight of each penalty by a fifth of the training images, held out from a training of its
    own: that with the highest accuracy under PGD-10 among those that lose at most a point of clean
    accuracy to plain training, or else the smallest. One projection estimates the exact Jacobian
    penalty without bias, which takes its weight."""
    (images, labels), cut = data.train, 4 * len(data.train[1]) // 5
    images, truth = images[cut:], labels[cut:]
    own = common.Images((data.train[0][:cut], labels[:cut]), (images, truth), data.name)
    size = EPSILONS[data.side]["linf"][1]

    def scores(method: Method) -> tuple[float, float]:
        net = train(method, own, epochs, seed).requires_grad_(False)
        moved = attack(net, images, truth, size, "linf", 10)
        clean, under = ((net(x).argmax(1) == truth).float().mean().item() for x in (images, moved))
        return clean, under

    exact, projected = "Jacobian, exact", "Jacobian, 1 projection"
    plain, chosen = scores(Method("plain"))[0], {}
    for method in methods():
        if method.weight is None and method.name in names and method.name != exact:
            tried = {w: scores(replace(method, weight=w)) for w in WEIGHTS}
            fit = [w for w in WEIGHTS if tried[w][0] >= plain - 0.01] or [WEIGHTS[0]]
            chosen[method.name] = max(fit, key=lambda w: tried[w][1])
    if exact in names:
        chosen[exact] = chosen[projected]
    return chosen


def experiment(
    data: common.Images, epochs: int, seeds: list[int], count: int, steps: int,
    weights: dict[str, float], names: tuple[str, ...] | None = None, kept: Kept | None = None,
) -> dict[str, list[Found]]:  # fmt: skip
    """kept: what an interrupted run has found already, which gains the rest."""
    kept = Kept(None) if kept is None else kept
    found: dict[str, list[Found]] = {}
    for seed in seeds:
        for method in methods():
            if names is None or method.name in names:
                method = replace(method, weight=weights.get(method.name, 0.0))
                told = kept(
                    f"{method.name}, seed {seed}",
                    lambda method=method, seed=seed: vars(
                        measure(train(method, data, epochs, seed), data, count, steps)
                    ),
                )
                found.setdefault(method.name, []).append(Found(**told))
    return found


class Kept:
    """Results by name in a JSON file, so that a long run can be interrupted and go on; None: not
    kept."""

    def __init__(self, path: str | None, settings: Any = None) -> None:
        self.path = None if path is None else Path(path)
        self.held: dict[str, Any] = {}
        if self.path is None:
            return
        if self.path.is_file():
            try:
                self.held = json.loads(self.path.read_text())
            except (OSError, ValueError) as error:
                raise common.UsageError(f"--keep {path}: cannot be read ({error})") from error
        before = self.held.setdefault("settings", settings)
        if before != settings:
            raise common.UsageError(
                f"--keep {path}: belongs to a run with other settings, {before}"
            )

    def __call__(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self.held:
            self.held[name] = make()
            if self.path is not None:
                self.path.write_text(json.dumps(self.held, indent=1, ensure_ascii=False))
                print(f"{name}: done", file=sys.stderr)
        return self.held[name]


def average(runs: list[Found], value: str, place: int | None = None) -> float:
    values = (getattr(r, value) for r in runs)
    return statistics.fmean(v if place is None else v[place] for v in values)


COLOURS = (
    common.INK, common.GREY, common.BLUE, common.GREEN, "#7fc29b", common.PURPLE, common.ORANGE,
)  # fmt: skip


def draw(found: dict[str, list[Found]], side: int):
    figure, (left, middle, right) = common.panels(3, width=12, height=3.7)
    for (name, runs), colour in zip(found.items(), COLOURS, strict=True):
        for axis, norm, value in ((left, "linf", "pgd"), (middle, "l2", "pgd_l2")):
            sizes = (0.0, *EPSILONS[side][norm])
            curve = [average(runs, "clean")]
            curve += [average(runs, value, i) for i in range(len(sizes) - 1)]
            ls = "-" if name not in ("plain", "weight decay") else "--"
            axis.plot(sizes, [100 * a for a in curve], color=colour, lw=2, ls=ls, label=name)
        right.scatter(
            average(runs, "jacobian"), 100 * average(runs, "pgd", 1), color=colour, s=60, zorder=3
        )
    left.set(title="PGD in ℓ∞", xlabel="ε", ylabel="accuracy, %", ylim=(0, 101))
    middle.set(title="PGD in ℓ₂", xlabel="ε", ylim=(0, 101))
    size = EPSILONS[side]["linf"][1]
    right.set(title=f"Slope and accuracy under PGD, ε = {size}", xscale="log", ylim=(0, 101))
    right.set(xlabel="mean ‖∂out/∂x‖_F on test images")
    lowest, highest = right.get_xlim()
    ticks = [t for t in (0.5, 1, 2, 5, 10, 20, 50, 100) if lowest <= t <= highest]
    right.minorticks_off()
    right.set_xticks(ticks, [f"{t:g}" for t in ticks])
    left.set_xticks((0.0, *EPSILONS[side]["linf"]))
    middle.set_xticks((0.0, *EPSILONS[side]["l2"]))
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside lower center", ncols=7, fontsize=8
    )
    return figure


def report(
    found: dict[str, list[Found]], data: common.Images, steps: int, weights: dict[str, float],
    raced: dict[str, Any],
) -> common.Report:  # fmt: skip
    sizes = EPSILONS[data.side]

    def percent(runs: list[Found], value: str, place: int | None = None) -> str:
        values = (getattr(r, value) for r in runs)
        return common.spread([100 * (v if place is None else v[place]) for v in values], "{:.1f}")

    rows = [
        (
            name,
            percent(runs, "clean"),
            percent(runs, "fgsm", 1),
            percent(runs, "pgd", 0),
            percent(runs, "pgd", 1),
            percent(runs, "pgd_l2", 1),
            common.spread([r.jacobian for r in runs], "{:.2f}"),
            common.spread([r.radius for r in runs], "{:.2f}"),
            common.spread([r.certified for r in runs], "{:.3f}"),
        )
        for name, runs in found.items()
    ]
    small, middle = sizes["linf"][:2]
    pgd = f"PGD-{steps}"
    columns = ("training", "clean %", f"FGSM {middle} %", f"{pgd} ℓ∞ {small} %",
               f"{pgd} ℓ∞ {middle} %", f"{pgd} ℓ₂ {sizes['l2'][1]} %", "‖J‖_F",
               "linear radius", "certified radius")  # fmt: skip
    made = common.Report(
        f"LeNet, {len(data.train[1])} training images: {data.name}",
        columns,
        rows,
        draw(found, data.side),
        numbers={
            **{name: [vars(r) for r in runs] for name, runs in found.items()}, "race": raced
        },
    )  # fmt: skip
    plain, exact = found["plain"], found["Jacobian, exact"]
    fall = average(plain, "jacobian") / average(exact, "jacobian")
    change = 100 * (average(exact, "clean") - average(plain, "clean"))
    seen = (
        f"with the exact Jacobian penalty ‖J‖_F falls {fall:.1f} times and clean accuracy changes "
        f"by {change:+.1f} points (Hoffman et al., 60,000 images: 32.9 → 1.1, 98.9 → 99.0 %)"
    )
    made.claim(fall >= 10 and change >= -0.5, seen, f"not the tenfold fall: {seen}")
    base = average(plain, "pgd", 1)
    gains = {
        name: 100 * (average(found[name], "pgd", 1) - base)
        for name in ("double backpropagation", "Jacobian, exact", "Jacobian, 1 projection",
                     "spectral norm")
    }  # fmt: skip
    told = ", ".join(f"{name} {gain:+.1f}" for name, gain in gains.items())
    made.claim(
        min(gains.values()) > 5,
        f"every penalty raises accuracy under {pgd}, ε = {middle}, over plain training: {told}",
        f"not every penalty raises accuracy under {pgd}, ε = {middle}, by 5 points: {told}",
    )
    trained = 100 * (average(found["adversarial training"], "pgd", 1) - base)
    best = max(gains.values())
    made.claim(
        best >= trained,
        f"the best penalty is level with adversarial training ({best:+.1f} against {trained:+.1f})",
        f"no penalty reaches adversarial training on the attack that it trains for "
        f"({best:+.1f} against {trained:+.1f} points)",
    )
    _tell_race(made, raced, middle)
    told = ", ".join(f"{name} {weight:g}" for name, weight in weights.items())
    made.notes.append(
        "weights of the penalties, chosen on a fifth of the training images held out (best under "
        f"PGD-10 among those that lose at most a point of clean accuracy there): {told}"
    )
    made.notes.append(
        "linear radius: median ℓ₂ distance to the nearest other class of the network linearised at "
        "the image; it is no certificate, since the network bends. Certified radius: median ℓ₂ "
        "radius that the product of the layers' operator norms guarantees"
    )
    return made


def _tell_race(made: common.Report, raced: dict[str, Any], size: float) -> None:
    for kind, ours, theirs in (
        ("exact Jacobian", "doubleback, exact", "stock autograd, exact"),
        ("one projection", "doubleback, 1 projection", "Hoffman et al., 1 projection"),
    ):
        level = min(max(right for _, right in raced[name]) for name in (ours, theirs))
        mine, stock = (first_at(raced[name], level) for name in (ours, theirs))
        assert mine is not None and stock is not None
        told = (
            f"{kind}: {100 * level:.1f} % under PGD-10, ε = {size}, after {mine:.0f} s of training "
            f"against {stock:.0f} s by {theirs.partition(',')[0]}"
        )
        made.claim(mine < stock, told, f"not sooner: {told}")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, metavar="N", help="how many; default: 1, --full 5")
    parser.add_argument("--epochs", type=int, metavar="N", help="default: by size and data")
    parser.add_argument("--attacked", type=int, metavar="N", help="test images under attack")
    parser.add_argument("--keep", metavar="FILE", help="go on from what is in this JSON file")


def run(arguments: argparse.Namespace) -> common.Report:
    mnist, full = arguments.data != "digits", arguments.full
    for name in ("seeds", "epochs", "attacked"):
        if (getattr(arguments, name) or 1) < 1:
            raise common.UsageError(f"--{name} must be at least 1")
    count = arguments.seeds or (5 if full else 1)
    seeds = [arguments.seed + i for i in range(count)]
    steps = 40 if full else 10
    data = common.load_images(
        arguments.data, 8000 if mnist else None, arguments.seed, arguments.device
    )
    epochs = arguments.epochs or ((10 if full else 3) if mnist else (60 if full else 25))
    attacked = min(arguments.attacked or (len(data.test[1]) if full else 300), len(data.test[1]))
    tried = max(1, epochs // 3) if mnist else epochs  # epochs to choose a weight by
    settings = [arguments.data.partition(":")[0], arguments.seed, epochs, attacked, steps]
    kept = Kept(arguments.keep, settings)
    names = tuple(method.name for method in methods())
    weights = kept("weights", lambda: choose(data, tried, arguments.seed, names))
    found = experiment(data, epochs, seeds, attacked, steps, weights, kept=kept)
    exact = weights["Jacobian, exact"]
    raced = kept("race", lambda: race(data, min(epochs, 6), arguments.seed, exact))
    return report(found, data, steps, weights, raced)


if __name__ == "__main__":
    sys.exit(common.main("robustness", __doc__, run, data=True, options=options))
