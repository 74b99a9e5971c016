"""Sizes that change: one capture and one set of flat graphs for all, whatever the penalty."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import doubleback as db
from doubleback import spaces
from doubleback.capture import dynamo
from doubleback.run import flattening

GRID = (1, 6, 6)
SIZES = (4, 6, 9, 3, 5, 7)  # one of them is the number of outputs too


def image_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(108, 3)
    ).double()


class GraphNet(nn.Module):
    """Nodes with features, edges between them; the numbers of both change."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.leave = nn.Linear(4, 5).double(), nn.Linear(5, 3).double()

    def forward(self, x, edges):
        h = torch.tanh(self.enter(x))
        return self.leave(torch.tanh(h + torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])))


class Beside(nn.Module):
    """What does not depend on x runs before the sweeps, at sizes of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.last = nn.Linear(36, 8), nn.Linear(8, 3)
        self.factor = 1.0
        self.double()

    def forward(self, x, z):
        beside = torch.sin(self.linear(z.reshape(len(z), 36)))
        return self.last(torch.tanh(self.linear(x.flatten(1))) * beside * self.factor)


def images(rows):
    return (torch.randn(rows, *GRID, dtype=torch.float64),)


def graphs(rows):
    return torch.randn(rows, 4, dtype=torch.float64), torch.randint(0, rows, (2, 3 * rows + 1))


# ------------------------------------------------------------------ each penalty by its definition
#
# (net, batch, penalty, its own arguments by rows and inputs, R per example by stock autograd)


def pulled(out, x, v, graph=True):
    return torch.autograd.grad(out, x, v, create_graph=graph, retain_graph=True)[0]


def square(xi):
    return xi.square().flatten(1).sum(1)


def of_loss(loss, measure=square):
    def values(out, x, y):
        return measure(pulled(loss(out, y).sum(), x, None))

    return values


def of_rows(out, x, *target):
    rows = torch.stack([pulled(out[:, i].sum(), x, None) for i in range(out.shape[1])], 1)
    return square(rows - target[0]) if target else square(rows)


def of_classes(out, x):
    return of_rows(out.softmax(-1), x)


def of_spectrum(out, x):
    """Two iterations from the direction that the penalty draws, which is fixed then."""
    v = torch.randn(out.shape, dtype=torch.float32).double()
    v = v / v.norm(dim=1, keepdim=True)
    probe = torch.zeros_like(out, requires_grad=True)
    pull = torch.autograd.grad(out, x, probe, create_graph=True)[0]
    for _ in range(2):
        along = pulled(out, x, v, graph=False)
        v = torch.autograd.grad(pull, probe, along, retain_graph=True)[0]
        v = (v / v.norm(dim=1, keepdim=True)).detach()
    return square(pulled(out, x, v)).sqrt()


def cross_entropy(out, y):
    return F.cross_entropy(out, y, reduction="none")


def squares(out, y):
    return (out - y).square().flatten(1).sum(1)


def labels(x):
    return (torch.arange(len(x)) % 3,)


def values(x):
    return (torch.randn(len(x), 3, dtype=torch.float64),)


def slopes(x):
    return (torch.randn_like(x),)


def pairs(x):
    return *values(x), *slopes(x)


def jacobians(x):
    return (torch.randn(len(x), 3, *x.shape[1:], dtype=torch.float64),)


def none(x):
    return ()


def steep(out):
    return torch.sin(out)


def cubes(xi):
    return xi.abs().pow(3).flatten(1).sum(1)


CASES = {
    "cross entropy": (db.LossGradient("cross_entropy"), labels, of_loss(cross_entropy)),
    "own loss": (db.LossGradient(lambda out, y: squares(out, y)), values, of_loss(squares)),
    "own norm": (
        db.LossGradient("cross_entropy", norm=cubes), labels, of_loss(cross_entropy, cubes),
    ),
    "match": (
        db.GradientMatch(1), slopes,
        lambda out, x, g: square(pulled(out[:, 1].sum(), x, None) - g),
    ),
    "bilinear": (
        db.BilinearForm(), pairs, lambda out, x, w, q: (pulled(out, x, w) * q).flatten(1).sum(1),
    ),
    "custom": (
        db.Custom(steep, cubes), none, lambda out, x: cubes(pulled(out, x, torch.sin(out))),
    ),
    "jacobian": (db.Jacobian(), none, of_rows),
    "by chunks": (db.Jacobian(chunk=2), none, of_rows),
    "classes": (db.Jacobian("softmax"), none, of_classes),
    "projections": (db.Jacobian(projections=3), none, of_rows),  # as many as outputs: exact
    "each example": (db.Jacobian(reduction="none"), none, of_rows),
    "spectral": (db.SpectralNorm(2, warm_start=False), none, of_spectrum),
    "jacobians": (db.JacobianMatch(), jacobians, of_rows),
}  # fmt: skip
NETS = {
    "image": (image_net, images), "graph": (GraphNet, graphs),
    "beside": (Beside, lambda rows: (*images(rows), *images(rows))),
}  # fmt: skip
MODES = {
    "nodes": {"flatten_after": None}, "flat": {"flatten_after": 1}, "compiled": {"compile": True},
}  # fmt: skip


def loss_of(out, penalty):
    if penalty.dim():
        penalty = penalty @ torch.linspace(0.5, 1.5, len(penalty), dtype=torch.float64)
    return out.square().mean() + 0.3 * penalty


def stock(net, args, extra, penalty, per_example):
    """(out, penalty, gradients) by `create_graph=True`."""
    x = args[0].clone().requires_grad_()
    out = net(x, *args[1:])
    value = per_example(out, x, *extra)
    value = value if penalty.reduction == "none" else value.mean()
    gradients = torch.autograd.grad(loss_of(out, value), [x, *net.parameters()])
    return [out.detach(), value.detach(), *gradients]


def ours(model, args, extra):
    x = args[0].clone().requires_grad_()
    out, value = model(x, *args[1:], *extra)
    leaves = [x, *model.net.parameters()]
    return [out.detach(), value.detach(), *torch.autograd.grad(loss_of(out, value), leaves)]


@pytest.fixture
def counted_captures(monkeypatch):
    made, lift = [], dynamo.lift
    monkeypatch.setattr(dynamo, "lift", lambda *args: made.append(0) or lift(*args))
    return made


def agree(name, which, mode, captures, flattened):
    """Outputs, penalty and all gradients at every size; few captures, and no flat graph for the
    sizes after the fourth."""
    penalty, arguments, per_example = CASES[name]
    make, batch = NETS[which]
    net = make()
    model = db.Penalised(net, penalty, strict=True, **MODES[mode])
    del flattened[:]
    counts = []
    for i, rows in enumerate(SIZES):
        args = batch(rows)
        extra = arguments(args[0])
        torch.manual_seed(i)
        swept = ours(model, args, extra)
        torch.manual_seed(i)
        for a, b in zip(swept, stock(net, args, extra, penalty, per_example), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
        counts.append(len(flattened))
    assert len(captures) <= 3
    assert counts[-1] == counts[3] and bool(counts[-1]) == (mode != "nodes")


SOME = ("own loss", "classes", "projections", "spectral", "jacobians")
# The definition of R for rows that depend on one another is that of e_i at all of them at once,
# which random directions do not add up to.
EVERY = [
    (name, which, mode)
    for name in CASES for which in NETS for mode in MODES
    if (name, which) != ("projections", "graph")
]  # fmt: skip
QUICK = {*((name, "image", "flat") for name in SOME), ("jacobian", "graph", "flat")}
QUICK |= {("own loss", "beside", "flat"), ("classes", "beside", "flat")}


@pytest.mark.parametrize(
    ("name", "which", "mode"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.long) for case in EVERY],
)
def test_every_penalty_agrees_with_stock(name, which, mode, counted_captures, flattened):
    agree(name, which, mode, counted_captures, flattened)


# ------------------------------------------------------------------------- norms, and accumulate


def labelled(rows):
    return *images(rows), torch.arange(rows) % 3


def valued(rows):
    return *images(rows), torch.randn(rows, 3, dtype=torch.float64)


NORMS = {
    "squared error": (db.LossGradient("mse"), valued),
    "norm": (db.LossGradient("cross_entropy", norm=db.Norm()), labelled),
    "deviation": (db.LossGradient("cross_entropy", norm=db.Deviation(1.0)), labelled),
    "each example": (db.LossGradient("cross_entropy", reduction="none"), labelled),
    "sobolev": (
        db.LossGradient("cross_entropy", norm=db.SquaredNorm(spaces.Sobolev(1.0, (0.2, 0.2)))),
        labelled,
    ),
    "lp": (db.LossGradient("cross_entropy", norm=db.Norm(spaces.Lp(3.0))), labelled),
    "output": (db.OutputGradient(1), images),
    "sum of outputs": (db.OutputGradient("sum"), images),
}


@pytest.mark.parametrize("name", NORMS)
def test_sweeps_are_flattened_for_all_sizes(name, monkeypatch):
    """Were the sweeps not to be flattened with open sizes, they would go on node by node, right but
    slow, and nobody would be told."""
    penalty, batch = NORMS[name]
    made = []
    flatten = flattening.flatten

    def seen(*args, **kwargs):
        made.append(args)
        return flatten(*args, **kwargs)

    def refuse(family):
        raise AssertionError("flattening was given up")

    monkeypatch.setattr(flattening, "flatten", seen)
    monkeypatch.setattr(flattening.Family, "give_up", refuse)
    net = image_net()
    model = db.Penalised(net, penalty, flatten_after=1, sweeps=True)
    counts = []
    for rows in (4, 6, 9, 5, 7, 11, 8, 10):
        inputs = batch(rows)
        out, value = model(*inputs)
        (out.square().mean() + value.sum()).backward()
        counts.append(len(made))
    assert 0 < counts[-1] == counts[3]  # not one more for the sizes after the fourth


@pytest.mark.parametrize("call", ["call", "accumulate"])
def test_compiled_sweeps_for_all_sizes_agree(call):
    net = image_net()
    model = db.Penalised(net, db.LossGradient("cross_entropy"), compile=True, sweeps=True)
    stock = db.Penalised(net, db.LossGradient("cross_entropy"), sweeps=False)
    for rows in (4, 6, 9, 5):
        x, y = labelled(rows)
        gradients = []
        for m in (model, stock):
            net.zero_grad()
            if call == "accumulate":
                m.accumulate(x, y, loss="cross_entropy", weight=0.3)
            else:
                out, value = m(x, y)
                (F.cross_entropy(out, y) + 0.3 * value).backward()
            gradients.append([p.grad.clone() for p in net.parameters()])
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("call", ["call", "accumulate"])
def test_a_column_of_targets_keeps_no_sweeps_from_being_flattened(call, monkeypatch):
    made = []
    flatten = flattening.flatten
    monkeypatch.setattr(flattening, "flatten", lambda *a, **k: made.append(a) or flatten(*a, **k))
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    model = db.Penalised(net, db.LossGradient("mse"), flatten_after=1, sweeps=True)
    stock = db.Penalised(net, db.LossGradient("mse"), sweeps=False)
    counts = []
    for rows in (4, 6, 9, 5, 7, 11, 1, 8):
        x, y = torch.randn(rows, 5).double(), torch.randn(rows, 1).double()
        gradients = []
        for m in (model, stock):
            net.zero_grad()
            if call == "accumulate":
                m.accumulate(x, y, loss="mse", weight=0.3)
            else:
                out, value = m(x, y)
                (F.mse_loss(out, y) + 0.3 * value).backward()
            gradients.append([p.grad.clone() for p in net.parameters()])
        counts.append(len(made))
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert 0 < counts[-3] == counts[3]


@pytest.mark.parametrize("name", ["own loss", "jacobian", "spectral"])
def test_a_number_of_the_networks_own_that_changes(name):
    penalty, arguments, per_example = CASES[name]
    net = Beside()
    model = db.Penalised(net, penalty, strict=True, sweeps=True, flatten_after=1)
    for i, rows in enumerate((4, 4, 4, 4, 6, 5)):
        net.factor = 1.0 + 0.1 * i
        args = *images(rows), *images(rows)
        extra = arguments(args[0])
        torch.manual_seed(i)
        swept = ours(model, args, extra)
        torch.manual_seed(i)
        for a, b in zip(swept, stock(net, args, extra, penalty, per_example), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
