"""Operators that PyTorch differentiates once: no error in the midst of backward(), but the patch's
second derivative, on autograd, and a word about it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import doubleback as db


class Bags(nn.Module):
    """Weights of a bag's entries that depend on the input."""

    def __init__(self):
        super().__init__()
        self.scale, self.table = nn.Linear(6, 6), nn.Parameter(torch.randn(9, 3))

    def forward(self, x):
        weights = torch.tanh(self.scale(x))
        indices = torch.arange(24).reshape(4, 6) % 9
        return F.embedding_bag(indices, self.table, mode="sum", per_sample_weights=weights)


class Segments(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(6, 3)

    def forward(self, x):
        lengths = torch.tensor([1, 3])
        return torch.segment_reduce(torch.tanh(self.dense(x)), "mean", lengths=lengths, axis=0)


class Spoken(nn.Module):
    """The loss of a speech recogniser as the network's output."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(6, 5)

    def forward(self, x):
        scores = self.dense(x.reshape(4, 6, 1) * torch.ones(6)).transpose(0, 1).log_softmax(2)
        labels = torch.tensor([[1, 2], [3, 3], [4, 1], [2, 2]])
        return F.ctc_loss(scores, labels, [6] * 4, [2] * 4, reduction="none").unsqueeze(1)


@pytest.mark.parametrize("kind", [Bags, Segments, Spoken])
def test_its_second_derivative_is_the_patch_s(kind):
    torch.manual_seed(0)
    net, x = kind().double(), torch.randn(4, 6, dtype=torch.float64)

    def total(penalty, out):
        return penalty + out.square().sum()

    model = db.Penalised(net, db.LossGradient("mse"))
    y = torch.zeros_like(net(x))
    with pytest.warns(db.CaptureWarning, match=r"no second derivative|_ctc_loss"):
        out, penalty = model(x, y)
    total(penalty, out).backward()
    direction = [torch.randn_like(p) for p in net.parameters()]
    found = sum((p.grad * d).sum() for p, d in zip(net.parameters(), direction, strict=True))

    def value(step):
        """The same by first derivatives alone, with the parameters moved."""
        with torch.no_grad():
            for p, d in zip(net.parameters(), direction, strict=True):
                p.add_(d, alpha=step)
        at = x.clone().requires_grad_()
        out = net(at)
        (u,) = torch.autograd.grad(out.square().sum(), at)
        with torch.no_grad():
            for p, d in zip(net.parameters(), direction, strict=True):
                p.sub_(d, alpha=step)
        return total(u.square().sum(1).mean(), out).detach()

    wanted = (value(1e-5) - value(-1e-5)) / 2e-5
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)
    with pytest.raises(db.CaptureError, match=r"no second derivative|_ctc_loss"):
        db.Penalised(net, db.LossGradient("mse"), strict=True)(x, y)
