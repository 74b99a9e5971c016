"""Rules in several forms: equal derivatives, read off whatever the network keeps anyway."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import doubleback as db
from doubleback import sweeps
from doubleback.graph import Node, Ref
from doubleback.rules import Call, find_rule
from support.plans import plan_of

aten = torch.ops.aten
EDGES = [
    -float("inf"),
    -3.0,
    -1.0,
    -0.5,
    -0.1,
    0.0,
    0.1,
    0.5,
    1.0,
    3.0,
    6.0,
    float("inf"),
    float("nan"),
]
OPERATORS = {
    aten.relu.default: [()],
    aten.relu6.default: [()],
    aten.hardtanh.default: [(), (-0.5, 3.0), (1.0, 1.0)],
    aten.leaky_relu.default: [(), (0.2,), (0.0,)],
    aten.threshold.default: [(0.1, 20.0), (-1.0, -5.0)],
    aten.hardshrink.default: [(), (0.1,)],
    aten.softshrink.default: [(), (0.1,)],
    aten.clamp.default: [(-0.5, 3.0), (None, 0.1), (-1.0, None)],
    aten.clamp_min.default: [(0.5,)],
    aten.clamp_max.default: [(0.5,)],
}


@pytest.mark.parametrize("op", OPERATORS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_all_forms_give_the_same_bits(op, dtype):
    """At kinks, infinities and where the input is no number too."""
    x = torch.tensor(EDGES, dtype=dtype)
    y = torch.randn(len(EDGES)).to(dtype)
    y[0], y[5] = float("inf"), float("nan")
    rule = find_rule(op)
    for arguments in OPERATORS[op]:
        node = Node(0, "sample", op, (Ref(0), *arguments), {}, (0,), (1,), False, "sample")
        found = []
        for form in (rule, *rule.forms(node)):
            call = Call(node, (x,), (None,), shape=tuple(x.shape))
            call.out, call.saved = form.forward(call)
            if "inputs" not in form.reads:
                call.inputs = (None,)
            if "output" not in form.reads:
                call.out = None
            (pulled,) = form.backward(call, y, (True,))
            assert pulled.dtype is dtype
            torch.testing.assert_close(form.tangent(call, (y,)), pulled, equal_nan=True)
            found.append(pulled)
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], rtol=0, atol=0, equal_nan=True)


def test_a_slope_below_zero_is_read_off_the_input():
    rule = find_rule(aten.leaky_relu.default)
    node = Node(0, "sample", aten.leaky_relu.default, (Ref(0), -0.2), {}, (0,), (1,), False, "")
    assert rule.forms(node) == []
    assert rule.forms(replace(node, args=(Ref(0),), kwargs={"negative_slope": 0.1}))


# What a plan chooses --------------------------------------------------------------------------


class Pooled(nn.Module):
    """Nothing but the activation's own derivative reads what goes into it or comes out of it."""

    def __init__(self, activation):
        super().__init__()
        self.conv, self.activation, self.out = nn.Conv2d(2, 4, 3), activation, nn.Linear(4, 5)

    def forward(self, x):
        return self.out(self.activation(self.conv(x)).mean((2, 3)))


class Again(nn.Module):
    """A convolution reads what comes out."""

    def __init__(self, activation):
        super().__init__()
        self.conv, self.activation = nn.Conv2d(2, 4, 3), activation
        self.last, self.out = nn.Conv2d(4, 4, 3), nn.Linear(4, 5)

    def forward(self, x):
        return self.out(self.last(self.activation(self.conv(x))).mean((2, 3)))


class Both(nn.Module):
    """Another node reads what goes in."""

    def __init__(self, activation):
        super().__init__()
        self.conv, self.activation, self.out = nn.Conv2d(2, 4, 3), activation, nn.Linear(4, 5)

    def forward(self, x):
        u = self.conv(x)
        return self.out((self.activation(u) + u.sin()).mean((2, 3)))


CHOICES = {  # network, activation → what its derivative reads
    (Pooled, nn.ReLU()): "mask",
    (Pooled, nn.ReLU6()): "mask",
    (Pooled, nn.Hardtanh(-0.4, 0.3)): "mask",
    (Pooled, nn.LeakyReLU(0.2)): "inputs",
    (Again, nn.ReLU()): "output",
    (Again, nn.ReLU6()): "output",
    (Again, nn.Hardtanh(-0.4, 0.3)): "output",
    (Again, nn.LeakyReLU(0.2)): "output",
    (Again, nn.LeakyReLU(-0.2)): "inputs",
    (Again, nn.Threshold(0.1, 0.5)): "mask",
    (Both, nn.ReLU()): "mask",
    (Both, nn.Hardtanh(-0.4, 0.3)): "inputs",
}


@pytest.mark.parametrize(
    ("net", "activation"), CHOICES, ids=lambda part: getattr(part, "__name__", None) or str(part)
)
def test_choice(net, activation):
    """Of the least to keep; the gradient is autograd's, and masks are booleans."""
    torch.manual_seed(0)
    x, y = torch.randn(3, 2, 6, 6), torch.randint(5, (3,))
    model = db.Penalised(net(activation), db.LossGradient("cross_entropy"))
    plan = plan_of(model, x, y)
    name = {nn.ReLU: "relu", nn.ReLU6: "hardtanh", nn.LeakyReLU: "leaky_relu"}
    name = name.get(type(activation), type(activation).__name__.lower())
    (step,) = [s for s in plan.steps if f"aten::{name}" in str(s.node.op._schema.name)]
    expected = CHOICES[net, activation]
    assert step.rule.reads == ({expected} if expected != "mask" else set())
    leaves = {v: torch.randn(plan.graph.shape(v)) for v in (*plan.penalised, *plan.leaves)}
    saved = sweeps.forward(plan, leaves).saved.get(step.node.index)
    assert (saved is not None and saved[0].dtype is torch.bool) == (expected == "mask")
    db.check(model, x, y)
    for options in ({"flatten_after": 0}, {"recompute": False}):
        db.check(db.Penalised(net(activation), db.LossGradient("cross_entropy"), **options), x, y)


def test_seeds_share_a_mask():
    torch.manual_seed(0)
    net = Pooled(nn.ReLU())
    x = torch.randn(3, 2, 6, 6)
    db.check(db.Penalised(net, db.Jacobian(plan="rows")), x)
