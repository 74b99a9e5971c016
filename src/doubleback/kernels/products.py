"""Products in a form that PyTorch multiplies faster: rows of a matrix, strided convolutions,
locally connected products.

A product of (…, n) with a matrix becomes one product of rows. Where the leading axes cannot be
viewed as one, PyTorch multiplies each matrix of the batch by itself, and a compiler writes out a
copy of the weight for each of them; copying the rows together first costs one pass over them. What
becomes of the others stands above each.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..counting import flop_formula
from ..dtypes import accumulation
from .launch import library

# Products of rows --------------------------------------------------------------------------------


def times(x: Tensor, matrix: Tensor) -> Tensor:
    """x @ matrix.

    >>> import torch
    >>> times(torch.ones(2, 3, 5, 4).transpose(1, 2), torch.ones(4, 6)).shape
    torch.Size([2, 5, 3, 6])
    """
    if x.dim() < 3 or matrix.dim() != 2 or x.is_contiguous():
        return x @ matrix
    return (x.reshape(-1, x.shape[-1]) @ matrix).view(*x.shape[:-1], matrix.shape[-1])


def affine_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b.

    >>> import torch
    >>> affine_rows(torch.ones(2, 3, 5, 4).transpose(1, 2), torch.ones(6, 4), None).shape
    torch.Size([2, 5, 3, 6])
    """
    if x.dim() < 3 or x.is_contiguous():
        return F.linear(x, weight, bias)
    rows = F.linear(x.reshape(-1, x.shape[-1]), weight, bias)
    return rows.view(*x.shape[:-1], weight.shape[0])


# Strided convolutions ----------------------------------------------------------------------------
#
# A strided convolution becomes what a GPU does well: matrix products, or stride 1 on more channels.
# With k = s·a + b, a kernel of size K at stride s is one of size A = ⌈K/s⌉ at stride 1 on the s²
# times as many channels that the image has when its s×s blocks become channels:
#
#     y[i] = Σ_k θ[k] x[s·i + k] = Σ_{a,b} θ[s·a + b] x̃[i + a, b],    x̃[j, b] = x[s·j + b].
#
# For K = s (patches) that is a dense layer on the blocks. It pays where x has few channels, of
# which cuDNN's kernels read eight at a time: the first layer of most image networks, whose input
# gradient no ordinary training ever asks for. `pays` says where; benchmarks/convolutions.py
# measures it.
#
# Blocks are laid out (rows, columns, channels), as the filters of a channels-last network are. In
# 16 bits, of which kernels read eight at a time, a colour image gets a fourth channel of zeros
# where its blocks of 2×2 would have twelve, which is no multiple of eight.


aten = torch.ops.aten
FEW = 4  # channels
WASTE = 1.5  # products with zeros that kernel or channels are filled up with, for one without them
EIGHT = 8  # numbers of 16 bits that kernels read at once


