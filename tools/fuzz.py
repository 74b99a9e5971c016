"""Random networks against stock autograd in float64: `make fuzz ARGS="--networks 1000"`.

    python tools/fuzz.py [--first SEED] [--networks N] [--minutes M] [--jobs N] [--slow SHARE]
        [--paths PATH,…] [--device cuda] [--limit SECONDS] [--json FILE]

Every seed is one network with its penalty and its training steps (tests/support/fuzz.py); the same
seed is the same case. A failure is shrunk and printed as a program. By default one case in a
hundred is compiled, which takes minutes for a hundred of them; `--paths` runs these alone:
`--paths "compiled,compiled accumulate,compiled gradient,backend"`.

Cases run in processes of their own, `--jobs` at a time, each of one thread and replaced after some
cases, since PyTorch keeps what it traced. A case that takes longer than `--limit` is ended and
counted as 'hangs', one that ends its process as 'crashes'; the others go on.

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
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import torch  # noqa: E402

from support import fuzz, vocabulary  # noqa: E402  # pyright: ignore[reportMissingImports]

RESULTS = ROOT / "benchmarks" / "results" / "fuzz.json"
EXCUSES = ("stock raises", "not finite", "unstable", "draws")
FAILURES = ("wrong", "raises", "hangs", "crashes")
CASES = 200  # by one process
START = "spawn"  # nothing of one process in the next
SHRINKING = 60.0  # seconds for a failure


class Tally:
    """Counts over cases."""

    def __init__(self) -> None:
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

    def add(self, case: Any, verdict: Any) -> None:
        self.kinds[verdict.kind] += 1
        if verdict.kind in EXCUSES:
            self.excused[f"{verdict.kind}: {verdict.detail[:60]}".rstrip(": ")] += 1
            return
        for name, counter in self.by.items():
            counter[getattr(case, name)] += 1
        self.training_steps += verdict.step + 1
        self.words |= {name for name, *_ in case.steps}
        if case.path not in ("patch", "backend"):
            self.captured["captured" if verdict.captured else "fell back"] += 1
        self.reasons.update(reason[:90] for reason in verdict.reasons)

    def fail(self, seed: int, kind: str, script: str) -> None:
        self.failures.append({"seed": seed, "kind": kind, "script": script})
        print(f"\n# seed {seed}\n{script}\n", flush=True)

    def document(self) -> dict[str, Any]:
        return {
            "networks": sum(self.kinds.values()),
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
    """A process: draws the cases whose seeds arrive, and sends what became of them.

    Up: ("ready",), and for each case ("done", seed, verdict, new operators, script or None), with
    ("fails", seed, verdict) before it where the case is shrunk first.
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
        while (case := pipe.recv()) is not None:
            known = set(operators)
            verdict, text = fuzz.run(case), None
            if verdict.failed:
                pipe.send(("fails", case.seed, verdict))
                small = fuzz.shrink(case, verdict, SHRINKING)
                text = fuzz.script(small, fuzz.run(small))
            pipe.send(("done", case.seed, verdict, operators - known, text))


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
    """One process and the case it is at."""

    process: Any
    pipe: Connection
    said: str
    cases: int = 0
    case: Any = None
    since: float = field(default_factory=time.monotonic)
    failing: Any = None  # the verdict that is being shrunk

    @classmethod
    def start(cls, folder: str, number: int) -> Worker:
        context = multiprocessing.get_context(START)
        ours, theirs = context.Pipe()
        said = os.path.join(folder, f"{number}.log")
        process = context.Process(target=work, args=(theirs, said), daemon=True)
        process.start()
        theirs.close()
        return cls(process, ours, said)

    def take(self, case: Any) -> None:
        self.case, self.since, self.failing = case, time.monotonic(), None
        self.cases += 1
        self.pipe.send(case)

    def seconds(self) -> float:
        return time.monotonic() - self.since

    def allowance(self) -> float:
        """Seconds beside those of a case: to start, or to shrink."""
        return 2 * SHRINKING if self.case is None or self.failing else 0.0

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
    cases: Iterator[Any], jobs: int, limit: float, end: float, tally: Tally
) -> Generator[int]:
    """Runs the cases; yields a seed whenever one is done. Its workers are ended with it."""
    numbers = itertools.count()
    with tempfile.TemporaryDirectory() as folder:
        workers = [Worker.start(folder, next(numbers)) for _ in range(jobs)]

        def feed(worker: Worker) -> None:
            case = next(cases, None) if time.monotonic() < end else None
            if case is None:
                worker.end()
                workers.remove(worker)
            else:
                worker.take(case)

        def renew(worker: Worker) -> None:
            worker.end()
            workers[workers.index(worker)] = Worker.start(folder, next(numbers))

        def lost(worker: Worker, kind: str, detail: str) -> int:
            """A process that had to be ended, or ended itself."""
            case, verdict = worker.case, worker.failing
            if case is None:
                raise RuntimeError(f"a process does not start:\n{worker.words()}")
            if verdict is None:
                verdict = fuzz.Verdict(kind, detail)
            tally.add(case, verdict)
            text = fuzz.script(case, verdict)
            tally.fail(case.seed, verdict.kind, f"{text}\n{worker.words()}".strip())
            renew(worker)
            return case.seed

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
                        seed, verdict, operators, text = rest
                        tally.operators |= operators
                        tally.add(worker.case, verdict)
                        if text is not None:
                            tally.fail(seed, verdict.kind, text)
                        (renew if worker.cases >= CASES else feed)(worker)
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

SUMMED = ("networks", "compared", "agree", "failed", "training_steps")


def kept(path: Path, run: dict[str, Any]) -> dict[str, Any]:
    """The file's document with this run in the place of its own earlier state, or added to it."""
    found = json.loads(path.read_text()) if path.exists() else {}
    same = ("started", "seeds_from", "paths")
    runs = [r for r in found.get("runs", ()) if any(r[n] != run[n] for n in same)] + [run]
    total: dict[str, Any] = {name: sum(r[name] for r in runs) for name in SUMMED}
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
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one case")
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
        done, failed = sum(tally.kinds.values()), len(tally.failures)
        rate = done / max(time.monotonic() - start, 1e-9)
        print(f"{done} networks, {failed} failures, {rate:.2f}/s", file=sys.stderr, flush=True)

    cases = (
        fuzz.settled(fuzz.draw(seed, slow=given.slow, paths=given.paths, device=given.device))
        for seed in range(given.first, given.first + given.networks)
    )
    end = start + 60 * given.minutes if given.minutes is not None else float("inf")
    running = crowd(cases, given.jobs, given.limit, end, tally)
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
