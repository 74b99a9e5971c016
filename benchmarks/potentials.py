"""Interatomic potentials, each written here from its paper's formulas: SchNet, PaiNN, and one with
tensor products of spherical harmonics up to l = 2. And batches of molecules, no two alike in size.

    net(pos, z, edges, batch, like) → energies

pos: (atoms, 3); z: (atoms,), numbers of elements; edges: (2, pairs), who hears whom; batch:
(atoms,), the molecule of each atom; like: any tensor with one row per molecule.
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CUTOFF = 5.0
INPUTS = ("pos", "z", "edges", "batch", "like")


def dense(inputs: int, width: int, outputs: int, between: type[nn.Module] = nn.SiLU) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, width), between(), nn.Linear(width, outputs))


def directions(pos: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    """Of each pair the unit vector and the distance, (pairs, 3) and (pairs, 1)."""
    apart = pos[edges[0]] - pos[edges[1]]
    distance = apart.square().sum(-1, keepdim=True).add(1e-12).sqrt()
    return apart / distance, distance


def fade(distance: Tensor) -> Tensor:
    """Cosine from 1 to 0 at the cutoff."""
    return 0.5 * (torch.cos(distance * (math.pi / CUTOFF)) + 1.0)


def bessel(distance: Tensor, count: int) -> Tensor:
    """sin(nπr/c)/r for n = 1 … count."""
    n = torch.arange(1, count + 1, device=distance.device, dtype=distance.dtype)
    return torch.sin(distance * (n * (math.pi / CUTOFF))) / distance


def gathered(message: Tensor, to: Tensor, like: Tensor) -> Tensor:
    """Messages added up at their atoms, `like` (atoms, …)."""
    return message.new_zeros(like.shape[0], *message.shape[1:]).index_add(0, to, message)


# --------------------------------------------------------------------------------- SchNet


class Shifted(nn.Module):
    """softplus(x) − log 2."""

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(x) - 0.6931471805599453


class Continuous(nn.Module):
    """A convolution whose filter is a function of the distance."""

    def __init__(self, width: int, waves: int) -> None:
        super().__init__()
        self.filter = dense(waves, width, width, Shifted)
        self.before = nn.Linear(width, width, bias=False)
        self.after = dense(width, width, width, Shifted)

    def forward(self, h: Tensor, waves: Tensor, cut: Tensor, edges: Tensor) -> Tensor:
        message = self.before(h)[edges[1]] * (self.filter(waves) * cut)
        return h + self.after(gathered(message, edges[0], h))


class SchNet(nn.Module):
    """Continuous-filter convolutions over neighbours (Schütt et al., 2017)."""

    centres: Tensor

    def __init__(self, width: int = 128, layers: int = 3, waves: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.register_buffer("centres", torch.linspace(0, CUTOFF, waves))
        self.layers = nn.ModuleList(Continuous(width, waves) for _ in range(layers))
        self.head = dense(width, width // 2, 1, Shifted)

    def forward(self, pos: Tensor, z: Tensor, edges: Tensor, batch: Tensor, like: Tensor) -> Tensor:
        _, distance = directions(pos, edges)
        waves = torch.exp(-10.0 * (distance - self.centres).square())
        h = self.embed(z)
        for layer in self.layers:
            h = layer(h, waves, fade(distance), edges)
        return gathered(self.head(h)[:, 0], batch, like)


# ---------------------------------------------------------------------------------- PaiNN


class Polarised(nn.Module):
    """A message and an update of scalars h (atoms, width) and vectors v (atoms, 3, width)."""

    def __init__(self, width: int, waves: int) -> None:
        super().__init__()
        self.filter = nn.Linear(waves, 3 * width)
        self.message = dense(width, width, 3 * width)
        self.mix = nn.Linear(width, 2 * width, bias=False)
        self.update = dense(2 * width, width, 3 * width)

    def forward(
        self, h: Tensor, v: Tensor, waves: Tensor, cut: Tensor, unit: Tensor, edges: Tensor
    ) -> tuple[Tensor, Tensor]:
        to, of = edges[0], edges[1]
        message = self.message(h)[of] * (self.filter(waves) * cut)
        scalar, carried, along = message.chunk(3, dim=1)
        vector = carried[:, None] * v[of] + along[:, None] * unit[:, :, None]
        h = h + gathered(scalar, to, h)
        v = v + gathered(vector, to, h)
        left, right = self.mix(v).chunk(2, dim=2)
        length = (right.square().sum(1) + 1e-8).sqrt()
        scale, product, add = self.update(torch.cat([h, length], dim=1)).chunk(3, dim=1)
        return h + add + product * (left * right).sum(1), v + scale[:, None] * left


class PaiNN(nn.Module):
    """Messages of scalars and vectors (Schütt, Unke & Gastegger, 2021)."""

    def __init__(self, width: int = 128, layers: int = 3, waves: int = 20) -> None:
        super().__init__()
        self.embed, self.waves = nn.Embedding(100, width), waves
        self.layers = nn.ModuleList(Polarised(width, waves) for _ in range(layers))
        self.head = dense(width, width // 2, 1)

    def forward(self, pos: Tensor, z: Tensor, edges: Tensor, batch: Tensor, like: Tensor) -> Tensor:
        unit, distance = directions(pos, edges)
        waves, cut = bessel(distance, self.waves), fade(distance)
        h = self.embed(z)
        v = h.new_zeros(h.shape[0], 3, h.shape[1])
        for layer in self.layers:
            h, v = layer(h, v, waves, cut, unit, edges)
        return gathered(self.head(h)[:, 0], batch, like)


# -------------------------------------------------------------------------- tensor products


def harmonics(unit: Tensor) -> list[Tensor]:
    """Real spherical harmonics of l = 0, 1, 2, each with mean square 1 per component."""
    x, y, z = unit.unbind(-1)
    second = [x * y, y * z, (3 * z * z - 1) / 12**0.5, x * z, (x * x - y * y) / 2]
    first = torch.stack([y, z, x], -1)
    return [torch.ones_like(x)[:, None], 3**0.5 * first, 15**0.5 * torch.stack(second, -1)]


def couplings() -> dict[tuple[int, int, int], Tensor]:
    """C of h⊗Y → Σ_ab C_abc h_a Y_b for each l₁, l₂, l₃ ≤ 2 whose sum is even: the mean over the
    sphere of Y_a Y_b Y_c, by a quadrature that is exact for their degree. Norm √(2l₃ + 1)."""
    heights, weights = _gauss(4)
    angles = torch.arange(8, dtype=torch.float64) * (math.pi / 4)
    flat = (1 - heights.square()).sqrt()
    points = [
        torch.stack([s * angles.cos(), s * angles.sin(), h.expand(8)], 1)
        for h, s in zip(heights, flat, strict=True)
    ]
    y = harmonics(torch.cat(points))
    weight = weights.repeat_interleave(8) / weights.sum() / 8
    found = {}
    for a, b, c in itertools.product(range(3), repeat=3):
        if (a + b + c) % 2 or not abs(a - b) <= c <= a + b:
            continue
        C = torch.einsum("n,na,nb,nc->abc", weight, y[a], y[b], y[c])
        found[a, b, c] = (C * ((2 * c + 1) ** 0.5 / C.norm())).to(torch.get_default_dtype())
    return found


def _gauss(count: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights of Gauss and Legendre on [−1, 1], by their recurrence's eigenvalues."""
    n = torch.arange(1, count, dtype=torch.float64)
    off = n / (4 * n * n - 1).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return nodes, 2 * vectors[0].square()


