"""What a penalised training step costs, side by side with plain training and with other libraries.

    PYTHONPATH=src python benchmarks/engine.py --out benchmarks/results/engine-h200.json
    PYTHONPATH=src python benchmarks/engine.py --small --device cpu

Every network and dtype runs in a process of its own with a time limit; the output file is rewritten
after each. benchmarks/README.md explains the methods and the columns.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

import methods
import nets
import report
from timing import alone

HERE = Path(__file__).resolve().parent


def arguments() -> argparse.Namespace:
    names = methods.known()
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="methods: " + ", ".join(names),
    )
    add = parser.add_argument
    add("--nets", nargs="+", choices=nets.TABLE, default=list(nets.TABLE), metavar="NET")
    add("--dtypes", nargs="+", choices=["float32", "bf16"], help="default: both; CPU: float32")
    where = "METHOD, NET:METHOD or NET:DTYPE:METHOD"
    add("--methods", nargs="+", type=scoped, metavar="METHOD", help=f"{where}; see README.md")
    add("--also", nargs="+", type=scoped, default=[], metavar="METHOD", help="beside the default")
    add("--all-peers", action="store_true", help="also what is slow to compile")
    add("--small", action="store_true", help="reduced sizes, for CPUs")
    add("--device", choices=["cuda", "cpu"], help="default: cuda if there is one")
    add("--repeats", type=int, default=60, help="timed steps per method")
    add("--cap-seconds", type=float, help="timed seconds per method; default: 2; CPU: 0.5")
    add("--budget-seconds", type=float, help="for the whole run")
    add("--limit-seconds", type=float, default=420.0, help="for one network and dtype")
    add("--jax-seconds", type=float, default=120.0, help="for JAX on one network and dtype")
    add("--warm-cache", action="store_true", help="first compile everything in parallel")
    add("--compile-seconds", type=float, help="for that; default: half of the budget")
    add("--together", action="store_true", help="compile all at once, then measure one by one")
    add("--start-by", type=float, default=300.0, help="with --together: seconds for compiling")
    add("--ahead", type=int, help="workers that start up while one measures; default: 1; CPU: 0")
    add("--no-exact", action="store_true", help="compare with stock autograd in the same dtype")
    add("--no-references", action="store_true", help="compare with nothing; saves a slow step")
    add("--compile-only", action="store_true", help="do that and nothing else")
    add(
        "--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="parallel compilations"
    )
    add("--cache-dir", type=Path, default=Path(tempfile.gettempdir()) / "doubleback-benchmarks")
    add("--jax-python", default=sys.executable, help="the interpreter that has JAX")
    add("--out", type=Path, help="JSON file")
    add(
        "--combine",
        nargs="+",
        type=Path,
        metavar="JSON",
        help="merge results, of --methods; measures nothing",
    )
    chosen = parser.parse_args()
    chosen.device = chosen.device or ("cuda" if torch.cuda.is_available() else "cpu")
    cpu = chosen.device == "cpu"
    chosen.dtypes = chosen.dtypes or (["float32"] if cpu else ["float32", "bf16"])
    chosen.cap_seconds = chosen.cap_seconds or (0.5 if cpu else 2.0)
    chosen.ahead = (0 if cpu else 1) if chosen.ahead is None else chosen.ahead
    chosen.budget_seconds = chosen.budget_seconds or float("inf")
    chosen.compile_seconds = chosen.compile_seconds or chosen.budget_seconds / 2
    return chosen


class Scoped(NamedTuple):
    """A method, on every network and dtype or on some."""

    net: str | None
    dtype: str | None
    method: str

    def applies(self, net: str, dtype: str) -> bool:
        return self.net in (None, net) and self.dtype in (None, dtype)


def scoped(text: str) -> Scoped:
    """
    >>> scoped("vit:bf16:plain-compiled")
    Scoped(net='vit', dtype='bf16', method='plain compiled')
    """
    *scope, method = text.split(":")
    net, dtype = (*scope, None, None)[:2]
    names = methods.known()
    if len(scope) > 2 or method not in names or net not in (None, *nets.TABLE):
        raise argparse.ArgumentTypeError(f"{text!r} names no method, or no network")
    if dtype not in (None, "float32", "bf16"):
        raise argparse.ArgumentTypeError(f"{text!r}: no such dtype")
    return Scoped(net, dtype, names[method])


def slow_to_compile(method: str, net: str, device: str) -> bool:
    """Peers on heavy networks; on CPUs, all compiled methods but the main two."""
    if method in methods.JAX:
        return False
    base = methods.parse(method)[0]
    if device == "cpu":
        return base.compiled and method not in ("plain compiled", "doubleback compiled")
    return base.peer and nets.TABLE[net].heavy


def selected(chosen: argparse.Namespace, net: str, dtype: str) -> list[str]:
    """The methods to run on a network: as asked, or the default less what does not apply."""
    if chosen.methods:
        wanted = [asked.method for asked in chosen.methods if asked.applies(net, dtype)]
    else:
        wanted = list(methods.DEFAULT)
        if not chosen.all_peers:
            wanted = [m for m in wanted if not slow_to_compile(m, net, chosen.device)]
        if importlib.util.find_spec("jax") is None and chosen.jax_python == sys.executable:
            wanted = [method for method in wanted if method not in methods.JAX]
    more = [asked.method for asked in chosen.also if asked.applies(net, dtype)]
    wanted += [method for method in more if method not in wanted]
    if not nets.TABLE[net].layouts:
        wanted = [method for method in wanted if methods.CHANNELS_LAST not in method]
    return wanted


# --- processes ------------------------------------------------------------------------------------


def environment(chosen: argparse.Namespace, threads: int | None = None) -> dict[str, str]:
    cache = chosen.cache_dir.absolute()
    variables = dict(os.environ)
    variables["TORCHINDUCTOR_CACHE_DIR"] = str(cache / "inductor")
    variables["TRITON_CACHE_DIR"] = str(cache / "triton")
    variables.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache / "jax"))
    variables.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    variables.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if chosen.device == "cpu":
        variables.setdefault("JAX_PLATFORMS", "cpu")
        variables.setdefault("OMP_WAIT_POLICY", "passive")  # spinning ruins shared cores' timings
    if threads is not None:
        variables["TORCHINDUCTOR_COMPILE_THREADS"] = str(threads)
    return variables


_running: set[int] = set()


def end_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def end_all(number: int, _frame: object) -> None:
    """On a signal: leave no process behind. Results so far are in the output file."""
    for leader in list(_running):
        end_group(leader)
    os._exit(128 + number)


def call(
    command: list[str], variables: dict[str, str], limit_s: float, begun: Path | None = None
) -> tuple[str, str, str]:
    """(stdout, stderr, trouble) of a process; on time-out it and its children are ended.

    begun: a file that comes to be when the process has its turn; the limit counts from then on.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, env=variables, stdout=out, stderr=err, process_group=0)
        _running.add(process.pid)
        trouble = ""
        try:
            while begun is not None and not begun.exists() and process.poll() is None:
                time.sleep(0.1)
            if process.wait(timeout=max(1.0, limit_s)):
                trouble = f"exit status {process.returncode}"
        except subprocess.TimeoutExpired:
            trouble = f"ended at its limit of {limit_s:.0f} s"
        finally:
            end_group(process.pid)
            process.wait()
            _running.discard(process.pid)
        out.seek(0), err.seek(0)
        return out.read(), err.read(), trouble


