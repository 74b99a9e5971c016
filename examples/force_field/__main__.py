"""A learned potential whose forces are trained, too: small silicon clusters with Stillinger and
Weber's three-body energy, networks in the manner of SchNet (Schütt et al. 2017) and PaiNN (2021)
on energies alone and on energies and forces, every batch of another size, and a run of dynamics."""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import doubleback as db
from examples import common

SIZES = (5, 12)  # atoms in a cluster, fewest and most
CUTOFF = 2.4  # of the networks; the true energy ends at 1.8
EV, ANGSTROM, FEMTOSECONDS = 2.1683, 2.0951, 76.6  # units of energy, length and time for silicon
STEP = 0.01  # of the dynamics, 0.77 fs
BATCH = 16
PATHS = 8  # clusters that are followed
NAMES = ("SchNet, energies", "SchNet, energies and forces", "equivariant, energies and forces")


# --------------------------------------------------------------------------- the true energy


def true_energy(pos: Tensor, real: Tensor) -> Tensor:
    """Stillinger & Weber (1985), in their units: (C, N, 3) places, of which (C, N) are atoms → (C,)

    Σ A (B r⁻⁴ − 1) e^{1/(r−a)} over pairs + λ Σ g_ij g_ik (cos θ_jik + 1/3)² over corners, where
    g = e^{γ/(r−a)}; all ends at r = a. With u_ij the unit vectors, corners are summed as
    Σ_jk g_j g_k cos² = ‖Σ g u uᵀ‖² and Σ_jk g_j g_k cos = ‖Σ g u‖², less those with j = k.
    """
    a, strength, core, bending, width = 1.8, 7.049556277, 0.6022245584, 21.0, 1.2
    apart = pos[:, :, None] - pos[:, None]
    squared = apart.square().sum(3)
    near = (squared < (a - 0.01) ** 2) & real[:, :, None] & real[:, None]
    near &= ~torch.eye(pos.shape[1], dtype=torch.bool, device=pos.device)
    r = torch.where(near, squared, 1.0).sqrt()
    pairs = strength * (core * r**-4 - 1) * torch.exp(1 / (r - a))
    g = torch.where(near, torch.exp(width / (r - a)), 0.0)
    u = apart / r[..., None]
    corners = (
        torch.einsum("cij,cijx,cijy->cixy", g, u, u).square().sum((2, 3))
        + 2 / 3 * torch.einsum("cij,cijx->cix", g, u).square().sum(2)
        + g.sum(2).square() / 9
        - 16 / 9 * g.square().sum(2)
    )
    return torch.where(near, pairs, 0.0).sum((1, 2)) / 2 + bending / 2 * corners.sum(1)


def true_forces(pos: Tensor, real: Tensor) -> Tensor:
    with torch.enable_grad():
        pos = pos.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(true_energy(pos, real).sum(), pos)
    return -gradient


@dataclass(frozen=True)
class Clusters:
    """Clusters of unlike size, filled up with places that are no atoms."""

    pos: Tensor  # (C, N, 3)
    real: Tensor  # (C, N), whether there is an atom
    energy: Tensor  # (C,)
    forces: Tensor  # (C, N, 3)

    def __len__(self) -> int:
        return len(self.pos)


