"""Small networks on a CPU, where the host's work decides: stock autograd, `db.patch()`, `Penalised`
as it chooses by itself, and with sweeps. Some of them cannot be captured, and run on autograd.

    PYTHONPATH=src python benchmarks/small.py --threads 1 --out benchmarks/results/small-cpu.json

All methods of a network are timed in turn, round by round, in seconds of the processor, which other
programs on the machine disturb least. Written down: medians and quartiles of the ratio to stock of
the same round, and what `explain` says of the choice.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import doubleback as db
from measuring import hardware, print_table, versions, write

CLASSES = 5


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(32, 32), nn.Linear(32, CLASSES)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(8, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 16)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.head(h)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x).mean(1))


class Messages(nn.Module):
    """Two rounds of messages along 256 edges between 64 nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.pass_on = nn.Linear(8, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, CLASSES)
        g = torch.Generator().manual_seed(0)
        self.register_buffer("edges", torch.randint(64, (2, 256), generator=g))

    def forward(self, x: Tensor) -> Tensor:
        i, j = self.edges[0], self.edges[1]
        h = F.silu(self.first(x))
        for _ in range(2):
            h = h + torch.zeros_like(h).index_add(0, i, F.silu(self.pass_on(h))[j])
        return self.head(h)


class Uncaptured(nn.Module):
    """Which way it goes depends on numbers: no one graph holds it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        return -out if out.sum() > 1e9 else out


def dense(sizes: list[int], activation: type[nn.Module]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), activation()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], CLASSES))


def images(norm: bool = False, depthwise: bool = False) -> nn.Sequential:
    width = 16
    middle = nn.Conv2d(width, width, 3, padding=1, groups=width if depthwise else 1)
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), *((nn.BatchNorm2d(width),) if norm else ()), nn.ReLU(),
        middle, *((nn.BatchNorm2d(width),) if norm else ()), nn.ReLU(),
        nn.Flatten(), nn.Linear(width * 64, CLASSES),
    )  # fmt: skip


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP, tanh": (lambda: dense([20, 64, 64], nn.Tanh), (32, 20)),
    "MLP, ReLU": (lambda: dense([64, 128, 128], nn.ReLU), (64, 64)),
    "MLP, two layers, SiLU": (lambda: dense([4, 16], nn.SiLU), (16, 4)),
    "MLP, 512 wide": (lambda: dense([256, 512, 512], nn.ReLU), (64, 256)),
    "MLP, softplus, 7 layers": (lambda: dense([32] * 7, nn.Softplus), (32, 32)),
    "convolutions": (images, (32, 1, 8, 8)),
    "convolutions, batch norm": (lambda: images(norm=True), (32, 1, 8, 8)),
    "convolutions, depthwise": (lambda: images(depthwise=True), (32, 1, 8, 8)),
    "residual": (Residual, (32, 32)),
    "recurrent": (Recurrent, (16, 6, 8)),
    "attention": (Attention, (8, 10, 32)),
    "messages": (Messages, (64, 8)),
    "not captured: MLP, ReLU": (lambda: Uncaptured(dense([64, 128, 128], nn.ReLU)), (64, 64)),
    "not captured: convolutions, batch norm": (
        lambda: Uncaptured(images(norm=True)),
        (32, 1, 8, 8),
    ),
    "not captured: attention": (lambda: Uncaptured(Attention()), (8, 10, 32)),
    "not captured: messages": (lambda: Uncaptured(Messages()), (64, 8)),
}


def steps(net: nn.Module, x: Tensor, y: Tensor) -> dict[str, Callable[[], None]]:
    def by_hand() -> None:
        leaf = x.detach().requires_grad_()
        losses = F.cross_entropy(net(leaf), y, reduction="none")
        (g,) = torch.autograd.grad(losses.sum(), leaf, create_graph=True)
        (losses.mean() + 0.1 * g.square().flatten(1).sum(1).mean()).backward()

    def by(model: nn.Module) -> Callable[[], None]:
        def step() -> None:
            out, penalty = model(x, y)
            (F.cross_entropy(out, y) + 0.1 * penalty).backward()

        return step

    penalty = db.LossGradient("cross_entropy")
    methods = {
        "stock": by_hand,
        "db.patch()": by_hand,
        "Penalised": by(db.Penalised(net, penalty)),
        "with sweeps": by(db.Penalised(net, penalty, sweeps=True)),
    }
    if isinstance(net, Uncaptured):
        methods.pop("with sweeps")
    return methods


def timed(step: Callable[[], None], net: nn.Module, count: int) -> float:
    start = time.process_time()
    for _ in range(count):
        net.zero_grad()
        step()
    return (time.process_time() - start) / count


def measure(name: str, rounds: int) -> dict:
    torch.manual_seed(0)
    build, shape = NETS[name]
    net = build()
    x, y = torch.randn(shape), torch.randint(CLASSES, shape[:1])
    by_name = steps(net, x, y)
    math = partial(sdpa_kernel, SDPBackend.MATH)
    with math():  # the only attention that stock differentiates twice
        timed(by_name["stock"], net, 5)
        count = max(2, int(0.02 / timed(by_name["stock"], net, 5)))
    for method in list(by_name)[2:]:
        timed(by_name[method], net, 6)
    times: dict[str, list[float]] = {n: [] for n in by_name}
    for _ in range(rounds):
        for method, step in by_name.items():
            if method == "db.patch()":
                with db.patched():
                    timed(step, net, 1)
                    times[method].append(timed(step, net, count))
            elif method == "stock":
                with math():
                    times[method].append(timed(step, net, count))
            else:
                times[method].append(timed(step, net, count))
    row: dict = {"net": name, "stock_us": round(1e6 * statistics.median(times["stock"]), 1)}
    for method in list(by_name)[1:]:
        ratios = [a / b for a, b in zip(times[method], times["stock"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        row[method] = {"ratio": round(middle, 3), "quartiles": [round(low, 3), round(high, 3)]}
    if isinstance(net, Uncaptured):
        row["choice"] = "autograd: not captured"
    else:
        row["choice"] = db.Penalised(net, db.LossGradient("cross_entropy")).explain(x, y).way
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", nargs="+", choices=list(NETS), default=list(NETS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    warnings.simplefilter("ignore", db.CaptureWarning)
    rows = []
    for name in chosen.nets:
        rows.append(measure(name, chosen.rounds))
        print(f"{name}: {rows[-1]['Penalised']['ratio']:.2f} × stock", flush=True)
    methods = ["db.patch()", "Penalised", "with sweeps"]
    print_table(
        ["network", "stock, µs", *(f"{m}, × stock" for m in methods), "chosen"],
        [
            [r["net"], f"{r['stock_us']:.0f}",
             *(f"{r[m]['ratio']:.2f}" if m in r else "–" for m in methods),
             r["choice"].partition(":")[0]]
            for r in rows
        ],
    )  # fmt: skip
    command = f"python benchmarks/small.py --threads {chosen.threads} --rounds {chosen.rounds}"
    write(chosen.out, {
        "hardware": hardware("cpu"), "versions": versions(), "machine": platform.machine(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command, "results": rows,
    })  # fmt: skip


if __name__ == "__main__":
    main()
