"""Operators with weights: dense, convolution, locally connected; and layers that PyTorch lacks:
locally connected ones, a filter of its own at every place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..counting import counted
from ..errors import InputError
from ..kernels import (
    Depthwise,
    Part,
    Strided,
    affine_rows,
    local_product,
    local_transpose,
    local_weight_adjoint,
    pays,
    times,
)
from .base import Operator, Shape, placeholder, shape_of

aten = torch.ops.aten


def _unread(y: Tensor, weight: Tensor | None, shape: Sequence[int]) -> Tensor:
    """An input of which PyTorch reads shape and layout only. A stride-0 placeholder would make it
    copy channels-last cotangents back and forth."""
    if weight is not None and weight.dim() == 4 and not weight.is_contiguous():
        return torch.empty(
            tuple(shape), dtype=y.dtype, device=y.device, memory_format=torch.channels_last
        )
    return placeholder(y, shape)


@dataclass(frozen=True)
class Dense(Operator):
    """K(W, x) = x Wᵀ over the last axis, for any number of leading axes.

    x: (…, n), W: (m, n), y: (…, m).

    >>> import torch
    >>> K, W, x, y = Dense(), torch.ones(2, 3), torch.ones(4, 3), torch.ones(4, 2)
    >>> K.forward(W, x).shape, K.transpose(W, y).shape, K.weight_adjoint(x, y).shape
    (torch.Size([4, 2]), torch.Size([4, 3]), torch.Size([2, 3]))
    """

    def forward(self, weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
        counted(forward=1)
        return affine_rows(x, weight, bias)

    def transpose(self, weight: Tensor, y: Tensor, shape: Shape | None = None) -> Tensor:
        counted(transpose=1)
        return times(y, weight)

    def weight_adjoint(self, x: Tensor, y: Tensor, shape: Any = None) -> Tensor:
        counted(weight_adjoint=1)
        return y.reshape(-1, y.shape[-1]).t() @ x.reshape(-1, x.shape[-1])

    def sample(self) -> tuple[Tensor, Tensor]:
        return torch.randn(4, 5), torch.randn(2, 3, 5)


@dataclass(frozen=True)
class Convolution(Operator):
    """Convolution or transposed convolution in one to three dimensions.

    K(θ, x) = x ⋆ θ with stride, padding, dilation and groups, as ``aten.convolution``.

    >>> import torch
    >>> K = Convolution(stride=(2, 2), padding=(1, 1), dilation=(1, 1))
    >>> K.forward(torch.ones(5, 3, 3, 3), torch.ones(1, 3, 8, 8)).shape
    torch.Size([1, 5, 4, 4])
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool = False
    output_padding: tuple[int, ...] = ()
    groups: int = 1

    def _options(self) -> tuple:
        extra = self.output_padding or (0,) * len(self.stride)
        return (self.stride, self.padding, self.dilation, self.transposed, extra, self.groups)

    def _instead(
        self, part: Part, tensors: Sequence[Tensor | None], x_shape: Sequence[int],
        weight_shape: Sequence[int],
    ) -> Depthwise | Strided | None:  # fmt: skip
        """Another way to compute a part of this convolution from `tensors`, where it is faster than
        PyTorch's."""
        if self.transposed:
            return None
        first = next(t for t in tensors if t is not None)
        if self.folds(first.device, weight_shape, part):
            return Strided(x_shape, weight_shape, self.stride, self.padding, first.dtype)
        options = (self.stride, self.padding, self.dilation, self.groups)
        return Depthwise.where_faster(part, tensors, x_shape, weight_shape, *options)

    def folds(self, device: torch.device, weight_shape: Sequence[int], part: Part = "K") -> bool:
        """Whether blocks of x become channels for this, which any layout of x is read for."""
        options = (self.stride, self.padding, self.dilation, self.groups)
        return not self.transposed and pays(device, weight_shape, *options, part == "Kᵀ")

    def forward(self, weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
        counted(forward=1)
        instead = self._instead("K", (x, weight, bias), x.shape, weight.shape)
        if instead is not None:
            return instead.forward(weight, x, bias)
        return aten.convolution(x, weight, bias, *self._options())

    def transpose(
        self,
        weight: Tensor,
        y: Tensor,
        shape: Shape | None = None,
        like: Tensor | None = None,
    ) -> Tensor:
        """Kᵀ(θ, y), of the input's `shape` (a strided convolution forgets it).

        like: any tensor of that shape; PyTorch reads the layout of the result off it.
        """
        if shape is None:
            raise InputError(f"the transpose of {self} needs the input's shape")
        return self.adjoints(like, weight, y, shape, weight.shape, (True, False, False))[0]

    def weight_adjoint(self, x: Tensor, y: Tensor, shape: Any = None) -> Tensor:
        """K□(x, y), of the weight's `shape`."""
        if shape is None:
            raise InputError(f"the weight adjoint of {self} needs the weight's shape")
        return self.adjoints(x, None, y, x.shape, shape_of(shape), (False, True, False))[1]

    def adjoints(
        self,
        x: Tensor | None,
        weight: Tensor | None,
        y: Tensor,
        x_shape: Sequence[int],
        weight_shape: Sequence[int],
        wanted: tuple[bool, bool, bool],
        like: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Kᵀ(θ, y), K□(x, y) and the sum of y for a bias, those that are `wanted`, in one call.

        x may be None where K□ is not wanted, the weight where Kᵀ is not; `like` then lends the
        layout of an x.
        """
        counted(transpose=int(wanted[0]), weight_adjoint=int(wanted[1]))
        shapes = (x_shape, weight_shape)
        turned = self._instead("Kᵀ", (y, weight), *shapes) if wanted[0] else None
        crossed = self._instead("K□", (x, y), *shapes) if wanted[1] else None
        dx = dw = db = None
        if turned is not None and weight is not None:
            dx = turned.transpose(weight, y)
        if crossed is not None and x is not None:
            dw, db = crossed.weight_adjoint(x, y, wanted[2])
        rest = (wanted[0] and dx is None, wanted[1] and dw is None, wanted[2] and db is None)
        if any(rest):
            stock = self._adjoints(x, weight, y, *shapes, rest, like)
            dx, dw, db = (
                new if need else old
                for old, new, need in zip((dx, dw, db), stock, rest, strict=True)
            )
        return dx, dw, db  # type: ignore[return-value]

    def _adjoints(self, x, weight, y, x_shape, weight_shape, wanted, like) -> Any:
        """The same by PyTorch's own kernels."""
        if x is None:
            x = like
        if x is None:
            x = _unread(y, weight, x_shape)
        if weight is None:
            weight = placeholder(y, weight_shape)
        channels = [y.shape[1]] if wanted[2] else None
        return aten.convolution_backward(y, x, weight, channels, *self._options(), list(wanted))

    def sample(self) -> tuple[Tensor, Tensor]:
        n, kernel = len(self.stride), 2
        sizes = [5 + d * (kernel - 1) + s for d, s in zip(self.dilation, self.stride, strict=True)]
        before, after = 2 * self.groups, 3
        shape = (before, after) if self.transposed else (after * self.groups, before // self.groups)
        return torch.randn(*shape, *(kernel,) * n), torch.randn(2, before, *sizes)


@dataclass(frozen=True)
class LocallyConnected(Operator):
    """A convolution whose filter changes from place to place, in one or two dimensions.

    y[b, o, p] = Σ_{c,k} θ[p, o, c, k] x[b, c, p·stride + k·dilation − padding]

    x: (B, C, *sizes), θ: (*out sizes, O, C, *kernel), y: (B, O, *out sizes). Computed as batched
    products over a few rows of places at a time: the patches of x never exist as a whole.

    >>> import torch
    >>> K = LocallyConnected(stride=(1, 1), padding=(0, 0), dilation=(1, 1))
    >>> K.forward(torch.randn(6, 6, 5, 3, 3, 3), torch.randn(2, 3, 8, 8)).shape
    torch.Size([2, 5, 6, 6])
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = {len(self.stride), len(self.padding), len(self.dilation)}
        if sizes not in ({1}, {2}):
            raise InputError(f"{self} needs stride, padding and dilation for one or two axes")

    @property
    def _flat(self) -> bool:
        return len(self.stride) == 1

    def _options(self) -> tuple[list[int], list[int], list[int]]:
        """Stride, padding and dilation in two dimensions; a row has height 1."""
        if self._flat:
            return [1, *self.stride], [0, *self.padding], [1, *self.dilation]
        return list(self.stride), list(self.padding), list(self.dilation)

    def out_sizes(self, sizes: Shape, kernel: Shape) -> tuple[int, ...]:
        """Spatial sizes of the output."""
        parts = zip(sizes, kernel, self.stride, self.padding, self.dilation, strict=True)
        return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in parts)

    def _check(self, weight: Tensor, x: Tensor) -> None:
        n = len(self.stride)
        shapes = f"weight of shape {tuple(weight.shape)}, input of shape {tuple(x.shape)}"
        if x.dim() != n + 2 or weight.dim() != 2 * n + 2:
            raise InputError(
                f"{self} takes an input (B, C, *sizes) and a weight (*out sizes, O, C, *kernel) "
                f"with {n} spatial axes: {shapes}"
            )
        wanted = (*self.out_sizes(x.shape[2:], weight.shape[n + 2 :]), x.shape[1])
        if (*weight.shape[:n], weight.shape[n + 1]) != wanted:
            raise InputError(
                f"{self}: {shapes}; such an input has output sizes {wanted[:-1]} and "
                f"{wanted[-1]} channels"
            )

    def _weight2d(self, weight: Tensor) -> Tensor:
        return weight[None].unsqueeze(-2) if self._flat else weight

    def _image(self, t: Tensor) -> Tensor:
        return t.unsqueeze(-2) if self._flat else t

    def forward(self, weight: Tensor, x: Tensor) -> Tensor:
        self._check(weight, x)
        counted(forward=1)
        y = local_product(self._image(x), self._weight2d(weight), *self._options())
        return y.squeeze(-2) if self._flat else y

    def transpose(self, weight: Tensor, y: Tensor, shape: Shape | None = None) -> Tensor:
        if shape is None:
            raise InputError(f"the transpose of {self} needs the input's shape")
        counted(transpose=1)
        sizes = [1, shape[-1]] if self._flat else list(shape[-2:])
        x = local_transpose(self._weight2d(weight), self._image(y), sizes, *self._options())
        return x.squeeze(-2) if self._flat else x

    def weight_adjoint(self, x: Tensor, y: Tensor, shape: Any = None) -> Tensor:
        if shape is None:
            raise InputError(f"the weight adjoint of {self} needs the weight's shape")
        counted(weight_adjoint=1)
        kernel = list(shape_of(shape)[-len(self.stride) :])
        kernel = [1, *kernel] if self._flat else kernel
        weight = local_weight_adjoint(self._image(x), self._image(y), kernel, *self._options())
        return weight.squeeze(-2)[0] if self._flat else weight

    def sample(self) -> tuple[Tensor, Tensor]:
        kernel = (2,) * len(self.stride)
        sizes = tuple(4 + d + s for d, s in zip(self.dilation, self.stride, strict=True))
        weight = torch.randn(*self.out_sizes(sizes, kernel), 3, 2, *kernel)
        return weight, torch.randn(2, 2, *sizes)


# Layers ------------------------------------------------------------------------------------------


Sizes = int | tuple[int, ...]


class _LocallyConnected(nn.Module):
    """Common to one and two dimensions; see `LocallyConnected2d`."""

    axes: int

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        input_size: Sizes,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes = 0,
        dilation: Sizes = 1,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.input_size = self._sizes("input_size", input_size, 1)
        self.kernel_size = self._sizes("kernel_size", kernel_size, 1)
        self.operator = LocallyConnected(
            self._sizes("stride", stride, 1),
            self._sizes("padding", padding, 0),
            self._sizes("dilation", dilation, 1),
        )
        out = self.operator.out_sizes(self.input_size, self.kernel_size)
        if min(out) < 1:
            raise InputError(
                f"{type(self).__name__}: an input of size {self.input_size} has no place for a "
                f"window of size {self.kernel_size}; its output would have size {out}"
            )
        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        weight = torch.empty(*out, out_channels, in_channels, *self.kernel_size, **kind)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.empty(out_channels, *out, **kind)) if bias else None
        self.reset_parameters()

    def _sizes(self, name: str, value: Sizes, least: int) -> tuple[int, ...]:
        sizes = (value,) * self.axes if isinstance(value, int) else tuple(value)
        if len(sizes) != self.axes or any(not isinstance(s, int) or s < least for s in sizes):
            raise InputError(
                f"{type(self).__name__}'s {name} must be a whole number ≥ {least}, or "
                f"{self.axes} of them, not {value!r}"
            )
        return sizes

    def reset_parameters(self) -> None:
        """Uniform within ±1/√fan_in, as of PyTorch's convolutions."""
        bound = 1 / math.sqrt(self.in_channels * math.prod(self.kernel_size))
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        y = self.operator.forward(weight, x)
        return y if bias is None else y + bias

    def extra_repr(self) -> str:
        options = self.operator
        return (
            f"{self.in_channels}, {self.out_channels}, input_size={self.input_size}, "
            f"kernel_size={self.kernel_size}, stride={options.stride}, padding={options.padding}, "
            f"dilation={options.dilation}, bias={self.bias is not None}"
        )


class LocallyConnected1d(_LocallyConnected):
    """(B, C, L) → (B, O, L′): a convolution with a filter and a bias of its own at every place.

    weight: (L′, O, C, k), bias: (O, L′). input_size is L, which the weights depend on.

    >>> import torch
    >>> LocallyConnected1d(3, 5, input_size=10, kernel_size=3)(torch.randn(2, 3, 10)).shape
    torch.Size([2, 5, 8])
    """

    axes = 1


class LocallyConnected2d(_LocallyConnected):
    """(B, C, H, W) → (B, O, H′, W′): a filter and a bias of its own at every place.

    weight: (H′, W′, O, C, k, l), bias: (O, H′, W′). input_size is (H, W).

    >>> import torch
    >>> layer = LocallyConnected2d(3, 5, input_size=(8, 8), kernel_size=3, stride=2, padding=1)
    >>> layer(torch.randn(2, 3, 8, 8)).shape
    torch.Size([2, 5, 4, 4])
    """

    axes = 2
