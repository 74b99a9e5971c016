"""The layout of one attention call: heads folded into a batch, scores in blocks of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._torch import peek_interpreter_stack
from ...dtypes import accumulation, is_half
from ...errors import InputError
from ..mode import watched
from .stock import Maybe, Residual

# Scores per block: a CPU block stays near the cache, a CUDA block fills the device, and a traced
# program, where every block becomes nodes of its own, has few blocks.
BLOCK_ELEMENTS = {"cpu": 2**21, "cuda": 2**25, "traced": 2**25}
_ROWS = 256  # fewer rows make thin products: heads are split before rows are


@dataclass(frozen=True)
class Tile:
    """One block: heads [z0, z1) of the folded axis, rows [i0, i1), the first m columns."""

    f: Frame
    z0: int
    z1: int
    i0: int
    i1: int
    m: int

    @property
    def scale(self) -> float:
        return self.f.scale

    def reuse(self, t: Tensor) -> Maybe:
        """Where the next result may be written: over `t`, unless a graph is being recorded."""
        return t if self.f.eager else None

    def mm(self, a: Tensor, b: Tensor) -> Tensor:
        """a b, in the precision of the softmax."""
        work, exact = self.f.work, self.f.exact
        if work == exact:
            return torch.bmm(a, b)
        return torch.bmm(a.to(work), b.to(work), out_dtype=exact)

    def pair(self, b: Tensor, x: Tensor, c: Tensor, tx: Maybe) -> Tensor:
        """s (b x + c tx)"""
        s = self.mm(b, x)
        return (s if tx is None else s + self.mm(c, tx)) * self.scale

    def probabilities(self, q: Tensor, k: Tensor, lse: Tensor) -> Tensor:
        """P = exp(S − lse)"""
        scores = self.mm(q, k.mT)
        p = torch.add(-lse, scores, alpha=self.scale, out=self.reuse(scores))
        p = self.masked(p)
        return torch.exp(p, out=self.reuse(p))

    def masked(self, scores: Tensor) -> Tensor:
        f = self.f
        if f.mask is None and not f.causal:
            return scores
        # Blocks of heads divide the heads, or hold whole examples: b × h of them either way.
        z = self.z1 - self.z0
        b, h = (z // f.h, f.h) if z >= f.h > 0 else (1, z)
        s = scores.view(b, h, f.g, self.i1 - self.i0, self.m)
        if f.mask is not None:
            block = self._mask(f.mask.unflatten(1, (-1, f.g) if f.mask.shape[1] > 1 else (1, 1)))
            if block.dtype == torch.bool:
                s = self._without(s, ~block)
            else:
                s = torch.add(s, block.to(f.exact), out=self.reuse(s))
        if f.causal:
            above = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device)
            s = self._without(s, above.triu(self.i0 - f.first + 1))
        return s.view_as(scores)

    def _without(self, s: Tensor, where: Tensor) -> Tensor:
        return (s.masked_fill_ if self.f.eager else s.masked_fill)(where, -math.inf)

    def _mask(self, mask: Tensor) -> Tensor:
        """The part of `mask` (b, h, g, N, M), each axis full or 1, that lies in this block."""
        h = self.f.h
        ranges = (
            (self.z0 // h, -(-self.z1 // h)),
            (self.z0 % h, self.z0 % h + min(h, self.z1 - self.z0)),
            (0, self.f.g),
            (self.i0, self.i1),
            (0, self.m),
        )
        pairs = zip(ranges, mask.shape, strict=True)
        return mask[tuple(slice(*r) if size > 1 else slice(None) for r, size in pairs)]


@dataclass(frozen=True)
class Frame:
    """Shapes and options; batch and key heads fold into one axis of length z = b·h.

    Row tensors (q, ξ, O, …) become (z, g, N, ·), column tensors (k, v, …) become (z, M, ·), where
    g = Hq/Hkv query heads share one key head.
    """

    shape: tuple[int, ...]  # of the output, without its last two axes
    batch: tuple[int, ...]
    b: int
    h: int
    g: int
    n: int
    m: int
    mask: Maybe  # (b or 1, h·g or 1, N or 1, M or 1)
    causal: bool
    scale: float
    dtype: torch.dtype  # of q, k and v
    work: torch.dtype  # of the operands of products
    exact: torch.dtype  # of the softmax and of sums
    traced: bool
    eager: bool  # results may be written over operands
    transformed: bool  # by torch.func: operands have no storage of their own
    limit: int
    first: int = 0  # column of the whole that column 0 is

    def cut(self, first: int, last: int) -> Frame:
        """Columns [first, last) alone."""
        mask = self.mask
        if mask is not None and mask.shape[-1] > 1:
            mask = mask[..., first:last]
        return replace(self, m=last - first, mask=mask, first=self.first + first)

    def rows(self, t: Maybe) -> Any:
        return None if t is None else self.fold(t.to(self.work), self.n, self.g)

    def columns(self, t: Maybe) -> Any:
        return None if t is None else self.fold(t.to(self.work), self.m, 1).squeeze(1)

    def fold(self, t: Tensor, length: int, group: int) -> Tensor:
        t = t.expand(*self.batch, self.h * group, length, t.shape[-1])
        return t.reshape(self.b * self.h, group, length, t.shape[-1])

    def heads(self, t: Maybe, group: int = 1) -> Any:
        """`t` as (b, h·group, length, ·) in q's dtype; a view where strides allow one."""
        if t is None:
            return None
        t = t.to(self.dtype).expand(*self.batch, self.h * group, *t.shape[-2:])
        return t.reshape(self.b, self.h * group, *t.shape[-2:])

    def mean(self, xi: Tensor, out: Tensor) -> Tensor:
        """D = ⟨ξ, O⟩, (z, g, N, 1)"""
        d = (xi.to(self.exact) * out.to(self.exact)).sum(-1, keepdim=True)
        return self.fold(d, self.n, self.g)

    def lse(self, residual: Residual | Tensor) -> Tensor:
        """(z, g, N, 1); cuDNN keeps a last axis of 1, efficient attention pads N to 32s."""
        lse = residual[0] if isinstance(residual, tuple) else residual
        lse = lse.squeeze(-1) if lse.dim() > len(self.shape) + 1 else lse
        return self.fold(lse[..., : self.n, None].to(self.exact), self.n, self.g)

    def unfold(self, t: Maybe, like: Tensor, group: int = 1) -> Maybe:
        """Back to the shape and dtype of `like`, summed over the axes along which it was spread."""
        if t is None:
            return None
        t = t.reshape(*self.batch, self.h * group, *t.shape[-2:])
        return t.sum_to_size(like.shape).to(like.dtype)

    def unfold_all(self, results: Sequence[Maybe], out: Tensor, q, k, v) -> list[Maybe]:
        """(t_out, sq, sk, sv) in the shapes of (out, q, k, v)."""
        groups = (self.g, self.g, 1, 1)
        return [self.unfold(*x) for x in zip(results, (out, q, k, v), groups, strict=True)]

    def map(self, tile: Callable, rows: Sequence[Maybe], columns: Sequence[Maybe]):
        """`tile` over all blocks: row results side by side, column results summed over rows."""
        by_heads = []
        step_z, step_i = self._steps()
        for z0, z1 in _ranges(self.b * self.h, step_z):
            parts, sums = [], None
            for i0, i1 in _ranges(self.n, step_i):
                seen = min(self.m, max(1, i1 - self.first)) if self.causal else self.m
                t = Tile(self, z0, z1, i0, i1, seen)
                args = [None if x is None else x[z0:z1, :, i0:i1].flatten(1, 2) for x in rows]
                args += [None if x is None else x[z0:z1, : t.m] for x in columns]
                row, column = tile(t, *args)
                parts.append([None if x is None else x.unflatten(1, (self.g, -1)) for x in row])
                sums = self._add(sums, column)
            by_heads.append(([_cat(x, 2) for x in zip(*parts, strict=True)], sums))
        row, column = zip(*by_heads, strict=True)
        return tuple([_cat(x, 0) for x in zip(*each, strict=True)] for each in (row, column))

    def _steps(self) -> tuple[int, int]:
        """Heads and rows per block; a block of heads divides h or is a multiple of it."""
        budget = max(1, self.limit // max(1, self.g * self.m))
        rows = max(1, min(self.n, max(budget // max(1, self.b * self.h), min(budget, _ROWS))))
        heads = max(1, min(self.b * self.h, budget // rows))
        if heads >= self.h:
            return heads - heads % max(1, self.h), rows
        return max(d for d in range(1, heads + 1) if self.h % d == 0), rows

    def _add(self, sums: list[Maybe] | None, parts: Sequence[Maybe]) -> list[Maybe]:
        """sums + parts, where a causal block's columns end at its last row."""
        if sums is None:
            return [
                x if x is None or x.shape[1] == self.m else F.pad(x, (0, 0, 0, self.m - x.shape[1]))
                for x in parts
            ]
        if not self.eager:
            return [_plus(s, x) for s, x in zip(sums, self._add(None, parts), strict=True)]
        for s, x in zip(sums, parts, strict=True):
            if s is not None and x is not None:
                s[:, : x.shape[1]] += x
        return sums


def frame(q, k, v, mask, is_causal, scale, enable_gqa) -> Frame:
    n, m = q.shape[-2], k.shape[-2]
    lead_q = q.shape[:-2] or (1,)
    lead_k = torch.broadcast_shapes(k.shape[:-2], v.shape[:-2]) or (1,)
    batch = tuple(torch.broadcast_shapes(lead_q[:-1], lead_k[:-1]))
    hq, h = lead_q[-1], lead_k[-1]
    if hq != h and hq != 1 and not (h == 1 or (enable_gqa and hq % h == 0)):
        raise InputError(
            f"attention: {hq} query heads of q {tuple(q.shape)} cannot share {h} key heads of k "
            f"{tuple(k.shape)}; pass enable_gqa=True and a number of heads that divides"
        )
    g = hq // h if hq > h > 0 else 1
    traced = watched()
    transformed = peek_interpreter_stack() is not None
    wrapped = torch.is_grad_enabled() or transformed
    exact = accumulation(q.dtype)
    return Frame(
        shape=(*batch, h * g) if max(q.dim(), k.dim(), v.dim()) > 2 else (),
        batch=batch,
        b=math.prod(batch),
        h=h,
        g=g,
        n=n,
        m=m,
        mask=None if mask is None else _mask4(mask, batch, n, m),
        causal=is_causal,
        scale=1 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
        dtype=q.dtype,
        work=q.dtype if is_half(q.dtype) and q.is_cuda else exact,
        exact=exact,
        traced=traced,
        eager=not (traced or wrapped),
        transformed=transformed,
        limit=BLOCK_ELEMENTS["traced" if traced else "cpu" if q.device.type == "cpu" else "cuda"],
    )


def _mask4(mask: Tensor, batch: tuple[int, ...], n: int, m: int) -> Tensor:
    """(b or 1, heads or 1, N or 1, M or 1), without spreading what is constant."""
    shape = (1,) * (len(batch) + 3 - mask.dim()) + tuple(mask.shape)
    mask = mask.reshape(shape)
    if any(x != 1 for x in shape[: len(batch)]):
        mask = mask.expand(*batch, *shape[len(batch) :])
    return mask.reshape(-1, *shape[len(batch) :])


def finite(lse: Tensor) -> Tensor:
    """exp(−∞ − lse) must be 0 in a row whose scores are all −∞."""
    return lse.masked_fill(lse == -math.inf, 0.0)


def _plus(a: Maybe, b: Maybe) -> Maybe:
    return b if a is None else a if b is None else a + b


def _cat(parts: Sequence[Any], dim: int) -> Any:
    if len(parts) == 1 or parts[0] is None:
        return parts[0]
    return torch.cat(list(parts), dim)


def _ranges(length: int, step: int) -> Iterator[tuple[int, int]]:
    """[0, step), [step, 2·step), …; one empty range where there is nothing."""
    for i in range(0, max(1, length), step):
        yield i, min(i + step, length)
