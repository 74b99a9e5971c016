"""Gradients that a CUDA graph lends: what anybody holds survives the next replay."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import doubleback as db
from doubleback.run.bridge import deliver
from doubleback.run.cuda_graphs import Lent


class Replayed:
    """A step whose gradients lie in the same memory every time, as those of a CUDA graph do."""

    def __init__(self, owners: list[nn.Parameter]) -> None:
        self.owners, self.places = owners, [torch.zeros_like(p) for p in owners]
        self.lent = Lent([*self.places[:-1], None, self.places[-1]])

    def __call__(self, value: float) -> None:
        owners = [*self.owners[:-1], torch.ones(2), self.owners[-1]]
        self.lent.recall(owners)
        for i, place in enumerate(self.places):
            place.fill_(value + i)
        grads = self.lent.hand_out()
        assert grads[-2] is None
        deliver([(t, g) for t, g in zip(owners, grads, strict=True) if g is not None], True)


@pytest.fixture
def step() -> Replayed:
    return Replayed([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))])


def grads(step: Replayed) -> list[float]:
    found = [p.grad for p in step.owners]
    assert all(g is not None and (g == g.flatten()[0]).all() for g in found)
    return [float(g.flatten()[0]) for g in found if g is not None]


def lies_there(step: Replayed) -> bool:
    pairs = zip(step.owners, step.places, strict=True)
    return all(p.grad is not None and p.grad.data_ptr() == t.data_ptr() for p, t in pairs)


def test_gradients_are_not_copied(step):
    for value in (1.0, 5.0):
        for p in step.owners:
            p.grad = None
        step(value)
        assert grads(step) == [value, value + 1]
        assert lies_there(step)


def test_gradients_are_added_up(step):
    for value in (1.0, 5.0, 10.0):
        step(value)
    assert grads(step) == [16.0, 19.0]


def test_zeroed_in_place(step):
    step(1.0)
    for p in step.owners:
        p.grad.zero_()
    step(5.0)
    assert grads(step) == [5.0, 6.0]


def test_who_holds_a_gradient_keeps_it(step):
    step(1.0)
    first = step.owners[0].grad  # the tensor itself,
    part = step.owners[1].grad[1]  # and a view
    for p in step.owners:
        p.grad = None
    step(5.0)
    assert grads(step) == [5.0, 6.0]
    assert first.tolist() == [1.0] * 3
    assert part.tolist() == [2.0] * 2
    del first, part
    for p in step.owners:
        p.grad = None
    step(7.0)
    assert grads(step) == [7.0, 8.0]
    assert lies_there(step)


def test_who_holds_a_gradient_that_is_added_to(step):
    step(1.0)
    held = [p.grad for p in step.owners]
    parts = [g.view(-1)[1:] for g in held]
    step(5.0)
    assert grads(step) == [6.0, 8.0]
    assert [float(g.flatten()[0]) for g in held] == [6.0, 8.0]  # the tensor that was added to
    assert [float(g[0]) for g in parts] == [6.0, 8.0]  # and what reads it


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).cuda()
    plain = db.Penalised(net, db.LossGradient("mse"))
    graphed = db.Penalised(net, db.LossGradient("mse"), cuda_graph=True)

    def run(model: db.Penalised, sets: list) -> list[torch.Tensor]:
        for p in net.parameters():
            p.grad = None
        for x, y in sets:
            model.accumulate(x, y)
        return [p.grad for p in net.parameters() if p.grad is not None]

    sets = [(torch.randn(4, 6).cuda(), torch.randn(4, 5).cuda()) for _ in range(3)]
    expected = [[g.clone() for g in run(plain, sets[:n])] for n in (1, 2, 3)]
    found = [run(graphed, sets[:n]) for n in (1, 2, 3)]
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
