"""Figure C, ours: what jumps do to training. SGD on the penalty alone, with one example and with
256.

Each step θ → θ + d is a path over all layers. Along it, for the batch of that step, the change of
the directional derivative D(t) = d/dt R(θ + t d) splits exactly into its jumps and a smooth rest,
and so does the change of R. The sampling noise is the spread of D(0) over examples, over √M.
"""

from __future__ import annotations

import copy
import math
from statistics import fmean

import torch
from torch import Tensor, nn

import doubleback as db
from doubleback import landscape as L
from doubleback.landscape import Network, drawing

from .experiment import NODE, OURS, Checked, Experiment

SIZES, STEPS, RATE = (1, 256), 200, 5e-3
CROSSED, MOST = 6, 40  # breakpoints that single examples must cross, in at most so many runs
REFERENCE, EVERY = 256, 4  # examples and steps from which the sampling noise is estimated


def draw(experiment: Experiment) -> Checked:
    report = Checked(
        "figure-C-training",
        "Figure C: what the jumps mean for training",
        f"SGD on R_node alone, rate {RATE:g}, from the trained network, each of {STEPS} steps "
        "followed exactly over all layers. One example at a time meets few breakpoints, so that "
        f"the run with M = 1 is repeated with other orders of the samples until {CROSSED} are "
        "crossed. (a) R_node over all 1500 points, every run. (b) The gradient's "
        "component along the step: its sampling noise, its smooth change over one step, and its "
        "change by jumps (root mean squares). (c) How R of the step's own batch changes: by the "
        "smooth part, which the gradient predicts, and by jumps, which it does not see.",
        OURS,
    )
    runs = {1: _single_runs(experiment), SIZES[-1]: [_run(experiment, SIZES[-1])]}
    summaries = {size: _summary(found) for size, found in runs.items()}
    one, many = (summaries[size] for size in SIZES)
    crossed = _crossed(runs[1])
    report.claim(
        crossed >= CROSSED,
        f"{len(runs[1])} runs of {STEPS} steps with one example each cross {crossed:.0f} "
        "breakpoints, enough to compare",
    )
    report.claim(
        many["jumps of the gradient"] < one["jumps of the gradient"],
        "averaging over 256 examples lowers the gradient's change by jumps per step: "
        f"{one['jumps of the gradient']:.3g} → {many['jumps of the gradient']:.3g}",
    )
    report.claim(
        many["sampling noise"] < one["sampling noise"] / 8,
        "and its sampling noise, by about √256: "
        f"{one['sampling noise']:.3g} → {many['sampling noise']:.3g}",
    )
    worst = max(found["worst error"] for found in summaries.values())
    report.claim(
        worst <= 1e-9, f"smooth part plus jumps give the whole change of R; worst error {worst:.0e}"
    )
    report.figure = _figure(runs, summaries)
    heads = ("", *(f"M = {size}" for size in SIZES))
    rows = [(what, *(summaries[s][what] for s in SIZES)) for what in one]
    report.tables.append(drawing.Table("Means over all steps", heads, rows))
    report.numbers = {
        f"M = {size}": {"summary": summaries[size], "runs": found} for size, found in runs.items()
    }
    return report


def _single_runs(experiment: Experiment) -> list[dict]:
    """Runs with one example at a time, until enough breakpoints are crossed to compare."""
    runs: list[dict] = []
    while len(runs) < MOST and _crossed(runs) < CROSSED:
        runs.append(_run(experiment, 1, order=len(runs)))
    return runs


def _crossed(runs: list[dict]) -> float:
    return sum(step["crossed"] for run in runs for step in run["steps"])


def _run(experiment: Experiment, size: int, order: int = 0) -> dict:
    net = copy.deepcopy(experiment.net)
    model = db.Penalised(net, NODE, flatten_after=None)
    generator = torch.Generator().manual_seed(experiment.seed + 3 + 1000 * order)
    reference = experiment.x[torch.randperm(len(experiment.x), generator=generator)[:REFERENCE]]
    network = experiment.paths["w"].network
    history, steps = [_mean_penalty(net, experiment.x)], []
    for step in range(STEPS):
        batch = experiment.x[torch.randperm(len(experiment.x), generator=generator)[:size]]
        direction = _step(model, batch)
        steps.append(_split(net, network, batch, direction))
        if step % EVERY == 0 and order == 0:
            steps[-1]["noise"] = _noise(net, network, reference, direction) / math.sqrt(size)
        with torch.no_grad():
            for name, p in net.named_parameters():
                p += direction[name]
        history.append(_mean_penalty(net, experiment.x))
    return {"penalty": history, "steps": steps}


def _step(model: db.Penalised, batch: Tensor) -> dict[str, Tensor]:
    """−rate · ∇R of the batch, from the engine."""
    _, penalty = model(batch)
    names, parameters = zip(*model.net.named_parameters(), strict=True)
    grads = torch.autograd.grad(penalty, parameters, allow_unused=True)
    return {
        name: -RATE * (torch.zeros_like(p) if g is None else g)
        for name, p, g in zip(names, parameters, grads, strict=True)
    }


