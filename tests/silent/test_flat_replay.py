"""Numbers that a loss, a norm, a space or a penalty reads may change between steps, whatever holds
them: a graph that is replayed from the third call on must not keep the old ones."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import doubleback as db
from doubleback import spaces
from support.stock import WEIGHT, assert_close, numbers

np = pytest.importorskip("numpy")

SCHEDULE = (1.0, 1.0, 1.0, 2.0, 2.0, 3.0, 0.5)

GAMMA = 1.0
TABLE = {"gamma": [1.0]}
options = types.SimpleNamespace(gamma=1.0)


def focal(out, y, gamma):
    """−(1 − s_y)^γ log s_y per example."""
    logs = F.log_softmax(out, 1).gather(1, y[:, None])[:, 0]
    return -((1 - logs.exp()) ** gamma) * logs


# ------------------------------------------------------------------------------ losses


class Focal:
    """A loss object with `__call__`."""

    def __init__(self) -> None:
        self.gamma: Any = 1.0

    def __call__(self, out, y):
        return focal(out, y, self.gamma)


class Slotted:
    __slots__ = ("gamma",)

    def __call__(self, out, y):
        return focal(out, y, self.gamma)


class Methods:
    """A method that calls another method that reads the number."""

    def __init__(self) -> None:
        self.gamma = 1.0

    def power(self):
        return self.gamma

    def loss(self, out, y):
        return self.inner(out, y)

    def inner(self, out, y):
        return focal(out, y, self.power())


class Nested:
    """An object in an object."""

    def __init__(self) -> None:
        self.config = types.SimpleNamespace(deep=types.SimpleNamespace(gamma=1.0))

    def __call__(self, out, y):
        return focal(out, y, self.config.deep.gamma)


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Focal()

    def forward(self, out, y):
        return self.inner(out, y)


class Counting:
    """Anneals by itself: the number of calls is the number."""

    gamma = 1.0

    def __call__(self, out, y):
        return focal(out, y, self.gamma)


def read_global():
    return GAMMA


def by_global(out, y):
    return focal(out, y, GAMMA)


def by_helper(out, y):
    return focal(out, y, read_global())


def by_table(out, y):
    return focal(out, y, TABLE["gamma"][0])


def by_options(out, y):
    return focal(out, y, options.gamma)


def _set(holder, name="gamma", kind: Any = float):
    def change(value):
        setattr(holder, name, kind(value))

    return change


def _set_global(value):
    globals()["GAMMA"] = value


def _set_table(value):
    TABLE["gamma"][0] = value


def _objects():
    """name → () → (loss, how to change it)."""

    def made(kind, holder=lambda loss: loss, method=None, number: Any = float):
        def make():
            loss = kind()
            _set(holder(loss), kind=number)(1.0)
            return (getattr(loss, method) if method else loss), _set(holder(loss), kind=number)

        return make

    def closure():
        cell = [1.0]

        def change(value):
            cell[0] = value

        return (lambda out, y: focal(out, y, cell[0])), change

    def partial():
        holder = Focal()
        return functools.partial(lambda h, out, y: h(out, y), holder), _set(holder)

    return {
        "object": made(Focal),
        "slotted object": made(Slotted),
        "numpy.float64": made(Focal, number=np.float64),
        "numpy.float32": made(Focal, number=np.float32),
        "method": made(Methods, method="loss"),
        "nested object": made(Nested, holder=lambda loss: loss.config.deep),
        "object in a module": made(Module, holder=lambda loss: loss.inner),
        "class attribute": made(Counting, holder=type),
        "closure": closure,
        "partial": partial,
        "global": lambda: (by_global, _set_global),
        "helper's global": lambda: (by_helper, _set_global),
        "global dictionary": lambda: (by_table, _set_table),
        "global options": lambda: (by_options, _set(options)),
    }


LOSSES = _objects()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def labels(i: int):
    return torch.randint(0, 3, (4,), generator=torch.Generator().manual_seed(i))


def _gradients(net, out, loss, penalty):
    net.zero_grad()
    (loss + WEIGHT * penalty).backward()
    return {name: t.grad.clone() for name, t in net.named_parameters()}


def _compare(i, model, found, wanted):
    out, penalty, grads = found
    wanted_out, wanted_penalty, wanted_grads = wanted
    assert_close(out, wanted_out, f"step {i}, out")
    assert_close(penalty, wanted_penalty, f"step {i}, penalty")
    for name in wanted_grads:
        assert_close(grads[name], wanted_grads[name], f"step {i}, gradient of {name}")


@pytest.mark.parametrize("how", ["backward", "accumulate"])
@pytest.mark.parametrize("name", LOSSES)
def test_numbers_of_a_loss(name, how):
    """As the loss of `LossGradient`, which enters v and its derivative."""
    loss, change = LOSSES[name]()
    net = network()
    twin = copy.deepcopy(net)
    model = db.Penalised(net, db.LossGradient(loss))
    try:
        for i, value in enumerate(SCHEDULE):
            change(value)
            x, y = numbers(i, 4, 5), labels(i)
            leaf = x.clone().requires_grad_()
            out = twin(leaf)
            values = focal(out, y, value)
            (xi,) = torch.autograd.grad(values.sum(), leaf, create_graph=True)
            penalty = xi.square().sum(1).mean()
            wanted = out, penalty, _gradients(twin, out, values.mean(), penalty)
            net.zero_grad()
            if how == "accumulate":
                out, _, penalty = model.accumulate(x, y, weight=WEIGHT)
            else:
                out, penalty = model(x, y)
                (loss(out, y).mean() + WEIGHT * penalty).backward()
            grads = {key: t.grad for key, t in net.named_parameters()}
            _compare(i, model, (out, penalty, grads), wanted)
    finally:
        change(1.0)


@pytest.mark.parametrize("name", LOSSES)
def test_numbers_of_a_loss_beside_the_penalty(name):
    """As `accumulate(loss=…)` with another penalty."""
    loss, change = LOSSES[name]()
    net = network()
    twin = copy.deepcopy(net)
    model = db.Penalised(net, db.OutputGradient(1))
    try:
        for i, value in enumerate(SCHEDULE):
            change(value)
            x, y = numbers(i, 4, 5), labels(i)
            leaf = x.clone().requires_grad_()
            out = twin(leaf)
            (xi,) = torch.autograd.grad(out[:, 1].sum(), leaf, create_graph=True)
            penalty = xi.square().sum(1).mean()
            grads = _gradients(twin, out, focal(out, y, value).mean(), penalty)
            net.zero_grad()
            found, _, own = model.accumulate(x, y, loss=loss, weight=WEIGHT)
            mine = {key: t.grad for key, t in net.named_parameters()}
            _compare(i, model, (found, own, mine), (out, penalty, grads))
    finally:
        change(1.0)


# --------------------------------------------------------------- norms, spaces, penalties


@dataclass
class Scaled(spaces.Space):
    """⟨u, v⟩ = s Σ uᵢvᵢ with a number of its own."""

    s: float = 1.0

    def riesz(self, g):
        return g / self.s

    def riesz_inverse(self, u):
        return u * self.s

    __hash__ = object.__hash__


@dataclass
class Power:
    """A norm of one's own: Σ|ξ|^(2a)."""

    a: float = 1.0

    def value(self, xi):
        return torch.stack([u.square().pow(self.a).flatten(1).sum(1) for u in xi]).sum(0)

    def measure(self, xi):
        with torch.enable_grad():
            leaves = [u.detach().requires_grad_() for u in xi]
            values = self.value(leaves)
            grads = torch.autograd.grad(values.sum(), leaves)
        return values.detach(), list(grads)

    __hash__ = object.__hash__


