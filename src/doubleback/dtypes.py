"""In which dtype sums and smooth functions are computed: 16-bit numbers in float32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


def is_half(dtype: torch.dtype) -> bool:
    """Whether this is one of the two 16-bit floating-point dtypes."""
    return dtype in HALF


def accumulation(dtype: torch.dtype) -> torch.dtype:
    """float32 for 16 bits, else the dtype itself.

    >>> accumulation(torch.bfloat16), accumulation(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float32 if dtype in HALF else dtype


def lifted(t: Tensor) -> Tensor:
    """t in its accumulation dtype; t itself where that is its own."""
    return t.to(torch.float32) if t.dtype in HALF else t


def lifted_and_back(t: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The same, and what casts a result back to t's dtype."""
    if t.dtype not in HALF:
        return t, lambda result: result
    dtype = t.dtype
    return lifted(t), lambda result: result.to(dtype)