class Product(nn.Module):
    """Messages h⊗Y weighted by the distance, added up, mixed and gated, for each l.

    h: one (atoms, 2l+1, width) for each l of `given`; so are the results, for each l of `wanted`.
    """

    def __init__(self, width: int, waves: int, given: range, wanted: range) -> None:
        super().__init__()
        self.paths = [p for p in couplings() if p[0] in given and p[2] in wanted]
        for path in self.paths:
            self.register_buffer("c{}{}{}".format(*path), couplings()[path])
        self.given, self.wanted, self.width = given, wanted, width
        self.weights = dense(waves, 64, len(self.paths) * width)
        self.before = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in given)
        self.after = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in wanted)
        self.keep = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in wanted)
        gated = (len(wanted) - 1) * width
        self.gates = nn.Linear(width, gated) if gated else None

    def forward(self, h: list[Tensor], y: list[Tensor], waves: Tensor, edges: Tensor):
        to, of = edges[0], edges[1]
        sent = [linear(each)[of] for linear, each in zip(self.before, h, strict=True)]
        weights = self.weights(waves).split(self.width, 1)
        messages: list[list[Tensor]] = [[] for _ in self.wanted]
        for (a, b, c), weight in zip(self.paths, weights, strict=True):
            turn = torch.einsum("abc,eb->eca", getattr(self, f"c{a}{b}{c}"), y[b])
            messages[c].append(torch.bmm(turn, sent[a]) * weight[:, None])
        results = []
        for l in self.wanted:  # noqa: E741
            scale = 1 / (10 * len(messages[l])) ** 0.5  # about as many neighbours
            new = self.after[l](gathered(sum(messages[l]) * scale, to, h[0]))
            results.append(new + self.keep[l](h[l]) if l in self.given else new)
        scalars = results[0]
        if self.gates is None:
            return [F.silu(scalars)]
        gates = torch.sigmoid(self.gates(scalars)).split(self.width, 2)
        return [F.silu(scalars), *(g * r for g, r in zip(gates, results[1:], strict=True))]


