"""Sizes that numbers decide, where they are one or none: symbols are taken to be more than that."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import doubleback as db
from support.stock import assert_close, numbers, pair, same_training, stock_penalty


class Decided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 1)
        self.register_buffer("lengths", torch.tensor([1, 3]))


class Split(Decided):
    """Segments of lengths that a buffer holds."""

    def forward(self, x):
        parts = self.last(self.first(x).tanh()).split(self.lengths.tolist())
        return torch.cat([part * part.sum() for part in parts])


@pytest.mark.parametrize("how", ["backward", "accumulate"])
@pytest.mark.parametrize("flatten_after", [0, 2])
def test_segments_of_one_row(how, flatten_after):
    lengths = ([1, 3], [2, 2], [1, 3], [3, 1], [2, 2], [1, 3])
    model, twin = pair(Split(), strict=True, flatten_after=flatten_after)
    same_training(
        model, twin, how=how, change=lambda net, i: net.lengths.copy_(torch.tensor(lengths[i]))
    )


class Squeezed(Decided):
    """One entry fewer axes where a mask chooses one row only."""

    def forward(self, x, mask):
        h = self.last(self.first(x).tanh())
        rows = h[mask.nonzero().squeeze()]
        return h * rows.sum() * rows.dim()


class SqueezedAxis(Decided):
    def forward(self, x, mask):
        h = self.last(self.first(x).tanh())
        rows = h[mask].squeeze(0)
        return h * rows.sum() * rows.dim()


CHOSEN = (3, 2, 1, 4, 1, 2)


def masked(i):
    return numbers(i, 4, 5), torch.arange(4) < CHOSEN[i]


@pytest.mark.parametrize("how", ["backward", "accumulate"])
@pytest.mark.parametrize("kind", [Squeezed, SqueezedAxis])
def test_an_axis_that_is_squeezed_or_not(kind, how):
    model, twin = pair(kind())
    same_training(model, twin, how=how, batch=masked)


@pytest.mark.parametrize("kind", [Squeezed, SqueezedAxis])
def test_an_axis_that_is_squeezed_or_not_in_a_compiled_loss(kind):
    net = kind().double()

    def loss(x, mask):
        out, values = stock_penalty(net, (x, mask))
        return out.sum() + values.mean()

    step = db.compile(loss, compiler="eager")
    for i in range(len(CHOSEN)):
        found = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", db.CaptureWarning)
            for way in (step, loss):
                net.zero_grad()
                value = way(*masked(i))
                value.backward()
                found.append((value, net.first.weight.grad))
        for own, wanted in zip(*found, strict=True):
            assert_close(own, wanted, f"step {i}")
