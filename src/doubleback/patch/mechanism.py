"""Install and remove the replaced derivatives: process-wide, counted, under one lock.

Autograd kernels are registered for AutogradCPU and AutogradCUDA, where PyTorch itself registers
none (its own stand at the alias key Autograd), so nothing is overwritten and removal uncovers
PyTorch's kernel. A Python kernel costs microseconds a call. So that first-order training pays
none, kernels are registered when they are first needed: the first backward with
`create_graph=True`, or the first forward-mode level, arms them. What mends a first derivative is
registered at once.
"""

from __future__ import annotations

import difflib
import functools
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad, graph

from .._torch import OpOverload, dispatch_dump
from ..errors import PatchError
from .node import KEYS, Formula, derivative_kernel

OLDEST, NEWEST = (2, 11), (2, 13)


@dataclass(frozen=True)
class Entry:
    """One row of the report.

    state: "replaced"; "ready" (registered at the first `create_graph=True` or forward-mode
    level); "stock" (not asked for); "missing" in this build; "foreign" (another library's).
    """

    operator: str
    family: str
    state: str
    reason: str


class PatchReport(tuple[Entry, ...]):
    """The rows of `patch_report()`, printed as a table."""

    def __str__(self) -> str:
        heads = ("operator", "family", "state", "reason")
        rows = [heads, *((e.operator, e.family, e.state, e.reason) for e in self)]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = (
            "  ".join([*(c.ljust(w) for c, w in zip(row[:3], widths, strict=True)), row[3]])
            for row in rows
        )
        return "\n".join(line.rstrip() for line in lines)


def supported(version: str) -> bool:
    """Whether the patch knows this torch version."""
    return OLDEST <= tuple(int(part) for part in re.findall(r"\d+", version)[:2]) <= NEWEST


def version_check(version: str) -> None:
    if not supported(version):
        low, high = (".".join(map(str, v)) for v in (OLDEST, NEWEST))
        raise PatchError(
            f"db.patch() supports torch {low} to {high}, and this is torch {version}; nothing was "
            f"patched. Install a supported torch, or use db.Penalised, which needs no patch"
        )