class Weighted(db.OutputGradient):
    """A penalty of one's own with a number that its seed reads."""

    factor = 1.0

    def seed(self, out, *extra):
        return self.factor * super().seed(out, *extra)


@dataclass
class Factor:
    a: float = 1.0
    held: dict = field(default_factory=dict)

    def v(self, out):
        return self.a * torch.ones_like(out) * out

    def p(self, xi):
        return self.a * xi.square().sum(1)


def _set_norm(penalty, make: Callable):
    def change(value):
        penalty.norm = make(value)

    return change


def _make(name):
    """(penalty, how to change it, p(ξ, a) per example, v(out, a))."""

    def first(out, a):
        return F.one_hot(torch.zeros(len(out), dtype=torch.long), 3).to(out.dtype)

    def square(xi, a):
        return xi.square().sum(1)

    if name == "deviation, replaced":
        penalty = db.OutputGradient(0)
        make = _set_norm(penalty, lambda a: db.Deviation(1 + a))
        return penalty, make, lambda xi, a: (xi.norm(dim=1) - 1 - a).square(), first
    if name == "deviation, written to":
        penalty = db.OutputGradient(0, norm=db.Deviation(1.0))
        return (penalty, lambda a: object.__setattr__(penalty.norm, "target", a),
                lambda xi, a: (xi.norm(dim=1) - a).square(), first)  # fmt: skip
    if name == "index":
        penalty = db.OutputGradient(0)

        def chosen(out, a):
            return F.one_hot(torch.full((len(out),), int(a) % 3), 3).to(out.dtype)

        return penalty, lambda a: setattr(penalty, "index", int(a) % 3), square, chosen
    if name == "reduction":
        penalty = db.OutputGradient(0)
        return (penalty, lambda a: setattr(penalty, "reduction", "mean" if a < 2 else "sum"),
                lambda xi, a: square(xi, a) * (1 if a < 2 else len(xi)), first)  # fmt: skip
    if name == "own space":
        space = Scaled()
        penalty = db.OutputGradient(0, norm=db.SquaredNorm(space))
        return penalty, _set(space, "s"), lambda xi, a: square(xi, a) / a, first
    if name == "weights of a space":
        space = spaces.Weighted(torch.ones(5, dtype=torch.float64))
        penalty = db.OutputGradient(0, norm=db.SquaredNorm(space))
        return (penalty, lambda a: space.weight.fill_(a), lambda xi, a: square(xi, a) / a,
                first)  # fmt: skip
    if name == "own norm":
        norm = Power()
        return (db.OutputGradient(0, norm=norm), _set(norm, "a"),
                lambda xi, a: xi.square().pow(a).sum(1), first)  # fmt: skip
    if name == "own penalty":
        penalty = Weighted(0)
        return (penalty, _set(penalty, "factor"), square,
                lambda out, a: a * first(out, a))  # fmt: skip
    if name == "own penalty's class":
        return (Weighted(0), _set(Weighted, "factor"), square,
                lambda out, a: a * first(out, a))  # fmt: skip
    holder = Factor()
    if name == "custom v":
        return db.Custom(holder.v), _set(holder, "a"), square, lambda out, a: a * out
    return (db.Custom(torch.ones_like, holder.p), _set(holder, "a"),
            lambda xi, a: a * square(xi, a), lambda out, a: torch.ones_like(out))  # fmt: skip


