"""Steps in parameter spaces, against dense Gram matrices."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import doubleback as db
from doubleback import spaces
from support import gram

SMOOTH = spaces.Sobolev(1.5, (1.0, 0.5), ("neumann", "dirichlet"))


def setting():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, (3, 4)), nn.Tanh(), nn.Flatten(), nn.Linear(12, 1)).double()
    weight = torch.rand(1, 12, dtype=torch.float64) + 0.5
    return net, {net[0].weight: SMOOTH, net[3].weight: spaces.Weighted(weight)}, weight


def backward(net):
    x = torch.randn(4, 2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    loss = net(x).square().mean()
    loss.backward()
    return loss


def representers(net, weight):
    """Gradients by dense matrices, in the order of the parameters."""
    _, inverse = gram.sobolev(1.5, (3, 4), (1.0, 0.5), ("neumann", "dirichlet"))
    grads = [p.grad.clone() for p in net.parameters()]
    grads[0] = gram.apply(inverse, grads[0], 2)
    grads[2] = grads[2] / weight
    return grads


@pytest.mark.parametrize("closure", [False, True])
def test_a_step_is_taken_along_the_representer(closure):
    net, chosen, weight = setting()
    start = [p.detach().clone() for p in net.parameters()]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    assert db.parameter_spaces(optimizer, chosen) is optimizer
    if closure:
        optimizer.step(closure=lambda: backward(net))
    else:
        backward(net)
        optimizer.step()
    euclidean = [p.grad.clone() for p in net.parameters()]
    other, _, _ = setting()
    backward(other)
    for mine, theirs in zip(euclidean, other.parameters(), strict=True):
        assert torch.equal(mine, theirs.grad)  # .grad is the Euclidean gradient afterwards
    for p, before, g in zip(net.parameters(), start, representers(other, weight), strict=True):
        torch.testing.assert_close(p.detach(), before - 0.1 * g, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.Adam(p, lr=0.01),
    lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
])  # fmt: skip
def test_any_optimiser_sees_the_representers(make):
    """The same as handing it representers by hand, over several steps."""
    net, chosen, weight = setting()
    other = copy.deepcopy(net)
    ours, theirs = make(net.parameters()), make(other.parameters())
    db.parameter_spaces(ours, chosen)
    schedule = torch.optim.lr_scheduler.StepLR(ours, 2)
    same = torch.optim.lr_scheduler.StepLR(theirs, 2)

    def by_hand():
        other.zero_grad()
        loss = backward(other)
        for p, g in zip(other.parameters(), representers(other, weight), strict=True):
            p.grad = g
        return loss

    def closure():
        net.zero_grad()
        return backward(net)

    for _ in range(3):
        ours.step(closure)
        theirs.step(by_hand)
        schedule.step()
        same.step()
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_parameter_without_gradient_is_passed_over():
    net, chosen, _ = setting()
    optimizer = db.parameter_spaces(torch.optim.SGD(net.parameters(), lr=0.1), chosen)
    before = net[0].weight.detach().clone()
    optimizer.step()
    assert torch.equal(net[0].weight, before) and net[0].weight.grad is None


def test_the_penalised_step_of_a_smoothed_filter():
    """A penalty's gradient is turned like any other."""
    net, chosen, weight = setting()
    model = db.Penalised(net, db.OutputGradient(norm=db.Norm()))
    optimizer = db.parameter_spaces(torch.optim.SGD(net.parameters(), lr=1.0), chosen)
    start = net[0].weight.detach().clone()
    x = torch.randn(4, 2, 4, 5, dtype=torch.float64)
    out, penalty = model(x)
    (out.mean() + penalty).backward()
    expected = representers(net, weight)[0]
    optimizer.step()
    torch.testing.assert_close(net[0].weight.detach(), start - expected, rtol=1e-11, atol=1e-13)


def test_bad_input():
    net, _, _ = setting()
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
    with pytest.raises(db.InputError, match=r"does not hold the parameter of shape \(1, 12\)"):
        db.parameter_spaces(optimizer, {net[3].weight: spaces.Euclidean()})
    with pytest.raises(db.InputError, match="needs a space"):
        db.parameter_spaces(optimizer, {net[0].weight: 2.0})
    with pytest.raises(db.InputError, match=r"\(5,\) do not broadcast .* \(3, 2, 3, 4\)"):
        db.parameter_spaces(optimizer, {net[0].weight: spaces.Weighted(torch.ones(5))})
