"""A p whose values depend on other examples' derivatives, each value with a weight of its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import doubleback as db
from support.stock import assert_close, numbers, pair, stock_penalty


def relative(xi):
    """Each example's share of the whole."""
    squares = xi.square().sum(1)
    return squares / squares.sum() + squares * squares.mean()


def softmax(xi):
    return torch.softmax(xi.norm(dim=1), 0)


def shifted(xi):
    """The norm of the next example."""
    return xi.square().sum(1).roll(1)


class Centred(db.Norm):
    """A norm of one's own: the distance to the batch's mean."""

    def value(self, xi):
        (u,) = xi
        return (u - u.mean(0)).square().sum(1)

    def measure(self, xi):
        with torch.enable_grad():
            leaves = [u.detach().requires_grad_() for u in xi]
            values = self.value(leaves)
            grads = torch.autograd.grad(values.sum(), leaves)
        return values.detach(), list(grads)


COUPLED = {"relative": relative, "softmax": softmax, "shifted": shifted, "norm": Centred()}


def value_of(p, xi):
    return p.value(xi) if isinstance(p, Centred) else p(*xi)


MAKERS = {
    "custom": lambda p, r: db.Custom(torch.ones_like, p, reduction=r),
    "output": lambda p, r: db.OutputGradient(norm=p, reduction=r),
    "spectral": lambda p, r: db.SpectralNorm(1, norm=p, reduction=r),
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("name", COUPLED)
def test_a_weight_per_example(name, kind, reduction):
    if kind == "spectral" and name == "norm":
        pytest.skip("the singular vector of one number is ±1, and this p is not even")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))
    p = COUPLED[name]
    model, twin = pair(net, MAKERS[kind](p, reduction))
    for i in range(5):
        x, weights = numbers(i, 4, 5), numbers(30 + i, 4)
        out, penalty = model(x)
        total = (penalty * weights).sum() if reduction == "none" else weights[0] * penalty
        model.zero_grad()
        (out.sum() + total).backward()
        out, values = stock_penalty(twin, (x,), p=lambda xi: value_of(p, xi))
        wanted = values if reduction == "none" else getattr(values, reduction)()
        total = (wanted * weights).sum() if reduction == "none" else weights[0] * wanted
        twin.zero_grad()
        (out.sum() + total).backward()
        assert_close(penalty, wanted, f"call {i}, penalty")
        for (key, t), other in zip(model.net.named_parameters(), twin.parameters(), strict=True):
            assert_close(t.grad, other.grad, f"call {i}, gradient of {key}")
