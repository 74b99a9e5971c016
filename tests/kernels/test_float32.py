"""float32 means float32: every kernel with TF32 off, to 1e-5 of float64.

On a GPU the sizes are those of image networks (windows of 7×7 tokens, images of 112², 56²); without
one the same tests run small, on PyTorch's CPU kernels, to see that they can.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import doubleback as db
from doubleback.kernels import attention_triton as attention_kernels
from doubleback.kernels import pointwise as pointwise_kernels
from doubleback.kernels import second, taps_first
from doubleback.kernels.attention import (
    attention_backward,
    attention_forward,
    attention_second,
    attention_tangent,
)
from doubleback.kernels.standardisation import (
    Groups,
    standardise,
    standardise_backward,
    standardise_second,
)
from doubleback.operators import Convolution
from support.gpu import CUDA, DEVICE, needs_gpu

TOLERANCE = 1e-5  # of the norm
LAST = torch.channels_last
FORMS = {"channels first": torch.contiguous_format, "channels last": LAST}


@pytest.fixture(autouse=True)
def exact():
    """TF32 off, in both places, and afterwards as it was."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    yield
    matmul.allow_tf32, cudnn.allow_tf32 = before


def normal(*shape: int, form: torch.memory_format = torch.contiguous_format) -> Tensor:
    return torch.randn(shape, device=DEVICE).contiguous(memory_format=form)


def error(found: Tensor, expected: Tensor) -> float:
    assert found.dtype == torch.float32 and found.shape == expected.shape
    expected = expected.detach()
    return float((found.double() - expected).norm() / expected.norm().clamp_min(1e-30))


def close(**pairs: tuple[Tensor, Tensor]) -> None:
    errors = {name: error(*pair) for name, pair in pairs.items()}
    assert max(errors.values()) <= TOLERANCE, errors


# ------------------------------------------------------------------------------- attention

# batch, heads, rows, columns, width, whether there is a bias, whether causal
ATTENTION = {
    "windows": (512, 2, 49, 49, 32, False, False),
    "windows with a bias": (512, 2, 49, 49, 32, True, False),
    "an image": (8, 6, 197, 197, 64, False, False),
    "a text": (2, 4, 256, 256, 64, False, True),
    "wide heads": (2, 2, 128, 128, 128, False, False),
    "few columns": (8, 4, 64, 3, 32, False, False),
    "one column": (8, 4, 64, 1, 32, False, False),
}


@pytest.mark.parametrize("case", ATTENTION)
def test_attention(case):
    batch, heads, n, m, width, biased, causal = ATTENTION[case]
    batch = batch if CUDA else 1
    q, tq, xi = (normal(batch, heads, n, width) for _ in range(3))
    k, v, tk, tv = (normal(batch, heads, m, width) for _ in range(4))
    mask = normal(1, heads, n, m) if biased else None
    leaves = [t.double().requires_grad_() for t in (q, k, v, xi)]
    with sdpa_kernel(SDPBackend.MATH):
        bias = None if mask is None else mask.double()
        out64 = F.scaled_dot_product_attention(*leaves[:3], bias, is_causal=causal)
    first = torch.autograd.grad(out64, leaves[:3], leaves[3], create_graph=True)
    seeds = [t.double() for t in (tq, tk, tv)]
    *sources, t64 = torch.autograd.grad(first, leaves, seeds, materialize_grads=True)
    with torch.no_grad():
        out, residual = attention_forward(q, k, v, mask, causal)
        saved = (q, k, v, out, residual, mask, causal)
        grads = attention_backward(xi, *saved)
        t_out, found = attention_second(xi, tq, tk, tv, *saved)
        pairs = {
            "out": (out, out64), "dv": (grads[2], first[2]), "t_out": (t_out, t64),
            "tangent": (attention_tangent(tq, tk, tv, *saved), t64),
        }  # fmt: skip
        if m > 1:  # else the others are zero
            pairs |= {"dq": (grads[0], first[0]), "dk": (grads[1], first[1])}
            pairs |= dict(zip(("sq", "sk", "sv"), zip(found, sources, strict=True), strict=True))
    close(**pairs)


