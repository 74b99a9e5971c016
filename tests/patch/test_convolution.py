"""Convolution's second derivative: equal to stock to rounding, and differentiable again."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradgradcheck

import doubleback as db
from doubleback.patch import faster
from support.derivatives import error, samples, second

CONVOLUTIONS = [
    f"nn.functional.conv{kind}{n}d" for kind, n in itertools.product(("", "_transpose"), (1, 2, 3))
]
SHAPES = {  # x, weight, options
    "1d": ((2, 4, 7), (3, 4, 3), dict(padding=1)),
    "2d grouped strided": ((2, 4, 7, 6), (6, 2, 3, 3), dict(groups=2, stride=2, padding=(1, 2))),
    "2d depthwise": ((2, 4, 6, 6), (4, 1, 3, 3), dict(groups=4, padding=1)),
    "2d depthwise multiplier": ((2, 3, 5, 5), (6, 1, 3, 3), dict(groups=3, padding=1, stride=2)),
    "2d dilated": ((1, 2, 9, 8), (3, 2, 3, 2), dict(dilation=(2, 3), stride=(1, 2))),
    "3d": ((1, 2, 4, 5, 4), (4, 1, 2, 3, 2), dict(groups=2, stride=2, padding=1)),
    "1×1": ((3, 5, 4, 4), (7, 5, 1, 1), {}),
    "empty batch": ((0, 2, 5, 5), (3, 2, 3, 3), {}),
}
TRANSPOSED = {
    "1d": ((2, 4, 5), (4, 3, 3), dict(stride=2)),
    "2d grouped": ((2, 4, 5, 4), (4, 3, 3, 3), dict(groups=2, stride=2, padding=1)),
    "2d dilated": ((1, 3, 4, 4), (3, 2, 2, 3), dict(dilation=2, padding=1)),
    "3d depthwise": ((1, 3, 3, 3, 3), (3, 1, 2, 2, 2), dict(groups=3, stride=2)),
}


def problem(shape, weight_shape, options, transposed=False):
    generator = torch.Generator().manual_seed(1)
    channels = weight_shape[1] * options.get("groups", 1) if transposed else weight_shape[0]
    x, weight, bias = (
        torch.randn(s, generator=generator, dtype=torch.float64)
        for s in (shape, weight_shape, (channels,))
    )
    inputs = [t.requires_grad_() for t in (x, weight, bias)]
    name = f"conv{'_transpose' if transposed else ''}{len(shape) - 2}d"
    return (lambda: getattr(F, name)(*inputs, **options)), inputs


CASES = [(False, key) for key in SHAPES] + [(True, key) for key in TRANSPOSED]


@pytest.mark.parametrize("transposed, key", CASES)
def test_second_and_third_order_are_stock_s(transposed, key):
    function, inputs = problem(*(TRANSPOSED if transposed else SHAPES)[key], transposed=transposed)

    def third():  # a nonlinearity behind, so that no order vanishes
        y = function()
        return y * y.sin()

    expected = second(third, inputs, order=3)
    with db.patched(only=["convolution"]):
        assert error(second(third, inputs, order=3), expected) < 1e-13


DENSE = [(False, "2d dilated"), (False, "1d"), (False, "1×1"), (True, "1d"), (True, "2d dilated")]


@pytest.mark.parametrize("transposed, key", [*DENSE, (False, "2d grouped strided")])
def test_the_input_s_derivative_is_itself_a_convolution(transposed, key, monkeypatch):
    """What cuDNN's convolutions take, tried on the CPU: the first derivative by x alone, twice
    and three times differentiated, without a node in Python where the groups allow it."""
    monkeypatch.setattr(faster, "_by_cudnn", lambda *_: True)
    shapes = (TRANSPOSED if transposed else SHAPES)[key]
    function, inputs = problem(*shapes, transposed=transposed)

    def third():
        y = function()
        (g,) = torch.autograd.grad((y * y.sin()).sum(), inputs[0], create_graph=True)
        found = torch.autograd.grad(g.pow(3).sum(), inputs, create_graph=True)
        again = torch.autograd.grad(sum(f.pow(3).sum() for f in found), inputs)
        return g, [[g], list(found), list(again)]

    _, expected = third()
    with db.patched(only=["convolution"]):
        g, found = third()
        assert error(found, expected) < 1e-13
        written = type(g.grad_fn).__name__ == "DerivativeNodeBackward"
        assert written == ("groups" in shapes[2])


def test_autocast_does_not_change_a_derivative_s_dtype(monkeypatch):
    monkeypatch.setattr(faster, "_by_cudnn", lambda *_: True)
    function, inputs = problem(*SHAPES["1×1"])
    y = function().square().sum()
    with db.patched(), torch.autocast("cpu", torch.bfloat16):
        (g,) = torch.autograd.grad(y, inputs[0], create_graph=True)
        assert g.dtype == torch.float64 and type(g.grad_fn).__name__ == "DerivativeNodeBackward"


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_samples_of_the_operator_database(name):
    for function, inputs in samples(name, largest=600):
        expected = second(function, inputs)
        with db.patched():
            assert error(second(function, inputs), expected) < 1e-13


@pytest.mark.parametrize("key", ["2d grouped strided", "2d depthwise", "3d"])
def test_finite_differences_agree(key):
    function, inputs = problem(*SHAPES[key])
    with db.patched():
        assert gradgradcheck(lambda *_: function(), inputs, fast_mode=True)


SUBSETS = [s for s in itertools.product((False, True), repeat=3) if any(s)]


PAIRS = [
    (needed, seeds)
    for needed, seeds in itertools.product(SUBSETS, SUBSETS)
    if all(n or not s for n, s in zip(needed, seeds, strict=True))
]


@pytest.mark.parametrize("needed, seeds", PAIRS)
def test_every_combination_of_masks_and_seeds(needed, seeds):
    """`needed`: which of x, θ, b require a gradient; `seeds`: whose gradients are penalised."""
    _, inputs = problem(*SHAPES["2d grouped strided"])
    inputs = [t.detach().requires_grad_(n) for t, n in zip(inputs, needed, strict=True)]
    options = SHAPES["2d grouped strided"][2]
    live = [t for t, s in zip(inputs, seeds, strict=True) if s]

    def penalty():
        loss = F.conv2d(*inputs, **options).pow(3).sum()
        grads = torch.autograd.grad(loss, live, create_graph=True)
        wanted = [t for t in inputs if t.requires_grad]
        total = sum(g.pow(3).sum() for g in grads)
        return [list(torch.autograd.grad(total, wanted, allow_unused=True))]

    expected = penalty()
    with db.patched():
        assert error(penalty(), expected) < 1e-13


@pytest.mark.parametrize("groups", [1, 4])
def test_channels_last_stays_channels_last(groups):
    """In float32, whose CPU kernels know that layout."""
    x, weight = torch.randn(2, 4, 8, 8), torch.randn(4, 4 // groups, 3, 3)
    leaves = [t.to(memory_format=torch.channels_last).requires_grad_() for t in (x, weight)]
    with db.patched():
        y = F.conv2d(*leaves, padding=1, groups=groups).sin()
        grads = torch.autograd.grad(y.sum(), leaves, create_graph=True)
        total = sum(g.square().sum() for g in grads)
        found = torch.autograd.grad(total, leaves)
    for t in (grads[0], found[0]):
        assert t.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("groups, size", [(2, 3), (8, 5), (8, 3)])
def test_float32_groups_are_exact_and_keep_their_layout(groups, size):
    """Some filter gradients run on channels-last copies."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 8, 9, 9), (8, 8 // groups, size, size)

    def results(dtype):
        inputs = [torch.randn(s, generator=generator.manual_seed(1)).to(dtype) for s in shapes]
        inputs = [t.requires_grad_() for t in inputs]
        y = F.conv2d(*inputs, padding=size // 2, groups=groups)
        grads = torch.autograd.grad(y.sin().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), inputs)

    exact = results(torch.float64)
    with db.patched():
        found = results(torch.float32)
    for a, b in zip(found, exact, strict=True):
        assert a.is_contiguous()
        assert (a - b).norm() / b.norm() < 1e-5


