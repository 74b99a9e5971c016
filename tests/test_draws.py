"""Random numbers are drawn in the network's order, wherever it draws them: one seed, one output."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import doubleback as db


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)


class DropConnect(Net):
    """Weights are dropped between the activations before and behind them."""

    def forward(self, x):
        u = F.dropout(self.a(x).tanh(), 0.5, self.training)
        u = F.linear(u, F.dropout(self.b.weight, 0.5, self.training), self.b.bias).tanh()
        return self.c(F.dropout(u, 0.3, self.training))


class WeightsFirst(Net):
    """Weights are dropped before anything that depends on x."""

    def forward(self, x):
        weight = F.dropout(self.b.weight, 0.5)
        return self.c(F.linear(F.dropout(self.a(x).tanh(), 0.5), weight))


class Noise(Net):
    """Numbers that depend on nothing at all."""

    def forward(self, x):
        u = F.dropout(self.a(x).tanh(), 0.5)
        return self.c(u + 0.1 * torch.randn(8) * self.b.bias)


class Several(Net):
    """On both sides of a dropped activation, and carried on by curved functions."""

    def forward(self, x):
        one = F.dropout(F.rrelu(self.b.weight, training=True), 0.4)
        u = F.dropout(self.a(x).tanh(), 0.5)
        noisy = self.b.weight * torch.rand_like(self.b.weight)
        two = F.alpha_dropout(noisy, 0.5, True).softmax(1)
        return self.c(F.linear(u, one) + F.linear(u, two).sin())


PENALTIES = {
    "output": lambda: db.OutputGradient(1),
    "rows": lambda: db.Jacobian(plan="rows"),
    "columns": lambda: db.Jacobian(plan="columns"),
    "spectral": lambda: db.SpectralNorm(3),
}


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("kind", [DropConnect, WeightsFirst, Noise, Several])
def test_one_seed_one_output(kind, penalty):
    torch.manual_seed(0)
    net, x = kind(), torch.randn(5, 6)
    model = db.Penalised(net, PENALTIES[penalty](), strict=True)
    for seed in range(4):  # node by node, then flat
        torch.manual_seed(seed)
        expected = net(x)
        torch.manual_seed(seed)
        torch.testing.assert_close(model(x)[0], expected)


@pytest.mark.parametrize("kind", [DropConnect, WeightsFirst, Noise, Several])
def test_parity(kind):
    """Gradients too: what draws late is swept, and γ goes through it to the weights."""
    torch.manual_seed(0)
    net, x = kind(), torch.randn(5, 6)
    for penalty in (db.OutputGradient(1), db.Jacobian(plan="rows"), db.Jacobian(plan="columns")):
        assert db.check(db.Penalised(net, penalty), x).worst <= 1e-10


def test_nothing_is_swept_without_need():
    """In eval nothing draws; where nothing drew before, weights stay outside the sweeps."""
    x = torch.randn(5, 6)
    model = db.Penalised(DropConnect().eval(), db.OutputGradient(1))
    assert not any("dropout" in name for name in model.explain(x).operators)
    dropped = db.Penalised(WeightsFirst(), db.OutputGradient(1)).explain(x)
    assert dropped.prelude == 1 and dropped.operators["aten.native_dropout.default"]["count"] == 1
    assert db.Penalised(DropConnect(), db.OutputGradient(1)).explain(x).prelude == 0
