"""Mutation testing of the formulas: `make mutate ARGS="--mutants 200 --seed 1"`.

    python tools/mutate.py [--mutants N] [--seed S] [--only PART] [--jobs N] [--minutes M]
        [--json FILE]
    python tools/mutate.py --again --json FILE
    python tools/mutate.py --list

A mutant is the library with one small error in one place of FILES: a sign flipped, a term of a sum
dropped, two arguments swapped, a constant changed, a condition negated. The quick tests that run
through that place must fail; a mutant that none of them notices has survived, and shows what they
do not test. Mutants are drawn by a seed (`--mutants 0`: all there are); `--again` runs those that
survived, after new tests. Survivors whose results are the same by mathematics, or that differ in
memory or time alone, stand with their reasons in tools/mutants.json.

Nothing is written to the source: each mutant is compiled in a process of its own, forked from one
that has PyTorch imported already. Which test runs through which line is found by one run of all of
them, kept under build/ until source or tests change.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import datetime
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "doubleback"
RESULTS = ROOT / "benchmarks" / "results" / "mutation.json"
REASONS = ROOT / "tools" / "mutants.json"
CACHE = ROOT / "build" / "mutation-coverage"
FILES = [
    *sorted((SOURCE / "rules").glob("[a-z]*.py")),
    SOURCE / "plan.py",
    SOURCE / "sweeps.py",
    *(SOURCE / "penalties" / f"{n}.py" for n in ("losses", "one_seed", "many_seeds")),
]
TESTS = (
    "test_structure", "test_penalties", "test_rules", "test_forms", "test_norms", "test_declared",
    "test_renewal", "test_jacobian", "test_directions", "test_plan", "silent/test_random",
)  # fmt: skip
SLOW = 6.0  # seconds of one test, beyond which it is left out
KEY = ("file", "function", "text", "before", "after")
AT_MOST = 150  # tests for one mutant
FIRST = {"rules": "test_rules", "penalties": "test_penalties"}  # by folder; else test_structure


# ------------------------------------------------------------------------------------- mutants


@dataclass(frozen=True)
class Mutant:
    """One change: of the node with this number in `ast.walk`'s order, in its k-th way."""

    path: Path
    node: int
    way: int
    line: int
    function: str
    before: str
    after: str
    text: str

    @property
    def file(self) -> str:
        return self.path.relative_to(SOURCE).as_posix()

    @property
    def key(self) -> tuple[str, ...]:
        """What it is, wherever the line has moved to."""
        return self.file, self.function, self.text, self.before, self.after

    def tree(self) -> ast.Module:
        tree = ast.parse(self.path.read_text())
        for number, (node, _) in enumerate(nodes(tree)):
            if number == self.node:
                list(ways(node))[self.way]()
                return ast.fix_missing_locations(tree)
        raise AssertionError("the source has changed")

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function}) {self.before}  →  {self.after}"


