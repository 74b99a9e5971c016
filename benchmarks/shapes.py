"""Sizes that change: energies and forces of molecules, every batch of another size.

    PYTHONPATH=src python benchmarks/shapes.py --device cuda --out shapes.json

A SchNet-like network (widths as published: 128 features, 3 interactions, 50 radial waves) is
trained on energies and forces. All methods run in one process, interleaved batch by batch, on the
same batches; the first batches of each (captures, compilation) are timed apart. Written down:
medians and quartiles of the step, every call of the warm-up, the slowest later call, peak memory,
growth of memory over the run, and the gradient's error against float64 autograd.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import doubleback as db


class Shifted(nn.Module):
    """softplus(x) − log 2."""

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(x) - 0.6931471805599453


class Interaction(nn.Module):
    def __init__(self, width: int, waves: int) -> None:
        super().__init__()
        self.filter = nn.Sequential(nn.Linear(waves, width), Shifted(), nn.Linear(width, width))
        self.before = nn.Linear(width, width, bias=False)
        self.after = nn.Sequential(nn.Linear(width, width), Shifted(), nn.Linear(width, width))

    def forward(self, h: Tensor, waves: Tensor, cut: Tensor, i: Tensor, j: Tensor) -> Tensor:
        messages = self.before(h)[j] * (self.filter(waves) * cut)
        return h + self.after(torch.zeros_like(h).index_add(0, i, messages))


class SchNet(nn.Module):
    """Continuous-filter convolutions over neighbours (Schütt et al., 2017)."""

    def __init__(self, width: int = 128, layers: int = 3, waves: int = 50, cutoff: float = 5.0):
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.register_buffer("centres", torch.linspace(0, cutoff, waves))
        self.cutoff = cutoff
        self.layers = nn.ModuleList(Interaction(width, waves) for _ in range(layers))
        self.head = nn.Sequential(nn.Linear(width, width // 2), Shifted(), nn.Linear(width // 2, 1))

    def forward(self, pos: Tensor, z: Tensor, edges: Tensor, batch: Tensor, like: Tensor) -> Tensor:
        """like: any tensor with one row per molecule."""
        i, j = edges[0], edges[1]
        apart = (pos[i] - pos[j]).square().sum(-1, keepdim=True).add(1e-12).sqrt()
        waves = torch.exp(-10.0 * (apart - self.centres).square())
        cut = 0.5 * (torch.cos(apart * (torch.pi / self.cutoff)) + 1.0)
        h = self.embed(z)
        for layer in self.layers:
            h = layer(h, waves, cut, i, j)
        each = self.head(h)[:, 0]
        return torch.zeros_like(like).index_add(0, batch, each)


def make_batch(molecules: int, seed: int, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Molecules of 9 to 27 atoms at random places, neighbours within 5."""
    g = torch.Generator().manual_seed(seed)
    pos, z, batch, edges, start = [], [], [], [], 0
    for m in range(molecules):
        n = int(torch.randint(9, 28, (1,), generator=g))
        at = 2.2 * n ** (1 / 3) * torch.rand(n, 3, generator=g)
        near = (torch.cdist(at, at) < 5.0) & ~torch.eye(n, dtype=torch.bool)
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


INPUTS = ("pos", "z", "edges", "batch", "like")


