"""What gradient penalties do for adversarial training: R1 (Mescheder et al. 2018), Roth et al.'s
penalty (2017) and WGAN-GP (Gulrajani et al. 2017) against none, on a ring of eight Gaussians and on
digits, where a classifier judges what is made."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import doubleback as db
from examples import common

MODES, RADIUS, WIDTH = 8, 2.0, 0.1  # of the ring; WIDTH: deviation of one Gaussian
BATCH, SAMPLES = 128, 2000  # points of a training step, and of those that are judged
NAMES = ("none", "R1", "Roth et al.", "WGAN-GP")
REACHED = 3  # deviations from its centre that a mode of the ring extends
SURE = 0.9  # probability from which the classifier is sure of a digit
SHARE = 0.5  # of its due samples that a mode needs to be covered; a ring without modes has less
SIDE, REACH = 60, 3.2  # of the square on which the ring's critic is drawn

Loss = Callable[[Tensor, Tensor], Tensor]  # of the critic, from true and made points


# ------------------------------------------------------------------------------------ the data


def covered(mode: Tensor, belongs: Tensor, modes: int) -> tuple[int, float]:
    """How many modes have at least SHARE of the samples that they are due, and the share of samples
    that belong to one."""
    counts = torch.bincount(mode[belongs], minlength=modes)
    due = SHARE * len(mode) / modes
    return int((counts >= due).sum()), counts.sum().item() / len(mode)


@cache
def centres() -> Tensor:
    angle = torch.arange(MODES) * (2 * math.pi / MODES)
    return RADIUS * torch.stack([angle.cos(), angle.sin()], dim=1)


def sliced(a: Tensor, b: Tensor) -> float:
    """Mean over directions of the Wasserstein distance along them; as many points in both."""
    angle = torch.arange(32) * (math.pi / 32)
    lines = torch.stack([angle.cos(), angle.sin()], dim=1)
    return ((lines @ a.T).sort().values - (lines @ b.T).sort().values).abs().mean().item()


def coverage(samples: Tensor) -> tuple[int, float]:
    """(modes of the ring that samples cover, share of them that belong to one)."""
    apart, mode = torch.cdist(samples, centres()).min(1)
    return covered(mode, apart < REACHED * WIDTH, MODES)


class Ring:
    """Eight Gaussians; the distance is the sliced Wasserstein distance."""

    name, modes, size, latent = "ring", MODES, 2, 4
    rate, slower = 4e-3, 0.25  # of learning; slower: WGAN-GP's share of it
    weights: ClassVar = {"R1": 1.0, "Roth et al.": 1.0, "WGAN-GP": 1.0}

    def __init__(self) -> None:
        self.truth = self.draw(SAMPLES, torch.Generator().manual_seed(1))

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        modes = torch.randint(MODES, (count,), generator=generator)
        return centres()[modes] + WIDTH * torch.randn(count, 2, generator=generator)

    def judge(self, samples: Tensor) -> tuple[int, float, float]:
        """(modes covered, share of the samples that belong to one, distance from the data)."""
        return *coverage(samples), sliced(samples, self.truth)


class Digits:
    """scikit-learn's digits, and a classifier of them: modes are the classes that it is sure of,
    the distance is Fréchet's in its last features, from images that nothing was trained on."""

    name, modes, size, latent = "digits", 10, 64, 16
    rate, slower = 1e-3, 1.0
    weights: ClassVar = {"R1": 1.0, "Roth et al.": 1.0, "WGAN-GP": 10.0}

    def __init__(self) -> None:
        data = common.load_images("digits", None, 0, torch.device("cpu"))
        self.images, labels = data.train[0].flatten(1), data.train[1]
        test, truth = data.test[0].flatten(1), data.test[1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.features = nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 32),
                                          nn.SiLU())  # fmt: skip
            self.classes = nn.Linear(32, 10)
            parameters = [*self.features.parameters(), *self.classes.parameters()]
            optimiser = torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)
            for rows in (r for _ in range(40) for r in torch.randperm(len(labels)).split(100)):
                optimiser.zero_grad()
                x = self.images[rows]
                out = self.classes(self.features(x + 0.1 * torch.randn_like(x)))
                F.cross_entropy(out, labels[rows]).backward()
                optimiser.step()
        with torch.no_grad():
            self.held = self.features(test)
            right = self.classes(self.held).argmax(1) == truth
        self.accuracy = right.float().mean().item()

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        return self.images[torch.randint(len(self.images), (count,), generator=generator)]

    @torch.no_grad()
    def judge(self, samples: Tensor) -> tuple[int, float, float]:
        features = self.features(samples)
        probability, mode = self.classes(features).softmax(1).max(1)
        return *covered(mode, probability >= SURE, 10), frechet(features, self.held)


