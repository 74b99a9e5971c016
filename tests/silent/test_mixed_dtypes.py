"""Values of two dtypes in one network, as autocast makes them: what a sweep carries has the dtype
of the value that it belongs to."""

import pytest
import torch
from torch import nn

import doubleback as db
from support.stock import numbers


class Mixed(nn.Module):
    """bfloat16 from a linear layer meets a float32 constant, and goes into a product."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 1)
        self.register_buffer("offset", torch.linspace(-1, 1, 6))

    def forward(self, x):
        a = self.layer(x) + self.offset
        return self.head(a * torch.mv(a, a[0])[:, None])


def gradients(net):
    return [p.grad.clone() for p in net.parameters()]


@pytest.mark.parametrize("flatten_after", [None, 0])
def test_a_bfloat16_tangent_meets_float32(flatten_after):
    torch.manual_seed(0)
    net, x = Mixed(), numbers(0, 3, 6).float()
    model = db.WithGradient(net, strict=True, flatten_after=flatten_after)
    with torch.autocast("cpu", torch.bfloat16):
        out, gradient = model(x)
    (out.float().sum() + gradient.square().sum()).backward()
    ours = gradients(net)
    net.zero_grad()
    x = x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = net(x)
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (out.float().sum() + g.square().sum()).backward()
    for a, b in zip(ours, gradients(net), strict=True):
        assert torch.allclose(a, b, rtol=0.05, atol=0.02 * float(b.abs().max()))


MEETINGS = {
    "maximum": torch.maximum,
    "minimum": lambda a, b: torch.minimum(b, a),
    "quotient": lambda a, b: a / (2 + b),
    "divisor": lambda a, b: b / (3 + a),
    "product": lambda a, b: a * b,
    "choice": lambda a, b: torch.where(b > 0, a, b),
    "mixture": lambda a, b: torch.lerp(a.float(), b, 0.3),
    "angle": lambda a, b: torch.atan2(a, 2 + b),
    "subtracted": lambda a, b: torch.sub(b, a, alpha=2),
}


class Meeting(nn.Module):
    """A layer's 16 bits and the 32 of what the input itself became."""

    def __init__(self, meet):
        super().__init__()
        self.layer, self.head, self.meet = nn.Linear(6, 6), nn.Linear(6, 1), meet

    def forward(self, x):
        return self.head(self.meet(self.layer(x), x.tanh()))


@pytest.mark.parametrize("meet", MEETINGS)
def test_values_of_two_dtypes_meet(meet):
    torch.manual_seed(0)
    net, x = Meeting(MEETINGS[meet]), numbers(0, 5, 6).float().requires_grad_()
    results = []
    for _ in range(2):
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            if not results:
                out, penalty = db.Penalised(net, db.OutputGradient("sum"), strict=True)(x)
            else:
                out = net(x)
        if results:
            (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            penalty = g.square().sum(1).mean()
        grads = torch.autograd.grad(out.float().sum() + penalty, [x, *net.parameters()])
        results.append([penalty.detach(), *grads])
    for a, b in zip(*results, strict=True):
        assert a.dtype is b.dtype
        assert torch.allclose(a, b, rtol=0.05, atol=0.03 * float(b.abs().max()))


def test_a_v_of_another_dtype_is_cast_as_autograd_casts_it():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).bfloat16()
    x = numbers(0, 4, 6).bfloat16()
    model = db.Penalised(net, db.Custom(lambda out: out.float().softmax(1)), strict=True)
    out, penalty = model(x)
    penalty.backward()
    ours = gradients(net)
    net.zero_grad()
    x = x.requires_grad_()
    out = net(x)
    (g,) = torch.autograd.grad(out, x, out.float().softmax(1), create_graph=True)
    expected = g.float().square().sum(1).mean()
    expected.backward()
    assert torch.allclose(penalty, expected.to(penalty.dtype), rtol=0.03)
    for a, b in zip(ours, gradients(net), strict=True):
        assert torch.allclose(a, b, rtol=0.1, atol=0.05 * float(b.abs().max()))
