"""Sizes that change: energies and forces of molecules, every batch of another size.

    PYTHONPATH=src python benchmarks/shapes.py --device cuda --out shapes-h200.json
    PYTHONPATH=src python benchmarks/shapes.py --molecules 4 --width 32 --nets schnet    # two cores

Potentials of benchmarks/potentials.py are trained on energies and forces. Each method has a process
of its own, which takes the first batches by itself (captures, compilations), side by side with
others. Then, with the machine to themselves, all methods of a network take the other batches in
turn, a few at a time. Written down for each: every call of the warm-up, medians and quartiles of
the later ones, the slowest, peak memory, its growth over so many steps, and the gradient's error
against stock autograd in float64.

"JAX, padded" is benchmarks/jax_potentials.py, where JAX is installed (`--jax PYTHON` names another
interpreter that has it): atoms and pairs of all batches are padded to the largest of them, so that
one compilation serves all. Padding is done beforehand, and not timed.

A method that has not finished its warm-up after `--compile-seconds` is recorded as such. The file
is written anew after each network, and a process that fails loses no more than its own row.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import json
import os
import select
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


def whole_step(net: nn.Module, dynamic: bool | None = None, **options: Any) -> Step:
    loss = whole_loss(net)
    compiled = db.compile(
        lambda given: loss(given["pos"].detach().requires_grad_(), given),
        strict=True, dynamic=dynamic, options=options or None,
    )  # fmt: skip

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
    "db.compile": lambda net: whole_step(net, dynamic=True),
    "db.compile, launched from C++": lambda net: whole_step(net, dynamic=True, cpp_wrapper=True),
    "WithGradient, compiled": lambda net: with_gradient(net, compile=True),
    "backend": lambda net: compiled_net(net, backend="doubleback", dynamic=True),
    "make_fx and torch.compile (NequIP)": nequip,
    "make_fx of the step, Inductor": make_fx_whole,
    "energy only, compiled": lambda net: energy_only(torch.compile(net, dynamic=True)),  # type: ignore[arg-type]
    "torch.compile of the net": lambda net: compiled_net(net, dynamic=True),
    "torch.compile of the loss": stock_whole_compiled,
    "db.patch": stock,
    "db.compile, sizes static at first": whole_step,
    "backend, sizes static at first": lambda net: compiled_net(net, backend="doubleback"),
}
JAX = "JAX, padded"
# The longest to compile first, so that none is waited for in the end.
LONGEST = (
    "db.compile, sizes static at first", "db.compile, launched from C++", "db.compile",
    "make_fx of the step, Inductor", "WithGradient, compiled", "backend, sizes static at first",
    "backend",
)  # fmt: skip


# What a method's steps run inside of, once.
AROUND: dict[str, Callable[[], contextlib.AbstractContextManager]] = {"db.patch": db.patched}


# ------------------------------------------------------------------------ one method's process


def timed(step: Step, given: Batch, net: nn.Module, cuda: bool) -> float:
    net.zero_grad(set_to_none=True)
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


def network(chosen: argparse.Namespace, row: str) -> tuple[nn.Module, list[Batch]]:
    dtype = getattr(torch, chosen.dtype)
    torch.manual_seed(0)
    options = {"width": chosen.width} if chosen.width else {}
    net = POTENTIALS[row](**options).to(chosen.device, dtype)
    total = chosen.warm + chosen.batches
    return net, [make_batch(chosen.molecules, s, chosen.device, dtype) for s in range(total)]


def work(chosen: argparse.Namespace) -> None:
    """Warm up, then answer questions, one line of JSON each: {"batches": [numbers]} with the
    milliseconds of each, {"memory": …} with peak and growth."""
    tell = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    cuda = chosen.device == "cuda"
    allow_tf32(False)
    warnings.simplefilter("ignore", FutureWarning)
    name = chosen.methods[0]
    original, batches = network(chosen, chosen.row)
    net, first = copy.deepcopy(original), batches[: chosen.warm]
    times: list[float] = []
    crowd = crowded(chosen.folder / "tuning") if cuda else contextlib.nullcontext()
    with AROUND.get(name, contextlib.nullcontext)():
        with crowd:
            step = METHODS[name](net)
            for given in first:
                times.append(round(timed(step, given, net, cuda), 2))
        off = error(gradients(net), truth(original, first[-1], not name.startswith("energy")))
        del original
        net.zero_grad(set_to_none=True)
        tidy(cuda)
        print(json.dumps({"warm_up_ms": times, "gradient_error": off}), file=tell)
        for line in sys.stdin:
            asked = json.loads(line)
            if "memory" in asked:
                answer: Any = memory(step, batches[chosen.warm :], net, asked["memory"])
            else:
                answer = [timed(step, batches[i], net, cuda) for i in asked["batches"]]
            print(json.dumps(answer), file=tell)


def memory(step: Step, batches: list[Batch], net: nn.Module, asked: dict) -> dict[str, float]:
    """Peak of one pass over the batches, and by how much what stays allocated grew over so many
    steps, or as many as there was time for."""
    timed(step, batches[0], net, True)
    net.zero_grad(set_to_none=True)
    tidy(True)
    torch.cuda.reset_peak_memory_stats()
    before, start, count = torch.cuda.memory_allocated(), time.monotonic(), 0
    while count < len(batches) or (
        count < asked["steps"] and time.monotonic() - start < asked["seconds"]
    ):
        timed(step, batches[count % len(batches)], net, True)
        count += 1
    net.zero_grad(set_to_none=True)
    tidy(True)
    peak = torch.cuda.max_memory_allocated() - before
    grown = torch.cuda.memory_allocated() - before
    return {"peak_mib": round(peak / 2**20, 1), "grown_mib": round(grown / 2**20, 3),
            "memory_steps": count}  # fmt: skip


# ------------------------------------------------------------------------------ the whole run


TOLD = 6000  # characters of what a process said before it failed


def reason(told: str) -> str:
    """What follows the frames of the last traceback; else the last line."""
    lines = [x for x in told.splitlines() if x.strip()]
    frames = [i for i, x in enumerate(lines) if x.startswith("Traceback (most recent call last)")]
    after = (x for x in lines[frames[-1] + 1 :] if not x[0].isspace()) if frames else iter(())
    return next(after, lines[-1].strip() if lines else "nothing said")


class Worker:
    """One method's process, as the run sees it."""

    def __init__(self, chosen: argparse.Namespace, net: str, method: str, folder: Path) -> None:
        self.row: dict[str, Any] = {"net": net, "method": method}
        self.error = folder / f"{net}-{method}.txt".replace(" ", "-")
        if method == JAX:
            command = [chosen.jax, str(HERE / "jax_potentials.py"), str(folder / net)]
        else:
            words = [*sys.argv[1:], "--row", net, "--folder", str(folder), "--methods", method]
            command = [sys.executable, str(HERE / "shapes.py"), *words]
        # the processors are shared with those that compile at the same time
        beside = min(chosen.at_once, len(chosen.nets) * len(chosen.methods))
        threads = str(max(1, (os.cpu_count() or 1) // beside))
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": threads}
        with self.error.open("w") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True,
                bufsize=1, env=environment,
            )  # fmt: skip
        self.ready = False

    def answer(self, seconds: float) -> Any:
        """Its next line; None after so many seconds. A process that ended leaves why in its row."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], max(0.0, seconds))[0]:
            return None
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        code = self.process.wait()
        told = self.error.read_text()
        self.row.setdefault("failed", f"exit {code}: {reason(told)}"[:300])
        self.row["told"] = told[-TOLD:]
        print(f"{self.row['net']}, {self.row['method']}: {self.row['failed']}", file=sys.stderr)
        return None

    def ask(self, question: dict[str, Any], seconds: float) -> Any:
        self.send(question)
        found = self.answer(seconds)
        if found is None:
            self.stop("not finished: a step took too long")
        return found

    def send(self, question: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(question), file=self.process.stdin)

    def stop(self, why: str | None = None) -> None:
        self.ready = False
        if why is not None:
            self.row.setdefault("failed", why)
        self.process.kill()
        self.process.wait()


def warm_up(chosen: argparse.Namespace, workers: list[tuple[str, str]], folder: Path) -> list:
    """All processes, those of them ready that finished their first batches in time."""
    end = time.monotonic() + chosen.compile_seconds
    order = {name: i for i, name in enumerate(LONGEST)}
    nets = list(POTENTIALS)  # from the shortest to the longest
    waiting = sorted(workers, key=lambda w: (order.get(w[1], 99), -nets.index(w[0])))
    running: list[Worker] = []
    started: list[Worker] = []
    while waiting or running:
        while waiting and len(running) < chosen.at_once and time.monotonic() < end:
            running.append(Worker(chosen, *waiting.pop(0), folder))
            started.append(running[-1])
        if time.monotonic() > end:
            for worker in running:
                worker.stop(f"not finished after {chosen.compile_seconds:.0f} s")
            break
        streams = [w.process.stdout for w in running]
        there, _, _ = select.select(streams, [], [], 1.0)
        for worker in [w for w in running if w.process.stdout in there]:
            running.remove(worker)
            found = worker.answer(0.0)
            if found is not None:
                worker.ready = True
                worker.row.update(found)
                spent, off = sum(found["warm_up_ms"]) / 1e3, found["gradient_error"]
                print(
                    f"{worker.row['net']}, {worker.row['method']}: {spent:.1f} s, error {off:.1e}"
                )
    rows = {(w.row["net"], w.row["method"]): w for w in started}
    return [rows.get(w) or {"net": w[0], "method": w[1], "failed": "not run: no time left"}
            for w in workers]  # fmt: skip


def measure(chosen: argparse.Namespace, workers: list[Worker]) -> None:
    """The later batches, a few at a time, by all methods of a network in turn."""
    end = time.monotonic() + chosen.row_seconds
    times: dict[str, list[float]] = {w.row["method"]: [] for w in workers}
    later = range(chosen.warm, chosen.warm + chosen.batches)
    for i in range(0, len(later), chosen.turn):
        if i and time.monotonic() > end:
            break
        for worker in workers:
            if worker.ready:
                found = worker.ask({"batches": list(later[i : i + chosen.turn])}, 60.0)
                times[worker.row["method"]] += found or []
    base = times.get("stock")
    for worker in workers:
        samples, row = times[worker.row["method"]], worker.row
        if len(samples) < 2 or "failed" in row:
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


def weigh(chosen: argparse.Namespace, workers: list[Worker]) -> None:
    """Memory of all methods, side by side."""
    asked = {"steps": chosen.memory_steps, "seconds": chosen.memory_seconds}
    for worker in workers:
        worker.send({"memory": asked})
    for worker in workers:
        worker.row.update(worker.answer(chosen.memory_seconds + 60.0) or {})


def write_for_jax(chosen: argparse.Namespace, name: str, folder: Path) -> None:
    """Parameters, buffers, batches and float64's gradients of one network, as NumPy arrays."""
    import numpy

    folder.mkdir()
    net, batches = network(chosen, name)
    names = [n for n, _ in net.named_parameters()]
    exact = dict(zip(names, truth(net, batches[chosen.warm - 1], True), strict=True))
    held = {n: t for n, t in net.state_dict().items()}
    for file, tensors in (("state", held), ("exact", exact)):
        numpy.savez(folder / f"{file}.npz", **{n: t.cpu().numpy() for n, t in tensors.items()})
    for i, batch in enumerate(batches):
        numpy.savez(folder / f"batch{i}.npz", **{n: t.cpu().numpy() for n, t in batch.items()})
    job = {"net": name, "warm": chosen.warm, "trained": names}
    (folder / "job.json").write_text(json.dumps(job))
    tidy(chosen.device == "cuda")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    add = parser.add_argument
    every = [*METHODS, JAX]
    add("--nets", nargs="+", default=list(POTENTIALS), choices=list(POTENTIALS))
    add("--methods", nargs="+", default=every, choices=every, metavar="METHOD")
    add("--without", nargs="+", default=[], choices=every, metavar="METHOD")
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add("--dtype", default="float32", choices=("float32", "float64"))
    add("--molecules", type=int, default=64)
    add("--width", type=int, help="default: as published")
    add("--batches", type=int, default=40)
    add("--warm", type=int, default=8, help="batches before the timed ones")
    add("--turn", type=int, default=4, help="batches that a method takes in a row")
    add("--at-once", type=int, default=os.cpu_count(), help="processes that warm up side by side")
    add("--compile-seconds", type=float, default=280.0, help="for the warm-ups of all networks")
    add("--row-seconds", type=float, default=60.0, help="for measuring one network")
    add("--memory-steps", type=int, default=300, help="over which memory may grow")
    add("--memory-seconds", type=float, default=60.0, help="for these steps, all side by side")
    add("--gates", type=Path, help="folder of locks, shared with benchmarks that run meanwhile")
    add("--jax", default=sys.executable, help="the Python that has JAX")
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


SETTINGS = ("dtype", "molecules", "width", "batches", "warm", "turn", "compile_seconds",
            "row_seconds", "memory_steps")  # fmt: skip


def main() -> int:
    chosen = arguments()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    if chosen.row:
        work(chosen)
        return 0
    document: dict[str, Any] = {
        "command": command_line(), "hardware": hardware(chosen.device), "versions": versions(),
        "doubleback": db.__version__, "date": datetime.date.today().isoformat(), "tf32": False,
        "settings": {n: getattr(chosen, n) for n in SETTINGS}, "rows": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if JAX in chosen.methods:
            for net in chosen.nets:
                write_for_jax(chosen, net, folder / net)
        wanted = [(net, method) for net in chosen.nets for method in chosen.methods]
        all_of_them = warm_up(chosen, wanted, folder)
        workers = [w for w in all_of_them if isinstance(w, Worker)]
        try:
            document["rows"] = [w.row if isinstance(w, Worker) else w for w in all_of_them]
            write(chosen.out, document)
            with alone(chosen.gates and chosen.gates / "turn"):
                for net in chosen.nets:
                    measure(chosen, [w for w in workers if w.row["net"] == net])
                    write(chosen.out, document)
                if chosen.device == "cuda":
                    weigh(chosen, [w for w in workers if w.ready])
            write(chosen.out, document)
            show(document["rows"])
        finally:
            for worker in workers:
                worker.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
