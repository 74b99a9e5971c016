"""Random graphs, drawn from every operator that has a rule, against stock autograd in float64.

A program is a list of steps over three pools of tensors: images (B, 4, 4, 4), sequences (B, 4, 6)
and vectors (B, 6). Each step applies one operator of the vocabulary to recent members of a pool
and puts its result (of the same shape) into a pool; whatever nobody used is summed into the head.
So every operator drawn reaches the output, in a graph with branches, joins and reuse.
"""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

import doubleback as db
from doubleback.capture import find_graph
from doubleback.rules import registered
from support import oracle
from support.oracle import Spec
from support.penalties import TOLERANCE, library_penalty, quartic, turned
from support.zoo import double

B = 3
ROWS, COLUMNS = torch.arange(B)[:, None], torch.tensor([[1, 0, 3, 3]])
SHAPES = {"image": (4, 4, 4), "sequence": (4, 6), "vector": (6,)}
KINDS = tuple(SHAPES)


@dataclass(frozen=True)
class Op:
    name: str
    build: Callable  # random.Random -> function or module of `arity` tensors
    kind: str = "any"
    arity: int = 1
    to: str | None = None  # pool of the result, if another


OPS: dict[str, Op] = {}


def op(name: str, build: Callable, kind: str = "any", arity: int = 1, to: str | None = None):
    if name in OPS:
        raise ValueError(f"{name} is in the vocabulary twice")
    OPS[name] = Op(name, build, kind, arity, to)


def plain(name: str, fn: Callable, kind: str = "any", arity: int = 1):
    """A function without parameters or choices."""
    op(name, lambda r: fn, kind, arity)


class Module(nn.Module):
    """fn(module, *tensors) around an inner module or parameters."""

    def __init__(self, fn, inner=None, **parameters):
        super().__init__()
        self.fn, self.inner = fn, inner
        for name, shape in parameters.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / 2))

    def forward(self, *tensors):
        return self.fn(self, *tensors)


def fit(t: Tensor, shape=None) -> Tensor:
    """Crop or zero-pad every axis but the first to the canonical shape of its rank."""
    shape = shape or {4: SHAPES["image"], 3: SHAPES["sequence"], 2: SHAPES["vector"]}[t.dim()]
    for axis, size in enumerate(shape, 1):
        t = t.narrow(axis, 0, min(size, t.shape[axis]))
    missing = [s - n for s, n in zip(shape, t.shape[1:], strict=True)]
    if any(missing):
        t = F.pad(t, [k for m in reversed(missing) for k in (0, m)])
    return t


# ----------------------------------------------------------------------------- coordinate-wise

for activation in (
    "relu", "leaky_relu", "elu", "selu", "celu", "silu", "mish", "softplus", "sigmoid", "tanh",
    "hardtanh", "hardswish", "hardsigmoid", "softsign", "logsigmoid", "relu6", "softshrink",
    "hardshrink", "tanhshrink", "gelu",
):  # fmt: skip
    # looked up when called, so that the oracle's twice differentiable hardsigmoid is found
    plain(activation, lambda x, name=activation: getattr(F, name)(x))
plain("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"))
plain("leaky_relu_slope", lambda x: F.leaky_relu(x, 0.3))
plain("softplus_sharp", lambda x: F.softplus(x, beta=3.0, threshold=2.0))
plain("threshold", lambda x: F.threshold(x, 0.2, -0.4))
plain("rrelu", lambda x: F.rrelu(x, training=True))
op("prelu", lambda r: nn.PReLU(init=r.uniform(0.1, 0.5)))
op("prelu_channels", lambda r: nn.PReLU(4), "image")
plain("exp", lambda x: torch.exp(-x.abs()))
plain("expm1", lambda x: torch.expm1(0.5 * x.tanh()))
plain("log", lambda x: torch.log(x.abs() + 0.5))
plain("log1p", lambda x: torch.log1p(x * x))
plain("sqrt", lambda x: torch.sqrt(x * x + 0.1))
plain("rsqrt", lambda x: torch.rsqrt(x * x + 0.5))
plain("reciprocal", lambda x: torch.reciprocal(1.5 + x.sin()))
plain("sin", torch.sin)
plain("cos", torch.cos)
plain("atan", torch.atan)
plain("erf", torch.erf)
plain("tan", lambda x: torch.tan(x.tanh() / 2))
plain("sinh", lambda x: torch.sinh(x.tanh()))
plain("cosh", lambda x: torch.cosh(x.tanh()))
plain("asin", lambda x: torch.asin(0.8 * x.tanh()))
plain("acos", lambda x: torch.acos(0.8 * x.tanh()))
plain("asinh", torch.asinh)
plain("atanh", lambda x: torch.atanh(0.8 * x.tanh()))
plain("exp2", lambda x: torch.exp2(-x.abs()))
plain("log2", lambda x: torch.log2(x.abs() + 0.5))
plain("log10", lambda x: torch.log10(x.abs() + 0.5))
plain("positive", lambda x: +x)
plain("steps", lambda x: x * (x.floor() - 2 * x.ceil() + x.trunc() + x.round() + x.sign()))
plain("heaviside", lambda x: x * torch.heaviside(x.detach(), x.new_tensor(0.5)))
plain("abs", torch.abs)
plain("neg", torch.neg)
plain("square", torch.square)
plain("pow_three", lambda x: x.pow(3))
plain("pow_fraction", lambda x: (x.abs() + 0.1) ** 1.5)
plain("pow_of_scalar", lambda x: 1.7**x)
plain("clamp", lambda x: x.clamp(-0.7, 0.9))
plain("clamp_min", lambda x: x.clamp_min(-0.3))
plain("clamp_max", lambda x: x.clamp_max(0.4))
plain("dropout", lambda x: F.dropout(x, 0.3))
# not onto 0, a kink of PReLU where autograd's own vjp and jvp differ
plain("round_straight_through", lambda x: x + (x.round() + 0.1 - x).detach())
plain("noise", lambda x: x * (1 + torch.rand_like(x) / 9) + torch.randn_like(x) / 9)
plain("bernoulli", lambda x: x * torch.bernoulli(torch.full_like(x, 0.6)))
plain("constants", lambda x: x * x.new_full((1,), 0.9) + torch.ones_like(x) - x.new_ones(()))
plain("detach", lambda x: x * x.detach().sigmoid())

