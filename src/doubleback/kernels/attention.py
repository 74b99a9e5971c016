"""Attention O = softmax(s·QKᵀ + mask) V: value, vjp, tangent and curvature source.

Layouts are those of ``F.scaled_dot_product_attention``: q (…, Hq, N, E), k (…, Hkv, M, E),
v (…, Hkv, M, Ev), query head h reads key head h // (Hq/Hkv). The mask (bool, or added to the
scores) is constant. With P = softmax(S), S = s·QKᵀ + mask, and ⟨P, ·⟩ the sum over one row:

    R = tq Kᵀ + Q tkᵀ,  U = s(R − ⟨P, R⟩)              tangent of log P
    G = Ξ Vᵀ,           D = ⟨P, G⟩ = ⟨Ξ, O⟩            cotangent of P, and its mean
    C = P∘(G − D)                                      cotangent of S
    X = U∘(G − D) + Ξ tvᵀ,  B = P∘(X − ⟨P, X⟩)         tangent of C

    t_out = (P∘U) V + P tv
    dq = s C K,            dk = s Cᵀ Q,                dv = Pᵀ Ξ
    sq = s(B K + C tk),    sk = s(Bᵀ Q + Cᵀ tq),       sv = (P∘U)ᵀ Ξ

First-order passes run PyTorch's fused kernels where one applies, but for the vjp in float32 where
TF32 is allowed. Everything else recomputes P from the log-sum-exp of its rows: in Triton on CUDA,
otherwise in blocks of at most ``BLOCK_ELEMENTS`` scores, so that memory grows with N + M, never
with N·M. A row whose scores are all −∞ has P = 0, as in PyTorch.

Dropout, of the second derivative alone, multiplies P by Z (0, or 1/(1 − p)) after the
softmax: O = (Z∘P) V. So with G = Z∘(Ξ Vᵀ) and H = Z∘(Ξ tvᵀ), D = ⟨P, G⟩ = ⟨Ξ, O⟩ as before, U, C
and B keep their form with X = U∘(G − D) + H, and

    t_out = (Z∘P∘U) V + (Z∘P) tv,    sv = (Z∘P∘U)ᵀ Ξ.

Z comes by ranges of columns, and a row's means δ = ⟨P, sR⟩ and κ = ⟨P, X⟩ are known only after the
last one. Neither needs Z twice: δ is found before, without Z, and κ enters linearly,

    B K = (P∘X) K − κ∘(P K),    Bᵀ Q = (P∘X)ᵀ Q − Pᵀ (κ∘Q),

so it is taken out afterwards, again without Z.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from .._torch import (
    FakeTensorMode,
    TorchDispatchMode,
    disable_current_modes,
    peek_interpreter_stack,
)
from ..dtypes import accumulation, is_half
from ..errors import InputError, PatchError
from . import attention_triton as fused
from .launch import traced, watched

aten = torch.ops.aten

Maybe = Tensor | None
# (log-sum-exp (…, Hq, N) in float32 or float64, backend, *tensors for the backend's own backward)
Residual = tuple[Any, ...]

MATH, FLASH, EFFICIENT, CUDNN = (
    int(b.value)
    for b in (
        SDPBackend.MATH,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
    )
)


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Maybe = None, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> tuple[Tensor, Residual]:  # fmt: skip
    """O (…, Hq, N, Ev) and its residual; ``residual[0]`` is log Σ_j exp S_ij, (…, Hq, N).

    >>> import torch
    >>> q, k, v = torch.ones(3, 2, 4, 7, 8).unbind()
    >>> out, residual = attention_forward(q, k, v, is_causal=True)
    >>> out.shape, residual[0].shape
    (torch.Size([2, 4, 7, 8]), torch.Size([2, 4, 7]))
    """
    f = frame(q, k, v, mask, is_causal, scale, enable_gqa)
    backend = choose_backend(f, q, k, v)
    if backend != MATH:
        return stock_forward(backend, f, q, k, v)
    (out, lse), _ = f.map(_forward_tile, (f.rows(q),), (f.columns(k), f.columns(v)))
    out = out.reshape(*f.shape, f.n, v.shape[-1]).to(q.dtype)
    return out, (lse.reshape(*f.shape, f.n), MATH)


def attention_backward(
    xi: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, residual: Residual | Tensor,
    mask: Maybe = None, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, wanted: Sequence[bool] = (True, True, True),
) -> tuple[Maybe, Maybe, Maybe]:  # fmt: skip
    """(dq, dk, dv) = (∂O)* ξ, None where not wanted; a bare log-sum-exp is a residual too."""
    if not any(wanted):
        return None, None, None
    f = frame(q, k, v, mask, is_causal, scale, enable_gqa)
    backend = residual[1] if isinstance(residual, tuple) else MATH
    tf32 = backend == EFFICIENT and not f.transformed and fused.better_first(f.mask, q, k, v)
    if tf32:
        lse = f.lse(residual).reshape(f.b, f.h * f.g, f.n)
        dq, dk, dv = fused.first(
            f.heads(xi, f.g), f.heads(q, f.g), f.heads(k), f.heads(v), f.heads(out, f.g), lse,
            f.mask, f.causal, f.scale, wanted,
        )  # fmt: skip
        return f.unfold(dq, q, f.g), f.unfold(dk, k), f.unfold(dv, v)
    if backend != MATH:
        dq, dk, dv = stock_backward(f, xi, q, k, v, out, residual, wanted)
        return dq, dk, dv
    rows = f.rows(q), f.rows(xi), f.mean(xi, out), finite(f.lse(residual))
    tile = partial(_backward_tile, wanted=tuple(wanted))
    (dq,), (dk, dv) = f.map(tile, rows, (f.columns(k), f.columns(v)))
    return f.unfold(dq, q, f.g), f.unfold(dk, k), f.unfold(dv, v)


def attention_tangent(
    tq: Maybe, tk: Maybe, tv: Maybe, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    residual: Residual | Tensor, mask: Maybe = None, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """t_out = (P∘U) V + P tv; a tangent that is None is zero."""
    layout = (mask, is_causal, scale, enable_gqa)
    if tq is None and tk is None and tv is not None:
        return attention_forward(q, k, tv, *layout)[0]
    tangents = tq, tk, tv
    return _second(None, tangents, q, k, v, out, residual, layout, (True, False, False, False))[0]


def attention_second(
    xi: Tensor, tq: Maybe, tk: Maybe, tv: Maybe, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    residual: Residual | Tensor, mask: Maybe = None, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
    wanted: Sequence[bool] = (True, True, True), tangent: bool = True,
    dropout: Dropout | None = None,
) -> tuple[Maybe, tuple[Maybe, Maybe, Maybe]]:  # fmt: skip
    """t_out, and (sq, sk, sv) = ∂⟨ξ, t_out⟩ by q, k, v with ξ and the tangents held fixed.

    A tangent that is None is zero; a result that is not wanted is None. `out` is that with dropout.
    """
    layout, tangents = (mask, is_causal, scale, enable_gqa), (tq, tk, tv)
    want = (tangent, *wanted)
    t_out, sq, sk, sv = _second(xi, tangents, q, k, v, out, residual, layout, want, dropout)
    return t_out, (sq, sk, sv)


def _second(xi, tangents, q, k, v, out, residual, layout, want, dropout=None) -> tuple[Any, ...]:
    """(t_out, sq, sk, sv) where wanted; what no tangent reaches is zero."""
    f = frame(q, k, v, *layout)
    tq, tk, tv = tangents
    reached = (True, True, True, tq is not None or tk is not None)
    if (tq is None and tk is None and tv is None) or (dropout is not None and dropout.p >= 1):
        reached = (False, False, False, False)
    run = tuple(w and r for w, r in zip(want, reached, strict=True))
    if not any(run):
        results: Sequence[Maybe] = (None,) * 4
    elif dropout is None and not f.transformed and fused.supported(f.mask, q, k, v):
        xi, tq, q4, out4 = (f.heads(t, f.g) for t in (xi, tq, q, out))
        tk, tv, k4, v4 = (f.heads(t) for t in (tk, tv, k, v))
        lse = f.lse(residual).reshape(f.b, f.h * f.g, f.n)
        options = f.mask, f.causal, f.scale, list(run)
        results = fused.second(xi, tq, tk, tv, q4, k4, v4, out4, lse, *options)
        results = f.unfold_all(results, out, q, k, v)
    else:
        lse = finite(f.lse(residual))
        results = _second_in_blocks(f, xi, tangents, q, k, v, out, lse, run, dropout)
    pairs = zip(want, results, (out, q, k, v), strict=True)
    return tuple(torch.zeros_like(t) if w and x is None else x for w, x, t in pairs)


# Tiles: one block of rows (z, g·n, ·) against its columns (z, m, ·), in float32 or float64.
# A tile returns what belongs to its rows and what is summed over rows into the columns.


def _forward_tile(t: Tile, q, k, v):
    scores = t.masked(t.mm(q, k.mT) * t.scale)
    lse = scores.logsumexp(-1, keepdim=True)
    p = torch.sub(scores, finite(lse), out=t.reuse(scores))
    p = torch.exp(p, out=t.reuse(p))
    return (t.mm(p, v), lse), ()


def _backward_tile(t: Tile, q, xi, mean, lse, k, v, wanted):
    p = t.probabilities(q, k, lse)
    dq = dk = dv = None
    if wanted[2]:
        dv = t.mm(p.mT, xi)
    if wanted[0] or wanted[1]:
        g = t.mm(xi, v.mT)
        c = torch.sub(g, mean, out=t.reuse(g))
        c = torch.mul(c, p, out=t.reuse(c))
        dq = t.mm(c, k) * t.scale if wanted[0] else None
        dk = t.mm(c.mT, q) * t.scale if wanted[1] else None
    return (dq,), (dk, dv)


# Tangent and curvature source in blocks, with dropout or without ---------------------------------


def _second_in_blocks(
    f: Frame, xi, tangents, q, k, v, out, lse: Tensor, run, dropout: Dropout | None
) -> list[Maybe]:
    """(t_out, sq, sk, sv) where `run` says so; `lse` as `Frame.lse` gives it, finite."""
    tq, tk, tv = tangents
    left = right = mean = None
    if tq is not None or tk is not None:
        # s·R = s [tq, Q] [K, tk]ᵀ: one product.
        left = f.rows(_beside(tq, None if tk is None else q)) * f.scale
        right = f.columns(_beside(None if tq is None else k, tk))
        mean = None if xi is None else f.mean(xi, out)
    rows = f.rows(q), f.rows(tq), f.rows(xi), left, lse, mean
    columns = f.columns(k), f.columns(tk), f.columns(v), f.columns(tv), right
    if dropout is None:
        (t_out, sq, _), (sk, sv) = f.map(
            partial(_second_tile, run=run), (*rows, None, None), columns
        )
        return f.unfold_all([t_out, sq, sk, sv], out, q, k, v)
    return f.unfold_all(_by_columns(f, rows, columns, run, dropout), out, q, k, v)


def _by_columns(f: Frame, rows, columns, run, dropout: Dropout) -> list[Maybe]:
    """Block of columns by block of columns, as far as Z is known at a time: row results are summed,
    column results put side by side."""
    q, _, _, left, lse, _ = rows
    k, right = columns[0], columns[-1]
    whole = dropout.step >= f.m
    delta, row, parts = None, None, []
    if left is not None and not whole:
        (delta,), _ = f.map(_delta_tile, (q, left, lse), (k, right))
    tile = partial(_second_tile, run=run, dropout=dropout, whole=whole)
    for first in range(0, f.m, dropout.step):
        last = min(first + dropout.step, f.m)
        codes = f.fold(dropout.codes(first), f.n, f.g)
        some = [None if x is None else x[:, first:last] for x in columns]
        more, column = f.cut(first, last).map(tile, (*rows, delta, codes), some)
        row = more if row is None else [_sum(a, b) for a, b in zip(row, more, strict=True)]
        parts.append(column)
    assert row is not None  # there are columns
    t_out, sq, kappa = row
    sk, sv = (None if x[0] is None else torch.cat(x, 1) for x in zip(*parts, strict=True))
    if kappa is not None:
        (less_q,), (less_k,) = f.map(partial(_kappa_tile, run=run), (q, lse, kappa), (k,))
        sq = None if sq is None else sq - less_q
        sk = None if sk is None else sk - less_k
    return [t_out, sq, sk, sv]


def _beside(a: Maybe, b: Maybe) -> Tensor:
    """[a, b]"""
    parts = [t for t in (a, b) if t is not None]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _sum(a: Maybe, b: Maybe) -> Maybe:
    return None if a is None or b is None else a + b


def _second_tile(
    t: Tile, q, tq, xi, left, lse, mean, delta, codes, k, tk, v, tv, right,
    run: Sequence[bool], dropout: Dropout | None = None, whole: bool = True,
):  # fmt: skip
    """(t_out, sq, κ), (sk, sv); δ is given, or a sum of the `whole` row, and κ stays in B and is
    returned where the row is not whole."""
    want_t, want_q, want_k, want_v = run
    p = t.probabilities(q, k, lse)
    z = None if dropout is None else dropout.weights(codes, t.m, t.f.exact)
    pu = t_out = sv = sq = sk = kappa = None
    if left is not None:
        r = t.mm(left, right.mT)
        pu = torch.mul(r, p, out=t.reuse(r))
        delta = pu.sum(-1, keepdim=True) if delta is None else delta
        pu = torch.addcmul(pu, p, delta, value=-1, out=t.reuse(pu))
        zpu = _times(pu, z)
        t_out = t.mm(zpu, v) if want_t else None
        sv = t.mm(zpu.mT, xi) if want_v else None
    if want_t and tv is not None:
        zptv = t.mm(_times(p, z), tv)
        t_out = zptv if t_out is None else t_out + zptv
    if want_q or want_k:
        b, c = _curvature(t, p, pu, xi, mean, v, tv, z)
        kappa = b.sum(-1, keepdim=True)
        if whole:
            b = torch.addcmul(b, p, kappa, value=-1, out=t.reuse(b))
            kappa = None
        sq = t.pair(b, k, c, tk) if want_q else None
        sk = t.pair(b.mT, q, c.mT, tq) if want_k else None
    return (t_out, sq, kappa), (sk, sv)


def _curvature(t: Tile, p, pu, xi, mean, v, tv, z) -> tuple[Tensor, Tensor]:
    """P∘X and C = P∘(G − D); where U = 0 nothing reads C, and it stands as P."""
    px, c = None, p
    if tv is not None:
        h = t.mm(xi, tv.mT)
        h = _times(h, z, t.reuse(h))
        px = torch.mul(h, p, out=t.reuse(h))
    if pu is not None:
        g = t.mm(xi, v.mT)
        g = _times(g, z, t.reuse(g))
        g = torch.sub(g, mean, out=t.reuse(g))
        px = pu * g if px is None else torch.addcmul(px, pu, g, out=t.reuse(px))
        c = torch.mul(g, p, out=t.reuse(g))
    assert px is not None  # some tangent is there
    return px, c


def _delta_tile(t: Tile, q, left, lse, k, right) -> tuple[Any, Any]:
    """δ = ⟨P, sR⟩"""
    p, r = t.probabilities(q, k, lse), t.mm(left, right.mT)
    return (torch.mul(r, p, out=t.reuse(r)).sum(-1, keepdim=True),), ()


def _kappa_tile(t: Tile, q, lse, kappa, k, run: Sequence[bool]) -> tuple[Any, Any]:
    """s κ∘(P K), s Pᵀ (κ∘Q)"""
    p = t.probabilities(q, k, lse)
    p = torch.mul(p, kappa, out=t.reuse(p))
    less_q = t.mm(p, k) * t.scale if run[1] else None
    return (less_q,), (t.mm(p.mT, q) * t.scale if run[2] else None,)


def _times(x: Tensor, z: Maybe, out: Maybe = None) -> Tensor:
    """Z∘x"""
    return x if z is None else torch.mul(x, z, out=out)


# Layout: heads folded into a batch, scores in blocks of rows -------------------------------------


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
        mask=None if mask is None else _mask4(mask, batch),
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


def _mask4(mask: Tensor, batch: tuple[int, ...]) -> Tensor:
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


# ---------------------------------------------------------------------------- PyTorch's own kernels
#
# Which one applies, its value and its vjp, and the dropout it draws. Each takes (b, heads, length,
# ·) and keeps its own log-sum-exp and random state for its backward.


def choose_backend(f: Frame, q: Tensor, k: Tensor, v: Tensor) -> int:
    """The kernel that F.scaled_dot_product_attention would choose here, as an SDPBackend."""
    spread = any(
        t.shape[:-2] != (*f.batch, heads) for t, heads in ((q, f.h * f.g), (k, f.h), (v, f.h))
    )
    foreign = f.mask is not None and f.mask.dtype not in (torch.bool, q.dtype)
    both = f.mask is not None and f.causal
    empty = any(t.numel() == 0 for t in (q, k, v))
    turned = f.scale <= 0 and q.is_cuda  # those kernels subtract the largest score before scaling
    odd = spread or foreign or both or empty or turned
    if not f.shape or odd or q.device.type not in ("cpu", "cuda"):
        return MATH
    call = partial(_choice, f, f.heads(q, f.g), f.heads(k), f.heads(v))
    backend = call()
    if backend == CUDNN and f.mask is not None:
        # cuDNN's masks do not give zeros in rows without a score.
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            backend = call()
        finally:
            torch.backends.cuda.enable_cudnn_sdp(True)
    return backend if backend in (FLASH, EFFICIENT, CUDNN) else MATH


def _choice(f: Frame, q: Tensor, k: Tensor, v: Tensor) -> int:
    options: Any = {"is_causal": f.causal, "scale": f.scale, "enable_gqa": f.g > 1}
    like: Any = {"device": q.device}
    if not f.traced:
        return aten._fused_sdp_choice(q, k, v, f.mask, **options)
    # On the tensors of a trace that function knows no device: watch the real choice on fake ones.
    with disable_current_modes(), FakeTensorMode(), torch.no_grad(), _Witness() as seen:
        fakes: Any = [
            None if t is None else torch.empty_strided(t.shape, t.stride(), **like, dtype=t.dtype)
            for t in (q, k, v, f.mask)
        ]
        F.scaled_dot_product_attention(*fakes, **options)
    return seen.backend


class _Witness(TorchDispatchMode):
    """Remembers which fused kernel ran."""

    backend = MATH
    kernels: ClassVar = {
        aten._scaled_dot_product_flash_attention_for_cpu.default: FLASH,
        aten._scaled_dot_product_flash_attention.default: FLASH,
        aten._scaled_dot_product_efficient_attention.default: EFFICIENT,
        aten._scaled_dot_product_cudnn_attention.default: CUDNN,
    }

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.backend = self.kernels.get(func, self.backend)
        return func(*args, **(kwargs or {}))


def stock_forward(backend: int, f: Frame, q, k, v) -> tuple[Tensor, Residual]:
    width = v.shape[-1]
    q, k, v, bias = f.heads(q, f.g), f.heads(k), f.heads(v), _bias(backend, f, q)
    if q.device.type == "cpu":
        out, *kept = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, f.causal, attn_mask=bias, scale=f.scale
        )
    elif backend == FLASH:
        r = aten._scaled_dot_product_flash_attention(
            _pad8(q), _pad8(k), _pad8(v), 0.0, f.causal, scale=f.scale
        )
        out, *kept = r[0][..., :width], r[1], r[6], r[7]
    elif backend == EFFICIENT:
        out, *kept = aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, True, 0.0, f.causal, scale=f.scale
        )
    else:
        r = aten._scaled_dot_product_cudnn_attention(
            q, k, v, bias, True, 0.0, f.causal, scale=f.scale
        )
        out, *kept = r[0], r[1], r[6], r[7]
    lse = kept[0].squeeze(-1) if kept[0].dim() > 3 else kept[0]
    lse = lse[..., : f.n].reshape(*f.shape, f.n)
    return out.reshape(*f.shape, f.n, width), (lse, backend, *kept)


def stock_backward(f: Frame, xi, q, k, v, out, residual, wanted) -> list[Maybe]:
    _, backend, lse, *rng = residual
    shapes = q.shape, k.shape, v.shape
    bias = _bias(backend, f, q)
    xi, q, out = (f.heads(t, f.g) for t in (xi, q, out))
    k, v = f.heads(k), f.heads(v)
    xi = xi if xi.stride(-1) == 1 else xi.contiguous()
    if q.device.type == "cpu":
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            xi, q, k, v, out, lse, 0.0, f.causal, attn_mask=bias, scale=f.scale
        )
    elif backend == FLASH:
        padded = [_pad8(t) for t in (xi, q, k, v, out)]
        grads = aten._scaled_dot_product_flash_attention_backward(
            *padded, lse, None, None, f.n, f.m, 0.0, f.causal, *rng, scale=f.scale
        )
    elif backend == EFFICIENT:
        grads = aten._scaled_dot_product_efficient_attention_backward(
            xi, q, k, v, bias, out, lse, *rng, 0.0, [*wanted, False], f.causal, scale=f.scale
        )
    else:
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            xi, q, k, v, out, lse, *rng, bias, None, None, f.n, f.m, 0.0, f.causal, scale=f.scale
        )
    pairs = zip(grads[:3], shapes, wanted, strict=True)
    return [g[..., : s[-1]].reshape(s) if w else None for g, s, w in pairs]


def _bias(backend: int, f: Frame, q: Tensor) -> Maybe:
    """The mask as a term of the scores, in the layout that `backend` asks for."""
    if f.mask is None:
        return None
    bias = f.mask
    if bias.dtype == torch.bool:
        bias = torch.zeros_like(bias, dtype=q.dtype).masked_fill(~bias, -math.inf)
    if backend != EFFICIENT:
        return bias
    bias = bias.expand(*bias.shape[:-1], f.m)
    bias = F.pad(bias, (0, -f.m % 16))[..., : f.m]  # rows start at multiples of 16
    return bias.expand(f.b, f.h * f.g, f.n, f.m)


def _pad8(t: Tensor) -> Tensor:
    """Zeros up to a width that flash attention takes; a pad by nothing would be a copy."""
    more = -t.shape[-1] % 8
    return F.pad(t, (0, more)) if more else t


# Dropout. A kernel draws its mask from (seed, offset) and the place of a score alone, so the mask
# is read off the kernel itself: where q = k = 0 it returns (Z V)/M, and V can be a code.

BITS = 6  # columns told apart by one number: 2⁶ − 1 is well within the 8 bits of bfloat16


@dataclass(frozen=True)
class Dropout:
    """Z in O = (Z∘P) V: 1/(1 − p) where a probability was kept, else 0.

    codes(first) tells of the columns [first, first + step), as (b, Hq, N, step/BITS) in uint8:
    bit i of entry c is set where column first + BITS·c + i was kept.
    """

    p: float
    step: int
    codes: Callable[[int], Tensor]

    def weights(self, codes: Tensor, m: int, dtype: torch.dtype) -> Tensor:
        """Z (…, m) from codes (…, c)."""
        shifts = torch.arange(BITS, dtype=torch.uint8, device=codes.device)
        bits = torch.bitwise_right_shift(codes.unsqueeze(-1), shifts) & 1
        return bits.flatten(-2)[..., :m].to(dtype) * (1 / (1 - self.p) if self.p < 1 else 0.0)

    def dense(self, m: int, dtype: torch.dtype) -> Tensor:
        """All of Z, (b, Hq, N, m)."""
        firsts = range(0, m, self.step)
        parts = [self.weights(self.codes(j), min(self.step, m - j), dtype) for j in firsts]
        return torch.cat(parts, -1)


def recovered(backend: int, p: float, q, k, v, seed: Tensor, offset: Tensor) -> Dropout:
    """The dropout of the call of `backend` with these q, k, v whose random state was kept."""
    b, heads, n, width = q.shape
    m, columns = k.shape[-2], v.shape[-1]

    def codes(first: int) -> Tensor:
        like: Any = {"dtype": q.dtype, "device": q.device}
        if p >= 1:
            return torch.zeros(b, heads, n, columns, dtype=torch.uint8, device=q.device)
        zero_q, zero_k = (torch.zeros(b, heads, x, width, **like) for x in (n, m))
        code = _code(first, m, columns, **like).expand(b, heads, m, columns).contiguous()
        with torch.no_grad(), _random_state(q.device, *state):
            return _decode(drop(backend, p, zero_q, zero_k, code), m, p)

    state = _read(backend, seed, offset) if p < 1 else (0, 0)
    return Dropout(p, BITS * columns, codes)


def drop(backend: int, p: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """O with dropout, for as many key heads as query heads, from CUDA's random state."""
    if backend == FLASH:
        return aten._scaled_dot_product_flash_attention(q, k, v, p)[0]
    if backend == EFFICIENT:
        return aten._scaled_dot_product_efficient_attention(q, k, v, None, True, p)[0]
    return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, p)[0]


