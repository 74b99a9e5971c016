"""ξ is computed again where one light node gives it, and held everywhere else; results are those of
autograd either way."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import doubleback as db
from doubleback import sweeps
from support.plans import leaves_of, plan_of


class Twice(nn.Module):
    """A value that two nodes read: one light path and the residual."""

    def __init__(self):
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x):
        u = self.into(x)
        return self.out(torch.tanh(self.norm(u)) + u)


class Square(nn.Module):
    """One node reads the value twice."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x):
        u = self.into(x)
        return self.out(u * u)


class Scaled(nn.Module):
    """Light nodes of two inputs: a learned scale, and a gate smaller than what it scales."""

    def __init__(self):
        super().__init__()
        self.into, self.gate, self.out = nn.Linear(6, 8), nn.Linear(6, 1), nn.Linear(8, 5)
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x):
        return self.out(self.scale * self.into(x) * self.gate(x))


class Gated(nn.Module):
    """Two products whose results are multiplied, with an activation before that or without."""

    def __init__(self, act: nn.Module):
        super().__init__()
        self.gate, self.into, self.out = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 5)
        self.act = act

    def forward(self, x):
        return self.out(self.act(self.gate(x)) * self.into(x))


class Summed(Gated):
    def forward(self, x):
        return self.out(self.act(self.gate(x) + self.into(x)))


class ChannelsFirst(nn.Module):
    """A permutation between the convolution and its norm."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(2, 4, 3), nn.LayerNorm(4), nn.Linear(4, 5)

    def forward(self, x):
        return self.out(F.gelu(self.norm(self.conv(x).permute(0, 2, 3, 1))).mean((1, 2)))


class Attention(nn.Module):
    """Written out: scores, a scale, a mask and softmax."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))
        self.out = nn.Linear(4, 5)

    def forward(self, x):
        scores = self.q(x) @ self.k(x).transpose(1, 2) / 2.0
        scores = scores.masked_fill(torch.ones(3, 3, dtype=torch.bool).triu(1), -1e9)
        return self.out((scores.softmax(-1) @ self.v(x)).mean(1))


def dense(*between: nn.Module, widths=(6, 8, 8)) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), *between]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 5))


def convolutions(act: type[nn.Module]) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), act(),
        nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), act(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5),
    )  # fmt: skip


IMAGES = (4, 2, 7, 7)
CASES = {  # the network, its input, and the nodes whose ξ is held
    "linear, GELU": (lambda: dense(nn.GELU()), (4, 6), ["gelu", "gelu", "linear"]),
    "linear, ReLU": (lambda: dense(nn.ReLU()), (4, 6), ["linear", "linear", "linear"]),
    "linear, layer norm": (
        lambda: dense(nn.LayerNorm(8)), (4, 6), ["layer_norm", "layer_norm", "linear"],
    ),
    "a chain": (
        lambda: dense(nn.LayerNorm(8), nn.ReLU(), nn.SiLU(), nn.Dropout(0.3)), (4, 6),
        ["silu", "silu", "linear"],
    ),
    "PReLU": (lambda: dense(nn.PReLU()), (4, 6), ["prelu", "prelu", "linear"]),
    "convolution, batch norm, ReLU": (
        lambda: convolutions(nn.ReLU), IMAGES, ["batch_norm", "batch_norm", "linear"],
    ),
    "convolution, batch norm, SiLU": (
        lambda: convolutions(nn.SiLU), IMAGES, ["silu", "silu", "linear"],
    ),
    "batch norm in eval": (
        lambda: convolutions(nn.ReLU).eval(), IMAGES, ["batch_norm", "batch_norm", "linear"],
    ),
    "a permutation between": (ChannelsFirst, IMAGES, ["gelu", "linear"]),
    "two readers": (Twice, (4, 6), ["linear", "tanh", "linear"]),
    "one reader, twice": (Square, (4, 6), ["linear", "mul", "linear"]),
    "a scale and a gate": (Scaled, (4, 6), ["linear", "mul", "linear"]),
    "a gate": (lambda: Gated(nn.SiLU()), (4, 6), ["mul", "linear"]),
    "a product of two products": (lambda: Gated(nn.Identity()), (4, 6), ["mul", "linear"]),
    "a sum of two products": (lambda: Summed(nn.Tanh()), (4, 6), ["tanh", "linear"]),
    "softmax": (
        Attention, (4, 3, 4), ["linear", "linear", "softmax", "linear", "matmul", "linear"],
    ),
    "the penalised output": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.GELU()), (4, 6), ["gelu"],
    ),
}  # fmt: skip


