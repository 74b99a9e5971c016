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
with N·M. A row whose scores are all −∞ has P = 0, as in PyTorch. Dropout of the second derivative:
``attention_blocks``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import attention_blocks, attention_fused, attention_triton
from .attention_frame import Tile, finite, frame
from .attention_fused import Dropout, Maybe, Residual


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
    backend = attention_fused.choose(f, q, k, v)
    if backend != attention_fused.MATH:
        return attention_fused.forward(backend, f, q, k, v)
    (out, lse), _ = f.map(_forward_tile, (f.rows(q),), (f.columns(k), f.columns(v)))
    out = out.reshape(*f.shape, f.n, v.shape[-1]).to(q.dtype)
    return out, (lse.reshape(*f.shape, f.n), attention_fused.MATH)


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
    backend = residual[1] if isinstance(residual, tuple) else attention_fused.MATH
    if not f.transformed and attention_triton.better_first(backend, f.mask, q, k, v):
        lse = f.lse(residual).reshape(f.b, f.h * f.g, f.n)
        dq, dk, dv = attention_triton.first(
            f.heads(xi, f.g), f.heads(q, f.g), f.heads(k), f.heads(v), f.heads(out, f.g), lse,
            f.mask, f.causal, f.scale, wanted,
        )  # fmt: skip
        return f.unfold(dq, q, f.g), f.unfold(dk, k), f.unfold(dv, v)
    if backend != attention_fused.MATH:
        dq, dk, dv = attention_fused.backward(f, xi, q, k, v, out, residual, wanted)
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
    elif dropout is None and not f.transformed and attention_triton.supported(f.mask, q, k, v):
        xi, tq, q4, out4 = (f.heads(t, f.g) for t in (xi, tq, q, out))
        tk, tv, k4, v4 = (f.heads(t) for t in (tk, tv, k, v))
        lse = f.lse(residual).reshape(f.b, f.h * f.g, f.n)
        options = f.mask, f.causal, f.scale, list(run)
        results = attention_triton.second(xi, tq, tk, tv, q4, k4, v4, out4, lse, *options)
        results = f.unfold_all(results, out, q, k, v)
    else:
        lse = finite(f.lse(residual))
        results = attention_blocks.second(f, xi, tangents, q, k, v, out, lse, run, dropout)
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
