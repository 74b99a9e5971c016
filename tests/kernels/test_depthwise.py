"""Depthwise convolutions in Triton against PyTorch's own, in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import doubleback as db
from doubleback.kernels import Depthwise, depthwise
from doubleback.operators import Convolution
from doubleback.plan import _layouts
from support.gpu import CUDA, DEVICE, needs_gpu, needs_triton, on_gpu_all
from support.plans import plan_of

aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

# Largest error over the largest entry. 16 bit: the last place of the result; the interpreter
# truncates.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}

LAYOUTS = [torch.contiguous_format, torch.channels_last]
# batch, channels, sizes, kernel, stride, padding, dilation
CASES = {
    "3×3": (2, 5, (9, 10), (3, 3), (1, 1), (1, 1), (1, 1)),
    "7×7, small image": (2, 64, (7, 7), (7, 7), (1, 1), (3, 3), (1, 1)),
    "stride 2": (1, 8, (11, 12), (3, 3), (2, 2), (1, 1), (1, 1)),
    "stride 2, 5×5, even and odd": (2, 6, (8, 9), (5, 5), (2, 2), (2, 2), (1, 1)),
    "stride 2, 7×7": (1, 3, (13, 13), (7, 7), (2, 2), (3, 3), (1, 1)),
    "stride down only": (2, 4, (9, 8), (3, 3), (2, 1), (1, 1), (1, 1)),
    "stride across only": (2, 4, (8, 9), (3, 2), (1, 2), (1, 0), (1, 1)),
    "dilated": (1, 4, (10, 11), (3, 5), (1, 1), (2, 4), (2, 2)),
    "dilated, stride 2": (1, 4, (9, 17), (3, 3), (2, 2), (1, 2), (2, 2)),
    "no padding": (2, 70, (5, 6), (3, 3), (1, 1), (0, 0), (1, 1)),
    "padding beyond the filter": (1, 4, (3, 3), (3, 3), (1, 1), (4, 3), (1, 1)),
    "96 channels": (1, 96, (6, 19), (3, 3), (1, 1), (1, 1), (1, 1)),
    "a row": (2, 4, (1, 9), (1, 3), (1, 1), (0, 1), (1, 1)),
    "1×1": (2, 4, (3, 3), (1, 1), (1, 1), (0, 0), (1, 1)),
    "inputs that no output reads": (2, 4, (6, 6), (3, 3), (2, 2), (0, 0), (1, 1)),
}


def problem(case, dtype):
    batch, channels, sizes, kernel, *geometry = CASES[case]
    like = dict(dtype=dtype, device=DEVICE)
    shapes = ((batch, channels, *sizes), (channels, 1, *kernel), (channels,))
    return *(torch.randn(shape, **like) for shape in shapes), Depthwise(sizes, kernel, *geometry)


def exact(x, weight, bias, here):
    """y, ξ, Kᵀξ, K□(x, ξ), Σξ in float64, ξ rounded as the inputs are."""
    dtype = x.dtype
    x, weight, bias = (t.double() for t in (x, weight, bias))
    y = F.conv2d(x, weight, bias, *here[2:], groups=x.shape[1])
    xi = torch.randn_like(y).to(dtype).double()
    options = (*here[2:], False, (0, 0), x.shape[1])
    return y, xi, *aten.convolution_backward(xi, x, weight, [x.shape[1]], *options, [True] * 3)


def close(found, expected, dtype):
    assert found.dtype == dtype and found.shape == expected.shape
    error = (found.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    assert error <= TOLERANCE[dtype], float(error)


@needs_triton
@pytest.mark.parametrize("layout", LAYOUTS if CUDA else LAYOUTS[1:])
@pytest.mark.parametrize("dtype", list(TOLERANCE) if CUDA else [torch.float32], ids=str)
@pytest.mark.parametrize(
    "case",
    on_gpu_all(
        CASES, "3×3", "stride 2, 5×5, even and odd", "stride down only", "stride across only",
        "dilated, stride 2", "padding beyond the filter", "a row", "1×1",
        "inputs that no output reads",
    ),
)  # fmt: skip
def test_agrees_with_pytorch(case, dtype, layout):
    x, weight, bias, here = problem(case, dtype)
    y, xi, dx, dw, total = exact(x, weight, bias, here)
    assert here.out == tuple(y.shape[2:])
    x, xi = (t.to(dtype).contiguous(memory_format=layout) for t in (x, xi))
    with torch.no_grad():
        found = here.forward(weight, x, bias)
        close(found, y, dtype)
        assert found.is_contiguous(memory_format=torch.channels_last)
        close(here.forward(weight, x), y - bias.double()[:, None, None], dtype)
        close(here.transpose(weight, xi), dx, dtype)
        for with_bias in (True, False):
            found, summed = here.weight_adjoint(x, xi, with_bias)
            close(found, dw, dtype)
            if with_bias:
                close(summed, total, dtype)
            else:
                assert summed is None


@needs_triton
def test_sums_of_many_parts():
    """More tiles than programs, more parts than are added at once; the same bits every time."""
    x, xi = torch.randn(2, 8 if CUDA else 3, 32, 7, 20, device=DEVICE)
    here = Depthwise((7, 20), (3, 3), (1, 1), (1, 1), (1, 1))
    first, again = (here.weight_adjoint(x, xi, True) for _ in range(2))
    options = ((1, 1), (1, 1), (1, 1), False, (0, 0), 32)
    weight = torch.empty(32, 1, 3, 3, dtype=torch.float64, device=DEVICE)
    exact = aten.convolution_backward(xi.double(), x.double(), weight, [32], *options, [True] * 3)
    for found, same, expected in zip(first, again, exact[1:], strict=True):
        close(found, expected, torch.float32)
        assert torch.equal(found, same)


@needs_triton
def test_operators_tell_the_truth_about_their_results():
    x, weight, bias, here = problem("stride 2", torch.float32)
    ops = torch.ops.doubleback
    y = ops.depthwise(x, weight, bias, *here[2:])
    for op, arguments in (
        (ops.depthwise, (x, weight, bias, *here[2:])),
        (ops.depthwise_transpose, (y, weight, here.sizes, *here[2:])),
        (ops.depthwise_adjoint, (x, y, *here[1:], True)),
    ):
        torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))


# Which convolutions, and which tensors --------------------------------------------------------


def choose(monkeypatch, part="K", dtype=torch.float32, **changes):
    monkeypatch.setattr(depthwise, "_known", lambda tensors: True)
    options = dict(
        x_shape=(2, 8, 9, 9), weight_shape=(8, 1, 3, 3), stride=(1, 1), padding=(1, 1),
        dilation=(1, 1), groups=8,
    )  # fmt: skip
    tensors = (None, torch.empty(1, dtype=dtype))
    return Depthwise.where_faster(part, tensors, **(options | changes))


def test_where_it_is_chosen(monkeypatch):
    assert choose(monkeypatch) == Depthwise((9, 9), (3, 3), (1, 1), (1, 1), (1, 1))
    assert choose(monkeypatch, weight_shape=(8, 1, 7, 7)) is not None
    for part, found in (("K", True), ("Kᵀ", True), ("K□", False)):
        large = dict(weight_shape=(8, 1, 5, 5), dtype=torch.bfloat16)
        assert (choose(monkeypatch, part, **large) is not None) is found
        assert choose(monkeypatch, part, dtype=torch.bfloat16) is not None


@pytest.mark.parametrize(
    "changes",
    [
        dict(weight_shape=(8, 8, 3, 3), groups=1),
        dict(weight_shape=(16, 1, 3, 3)),  # two filters for a channel
        dict(weight_shape=(8, 2, 3, 3), groups=4),
        dict(x_shape=(2, 1, 9, 9), weight_shape=(1, 1, 3, 3), groups=1),
        dict(weight_shape=(8, 1, 9, 9)),
        dict(stride=(3, 3)),
        dict(dilation=(1, 12), x_shape=(2, 8, 9, 40)),
        dict(x_shape=(0, 8, 9, 9)),
        dict(x_shape=(2, 8, 9), weight_shape=(8, 1, 3), stride=(1,), padding=(1,), dilation=(1,)),
    ],
    ids=str,
)
def test_where_it_is_not(monkeypatch, changes):
    assert choose(monkeypatch, **changes) is None


def test_tensors_that_are_left_to_pytorch(monkeypatch):
    monkeypatch.setattr(depthwise.launch, "available", lambda: True)
    cpu = torch.ones(2)
    assert not depthwise._known([cpu])
    monkeypatch.setattr(depthwise.launch, "on_cuda", lambda *tensors: True)
    assert depthwise._known([cpu, cpu])
    assert not depthwise._known([cpu.double()])
    assert not depthwise._known([cpu, cpu.half()])
    assert not depthwise._known([cpu, cpu.clone().requires_grad_()])
    with torch.no_grad():
        assert depthwise._known([cpu, cpu.clone().requires_grad_()])
    image = torch.ones(2, 3, 4, 4)
    assert not depthwise._known([image])
    assert depthwise._known([image.contiguous(memory_format=torch.channels_last)])
    assert depthwise._known([image[:1, :1].expand_as(image)])
    assert depthwise._known([torch.ones(3, 1, 4, 4)])  # a filter, the same in both layouts
    seen = []
    torch.func.vmap(lambda t: seen.append(depthwise._known([t])) or t)(cpu)
    assert seen == [False]


# In networks ----------------------------------------------------------------------------------


class Net(nn.Module):
    """Depthwise layers of several kinds, beside one that is not."""

    def __init__(self, bias=True):
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3, padding=1, bias=bias)
        self.same = nn.Conv2d(6, 6, 5, padding=2, groups=6, bias=bias)
        self.down = nn.Conv2d(6, 6, 3, stride=2, padding=1, groups=6, bias=bias)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = F.silu(self.first(x))
        x = F.silu(self.down(x + F.silu(self.same(x))))
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("bias", [True, False])
def test_networks_agree_with_autograd(bias, monkeypatch):
    """With PyTorch's operators in the kernels' place, to see that each is called as it should."""
    called = []

    def forward(x, weight, bias, *geometry):
        called.append("K")
        return aten.convolution(x, weight, bias, *geometry, False, (0, 0), x.shape[1])

    def transpose(y, weight, sizes, *geometry):
        called.append("Kᵀ")
        x = y.new_empty(*y.shape[:2], *sizes)
        options = (None, *geometry, False, (0, 0), y.shape[1], [True, False, False])
        return aten.convolution_backward(y, x, weight, *options)[0]

    def adjoint(x, y, kernel, stride, padding, dilation, bias):
        called.append("K□ and bias" if bias else "K□")
        weight, channels = x.new_empty(x.shape[1], 1, *kernel), x.shape[1]
        options = ([channels], stride, padding, dilation, False, (0, 0), channels)
        return aten.convolution_backward(y, x, weight, *options, [False, True, bias])[1:]

    monkeypatch.setattr(depthwise, "_known", lambda tensors: True)
    for name, function in (("_forward", forward), ("_transpose", transpose), ("_adjoint", adjoint)):
        monkeypatch.setattr(depthwise, name, function)
    model = db.Penalised(Net(bias).double(), db.LossGradient("cross_entropy"))
    x, y = torch.randn(3, 2, 8, 9, dtype=torch.float64), torch.randint(3, (3,))
    assert db.check(model, x.requires_grad_(), y).passed
    assert {"K", "Kᵀ", "K□", *(["K□ and bias"] if bias else [])} == set(called)


@needs_gpu
@pytest.mark.parametrize("compile", [False, True])
def test_networks_on_a_gpu(compile, monkeypatch):
    monkeypatch.setattr(depthwise, "_plans", plans := {})
    net = Net().to(DEVICE)
    x, y = torch.randn(3, 2, 8, 9, device=DEVICE), torch.randint(3, (3,), device=DEVICE)
    x = x.contiguous(memory_format=torch.channels_last)  # on a GPU the sweeps see to it
    model = db.Penalised(net, db.LossGradient("cross_entropy"), compile=compile)
    out, penalty = model(x, y)
    (F.cross_entropy(out, y) + penalty).backward()
    found = [p.grad.double() for p in net.parameters()]
    net.zero_grad()
    model.accumulate(x, y, loss="cross_entropy", weight=1.0)
    at_once = [p.grad.double() for p in net.parameters()]
    assert {"K", "Kᵀ", "K□"} == {key[0] for key in plans}
    net.zero_grad()
    net.double()
    x = x.double().requires_grad_()
    each = F.cross_entropy(net(x), y, reduction="none")
    (g,) = torch.autograd.grad(each.sum(), x, create_graph=True)
    (each.mean() + g.square().sum((1, 2, 3)).mean()).backward()
    tf32 = 2e-3  # the dense layers
    for parameter, *grads in zip(net.parameters(), found, at_once, strict=True):
        for grad in grads:
            error = (grad - parameter.grad).norm() / parameter.grad.norm()
            assert error <= tf32, float(error)


@needs_triton
def test_floating_point_operations_are_known():
    x, weight, bias, here = problem("stride 2", torch.float32)
    with FlopCounterMode(display=False) as stock:  # of its K□ it does not see that it is grouped
        F.conv2d(x, weight, bias, *here[2:], groups=8)
    ops = torch.ops.doubleback
    with FlopCounterMode(display=False) as counter:
        y = ops.depthwise(x, weight, bias, *here[2:])
        ops.depthwise_transpose(y, weight, here.sizes, *here[2:])
        ops.depthwise_adjoint(x, y, *here[1:], True)
    assert counter.get_total_flops() == 3 * stock.get_total_flops() > 0


def test_operations_are_counted():
    conv = Convolution((1, 1), (1, 1), (1, 1), groups=4)
    x, weight = torch.randn(2, 4, 5, 5), torch.randn(4, 1, 3, 3)
    with db.count_operations() as count:
        y = conv.forward(weight, x)
        conv.transpose(weight, y, x.shape)
        conv.weight_adjoint(x, y, weight.shape)
    assert (count.forward, count.transpose, count.weight_adjoint) == (1, 1, 1)


def test_filters_are_laid_out_once_for_all_sweeps():
    """Depthwise filters taps-first, other filters and the image channels-last, on a GPU."""
    model = db.Penalised(Net(), db.LossGradient("cross_entropy"))
    x, y = torch.randn(3, 2, 8, 9), torch.randint(3, (3,))
    plan = plan_of(model, x, y)
    assert plan.channels_last == plan.taps_first == frozenset()
    on_gpu = SimpleNamespace(shape=plan.graph.shape, values=())
    channels_last, taps_first = _layouts(on_gpu, plan.steps, plan.penalised, plan.leaves)
    shapes = [sorted(plan.graph.shape(v) for v in chosen) for chosen in (channels_last, taps_first)]
    assert shapes == [[(3, 2, 8, 9), (6, 2, 3, 3)], [(6, 1, 3, 3), (6, 1, 5, 5)]]
    filters = depthwise.taps_first(torch.randn(6, 1, 5, 4))
    assert filters.permute(2, 3, 0, 1).is_contiguous()
