"""Several penalised inputs: rows that do not belong together, and arguments made of one another."""

from __future__ import annotations

import warnings
from functools import cache

import pytest
import torch
from torch import nn

import doubleback as db
from support.stock import (
    WEIGHT,
    assert_close,
    assert_same_state,
    numbers,
    pair,
    same_training,
    squared,
)


class Strained(nn.Module):
    """Positions (atoms, 3) and a strain (structures, 3, 3) → an energy per structure or atom."""

    def __init__(self, per_atom: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 1)
        self.per_atom = per_atom

    def forward(self, positions, strain, owner):
        moved = positions + torch.einsum("ai,aij->aj", positions, strain[owner])
        energy = self.last(torch.tanh(self.first(moved)))
        if self.per_atom:
            return energy
        return energy.new_zeros(strain.shape[0], 1).index_add(0, owner, energy)


PENALTIES = {
    "output": (db.OutputGradient, ()),
    "norm": (lambda: db.OutputGradient(norm=db.Norm()), ()),
    "deviation": (lambda: db.OutputGradient(norm=db.Deviation(1.0)), ()),
    "custom": (lambda: db.Custom(torch.ones_like, lambda xi: xi[0].square().sum(1)), ()),
    "jacobian": (db.Jacobian, ()),
    "spectral": (db.SpectralNorm, ()),
    "match": (db.GradientMatch, ("like x",)),
    "loss": (lambda: db.LossGradient("mse"), ("like out",)),
    "bilinear": (db.BilinearForm, ("like out", "like x")),
}


@cache
def strained(captured: bool) -> nn.Module:
    """One for all penalties, which share its capture."""
    torch.manual_seed(0)
    net = Strained().double()
    return net if captured else Uncaptured(net)


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("structures", [1, 2])
@pytest.mark.parametrize("name", PENALTIES)
def test_other_leading_sizes_are_refused(name, structures, captured):
    make, extras = PENALTIES[name]
    model = db.Penalised(strained(captured), make(), wrt=(0, 1))
    x, strain = numbers(0, 5, 3), 0.1 * numbers(1, structures, 3, 3)
    owner = torch.arange(5) % structures
    given = {"like x": (x, strain), "like out": numbers(3, structures, 1)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", db.CaptureWarning)
        with pytest.raises(db.InputError, match=r"\(5, 3\).*WithGradient"):
            model(x, strain, owner, *(given[kind] for kind in extras))


class Uncaptured(nn.Module):
    """Runs on autograd."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *args):
        if args[0].sum().item() > 1e9:
            raise AssertionError
        return self.net(*args)


@pytest.mark.parametrize("how", ["backward", "accumulate"])
def test_one_strain_per_atom_is_right(how):
    """The same leading size, as a control."""
    torch.manual_seed(0)
    model, twin = pair(Strained(per_atom=True), wrt=(0, 1))
    same_training(
        model, twin, how=how, wrt=(0, 1), p=squared,
        batch=lambda i: (numbers(i, 4, 3), 0.1 * numbers(9 + i, 4, 3, 3), torch.arange(4)),
    )  # fmt: skip


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(5, 6)
        self.last = nn.Linear(6, 1)

    def forward(self, x, s):
        return self.last(torch.tanh(self.first(x)) * torch.sigmoid(self.second(s)))


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("leaf", [True, False])
def test_a_partial_derivative_whatever_the_other_argument_is_made_of(captured, leaf):
    """net(x, sin(x)) with wrt=0: ∂net/∂x at fixed second argument, captured or not; the gradient of
    x itself goes through both arguments."""
    torch.manual_seed(0)
    net, twin = Two().double(), Two().double()
    twin.load_state_dict(net.state_dict())
    model = db.Penalised(net if captured else Uncaptured(net), db.OutputGradient())
    for i in range(5):
        start = numbers(i, 4, 5).requires_grad_()
        x = start if leaf else 2 * start
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", db.CaptureWarning)
            out, penalty = model(x, torch.sin(x))
        model.zero_grad(), twin.zero_grad()
        (out.sum() + WEIGHT * penalty).backward()
        again = start.detach().clone().requires_grad_()
        x = again if leaf else 2 * again
        place = x.view_as(x)
        wanted = twin(place, torch.sin(x))
        (xi,) = torch.autograd.grad(wanted.sum(), place, create_graph=True)
        values = xi.square().sum(1).mean()
        (wanted.sum() + WEIGHT * values).backward()
        assert_close(penalty, values, f"step {i}, penalty")
        assert_close(start.grad, again.grad, f"step {i}, gradient of x")
        assert_same_state(net, twin, f"step {i}")
