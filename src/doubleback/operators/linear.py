"""Operators without weights: average pooling, invertible down-sampling and its inverse."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from .base import Operator, Shape

aten = torch.ops.aten
_POOLS = {
    1: (aten.avg_pool2d, aten.avg_pool2d_backward),
    2: (aten.avg_pool2d, aten.avg_pool2d_backward),
    3: (aten.avg_pool3d, aten.avg_pool3d_backward),
}


@dataclass(frozen=True)
class AveragePool(Operator):
    """The mean over windows, in one to three dimensions; no weight: θ is None.

    x: (B, C, *sizes) or (C, *sizes). Arguments as of ``torch.nn.AvgPool2d``.

    >>> import torch
    >>> K, x = AveragePool((2,)), torch.tensor([[[1.0, 3.0, 5.0]]])
    >>> K.forward(None, x), K.transpose(None, torch.ones(1, 1, 1), x.shape)
    (tensor([[[2.]]]), tensor([[[0.5000, 0.5000, 0.0000]]]))
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    ceil_mode: bool = False
    count_include_pad: bool = True
    divisor: int | None = None

    def __post_init__(self) -> None:
        for name in ("kernel", "stride", "padding"):
            if not isinstance(getattr(self, name), tuple):
                raise InputError(
                    f"{self}: {name} is a tuple, one number per spatial axis; for images "
                    "AveragePool((2, 2))"
                )
        n = len(self.kernel)
        given = (len(self.stride), len(self.padding))
        if n not in _POOLS or any(size not in (0, n) for size in given):
            raise InputError(f"{self} needs 1 to 3 window sizes, and as many strides and paddings")

    def _options(self) -> list[Any]:
        parts = [self.kernel, self.stride or self.kernel, self.padding or (0,) * len(self.kernel)]
        if len(self.kernel) == 1:  # a row of height 1
            parts = [(fill, *part) for fill, part in zip((1, 1, 0), parts, strict=True)]
        rest = [self.ceil_mode, self.count_include_pad, self.divisor]
        return [*map(list, parts), *rest]

    def forward(self, weight: None, x: Tensor) -> Tensor:
        pool = _POOLS[len(self.kernel)][0]
        if len(self.kernel) == 1:
            return pool(x.unsqueeze(-2), *self._options()).squeeze(-2)
        return pool(x, *self._options())

    def transpose(self, weight: None, y: Tensor, shape: Shape | None = None) -> Tensor:
        """Each entry of y spread evenly over its window."""
        if shape is None:
            raise InputError(f"the transpose of {self} needs the input's shape")
        flat = len(self.kernel) == 1
        if flat:
            y, shape = y.unsqueeze(-2), (*shape[:-1], 1, shape[-1])
        last = y.dim() == 4 and y.shape[1] > 1 and y.stride(1) == 1  # channels last
        last = last and not (y.is_cuda and self._overlaps)
        form = torch.channels_last if last else torch.contiguous_format
        unread = torch.empty(tuple(shape), dtype=y.dtype, device=y.device, memory_format=form)
        x = _POOLS[len(self.kernel)][1](y, unread, *self._options())
        return x.squeeze(-2) if flat else x

    @property
    def _overlaps(self) -> bool:
        """Whether an entry may lie in several windows, or a window reach over the edge. PyTorch's
        CUDA kernel of this transpose is wrong there for images that lie channels-last."""
        strides = self.stride or self.kernel
        return any(self.padding) or any(s < k for s, k in zip(strides, self.kernel, strict=True))

    def weight_adjoint(self, x: Tensor, y: Tensor, shape: Any = None) -> None:
        return None

    def sample(self) -> tuple[None, Tensor]:
        return None, torch.randn(2, 3, *(2 * k + 1 for k in self.kernel))


