"""Gradients that were lost without a word: parameters that no module lists, weights that are
unfrozen later, the weight of the penalty itself, an input that the network cuts off."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import doubleback as db
from support.stock import assert_close, numbers, pair, same_training, stock_penalty

# ---------------------------------------------------------------------- parameters in plain lists


class PlainList(nn.Module):
    """Layers in a list and a dictionary that are no `nn.ModuleList`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(5, 6).double(), nn.Linear(6, 6).double()]
        self.named = {"last": nn.Linear(6, 1).double()}
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.named["last"](x) + self.shift

    def hidden(self):
        return [t for layer in (*self.layers, self.named["last"]) for t in layer.parameters()]


@pytest.mark.parametrize("how", ["backward", "accumulate"])
def test_parameters_of_modules_in_plain_lists(how):
    torch.manual_seed(0)
    model, twin = pair(PlainList())

    def change(net, i):
        for t in net.hidden():
            t.grad = None

    def effects(net):
        return torch.cat([torch.zeros(1) if t.grad is None else t.grad.flatten()
                          for t in net.hidden()])  # fmt: skip

    same_training(model, twin, change=change, effects=effects, how=how)


class Free(nn.Module):
    """A parameter that is a global, or held by an object that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 1)
        self.holder = {"scale": torch.full((6,), 0.7, dtype=torch.float64, requires_grad=True)}

    def forward(self, x):
        return self.last(torch.tanh(self.first(x) * self.holder["scale"]))


@pytest.mark.parametrize("how", ["backward", "accumulate"])
def test_a_tensor_in_a_dictionary(how):
    torch.manual_seed(0)
    model, twin = pair(Free())

    def change(net, i):
        net.holder["scale"].grad = None

    same_training(model, twin, change=change, effects=lambda net: net.holder["scale"].grad, how=how)


# ------------------------------------------------------------------------- frozen and unfrozen


class Round(torch.autograd.Function):
    """Straight through: rounded numbers, the gradient of the unrounded."""

    @staticmethod
    def forward(ctx, x):
        return x.mul(8).round().div(8)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Quantised(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 1)
        self.how = how

    def forward(self, x):
        weight = self.first.weight
        if self.how == "function":
            weight = Round.apply(weight)
        elif self.how == "detach":
            weight = weight + (weight.mul(8).round().div(8) - weight).detach()
        elif self.how == "clone":
            weight = weight.clone()
        return self.last(torch.tanh(F.linear(x, weight, self.first.bias)))


@pytest.mark.parametrize("how", ["backward", "accumulate"])
@pytest.mark.parametrize("kind", ["function", "detach", "clone"])
@pytest.mark.parametrize("frozen_first", [True, False])
def test_weights_frozen_and_unfrozen(kind, frozen_first, how):
    torch.manual_seed(0)
    model, twin = pair(Quantised(kind))

    def change(net, i):
        net.first.weight.requires_grad_((i >= 3) is frozen_first)

    same_training(model, twin, change=change, how=how)


# ------------------------------------------------------------------------------ hypergradients


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))


def _step(net, out, penalty, weight, rate):
    """Parameters after one step of gradient descent that can be differentiated in `weight`."""
    loss = out.square().mean() + weight * penalty
    grads = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
    names = [name for name, _ in net.named_parameters()]
    return {name: t - rate * g for name, t, g in zip(names, net.parameters(), grads, strict=True)}


def _hypergradient(net, weight, x, other, penalised):
    """d(validation loss after one step)/d weight."""
    if penalised is None:
        out, values = stock_penalty(net, (x,))
        after = _step(net, out, values.mean(), weight, 0.3)
    else:
        out, penalty = penalised(x)
        after = _step(net, out, penalty, weight, 0.3)
    value = torch.func.functional_call(net, after, (other,)).square().mean()
    return torch.autograd.grad(value, weight)[0]


def test_the_hypergradient_of_the_penaltys_weight():
    """Gradients are linear in what arrives at the penalty, so its weight has a gradient; where the
    step's own weights have one too, that is a third derivative, and raises."""
    model, twin = pair(_net())
    for i in range(4):
        x, other = numbers(i, 4, 5), numbers(10 + i, 4, 5)
        weight = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
        wanted = _hypergradient(twin, weight, x, other, None)
        found = _hypergradient(model.net, weight, x, other, model)
        assert_close(found, wanted, f"call {i}")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", ["output", "jacobian", "spectral", "loss"])
