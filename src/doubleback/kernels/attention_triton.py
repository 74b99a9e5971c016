"""Tangent and curvature source of attention in Triton, without an N×M matrix in memory.

The formulas are those of ``attention.py``; P is recomputed tile by tile from the log-sum-exp. Two
kernels: `_rows_kernel` holds a block of query rows and walks along the columns, `_columns_kernel`
holds a block of key columns and walks down the rows.

The row walk does not know the row means δ = ⟨P, sR⟩ and κ = ⟨P, X⟩ before its end. Narrow heads
take them out afterwards, since both enter linearly:

    t_out = P∘R′ V + P tv − δ′ O
    B K + C tk = (P∘X′ K + C tk) − δ′ (C K) − κ′ (P K),   X′ = R′∘(G − D) + H′

where R′ = sR − c and H′ = Ξ tvᵀ − e are shifted by numbers c, e of their row, and δ′, κ′ are the
means of R′, X′. The shifts cancel in exact arithmetic; near δ and κ they keep the rounding of P∘X′
small, so they are taken from the mean of the first columns. Wide heads have no registers for the
three sums: they walk twice, first for δ and κ, then with c = δ, e = κ, which leaves δ′ = κ′ = 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import mode
from .launch import available, jit, launch, tl, triton

_MAX_WIDTH = 128
# BM, BN and warps, such that sums and tiles stay in registers on an H200; and what other devices,
# with less than _SHARED bytes of shared memory for a block, have room for.
_SHARED = 200 * 1024
_TILES = {
    ("narrow", 2): {"rows": (64, 32, 4), "means": (64, 64, 4), "columns": (32, 64, 4)},
    ("wide", 2): {"rows": (128, 32, 8), "means": (128, 32, 8), "columns": (32, 128, 8)},
    ("narrow", 4): {"rows": (32, 32, 4), "means": (64, 32, 4), "columns": (16, 64, 4)},
    ("wide", 4): {"rows": (32, 32, 8), "means": (32, 32, 8), "columns": (32, 32, 8)},
    ("small", 2): {"rows": (32, 32, 4), "means": (32, 32, 4), "columns": (32, 32, 4)},
    ("small", 4): {"rows": (16, 16, 4), "means": (16, 16, 4), "columns": (16, 16, 4)},
}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def supported(mask: Tensor | None, *tensors: Tensor) -> bool:
    """Whether the kernels take these q, k, v.

    float32 only where PyTorch's own matmul may use TF32: three TF32 products for each exact one
    cost more than blocks of exact ones.
    """
    first = tensors[0]
    return (
        available()
        and all(t.is_cuda and t.dtype == first.dtype and t.numel() > 0 for t in tensors)
        and first.dtype in _DTYPES
        and (first.dtype != torch.float32 or _tf32())
        and all(t.shape[-1] <= _MAX_WIDTH for t in tensors)
        and (mask is None or mask.dtype in (torch.bool, *_DTYPES))
    )


def second(
    xi: Tensor | None,
    tq: Tensor | None,
    tk: Tensor | None,
    tv: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    want: list[bool],
) -> tuple[Tensor | None, ...]:
    """(t_out, sq, sk, sv), None where `want` says no.

    q, tq, ξ, out (b, Hq, N, ·), k, v and their tangents (b, Hkv, M, ·), lse (b, Hq, N), mask
    (b or 1, Hq or 1, N or 1, M or 1). Under a dispatch mode (tracing, fake tensors) this is one
    node, ``doubleback::attention_second``.
    """
    traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    call = torch.ops.doubleback.attention_second if traced else _launch
    found = iter(call(xi, tq, tk, tv, q, k, v, out, lse, mask, causal, scale, want))
    return tuple(next(found) if w else None for w in want)


def _empty(want: Sequence[bool], *like: Tensor) -> list[Tensor]:
    return [torch.empty_like(t) for t, w in zip(like, want, strict=True) if w]


def _launch(xi, tq, tk, tv, q, k, v, out, lse, mask, causal, scale, want) -> list[Tensor]:
    xi, tq, tk, tv, q, k, v, out = (_rowwise(t) for t in (xi, tq, tk, tv, q, k, v, out))
    results = _empty(want, out, q, k, v)
    found = iter(results)
    t_out, sq, sk, sv = (next(found) if w else None for w in want)
    b, hq, n, e = q.shape
    h, m, ev = k.shape[1], k.shape[2], v.shape[3]
    stats = torch.empty(3, b, hq, n, dtype=torch.float32, device=q.device)
    kind = 0 if mask is None else 1 if mask.dtype == torch.bool else 2
    mask = q if mask is None else mask.expand(b, hq, n, m)
    mask = mask.view(torch.uint8) if kind == 1 else mask
    common: dict[str, Any] = dict(
        HEADS=hq, GROUP=hq // h, N=n, M=m, scale=scale, E=e, EV=ev,
        BE=max(16, triton.next_power_of_2(e)), BEV=max(16, triton.next_power_of_2(ev)),
        TQ=tq is not None, TK=tk is not None, TV=tv is not None, CAUSAL=causal, MASKED=kind,
    )  # fmt: skip
    shared = lse.contiguous(), stats, mask, *mask.stride()
    row_tensors = _with_strides(q, tq, xi, out, k, tk, v, tv, t_out, sq)
    for walk in _row_walks(want, max(e, ev)):
        name = "means" if walk["SOURCE"] and not walk["SQ"] else "rows"
        size = tiles(name, max(e, ev), q.itemsize, q.device)
        grid = (b * hq * triton.cdiv(n, size["BM"]),)
        launch(_rows_kernel, grid, *row_tensors, *shared, **common, **size, **walk)
    if want[2] or want[3]:
        size = tiles("columns", max(e, ev), q.itemsize, q.device)
        grid = (b * h * triton.cdiv(m, size["BN"]),)
        column_tensors = _with_strides(q, tq, xi, k, tk, v, tv, sk, sv)
        walk = dict(SK=want[2], SV=want[3])
        launch(_columns_kernel, grid, *column_tensors, *shared, **common, **size, **walk)
    return results


def _tf32() -> bool:
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def _row_walks(want: Sequence[bool], width: int) -> list[dict[str, bool]]:
    """What each walk along the columns finds: T t_out, SQ sq, SOURCE κ; KNOWN: δ, κ are there."""
    t, sq, source = want[0], want[1], want[1] or want[2]
    if sq and width > 64:
        return [
            dict(T=False, SQ=False, SOURCE=True, KNOWN=False),
            dict(T=t, SQ=True, SOURCE=True, KNOWN=True),
        ]
    return [dict(T=t, SQ=sq, SOURCE=source, KNOWN=False)]


def tiles(walk: str, width: int, itemsize: int, device: torch.device) -> dict[str, int]:
    """Rows BM and columns BN of a tile, warps and pipeline stages."""
    size = "wide" if width > 64 else "narrow"
    if device.type == "cuda":
        shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
        size = size if shared >= _SHARED else "small"
    bm, bn, warps = _TILES[size, itemsize][walk]
    return dict(BM=bm, BN=bn, num_warps=warps, num_stages=2)


def _rowwise(t: Tensor | None) -> Tensor | None:
    return t if t is None or t.stride(-1) == 1 else t.contiguous()


def _with_strides(*tensors: Tensor | None) -> list[Any]:
    """Each tensor and its strides over batch, heads and length; the first stands for None."""
    first = tensors[0]
    given = [first if t is None else t for t in tensors]
    return [x for t in given for x in (t, *t.stride()[:3])]  # type: ignore[union-attr]


@jit
def _load(base, rows, length, stride, width: tl.constexpr, block: tl.constexpr):
    """Rows `rows` of a (length, width) matrix, zero outside, `block` columns wide."""
    lanes = tl.arange(0, block)
    inside = rows[:, None] < length
    if block != width:
        inside = inside & (lanes[None, :] < width)
    return tl.load(base + rows[:, None] * stride + lanes[None, :], mask=inside, other=0.0)


@jit
def _store(base, value, rows, length, stride, width: tl.constexpr, block: tl.constexpr):
    lanes = tl.arange(0, block)
    inside = (rows[:, None] < length) & (lanes[None, :] < width)
    where = base + rows[:, None] * stride + lanes[None, :]
    tl.store(where, value.to(base.dtype.element_ty), mask=inside)


@jit
def _bilinear(a, ta, b, tb, TA: tl.constexpr, TB: tl.constexpr):
    """a bᵀ and its tangent ta bᵀ + a tbᵀ."""
    y = tl.dot(a, tl.trans(b))
    ty = tl.zeros_like(y)
    if TA:
        ty = tl.dot(ta, tl.trans(b), ty)
    if TB:
        ty = tl.dot(a, tl.trans(tb), ty)
    return y, ty


@jit
def _probabilities(
    y, lse, rows, columns, mask, mask_n, mask_m, N, M, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """P = exp(s y + mask − lse); rows and columns lie along the axes of y, in either order."""
    keep = (columns < M) & (lse > float("-inf"))  # a row of scores −∞ has P = 0
    if CAUSAL:
        keep = keep & (columns <= rows)
    exponent = (y * scale - lse) * 1.4426950408889634
    if MASKED:
        where = mask + rows * mask_n + columns * mask_m
        value = tl.load(where, mask=(rows < N) & (columns < M), other=0)
        if MASKED == 1:
            keep = keep & (value != 0)
        else:
            exponent += value.to(tl.float32) * 1.4426950408889634
    return tl.where(keep, tl.exp2(exponent), 0.0)


@jit
def _rows_kernel(
    q, q_b, q_h, q_n, tq, tq_b, tq_h, tq_n, xi, xi_b, xi_h, xi_n, out, out_b, out_h, out_n,
    k, k_b, k_h, k_m, tk, tk_b, tk_h, tk_m, v, v_b, v_h, v_m, tv, tv_b, tv_h, tv_m,
    t_out, t_b, t_h, t_n, sq, sq_b, sq_h, sq_n,
    lse, stats, mask, mask_b, mask_h, mask_n, mask_m,
    HEADS, GROUP, N, M, scale,
    E: tl.constexpr, EV: tl.constexpr, BE: tl.constexpr, BEV: tl.constexpr,
    TQ: tl.constexpr, TK: tl.constexpr, TV: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
    T: tl.constexpr, SQ: tl.constexpr, SOURCE: tl.constexpr, KNOWN: tl.constexpr,
):  # fmt: skip
    """t_out and sq of BM rows, and their means δ, D, κ into `stats` (3, b·heads, N)."""
    blocks = tl.cdiv(N, BM)
    i = blocks - 1 - tl.program_id(0) % blocks  # the longest causal rows first
    z = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = z // HEADS, z % HEADS
    g = h // GROUP
    rows = i * BM + tl.arange(0, BM)
    k += b * k_b + g * k_h
    tk += b * tk_b + g * tk_h
    v += b * v_b + g * v_h
    tv += b * tv_b + g * tv_h
    mask += b * mask_b + h * mask_h

    qi = _load(q + b * q_b + h * q_h, rows, N, q_n, E, BE)
    tqi = qi
    if TQ:
        tqi = _load(tq + b * tq_b + h * tq_h, rows, N, tq_n, E, BE)
    xii = qi
    mean = tl.zeros([BM], tl.float32)
    if SOURCE:
        xii = _load(xi + b * xi_b + h * xi_h, rows, N, xi_n, EV, BEV)
        o = _load(out + b * out_b + h * out_h, rows, N, out_n, EV, BEV)
        mean = tl.sum(xii.to(tl.float32) * o.to(tl.float32), 1)
    log = tl.load(lse + z * N + rows, mask=rows < N, other=float("inf"))
    where = stats + z * N + rows
    size = (tl.num_programs(0) // blocks).to(tl.int64) * N
    if KNOWN:
        c = tl.load(where, mask=rows < N, other=0.0)
        e = tl.load(where + 2 * size, mask=rows < N, other=0.0)
    else:
        c, e = _shifts(
            qi, tqi, xii, k, k_m, tk, tk_m, tv, tv_m, M, scale,
            E, EV, BE, BEV, TQ, TK, TV and SOURCE, BN,
        )  # fmt: skip

    delta = tl.zeros([BM], tl.float32)
    kappa = tl.zeros([BM], tl.float32)
    centre = tl.zeros([BM], tl.float32)
    sum_t = tl.zeros([BM, BEV], tl.float32)
    sum_x = tl.zeros([BM, BE], tl.float32)
    sum_c = tl.zeros([BM, BE], tl.float32)
    sum_p = tl.zeros([BM, BE], tl.float32)
    end = M
    if CAUSAL:
        end = tl.minimum(M, (i + 1) * BM)
    for j in range(0, end, BN):
        columns = j + tl.arange(0, BN)
        kj = _load(k, columns, M, k_m, E, BE)
        tkj = kj
        if TK:
            tkj = _load(tk, columns, M, tk_m, E, BE)
        vj = _load(v, columns, M, v_m, EV, BEV)
        tvj = vj
        if TV:
            tvj = _load(tv, columns, M, tv_m, EV, BEV)
        y, r = _bilinear(qi, tqi, kj, tkj, TQ, TK)
        p = _probabilities(
            y, log[:, None], rows[:, None], columns[None, :], mask, mask_n, mask_m, N, M, scale,
            CAUSAL, MASKED,
        )  # fmt: skip
        low = p.to(kj.dtype)
        pr = p * (r * scale - c[:, None])
        delta += tl.sum(pr, 1)
        if T:
            if TQ or TK:
                sum_t = tl.dot(pr.to(vj.dtype), vj, sum_t)
            if TV:
                sum_t = tl.dot(low, tvj, sum_t)
        if SOURCE:
            gj, hj = _bilinear(xii, xii, vj, tvj, False, TV)
            gj -= mean[:, None]
            pc = p * gj
            px = pr * gj + p * (hj - e[:, None])
            kappa += tl.sum(px, 1)
            centre += tl.sum(pc, 1)
            if SQ:
                sum_x = tl.dot(px.to(kj.dtype), kj, sum_x)
                if TK:
                    sum_x = tl.dot(pc.to(kj.dtype), tkj, sum_x)
                if not KNOWN:
                    sum_p = tl.dot(low, kj, sum_p)
                    if TQ or TK:
                        sum_c = tl.dot(pc.to(kj.dtype), kj, sum_c)

    kappa -= delta * centre
    if T:
        if (TQ or TK) and not KNOWN:
            o = _load(out + b * out_b + h * out_h, rows, N, out_n, EV, BEV)
            sum_t -= delta[:, None] * o.to(tl.float32)
        _store(t_out + b * t_b + h * t_h, sum_t, rows, N, t_n, EV, BEV)
    if SQ:
        if not KNOWN:
            sum_x -= delta[:, None] * sum_c + kappa[:, None] * sum_p
        _store(sq + b * sq_b + h * sq_h, sum_x * scale, rows, N, sq_n, E, BE)
    if not KNOWN:
        tl.store(where, delta + c, mask=rows < N)
        tl.store(where + size, mean, mask=rows < N)
        tl.store(where + 2 * size, kappa + e, mask=rows < N)


@jit
def _shifts(
    q, tq, xi, k, k_m, tk, tk_m, tv, tv_m, M, scale,
    E: tl.constexpr, EV: tl.constexpr, BE: tl.constexpr, BEV: tl.constexpr,
    TQ: tl.constexpr, TK: tl.constexpr, TV: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """c = s(tq·k̄ + q·t̄k) and e = ξ·t̄v, with means over the first BN columns."""
    first = tl.arange(0, BN)
    count = tl.minimum(M, BN).to(tl.float32)
    c = tl.zeros([q.shape[0]], tl.float32)
    e = tl.zeros([q.shape[0]], tl.float32)
    if TQ:
        mean = tl.sum(_load(k, first, M, k_m, E, BE).to(tl.float32), 0) / count
        c += tl.sum(tq.to(tl.float32) * mean[None, :], 1)
    if TK:
        mean = tl.sum(_load(tk, first, M, tk_m, E, BE).to(tl.float32), 0) / count
        c += tl.sum(q.to(tl.float32) * mean[None, :], 1)
    if TV:
        mean = tl.sum(_load(tv, first, M, tv_m, EV, BEV).to(tl.float32), 0) / count
        e += tl.sum(xi.to(tl.float32) * mean[None, :], 1)
    return c * scale, e


@jit
def _columns_kernel(
    q, q_b, q_h, q_n, tq, tq_b, tq_h, tq_n, xi, xi_b, xi_h, xi_n,
    k, k_b, k_h, k_m, tk, tk_b, tk_h, tk_m, v, v_b, v_h, v_m, tv, tv_b, tv_h, tv_m,
    sk, sk_b, sk_h, sk_m, sv, sv_b, sv_h, sv_m,
    lse, stats, mask, mask_b, mask_h, mask_n, mask_m,
    HEADS, GROUP, N, M, scale,
    E: tl.constexpr, EV: tl.constexpr, BE: tl.constexpr, BEV: tl.constexpr,
    TQ: tl.constexpr, TK: tl.constexpr, TV: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
    SK: tl.constexpr, SV: tl.constexpr,
):  # fmt: skip
    """sk and sv of BN columns, summed over the rows of all heads of the group; tiles are Pᵀ."""
    blocks = tl.cdiv(M, BN)
    j = tl.program_id(0) % blocks
    z = (tl.program_id(0) // blocks).to(tl.int64)
    key_heads = HEADS // GROUP
    b, g = z // key_heads, z % key_heads
    size = (tl.num_programs(0) // blocks).to(tl.int64) * GROUP * N
    columns = j * BN + tl.arange(0, BN)

    kj = _load(k + b * k_b + g * k_h, columns, M, k_m, E, BE)
    tkj = kj
    if TK:
        tkj = _load(tk + b * tk_b + g * tk_h, columns, M, tk_m, E, BE)
    vj = kj
    tvj = kj
    if SK:
        vj = _load(v + b * v_b + g * v_h, columns, M, v_m, EV, BEV)
        tvj = vj
        if TV:
            tvj = _load(tv + b * tv_b + g * tv_h, columns, M, tv_m, EV, BEV)

    sum_k = tl.zeros([BN, BE], tl.float32)
    sum_v = tl.zeros([BN, BEV], tl.float32)
    start = 0
    if CAUSAL:
        start = j * BN // BM * BM  # rows above see none of these columns
    steps = tl.cdiv(tl.maximum(N - start, 0), BM)
    for step in range(0, steps * GROUP):
        h = g * GROUP + step // steps
        rows = start + (step % steps) * BM + tl.arange(0, BM)
        qi = _load(q + b * q_b + h * q_h, rows, N, q_n, E, BE)
        tqi = qi
        if TQ:
            tqi = _load(tq + b * tq_b + h * tq_h, rows, N, tq_n, E, BE)
        xii = _load(xi + b * xi_b + h * xi_h, rows, N, xi_n, EV, BEV)
        where = (b * HEADS + h) * N + rows
        log = tl.load(lse + where, mask=rows < N, other=float("inf"))
        delta = tl.load(stats + where, mask=rows < N, other=0.0)
        y, r = _bilinear(kj, tkj, qi, tqi, TK, TQ)
        p = _probabilities(
            y, log[None, :], rows[None, :], columns[:, None],
            mask + b * mask_b + h * mask_h, mask_n, mask_m, N, M, scale, CAUSAL, MASKED,
        )  # fmt: skip
        pu = p * (r * scale - delta[None, :])
        if SV:
            sum_v = tl.dot(pu.to(xii.dtype), xii, sum_v)
        if SK:
            mean = tl.load(stats + size + where, mask=rows < N, other=0.0)
            kappa = tl.load(stats + 2 * size + where, mask=rows < N, other=0.0)
            gj, hj = _bilinear(vj, tvj, xii, xii, TV, False)
            gj -= mean[None, :]
            px = pu * gj + p * (hj - kappa[None, :])
            sum_k = tl.dot(px.to(qi.dtype), qi, sum_k)
            if TQ:
                sum_k = tl.dot((p * gj).to(qi.dtype), tqi, sum_k)

    if SK:
        _store(sk + b * sk_b + g * sk_h, sum_k * scale, columns, M, sk_m, E, BE)
    if SV:
        _store(sv + b * sv_b + g * sv_h, sum_v, columns, M, sv_m, EV, BEV)


def _fake(xi, tq, tk, tv, q, k, v, out, lse, mask, causal, scale, want):
    q, k, v, out = (_rowwise(t) for t in (q, k, v, out))
    return _empty(want, out, q, k, v)


mode.opaque(
    "attention_second(Tensor? xi, Tensor? tq, Tensor? tk, Tensor? tv, Tensor q, Tensor k, "
    "Tensor v, Tensor out, Tensor lse, Tensor? mask, bool causal, float scale, bool[] want) "
    "-> Tensor[]",
    _launch,
    _fake,
)
