"""Tangent and curvature source of attention in Triton, without an N×M matrix in memory; and its
vjp in TF32, for which PyTorch has no kernel.

The formulas are those of ``attention.py``; P is recomputed tile by tile from the log-sum-exp. Two
kernels each: `rows_kernel` holds a block of query rows and walks along the columns,
`columns_kernel` holds a block of key columns and walks down the rows.

The row walk does not know the row means δ = ⟨P, sR⟩ and κ = ⟨P, X⟩ before its end. Narrow heads
take them out afterwards, since both enter linearly:

    t_out = P∘R′ V + P tv − δ′ O
    B K + C tk = (P∘X′ K + C tk) − δ′ (C K) − κ′ (P K),   X′ = R′∘(G − D) + H′

where R′ = sR − c and H′ = Ξ tvᵀ − e are shifted by numbers c, e of their row, and δ′, κ′ are the
means of R′, X′. The shifts cancel in exact arithmetic; near δ and κ they keep the rounding of P∘X′
small, so they are taken from the mean of the first columns. Wide heads have no registers for the
three sums: they walk twice, first for δ and κ, then with c = δ, e = κ, which leaves δ′ = κ′ = 0.
"""

# pyright: reportInvalidTypeForm=false
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import launch
from .launch import Launch, available, jit, look, planned, tl, triton

_MAX_WIDTH = 128
# BM, BN, warps and pipeline stages, such that sums and tiles stay in registers on an H200; and what
# other devices, with less than _SHARED bytes of shared memory for a block, have room for.
_SHARED = 200 * 1024
_TILES = {
    ("narrow", 2): {"rows": (64, 32, 4, 3), "means": (64, 64, 4, 2), "columns": (32, 64, 4, 2)},
    ("wide", 2): {"rows": (128, 32, 8, 2), "means": (128, 32, 8, 2), "columns": (32, 128, 8, 2)},
    ("short", 4): {
        "rows": (64, 32, 4, 2), "means": (64, 32, 4, 2), "columns": (32, 64, 4, 2),
        "first rows": (64, 32, 4, 2), "first columns": (32, 64, 4, 2),
    },
    ("narrow", 4): {
        "rows": (128, 16, 8, 2), "means": (64, 32, 4, 2), "columns": (32, 128, 8, 2),
        "first rows": (128, 32, 8, 2), "first columns": (32, 128, 4, 2),
    },
    ("wide", 4): {
        "rows": (32, 32, 8, 2), "means": (32, 32, 8, 2), "columns": (32, 32, 8, 2),
        "first rows": (64, 32, 4, 2), "first columns": (32, 64, 4, 2),
    },
    ("small", 2): {"rows": (32, 32, 4, 2), "means": (32, 32, 4, 2), "columns": (32, 32, 4, 2)},
    ("small", 4): {
        "rows": (16, 16, 4, 2), "means": (16, 16, 4, 2), "columns": (16, 16, 4, 2),
        "first rows": (32, 16, 4, 2), "first columns": (16, 32, 4, 2),
    },
}  # fmt: skip
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