def test_products_are_as_pytorch_is_set_at_the_launch():
    """What was planned while TF32 was allowed is not what runs when it no longer is."""
    assert attention_kernels._precision(torch.float32) == "ieee"
    assert attention_kernels._precision(torch.float16) == "tf32"  # has no say there
    torch.backends.cuda.matmul.allow_tf32 = True
    assert attention_kernels._precision(torch.float32) == "tf32"


@needs_gpu
def test_sweeps_flattened_under_tf32_are_exact_without_it():
    q, k, v, tq, tk, tv, xi = (normal(64, 2, 49, 32) for _ in range(7))
    with torch.no_grad():
        out, (lse, *_) = attention_forward(q, k, v)
        args = (xi, tq, tk, tv, q, k, v, out, lse)

        def run(*args: Tensor) -> Any:
            return attention_second(*args)

        exact = run(*(t.double() for t in args))
        torch.backends.cuda.matmul.allow_tf32 = True
        graph = make_fx(run)(*args)
        torch.backends.cuda.matmul.allow_tf32 = False
        pairs = zip(pytree.tree_leaves(graph(*args)), pytree.tree_leaves(exact), strict=True)
        close(**{str(i): pair for i, pair in enumerate(pairs)})


# ---------------------------------------------------------------------------- convolutions

# batch, channels, size, filters, kernel, stride, padding, groups
CONVOLUTIONS = {
    "depthwise 3×3": (8, 64, 112, 64, 3, 1, 1, 64),
    "depthwise 3×3, stride 2": (8, 64, 112, 64, 3, 2, 1, 64),
    "depthwise 3×3, stride 2, wide": (8, 256, 112, 256, 3, 2, 1, 256),
    "depthwise 3×3, 56²": (8, 256, 56, 256, 3, 1, 1, 256),
    "depthwise 3×3, 7²": (8, 2048, 7, 2048, 3, 1, 1, 2048),
    "depthwise 5×5, stride 2": (8, 144, 56, 144, 5, 2, 2, 144),
    "depthwise 7×7": (8, 96, 56, 96, 7, 1, 3, 96),
    "stem 3×3": (8, 3, 224, 64, 3, 2, 1, 1),
    "stem 7×7": (8, 3, 224, 64, 7, 2, 3, 1),
    "patches": (8, 3, 224, 192, 16, 16, 0, 1),
    "dense 3×3": (8, 64, 112, 64, 3, 1, 1, 1),
    "1×1": (8, 64, 112, 256, 1, 1, 0, 1),
    "gate": (8, 256, 1, 16, 1, 1, 0, 1),
}


