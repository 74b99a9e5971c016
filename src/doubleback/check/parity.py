"""`check` compares a whole model with autograd in float64."""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._torch import pytree
from ..captured import Way
from ..errors import CheckError, DoublebackError, InputError
from ..patch import patch_report
from ..penalised import Penalised, WithGradient, accumulate_on_autograd, on_autograd
from ..penalties import Thinning

Model = Penalised | WithGradient

TOLERANCE = 1e-10  # relative, float64
SHOWN = 10  # rows of a printed report


@dataclass(frozen=True)
class Row:
    """One compared tensor: ‖ours − oracle‖ / ‖oracle‖, and the two norms. rounding: what is allowed
    besides the tolerance, where the model computes in less than float64."""

    name: str
    error: float
    ours: float
    oracle: float
    rounding: float = 0.0


@dataclass(frozen=True)
class CheckReport:
    """The comparison; prints as a table of the ten worst rows and a count of the others."""

    rows: tuple[Row, ...]
    tolerance: float
    title: str = ""

    @property
    def worst(self) -> float:
        """The largest relative error in float64."""
        return max((row.error for row in self.rows if not row.rounding), default=0.0)

    @property
    def passed(self) -> bool:
        return all(self._right(row) for row in self.rows)

    def _right(self, row: Row) -> bool:
        return row.error <= max(self.tolerance, row.rounding)

    def as_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "worst": self.worst,
            "tolerance": self.tolerance,
            "rows": [vars(row) for row in self.rows],
        }

    def __str__(self) -> str:
        worst = sorted(self.rows, key=lambda row: (self._right(row), -row.error))
        shown, others = worst[:SHOWN], worst[SHOWN:]
        width = max([len(row.name) for row in shown] + [8])
        lines = [self.title] if self.title else []
        lines.append(
            f"{'quantity':<{width}}  {'relative error':>14}  {'‖ours‖':>10}  {'‖oracle‖':>10}"
        )
        for row in shown:
            mark = "" if self._right(row) else "  ← wrong"
            if not mark and row.rounding:
                mark = f"  as it runs: {row.rounding:.0e} allowed"
            lines.append(
                f"{row.name:<{width}}  {row.error:>14.1e}  {row.ours:>10.3e}  "
                f"{row.oracle:>10.3e}{mark}"
            )
        if others:
            wrong = sum(not self._right(row) for row in others)
            more = f"{wrong} of them wrong" if wrong else f"none above {others[0].error:.1e}"
            lines.append(f"… and {len(others)} more, {more}")
        verdict = "agrees with" if self.passed else "DISAGREES with"
        count = f"{len(self.rows)} quantit{'y' if len(self.rows) == 1 else 'ies'}"
        lines.append(
            f"{verdict} the oracle in {count}; worst {self.worst:.1e}, allowed "
            f"{self.tolerance:.0e}, relative to ‖oracle‖, or to a millionth of the largest "
            "‖oracle‖ where that is more"
        )
        return "\n".join(lines)


def compare(pairs: Mapping[str, tuple[Tensor | None, Tensor | None]]) -> list[Row]:
    """Relative errors. A tensor that is zero for the oracle is measured against the largest
    one beside it, since nothing smaller than that one's rounding can be asked of it."""
    wide = {
        name: _finite(*(None if t is None else t.detach().double() for t in pair))
        for name, pair in pairs.items()
    }
    norms = {n: float(o.norm()) if o is not None else 0.0 for n, (_, o) in wide.items()}
    scale = max(norms.values(), default=0.0)
    rows = []
    for name, (ours, oracle) in wide.items():
        ours_norm = float(ours.norm()) if ours is not None else 0.0
        if ours is None or oracle is None:
            difference = max(ours_norm, norms[name])
        else:
            difference = float((ours - oracle).norm())
        floor = max(norms[name], 1e-6 * scale, 1e-300)
        error = difference / floor
        rows.append(Row(name, error if error == error else float("inf"), ours_norm, norms[name]))
    return rows


