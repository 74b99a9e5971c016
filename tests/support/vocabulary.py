"""Operators for random networks: each maps tensors of a few fixed shapes to one of them.

Three pools: images (batch, 4, 4, 4), sequences (batch, 4, 6) and vectors (batch, 6). An operator of
the vocabulary takes one or two members of a pool and yields a member of the same pool or of another
(`to`), at any batch size. `build(random.Random)` draws its options and makes its parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import doubleback as db

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
plain("bernoulli_share", lambda x: x * torch.bernoulli(x.detach(), 0.6))
plain("bernoulli_in_place", lambda x: x * torch.empty_like(x).bernoulli_(0.6))
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
op("addmv", lambda r: Module(lambda m, x: x + torch.addmv(m.b, x, m.w)[:, None], b=(1,), w=(6,)),
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
plain(
    "index_two_axes",
    lambda x: x[torch.arange(len(x), device=x.device)[:, None], [[1, 0, 3, 3]]],
    "sequence",
)
plain(
    "index_select",
    lambda x: x.index_select(-1, torch.arange(x.shape[-1], device=x.device) // 2) * x,
)
plain("gather", lambda x: x.gather(1, x.argsort(1)))
plain("take_along", lambda x: torch.take_along_dim(x, x.detach().argmax(1, keepdim=True), 1) + x)
plain("scatter_add", lambda a, b: a.scatter_add(1, b.argsort(1), b), arity=2)
plain(
    "index_add",
    lambda a, b: a.index_add(1, torch.tensor([1, 1, 0], device=a.device), b[:, :3]),
    arity=2,
)
plain("scatter", lambda a, b: a.scatter(1, a.argsort(1), b), arity=2)
plain(
    "index_copy",
    lambda a, b: a.index_copy(1, torch.tensor([2, 0], device=a.device), b[:, 1:3]),
    arity=2,
)
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
plain("as_strided", lambda x: x.contiguous().as_strided((len(x), 6), (6, 1)).sin(), "vector")
plain("alpha_dropout", lambda x: F.alpha_dropout(x, 0.2, True))
plain("dropout_channels", lambda x: F.dropout2d(x, 0.4), "image")

# ------------------------------------------------------------------------- special functions

plain("erfinv", lambda x: torch.erfinv(0.7 * x.tanh()))
plain("erfc", torch.erfc)
plain("erfcx", lambda x: torch.special.erfcx(x.tanh()))
plain("lgamma", lambda x: torch.lgamma(x.square() + 1))
plain("digamma", lambda x: torch.digamma(x.square() + 1))
plain("polygamma", lambda x: torch.polygamma(1, x.square() + 1))
plain("multigammaln", lambda x: torch.special.multigammaln(x.square() + 2, 2))
plain("i0", lambda x: torch.special.i0(x.tanh()))
plain("i0e", lambda x: torch.special.i0e(x.square() + 0.2))
plain("i1", lambda x: torch.special.i1(x.square().tanh() + 0.2))
plain("i1e", lambda x: torch.special.i1e(x.square() + 0.2))
plain("ndtr", torch.special.ndtr)
plain("ndtri", lambda x: torch.special.ndtri(0.1 + 0.8 * x.sigmoid()))
plain("log_ndtr", torch.special.log_ndtr)
plain("entr", lambda x: torch.special.entr(x.sigmoid() + 0.1))
plain("sinc", lambda x: torch.sinc(x.square() + 0.3))
plain("logit", lambda x: torch.logit(0.1 + 0.8 * x.sigmoid()))
plain("logit_eps", lambda x: torch.logit(x.sigmoid(), 0.2))
plain("frac", lambda x: x.frac())
plain("deg2rad", lambda x: 40 * torch.deg2rad(x))
plain("rad2deg", lambda x: torch.rad2deg(x) / 40)
plain("nan_to_num", torch.nan_to_num)
plain("remainder", lambda x: torch.remainder(x, 1.7))
plain("fmod", lambda x: torch.fmod(x, 1.7))
plain("float_power", lambda x: torch.float_power(x.abs() + 0.1, 1.3).to(x.dtype))
plain("ldexp", lambda x: torch.ldexp(x, torch.tensor(-1)))
plain("sgn", lambda x: x * x.sgn())
plain("logsigmoid_sum", lambda x: F.logsigmoid(x) + F.logsigmoid(-x))
plain("xlogy", lambda a, b: torch.xlogy(a, b.square() + 0.5), arity=2)
plain("xlog1py", lambda a, b: torch.special.xlog1py(a, b.square() + 0.1), arity=2)
plain("hypot", lambda a, b: torch.hypot(a, 1 + b * b), arity=2)
plain("copysign", lambda a, b: torch.copysign(a, b.detach()), arity=2)
plain("fmax", torch.fmax, arity=2)
plain("fmin", torch.fmin, arity=2)
plain("logaddexp2", torch.logaddexp2, arity=2)
plain("addcdiv", lambda a, b: torch.addcdiv(a, a, 1 + b * b, value=0.5), arity=2)
plain("true_divide", lambda a, b: torch.true_divide(a, 2 + b.cos()), arity=2)
plain(
    "divide_floor", lambda a, b: a * torch.div(b, 0.7, rounding_mode="floor").clamp(-2, 2), arity=2
)
plain("lerp_tensor", lambda a, b: torch.lerp(a, b, b.sigmoid()), arity=2)
plain("polar", lambda a, b: torch.polar(a.abs() + 0.1, b).real, arity=2)
plain("complex", lambda a, b: torch.complex(a, b + 0.1).abs(), arity=2)
plain("angle", lambda a, b: torch.complex(2 + a.cos(), b).angle(), arity=2)
plain(
    "complex_product", lambda a, b: (torch.complex(a, b) * torch.complex(b, a).conj()).imag, arity=2
)
plain("heaviside_mask", lambda a, b: a * (b > 0) + b * (a <= 0), arity=2)
plain("clip_tensors", lambda a, b: torch.clip(a, b - 1, b + 1.5), arity=2)

# ---------------------------------------------------------------------------------- in place

for name, arguments in {
    "sin_": (),
    "cos_": (),
    "tanh_": (),
    "sigmoid_": (),
    "neg_": (),
    "square_": (),
    "abs_": (),
    "exp2_": (),
    "erf_": (),
    "atan_": (),
    "clamp_": (-0.7, 0.9),
    "mul_": (1.3,),
    "add_": (0.4,),
    "sub_": (0.4,),
    "div_": (1.7,),
    "pow_": (3,),
    "cumsum_": (1,),
    "relu_": (),
    "nan_to_num_": (),
    "round_": (),
    "sinc_": (),
}.items():
    plain(name, lambda x, n=name, a=arguments: getattr(0.9 * x, n)(*a) + 0.3 * x)
for name in (
    "relu",
    "leaky_relu",
    "elu",
    "selu",
    "celu",
    "silu",
    "mish",
    "hardtanh",
    "hardswish",
    "relu6",
    "threshold",
    "rrelu",
):
    more = {"threshold": (0.2, -0.1)}.get(name, ())
    plain(f"{name}_inplace", lambda x, n=name, m=more: getattr(F, n)(x.clone(), *m, inplace=True))
plain("tril_", lambda x: x.clone().tril_() + x, "sequence")
plain("triu_", lambda x: x.clone().triu_(1) + x, "sequence")
plain("lerp_", lambda a, b: a.clone().lerp_(b, 0.3), arity=2)
plain("addcmul_", lambda a, b: a.clone().addcmul_(a, b, value=0.3), arity=2)
plain("addcdiv_", lambda a, b: a.clone().addcdiv_(a, 1 + b * b), arity=2)
plain("masked_fill_", lambda a, b: a.clone().masked_fill_(b > 0, 0.3), arity=2)
plain("index_fill_", lambda x: x.clone().index_fill_(1, torch.tensor([0, 2], device=x.device), 0.4))
plain(
    "index_add_",
    lambda a, b: a.clone().index_add_(1, torch.tensor([1, 1, 0], device=a.device), b[:, :3]),
    arity=2,
)
plain(
    "index_put_",
    lambda a, b: a.clone().index_put_(
        (torch.arange(len(a), device=a.device), torch.tensor(1, device=a.device)),
        b[:, 0],
        accumulate=True,
    ),
    arity=2,
)
plain("scatter_", lambda a, b: a.clone().scatter_(1, b.argsort(1), b), arity=2)
plain("scatter_add_", lambda a, b: a.clone().scatter_add_(1, b.argsort(1), b), arity=2)
plain("copy_", lambda a, b: torch.empty_like(a).copy_(b) * a, arity=2)
plain("fill_diagonal_", lambda x: x.clone().fill_diagonal_(0.3) + 0.2 * x, "vector")
plain("transpose_", lambda x: x.sin().transpose_(2, 3), "image")
plain("unsqueeze_", lambda x: x.sin().unsqueeze_(1).squeeze_(1))
plain("baddbmm_", lambda a, b: a.clone().baddbmm_(a @ b.mT, b, alpha=0.2), "sequence", 2)
plain("addmm_", lambda a, b: a.clone().addmm_(a, (b.T @ b) / 3), "vector", 2)


def written_views(a, b):
    """Writes through views, views of views, and a value that was read before."""
    y = (a * 0.8).contiguous()
    first = y[:, :2].clone()
    y[:, 1].mul_(b[:, 0])
    y.view(len(y), -1)[:, ::3].add_(0.5)
    y.transpose(1, -1)[..., 0] -= b.transpose(1, -1)[..., 1]
    y[..., -1:] += y[..., :1].clone()
    y[:, 2:3] = first[:, :1]
    return y


plain("written_views", written_views, arity=2)


def written_parts(x):
    y = x.cos()
    left, right = y[:, :1], y[:, 1:]
    left.mul_(right.detach().mean())
    right.add_(left, alpha=0.3)
    return y


plain("written_parts", written_parts)


def masked_assign(a, b):
    y = a.clone()
    y[b > 0.2] = 0.7
    y[..., 0] = torch.where(b[..., 0] > 0, y[..., 0], b[..., 1])
    return y


plain("masked_assign", masked_assign, arity=2)
plain("select_scatter", lambda a, b: torch.select_scatter(a, b[:, 0], 1, 1), arity=2)
plain("slice_scatter", lambda a, b: torch.slice_scatter(a, b[:, :2], 1, 1, 3), arity=2)
plain(
    "diagonal_scatter",
    lambda a, b: torch.diagonal_scatter(a, b.diagonal(0, 1, 2), 0, 1, 2),
    "sequence",
    2,
)
plain("buffer_of_rows", lambda x: torch.stack([x[:, 0], x[:, 1] * x[:, 0], *x[:, 2:].unbind(1)], 1))

# --------------------------------------------------------------------------- more reductions

plain("nansum", lambda x: 0.5 * x + x.nansum(1, keepdim=True))
plain("nanmean", lambda x: 0.5 * x + x.nanmean(1, keepdim=True))
plain(
    "var_mean",
    lambda x: x * torch.var_mean(x, 1, keepdim=True)[0] + torch.var_mean(x, 1, keepdim=True)[1],
)
plain("std_mean", lambda x: x / (0.5 + torch.std_mean(x, -1, keepdim=True)[0]))
plain("var_correction", lambda x: x * torch.var(x, (1, -1), correction=0, keepdim=True), "sequence")
plain("cumprod", lambda x: (1 + 0.3 * x.sin()).cumprod(1))
plain("cummax", lambda x: x.cummax(1).values)
plain("cummin", lambda x: x.cummin(-1).values)
plain(
    "aminmax", lambda x: (x - x.aminmax(dim=1, keepdim=True)[0]) * x.aminmax(dim=1, keepdim=True)[1]
)
plain("quantile", lambda x: x - x.quantile(0.3, 1, keepdim=True))
plain("nanquantile", lambda x: x - x.nanquantile(0.6, 1, keepdim=True))
plain("nanmedian", lambda x: x * x.nanmedian(1, keepdim=True).values)
plain("mode", lambda x: x - x.mode(1, keepdim=True).values)
plain("renorm", lambda x: x.renorm(2, 0, 1.5))
plain("norm_one", lambda x: x / (1 + x.norm(1, 1, keepdim=True)))
plain("norm_three", lambda x: x / (1 + torch.linalg.vector_norm(x, 3, 1, keepdim=True)))
plain("norm_inf", lambda x: x / (1 + torch.linalg.vector_norm(x, float("inf"), 1, keepdim=True)))
plain("matrix_norm", lambda x: x / (1 + torch.linalg.matrix_norm(x, keepdim=True)), "sequence")
plain("dist", lambda a, b: a * torch.dist(a, b) / 5, arity=2)
plain("trapezoid", lambda x: x + torch.trapezoid(x, dim=1).unsqueeze(1))
plain(
    "cumulative_trapezoid", lambda x: torch.cat([x[:, :1], torch.cumulative_trapezoid(x, dim=1)], 1)
)
plain("diff", lambda x: torch.diff(x, dim=1, prepend=x[:, :1]))
plain("gradient", lambda x: torch.gradient(x, dim=1)[0])
plain("sum_to_size", lambda x: x * (x * x).sum_to_size(1, *[1] * (x.dim() - 1)) / 20)
plain("logcumsumexp", lambda x: x.logcumsumexp(1))
plain("prod_all", lambda x: x * (1 + 0.05 * x.sin()).prod())
plain("amax_several", lambda x: x - x.amax((2, 3), keepdim=True), "image")
plain("msort", lambda x: torch.msort(x.transpose(0, 1)).transpose(0, 1))
plain("topk", lambda x: x.topk(2, 1, sorted=True).values.sum(1, keepdim=True) * x)
plain("argmax_gather", lambda x: x + x.gather(-1, x.argmax(-1, keepdim=True)))
plain("count", lambda x: x * (x > 0).sum(1, keepdim=True) / 3)
plain("log_mean_exp", lambda x: x - x.exp().mean(1, keepdim=True).log())

# ------------------------------------------------------------------------------ linear algebra


def positive(x):
    """(batch, 4, 4), symmetric and well conditioned, of a sequence."""
    return x @ x.mT / 6 + 2 * torch.eye(4, dtype=x.dtype, device=x.device)


plain("solve", lambda a, b: torch.linalg.solve(positive(a), b), "sequence", 2)
plain(
    "solve_triangular",
    lambda a, b: torch.linalg.solve_triangular(positive(a).tril(), b, upper=False),
    "sequence",
    2,
)
plain("inv", lambda x: torch.linalg.inv(positive(x)) @ x, "sequence")
plain("det", lambda x: x * torch.linalg.det(positive(x))[:, None, None] / 30, "sequence")
plain("slogdet", lambda x: x * torch.linalg.slogdet(positive(x))[1][:, None, None] / 3, "sequence")
plain("cholesky", lambda x: torch.linalg.cholesky(positive(x)) @ x, "sequence")
plain(
    "cholesky_solve",
    lambda a, b: torch.cholesky_solve(b, torch.linalg.cholesky(positive(a))),
    "sequence",
    2,
)
plain(
    "cholesky_inverse",
    lambda x: torch.cholesky_inverse(torch.linalg.cholesky(positive(x))) @ x,
    "sequence",
)
plain("qr", lambda x: torch.linalg.qr(positive(x) + x[..., :4] / 3)[1] @ x, "sequence")
plain(
    "eigvalsh",
    lambda x: x * torch.linalg.eigvalsh(positive(x)).square().sum(-1)[:, None, None] / 50,
    "sequence",
)
plain(
    "svdvals", lambda x: x * torch.linalg.svdvals(x + 0.1).amax(-1)[:, None, None] / 3, "sequence"
)
plain(
    "pinv",
    lambda x: (
        torch.linalg.pinv(x @ x.mT / 6 + 2 * torch.eye(4, dtype=x.dtype, device=x.device)) @ x
    ),
    "sequence",
)
plain("matrix_exp", lambda x: torch.linalg.matrix_exp(x[..., :4] / 4) @ x, "sequence")
plain("matrix_power", lambda x: torch.linalg.matrix_power(positive(x) / 4, 3) @ x, "sequence")
plain(
    "multi_dot",
    lambda x: torch.linalg.multi_dot([x, x.T @ x / 9, x.new_ones(6, 6)]),
    "vector",
)
plain(
    "lu", lambda a, b: torch.linalg.lu_solve(*torch.linalg.lu_factor(positive(a)), b), "sequence", 2
)
plain("vecdot", lambda a, b: a * torch.linalg.vecdot(a, b).unsqueeze(-1) / 3, arity=2)
plain(
    "cross",
    lambda a, b: torch.cat([torch.linalg.cross(a[..., :3], b[..., :3]), a[..., 3:]], -1),
    arity=2,
)
plain("tensordot", lambda a, b: torch.tensordot(a, (b.T @ b) / 4, ([1], [0])), "vector", 2)
plain("inner", lambda a, b: torch.inner(a, b) @ a / 5, "vector", 2)
plain("outer_vectors", lambda a, b: torch.outer(a[:, 0], b[0]) + a, "vector", 2)
plain("mv", lambda a, b: a * torch.mv(a, b[0])[:, None], "vector", 2)
plain("addr", lambda a, b: torch.addr(a, a[:, 0], b[0], alpha=0.4), "vector", 2)
plain("addbmm", lambda a, b: a + torch.addbmm(a[0], a @ b.mT, b, alpha=0.1), "sequence", 2)
plain("kron", lambda a, b: torch.kron(a[:, :2], b[:1, :3]), "vector", 2)
plain("cov", lambda x: x @ torch.cov(x.T + 0.1 * x[0].unsqueeze(-1)), "vector")
plain(
    "block_diag", lambda a, b: fit(torch.block_diag(a[:, :3], b[:, 3:])[: len(a)]) + b, "vector", 2
)
plain(
    "einsum_sum",
    lambda a, b: torch.einsum("bti,bsi->bts", a, b).sum(-1, keepdim=True) * a / 6,
    "sequence",
    2,
)
plain("einsum_diagonal", lambda x: torch.einsum("bcii->bci", x)[..., None] * x, "image")
plain(
    "einsum_ellipsis", lambda a, b: torch.einsum("...i,...i->...", a, b)[..., None] * b / 3, arity=2
)
plain(
    "pairwise_distance", lambda a, b: a * F.pairwise_distance(a, b + 1).unsqueeze(-1) / 3, arity=2
)
plain(
    "cosine_similarity",
    lambda a, b: a * F.cosine_similarity(a, b + 0.3, 1, 1e-3).unsqueeze(1),
    arity=2,
)
plain(
    "square_distances",
    lambda a, b: torch.exp(-(a[:, :, None] - b[:, None]).square().sum(-1) / 6) @ a,
    "sequence",
    2,
)

# -------------------------------------------------------------------------------------- losses


def loss(name: str, fn: Callable):
    """x/2 + the loss, which is a number or one per entry."""
    plain(name, lambda a, b: 0.5 * a + fn(a, b), arity=2)


loss("mse_loss", F.mse_loss)
loss("mse_loss_none", lambda a, b: F.mse_loss(a, b, reduction="none"))
loss("l1_loss", F.l1_loss)
loss("smooth_l1_loss", lambda a, b: F.smooth_l1_loss(a, b, beta=0.7))
loss("huber_loss", lambda a, b: F.huber_loss(a, b, reduction="none", delta=0.8))
loss("kl_div", lambda a, b: F.kl_div(a.log_softmax(1), b.softmax(1), reduction="sum") / 9)
loss("kl_div_log", lambda a, b: F.kl_div(a.log_softmax(1), b.log_softmax(1), log_target=True))
loss("nll_loss", lambda a, b: F.nll_loss(a.log_softmax(1), b.argmax(1)))
loss("cross_entropy", lambda a, b: F.cross_entropy(a, b.argmax(1), label_smoothing=0.1))
loss("cross_entropy_soft", lambda a, b: F.cross_entropy(a, b.softmax(1), reduction="sum") / 9)
loss("bce", lambda a, b: F.binary_cross_entropy(a.sigmoid(), b.sigmoid()))
loss(
    "bce_with_logits",
    lambda a, b: F.binary_cross_entropy_with_logits(
        a, b.sigmoid(), pos_weight=a.new_full(a.shape[-1:], 1.5)
    ),
)
loss("poisson_nll_loss", lambda a, b: F.poisson_nll_loss(a, b.square()))
loss("gaussian_nll_loss", lambda a, b: F.gaussian_nll_loss(a, b, b.square() + 0.3))
loss("soft_margin_loss", lambda a, b: F.soft_margin_loss(a, b.sign().detach()))
loss("hinge_embedding_loss", lambda a, b: F.hinge_embedding_loss(a, b.sign().detach()))
loss("margin_ranking_loss", lambda a, b: F.margin_ranking_loss(a, b, a.sign().detach(), 0.2))
loss(
    "cosine_embedding_loss",
    lambda a, b: F.cosine_embedding_loss(a.flatten(1) + 0.1, b.flatten(1), a.new_ones(len(a))),
)
loss("triplet_margin_loss", lambda a, b: F.triplet_margin_loss(a, b, a.flip(1), eps=1e-3))
loss(
    "multilabel_soft_margin",
    lambda a, b: F.multilabel_soft_margin_loss(a.flatten(1), (b > 0).to(a.dtype).flatten(1)),
)

# ------------------------------------------------------- recurrent nets, embeddings, attention


class First(nn.Module):
    """The first result of a module with several."""

    def __init__(self, inner, out=None):
        super().__init__()
        self.inner, self.out = inner, out or nn.Identity()

    def forward(self, *tensors):
        return self.out(self.inner(*tensors)[0])


op("lstm", lambda r: First(nn.LSTM(6, 6, r.choice([1, 2]), batch_first=True)), "sequence")
op(
    "lstm_both_ways",
    lambda r: First(nn.LSTM(6, 3, batch_first=True, bidirectional=True)),
    "sequence",
)
op("gru", lambda r: First(nn.GRU(6, 6, batch_first=True, bias=r.random() < 0.5)), "sequence")
op(
    "rnn",
    lambda r: First(nn.RNN(6, 6, batch_first=True, nonlinearity=r.choice(["tanh", "relu"]))),
    "sequence",
)
op("lstm_cell", lambda r: First(nn.LSTMCell(6, 6)), "vector")
op("gru_cell", lambda r: nn.GRUCell(6, 6), "vector", 2)
op("rnn_cell", lambda r: nn.RNNCell(6, 6), "vector", 2)
op(
    "multihead_attention",
    lambda r: Module(
        lambda m, a, b: m.inner(a, b, b, need_weights=False)[0],
        nn.MultiheadAttention(6, r.choice([1, 2, 3]), batch_first=True),
    ),
    "sequence",
    2,
)
op(
    "multihead_weights",
    lambda r: Module(
        lambda m, x: m.inner(x, x, x)[1] @ x, nn.MultiheadAttention(6, 2, batch_first=True)
    ),
    "sequence",
)
op(
    "transformer_layer",
    lambda r: nn.TransformerEncoderLayer(
        6,
        2,
        8,
        r.choice([0.0, 0.2]),
        r.choice(["relu", "gelu"]),
        batch_first=True,
        norm_first=r.random() < 0.5,
    ),
    "sequence",
)
op(
    "embedding_tokens",
    lambda r: Module(
        lambda m, x: x + m.inner(x.argmax(-1)), nn.Embedding(6, 6, padding_idx=r.choice([None, 2]))
    ),
    "sequence",
)
op(
    "embedding_bag_weights",
    lambda r: Module(
        lambda m, x: F.one_hot(x.argsort(1), 6).to(x.dtype).mean(1) @ m.w + x, w=(6, 6)
    ),
    "vector",
)
plain(
    "bucketize", lambda x: x * (1 + torch.bucketize(x.detach(), x.new_tensor([-0.5, 0.1, 0.9])) / 4)
)
plain(
    "searchsorted",
    lambda x: (
        x * (1 + torch.searchsorted(x.new_tensor([-0.4, 0.2, 1.1]), x.detach().contiguous()) / 4)
    ),
)
op(
    "positional",
    lambda r: Module(lambda m, x: x + m.position[: x.shape[1]], position=(5, 6)),
    "sequence",
)
op(
    "soft_mixture",
    lambda r: Module(
        lambda m, x: (
            m.inner(x).softmax(-1).unsqueeze(1) @ torch.stack([x, x.sin(), x.tanh()], 1)
        ).squeeze(1),
        nn.Linear(6, 3),
    ),
    "vector",
)

# ------------------------------------------------------------------------- pooling and images

plain("lp_pool2d", lambda x: fit(F.lp_pool2d(x.abs() + 0.2, 2.0, 2, 1)), "image")
plain("lp_pool1d", lambda x: fit(F.lp_pool1d(x.abs() + 0.2, 3.0, 2, 1)), "sequence")
plain(
    "max_unpool2d", lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), "image"
)
plain(
    "max_unpool1d",
    lambda x: F.max_unpool1d(*F.max_pool1d(x, 2, return_indices=True), 2),
    "sequence",
)
plain("avg_pool_divisor", lambda x: fit(F.avg_pool2d(x, 2, 1, divisor_override=3)), "image")
plain("avg_pool_ceil", lambda x: fit(F.avg_pool2d(x, 3, 2, 1, ceil_mode=True)), "image")
plain("local_response_norm", lambda x: F.local_response_norm(x, 3), "image")
plain(
    "grid_sample",
    lambda x: F.grid_sample(x, torch.tanh(x[:, :2]).permute(0, 2, 3, 1), align_corners=False),
    "image",
)
plain(
    "affine_grid",
    lambda x: F.grid_sample(
        x,
        F.affine_grid(
            torch.eye(2, 3, dtype=x.dtype, device=x.device).expand(len(x), 2, 3) * 0.8
            + x.mean((1, 2, 3))[:, None, None] / 9,
            x.shape,
            align_corners=True,
        ),
        padding_mode="border",
        align_corners=True,
    ),
    "image",
)
plain("fractional_max_pool2d", lambda x: fit(F.fractional_max_pool2d(x, 2, output_size=3)), "image")
plain("pad_replicate", lambda x: F.pad(x, (1, 2), mode="replicate")[..., 3:], "sequence")
plain("pad_mixed", lambda x: F.pad(x, (1, -1, -1, 1), value=0.2), "image")
plain("pixel_unshuffle", lambda x: F.pixel_shuffle(F.pixel_unshuffle(x, 2).tanh(), 2), "image")
plain(
    "upsample_scale",
    lambda x: fit(
        F.interpolate(x, scale_factor=(1.3, 0.8), mode="bilinear", recompute_scale_factor=True)
    ),
    "image",
)
op(
    "conv_filters_from_image",
    lambda r: Module(
        lambda m, x: F.conv2d(x, (m.w + x.mean((0, 2, 3), keepdim=True)), padding=1), w=(4, 4, 3, 3)
    ),
    "image",
)
op(
    "separable",
    lambda r: nn.Sequential(
        nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False), nn.Conv2d(4, 4, 1), nn.SiLU()
    ),
    "image",
)
op(
    "squeeze_excite",
    lambda r: Module(
        lambda m, x: x * m.inner(x.mean((2, 3), keepdim=True)).sigmoid(), nn.Conv2d(4, 4, 1)
    ),
    "image",
)
op(
    "residual_block",
    lambda r: Module(
        lambda m, x: F.relu(x + m.inner(x)),
        nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
    ),
    "image",
)

# ------------------------------------------------------------------- more shapes and indexing

plain("hstack", lambda a, b: torch.hstack([a[:, :1], b[:, 1:]]), arity=2)
plain("vstack", lambda a, b: torch.vstack([a[:1], b[1:]]), arity=2)
plain("tensor_split", lambda x: torch.cat(torch.tensor_split(x, (1, 3), 1)[::-1], 1))
plain("hsplit", lambda x: torch.cat([t.sin() for t in x.hsplit(2)], 1))
plain("broadcast_tensors", lambda x: sum(torch.broadcast_tensors(x, x[:, :1])))
plain("meshgrid", lambda x: x * torch.meshgrid(x[0, 0, 0], x[0, 1, 0], indexing="ij")[0], "image")
plain("adjoint", lambda x: x.mT.adjoint().sin(), "sequence")
plain("ravel", lambda x: x.ravel().cos().view_as(x))
plain("swapdims", lambda x: x.swapdims(1, 3).sin(), "image")
plain("take", lambda x: x.take(torch.arange(x.numel(), device=x.device).flip(0).view(x.shape)))
plain(
    "index_put",
    lambda a, b: a.index_put(
        (torch.arange(len(a), device=a.device), torch.tensor(2, device=a.device)), b[:, 0]
    ),
    arity=2,
)
plain("index_fill", lambda x: x.index_fill(1, torch.tensor([1], device=x.device), 0.4) * x)
plain(
    "put",
    lambda a, b: a.put(torch.tensor([0, 3, 3], device=a.device), b.flatten()[:3], accumulate=True),
    arity=2,
)
plain("masked_where", lambda x: torch.masked_fill(x, x.abs() > 1.1, 0.2))
plain("fliplr", lambda x: x.fliplr().flipud())
plain("triu", lambda x: x.triu(-1), "image")
plain("diag", lambda x: x + torch.diag(x[:, 0])[: len(x), :1], "vector")
plain("diagflat", lambda x: x * torch.diagflat(x[0])[: x.shape[-1]].sum(), "vector")
plain("unfold_sequence", lambda x: x.unfold(1, 2, 1).mean(-1).repeat(1, 2, 1)[:, :4], "sequence")
for how in ("sum", "prod", "mean", "amax", "amin"):
    plain(
        f"scatter_reduce_{how}",
        lambda a, b, h=how: a.scatter_reduce(1, torch.zeros_like(b, dtype=torch.long), b, h),
        arity=2,
    )
for how in ("mean", "amax", "prod"):
    plain(
        f"index_reduce_{how}",
        lambda a, b, h=how: a.index_reduce(
            1, torch.tensor([0, 0, 2], device=a.device), b[:, :3], h
        ),
        arity=2,
    )
plain(
    "boolean_index",
    lambda x: (
        x[:, torch.tensor([True, True, True, True, False, False][: x.shape[1]], device=x.device)][
            :, :1
        ]
        * x
    ),
)
plain("index_none", lambda x: x[:, None, ..., ::2].repeat_interleave(2, -1)[:, 0])
plain("negative_step", lambda x: x.flip(-1)[..., 1:-1].sum(-1, keepdim=True) * x)
plain("constant_rows", lambda x: torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1))
plain("stack_of_two", lambda a, b: torch.stack((a, b), -1).prod(-1), arity=2)
plain("cat_one", lambda a, b: torch.cat([a.unsqueeze(1), b.unsqueeze(1)], 1).amax(1), arity=2)
plain("view_complex", lambda x: torch.view_as_real(torch.fft.fft(x, dim=1)).norm(dim=-1) / 3)
plain(
    "hfft", lambda x: torch.fft.hfft(torch.fft.ihfft(x).conj().resolve_conj(), n=x.shape[-1]).real
)
plain("cumsum_reverse", lambda x: x.flip(1).cumsum(1).flip(1))
plain("gumbel_softmax", lambda x: F.gumbel_softmax(x, dim=1))
plain("randperm", lambda x: x[:, torch.randperm(x.shape[1])])
plain(
    "multinomial", lambda x: x + x.gather(1, torch.multinomial(x.detach().softmax(1), 1)), "vector"
)
plain("rand_mask", lambda x: torch.where(torch.rand(x.shape, device=x.device) > 0.4, x, 0.1 * x))
plain("normal_noise", lambda x: x + torch.empty_like(x).normal_(0, 0.1))
plain("feature_alpha_dropout", lambda x: F.feature_alpha_dropout(x, 0.3, True), "image")
plain(
    "checkpoint",
    lambda x: torch.utils.checkpoint.checkpoint(lambda t: t.sin() * t, x, use_reentrant=False),
)
plain("functional_vmap", lambda x: torch.func.vmap(lambda t: t.sin() * t.sum())(x))
plain("no_grad_scale", lambda x: x / frozen_size(x))
op("registered_buffer", lambda r: Counting(), "vector")
op("scaled_hook", lambda r: hooked(nn.Linear(6, 6)), "vector")
op("weight_tanh", lambda r: reparametrised(nn.Linear(6, 6)), "vector")


@torch.no_grad()
def frozen_size(x):
    return 1 + x.abs().mean()


class Counting(nn.Module):
    """Writes to two buffers: a moving average of what it sees, and a count."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            self.average.mul_(0.9).add_(0.1 * x.detach().mean(0))
            self.calls += 1
        return x - self.average


def hooked(module):
    module.register_forward_hook(lambda m, args, y: y * 0.7 + args[0])
    module.register_forward_pre_hook(lambda m, args: (args[0].tanh(),))
    return module


class Tanh(nn.Module):
    def forward(self, w):
        return w.tanh()


def reparametrised(module):
    nn.utils.parametrize.register_parametrization(module, "weight", Tanh())
    return module


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
op(
    "vector_to_sequence",
    lambda r: (
        lambda x: x[:, None] * torch.linspace(-1, 1, 4, dtype=x.dtype, device=x.device)[:, None]
    ),
    "vector",
    to="sequence",
)

NAMES = tuple(OPS)
# A network with one of these runs on autograd.
UNCAPTURED = (
    # shapes or branches that depend on values
    "gaussian_nll_loss", "cov", "boolean_index",
    "written_parts",  # to memory that detach() has reached
    "rrelu_inplace",  # draws, and has no rule
    "functional_vmap",  # inside, no tensor tells whether a derivative reaches it
)  # fmt: skip
