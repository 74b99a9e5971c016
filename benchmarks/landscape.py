"""Exact breakpoints against a grid fine enough to find the same ones.

    PYTHONPATH=src python benchmarks/landscape.py --out benchmarks/results/landscape-cpu.json

A 784-512-512-10 ReLU net, 4096 examples, one weight at a time. The grid is the fastest that could
be written: everything before the weight's neuron is computed once, a grid point updates that
neuron and its rank-one effect on the next layer, and signs are compared with the point before. It
finds two neighbouring breakpoints as two only if a grid point lies between them, so its number of
points follows from the gaps between the exact breakpoints: `share` of all gaps must be wider than
its spacing, those within each example or those in the whole batch (each is a jump of the batch
mean). The time of a grid point is measured over a few hundred points.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from doubleback import landscape as L
from measuring import hardware, print_table, versions, write

SHARES = (0.5, 0.9, 0.99, 1.0)
ENTRIES = ("0.weight[3,100]", "0.bias[3]", "2.weight[7,5]", "2.bias[7]")


def make(seed: int, examples: int) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )
    return net, torch.randn(examples, 784)


def grid_seconds(net: nn.Sequential, x: Tensor, along: L.Coordinate, places: Tensor) -> float:
    """Seconds per grid point, everything that can be hoisted out of the loop taken out of it."""
    first = net[0](x)
    layer, parameter = along.name.split(".")
    row = along.index[0]
    if layer == "0":
        rest = first[:, row] - _share(net[0], parameter, along.index, x)
        other = first.relu()
        other[:, row] = 0
        base, column = net[2](other), net[2].weight[:, row]
    else:
        hidden = first.relu()
        second = net[2](hidden)
        rest = second[:, row] - _share(net[2], parameter, along.index, hidden)
    factor = _factor(along.index, x if layer == "0" else first.relu())
    old = None
    start = time.perf_counter()
    for t in places:
        unit = rest + t * factor
        if layer == "0":
            signs = (base + unit.relu()[:, None] * column) > 0
            changed = None if old is None else signs != old[0]
            turned = None if old is None else (unit > 0) != old[1]
            old = (signs, unit > 0)
            if changed is not None and turned is not None:
                changed.any() or turned.any()
        else:
            signs = unit > 0
            if old is not None:
                (signs != old).any()
            old = signs
    return (time.perf_counter() - start) / len(places)


def _factor(index: tuple[int, ...], values: Tensor) -> Tensor:
    return values[:, index[1]] if len(index) == 2 else torch.ones(len(values))


def _share(layer: nn.Linear, parameter: str, index: tuple[int, ...], values: Tensor) -> Tensor:
    """What the entry itself adds to its neuron."""
    return getattr(layer, parameter)[index] * _factor(index, values)


def _gaps(path: L.Path, span: float) -> dict[str, Tensor]:
    """Distances of neighbouring breakpoints, in order: within examples, and in the batch."""
    inner = (path.start > -span) & (path.end < span)
    within = (path.end - path.start)[inner].sort().values
    places = torch.tensor([b.t for b in path.breakpoints], dtype=torch.float64).unique()
    return {"example": within, "batch": (places[1:] - places[:-1]).sort().values}


def measure(net, x, name: str, span: float, repeats: int, points: int) -> dict:
    along = L.Coordinate.parse(name)
    seconds, busy = [], []
    for _ in range(repeats):
        start, processor = time.perf_counter(), time.process_time()
        path = L.follow(net, x, along, (-span, span))
        seconds.append(time.perf_counter() - start)
        busy.append(time.process_time() - processor)
    with torch.no_grad():
        step = grid_seconds(net, x, along, torch.linspace(-span, span, points))
        plain = time.perf_counter()
        for _ in range(3):
            net(x)
        plain = (time.perf_counter() - plain) / 3
    exact = statistics.median(seconds)
    rows = []
    for among, gaps in _gaps(path, span).items():
        for share in SHARES if len(gaps) else ():
            gap = float(gaps[round((1 - share) * (len(gaps) - 1))])
            count = 2 * span / gap
            rows.append(
                {"among": among, "share": share, "spacing": gap, "points": count,
                 "grid_s": count * step, "speed_up": count * step / exact,
                 "plain_grid_s": count * plain}
            )  # fmt: skip
    return {
        "parameter": name,
        "breakpoints": len(path.breakpoints),
        "exact_s": exact,
        "exact_s_all": seconds,
        "exact_cpu_s": statistics.median(busy),
        "grid_point_ms": 1e3 * step,
        "plain_forward_ms": 1e3 * plain,
        "grids": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--examples", type=int, default=4096)
    parser.add_argument("--span", type=float, default=1.0, help="t runs from −span to span")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--points", type=int, default=200, help="grid points that are timed")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--note", default="", help="kept in the file: what else ran")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    net, x = make(chosen.seed, chosen.examples)
    L.follow(net, x[:2], "0.bias[0]")  # the first capture loads the exporter
    results = [
        measure(net, x, name, chosen.span, chosen.repeats, chosen.points) for name in ENTRIES
    ]
    print_table(
        ["parameter", "breakpoints", "exact s", "CPU s", "told apart", "grid points", "grid s",
         "times faster"],
        [
            [r["parameter"], r["breakpoints"], f"{r['exact_s']:.2f}", f"{r['exact_cpu_s']:.2f}",
             f"{g['share']:.0%} in {'an' if g['among'] == 'example' else 'the'} {g['among']}",
             f"{g['points']:.3g}",
             f"{g['grid_s']:.3g}", f"{g['speed_up']:.3g}"]
            for r in results for g in r["grids"]
        ],
    )  # fmt: skip
    write(
        chosen.out,
        {
            "hardware": hardware("cpu"),
            "versions": versions(),
            "threads": chosen.threads,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": "python benchmarks/landscape.py " + " ".join(sys.argv[1:]),
            "note": chosen.note,
            "net": "784-512-512-10, ReLU, float64 copy",
            "examples": chosen.examples,
            "span": chosen.span,
            "results": results,
        },
    )


if __name__ == "__main__":
    main()
