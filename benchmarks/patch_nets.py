"""Networks on which `db.patch()` is measured: plain PyTorch, shaped like those that people train.

`TABLE[name]` has the network at full size and tiny, and the loss that its users penalise.

>>> entry = TABLE["mobilenetv2"]
>>> net, x, y = entry.problem(tiny=True)
>>> net(x).shape
torch.Size([2, 10])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nets


def _conv(before: int, width: int, size: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, width, size, stride, size // 2, groups=groups, bias=False)


def _normed(before: int, width: int, size: int, act: nn.Module, **options) -> nn.Sequential:
    return nn.Sequential(_conv(before, width, size, **options), nn.BatchNorm2d(width), act)


class Bottleneck(nn.Module):
    """1×1, 3×3 (with the stride), 1×1 to four times the width; batch norm after each."""

    def __init__(self, before: int, width: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            _normed(before, width, 1, nn.ReLU()),
            _normed(width, width, 3, nn.ReLU(), stride=stride),
            _normed(width, 4 * width, 1, nn.Identity()),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != 4 * width:
            self.shortcut = _normed(before, 4 * width, 1, nn.Identity(), stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class ResNetOfBottlenecks(nn.Module):
    """Depths (3, 4, 6, 3) and width 64 is ResNet-50."""

    def __init__(self, depths: Sequence[int], width: int, classes: int = 1000):
        super().__init__()
        self.stem = nn.Sequential(
            _normed(3, width, 7, nn.ReLU(), stride=2), nn.MaxPool2d(3, 2, padding=1)
        )
        blocks, before = [], width
        for stage, depth in enumerate(depths):
            for i in range(depth):
                blocks.append(Bottleneck(before, width << stage, 2 if stage and i == 0 else 1))
                before = 4 * (width << stage)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Squeeze(nn.Module):
    """Channels scaled by sigmoid(W₂ silu(W₁ mean(x)))."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.down, self.up = nn.Conv2d(width, inner, 1), nn.Conv2d(inner, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.up(F.silu(self.down(x.mean((2, 3), keepdim=True)))))


class Inverted(nn.Module):
    """1×1 up, depthwise, (squeeze and excite,) 1×1 down; residual where shapes agree."""

    def __init__(self, before, width, size, stride, expand, act: Callable, squeeze: bool):
        super().__init__()
        inner = before * expand
        parts: list[nn.Module] = [_normed(before, inner, 1, act())] if expand > 1 else []
        parts.append(_normed(inner, inner, size, act(), stride=stride, groups=inner))
        if squeeze:
            parts.append(Squeeze(inner, max(1, before // 4)))
        parts.append(_normed(inner, width, 1, nn.Identity()))
        self.body, self.same = nn.Sequential(*parts), stride == 1 and before == width

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.same else self.body(x)


MOBILE = (  # expand, width, depth, stride, size
    (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 32, 3, 2, 3), (6, 64, 4, 2, 3),
    (6, 96, 3, 1, 3), (6, 160, 3, 2, 3), (6, 320, 1, 1, 3),
)  # fmt: skip
EFFICIENT = (
    (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3),
)  # fmt: skip


class InvertedNet(nn.Module):
    """`MOBILE` with ReLU6 is MobileNetV2, `EFFICIENT` with SiLU and squeezing EfficientNet-B0."""

    def __init__(self, plan, act: Callable, squeeze: bool, classes: int = 1000, last: int = 1280):
        super().__init__()
        self.stem, before, blocks = _normed(3, 32, 3, act(), stride=2), 32, []
        for expand, width, depth, stride, size in plan:
            for i in range(depth):
                step = stride if i == 0 else 1
                blocks.append(Inverted(before, width, size, step, expand, act, squeeze))
                before = width
        self.blocks = nn.Sequential(*blocks)
        self.last = _normed(before, last, 1, act())
        self.head = nn.Linear(last, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.blocks(self.stem(x))).mean((2, 3)))


class Blurred(nn.Module):
    """A binomial filter with stride 2, one channel at a time, as StyleGAN2's resampling."""

    def __init__(self, width: int):
        super().__init__()
        line = torch.tensor([1.0, 3.0, 3.0, 1.0]) / 8
        self.width = width
        self.register_buffer("kernel", (line[:, None] * line)[None, None].repeat(width, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.kernel, stride=2, padding=1, groups=self.width)


class CriticBlock(nn.Module):
    def __init__(self, before: int, width: int):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(before, w, 3, padding=1) for w in (before, width))
        self.blur, self.skip_blur = Blurred(width), Blurred(before)
        self.skip = nn.Conv2d(before, width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.leaky_relu(self.conv2(F.leaky_relu(self.conv1(x), 0.2)), 0.2)
        return (self.blur(y) + self.skip(self.skip_blur(x))) * 0.5**0.5


class StyleCritic(nn.Module):
    """Residual critic with blurred downsampling and a minibatch deviation channel; scalar."""

    def __init__(self, image: int, widths: Sequence[int]):
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 1)
        self.blocks = nn.Sequential(*(CriticBlock(a, b) for a, b in pairwise(widths)))
        side = image >> (len(widths) - 1)
        self.last = nn.Conv2d(widths[-1] + 1, widths[-1], 3, padding=1)
        self.dense = nn.Linear(widths[-1] * side * side, widths[-1])
        self.score = nn.Linear(widths[-1], 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.leaky_relu(self.stem(x), 0.2))
        spread = (x.var(0, unbiased=False) + 1e-8).sqrt().mean().expand(len(x), 1, *x.shape[2:])
        x = F.leaky_relu(self.last(torch.cat([x, spread], 1)), 0.2).flatten(1)
        return self.score(F.leaky_relu(self.dense(x), 0.2)).squeeze(1)


class DCGANCritic(nn.Module):
    """4×4 convolutions of stride 2 with instance norm and leaky ReLU; scalar, as for WGAN-GP."""

    def __init__(self, width: int):
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2)]
        for i in range(3):
            a, b = width << i, width << (i + 1)
            layers += [
                nn.Conv2d(a, b, 4, 2, 1, bias=False),
                nn.InstanceNorm2d(b, affine=True),
                nn.LeakyReLU(0.2),
            ]
        self.body = nn.Sequential(*layers, nn.Conv2d(width << 3, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).flatten(1).mean(1)


# ------------------------------------------------------------------------------- losses
#
# (net, x, y) → loss and the gradient's penalty, the latter from ∂(Σ outputs or losses)/∂x.


def cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="none")