# ---------------------------------------------------------------------------------- arithmetic

plain("add", torch.add, arity=2)
plain("add_alpha", lambda a, b: torch.add(a, b, alpha=0.3), arity=2)
plain("sub", torch.sub, arity=2)
plain("sub_scalar", lambda a: torch.sub(a, 0.3))
plain("rsub_tensor", lambda a, b: torch.rsub(a, b, alpha=0.4), arity=2)
plain("rsub", lambda a: 1.3 - a)
plain("mul", torch.mul, arity=2)
plain("div", lambda a, b: a / (1 + b * b), arity=2)
plain("div_scalar", lambda a: 1 / (2 + a.abs()))
plain("maximum", torch.maximum, arity=2)
plain("minimum", torch.minimum, arity=2)
plain("clamp_tensor", lambda a, b: a.clamp(min=b - 1), arity=2)
plain("where", lambda a, b: torch.where(a > b, a * b, b), arity=2)
plain("where_scalar", lambda a: torch.where(a > 0, a, a.new_tensor(0.1)))
plain("where_number", lambda a: torch.where(a > 0, a, 0.1))
plain("lerp", lambda a, b: torch.lerp(a, b, 0.3), arity=2)
plain("addcmul", lambda a, b: torch.addcmul(a, a, b, value=0.5), arity=2)
plain("pow_tensor", lambda a, b: (1 + a * a) ** b.tanh(), arity=2)
plain("atan2", lambda a, b: torch.atan2(a, 2 + b.cos()), arity=2)
plain("logaddexp", torch.logaddexp, arity=2)
plain("masked_fill", lambda a, b: a.masked_fill(b > 0.3, 0.2), arity=2)
plain("inplace", lambda a, b: a.clone().mul_(b).add_(a).relu_(), arity=2)
op("affine", lambda r: Module(lambda m, x: x * m.scale + m.shift, scale=(4,), shift=(4,)), "image")
op("scale_last", lambda r: Module(lambda m, x: m.scale * x, scale=(6,)), "vector")


def slice_assign(a, b):
    y = a.clone()
    y[:, 1:3] = b[:, :2] * a[:, 2:]
    return y


plain("slice_assign", slice_assign, "sequence", 2)


def fill(x):
    y = x.clone()
    y[:, 0] = 0.5
    y[:, 1] = x.mean()
    y[:, 2].fill_(x.detach().amax())
    return y * x


plain("fill", fill)

# ---------------------------------------------------------------------------------- reductions


def reduction(name: str, fn: Callable):
    """a + reduced(a), the reduced axis broadcast back: (channel), (last), or several axes."""

    def build(r):
        axes = r.choice([1, -1, (1,), (-1, 1)])
        several = fn in (torch.sum, torch.mean, torch.amax, torch.amin, torch.logsumexp, variance)

        def apply(x):
            dim = axes if several and x.dim() > 2 else (axes if isinstance(axes, int) else 1)
            return 0.5 * x + fn(x, dim=dim, keepdim=True)

        return apply

    op(name, build)


def variance(x, dim, keepdim):
    return torch.var(x, dim=dim, keepdim=keepdim)


reduction("sum", torch.sum)
reduction("mean", torch.mean)
reduction("amax", torch.amax)
reduction("amin", torch.amin)
reduction("logsumexp", torch.logsumexp)
reduction("var", variance)
reduction("std", lambda x, dim, keepdim: x.std(dim=dim, keepdim=keepdim))
reduction("norm", lambda x, dim, keepdim: torch.linalg.vector_norm(x, dim=dim, keepdim=keepdim))
reduction("max_values", lambda x, dim, keepdim: x.max(dim=dim, keepdim=keepdim).values)
reduction("min_values", lambda x, dim, keepdim: x.min(dim=dim, keepdim=keepdim).values)
reduction("prod", lambda x, dim, keepdim: x.tanh().prod(dim=dim, keepdim=keepdim))
plain("sum_all", lambda x: x + 0.1 * x.square().sum())
plain("mean_all", lambda x: x - x.mean())
plain("kthvalue", lambda x: x * x.kthvalue(2, 1, keepdim=True).values)
plain("median", lambda x: x - x.median(1, keepdim=True).values)
plain("cumsum", lambda x: x.cumsum(1))
plain("softmax", lambda x: x.softmax(-1))
plain("softmax_channels", lambda x: x.softmax(1))
plain("log_softmax", lambda x: x.log_softmax(-1))
plain("softmin", lambda x: F.softmin(x, dim=1))
plain("normalize", lambda x: F.normalize(x + 0.1, dim=1))