@pytest.mark.parametrize("filters", ["as they come", "as the sweeps hold them"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolution(case, form, filters):
    batch, channels, size, after, kernel, stride, padding, groups = CONVOLUTIONS[case]
    if not CUDA:
        fewer = 4 if groups > 1 else min(channels, 4)
        batch, size, after = 1, min(size, 20), fewer if groups > 1 else 4
        channels, groups = fewer, fewer if groups > 1 else 1
    K = Convolution((stride,) * 2, (padding,) * 2, (1, 1), groups=groups)
    x = normal(batch, channels, size, size, form=FORMS[form])
    weight, bias = normal(after, channels // groups, kernel, kernel), normal(after)
    if filters != "as they come":
        weight = taps_first(weight) if groups > 1 else weight.contiguous(memory_format=LAST)
    x64, w64, b64 = x.double(), weight.double(), bias.double()
    with torch.no_grad():
        y = K.forward(weight, x, bias)
        y64 = F.conv2d(x64, w64, b64, stride, padding, groups=groups)
        xi = normal(*y.shape, form=FORMS[form])
        options = (*(((s,) * 2) for s in (stride, padding, 1)), False, (0, 0), groups)
        expected = torch.ops.aten.convolution_backward(
            xi.double(), x64, w64, [after], *options, [True] * 3
        )
        dx, dw, total = K.adjoints(x, weight, xi, x.shape, weight.shape, (True, True, True))
        again = K.transpose(weight, xi, x.shape)  # without an x to read the layout off
    close(y=(y, y64), dx=(dx, expected[0]), total=(total, expected[2]), again=(again, expected[0]))
    # a sum of as many products as there are places: rounding grows with the root of their number
    places = (batch * y.shape[2] * y.shape[3]) ** 0.5
    assert (dw - expected[1]).norm() <= max(TOLERANCE, 6e-8 * places) * expected[1].norm()


# --------------------------------------------------------------- norms and activations

NORMS = {
    "batch norm, 112²": (Groups.batch_norm(), (8, 64, 112, 112)),
    "batch norm, 7²": (Groups.batch_norm(), (8, 512, 7, 7)),
    "layer norm of windows": (Groups.layer_norm([64]), (512, 49, 64)),
    "layer norm of long rows": (Groups.layer_norm([20000]), (4, 20000)),
    "group norm": (Groups.group_norm(8), (8, 64, 56, 56)),
    "rms norm": (Groups.rms_norm([512]), (64, 512)),
}


@pytest.mark.parametrize("offset", [0.0, 3.0])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", NORMS)
def test_standardisation(case, form, offset):
    """Against plain operations in float64; offset: of x from zero, in standard deviations."""
    groups, shape = NORMS[case]
    if not CUDA:
        shape = (*(min(n, 8) for n in shape[:1]), *shape[1:2], *(min(n, 9) for n in shape[2:]))
        shape = NORMS[case][1] if groups.kind == "rows" else shape
    form = FORMS[form] if len(shape) == 4 else torch.contiguous_format
    x, xi, q = (normal(*shape, form=form) for _ in range(3))
    x, eps = x + offset, 1e-3
    w, b = (normal(*(groups.shape or shape[1:2])) for _ in range(2))
    b = None if groups.rms else b

    def run(x, w, b, xi, q, fused=None):
        y, mean, rstd = standardise(groups, x, w, b, eps, fused=fused)
        at = (x, mean, rstd, w)
        first = standardise_backward(groups, xi, *at, (True, True, b is not None), fused=fused)
        return y, *first, *standardise_second(groups, xi, q, *at, pulled=True, fused=fused)

    with torch.no_grad():
        found = run(x, w, b, xi, q)
        wide = [None if t is None else t.double() for t in (x, w, b, xi, q)]
        expected = run(*wide, fused=False)
    names = ("y", "dx", "dw", "db", "t_y", "s_x", "s_w", "pulled")
    pairs = zip(names, zip(found, expected, strict=True), strict=True)
    close(**{name: pair for name, pair in pairs if pair[0] is not None})


@needs_gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", pointwise_kernels.TABLE)
def test_curvature_of_activations(name, form):
    """Against the formula in float64, which test_pointwise compares with autograd."""
    z, h, xi = (normal(8, 64, 56, 56, form=f) for f in (FORMS[form], FORMS[form], LAST))
    z = z.abs() + 0.3 if name in ("log", "sqrt", "rsqrt", "reciprocal") else z
    z = z.sigmoid() if name == "sigmoid" else z.tanh() if name == "tanh" else z
    params = {"softplus": (1.0, 20.0), "elu": (1.0, 1.0, 1.0)}.get(name, ())
    found, tangent, pulled = pointwise_kernels.launch_bend(name, z, h, xi, params, True, True)
    onto = pointwise_kernels.launch_onto(name, z, h, xi, params)
    wide, y, there = z.double(), h.double(), xi.double()
    slope = pointwise_kernels.TABLE[name].first(wide, *params, *(0.0,) * (3 - len(params)))
    close(
        source=(found, second(name, wide, *params) * y * there),
        tangent=(tangent, slope * y),
        pulled=(pulled, slope * there),
        onto=(onto, slope * y + there),
    )


# --------------------------------------------------------------- a network, node by node


class Watch(TorchDispatchMode):
    """Computes each operator on float32 once more in float64, from the same inputs, and notes by
    how much they differ."""

    RANDOM_OR_EMPTY = ("empty", "bernoulli", "rand", "normal", "uniform", "dropout")

    def __init__(self) -> None:
        super().__init__()
        self.worst: dict[str, float] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        name = func._schema.name
        exact = None
        if self._compared(func, name, given, kwargs):
            exact = self._in_float64(func, name, *pytree.tree_map(_double, (args, kwargs)))
        out = func(*args, **kwargs)
        if exact is not None:
            pairs = zip(pytree.tree_leaves(out), pytree.tree_leaves(exact), strict=True)
            for found, wide in pairs:
                if wide is None:  # a gradient that was not asked for
                    continue
                if isinstance(found, Tensor) and found.dtype == torch.float32 and found.numel():
                    self._note(name, given, found, wide)
        return out

    def _compared(self, func, name: str, given: list[Tensor], kwargs: dict) -> bool:
        skipped = any(word in name for word in self.RANDOM_OR_EMPTY)
        real = [t for t in given if t.dtype.is_floating_point]
        own = kwargs.get("dtype") is None  # casts are what they say
        views = any(r.alias_info is not None for r in func._schema.returns)
        inplace = func._schema.is_mutable
        all_single = bool(real) and all(t.dtype == torch.float32 for t in real)
        return all_single and own and not skipped and (inplace or not views)

    def _in_float64(self, func, name: str, args, kwargs):
        if not name.startswith("doubleback::depthwise"):
            return func(*args, **kwargs)
        # the kernels here sum in float32
        if name == "doubleback::depthwise":
            x, weight, bias, *geometry = args
            return F.conv2d(x, weight, bias, *geometry, groups=x.shape[1])
        adjoint = name == "doubleback::depthwise_adjoint"
        x, other, sizes, *geometry = args
        bias = geometry.pop() if adjoint else False
        options = (*geometry, False, (0, 0), x.shape[1])
        backward = torch.ops.aten.convolution_backward
        if not adjoint:  # x is y, `other` the filter
            like = x.new_empty(*x.shape[:2], *sizes)
            return backward(x, like, other, None, *options, [True, False, False])[0]
        weight = x.new_empty(x.shape[1], 1, *sizes)
        found = backward(other, x, weight, [x.shape[1]], *options, [False, True, bias])
        return [t for t in found[1:] if t is not None]

    def _note(self, name: str, given: list[Tensor], found: Tensor, wide: Tensor) -> None:
        # differences may cancel: the rounding of what they are taken of is allowed for
        real = [t for t in given if t.dtype.is_floating_point and t.numel()]
        size = max(float(t.norm()) / t.numel() ** 0.5 for t in real) * found.numel() ** 0.5
        found, wide = found.detach().double(), wide.detach()
        relative = float((found - wide).norm()) / max(float(wide.norm()), 1e-2 * size, 1e-30)
        shapes = ", ".join(f"{tuple(t.shape)}@{t.stride()}" for t in given)
        key = f"{name}({shapes})"
        self.worst[key] = max(self.worst.get(key, 0.0), relative)

    def above(self, tolerance: float) -> dict[str, float]:
        return {key: e for key, e in self.worst.items() if not e <= tolerance}


def _double(item):
    """A float32 tensor in float64, from a contiguous copy of it, since a kernel may be wrong in one
    layout in either dtype; the dtype float32 as float64."""
    if isinstance(item, Tensor) and item.dtype == torch.float32:
        return item.contiguous().double()
    return torch.float64 if item is torch.float32 else item


class Windows(nn.Module):
    """Attention inside windows of an image, with a learnt bias by relative position."""

    def __init__(self, channels: int, width: int, window: int, grid: bool) -> None:
        super().__init__()
        self.heads, self.window, self.grid = channels // width, window, grid
        self.norm, self.qkv = nn.LayerNorm(channels), nn.Linear(channels, 3 * channels)
        self.merge = nn.Linear(channels, channels)
        self.table = nn.Parameter(0.02 * torch.randn((2 * window - 1) ** 2, self.heads))
        at = torch.cartesian_prod(torch.arange(window), torch.arange(window))
        apart = at[:, None] - at[None] + window - 1
        self.register_buffer("index", apart[..., 0] * (2 * window - 1) + apart[..., 1])
        self.mlp = nn.Sequential(
            nn.LayerNorm(channels), nn.Linear(channels, 2 * channels), nn.GELU(),
            nn.Linear(2 * channels, channels),
        )  # fmt: skip

    def attend(self, x: Tensor) -> Tensor:
        b, g, p, c = x.shape
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (t.reshape(b, g, p, self.heads, -1).permute(0, 1, 3, 2, 4) for t in parts)
        scores = torch.einsum("b g h i d, b g h j d -> b g h i j", q, k * c**-0.5)
        bias = self.table[self.index.view(-1)].view(p, p, -1).permute(2, 0, 1).unsqueeze(0)
        out = torch.einsum("b g h i j, b g h j d -> b g h i d", F.softmax(scores + bias, -1), v)
        return self.merge(out.permute(0, 1, 3, 2, 4).reshape(b, g, p, c))

    def forward(self, x: Tensor) -> Tensor:
        b, c, size, _ = x.shape
        s = size // self.window if self.grid else self.window
        n = size // s
        x = x.reshape(b, c, n, s, n, s).permute(0, 2, 4, 3, 5, 1).reshape(b, n * n, s * s, c)
        x = x.swapaxes(1, 2) if self.grid else x
        x = x + self.attend(x)
        x = x + self.mlp(x)
        x = x.swapaxes(1, 2) if self.grid else x
        return x.reshape(b, n, n, s, s, c).permute(0, 5, 1, 3, 2, 4).reshape(b, c, size, size)


class Inverted(nn.Module):
    """1×1, depthwise 3×3, a gate by squeeze and excitation, 1×1, beside an average."""

    def __init__(self, before: int, after: int, stride: int, tanh: bool) -> None:
        super().__init__()
        wide, form = 4 * after, "tanh" if tanh else "none"
        norm = dict(eps=1e-3, momentum=0.01)
        self.short = nn.Conv2d(before, after, 1)
        self.pool = nn.AvgPool2d(3, stride, 1) if stride > 1 else nn.Identity()
        self.inner = nn.Sequential(
            nn.BatchNorm2d(before, **norm), nn.Conv2d(before, wide, 1, bias=False),
            nn.BatchNorm2d(wide, **norm), nn.GELU(form),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            nn.BatchNorm2d(wide, **norm), nn.GELU(form),
        )  # fmt: skip
        self.squeeze, self.excite = nn.Conv2d(wide, after // 4, 1), nn.Conv2d(after // 4, wide, 1)
        self.last = nn.Conv2d(wide, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        gate = torch.sigmoid(self.excite(F.silu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        return self.short(self.pool(x)) + self.last(gate * y)


def network() -> nn.Module:
    """A stem and three blocks, as networks of windows on convolutions have them; on a CPU one."""
    channels, width, window = (64, 32, 7) if CUDA else (8, 4, 7)
    blocks = []
    for i, stride in enumerate((2, 1, 2) if CUDA else (2,)):
        blocks += [
            Inverted(channels, channels, stride, tanh=i == 2),
            Windows(channels, width, window, grid=False),
            Windows(channels, width, window, grid=True),
        ]
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, 2, 1, bias=False),
        nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01), nn.GELU(),
        nn.Conv2d(channels, channels, 3, 1, 1), *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(channels),
        nn.Linear(channels, channels), nn.Tanh(), nn.Linear(channels, 10, bias=False),
    )  # fmt: skip


@pytest.fixture
def problem():
    torch.manual_seed(0)
    batch, size = (8, 224) if CUDA else (2, 28)
    x, y = torch.randn(batch, 3, size, size), torch.randint(10, (batch,))
    return network().to(DEVICE), x.to(DEVICE), y.to(DEVICE)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_every_operator_of_a_network(problem, training):
    """Which operator, of which shapes and strides, does not keep to float32."""
    net, x, y = problem
    model = db.Penalised(net.train(training), db.LossGradient("cross_entropy"))
    model(x, y)  # captured without being watched
    with Watch() as watch:
        out, penalty = model(x, y)
        (F.cross_entropy(out, y) + penalty).backward()
    names = {key.partition("(")[0] for key in watch.worst}
    assert {"aten::convolution", "aten::convolution_backward", "aten::bmm"} <= names
    assert not watch.above(TOLERANCE)


def test_what_is_watched_is_seen():
    """An operator that rounds to the 11 bits of TF32 is above the tolerance."""
    library = torch.library.Library("doubleback_test", "FRAGMENT")
    library.define("rough(Tensor x) -> Tensor")
    rough = lambda x: x.half().float() if x.dtype == torch.float32 else x.clone()  # noqa: E731
    library.impl("rough", rough, "CompositeExplicitAutograd")
    x = torch.randn(1000, device=DEVICE)
    with Watch() as watch:
        torch.ops.doubleback_test.rough(x)
        x.mul(3).sin()
    assert {key.partition("(")[0] for key in watch.above(TOLERANCE)} == {"doubleback_test::rough"}
    assert len(watch.worst) == 3


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_network(problem, training):
    """Penalty and gradient, one call after the other (node by node, then flattened)."""
    net, x, y = problem
    net.train(training)
    model = db.Penalised(net, db.LossGradient("cross_entropy"))
    exact = network().to(DEVICE).double().train(training)
    exact.load_state_dict(net.state_dict())
    x64 = x.double().requires_grad_()
    each = F.cross_entropy(exact(x64), y, reduction="none")
    (g,) = torch.autograd.grad(each.sum(), x64, create_graph=True)
    penalty64 = g.square().flatten(1).sum(1).mean()
    penalty64.backward()
    expected = [p.grad for p in exact.parameters()]
    scale = torch.stack([g.norm() for g in expected]).norm()
    for _ in range(4 if CUDA else 1):
        net.zero_grad()
        _, penalty = model(x, y)
        penalty.backward()
        # a gradient through several norms amplifies rounding; TF32 would be a hundred times this
        gap = torch.stack([
            (p.grad.double() - g).norm() for p, g in zip(net.parameters(), expected, strict=True)
        ]).norm()  # fmt: skip
        assert abs(float(penalty.detach() / penalty64.detach()) - 1) <= TOLERANCE
        assert gap <= 5 * TOLERANCE * scale, float(gap / scale)


@needs_gpu
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [(3, 2, 1), (3, 1, 1), (2, 2, 0), (3, 3, 0), (2, 1, 0)]
)
def test_average_pooling(kernel, stride, padding, layout):
    """PyTorch's transpose is wrong where windows overlap and images lie channels-last."""
    torch.manual_seed(0)
    pool = db.operators.AveragePool((kernel,) * 2, (stride,) * 2, (padding,) * 2)
    x = torch.randn(4, 16, 30, 30, device="cuda").contiguous(memory_format=layout)
    y = torch.randn_like(pool.forward(None, x)).contiguous(memory_format=layout)
    found = pool.transpose(None, y, x.shape)
    wide = x.cpu().double().contiguous().requires_grad_()
    out = torch.nn.functional.avg_pool2d(wide, kernel, stride, padding)
    (expected,) = torch.autograd.grad(out, wide, y.cpu().double())
    assert (found.cpu() - expected).norm() <= 1e-6 * expected.norm()
