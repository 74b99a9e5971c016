"""One list of sample arguments per operator: every rule in the table is checked on these."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

aten = torch.ops.aten


def _r(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 17 * len(shape) + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _positive(*shape: int) -> torch.Tensor:
    return _r(*shape).abs() + 0.3


def _inside(*shape: int) -> torch.Tensor:
    """In (−0.9, 0.9), away from 0."""
    return torch.tanh(_r(*shape)) * 0.9


def _spread(*shape: int) -> torch.Tensor:
    """Distinct entries, none within 0.02 of a kink at −3, −1, −0.5, 0, 0.5, 1, 3 or 6."""
    n = 1
    for s in shape:
        n *= s
    grid = torch.linspace(-3.37, 7.11, n, dtype=torch.float64)
    for kink in (-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0, 6.0):
        near = (grid - kink).abs() < 0.02
        grid = torch.where(near, grid + 0.041, grid)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(n))
    return grid[order].reshape(shape)


def _mask(*shape: int) -> torch.Tensor:
    return _r(*shape) > 0


def _ids(*shape: int, high: int = 3) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(1))


def _norm_affine(c: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _r(c, seed=1), _r(c, seed=2)


def _batch_norm(x: torch.Tensor, stats: bool) -> tuple:
    c = x.shape[1]
    running = (torch.zeros(c).double(), torch.ones(c).double()) if stats else ()
    return (x, *_norm_affine(c), *running)


# Tensor arguments that are differentiated, where not all floating-point ones are.
WRT = {
    "_native_batch_norm_legit_functional.default": (0, 1, 2),
    "_native_batch_norm_legit_no_training.default": (0, 1, 2),
}

COORDINATE_WISE = [
    "relu",
    "relu6",
    "leaky_relu",
    "hardtanh",
    "hardshrink",
    "softshrink",
    "abs",
    "gelu",
    "elu",
    "selu",
    "celu",
    "silu",
    "mish",
    "softplus",
    "sigmoid",
    "tanh",
    "hardswish",
    "log_sigmoid",
    "exp",
    "expm1",
    "exp2",
    "square",
    "sin",
    "cos",
    "sinh",
    "cosh",
    "atan",
    "asinh",
    "erf",
]
POSITIVE = ["log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal"]
INSIDE = ["tan", "asin", "acos", "atanh"]


def enter(table: dict[str, list[Callable[[], tuple]]], name: str, *args, **kwargs) -> None:
    """One more sample: the arguments with which `check_rule` will call the operator `name`."""
    table.setdefault(name, []).append(lambda: (args, kwargs))


def _table() -> dict[str, list[Callable[[], tuple]]]:
    """Operator name → functions that make (args, kwargs)."""
    table: dict[str, list[Callable[[], tuple]]] = {}
    add = partial(enter, table)

    for name in COORDINATE_WISE:
        add(f"{name}.default", _spread(7, 5))
    for name in POSITIVE:
        add(f"{name}.default", _positive(4, 3))
    for name in INSIDE:
        add(f"{name}.default", _inside(4, 3))
    add("gelu.default", _r(9), approximate="tanh")
    add("elu.default", _spread(9), 0.7, 1.3, 0.9)
    add("celu.default", _spread(9), 0.5)
    add("softplus.default", _r(9), 2.0, 1.0)
    add("leaky_relu.default", _spread(9), 0.2)
    add("threshold.default", _spread(9), 0.25, -1.0)
    add("clamp.default", _spread(9), -0.7, 0.8)
    add("clamp.default", _spread(9), None, 0.8)
    add("clamp_min.default", _spread(9), 0.2)
    add("clamp_max.default", _spread(9), 0.2)
    add("prelu.default", _r(2, 3, 4), _r(3))
    add("prelu.default", _r(5), _r(1))
    add("rrelu.default", _r(6), 0.125, 0.25)
    add("pow.Tensor_Scalar", _positive(5), 2.5)
    add("pow.Tensor_Scalar", _r(5), 3)
    add("pow.Tensor_Scalar", _r(5), 1)
    add("pow.Scalar", 2.5, _r(5))

    add("linear.default", _r(2, 4, 3), _r(5, 3), _r(5))
    add("linear.default", _r(3), _r(5, 3))
    add("conv1d.default", _r(2, 4, 9), _r(6, 2, 3), _r(6), [2], [1], [1], 2)
    add("conv2d.default", _r(2, 3, 6, 7), _r(4, 3, 3, 2), _r(4), [2, 1], [1, 0], [1, 2])
    add("conv2d.default", _r(3, 6, 6), _r(3, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], 3)
    add("conv3d.default", _r(1, 2, 4, 4, 4), _r(3, 2, 2, 2, 2))
    add("convolution.default", _r(2, 3, 5), _r(4, 3, 3), None, [1], [1], [1], False, [0], 1)
    add("conv_transpose1d.default", _r(2, 4, 5), _r(4, 3, 3), _r(3), [2], [1], [1])
    add("conv_transpose2d.input", _r(2, 4, 4, 4), _r(4, 2, 3, 3), None, [2, 2], [1, 1], [1, 0], 2)
    add("conv_transpose3d.input", _r(1, 2, 3, 3, 3), _r(2, 2, 2, 2, 2))
    image, filters = _r(2, 3, 5, 6), _r(3, 4, 2, 3, 3, 3)
    add("locally_connected.default", image, filters, [1, 1], [0, 0], [1, 1])
    filters = _r(3, 5, 2, 3, 3, 2)
    add("locally_connected.default", image, filters, [2, 1], [1, 1], [1, 3])
    for a, b in (
        (_r(3, 4), _r(4, 5)), (_r(4), _r(4)), (_r(4), _r(4, 5)), (_r(2, 3, 4), _r(4)),
        (_r(2, 1, 3, 4), _r(5, 4, 2)), (_r(2, 3, 4), _r(4, 5)), (_r(4), _r(2, 3, 4, 5)),
    ):  # fmt: skip
        add("matmul.default", a, b)
    add("mm.default", _r(3, 4), _r(4, 5))
    add("bmm.default", _r(2, 3, 4), _r(2, 4, 5))
    add("mv.default", _r(3, 4), _r(4))
    add("dot.default", _r(4), _r(4, seed=1))
    add("addmm.default", _r(5), _r(3, 4), _r(4, 5), beta=0.5, alpha=2.0)
    add("baddbmm.default", _r(2, 1, 5), _r(2, 3, 4), _r(2, 4, 5))
    add("addmv.default", _r(3), _r(3, 4), _r(4))
    add("mul.Tensor", _r(2, 3), _r(3))
    add("mul.Tensor", _r(2, 3), 2.5)
    add("einsum.default", "bij,jk->bik", [_r(2, 3, 4), _r(4, 5)])
    add("einsum.default", "ij,kl->il", [_r(2, 3), _r(4, 5)])
    add("einsum.default", "ij,jk", [_r(2, 3), _r(3, 5)])
    add("einsum.default", "bi,bj,bk->bijk", [_r(2, 3), _r(2, 2), _r(2, 2, seed=3)])

    for name in ("add.Tensor", "sub.Tensor", "rsub.Tensor"):
        add(name, _r(2, 3), _r(3), alpha=0.5)
        add(name, _r(2, 3), _r(2, 1))
    add("add.Tensor", _r(2, 3), 1.5)
    for name in ("add.Scalar", "sub.Scalar", "rsub.Scalar"):
        add(name, _r(2, 3), 1.5)
    add("div.Tensor", _r(2, 3), _positive(3))
    add("div.Tensor", _r(2, 3), 3.0)
    add("div.Scalar", _r(2, 3), 3.0)
    add("mul.Scalar", _r(2, 3), 3.0)
    add("neg.default", _r(2, 3))
    add("where.self", _mask(2, 3), _r(2, 3), _r(3))
    add("where.ScalarOther", _mask(2, 3), _r(2, 3), 1.0)
    add("where.ScalarSelf", _mask(2, 3), 1.0, _r(2, 3))
    add("maximum.default", _r(2, 3), _r(3))
    add("minimum.default", _r(2, 3), _r(3))
    add("masked_fill.Scalar", _r(2, 3), _mask(3), 2.0)
    add("sum.default", _r(2, 3))
    add("sum.dim_IntList", _r(2, 3, 4), [0, -1])
    add("sum.dim_IntList", _r(2, 3, 4), [1], True)
    add("mean.default", _r(2, 3))
    add("mean.dim", _r(2, 3, 4), [1], True)
    add("amax.default", _r(2, 3, 4), [1])
    add("amin.default", _r(2, 3, 4), [0, 2], True)
    for name in ("max.dim", "min.dim", "median.dim"):
        add(name, _spread(3, 5), 1)
    add("sort.default", _spread(3, 5), 0)
    add("topk.default", _spread(3, 5), 2, 1)
    add("kthvalue.default", _spread(3, 5), 2, 1)

    for name in ("softmax.int", "log_softmax.int", "_safe_softmax.default"):
        add(name, _r(2, 4), 1)
    for name in ("_softmax.default", "_log_softmax.default"):
        add(name, _r(2, 4), 1, False)
    add("logsumexp.default", _r(2, 3, 4), [1])
    add("logsumexp.default", _r(2, 3, 4), [0, 2], True)
    add("logcumsumexp.default", _r(2, 3, 4), 1)
    add("logcumsumexp.default", 30 * _r(2, 7), -1)

    add("layer_norm.default", _r(2, 3, 4), [4], *_norm_affine(4))
    add("layer_norm.default", _r(2, 3, 4), [3, 4])
    add("rms_norm.default", _r(2, 3, 4), [4], _r(4))
    add("group_norm.default", _r(2, 4, 3), 2, *_norm_affine(4))
    add("instance_norm.default", _r(2, 3, 5), *_norm_affine(3), None, None, True, 0.1, 1e-5, False)
    batch = _r(4, 3, 2, 2)
    add("_native_batch_norm_legit.no_stats", *_batch_norm(batch, False), True, 0.1, 1e-5)
    add("_native_batch_norm_legit_functional.default", *_batch_norm(batch, True), True, 0.1, 1e-5)
    add("_native_batch_norm_legit_no_training.default", *_batch_norm(batch, True), 0.1, 1e-5)
    q, k, v = _r(2, 2, 5, 4), _r(2, 2, 6, 4), _r(2, 2, 6, 3)
    add("scaled_dot_product_attention.default", q, k, v)
    add("scaled_dot_product_attention.default", q, k, v, _r(5, 6) > -0.5)
    add("scaled_dot_product_attention.default", q, q + 1, q - 1, None, 0.0, True, scale=0.3)

    for n, shape in ((1, (2, 3, 7)), (2, (2, 3, 6, 7)), (3, (1, 2, 4, 4, 4))):
        add(f"avg_pool{n}d.default", _r(*shape), [2] * n)
        add(f"avg_pool{n}d.default", _r(*shape), [3] * n, [2] * n, [1] * n, True, False)
        add(f"avg_pool{n}d.default", _r(*shape)[0], [2])
        add(f"adaptive_avg_pool{n}d.default", _r(*shape), [2] * n)
        add(f"adaptive_max_pool{n}d.default", _spread(*shape), [2] * n)
        add(f"max_pool{n}d.default", _spread(*shape), [3] * n, [2] * n, [1] * n)
        add(f"upsample_nearest{n}d.vec", _r(*shape), None, [2.0] * n)
        add(f"upsample_nearest{n}d.default", _r(*shape), [s * 2 for s in shape[2:]])
        add(f"_upsample_nearest_exact{n}d.vec", _r(*shape), None, [1.5] * n)
    for n, shape in ((2, (2, 3, 6, 7)), (3, (1, 2, 4, 4, 4))):
        add(f"_adaptive_avg_pool{n}d.default", _r(*shape), [2] * n)
        add(f"max_pool{n}d_with_indices.default", _spread(*shape), [2] * n)
    add("upsample_linear1d.vec", _r(2, 3, 5), None, True, [2.0])
    add("upsample_linear1d.default", _r(2, 3, 5), [8], False)
    for name in ("bilinear", "bicubic"):
        add(f"upsample_{name}2d.vec", _r(1, 2, 4, 4), None, False, [2.0, 1.5])
        add(f"upsample_{name}2d.default", _r(1, 2, 4, 4), [7, 6], True)
        add(f"_upsample_{name}2d_aa.vec", _r(1, 2, 6, 6), [3, 4], False, None)
    add("upsample_trilinear3d.vec", _r(1, 1, 3, 3, 3), None, False, [2.0, 2.0, 2.0])
    add("upsample_trilinear3d.default", _r(1, 1, 3, 3, 3), [5, 5, 5], False)
    _shapes(add)
    return table


def _shapes(add: Callable) -> None:
    x = _r(2, 3, 4)
    for name in ("view.default", "reshape.default", "_unsafe_view.default"):
        add(name, x, [6, 4])
    for name in ("clone", "contiguous", "alias", "lift_fresh_copy", "lift_fresh", "positive"):
        add(f"{name}.default", x)
    add("squeeze.default", _r(2, 1, 3))
    add("squeeze.dim", _r(2, 1, 3), 1)
    add("squeeze.dims", _r(2, 1, 3), [1])
    add("unsqueeze.default", x, 1)
    add("flatten.using_ints", x, 1)
    add("unflatten.int", _r(2, 6), 1, [2, 3])
    add("view_as.default", _r(2, 6), _ids(4, 3))
    add("reshape_as.default", _r(2, 6), _ids(4, 3))
    add("permute.default", x, [2, 0, 1])
    add("transpose.int", x, 0, 2)
    add("t.default", _r(2, 3))
    add("numpy_T.default", _r(2, 3))
    add("expand.default", _r(2, 1, 4), [5, 2, 3, 4])
    add("cat.default", [_r(2, 3), _r(2, 4)], 1)
    add("stack.default", [_r(2, 3), _r(2, 3, seed=1)], 1)
    add("split.Tensor", _r(2, 5), 2, 1)
    add("split_with_sizes.default", _r(2, 5), [1, 4], 1)
    add("split.sizes", _r(2, 5), [1, 4], 1)
    add("chunk.default", _r(2, 5), 3, 1)
    add("unbind.int", x, 1)
    add("slice.Tensor", x, 1, 0, 3, 2)
    add("select.int", x, 1, -1)
    add("_to_copy.default", x, memory_format=torch.contiguous_format)
    add("to.dtype", x, torch.float64)
    add("to.dtype_layout", x, dtype=torch.float64)
    add("to.device", x, torch.device("cpu"), torch.float64)
    add("type_as.default", x, _r(2))
    add("fill.Tensor", _r(2, 3), _r())
    add("constant_pad_nd.default", x, [1, 2, 0, 1], 0.5)
    add("constant_pad_nd.default", x, [-1, 2], 0.5)
    add("pad.default", x, [1, 2, 0, 1], "constant", 0.5)
    add("pad.default", x, [1, 2], "reflect")
    add("pad.default", x, [1, 2], "circular")
    for n in (1, 2, 3):
        image = _r(1, 2, *[4] * n)
        add(f"reflection_pad{n}d.default", image, [1, 2] * n)
        add(f"replication_pad{n}d.default", image, [1, 2] * n)
    add("roll.default", x, [1], [1])
    add("flip.default", x, [0, 2])
    add("rot90.default", x, 1, [1, 2])
    add("tril.default", _r(3, 3))
    add("triu.default", _r(3, 3), 1)
    add("diagonal.default", _r(3, 4), 1)
    add("diag_embed.default", _r(2, 3))
    add("unfold.default", _r(2, 6), 1, 3, 2)
    add("im2col.default", _r(1, 2, 4, 4), [2, 2], [1, 1], [0, 0], [1, 1])
    add("col2im.default", _r(1, 8, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1])
    add("repeat.default", _r(2, 3), [2, 1, 2])
    add("repeat_interleave.self_int", _r(2, 3), 2, 1)
    add("tile.default", _r(2, 3), [2, 2])
    add("movedim.intlist", x, [0], [2])
    add("movedim.int", x, 0, 2)
    add("swapaxes.default", x, 0, 2)
    add("cumsum.default", x, 1)
    add("pixel_shuffle.default", _r(1, 8, 2, 2), 2)
    add("pixel_unshuffle.default", _r(1, 2, 4, 4), 2)
    add("pixel_unshuffle.default", _r(2, 2, 6, 3), 3)
    add("pixel_shuffle.default", _r(9, 2, 4), 3)
    add("channel_shuffle.default", _r(1, 4, 2, 2), 2)
    add("gather.default", _r(3, 4), 1, _ids(3, 2))
    add("index_select.default", _r(3, 4), 0, _ids(5))
    add("index.Tensor", _r(3, 4), [_ids(5)])
    add("embedding.default", _r(3, 4), _ids(2, 2))
    add("take_along_dim.default", _r(3, 4), _ids(3, 2), 1)
    add("index_add.default", _r(3, 4), 0, _ids(2), _r(2, 4))
    add("scatter_add.default", _r(3, 4), 1, _ids(3, 2), _r(3, 2))
    add("scatter.src", _r(3, 4), 1, torch.tensor([[0, 2], [1, 3], [2, 0]]), _r(3, 2))
    add("index_copy.default", _r(3, 4), 0, torch.tensor([2, 0]), _r(2, 4))
    add("select_scatter.default", _r(3, 4), _r(4), 0, 1)
    add("slice_scatter.default", _r(3, 4), _r(2, 4), 0, 1, 3)
    add("masked_scatter.default", _r(2, 3), _mask(2, 3), _r(2, 3, seed=4))
    add("trace.default", _r(3, 3))
    add("broadcast_to.default", _r(2, 1), [2, 3])
    add("expand_as.default", _r(2, 1), _ids(2, 3))
    add("lerp.Scalar", _r(2, 3), _r(2, 3, seed=5), 0.3)


SAMPLES = _table()

# Operators whose rule needs no sample here, and why.
WITHOUT = {
    **dict.fromkeys(
        ("cdist.default", "_cdist_forward.default", "pdist.default", "_pdist_forward.default"),
        "stock autograd has no second derivative; tests/test_rules.py has one",
    ),
    "copy.default": "stock autograd has no derivative of it; the zoo's in-place network holds it",
    "hardsigmoid.default": "stock autograd has no second derivative; tests/test_rules.py has one",
    "native_dropout.default": "random: tests/test_rules.py checks it against its own mask",
    "repeat_interleave.Tensor": "takes integers only; listed for graphs that hold it",
    "real.default": "complex: the zoo's Fourier operator",
    "imag.default": "complex: the zoo's Fourier operator",
    "view_as_real.default": "complex: the zoo's Fourier operator",
}
