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

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import fused, stock
from .frame import Frame, Tile, finite, frame
from .stock import Dropout, Maybe, Residual


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Maybe = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Residual]:
    """O (…, Hq, N, Ev) and its residual; ``residual[0]`` is log Σ_j exp S_ij, (…, Hq, N).

    >>> import torch
    >>> q, k, v = torch.ones(3, 2, 4, 7, 8).unbind()
    >>> out, residual = attention_forward(q, k, v, is_causal=True)
    >>> out.shape, residual[0].shape
    (torch.Size([2, 4, 7, 8]), torch.Size([2, 4, 7]))
    """
    f = frame(q, k, v, mask, is_causal, scale, enable_gqa)
    backend = stock.choose(f, q, k, v)
    if backend != stock.MATH:
        return stock.forward(backend, f, q, k, v)
    (out, lse), _ = f.map(_forward_tile, (f.rows(q),), (f.columns(k), f.columns(v)))
    out = out.reshape(*f.shape, f.n, v.shape[-1]).to(q.dtype)
    return out, (lse.reshape(*f.shape, f.n), stock.MATH)


def attention_backward(
    xi: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    residual: Residual | Tensor,
    mask: Maybe = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    wanted: Sequence[bool] = (True, True, True),
) -> tuple[Maybe, Maybe, Maybe]:
    """(dq, dk, dv) = (∂O)* ξ, None where not wanted; a bare log-sum-exp is a residual too."""
    if not any(wanted):
        return None, None, None
    f = frame(q, k, v, mask, is_causal, scale, enable_gqa)
    backend = residual[1] if isinstance(residual, tuple) else stock.MATH
    if not f.transformed and fused.better_first(backend, f.mask, q, k, v):
        lse = f.lse(residual).reshape(f.b, f.h * f.g, f.n)
        dq, dk, dv = fused.first(
            f.heads(xi, f.g), f.heads(q, f.g), f.heads(k), f.heads(v), f.heads(out, f.g), lse,
            f.mask, f.causal, f.scale, wanted,
        )  # fmt: skip
        return f.unfold(dq, q, f.g), f.unfold(dk, k), f.unfold(dv, v)
    if backend != stock.MATH:
        dq, dk, dv = stock.backward(f, xi, q, k, v, out, residual, wanted)
        return dq, dk, dv
    rows = f.rows(q), f.rows(xi), f.mean(xi, out), finite(f.lse(residual))
    tile = partial(_backward_tile, wanted=tuple(wanted))
    (dq,), (dk, dv) = f.map(tile, rows, (f.columns(k), f.columns(v)))
    return f.unfold(dq, q, f.g), f.unfold(dk, k), f.unfold(dv, v)


def attention_tangent(
    tq: Maybe,
    tk: Maybe,
    tv: Maybe,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    residual: Residual | Tensor,
    mask: Maybe = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """t_out = (P∘U) V + P tv; a tangent that is None is zero."""
    layout = (mask, is_causal, scale, enable_gqa)
    if tq is None and tk is None and tv is not None:
        return attention_forward(q, k, tv, *layout)[0]
    tangents = tq, tk, tv
    return _second(None, tangents, q, k, v, out, residual, layout, (True, False, False, False))[0]


def attention_second(
    xi: Tensor,
    tq: Maybe,
    tk: Maybe,
    tv: Maybe,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    residual: Residual | Tensor,
    mask: Maybe = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    wanted: Sequence[bool] = (True, True, True),
    tangent: bool = True,
    dropout: Dropout | None = None,
) -> tuple[Maybe, tuple[Maybe, Maybe, Maybe]]:
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
    """As far as Z is known at a time: row results summed, column results side by side."""
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
        found, column = f.cut(first, last).map(tile, (*rows, delta, codes), some)
        row = found if row is None else [_sum(a, b) for a, b in zip(row, found, strict=True)]
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
