"""The Triton kernels of attention's derivatives; attention_triton.py launches them."""

# pyright: reportInvalidTypeForm=false
from .launch import jit, tl


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
    SK: tl.constexpr, SV: tl.constexpr,
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


@jit
def first_rows_kernel(
    q, xi, out, k, v, dq, lse, means, mask,
    q_b, q_h, q_n, xi_b, xi_h, xi_n, out_b, out_h, out_n, k_b, k_h, k_m, v_b, v_h, v_m,
    dq_b, dq_h, dq_n, mask_b, mask_h, mask_n, mask_m,
    HEADS, GROUP, N, M, scale,
    E: tl.constexpr, EV: tl.constexpr, BE: tl.constexpr, BEV: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, DQ: tl.constexpr,
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
            p = _probabilities(
                tl.dot(qi, tl.trans(kj)), log[:, None], rows[:, None], columns[None, :],
                mask, mask_n, mask_m, N, M, scale, CAUSAL, MASKED,
            )  # fmt: skip
            c = p * (tl.dot(xii, tl.trans(vj)) - mean[:, None])
            total = tl.dot(c.to(kj.dtype), kj, total)
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
        p = _probabilities(
            tl.dot(kj, tl.trans(qi)), log[None, :], rows[None, :], columns[:, None],
            mask + b * mask_b + h * mask_h, mask_n, mask_m, N, M, scale, CAUSAL, MASKED,
        )  # fmt: skip
        if DV:
            sum_v = tl.dot(p.to(xii.dtype), xii, sum_v)
        if DK:
            mean = tl.load(means + where, mask=rows < N, other=0.0)
            c = p * (tl.dot(vj, tl.trans(xii)) - mean[None, :])
            sum_k = tl.dot(c.to(qi.dtype), qi, sum_k)
    if DK:
        _store(dk + b * dk_b + g * dk_h, sum_k * scale, columns, M, dk_m, E, BE)
    if DV:
        _store(dv + b * dv_b + g * dv_h, sum_v, columns, M, dv_m, EV, BEV)