# ------------------------------------------------------------------------------ dense products

op("linear", lambda r: nn.Linear(6, 6), "sequence")
op("linear_vector", lambda r: nn.Linear(6, 6, bias=r.random() < 0.5), "vector")
op("bottleneck", lambda r: nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 6)), "vector")
op("addmm", lambda r: Module(lambda m, x: torch.addmm(m.b, x, m.w, beta=0.5), b=(6,), w=(6, 6)),
   "vector")  # fmt: skip
op("mm", lambda r: Module(lambda m, x: x.mm(m.w), w=(6, 6)), "vector")
op("bilinear_layer", lambda r: nn.Bilinear(6, 6, 6), "vector", 2)
op("weight_from_parameters", lambda r: Module(lambda m, x: F.linear(x, m.a @ m.b.tanh()), a=(6, 3),
                                              b=(3, 6)), "vector")  # fmt: skip
op("weight_from_input", lambda r: Module(
    lambda m, x: torch.bmm(m.inner(x).reshape(-1, 6, 6), x.unsqueeze(-1)).squeeze(-1),
    nn.Linear(6, 36)), "vector")  # fmt: skip
op("addmv", lambda r: Module(lambda m, x: x + torch.addmv(m.b, x, m.w)[:, None], b=(B,), w=(6,)),
   "vector")  # fmt: skip
plain("trace", lambda x: x * (x.T @ x).trace() / 9, "vector")
plain("dot", lambda x: x * x.flatten().dot(x.flatten().cos()) / 9)
plain("matmul", lambda a, b: a @ (b.mT @ a) / 4, "sequence", 2)
plain("matmul_image", lambda a, b: torch.matmul(a, b), "image", 2)
op("matmul_broadcast", lambda r: Module(lambda m, x: m.w @ x, w=(4, 4)), "sequence")
plain("bmm", lambda a, b: torch.bmm(torch.bmm(a, b.transpose(1, 2)), b), "sequence", 2)
plain("baddbmm", lambda a, b: torch.baddbmm(a, a @ b.mT, b, alpha=0.3), "sequence", 2)
op("einsum", lambda r: Module(lambda m, x: torch.einsum("bti,ijk,btk->btj", x, m.w, x),
                              w=(6, 6, 6)), "sequence")  # fmt: skip
plain("einsum_pair", lambda a, b: torch.einsum("bchw,bdhw->bcd", a, b)[..., None] * a[:, :1],
      "image", 2)  # fmt: skip
plain("outer", lambda a, b: (a.unsqueeze(2) * b.unsqueeze(1)).sum(1), "vector", 2)
op(
    "embedding",
    lambda r: Module(
        lambda m, x: x + m.inner(torch.arange(4, device=x.device) % 3), nn.Embedding(3, 6)
    ),
    "sequence",
)
op("glu", lambda r: nn.Sequential(nn.Linear(6, 12), nn.GLU()), "sequence")

# --------------------------------------------------------------------------------- convolution


def conv2d(r):
    k, stride, dilation = r.choice([(1, 1, 1), (3, 1, 1), (3, 2, 1), (2, 1, 2), (3, 1, 2)])
    groups = r.choice([1, 2, 4])
    conv = nn.Conv2d(
        4,
        4,
        k,
        stride,
        r.choice([0, 1, 2]) if k > 1 else 0,
        dilation,
        groups,
        bias=r.random() < 0.5,
    )
    return nn.Sequential(nn.ConstantPad2d(1, 0.1), conv)


op("conv2d", lambda r: Module(lambda m, x: fit(m.inner(x)), conv2d(r)), "image")
op(
    "conv2d_padding_mode",
    lambda r: nn.Conv2d(
        4, 4, 3, padding=1, padding_mode=r.choice(["circular", "reflect", "replicate"])
    ),
    "image",
)
op("depthwise", lambda r: nn.Conv2d(4, 4, 3, padding="same", groups=4), "image")
op(
    "conv2d_unbatched_weight",
    lambda r: Module(
        lambda m, x: F.conv2d(x, m.w * m.g.exp(), padding=1), w=(4, 4, 3, 3), g=(4, 1, 1, 1)
    ),
    "image",
)
op("conv2d_weight_from_input", lambda r: Module(lambda m, x: F.conv2d(
    x.reshape(1, -1, 4, 4), m.inner(x.mean((2, 3))).reshape(-1, 1, 3, 3), padding=1,
    groups=4 * x.shape[0]).view(x.shape), nn.Linear(4, 36)), "image")  # fmt: skip
op(
    "conv_transpose2d",
    lambda r: Module(
        lambda m, x: fit(m.inner(x)),
        nn.ConvTranspose2d(
            4, 4, 3, r.choice([1, 2]), 1, 0, r.choice([1, 2]), dilation=r.choice([1, 2])
        ),
    ),
    "image",
)
op("conv_transpose2d_output_padding", lambda r: Module(
    lambda m, x: F.avg_pool2d(m.inner(x), 2), nn.ConvTranspose2d(4, 4, 3, 2, 1, 1, bias=False)),
   "image")  # fmt: skip
