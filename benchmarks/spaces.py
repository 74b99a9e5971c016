"""What a space costs, and what locally connected layers cost.

    PYTHONPATH=src python benchmarks/spaces.py --out benchmarks/results/spaces-h200.json
    PYTHONPATH=src python benchmarks/spaces.py --tiny --device cpu

price: one penalised step of the conv stack (nets.py), the penalty measured in several spaces;
ratios are to the Euclidean step of the same run. local: `LocallyConnected2d` against unfold and
einsum, in a plain step and in a penalised one. All variants take turns, so that drift of the
machine hits them alike. What does not fit into --limit-seconds is left out and said so.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import doubleback as db
import measuring
import nets
from measuring import DTYPES, allow_tf32, hardware, peak_memory, tidy, time_steps, versions
from timing import plan_repeats, summary

STEP = 1 / 32  # of a grid of 32² cells on the unit square
SPACES: dict[str, db.spaces.Space] = {
    "Euclidean": db.spaces.Euclidean(),
    "L²": db.spaces.Grid((STEP, STEP)),
    "H¹ periodic": db.spaces.Sobolev(1.0, (STEP, STEP)),
    "H¹ Neumann": db.spaces.Sobolev(1.0, (STEP, STEP), "neumann"),
    "L∞": db.spaces.Lp(float("inf")),
}
COMPILED = ("Euclidean", "H¹ periodic")  # each takes long to compile
LAYERS = {  # batch, channels in and out, side, kernel
    "64 → 64 channels, 32², 3×3": (256, 64, 64, 32, 3),
    "3 → 32 channels, 64², 5×5": (256, 3, 32, 64, 5),
}
TINY = {"4 → 4 channels, 8², 3×3": (4, 4, 4, 8, 3)}

Step = Callable[[Tensor, Tensor], Any]


class Unfolded(nn.Module):
    """A locally connected layer as it is usually written: every patch of x, then an einsum."""

    def __init__(self, layer: db.LocallyConnected2d):
        super().__init__()
        self.weight = nn.Parameter(layer.weight.detach().clone())
        self.bias = nn.Parameter(layer.bias.detach().clone())
        self.kernel, self.padding = layer.kernel_size, layer.operator.padding

    def forward(self, x: Tensor) -> Tensor:
        rows, columns, out = self.weight.shape[:3]
        patches = F.unfold(x, self.kernel, padding=self.padding)
        y = torch.einsum("bkp,pok->bop", patches, self.weight.reshape(rows * columns, out, -1))
        return y.reshape(x.shape[0], out, rows, columns) + self.bias


class Run:
    """Variants of one problem: built, measured in turns, written down."""

    def __init__(self, options: argparse.Namespace, document: dict[str, Any]):
        self.options, self.document = options, document
        self.deadline = time.monotonic() + options.limit_seconds

    def measure(
        self,
        part: str,
        problem: str,
        dtype: str,
        base: str,
        variants: dict[str, tuple],
        **more: Any,
    ) -> None:
        """variants: name → (network, its sets of inputs, step); more: facts for every row."""
        rows = {}
        for name, (net, sets, step) in variants.items():
            start = time.perf_counter()
            for _ in range(4):  # capture, flatten or compile, warm up
                net.zero_grad(set_to_none=True)
                step(*sets[0])
            tidy(sets[0][0].is_cuda)
            rows[name] = {"part": part, "problem": problem, "dtype": dtype, "variant": name, **more}
            rows[name]["first_calls_s"] = time.perf_counter() - start
            rows[name] |= self.memory(net, sets, step)
        samples: dict[str, list[float]] = {name: [] for name in variants}
        for turn in range(5):
            for name, (net, sets, step) in variants.items():
                if turn == 0:
                    rows[name] |= summary(time_steps(step, net, sets, 3))
                count = plan_repeats(rows[name]["ms"], self.options.repeats, 1.0)
                samples[name] += time_steps(step, net, sets, max(1, count // 5))
        for name, row in rows.items():
            row |= summary(samples[name])
        for row in rows.values():
            row["times_" + base] = row["ms"] / rows[base]["ms"]
            if row.get("beyond_mib"):
                row["memory_times_" + base] = row["beyond_mib"] / rows[base]["beyond_mib"]
        self.add(list(rows.values()), base)

    def memory(self, net: nn.Module, sets: list, step: Step) -> dict[str, float]:
        """Peak of two steps; `beyond_mib`: above parameters, inputs and what else is alive."""
        net.zero_grad(set_to_none=True)
        if not sets[0][0].is_cuda:
            return {}
        tidy(True)
        before = torch.cuda.memory_allocated() / 2**20
        found = peak_memory(step, net, sets)
        return {"peak_mib": found["peak_mib"], "beyond_mib": found["peak_mib"] - before}

    def add(self, rows: list[dict], base: str) -> None:
        self.document["results"] += rows
        measuring.write(self.options.out, self.document)
        print(f"\n{rows[0]['part']}: {rows[0]['problem']}, {rows[0]['dtype']}")
        heads = ["", "ms", "±", f"× {base}", "MiB beyond", "× MiB"]

        def cell(row: dict, key: str, form: str) -> str:
            return "–" if row.get(key) is None else format(row[key], form)

        measuring.print_table(heads, [
            [row["variant"], cell(row, "ms", ".3f"), cell(row, "ms_spread", ".3f"),
             cell(row, "times_" + base, ".2f"), cell(row, "beyond_mib", ".0f"),
             cell(row, "memory_times_" + base, ".2f")]
            for row in rows
        ])  # fmt: skip

    def late(self, what: str, need: float) -> bool:
        """Whether too little time is left for what may need so many seconds."""
        if time.monotonic() + need < self.deadline:
            return False
        self.document["left_out"].append(what)
        measuring.write(self.options.out, self.document)
        print(f"\n{what}: left out, time limit")
        return True


# ------------------------------------------------------------------------------------ price


def price(run: Run, dtype: str, compiled: bool) -> None:
    """The conv stack with LossGradient(norm=SquaredNorm(space))."""
    options = run.options
    net, xs, ys = nets.problem(
        "conv", small=options.tiny, dtype=DTYPES[dtype], device=options.device
    )
    sets = list(zip(xs, ys, strict=True))
    weight = nets.TABLE["conv"].weight
    variants = {}
    for name, space in SPACES.items():
        if compiled and name not in COMPILED:
            continue
        norm = db.SquaredNorm(space)
        model = db.Penalised(net, db.LossGradient(norm=norm), compile=compiled)

        def step(x: Tensor, y: Tensor, model: db.Penalised = model) -> None:
            out, penalty = model(x, y)
            (F.cross_entropy(out, y) + weight * penalty).backward()

        variants[name] = (net, sets, step)
    problem = f"conv stack, batch {xs[0].shape[0]}, {'compiled' if compiled else 'eager'}"
    run.measure("price", problem, dtype, "Euclidean", variants)


# ------------------------------------------------------------------------------------ local


def local(run: Run, name: str, sizes: tuple[int, ...], dtype: str) -> None:
    """A locally connected layer with Softplus and a dense layer after it."""
    batch, channels, out, side, kernel = sizes
    device = run.options.device
    torch.manual_seed(0)
    layer = db.LocallyConnected2d(channels, out, side, kernel, padding=kernel // 2)
    head = nn.Sequential(nn.Softplus(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(out, 10))

    def build(first: nn.Module) -> nn.Module:
        net = copy.deepcopy(nn.Sequential(first, *head))
        return net.to(device=device, dtype=DTYPES[dtype])

    x = torch.randn(batch, channels, side, side).to(device, DTYPES[dtype])
    y = torch.randint(10, (batch,)).to(device)
    sets = [(x, y)] * 2
    for kind in ("plain", "penalised"):
        variants = {}
        for variant, make in (("unfold", Unfolded), ("LocallyConnected2d", lambda layer: layer)):
            net = build(make(layer))
            variants[variant] = (net, sets, plain(net) if kind == "plain" else penalised(net))
        problem, error = f"{name}, batch {batch}, {kind}", apart(variants, x, y)
        run.measure("local", problem, dtype, "unfold", variants, gradients_apart=error)
        del variants
        tidy(device == "cuda")


def plain(net: nn.Module) -> Step:
    return lambda x, y: F.cross_entropy(net(x), y).backward()


def penalised(net: nn.Module) -> Step:
    model = db.Penalised(net, db.LossGradient())

    def step(x: Tensor, y: Tensor) -> None:
        out, penalty = model(x, y)
        (F.cross_entropy(out, y) + penalty).backward()

    return step


def apart(variants: dict[str, tuple], x: Tensor, y: Tensor) -> float:
    """The largest relative difference between the two layers' gradients."""
    found = []
    for net, _, step in variants.values():
        net.zero_grad(set_to_none=True)
        step(x, y)
        found.append([p.grad.double() for p in net.parameters()])
        net.zero_grad(set_to_none=True)
    pairs = zip(*found, strict=True)
    return max(float((a - b).norm() / a.norm().clamp(min=1e-30)) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="sizes that only try the script")
    parser.add_argument("--parts", nargs="+", default=["price", "local", "compiled"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bf16"], choices=DTYPES)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--limit-seconds", type=float, default=55.0)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    allow_tf32(True)
    torch.backends.cudnn.benchmark = True
    document = {
        "hardware": hardware(options.device),
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": measuring.command_line(),
        "tiny": options.tiny,
        "left_out": [],
        "results": [],
    }
    run = Run(options, document)
    if "price" in options.parts:
        for dtype in options.dtypes:
            price(run, dtype, compiled=False)
    if "local" in options.parts:
        for name, sizes in (TINY if options.tiny else LAYERS).items():
            for dtype in options.dtypes:
                if not run.late(f"local, {name}, {dtype}", 4.0):
                    local(run, name, sizes, dtype)
    if "compiled" in options.parts:
        dtype = options.dtypes[-1]
        if not run.late(f"compiled conv stack, {dtype}", 25.0):
            price(run, dtype, compiled=True)


if __name__ == "__main__":
    main()
