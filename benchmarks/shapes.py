"""Sizes that change: energies and forces of molecules, every batch of another size.

    PYTHONPATH=src python benchmarks/shapes.py --device cuda --out shapes-h200.json
    PYTHONPATH=src python benchmarks/shapes.py --molecules 4 --width 32 --nets schnet    # two cores

Potentials of benchmarks/potentials.py are trained on energies and forces. One process measures one
network: each method takes the first batches alone (captures, compilations), side by side with the
other networks' processes; then, with the machine to themselves, all methods take the others in
turn, batch by batch. Written down for each: every call of the warm-up, medians and
quartiles of the later ones, the slowest, what a size costs that has not been met before, peak
memory, its growth over the run, and the gradient's error against stock autograd in float64.

Methods that are not reached within `--compile-seconds` are recorded as such. The file is written
anew after each network, and a process that fails loses no more than its own.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import doubleback as db
from measuring import allow_tf32, command_line, crowded, hardware, tidy, versions, write
from potentials import INPUTS, POTENTIALS, loss_of, make_batch
from timing import alone

HERE = Path(__file__).resolve().parent
Batch = dict[str, Tensor]
Step = Callable[[Batch], Tensor]

# ------------------------------------------------------------------------------- methods


def energy_only(net: nn.Module) -> Step:
    def step(given: Batch) -> Tensor:
        loss = F.mse_loss(net(*(given[n] for n in INPUTS)), given["energy"])
        loss.backward()
        return loss

    return step


def whole_loss(net: nn.Module) -> Callable[[Tensor, Batch], Tensor]:
    """pos must require grad."""

    def loss(pos: Tensor, given: Batch) -> Tensor:
        energy = net(pos, *(given[n] for n in INPUTS[1:]))
        (gradient,) = torch.autograd.grad(energy.sum(), pos, create_graph=True)
        return loss_of(energy, gradient, given)

    return loss


def stock(net: nn.Module) -> Step:
    loss = whole_loss(net)

    def step(given: Batch) -> Tensor:
        value = loss(given["pos"].detach().requires_grad_(), given)
        value.backward()
        return value

    return step


def stock_whole_compiled(net: nn.Module) -> Step:
    """torch.compile of the whole loss, with Dynamo's switch for derivatives inside."""
    torch._dynamo.config.trace_autograd_ops = True
    loss = torch.compile(whole_loss(net), dynamic=True, fullgraph=True)

    def step(given: Batch) -> Tensor:
        value = loss(given["pos"].detach().requires_grad_(), given)
        value.backward()
        return value

    return step


def with_gradient(net: nn.Module, compile: bool = False) -> Step:
    model = db.WithGradient(net, wrt="pos", compile=compile, strict=True)

    def step(given: Batch) -> Tensor:
        energy, gradient = model(*(given[n] for n in INPUTS))
        loss = loss_of(energy, gradient, given)
        loss.backward()
        return loss

    return step


def whole_step(net: nn.Module) -> Step:
    loss = whole_loss(net)
    compiled = db.compile(
        lambda given: loss(given["pos"].detach().requires_grad_(), given), strict=True
    )

    def step(given: Batch) -> Tensor:
        value = compiled(given)
        value.backward()
        return value

    return step


