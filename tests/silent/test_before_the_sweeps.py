"""What does not depend on the penalised input runs before the sweeps, on autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import doubleback as db
from support.zoo import double


class Beside(nn.Module):
    """f of another input beside a network of x."""

    def __init__(self, fn):
        super().__init__()
        self.fn, self.layer, self.other = fn, nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x, z):
        return torch.sin(self.layer(x) * self.fn(self.other(z)))


def written(z):
    y = z.clone().addcmul_(z, z, value=0.3)
    y[:, 1:3] = z[:, :2] * 2
    return y


def shuffled(z):
    """PyTorch's kernel keeps the memory format, and its stand-in says that it does not."""
    images = z[:, :4, None, None] * torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    images = images.contiguous(memory_format=torch.channels_last)
    return F.channel_shuffle(images, 2).flatten(1)[:, 3:8]


BEFORE = {
    "a view of what is laid out otherwise than traced": lambda: shuffled,
    "batch norm": lambda: nn.BatchNorm1d(5),
    "batch norm in eval": lambda: nn.BatchNorm1d(5).eval(),
    "writes": lambda: written,
}


@double()
@pytest.mark.parametrize("name", BEFORE)
def test_it_is_trained_alike(name):
    torch.manual_seed(0)
    model = db.Penalised(Beside(BEFORE[name]()), db.LossGradient("mse"), strict=True)
    x, z, y = torch.randn(4, 6), torch.randn(4, 6, requires_grad=True), torch.randn(4, 5)
    assert db.check(model, x, z, y).worst < 1e-10
    buffers = [b.clone() for b in model.buffers()]
    model(x, z, y)[1].backward()
    once = [b.clone() for b in model.buffers()]
    for b, old in zip(model.buffers(), buffers, strict=True):
        b.copy_(old)
    model.accumulate(x, z, y)
    assert all(torch.equal(a, b) for a, b in zip(once, model.buffers(), strict=True))