op(
    "conv1d",
    lambda r: Module(
        lambda m, x: fit(m.inner(x)),
        nn.Conv1d(4, 4, r.choice([2, 3]), r.choice([1, 2]), 2, r.choice([1, 2]), r.choice([1, 4])),
    ),
    "sequence",
)
op("conv_transpose1d", lambda r: Module(lambda m, x: fit(m.inner(x)), nn.ConvTranspose1d(
    4, 4, 3, r.choice([1, 2]), r.choice([0, 1]), groups=r.choice([1, 2]))), "sequence")  # fmt: skip
op("conv3d", lambda r: Module(lambda m, x: m.inner(x.unsqueeze(1)).mean(1), nn.Conv3d(
    1, 2, 3, padding=1, bias=r.random() < 0.5)), "image")  # fmt: skip
op(
    "conv_transpose3d",
    lambda r: Module(
        lambda m, x: fit(m.inner(x.unsqueeze(1)).squeeze(1)),
        nn.ConvTranspose3d(1, 1, 2, r.choice([1, 2])),
    ),
    "image",
)
op("spectral_norm", lambda r: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), "vector")
op("locally_connected2d", lambda r: Module(lambda m, x: fit(m.inner(x)), db.LocallyConnected2d(
    4, 4, 4, r.choice([2, 3]), r.choice([1, 2]), 1, r.choice([1, 2]))), "image")  # fmt: skip
op("locally_connected1d", lambda r: Module(lambda m, x: fit(m.inner(x)), db.LocallyConnected1d(
    4, 4, 6, r.choice([2, 3]), r.choice([1, 2]), r.choice([0, 1]))), "sequence")  # fmt: skip
op("weight_norm", lambda r: nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1)), "image")

# ------------------------------------------------------------------------------- normalisation


def unsettled(module):
    for name, t in (*module.named_parameters(), *module.named_buffers()):
        if name in ("weight", "running_var"):
            nn.init.uniform_(t, 0.5, 1.5)
        elif name in ("bias", "running_mean"):
            nn.init.normal_(t, std=0.3)
    return module