def test_the_gradient_of_incoming_gradients(name, reduction):
    """g = ∇(⟨a, out⟩ + ⟨b, penalty⟩) is linear in b: d⟨c, g⟩/db; d⟨c, g⟩/da is refused."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    extra = (numbers(7, 4, 3),) if name == "loss" else ()
    made = {
        "output": lambda: db.OutputGradient(1, reduction=reduction),
        "jacobian": lambda: db.Jacobian(reduction=reduction),
        "spectral": lambda: db.SpectralNorm(iterations=0, reduction=reduction),
        "loss": lambda: db.LossGradient("mse", reduction=reduction),
    }[name]()
    model, _ = pair(net, made)
    parameters = list(model.net.parameters())
    if name == "spectral":  # from now on with the direction that this call drew
        model(numbers(0, 4, 5))
    for i in range(4):
        x = numbers(i, 4, 5).requires_grad_()
        out, penalty = model(x, *extra)
        a = torch.randn_like(out).requires_grad_()
        b = torch.randn_like(penalty).requires_grad_()
        g = torch.autograd.grad([out, penalty], [*parameters, x], [a, b], create_graph=True)
        c = [numbers(20 + k, *t.shape) for k, t in enumerate(g)]
        (found,) = torch.autograd.grad(g, b, c, retain_graph=True)
        # by linearity: the derivative in one entry is the gradient seeded with that entry alone
        for k in range(b.numel()):
            seed = torch.zeros_like(b)
            seed.view(-1)[k] = 1.0
            _, penalty = model(x, *extra)
            parts = torch.autograd.grad(
                penalty, [*parameters, x], seed, allow_unused=True, materialize_grads=True
            )
            wanted = sum((u * v).sum() for u, v in zip(parts, c, strict=True))
            assert_close(found.reshape(-1)[k], wanted, f"call {i}, entry {k}")
        with pytest.raises(db.ThirdDerivativeError):
            torch.autograd.grad(g, a, c)


def test_third_derivatives_still_raise():
    model, _ = pair(_net())
    for i in range(4):
        out, penalty = model(numbers(i, 4, 5))
        g = torch.autograd.grad(penalty + out.sum(), model.net[0].weight, create_graph=True)[0]
        with pytest.raises(db.ThirdDerivativeError):
            torch.autograd.grad(g.square().sum(), model.net[0].weight)
        with pytest.raises(db.ThirdDerivativeError):
            g.square().sum().backward()


def test_a_weight_that_needs_a_third_derivative_raises():
    """b is a function of the network's own weights: its gradient would need ∂g/∂θ."""
    model, _ = pair(_net())
    for i in range(4):
        _, penalty = model(numbers(i, 4, 5))
        scale = model.net[0].weight.norm()
        g = torch.autograd.grad(scale * penalty, model.net[0].weight, create_graph=True)[0]
        with pytest.raises(db.ThirdDerivativeError):
            g.square().sum().backward()


# ------------------------------------------------------------------------------- inputs cut off


class CutOff(nn.Module):
    """As in SIREN's code: the coordinates are cloned, detached and asked for gradients inside."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 1)
        self.how = how

    def forward(self, x):
        if self.how == "clone":
            x = x.clone().detach().requires_grad_(True)
        elif self.how == "round":
            x = x.round()
        elif self.how == "no_grad":
            with torch.no_grad():
                x = 2 * x
        elif self.how == "unused":
            x = torch.ones_like(x)
        return self.last(torch.tanh(self.first(x)))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("how", ["clone", "no_grad", "unused"])
def test_an_input_that_is_cut_off(how, strict):
    """Stock raises too: 'one of the differentiated tensors appears to not have been used'."""
    model, _ = pair(CutOff(how), strict=strict)
    for i in range(4):
        x = numbers(i, 4, 5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", db.CaptureWarning)
            with pytest.raises(db.DoublebackError, match="depend"):
                model(x)
            with pytest.raises(db.DoublebackError, match="depend"):
                model.accumulate(x, numbers(9, 4, 1), loss="mse")


def test_an_input_that_may_be_unused():
    """`allow_unused=True` says that a derivative of zero is meant."""
    model, _ = pair(CutOff("unused"), allow_unused=True)
    for i in range(4):
        _, penalty = model(numbers(i, 4, 5))
        assert penalty.item() == 0.0