def pays(
    device: torch.device, weight_shape: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], groups: int, transpose: bool,
) -> bool:  # fmt: skip
    """Whether this convolution, or its transpose, is better computed here."""
    if device.type != "cuda" or len(weight_shape) != 4 or groups != 1 or tuple(dilation) != (1, 1):
        return False
    if weight_shape[1] > FEW or min(stride) < 2:
        return False
    kernel = tuple(weight_shape[2:])
    if kernel == tuple(stride):
        return not any(padding)
    if any(k <= s for k, s in zip(kernel, stride, strict=True)):
        return False
    grown = [-(-k // s) * s for k, s in zip(kernel, stride, strict=True)]
    return transpose or math.prod(grown) <= WASTE * math.prod(kernel)


class Strided:
    """The geometry of one such convolution, for images (B, C, *sizes) of `dtype`."""

    def __init__(
        self,
        x_shape: Sequence[int],
        weight_shape: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        self.batch, self.given, *sizes = x_shape
        self.after, _, *kernel = weight_shape
        self.kernel, self.stride = tuple(kernel), tuple(stride)
        parts = list(zip(sizes, kernel, stride, padding, strict=True))
        self.out = tuple((n + 2 * p - k) // s + 1 for n, k, s, p in parts)
        self.taps = tuple(-(-k // s) for _, k, s, _ in parts)  # A
        self.blocks = tuple(o + a - 1 for o, a in zip(self.out, self.taps, strict=True))
        self.channels = self.given  # of the blocks
        if dtype.itemsize == 2 and not self.dense:
            self.channels = _filled(self.given, math.prod(stride))
        self.fill = self.channels - self.given
        # before and after each axis, from the last; what no output reads is cut off
        self.margins = [
            m
            for (n, _, s, p), b in reversed(list(zip(parts, self.blocks, strict=True)))
            for m in (p, s * b - n - p)
        ] + [0, self.fill]

    @property
    def dense(self) -> bool:
        return self.taps == (1, 1)

    def fold(self, x: Tensor) -> Tensor:
        """x̃ (B, rows of blocks, columns of blocks, s·s·C)."""
        x = F.pad(x, self.margins) if any(self.margins) else x
        (bh, bw), (sh, sw) = self.blocks, self.stride
        x = x.permute(0, 2, 3, 1).reshape(self.batch, bh, sh, bw, sw, self.channels)
        return x.transpose(2, 3).reshape(self.batch, bh, bw, sh * sw * self.channels)

    def unfold(self, folded: Tensor) -> Tensor:
        """The adjoint of `fold`."""
        (bh, bw), (sh, sw) = self.blocks, self.stride
        x = folded.reshape(self.batch, bh, bw, sh, sw, self.channels).transpose(2, 3)
        x = x.reshape(self.batch, bh * sh, bw * sw, self.channels).permute(0, 3, 1, 2)
        return F.pad(x, [-m for m in self.margins]) if any(self.margins) else x

    def filters(self, weight: Tensor) -> Tensor:
        """θ̃ (O, s·s·C, A, A), channels-last."""
        (ah, aw), (sh, sw), (kh, kw) = self.taps, self.stride, self.kernel
        if (ah * sh, aw * sw) != (kh, kw) or self.fill:
            weight = F.pad(weight, [0, aw * sw - kw, 0, ah * sh - kh, 0, self.fill])
        weight = weight.permute(0, 2, 3, 1).reshape(self.after, ah, sh, aw, sw, self.channels)
        weight = weight.transpose(2, 3).reshape(self.after, ah, aw, sh * sw * self.channels)
        return weight.permute(0, 3, 1, 2)

    def unfilters(self, folded: Tensor) -> Tensor:
        """The adjoint of `filters`."""
        (ah, aw), (sh, sw), (kh, kw) = self.taps, self.stride, self.kernel
        weight = folded.permute(0, 2, 3, 1).reshape(self.after, ah, aw, sh, sw, self.channels)
        weight = weight.transpose(2, 3).reshape(self.after, ah * sh, aw * sw, self.channels)
        return weight[:, :kh, :kw, : self.given].contiguous().permute(0, 3, 1, 2)

    def forward(self, weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        folded, filters = self.fold(x), self.filters(weight)
        if self.dense:
            return affine_rows(folded, filters.flatten(1), bias).permute(0, 3, 1, 2)
        return aten.convolution(folded.permute(0, 3, 1, 2), filters, bias, *_UNIT)

    def transpose(self, weight: Tensor, y: Tensor) -> Tensor:
        filters = self.filters(weight)
        if self.dense:
            return self.unfold(times(y.permute(0, 2, 3, 1), filters.flatten(1)))
        like = _unread(y, (self.batch, filters.shape[1], *self.blocks))
        folded = aten.convolution_backward(y, like, filters, None, *_UNIT, [True, False, False])[0]
        return self.unfold(folded.permute(0, 2, 3, 1))

    def weight_adjoint(
        self, x: Tensor, y: Tensor, bias: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """K□(x, y), and the sum of y for a bias."""
        total = y.sum((0, 2, 3)) if bias else None
        folded = self.fold(x)
        if self.dense:
            rows = y.permute(0, 2, 3, 1).reshape(-1, self.after)
            product = rows.t() @ folded.reshape(-1, folded.shape[-1])
            return self.unfilters(product[:, :, None, None]), total
        like = _unread(y, (self.after, folded.shape[-1], *self.taps))
        folded = folded.permute(0, 3, 1, 2)
        product = aten.convolution_backward(y, folded, like, None, *_UNIT, [False, True, False])[1]
        return self.unfilters(product), total


# Transposes on a CPU -----------------------------------------------------------------------------
#
# At stride 1 the transpose is a convolution of y with the filters turned round,
#
#     x[i] = Σ_k θ[k] y[i − k] = Σ_k θ[K−1−k] y[i + k − (K−1)],
#
# which fills up no channels where y has fewer than the processor multiplies at once: PyTorch's
# gradient kernel does.


class Turned(NamedTuple):
    """Such a convolution; padding: of y."""

    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @classmethod
    def where_faster(
        cls, y: Tensor, weight_shape: Sequence[int], stride: Sequence[int], padding: Sequence[int],
        dilation: Sequence[int], groups: int,
    ) -> Turned | None:  # fmt: skip
        """None where PyTorch's own transpose is as good."""
        if y.device.type != "cpu" or y.dtype != torch.float32 or groups != 1 or max(stride) > 1:
            return None
        if weight_shape[0] >= _width() or len(weight_shape) != 4:
            return None
        parts = zip(weight_shape[2:], padding, dilation, strict=True)
        left = tuple(d * (k - 1) - p for k, p, d in parts)
        return cls(left, tuple(dilation)) if min(left) >= 0 else None

    def transpose(self, weight: Tensor, y: Tensor) -> Tensor:
        turned = weight.flip(2, 3).transpose(0, 1)
        return aten.convolution(
            y, turned, None, (1, 1), self.padding, self.dilation, False, (0, 0), 1
        )


@functools.cache
def _width() -> int:
    """Numbers of 32 bits that the processor multiplies at once."""
    return 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8


def _filled(channels: int, pixels: int) -> int:
    """Channels such that a block of so many pixels can be read eight numbers at a time.

    >>> _filled(3, 4), _filled(3, 16), _filled(3, 9)
    (4, 3, 3)
    """
    enough = channels
    while enough * pixels % EIGHT:
        enough += 1
    return enough if enough <= WASTE * channels else channels


_UNIT = ((1, 1), (0, 0), (1, 1), False, (0, 0), 1)


def _unread(y: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What PyTorch reads shape and layout of only."""
    form = torch.channels_last
    return torch.empty(shape, dtype=y.dtype, device=y.device, memory_format=form)


# Locally connected products ----------------------------------------------------------------------
#
# In two dimensions: K, Kᵀ and K□ as operators of the library `doubleback`, each differentiable by
# the other two (adjoint commutativity). x is (B, C, H, W), θ is (H′, W′, O, C, k, l), y is
# (B, O, H′, W′).
#
# For every place p, y_p = θ_p x_p with θ_p: (O, Ckl) and the patch x_p: (Ckl, B), so that examples
# lie side by side in memory and a patch is copied in long runs. Rows of places are taken in chunks:
# the patches of one chunk exist at a time.

PARTS = 4  # chunks that the patches are taken in …
LEAST = 2**22  # … unless all of them are smaller than so many bytes

Ints = Sequence[int]


def _chunks(rows: int, bytes_per_row: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows of places."""
    budget = max(rows * bytes_per_row / PARTS, LEAST)
    step = max(1, int(budget // max(bytes_per_row, 1)))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _places_first(y: Tensor, a: int, b: int) -> Tensor:
    """Rows a … b of (B, O, H′, W′) as (places, O, B)."""
    return y[:, :, a:b].permute(2, 3, 1, 0).flatten(0, 1)


def _windows(x: Tensor, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    """Every patch as a view: (H′, W′, C, k, l, B)."""
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = kernel, stride, padding, dilation
    height, width = x.shape[2:]
    new = x.new_zeros if ph or pw else x.new_empty
    padded = new(x.shape[1], height + 2 * ph, width + 2 * pw, x.shape[0])  # (C, H, W, B)
    padded[:, ph : ph + height, pw : pw + width].copy_(x.permute(1, 2, 3, 0))
    view = padded.unfold(1, dh * (kh - 1) + 1, sh)[..., ::dh]
    view = view.unfold(2, dw * (kw - 1) + 1, sw)[..., ::dw]  # (C, H′, W′, B, k, l)
    return view.permute(1, 2, 0, 4, 5, 3)


def _row_bytes(windows: Tensor) -> int:
    return windows[0].numel() * windows.element_size() if windows.shape[0] else 0


def _forward(x: Tensor, weight: Tensor, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    """y_p = θ_p x_p."""
    rows, columns, out, _, *kernel = weight.shape
    windows = _windows(x, kernel, stride, padding, dilation)
    filters = weight.reshape(rows, columns, out, -1)
    y = x.new_empty(x.shape[0], out, rows, columns)
    for a, b in _chunks(rows, _row_bytes(windows)):
        patches = windows[a:b].reshape((b - a) * columns, -1, x.shape[0])
        part = torch.bmm(filters[a:b].flatten(0, 1), patches)
        y[:, :, a:b] = part.reshape(b - a, columns, out, -1).permute(3, 2, 0, 1)
    return y


def _transpose(
    weight: Tensor, y: Tensor, sizes: Ints, stride: Ints, padding: Ints, dilation: Ints
) -> Tensor:
    """x = Σ_p of θ_pᵀ y_p, put back in its place."""
    rows, columns, out, channels, *kernel = weight.shape
    batch = y.shape[0]
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = kernel, stride, padding, dilation
    filters = weight.reshape(rows, columns, out, -1)
    shape = channels, sizes[0] + 2 * ph, sizes[1] + 2 * pw, batch
    x = y.new_zeros(shape, dtype=accumulation(y.dtype))
    row_bytes = columns * filters.shape[-1] * batch * y.element_size()
    for a, b in _chunks(rows, row_bytes):
        patches = torch.bmm(filters[a:b].flatten(0, 1).transpose(1, 2), _places_first(y, a, b))
        patches = patches.reshape(b - a, columns, channels, kh, kw, batch)
        for i in range(kh):
            for j in range(kw):
                top, left = a * sh + i * dh, j * dw
                place = x[:, top : top + (b - a - 1) * sh + 1 : sh]
                place = place[:, :, left : left + (columns - 1) * sw + 1 : sw]
                place += patches[:, :, :, i, j].permute(2, 0, 1, 3)
    inside = x[:, ph : ph + sizes[0], pw : pw + sizes[1]].permute(3, 0, 1, 2)
    return y.new_empty(inside.shape).copy_(inside)


def _weight_adjoint(
    x: Tensor, y: Tensor, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints
) -> Tensor:
    """θ_p = y_p x_pᵀ."""
    windows = _windows(x, kernel, stride, padding, dilation)
    rows, columns, channels = windows.shape[:3]
    weight = x.new_empty(rows, columns, y.shape[1], channels, *kernel)
    for a, b in _chunks(rows, _row_bytes(windows)):
        patches = windows[a:b].reshape((b - a) * columns, -1, x.shape[0])
        torch.bmm(
            _places_first(y, a, b),
            patches.transpose(1, 2),
            out=weight[a:b].view((b - a) * columns, y.shape[1], -1),
        )
    return weight


# ------------------------------------------------------------------------------- as operators

_GEOMETRY = "int[] stride, int[] padding, int[] dilation"


def _define(schema: str, run: Any, fake: Any, backward: Any, setup: Any) -> Any:
    name = schema.partition("(")[0]
    library.define(schema)
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"doubleback::{name}", fake, lib=library)
    torch.library.register_autograd(
        f"doubleback::{name}", backward, setup_context=setup, lib=library
    )
    return getattr(torch.ops.doubleback, name)


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.rest = inputs[2:]


def _backward_of_forward(ctx: Any, y: Tensor) -> tuple:
    x, weight = ctx.saved_tensors
    want_x, want_weight = ctx.needs_input_grad[:2]
    return (
        local_transpose(weight, y, list(x.shape[2:]), *ctx.rest) if want_x else None,
        local_weight_adjoint(x, y, list(weight.shape[4:]), *ctx.rest) if want_weight else None,
        None, None, None,
    )  # fmt: skip


def _backward_of_transpose(ctx: Any, x: Tensor) -> tuple:
    weight, y = ctx.saved_tensors
    want_weight, want_y = ctx.needs_input_grad[:2]
    geometry = ctx.rest[1:]
    return (
        local_weight_adjoint(x, y, list(weight.shape[4:]), *geometry) if want_weight else None,
        local_product(x, weight, *geometry) if want_y else None,
        None, None, None, None,
    )  # fmt: skip


def _backward_of_weight_adjoint(ctx: Any, weight: Tensor) -> tuple:
    x, y = ctx.saved_tensors
    want_x, want_y = ctx.needs_input_grad[:2]
    geometry = ctx.rest[1:]
    return (
        local_transpose(weight, y, list(x.shape[2:]), *geometry) if want_x else None,
        local_product(x, weight, *geometry) if want_y else None,
        None, None, None, None,
    )  # fmt: skip


def _fake_forward(x, weight, stride, padding, dilation):
    return x.new_empty(x.shape[0], weight.shape[2], *weight.shape[:2])


def _fake_transpose(weight, y, sizes, stride, padding, dilation):
    return y.new_empty(y.shape[0], weight.shape[3], *sizes)


def _fake_weight_adjoint(x, y, kernel, stride, padding, dilation):
    return x.new_empty(*y.shape[2:], y.shape[1], x.shape[1], *kernel)


local_product = _define(
    f"locally_connected(Tensor x, Tensor weight, {_GEOMETRY}) -> Tensor",
    _forward, _fake_forward, _backward_of_forward, _save,
)  # fmt: skip
local_transpose = _define(
    f"locally_connected_transpose(Tensor weight, Tensor y, int[] sizes, {_GEOMETRY}) -> Tensor",
    _transpose, _fake_transpose, _backward_of_transpose, _save,
)  # fmt: skip
local_weight_adjoint = _define(
    f"locally_connected_weight_adjoint(Tensor x, Tensor y, int[] kernel, {_GEOMETRY}) -> Tensor",
    _weight_adjoint, _fake_weight_adjoint, _backward_of_weight_adjoint, _save,
)  # fmt: skip


@flop_formula([local_product, local_transpose, local_weight_adjoint])
def _flops(first: Any, second: Any, *rest: Any, out_shape: Any = None, **named: Any) -> int:
    """One multiplication and one addition per example and entry of θ, whichever the result."""
    shapes = (first, second, out_shape)
    (weight,) = (shape for shape in shapes if len(shape) == 6)
    batch = next(shape for shape in shapes if len(shape) == 4)[0]
    return 2 * batch * math.prod(weight)