class Eval(nn.Module):
    """A module that stays in eval mode inside a training net."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner.eval()

    def train(self, mode=True):
        return self

    def forward(self, x):
        return self.inner(x)


op("batch_norm", lambda r: unsettled(nn.BatchNorm2d(4)), "image")
op("batch_norm_eval", lambda r: Eval(unsettled(nn.BatchNorm2d(4))), "image")
op(
    "batch_norm_untracked",
    lambda r: unsettled(nn.BatchNorm2d(4, track_running_stats=False)),
    "image",
)
op("batch_norm_sequence", lambda r: nn.BatchNorm1d(4, affine=False, momentum=0.3), "sequence")
op("instance_norm", lambda r: unsettled(nn.InstanceNorm2d(4, affine=r.random() < 0.5)), "image")
op(
    "instance_norm_tracked",
    lambda r: unsettled(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
    "image",
)
op("group_norm", lambda r: unsettled(nn.GroupNorm(r.choice([1, 2]), 4, affine=r.random() < 0.7)),
   "image")  # fmt: skip
op("layer_norm", lambda r: unsettled(nn.LayerNorm(r.choice([6, (4, 6)]), eps=1e-3)), "sequence")
op("layer_norm_vector", lambda r: nn.LayerNorm(6, elementwise_affine=False), "vector")
op("layer_norm_image", lambda r: unsettled(nn.LayerNorm((4, 4), bias=False)), "image")
op("rms_norm", lambda r: unsettled(nn.RMSNorm(6, elementwise_affine=r.random() < 0.7)), "sequence")
op("rms_norm_image", lambda r: unsettled(nn.RMSNorm((4, 4), eps=1e-2)), "image")

# ------------------------------------------------------------------------------------- pooling

plain("max_pool2d", lambda x: F.max_pool2d(x, 3, 1, 1), "image")
plain("max_pool2d_stride", lambda x: fit(F.max_pool2d(x, 2, 2, ceil_mode=True)), "image")
plain("max_pool2d_dilated", lambda x: fit(F.max_pool2d(x, 2, 1, 1, dilation=2)), "image")
plain("max_pool2d_indices", lambda x: F.max_pool2d(x, 3, 1, 1, return_indices=True)[0], "image")
plain("max_pool3d_indices", lambda x: F.max_pool3d(x, 3, 1, 1, return_indices=True)[0], "image")
plain("max_pool1d", lambda x: F.max_pool1d(x, 3, 1, 1), "sequence")
plain("max_pool3d", lambda x: F.max_pool3d(x, 3, 1, 1), "image")
plain("avg_pool2d", lambda x: F.avg_pool2d(x, 3, 1, 1), "image")
plain("avg_pool2d_uncounted", lambda x: F.avg_pool2d(x, 3, 1, 1, False, False), "image")
plain("avg_pool1d", lambda x: F.avg_pool1d(x, 3, 1, 1), "sequence")
plain("avg_pool3d", lambda x: F.avg_pool3d(x, 3, 1, 1), "image")
plain("adaptive_avg_pool2d", lambda x: x - F.adaptive_avg_pool2d(x, (1, 4)), "image")
plain("adaptive_avg_pool2d_uneven", lambda x: fit(F.adaptive_avg_pool2d(x, (3, 2))), "image")
plain("adaptive_max_pool2d", lambda x: fit(F.adaptive_max_pool2d(x, 3)), "image")
plain("adaptive_avg_pool1d", lambda x: fit(F.adaptive_avg_pool1d(x, 4)), "sequence")
plain("interpolate_nearest", lambda x: F.avg_pool2d(F.interpolate(x, scale_factor=2), 2, 1)[
    ..., 1:5, 2:6], "image")  # fmt: skip
plain("interpolate_bilinear", lambda x: fit(F.interpolate(x, size=(7, 5), mode="bilinear")),
      "image")  # fmt: skip
plain("interpolate_align", lambda x: F.interpolate(
    x[..., :3], size=(4, 4), mode="bilinear", align_corners=True), "image")  # fmt: skip
plain("interpolate_bicubic", lambda x: fit(F.interpolate(x, scale_factor=1.5, mode="bicubic")),
      "image")  # fmt: skip
plain("interpolate_linear", lambda x: F.interpolate(x[..., :4], size=6, mode="linear"), "sequence")

plain("adaptive_max_pool1d", lambda x: fit(F.adaptive_max_pool1d(x, 4)), "sequence")
plain("adaptive_max_pool3d", lambda x: fit(F.adaptive_max_pool3d(x[:, None], (4, 2, 3))[:, 0]),
      "image")  # fmt: skip
plain("adaptive_avg_pool3d", lambda x: fit(F.adaptive_avg_pool3d(x[:, None], (3, 4, 2))[:, 0]),
      "image")  # fmt: skip
for mode in ("nearest", "nearest-exact"):
    plain(f"interpolate_1d_{mode}", lambda x, m=mode: fit(F.interpolate(x, 9, mode=m)), "sequence")
for mode in ("nearest", "nearest-exact", "trilinear"):
    plain(
        f"interpolate_3d_{mode}",
        lambda x, m=mode: fit(F.interpolate(x[:, None], (5, 4, 6), mode=m)[:, 0]),
        "image",
    )
plain(
    "interpolate_nearest_exact", lambda x: fit(F.interpolate(x, 5, mode="nearest-exact")), "image"
)
for mode in ("bilinear", "bicubic"):
    plain(
        f"interpolate_antialias_{mode}",
        lambda x, m=mode: fit(F.interpolate(x, (3, 5), mode=m, antialias=True)),
        "image",
    )

# ------------------------------------------------------------------------------------- Fourier


def filtered(forth, back):
    """A low-pass filter of the phase: there, times a complex number per frequency, and back."""

    def apply(x):
        f = forth(x)
        return back(f * torch.exp(-1j * f.abs().detach()) + 0.3 * f).real

    return apply


plain("fft", filtered(torch.fft.fft, torch.fft.ifft))
plain("fft2", filtered(torch.fft.fft2, torch.fft.ifft2), "image")
plain("fftn", filtered(lambda x: torch.fft.fftn(x, dim=(1, 2)),
                       lambda f: torch.fft.ifftn(f, dim=(1, 2))), "sequence")  # fmt: skip
plain("rfft", filtered(torch.fft.rfft, torch.fft.irfft))
plain("rfft2", filtered(torch.fft.rfft2, torch.fft.irfft2), "image")
plain("rfftn", filtered(lambda x: torch.fft.rfftn(x, dim=(1, 2)),
                        lambda f: torch.fft.irfftn(f, dim=(1, 2))), "sequence")  # fmt: skip
plain("fftshift", lambda x: torch.fft.ifftshift(torch.fft.fftshift(x, -1).sin(), 1))
plain("imag", lambda x: torch.fft.fft(x).imag)
plain(
    "complex_pairs",
    lambda x: torch.view_as_real(
        torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()).pow(2)
    ).flatten(-2),
)

# ----------------------------------------------------------------------------------- attention


def heads(x):
    return x.reshape(x.shape[0], 4, 2, 3).transpose(1, 2)


def attention(name: str, **options):
    def build(r):
        def fn(m, a, b):
            q, k, v = heads(a), *(heads(t) for t in m.inner(b).chunk(2, -1))
            more = {key: o(m, a) if callable(o) else o for key, o in options.items()}
            return F.scaled_dot_product_attention(q, k, v, **more).transpose(1, 2).flatten(2)

        return Module(fn, nn.Linear(6, 12), bias=(2, 4, 4))

    op(name, build, "sequence", 2)


def keep(m, a):
    return torch.ones(4, 4, dtype=torch.bool, device=a.device).tril(1)


attention("attention")
attention("attention_causal", is_causal=True)
attention("attention_scale", scale=0.9)
attention("attention_mask", attn_mask=keep)
attention("attention_bias", attn_mask=lambda m, a: m.bias)
attention("attention_bias_from_input", attn_mask=lambda m, a: (a @ a.mT).unsqueeze(1))
attention("attention_dropout", dropout_p=0.3)
plain("scores_by_hand", lambda a, b: (a @ b.mT / math.sqrt(6)).softmax(-1) @ b, "sequence", 2)

# --------------------------------------------------------------------------------------- shape

plain("view", lambda x: x.contiguous().view(x.shape[0], -1).sin().view(x.shape))
plain("reshape", lambda x: x.transpose(1, -1).reshape(x.shape))
plain("permute", lambda x: x.permute(0, 1, 3, 2), "image")
plain("movedim", lambda x: x.movedim(1, 3), "image")
plain("contiguous", lambda x: x.mT.contiguous().mT * 1.1, "sequence")
plain("cat", lambda a, b: torch.cat([a[:, :2], b[:, 2:]], 1), arity=2)
plain("stack", lambda a, b: torch.stack([a, b, a * b], 1).sum(1), arity=2)
plain("split", lambda x: torch.cat(x.split([3, 1], 1)[::-1], 1), "image")
plain("chunk", lambda x: torch.cat([p.tanh() for p in x.chunk(2, 1)], 1))
plain("unbind", lambda x: torch.stack(x.unbind(1)[::-1], 1))
plain("slice_step", lambda x: torch.cat([x[..., ::2], x[..., 1::2]], -1))
plain("narrow_select", lambda x: x.narrow(1, 1, 3).sum(1, True) * x + x.select(1, 0)[:, None])
plain("pad", lambda x: F.pad(x, (1, 0), value=0.3)[..., :-1])
plain("pad_reflect", lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect")[..., 2:, :-2], "image")
plain("pad_circular", lambda x: F.pad(x, (0, 2), mode="circular")[..., 2:], "sequence")
plain("pad_negative", lambda x: F.pad(F.pad(x, (-1, -1)), (1, 1)))
plain("roll", lambda x: x.roll(1, 1))
plain("roll_two", lambda x: x.roll((1, -1), (2, 3)), "image")
plain("flip", lambda x: x.flip(1))
plain("expand", lambda x: x[:, :1].expand(x.shape) + x)
plain("repeat", lambda x: x[:, :2].repeat(1, x.shape[1] // 2, *[1] * (x.dim() - 2)))
plain("repeat_interleave", lambda x: x[..., ::2].repeat_interleave(2, -1))
plain("squeeze", lambda x: (x.unsqueeze(1) * x.unsqueeze(1)).squeeze(1))
plain("unflatten", lambda x: x.unflatten(-1, (2, -1)).flatten(-2).cos())
plain("index", lambda x: x[:, [2, 0, 0, 3, 1, 1][: x.shape[1]]])
plain("index_two_axes", lambda x: x[ROWS[: len(x)], COLUMNS],
      "sequence")  # fmt: skip
plain("index_select", lambda x: x.index_select(-1, torch.arange(x.shape[-1]) // 2) * x)
plain("gather", lambda x: x.gather(1, x.argsort(1)))
plain("take_along", lambda x: torch.take_along_dim(x, x.detach().argmax(1, keepdim=True), 1) + x)
plain("scatter_add", lambda a, b: a.scatter_add(1, b.argsort(1), b), arity=2)
plain("index_add", lambda a, b: a.index_add(1, torch.tensor([1, 1, 0]), b[:, :3]), arity=2)
plain("scatter", lambda a, b: a.scatter(1, a.argsort(1), b), arity=2)
plain("index_copy", lambda a, b: a.index_copy(1, torch.tensor([2, 0]), b[:, 1:3]), arity=2)
plain("masked_scatter", lambda a, b: a.masked_scatter(b > 0, b), arity=2)
plain("topk_sort", lambda x: x.sort(1).values + x.topk(1, 1).values)
plain("pixel_shuffle", lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2).sin(), 2), "image")
plain("channel_shuffle", lambda x: F.channel_shuffle(x, 2), "image")
plain("unfold", lambda x: x.unfold(2, 2, 2).sum(-1).repeat(1, 1, 2, 1), "image")
plain("im2col", lambda x: F.unfold(x, 3, padding=1).view(x.shape[0], 4, 9, 4, 4).amax(2), "image")
plain("tril", lambda x: x.tril() + x.triu(1) * x, "sequence")
plain("diagonal", lambda x: x * x.diagonal(0, 2, 3).sum(-1)[..., None, None], "image")
plain("diag_embed", lambda a, b: (torch.diag_embed(a) @ b[..., None])[..., 0], "vector", 2)
plain("fold", lambda x: F.fold(F.unfold(x, 3, padding=1).sin(), (4, 4), 3, padding=1), "image")
plain("rot90", lambda x: x.rot90(1, (2, 3)), "image")
plain("swapaxes", lambda x: x.swapaxes(1, 2).contiguous() * 1.1, "image")
plain("tile", lambda x: x[..., :2].tile(3)[..., : x.shape[-1]])
plain("squeeze_axes", lambda x: torch.squeeze(x[:, None, None].cos(), (1, 2)))
plain("squeeze_all", lambda x: x.sum(1, keepdim=True).squeeze()[:, None] * x, "vector")
plain("as_strided", lambda x: x.contiguous().as_strided((B, 6), (6, 1)).sin(), "vector")
plain("alpha_dropout", lambda x: F.alpha_dropout(x, 0.2, True))
plain("dropout_channels", lambda x: F.dropout2d(x, 0.4), "image")

# -------------------------------------------------------------------- from one pool to another

op("image_to_sequence", lambda r: Module(lambda m, x: m.inner(x.flatten(2)), nn.Linear(16, 6)),
   "image", to="sequence")  # fmt: skip
op("image_to_vector", lambda r: nn.Sequential(nn.Flatten(), nn.Linear(64, 6)), "image", to="vector")
op("pool_to_vector", lambda r: nn.Sequential(nn.AdaptiveAvgPool2d((3, 1)), nn.Flatten(),
                                             nn.Linear(12, 6)), "image", to="vector")  # fmt: skip
op("sequence_to_vector", lambda r: lambda x: x.mean(1), "sequence", to="vector")
op("last_token", lambda r: lambda x: x[:, -1], "sequence", to="vector")
op("sequence_to_image", lambda r: Module(lambda m, x: m.inner(x).unflatten(-1, (4, 4)),
                                         nn.Linear(6, 16)), "sequence", to="image")  # fmt: skip
op("vector_to_image", lambda r: nn.Sequential(nn.Linear(6, 64), nn.Unflatten(1, (4, 4, 4))),
   "vector", to="image")  # fmt: skip
op("vector_to_sequence", lambda r: lambda x: x[:, None] * torch.linspace(-1, 1, 4, dtype=x.dtype)[
    :, None], "vector", to="sequence")  # fmt: skip

NAMES = tuple(OPS)
# Rules whose operators no program of this file leaves in its graph.
NOT_DRAWN = frozenset({
    # tested by itself, at a seed that is zero
    "logcumsumexp.default",
    # composite: the capture leaves their parts instead
    "_adaptive_avg_pool2d.default", "_adaptive_avg_pool3d.default", "alias.default",
    "broadcast_to.default",
    "chunk.default", "contiguous.default", "expand_as.default", "flatten.using_ints",
    "hardshrink.default", "imag.default", "movedim.int", "movedim.intlist", "numpy_T.default",
    "positive.default", "real.default", "reshape.default", "reshape_as.default",
    "softshrink.default", "split.sizes", "swapaxes.default", "type_as.default", "unflatten.int",
    "view_as.default", "to.device", "to.dtype", "to.dtype_layout", "detach.default",
    "lift_fresh.default", "lift_fresh_copy.default", "sub.Scalar", "fill.Scalar",
    # parts: the capture leaves the whole instead (conv2d, softmax, pad, interpolate)
    "_softmax.default", "_log_softmax.default", "convolution.default", "constant_pad_nd.default",
    "reflection_pad1d.default", "reflection_pad2d.default", "reflection_pad3d.default",
    "replication_pad1d.default", "replication_pad2d.default", "replication_pad3d.default",
    "upsample_bicubic2d.default", "upsample_bilinear2d.default", "upsample_linear1d.default",
    "upsample_nearest1d.default", "upsample_nearest2d.default", "upsample_nearest3d.default",
    "upsample_trilinear3d.default",
    # no second derivative in stock autograd: tests/test_rules.py
    "cdist.default", "_cdist_forward.default", "pdist.default", "_pdist_forward.default",
    # the size of the result depends on values
    "repeat_interleave.Tensor",
    # casts of constants, which are in the zoo (bert, integer_path_only); a cast of an activation
    # rounds, so that float64 parity would be lost to the last bit of float32
    "_to_copy.default",
    # in the zoo: tied weights, zero states, slices assigned into zeros
    "t.default", "new_zeros.default", "zeros_like.default",
})  # fmt: skip
# A long drawn graph sums more roundings into a gradient that cancels exactly than the zoo's nets.
FLOOR = 1e-5
SHARDS = 12
EXAMPLES = 25  # per shard: 300 in all, and one fixed program each


# ------------------------------------------------------------------------------------ programs


class Program(nn.Module):
    """Interprets steps (operator, first operand, second operand, seed).

    A result whose size strays from 1 is rescaled by a constant, so that long programs neither
    overflow nor vanish; programs that are not finite all the same are not drawn.
    """

    def __init__(self, steps, x):
        super().__init__()
        self.stems = nn.ModuleList([nn.Linear(16, 6), nn.Linear(64, 6)])
        self.nodes, self.wiring, self.used = nn.ModuleList(), [], set()
        pools = self.pools(x)
        for name, first, second, seed in steps:
            spec, r = OPS[name], random.Random(seed)
            kind = r.choice(KINDS) if spec.kind == "any" else spec.kind
            picks = [self.pick(kind, len(pools[kind]), k) for k in (first, second)[: spec.arity]]
            node = spec.build(r)
            node = node if isinstance(node, nn.Module) else Module(lambda m, *t, f=node: f(*t))
            y = node(*(pools[kind][k] for k in picks))
            to = spec.to or kind
            if y.shape[1:] != SHAPES[to]:
                raise AssertionError(f"{name} maps {kind} to {tuple(y.shape)}")
            size = y.square().mean().sqrt().item()
            scale = 1.0 if 0.2 < size < 3.0 or size < 1e-6 else 1 / size
            self.nodes.append(node)
            self.wiring.append((kind, picks, to, scale))
            pools[to].append(scale * y)
        self.used |= {(kind, 0) for kind in KINDS if len(pools[kind]) > 1}
        self.head = nn.Linear(16, 3)

    def pick(self, kind, count, k):
        """One of the last three members."""
        chosen = count - 1 - k % min(count, 3)
        self.used.add((kind, chosen))
        return chosen

    def pools(self, x):
        sequence, vector = self.stems[0](x.flatten(2)), self.stems[1](x.flatten(1))
        return {"image": [x], "sequence": [sequence], "vector": [vector]}

    def forward(self, x):
        pools = self.pools(x)
        for node, (kind, picks, to, scale) in zip(self.nodes, self.wiring, strict=True):
            y = node(*(pools[kind][k] for k in picks))
            pools[to].append(y if scale == 1.0 else scale * y)
        ends = {}
        for kind, pool in pools.items():
            loose = [t for k, t in enumerate(pool) if (kind, k) not in self.used] or pool[:1]
            ends[kind] = functools.reduce(torch.add, loose)
        parts = [ends["image"].tanh().mean((2, 3)), ends["sequence"].tanh().mean(1), ends["vector"]]
        return self.head(torch.cat(parts, 1))


def penalty(which: int, seed: int) -> Spec:
    g = torch.Generator().manual_seed(seed)
    out = torch.randn(B, 3, generator=g, dtype=torch.float64)
    q = torch.randn(B, *SHAPES["image"], generator=g, dtype=torch.float64)
    labels = torch.randint(0, 3, (B,), generator=g)
    return (
        Spec("cross entropy", "loss", loss="cross_entropy", extras=(labels,)),
        Spec("mse", "loss", loss="mse", norm=("norm",), extras=(out,)),
        Spec("output", "output", index=2, norm=("deviation", 1.0, False)),
        Spec("match", "match", index=0, extras=(q,)),
        Spec("bilinear", "bilinear", extras=(out, q)),
        Spec("custom", "custom", v=turned, p=quartic, extras=(out,)),
    )[which]


def finite(result: oracle.Result) -> bool:
    tensors = (*result.out, result.penalty, *result.gradients.values())
    return all(t is None or (t.isfinite().all() and t.abs().max() < 1e8) for t in tensors)


@double()
def check(steps, which: int, seed: int) -> bool:
    """Compare one program with the oracle; False if its values are out of range."""
    torch.manual_seed(seed)
    x = torch.randn(B, *SHAPES["image"])
    with torch.no_grad():
        net = Program(steps, x)
    twin, spec = copy.deepcopy(net), penalty(which, seed)
    x, x_ = x.requires_grad_(), x.detach().clone().requires_grad_()
    truth = oracle.solve(twin, (x_,), spec, seed=seed)
    if not finite(truth):
        return False
    model = db.Penalised(net, library_penalty(spec), strict=True)
    torch.manual_seed(seed)
    out, value = model(x, *spec.extras)
    oracle.total_loss(out, value).backward()
    got = oracle.collect(net, (x,), out, value)
    errors = oracle.compare(got, truth, FLOOR)
    limit = TOLERANCE[torch.float64].relative
    bad = {name: f"{e:.2e}" for name, e in errors.items() if not e <= limit}
    if bad:
        shaken = shake(steps, x_.detach(), spec, seed, truth)
        if all(shaken[name] > limit for name in bad):
            return False
    assert not bad, f"{spec.name}: {bad}"
    return True


def shake(steps, x: Tensor, spec: Spec, seed: int, truth: oracle.Result) -> dict[str, float]:
    """How far the oracle's own gradients move when x is rounded differently: what moves further
    than the tolerance, a layer norm of nearly equal numbers, nobody can compare."""
    torch.manual_seed(seed)
    drawn = torch.randn(B, *SHAPES["image"])
    with torch.no_grad():
        net = Program(steps, drawn)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
    moved = (x * (1 + torch.finfo(x.dtype).eps * noise)).requires_grad_()
    return oracle.compare(oracle.solve(net, (moved,), spec, seed=seed), truth, FLOOR)


def step(names):
    return st.tuples(st.sampled_from(names), st.integers(0, 2), st.integers(0, 2),
                     st.integers(0, 999))  # fmt: skip


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_graphs(shard):
    """Programs of 10 to 12 steps; the shard's own operators are drawn more often, and one fixed
    program holds each of them, so that every operator of the vocabulary is compared."""
    own = NAMES[shard::SHARDS]
    compared: list[set[str]] = []

    def run(steps, which, seed):
        if not check(steps, which, seed):
            return False
        compared.append({name for name, *_ in steps})
        return True

    assert any(run(fixed_program(shard), which=0, seed=seed) for seed in range(5))

    @hypothesis.settings(max_examples=EXAMPLES)
    @hypothesis.given(
        st.lists(step(own), min_size=4, max_size=5), st.lists(step(NAMES), min_size=6, max_size=7),
        st.randoms(use_true_random=False), st.integers(0, 5), st.integers(0, 99),
    )  # fmt: skip
    def property(first, second, shuffler, which, seed):
        steps = [*first, *second]
        shuffler.shuffle(steps)
        hypothesis.assume(run(steps, which, seed))

    property()
    assert len(compared) > EXAMPLES
    assert set(own) <= set().union(*compared)


def fixed_program(shard: int):
    """Each operator of the shard once."""
    return [(name, k % 3, (k + 1) % 3, k) for k, name in enumerate(NAMES[shard::SHARDS])]


@double()
def test_every_rule_is_drawn():
    """The fixed programs hold every operator that has a rule; what they cannot hold is listed."""
    drawn = set()
    for shard in range(SHARDS):
        x = torch.randn(B, *SHAPES["image"])
        graph, _ = find_graph(Program(fixed_program(shard), x), None, (x,), {})
        drawn |= {node.op for node in graph.nodes}
    names = {str(op).removeprefix("aten.") for op in set(registered()) - drawn}
    assert names <= NOT_DRAWN, f"add to the vocabulary: {sorted(names - NOT_DRAWN)}"


def test_the_run_is_large_enough():
    assert SHARDS * EXAMPLES >= 300
    assert sorted(n for s in range(SHARDS) for n in NAMES[s::SHARDS]) == sorted(NAMES)
