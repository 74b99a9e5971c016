"""Penalties on the input gradient and the Jacobian make a classifier robust: LeNet under FGSM and
PGD, against plain training, weight decay and adversarial training."""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
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
ALLOWED = 0.005  # of clean accuracy that a penalty may cost


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
    model = None
    if method.penalty is not None:
        graph = images.is_cuda and method.penalty.no_graph is None
        model = db.Penalised(net, method.penalty, cuda_graph=graph)
    optimiser = torch.optim.AdamW(net.parameters(), weight_decay=method.decay, fused=images.is_cuda)
    steps = epochs * (len(labels) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, steps)
    shuffle = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for rows in common.batches(len(labels), BATCH, shuffle):
            rows = rows.to(images.device)
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
    certified: float  # median ℓ₂ radius within which no other class can win, by layers' norms
    # the same by the slope at the image and a bound on the curvature; older files have none
    local: float | None = None


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
    everywhere, local = certified_radii(net, few, truth, jacobian)
    return Found(
        clean=accuracy(x, y),
        fgsm=under("linf", 1),
        pgd=under("linf", steps),
        pgd_l2=under("l2", steps),
        jacobian=jacobian.flatten(1).norm(dim=1).mean().item(),
        radius=linear_radius(net(few), truth, jacobian).median().item(),
        certified=everywhere.median().item(),
        local=local.median().item(),
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


def operator_norm(
    layer: nn.Module, shape: torch.Size, device: torch.device | None = None
) -> tuple[float, torch.Size]:
    """(largest singular value of a layer's linear part on inputs of such a shape, its output's
    shape), from the layer's matrix. tanh and reshaping do not increase distances: 1."""
    if not isinstance(layer, (nn.Linear, nn.Conv2d, nn.AvgPool2d)):
        return 1.0, layer(torch.zeros(1, *shape, device=device)).shape[1:]
    size = math.prod(shape)
    own = copy.deepcopy(layer).double()
    with torch.no_grad():
        units = torch.eye(size + 1, device=device, dtype=torch.float64)[:, :size]
        images = own(units.reshape(size + 1, *shape))  # of the unit vectors, and of zero
        matrix = (images[:-1] - images[-1]).flatten(1)
    gram = matrix @ matrix.T if size <= matrix.shape[1] else matrix.T @ matrix
    return math.sqrt(torch.linalg.eigvalsh(gram)[-1].item()), images.shape[1:]


BEND = 4 / (3 * math.sqrt(3))  # the largest second derivative of tanh


def slope_and_curvature(net: nn.Module, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """For each pair of classes, bounds of ‖∇m‖ and ‖∇²m‖ that hold everywhere, m = out_y − out_k.

    With a_l the argument of the l-th tanh and δ_l the gradient of m in its value,
    ∇²m = Σ_l (∂a_l/∂x)ᵀ diag(δ_l tanh″(a_l)) (∂a_l/∂x). ‖∂a_l/∂x‖ is at most the product of the
    norms of the layers before; of |δ_l| the largest entry is taken, bounded by the layers behind
    with absolute weights and by the product of their norms, the smaller of the two."""
    *layers, last = list(net)  # type: ignore[call-overload]
    weight = last.weight.detach().double()
    value = torch.zeros(1, *shape, device=weight.device, dtype=torch.float64)
    before, norms, steep = [], [], [1.0]
    for layer in layers:
        norm, _ = operator_norm(layer, value.shape[1:], value.device)
        before.append(value)
        norms.append(norm)
        steep.append(steep[-1] * norm)
        value = copy.deepcopy(layer).double()(value).detach()
    pairs = weight[:, None] - weight
    length = pairs.norm(dim=2)
    delta, curvature, behind = pairs.abs().flatten(0, 1), torch.zeros_like(length), 1.0
    for i, layer in reversed(list(enumerate(layers))):
        if isinstance(layer, nn.Tanh):
            entry = delta.flatten(1).amax(1).view_as(length).minimum(behind * length)
            curvature += BEND * entry * steep[i] ** 2
        else:
            delta = _absolute_transpose(layer, before[i], delta)
        behind *= norms[i]
    return length * steep[-1], curvature


def _absolute_transpose(layer: nn.Module, inputs: Tensor, delta: Tensor) -> Tensor:
    """|W|ᵀ δ for a linear layer."""
    own = copy.deepcopy(layer).double().requires_grad_(False)
    for parameter in own.parameters():
        parameter.abs_()
    inputs = inputs.expand(len(delta), *inputs.shape[1:]).clone().requires_grad_()
    (found,) = torch.autograd.grad(own(inputs), inputs, delta)
    return found


def certified_radii(
    net: nn.Module, x: Tensor, labels: Tensor, jacobian: Tensor
) -> tuple[Tensor, Tensor]:
    """How far x may move in ℓ₂ before another class can win, whatever the network does on the way,
    0 where the class is wrong already: min over k of r with

        m / L                        everywhere: L ≥ ‖∇m‖ by the norms of the layers
        ‖∇m(x)‖ r + ½ M r² = m       by the slope here, M ≥ ‖∇²m‖; the first where that is larger

    of the margin m = out_y − out_k: in the ball its slope is at most ‖∇m(x)‖ + M r."""
    rows = torch.arange(len(x), device=x.device)
    with torch.no_grad():
        out = net(x).double()
    margin = (out[rows, labels, None] - out).clamp_min(0)
    steep, curvature = (bound[labels] for bound in slope_and_curvature(net, x.shape[1:]))
    here = (jacobian[rows, labels, None] - jacobian).double().norm(dim=2)
    everywhere = torch.where(steep > 0, margin / steep, torch.inf)
    local = 2 * margin / (here + (here.square() + 2 * curvature * margin).sqrt())
    local = torch.where(steep > 0, local, torch.inf).maximum(everywhere)
    return everywhere.amin(1), local.amin(1)


# -------------------------------------------------------------------- time to the same robustness


def race(
    data: common.Images, epochs: int, seed: int, weight: float, count: int = 200, every: int = 20
) -> dict[str, Curve]:
    """(seconds of training so far, accuracy under PGD-10) after the first step, in which networks
    are captured, and then every so many, for the Jacobian
    penalty by the library, by stock autograd with a loop over the classes, and from one random
    projection by the library and by autograd as Hoffman et al. do it; on a GPU also by the library
    with a CUDA graph. All train in turn, batch by batch, so that a busy machine is as busy for
    each; on a CPU the seconds are the processor's, which do not count what others do."""
    images, labels = data.train
    x, y = data.test[0][:count], data.test[1][:count]
    size = EPSILONS[data.side]["linf"][1]
    steps = epochs * (len(labels) // BATCH)
    ways = {name: _runner(make, data.side, images.device, weight, steps, seed)
            for name, make in penalties(images.is_cuda).items()}  # fmt: skip
    clock = common.clock(images.device)
    spent = dict.fromkeys(ways, 0.0)
    found: dict[str, Curve] = {name: [] for name in ways}
    shuffle = torch.Generator().manual_seed(seed)
    order = [rows for _ in range(epochs) for rows in common.batches(len(labels), BATCH, shuffle)]
    for number, rows in enumerate(order, start=1):
        rows = rows.to(images.device)
        for name, (_, step) in ways.items():
            start = clock()
            step(images[rows], labels[rows])
            if images.is_cuda:
                torch.cuda.synchronize()
            spent[name] += clock() - start
        if number % every and 1 < number < len(order):
            continue
        for name, (net, _) in ways.items():
            moved = attack(net, x, y, size, "linf", 10)
            right = (net(moved).argmax(1) == y).float().mean().item()
            found[name].append((spent[name], right))
    return found


def by_library(projections: int | None, graph: bool, net: nn.Module, weight: float) -> Callable:
    model = db.Penalised(net, db.Jacobian(projections=projections), cuda_graph=graph)
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


def penalties(graphed: bool) -> dict[str, Callable[[nn.Module, float], Callable]]:
    """The ways that race each other; graphed: CUDA graphs too."""
    ways: dict[str, Callable[[nn.Module, float], Callable]] = {}
    for kind, number, theirs in (("exact", None, STOCK), ("1 projection", 1, HOFFMAN)):
        for graph in (False, True) if graphed else (False,):
            ways[f"{OURS}, {kind}{GRAPHED if graph else ''}"] = partial(by_library, number, graph)
        ways[f"{theirs}, {kind}"] = partial(by_autograd, number)
    return ways


OURS, STOCK, HOFFMAN, GRAPHED = "doubleback", "stock autograd", "Hoffman et al.", ", CUDA graph"


def _runner(
    make: Callable, side: int, device: torch.device, weight: float, steps: int, seed: int
) -> tuple[nn.Module, Callable[[Tensor, Tensor], None]]:
    torch.manual_seed(seed)
    net = lenet(side).to(device)
    accumulate = make(net, weight)
    optimiser = torch.optim.AdamW(net.parameters(), weight_decay=0.0, fused=device.type == "cuda")
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, steps)

    def step(x: Tensor, y: Tensor) -> None:
        optimiser.zero_grad()
        accumulate(x, y)
        optimiser.step()
        schedule.step()

    return net, step


Curve = list[tuple[float, float]]  # seconds of training, accuracy under attack


def first_at(curve: Curve, level: float) -> float | None:
    """The seconds of training after which this accuracy was first seen."""
    return next((seconds for seconds, right in curve if right >= level), None)


# --------------------------------------------------------------------------------- the experiment


def choose(data: common.Images, epochs: int, seed: int, names: tuple[str, ...]) -> dict[str, float]:
    """The weight of each penalty by a fifth of the training images, held out from a training of its
    own: that with the highest accuracy under PGD-10 among those that lose at most half a point of
    clean accuracy to plain training, or else the smallest. One projection estimates the exact
    Jacobian penalty without bias, which takes its weight."""
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
            fit = [w for w in WEIGHTS if tried[w][0] >= plain - ALLOWED] or [WEIGHTS[0]]
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
    for seed in seeds:
        for method in methods():
            if names is None or method.name in names:
                method = replace(method, weight=weights.get(method.name, 0.0))
                kept(
                    f"{method.name}, seed {seed}",
                    lambda method=method, seed=seed: vars(
                        measure(train(method, data, epochs, seed), data, count, steps)
                    ),
                )
    return kept.found()


class Kept:
    """Results by name in a JSON file, which an interrupted run goes on from and from which the
    table is made; None: not kept."""

    def __init__(self, path: str | None, settings: Any = None) -> None:
        self.path = None if path is None else Path(path)
        self.held: dict[str, Any] = {}
        if self.path is not None and self.path.is_file():
            self.held = _read(self.path, "--json")
        before = self.held.setdefault("settings", settings)
        if before != settings:
            raise common.UsageError(
                f"--json {path}: belongs to a run with other settings, {before}"
            )

    @classmethod
    def merged(cls, paths: list[str]) -> Kept:
        """What several runs with the same settings found, each for seeds of its own and with the
        weights that it chose, or several runs of the race."""
        kept = cls(None)
        kept.held = {}
        chosen: dict[str, set[float]] = {}
        for path in paths:
            for name, value in _read(Path(path), "--from").items():
                if name == "settings" and kept.held.get(name, value) != value:
                    raise common.UsageError(f"--from {path}: has other {name} than {paths[0]}")
                if name == "weights":
                    for method, weight in value.items():
                        chosen.setdefault(method, set()).add(weight)
                kept.held.setdefault(name, value)
        if chosen:
            kept.held["weights"] = {method: sorted(chosen[method]) for method in chosen}
        if kept.races:
            return kept
        short = [name for name in ("settings", "weights") if name not in kept.held]
        found = kept.found()
        short += [m.name for m in methods() if len(found.get(m.name, ())) < len(kept.seeds)]
        if short or not found:
            raise common.UsageError(f"--from {paths[0]}: has no {', '.join(short) or 'results'}")
        return kept

    def __call__(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self.held:
            start = time.perf_counter()
            self.held[name] = make()
            if self.path is not None:
                self.path.write_text(json.dumps(self.held, indent=1, ensure_ascii=False) + "\n")
                print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
        return self.held[name]

    @property
    def races(self) -> dict[int, dict[str, Curve]]:
        """The curves of the race by itself, by seed."""
        return {seed: self.held[f"race, seed {seed}"] for seed in self.seeds
                if f"race, seed {seed}" in self.held}  # fmt: skip

    @property
    def seeds(self) -> list[int]:
        told = (name.partition(", seed ")[2] for name in self.held)
        return sorted({int(seed) for seed in told if seed})

    def found(self) -> dict[str, list[Found]]:
        """By method, in the order of the table and of the seeds."""
        named = {
            m.name: [self.held.get(f"{m.name}, seed {seed}") for seed in self.seeds]
            for m in methods()
        }
        return {
            name: [Found(**told) for told in runs if told]
            for name, runs in named.items()
            if any(runs)
        }


def _read(path: Path, option: str) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise common.UsageError(f"{option} {path}: cannot be read ({error})") from error


def average(runs: list[Found], value: str, place: int | None = None) -> float:
    values = (getattr(r, value) for r in runs)
    return statistics.fmean(v if place is None else v[place] for v in values)


def deviation(runs: list[Found], value: str, place: int | None = None) -> float:
    values = (getattr(r, value) for r in runs)
    return statistics.stdev(v if place is None else v[place] for v in values)


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
            if len(runs) > 1:
                off = [deviation(runs, "clean")]
                off += [deviation(runs, value, i) for i in range(len(sizes) - 1)]
                low, high = ([100 * (a + sign * d) for a, d in zip(curve, off, strict=True)]
                             for sign in (-1, 1))  # fmt: skip
                axis.fill_between(sizes, low, high, color=colour, alpha=0.2, lw=0)
        several = len(runs) > 1
        right.errorbar(
            average(runs, "jacobian"), 100 * average(runs, "pgd", 1), fmt="o", ms=7, color=colour,
            xerr=deviation(runs, "jacobian") if several else None,
            yerr=100 * deviation(runs, "pgd", 1) if several else None,
        )  # fmt: skip
    left.set(title="PGD in ℓ∞", xlabel="ε", ylabel="accuracy, %", ylim=(0, 101))
    middle.set(title="PGD in ℓ₂", xlabel="ε", ylim=(0, 101))
    size = EPSILONS[side]["linf"][1]
    right.set(title=f"Slope and accuracy under PGD, ε = {size}", xscale="log", ylim=(0, 101))
    right.set(xlabel="mean ‖∂out/∂x‖$_F$ on test images")
    lowest, highest = right.get_xlim()
    ticks = [t for t in (0.5, 1, 2, 3, 5, 10, 20, 50, 100) if lowest <= t <= highest]
    right.minorticks_off()
    right.set_xticks(ticks, [f"{t:g}" for t in ticks])
    left.set_xticks((0.0, *EPSILONS[side]["linf"]))
    middle.set_xticks((0.0, *EPSILONS[side]["l2"]))
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside lower center", ncols=7, fontsize=8
    )
    return figure


def _known(values: list[float | None]) -> str:
    return common.spread([v for v in values if v is not None], "{:.3f}") if any(values) else ""


def report(kept: Kept) -> common.Report:
    """The table, the figure and the claims, from the numbers alone."""
    found, settings, weights = kept.found(), kept.held["settings"], kept.held["weights"]
    side, steps, raced = settings["side"], settings["steps"], kept.held.get("race")
    sizes = EPSILONS[side]

    def percent(runs: list[Found], value: str, place: int | None = None) -> str:
        values = (getattr(r, value) for r in runs)
        return common.spread([100 * (v if place is None else v[place]) for v in values], "{:.1f}")

    middle, pgd = sizes["linf"][1], f"PGD-{steps}"
    rows = [
        (
            name,
            percent(runs, "clean"),
            percent(runs, "pgd", 1),
            percent(runs, "pgd_l2", 1),
            common.spread([r.jacobian for r in runs], "{:.2f}"),
            common.spread([r.radius for r in runs], "{:.2f}"),
            _known([r.local for r in runs]),
            common.spread([r.certified for r in runs], "{:.3f}"),
        )
        for name, runs in found.items()
    ]
    columns = ("training", "clean %", f"{pgd} ℓ∞ {middle} %", f"{pgd} ℓ₂ {sizes['l2'][1]} %",
               "‖J‖_F", "linear radius", "certified radius", "… by global Lipschitz")  # fmt: skip
    attacks = (("FGSM ℓ∞", "fgsm", "linf"), (f"{pgd} ℓ∞", "pgd", "linf"),
               (f"{pgd} ℓ₂", "pgd_l2", "l2"))  # fmt: skip
    under = (
        ("accuracy in % under", *(f"{words} {e}" for words, _, n in attacks for e in sizes[n])),
        [(name, *(percent(runs, value, i) for _, value, n in attacks
                  for i in range(len(sizes[n])))) for name, runs in found.items()],
    )  # fmt: skip
    made = common.Report(
        f"LeNet, {settings['trained']} training images: {settings['name']}",
        columns,
        rows,
        draw(found, side),
        further=[under],
        numbers={
            **{name: [vars(r) for r in runs] for name, runs in found.items()}, "race": raced
        },
        settings={**settings["given"], "seeds": kept.seeds, "raced": kept.held.get("raced")},
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
    _tell_certificates(made, found)
    if raced is not None:
        _tell_race(made, [raced], middle)
    chosen = {
        name: weight if isinstance(weight, list) else [weight] for name, weight in weights.items()
    }
    told = ", ".join(
        f"{name} {' or '.join(f'{w:g}' for w in values)}" for name, values in chosen.items()
    )
    each = any(len(values) > 1 for values in chosen.values())
    made.notes.append(
        "weights of the penalties, chosen on a fifth of the training images held out (best under "
        "PGD-10 among those that lose at most half a point of clean accuracy there"
        f"{'; every run chose for itself' if each else ''}): {told}; the exact Jacobian takes that "
        "of one projection, which estimates it. Weight decay, 0.5, and adversarial training, PGD-5 "
        "with ε = 0.1, were not tuned"
    )
    made.notes.append(
        "linear radius: median ℓ₂ distance to the nearest other class of the network linearised at "
        "the image; it is no certificate, since the network bends. Certified radius: median ℓ₂ "
        "radius within which no other class can win: by the slope at the image and a bound on its "
        "change (local Lipschitz), and by the product of the layers' operator norms alone (global)"
    )
    made.notes.append(
        f"seeds: {len(kept.seeds)}; epochs: {settings['epochs']}; test images under attack: "
        f"{settings['attacked']} of {settings['tested']}; on {settings['device']}"
    )
    if "note" in kept.held:  # what whoever put files together has to say of them
        made.notes.append(kept.held["note"])
    return made


def _tell_certificates(made: common.Report, found: dict[str, list[Found]]) -> None:
    """Whether what raises accuracy under attack raises what can be certified, too."""
    radii = {
        method.name: statistics.fmean(local)
        for method in methods()
        if method.name == "plain" or method.penalty is not None
        if (local := [r.local for r in found[method.name] if r.local is not None])
    }
    plain = radii.pop("plain", None)
    if plain is None or not radii:  # files of before there were local bounds
        return
    told = ", ".join([f"plain {plain:.3f}", *(f"{name} {r:.3f}" for name, r in radii.items())])
    made.claim(
        min(radii.values()) > plain,
        f"the certified radius grows, too, with every penalty: {told}",
        f"the certified radius does not grow with every penalty: {told}; the slope at an image is "
        "low, but what bounds its change nearby are the norms of the layers",
    )


def race_report(kept: Kept) -> common.Report:
    """The race by itself: a table of the seconds to several accuracies, and the curves."""
    settings, races = kept.held["settings"], kept.races
    side, size = settings["side"], EPSILONS[settings["side"]]["linf"][1]
    parts = (0.7, 0.85, 1.0)  # of the highest accuracy that all ways reach
    rows = []
    for name in next(iter(races.values())):
        curves = [raced[name] for raced in races.values()]
        steps = settings["raced steps"] - 1
        each = [1e3 * (curve[-1][0] - curve[0][0]) / max(1, steps) for curve in curves]
        seconds = [
            [first_at(raced[name], part * common_level(raced)) or 0.0 for raced in races.values()]
            for part in parts
        ]
        rows.append(
            (
                name,
                common.spread([curve[0][0] for curve in curves], "{:.2f}"),
                common.spread(each, "{:.2f}"),
                *(common.spread(values, "{:.2f}") for values in seconds),
                common.spread([100 * curve[-1][1] for curve in curves], "{:.1f}"),
            )
        )
    level = 100 * statistics.fmean(common_level(raced) for raced in races.values())
    columns = ("the Jacobian penalty by", "first step, s", "ms a step after it",
               *(f"s to {part * level:.0f} % under PGD-10" for part in parts),
               "% at the end")  # fmt: skip
    figure, (axis,) = common.panels(1, width=7)
    for raced in races.values():
        for (name, curve), colour in zip(raced.items(), RACED, strict=False):
            seconds, right = zip(*curve, strict=True)
            style = "--" if name.startswith((STOCK, HOFFMAN)) else "-"
            label = name if raced is next(iter(races.values())) else None
            axis.plot(seconds, [100 * a for a in right], style, color=colour, lw=1.5, label=label)
    axis.set(title=f"Accuracy under PGD-10, ε = {size}, %", xlabel="seconds of training",
             xscale="log", ylim=(0, 100))  # fmt: skip
    figure.legend(
        *axis.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8
    )
    made = common.Report(
        f"Time to the same robustness: LeNet, {settings['trained']} training images of {side}×"
        f"{side}, batches of {BATCH}, {settings['raced steps']} steps",
        columns,
        rows,
        figure,
        numbers={f"race, seed {seed}": raced for seed, raced in races.items()},
        settings={**settings["given"], "seeds": list(races)},
        name="race",
    )
    _tell_race(made, list(races.values()), size)
    made.notes.append(
        f"accuracies are those of {settings['attacked']} test images, looked at every 20 steps; "
        f"weight of the penalty: {settings['given']['race']:g}; seeds: {len(races)}; on "
        f"{settings['device']}"
    )
    return made


def common_level(raced: dict[str, Curve]) -> float:
    """The highest accuracy that every way has reached at some time."""
    return min(max(right for _, right in curve) for curve in raced.values())


RACED = (common.GREEN, common.INK, "#7fc29b", common.GREY, common.BLUE, common.PURPLE)


def _tell_race(made: common.Report, races: list[dict[str, Curve]], size: float) -> None:
    """Means over the races of the seconds until the highest accuracy that the ways with this
    penalty share."""
    for kind, rival, words in (
        ("exact", f"{STOCK}, exact", "stock autograd, class by class"),
        ("1 projection", f"{HOFFMAN}, 1 projection", "autograd as Hoffman et al. use it"),
    ):
        names = [n for n in (f"{OURS}, {kind}", f"{OURS}, {kind}{GRAPHED}", rival) if n in races[0]]
        levels, needed = [], {name: [] for name in names}
        for raced in races:
            level = common_level({name: raced[name] for name in names})
            levels.append(level)
            for name in names:
                needed[name].append(first_at(raced[name], level) or 0.0)
        mean = {name: statistics.fmean(seconds) for name, seconds in needed.items()}
        graphed = mean.get(f"{OURS}, {kind}{GRAPHED}")
        told = (
            f"Jacobian, {kind}: {100 * statistics.fmean(levels):.1f} % under PGD-10, ε = {size}, "
            f"after {mean[names[0]]:.3g} s of training"
            + ("" if graphed is None else f" ({graphed:.3g} s with a CUDA graph)")
            + f" against {mean[rival]:.3g} s by {words}"
        )
        made.claim(min(mean.values()) < mean[rival], told, f"not sooner: {told}")
    made.notes.append(
        "seconds are those of all ways in turn, batch by batch, the capture of the network at the "
        "first step included; on a CPU they are the processor's; compare them with each other only"
    )


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    told = "default: --seed; --full: five from it; none: choose the weights only"
    add("--seeds", type=int, nargs="*", metavar="S", help=told)
    add("--epochs", type=int, metavar="N", help="default: by size and data")
    add("--attacked", type=int, metavar="N", help="test images under attack")
    add("--raced", type=int, metavar="N", help="epochs of the race; default: 6; 0: no race")
    told = "the race alone, with this weight of the Jacobian penalty, and its figure"
    add("--race", type=float, metavar="WEIGHT", help=told)
    told = "write the numbers here as they come, going on from what is there, and draw nothing"
    add("--json", metavar="FILE", help=told)
    told = "draw what runs with --json found, each for seeds of its own"
    add("--from", nargs="+", dest="source", metavar="FILE", help=told)


def run(arguments: argparse.Namespace) -> common.Report | None:
    if arguments.source:
        kept = Kept.merged(arguments.source)
        return race_report(kept) if kept.races else report(kept)
    mnist, full = arguments.data != "digits", arguments.full
    for name, least in (("epochs", 1), ("attacked", 1), ("raced", 0), ("race", 0)):
        given = getattr(arguments, name)
        if given is not None and given < least:
            raise common.UsageError(f"--{name} must be at least {least}")
    seeds = arguments.seeds
    if seeds is None:
        seeds = [arguments.seed + i for i in range(5 if full else 1)]
    if not seeds and (arguments.race is not None or not arguments.json):
        raise common.UsageError("--seeds without a seed chooses weights, and goes with --json only")
    steps = 40 if full else 10
    data = common.load_images(
        arguments.data, 8000 if mnist else None, arguments.seed, arguments.device
    )
    epochs = arguments.epochs or ((30 if full else 3) if mnist else (60 if full else 25))
    attacked = min(arguments.attacked or (len(data.test[1]) if full else 300), len(data.test[1]))
    tried = max(1, epochs // 3) if mnist else epochs  # epochs to choose a weight by
    cuda = arguments.device.type == "cuda"
    settings = {
        "name": data.name, "side": data.side, "epochs": epochs, "steps": steps,
        "attacked": attacked, "trained": len(data.train[1]), "tested": len(data.test[1]),
        "device": torch.cuda.get_device_name(arguments.device) if cuda else "the CPU",
        "given": {"data": arguments.data.partition(":")[0], "full": full, "seed": arguments.seed,
                  "epochs": arguments.epochs, "attacked": arguments.attacked,
                  "device": arguments.device.type},
    }  # fmt: skip
    if arguments.race is not None:
        laps = arguments.raced or min(epochs, 6)
        count = min(arguments.attacked or 500, len(data.test[1]))
        settings["given"] |= {"race": arguments.race, "raced": arguments.raced}
        settings |= {"attacked": count, "raced steps": laps * (len(data.train[1]) // BATCH)}
        kept = Kept(arguments.json, settings)
        for seed in seeds:
            one = partial(race, data, laps, seed, arguments.race, count)
            kept(f"race, seed {seed}", one)
        return None if arguments.json else race_report(kept)
    kept = Kept(arguments.json, settings)
    names = tuple(method.name for method in methods())
    weights = kept("weights", lambda: choose(data, tried, arguments.seed, names))
    experiment(data, epochs, seeds, attacked, steps, weights, kept=kept)
    exact, raced = weights["Jacobian, exact"], arguments.raced
    if raced != 0 and seeds:
        kept.held["raced"] = raced
        kept("race", lambda: race(data, raced or min(epochs, 6), arguments.seed, exact))
    return None if arguments.json else report(kept)


if __name__ == "__main__":
    sys.exit(common.main("robustness", __doc__, run, data=True, options=options))
