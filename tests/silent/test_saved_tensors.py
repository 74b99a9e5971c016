"""Hooks of a caller's on what autograd saves: a checkpoint's, or those that move tensors elsewhere.
They see no tensors of a trace, and a call saves the same whenever it is repeated."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import doubleback as db
from support.stock import assert_close, assert_same_state, numbers, stock_penalty


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1)).double()


@pytest.fixture
def awake():
    """Before each capture TorchDynamo asks for the states of all generators, for which CUDA is
    started where there is a GPU, whatever the tensors are on; and a checkpoint refuses to see CUDA
    started inside, as it does around a `torch.compile` of anything."""
    if torch.cuda.is_available():
        torch.cuda.init()


@pytest.mark.choice
@pytest.mark.usefixtures("awake")
@pytest.mark.parametrize("sweeps", [True, None])
@pytest.mark.parametrize("rows", [0, 1])
def test_a_call_in_a_checkpoint(sweeps, rows):
    model = db.Penalised(net(), db.OutputGradient(), sweeps=sweeps)
    twin = copy.deepcopy(model.net)

    def whole(x):
        out, penalty = model(x)
        return out.sum() + penalty.sin()

    for i in range(5):
        x = numbers(i, 4 + i * rows, 5)
        model.zero_grad()
        twin.zero_grad()
        checkpoint(whole, x.clone().requires_grad_(), use_reentrant=False).backward()
        out, values = stock_penalty(twin, (x,))
        (out.sum() + values.mean().sin()).backward()
        assert_same_state(model.net, twin, f"step {i}")


@pytest.mark.parametrize("what", ["sweeps", "compiled loss"])
def test_hooks_see_no_tensors_of_a_trace(what):
    own = net()

    def loss(x):
        out, values = stock_penalty(own, (x,))
        return out.sum() + values.mean()

    model = db.Penalised(own, db.OutputGradient())
    step = loss if what == "sweeps" else db.compile(loss, compiler="eager")
    seen: set[type] = set()
    for i in range(4):  # captured, then flattened
        x = numbers(i, 4, 5)
        with saved_tensors_hooks(lambda t: (seen.add(type(t)), t)[1], lambda t: t):
            if what == "sweeps":
                out, penalty = model(x)
                found = out.sum() + penalty
            else:
                found = step(x)
        assert_close(found, loss(x), f"step {i}")
    assert seen <= {torch.Tensor, nn.Parameter}, seen
