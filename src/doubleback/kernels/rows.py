"""Products of (…, n) with a matrix, as one product of rows.

Where the leading axes cannot be viewed as one, PyTorch multiplies each matrix of the batch by
itself, and a compiler writes out a copy of the weight for each of them. Copying the rows together
first costs one pass over them.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


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
