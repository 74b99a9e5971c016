"""Networks whose large channels-last tensors run on kernels of our own: batch norm from its
statistics to its second derivative, and what is constant over the places of an image."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import doubleback as db
from doubleback.kernels import launch, pointwise, standardisation, standardisation_triton
from doubleback.rules import structures
from doubleback.run import straight_line
from support.gpu import CUDA, DEVICE, needs_triton

# Raised inside Triton's interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


class Block(nn.Module):
    """Convolution, batch norm, squeeze-and-excite, a shortcut."""

    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.squeeze = nn.Conv2d(width, 4, 1)
        self.excite = nn.Conv2d(4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).contiguous(memory_format=torch.channels_last)  # cuDNN's is not in float64
        y = F.silu(self.norm(y))
        s = F.silu(self.squeeze(y.mean((2, 3), keepdim=True)))
        return x + y * torch.sigmoid(self.excite(s))


def network() -> nn.Module:
    torch.manual_seed(0)
    stem = [nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12, affine=False), nn.SiLU()]
    blocks = [Block(12), nn.BatchNorm2d(12, track_running_stats=False)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5)]
    return nn.Sequential(*stem, *blocks, *head).double().to(DEVICE)


def as_on_a_gpu(monkeypatch) -> None:
    """The ways that lead to the kernels are taken here too, in Triton's interpreter."""

    def slowly(groups, x):
        if groups.kind != "batch" or groups.layout(x) == torch.contiguous_format:
            return False
        return launch.being_flattened() or x.numel() >= standardisation.LARGE_WHEN_LAUNCHED

    def over_places(x, s):
        same = x.dim() == s.dim() == 4 and x.dtype is s.dtype
        small = same and s.shape == (*x.shape[:2], 1, 1) != x.shape
        return small and x.is_contiguous(memory_format=torch.channels_last)

    monkeypatch.setattr(standardisation, "_summed_slowly", slowly)
    for module in (pointwise, straight_line):
        monkeypatch.setattr(module, "constant_over_places", over_places)


WAYS = ["ordinary", "accumulate", "small", *(["graphed", "compiled"] if CUDA else [])]


@needs_triton
@pytest.mark.parametrize("way", WAYS)
def test_parity_with_stock(way, monkeypatch):
    """Four steps, the first two node by node, with every kernel at every size. small: recorded as
    for a CUDA graph, and run without one, where PyTorch's take fewer launches."""
    monkeypatch.setattr(standardisation, "LARGE", 0)
    if way != "small":
        monkeypatch.setattr(standardisation, "LARGE_WHEN_LAUNCHED", 0)
    monkeypatch.setattr(pointwise, "MANY", 0)
    if not CUDA:
        as_on_a_gpu(monkeypatch)
    calls: dict[str, int] = {}

    def counted(module, name):
        original = getattr(module, name)

        def call(*args, **options):
            added = name == "batch_backward" and args[3] is not None
            for key in (name, f"{name} onto")[: 1 + added]:
                calls[key] = calls.get(key, 0) + 1
            return original(*args, **options)

        monkeypatch.setattr(module, name, call)

    for name in ("batch_forward", "batch_backward"):
        counted(standardisation_triton, name)
    if CUDA:  # by the fused kernels of a GPU
        for name in ("fused_bend", "fused_onto"):
            counted(structures, name)
    monkeypatch.setattr(pointwise, "_places_plans", {})
    net = network().to(memory_format=torch.channels_last)
    twin = copy.deepcopy(net)
    model = db.Penalised(
        net,
        db.LossGradient("cross_entropy"),
        compile=way == "compiled",
        cuda_graph=way == "graphed",
    )
    optimisers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (net, twin)]
    for step in range(4):
        torch.manual_seed(step)
        x = torch.randn(4, 3, 5, 4, dtype=torch.float64, device=DEVICE)
        x = x.contiguous(memory_format=torch.channels_last)
        y = torch.randint(5, (4,), device=DEVICE)
        for optimiser in optimisers:
            optimiser.zero_grad()
        if way == "accumulate":
            model.accumulate(x, y, loss="cross_entropy", weight=0.3)
        else:
            out, penalty = model(x, y)
            (F.cross_entropy(out, y) + 0.3 * penalty).backward()
        leaf = x.clone().requires_grad_()
        losses = F.cross_entropy(twin(leaf), y, reduction="none")
        (slope,) = torch.autograd.grad(losses.sum(), leaf, create_graph=True)
        (losses.mean() + 0.3 * slope.square().sum((1, 2, 3)).mean()).backward()
        for mine, its in zip(net.parameters(), twin.parameters(), strict=True):
            error = (mine.grad - its.grad).norm() / its.grad.norm().clamp_min(1e-12)
            assert error < 1e-10 or (mine.grad - its.grad).norm() < 1e-12, (step, float(error))
        for mine, its in zip(net.buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-10, atol=1e-12)
        for optimiser in optimisers:
            optimiser.step()
    if way == "small":
        assert not calls.keys() & {"batch_forward", "batch_backward"}
    elif way != "compiled":
        ran = {"batch_forward", "batch_backward", "batch_backward onto"}
        assert calls.keys() == (ran | {"fused_bend", "fused_onto"} if CUDA else ran)
        assert any(plan is not None for plan in pointwise._places_plans.values())