def _finite(ours: Tensor | None, oracle: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Zero for infinities on which both agree (excluded logits): they measure nothing else."""
    if ours is None or oracle is None or ours.shape != oracle.shape:
        return ours, oracle
    agreed = oracle.isinf() & (ours == oracle)
    return ours.masked_fill(agreed, 0.0), oracle.masked_fill(agreed, 0.0)


def check(
    model: Model, *args: Any, tolerance: float = TOLERANCE, seed: int = 0, **kwargs: Any
) -> CheckReport:
    """Compare this very model with autograd's double backward in float64.

    The arguments are those of a call, `check(model, x, y)`. Output, penalty, the gradient of
    every parameter, of x and of what the penalty's own arguments ask for, and updated buffers are
    compared on a float64 copy, with the same random numbers, in every way in which the model's
    sweeps run: node by node, flat, compiled if it is, each by `accumulate` too. A model that was
    called before also runs itself, with the graphs it holds ("live"), in its own precision: there
    ten times what rounding does to autograd is allowed. `model` itself does not change.
    Returns a report; raises `CheckError` where the relative error exceeds `tolerance`.

    >>> import torch, doubleback as db
    >>> model = db.Penalised(torch.nn.Linear(3, 1), db.OutputGradient())
    >>> db.check(model, torch.randn(2, 3)).worst < 1e-10
    True
    """
    if not isinstance(model, (Penalised, WithGradient)):
        raise InputError(f"check takes a Penalised or a WithGradient, not {type(model).__name__}")
    given = args, kwargs
    args, kwargs = _double(given)
    patch_is_on = any(entry.state in ("replaced", "ready") for entry in patch_report())
    by = "autograd under db.patch()" if patch_is_on else "autograd"
    way: Way = "stock"
    try:
        theirs = _by_oracle(model, args, kwargs, seed, way)
    except RuntimeError as error:
        if not _differentiated_once(error):
            raise
        by = f"autograd under db.patch(): {error}"
        way = "patched"
        theirs = _by_oracle(model, args, kwargs, seed, way)
    pairs: dict[str, tuple[Tensor | None, Tensor | None]] = {}
    twins = _Twins(model)
    for prefix, options in _ways(model).items():
        engine = twins.make(strict=True, **{"compile_mode": False, **options})
        ours = _measure(engine, engine.forward, args, kwargs, seed)
        pairs |= {prefix + n: (ours.get(n), theirs.get(n)) for n in {**theirs, **ours}}
    if isinstance(model, Penalised):
        pairs |= _accumulated(model, twins, args, kwargs, seed, way)
    rows = compare(pairs)
    if model._programs and _can_run_itself(model, twins):
        rows += _live(model, given, seed, way, theirs)
    report = CheckReport(
        tuple(rows),
        tolerance,
        f"{type(model.net).__name__} with {_what(model)}, float64 against {by}",
    )
    if not report.passed:
        raise CheckError(str(report), report)
    return report


def _differentiated_once(error: RuntimeError) -> bool:
    """Whether an operator is met that PyTorch has no second derivative of."""
    known = isinstance(error, NotImplementedError) and not isinstance(error, DoublebackError)
    return known or bool(re.search(r"derivative for .* is not implemented", str(error)))


def _ways(model: Model) -> dict[str, dict[str, Any]]:
    """The ways in which this model's sweeps run, with what stands before the names of their
    results: node by node, flat where it ever flattens them, compiled where it is."""
    ways: dict[str, dict[str, Any]] = {"": {"flatten_after": None}}
    if model.flatten_after is not None and not model.debug:
        ways["flat: "] = {"flatten_after": 0}
    if model.compile_mode:
        ways["compiled: "] = {"compile_mode": model.compile_mode}
    return ways


class _Twins:
    """Copies of a model in float64, each as if none had been called before.

    They share one copy of the network, which is then captured once, as long as its calls leave
    nothing behind but numbers in its buffers.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.net: nn.Module | None = None

    def make(self, **options: Any) -> Any:
        memo: dict[int, Any] = {}
        if self.net is not None and _as_new(self.net, self.model.net):
            for original, shared in _counterparts(self.model.net, self.net):
                memo[id(original)] = shared
        twin = copy.deepcopy(self.model, memo).double()
        self.net = twin.net
        if isinstance(twin, Penalised):
            twin.thinning = Thinning()  # the whole penalty, at every call
        for name, value in options.items():
            setattr(twin, name, value)
        return twin


def _counterparts(original: nn.Module, net: nn.Module) -> Iterator[tuple[Any, Any]]:
    for parts in ("modules", "parameters", "buffers"):
        yield from zip(getattr(original, parts)(), getattr(net, parts)(), strict=True)


def _as_new(net: nn.Module, original: nn.Module) -> bool:
    """Whether a copy that was called is in all but the numbers of its buffers as its original is;
    if so, these are set back, and gradients taken away."""
    pairs = list(zip(original.modules(), net.modules(), strict=False))
    if not all(type(a) is type(b) and _alike(_attributes(a), _attributes(b)) for a, b in pairs):
        return False
    with torch.no_grad():
        net.zero_grad(set_to_none=True)
        for old, new in zip(original.buffers(), net.buffers(), strict=True):
            if not _alike(old, new):
                new.copy_(old)
    return True


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes that a call might change; of buffers only which there are."""
    held = {n: v for n, v in vars(module).items() if n not in ("_buffers", "_modules")}
    buffers = {n: tuple(t.shape) for n, t in module.named_buffers(recurse=False)}
    return {**held, "_buffers": buffers, "_modules": [n for n, _ in module.named_children()]}


def _alike(a: Any, b: Any) -> bool:
    """Whether two pieces of data are equal, but for the precision of tensors; False where that
    cannot be told."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (int, float, complex, str, bytes, set, frozenset, torch.device)):
        return a == b
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_alike(a[k], b[k]) for k in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, weakref.ref):
        return _alike(a(), b())
    if not isinstance(a, Tensor) or a.shape != b.shape or a.requires_grad != b.requires_grad:
        return False
    return torch.equal(a.detach().to(b.dtype), b.detach())