def loss_of(energy: Tensor, gradient: Tensor, given: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(energy, given["energy"]) + 10.0 * F.l1_loss(-gradient, given["forces"])


# ------------------------------------------------------------------------------- methods


def energy_only(net: nn.Module) -> Callable:
    def step(given: dict[str, Tensor]) -> Tensor:
        loss = F.mse_loss(net(*(given[n] for n in INPUTS)), given["energy"])
        loss.backward()
        return loss

    return step


def stock(net: nn.Module) -> Callable:
    def step(given: dict[str, Tensor]) -> Tensor:
        pos = given["pos"].detach().requires_grad_()
        energy = net(pos, *(given[n] for n in INPUTS[1:]))
        (gradient,) = torch.autograd.grad(energy.sum(), pos, create_graph=True)
        loss = loss_of(energy, gradient, given)
        loss.backward()
        return loss

    return step


def patched(net: nn.Module) -> Callable:
    run = stock(net)

    def step(given: dict[str, Tensor]) -> Tensor:
        with db.patched():
            return run(given)

    return step


def with_gradient(net: nn.Module, compile: bool = False) -> Callable:
    model = db.WithGradient(net, wrt="pos", compile=compile, strict=True)

    def step(given: dict[str, Tensor]) -> Tensor:
        energy, gradient = model(*(given[n] for n in INPUTS))
        loss = loss_of(energy, gradient, given)
        loss.backward()
        return loss

    return step


def whole_step(net: nn.Module) -> Callable:
    def loss(given: dict[str, Tensor]) -> Tensor:
        pos = given["pos"].detach().requires_grad_()
        energy = net(pos, *(given[n] for n in INPUTS[1:]))
        (gradient,) = torch.autograd.grad(energy.sum(), pos, create_graph=True)
        return loss_of(energy, gradient, given)

    compiled = db.compile(loss)  # type: ignore[attr-defined]

    def step(given: dict[str, Tensor]) -> Tensor:
        value = compiled(given)
        value.backward()
        return value

    return step


METHODS: dict[str, Callable[[nn.Module], Callable]] = {
    "energy only": energy_only,
    "energy only, compiled": lambda net: energy_only(torch.compile(net, dynamic=True)),  # type: ignore[arg-type]
    "stock": stock,
    "db.patch": patched,
    "WithGradient": with_gradient,
    "WithGradient, compiled": lambda net: with_gradient(net, compile=True),
    "db.compile": whole_step,
    "backend": lambda net: stock(torch.compile(net, backend="doubleback", dynamic=True)),  # type: ignore[arg-type]
    "backend, sizes static at first": lambda net: stock(torch.compile(net, backend="doubleback")),  # type: ignore[arg-type]
}


# ---------------------------------------------------------------------------- measurement


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(step: Callable, given: dict[str, Tensor], net: nn.Module, device: str) -> float:
    net.zero_grad(set_to_none=True)
    sync(device)
    start = time.perf_counter()
    step(given)
    sync(device)
    return 1e3 * (time.perf_counter() - start)


def gradients(net: nn.Module) -> list[Tensor]:
    return [p.grad.detach().double().cpu().clone() for p in net.parameters() if p.grad is not None]


def truth(net: nn.Module, given: dict[str, Tensor], whole: bool) -> list[Tensor]:
    """By stock autograd in float64."""
    wide = copy.deepcopy(net).double()
    given = {n: t.double() if t.is_floating_point() else t for n, t in given.items()}
    (stock if whole else energy_only)(wide)(given)
    return gradients(wide)


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    """‖ours − float64's‖ / ‖float64's‖ over all parameters."""
    off = sum(float((a - b).square().sum()) for a, b in zip(found, expected, strict=True))
    return (off / sum(float(b.square().sum()) for b in expected)) ** 0.5


def measure(arguments: argparse.Namespace) -> list[dict]:
    device, dtype = arguments.device, getattr(torch, arguments.dtype)
    torch.manual_seed(0)
    net = SchNet(arguments.width).to(device, dtype)
    total = arguments.warm + arguments.batches
    batches = [make_batch(arguments.molecules, s, device, dtype) for s in range(total)]
    rows, steps = [], {}
    for name in arguments.methods:
        own = copy.deepcopy(net)
        try:
            step = METHODS[name](own)
            warm = []
            for given in batches[: arguments.warm]:
                warm.append(timed(step, given, own, device))
            found = gradients(own)
        except Exception as problem:
            print(f"{name}: {type(problem).__name__}: {str(problem)[:300]}", file=sys.stderr)
            rows.append({"method": name, "failed": f"{type(problem).__name__}: {problem}"[:300]})
            continue
        expected = truth(own, batches[arguments.warm - 1], not name.startswith("energy"))
        steps[name] = (own, step)
        rows.append({"method": name, "warm_up_ms": [round(t, 2) for t in warm],
                     "gradient_error": error(found, expected), "times": []})  # fmt: skip
        print(f"{name}: warm-up {sum(warm) / 1e3:.1f} s, error {rows[-1]['gradient_error']:.1e}")
    by_name = {row["method"]: row for row in rows}
    for given in batches[arguments.warm :]:
        for name, (own, step) in steps.items():
            by_name[name]["times"].append(timed(step, given, own, device))
    for name, (own, step) in steps.items():
        by_name[name].update(memory(own, step, batches[arguments.warm :], device))
    for row in rows:
        if "times" in row:
            times = row.pop("times")
            low, middle, high = statistics.quantiles(times, n=4)
            row.update(median_ms=round(middle, 3), quartiles_ms=[round(low, 3), round(high, 3)],
                       slowest_ms=round(max(times), 2))  # fmt: skip
    return rows


def memory(own: nn.Module, step: Callable, batches: list, device: str) -> dict:
    """Peak of one pass over the batches, and by how much what stays allocated grew."""
    if device != "cuda":
        return {}
    timed(step, batches[0], own, device)
    own.zero_grad(set_to_none=True)
    sync(device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for given in batches:
        timed(step, given, own, device)
    own.zero_grad(set_to_none=True)
    sync(device)
    peak = torch.cuda.max_memory_allocated() - before
    grown = torch.cuda.memory_allocated() - before
    return {"peak_mib": round(peak / 2**20, 1), "grown_mib": round(grown / 2**20, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    parser.add_argument("--molecules", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--warm", type=int, default=6, help="batches before the timed ones")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.exit(2, "shapes.py: there is no CUDA device here\n")
    warnings.simplefilter("ignore", FutureWarning)
    rows = measure(arguments)
    cuda = arguments.device == "cuda"
    result = {
        "command": "PYTHONPATH=src python benchmarks/shapes.py " + " ".join(sys.argv[1:]),
        "hardware": torch.cuda.get_device_name() if cuda else platform.processor() or "CPU",
        "torch": torch.__version__,
        "doubleback": db.__version__,
        "date": datetime.date.today().isoformat(),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "settings": {k: v for k, v in vars(arguments).items() if k not in ("out", "methods")},
        "rows": rows,
    }
    stock_ms = next((r.get("median_ms") for r in rows if r["method"] == "stock"), None)
    for row in rows:
        if "median_ms" in row and stock_ms:
            row["over_stock"] = round(row["median_ms"] / stock_ms, 3)
            print(
                f"{row['method']:26} {row['median_ms']:9.3f} ms  {row['over_stock']:6.3f} × stock"
            )
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
