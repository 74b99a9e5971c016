"""Functions that PyTorch has in Python and TorchDynamo does not look into: what they cut off or
write behind autograd's back within, and the dropout inside of recurrent layers."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import func, nn
from torch.overrides import TorchFunctionMode

import doubleback as db
from support.stock import TOLERANCE, numbers, pair, same_training


class Between(nn.Module):
    """A function between two layers."""

    def __init__(self, function) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 1)
        self.function = function

    def forward(self, x):
        return self.last(self.function(self.first(x)))


def straight_through(h):
    """One-hot numbers with the derivative of a softmax, which is detached within."""
    return F.gumbel_softmax(h, tau=0.7, hard=True)


def drawn(h):
    return F.gumbel_softmax(h, tau=0.7)


def clamped_within(h):
    """Variances, most of them raised to eps in place under no_grad."""
    loss = F.gaussian_nll_loss(h, torch.zeros_like(h), h.square(), eps=0.5, reduction="none")
    return h * loss


def normalised(h):
    return F.normalize(h, dim=1)


@pytest.mark.parametrize("how", ["backward", "accumulate"])
@pytest.mark.parametrize("function", [straight_through, drawn, clamped_within, normalised])
def test_what_a_function_in_python_does_within(function, how):
    torch.manual_seed(3)
    model, twin = pair(Between(function), sweeps=True)
    same_training(model, twin, how=how)


def test_a_straight_through_function_is_captured_and_agrees():
    torch.manual_seed(3)
    net = Between(straight_through).double()
    model = db.Penalised(net, db.OutputGradient(), strict=True)
    x = numbers(0, 4, 5)
    assert model(x)[1] > 1e-6
    assert db.check(model, x).worst <= TOLERANCE


LAYERS = {
    "GRU": lambda: nn.GRU(5, 4, 3, batch_first=True, dropout=0.5),
    "LSTM": lambda: nn.LSTM(5, 4, 2, batch_first=True, dropout=0.5, bidirectional=True),
    "RNN": lambda: nn.RNN(5, 4, 3, batch_first=True, dropout=0.5, nonlinearity="relu"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_dropout_between_recurrent_layers_of_a_compiled_loss(name):
    """PyTorch's own trace of these layers leaves it out."""
    torch.manual_seed(0)
    net = LAYERS[name]().double()

    def loss(x):
        x = x.detach().requires_grad_()
        out = net(x)[0]
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.square().mean() + slope.square().sum()

    step = db.compile(loss, compiler="eager", strict=True)
    for i in range(3):
        x = numbers(i, 3, 4, 5)
        found = []
        for function in (step, loss):
            torch.manual_seed(i)
            net.zero_grad()
            function(x).backward()
            found.append([p.grad.clone() for p in net.parameters()])
        torch.testing.assert_close(*found, rtol=TOLERANCE, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
@torch._dynamo.config.patch(allow_rnn=True)
def test_dropout_between_recurrent_layers_in_the_backend(name):
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = LAYERS[name]().double()
    fast = torch.compile(net, backend="doubleback", options={"compiler": "eager"})
    x, direction = numbers(0, 3, 4, 5).requires_grad_(), numbers(1, 3, 4, 5)

    def loss(x):  # the backend draws beforehand, in an order of its own
        torch.manual_seed(7)
        out = fast(x)[0]
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.square().mean() + slope.square().sum()

    for _ in range(3):
        (found,) = torch.autograd.grad(loss(x), x)
        ahead, behind = (loss((x + t * direction).detach().requires_grad_()) for t in (1e-5, -1e-5))
        wanted = (ahead - behind) / 2e-5
        torch.testing.assert_close((found * direction).sum(), wanted.detach(), rtol=1e-6, atol=1e-8)
        assert not torch.equal(fast(x)[0], fast(x)[0])  # it does drop out


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("around", [nullcontext, db.patched])
def test_compiled_code_that_differentiates_its_own_regions(around):
    """The engine calls the backend from inside of such code, where TorchDynamo reads everything,
    the patch's own Python too."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    net.double()

    def loss(x, p):
        x = x.detach().requires_grad_()
        (score,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        (slope,) = torch.autograd.grad((score * p).sum(), x, create_graph=True)
        return ((slope * p).sum(1) + 0.5 * score.square().sum(1)).mean()

    fast = torch.compile(loss, backend="doubleback", options={"compiler": "eager"})
    for i in range(4):
        args = numbers(i, 6, 3), numbers(i + 10, 6, 3)
        found = []
        for function in (fast, loss):
            net.zero_grad()
            with around():
                value = function(*args)
                value.backward()
            trained = [t.grad for t in net.parameters() if t.grad is not None]
            found.append([value.detach(), *trained])
        torch.testing.assert_close(*found, rtol=TOLERANCE, atol=1e-12)


class Louder(TorchFunctionMode):
    """Changes what a function returns, as simulations of hardware do."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return 1.5 * result if func in (F.linear, torch.tanh) else result


@pytest.mark.parametrize("how", ["sweeps", "gradient", "step"])
def test_a_mode_of_the_caller_s(how):
    """Dynamo writes out what it does, and the trace would meet it again."""
    net, x = Between(torch.tanh).double(), numbers(0, 4, 5)
    call = {
        "sweeps": db.Penalised(net, db.OutputGradient(), sweeps=True),
        "gradient": db.WithGradient(net, sweeps=True),
        "step": db.compile(lambda x: net(x).sum(), compiler="eager"),
    }[how]
    for active in (False, True, True, False):
        with warnings.catch_warnings(), Louder() if active else nullcontext():
            warnings.simplefilter("ignore", db.CaptureWarning)
            wanted = net(x)
            found = call(x)
        if how == "step":
            wanted = wanted.sum()
        else:
            found = found[0]
        torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=0.0)


def test_a_mode_inside_of_forward_is_captured():
    class Inside(Between):
        def forward(self, x):
            with Louder():
                return super().forward(x)

    model, twin = pair(Inside(torch.tanh), sweeps=True, strict=True)
    same_training(model, twin)


class Transformed(nn.Module):
    """A transform of torch.func beside a layer, each of which depends on x."""

    def __init__(self, transform) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(5, 3), nn.Linear(5, 3)
        self.transform = transform

    def forward(self, x):
        return (self.last(x) + self.transform(self, x)).sum(1, keepdim=True)

    def one(self, row):
        return torch.tanh(self.inner(row))


TRANSFORMS = {
    "vmap": lambda net, x: func.vmap(net.one)(x),
    "vmap over a parameter": lambda net, x: func.vmap(lambda w: x[:, 0] * w)(net.inner.bias).t(),
    "grad": lambda net, x: func.grad(lambda x: net.one(x).square().sum())(x)[:, :3],
    "vjp": lambda net, x: func.vjp(net.one, x)[1](torch.ones(len(x), 3).to(x))[0][:, :3],
    "jacrev": lambda net, x: func.vmap(func.jacrev(net.one))(x)[:, :, 0],
    "jvp": lambda net, x: func.jvp(net.one, (x,), (torch.ones_like(x),))[1],
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_inside_of_forward(transform):
    torch.manual_seed(3)
    model, twin = pair(Transformed(TRANSFORMS[transform]), sweeps=True)
    same_training(model, twin, steps=3)
    with pytest.raises(db.CaptureError):
        db.Penalised(model.net, db.OutputGradient(), strict=True)(numbers(0, 4, 5))