class Task:
    """One network in one dtype with some methods: a worker process, then JAX in another."""

    def __init__(self, chosen, net: str, dtype: str, names: list[str], *, compile_only: bool):
        self.chosen, self.net, self.dtype = chosen, net, dtype
        self.torch_methods = [name for name in names if name not in methods.JAX]
        self.jax_methods = [name for name in names if name in methods.JAX]
        self.compile_only = compile_only
        self.turns: dict[str, Any] | None = None
        self.gate: Path | None = None
        self.size = nets.TABLE[net].size(chosen.small)

    @property
    def references(self) -> list[str]:
        """What gradients are compared with."""
        if self.chosen.no_references:
            return []
        return ["stock"] if self.chosen.no_exact else ["stock", "exact"]

    @property
    def gib(self) -> float:
        """Device memory this task may need."""
        if self.chosen.small:
            return 1.0
        share = 1.0 if self.dtype == "float32" else 0.5
        if self.compile_only:
            share /= 2  # most of the time it compiles
        return nets.TABLE[self.net].gib * share + 1

    def run(
        self, limit_s: float, threads: int | None = None, deadline: float = float("inf")
    ) -> dict[str, Any]:
        """The worker's facts, its rows completed: every method has one, if only an error."""
        with tempfile.TemporaryDirectory() as folder_name:
            folder = Path(folder_name)
            variables = environment(self.chosen, threads)
            facts = self._worker(folder, variables, limit_s)
            if self.jax_methods:
                with alone(self.gate):
                    left = min(self.chosen.jax_seconds, deadline - time.monotonic())
                    facts["rows"] |= self._jax(folder, variables, left)
        return facts

    def _worker(self, folder: Path, variables: dict[str, str], limit_s: float) -> dict[str, Any]:
        result = folder / "result.json"
        job = {
            "net": self.net,
            "dtype": self.dtype,
            "methods": self.torch_methods,
            "small": self.chosen.small,
            "device": self.chosen.device,
            "repeats": self.chosen.repeats,
            "cap_s": self.chosen.cap_seconds,
            "limit_s": limit_s,
            "compile_only": self.compile_only,
            "references": self.references,
            "turns": self.turns,
            "gate": None if self.gate is None else str(self.gate),
            "begun": str(folder / "begun"),
            "export": str(folder) if self.jax_methods else None,
            "result": str(result),
        }
        (folder / "worker.json").write_text(json.dumps(job))
        command = [sys.executable, str(HERE / "worker.py"), str(folder / "worker.json")]
        begun = None if self.gate is None else folder / "begun"
        _, err, trouble = call(command, variables, limit_s + 10, begun)
        facts = json.loads(result.read_text()) if result.exists() else {"rows": {}}
        for method in self.torch_methods:
            row = facts["rows"].setdefault(method, {"error": f"not run: {trouble}"})
            if trouble and method == facts.get("current"):
                row["error"] = f"{trouble}; {err.strip()[-600:]}"
        if trouble and not facts.get("current"):
            print(err[-2000:], file=sys.stderr)
        return facts

    def _jax(self, folder: Path, variables: dict[str, str], limit_s: float) -> dict[str, Any]:
        if not (folder / "data.npz").exists():
            return {
                method: {"error": "not run: no exported network"} for method in self.jax_methods
            }
        job = {
            "net": self.net,
            "dtype": self.dtype,
            "device": self.chosen.device,
            "sizes": asdict(self.size)["arguments"],
            "sets": 2,
            "methods": self.jax_methods,
            "weight": nets.TABLE[self.net].weight,
            "repeats": self.chosen.repeats,
            "cap_s": self.chosen.cap_seconds,
        }
        (folder / "job.json").write_text(json.dumps(job))
        command = [self.chosen.jax_python, str(HERE / "jax_peer.py"), str(folder)]
        out, err, trouble = call(command, variables, limit_s)
        rows = {}
        for line in out.splitlines():
            if line.startswith("{"):
                row = json.loads(line)
                rows[row.pop("method")] = row
        for method in self.jax_methods:
            rows.setdefault(method, {"error": f"not run: {trouble}; {err.strip()[-600:]}"})
        return rows


