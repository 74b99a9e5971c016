"""The zoo: tiny versions of the architectures people train, and modules awkward on purpose.

    CASES: tuple[Case, ...]      BY_NAME: dict[str, Case]
    net, args = build(BY_NAME["vit"], dtype=torch.float64, seed=0)

Every net keeps the traits of its model (operators, wiring, state) and drops its width. A case says
which arguments are penalised (`wrt`), which output (`output`), and what that output looks like:
`classes=C` for logits (B, C) or (B, C, d1, ...), `scalar=True` for (B,) or (B, 1), neither for
anything else. Inputs are drawn from the generator given, in the default dtype.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import doubleback as db

B = 3  # batch size unless a case says otherwise


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], tuple]
    wrt: Any = 0
    output: Any = None
    classes: int | None = None
    scalar: bool = False
    train: bool = True
    notes: str = ""


CASES: list[Case] = []


def add(name: str, make: Callable[[], nn.Module], inputs: Callable, **kwargs) -> None:
    CASES.append(Case(name, make, inputs, **kwargs))


def case(name: str, inputs: Callable, **kwargs):
    """Class decorator: the class itself is `make`."""

    def register(cls):
        add(name, cls, inputs, **kwargs)
        return cls

    return register


@contextlib.contextmanager
def double():
    """Tensors and nets made inside are float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build(case: Case, dtype=torch.float64, seed: int = 0) -> tuple[nn.Module, tuple]:
    """The net and its arguments, drawn in float64 and then rounded: the same in any dtype."""
    with double():
        torch.manual_seed(seed)
        net = unsettle(case.make().train(case.train))
        args = case.inputs(torch.Generator().manual_seed(seed + 1))
    return net.to(dtype), leaves(args, dtype)


def unsettle(net: nn.Module) -> nn.Module:
    """Random scales, shifts and running statistics: ones and zeros would hide mistakes."""
    for module in net.modules():
        if not type(module).__name__.endswith(("Norm", "Norm1d", "Norm2d", "Norm3d")):
            continue
        for name, t in (*module.named_parameters(), *module.named_buffers()):
            if name in ("weight", "running_var"):
                nn.init.uniform_(t, 0.5, 1.5)
            elif name in ("bias", "running_mean"):
                nn.init.normal_(t, std=0.3)
    return net


def leaves(tree, dtype):
    """Floating-point tensors in dtype, as leaves that require grad; the rest as it is."""
    if isinstance(tree, (tuple, list)):
        return type(tree)(leaves(t, dtype) for t in tree)
    if isinstance(tree, Tensor) and tree.is_floating_point():
        return tree.detach().to(dtype).requires_grad_()
    return tree


def randn(*shape):
    """inputs(generator) -> one tensor."""
    return lambda g: (torch.randn(*shape, generator=g),)


def image(c=3, s=8, b=B):
    return randn(b, c, s, s)


# ---------------------------------------------------------------------------------------- dense


def mlp(act, sizes=(6, 9, 8, 4)):
    layers = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), act())]
    return nn.Sequential(*layers[:-1])


add("mlp_relu", lambda: mlp(nn.ReLU), randn(B, 6), classes=4)
add("mlp_tanh", lambda: mlp(nn.Tanh), randn(B, 6), classes=4)
add("mlp_gelu", lambda: mlp(nn.GELU), randn(B, 6), classes=4)
add("mlp_batch_of_one", lambda: mlp(nn.Softplus), randn(1, 6), classes=4)
add("mlp_prelu", lambda: mlp(nn.PReLU), randn(B, 6), classes=4)
add(
    "mlp_no_bias_scalar",
    lambda: nn.Sequential(nn.Linear(6, 9, bias=False), nn.SiLU(), nn.Linear(9, 1, bias=False)),
    randn(B, 6),
    scalar=True,
)
add(
    "linear_only",
    lambda: nn.Linear(6, 4),
    randn(B, 6),
    classes=4,
    notes="the Jacobian is constant: no curvature anywhere",
)


add("rrelu", lambda: mlp(nn.RReLU), randn(B, 6), classes=4, notes="slopes drawn in every step")


@case("mlp_every_activation", randn(B, 6), classes=4)
class EveryActivation(nn.Module):
    """A residual chain through the coordinate-wise activations of torch.nn. CELU with alpha 0.5:
    stock autograd rounds alpha to float32, which 0.5 survives."""

    def __init__(self):
        super().__init__()
        acts = [nn.ReLU(), nn.LeakyReLU(0.1), nn.PReLU(9), nn.ELU(), nn.SELU(), nn.CELU(0.5),
                nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Mish(), nn.Softplus(2.0), nn.Sigmoid(),
                nn.Tanh(), nn.Hardtanh(), nn.Hardswish(), nn.Hardsigmoid(), nn.Softsign(),
                nn.LogSigmoid(), nn.ReLU6(), nn.Softshrink(0.1), nn.Hardshrink(0.1),
                nn.Tanhshrink(), nn.Threshold(0.1, 0.2)]  # fmt: skip
        self.first, self.last = nn.Linear(6, 9), nn.Linear(9, 4)
        self.layers = nn.ModuleList(nn.Linear(9, 9) for _ in acts)
        self.acts = nn.ModuleList(acts)

    def forward(self, x):
        h = self.first(x)
        for layer, act in zip(self.layers, self.acts, strict=True):
            h = 0.8 * h + act(layer(h))
        return self.last(h)


@case("mlp_mixer", image(2, 8), classes=4)
class Mixer(nn.Module):
    def __init__(self, d=6, n=4):
        super().__init__()
        self.stem = nn.Conv2d(2, d, 4, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(3))
        # no last bias: the layer norms that follow would cancel it, and its gradient be rounding
        self.tokens = nn.Sequential(nn.Linear(n, 5), nn.GELU(), nn.Linear(5, n, bias=False))
        self.channels = nn.Sequential(nn.Linear(d, 7), nn.GELU(), nn.Linear(7, d))
        self.head = nn.Linear(d, 4)

    def forward(self, x):
        h = self.stem(x).flatten(2).transpose(1, 2)
        h = h + self.tokens(self.norms[0](h).transpose(1, 2)).transpose(1, 2)
        h = h + self.channels(self.norms[1](h))
        return self.head(self.norms[2](h).mean(1))


