"""What a penalised training step costs, side by side with plain training and with other ways.

    PYTHONPATH=src python benchmarks/engine.py --out benchmarks/results/engine-h200.json
    PYTHONPATH=src python benchmarks/engine.py --small --device cpu --nets conv mlp

A row is one network in one dtype: one process, in which all of its methods are timed in turn,
round by round, so that drift of the machine hits all alike. Rows compile side by side and are
measured one after the other, each with the machine to itself. Rows of different runs are never put
into one file. benchmarks/README.md explains methods and columns.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import methods
import nets
from measuring import (
    DTYPES,
    allow_tf32,
    command_line,
    crowded,
    evaluate,
    gradient_error,
    hardware,
    tidy,
    time_steps,
    versions,
    write,
)
from profile_step import kernels, kinds
from timing import alone, plan_repeats, summary

HERE = Path(__file__).resolve().parent
ROUNDS = 5


def arguments() -> argparse.Namespace:
    names = methods.known()
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="methods: " + ", ".join(names)
    )
    add = parser.add_argument
    add("--nets", nargs="+", choices=nets.TABLE, default=list(nets.TABLE), metavar="NET")
    add("--dtypes", nargs="+", choices=DTYPES, help="default: both; CPU: float32")
    add("--methods", nargs="+", choices=names, metavar="METHOD", help="default: all, no peers")
    add("--without", nargs="+", choices=names, default=[], metavar="METHOD")
    add("--peers", action="store_true", help="also other libraries' compiled double backward")
    add("--small", action="store_true", help="reduced sizes, for CPUs")
    add("--device", choices=["cuda", "cpu"], help="default: cuda if there is one")
    add("--repeats", type=int, default=40, help="timed steps per method")
    add("--seconds", type=float, default=1.5, help="at most, for these steps")
    add("--compile-seconds", type=float, default=600.0, help="for all compilations together")
    add("--row-seconds", type=float, default=90.0, help="for measuring one row")
    add("--one-layout", action="store_true", help="images compiled channels-last only")
    add("--gates", type=Path, help="folder of locks, shared with benchmarks that run meanwhile")
    add("--out", type=Path, help="JSON file, rewritten after each row")
    add("--row", nargs=2, metavar=("NET", "DTYPE"), help=argparse.SUPPRESS)
    add("--folder", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    chosen.device = chosen.device or ("cuda" if torch.cuda.is_available() else "cpu")
    chosen.dtypes = chosen.dtypes or (["float32"] if chosen.device == "cpu" else list(DTYPES))
    return chosen


def selected(chosen: argparse.Namespace, net: str) -> list[str]:
    """The methods of a row, what compiles first."""
    names = methods.known()
    if chosen.methods:
        wanted = [names[m] for m in chosen.methods]
    else:
        wanted = [m for m in methods.DEFAULT if chosen.peers or not methods.parse(m)[0].peer]
        if chosen.device == "cpu":
            wanted = [m for m in wanted if not methods.captures(m)]
        wanted = [m for m in wanted if m not in {names[n] for n in chosen.without}]
    if not nets.TABLE[net].layouts:
        wanted = [m for m in wanted if methods.CHANNELS_LAST not in m]
    elif chosen.one_layout:
        wanted = [m for m in wanted if not m.startswith("plain compiled") or methods.parse(m)[1]]
    return sorted(wanted, key=lambda m: (not methods.parse(m)[0].compiled, methods.captures(m)))


# --------------------------------------------------------------------------------- one row


class Row:
    """One network in one dtype, and its methods."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        self.net_name, self.dtype = chosen.row
        entry = nets.TABLE[self.net_name]
        self.weight, self.cuda = entry.weight, chosen.device == "cuda"
        net, xs, ys = nets.problem(
            self.net_name, small=chosen.small, dtype=DTYPES[self.dtype], device=chosen.device
        )
        self.layouts: dict[bool, tuple[nn.Module, list]] = {False: (net, [*zip(xs, ys)])}  # noqa: B905
        self.steps: dict[str, methods.Step] = {}
        self.columns: dict[str, dict[str, Any]] = {}
        self.facts = {
            "net": self.net_name, "dtype": self.dtype, "batch": entry.size(chosen.small).batch,
            "parameters": sum(p.numel() for p in net.parameters()), "columns": self.columns,
        }  # fmt: skip

    def layout(self, channels_last: bool) -> tuple[nn.Module, list]:
        if channels_last not in self.layouts:
            net, sets = self.layouts[False]
            moved = copy.deepcopy(net).to(memory_format=torch.channels_last)
            laid = [(x.contiguous(memory_format=torch.channels_last), y) for x, y in sets]
            self.layouts[channels_last] = moved, laid
        return self.layouts[channels_last]

    def save(self) -> None:
        path = self.chosen.folder / f"{self.net_name}-{self.dtype}.json"
        scratch = path.with_suffix(".partial")
        scratch.write_text(json.dumps(self.facts))
        os.replace(scratch, path)

    def attempt(self, method: str, work: Any, *args: Any) -> bool:
        """Whether it came through; what went wrong stands in the method's column."""
        try:
            with methods.parse(method)[0].around():
                work(method, *args)
        except Exception as error:
            traceback.print_exc()
            lines = str(error).strip().splitlines()
            told = f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
            self.columns[method] = {"error": told}
            self.steps.pop(method, None)
            tidy(self.cuda)
            return False
        finally:
            self.save()
        return True

    def first_call(self, method: str) -> None:
        net, sets = self.layout(methods.parse(method)[1])
        start = time.perf_counter()
        step = methods.build(method, net, *sets[0], self.weight)
        for _ in range(3):  # sweeps are flattened at the third call
            net.zero_grad(set_to_none=True)
            step(*sets[0])
        if self.cuda:
            torch.cuda.synchronize()
        self.steps[method] = step
        self.columns[method] = {"first_calls_s": round(time.perf_counter() - start, 2)}

    def references(self) -> dict[bool, dict[str, Tensor]]:
        """By autograd from the same numbers, in float64 on a CPU and in float32 without TF32 on a
        GPU: gradients of the plain step (False) and of the penalised one (True)."""
        net, sets = self.layout(False)
        wide = torch.float32 if self.cuda else torch.float64
        found = {}
        allow_tf32(False)
        torch.backends.cudnn.benchmark = False
        for penalised, method in ((False, "plain"), (True, "stock")):
            twin, x = copy.deepcopy(net).to(wide), sets[0][0].to(wide)
            step = methods.build(method, twin, x, sets[0][1], self.weight)
            found[penalised] = on_the_host(evaluate(step, twin, x, sets[0][1])["gradients"])
            del twin, step
            tidy(self.cuda)
        allow_tf32(True)
        torch.backends.cudnn.benchmark = True
        return found

    def judge(self, method: str, known: dict[bool, dict[str, Tensor]]) -> None:
        """The gradient's error, and the peak of memory."""
        base, channels_last, _ = methods.parse(method)
        net, sets = self.layout(channels_last)
        expected = known.get(base.penalised)
        step, column = self.steps[method], self.columns[method]
        if expected is not None:
            found = on_the_host(evaluate(step, net, *sets[0])["gradients"])
            column["gradient_error"], _ = gradient_error(found, expected)
        if self.cuda and not methods.captures(method):
            net.zero_grad(set_to_none=True)
            tidy(True)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step(*sets[0])
            torch.cuda.synchronize()
            column["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        net.zero_grad(set_to_none=True)

    def profile(self, method: str) -> None:
        net, sets = self.layout(methods.parse(method)[1])
        self.columns[method]["kinds_ms"] = kinds(kernels(self.steps[method], net, sets, 3)[0])

    def timed(self, method: str, count: int) -> list[float]:
        net, sets = self.layout(methods.parse(method)[1])
        return time_steps(self.steps[method], net, sets, count)

    def run(self, waiting: int) -> None:
        names = selected(self.chosen, self.net_name)
        folder = self.chosen.folder
        gates = self.chosen.gates or folder
        allow_tf32(True)
        compiled = [m for m in names if methods.parse(m)[0].compiled and not methods.captures(m)]
        with crowded(gates / "tuning") if self.cuda else contextlib.nullcontext():
            for method in compiled:
                self.attempt(method, self.first_call)
        (folder / f"ready-{os.getpid()}").touch()
        deadline = (folder / "begun").stat().st_mtime + self.chosen.compile_seconds
        while len([*folder.glob("ready-*")]) < waiting and time.time() < deadline:
            time.sleep(0.2)
        with alone(gates / "turn"):
            self.measure([m for m in names if m not in compiled])

    def measure(self, others: list[str]) -> None:
        end = time.monotonic() + self.chosen.row_seconds
        torch.backends.cudnn.benchmark = True
        known: dict[bool, dict[str, Tensor]] = {}
        try:
            known = self.references()
        except Exception as error:
            self.facts["no_reference"] = f"{type(error).__name__}: {error}"[:300]
            tidy(self.cuda)
        for method in others:
            if time.monotonic() < end:
                self.attempt(method, self.first_call)
            else:
                self.columns[method] = {"error": "not run: no time left"}
        for method in list(self.steps):
            self.attempt(method, self.judge, known)
        del known
        tidy(self.cuda)
        samples: dict[str, list[float]] = {}
        for method in self.steps:
            with methods.parse(method)[0].around():
                samples[method] = self.timed(method, 2)
        counts = {
            m: plan_repeats(min(times), self.chosen.repeats, self.chosen.seconds)
            for m, times in samples.items()
        }
        samples = {m: [] for m in samples}
        for _ in range(ROUNDS):
            for method, times in samples.items():
                if time.monotonic() < end or not times:
                    with methods.parse(method)[0].around():
                        times += self.timed(method, max(1, round(counts[method] / ROUNDS)))
        for method, times in samples.items():
            self.columns[method] |= summary(times)
        if self.cuda:
            for method in self.steps:
                base = methods.parse(method)[0]
                if base.compiled and not base.peer and not methods.captures(method):
                    self.attempt(method, self.profile)
        price(self.columns)
        self.facts["complete"] = True
        self.save()


def on_the_host(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: g.double().cpu() for name, g in gradients.items()}


# What arithmetic asks of a penalised step, over a plain one: a product of the network is taken four
# times instead of twice and has two weight gradients instead of one; attention takes 27 products of
# its tiles for 7 (docs/benchmarks.md counts them); what passes over memory does so twice.
LEAST = {"products": 2.0, "attention": 27 / 7, "passes": 2.0}


def floor(kinds_ms: dict[str, float]) -> float:
    """The price below which arithmetic forbids a step whose plain one spends its time so.

    >>> round(floor({"products": 6.0, "attention": 1.0, "passes": 3.0}), 2)
    2.19
    """
    return sum(LEAST[name] * ms for name, ms in kinds_ms.items()) / sum(kinds_ms.values())


def price(columns: dict[str, dict[str, Any]]) -> None:
    """To each penalised method its price: over the fastest plain step of its own launch kind, which
    is named beside it; memory over that of the plain step that allocates least."""
    for column in columns.values():
        if sum(column.get("kinds_ms", {}).values()):
            column["floor"] = floor(column["kinds_ms"])
    for method, column in columns.items():
        base = methods.parse(method)[0]
        if base.penalised:
            column.pop("floor", None)
        if not base.penalised or column.get("ms") is None:
            continue
        plain = {
            name: other
            for name, other in columns.items()
            if other.get("ms") is not None
            and not methods.parse(name)[0].penalised
            and methods.launch(name) == methods.launch(method)
        }
        if not plain:
            continue
        fastest = min(plain, key=lambda name: plain[name]["ms"])
        column["over"], column["price"] = fastest, column["ms"] / plain[fastest]["ms"]
        peaks = [other["peak_mib"] for other in plain.values() if other.get("peak_mib")]
        if peaks and column.get("peak_mib"):
            column["memory_price"] = column["peak_mib"] / min(peaks)


# ----------------------------------------------------------------------------- the whole run


def show(row: dict[str, Any]) -> None:
    print(f"\n{row['net']} {row['dtype']}, batch {row['batch']}")
    for method, column in row["columns"].items():
        if column.get("ms") is None:
            print(f"  {method:<42} {column.get('error', 'not finished')[:110]}")
            continue
        parts = [f"{column['ms']:9.2f} ms ± {column['ms_spread']:.2f}"]
        if "price" in column:
            parts.append(f"{column['price']:5.2f} × {column['over']}")
        if column.get("gradient_error") is not None:
            parts.append(f"error {column['gradient_error']:.1e}")
        if column.get("floor"):
            parts.append(f"floor {column['floor']:.2f}")
        if column.get("memory_price"):
            parts.append(f"memory {column['memory_price']:.2f} ×")
        print(f"  {method:<42} " + "  ".join(parts), flush=True)


def main() -> int:
    chosen = arguments()
    if chosen.row:
        waiting = int((chosen.folder / "begun").read_text())
        Row(chosen).run(waiting)
        return 0
    pairs = [(net, dtype) for net in chosen.nets for dtype in chosen.dtypes]
    document: dict[str, Any] = {
        "hardware": hardware(chosen.device), "versions": versions(), "small": chosen.small,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command_line(), "rows": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "begun").write_text(str(len(pairs)))
        threads = max(1, (os.cpu_count() or 2) // len(pairs))
        variables = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
        variables.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        if chosen.device == "cpu":
            variables.setdefault("OMP_WAIT_POLICY", "passive")
        started = {}
        for net, dtype in pairs:
            with open(folder / f"{net}-{dtype}.log", "w") as log:
                words = [*sys.argv[1:], "--row", net, dtype, "--folder", str(folder)]
                command = [sys.executable, str(HERE / "engine.py"), *words]
                started[net, dtype] = subprocess.Popen(
                    command, env=variables, stdout=log, stderr=subprocess.STDOUT
                )
        try:
            collect(chosen, document, folder, started)
        finally:
            for process in started.values():
                process.kill()
    return 0


def collect(
    chosen: argparse.Namespace, document: dict[str, Any], folder: Path, started: dict
) -> None:
    """Rows as they come to an end, in the order of the networks."""
    order = list(started)
    left, rows = dict(started), {}
    while left:
        time.sleep(0.3)
        for pair in [pair for pair, process in left.items() if process.poll() is not None]:
            process = left.pop(pair)
            net, dtype = pair
            path = folder / f"{net}-{dtype}.json"
            row = json.loads(path.read_text()) if path.exists() else None
            if row is None or not row.get("complete"):
                (folder / f"ready-{process.pid}").touch()  # nobody waits for it
                print(f"\n{net} {dtype} did not finish; the end of what it said:")
                print((folder / f"{net}-{dtype}.log").read_text()[-1500:], flush=True)
            if row is None:
                continue
            rows[pair] = row
            document["rows"] = [rows[p] for p in order if p in rows]
            write(chosen.out, document)
            show(row)


if __name__ == "__main__":
    sys.exit(main())
