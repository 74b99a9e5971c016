"""Operators whose own backward divides by the cotangent, or takes its logarithm: the tangent is
linear, and finite where the cotangent is zero or absent."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import doubleback as db
from support.stock import numbers, pair, same_training


class Cumulative(nn.Module):
    """log Σ exp along features; `blind`: some of them are not seen by the output."""

    def __init__(self, blind: bool, scale: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 1)
        self.scale = scale
        self.register_buffer("mask", torch.tensor([1.0, 0, 1, 1, 0, 0] if blind else [1.0] * 6))

    def forward(self, x):
        h = torch.logcumsumexp(self.scale * self.first(x), 1)
        return self.last(torch.tanh(h / self.scale) * self.mask)


@pytest.mark.parametrize("how", ["backward", "accumulate"])
@pytest.mark.parametrize("scale", [1.0, 40.0])
@pytest.mark.parametrize("blind", [True, False])
def test_logcumsumexp(blind, scale, how):
    torch.manual_seed(0)
    model, twin = pair(Cumulative(blind, scale))

    def other(net):  # the same by logsumexp, whose double backward is finite everywhere
        def forward(x):
            h = net.scale * net.first(x)
            h = torch.stack([h[:, : i + 1].logsumexp(1) for i in range(6)], 1)
            return net.last(torch.tanh(h / net.scale) * net.mask)

        return forward

    twin.forward = other(twin)
    same_training(model, twin, how=how, rate=0.002)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_logcumsumexp_with_and_without_a_gradient_of_x(requires_grad):
    torch.manual_seed(0)
    model, _ = pair(Cumulative(True, 1.0))
    for i in range(4):
        x = numbers(i, 4, 5).requires_grad_(requires_grad)
        model.zero_grad()
        out, penalty = model(x)
        (out.sum() + penalty).backward()
        grads = [t.grad for t in (*model.net.parameters(), *([x] if requires_grad else []))]
        assert all(g is not None and g.isfinite().all() for g in grads), f"call {i}"


def test_check_agrees():
    torch.manual_seed(0)
    model, _ = pair(Cumulative(False, 1.0))
    assert db.check(model, numbers(0, 4, 5)).worst < 1e-10


@pytest.mark.parametrize("sweeps", [True, False])
def test_the_spectral_norm_is_the_largest_singular_value(sweeps):
    """On autograd its power iteration takes J q as a derivative in w, which is not to be zero."""
    torch.manual_seed(0)
    net = Cumulative(False, 1.0).double()
    net.last = nn.Linear(6, 3).double()
    x = numbers(0, 3, 5)
    out, sigma = db.Penalised(net, db.SpectralNorm(iterations=200), sweeps=sweeps)(x)
    rows = [torch.autograd.grad(net(x.requires_grad_())[:, i].sum(), x)[0] for i in range(3)]
    largest = torch.linalg.svdvals(torch.stack(rows, 1))[:, 0]
    assert torch.allclose(sigma, largest.mean(), rtol=1e-8)
    assert out.shape == (3, 3)
