"""Layers that PyTorch lacks: locally connected ones, a filter of its own at every place."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from .products import LocallyConnected

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
