"""GELU and SiLU: stock's numbers at every order, in fewer kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import doubleback as db
from support.derivatives import error, samples, second

FUNCTIONS = {
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


@pytest.mark.parametrize("key", FUNCTIONS)
def test_every_order_is_stock_s(key):
    x = torch.linspace(-6, 6, 41, dtype=torch.float64).requires_grad_()
    expected = second(lambda: FUNCTIONS[key](x).sin(), [x], order=4)
    with db.patched():
        assert error(second(lambda: FUNCTIONS[key](x).sin(), [x], order=4), expected) < 1e-12


@pytest.mark.parametrize("name", ["nn.functional.gelu", "nn.functional.silu"])
def test_samples_of_the_operator_database(name):
    for function, inputs in samples(name):
        expected = second(function, inputs)
        with db.patched():
            assert error(second(function, inputs), expected) < 1e-13


@pytest.mark.parametrize("key", FUNCTIONS)
def test_forward_over_reverse_and_vmap(key):
    x = torch.linspace(-3, 3, 7, dtype=torch.float64)

    def loss(x):
        return FUNCTIONS[key](x).pow(3).sum()

    def results():
        over = torch.func.hessian(loss)(x)
        each = torch.func.vmap(torch.func.grad(lambda t: torch.func.grad(loss)(t)))(x)
        return [[over, each]]

    expected = results()
    with db.patched():
        assert error(results(), expected) < 1e-13


class Count(TorchDispatchMode):
    operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("key", FUNCTIONS)
def test_first_order_is_bit_identical_and_one_operator(key):
    x = torch.randn(50, requires_grad=True)

    def first(create_graph):
        y = FUNCTIONS[key](x)
        with Count() as count:
            (g,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=create_graph)
        return g.detach(), count.operators

    expected, _ = first(False)
    with db.patched():
        found, plain = first(False)
        _, graphed = first(True)
    assert torch.equal(found, expected) and graphed == plain


@pytest.mark.parametrize("key", FUNCTIONS)
def test_bfloat16_is_computed_with_in_float32(key):
    rounded = torch.randn(200).bfloat16()

    def penalty(x):
        x = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(FUNCTIONS[key](x).sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), x)[0]

    with db.patched():
        found, exact = penalty(rounded).double(), penalty(rounded.double())
    assert (found - exact).norm() / exact.norm() < 8 * torch.finfo(torch.bfloat16).eps