def test_third_order_where_stock_has_none():
    """Stock's double backward hands output_padding to an ordinary convolution, and stops."""
    _, inputs = problem((1, 2, 3), (2, 2, 3), dict(stride=2, output_padding=1), transposed=True)

    def gradients(*inputs):
        y = F.conv_transpose1d(*inputs, stride=2, output_padding=1)
        return torch.autograd.grad((y * y.sin()).sum(), inputs, create_graph=True)

    with db.patched():
        assert gradgradcheck(gradients, inputs)


def test_the_filter_gradient_kernel_runs_once_for_all_groups():
    """Stock: one convolution per group for the weight's part. Here: one backward call."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.ran = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.ran.append(func._opname)
            return func(*args, **(kwargs or {}))

    def heavy():
        function, inputs = problem(*SHAPES["2d depthwise"])
        (g,) = torch.autograd.grad(function().square().sum(), inputs[0], create_graph=True)
        with Count() as count:
            g.square().sum().backward()
        return sum("convolution" in name for name in count.ran)

    stock = heavy()
    with db.patched():
        assert heavy() <= 3 < stock


def test_torch_func_and_batched_gradients():
    _, (x, weight, bias) = problem(*SHAPES["2d grouped strided"])
    x, weight, bias = (t.detach() for t in (x, weight, bias))
    options = SHAPES["2d grouped strided"][2]

    def loss(x, weight):
        return F.conv2d(x, weight, bias, **options).pow(3).sum()

    def penalty(x, weight):
        return torch.func.grad(loss)(x, weight).square().sum()

    def results():
        one = torch.func.grad(penalty, argnums=(0, 1))(x, weight)
        many = torch.func.vmap(torch.func.grad(penalty, argnums=1), (0, None))(x[:, None], weight)
        hessian = torch.func.hessian(loss, argnums=1)(x[:1, :, :4, :4], weight)
        leaf = weight.clone().requires_grad_()
        (g,) = torch.autograd.grad(loss(x, leaf), leaf, create_graph=True)
        seeds = torch.eye(g.numel(), dtype=g.dtype)[:5].view(5, *g.shape)
        batched = torch.autograd.grad(g, leaf, seeds, is_grads_batched=True)
        return [[*one, many, hessian, *batched]]

    expected = results()
    with db.patched():
        assert error(results(), expected) < 1e-13