def labels(x):
    return torch.randint(5, (x.shape[0],))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(3)


@pytest.mark.parametrize("name", CASES)
def test_held_and_right(name):
    make, shape, held = CASES[name]
    net, x = make(), torch.randn(shape)
    y = labels(x)
    model = db.Penalised(net, db.LossGradient("cross_entropy"), flatten_after=None)
    plan = plan_of(model, x, y)
    named = {s.node.index: str(s.node.op._schema.name) for s in plan.steps}
    _, penalty = model(x, y)
    found = sorted(penalty.grad_fn.state.xi)
    assert len(found) == len(held), [named[i] for i in found]
    for index, part in zip(found, held, strict=True):
        assert part in named[index], [named[i] for i in found]
    assert found == sorted(s.node.index for s in plan.steps if plan.holds_xi(s))
    assert db.check(model, x, y).worst <= 1e-10


@pytest.mark.parametrize("penalty", [db.Jacobian(plan="rows"), db.Jacobian(plan="rows", chunk=2),
                                     db.SpectralNorm(iterations=2, warm_start=False)])  # fmt: skip
@pytest.mark.parametrize("name", ["a chain", "a permutation between", "linear, GELU", "PReLU"])
def test_many_seeds(name, penalty):
    make, shape, _ = CASES[name]
    net = make()
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    assert db.check(db.Penalised(net, penalty), torch.randn(shape)).worst <= 1e-8