class Patcher:
    """Which families are wanted by whom, and what is registered for them."""

    def __init__(self, formulas: Sequence[Formula]) -> None:
        self.formulas = {f.operator: f for f in formulas}
        self.families = tuple(dict.fromkeys(f.family for f in formulas))
        self.lock = threading.RLock()
        self.permanent: set[str] = set()
        self.scoped: Counter[str] = Counter()
        self.armed = {"patch"}
        self.libraries: dict[str, torch.library.Library] = {}
        self.hooks: list[tuple[Any, str, Any, Any]] = []

    # ------------------------------------------------------------------------ who wants what

    def choose(self, only: Iterable[str] | None) -> set[str]:
        if only is None:
            return set(self.families)
        names = {only} if isinstance(only, str) else set(only)
        for name in sorted(names - set(self.families)):
            near = difflib.get_close_matches(name, self.families, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise PatchError(
                f"db.patch(only=…): no family of operators is called {name!r}; {hint}"
                f"there are {', '.join(self.families)}"
            )
        return names

    def patch(self, only: Iterable[str] | None) -> None:
        version_check(torch.__version__)
        with self.lock:
            self.permanent |= self.choose(only)
            self.settle()

    def unpatch(self) -> None:
        with self.lock:
            self.permanent.clear()
            self.settle()

    @contextmanager
    def patched(self, only: Iterable[str] | None) -> Iterator[None]:
        version_check(torch.__version__)
        chosen = self.choose(only)
        with self.lock:
            self.scoped.update(chosen)
            self.arm("create_graph")  # what a block is for
        try:
            yield
        finally:
            with self.lock:
                self.scoped.subtract(chosen)
                self.settle()

    def wanted(self) -> set[str]:
        return self.permanent | {family for family, count in self.scoped.items() if count > 0}

    # ------------------------------------------------------------------------ what is there

    def settle(self) -> None:
        """Make what is registered agree with what is wanted."""
        wanted = self.wanted()
        if wanted and not self.hooks:
            self.hook()
        for name, formula in self.formulas.items():
            due = formula.family in wanted and formula.armed_by in self.armed
            if due and name not in self.libraries:
                self.register(formula)
            elif not due and name in self.libraries:
                self.libraries.pop(name)._destroy()
                forget(formula.overload())
        if not wanted and self.hooks:
            self.unhook()

    def register(self, formula: Formula) -> None:
        op = formula.overload()
        if op is None or foreign(op):
            return
        library = torch.library.Library("aten", "IMPL")
        for key in formula.keys:
            stock = torch.library.get_kernel(op, key)
            make = formula.kernel or derivative_kernel
            library.impl(op, make(formula, stock), key, with_keyset=True)
        self.libraries[formula.operator] = library
        forget(op)

    def arm(self, *events: str) -> None:
        with self.lock:
            self.armed.update(events)
            self.settle()

    def hook(self) -> None:
        """Watch for the first `create_graph=True` and the first forward-mode level."""
        run: Any = graph._engine_run_backward
        enter = forward_ad.enter_dual_level

        @functools.wraps(run)
        def run_backward(outputs, *args, **kwargs):
            # args: gradients, retain_graph, create_graph, …
            if args[2] and "create_graph" not in self.armed:
                self.arm("create_graph")
            return run(outputs, *args, **kwargs)

        @functools.wraps(enter)
        def enter_dual_level():
            if "forward_mode" not in self.armed:
                self.arm("create_graph", "forward_mode")
            return enter()

        for module in (graph, torch.autograd):
            self.replace(module, "_engine_run_backward", run, run_backward)
        self.replace(forward_ad, "enter_dual_level", enter, enter_dual_level)

    def replace(self, module: Any, name: str, old: Callable, new: Callable) -> None:
        setattr(module, name, new)
        self.hooks.append((module, name, old, new))

    def unhook(self) -> None:
        for module, name, old, new in self.hooks:
            if getattr(module, name) is new:
                setattr(module, name, old)
        self.hooks.clear()
        self.armed = {"patch"}

    # ------------------------------------------------------------------------------- report

    def report(self) -> PatchReport:
        with self.lock:
            wanted = self.wanted()
            return PatchReport(self.entry(f, wanted) for f in self.formulas.values())

    def entry(self, formula: Formula, wanted: set[str]) -> Entry:
        op = formula.overload()
        state, reason = "stock", formula.why
        if op is None:
            state, reason = "missing", f"torch {torch.__version__} has no such operator"
        elif place := foreign(op):
            state, reason = "foreign", f"its autograd kernel was replaced at {place}; left as it is"
        elif formula.operator in self.libraries:
            state = "replaced"
        elif formula.family in wanted:
            state = "ready"
        return Entry(formula.operator, formula.family, state, reason)


def forget(op: OpOverload | None) -> None:
    """The kernels that tracing looked up before: it would go on with them."""
    if op is not None:
        op._dispatch_cache.clear()


_LINE = re.compile(r"^(\w+)(?:\[alias\])?(?: \(inactive\))?: registered at (.*?:\d+) ")


_OURS = Patcher.register.__code__.co_filename.replace("\\", "/")  # as the dispatcher notes it


def foreign(op: OpOverload) -> str | None:
    """Where another library registered an autograd kernel of this operator, None if none did."""
    for line in dispatch_dump(op._name).splitlines():
        match = _LINE.match(line)
        if match is None or match[1] not in ("Autograd", *KEYS):
            continue
        place = match[2].replace("\\", "/")
        ours = place.rpartition(":")[0] == _OURS
        torch_s = re.search(r"(csrc/autograd|aten/src/ATen)/", place)
        if not ours and not torch_s:
            return "/".join(place.split("/")[-2:])
    return None