# --- the two passes -------------------------------------------------------------------------------


class Memory:
    """Admits tasks while their device memory adds up to less than the card has."""

    def __init__(self, gib: float):
        self.free, self.total = gib, gib
        self.changed = threading.Condition()

    @contextlib.contextmanager
    def take(self, gib: float) -> Iterator[None]:
        gib = min(gib, self.total)
        with self.changed:
            self.changed.wait_for(lambda: self.free >= gib)
            self.free -= gib
        try:
            yield
        finally:
            with self.changed:
                self.free += gib
                self.changed.notify_all()


def device_gib(device: str) -> float:
    """What may be handed out, asked in another process so that this one stays off the device."""
    if device == "cpu":
        return 8.0
    question = "import torch; print(torch.cuda.get_device_properties(0).total_memory)"
    answer = subprocess.run(
        [sys.executable, "-c", question], capture_output=True, text=True, check=True
    )
    return 0.85 * int(answer.stdout) / 2**30


Failures = dict[tuple[str, str, str], str]  # network, dtype, method → what went wrong


def _slowest_first(net: str, method: str) -> tuple[bool, ...]:
    """Sorts what takes longest to compile first."""
    base = methods.parse(method)[0]
    return not nets.TABLE[net].heavy, not base.peer, not base.penalised