def non_saturating(out: Tensor, y: Tensor) -> Tensor:
    return F.softplus(-out)


def wasserstein(out: Tensor, y: Tensor) -> Tensor:
    return -out


def squared(norm: Tensor) -> Tensor:
    return norm.square()


def deviation(norm: Tensor) -> Tensor:
    return (norm - 1).square()


@dataclass(frozen=True)
class Entry:
    """`losses` per example, differentiated by x (or the outputs are, for R1 and WGAN-GP)."""

    full: Callable[[], nn.Module]
    tiny: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tiny_shape: tuple[int, ...]
    batch: int = 64
    losses: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    of_output: bool = False
    penalty: Callable[[Tensor], Tensor] = squared
    weight: float = 1.0
    attention: bool = False

    def problem(self, *, tiny: bool, device: str = "cpu", dtype: torch.dtype = torch.float32):
        torch.manual_seed(0)
        net = (self.tiny if tiny else self.full)().to(device, dtype).train()
        batch, shape = (2, self.tiny_shape) if tiny else (self.batch, self.shape)
        x = torch.randn(batch, *shape).to(device, dtype)
        y = torch.randint(10, (batch,)).to(device)
        return net, x, y


IMAGE, SMALL = (3, 224, 224), (3, 64, 64)
TABLE: dict[str, Entry] = {
    "resnet18": Entry(
        partial(nets.ResNet, (2, 2, 2, 2), (64, 128, 256, 512)),
        partial(nets.ResNet, (1, 1, 1, 1), (8, 16, 16, 16), 10), IMAGE, SMALL,
    ),
    "resnet50": Entry(
        partial(ResNetOfBottlenecks, (3, 4, 6, 3), 64),
        partial(ResNetOfBottlenecks, (1, 1, 1, 1), 4, 10), IMAGE, SMALL,
    ),
    "mobilenetv2": Entry(
        partial(InvertedNet, MOBILE, nn.ReLU6, False),
        partial(InvertedNet, MOBILE[:3], nn.ReLU6, False, 10, 32), IMAGE, SMALL,
    ),
    "efficientnet-b0": Entry(
        partial(InvertedNet, EFFICIENT, nn.SiLU, True),
        partial(InvertedNet, EFFICIENT[:3], nn.SiLU, True, 10, 32), IMAGE, SMALL,
    ),
    "convnext-t": Entry(
        partial(nets.ConvNeXt, (3, 3, 9, 3), (96, 192, 384, 768)),
        partial(nets.ConvNeXt, (1, 1, 1, 1), (8, 16, 16, 16), 10), IMAGE, SMALL,
    ),
    "vit-b16": Entry(
        partial(nets.ViT, 224, 16, 768, 12, 12),
        partial(nets.ViT, 64, 16, 32, 2, 2, 10), IMAGE, SMALL, attention=True,
    ),
    "stylegan2-r1": Entry(
        partial(StyleCritic, 128, (64, 128, 256, 512, 512, 512)),
        partial(StyleCritic, 16, (8, 8, 8)), (3, 128, 128), (3, 16, 16), 32,
        non_saturating, True, squared, 5.0,
    ),
    "dcgan-wgan-gp": Entry(
        partial(DCGANCritic, 64), partial(DCGANCritic, 4), (3, 64, 64), (3, 64, 64), 256,
        wasserstein, True, deviation, 10.0,
    ),
}  # fmt: skip
