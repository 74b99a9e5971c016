"""Masks of attention's dropout: known ones in codes, those of CUDA's kernels by unit vectors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from doubleback.kernels import BITS, Dropout


def provider(keep: Tensor, p: float, step: int) -> Dropout:
    """The mask `keep` (b, heads, N, M), `step` columns at a time."""

    def codes(first: int) -> Tensor:
        part = keep[..., first : first + step]
        part = F.pad(part, (0, step - part.shape[-1])).unflatten(-1, (-1, BITS))
        return (part * 2 ** torch.arange(BITS)).sum(-1).to(torch.uint8)

    return Dropout(p, step, codes)


def kept(backend: SDPBackend, p: float, q: Tensor, m: int, seed: int) -> Tensor:
    """Which probabilities `backend` keeps after `torch.manual_seed(seed)`, (b, heads, N, M).

    With q = k = 0 and V the unit vectors of some columns, these columns of Z/M are the result.
    """
    b, heads, _, width = q.shape
    zero_q = torch.zeros_like(q).detach().requires_grad_()
    zero_k = q.new_zeros(b, heads, m, width)
    parts = []
    for first in range(0, m, width):
        rows = torch.arange(first, min(first + width, m), device=q.device)
        v = torch.zeros_like(zero_k)
        v[..., rows, rows - first] = 1
        torch.manual_seed(seed)
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(zero_q, zero_k, v, dropout_p=p)
        parts.append(out.detach()[..., : len(rows)] > 0)
    return torch.cat(parts, -1)
