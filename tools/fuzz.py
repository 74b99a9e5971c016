"""Random networks against stock autograd in float64: `make fuzz ARGS="--networks 1000"`.

    python tools/fuzz.py [--first SEED] [--networks N] [--minutes M] [--jobs N] [--slow SHARE]
        [--paths PATH,…] [--device cuda] [--limit SECONDS] [--json FILE]

Every seed is one network, which is trained in several ways: each a case with a penalty, an input
and a path of its own (tests/support/fuzz.py); the same seed is the same network and the same cases.
A failure is shrunk and printed as a program. By default one network in a hundred is compiled, which
takes minutes for a hundred of them; `--paths` runs these alone:
`--paths "compiled,compiled accumulate,compiled gradient,compiled step,backend"`.

Networks run in processes of their own, `--jobs` at a time, each of one thread and replaced after
some networks, since PyTorch keeps what it traced. A network that takes longer than `--limit` is
ended and counted as 'hangs', one that ends its process as 'crashes'; the others go on.

The file keeps a record of each run, the newest last (which seeds, on which commit, what was
compared, what was excused and why, what failed), and their sum. It is written as the run goes, and
when it is interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import itertools
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import torch  # noqa: E402

from support import fuzz, vocabulary  # noqa: E402  # pyright: ignore[reportMissingImports]

RESULTS = ROOT / "benchmarks" / "results" / "fuzz.json"
EXCUSES = ("stock raises", "not finite", "unstable", "draws", "left out")
FAILURES = ("wrong", "raises", "hangs", "crashes")
NETWORKS = 200  # by one process
START = "spawn"  # nothing of one process in the next
SHRINKING = 60.0  # seconds for a failure


class Tally:
    """Counts over cases, and of networks."""

    def __init__(self) -> None:
        self.networks = 0
        self.kinds: Counter[str] = Counter()
        self.by: dict[str, Counter[str]] = {
            name: Counter() for name in ("path", "penalty", "dtype", "layout", "wrt", "device")
        }
        self.training_steps = 0
        self.captured: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.excused: Counter[str] = Counter()
        self.words: set[str] = set()
        self.operators: set[str] = set()
        self.failures: list[dict[str, Any]] = []

    def add(self, cases: Sequence[Any], verdicts: Sequence[Any]) -> None:
        """One network."""
        self.networks += 1
        for case, verdict in zip(cases, verdicts, strict=True):
            self._add(case, verdict)

    def _add(self, case: Any, verdict: Any) -> None:
        self.kinds[verdict.kind] += 1
        if verdict.kind in EXCUSES:
            self.excused[f"{verdict.kind}: {verdict.detail[:60]}".rstrip(": ")] += 1
            return
        for name, counter in self.by.items():
            counter[getattr(case, name)] += 1
        self.training_steps += verdict.step + 1
        self.words |= {name for name, *_ in case.steps}
        if case.path not in ("patch", "backend", "step", "compiled step"):
            self.captured["captured" if verdict.captured else "fell back"] += 1
        self.reasons.update(reason[:90] for reason in verdict.reasons)

    def fail(self, seed: int, kind: str, script: str) -> None:
        self.failures.append({"seed": seed, "kind": kind, "script": script})
        print(f"\n# seed {seed}\n{script}\n", flush=True)

    def document(self) -> dict[str, Any]:
        return {
            "networks": self.networks,
            "cases": sum(self.kinds.values()),
            "compared": sum(n for k, n in self.kinds.items() if k not in EXCUSES),
            "agree": self.kinds["agrees"],
            "failed": sum(self.kinds[k] for k in FAILURES),
            "training_steps": self.training_steps,
            "captured": dict(self.captured),
            "excuses": {k: self.kinds[k] for k in EXCUSES},
            "operators": {"vocabulary": len(self.words), "aten": len(self.operators)},
            "by": {name: dict(counter.most_common()) for name, counter in self.by.items()},
            "reasons_to_fall_back": dict(self.reasons.most_common(12)),
            "excused": dict(self.excused.most_common(12)),
            "failures": self.failures,
        }


# ------------------------------------------------------------------------------------ processes


def work(pipe: Connection, said: str) -> None:
    """A process: runs the networks that arrive, and sends what became of their cases.

    Up: ("ready",), and for each network ("done", seed, verdicts, new operators, script or None),
    with ("fails", seed, verdicts) before it where a case is shrunk first.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop
    with contextlib.suppress(OSError):  # what PyTorch prints, and the stack of a crash
        stream = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
    prepare()
    operators: set[str] = set()
    pipe.send(("ready",))
    with fuzz.operators_seen(operators):
        while (cases := pipe.recv()) is not None:
            known = set(operators)
            verdicts, text = fuzz.run_all(cases), None
            if any(verdict.failed for verdict in verdicts):
                pipe.send(("fails", cases[0].seed, verdicts))
                text = shown(cases, verdicts)
            pipe.send(("done", cases[0].seed, verdicts, operators - known, text))


