"""The Triton kernels of depthwise convolutions; depthwise.py plans and launches them.

Images are (N, H, W, C) in memory, filters (KH·KW, C). A program holds a tile of strips × channels,
a strip being four neighbours in a row of outputs: what is loaded for one of them serves up to four.
Along a row, output o of a strip, its tap k and the input j places from the strip's first are bound
by `S·o + D·k − PAD = j` (K and K□) or `S·j + D·k − PAD = o` (Kᵀ), so that all of it is known to
the compiler.
"""

# pyright: reportInvalidTypeForm=false
from doubleback.kernels.launch import jit, tl


@jit
def _strips(tile, rows, row_tiles, columns, column_tiles, ROWS: tl.constexpr, STRIPS: tl.constexpr):
    """Example, row and first column of each strip of a tile, and which of them exist."""
    place = tl.arange(0, ROWS * STRIPS)
    example = tile // (row_tiles * column_tiles)
    row = (tile // column_tiles) % row_tiles * ROWS + place // STRIPS
    column = (tile % column_tiles * STRIPS + place % STRIPS) * 4
    return example, row, column, (row < rows) & (column < columns)


@jit
def _add(
    acc, value, w_ptr, known, channels, j: tl.constexpr, o: tl.constexpr, K: tl.constexpr,
    S: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """The part of input j in output o."""
    n: tl.constexpr = o + PAD - S * j if TRANSPOSED else j + PAD - S * o
    if n >= 0 and n % D == 0 and n // D < K:
        w = tl.load(w_ptr + (n // D) * channels, mask=known, other=0)
        acc += value * w.to(acc.dtype)[None, :]
    return acc


@jit
def _store(out_ptr, acc, bias, at, column, columns, live, channels, o: tl.constexpr):
    kept = live & (column + o < columns)[:, None]
    tl.store(out_ptr + at + o * channels, acc + bias, mask=kept)


@jit
def apply_kernel(
    in_ptr, w_ptr, b_ptr, out_ptr, channels, in_rows, in_columns, out_rows, out_columns,
    class_rows, row_tiles, column_tiles, blocks,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr,
    PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, TRANSPOSED: tl.constexpr,
    BIAS: tl.constexpr, FIRST: tl.constexpr, STOP: tl.constexpr, ROWS: tl.constexpr,
    STRIPS: tl.constexpr, CHANNELS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """K(θ, x) + b, or Kᵀ(θ, y), whose rows r fall into SH classes (r mod SH) of unlike taps."""
    block, tile = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    of_class = 0
    if TRANSPOSED and SH > 1:
        of_class = tile % SH
        tile = tile // SH
    example, row, column, exists = _strips(
        tile, class_rows, row_tiles, out_columns, column_tiles, ROWS, STRIPS
    )
    if TRANSPOSED:
        row = row * SH + of_class
        exists = exists & (row < out_rows)
        left = column // SW
    else:
        left = column * SW
    channel = block * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < channels
    acc0 = tl.zeros((ROWS * STRIPS, CHANNELS), ACC)
    acc1 = tl.zeros((ROWS * STRIPS, CHANNELS), ACC)
    acc2 = tl.zeros((ROWS * STRIPS, CHANNELS), ACC)
    acc3 = tl.zeros((ROWS * STRIPS, CHANNELS), ACC)
    image = in_ptr + tl.cast(example, tl.int64) * in_rows * in_columns * channels
    for kh in range(KH):
        if TRANSPOSED:
            source = (row + PH - kh * DH) // SH
            taken = (of_class + PH - kh * DH) % SH == 0
        else:
            source = row * SH + kh * DH - PH
            taken = True
        if taken:
            inside = exists & (source >= 0) & (source < in_rows)
            start = (source * in_columns + left) * channels
            taps = w_ptr + kh * KW * channels + channel
            for j in tl.static_range(FIRST, STOP):
                here = inside & (left + j >= 0) & (left + j < in_columns)
                value = tl.load(
                    image + (start + j * channels)[:, None] + channel[None, :],
                    mask=here[:, None] & known[None, :], other=0,
                ).to(ACC)  # fmt: skip
                acc0 = _add(acc0, value, taps, known, channels, j, 0, KW, SW, DW, PW, TRANSPOSED)
                acc1 = _add(acc1, value, taps, known, channels, j, 1, KW, SW, DW, PW, TRANSPOSED)
                acc2 = _add(acc2, value, taps, known, channels, j, 2, KW, SW, DW, PW, TRANSPOSED)
                acc3 = _add(acc3, value, taps, known, channels, j, 3, KW, SW, DW, PW, TRANSPOSED)
    bias = tl.zeros((1, CHANNELS), ACC)
    if BIAS:
        bias = tl.load(b_ptr + channel, mask=known, other=0).to(ACC)[None, :]
    live = exists[:, None] & known[None, :]
    at = ((row * out_columns + column) * channels)[:, None] + channel[None, :]
    at += tl.cast(example, tl.int64) * out_rows * out_columns * channels
    _store(out_ptr, acc0, bias, at, column, out_columns, live, channels, 0)
    _store(out_ptr, acc1, bias, at, column, out_columns, live, channels, 1)
    _store(out_ptr, acc2, bias, at, column, out_columns, live, channels, 2)
    _store(out_ptr, acc3, bias, at, column, out_columns, live, channels, 3)


# The weight's adjoint ----------------------------------------------------------------------------


@jit
def _meet(
    acc, value, y0, y1, y2, y3, j: tl.constexpr, k: tl.constexpr, K: tl.constexpr,
    S: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """The products of input j with those outputs that reach it by tap k, if there is one."""
    if k >= 0 and k < K:
        if j + PAD - D * k == 0:
            acc += value * y0
        if j + PAD - D * k == S:
            acc += value * y1
        if j + PAD - D * k == 2 * S:
            acc += value * y2
        if j + PAD - D * k == 3 * S:
            acc += value * y3
    return acc


@jit
def _output(y_ptr, at, column, columns, live, channels, o: tl.constexpr, ACC: tl.constexpr):
    kept = live & (column + o < columns)[:, None]
    return tl.load(y_ptr + at + o * channels, mask=kept, other=0).to(ACC)


@jit
def _keep(parts_ptr, acc, first, known, channels, k: tl.constexpr, COUNT: tl.constexpr):
    if k < COUNT:
        tl.store(parts_ptr + (first + k) * channels, tl.sum(acc, 0), mask=known)


@jit
def adjoint_kernel(
    x_ptr, y_ptr, parts_ptr, channels, x_rows, x_columns, y_rows, y_columns, row_tiles,
    column_tiles, tiles, parts,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr,
    PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, BIAS: tl.constexpr,
    FIRST: tl.constexpr, STOP: tl.constexpr, TAP_ROWS: tl.constexpr, ROWS: tl.constexpr,
    STRIPS: tl.constexpr, CHANNELS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """K□(x, y), one row of its taps or all where they are few (TAP_ROWS), summed over a share of
    the tiles; and Σ y."""
    groups = KH // TAP_ROWS
    top, rest = tl.program_id(0) % groups * TAP_ROWS, tl.program_id(0) // groups
    part, block = rest % parts, rest // parts
    channel = block * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < channels
    acc0 = tl.zeros((ROWS * STRIPS, CHANNELS), ACC)
    acc1 = tl.zeros((ROWS * STRIPS, CHANNELS), ACC)
    acc2 = tl.zeros((ROWS * STRIPS, CHANNELS), ACC)
    acc3 = tl.zeros((ROWS * STRIPS, CHANNELS), ACC)
    acc4 = tl.zeros((ROWS * STRIPS, CHANNELS), ACC)
    acc5 = tl.zeros((ROWS * STRIPS, CHANNELS), ACC)
    acc6 = tl.zeros((ROWS * STRIPS, CHANNELS), ACC)
    acc7 = tl.zeros((ROWS * STRIPS, CHANNELS), ACC)
    acc8 = tl.zeros((ROWS * STRIPS, CHANNELS), ACC)
    total = tl.zeros((ROWS * STRIPS, CHANNELS), ACC)
    for tile in range(part, tiles, parts):
        example, row, column, exists = _strips(
            tile, y_rows, row_tiles, y_columns, column_tiles, ROWS, STRIPS
        )
        example = tl.cast(example, tl.int64)
        live = exists[:, None] & known[None, :]
        at = ((row * y_columns + column) * channels)[:, None] + channel[None, :]
        at += example * y_rows * y_columns * channels
        y0 = _output(y_ptr, at, column, y_columns, live, channels, 0, ACC)
        y1 = _output(y_ptr, at, column, y_columns, live, channels, 1, ACC)
        y2 = _output(y_ptr, at, column, y_columns, live, channels, 2, ACC)
        y3 = _output(y_ptr, at, column, y_columns, live, channels, 3, ACC)
        if BIAS:
            total += y0 + y1 + y2 + y3
        image, left = x_ptr + example * x_rows * x_columns * channels, column * SW
        for i in tl.static_range(TAP_ROWS):
            source = row * SH + (top + i) * DH - PH
            inside = exists & (source >= 0) & (source < x_rows)
            start = (source * x_columns + left) * channels
            for j in tl.static_range(FIRST, STOP):
                here = inside & (left + j >= 0) & (left + j < x_columns)
                v = tl.load(
                    image + (start + j * channels)[:, None] + channel[None, :],
                    mask=here[:, None] & known[None, :], other=0,
                ).to(ACC)  # fmt: skip
                acc0 = _meet(acc0, v, y0, y1, y2, y3, j, -i * KW, KW, SW, DW, PW)
                acc1 = _meet(acc1, v, y0, y1, y2, y3, j, 1 - i * KW, KW, SW, DW, PW)
                acc2 = _meet(acc2, v, y0, y1, y2, y3, j, 2 - i * KW, KW, SW, DW, PW)
                acc3 = _meet(acc3, v, y0, y1, y2, y3, j, 3 - i * KW, KW, SW, DW, PW)
                acc4 = _meet(acc4, v, y0, y1, y2, y3, j, 4 - i * KW, KW, SW, DW, PW)
                acc5 = _meet(acc5, v, y0, y1, y2, y3, j, 5 - i * KW, KW, SW, DW, PW)
                acc6 = _meet(acc6, v, y0, y1, y2, y3, j, 6 - i * KW, KW, SW, DW, PW)
                acc7 = _meet(acc7, v, y0, y1, y2, y3, j, 7 - i * KW, KW, SW, DW, PW)
                acc8 = _meet(acc8, v, y0, y1, y2, y3, j, 8 - i * KW, KW, SW, DW, PW)
    mine = parts_ptr + tl.cast(part, tl.int64) * (KH * KW + BIAS) * channels + channel
    _keep(mine, acc0, top * KW, known, channels, 0, TAP_ROWS * KW)
    _keep(mine, acc1, top * KW, known, channels, 1, TAP_ROWS * KW)
    _keep(mine, acc2, top * KW, known, channels, 2, TAP_ROWS * KW)
    _keep(mine, acc3, top * KW, known, channels, 3, TAP_ROWS * KW)
    _keep(mine, acc4, top * KW, known, channels, 4, TAP_ROWS * KW)
    _keep(mine, acc5, top * KW, known, channels, 5, TAP_ROWS * KW)
    _keep(mine, acc6, top * KW, known, channels, 6, TAP_ROWS * KW)
    _keep(mine, acc7, top * KW, known, channels, 7, TAP_ROWS * KW)
    _keep(mine, acc8, top * KW, known, channels, 8, TAP_ROWS * KW)
    if BIAS:
        _keep(mine, total, KH * KW, known & (top == 0), channels, 0, 1)


@jit
def sum_kernel(
    parts_ptr, weight_ptr, bias_ptr, channels, parts, blocks,
    TAPS: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr, CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Σ over the parts: one tap, or the bias, of some channels."""
    block, tap = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    channel = block * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < channels
    total = tl.zeros((PARTS, CHANNELS), ACC)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        at = ((part * (TAPS + BIAS) + tap) * channels)[:, None] + channel[None, :]
        total += tl.load(parts_ptr + at, mask=(part < parts)[:, None] & known[None, :], other=0)
    found = tl.sum(total, 0)
    tl.store(weight_ptr + channel * TAPS + tap, found, mask=known & (tap < TAPS))
    if BIAS:
        tl.store(bias_ptr + channel, found, mask=known & (tap == TAPS))
