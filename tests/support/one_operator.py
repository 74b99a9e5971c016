"""Each operator of PyTorch's own database as a network of its own, against stock autograd.

    for row in examine("nn.functional.ctc_loss"): ...

A sample's first differentiable tensor is the network's input, the others are its parameters. The
loss is ‖out − y‖² and the penalty ‖∇ₓ‖out − y‖²‖², so that its gradient holds second derivatives
of the operator in everything. Where PyTorch has no second derivative, the oracle is finite
differences of its first one. Compared are

    penalised   Penalised(net): node by node, then flat
    patch       autograd under db.patched()

What rounding alone does is measured as in `architectures`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

import doubleback as db
from support import oracle
from support.forked import forked

LARGEST = 20_000  # entries of a sample's tensors
DIFFERENCE = 1e-5  # step of finite differences
TOLERANCE, NEAR = 1e-10, 1e-4  # relative, against autograd and against finite differences
LAST_DIGITS, ROUNDING = 1e-15, 100  # as in `architectures`


class OneOperator(nn.Module):
    """x (1, n) → out (1, m)"""

    def __init__(self, op: Any, sample: Any) -> None:
        super().__init__()
        self.function = functools.partial(op.gradcheck_wrapper, op.get_op())
        leaves, self.spec = _pytree.tree_flatten(
            ((sample.input, *sample.args), dict(sample.kwargs))
        )
        self.leaves = [t.detach() if isinstance(t, Tensor) else t for t in leaves]
        places = [i for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.requires_grad]
        self.place, self.others = places[0], places[1:]
        self.shape = leaves[self.place].shape
        self.x = leaves[self.place].detach().reshape(1, -1)
        self.own = nn.ParameterList(leaves[i].detach().clone() for i in self.others)

    def forward(self, x: Tensor) -> Tensor:
        leaves = list(self.leaves)
        leaves[self.place] = x.reshape(self.shape)
        for i, t in zip(self.others, self.own, strict=True):
            leaves[i] = t
        args, kwargs = _pytree.tree_unflatten(leaves, self.spec)
        found = [t for t in _pytree.tree_leaves(self.function(*args, **kwargs)) if _smooth(t)]
        flat = [(torch.view_as_real(t) if t.is_complex() else t).reshape(1, -1) for t in found]
        return torch.cat(flat, 1)


def _smooth(t: Any) -> bool:
    return isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()) and t.requires_grad


# ---------------------------------------------------------------------------------------- a sample


class Bench:
    """A sample's network, its target, and the weight of its penalty."""

    def __init__(self, net: OneOperator) -> None:
        self.net = net
        with self.seeded():
            out = net(net.x.clone().requires_grad_())
        g = torch.Generator().manual_seed(1)
        self.y = torch.randn(out.shape, generator=g, dtype=torch.float64) * (1 + out.detach().abs())

    @contextlib.contextmanager
    def seeded(self) -> Iterator[None]:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(5)
            yield

    def total(self, x: Tensor, graph: bool = True) -> tuple[Tensor, Tensor]:
        """(out, loss + penalty) by autograd."""
        with self.seeded():
            out = self.net(x)
            loss = (out - self.y).square().sum()
            (xi,) = torch.autograd.grad(loss, x, create_graph=graph)
            return out, loss + xi.square().sum()

    def leaves(self) -> list[Tensor]:
        return [self.net.x, *self.net.own]

    def by_autograd(self, noise: float = 0.0) -> list[Tensor]:
        """out, total and the gradients in x and in the parameters."""
        before = [t.detach().clone() for t in self.leaves()]
        g = torch.Generator().manual_seed(2)
        self.net.zero_grad()
        try:
            with torch.no_grad():
                for t in self.leaves():
                    t.mul_(1 + noise * torch.randn(t.shape, generator=g, dtype=torch.float64))
            x = self.net.x.clone().requires_grad_()
            out, total = self.total(x)
            total.backward()
            return self.collected(out, total, x)
        finally:
            with torch.no_grad():
                for t, old in zip(self.leaves(), before, strict=True):
                    t.copy_(old)

    def collected(self, out: Tensor, total: Tensor, x: Tensor) -> list[Tensor]:
        grads = [x.grad, *(p.grad for p in self.net.own)]
        grads = [
            torch.zeros_like(p) if g is None else g.clone()
            for g, p in zip(grads, [x, *self.net.own], strict=True)
        ]
        return [out.detach(), total.detach(), *grads]

    def by_differences(self) -> list[Tensor]:
        """out, total and, in the gradients' place, the derivative of the total along a direction,
        by central differences of PyTorch's first derivative."""
        directions = self.directions()
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                for t, d in zip(self.leaves(), directions, strict=True):
                    t.add_(d, alpha=sign * DIFFERENCE)
            values.append(self.total(self.net.x.clone().requires_grad_(), graph=False)[1].detach())
            with torch.no_grad():
                for t, d in zip(self.leaves(), directions, strict=True):
                    t.sub_(d, alpha=sign * DIFFERENCE)
        out, total = self.total(self.net.x.clone().requires_grad_(), graph=False)
        return [out.detach(), total.detach(), (values[0] - values[1]) / (2 * DIFFERENCE)]

    def directions(self) -> list[Tensor]:
        g = torch.Generator().manual_seed(3)
        return [torch.randn(t.shape, generator=g, dtype=torch.float64) for t in self.leaves()]

    def along(self, found: list[Tensor]) -> list[Tensor]:
        """Gradients as `by_differences` has them."""
        slope = sum((g * d).sum() for g, d in zip(found[2:], self.directions(), strict=True))
        return [*found[:2], torch.as_tensor(slope)]

    def by_model(self, model: db.Penalised) -> list[Tensor]:
        self.net.zero_grad()
        x = self.net.x.clone().requires_grad_()
        with self.seeded():
            out, penalty = model(x, self.y)
            total = (out - self.y).square().sum() + penalty
            total.backward()
        return self.collected(out, total, x)