def _code(first: int, m: int, columns: int, **like: Any) -> Tensor:
    """V (m, columns): 2ⁱ in row first + BITS·c + i of column c, zero in the rows of other calls."""
    j = torch.arange(m, device=like["device"]).unsqueeze(-1) - first
    here = j.div(BITS, rounding_mode="floor") == torch.arange(columns, device=like["device"])
    return torch.where(here, torch.exp2((j % BITS).float()), 0.0).to(like["dtype"])


def _decode(out: Tensor, m: int, p: float) -> Tensor:
    """out = Σ_j Z_j V_j / m, where Z is 0 or 1/(1 − p): whole numbers after rescaling."""
    return (out.float() * (m * (1 - p))).round().to(torch.uint8)


def _read(backend: int, seed: Tensor, offset: Tensor) -> tuple[int, int]:
    """The two numbers; flash attention keeps both in one tensor."""
    captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    if traced() or captured:
        raise PatchError(
            "second derivative of fused attention with dropout: its random state cannot be read "
            "while a graph is captured or traced; take it eagerly, set dropout_p=0, or run under "
            "sdpa_kernel(SDPBackend.MATH)"
        )
    both = seed.view(torch.int64) if backend == FLASH else (seed, offset)
    return int(both[0]) % 2**64, int(both[1]) % 2**64


@contextmanager
def _random_state(device: torch.device, seed: int, offset: int) -> Iterator[None]:
    """CUDA's generator at (seed, offset), and afterwards where it was."""
    generator = torch.cuda.default_generators[device.index]
    before = generator.get_state()
    try:
        generator.manual_seed(seed)
        generator.set_offset(offset)
        yield
    finally:
        generator.set_state(before)
