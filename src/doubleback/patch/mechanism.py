"""How a derivative of PyTorch's is replaced.

One ATen operator becomes a node of PyTorch's graph with a derivative of our own. Mostly it is a
backward operator d = B(ξ, x, θ, …); its `Formula` maps cotangents of d to those of B's arguments,
which is a second derivative. `derivative_kernel` makes the function that stands in front of the
operator's autograd kernel: where no derivative of B is asked for, the stock kernel runs.

All of them are installed and removed process-wide, counted, under one lock. Autograd kernels are
registered for AutogradCPU and AutogradCUDA, where PyTorch itself registers none (its own stand at
the alias key Autograd), so nothing is overwritten and removal uncovers PyTorch's kernel. A Python
kernel costs microseconds a call. So that first-order training pays none, kernels are registered
when they are first needed: the first backward with `create_graph=True`, or the first forward-mode
level, arms them. What mends a first derivative is registered at once.

To register costs milliseconds, which a block in a training loop would pay at every step. Kernels of
backward operators therefore outlive their block, switched off, until some calls have passed through
them in vain. And a kernel that is there for speed alone, and was declined by its last calls because
their tensors were small, rests for a while.
"""

from __future__ import annotations

import difflib
import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable, forward_ad, graph

from .._torch import (
    AutoDispatchBelowAutograd,
    OpOverload,
    SingleLevelFunction,
    after_autograd_keyset,
    dispatch_dump,
    enable_single_level_autograd_function,
    peek_interpreter_stack,
)
from ..errors import PatchError
from ..kernels import batched

# ----------------------------------------------------------------------------------- one operator


KEYS = ("AutogradCPU", "AutogradCUDA")
SMALL_ON_STOCK = True  # see `Formula.pays`; tests of the formulas switch it off
PATIENCE = 100  # small calls in a row after which a kernel rests, and after a rest a tenth of them
REST = 100  # passes with `create_graph=True` that it rests for
IN_VAIN = 100  # calls through kernels that are off, after which they are removed
Grads = Sequence[Tensor | None]
Arguments = dict[str, Any]
_AFTER = after_autograd_keyset


class Applied:
    """The arguments of B by name, which of them need a cotangent, and B's results if kept."""

    __slots__ = ("arguments", "needed", "results")

    def __init__(
        self,
        arguments: dict[str, Any],
        needed: dict[str, bool],
        results: tuple[Tensor | None, ...] = (),
    ) -> None:
        self.arguments, self.needed, self.results = arguments, needed, results

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def needs(self, name: str) -> bool:
        return self.needed[name]


@dataclass(frozen=True)
class Formula:
    """The second derivative of one ATen operator.

    operator: its name, with the overload unless it is the default one.
    second: (call, cotangents of the results) → {argument name: cotangent}; may leave out zeros.
    accepts: whether `second` covers these arguments; the stock kernel serves the others.
    composite: the operator in differentiable steps, for forward mode; without one the stock kernel
        serves dual tensors.
    keeps: the results of the operator that `second` reads.
    derived: arguments that are functions of others (results of the forward operator), whose part
        is in the cotangents of these. They are constants of the node: an edge to the forward
        operator would run its backward on no gradient at all, of which cuDNN's attention makes
        whatever its memory held before.
    unread: arguments whose value no derivative reads: they are not kept, and may change in place
        before the backward pass, as in stock.
    armed_by: what registers it, "create_graph" or "forward_mode"; "patch": `db.patch()` itself.
    keys: where it is registered.
    kernel: makes its kernel from (formula, stock kernel, switch), if not `derivative_kernel`.
    steps: (arguments by name) → the operator in PyTorch's own differentiable operators, where that
        is quicker on a CPU because its tensors are small; None where it is not.
    pays: of the operator's arguments, whether `second` is quicker than stock on a CPU, where a
        small tensor's kernels take less time than the Python that calls them; None: always taken.
    gains: the same where `second` is always taken, since stock is wrong elsewhere (third order):
        a watch, which asks for second derivatives alone, is not told of what gains nothing.
    """

    operator: str
    family: str
    why: str
    second: Callable[[Applied, Grads], dict[str, Any]] | None = None
    accepts: Callable[[dict[str, Any]], bool] = lambda arguments: True
    composite: Callable[[dict[str, Any]], Any] | None = None
    keeps: tuple[int, ...] = ()
    derived: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    armed_by: str = "create_graph"
    keys: tuple[str, ...] = KEYS
    kernel: Callable[[Formula, Any, Switch], Callable] | None = None
    steps: Callable[[dict[str, Any]], Any] | None = None
    pays: Callable[..., bool] | None = None
    gains: Callable[..., bool] | None = None

    @property
    def outlives(self) -> bool:
        """Whether its kernels stay when a block ends: those that forward passes call do not."""
        return self.armed_by == "create_graph" and "_backward" in self.operator

    @property
    def names(self) -> tuple[str, ...]:
        """What has to be wanted of it: its family, and by itself what does not outlive a block."""
        return (self.family,) if self.outlives else (self.family, self.operator)

    def overload(self) -> OpOverload | None:
        """The operator of this build of PyTorch, None where it has none."""
        name, _, variant = self.operator.partition(".")
        packet = getattr(torch.ops.aten, name, None)
        return getattr(packet, variant or "default", None)


