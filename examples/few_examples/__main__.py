"""Does double backpropagation help when there are few examples? Drucker & LeCun's question (1992),
in their setting of 320 training and 180 test digits, over 20 seeds."""

from __future__ import annotations

import argparse
import statistics
import sys

import torch
import torch.nn.functional as F
from torch import nn

import doubleback as db
from examples import common

TRAINING, TEST = 320, 180
WEIGHTS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)  # λ in ℓ + λ‖∇ₓℓ‖²; 0 is plain training
BATCH = 80
TUNING = 1000  # seeds from here on choose λ; they are none of those that are reported


def network(side: int, device: torch.device) -> nn.Module:
    """One hidden layer of tanh, as was the custom then."""
    layers = (nn.Flatten(), nn.Linear(side * side, 40), nn.Tanh(), nn.Linear(40, 10))
    return nn.Sequential(*layers).to(device)


class Trial:
    """Trains from scratch for any seed and λ; the network is captured once."""

    def __init__(self, source: str, epochs: int, device: torch.device) -> None:
        self.source, self.epochs, self.device = source, epochs, device
        self.net: nn.Module | None = None

    def run(self, seed: int, weight: float) -> tuple[float, float]:
        """Test error and mean ‖∇ₓℓ‖² on test digits after training on 320; the seed draws the
        digits, the initial weights and the batches."""
        data = common.load_images(self.source, TRAINING, seed, self.device)
        images, labels = data.train
        targets = 2.0 * F.one_hot(labels, 10).to(images.dtype) - 1  # ±1, squared loss
        torch.manual_seed(seed)
        fresh = network(data.side, self.device)
        if self.net is None:
            self.net = fresh
            self.model = db.Penalised(self.net, db.LossGradient("mse"))
        self.net.load_state_dict(fresh.state_dict())
        optimiser = torch.optim.Adam(self.net.parameters(), lr=5e-3)
        steps = self.epochs * (TRAINING // BATCH)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        shuffle = torch.Generator().manual_seed(seed)
        for _ in range(self.epochs):
            for rows in common.batches(TRAINING, BATCH, shuffle):
                optimiser.zero_grad()
                self.model.accumulate(images[rows], targets[rows], weight=weight)  # all four sweeps
                optimiser.step()
                schedule.step()
        images, labels = data.test[0][:TEST], data.test[1][:TEST]
        targets = 2.0 * F.one_hot(labels, 10).to(images.dtype) - 1
        with torch.no_grad():
            out, slope = self.model(images, targets)
        return (out.argmax(1) != labels).float().mean().item(), slope.item()


def choose(trial: Trial, tuning: int, seed: int) -> dict[float, float]:
    """Mean error of every λ over seeds that are not reported; 0 for comparison."""
    seeds = [TUNING + seed + i for i in range(tuning)]
    return {w: statistics.fmean(trial.run(s, w)[0] for s in seeds) for w in (0.0, *WEIGHTS)}


def experiment(
    source: str, epochs: int, seeds: list[int], tuning: int, device: torch.device
) -> dict:
    trial = Trial(source, epochs, device)
    curve = choose(trial, tuning, seeds[0])
    best = min(WEIGHTS, key=lambda w: curve[w])
    plain, double = ([trial.run(s, w) for s in seeds] for w in (0.0, best))
    return {
        "curve": curve,
        "tuning": tuning,
        "weight": best,
        "plain": [error for error, _ in plain],
        "double": [error for error, _ in double],
        "slopes": [[slope for _, slope in runs] for runs in (plain, double)],
    }


def t_value(differences: list[float]) -> float:
    """Mean over its standard error."""
    deviation = statistics.stdev(differences)
    return statistics.fmean(differences) / (deviation / len(differences) ** 0.5)


def outcome(plain: list[float], double: list[float]) -> str:
    pairs = list(zip(plain, double, strict=True))
    better, worse = sum(b < a for a, b in pairs), sum(b > a for a, b in pairs)
    equal = len(pairs) - better - worse
    return f"better for {better} seeds, worse for {worse}, equal for {equal}"


def draw(found: dict):
    figure, (left, right) = common.panels(2, width=9, height=3.6, width_ratios=[1.3, 1])
    plain, double = ([100 * e for e in found[k]] for k in ("plain", "double"))
    for a, b in zip(plain, double, strict=True):
        colour = common.GREY if a == b else common.BLUE if b < a else common.RED
        left.plot([0, 1], [a, b], color=colour, alpha=0.6, lw=1.5)
    for place, values in enumerate((plain, double)):
        left.scatter([place] * len(values), values, color=common.INK, s=14, zorder=3)
        left.hlines(statistics.fmean(values), place - 0.13, place + 0.13, color=common.ORANGE, lw=4)
    left.set(
        xticks=[0, 1],
        xticklabels=["plain", f"double backpropagation, λ = {found['weight']:g}"],
        xlim=(-0.4, 1.4),
        ylabel="test error, %",
        title=outcome(plain, double).capitalize(),
    )
    curve = {w: 100 * e for w, e in found["curve"].items()}
    right.axhline(curve[0.0], color=common.GREY, lw=1.5, label="plain")
    right.semilogx(WEIGHTS, [curve[w] for w in WEIGHTS], "o-", color=common.BLUE, label="penalised")
    right.legend()
    right.axvline(found["weight"], color=common.ORANGE, lw=1, ls="--")
    right.set(xlabel="λ", ylabel="error on seeds kept for choosing, %", title="How λ was chosen")
    return figure


def report(found: dict, name: str) -> common.Report:
    plain, double = found["plain"], found["double"]
    differences = [100 * (a - b) for a, b in zip(plain, double, strict=True)]
    rows = [
        (label, common.spread([100 * e for e in errors], "{:.2f}"), f"{100 * min(errors):.1f}",
         f"{100 * max(errors):.1f}", common.spread(slopes, "{:.2f}"))
        for label, errors, slopes in (
            ("plain", plain, found["slopes"][0]),
            (f"λ = {found['weight']:g}", double, found["slopes"][1]),
        )
    ]  # fmt: skip
    rows.append(("difference", common.spread(differences, "{:.2f}"), f"{min(differences):.1f}",
                 f"{max(differences):.1f}", ""))  # fmt: skip
    made = common.Report(
        f"Test error in % after {TRAINING} training digits, {len(plain)} seeds: {name}",
        ("training", "mean ± deviation", "least", "most", "‖∇ₓℓ‖² on test digits"),
        rows,
        draw(found),
        numbers=found,
    )
    t = t_value(differences)
    gain = statistics.fmean(differences)
    made.claim(
        t > 2.1,  # 95 %, two-sided, 19 degrees of freedom
        f"generalisation improves, as Drucker & LeCun found: {gain:.2f} points on average, "
        f"{outcome(plain, double)}, t = {t:.1f}",
        f"no clear improvement: {gain:+.2f} points on average, "
        f"{outcome(plain, double)}, t = {t:.1f} (Drucker & LeCun found an improvement)",
    )
    made.notes.append(
        f"λ is the best of {len(WEIGHTS)} by {found['tuning']} other seeds. Looked at before: with "
        "ten of them the smallest λ was chosen, 0.003 or, where smaller ones were tried, 0.0003, "
        "and the improvement was not clear (0.19 and 0.06 points by the seeds 0 to 19); those to "
        "choose by were tripled after that"
    )
    return made


def run(arguments: argparse.Namespace) -> common.Report:
    seeds = [arguments.seed + i for i in range(100 if arguments.full else 20)]
    epochs, tuning = 200 if arguments.full else 100, 30
    found = experiment(arguments.data, epochs, seeds, tuning, arguments.device)
    name = "scikit-learn's digits, 8×8" if arguments.data == "digits" else "MNIST, 28×28"
    made = report(found, name)
    made.name = "full" if arguments.full else ""  # a record beside that of the default
    return made


if __name__ == "__main__":
    sys.exit(common.main("few_examples", __doc__, run, data=True))
