"""What a forward pass asserts of its tensors' numbers is asserted at every call.

PYTEST_DONT_REWRITE: the networks' assertions are to stay what they are.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import doubleback as db
from support.stock import assert_same_state, numbers, own_step, pair, stock_step


class Asserting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 1)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x, labels):
        self.calls += 1
        self.seen.add_(1)
        return self.last(self.hidden(x, labels).tanh())

    def hidden(self, x, labels):
        raise NotImplementedError


class OfHidden(Asserting):
    def hidden(self, x, labels):
        h = self.first(x)
        assert h.abs().max() < 100, "too large"
        return h


class OfLabels(Asserting):
    def hidden(self, x, labels):
        assert (labels < 3).all()
        return self.first(x)


class OfWeights(Asserting):
    def hidden(self, x, labels):
        assert torch.isfinite(self.first.weight).all(), "weights"
        return self.first(x)


class OfNumbers(Asserting):
    def hidden(self, x, labels):
        torch._check(bool((labels < 3).all()), lambda: "no such label")
        assert self.first.weight.sum().item() < 1e6, "weights"
        return self.first(x)


@pytest.mark.filterwarnings("ignore::doubleback.CaptureWarning")  # OfNumbers before torch 2.13
@pytest.mark.parametrize("how", ["backward", "accumulate"])
@pytest.mark.parametrize("kind", [OfHidden, OfLabels, OfWeights, OfNumbers])
def test_what_is_asserted(kind, how):
    model, twin = pair(kind())
    labels, y = torch.tensor([0, 1, 2, 1]), numbers(50, 4, 1)
    with torch.no_grad():
        weight = twin.first.weight[0, 0].item()
    for i in range(6):
        found = []
        for net in (model.net, twin):
            net.zero_grad()
            bad = i in (1, 4)
            x = numbers(i, 4, 5) * (1e6 if bad and kind is OfHidden else 1)
            given = labels + (bad and kind in (OfLabels, OfNumbers))
            with torch.no_grad():
                net.first.weight[0, 0] = torch.inf if bad and kind is OfWeights else weight
            try:
                if net is twin:
                    stock_step(net, (x, given), y)
                else:
                    own_step(model, (x, given), y, how)
                found.append("")
            except (AssertionError, RuntimeError) as error:
                found.append(f"{type(error).__name__}: {str(error).splitlines()[:1]}")
            found.append(net.calls)
        assert found[:2] == found[2:] and bool(found[0]) == bad, f"step {i}: {found}"
        assert_same_state(model.net, twin, f"step {i}")


def test_strict_says_what_was_asserted():
    model = db.WithGradient(OfHidden(), strict=True)
    labels = torch.zeros(4, dtype=torch.long)
    model(torch.randn(4, 5), labels)
    with pytest.raises(db.CaptureError, match="asserts what is not so in this call: too large"):
        model(1e6 * torch.randn(4, 5), labels)
