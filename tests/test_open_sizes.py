"""Sizes that change: sweeps are flattened once, for all of them. (A caller's own functions and many
seeds are not: their sweeps are flattened for a size that comes again and again.)"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import doubleback as db
from doubleback import spaces
from doubleback.run import flattening

GRID = (1, 6, 6)
SOBOLEV = spaces.Sobolev(1.0, (0.2, 0.2))


def image_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(108, 3)
    ).double()


def labelled(rows):
    return torch.randn(rows, *GRID, dtype=torch.float64), torch.arange(rows) % 3


def unlabelled(rows):
    return (torch.randn(rows, *GRID, dtype=torch.float64),)


def with_values(rows):
    return (*unlabelled(rows), torch.randn(rows, 3, dtype=torch.float64))


CASES = {
    "cross entropy": (db.LossGradient("cross_entropy"), labelled),
    "squared error": (db.LossGradient("mse"), with_values),
    "norm": (db.LossGradient("cross_entropy", norm=db.Norm()), labelled),
    "deviation": (db.LossGradient("cross_entropy", norm=db.Deviation(1.0)), labelled),
    "each example": (db.LossGradient("cross_entropy", reduction="none"), labelled),
    "sobolev": (
        db.LossGradient("cross_entropy", norm=db.SquaredNorm(spaces.Sobolev(1.0, (0.2, 0.2)))),
        labelled,
    ),
    "lp": (db.LossGradient("cross_entropy", norm=db.Norm(spaces.Lp(3.0))), labelled),
    "output": (db.OutputGradient(1), unlabelled),
    "sum of outputs": (db.OutputGradient("sum"), unlabelled),
}


@pytest.mark.parametrize("name", CASES)
def test_sweeps_are_flattened_for_all_sizes(name, monkeypatch):
    """Were the sweeps not to be flattened with open sizes, they would go on node by node, right but
    slow, and nobody would be told."""
    penalty, batch = CASES[name]
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