def apart(found: list[Tensor], truth: list[Tensor]) -> float:
    """The largest relative difference; a gradient's is at least relative to the largest one."""
    scale = max((float(t.norm()) for t in truth[2:]), default=0.0)
    return max(
        oracle.relative(a, b, scale if i >= 2 else 0.0)
        for i, (a, b) in enumerate(zip(found, truth, strict=True))
    )


def finite(values: list[Tensor]) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in values)


# ------------------------------------------------------------------------------------- an operator


def operators() -> dict[str, Any]:
    """Those of the database that have a derivative in float64 on a CPU, by full name."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {
        op.full_name: op
        for op in op_db
        if op.supports_autograd and torch.float64 in op.supported_dtypes("cpu")
    }


def networks(op: Any, count: int) -> Iterator[Bench]:
    """Of `count` samples that are not large, spread over those there are."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drawn = op.sample_inputs("cpu", torch.float64, requires_grad=True)
        for sample in itertools.islice(drawn, 300):
            tensors = [
                t
                for t in _pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
                if isinstance(t, Tensor)
            ]
            wanted = [t for t in tensors if t.requires_grad and t.numel()]
            if wanted and sum(t.numel() for t in tensors) <= LARGEST:
                found.append(sample)
    for sample in found[:: max(1, len(found) // count)][:count]:
        with contextlib.suppress(_Unusable):
            yield _bench(op, sample)


class _Unusable(Exception):
    """A sample without a derivative."""


def _bench(op: Any, sample: Any) -> Bench:
    try:
        net = OneOperator(op, sample)
        bench = Bench(net)
        x = net.x.clone().requires_grad_()
        out, _ = bench.total(x, graph=False)
    except Exception as error:  # whatever the operator raises at such a sample
        raise _Unusable from error
    if not finite([out.detach()]):
        raise _Unusable
    return bench


def examine(name: str, count: int = 2) -> Iterator[dict[str, Any]]:
    """One row: what each way has, and how far it is from the oracle."""
    row: dict[str, Any] = {"operator": name, "samples": 0, "captured": True, "stock": True}
    row |= {"penalised": 0.0, "patch": 0.0}
    for bench in networks(operators()[name], count):
        found = None if name in WRONG_IN_STOCK else one(bench)
        if found is None:
            continue
        row["samples"] += 1
        for key in ("captured", "stock"):
            row[key] &= found[key]
        for key in ("penalised", "patch"):
            if row[key] is not None:
                row[key] = None if found[key] is None else max(row[key], found[key])
        for key in ("why", "wrong"):
            if key in found:
                row[key] = found[key]
    yield row


def one(bench: Bench) -> dict[str, Any] | None:
    """None where the derivatives are not finite or rounding alone decides them."""
    row: dict[str, Any] = {"captured": True, "stock": True, "patch": None, "penalised": None}
    wrong: dict[str, str] = {}
    try:
        truth = bench.by_autograd()
        rounding = apart(bench.by_autograd(LAST_DIGITS), truth)
        limit, same = max(TOLERANCE, ROUNDING * rounding), list
    except (RuntimeError, NotImplementedError):
        row["stock"] = False
    if not row["stock"]:
        truth, limit, same = bench.by_differences(), NEAR, bench.along
    if not finite(truth) or limit > 1e-3:
        return None
    try:
        with db.patched():
            row["patch"] = apart(same(bench.by_autograd()), truth)
        if row["patch"] > limit:
            wrong["patch"] = f"{row['patch']:.1e} apart, {limit:.1e} allowed"
    except (RuntimeError, NotImplementedError) as error:
        row["why patch"] = _line(error)
    options = {"strict": True, "sweeps": True, "allow_unused": True, "flatten_after": 1}
    model = db.Penalised(bench.net, db.LossGradient("mse"), **options)
    errors = []
    for _ in range(2):
        try:
            found = bench.by_model(model)
        except db.CaptureError as error:
            row["captured"], row["why"], model.strict = False, _line(error), False
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", db.CaptureWarning)
                    found = bench.by_model(model)
            except (RuntimeError, NotImplementedError) as again:
                row["why"] = f"no second derivative: {_line(again)}"
                break
        except Exception as error:
            wrong["penalised"] = _line(error)
            break
        errors.append(apart(same(found), truth))
    if errors:
        row["penalised"] = max(errors)
        if row["penalised"] > limit:
            wrong["penalised"] = f"{row['penalised']:.1e} apart, {limit:.1e} allowed"
    return {**row, "wrong": wrong} if wrong else row


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def examine_all(names: list[str], limit: float = 120.0, count: int = 2) -> Iterator[dict[str, Any]]:
    """The row of each operator, from a process of its own that has `limit` seconds."""
    list(examine("tanh", 1))  # what the first capture imports is imported before processes part
    for name, rows, why in forked(functools.partial(examine, count=count), names, limit):
        yield from rows or [{"operator": name, "samples": 0, "wrong": {"process": str(why)}}]


# ------------------------------------------------------------------------------------- the verdict

# Operators whose first derivative is wrong in PyTorch: no oracle here; tests/test_rules.py has one.
WRONG_IN_STOCK = ("as_strided_scatter",)

# What is not had, and why: (way, operator) → reason. Ways: "captured" (runs on autograd, and is
# right there), "penalised" and "patch" (no second derivative), "samples" (nothing to compare).
REASONS: dict[tuple[str, str], str] = {}


def missing(row: dict[str, Any]) -> list[str]:
    """What this operator lacks, by way."""
    if not row["samples"]:
        return ["samples"]
    found = [way for way in ("penalised", "patch") if row.get(way) is None]
    return found if row["captured"] or "penalised" in found else ["captured", *found]


def as_expected(row: dict[str, Any]) -> bool:
    """Whether it is captured, twice differentiable both ways, and right."""
    return not missing(row) and "wrong" not in row


def faults(row: dict[str, Any]) -> list[str]:
    """What is wrong, lacks a reason, or has one without need."""
    name = row["operator"]
    lacking = set(missing(row)) - set(row.get("wrong", ()))
    found = [f"{name}: {way}: {text}" for way, text in row.get("wrong", {}).items()]
    found += [
        f"{name}: not {way}, and no reason is given ({row.get('why')})"
        for way in sorted(lacking)
        if (way, name) not in REASONS
    ]
    return found + [
        f"{name}: has a reason not to be {way}, and is"
        for way in ("captured", "penalised", "patch", "samples")
        if (way, name) in REASONS and way not in lacking
    ]


def reasons(row: dict[str, Any]) -> dict[str, str]:
    """Why it lacks what it lacks, by way."""
    name = row["operator"]
    return {way: REASONS[way, name] for way in missing(row) if (way, name) in REASONS}


def count(rows: list[dict[str, Any]]) -> dict[str, int]:
    compared = [r for r in rows if r["samples"]]
    return {
        "operators": len(rows),
        "compared": len(compared),
        "second in stock": sum(r["stock"] for r in compared),
        "penalised": sum(r["penalised"] is not None for r in compared),
        "captured": sum("captured" not in missing(r) for r in compared),
        "patch": sum(r["patch"] is not None for r in compared),
        "wrong": sum("wrong" in r for r in rows),
    }