def _by_oracle(
    model: Model, args: Any, kwargs: Any, seed: int, way: Way
) -> dict[str, Tensor | None]:
    twin = copy.deepcopy(model).double()
    with _ExactHardsigmoid():
        return _measure(twin, _oracle_forward(twin, way), args, kwargs, seed)


class _ExactHardsigmoid(TorchFunctionMode):
    """PyTorch rounds its slope 1/6 to float32, in float64 too, and knows no second derivative: for
    the oracle the same function as a clamp, which is flat at both ends alike."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name not in ("hardsigmoid", "hardsigmoid_"):
            return func(*args, **(kwargs or {}))
        value = F.hardtanh(args[0] / 6 + 0.5, 0.0, 1.0)
        return args[0].copy_(value) if name.endswith("_") else value


def _accumulated(
    model: Penalised, twins: _Twins, args: Any, kwargs: Any, seed: int, way: Way
) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    """`accumulate`'s gradients, by each way, beside those of its loss and penalty by autograd."""
    ways = _ways(model)
    gradients = []
    for options in (*ways.values(), None):
        by_us = options is not None
        options = {"strict": True, "compile_mode": False, "flatten_after": None, **(options or {})}
        twin = (twins if by_us else _Twins(model)).make(**options)
        own = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), (args, kwargs))
        devices = [t.device for t in pytree.tree_leaves(own) if isinstance(t, Tensor) and t.is_cuda]
        with torch.random.fork_rng(devices), torch.autocast("cuda", enabled=False):
            torch.manual_seed(seed)
            if by_us:
                twin.accumulate(*own[0], weight=0.5, **own[1])
            else:
                call = twin._call(*own)
                loss = twin.penalty.own_loss
                target = call.extra[0] if loss is not None else None
                with _ExactHardsigmoid():
                    accumulate_on_autograd(twin, call, loss, target, 0.5, way)
        named = twin.net.named_parameters()
        gradients.append({f"accumulate: ∇ {n}": p.grad for n, p in named if p.requires_grad})
    *ours, theirs = gradients
    return {
        prefix + name: (mine.get(name), theirs.get(name))
        for prefix, mine in zip(ways, ours, strict=True)
        for name in {**mine, **theirs}
    }


# -------------------------------------------------------------------------- the model itself


ROUNDING = 10  # times what it does to autograd


def _can_run_itself(model: Model, twins: _Twins) -> bool:
    """Whether a call leaves nothing behind but numbers, which can be put back, and nobody else
    watches or changes the gradients."""
    leaves = [t for t in (*model.parameters(), *model.buffers()) if t is not None]
    hooks = [t._backward_hooks or getattr(t, "_post_accumulate_grad_hooks", None) for t in leaves]
    remembers = getattr(getattr(model, "penalty", None), "warm_start", False)
    if any(hooks) or remembers or twins.net is None:
        return False
    return _as_new(twins.net, model.net)


