"""The Triton kernels of standardisation; standardisation_triton.py plans and launches them."""

# pyright: reportInvalidTypeForm=false
from doubleback.kernels.launch import jit, tl


@jit
def _tangent(q, x_hat, r, mean_q, c):
    """t = rP(q)."""
    return r * (q - mean_q - c * x_hat)


@jit
def _source(g, t, x_hat, r, mean_g, a, c, phi):
    """s_x = −r²(cP(g) + aP(q)) − rφx̂ with t = rP(q)."""
    return -r * (r * c * (g - mean_g - a * x_hat) + a * t + phi * x_hat)


@jit
def rows_kernel(
    xi_ptr, q_ptr, x_ptr, mean_ptr, rstd_ptr, w_ptr, t_y_ptr, s_x_ptr, s_w_ptr, rows, per_example,
    channels, length,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, LENGTH: tl.constexpr, ACC: tl.constexpr,
    RMS: tl.constexpr, AFFINE: tl.constexpr, PER_ENTRY: tl.constexpr, TANGENT: tl.constexpr,
    SOURCE: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    entry = tl.arange(0, CHANNELS * LENGTH)
    channel, place = entry // LENGTH, entry % LENGTH
    inside = (channel < channels) & (place < length)
    offset = channel * length + place
    m = channels * length
    same_w = tl.full((1, 1), 1, ACC)
    if AFFINE and PER_ENTRY:
        same_w = tl.load(w_ptr + offset, mask=inside, other=0).to(ACC)[None, :]
    total = tl.zeros((ROWS, CHANNELS * LENGTH), ACC)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        live = (row < rows)[:, None] & inside[None, :]
        at = row.to(tl.int64)[:, None] * m + offset[None, :]
        r = tl.load(rstd_ptr + row, mask=row < rows, other=0).to(ACC)[:, None]
        x_hat = tl.load(x_ptr + at, mask=live, other=0).to(ACC)
        q = tl.load(q_ptr + at, mask=live, other=0).to(ACC)
        mean_q = tl.zeros((ROWS, 1), ACC)
        if not RMS:
            mean = tl.load(mean_ptr + row, mask=row < rows, other=0).to(ACC)[:, None]
            x_hat = tl.where(live, x_hat - mean, 0)
            mean_q = tl.sum(q, 1)[:, None] / m
        x_hat *= r
        c = tl.sum((q - mean_q) * x_hat, 1)[:, None] / m
        t = _tangent(q, x_hat, r, mean_q, c)
        if AFFINE and not PER_ENTRY:
            at_w = ((row % per_example) * channels)[:, None] + channel[None, :]
            w = tl.load(w_ptr + at_w, mask=live, other=0).to(ACC)
        else:
            w = same_w
        if TANGENT:
            tl.store(t_y_ptr + at, w * t, mask=live)
        if SOURCE or WEIGHTED:
            xi = tl.load(xi_ptr + at, mask=live, other=0).to(ACC)
            if SOURCE:
                g = w * xi
                mean_g = tl.zeros((ROWS, 1), ACC)
                if not RMS:
                    mean_g = tl.sum(g, 1)[:, None] / m
                a = tl.sum((g - mean_g) * x_hat, 1)[:, None] / m
                phi = tl.sum(g * t, 1)[:, None] / m
                tl.store(s_x_ptr + at, _source(g, t, x_hat, r, mean_g, a, c, phi), mask=live)
            if WEIGHTED and PER_ENTRY:
                total += xi * t
            if WEIGHTED and not PER_ENTRY:
                cells = tl.sum(tl.reshape(xi * t, (ROWS, CHANNELS, LENGTH)), 2)
                column = tl.arange(0, CHANNELS)[None, :]
                keep = (row < rows)[:, None] & (column < channels)
                tl.store(s_w_ptr + row[:, None] * channels + column, cells, mask=keep)
    if WEIGHTED and PER_ENTRY:
        at_w = tl.program_id(0).to(tl.int64) * m + entry
        tl.store(s_w_ptr + at_w, tl.sum(total, 0), mask=inside)


# Two passes --------------------------------------------------------------------------------------


@jit
def sums_kernel(
    xi_ptr, q_ptr, x_ptr, mean_ptr, rstd_ptr, w_ptr, sums_ptr, plane, examples, channels, entries,
    example_stride, channel_stride, entry_stride, inner, per_set, channels_per_group, parts,
    CHANNELS: tl.constexpr, ENTRIES: tl.constexpr, ACC: tl.constexpr, RMS: tl.constexpr,
    AFFINE: tl.constexpr, PER_ENTRY: tl.constexpr, TANGENT: tl.constexpr, SOURCE: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Σq, Σq⊙x̂, Σξ, Σξ⊙x̂, Σξ⊙q over cells; with a weight per entry, w⊙ξ in place of ξ."""
    blocks = tl.cdiv(channels, CHANNELS)
    part, rest = tl.program_id(0) % parts, tl.program_id(0) // parts
    block, which = rest % blocks, rest // blocks
    channel = block * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < channels
    group = which * per_set + channel // channels_per_group
    r = tl.load(rstd_ptr + group, mask=known, other=0).to(ACC)[:, None]
    mean = tl.zeros((CHANNELS, 1), ACC)
    if not RMS:
        mean = tl.load(mean_ptr + group, mask=known, other=0).to(ACC)[:, None]
    span = tl.arange(0, ENTRIES)
    local = tl.arange(0, CHANNELS)[:, None] * channel_stride + span[None, :] * entry_stride
    q_1 = tl.zeros((CHANNELS, ENTRIES), ACC)
    q_x = tl.zeros((CHANNELS, ENTRIES), ACC)
    xi_1 = tl.zeros((CHANNELS, ENTRIES), ACC)
    xi_x = tl.zeros((CHANNELS, ENTRIES), ACC)
    xi_q = tl.zeros((CHANNELS, ENTRIES), ACC)
    chunks = tl.cdiv(entries, ENTRIES)
    for item in range(part, inner * chunks, parts):
        example = (which * inner + item // chunks).to(tl.int64)
        start = (item % chunks) * ENTRIES
        live = known[:, None] & (start + span < entries)[None, :]
        corner = example * example_stride + start.to(tl.int64) * entry_stride
        at = corner + block.to(tl.int64) * CHANNELS * channel_stride + local
        x = tl.load(x_ptr + at, mask=live, other=0).to(ACC)
        q = tl.load(q_ptr + at, mask=live, other=0).to(ACC)
        x_hat = tl.where(live, (x - mean) * r, 0)
        q_1 += q
        q_x += q * x_hat
        if SOURCE or WEIGHTED:
            xi = tl.load(xi_ptr + at, mask=live, other=0).to(ACC)
            if AFFINE and PER_ENTRY:
                at_w = start + span
                xi *= tl.load(w_ptr + at_w, mask=at_w < entries, other=0).to(ACC)[None, :]
            xi_1 += xi
            xi_x += xi * x_hat
            xi_q += xi * q
    cell = (which * channels + channel).to(tl.int64) * parts + part
    tl.store(sums_ptr + cell, tl.sum(q_1, 1), mask=known)
    tl.store(sums_ptr + plane + cell, tl.sum(q_x, 1), mask=known)
    if SOURCE or WEIGHTED:
        tl.store(sums_ptr + 2 * plane + cell, tl.sum(xi_1, 1), mask=known)
        tl.store(sums_ptr + 3 * plane + cell, tl.sum(xi_x, 1), mask=known)
        tl.store(sums_ptr + 4 * plane + cell, tl.sum(xi_q, 1), mask=known)


@jit
def combine_kernel(
    sums_ptr, rstd_ptr, w_ptr, values_ptr, s_w_ptr, plane, channels, per_set, channels_per_group,
    parts, m,
    CHANNELS: tl.constexpr, PARTS: tl.constexpr, ACC: tl.constexpr, RMS: tl.constexpr,
    AFFINE: tl.constexpr, PER_ENTRY: tl.constexpr, TANGENT: tl.constexpr, SOURCE: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    """mean(q), c, mean(g), a, φ of one group, and s_w of its channels."""
    group = tl.program_id(0)
    groups = tl.num_programs(0)
    first = (group % per_set) * channels_per_group
    base = sums_ptr + ((group // per_set) * channels + first).to(tl.int64) * parts
    q_1 = tl.zeros((CHANNELS,), ACC)
    q_x = tl.zeros((CHANNELS,), ACC)
    g_1 = tl.zeros((CHANNELS,), ACC)
    g_x = tl.zeros((CHANNELS,), ACC)
    g_q = tl.zeros((CHANNELS,), ACC)
    for start in range(0, channels_per_group, CHANNELS):
        channel = start + tl.arange(0, CHANNELS)
        known = channel < channels_per_group
        w = tl.full((CHANNELS,), 1, ACC)
        if AFFINE and not PER_ENTRY:
            w = tl.load(w_ptr + first + channel, mask=known, other=0).to(ACC)
        for begin in range(0, parts, PARTS):
            part = begin + tl.arange(0, PARTS)
            live = known[:, None] & (part < parts)[None, :]
            at = base + channel[:, None] * parts + part[None, :]
            q_1 += tl.sum(tl.load(at, mask=live, other=0), 1)
            q_x += tl.sum(tl.load(at + plane, mask=live, other=0), 1)
            if SOURCE:
                g_1 += w * tl.sum(tl.load(at + 2 * plane, mask=live, other=0), 1)
                g_x += w * tl.sum(tl.load(at + 3 * plane, mask=live, other=0), 1)
                g_q += w * tl.sum(tl.load(at + 4 * plane, mask=live, other=0), 1)
    r = tl.load(rstd_ptr + group).to(ACC)
    c = tl.sum(q_x, 0) / m
    mean_q, mean_g = c * 0, c * 0
    if not RMS:
        mean_q = tl.sum(q_1, 0) / m
        mean_g = tl.sum(g_1, 0) / m
    a = tl.sum(g_x, 0) / m
    tl.store(values_ptr + group, mean_q)
    tl.store(values_ptr + groups + group, c)
    if SOURCE:
        tl.store(values_ptr + 2 * groups + group, mean_g)
        tl.store(values_ptr + 3 * groups + group, a)
        phi = r * (tl.sum(g_q, 0) / m - mean_g * mean_q - a * c)
        tl.store(values_ptr + 4 * groups + group, phi)
    if WEIGHTED and not PER_ENTRY:
        for start in range(0, channels_per_group, CHANNELS):
            channel = start + tl.arange(0, CHANNELS)
            known = channel < channels_per_group
            s_w = tl.zeros((CHANNELS,), ACC)
            for begin in range(0, parts, PARTS):
                part = begin + tl.arange(0, PARTS)
                live = known[:, None] & (part < parts)[None, :]
                at = base + channel[:, None] * parts + part[None, :]
                xi_1 = tl.load(at + 2 * plane, mask=live, other=0)
                xi_x = tl.load(at + 3 * plane, mask=live, other=0)
                xi_q = tl.load(at + 4 * plane, mask=live, other=0)
                s_w += tl.sum(xi_q - mean_q * xi_1 - c * xi_x, 1)
            at_w = (group // per_set) * channels + first + channel
            tl.store(s_w_ptr + at_w, r * s_w, mask=known)


@jit
def apply_kernel(
    xi_ptr, q_ptr, x_ptr, mean_ptr, rstd_ptr, w_ptr, t_y_ptr, s_x_ptr, s_w_ptr, values_ptr,
    groups, examples, channels, entries, example_stride, channel_stride, entry_stride, inner,
    per_set, channels_per_group, parts,
    CHANNELS: tl.constexpr, ENTRIES: tl.constexpr, ACC: tl.constexpr, RMS: tl.constexpr,
    AFFINE: tl.constexpr, PER_ENTRY: tl.constexpr, TANGENT: tl.constexpr, SOURCE: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    """t_y and s_x from the five numbers of each group; Σ ξ⊙t where each entry has its weight."""
    chunks = tl.cdiv(entries, ENTRIES)
    part, rest = tl.program_id(0) % parts, tl.program_id(0) // parts
    start, block = (rest % chunks) * ENTRIES, rest // chunks
    channel = block * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < channels
    entry = start + tl.arange(0, ENTRIES)
    live = known[:, None] & (entry < entries)[None, :]
    local = tl.arange(0, CHANNELS)[:, None] * channel_stride
    local += tl.arange(0, ENTRIES)[None, :] * entry_stride
    corner = start.to(tl.int64) * entry_stride + block.to(tl.int64) * CHANNELS * channel_stride
    w = tl.full((1, 1), 1, ACC)
    if AFFINE and PER_ENTRY:
        w = tl.load(w_ptr + entry, mask=entry < entries, other=0).to(ACC)[None, :]
    elif AFFINE:
        w = tl.load(w_ptr + channel, mask=known, other=0).to(ACC)[:, None]
    total = tl.zeros((CHANNELS, ENTRIES), ACC)
    for example in range(part, examples, parts):
        group = (example // inner) * per_set + channel // channels_per_group
        at = tl.cast(example, tl.int64) * example_stride + corner + local
        value = values_ptr + group
        mean_q = tl.load(value, mask=known, other=0)[:, None]
        c = tl.load(value + groups, mask=known, other=0)[:, None]
        r = tl.load(rstd_ptr + group, mask=known, other=0).to(ACC)[:, None]
        x_hat = tl.load(x_ptr + at, mask=live, other=0).to(ACC)
        if not RMS:
            x_hat -= tl.load(mean_ptr + group, mask=known, other=0).to(ACC)[:, None]
        x_hat *= r
        q = tl.load(q_ptr + at, mask=live, other=0).to(ACC)
        t = _tangent(q, x_hat, r, mean_q, c)
        if TANGENT:
            tl.store(t_y_ptr + at, w * t, mask=live)
        if SOURCE or (WEIGHTED and PER_ENTRY):
            xi = tl.load(xi_ptr + at, mask=live, other=0).to(ACC)
            if SOURCE:
                mean_g = tl.load(value + 2 * groups, mask=known, other=0)[:, None]
                a = tl.load(value + 3 * groups, mask=known, other=0)[:, None]
                phi = tl.load(value + 4 * groups, mask=known, other=0)[:, None]
                s_x = _source(w * xi, t, x_hat, r, mean_g, a, c, phi)
                tl.store(s_x_ptr + at, s_x, mask=live)
            if WEIGHTED and PER_ENTRY:
                total += xi * t
    if WEIGHTED and PER_ENTRY:
        at_w = part.to(tl.int64) * entries + entry
        tl.store(s_w_ptr + at_w, tl.sum(total, 0), mask=entry < entries)
