"""What `every` and `fraction` make of a penalised step's price, on small networks on a CPU.

    PYTHONPATH=src python benchmarks/thinning.py --out benchmarks/results/thinning-cpu.json

Methods are timed in turn, round by round, in seconds of the processor; one sample is as many steps
as `every` says. Written down: medians and quartiles of the ratio to plain steps of the same round.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import doubleback as db
from measuring import hardware, print_table, versions, write

EVERY, FRACTION, CLASSES = 4, 0.25, 10
METHODS = {
    "whole": {},
    f"every={EVERY}": {"every": EVERY},
    f"fraction={FRACTION}": {"fraction": FRACTION},
    f"every={EVERY}, fraction={FRACTION}": {"every": EVERY, "fraction": FRACTION},
}


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.GELU(), nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.GroupNorm(8, 64), nn.GELU(), nn.Conv2d(64, 64, 3, stride=2, padding=1), nn.GELU(),
        nn.Flatten(), nn.Linear(64 * 64, CLASSES),
    )  # fmt: skip


def dense() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(784, 1024), nn.SiLU(), nn.Linear(1024, 1024), nn.SiLU(), nn.Linear(1024, CLASSES)
    )


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions": (convolutions, (32, 3, 32, 32)),
    "MLP, 1024 wide": (dense, (256, 784)),
}
PENALTIES = {
    "classical": lambda: db.LossGradient("cross_entropy"),
    "Jacobian": lambda: db.Jacobian(),
}


def steps(net: nn.Module, penalty: Callable, x: Tensor, y: Tensor) -> dict[str, Callable]:
    def plain() -> None:
        F.cross_entropy(net(x), y).backward()

    def by(options: dict) -> Callable[[], None]:
        model = db.Penalised(net, penalty(), **options)
        shared = isinstance(model.penalty, db.LossGradient)
        loss = None if shared else "cross_entropy"
        return lambda: model.accumulate(x, y, loss=loss, weight=0.1) and None

    return {"plain": plain, **{name: by(options) for name, options in METHODS.items()}}


def measure(name: str, kind: str, rounds: int) -> dict:
    torch.manual_seed(0)
    build, shape = NETS[name]
    net, x = build(), torch.randn(shape)
    by_name = steps(net, PENALTIES[kind], x, torch.randint(CLASSES, shape[:1]))
    times: dict[str, list[float]] = {n: [] for n in by_name}
    for i in range(3 + rounds):
        for method, step in by_name.items():
            start = time.process_time()
            for _ in range(EVERY):
                net.zero_grad()
                step()
            if i >= 3:  # captured and flattened by then
                times[method].append(time.process_time() - start)
    plain = statistics.median(times["plain"]) / EVERY
    row: dict = {"net": name, "penalty": kind, "plain_ms": round(1e3 * plain, 2)}
    for method in METHODS:
        ratios = [a / b for a, b in zip(times[method], times["plain"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        row[method] = {"price": round(middle, 2), "quartiles": [round(low, 2), round(high, 2)]}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    rows = [measure(name, kind, chosen.rounds) for name in NETS for kind in PENALTIES]
    print_table(
        ["network", "penalty", "plain, ms", *METHODS],
        [
            [r["net"], r["penalty"], f"{r['plain_ms']:.1f}", *(f"{r[m]['price']}" for m in METHODS)]
            for r in rows
        ],
    )
    write(chosen.out, {
        "hardware": hardware("cpu"), "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": f"python benchmarks/thinning.py --threads {chosen.threads} "
        f"--rounds {chosen.rounds}",
        "results": rows,
    })  # fmt: skip


if __name__ == "__main__":
    main()
