"""`db.check` compares what really runs: the model's own graphs, every way its sweeps run, and
`accumulate` by each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import doubleback as db
from doubleback.rules import find_rule, register, unregister

SCALE = {"of": 1.0}


@pytest.fixture
def scaled_erf():
    """erf's derivative times a number that its rule reads elsewhere, so that a flat graph keeps
    the number of the day it was made."""
    op = torch.ops.aten.erf.default
    right = find_rule(op)
    unregister(op)

    def tangent(call, q):
        return SCALE["of"] * right.tangent(call, q)

    register(op, replace(right, tangent=tangent))
    SCALE["of"] = 1.0
    yield
    SCALE["of"] = 1.0
    unregister(op)
    register(op, right)


class Erf(nn.Module):
    def forward(self, x):
        return torch.erf(x)


def model_of(dtype=torch.float64, **how):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), Erf(), nn.BatchNorm1d(8), nn.Linear(8, 3)).to(dtype)
    return db.Penalised(net, db.LossGradient("cross_entropy"), **how)


def batch(dtype=torch.float64):
    return torch.randn(4, 6, dtype=dtype), torch.tensor([0, 1, 2, 0])


def step(model, x, y):
    out, penalty = model(x, y)
    (F.cross_entropy(out, y) + penalty).backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_model_that_was_called_runs_itself(scaled_erf, dtype):
    """The graphs it holds have the wrong derivative; one made now has the right one."""
    model, (x, y) = model_of(dtype, flatten_after=0), batch(dtype)
    SCALE["of"] = 1.5
    step(model, x, y)
    SCALE["of"] = 1.0
    with pytest.raises(db.CheckError, match="live: ") as caught:
        db.check(model, x, y)
    report: Any = caught.value.report
    wrong = [r.name for r in report.rows if r.error > max(1e-10, r.rounding)]
    assert wrong and all(name.startswith("live: ∇") for name in wrong)
    assert db.check(model_of(dtype), x, y).worst < 1e-10  # nothing is held yet


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_check_changes_nothing(dtype):
    model, (x, y) = model_of(dtype, flatten_after=1), batch(dtype)
    for _ in range(3):
        step(model, x, y)
    grads = [p.grad for p in model.parameters()]
    numbers = {n: t.clone() for n, t in model.state_dict().items()}
    drawn = torch.get_rng_state()
    report = db.check(model, x, y)
    assert report.worst < 1e-10 and any(r.name.startswith("live: ") for r in report.rows)
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert all(torch.equal(numbers[n], t) for n, t in model.state_dict().items())
    assert torch.equal(drawn, torch.get_rng_state())


def test_a_watched_gradient_is_left_alone():
    model, (x, y) = model_of(), batch()
    seen = []
    next(model.parameters()).register_post_accumulate_grad_hook(lambda p: seen.append(p))
    step(model, x, y)
    assert len(seen) == 1
    report = db.check(model, x, y)
    assert len(seen) == 1 and not any(r.name.startswith("live: ") for r in report.rows)


def test_accumulate_is_checked_by_every_way():
    names = {row.name for row in db.check(model_of(), *batch()).rows}
    for way in ("", "flat: "):
        assert {f"{way}accumulate: ∇ 0.weight", f"{way}∇ 0.weight", f"{way}penalty"} <= names