def warm_cache(chosen: argparse.Namespace, deadline: float) -> Failures:
    """Compile in parallel processes, so that the timed pass finds the kernels in the caches. What
    could not be compiled is returned: there is no use in trying again.

    What was tuned by timing on the crowded device is forgotten again: Inductor's choices among
    its compiled configurations are deleted and made anew in the timed pass, and JAX, whose cache
    has no such seam, compiles in the timed pass alone.
    """
    tasks = [
        Task(chosen, net, dtype, [method], compile_only=True)
        for net in chosen.nets
        for dtype in chosen.dtypes
        for method in selected(chosen, net, dtype)
        if method not in methods.JAX and methods.parse(method)[0].compiled
    ]
    tasks.sort(key=lambda task: _slowest_first(task.net, *task.torch_methods))
    memory = Memory(device_gib(chosen.device))
    threads = max(1, (os.cpu_count() or 2) // max(1, chosen.jobs))
    failures: Failures = {}

    def compile_one(task: Task) -> None:
        (name,) = task.torch_methods
        with memory.take(task.gib):
            start = time.monotonic()
            left = deadline - start
            error = "no time left"
            if left >= 10:
                facts = task.run(min(left, chosen.limit_seconds), threads)
                error = facts["rows"][name]["error"]
        seconds = time.monotonic() - start
        print(f"  {seconds:6.1f} s  {task.net} {task.dtype}: {name}", flush=True)
        if error:
            print(f"           {error.splitlines()[0][:160]}", flush=True)
            text = f"not compiled in {seconds:.0f} s, {chosen.jobs} at a time: {error}"
            failures[task.net, task.dtype, name] = text

    print(f"compiling {len(tasks)} methods, {chosen.jobs} at a time", flush=True)
    with ThreadPoolExecutor(chosen.jobs) as pool:
        list(pool.map(compile_one, tasks))
    for choice in (chosen.cache_dir / "inductor").rglob("*.best_config"):
        choice.unlink()
    return failures


def together(chosen: argparse.Namespace, document: dict[str, Any], deadline: float) -> None:
    """All workers at once: they compile side by side, then measure one after the other.

    Each compiled peer has a worker of its own, so that a compiler that does not come to an end
    costs no other number. JAX, which compiles while it measures, is left out.
    """
    tasks = []
    for net, dtype in ((net, dtype) for net in chosen.nets for dtype in chosen.dtypes):
        names = [name for name in selected(chosen, net, dtype) if name not in methods.JAX]
        peers = [name for name in names if (m := methods.parse(name)[0]).compiled and m.peer]
        ours = sorted((name for name in names if name not in peers), key=methods.captures)
        parts = [[peer] for peer in peers] + ([ours] if ours else [])
        tasks += [Task(chosen, net, dtype, part, compile_only=False) for part in parts]
    tasks.sort(key=lambda task: _slowest_first(task.net, task.torch_methods[-1]))
    limit = min(deadline - time.monotonic(), max(chosen.limit_seconds, 2 * chosen.start_by))
    threads = max(1, (os.cpu_count() or 2) // len(tasks))
    with tempfile.TemporaryDirectory() as folder:
        for task in tasks:
            task.turns = {
                "folder": folder,
                "workers": len(tasks),
                "start_by": time.time() + chosen.start_by,
            }
        with ThreadPoolExecutor(len(tasks)) as pool:
            runs = {pool.submit(task.run, limit, threads): task for task in tasks}
            known: dict[tuple[str, str], dict[str, Any]] = {}
            found: dict[tuple[str, str], list[dict[str, Any]]] = {}
            for run in as_completed(runs):
                task, facts = runs[run], run.result()
                pair = task.net, task.dtype
                document["hardware"] = facts.get("hardware", document["hardware"])
                document["versions"] |= facts.get("versions", {})
                whole = known.setdefault(pair, {"rows": {}})
                whole |= {**facts, "rows": whole["rows"] | facts["rows"]}
                weight = nets.TABLE[task.net].weight
                found[pair] = report.complete(*pair, task.size.batch, weight, whole)
                document["results"] = [row for some in found.values() for row in some]
                report.write(chosen.out, document)
                print(f"\n{task.net} {task.dtype}, batch {task.size.batch}")
                report.show(found[pair])


def timed_pass(
    chosen: argparse.Namespace, document: dict[str, Any], deadline: float, failures: Failures
) -> None:
    """One network and dtype after the other; the next worker starts up while one measures."""
    pairs = [(net, dtype) for dtype in chosen.dtypes for net in chosen.nets]
    tasks = []
    for pair in pairs:
        names = [name for name in selected(chosen, *pair) if (*pair, name) not in failures]
        tasks.append(Task(chosen, *pair, names, compile_only=False))

    def run(i: int) -> dict[str, Any]:
        task, left = tasks[i], deadline - time.monotonic()
        share = 2 * left / (len(tasks) - i)
        if left < 20:
            error = {"error": "not run: budget spent"}
            return {"rows": {m: dict(error) for m in task.torch_methods + task.jax_methods}}
        limit = min(chosen.limit_seconds, left, max(60.0, share))
        return task.run(limit, deadline=deadline)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1 + chosen.ahead) as pool:
        for task in tasks:
            task.gate = Path(folder) / "gate"
        start = time.monotonic()
        for task, facts in zip(tasks, pool.map(run, range(len(tasks))), strict=True):
            document["hardware"] = facts.get("hardware", document["hardware"])
            document["versions"] |= facts.get("versions", {})
            for (net, dtype, name), text in failures.items():
                if (net, dtype) == (task.net, task.dtype):
                    facts["rows"][name] = {"error": text}
            weight = nets.TABLE[task.net].weight
            rows = report.complete(task.net, task.dtype, task.size.batch, weight, facts)
            document["results"] += rows
            report.write(chosen.out, document)
            passed = time.monotonic() - start
            print(f"\n{task.net} {task.dtype}, batch {task.size.batch}: after {passed:.0f} s")
            report.show(rows)


def main() -> int:
    chosen = arguments()
    if chosen.combine:
        document = report.combine([json.loads(path.read_text()) for path in chosen.combine])
        if chosen.methods:
            kept = {asked.method for asked in chosen.methods}
            document["results"] = [r for r in document["results"] if r["method"] in kept]
        report.write(chosen.out, document)
        report.overview(document["results"])
        return 0
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end_all)
    deadline = time.monotonic() + chosen.budget_seconds
    failures: Failures = {}
    if chosen.warm_cache or chosen.compile_only:
        half = time.monotonic() + chosen.compile_seconds
        failures = warm_cache(chosen, deadline if chosen.compile_only else half)
    if chosen.compile_only:
        return 0
    document = {
        "hardware": None,
        "versions": {"jax": report.jax_version(chosen.jax_python)},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command_line(),
        "small": chosen.small,
        "results": [],
    }
    if chosen.together:
        together(chosen, document, deadline)
    else:
        timed_pass(chosen, document, deadline, failures)
    print()
    report.overview(document["results"])
    return 0


def command_line() -> str:
    """The command as others would type it: without the folders of this machine."""
    words = sys.argv[1:]
    for option in ("--out", "--cache-dir", "--jax-python"):
        if option in words[:-1]:
            at = words.index(option) + 1
            words[at] = Path(words[at]).name
    return shlex.join(["python", "benchmarks/engine.py", *words])


if __name__ == "__main__":
    sys.exit(main())