def shown(cases: Sequence[Any], verdicts: Sequence[Any]) -> str:
    """The first failure of a network as a program: alone if it fails alone, else after those cases
    that ran before it."""
    first = next(k for k, verdict in enumerate(verdicts) if verdict.failed)
    case, verdict = cases[first], verdicts[first]
    if fuzz.run(case).kind != verdict.kind:
        return fuzz.script(case, verdict, cases[:first])
    small = fuzz.shrink(case, verdict, SHRINKING)
    return fuzz.script(small, fuzz.run(small))


def prepare() -> None:
    """Settings of a process that traces many small networks and measures nothing."""
    import faulthandler

    from torch._dynamo import guards

    faulthandler.enable()
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # each capture empties the processor's caches to time its guards, for a log that nobody reads
    guards.profile_guard_manager = lambda *args: 0.0  # type: ignore[attr-defined]
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@dataclass
class Worker:
    """One process and the network it is at."""

    process: Any
    pipe: Connection
    said: str
    networks: int = 0
    cases: Any = None
    since: float = field(default_factory=time.monotonic)
    failing: Any = None  # the verdicts of which one is being shrunk

    @classmethod
    def start(cls, folder: str, number: int) -> Worker:
        context = multiprocessing.get_context(START)
        ours, theirs = context.Pipe()
        said = os.path.join(folder, f"{number}.log")
        process = context.Process(target=work, args=(theirs, said), daemon=True)
        process.start()
        theirs.close()
        return cls(process, ours, said)

    def take(self, cases: Any) -> None:
        self.cases, self.since, self.failing = cases, time.monotonic(), None
        self.networks += 1
        self.pipe.send(cases)

    def seconds(self) -> float:
        return time.monotonic() - self.since

    def allowance(self) -> float:
        """Seconds beside those of a network: to start, or to shrink."""
        return 2 * SHRINKING if self.cases is None or self.failing else 0.0

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def words(self) -> str:
        """The last of what the process printed."""
        with contextlib.suppress(OSError), open(self.said, errors="replace") as file:
            lines = [line.rstrip() for line in file if line.strip()]
            return "\n".join(f"# {line}" for line in lines[-8:])
        return ""


def crowd(
    networks: Iterator[Any], jobs: int, limit: float, end: float, tally: Tally
) -> Generator[int, None, None]:
    """Runs the networks; yields a seed whenever one is done. Its workers are ended with it."""
    numbers = itertools.count()
    with tempfile.TemporaryDirectory() as folder:
        workers = [Worker.start(folder, next(numbers)) for _ in range(jobs)]

        def feed(worker: Worker) -> None:
            cases = next(networks, None) if time.monotonic() < end else None
            if cases is None:
                worker.end()
                workers.remove(worker)
            else:
                worker.take(cases)

        def renew(worker: Worker) -> None:
            worker.end()
            workers[workers.index(worker)] = Worker.start(folder, next(numbers))

        def lost(worker: Worker, kind: str, detail: str) -> int:
            """A process that had to be ended, or ended itself."""
            cases, verdicts = worker.cases, worker.failing
            if cases is None:
                raise RuntimeError(f"a process does not start:\n{worker.words()}")
            if verdicts is None:
                verdicts = [fuzz.Verdict(kind, detail), *[fuzz.Verdict("left out")] * len(cases)]
                verdicts = verdicts[: len(cases)]
            tally.add(cases, verdicts)
            first = next(k for k, verdict in enumerate(verdicts) if verdict.kind in FAILURES)
            text = fuzz.script(cases[-1], verdicts[first], cases[:-1])
            tally.fail(cases[0].seed, verdicts[first].kind, f"{text}\n{worker.words()}".strip())
            renew(worker)
            return cases[0].seed

        try:
            while workers:
                ready = wait([w.pipe for w in workers], timeout=1.0)
                for worker in list(workers):
                    if worker.pipe in ready:
                        try:
                            kind, *rest = worker.pipe.recv()
                        except (EOFError, OSError):
                            worker.process.join(5.0)
                            code = worker.process.exitcode
                            yield lost(worker, "crashes", f"the process ended with {code}")
                            continue
                        if kind == "ready":
                            feed(worker)
                            continue
                        if kind == "fails":
                            worker.failing, worker.since = rest[1], time.monotonic()
                            continue
                        seed, verdicts, operators, text = rest
                        tally.operators |= operators
                        tally.add(worker.cases, verdicts)
                        if text is not None:
                            tally.fail(seed, next(v.kind for v in verdicts if v.failed), text)
                        (renew if worker.networks >= NETWORKS else feed)(worker)
                        yield seed
                    elif worker.seconds() > limit + worker.allowance():
                        yield lost(worker, "hangs", f"more than {limit:.0f} s")
                    elif time.monotonic() > end + limit:
                        worker.end()
                        workers.remove(worker)
        finally:
            for worker in workers:
                worker.end()