class Switch:
    """What the kernels of a `Patcher` and the patcher tell one another.

    on: what is wanted now; declined: the operators that were not worth it in a row of calls;
    passed: how many calls went through kernels that are off; clean: removes these; watches: sets
    that are told what is used.
    """

    def __init__(self, clean: Callable[[], None]) -> None:
        self.on: set[str] = set()
        self.declined: set[str] = set()
        self.passed = 0
        self.clean = clean
        self.watches: list[set[str]] = []

    def note(self, formula: Formula, *instead: str) -> None:
        """To be called where a formula takes the place of PyTorch's own; instead: of its names."""
        for seen in self.watches:
            seen.update(instead or formula.names)

    def is_off(self, family: str) -> bool:
        if family in self.on:
            return False
        self.passed += 1
        if self.passed == IN_VAIN:
            try:  # after this backward pass: no kernel is removed by itself
                Variable._execution_engine.queue_callback(self.clean)
            except RuntimeError:  # called outside of any
                self.passed = 0
        return True


def in_steps(family: str) -> str:
    """What a watch is told where operators of a family were taken by their `steps`."""
    return f"{family} in steps"


def plain(*tensors: Any) -> bool:
    """Whether all are real, dense tensors."""
    for t in tensors:
        if t is not None and (t.layout != torch.strided or t.is_complex() or t.is_quantized):
            return False
    return True


def is_dual(*tensors: Any) -> bool:
    """Whether a tensor carries a forward-mode tangent at the current level."""
    if forward_ad._current_level < 0:
        return False
    return any(
        isinstance(t, Tensor) and forward_ad.unpack_dual(t, level=0).tangent is not None
        for t in tensors
    )


def again(*tensors: Any) -> bool:
    """Whether derivatives will be taken of what is computed now from these tensors."""
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
        return True
    return is_dual(*tensors)


