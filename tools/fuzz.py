"""Random networks against stock autograd in float64: `make fuzz ARGS="--networks 1000"`.

    python tools/fuzz.py [--first SEED] [--networks N] [--minutes M] [--slow SHARE]
        [--paths PATH,…] [--json FILE]

Every seed is one network with its penalty and its training steps (tests/support/fuzz.py); the same
seed is the same case. A failure is shrunk and printed as a program. By default one case in a
hundred is compiled, which takes minutes for a hundred of them; `--paths` runs these alone:
`--paths "compiled,compiled accumulate,compiled gradient,backend"`.

The file keeps a record of each run, the newest last (which seeds, on which commit, what was
compared, what was excused and why, what failed), and their sum.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import platform
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import torch  # noqa: E402

from support import fuzz, vocabulary  # noqa: E402  # pyright: ignore[reportMissingImports]

RESULTS = ROOT / "benchmarks" / "results" / "fuzz.json"
EXCUSES = ("stock raises", "not finite", "unstable", "draws")


class Tally:
    """Counts over cases."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.by: dict[str, Counter[str]] = {
            name: Counter() for name in ("path", "penalty", "dtype", "layout", "wrt")
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

    def document(self) -> dict[str, Any]:
        return {
            "networks": sum(self.kinds.values()),
            "compared": sum(n for k, n in self.kinds.items() if k not in EXCUSES),
            "agree": self.kinds["agrees"],
            "failed": self.kinds["wrong"] + self.kinds["raises"],
            "training_steps": self.training_steps,
            "captured": dict(self.captured),
            "excuses": {k: self.kinds[k] for k in EXCUSES},
            "operators": {"vocabulary": len(self.words), "aten": len(self.operators)},
            "by": {name: dict(counter.most_common()) for name, counter in self.by.items()},
            "reasons_to_fall_back": dict(self.reasons.most_common(12)),
            "excused": dict(self.excused.most_common(12)),
            "failures": self.failures,
        }


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


def head(first: int, last: int, seconds: float) -> dict[str, Any]:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return {
        "date": datetime.date.today().isoformat(),
        "commit": found.stdout.strip(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seeds_from": first,
        "seeds_to": last,
        "seconds": round(seconds),
    }


def names(text: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in text.split(","))
    known = (*fuzz.PATHS, *fuzz.SLOW_PATHS)
    if not set(found) <= set(known):
        raise argparse.ArgumentTypeError(f"there are {', '.join(known)}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--networks", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=None, help="stop after so long")
    parser.add_argument("--slow", type=float, default=0.01, help="share of compiled networks")
    parser.add_argument("--paths", type=names, default=(), help="these alone, in turn")
    parser.add_argument("--json", type=Path, default=None, help=f"{RESULTS.name}, for instance")
    given = parser.parse_args()
    torch.set_num_threads(1)
    tally, start, last = Tally(), time.monotonic(), given.first
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    which = {"started": started, "paths": list(given.paths) or f"all, {given.slow:.0%} compiled"}

    def keep() -> None:
        if given.json:
            seconds = time.monotonic() - start
            run = {**which, **head(given.first, last, seconds), **tally.document()}
            given.json.write_text(json.dumps(kept(given.json, run), indent=1) + "\n")

    with fuzz.operators_seen(tally.operators):
        for last in range(given.first, given.first + given.networks):
            case = fuzz.settled(fuzz.draw(last, slow=given.slow, paths=given.paths))
            verdict = fuzz.run(case)
            tally.add(case, verdict)
            if verdict.failed:
                small = fuzz.shrink(case, verdict)
                text = fuzz.script(small, fuzz.run(small))
                tally.failures.append({"seed": last, "kind": verdict.kind, "script": text})
                print(f"\n# seed {last}\n{text}\n", flush=True)
            if last % 20 == 0:
                gc.collect()
                keep()
                done, failed = sum(tally.kinds.values()), len(tally.failures)
                print(f"{done} networks, {failed} failures", file=sys.stderr, flush=True)
            if given.minutes is not None and time.monotonic() - start > 60 * given.minutes:
                break
    keep()
    document = tally.document()
    print(json.dumps({k: v for k, v in document.items() if k != "failures"}, indent=1))
    print(f"of a vocabulary of {len(vocabulary.NAMES)} operators")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