class Equivariant(nn.Module):
    """Tensor products with spherical harmonics up to l = 2, in the manner of NequIP (Batzner et
    al., 2022), with the parities that they have by themselves."""

    def __init__(self, width: int = 64, layers: int = 3, waves: int = 8) -> None:
        super().__init__()
        self.embed, self.waves = nn.Embedding(100, width), waves
        ends = [range(1), *[range(3)] * (layers - 1), range(1)]
        self.layers = nn.ModuleList(
            Product(width, waves, a, b) for a, b in itertools.pairwise(ends)
        )
        self.head = dense(width, width // 2, 1)

    def forward(self, pos: Tensor, z: Tensor, edges: Tensor, batch: Tensor, like: Tensor) -> Tensor:
        unit, distance = directions(pos, edges)
        waves, y = bessel(distance, self.waves) * fade(distance), harmonics(unit)
        h = [self.embed(z)[:, None]]
        for layer in self.layers:
            h = layer(h, y, waves, edges)
        return gathered(self.head(h[0])[:, 0, 0], batch, like)


POTENTIALS = {"schnet": SchNet, "painn": PaiNN, "equivariant": Equivariant}


# --------------------------------------------------------------------------------- batches


def make_batch(molecules: int, seed: int, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Molecules of 9 to 27 atoms at random places, neighbours within the cutoff."""
    g = torch.Generator().manual_seed(seed)
    pos, z, batch, edges, start = [], [], [], [], 0
    for m in range(molecules):
        n = int(torch.randint(9, 28, (1,), generator=g))
        at = 2.2 * n ** (1 / 3) * torch.rand(n, 3, generator=g)
        near = (torch.cdist(at, at) < CUTOFF) & ~torch.eye(n, dtype=torch.bool)
        edges.append(near.nonzero().T + start)
        pos.append(at)
        z.append(torch.randint(1, 10, (n,), generator=g))
        batch.append(torch.full((n,), m))
        start += n
    made = {
        "pos": torch.cat(pos).to(dtype), "z": torch.cat(z), "edges": torch.cat(edges, 1),
        "batch": torch.cat(batch), "like": torch.zeros(molecules, dtype=dtype),
        "energy": torch.randn(molecules, generator=g).to(dtype),
        "forces": torch.randn(start, 3, generator=g).to(dtype),
    }  # fmt: skip
    return {name: t.to(device) for name, t in made.items()}


def loss_of(energy: Tensor, gradient: Tensor, given: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(energy, given["energy"]) + 10.0 * F.l1_loss(-gradient, given["forces"])