def _mean_penalty(net: nn.Module, x: Tensor) -> float:
    leaf = x.detach().clone().requires_grad_()
    (s,) = torch.autograd.grad(net(leaf).sum(), leaf)
    return float(s.square().mean())


def _length(direction: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(d.square().sum()) for d in direction.values()))


def _split(net: nn.Module, network: Network, batch: Tensor, direction: dict) -> dict[str, float]:
    """The step's change of D and of R, each as smooth part and jumps; D per unit of length."""
    length, size = _length(direction), len(batch)
    if length == 0.0:
        return dict.fromkeys(("smooth", "jumps", "crossed", "R smooth", "R jumps", "error"), 0.0)
    path = L.follow(net, batch, L.Direction(direction), (0.0, 1.0), network=network)
    curve = L.penalty(path, NODE)
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    slope, value = curve.slope.mean(ends), curve.value.mean(ends)
    slope_jumps = float(curve.slope.jumps().height.sum()) / size
    value_jumps = float(curve.value.jumps().height.sum()) / size
    smooth = _integral(curve)
    return {
        "smooth": (float(slope[1] - slope[0]) - slope_jumps) / length,
        "jumps": slope_jumps / length,
        "crossed": len(path.breakpoints) / size,
        "R smooth": smooth,
        "R jumps": value_jumps,
        "error": abs(float(value[1] - value[0]) - smooth - value_jumps),
    }


def _noise(net: nn.Module, network: Network, reference: Tensor, direction: dict) -> float:
    """Standard deviation over examples of the gradient's component along the step."""
    length = _length(direction)
    if length == 0.0:
        return 0.0
    path = L.follow(net, reference, L.Direction(direction), (0.0, 1e-6), network=network)
    slope = L.penalty(path, NODE).slope
    return float(slope.ends[0][_first_pieces(path)].std()) / length


def _first_pieces(path: L.Path) -> Tensor:
    first = torch.ones(len(path.example), dtype=torch.bool)
    first[1:] = path.example[1:] != path.example[:-1]
    return first


def _integral(curve: L.Curve) -> float:
    """∫ D dt over all pieces, from the polynomials: ∫₋₁¹ u^k du = 2/(k+1) for even k."""
    path, coefficients = curve.slope.path, curve.slope.coefficients
    k = torch.arange(coefficients.shape[1])
    weights = torch.where(k % 2 == 0, 2.0 / (k + 1).double(), 0.0)
    per_piece = (coefficients @ weights) * (path.end - path.start) / 2
    return float(per_piece.sum()) / path.examples


def _summary(runs: list[dict]) -> dict[str, float]:
    """Over all steps of all runs."""
    steps = [step for run in runs for step in run["steps"]]

    def rms(what: str) -> float:
        return math.sqrt(fmean(s[what] ** 2 for s in steps if what in s))

    return {
        "sampling noise": rms("noise"),
        "smooth change of the gradient": rms("smooth"),
        "jumps of the gradient": rms("jumps"),
        "breakpoints crossed per step and example": fmean(s["crossed"] for s in steps),
        "change of R, smooth": fmean(s["R smooth"] for s in steps),
        "change of R by jumps": fmean(s["R jumps"] for s in steps),
        "change of R by jumps, root mean square": rms("R jumps"),
        "R before": runs[0]["penalty"][0],
        "R after": fmean(run["penalty"][-1] for run in runs),
        "worst error": max(s["error"] for s in steps),
    }


def _figure(runs: dict[int, list[dict]], summaries: dict[int, dict[str, float]]):
    figure, axes = drawing.panels(3, width=3.1)
    for colour, (size, found) in zip((drawing.ORANGE, drawing.BLUE), runs.items(), strict=True):
        for k, run in enumerate(found):
            label = f"M = {size}" if k == 0 else None
            axes[0].plot(run["penalty"], color=colour, lw=1.0 if size == 1 else 1.6, label=label)
    axes[0].set_xlabel("step")
    axes[0].set_title("(a) $R_{node}$, all points")
    axes[0].legend()
    groups = (
        (axes[1], "(b) gradient along the step", ("sampling noise",
         "smooth change of the gradient", "jumps of the gradient"), ("noise", "smooth", "jumps")),
        (axes[2], "(c) change of $R$ per step", ("change of R, smooth", "change of R by jumps",
         "change of R by jumps, root mean square"), ("smooth", "jumps", "jumps,\nr.m.s.")),
    )  # fmt: skip
    for ax, title, whats, names in groups:
        for k, (colour, summary) in enumerate(
            zip((drawing.ORANGE, drawing.BLUE), summaries.values(), strict=True)
        ):
            places = [i + 0.38 * k - 0.19 for i in range(len(whats))]
            ax.bar(places, [summary[w] for w in whats], 0.36, color=colour)
        ax.set_xticks(range(len(names)), names)
        ax.set_title(title)
    axes[1].set_yscale("log")
    axes[2].axhline(0, color=drawing.BLACK, lw=0.6)
    return figure