PENALTIES = (
    "deviation, replaced", "deviation, written to", "index", "reduction", "own space",
    "weights of a space", "own norm", "own penalty", "own penalty's class", "custom v", "custom p",
)  # fmt: skip


@pytest.mark.parametrize("how", ["backward", "accumulate"])
@pytest.mark.parametrize("name", PENALTIES)
def test_numbers_of_a_penalty(name, how):
    penalty, change, p, v = _make(name)
    net = network()
    twin = copy.deepcopy(net)
    model = db.Penalised(net, penalty)
    try:
        for i, value in enumerate(SCHEDULE):
            change(value)
            x, y = numbers(i, 4, 5), numbers(50 + i, 4, 3)
            leaf = x.clone().requires_grad_()
            out = twin(leaf)
            (xi,) = torch.autograd.grad(out, leaf, v(out, value), create_graph=True)
            wanted = p(xi, value).mean()
            loss = (out - y).square().sum(1).mean()
            grads = _gradients(twin, out, loss, wanted)
            net.zero_grad()
            if how == "accumulate":
                found, _, own = model.accumulate(x, y, loss="mse", weight=WEIGHT)
            else:
                found, own = model(x)
                ((found - y).square().sum(1).mean() + WEIGHT * own).backward()
            mine = {key: t.grad for key, t in net.named_parameters()}
            _compare(i, model, (found, own, mine), (out, wanted, grads))
    finally:
        change(1.0)