def nodes(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Every node that computes, with the function it stands in: no annotations, no messages."""
    stack: list[tuple[ast.AST, str]] = [(tree, "")]
    while stack:
        node, where = stack.pop()
        yield node, where
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            where = f"{where}.{node.name}".lstrip(".")
        for name, field in reversed(list(ast.iter_fields(node))):
            if name in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            for child in reversed(field if isinstance(field, list) else [field]):
                if isinstance(child, ast.AST) and not _skipped(child):
                    stack.append((child, where))


def _skipped(node: ast.AST) -> bool:
    if isinstance(node, (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)):
        return True
    if isinstance(node, ast.FunctionDef) and node.name in ("__repr__", "__str__", "__post_init__"):
        return True
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    alias = isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript)
    return text or alias or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))


SWAPPED: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn,
    ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}  # fmt: skip
NAMES = {"any": "all", "all": "any", "min": "max", "max": "min"}
WORDS = {"input": "output", "output": "input", "inputs": "output"}


def ways(node: ast.AST) -> Iterator[Callable[[], None]]:
    """The changes of one node, each to be made by calling it."""

    def put(**fields: Any) -> Callable[[], None]:
        return lambda: vars(node).update(fields)

    def become(other: ast.AST) -> Callable[[], None]:
        def change() -> None:
            kept = copy.deepcopy(other)
            node.__class__ = type(kept)
            vars(node).clear()
            vars(node).update(vars(kept))

        return change

    if isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
        if not isinstance(node.left, ast.Constant) or isinstance(node.left.value, (int, float)):
            yield put(op=SWAPPED[type(node.op)]())
        if isinstance(node.op, (ast.Add, ast.Sub)):  # a term dropped
            yield become(node.left)
            if isinstance(node.op, ast.Add):
                yield become(node.right)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not, ast.Invert)):
        yield become(node.operand)
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        yield put(ops=[SWAPPED[type(node.ops[0])](), *node.ops[1:]])
    elif isinstance(node, ast.BoolOp):
        yield put(op=SWAPPED[type(node.op)]())
    elif isinstance(node, (ast.If, ast.IfExp)):
        yield put(test=ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield put(value=not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield put(value=node.value + 1)
    elif isinstance(node, ast.Constant) and node.value in WORDS:
        yield put(value=WORDS[node.value])
    elif isinstance(node, ast.Name) and node.id in NAMES and isinstance(node.ctx, ast.Load):
        yield put(id=NAMES[node.id])
    elif isinstance(node, ast.Call) and len(node.args) > 1:
        first, second, *rest = node.args
        plain = not any(isinstance(a, ast.Starred) for a in (first, second))
        if plain and ast.dump(first) != ast.dump(second) and not _of_types(node):
            yield put(args=[second, first, *rest])


def _of_types(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "getattr", "field")


def mutants_of(path: Path) -> list[Mutant]:
    found, text = [], path.read_text()
    lines = text.splitlines()
    for number, (node, where) in enumerate(nodes(ast.parse(text))):
        for way, _ in enumerate(ways(node)):
            own = copy.deepcopy(node)
            list(ways(own))[way]()
            after = _shown(ast.fix_missing_locations(own))
            line = getattr(node, "lineno", 0)
            source = lines[line - 1].strip()
            found.append(Mutant(path, number, way, line, where, _shown(node), after, source))
    return found


def _shown(node: ast.AST) -> str:
    if isinstance(node, ast.If):
        node = node.test
    return " ".join(ast.unparse(node).split())[:120]


# --------------------------------------------------------------------------- tests and their lines


class Coverage:
    """A plugin for pytest: the lines of FILES that each test runs through, and its seconds."""

    def __init__(self) -> None:
        self.names = {str(path): path.relative_to(SOURCE).as_posix() for path in FILES}
        self.tests: dict[str, Any] = {}
        self.lines: set[tuple[str, int]] = set()

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        name = self.names.get(frame.f_code.co_filename)
        if name is None:
            return None

        def local(inner: Any, event: str, _: Any) -> Any:
            self.lines.add((name, inner.f_lineno))
            return local

        return local(frame, event, None)

    def pytest_runtest_call(self, item: Any) -> None:
        self.lines = set()
        self.start = time.process_time()
        sys.settrace(self._trace)

    def pytest_runtest_teardown(self, item: Any) -> None:
        sys.settrace(None)
        if not self.lines:
            return
        by_file: dict[str, list[int]] = defaultdict(list)
        for name, line in sorted(self.lines):
            by_file[name].append(line)
        self.tests[item.nodeid] = {"seconds": time.process_time() - self.start, "lines": by_file}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.tests.pop(report.nodeid, None)
            print(f"left out, it fails without a mutant: {report.nodeid}", file=sys.stderr)


def state(test: Path) -> str:
    """Changes with the source and the test."""
    texts = b"".join(path.read_bytes() for path in (test, *FILES))
    return hashlib.sha256(texts).hexdigest()[:16]


def cover(path: Path) -> int:
    plugin = Coverage()
    status = _pytest(
        [str(path.relative_to(ROOT)), "-k", "not compile"], plugin
    )  # those take minutes
    if status not in (0, 1):  # it could not even be read
        return status
    found = {"state": state(path), "tests": plugin.tests}
    (CACHE / f"{path.stem}.json").write_text(json.dumps(found))
    return 0


def coverage(jobs: int) -> dict[str, Any]:
    """Every test with its lines, from the cache or by running it."""
    CACHE.mkdir(parents=True, exist_ok=True)
    paths = [ROOT / "tests" / f"{name}.py" for name in TESTS]

    def kept(path: Path) -> dict[str, Any]:
        file = CACHE / f"{path.stem}.json"
        return json.loads(file.read_text()) if file.exists() else {}

    new = [path for path in paths if kept(path).get("state") != state(path)]
    if new:
        names = ", ".join(path.stem for path in new)
        print(f"running {names} to see which lines their tests run through", file=sys.stderr)
    for path, status in crowd(new, cover, jobs, 3600):
        if status != 0:
            raise SystemExit(f"{path.stem} could not be run")
    return {test: lines for path in paths for test, lines in kept(path)["tests"].items()}


def concerned(mutant: Mutant, tests: dict[str, Any]) -> list[str]:
    """The tests that run through the mutant's line, those of its folder first; for a line that runs
    when the module is imported, those that run nearest to it."""
    quick = {n: t for n, t in tests.items() if t["seconds"] < SLOW and mutant.file in t["lines"]}

    def distance(lines: list[int]) -> int:
        return min(abs(line - mutant.line) for line in lines)

    near = {n: distance(t["lines"][mutant.file]) for n, t in quick.items()}
    chosen = [n for n, d in near.items() if d == 0]
    if not chosen:  # a row of a table: the tests that bear the name of its operator
        lines = mutant.path.read_text().splitlines()[mutant.line - 4 : mutant.line + 3]
        names = re.findall(r'"([\w.]+)"', "\n".join(lines))
        named = [n for n in quick if any(f"[{name}" in n for name in names)]
        chosen = [*named, *(n for n, d in near.items() if d <= 12 and n not in named)]
        near |= dict.fromkeys(named, 0)
    chosen = chosen or list(quick)
    first = FIRST.get(mutant.file.partition("/")[0], "test_structure")
    ranked = sorted(chosen, key=lambda n: (near[n], first not in n, quick[n]["seconds"]))[:AT_MOST]
    declared = [n for n in quick if n.endswith("::test_what_rules_declare") and n not in ranked]
    return ranked + (declared if mutant.file.startswith("rules/") else [])


# ------------------------------------------------------------------------------------------ runs


class Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, mutant: Mutant) -> None:
        super().__init__(name, str(mutant.path))
        self.mutant = mutant

    def get_code(self, fullname: str) -> Any:
        return compile(self.mutant.tree(), self.path, "exec")


class Finder(importlib.abc.MetaPathFinder):
    """Imports one module as its mutant."""

    def __init__(self, mutant: Mutant) -> None:
        parts = mutant.path.relative_to(SOURCE).with_suffix("").parts
        self.name, self.mutant = ".".join(("doubleback", *parts)), mutant

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self.name:
            return None
        loader = Loader(fullname, self.mutant)
        return importlib.util.spec_from_loader(fullname, loader)


def _pytest(args: list[str], *plugins: Any) -> int:
    import pytest

    sys.path[:0] = [str(ROOT / "src")]
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--tb=no"]
    with contextlib.redirect_stdout(io.StringIO()):
        return int(pytest.main([*options, *args], plugins=list(plugins)))


def start(run: Callable[[], int]) -> int:
    """The number of a process of its own that exits with what `run` returns."""
    child = os.fork()
    if child:
        return child
    os.setsid()
    try:
        status = run()
    except BaseException:
        traceback.print_exc()
        status = 99
    os._exit(min(status, 120))


def crowd(
    items: Iterable[T], run: Callable[[T], int], jobs: int, seconds: float
) -> Generator[tuple[T, int | None]]:
    """Each item with what run(item) returns in a process of its own, None when it took too long;
    `jobs` of them at a time."""
    waiting, running = iter(items), {}
    try:
        while True:
            while len(running) < jobs and (item := next(waiting, None)) is not None:
                running[start(partial(run, item))] = item, time.monotonic() + seconds
            if not running:
                return
            time.sleep(0.02)
            for child, (item, end) in list(running.items()):
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    del running[child]
                    yield item, os.waitstatus_to_exitcode(status)
                elif time.monotonic() > end:
                    del running[child]
                    stop(child)
                    yield item, None
    finally:
        for child in running:
            stop(child)


def stop(child: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)


NONE = 98  # no test comes near


def try_on(tests: dict[str, Any], mutant: Mutant) -> int:
    """In a process of its own: 0 if no test notices."""
    chosen = concerned(mutant, tests)
    if not chosen:
        return NONE
    sys.meta_path.insert(0, Finder(mutant))
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        return _pytest(["-x", *chosen])


def outcome(status: int | None) -> str:
    return {None: "timed out", 0: "survived", NONE: "not run"}.get(status, "killed")


def warm() -> None:
    """All that a mutant's process needs and that is not the library."""
    os.chdir(ROOT)
    os.environ.setdefault("TRITON_INTERPRET", "1")
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import torch._dynamo
    import torch._inductor.compile_fx
    import torch.fx.experimental.proxy_tensor
    import torch.testing

    torch.set_num_threads(1)
    assert "doubleback" not in sys.modules


def document(
    done: dict[Mutant, str], excused: Reasons, counts: dict[str, int], given: Any
) -> dict[str, Any]:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    kinds = Counter("excused" if o != "killed" and m.key in excused else o
                    for m, o in done.items())  # fmt: skip
    by_file: dict[str, Counter[str]] = defaultdict(Counter)
    for m, o in done.items():
        by_file[m.file]["excused" if o != "killed" and m.key in excused else o] += 1
    judged = len(done) - kinds["excused"]
    return {
        "date": datetime.date.today().isoformat(),
        "commit": found.stdout.strip(),
        "seed": given.seed,
        "only": given.only,
        "mutants": given.mutants,
        "possible": sum(counts.values()),
        "sampled": len(done),
        "killed": kinds["killed"],
        "survived": kinds["survived"] + kinds["not run"] + kinds["timed out"],
        "excused": kinds["excused"],
        "share_killed": round(kinds["killed"] / judged, 4) if judged else None,
        "by_file": {name: {"possible": counts[name], **c} for name, c in sorted(by_file.items())},
        "survivors": [
            {**dict(zip(KEY, m.key, strict=True)), "line": m.line, "outcome": o}
            for m, o in done.items() if o != "killed" and m.key not in excused
        ],
        "excuses": [
            {**dict(zip(KEY, m.key, strict=True)), "reason": excused[m.key]}
            for m, o in done.items() if o != "killed" and m.key in excused
        ],
    }  # fmt: skip


class Reasons(dict):
    """By key. `strict=` of a zip needs none written down."""

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or self._checks_lengths(key)

    def __missing__(self, key: Any) -> str:
        return "strict= only checks that lengths agree, and they do"

    @staticmethod
    def _checks_lengths(key: Any) -> bool:
        _, _, text, before, after = key
        return "strict=True" in text and (before, after) == ("True", "False")


def reasons() -> Reasons:
    rows = json.loads(REASONS.read_text()) if REASONS.exists() else []
    return Reasons({tuple(row[name] for name in KEY): row["reason"] for row in rows})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--mutants", type=int, default=100, help="0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="files whose path holds this")
    parser.add_argument("--minutes", type=float, default=None, help="stop after so long")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=300.0, help="for one mutant")
    parser.add_argument("--json", type=Path, default=None, help=f"{RESULTS.name}, for instance")
    parser.add_argument("--list", action="store_true", help="say how many there are")
    parser.add_argument("--again", action="store_true", help="those of --json that survived")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # its processes are ended too
    earlier = json.loads(given.json.read_text()) if given.again else None
    if earlier:
        given.seed, given.only, given.mutants = (earlier[n] for n in ("seed", "only", "mutants"))
    every = [m for path in FILES if given.only in str(path) for m in mutants_of(path)]
    counts = Counter(m.file for m in every)
    if given.list:
        print("\n".join(f"{count:5d}  {name}" for name, count in sorted(counts.items())))
        print(f"{len(every):5d}  in all")
        return 0
    warm()
    tests, excused = coverage(given.jobs), reasons()
    given.mutants = min(given.mutants or len(every), len(every))
    chosen = random.Random(given.seed).sample(every, given.mutants)
    begun = told = time.monotonic()
    done: dict[Mutant, str] = {}
    if earlier:  # those that were killed then are taken over
        alive = {tuple(row[n] for n in KEY) for row in (*earlier["survivors"], *earlier["excuses"])}
        chosen = chosen[: earlier["sampled"]]
        done = {m: "killed" for m in chosen if m.key not in alive}
        chosen = [m for m in chosen if m.key in alive]

    def keep() -> None:
        if given.json:
            text = json.dumps(document(done, excused, counts, given), indent=1, ensure_ascii=False)
            part = given.json.with_suffix(".part")
            part.write_text(text + "\n")
            os.replace(part, given.json)

    end = begun + 60 * given.minutes if given.minutes is not None else float("inf")
    in_time = itertools.takewhile(lambda _: time.monotonic() < end, chosen)
    for mutant, status in crowd(in_time, partial(try_on, tests), given.jobs, given.seconds):
        done[mutant] = outcome(status)
        if done[mutant] != "killed":
            known = "known: " if mutant.key in excused else ""
            print(f"{known}{done[mutant]}: {mutant}", flush=True)
        if time.monotonic() - told > 15:
            told = time.monotonic()
            print(f"{len(done)} of {len(chosen)}", file=sys.stderr, flush=True)
            keep()
    keep()
    found = document(done, excused, counts, given)
    names = ("possible", "sampled", "killed", "survived", "excused", "share_killed")
    print(", ".join(f"{name} {found[name]}" for name in names))
    return 1 if found["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