# Kernels -----------------------------------------------------------------------------------------


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
def _bilinear(
    a, ta, b, tb, TA: tl.constexpr, TB: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """a bᵀ and its tangent ta bᵀ + a tbᵀ."""
    y = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    ty = tl.zeros_like(y)
    if TA:
        ty = tl.dot(ta, tl.trans(b), ty, input_precision=PRECISION)
    if TB:
        ty = tl.dot(a, tl.trans(tb), ty, input_precision=PRECISION)
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
def _block_of_rows(N, HEADS, GROUP, BLOCK: tl.constexpr):
    """This program's block and its rows, of which example, head, and head of keys; the longest
    causal rows come first."""
    blocks = tl.cdiv(N, BLOCK)
    i = blocks - 1 - tl.program_id(0) % blocks
    z = (tl.program_id(0) // blocks).to(tl.int64)
    return i, i * BLOCK + tl.arange(0, BLOCK), z, z // HEADS, z % HEADS, z % HEADS // GROUP


@jit
def _block_of_columns(M, HEADS, GROUP, BLOCK: tl.constexpr):
    """This program's block and its columns, of which example and head of keys."""
    blocks = tl.cdiv(M, BLOCK)
    j = tl.program_id(0) % blocks
    z = (tl.program_id(0) // blocks).to(tl.int64)
    heads = HEADS // GROUP
    return j, j * BLOCK + tl.arange(0, BLOCK), z // heads, z % heads


@jit
def rows_kernel(
    q, tq, xi, out, k, tk, v, tv, t_out, sq, lse, stats, mask,
    q_b, q_h, q_n, tq_b, tq_h, tq_n, xi_b, xi_h, xi_n, out_b, out_h, out_n,
    k_b, k_h, k_m, tk_b, tk_h, tk_m, v_b, v_h, v_m, tv_b, tv_h, tv_m,
    t_b, t_h, t_n, sq_b, sq_h, sq_n, mask_b, mask_h, mask_n, mask_m,
    HEADS, GROUP, N, M, scale,
    E: tl.constexpr, EV: tl.constexpr, BE: tl.constexpr, BEV: tl.constexpr,
    TQ: tl.constexpr, TK: tl.constexpr, TV: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
    T: tl.constexpr, SQ: tl.constexpr, SOURCE: tl.constexpr, KNOWN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """t_out and sq of BM rows, and their means δ, D, κ into `stats` (3, b·heads, N)."""
    i, rows, z, b, h, g = _block_of_rows(N, HEADS, GROUP, BM)
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
    size = (tl.num_programs(0) // tl.cdiv(N, BM)).to(tl.int64) * N
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
        y, r = _bilinear(qi, tqi, kj, tkj, TQ, TK, PRECISION)
        p = _probabilities(
            y, log[:, None], rows[:, None], columns[None, :], mask, mask_n, mask_m, N, M, scale,
            CAUSAL, MASKED,
        )  # fmt: skip
        low = p.to(kj.dtype)
        pr = p * (r * scale - c[:, None])
        delta += tl.sum(pr, 1)
        if T:
            if TQ or TK:
                sum_t = tl.dot(pr.to(vj.dtype), vj, sum_t, input_precision=PRECISION)
            if TV:
                sum_t = tl.dot(low, tvj, sum_t, input_precision=PRECISION)
        if SOURCE:
            gj, hj = _bilinear(xii, xii, vj, tvj, False, TV, PRECISION)
            gj -= mean[:, None]
            pc = p * gj
            px = pr * gj + p * (hj - e[:, None])
            kappa += tl.sum(px, 1)
            centre += tl.sum(pc, 1)
            if SQ:
                sum_x = tl.dot(px.to(kj.dtype), kj, sum_x, input_precision=PRECISION)
                if TK:
                    sum_x = tl.dot(pc.to(kj.dtype), tkj, sum_x, input_precision=PRECISION)
                if not KNOWN:
                    sum_p = tl.dot(low, kj, sum_p, input_precision=PRECISION)
                    if TQ or TK:
                        sum_c = tl.dot(pc.to(kj.dtype), kj, sum_c, input_precision=PRECISION)

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
def columns_kernel(
    q, tq, xi, k, tk, v, tv, sk, sv, lse, stats, mask,
    q_b, q_h, q_n, tq_b, tq_h, tq_n, xi_b, xi_h, xi_n,
    k_b, k_h, k_m, tk_b, tk_h, tk_m, v_b, v_h, v_m, tv_b, tv_h, tv_m,
    sk_b, sk_h, sk_m, sv_b, sv_h, sv_m, mask_b, mask_h, mask_n, mask_m,
    HEADS, GROUP, N, M, scale,
    E: tl.constexpr, EV: tl.constexpr, BE: tl.constexpr, BEV: tl.constexpr,
    TQ: tl.constexpr, TK: tl.constexpr, TV: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
    SK: tl.constexpr, SV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sk and sv of BN columns, summed over the rows of all heads of the group; tiles are Pᵀ."""
    j, columns, b, g = _block_of_columns(M, HEADS, GROUP, BN)
    size = (tl.num_programs(0) // tl.cdiv(M, BN)).to(tl.int64) * GROUP * N

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
        y, r = _bilinear(kj, tkj, qi, tqi, TK, TQ, PRECISION)
        p = _probabilities(
            y, log[None, :], rows[None, :], columns[:, None],
            mask + b * mask_b + h * mask_h, mask_n, mask_m, N, M, scale, CAUSAL, MASKED,
        )  # fmt: skip
        pu = p * (r * scale - delta[None, :])
        if SV:
            sum_v = tl.dot(pu.to(xii.dtype), xii, sum_v, input_precision=PRECISION)
        if SK:
            mean = tl.load(stats + size + where, mask=rows < N, other=0.0)
            kappa = tl.load(stats + 2 * size + where, mask=rows < N, other=0.0)
            gj, hj = _bilinear(vj, tvj, xii, xii, TV, False, PRECISION)
            gj -= mean[None, :]
            px = pu * gj + p * (hj - kappa[None, :])
            sum_k = tl.dot(px.to(qi.dtype), qi, sum_k, input_precision=PRECISION)
            if TQ:
                sum_k = tl.dot((p * gj).to(qi.dtype), tqi, sum_k, input_precision=PRECISION)

    if SK:
        _store(sk + b * sk_b + g * sk_h, sum_k * scale, columns, M, sk_m, E, BE)
    if SV:
        _store(sv + b * sv_b + g * sv_h, sum_v, columns, M, sv_m, EV, BEV)


@jit
def first_rows_kernel(
    q, xi, out, k, v, dq, lse, means, mask,
    q_b, q_h, q_n, xi_b, xi_h, xi_n, out_b, out_h, out_n, k_b, k_h, k_m, v_b, v_h, v_m,
    dq_b, dq_h, dq_n, mask_b, mask_h, mask_n, mask_m,
    HEADS, GROUP, N, M, scale,
    E: tl.constexpr, EV: tl.constexpr, BE: tl.constexpr, BEV: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, DQ: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """D of BM rows into `means` (b·heads, N), and their dq."""
    i, rows, z, b, h, g = _block_of_rows(N, HEADS, GROUP, BM)
    xii = _load(xi + b * xi_b + h * xi_h, rows, N, xi_n, EV, BEV)
    o = _load(out + b * out_b + h * out_h, rows, N, out_n, EV, BEV)
    mean = tl.sum(xii.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(means + z * N + rows, mean, mask=rows < N)
    if DQ:
        k += b * k_b + g * k_h
        v += b * v_b + g * v_h
        mask += b * mask_b + h * mask_h
        qi = _load(q + b * q_b + h * q_h, rows, N, q_n, E, BE)
        log = tl.load(lse + z * N + rows, mask=rows < N, other=float("inf"))
        total = tl.zeros([BM, BE], tl.float32)
        end = M
        if CAUSAL:
            end = tl.minimum(M, (i + 1) * BM)
        for j in range(0, end, BN):
            columns = j + tl.arange(0, BN)
            kj = _load(k, columns, M, k_m, E, BE)
            vj = _load(v, columns, M, v_m, EV, BEV)
            y = tl.dot(qi, tl.trans(kj), input_precision=PRECISION)
            p = _probabilities(
                y, log[:, None], rows[:, None], columns[None, :],
                mask, mask_n, mask_m, N, M, scale, CAUSAL, MASKED,
            )  # fmt: skip
            c = p * (tl.dot(xii, tl.trans(vj), input_precision=PRECISION) - mean[:, None])
            total = tl.dot(c.to(kj.dtype), kj, total, input_precision=PRECISION)
        _store(dq + b * dq_b + h * dq_h, total * scale, rows, N, dq_n, E, BE)


@jit
def first_columns_kernel(
    q, xi, k, v, dk, dv, lse, means, mask,
    q_b, q_h, q_n, xi_b, xi_h, xi_n, k_b, k_h, k_m, v_b, v_h, v_m,
    dk_b, dk_h, dk_m, dv_b, dv_h, dv_m, mask_b, mask_h, mask_n, mask_m,
    HEADS, GROUP, N, M, scale,
    E: tl.constexpr, EV: tl.constexpr, BE: tl.constexpr, BEV: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of BN columns, summed over the rows of all heads of the group; tiles are Pᵀ."""
    j, columns, b, g = _block_of_columns(M, HEADS, GROUP, BN)
    kj = _load(k + b * k_b + g * k_h, columns, M, k_m, E, BE)
    vj = _load(v + b * v_b + g * v_h, columns, M, v_m, EV, BEV)
    sum_k = tl.zeros([BN, BE], tl.float32)
    sum_v = tl.zeros([BN, BEV], tl.float32)
    start = 0
    if CAUSAL:
        start = j * BN // BM * BM
    steps = tl.cdiv(tl.maximum(N - start, 0), BM)
    for step in range(0, steps * GROUP):
        h = g * GROUP + step // steps
        rows = start + (step % steps) * BM + tl.arange(0, BM)
        qi = _load(q + b * q_b + h * q_h, rows, N, q_n, E, BE)
        xii = _load(xi + b * xi_b + h * xi_h, rows, N, xi_n, EV, BEV)
        where = (b * HEADS + h) * N + rows
        log = tl.load(lse + where, mask=rows < N, other=float("inf"))
        y = tl.dot(kj, tl.trans(qi), input_precision=PRECISION)
        p = _probabilities(
            y, log[None, :], rows[None, :], columns[:, None],
            mask + b * mask_b + h * mask_h, mask_n, mask_m, N, M, scale, CAUSAL, MASKED,
        )  # fmt: skip
        if DV:
            sum_v = tl.dot(p.to(xii.dtype), xii, sum_v, input_precision=PRECISION)
        if DK:
            mean = tl.load(means + where, mask=rows < N, other=0.0)
            c = p * (tl.dot(vj, tl.trans(xii), input_precision=PRECISION) - mean[None, :])
            sum_k = tl.dot(c.to(qi.dtype), qi, sum_k, input_precision=PRECISION)
    if DK:
        _store(dk + b * dk_b + g * dk_h, sum_k * scale, columns, M, dk_m, E, BE)
    if DV:
        _store(dv + b * dv_b + g * dv_h, sum_v, columns, M, dv_m, EV, BEV)


# Launching ---------------------------------------------------------------------------------------


def supported(mask: Tensor | None, *tensors: Tensor) -> bool:
    """Whether the kernels take these q, k, v.

    float32 only where PyTorch's own matmul may use TF32: three TF32 products for each exact one
    cost more than blocks of exact ones.
    """
    first = tensors[0]
    return (
        all(t.is_cuda and t.dtype == first.dtype and t.numel() > 0 for t in tensors)
        and first.dtype in _DTYPES
        and (first.dtype != torch.float32 or _tf32())
        and all(t.shape[-1] <= _MAX_WIDTH for t in tensors)
        and (mask is None or mask.dtype in (torch.bool, *_DTYPES))
        and available()
    )


def better_first(mask: Tensor | None, *tensors: Tensor) -> bool:
    """Whether the vjp is better computed here than by PyTorch's efficient attention, which
    multiplies float32 in three TF32 products, allowed or not."""
    return tensors[0].dtype == torch.float32 and supported(mask, *tensors)


def first(
    xi: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None,
    causal: bool, scale: float, want: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """(dq, dk, dv), None where `want` says no; shapes as for `second`."""
    call = torch.ops.doubleback.attention_first if launch.watched() else _launch_first
    return _placed(want, call(xi, q, k, v, out, lse, mask, causal, scale, list(want)))


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
    call = torch.ops.doubleback.attention_second if launch.watched() else _launch
    return _placed(want, call(xi, tq, tk, tv, q, k, v, out, lse, mask, causal, scale, want))


def _empty(want: Sequence[bool], *like: Tensor) -> list[Tensor]:
    return [torch.empty_like(t) for t, w in zip(like, want, strict=True) if w]


def _placed(
    want: Sequence[bool], results: Sequence[Tensor], other: Tensor | None = None
) -> tuple[Any, ...]:
    """The results, each in the place of one that was wanted, with `other` in those between."""
    rest = iter(results)
    return tuple(next(rest) if w else other for w in want)


def _launch(xi, tq, tk, tv, q, k, v, out, lse, mask, causal, scale, want) -> list[Tensor]:
    given = (xi, tq, tk, tv, q, k, v, out)
    key = (*map(look, given), look(lse), look(mask), causal, scale, *want, _precision(q.dtype))
    plan = planned(_plans, key, lambda: _AttentionPlan.of(*given, lse, mask, causal, scale, want))
    if plan.copies:
        xi, tq, tk, tv, q, k, v, out = (_rowwise(t) for t in given)
        lse = lse.contiguous()
    results = _empty(want, out, q, k, v)
    t_out, sq, sk, sv = _placed(want, results, q)
    stats = torch.empty(plan.stats, dtype=torch.float32, device=q.device)
    mask = _readable(mask, q)
    tq, tk, tv, xi = (q if t is None else t for t in (tq, tk, tv, xi))
    for walk in plan.rows:
        walk(q, tq, xi, out, k, tk, v, tv, t_out, sq, lse, stats, mask)
    if plan.columns is not None:
        plan.columns(q, tq, xi, k, tk, v, tv, sk, sv, lse, stats, mask)
    return results


class _AttentionPlan(NamedTuple):
    """The launches of calls that look alike; copies: whether a tensor is laid out anew first."""

    copies: bool
    stats: tuple[int, ...]
    rows: list[Launch]
    columns: Launch | None

    @classmethod
    def of(cls, xi, tq, tk, tv, q, k, v, out, lse, mask, causal, scale, want) -> "_AttentionPlan":
        given = (xi, tq, tk, tv, q, k, v, out)
        xi, tq, tk, tv, q, k, v, out = laid = [_rowwise(t) for t in given]
        t_out, sq, sk, sv = _placed(want, _empty(want, out, q, k, v))
        shapes = _Shapes(q, k, v, mask, causal, scale)
        moving = dict(TQ=tq is not None, TK=tk is not None, TV=tv is not None)
        rows, columns = [], None
        for walk in _row_walks(want, shapes.width):
            name = "means" if walk["SOURCE"] and not walk["SQ"] else "rows"
            strides = _strides(q, tq, xi, out, k, tk, v, tv, t_out, sq)
            rows.append(shapes.launch("BM", name, rows_kernel, strides, **moving, **walk))
        if want[2] or want[3]:
            strides = _strides(q, tq, xi, k, tk, v, tv, sk, sv)
            walk = dict(SK=want[2], SV=want[3])
            columns = shapes.launch("BN", "columns", columns_kernel, strides, **moving, **walk)
        return cls(_moved(given, laid, lse), (3, *q.shape[:3]), rows, columns)

    @classmethod
    def of_first(cls, xi, q, k, v, out, lse, mask, causal, scale, want) -> "_AttentionPlan":
        given = (xi, q, k, v, out)
        xi, q, k, v, out = laid = [_rowwise(t) for t in given]
        dq, dk, dv = _placed(want, _empty(want, q, k, v))
        shapes = _Shapes(q, k, v, mask, causal, scale)
        strides = _strides(q, xi, out, k, v, dq)
        rows = shapes.launch("BM", "first rows", first_rows_kernel, strides, DQ=want[0])
        columns = None
        if want[1] or want[2]:
            strides, walk = _strides(q, xi, k, v, dk, dv), dict(DK=want[1], DV=want[2])
            columns = shapes.launch("BN", "first columns", first_columns_kernel, strides, **walk)
        return cls(_moved(given, laid, lse), q.shape[:3], [rows], columns)


def _moved(given: Sequence[Any], laid: Sequence[Any], lse: Tensor) -> bool:
    same = all(a is b for a, b in zip(given, laid, strict=True))
    return not (same and lse.is_contiguous())


class _Shapes:
    """What all kernels are told of q, k, v and the mask."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> None:
        (b, hq, n, e), (_, h, m, _), ev = q.shape, k.shape, v.shape[3]
        masked = q.stride() if mask is None else mask.expand(b, hq, n, m).stride()
        self.width, self.itemsize, self.device = max(e, ev), q.itemsize, q.device
        self.sides = {"BM": (b * hq, n), "BN": (b * h, m)}  # heads, and their rows or columns
        self.numbers = (*masked, hq, hq // h, n, m, scale)
        self.constants: dict[str, Any] = dict(
            E=e, EV=ev, BE=max(16, triton.next_power_of_2(e)),
            BEV=max(16, triton.next_power_of_2(ev)), CAUSAL=causal,
            MASKED=0 if mask is None else 1 if mask.dtype == torch.bool else 2,
            PRECISION=_precision(q.dtype),
        )  # fmt: skip

    def launch(
        self, side: str, name: str, kernel: Any, strides: Sequence[int], **walk: bool
    ) -> Launch:
        """`kernel` in tiles called `name`, a program for every block of rows (side "BM") or of
        columns ("BN")."""
        heads, length = self.sides[side]
        tile = tiles(name, self.width, length, self.itemsize, self.device)
        grid = (heads * triton.cdiv(length, tile[side]),)
        return Launch(kernel, grid, (*strides, *self.numbers), **self.constants, **tile, **walk)


_plans: dict[Any, _AttentionPlan] = {}
_first_plans: dict[Any, _AttentionPlan] = {}


def _launch_first(xi, q, k, v, out, lse, mask, causal, scale, want) -> list[Tensor]:
    given = (xi, q, k, v, out)
    key = (*map(look, given), look(lse), look(mask), causal, scale, *want, _precision(q.dtype))
    plan = planned(
        _first_plans, key, lambda: _AttentionPlan.of_first(*given, lse, mask, causal, scale, want)
    )
    if plan.copies:
        xi, q, k, v, out = (_rowwise(t) for t in given)
        lse = lse.contiguous()
    results = _empty(want, q, k, v)
    dq, dk, dv = _placed(want, results, q)
    means = torch.empty(plan.stats, dtype=torch.float32, device=q.device)
    mask = _readable(mask, q)
    for walk in plan.rows:
        walk(q, xi, out, k, v, dq, lse, means, mask)
    if plan.columns is not None:
        plan.columns(q, xi, k, v, dk, dv, lse, means, mask)
    return results


def _readable(mask: Tensor | None, q: Tensor) -> Tensor:
    """The mask as kernels read it; anything stands for none."""
    if mask is None:
        return q
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def _tf32() -> bool:
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def _precision(dtype: torch.dtype) -> str:
    """The precision of products, as PyTorch is set at the launch: sweeps that were flattened while
    TF32 was allowed may be replayed when it no longer is. 16-bit products know no choice."""
    return "ieee" if dtype == torch.float32 and not _tf32() else "tf32"


def _row_walks(want: Sequence[bool], width: int) -> list[dict[str, bool]]:
    """What each walk along the columns finds: T t_out, SQ sq, SOURCE κ; KNOWN: δ, κ are there."""
    t, sq, source = want[0], want[1], want[1] or want[2]
    if sq and width > 64:
        return [
            dict(T=False, SQ=False, SOURCE=True, KNOWN=False),
            dict(T=t, SQ=True, SOURCE=True, KNOWN=True),
        ]
    return [dict(T=t, SQ=sq, SOURCE=source, KNOWN=False)]


def tiles(
    walk: str, width: int, length: int, itemsize: int, device: torch.device
) -> dict[str, int]:
    """Rows BM and columns BN of a tile, warps and pipeline stages, for heads of this width and
    programs that share rows (or columns) of this length."""
    size = "wide" if width > 64 else "narrow"
    if size == "narrow" and itemsize == 4 and length <= 64:
        size = "short"
    if device.type == "cuda":
        shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
        size = size if shared >= _SHARED else "small"
    bm, bn, warps, stages = _TILES[size, itemsize][walk]
    return dict(BM=bm, BN=bn, num_warps=warps, num_stages=stages)


def _rowwise(t: Tensor | None) -> Tensor | None:
    return t if t is None or t.stride(-1) == 1 else t.contiguous()


def _strides(*tensors: Tensor | None) -> list[int]:
    """Over batch, heads and length; the first stands for None."""
    first = tensors[0]
    return [x for t in tensors for x in (first if t is None else t).stride()[:3]]  # type: ignore[union-attr]


def _fake(xi, tq, tk, tv, q, k, v, out, lse, mask, causal, scale, want):
    q, k, v, out = (_rowwise(t) for t in (q, k, v, out))
    return _empty(want, out, q, k, v)


launch.opaque(
    "attention_second(Tensor? xi, Tensor? tq, Tensor? tk, Tensor? tv, Tensor q, Tensor k, "
    "Tensor v, Tensor out, Tensor lse, Tensor? mask, bool causal, float scale, bool[] want) "
    "-> Tensor[]",
    _launch,
    _fake,
)
launch.opaque(
    "attention_first(Tensor xi, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor? mask, bool causal, float scale, bool[] want) -> Tensor[]",
    _launch_first,
    lambda xi, q, k, v, out, lse, mask, causal, scale, want: _empty(
        want, *(_rowwise(t) for t in (q, k, v))
    ),
)