def test_an_output_beside_the_penalised_one():
    """γ enters at a value whose ξ is renewed."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.out = nn.Linear(6, 8), nn.Linear(8, 5)

        def forward(self, x):
            u = self.into(x)
            return self.out(F.gelu(u)), u

    model, x = db.Penalised(Heads(), db.OutputGradient(0), output=0), torch.randn(4, 6)
    assert len(plan_of(model, x).renewals) == 1
    assert db.check(model, x).worst <= 1e-10


def gradients(model, run) -> list:
    model.zero_grad(set_to_none=True)
    run()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("after", [None, 0])
def test_backward_twice(after):
    net, x = convolutions(nn.SiLU).double(), torch.randn(IMAGES, dtype=torch.float64)
    y = labels(x)
    model = db.Penalised(net, db.LossGradient("cross_entropy"), flatten_after=after)
    out, penalty = model(x, y)
    total = F.cross_entropy(out, y) + penalty
    once = gradients(model, lambda: total.backward(retain_graph=True))
    held = None if after == 0 else set(penalty.grad_fn.state.xi)
    again = gradients(model, lambda: total.backward(retain_graph=True))
    assert held is None or held == set(penalty.grad_fn.state.xi)
    last = gradients(model, lambda: total.backward())
    for a, b, c in zip(once, again, last, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


@pytest.mark.parametrize("name", ["linear, GELU", "convolution, batch norm, SiLU"])
def test_compiled(name):
    make, shape, _ = CASES[name]
    net, x = make().double(), torch.randn(shape, dtype=torch.float64)
    y = labels(x)
    stock = db.Penalised(net, db.LossGradient("cross_entropy"), flatten_after=None)
    model = db.Penalised(net, db.LossGradient("cross_entropy"), compile=True, recompute=True)
    assert plan_of(model, x, y).renewals

    def step(by):
        out, penalty = by(x, y)
        (F.cross_entropy(out, y) + 0.3 * penalty).backward()

    expected = gradients(net, lambda: step(stock))
    for run in (lambda: step(model), lambda: model.accumulate(x, y, weight=0.3)):
        for a, b in zip(gradients(net, run), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_debug_and_counts():
    net, x = dense(nn.LayerNorm(8), nn.GELU()), torch.randn(4, 6)
    y = labels(x)
    assert db.check(db.Penalised(net, db.LossGradient("cross_entropy"), debug=True), x, y)
    model = db.Penalised(net, db.LossGradient("cross_entropy"))
    with db.count_operations() as ops:
        out, penalty = model(x, y)
        (F.cross_entropy(out, y) + penalty).backward()
    assert ops.products == 4 * 3 - 1 and ops.weight_adjoint == 2 * 3


def test_less_memory():
    """Of two values and two ξ per layer, one ξ goes; its place is taken by no source, beside two
    tensors at the turn of a node that a product waits for."""
    x = torch.randn(512, 6)
    y, peaks = labels(x), []
    net = dense(nn.GELU(), widths=(6, *[64] * 12))
    for recompute in (False, True):
        model = db.Penalised(net, db.LossGradient("cross_entropy"), recompute=recompute)
        peaks.append(model.explain(x, y).as_dict()["peak_bytes"])
    assert peaks[1] <= 0.85 * peaks[0]


def test_who_recomputes():
    net, x = dense(nn.GELU()), torch.randn(4, 6)
    for options, expected in (
        ({}, True), ({"compile": True}, False), ({"compile": "max-autotune"}, False),
        ({"recompute": False}, False), ({"compile": True, "recompute": True}, True),
    ):  # fmt: skip
        model = db.Penalised(net, db.LossGradient("cross_entropy"), **options)
        assert bool(plan_of(model, x, labels(x)).renewals) is expected


def test_with_seeds_everything_is_held():
    net, x = dense(nn.GELU()).double(), torch.randn(4, 6, dtype=torch.float64)
    model = db.Penalised(net, db.Jacobian(plan="rows"), flatten_after=None)
    plan, leaves = plan_of(model, x), leaves_of(model, x)
    state = sweeps.forward(plan, {v: t.detach() for v, t in leaves.items()})
    sweeps.backward(plan, state, torch.ones(2, 4, 5, dtype=torch.float64), seeds=2)
    assert plan.renewals and set(state.xi) == {s.node.index for s in plan.steps if s.curves}


class Counted(TorchDispatchMode):
    """How often each operator runs."""

    def __init__(self):
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func._schema.name.split("::")[1]] += 1
        return func(*args, **(kwargs or {}))


WAITS = {  # the network, its input, the nodes that wait, and a backward that then runs twice less
    "linear, GELU": (lambda: dense(nn.GELU()), (4, 6), 2, None),
    "linear, layer norm": (
        lambda: dense(nn.LayerNorm(8)), (4, 6), 2, "native_layer_norm_backward",
    ),
    "convolution, batch norm, ReLU": (
        lambda: convolutions(nn.ReLU), IMAGES, 2, "native_batch_norm_backward",
    ),
    "convolution, batch norm, SiLU": (
        lambda: convolutions(nn.SiLU), IMAGES, 2, "native_batch_norm_backward",
    ),
    "a permutation between": (ChannelsFirst, IMAGES, 1, None),
    "two readers": (Twice, (4, 6), 0, None),
    "a scale and a gate": (Scaled, (4, 6), 0, None),
    "a gate": (lambda: Gated(nn.SiLU()), (4, 6), 2, None),
    "a product of two products": (lambda: Gated(nn.Identity()), (4, 6), 2, None),
    "a sum of two products": (lambda: Summed(nn.Tanh()), (4, 6), 2, None),
}  # fmt: skip


@pytest.mark.parametrize("name", WAITS)
def test_products_wait_for_the_norm_behind_them(name):
    """Their source is taken when the norm's tangent and source are, which give its input's ξ."""
    make, shape, count, operator = WAITS[name]
    net, x = make().double(), torch.randn(shape, dtype=torch.float64)
    y = labels(x)
    model = db.Penalised(net, db.LossGradient("cross_entropy"), flatten_after=None)
    plan = plan_of(model, x, y)
    assert len(plan.waits) == count
    ran = []
    for waits in (plan.waits, {}):
        changed = dataclasses.replace(plan, waits=waits)
        leaves = {v: t.detach() for v, t in leaves_of(model, x, y).items()}
        state = sweeps.forward(changed, leaves)
        seed = torch.ones(plan.graph.shape(plan.target), dtype=torch.float64)
        q0 = dict(zip(plan.penalised, sweeps.backward(changed, state, seed), strict=True))
        with Counted() as counted:
            q, sources = sweeps.tangent(changed, state, q0)
        ran.append((counted.names, q, sources))
    (fewer, q, sources), (more, expected_q, expected) = ran
    assert q is None or torch.equal(q, expected_q)
    assert sources.keys() == expected.keys()
    for v, source in sources.items():
        torch.testing.assert_close(source, expected[v], rtol=1e-12, atol=1e-14)
    assert operator is None or fewer[operator] == more[operator] - count
