"""Products in a form that PyTorch multiplies faster: rows of a matrix, strided convolutions.

A product of (…, n) with a matrix becomes one product of rows. Where the leading axes cannot be
viewed as one, PyTorch multiplies each matrix of the batch by itself, and a compiler writes out a
copy of the weight for each of them; copying the rows together first costs one pass over them.

A strided convolution becomes what a GPU does well: matrix products, or stride 1 on more channels.
With k = s·a + b, a kernel of size K at stride s is one of size A = ⌈K/s⌉ at stride 1 on the s²
times as many channels that the image has when its s×s blocks become channels:

    y[i] = Σ_k θ[k] x[s·i + k] = Σ_{a,b} θ[s·a + b] x̃[i + a, b],    x̃[j, b] = x[s·j + b].

For K = s (patches) that is a dense layer on the blocks. It pays where x has few channels, of which
cuDNN's kernels read eight at a time: the first layer of most image networks, whose input gradient
no ordinary training ever asks for. `pays` says where; benchmarks/convolutions.py measures it.

Blocks are laid out (rows, columns, channels), as the filters of a channels-last network are. In 16
bits, of which kernels read eight at a time, a colour image gets a fourth channel of zeros where its
blocks of 2×2 would have twelve, which is no multiple of eight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

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