def traced(fn: Callable, net: nn.Module, given: Batch, names: tuple[str, ...]) -> Any:
    """fn(parameters, *data) as a flat graph by make_fx, the sizes of the data left open; its
    stand-ins, and the mode they belong to."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import (
        DimDynamic,
        ShapeEnv,
        StatelessSymbolicContext,
    )

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def stand_in(name: str) -> Tensor:
        t = given[name]
        open_at = 1 if name == "edges" else 0
        kinds = [DimDynamic.STATIC] * t.dim()
        kinds[open_at] = DimDynamic.DYNAMIC
        return mode.from_tensor(t, symbolic_context=StatelessSymbolicContext(kinds))  # type: ignore[arg-type]

    parameters = [mode.from_tensor(p.detach(), static_shapes=True) for p in net.parameters()]
    data = [stand_in(name) for name in names]
    with mode:
        graph = make_fx(fn, tracing_mode="symbolic", _allow_non_fake_inputs=True)(parameters, *data)
    return graph, [*parameters, *data], mode


def nequip(net: nn.Module) -> Step:
    """Energy and forces traced by make_fx with open sizes, then torch.compile: forces are operators
    by then, and the loss's gradient is a first-order one, as in NequIP's compiled training."""
    names = [name for name, _ in net.named_parameters()]
    parameters = list(net.parameters())
    compiled: list[Callable] = []

    def outputs(weights: list[Tensor], pos: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        weights = [w.detach().requires_grad_() for w in weights]
        pos = pos.detach().requires_grad_()
        given = dict(zip(names, weights, strict=True))
        energy = torch.func.functional_call(net, given, (pos, *others))
        (gradient,) = torch.autograd.grad(energy.sum(), pos, create_graph=True)
        return energy, gradient

    def step(given: Batch) -> Tensor:
        data = [given[n] for n in INPUTS]
        if not compiled:
            graph, _, _ = traced(outputs, net, given, INPUTS)
            strip_detach(graph)
            compiled.append(torch.compile(graph, dynamic=True, fullgraph=True))
        energy, gradient = compiled[0](parameters, *data)
        loss = loss_of(energy, gradient, given)
        loss.backward()
        return loss

    return step


def strip_detach(graph: torch.fx.GraphModule) -> None:
    """make_fx writes a detach wherever autograd saved a tensor, which would cut the graph."""
    for node in list(graph.graph.nodes):
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    graph.recompile()


def make_fx_whole(net: nn.Module) -> Step:
    """Loss and all parameters' gradients traced by make_fx with open sizes, by Inductor at once."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx

    names = [name for name, _ in net.named_parameters()]
    inputs = (*INPUTS, "energy", "forces")
    compiled: list[Callable] = []

    def value(weights: list[Tensor], pos: Tensor, *others: Tensor) -> list[Tensor]:
        weights = [w.detach().requires_grad_() for w in weights]
        given = dict(zip(inputs, (pos.detach().requires_grad_(), *others), strict=True))
        energy = torch.func.functional_call(
            net, dict(zip(names, weights, strict=True)), tuple(given[n] for n in INPUTS)
        )
        (gradient,) = torch.autograd.grad(energy.sum(), given["pos"], create_graph=True)
        loss = loss_of(energy, gradient, given)
        return [loss.detach(), *torch.autograd.grad(loss, weights)]

    def step(given: Batch) -> Tensor:
        if not compiled:
            graph, stand_ins, mode = traced(value, net, given, inputs)
            graph.graph.set_codegen(torch.fx.graph.CodeGen())  # one input each, without the list
            flat = torch.fx.GraphModule(graph, graph.graph)
            with tracing(TracingContext(mode)), torch.no_grad():
                compiled.append(compile_fx(flat, stand_ins))  # type: ignore[arg-type]
        with torch.no_grad():
            found = compiled[0](*net.parameters(), *(given[n] for n in inputs))
        for p, g in zip(net.parameters(), found[1:], strict=True):
            p.grad = g
        return found[0]

    return step


def compiled_net(net: nn.Module, **options: Any) -> Step:
    return stock(torch.compile(net, **options))  # type: ignore[arg-type]


METHODS: dict[str, Callable[[nn.Module], Step]] = {
    "energy only": energy_only,
    "stock": stock,
    "WithGradient": with_gradient,
    "db.compile": whole_step,
    "WithGradient, compiled": lambda net: with_gradient(net, compile=True),
    "backend": lambda net: compiled_net(net, backend="doubleback", dynamic=True),
    "make_fx and torch.compile (NequIP)": nequip,
    "make_fx of the step, Inductor": make_fx_whole,
    "energy only, compiled": lambda net: energy_only(torch.compile(net, dynamic=True)),  # type: ignore[arg-type]
    "torch.compile of the net": lambda net: compiled_net(net, dynamic=True),
    "torch.compile of the loss": stock_whole_compiled,
    "db.patch": stock,
    "backend, sizes static at first": lambda net: compiled_net(net, backend="doubleback"),
}


# What a method's steps are timed inside of: a training run enters it once.
AROUND: dict[str, Callable[[], contextlib.AbstractContextManager]] = {"db.patch": db.patched}


