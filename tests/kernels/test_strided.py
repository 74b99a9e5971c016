"""Strided convolutions computed another way, against PyTorch's own."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import doubleback as db
from doubleback import operators
from doubleback.kernels import Strided, pays
from doubleback.plan import _layouts
from support.plans import plan_of

aten = torch.ops.aten
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU"))]  # fmt: skip

# batch, channels, sizes, filters, kernel, stride, padding
CASES = {
    "stem": (2, 3, (16, 16), 5, (7, 7), 2, 3),
    "odd sizes": (2, 3, (17, 18), 5, (7, 7), 2, 3),
    "patches": (2, 3, (16, 16), 4, (4, 4), 4, 0),
    "patches and a rest": (2, 3, (19, 18), 4, (4, 4), 4, 0),
    "stride 3": (1, 2, (20, 23), 3, (5, 7), 3, 2),
    "small kernel": (2, 3, (15, 16), 4, (3, 4), 2, 1),
    "one channel": (2, 1, (16, 16), 4, (11, 11), 4, 2),
    "padding wider than a block": (1, 2, (9, 9), 2, (7, 7), 2, 5),
    "one output": (2, 3, (4, 4), 2, (4, 4), 4, 0),
    "no examples": (0, 3, (16, 16), 5, (7, 7), 2, 3),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_pytorch(case, dtype, layout, device):
    """In float64; `dtype` decides whether channels are filled up."""
    batch, channels, sizes, after, kernel, stride, padding = CASES[case]
    like = dict(dtype=torch.float64, device=device)
    x = torch.randn(batch, channels, *sizes, **like).contiguous(memory_format=layout)
    weight = torch.randn(after, channels, *kernel, **like).contiguous(memory_format=layout)
    bias = torch.randn(after, **like)
    options = ((stride,) * 2, (padding,) * 2, (1, 1), False, (0, 0), 1)
    here = Strided(x.shape, weight.shape, *options[:2], dtype)
    filled = dtype == torch.bfloat16 and channels == 3 and (stride, *kernel) != (4, 4, 4)
    assert here.fill == int(filled)
    y = F.conv2d(x, weight, bias, stride, padding)
    torch.testing.assert_close(here.forward(weight, x, bias), y)
    xi = torch.randn_like(y)
    dx, dw, _ = aten.convolution_backward(xi, x, weight, None, *options, [True, True, False])
    torch.testing.assert_close(here.transpose(weight, xi), dx)
    found, total = here.weight_adjoint(x, xi, True)
    torch.testing.assert_close(found, dw)
    torch.testing.assert_close(total, xi.sum((0, 2, 3)))
    # where there are no examples all layouts are alike; float64 on a GPU is cuDNN's to lay out
    if batch and device == "cpu":
        assert here.forward(weight, x, bias).is_contiguous(memory_format=torch.channels_last)
        assert found.is_contiguous(memory_format=torch.channels_last)


# kernel, stride, padding, dilation, channels, groups → (K and K□, Kᵀ)
CHOICES = {
    ((7, 7), (2, 2), (3, 3), (1, 1), 3, 1): (True, True),
    ((3, 3), (2, 2), (1, 1), (1, 1), 3, 1): (False, True),
    ((16, 16), (16, 16), (0, 0), (1, 1), 3, 1): (True, True),
    ((16, 16), (16, 16), (1, 1), (1, 1), 3, 1): (False, False),
    ((2, 2), (2, 2), (0, 0), (1, 1), 96, 1): (False, False),
    ((7, 7), (2, 2), (3, 3), (2, 2), 3, 1): (False, False),
    ((7, 7), (2, 2), (3, 3), (1, 1), 1, 3): (False, False),
    ((3, 3), (1, 1), (1, 1), (1, 1), 3, 1): (False, False),
    ((1, 1), (2, 2), (0, 0), (1, 1), 3, 1): (False, False),
    ((3, 7), (1, 2), (1, 3), (1, 1), 3, 1): (False, False),
}


@pytest.mark.parametrize(("case", "expected"), CHOICES.items(), ids=str)
def test_pays_on_gpus_for_few_channels(case, expected):
    kernel, stride, padding, dilation, channels, groups = case
    options = ((8, channels, *kernel), stride, padding, dilation, groups)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert tuple(pays(gpu, *options, turned) for turned in (False, True)) == expected
    assert not any(pays(cpu, *options, turned) for turned in (False, True))
    volume = ((8, channels, *kernel, 3), (*stride, 2), (*padding, 0), (*dilation, 1), groups)
    assert not pays(gpu, *volume, True)


@pytest.mark.parametrize("kernel", [7, 4, 3])
def test_networks_agree_with_autograd(kernel, monkeypatch):
    """With the choice of a GPU, made here: K, Kᵀ and K□, together and apart."""
    asked = []

    def as_on_a_gpu(device, *options):
        asked.append(pays(torch.device("cuda"), *options))
        return asked[-1]

    monkeypatch.setattr(operators, "pays", as_on_a_gpu)
    first = nn.Conv2d(3, 6, kernel, stride=4 if kernel == 4 else 2, padding=kernel // 2 % 2)
    net = nn.Sequential(first, nn.SiLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.LazyLinear(5))
    x, y = torch.randn(3, 3, 16, 16), torch.randint(5, (3,))
    net(x)
    model = db.Penalised(net, db.LossGradient("cross_entropy"))
    assert db.check(model, x.requires_grad_(), y).passed
    assert any(asked)


class Twice(nn.Module):
    """The image is read by another layer as well, or not."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.first, self.again = nn.Conv2d(3, 4, 7, stride=2, padding=3), again
        self.other = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x):
        y = self.first(x).mean((2, 3))
        return y + self.other(x).mean((2, 3)) if self.again else y


@pytest.mark.parametrize("again", [False, True])
def test_images_that_are_folded_keep_their_layout(again):
    model = db.Penalised(Twice(again), db.LossGradient("cross_entropy"))
    x, y = torch.randn(2, 3, 8, 8), torch.randint(4, (2,))
    plan = plan_of(model, x, y)
    on_gpu = SimpleNamespace(shape=plan.graph.shape, values=())
    channels_last, _ = _layouts(on_gpu, plan.steps, plan.penalised, plan.leaves)
    shapes = {plan.graph.shape(v) for v in channels_last}
    assert (x.shape in shapes) == again
    assert (4, 3, 7, 7) in shapes