def below(op: Any, keyset: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The operator without this level of autograd; torch.func's levels below keep theirs."""
    keyset = keyset & _AFTER
    if peek_interpreter_stack() is None:
        with AutoDispatchBelowAutograd():
            return op.redispatch(keyset, *args, **kwargs)
    forward_mode = forward_ad._set_fwd_grad_enabled(True)
    with torch.enable_grad(), forward_mode, AutoDispatchBelowAutograd():
        return op.redispatch(keyset, *args, **kwargs)


def through(composite: Callable, call: Applied, cotangents: Grads) -> dict[str, Any]:
    """The second derivative by reverse mode over the operator in differentiable steps."""
    names = [name for name, needed in call.needed.items() if needed]
    present = [i for i, c in enumerate(cotangents) if c is not None]

    def results(*at: Tensor) -> tuple[Tensor, ...]:
        outputs = composite(call.arguments | dict(zip(names, at, strict=True)))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return tuple(outputs[i] for i in present)

    pull = torch.func.vjp(results, *(call[name] for name in names))[1]
    return dict(zip(names, pull(tuple(cotangents[i] for i in present)), strict=True))


class DerivativeNode(SingleLevelFunction):
    """B in the graph. One level of autograd: torch.func's transforms bring a level each."""

    @staticmethod
    def forward(ctx, site, keyset, arguments, args, kwargs, *tensors):
        result = below(site.op, keyset, args, kwargs)
        ctx.site, ctx.options = site, {name: arguments[name] for name in site.options}
        unread = site.formula.unread
        kept = (None if n in unread else t for n, t in zip(site.tensors, tensors, strict=True))
        ctx.save_for_backward(*kept, *(result[i] for i in site.formula.keeps))
        ctx.set_materialize_grads(False)
        return result

    @staticmethod
    def backward(ctx, *cotangents):
        site, saved, needs = ctx.site, ctx.saved_tensors, ctx.needs_input_grad[5:]
        names = site.tensors
        grads: dict[str, Any] = {}
        if any(c is not None for c in cotangents):
            arguments = {**ctx.options, **dict(zip(names, saved, strict=False))}
            call = Applied(arguments, dict(zip(names, needs, strict=True)), saved[len(names) :])
            if last():
                with AutoDispatchBelowAutograd():
                    grads = site.formula.second(call, cotangents)
            else:
                grads = site.formula.second(call, cotangents)
        wanted = [grads.get(n) if need else None for n, need in zip(names, needs, strict=True)]
        return (None, None, None, None, None, *wanted)


def last() -> bool:
    """Whether no derivative of any kind can be taken of what is computed now, and of one cotangent
    alone."""
    return (
        not torch.is_grad_enabled()
        and forward_ad._current_level < 0
        and peek_interpreter_stack() is None
        and not batched()
    )


@dataclass(frozen=True)
class Placement:
    """A formula at its operator, whose arguments are told apart once."""

    formula: Formula
    op: Any
    positional: tuple[str, ...]
    tensors: tuple[str, ...]
    derived: tuple[int, ...]
    options: tuple[str, ...]
    defaults: dict[str, Any]

    @classmethod
    def of(cls, formula: Formula, op: Any) -> Placement:
        schema = op._schema.arguments
        tensors = tuple(a.name for a in schema if "Tensor" in str(a.type))
        return cls(
            formula,
            op,
            tuple(a.name for a in schema if not a.kwarg_only),
            tensors,
            tuple(tensors.index(name) for name in formula.derived if name in tensors),
            tuple(a.name for a in schema if a.name not in tensors),
            {a.name: a.default_value for a in schema if a.has_default_value()},
        )

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """By name, with the defaults, which a dispatcher leaves out."""
        return {**self.defaults, **dict(zip(self.positional, args, strict=False)), **kwargs}


def derivative_kernel(formula: Formula, stock: Any, switch: Switch) -> Callable:
    """The autograd kernel of the operator, in front of `stock`.

    Every call of the operator comes here, so what most calls need is asked first.
    """
    site, apply = Placement.of(formula, formula.overload()), getattr(DerivativeNode, "apply")  # noqa: B009
    call_stock, accepts, names = stock.call_boxed, formula.accepts, site.tensors
    family, pays, steps = formula.family, formula.pays, formula.steps
    on, small = switch.on, 0

    def kernel(keyset, *args, **kwargs):
        nonlocal small
        if family not in on and switch.is_off(family):
            return call_stock(keyset, *args, **kwargs)
        differentiable = torch.is_grad_enabled()
        if forward_ad._current_level < 0:
            if not differentiable:
                return call_stock(keyset, *args, **kwargs)
            if pays is not None and SMALL_ON_STOCK and args[0].is_cpu:
                if not pays(*args):
                    small += 1
                    if small >= PATIENCE:
                        small -= PATIENCE // 10
                        switch.declined.add(formula.operator)
                    return call_stock(keyset, *args, **kwargs)
                small = 0
        arguments = site.arguments(args, kwargs)
        tensors = [arguments[name] for name in names]
        dual = is_dual(*tensors)
        differentiated = differentiable and any(t is not None and t.requires_grad for t in tensors)
        if (dual and formula.composite is None) or not (dual or differentiated):
            return call_stock(keyset, *args, **kwargs)
        if not accepts(arguments):
            return call_stock(keyset, *args, **kwargs)
        single = peek_interpreter_stack() is None
        if steps is not None and SMALL_ON_STOCK and single and not dual and args[0].is_cpu:
            written = steps(arguments)
            if written is not None:
                switch.note(formula, in_steps(family))
                return written
        if dual or formula.gains is None or not args[0].is_cpu or formula.gains(*args):
            switch.note(formula)
        if dual:
            return formula.composite(arguments)  # type: ignore[misc]
        for i in site.derived:
            tensors[i] = tensors[i].detach()
        if single:
            return apply(site, keyset, arguments, args, kwargs, *tensors)
        with enable_single_level_autograd_function():
            return apply(site, keyset, arguments, args, kwargs, *tensors)

    return kernel


# ------------------------------------------------------------------------------------ all of them


OLDEST, NEWEST = (2, 11), (2, 13)


@dataclass(frozen=True)
class Entry:
    """One row of the report.

    state: "replaced"; "ready" (registered at the first `create_graph=True` or forward-mode
    level, or again after a rest, see `REST`); "stock" (not asked for); "missing" in this build;
    "foreign" (another library's).
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


@functools.cache
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
        self.blocks: dict[object, AbstractSet[str]] = {}  # of `patched`, those that run now
        self.armed = {"patch"}
        self.libraries: dict[tuple[str, str], torch.library.Library] = {}  # by operator and key
        self.kernels: dict[tuple[str, str], Callable] = {}
        self.resting: dict[str, int] = {}  # on a CPU, until which pass
        self.passes = 0  # with create_graph=True
        self.hooks: list[tuple[Any, str, Any, Any]] = []
        self.switch = Switch(self.clean)
        self.settled = 0  # how often what is registered, or rests, may have changed
        self.known: dict[frozenset[str], int] = {}  # what was all there, and when

    # ------------------------------------------------------------------------ who wants what

    def choose(self, only: Iterable[str] | None) -> set[str]:
        """All that has to be wanted of these families."""
        if only is None:
            only = self.families
        names = {only} if isinstance(only, str) else set(only)
        for name in sorted(names - set(self.families)):
            near = difflib.get_close_matches(name, self.families, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise PatchError(
                f"db.patch(only=…): no family of operators is called {name!r}; {hint}"
                f"there are {', '.join(self.families)}"
            )
        formulas = self.formulas.values()
        return {name for f in formulas if f.family in names for name in f.names}

    def patch(self, only: Iterable[str] | None) -> None:
        version_check(torch.__version__)
        with self.lock:
            self.permanent |= self.choose(only)
            self.resting.clear()
            self.switch.declined.clear()
            self.settle()

    def unpatch(self) -> None:
        with self.lock:
            self.permanent.clear()
            self.settle()

    @contextmanager
    def patched(self, only: Iterable[str] | None) -> Iterator[None]:
        version_check(torch.__version__)
        chosen, block = self.choose(only), object()
        try:
            with self.lock:
                self.blocks[block] = chosen
                self.arm("create_graph")  # what a block is for
            yield
        finally:
            try:
                self.leave(block)
            except BaseException:  # Ctrl-C, with kernels still registered
                self.leave(block)
                raise

    def patched_as(self, seen: frozenset[str]) -> AbstractContextManager[None]:
        """`patched` for what a watch has seen: quick where all of it is registered already and is
        but switched on and off."""
        version_check(torch.__version__)
        return _Switched(self, seen)

    def enter(self, block: object, seen: frozenset[str]) -> None:
        with self.lock:
            self.blocks[block] = seen
            self.rest()
            if self.there(seen):
                self.switch.on.update(seen)
                self.switch.passed = 0
            else:
                self.arm("create_graph")

    def exit(self, block: object) -> None:
        with self.lock:
            if self.hooks:
                self.leave(block)
                return
            self.blocks.pop(block, None)  # nothing was registered for the block
            if self.blocks or self.permanent:
                self.switch.on.intersection_update(self.wanted())
            else:
                self.switch.on.clear()

    def there(self, seen: frozenset[str]) -> bool:
        """Whether all of it is registered, or rests; looked up once for what is registered now."""
        if self.known.get(seen) != self.settled:
            places = self.places(seen)
            if not all([place in self.libraries or self.rests(*place) for place in places]):
                return False
            if len(self.known) > 64:
                self.known.clear()
            self.known[seen] = self.settled
        return True

    @functools.cached_property
    def lasting(self) -> frozenset[str]:
        """Families whose kernels all stay registered when a block ends, and wait for nothing but
        the next block."""
        families = set(self.families)
        for formula in self.formulas.values():
            if not formula.outlives or formula.pays or formula.armed_by != "create_graph":
                families.discard(formula.family)
        return frozenset(families)

    @functools.lru_cache(maxsize=64)  # noqa: B019  there is one patcher
    def places(self, names: frozenset[str]) -> frozenset[tuple[str, str]]:
        """The operators and keys that these names are registered for."""
        return frozenset(
            (formula.operator, key)
            for formula in self.formulas.values()
            if names.issuperset(formula.names) and formula.overload() is not None
            for key in formula.keys
        )

    def rests(self, name: str, key: str) -> bool:
        return key == KEYS[0] and name in self.resting

    @contextmanager
    def watched(self) -> Iterator[set[str]]:
        """What is used inside, by any thread."""
        watches, seen = self.switch.watches, set()
        watches.append(seen)
        try:
            yield seen
        finally:
            watches[:] = [other for other in watches if other is not seen]

    def leave(self, block: object) -> None:
        with self.lock:
            self.blocks.pop(block, None)
            self.settle(outlive=True)

    def clean(self) -> None:
        """Remove what outlived its block."""
        with self.lock:
            self.settle()

    def wanted(self) -> set[str]:
        return self.permanent.union(*self.blocks.values())

    # ------------------------------------------------------------------------ what is there

    def settle(self, outlive: bool = False) -> None:
        """Make what is registered agree with what is wanted; outlive: off is enough for a while."""
        self.settled += 1
        wanted = self.wanted()
        self.switch.on.intersection_update(wanted)
        self.switch.on.update(wanted)
        self.switch.passed = 0
        if wanted and not self.hooks:
            self.hook()
        for name, formula in self.formulas.items():
            due = wanted.issuperset(formula.names) and formula.armed_by in self.armed
            for key in formula.keys:
                here, rests = (name, key) in self.libraries, self.rests(name, key)
                if due and not here and not rests:
                    self.register(formula, key)
                elif here and (rests or not (due or (outlive and formula.outlives))):
                    self.libraries.pop((name, key))._destroy()
                    forget(formula.overload())
        if not wanted and self.hooks:
            self.unhook()

    def register(self, formula: Formula, key: str) -> None:
        op, place = formula.overload(), (formula.operator, key)
        if op is None or foreign(op):
            return
        if place not in self.kernels:
            make = formula.kernel or derivative_kernel
            self.kernels[place] = make(formula, torch.library.get_kernel(op, key), self.switch)
        library = torch.library.Library("aten", "IMPL")
        library.impl(op, self.kernels[place], key, with_keyset=True)
        self.libraries[place] = library
        forget(op)

    def before_second(self) -> None:
        """Before each pass with create_graph=True."""
        if "create_graph" not in self.armed:
            self.arm("create_graph")
        self.rest()

    def rest(self) -> None:
        """Before a pass with create_graph=True: kernels that were declined go, others come back."""
        self.passes += 1
        over = self.resting and [n for n, until in self.resting.items() if until <= self.passes]
        if over or self.switch.declined:
            with self.lock:
                for name in over:
                    self.resting.pop(name, None)
                while self.switch.declined:
                    self.resting[self.switch.declined.pop()] = self.passes + REST
                self.settle(outlive=True)

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
            if args[2]:
                self.before_second()
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
        self.hooks.append((module, name, old, new))
        setattr(module, name, new)

    def unhook(self) -> None:
        for module, name, old, new in self.hooks:
            if getattr(module, name) is new:
                setattr(module, name, old)
        self.armed = {"patch"}
        self.hooks.clear()

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
        elif formula.family not in wanted:
            pass
        elif any((formula.operator, key) in self.libraries for key in formula.keys):
            state = "replaced"
        else:
            state = "ready"
        return Entry(formula.operator, formula.family, state, reason)


class _Switched:
    """A block of `patched_as`."""

    __slots__ = ("patcher", "seen")

    def __init__(self, patcher: Patcher, seen: frozenset[str]) -> None:
        self.patcher, self.seen = patcher, seen

    def __enter__(self) -> None:
        try:
            self.patcher.enter(self, self.seen)
        except BaseException:  # Ctrl-C
            self.patcher.leave(self)
            raise

    def __exit__(self, *raised: object) -> None:
        try:
            self.patcher.exit(self)
        except BaseException:
            self.patcher.leave(self)
            raise


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
