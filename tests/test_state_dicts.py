"""`load_state_dict` of a `Penalised` takes its own keys and those of the plain network."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import doubleback as db


class Inner(nn.Module):
    """A network whose own child is called `net`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, x):
        return self.net(x)


class Outer(nn.Module):
    """Holds a penalised model."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.critic = db.Penalised(net, db.OutputGradient())
        self.head = nn.Linear(1, 1)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def same(one: nn.Module, other: nn.Module) -> None:
    left, right = one.state_dict(), other.state_dict()
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


@pytest.mark.parametrize("make", [plain, Inner])
@pytest.mark.parametrize("wrapped", [True, False])
def test_either_kind_of_keys(make, wrapped):
    net = make()
    model = db.Penalised(make(), db.OutputGradient())
    state = (db.Penalised(net, db.OutputGradient()) if wrapped else net).state_dict()
    before = list(state)
    assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
    assert list(state) == before  # the caller's dictionary is not touched
    same(model.net, net)
    net.load_state_dict(model.net.state_dict())  # and back


@pytest.mark.parametrize("make", [plain, Inner])
@pytest.mark.parametrize("wrapped", [True, False])
def test_inside_another_module(make, wrapped):
    net, outer = make(), Outer(make())
    state = {f"head.{k}": v for k, v in nn.Linear(1, 1).state_dict().items()}
    middle = "critic.net." if wrapped else "critic."
    state |= {middle + k: v for k, v in net.state_dict().items()}
    outer.load_state_dict(state)
    same(outer.critic.net, net)


def test_what_is_missing_or_unknown_is_still_said():
    model = db.Penalised(plain(), db.OutputGradient())
    state = plain().state_dict()
    del state["0.bias"]
    with pytest.raises(RuntimeError, match=r"Missing key.*net\.0\.bias"):
        model.load_state_dict(state)
    state = {**plain().state_dict(), "9.weight": torch.zeros(1)}
    with pytest.raises(RuntimeError, match=r"Unexpected key.*9\.weight"):
        model.load_state_dict(state)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"other": torch.zeros(1)})


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_take_both_too(way):
    model = db.Penalised(plain(), db.OutputGradient())
    model(torch.randn(4, 3))
    if way == "deepcopy":
        other = copy.deepcopy(model)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    net = plain()
    other.load_state_dict(net.state_dict())
    same(other.net, net)