@case("siren", randn(5, 2), scalar=True)
class Siren(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 8), nn.Linear(8, 8)])
        self.last = nn.Linear(8, 1)

    def forward(self, x):
        for k, layer in enumerate(self.layers):
            x = torch.sin((6.0 if k == 0 else 1.0) * layer(x))
        return self.last(x).squeeze(-1)


@case("fourier_features", randn(B, 2), classes=4)
class FourierFeatures(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.randn(2, 5))
        self.net = mlp(nn.ReLU, (10, 8, 4))

    def forward(self, x):
        z = 2 * math.pi * x @ self.frequencies
        return self.net(torch.cat([z.sin(), z.cos()], -1))


@case(
    "neural_ode_rhs",
    lambda g: (torch.rand((), generator=g), torch.randn(B, 4, generator=g)),
    wrt=1,
    notes="f(t, x), as in FFJORD: the penalised argument comes second",
)
class OdeRhs(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(5, 8), nn.Linear(9, 4)

    def forward(self, t, x):
        t = t.expand(x.shape[0], 1)
        return self.two(torch.cat([self.one(torch.cat([x, t], 1)).tanh(), t], 1))


@case("iresnet_block", image(2, 5))
class IResNetBlock(nn.Module):
    """x + g(x) with Lip(g) < 1 by spectral normalisation."""

    def __init__(self):
        super().__init__()
        sn = parametrizations.spectral_norm
        self.g = nn.Sequential(nn.ELU(), sn(nn.Conv2d(2, 4, 3, padding=1)), nn.ELU(),
                               sn(nn.Conv2d(4, 2, 1)))  # fmt: skip

    def forward(self, x):
        return x + 0.9 * self.g(x)


@case("coupling_flow", randn(B, 6), scalar=True)
class Coupling(nn.Module):
    """Affine coupling (RealNVP): log-density of the input."""

    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleList(mlp(nn.Tanh, (3, 6, 6)) for _ in range(2))

    def forward(self, x):
        a, b = x.chunk(2, 1)
        log_det = 0
        for net in self.nets:
            s, t = net(a).split(3, 1)
            s = torch.tanh(s)
            a, b = b * torch.exp(s) + t, a
            log_det = log_det + s.sum(1)
        return log_det - 0.5 * (a**2 + b**2).sum(1)


# -------------------------------------------------------------------------------- convolutional


def conv_bn(i, o, k=3, act=nn.ReLU, **kw):
    return nn.Sequential(nn.Conv2d(i, o, k, padding=k // 2, bias=False, **kw), nn.BatchNorm2d(o),
                         act())  # fmt: skip


def head(c, classes=4):
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, classes))


add("vgg", lambda: nn.Sequential(
    nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(),
    nn.MaxPool2d(2), nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 4)),
    image(3, 8), classes=4)  # fmt: skip


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = conv_bn(3, 4)
        self.one = nn.Sequential(conv_bn(4, 4), conv_bn(4, 4, act=nn.Identity))
        self.two = nn.Sequential(conv_bn(4, 6, stride=2), conv_bn(6, 6, act=nn.Identity))
        self.skip = nn.Sequential(nn.Conv2d(4, 6, 1, 2, bias=False), nn.BatchNorm2d(6))
        self.head = head(6)

    def forward(self, x):
        x = self.stem(x)
        x = F.relu(x + self.one(x))
        return self.head(F.relu(self.skip(x) + self.two(x)))


add("resnet_bn_train", ResNet, image(3, 8), classes=4)
add("resnet_bn_eval", ResNet, image(3, 8), classes=4, train=False)


add("batch_norm_variants", lambda: nn.Sequential(
    nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3, affine=False), nn.Tanh(),
    nn.BatchNorm2d(3, affine=False, track_running_stats=False), nn.Flatten(),
    nn.Linear(27, 5, bias=False), nn.BatchNorm1d(5, eps=1e-3, momentum=0.3), nn.Softplus(),
    nn.Linear(5, 4)),
    image(2, 5), classes=4)  # fmt: skip


@case("densenet", image(3, 6), classes=4)
class DenseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(c), nn.ReLU(), nn.Conv2d(c, 2, 3, padding=1, bias=False))
            for c in (3, 5, 7))  # fmt: skip
        self.transition = nn.Sequential(
            nn.BatchNorm2d(9), nn.ReLU(), nn.Conv2d(9, 4, 1, bias=False), nn.AvgPool2d(2)
        )
        self.head = head(4)

    def forward(self, x):
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return self.head(self.transition(torch.cat(features, 1)))


class SqueezeExcite(nn.Module):
    def __init__(self, c, act, gate):
        super().__init__()
        self.down, self.up, self.act, self.gate = nn.Conv2d(c, 2, 1), nn.Conv2d(2, c, 1), act, gate

    def forward(self, x):
        s = F.adaptive_avg_pool2d(x, 1)
        return x * self.gate(self.up(self.act(self.down(s))))


class InvertedResidual(nn.Module):
    def __init__(self, i, o, act, se=None, stride=1):
        super().__init__()
        m = 2 * i
        self.body = nn.Sequential(conv_bn(i, m, 1, act), conv_bn(m, m, 3, act, groups=m,
                                  stride=stride), *([se(m)] if se else []),
                                  conv_bn(m, o, 1, nn.Identity))  # fmt: skip
        self.same = i == o and stride == 1

    def forward(self, x):
        return x + self.body(x) if self.same else self.body(x)


def mobile(act, se=None):
    body = InvertedResidual(4, 4, act, se), InvertedResidual(4, 5, act, se, stride=2)
    return nn.Sequential(conv_bn(3, 4, act=act), *body, conv_bn(5, 6, 1, act), head(6))


add("mobilenet_v2", lambda: mobile(nn.ReLU6), image(3, 6), classes=4)
add("mobilenet_v3",
    lambda: mobile(nn.Hardswish, lambda c: SqueezeExcite(c, nn.ReLU(), nn.Hardsigmoid())),
    image(3, 6), classes=4)  # fmt: skip
add("efficientnet",
    lambda: mobile(nn.SiLU, lambda c: SqueezeExcite(c, nn.SiLU(), nn.Sigmoid())),
    image(3, 6), classes=4)  # fmt: skip