def start(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pieces of the diamond lattice around random centres."""
    cells = torch.tensor(list(itertools.product(range(-2, 3), repeat=3))).double()
    faces = torch.tensor([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]]).double()
    corners = torch.cat([faces, faces + 0.25])
    lattice = (cells[:, None] + corners).reshape(-1, 3) * (2 ** (1 / 6) * 4 / 3**0.5)
    centres = 2.6 * torch.rand(count, 1, 3, generator=generator, dtype=torch.float64)
    order = (lattice - centres).square().sum(2).argsort(1)[:, : SIZES[1]]
    atoms = torch.randint(SIZES[0], SIZES[1] + 1, (count, 1), generator=generator)
    return lattice[order] - centres, torch.arange(SIZES[1]) < atoms


def sample(chains: int, steps: int, seed: int) -> list[Clusters]:
    """Langevin dynamics of the true energy at several temperatures: three snapshots of each chain,
    each with as many clusters as there are chains."""
    generator = torch.Generator().manual_seed(seed)
    pos, real = start(chains, generator)
    # silicon melts at 0.06; hotter clusters fall apart
    temperature = 0.02 + 0.08 * torch.rand(chains, 1, 1, generator=generator, dtype=torch.float64)
    velocity, drag, step = torch.zeros_like(pos), 2.0, 0.02
    forces, taken = true_forces(pos, real), []
    for i in range(3 * steps):
        velocity = velocity + step / 2 * forces
        pos = pos + step / 2 * velocity
        kick = torch.randn(pos.shape, generator=generator, dtype=torch.float64)
        keep = 2.718281828 ** (-drag * step)
        velocity = keep * velocity + (temperature * (1 - keep**2)).sqrt() * kick * real[..., None]
        pos = pos + step / 2 * velocity
        forces = true_forces(pos, real)
        velocity = velocity + step / 2 * forces
        if (i + 1) % steps == 0:
            made = (pos, real, true_energy(pos, real), forces)
            taken.append(Clusters(*(t.float() if t.is_floating_point() else t for t in made)))
    return taken


def flat(pos: Tensor, real: Tensor) -> tuple[Tensor, ...]:
    """The network's arguments: atoms one after another, neighbours, the cluster of each atom, and
    zeros for the energies."""
    near = (torch.cdist(pos, pos) < CUTOFF) & real[:, :, None] & real[:, None]
    near &= ~torch.eye(pos.shape[1], dtype=torch.bool, device=pos.device)
    cluster, i, j = near.nonzero(as_tuple=True)
    number = (real.flatten().cumsum(0) - 1).view_as(real)
    edges = torch.stack([number[cluster, i], number[cluster, j]])
    return pos[real], edges, real.nonzero()[:, 0], pos.new_zeros(len(pos))


# ------------------------------------------------------------------------------ the networks


def dense(inputs: int, width: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, outputs))


class Interaction(nn.Module):
    """Messages of the neighbours, filtered by distance; equivariant ones carry vectors as well."""

    def __init__(self, width: int, waves: int, equivariant: bool) -> None:
        super().__init__()
        self.equivariant = equivariant
        kinds = 3 if equivariant else 1
        self.filter = dense(waves, width, kinds * width)
        self.before = nn.Linear(width, kinds * width)
        self.after = dense((2 if equivariant else 1) * width, width, kinds * width)
        self.mix = nn.Linear(width, 2 * width, bias=False) if equivariant else None

    def forward(self, h: Tensor, v: Tensor, waves: Tensor, cut: Tensor, unit: Tensor, i: Tensor,
                j: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
        """h: (atoms, width), invariant; v: (atoms, 3, width), turns with the cluster."""
        message = self.before(h)[j] * (self.filter(waves) * cut)
        if self.mix is None:
            return h + self.after(torch.zeros_like(h).index_add(0, i, message)), v
        scalar, along, carried = message.chunk(3, dim=1)
        h = h + torch.zeros_like(h).index_add(0, i, scalar)
        vector = along[:, None] * unit[:, :, None] + carried[:, None] * v[j]
        v = v + torch.zeros_like(v).index_add(0, i, vector)
        left, right = self.mix(v).chunk(2, dim=2)
        length = (left.square().sum(1) + 1e-6).sqrt()
        add, scale, product = self.after(torch.cat([h, length], dim=1)).chunk(3, dim=1)
        return h + add + product * (left * right).sum(1), v + scale[:, None] * right


class Potential(nn.Module):
    """Energies of clusters: (atoms, 3), (2, edges), (atoms,), (clusters,) → (clusters,)."""

    centres: Tensor

    def __init__(self, equivariant: bool, mean: float, width: int = 32, waves: int = 24) -> None:
        super().__init__()
        self.register_buffer("centres", torch.linspace(0.8, CUTOFF, waves))
        self.sharpness = 0.5 * (waves / (CUTOFF - 0.8)) ** 2
        self.embed = nn.Parameter(torch.randn(width))
        self.layers = nn.ModuleList(Interaction(width, waves, equivariant) for _ in range(3))
        self.head, self.mean = dense(width, width, 1), mean

    def forward(self, pos: Tensor, edges: Tensor, cluster: Tensor, like: Tensor) -> Tensor:
        i, j = edges[0], edges[1]
        apart = pos[i] - pos[j]
        r = apart.square().sum(1, keepdim=True).sqrt()
        waves = torch.exp(-self.sharpness * (r - self.centres).square())
        cut = 0.5 * (torch.cos(r * (torch.pi / CUTOFF)) + 1)
        h = self.embed.expand(len(pos), -1)
        v = torch.zeros_like(pos)[:, :, None] * self.embed
        for layer in self.layers:
            h, v = layer(h, v, waves, cut, apart / r, i, j)
        return torch.zeros_like(like).index_add(0, cluster, self.head(h)[:, 0] + self.mean)


# ---------------------------------------------------------------------------------- training


def energy_loss(energy: Tensor, truth: Tensor, cluster: Tensor) -> Tensor:
    return ((energy - truth).square() / torch.bincount(cluster)).mean()


def train(
    name: str, data: Clusters, steps: int, seed: int, device: torch.device
) -> db.WithGradient:
    """The trained network as (energies, gradient by places)."""
    torch.manual_seed(seed)
    mean = (data.energy.sum() / data.real.sum()).item()
    net = Potential(name.startswith("equivariant"), mean).to(device)
    model = db.WithGradient(net, wrt="pos")
    optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        given, energy, forces = draw_batch(data, generator, device)
        optimiser.zero_grad()
        if name.endswith("forces"):
            found, gradient = model(*given)
            loss = energy_loss(found, energy, given[2]) + F.mse_loss(-gradient, forces)
        else:
            loss = energy_loss(net(*given), energy, given[2])
        loss.backward()
        optimiser.step()
        schedule.step()
    return model


def draw_batch(data: Clusters, generator: torch.Generator, device: torch.device):
    """The network's arguments, energies, forces: other numbers of atoms and pairs each time."""
    rows = torch.randint(len(data), (BATCH,), generator=generator)
    real = data.real[rows]
    given = tuple(t.to(device) for t in flat(data.pos[rows], real))
    return given, data.energy[rows].to(device), data.forces[rows][real].to(device)


def stock_step(net: nn.Module) -> Callable:
    def step(given: tuple, energy: Tensor, forces: Tensor) -> None:
        pos = given[0].detach().requires_grad_()
        found = net(pos, *given[1:])
        (gradient,) = torch.autograd.grad(found.sum(), pos, create_graph=True)
        (energy_loss(found, energy, given[2]) + F.mse_loss(-gradient, forces)).backward()

    return step


def our_step(model: db.WithGradient) -> Callable:
    def step(given: tuple, energy: Tensor, forces: Tensor) -> None:
        found, gradient = model(*given)
        (energy_loss(found, energy, given[2]) + F.mse_loss(-gradient, forces)).backward()

    return step


def rates(
    model: db.WithGradient, data: Clusters, count: int, device: torch.device
) -> dict[str, float]:
    """Steps per second without the optimiser, in turn and in changing order; from lower quartiles
    of the times, since whatever else runs on the machine can only add to them."""
    clock = common.clock(device)
    generator = torch.Generator().manual_seed(0)
    ways = {"stock": stock_step(model.net), "ours": our_step(model)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(count + 5):  # the first five are not counted
        batch = draw_batch(data, generator, device)
        for name, step in list(ways.items())[:: 1 if turn % 2 else -1]:
            model.zero_grad()
            begin = clock()
            step(*batch)
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn >= 5:
                times[name].append(clock() - begin)
    return {name: 1 / statistics.quantiles(taken, n=4)[0] for name, taken in times.items()}


# --------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Found:
    energy: float  # mean absolute error, meV per atom
    force: float  # mean absolute error of a component, meV/Å
    learned_drift: float  # largest change of kinetic + learned energy, meV per atom, median path
    true_drift: float  # the same for kinetic + true energy
    curve: Tensor  # (times,) change of kinetic + true energy, meV per atom, median path
    seen: Tensor  # (components, 2) true and learned forces, eV/Å
    rates: dict[str, float]  # steps per second, where they were measured


def measure(
    model: db.WithGradient, test: Clusters, steps: int, seed: int, rates: dict[str, float]
) -> Found:
    device = next(model.parameters()).device
    atoms = test.real.sum(1)
    with torch.no_grad():
        given = [t.to(device) for t in flat(test.pos, test.real)]
        energy, gradient = (t.cpu() for t in model(*given))
    truth = test.forces[test.real]
    learned, true = follow(model, test.pos[:PATHS], test.real[:PATHS], steps, seed, device)
    return Found(
        energy=1e3 * EV * ((energy - test.energy) / atoms).abs().mean().item(),
        force=1e3 * EV / ANGSTROM * (gradient + truth).abs().mean().item(),
        learned_drift=learned.abs().amax(0).median().item(),
        true_drift=true.abs().amax(0).median().item(),
        curve=true.abs().median(1).values,
        seen=EV / ANGSTROM * torch.stack([truth.flatten(), -gradient.flatten()], dim=1),
        rates=rates,
    )


@torch.no_grad()
def follow(
    model: db.WithGradient, pos: Tensor, real: Tensor, steps: int, seed: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Velocity Verlet by learned forces from 0.04 (1000 K) on: (times, clusters) changes of kinetic
    + learned and of kinetic + true energy, meV per atom."""
    generator = torch.Generator().manual_seed(seed)
    velocity = 0.04**0.5 * torch.randn(pos.shape, generator=generator) * real[..., None]

    def learned(pos: Tensor) -> tuple[Tensor, Tensor]:
        energy, gradient = model(*(t.to(device) for t in flat(pos, real)))
        forces = torch.zeros_like(pos)
        forces[real] = -gradient.cpu()
        return energy.cpu(), forces

    energy, forces = learned(pos)
    totals = []
    for _ in range(steps + 1):
        kinetic = velocity.double().square().sum((1, 2)) / 2
        totals.append(torch.stack([kinetic + energy, kinetic + true_energy(pos.double(), real)]))
        velocity = velocity + STEP / 2 * forces
        pos = pos + STEP * velocity
        energy, forces = learned(pos)
        velocity = velocity + STEP / 2 * forces
    changes = 1e3 * EV * (torch.stack(totals, dim=1) - totals[0][:, None]) / real.sum(1)
    return changes[0], changes[1]


def experiment(
    chains: int, steps: int, path: int, seed: int, device: torch.device,
    names: tuple[str, ...] = NAMES, timed: int = 0,
) -> dict[str, Found]:  # fmt: skip
    taken = sample(chains, 150, seed)
    cut = 4 * chains // 5  # chains that are learned from
    data, test = (
        Clusters(*(torch.cat([getattr(c, n)[rows] for c in taken]) for n in vars(taken[0])))
        for rows in (slice(cut), slice(cut, None))
    )
    found = {}
    for name in names:
        model = train(name, data, steps, seed, device)
        own = rates(model, data, timed, device) if timed and name.endswith("forces") else {}
        found[name] = measure(model, test, path, seed, own)
    return found


# ------------------------------------------------------------------------------- the report


COLOURS: dict[str, str] = dict(zip(NAMES, (common.ORANGE, common.BLUE, common.GREEN), strict=True))


def draw(found: dict[str, Found]):
    figure, axes = common.panels(4, width=12, height=3.3, width_ratios=[1, 1, 1, 1.5])
    limit = found[NAMES[0]].seen[:, 0].abs().quantile(0.998).item()
    for axis, (name, one) in zip(axes, found.items(), strict=False):
        axis.plot([-limit, limit], [-limit, limit], color=common.GREY, lw=1)
        axis.scatter(*one.seen[:3000].T, s=2, color=COLOURS[name], alpha=0.4, lw=0)
        axis.set(xlim=(-limit, limit), ylim=(-limit, limit), aspect="equal")
        axis.set(xticks=(-2, 0, 2), yticks=(-2, 0, 2))
        axis.set(xlabel="true force, eV/Å", title=name.replace(", ", ",\n"))
    axes[0].set_ylabel("learned force, eV/Å")
    last = axes[3]
    for name, one in found.items():
        times = torch.arange(len(one.curve)) * (STEP * FEMTOSECONDS / 1e3)
        last.semilogy(times[1:], one.curve[1:], color=COLOURS[name], lw=1.5, label=name)
    last.set(xlabel="time, ps", title="Change of the true total energy,\nmeV per atom")
    last.legend(fontsize=7, loc="lower right")
    return figure


def report(runs: dict[str, list[Found]], data: str) -> common.Report:
    def column(name: str, value: str, style: str) -> str:
        return common.spread([getattr(f, value) for f in runs[name]], style)

    def mean(name: str, value: str) -> float:
        return statistics.fmean(getattr(f, value) for f in runs[name])

    def rate(name: str, way: str) -> str:
        seen = [f.rates[way] for f in runs[name] if f.rates]
        return f"{statistics.median(seen):.0f}" if seen else ""

    rows: list[Sequence[str]] = [
        (
            name,
            column(name, "energy", "{:.1f}"),
            column(name, "force", "{:.0f}"),
            column(name, "learned_drift", "{:.2f}"),
            column(name, "true_drift", "{:.3g}"),
            rate(name, "stock"),
            rate(name, "ours"),
        )
        for name in runs
    ]
    columns = ("network, trained on", "energy error, meV/atom", "force error, meV/Å",
               "drift of learned energy, meV/atom", "drift of true energy, meV/atom",
               "steps/s, stock autograd", "steps/s, WithGradient")  # fmt: skip
    made = common.Report(
        f"Stillinger–Weber clusters of {SIZES[0]} to {SIZES[1]} atoms, {data}",
        columns,
        rows,
        draw({name: found[0] for name, found in runs.items()}),
    )
    without, schnet, equivariant = NAMES
    before, after = mean(without, "force"), mean(schnet, "force")
    made.claim(
        after < before,
        f"forces in the loss lower the error of forces {before / after:.1f} times "
        f"({before:.0f} → {after:.0f} meV/Å)",
        f"forces in the loss do not lower their error ({before:.0f} → {after:.0f} meV/Å)",
    )
    plain, taught = mean(without, "energy"), mean(schnet, "energy")
    made.claim(
        taught < plain,
        f"they lower SchNet's error of energies, too ({plain:.1f} → {taught:.1f} meV per atom)",
        f"they do not lower SchNet's error of energies ({plain:.1f} → {taught:.1f} meV per atom)",
    )
    made.claim(
        mean(equivariant, "force") < after,
        f"the equivariant network's are better still ({mean(equivariant, 'force'):.0f} meV/Å)",
        f"the equivariant network's are no better ({mean(equivariant, 'force'):.0f} meV/Å)",
    )
    drift = max(mean(name, "learned_drift") for name in runs)
    made.claim(
        drift < 1,
        "dynamics by learned forces conserve the learned energy, whatever was trained on: they are "
        f"its gradient (largest change {drift:.2f} meV per atom)",
        f"dynamics by learned forces do not conserve the learned energy: {drift:.2f} meV per atom",
    )
    before, after = mean(without, "true_drift"), mean(schnet, "true_drift")
    made.claim(
        after < before,
        "the true energy is kept better along them where forces were trained "
        f"({before:.3g} → {after:.3g} meV per atom)",
        f"the true energy is not kept better along them ({before:.3g} → {after:.3g} meV per atom)",
    )
    speeds = [f.rates["ours"] / f.rates["stock"] for name in runs for f in runs[name] if f.rates]
    if speeds:
        told = " and ".join(
            f"{statistics.median(f.rates['ours'] / f.rates['stock'] for f in runs[name]):.2f} times"
            for name in NAMES[1:]
        )
        made.claim(
            min(speeds) > 1.05,
            f"a step by `WithGradient` is faster than by stock autograd: {told} as many per second",
            f"a step by `WithGradient` is not faster than by stock autograd for both networks: "
            f"{told} as many per second",
        )
    made.notes.append(
        "rates are those of steps without the optimiser (lower quartiles of times, on a CPU the "
        "processor's), both ways in turn on the same batches, every one with other numbers of "
        "atoms and pairs; compare them with each other, not with those of another machine"
    )
    made.notes.append(
        f"drift: largest change within the run, median of {PATHS} clusters that were not trained "
        "on; by wrong forces atoms may fall into each other, where the true energy is enormous"
    )
    made.numbers = {
        name: [{k: v for k, v in vars(f).items() if not isinstance(v, Tensor)} for f in found]
        for name, found in runs.items()
    }
    return made


def run(arguments: argparse.Namespace) -> common.Report:
    full = arguments.full
    chains, path = (1000, 4000) if full else (150, 1000)
    runs: dict[str, list[Found]] = {name: [] for name in NAMES}
    for seed in range(arguments.seed, arguments.seed + (3 if full else 1)):
        found = experiment(
            chains, 20_000 if full else 1000, path, seed, arguments.device, timed=100
        )
        for name, one in found.items():
            runs[name].append(one)
    picoseconds = path * STEP * FEMTOSECONDS / 1e3
    return report(runs, f"{3 * (4 * chains // 5)} to learn from; dynamics of {picoseconds:.1f} ps")


if __name__ == "__main__":
    sys.exit(common.main("force_field", __doc__, run))
