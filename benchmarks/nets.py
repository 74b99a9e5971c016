"""The networks that are measured: plain PyTorch, nothing of doubleback in them. Six are written so
that other frameworks can hold the same; five are torchvision's, and two are language models of
published widths on embeddings.

`TABLE[name]` holds a network's full size and a reduced one for CPUs; `problem(name, ...)` makes the
network and its inputs. Weights are drawn so that signals neither die nor explode, and inputs and
labels are random: no result of a benchmark depends on a trained network.

>>> net, xs, ys = problem("conv", small=True)
>>> net(xs[0]).shape
torch.Size([16, 10])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def _he(module: nn.Module) -> None:
    """N(0, 2/fan_in) weights and small random biases: unit signals through ReLU layers."""
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        if module.bias is not None:
            nn.init.normal_(module.bias, std=0.02)


class ConvStack(nn.Module):
    """3×3 convolutions with ReLU in pairs; the first of every later pair has stride 2."""

    def __init__(self, widths: Sequence[int], classes: int = 10):
        super().__init__()
        self.convs = nn.ModuleList()
        before = 3
        for i, width in enumerate(widths):
            stride = 2 if i and i % 2 == 0 else 1
            self.convs.append(nn.Conv2d(before, width, 3, stride=stride, padding=1))
            before = width
        self.head = nn.Linear(before, classes)
        self.apply(_he)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = F.relu(conv(x))
        return self.head(x.mean((2, 3)))


class DepthwiseStack(nn.Module):
    """A dense 3×3 stem, then 3×3 depthwise and 1×1 pointwise convolutions, ReLU after each.

    Widths and strides are those of `ConvStack`.
    """

    def __init__(self, widths: Sequence[int], classes: int = 10):
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        self.depthwise, self.pointwise = nn.ModuleList(), nn.ModuleList()
        before = widths[0]
        for i, width in enumerate(widths[1:], start=1):
            stride = 2 if i % 2 == 0 else 1
            self.depthwise.append(
                nn.Conv2d(before, before, 3, stride=stride, padding=1, groups=before)
            )
            self.pointwise.append(nn.Conv2d(before, width, 1))
            before = width
        self.head = nn.Linear(before, classes)
        self.apply(_he)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for depthwise, pointwise in zip(self.depthwise, self.pointwise, strict=True):
            x = F.relu(pointwise(F.relu(depthwise(x))))
        return self.head(x.mean((2, 3)))


class MLP(nn.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, inputs: int, width: int, hidden: int, classes: int = 10):
        super().__init__()
        sizes = [inputs] + [width] * hidden + [classes]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.apply(_he)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


class BasicBlock(nn.Module):
    def __init__(self, before: int, width: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Sequential | None = None
        if stride != 1 or before != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, width, 1, stride=stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nn.Module):
    """ResNet of basic blocks; depths (2, 2, 2, 2) is ResNet-18."""

    def __init__(self, depths: Sequence[int], widths: Sequence[int], classes: int = 1000):
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 7, stride=2, padding=3, bias=False)
        self.bn = nn.BatchNorm2d(widths[0])
        self.blocks = nn.ModuleList()
        before = widths[0]
        for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            for i in range(depth):
                self.blocks.append(BasicBlock(before, width, 2 if stage and i == 0 else 1))
                before = width
        self.head = nn.Linear(before, classes)
        self.apply(_he)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn(self.stem(x))), 3, stride=2, padding=1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of an (N, C, H, W) tensor."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """x + γ · MLP(norm(depthwise 7×7(x))), the MLP on the last axis.

    γ starts at 0.1 as in a net that has learned something: at the usual 1e-6 the blocks would
    hardly touch the gradient, and no comparison could tell a right block from a wrong one.
    """

    def __init__(self, width: int, scale: float = 0.1):
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), scale))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """ConvNeXt; depths (3, 3, 9, 3) and widths (96, 192, 384, 768) is ConvNeXt-T."""

    def __init__(self, depths: Sequence[int], widths: Sequence[int], classes: int = 1000):
        super().__init__()
        self.downs, self.stages = nn.ModuleList(), nn.ModuleList()
        before = 3
        for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            norm = ChannelNorm(before if stage else width, eps=1e-6)
            size = 2 if stage else 4
            conv = nn.Conv2d(before, width, size, stride=size)
            self.downs.append(nn.Sequential(norm, conv) if stage else nn.Sequential(conv, norm))
            self.stages.append(nn.Sequential(*(ConvNeXtBlock(width) for _ in range(depth))))
            before = width
        self.norm = nn.LayerNorm(before, eps=1e-6)
        self.head = nn.Linear(before, classes)
        self.apply(_he)

    def forward(self, x: Tensor) -> Tensor:
        for down, stage in zip(self.downs, self.stages, strict=True):
            x = stage(down(x))
        return self.head(self.norm(x.mean((2, 3))))


class TransformerBlock(nn.Module):
    """Pre-norm attention and MLP, each with its residual."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """Vision transformer with a class token; width 384, depth 12, 6 heads, patch 16 is ViT-S/16."""

    def __init__(
        self, image: int, patch: int, width: int, depth: int, heads: int, classes: int = 1000
    ):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.zeros(1, (image // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)
        for parameter in (self.token, self.position):
            nn.init.normal_(parameter, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.normal_(module.bias, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


class EncoderBlock(nn.Module):
    """Attention and MLP, a norm behind each residual, as in BERT."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm1 = nn.LayerNorm(width, eps=1e-12)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.norm2 = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        x = self.norm1(x + self.out(y))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Encoder(nn.Module):
    """A text encoder on embeddings, classified by its first token; width 768, depth 12, 12 heads is
    BERT-base."""

    def __init__(self, width: int, depth: int, heads: int, classes: int = 10):
        super().__init__()
        self.blocks = nn.ModuleList(EncoderBlock(width, heads) for _ in range(depth))
        self.pool = nn.Linear(width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(torch.tanh(self.pool(x[:, 0])))


class DecoderBlock(nn.Module):
    """RMS norm, rotary positions, grouped queries, gated MLP."""

    def __init__(self, width: int, heads: int, groups: int):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm1 = nn.RMSNorm(width, eps=1e-5)
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * groups * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.RMSNorm(width, eps=1e-5)
        inner = int(8 * width / 3 + 63) // 64 * 64
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        h = self.norm1(x)
        q = self.q(h).view(batch, tokens, self.heads, self.size).transpose(1, 2)
        kv = self.kv(h).view(batch, tokens, 2, self.groups, self.size).permute(2, 0, 3, 1, 4)
        k, v = kv.unbind(0)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, width))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair of coordinates turned by an angle that grows with the position."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Decoder(nn.Module):
    """A language model of Llama's kind on embeddings; the last token is classified."""

    def __init__(self, width: int, depth: int, heads: int, groups: int, classes: int = 1000):
        super().__init__()
        self.blocks = nn.ModuleList(DecoderBlock(width, heads, groups) for _ in range(depth))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, classes, bias=False)
        self.half = width // heads // 2

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
        rates = torch.arange(self.half, device=x.device, dtype=torch.float32) / self.half
        angles = torch.outer(places, 10_000.0**-rates).repeat(1, 2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x[:, -1]))


