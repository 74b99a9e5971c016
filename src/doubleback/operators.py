"""Bilinear operators K with their two adjoints, Kᵀ and K□ (theory §1).

    ⟨K(θ, x), y⟩ = ⟨x, Kᵀ(θ, y)⟩ = ⟨θ, K□(x, y)⟩

Three functions serve every order of differentiation: the weight-adjoint of Kᵀ is K□ and the
transpose of K□ in x is Kᵀ (adjoint commutativity).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .counting import counted

aten = torch.ops.aten


def placeholder(like: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor of `shape` without storage of its own, where only a shape is read."""
    return like.new_empty(()).expand(tuple(shape))


def _unread(y: Tensor, weight: Tensor | None, shape: Sequence[int]) -> Tensor:
    """An input of which PyTorch reads shape and layout only. A stride-0 placeholder would make it
    copy channels-last cotangents back and forth."""
    if weight is not None and weight.dim() == 4 and not weight.is_contiguous():
        return torch.empty(
            tuple(shape), dtype=y.dtype, device=y.device, memory_format=torch.channels_last
        )
    return placeholder(y, shape)


@dataclass(frozen=True)
class Dense:
    """K(W, x) = x Wᵀ over the last axis, for any number of leading axes.

    x: (…, n), W: (m, n), y: (…, m).

    >>> import torch
    >>> K, W, x, y = Dense(), torch.ones(2, 3), torch.ones(4, 3), torch.ones(4, 2)
    >>> K.forward(W, x).shape, K.transpose(W, y).shape, K.weight_adjoint(x, y).shape
    (torch.Size([4, 2]), torch.Size([4, 3]), torch.Size([2, 3]))
    """

    def forward(self, weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
        counted(forward=1)
        return aten.linear(x, weight, bias)

    def transpose(self, weight: Tensor, y: Tensor) -> Tensor:
        counted(transpose=1)
        return y @ weight

    def weight_adjoint(self, x: Tensor, y: Tensor) -> Tensor:
        counted(weight_adjoint=1)
        return y.reshape(-1, y.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


@dataclass(frozen=True)
class Convolution:
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

    def forward(self, weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
        counted(forward=1)
        return aten.convolution(x, weight, bias, *self._options())

    def transpose(
        self, weight: Tensor, y: Tensor, shape: Sequence[int], like: Tensor | None = None
    ) -> Tensor:
        """Kᵀ(θ, y), of the input's `shape` (a strided convolution forgets it).

        like: any tensor of that shape; PyTorch reads the layout of the result off it.
        """
        return self.adjoints(like, weight, y, shape, weight.shape, (True, False, False))[0]

    def weight_adjoint(self, x: Tensor, y: Tensor, shape: Sequence[int]) -> Tensor:
        """K□(x, y), of the weight's `shape`."""
        return self.adjoints(x, None, y, x.shape, shape, (False, True, False))[1]

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
        if x is None:
            x = like
        if x is None:
            x = _unread(y, weight, x_shape)
        if weight is None:
            weight = placeholder(y, weight_shape)
        channels = [y.shape[1]] if wanted[2] else None
        return aten.convolution_backward(y, x, weight, channels, *self._options(), list(wanted))