@case("convnext", image(3, 8), classes=4)
class ConvNeXt(nn.Module):
    def __init__(self, c=4):
        super().__init__()
        self.stem, self.n0 = nn.Conv2d(3, c, 2, 2), nn.LayerNorm(c, eps=1e-6)
        self.dw, self.n1 = nn.Conv2d(c, c, 7, padding=3, groups=c), nn.LayerNorm(c, eps=1e-6)
        self.up, self.down = nn.Linear(c, 2 * c), nn.Linear(2 * c, c)
        self.scale = nn.Parameter(torch.full((c,), 0.3))
        self.n2, self.head = nn.LayerNorm(c, eps=1e-6), nn.Linear(c, 4)

    def forward(self, x):
        x = self.n0(self.stem(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        h = self.n1(self.dw(x).permute(0, 2, 3, 1))
        x = x + (self.scale * self.down(F.gelu(self.up(h)))).permute(0, 3, 1, 2)
        return self.head(self.n2(x.mean((-2, -1))))


class UNet(nn.Module):
    def __init__(self, up):
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 5, 3, padding=1)
        self.up = up()
        self.out, self.last = nn.Conv2d(8, 4, 3, padding=1), nn.Conv2d(4, 3, 1)

    def forward(self, x):
        a = F.silu(self.down1(x))
        b = F.silu(self.down2(F.max_pool2d(a, 2)))
        return self.last(F.silu(self.out(torch.cat([a, self.up(b)], 1))))


class Upsample(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(5, 4, 3, padding=1)

    def forward(self, b):
        smooth = F.interpolate(b, scale_factor=2, mode="bilinear", align_corners=False)
        return self.conv(smooth + 0.5 * F.interpolate(b, scale_factor=2, mode="nearest"))


add("unet_transposed", lambda: UNet(lambda: nn.ConvTranspose2d(5, 4, 2, 2)), image(2, 6), classes=3)
add("unet_interpolate", lambda: UNet(Upsample), image(2, 6), classes=3)

add("dcgan_critic", lambda: nn.Sequential(
    nn.Conv2d(3, 4, 4, 2, 1, bias=False), nn.LeakyReLU(0.2),
    nn.Conv2d(4, 6, 4, 2, 1, bias=False), nn.BatchNorm2d(6), nn.LeakyReLU(0.2),
    nn.Conv2d(6, 1, 2, bias=False), nn.Flatten()),
    image(3, 8), scalar=True)  # fmt: skip


@case("stylegan2_critic", image(3, 8, 4), scalar=True)
class StyleGan2Critic(nn.Module):
    """Equalised weights, blurred strided residual branch, minibatch standard deviation."""

    def __init__(self):
        super().__init__()
        shapes = [(4, 3, 1, 1), (4, 4, 3, 3), (4, 4, 1, 1), (4, 5, 3, 3)]
        self.weights = nn.ParameterList(torch.randn(*s) for s in shapes)
        self.dense, self.out = nn.Linear(64, 6), nn.Linear(6, 1)
        kernel = torch.tensor([1.0, 3, 3, 1])
        self.register_buffer("blur", (kernel[:, None] * kernel / 64).expand(4, 1, 4, 4).clone())

    def conv(self, x, k, **kw):
        w = self.weights[k]
        return F.conv2d(x, w / math.sqrt(w[0].numel()), **kw)

    def forward(self, x):
        x = F.leaky_relu(self.conv(x, 0), 0.2)
        skip = self.conv(F.conv2d(F.pad(x, (1, 1, 1, 1)), self.blur, groups=4), 2)
        main = F.leaky_relu(self.conv(x, 1, padding=1), 0.2) * math.sqrt(2)
        main = F.conv2d(F.pad(main, (2, 1, 2, 1)), self.blur, groups=4, stride=2)
        x = (F.interpolate(skip, size=main.shape[-2:], mode="nearest") + main) / math.sqrt(2)
        b, _, h, w = x.shape
        y = x.reshape(2, b // 2, 1, 4, h, w)
        y = (y - y.mean(0)).square().mean(0).add(1e-8).sqrt().mean((2, 3, 4)).reshape(-1, 1, 1, 1)
        x = torch.cat([x, y.repeat(2, 1, h, w)], 1)
        x = F.leaky_relu(self.conv(x, 3, padding=1), 0.2)
        return self.out(F.leaky_relu(self.dense(x.flatten(1)), 0.2))


add("locally_connected", lambda: nn.Sequential(
    db.LocallyConnected2d(2, 3, (6, 5), 3, stride=(2, 1), padding=1), nn.GELU(), nn.Flatten(2),
    db.LocallyConnected1d(3, 2, 15, 4, stride=3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 4)),
    randn(B, 2, 6, 5), classes=4)  # fmt: skip
add("conv1d", lambda: nn.Sequential(
    nn.Conv1d(2, 4, 3, dilation=2), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(4, 4, 3, groups=2),
    nn.Tanh(), nn.AvgPool1d(2, ceil_mode=True), nn.AdaptiveMaxPool1d(2), nn.Flatten(),
    nn.Linear(8, 4)),
    randn(B, 2, 20), classes=4)  # fmt: skip
add("conv3d", lambda: nn.Sequential(
    nn.Conv3d(1, 3, 3, padding=1), nn.SiLU(), nn.AvgPool3d(2), nn.Conv3d(3, 3, 2, groups=3),
    nn.ReLU(), nn.AdaptiveAvgPool3d((1, 2, 1)), nn.Flatten(), nn.Linear(6, 4)),
    randn(B, 1, 6, 4, 4), classes=4)  # fmt: skip
add("transposed_1d_3d", lambda: nn.Sequential(
    nn.ConvTranspose1d(2, 4, 3, stride=2, padding=1, output_padding=1, groups=2), nn.Tanh(),
    nn.Unflatten(2, (1, 3, 2)), nn.ConvTranspose3d(4, 2, (1, 2, 2), stride=(1, 2, 1)), nn.SiLU(),
    nn.Flatten(), nn.Linear(36, 4)),
    randn(B, 2, 3), classes=4)  # fmt: skip
add("transposed_2d", lambda: nn.Sequential(
    nn.ConvTranspose2d(2, 4, 3, stride=2, dilation=2, groups=2, padding=1), nn.ReLU(),
    nn.ConvTranspose2d(4, 2, 3, stride=(2, 1), output_padding=(1, 0), bias=False), nn.Tanh(),
    nn.Conv2d(2, 1, 3, stride=3, dilation=2)),
    image(2, 3))  # fmt: skip
add("padding_modes", lambda: nn.Sequential(
    nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), nn.Tanh(),
    nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect"), nn.Tanh(),
    nn.Conv2d(3, 3, 3, padding=(2, 1), padding_mode="replicate"), nn.Tanh(),
    nn.Conv2d(3, 2, 3, padding="same"), nn.ConstantPad2d((1, 0, -1, 2), 0.5), nn.Softplus(),
    head(2)),
    image(2, 5), classes=4)  # fmt: skip


@case("pooling", image(3, 9), classes=4)
class Pooling(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.last = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(75, 4)

    def forward(self, x):
        x = torch.tanh(self.stem(x))
        parts = [F.max_pool2d(x, 3, 2, padding=1), F.avg_pool2d(x, 3, 2, padding=1),
                 F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), F.adaptive_avg_pool2d(x, 5),
                 F.adaptive_max_pool2d(x, 5), F.lp_pool2d(x.abs() + 0.1, 2, 5, 1),
                 F.max_pool2d(x, 2, 2, ceil_mode=True)]  # fmt: skip
        h = torch.stack([p for p in parts if p.shape[-1] == 5]).sum(0)
        return self.last((h * h.sigmoid()).flatten(1))


@case("pixel_shuffle", image(4, 4))
class PixelShuffle(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = (nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(2, 2, 3),
                                          nn.Conv2d(8, 2, 1))  # fmt: skip

    def forward(self, x):
        x = F.pixel_shuffle(F.gelu(self.one(x)), 2)
        x = F.gelu(self.two(x))
        return self.three(F.channel_shuffle(F.pixel_unshuffle(x, 2), 2))


# ------------------------------------------------------------------------------- normalisation


add("group_norm", lambda: nn.Sequential(
    nn.Conv2d(2, 4, 3, bias=False), nn.GroupNorm(2, 4), nn.SiLU(), nn.GroupNorm(4, 4, affine=False),
    nn.Flatten(), nn.Linear(36, 4)),
    image(2, 5), classes=4)  # fmt: skip
add("instance_norm", lambda: nn.Sequential(
    nn.Conv2d(2, 4, 3, bias=False), nn.InstanceNorm2d(4), nn.SiLU(), nn.Conv2d(4, 3, 2, bias=False),
    nn.InstanceNorm2d(3, affine=True, track_running_stats=True), nn.Tanh(), nn.Flatten(),
    nn.Linear(12, 4)),
    image(2, 5), classes=4, notes="running statistics of an instance norm")  # fmt: skip
add("rms_norm", lambda: nn.Sequential(
    nn.Linear(6, 8), nn.RMSNorm(8), nn.SiLU(), nn.Linear(8, 8),
    nn.RMSNorm(8, eps=1e-3, elementwise_affine=False), nn.Tanh(), nn.Linear(8, 4)),
    randn(B, 5, 6))  # fmt: skip
add("layer_norm_2d", lambda: nn.Sequential(
    nn.Linear(6, 8), nn.LayerNorm((5, 8)), nn.SiLU(), nn.LayerNorm(8, elementwise_affine=False),
    nn.Linear(8, 8), nn.LayerNorm(8, bias=False), nn.Flatten(), nn.Linear(40, 4)),
    randn(B, 5, 6), classes=4)  # fmt: skip


@case("cosine_head", randn(B, 6), classes=4)
class CosineHead(nn.Module):
    """F.normalize and cosine similarity to learned prototypes, local response norm before."""

    def __init__(self):
        super().__init__()
        self.one, self.prototypes = nn.Linear(6, 8), nn.Parameter(torch.randn(4, 5))
        self.two = nn.Linear(8, 5)

    def forward(self, x):
        h = F.local_response_norm(self.one(x).tanh().unsqueeze(-1), 3, alpha=0.5).squeeze(-1)
        return 5 * F.normalize(self.two(h), dim=1) @ F.normalize(self.prototypes, dim=1).T


# ----------------------------------------------------------------------------------- attention


class Attention(nn.Module):
    def __init__(self, d=6, heads=2, causal=False, dropout=0.0):
        super().__init__()
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.heads, self.causal, self.dropout = heads, causal, dropout

    def forward(self, x, mask=None):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=p, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, d=6, dropout=0.0, **kw):
        super().__init__()
        self.n1, self.n2, self.attention = nn.LayerNorm(d), nn.LayerNorm(d), Attention(d, **kw)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask=None):
        x = x + self.dropout(self.attention(self.n1(x), mask))
        return x + self.dropout(self.mlp(self.n2(x)))


class ViT(nn.Module):
    def __init__(self, d=6, **kw):
        super().__init__()
        self.patches = nn.Conv2d(2, d, 4, 4)
        self.cls = nn.Parameter(torch.randn(1, 1, d))
        self.position = nn.Parameter(0.1 * torch.randn(1, 5, d))
        self.blocks = nn.ModuleList(Block(d, **kw) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, 4)

    def forward(self, x):
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.cls.expand(h.shape[0], -1, -1), h], 1) + self.position
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h)[:, 0])


