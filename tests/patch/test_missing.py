"""What PyTorch differentiates once only: the same first derivative, and finite differences."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradgradcheck

import doubleback as db
from doubleback.patch.mechanism import is_dual
from doubleback.patch.missing import OTHERS
from support.derivatives import samples

NAMES = [
    "nn.functional.hardsigmoid",
    "nn.functional.multi_margin_loss",
    "nn.functional.multilabel_margin_loss",
    "nn.functional.embedding_bag",
    "nn.functional.pdist",
    "_segment_reduce",
    "cdist",
]


def smooth_samples(name):
    """Small samples whose distances and margins stay away from kinks."""
    for function, inputs in samples(name, largest=150):
        if all(t.numel() for t in inputs):
            yield function, inputs


@pytest.mark.parametrize("name", NAMES)
def test_samples_of_the_operator_database(name):
    count = 0
    for function, inputs in smooth_samples(name):
        with db.patched(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert gradgradcheck(lambda *_, f=function: f(), inputs, fast_mode=True, atol=1e-4)
        count += 1
    assert count >= 2


class Watch:
    """Calls each formula's steps beside the operator itself, and compares."""

    def __init__(self, formula):
        self.seen, self.inside = 0, False
        op = formula.overload()
        names = [x.name for x in op._schema.arguments]
        defaults = {x.name: x.default_value for x in op._schema.arguments if x.has_default_value()}
        stock = torch.library.get_kernel(op, "AutogradCPU")

        def kernel(keyset, *args, **kwargs):
            expected = stock.call_boxed(keyset, *args, **kwargs)
            a = defaults | dict(zip(names, args, strict=False)) | kwargs
            if formula.accepts(a) and not self.inside:
                self.inside = True  # steps may call the operator
                torch.testing.assert_close(formula.composite(a), expected, rtol=1e-12, atol=1e-12)
                self.seen, self.inside = self.seen + 1, False
            return expected

        self.library = torch.library.Library("aten", "IMPL")
        self.library.impl(op, kernel, "AutogradCPU", with_keyset=True)


PAIRS = {
    "hardsigmoid_backward": "nn.functional.hardsigmoid",
    "multi_margin_loss_backward": "nn.functional.multi_margin_loss",
    "multilabel_margin_loss_backward": "nn.functional.multilabel_margin_loss",
    "_embedding_bag_backward": "nn.functional.embedding_bag",
    "_embedding_bag_per_sample_weights_backward": "nn.functional.embedding_bag",
    "_segment_reduce_backward": "_segment_reduce",
    "_cdist_backward": "cdist",
    "_pdist_backward": "nn.functional.pdist",
}


@pytest.mark.parametrize(
    "formula", [f for f in OTHERS if f.operator in PAIRS], ids=lambda f: f.operator
)
def test_the_steps_are_the_operator(formula):
    watch = Watch(formula)
    try:
        for function, inputs in samples(PAIRS[formula.operator], largest=2000):
            out = function()
            generator = torch.Generator().manual_seed(0)
            xi = torch.randn(out.shape, generator=generator, dtype=out.dtype)
            torch.autograd.grad(out, inputs, xi, allow_unused=True)
    finally:
        watch.library._destroy()
    assert watch.seen >= 2


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, float("inf")])
def test_equal_points_have_no_distance_to_differentiate(p):
    x = torch.tensor([[1.0, 2.0], [1.0, 2.0], [0.0, 3.5]], dtype=torch.float64, requires_grad=True)
    for function in (lambda x: torch.cdist(x, x, p), lambda x: F.pdist(x, p)):
        (expected,) = torch.autograd.grad(function(x).sum(), x)
        with db.patched():
            (g,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
            assert torch.equal(g, expected)
            total = g.square().sum()
            if total.requires_grad:
                (h,) = torch.autograd.grad(total, x, allow_unused=True)
                assert h is None or torch.isfinite(h).all()


@pytest.mark.parametrize("lengths", ["numbers", "tensors", "one row"])
@pytest.mark.parametrize("blank", [0, 2])
def test_connectionist_temporal_classification(lengths, blank):
    """Repeated labels, none at all, inputs that end early, and one that is too short."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(6, 4, 4, generator=g, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[1, 3, 3], [3, 1, 1], [1, 1, 1], [1, 3, 1]])
    steps, counts = [6, 5, 3, 4], [3, 1, 3, 0]  # the third has no way to say 1, 1, 1
    if lengths == "one row":
        labels = torch.cat([row[:n] for row, n in zip(labels, counts, strict=True)])
    if lengths == "tensors":
        steps, counts = torch.tensor(steps), torch.tensor(counts)

    def loss(x):
        return F.ctc_loss(
            x.log_softmax(2), labels, steps, counts, blank, "none", zero_infinity=True
        )

    watch = Watch(next(f for f in OTHERS if f.operator == "_ctc_loss_backward"))
    try:
        xi = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
        torch.autograd.grad(loss(x), x, xi)
    finally:
        watch.library._destroy()
    assert watch.seen == 1
    with db.patched():
        assert gradgradcheck(loss, x, atol=1e-6)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_with_padding_and_empty_bags(mode):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(7, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    indices, offsets = torch.tensor([1, 4, 1, 2, 6, 1]), torch.tensor([0, 3, 3, 5])

    def function(weight):
        return F.embedding_bag(indices, weight, offsets, mode=mode, padding_idx=2).sin()

    with db.patched():
        assert gradgradcheck(function, weight)
        dense = torch.ops.aten._embedding_bag_dense_backward
        number = ["sum", "mean", "max"].index(mode)
        _, bags, sizes, largest = torch.ops.aten._embedding_bag(
            weight.detach(), indices, offsets, False, number, False, None, False, 2
        )
        xi = torch.randn(4, 3, generator=generator, dtype=torch.float64, requires_grad=True)
        assert gradgradcheck(
            lambda xi: dense(xi, indices, bags, sizes, largest, 7, False, number, None, 2), xi
        )


def test_bags_scaled_by_frequency_are_left_to_stock():
    """That "gradient" is no derivative, and finite differences would not agree with it."""
    weight = torch.randn(4, 2, requires_grad=True)
    with db.patched():
        y = F.embedding_bag(torch.tensor([[0, 0, 1]]), weight, scale_grad_by_freq=True, mode="sum")
        (g,) = torch.autograd.grad(y.square().sum(), weight, create_graph=True)
        with pytest.raises(NotImplementedError, match="_embedding_bag_backward"):
            g.sum().backward()


def test_a_network_of_hard_activations_takes_a_penalty():
    net = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3), torch.nn.Hardswish(), torch.nn.Flatten(), torch.nn.Linear(64, 3),
        torch.nn.Hardsigmoid(),
    ).double()  # fmt: skip
    x = torch.randn(2, 2, 6, 6, dtype=torch.float64, requires_grad=True)
    with db.patched():
        (g,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        g.square().sum().backward()
    assert all(p.grad is not None for p in net[0].parameters())


def test_forward_over_reverse():
    x = torch.linspace(-4, 4, 9, dtype=torch.float64) + 0.1

    def loss(x):
        return F.hardsigmoid(x).pow(3).sum()

    with db.patched():
        found = torch.func.jvp(torch.func.grad(loss), (x,), (torch.ones_like(x),))[1]
    inside = x.abs() < 3
    expected = torch.where(inside, F.hardsigmoid(x) * 6 / 36, 0.0)
    torch.testing.assert_close(found, expected)
    assert not is_dual(x)