def torchvision_net(name: str) -> nn.Module:
    """A network of torchvision's, as written there. Nothing is dropped at random, so that gradients
    can be compared."""
    import torchvision

    net = getattr(torchvision.models, name)()
    for module in net.modules():
        if type(module).__name__ in ("Dropout", "StochasticDepth"):
            module.p = 0.0
    return net


@dataclass(frozen=True)
class Size:
    """One size of a network: constructor arguments, input shape of one example, batch."""

    arguments: dict[str, Any]
    shape: tuple[int, ...]
    batch: int


@dataclass(frozen=True)
class Entry:
    """A network of the table.

    `weight` is the penalty's weight in the loss. It scales both gradients to the same order of
    magnitude at these initial weights, so that comparing gradients judges the penalty's part too;
    no time depends on it. `heavy` marks nets whose double backward is slow to compile, `layouts`
    those with something to gain from channels-last, and `gib` estimates the device memory of one
    penalised float32 step at full size.
    """

    build: Callable[..., nn.Module]
    full: Size
    small: Size
    weight: float
    gib: float
    heavy: bool = False
    layouts: bool = True

    def size(self, small: bool) -> Size:
        return self.small if small else self.full


_WIDE, _NARROW = (64, 64, 128, 128, 256, 256), (16, 16, 32, 32, 64, 64)