add("vit", ViT, image(2, 8), classes=4)


@case(
    "gpt",
    lambda g: (torch.randn(2, 4, 6, generator=g),),
    classes=5,
    notes="token embeddings in, next-token logits (B, V, T) out, head tied to an embedding",
)
class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.vocabulary = nn.Embedding(5, 6)
        self.position = nn.Embedding(4, 6)
        self.blocks = nn.ModuleList(Block(causal=True) for _ in range(2))
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        x = x + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.vocabulary.weight).transpose(1, 2)


def bert_inputs(g):
    lengths = torch.tensor([4, 2, 3])
    return (torch.randn(3, 4, 6, generator=g), torch.randint(0, 3, (3, 4), generator=g),
            torch.arange(4) < lengths[:, None])  # fmt: skip


@case("bert", bert_inputs, classes=4, notes="padding mask and integer token types beside x")
class Bert(nn.Module):
    def __init__(self, d=6):
        super().__init__()
        self.types, self.norm = nn.Embedding(3, d), nn.LayerNorm(d, eps=1e-12)
        self.attention, self.n1, self.n2 = Attention(d), nn.LayerNorm(d), nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 8), nn.GELU(), nn.Linear(8, d))
        self.pool, self.head = nn.Linear(d, d), nn.Linear(d, 4)

    def forward(self, x, types, mask):
        x = self.norm(x + self.types(types))
        x = self.n1(x + self.attention(x, mask[:, None, None, :]))
        x = self.n2(x + self.mlp(x))
        m = mask[..., None].to(x.dtype)
        return self.head(torch.tanh(self.pool((x * m).sum(1) / m.sum(1))))