# ---------------------------------------------------------------------------------------- record

SUMMED = ("networks", "cases", "compared", "agree", "failed", "training_steps")


def kept(path: Path, run: dict[str, Any]) -> dict[str, Any]:
    """The file's document with this run in the place of its own earlier state, or added to it."""
    found = json.loads(path.read_text()) if path.exists() else {}
    same = ("started", "seeds_from", "paths")
    runs = [r for r in found.get("runs", ()) if any(r[n] != run[n] for n in same)] + [run]
    total: dict[str, Any] = {name: sum(r.get(name, r["networks"]) for r in runs) for name in SUMMED}
    for name in ("excuses", "captured"):
        counts: Counter[str] = Counter()
        for r in runs:
            counts.update(r[name])
        total[name] = dict(counts)
    return {"total": total, "runs": runs}


def write(path: Path, document: dict[str, Any]) -> None:
    """In one piece: a reader, or an interruption, never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(beside, path)


def commit() -> str:
    with contextlib.suppress(OSError):
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
        )
        return found.stdout.strip() or "unknown"
    return "unknown"


def names(text: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in text.split(","))
    known = (*fuzz.PATHS, *fuzz.SLOW_PATHS)
    if not set(found) <= set(known):
        raise argparse.ArgumentTypeError(f"there are {', '.join(known)}")
    return found


def stop(*_: Any) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--networks", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=None, help="stop after so long")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--slow", type=float, default=0.01, help="share of compiled networks")
    parser.add_argument("--paths", type=names, default=(), help="these alone, in turn")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one network")
    parser.add_argument("--commit", default=None, help="for the record, where there is no git")
    parser.add_argument("--json", type=Path, default=None, help=f"{RESULTS.name}, for instance")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, stop)
    os.environ["OMP_NUM_THREADS"] = "1"
    start, last, shown = time.monotonic(), given.first, time.monotonic()
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    tally = Tally()
    which = {
        "started": started,
        "paths": list(given.paths) or f"all, {given.slow:.0%} compiled",
        "date": started[:10],
        "commit": given.commit or commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "jobs": given.jobs,
        "seeds_from": given.first,
    }

    def keep() -> None:
        if given.json:
            seconds = {"seeds_to": last, "seconds": round(time.monotonic() - start)}
            write(given.json, kept(given.json, {**which, **seconds, **tally.document()}))

    def tell() -> None:
        cases, failed = sum(tally.kinds.values()), len(tally.failures)
        rate = tally.networks / max(time.monotonic() - start, 1e-9)
        told = f"{tally.networks} networks ({rate:.2f}/s), {cases} cases, {failed} failures"
        print(told, file=sys.stderr, flush=True)

    networks = (
        fuzz.draw(seed, slow=given.slow, paths=given.paths, device=given.device)
        for seed in range(given.first, given.first + given.networks)
    )
    end = start + 60 * given.minutes if given.minutes is not None else float("inf")
    running = crowd(networks, given.jobs, given.limit, end, tally)
    try:
        for seed in running:
            last = max(last, seed)
            if time.monotonic() - shown > 15:
                shown = time.monotonic()
                tell()
                keep()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    finally:
        running.close()
        keep()
    tell()
    document = tally.document()
    print(json.dumps({k: v for k, v in document.items() if k != "failures"}, indent=1))
    print(f"of a vocabulary of {len(vocabulary.NAMES)} operators")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