# ---------------------------------------------------------------------------- measurement


def timed(name: str, step: Step, given: Batch, net: nn.Module, cuda: bool) -> float:
    net.zero_grad(set_to_none=True)
    with AROUND.get(name, contextlib.nullcontext)():
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        step(given)
        if cuda:
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start)


def gradients(net: nn.Module) -> list[Tensor]:
    found = [p.grad for p in net.parameters()]
    both = zip(found, net.parameters(), strict=True)
    return [(torch.zeros_like(p) if g is None else g).detach().double().cpu() for g, p in both]


def truth(net: nn.Module, given: Batch, whole: bool) -> list[Tensor]:
    """By stock autograd in float64."""
    wide = copy.deepcopy(net).double()
    given = {n: t.double() if t.is_floating_point() else t for n, t in given.items()}
    (stock if whole else energy_only)(wide)(given)
    return gradients(wide)


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    """‖ours − float64's‖ / ‖float64's‖ over all parameters."""
    off = sum(float((a - b).square().sum()) for a, b in zip(found, expected, strict=True))
    return (off / sum(float(b.square().sum()) for b in expected)) ** 0.5


class Network:
    """The rows of one network, one for each method, written to a file as they come."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen, self.cuda = chosen, chosen.device == "cuda"
        dtype = getattr(torch, chosen.dtype)
        torch.manual_seed(0)
        options = {"width": chosen.width} if chosen.width else {}
        self.net = POTENTIALS[chosen.row](**options).to(chosen.device, dtype)
        total = chosen.warm + chosen.batches
        self.batches = [make_batch(chosen.molecules, s, chosen.device, dtype) for s in range(total)]
        self.rows: list[dict[str, Any]] = []
        self.steps: dict[str, tuple[nn.Module, Step]] = {}
        self.deadline = (chosen.folder / "begun").stat().st_mtime + chosen.compile_seconds

    def save(self, complete: bool = False) -> None:
        write(self.chosen.folder / f"{self.chosen.row}.json",
              {"rows": self.rows, "complete": complete})  # fmt: skip

    def warm_up(self, name: str) -> None:
        """The first batches, and the gradient's error at the last of them."""
        row: dict[str, Any] = {"net": self.chosen.row, "method": name}
        self.rows.append(row)
        if time.time() > self.deadline:
            row["failed"] = "not run: no time left"
            return
        own, first = copy.deepcopy(self.net), self.batches[: self.chosen.warm]
        try:
            step = METHODS[name](own)
            times = []
            row["warm_up_ms"] = times
            for given in first:
                times.append(round(timed(name, step, given, own, self.cuda), 2))
            row["gradient_error"] = error(
                gradients(own), truth(self.net, first[-1], not name.startswith("energy"))
            )
        except Exception as problem:
            row["failed"] = f"{type(problem).__name__}: {problem}"[:300]
            print(f"{self.chosen.row}, {name}: {row['failed']}", file=sys.stderr)
            return
        self.steps[name] = (own, step)
        spent = sum(times) / 1e3
        print(f"{self.chosen.row}, {name}: {spent:.1f} s, error {row['gradient_error']:.1e}")

    def run(self) -> None:
        folder = self.chosen.folder
        gates = self.chosen.gates or folder
        with crowded(gates / "tuning") if self.cuda else contextlib.nullcontext():
            for name in self.chosen.methods:
                self.warm_up(name)
                tidy(self.cuda)
                self.save()
        (folder / f"ready-{os.getpid()}").touch()
        waiting = int((folder / "begun").read_text())
        while len([*folder.glob("ready-*")]) < waiting and time.time() < self.deadline:
            time.sleep(0.2)
        with alone(gates / "turn"):
            self.measure()

    def measure(self) -> None:
        end = time.monotonic() + self.chosen.row_seconds
        times: dict[str, list[float]] = {name: [] for name in self.steps}
        later = self.batches[self.chosen.warm :]
        for i, given in enumerate(later):
            if i >= 4 and time.monotonic() > end:
                break
            for name, (own, step) in self.steps.items():
                times[name].append(timed(name, step, given, own, self.cuda))
        base = times.get("stock")
        for row in self.rows:
            samples = times.get(row["method"])
            if not samples:
                continue
            low, middle, high = statistics.quantiles(samples, n=4)
            row.update(
                median_ms=round(middle, 3), quartiles_ms=[round(low, 3), round(high, 3)],
                slowest_ms=round(max(samples), 2), batches=len(samples),
                first_batch_s=round(row["warm_up_ms"][0] / 1e3, 3),
                warm_up_s=round(sum(row["warm_up_ms"]) / 1e3, 3),
            )  # fmt: skip
            if base:
                row["over_stock"] = round(middle / statistics.median(base), 3)
        self.save()
        for row in self.rows:
            if row["method"] in self.steps and self.cuda:
                row.update(self.memory(row["method"], *self.steps[row["method"]]))
        self.save(complete=True)

    def memory(self, name: str, own: nn.Module, step: Step) -> dict[str, float]:
        """Peak of one pass over the batches, and by how much what stays allocated grew."""
        later = self.batches[self.chosen.warm :]
        timed(name, step, later[0], own, True)
        own.zero_grad(set_to_none=True)
        tidy(True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for given in later:
            timed(name, step, given, own, True)
        own.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        grown = torch.cuda.memory_allocated() - before
        return {"peak_mib": round(peak / 2**20, 1), "grown_mib": round(grown / 2**20, 3)}


# ------------------------------------------------------------------------------ the whole run


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    add = parser.add_argument
    add("--nets", nargs="+", default=list(POTENTIALS), choices=list(POTENTIALS))
    add("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="METHOD")
    add("--without", nargs="+", default=[], choices=list(METHODS), metavar="METHOD")
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add("--dtype", default="float32", choices=("float32", "float64"))
    add("--molecules", type=int, default=64)
    add("--width", type=int, help="default: as published")
    add("--batches", type=int, default=40)
    add("--warm", type=int, default=8, help="batches before the timed ones")
    add("--compile-seconds", type=float, default=280.0, help="for the warm-ups of all networks")
    add("--row-seconds", type=float, default=60.0, help="for measuring one network")
    add("--gates", type=Path, help="folder of locks, shared with benchmarks that run meanwhile")
    add("--threads", type=int, default=0)
    add("--out", type=Path)
    add("--row", choices=list(POTENTIALS), help=argparse.SUPPRESS)
    add("--folder", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    chosen.methods = [m for m in chosen.methods if m not in chosen.without]
    if chosen.device == "cuda" and not torch.cuda.is_available():
        parser.exit(2, "shapes.py: there is no CUDA device here\n")
    return chosen


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        head = f"{row['net']:12} {row['method']:36}"
        if row.get("median_ms") is None:
            print(f"{head} {row.get('failed', 'not finished')[:90]}")
            continue
        times = f"{row['median_ms']:9.3f} ms  {row.get('over_stock', float('nan')):6.3f} × stock"
        print(f"{head} {times}  {row.get('peak_mib', float('nan')):8.1f} MiB")


def main() -> int:
    chosen = arguments()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    if chosen.row:
        allow_tf32(False)
        warnings.simplefilter("ignore", FutureWarning)
        Network(chosen).run()
        return 0
    document: dict[str, Any] = {
        "command": command_line(), "hardware": hardware(chosen.device), "versions": versions(),
        "doubleback": db.__version__, "date": datetime.date.today().isoformat(), "tf32": False,
        "settings": {n: getattr(chosen, n) for n in
                     ("dtype", "molecules", "width", "batches", "warm", "compile_seconds",
                      "row_seconds")},
        "rows": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "begun").write_text(str(len(chosen.nets)))
        started = {}
        for net in chosen.nets:
            words = [*sys.argv[1:], "--row", net, "--folder", name]
            started[net] = subprocess.Popen([sys.executable, str(HERE / "shapes.py"), *words])
        try:
            for net, process in started.items():
                process.wait()
                (folder / f"ready-{process.pid}").touch()  # nobody waits for it
                path = folder / f"{net}.json"
                rows = json.loads(path.read_text())["rows"] if path.exists() else []
                if not rows:
                    rows = [{"net": net, "method": "all", "failed": f"exit {process.returncode}"}]
                show(rows)
                document["rows"] += rows
                write(chosen.out, document)
        finally:
            for process in started.values():
                process.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