@case("swin", image(2, 8, 2), classes=4)
class Swin(nn.Module):
    """Shifted windows: roll, 2x2-window attention with relative position bias and shift mask."""

    def __init__(self, d=6, heads=2):
        super().__init__()
        self.patches = nn.Conv2d(2, d, 2, 2)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(4 * d)
        self.table = nn.Parameter(torch.randn(9, heads))
        grid = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij"))
        grid = grid.flatten(1)
        offset = grid[:, :, None] - grid[:, None, :] + 1
        self.register_buffer("index", offset[0] * 3 + offset[1])
        region = torch.zeros(4, 4)
        region[-1, :] += 1
        region[:, -1] += 2
        region = self.windows(region[None, :, :, None])[..., 0]
        mask = torch.where(region[:, None] == region[:, :, None], 0.0, -100.0)
        self.register_buffer("mask", mask)
        self.merge, self.head, self.heads = nn.Linear(4 * d, 8, bias=False), nn.Linear(8, 4), heads

    @staticmethod
    def windows(x):
        b, h, w, d = x.shape
        return x.view(b, h // 2, 2, w // 2, 2, d).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, d)

    def attend(self, x, shift):
        b, h, w, d = x.shape
        y = self.windows(torch.roll(self.n1(x), (-shift, -shift), (1, 2)))
        q, k, v = self.qkv(y).view(-1, 4, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        bias = self.table[self.index].permute(2, 0, 1)[None]
        if shift:
            bias = bias + self.mask.repeat(b, 1, 1)[:, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(q.shape[0], -1, -1, -1))
        y = self.out(y.transpose(1, 2).reshape(-1, 4, d))
        y = y.view(b, h // 2, w // 2, 2, 2, d).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, d)
        return x + torch.roll(y, (shift, shift), (1, 2))

    def forward(self, x):
        x = self.patches(x).permute(0, 2, 3, 1)
        x = self.attend(self.attend(x, 0), 1)
        x = torch.cat([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1)
        return self.head(self.merge(self.n2(x)).mean((1, 2)))


def encoder_layer(**kw):
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, **{"dropout": 0.0, **kw})
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(24, 4))


add("transformer_encoder_layer", encoder_layer, randn(B, 4, 6), classes=4)
add(
    "transformer_encoder_layer_eval",
    lambda: encoder_layer(norm_first=True, activation="gelu"),
    randn(B, 4, 6),
    classes=4,
    train=False,
    notes="eval mode has a fused path under no_grad",
)
add("transformer_encoder_layer_dropout", lambda: encoder_layer(dropout=0.2), randn(B, 4, 6),
    classes=4)  # fmt: skip
add("attention_dropout", lambda: ViT(dropout=0.3), image(2, 8), classes=4)


@case("manual_attention", randn(B, 4, 6), classes=4)
class ManualAttention(nn.Module):
    """Scores by hand, additive causal mask, grouped keys; nn.MultiheadAttention after it."""

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.mha = nn.Linear(6, 8), nn.Linear(6, 4), nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (4, 2)).transpose(1, 2)
        k, v = (t.unsqueeze(1).repeat_interleave(4, 1) for t in self.kv(x).chunk(2, -1))
        s = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(2)
        s = s.masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), float("-inf"))
        h = (s.softmax(-1) @ v).transpose(1, 2).flatten(2).transpose(0, 1)
        return self.head(self.mha(h, h, h)[0].mean(0))


@case(
    "cross_attention",
    lambda g: (torch.randn(B, 4, 6, generator=g), torch.randn(B, 5, 6, generator=g)),
    wrt=(0, 1),
    classes=4,
)
class CrossAttention(nn.Module):
    """Perceiver: learned latents attend to x, then x's summary attends to a second sequence."""

    def __init__(self):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(3, 6))
        self.k, self.v, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(18, 4)

    def forward(self, x, context):
        h = self.latents.expand(x.shape[0], -1, -1)
        for source in (x, context):
            h = h + F.scaled_dot_product_attention(h, self.k(source), self.v(source), scale=0.3)
        return self.head(h.flatten(1))


# ----------------------------------------------------------------------------------- recurrent


class Recurrent(nn.Module):
    def __init__(self, cell, **kw):
        super().__init__()
        self.rnn = cell(4, 5, batch_first=True, **kw)
        self.head = nn.Linear(10 if kw.get("bidirectional") else 5, 4)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


add("lstm", lambda: Recurrent(nn.LSTM), randn(B, 4, 4), classes=4)
add("gru", lambda: Recurrent(nn.GRU), randn(B, 4, 4), classes=4)
add("rnn_tanh", lambda: Recurrent(nn.RNN), randn(B, 4, 4), classes=4)
add("rnn_relu_deep", lambda: Recurrent(nn.RNN, nonlinearity="relu", num_layers=2), randn(B, 4, 4),
    classes=4)  # fmt: skip
add("lstm_bidirectional_deep", lambda: Recurrent(nn.LSTM, bidirectional=True, num_layers=2),
    randn(2, 3, 4), classes=4)  # fmt: skip
add("lstm_dropout", lambda: Recurrent(nn.LSTM, bidirectional=True, num_layers=3, dropout=0.4),
    randn(2, 3, 4), classes=4)  # fmt: skip
add("gru_dropout", lambda: Recurrent(nn.GRU, num_layers=2, dropout=0.4), randn(B, 4, 4), classes=4)


@case("gru_cell_loop", randn(B, 4, 4), classes=4)
class CellLoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(4, 5), nn.Linear(5, 4)

    def forward(self, x):
        h = x.new_zeros(x.shape[0], 5)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.head(h)


