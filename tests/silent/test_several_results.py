"""Operators of which only some results are used, and writes to places given by strides."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import doubleback as db
from doubleback._torch import before
from support.zoo import double


class Scaled(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn
        self.weight = nn.Parameter(torch.randn(4, 6))

    def forward(self, x):
        return self.fn(x * self.weight).flatten(1).sin()


def square(x):
    return x @ x.mT / 6 + 2 * torch.eye(4)


ONE_OF_SEVERAL = {
    "singular values": lambda x: torch.linalg.svdvals(x)[..., None] * x,
    "left singular vectors": lambda x: torch.linalg.svd(square(x))[0].square() @ x,
    "eigenvalues": lambda x: torch.linalg.eigh(square(x))[0][..., None] * x,
    "q": lambda x: torch.linalg.qr(square(x))[0] @ x,
    "r": lambda x: torch.linalg.qr(square(x))[1] @ x,
    "variance beside the mean": lambda x: x * torch.var_mean(x.sin(), 1, keepdim=True)[0],
}
if not before(2, 13):  # PyTorch has no derivative of it before
    ONE_OF_SEVERAL["the largest"] = lambda x: x.cos() * x.aminmax(dim=1, keepdim=True)[1]


@double()
@pytest.mark.parametrize("name", ONE_OF_SEVERAL)
def test_results_that_nobody_uses_have_no_curvature(name):
    torch.manual_seed(0)
    model = db.Penalised(Scaled(ONE_OF_SEVERAL[name]), db.OutputGradient(0), strict=True)
    assert db.check(model, torch.randn(3, 4, 6)).worst < 1e-10


@double()
def test_a_diagonal_that_is_filled():
    """Which is `as_strided_scatter`, whose derivative is wrong in PyTorch."""
    torch.manual_seed(0)
    net = Scaled(lambda x: x.flatten(1).clone().fill_diagonal_(0.3) + 0.2 * x.flatten(1))
    model = db.Penalised(net, db.OutputGradient(0), strict=True)
    assert db.check(model, torch.randn(3, 4, 6)).worst < 1e-10


@double()
@pytest.mark.parametrize("contiguous", [True, False])
def test_entries_by_strides_wherever_they_lie(contiguous):
    """What lies otherwise runs on autograd: strides speak of memory, which sweeps lay out anew."""
    torch.manual_seed(0)

    def entries(x):
        turned = x.mT.contiguous() if contiguous else x.mT
        return turned.as_strided((len(x), 3, 2), (24, 5, 2), 1) * x[:, 1:, :2]

    net, x = Scaled(entries), torch.randn(3, 4, 6)
    if contiguous:
        model = db.Penalised(net, db.OutputGradient(0), strict=True)
        assert db.check(model, x).worst < 1e-10
    else:
        with pytest.raises(db.CaptureError, match="call contiguous"):
            db.Penalised(net, db.OutputGradient(0), strict=True)(x)