@pytest.mark.parametrize("sweeps", [True, False])
def test_what_a_jacobian_is_of(sweeps):
    """`of` may be another from call to call; so may the space."""
    penalty = db.Jacobian()
    net = network()
    model = db.Penalised(net, penalty, sweeps=sweeps)
    for i, of in enumerate(("output", "softmax", "softmax", "output", "softmax")):
        penalty.of = of
        penalty.norm = db.SquaredNorm(spaces.Weighted(torch.full((5,), 1.0 + i).double()))
        fresh = db.Penalised(net, db.Jacobian(of=of, space=penalty.norm.space), sweeps=False)
        x = numbers(i, 4, 5)
        found, wanted = model(x)[1], fresh(x)[1]
        assert_close(found, wanted, f"step {i}")
        pairs = [torch.autograd.grad(p, list(net.parameters())[:3]) for p in (found, wanted)]
        for mine, other in zip(*pairs, strict=True):
            assert_close(mine, other, f"step {i}, a gradient")


@pytest.mark.choice
@pytest.mark.parametrize("sweeps", [None, True])
def test_another_cotangent_and_another_penalty(sweeps):
    """Of a model that has run before, on autograd or by sweeps."""
    net = network()
    model = db.WithGradient(net, sweeps=sweeps)
    rows = lambda out: torch.stack([out, 2 * out])  # noqa: E731
    for i, v in enumerate(("sum", "sum", 0, rows, [0, 1], torch.sin, "sum")):
        model.v = v
        x = numbers(i, 4, 5)
        found, wanted = model(x)[1], db.WithGradient(net, v=v, sweeps=False)(x)[1]
        assert_close(found, wanted, f"call {i}")
    model = db.Penalised(net, db.OutputGradient(0), sweeps=sweeps)
    for _ in range(3):
        model(x)
    model.penalty = db.SpectralNorm(iterations=1)
    fresh = db.Penalised(net, db.SpectralNorm(iterations=1), sweeps=sweeps)
    for i in range(3):
        told = []
        for each in (model, fresh):
            torch.manual_seed(i)
            told.append(each(x)[1])
        assert_close(*told, f"call {i} of a penalty that goes on from the last call")


def test_the_weight_of_the_penalty():
    """`accumulate(weight=…)` may change at every step, and may be 0."""
    net = network()
    twin = copy.deepcopy(net)
    model = db.Penalised(net, db.OutputGradient(0))
    for i, weight in enumerate((0.5, 0.5, 0.5, 1.0, 0.0, 0.25)):
        x, y = numbers(i, 4, 5), numbers(50 + i, 4, 3)
        leaf = x.clone().requires_grad_()
        out = twin(leaf)
        (xi,) = torch.autograd.grad(out[:, 0].sum(), leaf, create_graph=True)
        twin.zero_grad()
        ((out - y).square().sum(1).mean() + weight * xi.square().sum(1).mean()).backward()
        net.zero_grad()
        model.accumulate(x, y, loss="mse", weight=weight)
        for (name, t), other in zip(net.named_parameters(), twin.parameters(), strict=True):
            assert_close(t.grad, other.grad, f"step {i}, {name}")


@dataclass
class Slope(db.Penalty):
    """A penalty that is equal to others, and so has no hash."""

    factor: float = 1.0

    def __post_init__(self) -> None:
        super().__init__()

    def seed(self, out, *extra):
        return self.factor * torch.ones_like(out)


@pytest.mark.choice
@pytest.mark.parametrize("sweeps", [None, True])
def test_a_penalty_that_is_a_dataclass(sweeps):
    net, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(5, 4)
    model = db.Penalised(net, Slope(), sweeps=sweeps)
    values = []
    for step in range(5):
        model.penalty.factor = 1.0 + step
        values.append(model(x)[1].item() / (1 + step) ** 2)
    torch.testing.assert_close(values, 5 * values[:1])
