"""A network that learns an energy H(q, p) from its gradient conserves it; one that learns the
motion itself does not (Hamiltonian networks, Greydanus et al. 2019): pendulum and two bodies."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import doubleback as db
from examples import common

Field = Callable[[Tensor], Tensor]  # (B, 2n), positions then momenta → their rates of change


@dataclass(frozen=True)
class System:
    name: str
    energy: Callable[[Tensor], Tensor]  # (B, 2n) → (B,)
    start: Callable[[int, torch.Generator], Tensor]  # count → initial states
    duration: float  # of training trajectories
    horizon: float  # how far the learned motion is followed
    step: float
    noise: float  # in the rates of change that are learned from

    def field(self, state: Tensor) -> Tensor:
        """(∂H/∂p, −∂H/∂q) of the true energy."""
        with torch.enable_grad():
            state = state.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.energy(state).sum(), state)
        return symplectic(gradient)


def symplectic(gradient: Tensor) -> Tensor:
    """(∂H/∂q, ∂H/∂p) → (q̇, ṗ) = (∂H/∂p, −∂H/∂q)."""
    in_q, in_p = gradient.chunk(2, dim=1)
    return torch.cat([in_p, -in_q], dim=1)


def pendulum_energy(state: Tensor) -> Tensor:
    """H = p²/2 + 3 (1 − cos q)"""
    q, p = state.unbind(1)
    return p.square() / 2 + 3 * (1 - torch.cos(q))


def pendulum_start(count: int, generator: torch.Generator) -> Tensor:
    """Swings of middling height, none over the top."""
    angle = 2 * math.pi * torch.rand(count, generator=generator)
    radius = 0.8 + 1.2 * torch.rand(count, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)


def bodies_energy(state: Tensor) -> Tensor:
    """H = (‖p₁‖² + ‖p₂‖²)/2 − 1/‖q₁ − q₂‖"""
    first, second = state[:, 0:2], state[:, 2:4]
    return state[:, 4:].square().sum(1) / 2 - 1 / (first - second).norm(dim=1)


def bodies_start(count: int, generator: torch.Generator) -> Tensor:
    """Nearly circular orbits around a common centre at rest."""
    radius = 0.5 + 0.5 * torch.rand(count, generator=generator)
    angle = 2 * math.pi * torch.rand(count, generator=generator)
    # a circle needs a speed of 1/(2√r); up to 5 % more or less bends it
    speed = (0.95 + 0.1 * torch.rand(count, generator=generator)) / (2 * radius.sqrt())
    q = radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
    p = speed[:, None] * torch.stack([-angle.sin(), angle.cos()], dim=1)
    return torch.cat([q, -q, p, -p], dim=1)


SYSTEMS = (
    System("pendulum", pendulum_energy, pendulum_start, 3.0, 30.0, 0.05, 0.1),
    System("two bodies", bodies_energy, bodies_start, 12.0, 30.0, 0.05, 0.02),
)


@torch.no_grad()
def follow(field: Field, state: Tensor, duration: float, step: float) -> Tensor:
    """Runge–Kutta of order four: (times, B, 2n)."""
    path = [state]
    for _ in range(round(duration / step)):
        a = field(state)
        b = field(state + step / 2 * a)
        c = field(state + step / 2 * b)
        d = field(state + step * c)
        state = state + step / 6 * (a + 2 * b + 2 * c + d)
        path.append(state)
    return torch.stack(path)


def network(inputs: int, outputs: int) -> nn.Module:
    width = 128
    return nn.Sequential(
        nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
        nn.Linear(width, outputs),
    )  # fmt: skip


def examples_of(system: System, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """States along true trajectories and their rates of change, with noise."""
    generator = torch.Generator().manual_seed(seed)
    start = system.start(count, generator)
    states = follow(system.field, start, system.duration, system.step)[::4].flatten(0, 1)
    rates = system.field(states)
    return states, rates + system.noise * torch.randn(rates.shape, generator=generator)


def train(
    system: System, hamiltonian: bool, steps: int, seed: int, device: torch.device
) -> tuple[Field, float]:
    """The learned field, and its mean squared error on new states without noise."""
    states, rates = (t.to(device) for t in examples_of(system, 40, seed))
    torch.manual_seed(seed)
    size = states.shape[1]
    net = network(size, 1 if hamiltonian else size).to(device)
    # (q̇, ṗ) = (∂H/∂p, −∂H/∂q) is a statement on ∇H: its target is the rates, turned back
    model = db.Penalised(net, db.GradientMatch())
    targets = -symplectic(rates)
    optimiser = torch.optim.Adam(net.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = torch.randint(len(states), (256,), generator=generator)
        optimiser.zero_grad()
        if hamiltonian:
            _, loss = model(states[rows], targets[rows])
        else:
            loss = (net(states[rows]) - rates[rows]).square().sum(1).mean()
        loss.backward()
        optimiser.step()
        schedule.step()
    for parameter in net.parameters():
        parameter.requires_grad_(False)

    def field(state: Tensor) -> Tensor:
        if not hamiltonian:
            return net(state)
        with torch.enable_grad():
            state = state.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(net(state).sum(), state)
        return symplectic(gradient)

    fresh = examples_of(system, 20, seed + 10_000)[0].to(device)
    return field, (field(fresh) - system.field(fresh)).square().mean().item()


@dataclass(frozen=True)
class Found:
    error: float  # of the field
    energy: float  # mean squared deviation from the starting energy
    drift: float  # mean |H(T) − H(0)| at the end
    distance: float  # mean distance from the true state over the whole time
    path: Tensor  # (times, 2n) of one trajectory
    curve: Tensor  # (times,) mean |H(t) − H(0)|


def measure(
    system: System, hamiltonian: bool, steps: int, seed: int, device: torch.device
) -> Found:
    field, error = train(system, hamiltonian, steps, seed, device)
    start = system.start(15, torch.Generator().manual_seed(seed + 20_000)).to(device)
    path = follow(field, start, system.horizon, system.step)
    truth = follow(system.field, start, system.horizon, system.step)
    energies = torch.stack([system.energy(state) for state in path])
    deviation = energies - energies[0]
    return Found(
        error=error,
        energy=deviation.square().mean().item(),
        drift=deviation[-1].abs().mean().item(),
        distance=(path - truth).norm(dim=2).mean().item(),
        path=path[:, 0].cpu(),
        curve=deviation.abs().mean(1).cpu(),
    )


def experiment(steps: int, seeds: list[int], device: torch.device) -> dict[str, dict]:
    return {
        system.name: {
            kind: [measure(system, kind == "Hamiltonian", steps, s, device) for s in seeds]
            for kind in ("plain", "Hamiltonian")
        }
        for system in SYSTEMS
    }


def draw(found: dict[str, dict], seed: int):
    figure, axes = common.panels(4, width=12, height=3.3, width_ratios=[1, 1.15, 1, 1.15])
    colours = {"plain": common.ORANGE, "Hamiltonian": common.BLUE}
    for system, (space, drift) in zip(SYSTEMS, (axes[:2], axes[2:]), strict=True):
        start = system.start(15, torch.Generator().manual_seed(seed + 20_000))
        truth = follow(system.field, start, system.horizon, system.step)[:, 0]
        columns = (0, 1)  # angle and momentum; or where the first body is
        space.plot(*truth[:, columns].T, color=common.GREY, lw=5, alpha=0.4, label="true")
        for kind, colour in colours.items():
            one = found[system.name][kind][0]
            space.plot(*one.path[:, columns].T, color=colour, lw=1, label=kind)
            times = torch.arange(len(one.curve)) * system.step
            drift.semilogy(times[1:], one.curve[1:], color=colour, lw=1.8, label=kind)
        space.set(title=system.name, aspect="equal" if system.name == "two bodies" else "auto")
        if system.name == "pendulum":
            space.set(xlabel="angle q", ylabel="momentum p")
        else:
            space.set(xlabel="first body, x", ylabel="y")
        drift.set(xlabel="time", title="|H(t) − H(0)|, mean of 15 paths")
        drift.axvline(system.duration, color=common.GREY, lw=1, ls="--")
        drift.text(system.duration, drift.get_ylim()[0] * 1.3, " longest seen", fontsize=8)
    axes[0].legend(loc="center")
    return figure


LITERATURE = {"pendulum": "4.2e-2 → 2.5e-2", "two bodies": "6.3e-2 → 3.9e-5"}


def report(found: dict[str, dict], seed: int) -> common.Report:
    rows = []
    for system, kinds in found.items():
        for kind, runs in kinds.items():
            rows.append(
                (
                    f"{system}, {kind}",
                    common.spread([r.error for r in runs], "{:.1e}"),
                    common.spread([r.energy for r in runs], "{:.1e}"),
                    common.spread([r.drift for r in runs], "{:.1e}"),
                    common.spread([r.distance for r in runs], "{:.2f}"),
                )
            )
    columns = ("network", "error of (q̇, ṗ)", "mean (H(t) − H(0))²", "|H(T) − H(0)|",
               "distance from true path")  # fmt: skip
    made = common.Report(
        "Learned motion, followed to T = 30 from 15 new states", columns, rows, draw(found, seed)
    )
    for system, kinds in found.items():
        plain, ours = (statistics.fmean(r.energy for r in kinds[k]) for k in kinds)
        fall = float(f"{plain / ours:.2g}")
        made.claim(
            ours < plain,
            f"{system}: the squared deviation of the energy is {fall:,.0f} times smaller "
            f"({plain:.1e} → {ours:.1e}; Greydanus et al., other units and noise: "
            f"{LITERATURE[system]})",
            f"{system}: the energy is not conserved better ({plain:.1e} → {ours:.1e})",
        )
    made.numbers = {
        system: {
            kind: [{k: v for k, v in vars(r).items() if isinstance(v, float)} for r in runs]
            for kind, runs in kinds.items()
        }
        for system, kinds in found.items()
    }
    return made


def run(arguments: argparse.Namespace) -> common.Report:
    seeds = [arguments.seed + i for i in range(5 if arguments.full else 1)]
    found = experiment(10_000 if arguments.full else 2000, seeds, arguments.device)
    return report(found, arguments.seed)


if __name__ == "__main__":
    sys.exit(common.main("hamiltonian", __doc__, run))
