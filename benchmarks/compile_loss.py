"""A whole loss with derivatives inside, every batch of another size: stock autograd, torch.compile
where it runs, and `db.compile`, interleaved in one process.

PYTHONPATH=src python benchmarks/compile_loss.py --device cuda
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import doubleback as db
from timing import summary

RESULTS = Path(__file__).parent / "results"


# --------------------------------------------------------------------------------- problems


class Potential(nn.Module):
    """Continuous-filter convolutions over atoms, as in SchNet."""

    def __init__(self, width: int, layers: int, basis: int = 50) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, width)
        self.filters = nn.ModuleList(self._mlp(basis, width, width) for _ in range(layers))
        self.inwards = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.updates = nn.ModuleList(self._mlp(width, width, width) for _ in range(layers))
        self.out = self._mlp(width, width // 2, 1)
        self.register_buffer("centres", torch.linspace(0, 5, basis))

    @staticmethod
    def _mlp(inputs: int, width: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, outputs))

    def forward(self, z: Tensor, pos: Tensor, source: Tensor, target: Tensor) -> Tensor:
        h = self.embedding(z)
        distance = (pos[source] - pos[target]).square().sum(-1).sqrt()
        near = 0.5 * (torch.cos(distance * torch.pi / 5) + 1)
        waves = torch.exp(-10 * (distance[:, None] - self.centres) ** 2)
        for filters, inward, update in zip(self.filters, self.inwards, self.updates, strict=True):
            w = filters(waves) * near[:, None]
            message = torch.zeros_like(h).index_add(0, target, inward(h)[source] * w)
            h = h + update(message)
        return self.out(h).squeeze(-1)


def forces(tiny: bool) -> tuple[nn.Module, Callable, Callable]:
    """Energies and forces of molecules."""
    count = 4 if tiny else 64

    def batch(seed: int) -> tuple:
        g = torch.Generator().manual_seed(seed)
        sizes = torch.randint(9, 30, (count,), generator=g)
        atoms = int(sizes.sum())
        molecule = torch.repeat_interleave(torch.arange(count), sizes)
        pos = 2 * torch.randn(atoms, 3, generator=g)
        close = (pos[:, None] - pos[None]).norm(dim=-1) < 5
        pairs = ((molecule[:, None] == molecule[None]) & close).fill_diagonal_(False).nonzero()
        z = torch.randint(1, 20, (atoms,), generator=g)
        energy, force = torch.randn(count, generator=g), torch.randn(atoms, 3, generator=g)
        source, target = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
        return z, pos, source, target, molecule, energy, force

    def loss(net, z, pos, source, target, molecule, energy, force):
        pos = pos.detach().requires_grad_()
        atoms = net(z, pos, source, target)
        found = torch.zeros_like(energy).index_add(0, molecule, atoms)
        (gradient,) = torch.autograd.grad(found.sum(), pos, create_graph=True)
        return F.mse_loss(found, energy) + 10 * F.mse_loss(-gradient, force)

    return Potential(*((16, 2) if tiny else (128, 6))), loss, batch


def equation(tiny: bool) -> tuple[nn.Module, Callable, Callable]:
    """The residual of Δu + sin u = f at points in a cube, and u at its boundary."""
    width, points = (16, 64) if tiny else (256, 8192)
    layers: list[nn.Module] = [nn.Linear(3, width), nn.Tanh()]
    for _ in range(3):
        layers += [nn.Linear(width, width), nn.Tanh()]
    net = nn.Sequential(*layers, nn.Linear(width, 1))

    def batch(seed: int) -> tuple:
        g = torch.Generator().manual_seed(seed)
        inside = torch.rand(points + 37 * seed, 3, generator=g)
        edge = torch.rand(points // 4 + 11 * seed, 3, generator=g)
        edge[:, 0] = edge[:, 0].round()
        return inside, edge

    def loss(net, inside, edge):
        x = inside.detach().requires_grad_()
        u = net(x)
        (g,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        laplacian = sum(
            torch.autograd.grad(g[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(3)
        )
        residual = laplacian + u.squeeze(1).sin() - x.prod(1)
        return residual.square().mean() + 10 * net(edge).square().mean()

    return net, loss, batch


def critic(tiny: bool) -> tuple[nn.Module, Callable, Callable]:
    """The R1 penalty of a convolutional critic."""
    width, side, count = (4, 16, 4) if tiny else (64, 64, 32)
    layers: list[nn.Module] = []
    channels = 3
    for k in range(4):
        out = width * 2**k
        layers += [nn.Conv2d(channels, out, 3, stride=2, padding=1), nn.BatchNorm2d(out), nn.SiLU()]
        channels = out
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * (side // 16) ** 2, 1))

    def batch(seed: int) -> tuple:
        g = torch.Generator().manual_seed(seed)
        return (torch.randn(count + seed, 3, side, side, generator=g),)

    def loss(net, x):
        x = x.detach().requires_grad_()
        out = net(x)
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.softplus(-out).mean() + 5 * g.square().sum((1, 2, 3)).mean()

    return net, loss, batch


PROBLEMS = {"forces": forces, "equation": equation, "critic": critic}


# -------------------------------------------------------------------------------- measuring


class Method:
    """One way to compute the same step, and what it cost."""

    def __init__(self, name: str, step: Callable, net: nn.Module, device: str) -> None:
        self.name, self.step, self.net, self.device = name, step, net, device
        self.samples: list[float] = []
        self.first_s = 0.0
        self.peak = 0
        self.error: str | None = None
        self.worst = 0.0

    def __call__(self, args: tuple) -> float:
        for p in self.net.parameters():
            p.grad = None
        self._wait()
        start = time.perf_counter()
        self.step(self.net, *args).backward()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def warm_up(self, batches: list[tuple]) -> None:
        """Every batch once: whatever compiles, compiles here."""
        try:
            self.first_s = sum(self(args) for args in batches)
            self(batches[0])
            if self.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                for args in batches:
                    self(args)
                self.peak = torch.cuda.max_memory_allocated() - before
        except Exception as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            self.error = f"{type(error).__name__}: {lines[0] if lines else ''}"

    def compare(self, wanted: list[Tensor], args: tuple) -> None:
        """The largest relative difference of a parameter's gradient from float64's."""
        self(args)
        largest = max(w.norm() for w in wanted)
        for p, w in zip(self.net.parameters(), wanted, strict=True):
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            scale = torch.maximum(w.norm(), 1e-3 * largest)
            self.worst = max(self.worst, ((grad.double() - w).norm() / scale).item())

    def row(self) -> dict:
        if self.error:
            return {"method": self.name, "error": self.error}
        row = {"method": self.name, **summary(self.samples), "all_sizes_once_s": self.first_s}
        row |= {"gradient_error": self.worst, "peak_bytes": self.peak or None}
        if isinstance(self.step, db_compiled):
            row["traces"] = self.step.traces
        return row


db_compiled = type(db.compile(lambda: None))


def exact(loss: Callable, net: nn.Module, args: tuple) -> list[Tensor]:
    """Stock autograd in float64."""
    twin = copy.deepcopy(net).double()
    args = tuple(t.double() if t.is_floating_point() else t for t in args)
    for p in twin.parameters():
        p.grad = None
    loss(twin, *args).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in twin.parameters()]


def measure(name: str, chosen: argparse.Namespace) -> dict:
    torch.manual_seed(0)
    torch._dynamo.reset()
    net, loss, make = PROBLEMS[name](chosen.tiny)
    net.to(chosen.device)
    batches = [tuple(t.to(chosen.device) for t in make(seed)) for seed in range(chosen.sizes)]
    steps: dict[str, Callable] = {"stock": loss, "torch.compile": torch.compile(loss)}
    steps["db.compile replayed"] = db.compile(loss, compiler="eager", strict=True)
    steps["db.compile"] = db.compile(loss, strict=True)
    wanted = [method for method in steps if not chosen.methods or method in chosen.methods]
    methods = [Method(m, steps[m], copy.deepcopy(net), chosen.device) for m in wanted]
    for method in methods:
        print(f"{name}: {method.name} …", file=sys.stderr, flush=True)
        method.warm_up(batches)
    live = [method for method in methods if method.error is None]
    gradients = exact(loss, net, batches[0])
    for method in live:
        method.net.load_state_dict(net.state_dict())
        method.compare(gradients, batches[0])
    for _ in range(chosen.repeats):
        for args in batches:
            for method in live:
                method.samples.append(1e3 * method(args))
    return {"problem": name, "sizes": chosen.sizes, "rows": [m.row() for m in methods]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("problems", nargs="*", help=f"of {', '.join(PROBLEMS)}; all by default")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--sizes", type=int, default=16, help="batches, each of another size")
    parser.add_argument("--repeats", type=int, default=8, help="rounds over all of them")
    parser.add_argument("--methods", nargs="*", help="of the methods, by name; all by default")
    parser.add_argument("--tiny", action="store_true", help="small nets, to try the script")
    parser.add_argument("--out", type=Path, help="JSON; default results/compile-loss-DEVICE.json")
    chosen = parser.parse_args()
    unknown = set(chosen.problems) - set(PROBLEMS)
    if unknown:
        parser.error(f"no problem is called {', '.join(unknown)}; there are {', '.join(PROBLEMS)}")
    cuda = chosen.device == "cuda"
    report = {
        "command": f"python benchmarks/compile_loss.py {' '.join(sys.argv[1:])}".strip(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "problems": [measure(name, chosen) for name in chosen.problems or PROBLEMS],
    }
    for problem in report["problems"]:
        print(problem["problem"])
        for row in problem["rows"]:
            print("  " + ", ".join(f"{k} {v}" for k, v in row.items()))
    path = chosen.out or RESULTS / f"compile-loss-{chosen.device}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
