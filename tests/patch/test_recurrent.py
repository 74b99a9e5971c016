"""cuDNN's recurrent backward. The operator exists on GPUs alone, so a kernel for the CPU stands in
for cuDNN's, and what is tested is the derivative around it."""

from __future__ import annotations

import pytest
import torch
from derivatives import error
from torch import nn

import doubleback as db
from doubleback.patch import recurrent

D = torch.float64
MODES = {"relu": 0, "tanh": 1, "lstm": 2, "gru": 3}


@pytest.fixture
def cpu_kernel():
    """dx, dh, dc, dθ as cuDNN would give them."""
    names = [a.name for a in torch.ops.aten._cudnn_rnn_backward.default._schema.arguments]

    def kernel(*args):
        a = dict(zip(names, args, strict=True))
        spread = {f"weight {i}": w for i, w in enumerate(a["weight"])}
        with torch.enable_grad():
            dx, dh, dc, *weights = recurrent._composite(a | spread)
        dc = torch.empty(0, dtype=D) if dc is None else dc.detach()
        return dx.detach(), dh.detach(), dc, [w.detach() for w in weights]

    library = torch.library.Library("aten", "IMPL")
    library.impl("_cudnn_rnn_backward", kernel, "CPU")
    yield
    library._destroy()


def module(kind: str, **options) -> nn.RNNBase:
    torch.manual_seed(0)
    if kind in ("relu", "tanh"):
        return nn.RNN(3, 4, nonlinearity=kind, dtype=D, **options)
    return (nn.LSTM if kind == "lstm" else nn.GRU)(3, 4, dtype=D, **options)


OPTIONS = [
    {},
    {"num_layers": 2, "bidirectional": True},
    {"bias": False, "batch_first": True},
]


@pytest.mark.parametrize("kind", MODES)
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "deep", "no bias"])
def test_second_derivative_is_that_of_the_unfused_cells(kind, options, cpu_kernel):
    net = module(kind, **options)
    weights = [p for w in net.all_weights for p in w]
    layers = net.num_layers * (1 + net.bidirectional)
    x = torch.randn(5, 2, 3, dtype=D).requires_grad_()
    batch = x.shape[0] if net.batch_first else x.shape[1]
    h, c = (torch.randn(layers, batch, 4, dtype=D).requires_grad_() for _ in range(2))
    state = (h, c) if kind == "lstm" else h
    inputs = [x, h, *([c] if kind == "lstm" else []), *weights]

    out, last = net(x, state)
    results = [out, *(last if kind == "lstm" else [last])]
    seeds = [torch.randn_like(r).requires_grad_() for r in results]
    expected = torch.autograd.grad(results, inputs, seeds, create_graph=True)

    empty = torch.empty(0, dtype=D)
    with db.patched():
        dx, dh, dc, dw = torch.ops.aten._cudnn_rnn_backward(
            x, weights, len(net.all_weights[0]), empty, h, c if kind == "lstm" else None,
            out.detach(), *seeds, *([None] * (3 - len(seeds))), MODES[kind], 4, 0, net.num_layers,
            net.batch_first, 0.0, True, net.bidirectional, [], None, empty, [True] * 4,
        )  # fmt: skip
    found = [dx, dh, *([dc] if kind == "lstm" else []), *dw]
    assert error([found], [expected]) < 1e-13
    at = [*inputs, *seeds]
    cotangents = [torch.randn_like(g) for g in expected]
    second = torch.autograd.grad(found, at, cotangents, allow_unused=True)
    reference = torch.autograd.grad(expected, at, cotangents, allow_unused=True)
    assert error([second], [reference]) < 1e-12


def test_dropout_between_layers_and_packed_sequences_are_left_to_stock():
    a = {"input": torch.zeros(1), "train": True, "dropout": 0.5, "num_layers": 2, "batch_sizes": []}
    assert not recurrent._accepts(a)
    assert recurrent._accepts(a | {"num_layers": 1})
    assert not recurrent._accepts(a | {"num_layers": 1, "batch_sizes": [2, 1]})
