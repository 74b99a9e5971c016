"""Tangent and curvature source of attention in blocks of scores, with dropout or without.

The formulas are those of ``attention.py``. Dropout multiplies P by Z (0, or 1/(1 − p)) after the
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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .attention_fused import Dropout, Maybe

if TYPE_CHECKING:
    from .attention_frame import Frame, Tile


def second(
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
        (t_out, sq, _), (sk, sv) = f.map(partial(_tile, run=run), (*rows, None, None), columns)
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
    tile = partial(_tile, run=run, dropout=dropout, whole=whole)
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


# Tiles, as in ``attention.py``.


def _tile(
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