def _published(name: str, layouts: bool = True) -> Entry:
    """One of torchvision's at its published size, 64 images of 224²; smaller: four."""
    full, small = (Size({"name": name}, (3, 224, 224), batch) for batch in (64, 4))
    return Entry(torchvision_net, full, small, weight=1.0, gib=24, heavy=True, layouts=layouts)


TABLE: dict[str, Entry] = {
    "conv": Entry(
        ConvStack,
        Size({"widths": _WIDE}, (3, 32, 32), 512),
        Size({"widths": _NARROW}, (3, 32, 32), 16),
        weight=100.0,
        gib=4,
    ),
    "depthwise": Entry(
        DepthwiseStack,
        Size({"widths": _WIDE}, (3, 32, 32), 512),
        Size({"widths": _NARROW}, (3, 32, 32), 16),
        weight=20.0,
        gib=5,
    ),
    "mlp": Entry(
        MLP,
        Size({"inputs": 3072, "width": 4096, "hidden": 7}, (3072,), 512),
        Size({"inputs": 768, "width": 512, "hidden": 7}, (768,), 64),
        weight=1.0,
        gib=2,
        layouts=False,
    ),
    "resnet18": Entry(
        ResNet,
        Size({"depths": (2, 2, 2, 2), "widths": (64, 128, 256, 512)}, (3, 224, 224), 128),
        Size({"depths": (1, 1, 1, 1), "widths": (16, 32, 64, 128), "classes": 10}, (3, 64, 64), 16),
        weight=2.0,
        gib=12,
        heavy=True,
    ),
    "convnext": Entry(
        ConvNeXt,
        Size({"depths": (3, 3, 9, 3), "widths": (96, 192, 384, 768)}, (3, 224, 224), 64),
        Size({"depths": (1, 1, 2, 1), "widths": (24, 48, 96, 192), "classes": 10}, (3, 64, 64), 8),
        weight=10.0,
        gib=24,
        heavy=True,
    ),
    "vit": Entry(
        ViT,
        Size({"image": 224, "patch": 16, "width": 384, "depth": 12, "heads": 6}, (3, 224, 224), 64),
        Size(
            {"image": 64, "patch": 8, "width": 96, "depth": 3, "heads": 3, "classes": 10},
            (3, 64, 64),
            16,
        ),
        weight=5.0,
        gib=16,
        heavy=True,
        layouts=False,
    ),
    "resnet50": _published("resnet50"),
    "mobilenetv2": _published("mobilenet_v2"),
    "efficientnet_b0": _published("efficientnet_b0"),
    "swin_t": _published("swin_t", layouts=False),
    "vit_b": _published("vit_b_16", layouts=False),
    "bert": Entry(
        Encoder,
        Size({"width": 768, "depth": 12, "heads": 12}, (256, 768), 32),
        Size({"width": 64, "depth": 2, "heads": 4}, (16, 64), 8),
        weight=5.0, gib=16, heavy=True, layouts=False,
    ),
    "llama": Entry(
        Decoder,
        Size({"width": 768, "depth": 12, "heads": 12, "groups": 4}, (512, 768), 16),
        Size({"width": 64, "depth": 2, "heads": 4, "groups": 2, "classes": 10}, (16, 64), 8),
        weight=5.0, gib=16, heavy=True, layouts=False,
    ),
}  # fmt: skip


def problem(
    name: str,
    *,
    small: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    sets: int = 2,
) -> tuple[nn.Module, list[Tensor], list[Tensor]]:
    """The network in training mode, and `sets` batches of inputs and labels.

    Drawn on the CPU in float32, then converted: every dtype and device sees the same numbers.
    """
    entry = TABLE[name]
    size = entry.size(small)
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(0)
    net = entry.build(**size.arguments)
    classes = [m.out_features for m in net.modules() if isinstance(m, nn.Linear)][-1]
    xs = [torch.randn(size.batch, *size.shape) for _ in range(sets)]
    ys = [torch.randint(classes, (size.batch,)) for _ in range(sets)]
    torch.random.set_rng_state(generator_state)
    net = net.to(device=device, dtype=dtype).train()
    return net, [x.to(device, dtype) for x in xs], [y.to(device) for y in ys]