@case("selective_scan", randn(B, 5, 4), classes=4)
class SelectiveScan(nn.Module):
    """Mamba-like: input-dependent decay through cumsum and exp, gated output."""

    def __init__(self):
        super().__init__()
        self.decay, self.value, self.gate = (nn.Linear(4, 6) for _ in range(3))
        self.mix, self.head = nn.Conv1d(4, 4, 3, padding=2, groups=4), nn.Linear(6, 4)

    def forward(self, x):
        x = F.silu(self.mix(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        a = torch.cumsum(F.softplus(self.decay(x)), 1)
        h = torch.exp(-a) * torch.cumsum(torch.exp(a) * self.value(x), 1)
        return self.head((h * F.silu(self.gate(x))).mean(1))


# --------------------------------------------------------------------------- computed weights


@case("hypernetwork", randn(B, 5), classes=4, notes="weights computed from parameters")
class Hypernetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.latent, self.generator = nn.Parameter(torch.randn(3)), mlp(nn.Tanh, (3, 6, 40))
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        w = self.generator(self.latent).view(8, 5)
        return self.last(F.softplus(F.linear(x, w)))


@case("dynamic_linear", randn(B, 5), classes=4, notes="weights computed from the input")
class DynamicLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator, self.last = mlp(nn.Tanh, (5, 6, 30)), nn.Linear(6, 4)

    def forward(self, x):
        w = self.generator(x).view(-1, 6, 5)
        return self.last(torch.tanh(torch.bmm(w, x.unsqueeze(-1)).squeeze(-1)))


@case(
    "dynamic_conv",
    image(2, 5),
    classes=4,
    notes="filters computed from the input, batch folded into groups: active conv weight",
)
class DynamicConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator, self.head = nn.Linear(2, 54), head(3)

    def forward(self, x):
        b, c, h, w = x.shape
        filters = self.generator(x.mean((2, 3))).view(b * 3, c, 3, 3)
        y = F.conv2d(x.reshape(1, b * c, h, w), filters, padding=1, groups=b)
        return self.head(F.silu(y.view(b, 3, h, w)))


class Wrapped(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.conv, self.linear = wrap(nn.Conv2d(2, 3, 3)), wrap(nn.Linear(27, 4))

    def forward(self, x):
        return self.linear(F.softplus(self.conv(x)).flatten(1))


def hooked(wrap):
    """The hook-based wrappers, still in much code; they warn of their successors."""

    def apply(module):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return wrap(module)

    return apply


add("weight_norm", lambda: Wrapped(parametrizations.weight_norm), image(2, 5), classes=4)
add("weight_norm_hook", lambda: Wrapped(hooked(nn.utils.weight_norm)), image(2, 5), classes=4)
add(
    "spectral_norm",
    lambda: Wrapped(parametrizations.spectral_norm),
    image(2, 5),
    classes=4,
    notes="power iteration updates its buffers in every training forward",
)
add("spectral_norm_hook", lambda: Wrapped(hooked(nn.utils.spectral_norm)), image(2, 5), classes=4)
add("orthogonal", lambda: Wrapped(parametrizations.orthogonal), image(2, 5), classes=4)


# -------------------------------------------------------------------------------------- wiring


@case("shared_parameters", randn(B, 6))
class TiedAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.b1 = nn.Parameter(torch.randn(4, 6) / 3), nn.Parameter(torch.randn(4))
        self.b2 = nn.Parameter(torch.randn(6))

    def forward(self, x):
        return F.linear(torch.sigmoid(F.linear(x, self.weight, self.b1)), self.weight.t(), self.b2)


@case("alias_parameters", randn(B, 5), classes=5, notes="one tensor under two names")
class Alias(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 5)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


@case("module_twice", image(3, 5), classes=4)
class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = conv_bn(3, 3, act=nn.Softplus), head(3)

    def forward(self, x):
        return self.head(self.block(self.block(x)))


@case("input_residual", randn(B, 5))
class InputResidual(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(nn.Tanh, (5, 7, 5))

    def forward(self, x):
        return x + self.net(x)


@case("identity", randn(B, 5), classes=5, notes="the output is the input itself")
class Identity(nn.Module):
    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x


@case("input_concatenated_late", randn(B, 5), classes=4)
class LateInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.last = mlp(nn.ELU, (5, 7, 6)), mlp(nn.ELU, (11, 6, 4))

    def forward(self, x):
        return self.last(torch.cat([self.net(x), x], 1))


@case("frozen_branch", randn(B, 5), classes=4)
class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen, self.free, self.last = mlp(nn.SiLU, (5, 6)), mlp(nn.SiLU, (5, 6)), mlp(
            nn.SiLU, (6, 5, 4))  # fmt: skip
        self.frozen.requires_grad_(False)
        self.last[2].bias.requires_grad_(False)

    def forward(self, x):
        return self.last(torch.sin(self.frozen(x)) * self.free(x))


@case("unused_parameter", randn(B, 5), classes=4)
class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.unused = mlp(nn.SiLU, (5, 6, 4)), nn.Linear(3, 3)

    def forward(self, x):
        self.unused(x[:, :3])  # computed, thrown away
        return self.net(x)


@case("inplace", image(2, 5), classes=4)
class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 1), head(4)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.act(self.one(x))
        z = self.two(y)
        z += y
        z[:, :2] = torch.tanh(z[:, :2])
        z[:, :, 0].mul_(2.0)
        z.mul_(torch.sigmoid(y))
        out = torch.zeros_like(z)
        out[:, 1:] = z[:, :-1]
        out[:, 0] = z[:, 3] ** 2
        return self.head(out.clamp_(-3, 3))


@case(
    "buffer_update",
    randn(B, 5),
    classes=4,
    notes="a counter and an exponential average of activations, written in forward",
)
class BufferUpdate(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.last = nn.Linear(5, 6), nn.Linear(6, 4)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        h = self.net(x)
        if self.training:
            self.steps += 1
            self.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
        return self.last(torch.tanh(h - self.mean))


@case(
    "integer_side_input",
    lambda g: (torch.randn(B, 5, generator=g), torch.randint(0, 7, (B,), generator=g)),
    classes=4,
)
class IntegerSide(nn.Module):
    """Class-conditional: the embedding shifts and scales (FiLM)."""

    def __init__(self):
        super().__init__()
        self.table, self.one, self.last = nn.Embedding(7, 12), nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, x, y):
        scale, shift = self.table(y).chunk(2, 1)
        return self.last(F.silu(scale * self.one(x) + shift))


def pair(g):
    return torch.randn(B, 4, generator=g), torch.randn(B, 3, generator=g)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.bilinear, self.one, self.last = nn.Bilinear(4, 3, 6), nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, a, b):
        return self.last(torch.tanh(self.bilinear(a, b) + self.one(a)))


add("two_inputs_both", TwoInputs, pair, wrt=(0, 1), classes=4)
add("two_inputs_first", TwoInputs, pair, wrt=0, classes=4)
add("two_inputs_second", TwoInputs, pair, wrt=1, classes=4)


@case("tuple_argument", lambda g: (pair(g), torch.randn(B, 6, generator=g)), wrt=0, classes=4)
class TupleArgument(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = TwoInputs()
        self.last = nn.Linear(6, 4)

    def forward(self, pair, c):
        return self.net(*pair) * torch.sigmoid(self.last(c))


class Outputs(nn.Module):
    """Value, features, and a by-product that does not depend on x."""

    def __init__(self, pack):
        super().__init__()
        self.trunk, self.value, self.policy = nn.Linear(5, 6), nn.Linear(6, 1), nn.Linear(6, 4)
        self.pack = pack

    def forward(self, x):
        h = torch.tanh(self.trunk(x))
        return self.pack(self.policy(h), self.value(h), self.trunk.weight.square().sum())


def as_tuple(policy, value, cost):
    return policy, value, cost


def as_dict(policy, value, cost):
    return {"heads": {"policy": policy, "value": value}, "cost": cost}


add("tuple_output", lambda: Outputs(as_tuple), randn(B, 5), output=0, classes=4)
add("tuple_output_second", lambda: Outputs(as_tuple), randn(B, 5), output=1, scalar=True)
add("dict_output", lambda: Outputs(as_dict), randn(B, 5), output=("heads", "policy"), classes=4)


@case("detach_inside", randn(B, 5), classes=4)
class Detach(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.last = nn.Linear(5, 6), nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, x):
        h = torch.tanh(self.one(x))
        return self.last(h * torch.sigmoid(self.two(x)).detach() + (h - h.detach()) * h.detach())


@case("no_grad_inside", randn(B, 5), classes=4)
class NoGrad(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.last = nn.Linear(5, 6), nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, x):
        with torch.no_grad():
            scale = self.two(x).square().mean(1, keepdim=True) + 0.5
        return self.last(torch.tanh(self.one(x) / scale))


@case("straight_through", randn(B, 5), classes=4)
class StraightThrough(nn.Module):
    """Rounding in the forward pass, identity in the backward pass."""

    def __init__(self):
        super().__init__()
        self.one, self.last = nn.Linear(5, 6), mlp(nn.Tanh, (6, 5, 4))

    def forward(self, x):
        h = self.one(x)
        return self.last(h + (torch.round(2 * h) / 2 - h).detach())


@case("dead_relu", randn(B, 5), classes=4, notes="every unit of a layer is off: xi is zero")
class DeadRelu(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.last = nn.Linear(5, 6), nn.Linear(6, 4)
        nn.init.constant_(self.one.bias, -100.0)

    def forward(self, x):
        return self.last(F.relu(self.one(x)))


@case("independent_of_input", randn(B, 5), classes=4, notes="penalty 0, gradient 0")
class Independent(nn.Module):
    def __init__(self):
        super().__init__()
        self.constant = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return self.constant.tanh().expand(x.shape[0], 4)


@case(
    "integer_path_only",
    randn(B, 5),
    classes=4,
    notes="x reaches the output through integers and comparisons alone",
)
class IntegerPath(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 4)

    def forward(self, x):
        return self.table(x.argmax(1)) * (x.sum(1, keepdim=True) > 0)


add("dropout", lambda: nn.Sequential(
    nn.Linear(6, 9), nn.SiLU(), nn.Dropout(0.4), nn.Unflatten(1, (3, 3, 1)), nn.Dropout2d(0.4),
    nn.Flatten(), nn.AlphaDropout(0.3), nn.Linear(9, 4)),
    randn(4, 6), classes=4)  # fmt: skip


# ------------------------------------------------------------------------- arithmetic, indices


@case("einsum", lambda g: (torch.randn(B, 4, 5, generator=g),), classes=4)
class Einsum(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 2, 3))
        self.mix, self.last = nn.Parameter(torch.randn(2, 4)), nn.Linear(6, 4)

    def forward(self, x):
        h = torch.tanh(torch.einsum("bti,ihd->bhtd", x, self.weight))
        gram = torch.einsum("bhtd,bhsd->bhts", h, h)
        h = torch.einsum("bhts,bhsd,ht->bhd", gram, h, self.mix)
        return self.last(h.flatten(1))


add("softmax_output", lambda: nn.Sequential(mlp(nn.Softplus), nn.Softmax(-1)), randn(B, 6),
    classes=4)  # fmt: skip
add("log_softmax_output", lambda: nn.Sequential(mlp(nn.Softplus), nn.LogSoftmax(-1)), randn(B, 6),
    classes=4)  # fmt: skip
add(
    "glu",
    lambda: nn.Sequential(nn.Linear(6, 10), nn.GLU(), nn.Linear(5, 12), nn.GLU(1), nn.Linear(6, 4)),
    randn(B, 6),
    classes=4,
)


@case("swiglu", randn(B, 6), classes=4)
class SwiGlu(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


@case("logsumexp_head", randn(B, 6), scalar=True, notes="energy-based model")
class LogSumExp(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(nn.SiLU)

    def forward(self, x):
        return torch.logsumexp(self.net(x), 1)


@case("arithmetic", randn(B, 6), classes=4)
class Arithmetic(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(12, 4)

    def forward(self, x):
        a, b = self.one(x), self.two(x)
        c = torch.maximum(a, b) - torch.minimum(a, 0.5 * b) + torch.clamp(a, -0.4, 0.6)
        c = torch.where(a > b, c * b, c / (1 + b.square())) + a.abs().sqrt() - a.pow(3)
        d = torch.exp(-c.abs()) + torch.log1p(a * a) + torch.rsqrt(1 + b * b) - 1 / (2 + b.sin())
        d = d + torch.atan2(a, 2 + b.cos()) + torch.lerp(a, b, 0.3) + b.clamp(min=a) - a.sigmoid()
        e = d.var(1, keepdim=True) + d.amax(1, keepdim=True) + torch.special.expit(d).erf()
        return self.last(torch.cat([d, e - d.norm(dim=1, keepdim=True) + d.prod(1)[:, None]], 1))


@case("maxout", randn(B, 6), classes=4)
class Maxout(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 12), nn.Linear(6, 12)

    def forward(self, x):
        h = self.one(x).view(-1, 6, 2).amax(-1)
        return self.two(h).view(-1, 4, 3).max(-1).values


@case("cumsum", randn(B, 6), classes=4)
class Cumsum(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.last = nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x):
        h = F.softplus(self.one(x))
        return self.last(torch.cumsum(h, 1) + 0.1 * torch.cumprod(h.flip(1), 1))


@case(
    "gather_index",
    lambda g: (torch.randn(B, 6, 4, generator=g), torch.randint(0, 6, (B, 2), generator=g)),
    classes=4,
)
class GatherIndex(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 5), nn.Linear(10, 4)
        self.register_buffer("order", torch.tensor([3, 0, 0, 5]))

    def forward(self, x, where):
        h = torch.tanh(self.one(x))
        picked = h.gather(1, where[..., None].expand(-1, -1, 5))
        rows = torch.arange(h.shape[0], device=h.device)
        picked = picked + h[:, self.order][:, 1:3] + h[rows, where[:, 0]][:, None]
        top = h.topk(2, 1).values + h.sort(1).values.index_select(1, self.order[:2])
        h = torch.stack([picked, top * picked], -1).sum(-1)
        return self.two(h.flatten(1)) + h.new_zeros(h.shape[0], 4).index_add(
            1, self.order[:2], h[:, 0, :2])  # fmt: skip


@case("shape_operators", randn(2, 4, 6), classes=4)
class Shapes(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.last = nn.Linear(6, 6), nn.Linear(18, 4)

    def forward(self, x):
        h = torch.sin(self.one(x)).transpose(1, 2).contiguous().view(2, 3, 2, 4).movedim(1, -1)
        a, b = h.split([1, 3], 2)
        h = torch.cat([b, a * b[:, :, :1]], 2).flip(2).roll(1, 1).unfold(2, 2, 2)
        h = F.pad(h, (1, 0)).squeeze(-1).repeat(1, 1, 1, 1, 2).tile(2)[..., ::2]
        h = h * h.narrow(2, 0, 1).expand_as(h) + torch.tril(h) - h.diagonal(0, 1, 3).sum((1, 2, 3),
            keepdim=False)[:, None, None, None, None]  # fmt: skip
        u, v = h.unbind(1)
        h = torch.stack([u, v, u * v], 1).flatten(2)
        return self.last(h[..., :6].reshape(2, 18))


@case("graph_network", lambda g: (torch.randn(2, 5, 3, generator=g),
                                  torch.tensor([[0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 0, 2]])),
      classes=4)  # fmt: skip
class GraphNetwork(nn.Module):
    """Message passing over an edge list (index_select, index_add, scatter)."""

    def __init__(self):
        super().__init__()
        self.message, self.update, self.head = nn.Linear(6, 4), nn.Linear(7, 5), nn.Linear(5, 4)

    def forward(self, x, edges):
        source, target = edges
        pairs = torch.cat([x.index_select(1, source), x.index_select(1, target)], -1)
        m = F.silu(self.message(pairs))
        pooled = x.new_zeros(x.shape[0], 5, 4).index_add(1, target, m)
        index = target[None, :, None].expand_as(m)
        pooled = pooled + x.new_zeros(x.shape[0], 5, 4).scatter_add(1, index, m * m)
        return self.head(torch.tanh(self.update(torch.cat([x, pooled], -1))).sum(1))


@case("force_field", randn(2, 4, 3), scalar=True, notes="energy of positions; forces are its slope")
class ForceField(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(nn.Softplus, (4, 6, 1))
        self.register_buffer("centres", torch.linspace(0.0, 3.0, 4))
        self.register_buffer("index", torch.triu_indices(4, 4, 1))

    def forward(self, r):
        d = (r[:, self.index[0]] - r[:, self.index[1]]).norm(dim=-1, keepdim=True)
        return self.net(torch.exp(-((d - self.centres) ** 2))).sum((1, 2))


@case("fourier_operator", randn(2, 2, 6), notes="complex numbers inside, by rfft and irfft")
class FourierOperator(nn.Module):
    def __init__(self):
        super().__init__()
        self.real, self.imag = (nn.Parameter(torch.randn(2, 3, 3)) for _ in range(2))
        self.skip, self.last = nn.Conv1d(2, 3, 1), nn.Conv1d(3, 1, 1)

    def forward(self, x):
        f = torch.fft.rfft(x)[..., :3]
        f = torch.einsum("bim,iom->bom", f, torch.complex(self.real, self.imag))
        return self.last(F.gelu(torch.fft.irfft(f, n=x.shape[-1]) + self.skip(x)))


@case("spectrogram", randn(B, 8), classes=4, notes="modulus and phase of complex numbers")
class Spectrogram(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.head = nn.Linear(8, 8), nn.Linear(9, 4)

    def forward(self, x):
        f = torch.fft.rfft(self.dense(x))
        g = torch.polar(f.abs().log1p(), f.angle())[:, 1:]
        return self.head(torch.cat([f.abs(), g.imag], 1))


@case("mixture_of_experts", randn(B, 5), classes=4)
class Moe(nn.Module):
    """Top-2 of three experts, gates renormalised."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(5, 3)
        self.w1, self.w2 = nn.Parameter(torch.randn(3, 5, 6)), nn.Parameter(torch.randn(3, 6, 4))

    def forward(self, x):
        top = self.gate(x).topk(2, -1)
        gates = x.new_zeros(x.shape[0], 3).scatter(1, top.indices, top.values.softmax(-1))
        h = F.gelu(torch.einsum("bi,eih->ebh", x, self.w1))
        return torch.einsum("be,ebo->bo", gates, torch.baddbmm(h.new_zeros(3, 1, 4), h, self.w2))


@case("rbf_kernel", randn(B, 4), classes=3)
class Rbf(nn.Module):
    """Learned centres by pairwise distances."""

    def __init__(self):
        super().__init__()
        self.centres, self.width = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.zeros(5))
        self.last = nn.Linear(5, 3)

    def forward(self, x):
        d = (x[:, None] - self.centres).norm(dim=-1)
        return self.last(torch.exp(-d.square() * self.width.exp()) + 0.1 * d)


CASES = tuple(CASES)
# Its update reads a Python number out of num_batches_tracked, which no capture can follow.
UNCAPTURABLE = Case("batch_norm_momentum_none", lambda: nn.Sequential(
    nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5, momentum=None), nn.Tanh(), nn.Linear(5, 4)),
    randn(B, 6), classes=4)  # fmt: skip
BY_NAME = {c.name: c for c in CASES}
if len(BY_NAME) != len(CASES):
    raise ValueError("two zoo cases share a name")