@dataclass(frozen=True)
class InvertibleDownsampling(Operator):
    """Blocks of r₁×…×r_n places become channels: (…, C, *sizes) → (…, C·Πr, *sizes/r).

    A permutation, so Kᵀ = K⁻¹. In two dimensions this is ``torch.nn.PixelUnshuffle``.

    >>> import torch
    >>> K, x = InvertibleDownsampling((2, 2)), torch.randn(1, 3, 4, 6)
    >>> y = K.forward(None, x)
    >>> y.shape, bool((K.transpose(None, y) == x).all())
    (torch.Size([1, 12, 2, 3]), True)
    """

    factor: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_factor(self, self.factor)

    @property
    def inverse(self) -> InvertibleUpsampling:
        return InvertibleUpsampling(self.factor)

    def forward(self, weight: None, x: Tensor) -> Tensor:
        return _down(self, self.factor, x)

    def transpose(self, weight: None, y: Tensor, shape: Shape | None = None) -> Tensor:
        return _up(self, self.factor, y)

    def weight_adjoint(self, x: Tensor, y: Tensor, shape: Any = None) -> None:
        return None

    def sample(self) -> tuple[None, Tensor]:
        return None, torch.randn(2, 3, *(2 * r for r in self.factor))


@dataclass(frozen=True)
class InvertibleUpsampling(Operator):
    """The inverse: channels become blocks of places, as ``torch.nn.PixelShuffle``.

    >>> import torch
    >>> K, x = InvertibleUpsampling((2,)), torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    >>> K.forward(None, x)
    tensor([[[1., 3., 2., 4.]]])
    """

    factor: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_factor(self, self.factor)

    @property
    def inverse(self) -> InvertibleDownsampling:
        return InvertibleDownsampling(self.factor)

    def forward(self, weight: None, x: Tensor) -> Tensor:
        return _up(self, self.factor, x)

    def transpose(self, weight: None, y: Tensor, shape: Shape | None = None) -> Tensor:
        return _down(self, self.factor, y)

    def weight_adjoint(self, x: Tensor, y: Tensor, shape: Any = None) -> None:
        return None

    def sample(self) -> tuple[None, Tensor]:
        return None, torch.randn(2, 3 * math.prod(self.factor), *(2 for _ in self.factor))


def _check_factor(op: Operator, factor: Any) -> None:
    if not isinstance(factor, tuple):
        example = (factor, factor) if isinstance(factor, int) else (2, 2)
        raise InputError(
            f"{op}: the factor is a tuple, one number per spatial axis; for images "
            f"{type(op).__name__}({example})"
        )
    if not factor or any(not isinstance(r, int) or r < 1 for r in factor):
        raise InputError(f"{op} needs one positive whole factor per spatial axis")


def _down(op: Operator, factor: tuple[int, ...], x: Tensor) -> Tensor:
    n = len(factor)
    if x.dim() <= n or any(s % r for s, r in zip(x.shape[-n:], factor, strict=True)):
        raise InputError(f"{op}: sizes of an input of shape {tuple(x.shape)} are no multiples")
    lead, (channels, *sizes) = x.shape[: -n - 1], x.shape[-n - 1 :]
    small = [s // r for s, r in zip(sizes, factor, strict=True)]
    split = [part for pair in zip(small, factor, strict=True) for part in pair]
    start = len(lead) + 1
    order = [*range(start), *range(start + 1, start + 2 * n, 2), *range(start, start + 2 * n, 2)]
    blocks = x.reshape(*lead, channels, *split).permute(order)
    return blocks.reshape(*lead, channels * math.prod(factor), *small)


def _up(op: Operator, factor: tuple[int, ...], y: Tensor) -> Tensor:
    n, block = len(factor), math.prod(factor)
    if y.dim() <= n or y.shape[-n - 1] % block:
        raise InputError(f"{op}: channels of a shape {tuple(y.shape)} are no multiple of {block}")
    lead, (channels, *sizes) = y.shape[: -n - 1], y.shape[-n - 1 :]
    start = len(lead) + 1
    order = [*range(start), *(k for i in range(n) for k in (start + n + i, start + i))]
    blocks = y.reshape(*lead, channels // block, *factor, *sizes).permute(order)
    large = [s * r for s, r in zip(sizes, factor, strict=True)]
    return blocks.reshape(*lead, channels // block, *large)
