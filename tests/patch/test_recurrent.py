"""cuDNN's recurrent backward. The operator exists on GPUs alone, so a kernel for the CPU stands in
for cuDNN's, and what is tested is the derivative around it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

import doubleback as db
from doubleback.patch import missing
from support.derivatives import error

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
            dx, dh, dc, *weights = missing._composite_recurrent(a | spread)
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


OPTIONS = {
    "plain": {},
    "deep": {"num_layers": 2, "bidirectional": True},
    "no bias": {"bias": False, "batch_first": True},
    "projected": {"proj_size": 2, "num_layers": 2},
    "projected, no bias": {"proj_size": 2, "bidirectional": True, "bias": False},
}
SIZES = [3, 3, 2, 2, 1]  # of a packed batch: sequences of 5, 4 and 2 steps


def check(net: nn.RNNBase, x, batch: int, packed: bool):
    """First and second derivatives in everything, against those of PyTorch's cells on the CPU."""
    lstm = isinstance(net, nn.LSTM)
    weights = [p for w in net.all_weights for p in w]
    layers = net.num_layers * (1 + net.bidirectional)
    h = torch.randn(layers, batch, net.proj_size or 4, dtype=D).requires_grad_()
    c = torch.randn(layers, batch, 4, dtype=D).requires_grad_()
    state = (h, c) if lstm else h
    inputs = [x, h, *([c] if lstm else []), *weights]

    if packed:
        (out, *_), last = net(PackedSequence(x, torch.tensor(SIZES)), state)
    else:
        out, last = net(x, state)
    results = [out, *(last if lstm else [last])]
    seeds = [torch.randn_like(r).requires_grad_() for r in results]
    expected = torch.autograd.grad(results, inputs, seeds, create_graph=True)

    empty, mode = torch.empty(0, dtype=D), MODES[net.mode.lower().removeprefix("rnn_")]
    with db.patched():
        dx, dh, dc, dw = torch.ops.aten._cudnn_rnn_backward(
            x, weights, len(net.all_weights[0]), empty, h, c if lstm else None,
            out.detach(), *seeds, *([None] * (3 - len(seeds))), mode, 4, net.proj_size,
            net.num_layers, net.batch_first and not packed, 0.0, True, net.bidirectional,
            SIZES if packed else [], None, empty, [True] * 4,
        )  # fmt: skip
    found = [dx, dh, *([dc] if lstm else []), *dw]
    assert error([found], [expected]) < 1e-13
    at = [*inputs, *seeds]
    cotangents = [torch.randn_like(g) for g in expected]
    second = torch.autograd.grad(found, at, cotangents, allow_unused=True)
    reference = torch.autograd.grad(expected, at, cotangents, allow_unused=True)
    assert error([second], [reference]) < 1e-12


KINDS = [  # LSTM alone has projections
    (kind, options)
    for kind in MODES
    for options in OPTIONS
    if "projected" not in options or kind == "lstm"
]


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind, options", KINDS)
def test_second_derivative_is_that_of_the_unfused_cells(kind, options, packed, cpu_kernel):
    net = module(kind, **OPTIONS[options])
    shape = (sum(SIZES), 3) if packed else (5, 2, 3)
    x = torch.randn(shape, dtype=D).requires_grad_()
    check(net, x, SIZES[0] if packed else x.shape[0 if net.batch_first else 1], packed)


@pytest.mark.parametrize("kind", MODES)
def test_packed_outputs(kind):
    net = module(kind, num_layers=2, bidirectional=True)
    x = torch.randn(sum(SIZES), 3, dtype=D)
    h, c = torch.randn(2, 4, SIZES[0], 4, dtype=D)
    lstm = kind == "lstm"
    (expected, *_), last = net(PackedSequence(x, torch.tensor(SIZES)), (h, c) if lstm else h)
    a = {"mode": MODES[kind], "weight_stride0": 4, "bidirectional": True, "batch_sizes": SIZES}
    weights = [p for w in net.all_weights for p in w]
    found = missing._run_packed(a, x, h, c if lstm else None, weights)
    assert error([found], [[expected, *(last if lstm else [last])]]) < 1e-14


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", MODES)
def test_packed_sequences_of_cudnn(kind):
    """cuDNN in float64 and under the patch, against the unfused cells on the CPU."""
    x = torch.randn(sum(SIZES), 3, dtype=D)

    def results(net, x):
        x = x.requires_grad_()
        (y, *_), _ = net(PackedSequence(x, torch.tensor(SIZES)))
        at = [x, *net.parameters()]
        grads = torch.autograd.grad(y.sin().sum(), at, create_graph=True)
        total = sum(g.square().sum() for g in grads)
        return [[g.cpu() for g in (*grads, *torch.autograd.grad(total, at))]]

    options: dict = {"num_layers": 2, "bidirectional": True}
    expected = results(module(kind, **options), x.clone())
    with db.patched():
        found = results(module(kind, **options).cuda(), x.cuda())
    assert error(found, expected) < 1e-10


def test_dropout_between_layers_is_left_to_stock():
    a = {"input": torch.zeros(1), "train": True, "dropout": 0.5, "num_layers": 2}
    assert not missing._accepts_recurrent(a)
    assert missing._accepts_recurrent(a | {"num_layers": 1})
    assert missing._accepts_recurrent(a | {"train": False})