def frechet(a: Tensor, b: Tensor) -> float:
    """Squared distance of the Gaussians with the rows' means and covariances A and B:
    ‖mean a − mean b‖² + tr(A + B − 2 (B^½ A B^½)^½)."""
    a, b = a.double(), b.double()
    first, second = torch.cov(a.T), torch.cov(b.T)
    values, vectors = torch.linalg.eigh(second)
    root = (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    shared = torch.linalg.eigvalsh(root @ first @ root).clamp_min(0).sqrt().sum()
    apart = (a.mean(0) - b.mean(0)).square().sum()
    return (apart + first.trace() + second.trace() - 2 * shared).item()


Data = Ring | Digits


def network(inputs: int, outputs: int) -> nn.Sequential:
    width = 96
    return nn.Sequential(
        nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(),
        nn.Linear(width, outputs),
    )  # fmt: skip


def generator_of(data: Data) -> nn.Module:
    """Pixels lie in [0, 1]; a point of the plane may lie anywhere."""
    bounded = nn.Sigmoid() if data.size > 2 else nn.Identity()
    return nn.Sequential(network(data.latent, data.size), bounded)


# ------------------------------------------------------------------------------- the penalties


def plain(critic: nn.Module, weight: float) -> Loss:
    """softplus(−D) on true points, softplus(D) on made ones."""

    def loss(true: Tensor, made: Tensor) -> Tensor:
        on_true, on_made = critic(torch.cat([true, made])).chunk(2)
        return F.softplus(-on_true).mean() + F.softplus(on_made).mean()

    return loss


def r1(critic: nn.Module, weight: float) -> Loss:
    """… + γ/2 mean ‖∇D‖² on true points; their scores come out of the same pass."""
    model = db.Penalised(critic, db.OutputGradient())

    def loss(true: Tensor, made: Tensor) -> Tensor:
        score, penalty = model(true)
        scored = F.softplus(-score).mean() + F.softplus(critic(made)).mean()
        return scored + weight / 2 * penalty

    return loss


def roth(critic: nn.Module, weight: float) -> Loss:
    """… + γ/2 (mean (1 − σ(D))² ‖∇D‖² on true points + mean σ(D)² ‖∇D‖² on made ones)."""
    model = db.WithGradient(critic)

    def loss(true: Tensor, made: Tensor) -> Tensor:
        score, gradient = model(torch.cat([true, made]))
        signed = score * torch.cat([-torch.ones_like(true), torch.ones_like(made)])[:, :1]
        penalty = signed.sigmoid().square() * gradient.square().sum(1, keepdim=True)
        return 2 * (F.softplus(signed) + weight / 2 * penalty).mean()

    return loss


def wgan_gp(critic: nn.Module, weight: float) -> Loss:
    """mean D on made − on true points + λ mean (‖∇D‖ − 1)² between them."""
    model = db.Penalised(critic, db.OutputGradient(norm=db.Deviation(1.0)))

    def loss(true: Tensor, made: Tensor) -> Tensor:
        part = torch.rand(len(true), 1, device=true.device)
        _, penalty = model(part * true + (1 - part) * made)
        on_true, on_made = critic(torch.cat([true, made])).chunk(2)
        return on_made.mean() - on_true.mean() + weight * penalty

    return loss


LOSSES: dict[str, Callable[[nn.Module, float], Loss]] = dict(
    zip(NAMES, (plain, r1, roth, wgan_gp), strict=True)
)


# ----------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Found:
    covered: float  # modes, mean over the last quarter of training
    most: int  # modes covered at best
    near: float  # share of samples that belong to a mode, over the last quarter
    distance: float  # from the data, over the last quarter
    counts: list[int]  # modes covered in the course of training
    curve: list[float]  # distance in the course of training
    samples: Tensor
    critic: Tensor  # on the ring's square, (SIDE, SIDE); nothing for digits


def train(
    name: str, data: Data, updates: int, seed: int, device: torch.device, looks: int = 30
) -> Found:
    """updates: of the critic; what is made is looked at `looks` times on the way."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    maker, critic = generator_of(data).to(device), network(data.size, 1).to(device)
    loss, wasserstein = LOSSES[name](critic, data.weights.get(name, 0.0)), name == "WGAN-GP"
    rate = data.rate * data.slower if wasserstein else data.rate
    for_maker, for_critic = (
        torch.optim.Adam(net.parameters(), lr=rate, betas=(0.5, 0.9), fused=True)
        for net in (maker, critic)
    )
    fixed = torch.randn(SAMPLES, data.latent, generator=torch.Generator().manual_seed(2)).to(device)
    samples, seen, made_by = torch.empty(0), [], list(maker.parameters())
    for i in range(1, updates + 1):
        with torch.no_grad():
            made = maker(torch.randn(BATCH, data.latent, device=device))
        for_critic.zero_grad()
        loss(data.draw(BATCH, generator).to(device), made).backward()
        for_critic.step()
        if not wasserstein or i % 5 == 0:
            for_maker.zero_grad()
            score = critic(maker(torch.randn(BATCH, data.latent, device=device)))
            lost = -score.mean() if wasserstein else F.softplus(-score).mean()
            lost.backward(inputs=made_by)  # the critic's own gradients are not asked for
            for_maker.step()
        if i % (updates // looks) == 0:
            with torch.no_grad():
                samples = maker(fixed).cpu()
            seen.append(data.judge(samples))
    late = seen[-max(1, len(seen) // 4) :]
    landscape = torch.empty(0)
    if isinstance(data, Ring):
        with torch.no_grad():
            landscape = critic(plane().to(device)).cpu().reshape(SIDE, SIDE)
    return Found(
        covered=statistics.fmean(s[0] for s in late),
        most=max(s[0] for s in seen),
        near=statistics.fmean(s[1] for s in late),
        distance=statistics.fmean(s[2] for s in late),
        counts=[s[0] for s in seen],
        curve=[s[2] for s in seen],
        samples=samples,
        critic=landscape,
    )


def plane() -> Tensor:
    line = torch.linspace(-REACH, REACH, SIDE)
    return torch.cartesian_prod(line, line).flip(1)  # rows of an image: y first


Runs = dict[str, list[Found]]  # penalty → a run for each seed


def experiment(
    data: Data, updates: int, seeds: list[int], device: torch.device, names: Sequence[str] = NAMES
) -> Runs:
    return {name: [train(name, data, updates, seed, device) for seed in seeds] for name in names}


# ------------------------------------------------------------------------------------- report


COLOURS: dict[str, str] = dict(
    zip(NAMES, (common.GREY, common.BLUE, common.GREEN, common.ORANGE), strict=True)
)


def draw(ring: Runs, digits: Runs, data: Digits, updates: tuple[int, int]):
    common.style()
    figure = common.plt.figure(figsize=(13, 5), layout="constrained")
    above, below = figure.subplots(2, 6, width_ratios=[1, 1, 1, 1, 1.3, 1.3])
    for cell, (name, runs) in zip(above, ring.items(), strict=False):
        _draw_ring(cell, runs[0], COLOURS[name] if name != "none" else "k")
        cell.set_title(f"{name}: {runs[0].counts[-1]} of {MODES}", fontsize=9)
    for cell, (name, runs) in zip(below, digits.items(), strict=False):
        rows = runs[0].samples[:36].reshape(6, 6, 8, 8)
        tiles = F.pad(rows, (1, 1, 1, 1)).permute(0, 2, 1, 3).reshape(60, 60)
        common.picture(cell, tiles, vmin=0, vmax=1)
        cell.set_title(f"{name}: {runs[0].counts[-1]} of 10", fontsize=9)
    for row, found, count, words in (
        (above, ring, updates[0], ("Modes covered", "Sliced Wasserstein distance")),
        (below, digits, updates[1], ("Classes covered", "Fréchet distance of features")),
    ):
        for axis, value, title in zip(row[4:], ("counts", "curve"), words, strict=True):
            _draw_curves(axis, found, value, count)
            axis.set_title(title)
    above[5].set_ylim(0, None)
    below[5].set_yscale("log")
    true = data.judge(data.images)[2]
    below[5].axhline(true, color=common.INK, lw=1, ls=":", label="true digits")
    below[4].set_xlabel("updates of the critic (band: all seeds)", loc="left")
    figure.legend(
        *below[5].get_legend_handles_labels(), loc="outside lower right", ncols=5, fontsize=8
    )
    return figure


def _draw_ring(cell, one: Found, colour: str) -> None:
    line = torch.linspace(-REACH, REACH, SIDE)
    low, high = one.critic.min().item(), one.critic.max().item()
    pale = 3 * high - 2 * low  # so that the highest is a light grey
    cell.contourf(line, line, one.critic, 8, cmap="Greys", vmin=low, vmax=pale)
    for x, y in centres().tolist():
        cell.add_patch(common.plt.Circle((x, y), REACHED * WIDTH, fill=False, lw=0.8))
    cell.scatter(*one.samples[:500].T, s=2, color=colour)
    cell.set(xlim=(-REACH, REACH), ylim=(-REACH, REACH), aspect="equal", xticks=[], yticks=[])


def _draw_curves(axis, found: Runs, value: str, updates: int) -> None:
    for name, runs in found.items():
        curves = torch.tensor([getattr(r, value) for r in runs], dtype=torch.float32)
        steps = torch.arange(1, curves.shape[1] + 1) * (updates // curves.shape[1])
        axis.plot(steps, curves.mean(0), color=COLOURS[name], lw=1.8, label=name)
        axis.fill_between(
            steps, curves.amin(0), curves.amax(0), color=COLOURS[name], alpha=0.2, lw=0
        )


def report(ring: Runs, digits: Runs, data: Digits, updates: tuple[int, int]) -> common.Report:
    rows: list[Sequence[str]] = [
        (
            f"{kind}, {name}",
            " ".join(f"{f.most}" for f in runs),
            " ".join(f"{f.covered:.1f}" for f in runs),
            common.spread([100 * f.near for f in runs], "{:.0f}"),
            common.spread([f.distance for f in runs], style),
        )
        for kind, found, style in (("ring", ring, "{:.3f}"), ("digits", digits, "{:.1f}"))
        for name, runs in found.items()
    ]
    classes, sure, least = data.judge(data.images)
    rows.append(("digits, true ones", f"{classes}", "", f"{100 * sure:.0f}", f"{least:.1f}"))
    columns = ("data, penalty", "modes at best, by seed", "modes in the last quarter, by seed",
               "samples that belong to one, %", "distance")  # fmt: skip
    count = len(ring[NAMES[0]])
    made = common.Report(
        f"A ring of {MODES} Gaussians and digits of 8×8, {updates[0]} and {updates[1]} updates of "
        f"the critic, {count} seeds",
        columns,
        rows,
        draw(ring, digits, data, updates),
    )
    for kind, found, most in (("ring", ring, MODES), ("digits", digits, 10)):
        _tell(made, kind, found, most)
    made.notes.append(
        f"modes: of the ring, {MODES} Gaussians, each from {SHARE:g} of its due samples within "
        f"{REACHED}σ on (by a laxer rule that was tried first, 0.25 within 4σ, a ring without "
        "modes has all, and so had each penalty); of digits, 10 classes, counted alike among "
        f"the samples of which a classifier is sure by {SURE:g} or more (it is right for "
        f"{100 * data.accuracy:.1f} % of the test images)"
    )
    made.notes.append(
        "distance: on the ring the sliced Wasserstein distance, on digits Fréchet's of the "
        "classifier's last features from those of 599 images that nothing was trained on"
    )
    made.notes.append(
        f"the ring's learning rate, {Ring.rate}, was chosen so that training without a penalty "
        "goes wrong within the run: at 0.001 little told R1 and Roth et al. from none after 1000 "
        f"updates; that of digits is the first that was tried, {Digits.rate}"
    )
    made.notes.append(
        "WGAN-GP has one step of the generator to five of the critic, so that its generator has "
        "made a fifth of the others' steps; on the ring it has a quarter of the rate, since one to "
        "one it swung to and fro"
    )
    made.numbers = {
        f"{kind}, {name}": [
            {k: v for k, v in vars(f).items() if not isinstance(v, Tensor)} for f in runs
        ]
        for kind, found in (("ring", ring), ("digits", digits))
        for name, runs in found.items()
    }
    return made


def _tell(made: common.Report, kind: str, found: Runs, modes: int) -> None:
    """What the penalties are claimed to do, of one kind of data."""
    without = found["none"]
    told = ", ".join(f"{f.covered:.1f}" for f in without)
    made.claim(
        max(f.covered for f in without) < modes - 1,
        f"{kind}: without a penalty training ends in a part of the modes, with every seed ({told} "
        f"of {modes})",
        f"{kind}: without a penalty training does not lose modes with every seed ({told})",
    )
    for name in NAMES[1:]:
        fewest = min(f.covered for f in found[name])
        theirs, ours = (statistics.fmean(f.distance for f in found[n]) for n in ("none", name))
        ahead = fewest > max(f.covered for f in without) and all(
            a.distance < b.distance for a, b in zip(found[name], without, strict=True)
        )
        numbers = f"at least {fewest:.1f} modes, distance {theirs:.3g} → {ours:.3g}"
        made.claim(
            ahead,
            f"{kind}: {name} covers more of them than none, and comes nearer, with every seed: "
            f"{numbers}",
            f"{kind}: {name} is not ahead of none in modes and distance with every seed: {numbers}",
        )
    shares = {name: 100 * statistics.fmean(f.near for f in found[name]) for name in NAMES}
    told = ", ".join(f"{name} {shares[name]:.0f} %" for name in NAMES)
    made.claim(
        min(shares[name] for name in NAMES[1:]) > shares["none"],
        f"{kind}: more samples belong to a mode: {told}",
        f"{kind}: a single sample is not surer to belong to a mode with every penalty: {told}",
    )


def run(arguments: argparse.Namespace) -> common.Report:
    updates = (10_000, 10_000) if arguments.full else (3000, 1000)
    seeds = [arguments.seed + i for i in range(8 if arguments.full else 3)]
    digits = Digits()
    ring, made = (
        experiment(data, count, seeds, arguments.device)
        for data, count in zip((Ring(), digits), updates, strict=True)
    )
    return report(ring, made, digits, updates)


if __name__ == "__main__":
    sys.exit(common.main("gan", __doc__, run))