def _live(
    model: Model, given: tuple[Any, Any], seed: int, way: Way, exact: Mapping[str, Tensor | None]
) -> list[Row]:
    """The model as it is, with the graphs it has, beside autograd in the same precision."""
    twin = copy.deepcopy(model)
    with _ExactHardsigmoid():
        theirs = _measure(twin, _oracle_forward(twin, way), *given, seed, as_given=True)
    with _put_back(model):
        measured = _measure(model, model.forward, *given, seed, as_given=True)
        ours = {n: None if t is None else t.detach().clone() for n, t in measured.items()}
    rounding = {
        row.name: row.error for row in compare({n: (theirs.get(n), exact.get(n)) for n in exact})
    }
    rows = compare({f"live: {n}": (ours.get(n), theirs.get(n)) for n in {**theirs, **ours}})
    dtypes = {t.dtype for t in model.parameters() if t.is_floating_point()} | {torch.float64}
    low = max(torch.finfo(dtype).eps for dtype in dtypes)
    if low == torch.finfo(torch.float64).eps:
        return rows
    return [
        replace(row, rounding=max(1e3 * low, ROUNDING * rounding.get(row.name[6:], 0.0)))
        for row in rows
    ]


@contextmanager
def _put_back(model: Model) -> Iterator[None]:
    """Buffers and gradients as they were."""
    numbers = [(t, t.detach().clone()) for t in model.buffers()]
    grads = [(t, t.grad) for t in model.parameters()]
    try:
        for t, _ in grads:
            t.grad = None
        yield
    finally:
        for t, grad in grads:
            t.grad = grad
        with torch.no_grad():
            for t, before in numbers:
                if not torch.equal(t, before):
                    t.copy_(before)


def _what(model: Model) -> str:
    return "its gradient" if isinstance(model, WithGradient) else repr(model.penalty)


def _oracle_forward(model: Model, way: Way = "stock") -> Any:
    by = model.by_autograd if isinstance(model, WithGradient) else partial(on_autograd, model)
    return lambda *args, **kwargs: by(model._call(args, kwargs), way)


def _double(tree: Any) -> Any:
    def convert(t: Tensor) -> Tensor:
        wide = t.detach().double() if t.is_floating_point() else t.detach()
        return wide.requires_grad_(t.requires_grad)

    return pytree.tree_map_only(Tensor, convert, tree)


def _measure(
    model: Model, forward: Any, args: Any, kwargs: Any, seed: int, as_given: bool = False
) -> dict[str, Tensor | None]:
    """Everything a training step yields, for a fixed random weighting of outputs and penalty; with
    the gradient of x, unless the call is to be `as_given`."""
    args, kwargs = pytree.tree_map_only(
        Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), (args, kwargs)
    )
    call = model._call(args, kwargs)
    for x in call.x:
        x.requires_grad_(x.requires_grad or not as_given)
    devices = [x.device for x in call.x if x.is_cuda]
    with torch.random.fork_rng(devices), torch.autocast("cuda", enabled=False):
        torch.manual_seed(seed)
        result, penalty = forward(*args, **kwargs)
    outputs = [
        t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and t.is_floating_point()
    ]
    generator = torch.Generator().manual_seed(seed)
    several = isinstance(model, WithGradient)
    measured = list(pytree.tree_leaves(penalty)) if several else [penalty]
    total = torch.zeros(()).double() if several else penalty.double().sum()
    for out in (*outputs, *measured) if several else outputs:
        weights = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        total = total + (out * weights.to(out.device)).sum() / max(out.numel(), 1)
    if total.requires_grad:
        total.backward()
    names = [f"gradient {i}" for i in range(len(measured))] if several else ["penalty"]
    named: dict[str, Tensor | None] = dict(zip(names, measured, strict=True))
    named.update({f"output {i}": out for i, out in enumerate(outputs)})
    named.update({f"∇ input {i}": x.grad for i, x in enumerate(call.x)})
    named.update({f"∇ argument {i}": t.grad for i, t in call.asked.items()})
    named.update({f"∇ {n}": p.grad for n, p in model.net.named_parameters() if p.requires_grad})
    named.update({f"buffer {n}": b for n, b in model.net.named_buffers() if b.is_floating_point()})
    return named
