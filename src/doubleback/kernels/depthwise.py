"""Depthwise convolutions on CUDA, one filter per channel: K, Kᵀ and K□ in Triton, channels-last.

They do little arithmetic per byte, and PyTorch's and cuDNN's kernels stay far from what memory
allows, but for the K□ of 16-bit filters beyond 3×3 (benchmarks/convolutions.py measures them).
So all is computed here but that one. Sums are taken in float32 and in a fixed order, without
atomics: equal input, equal bits. K□ gives a bias its gradient on the way.

Images are (N, H, W, C) in memory, filters (KH·KW, C). A program holds a tile of strips × channels,
a strip being four neighbours in a row of outputs: what is loaded for one of them serves up to four.
Along a row, output o of a strip, its tap k and the input j places from the strip's first are bound
by `S·o + D·k − PAD = j` (K and K□) or `S·j + D·k − PAD = o` (Kᵀ), so that all of it is known to
the compiler.
"""

# pyright: reportInvalidTypeForm=false
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..counting import flop_formula
from . import launch
from .launch import Launch, jit, look, planned, power_of_two, resident, tl

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST = 7  # taps along an axis: K□ holds a row of them in registers,
FEW = 9  # or all, up to so many
WIDEST = 24  # inputs that a strip reads from a row
TILE = 512  # strips × channels that a program holds
RESIDENT = 12  # programs per multiprocessor, for sums
Pair = tuple[int, int]
Part = Literal["K", "Kᵀ", "K□"]


# Kernels -----------------------------------------------------------------------------------------


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
    if BIAS:  # noqa: SIM102
        if top == 0:  # on its own: BIAS is known when the kernel is compiled, this is not
            _keep(mine, total, KH * KW, known, channels, 0, 1)


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
    summed = tl.sum(total, 0)
    if tap < TAPS:
        tl.store(weight_ptr + channel * TAPS + tap, summed, mask=known)
    if BIAS:  # noqa: SIM102
        if tap == TAPS:
            tl.store(bias_ptr + channel, summed, mask=known)


# Which convolutions ------------------------------------------------------------------------------


class Depthwise(NamedTuple):
    """The geometry of one such convolution."""

    sizes: Pair  # of the input
    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair

    @property
    def out(self) -> Pair:
        axes = zip(*self, strict=True)
        return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in axes)  # type: ignore[return-value]

    @classmethod
    def where_faster(
        cls, part: Part, tensors: Sequence[Tensor | None], x_shape: Sequence[int],
        weight_shape: Sequence[int], stride: Sequence[int], padding: Sequence[int],
        dilation: Sequence[int], groups: int,
    ) -> "Depthwise | None":  # fmt: skip
        """None where `part` of this convolution, or these tensors, are not for the kernels here."""
        if len(weight_shape) != 4 or weight_shape[1] != 1 or not weight_shape[0] == groups > 1:
            return None
        way = cls(*map(_pair, (x_shape[2:], weight_shape[2:], stride, padding, dilation)))
        reach = 3 * way.stride[1] + way.dilation[1] * (way.kernel[1] - 1)
        if max(way.kernel) > LARGEST or max(way.stride) > 2 or reach >= WIDEST:
            return None
        given = [t for t in tensors if t is not None]
        if not x_shape[0] or min(way.out) < 1 or not _known(given):
            return None
        half = given[0].dtype != torch.float32
        return None if part == "K□" and half and max(way.kernel) > 3 else way

    def forward(self, weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """K(θ, x) + b."""
        return _forward(x, weight, bias, *self[2:])

    def transpose(self, weight: Tensor, y: Tensor) -> Tensor:
        """Kᵀ(θ, y)."""
        return _transpose(y, weight, *self[:1], *self[2:])

    def weight_adjoint(
        self, x: Tensor, y: Tensor, bias: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """K□(x, y), and the sum of y for a bias."""
        sums = _adjoint(x, y, *self[1:], bias)
        return sums[0], sums[1] if bias else None


def _pair(values: Sequence[int]) -> Pair:
    first, second = values
    return first, second


def _known(tensors: Sequence[Tensor]) -> bool:
    """Whether the kernels here can be called with these tensors now."""
    if not launch.on_cuda(*tensors) or not launch.available():
        return False
    dtype = tensors[0].dtype
    if dtype not in DTYPES or any(t.dtype != dtype for t in tensors):
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return False  # PyTorch differentiates its own operators only
    if any(map(_channels_first, tensors)):
        return False  # two copies more, and a layout that the caller does not expect
    return launch.being_flattened() or launch.fusing() or launch.eager(*tensors)


def _channels_first(t: Tensor) -> bool:
    """Whether this is an image in the usual layout, and not in that of the kernels as well."""
    last = torch.channels_last
    return t.dim() == 4 and t.is_contiguous() and not t.is_contiguous(memory_format=last)


# Launching ---------------------------------------------------------------------------------------


class _Tiles(NamedTuple):
    """A tile of rows × strips × channels, and how many of each there are."""

    rows: int
    strips: int
    channels: int
    row_tiles: int
    column_tiles: int
    blocks: int

    @classmethod
    def of(cls, rows: int, columns: int, channels: int) -> "_Tiles":
        width = next((c for c in (64, 32) if channels % c == 0), min(power_of_two(channels), 64))
        in_row = -(-columns // 4)
        strips = min(power_of_two(in_row), 4)
        high = max(1, min(TILE // (width * strips), power_of_two(rows)))
        counts = (-(-rows // high), -(-in_row // strips), -(-channels // width))
        return cls(high, strips, width, *counts)

    @property
    def constants(self) -> dict[str, Any]:
        warps = max(1, min(4, self.rows * self.strips * self.channels // 128))
        return {
            "ROWS": self.rows, "STRIPS": self.strips, "CHANNELS": self.channels,
            "ACC": tl.float32, "num_warps": warps,
        }  # fmt: skip


def _constants(
    kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    transposed: bool,
) -> dict[str, Any]:  # fmt: skip
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = kernel, stride, padding, dilation
    reach = dw * (kw - 1)
    first, last = -pw, 3 * sw + reach - pw
    if transposed:
        first, last = -((reach - pw) // sw), (3 + pw) // sw
    return {
        "KH": kh, "KW": kw, "SH": sh, "SW": sw, "PH": ph, "PW": pw, "DH": dh, "DW": dw,
        "FIRST": first, "STOP": last + 1,
    }  # fmt: skip


_plans: dict[Any, Any] = {}


def _laid_out(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last)


def taps_first(weight: Tensor) -> Tensor:
    """A filter (C, 1, KH, KW) that is (KH, KW, C) in memory, as the kernels here read it.

    >>> taps_first(torch.zeros(5, 1, 3, 2)).stride()
    (1, 1, 10, 5)
    """
    return weight.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)


def _empty(like: Tensor, sizes: Sequence[int]) -> Tensor:
    shape, form = (*like.shape[:2], *sizes), torch.channels_last
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=form)


def _apply_plan(
    source: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sequence[int], *geometry: Any,
    transposed: bool,
) -> tuple[Launch, bool, Sequence[int]]:  # fmt: skip
    """The launch, whether the filter has to be laid out first, and the `sizes` of the result."""
    examples, channels, *in_sizes = source.shape
    constants = _constants(weight.shape[2:], *geometry, transposed=transposed)
    classes = constants["SH"] if transposed else 1
    class_rows = -(-sizes[0] // classes)
    tiles = _Tiles.of(class_rows, sizes[1], channels)
    programs = examples * tiles.row_tiles * tiles.column_tiles * tiles.blocks * classes
    numbers = (channels, *in_sizes, *sizes, class_rows, *tiles[3:])
    flags = {"TRANSPOSED": transposed, "BIAS": bias is not None}
    run = Launch(apply_kernel, (programs,), numbers, **constants, **flags, **tiles.constants)
    return run, not weight.permute(2, 3, 0, 1).is_contiguous(), sizes


def _out(x: Tensor, weight: Tensor, geometry: Sequence[Sequence[int]]) -> Pair:
    return Depthwise(*map(_pair, (x.shape[2:], weight.shape[2:], *geometry))).out


def _launch_forward(x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Sequence[int]):
    x, geometry = _laid_out(x), tuple(map(_pair, geometry))
    bias = None if bias is None else bias.contiguous()
    key = ("K", look(x), look(weight), look(bias), geometry)

    def make() -> Any:
        return _apply_plan(x, weight, bias, _out(x, weight, geometry), *geometry, transposed=False)

    run, copies, sizes = planned(_plans, key, make)
    y = _empty(x, sizes)
    run(x, taps_first(weight) if copies else weight, bias, y)
    return y


def _launch_transpose(y: Tensor, weight: Tensor, sizes: Sequence[int], *geometry: Sequence[int]):
    y, sizes, geometry = _laid_out(y), _pair(sizes), tuple(map(_pair, geometry))
    key = ("Kᵀ", look(y), look(weight), sizes, geometry)
    run, copies, _ = planned(
        _plans, key, lambda: _apply_plan(y, weight, None, sizes, *geometry, transposed=True)
    )
    x = _empty(y, sizes)
    run(y, taps_first(weight) if copies else weight, None, x)
    return x


class _AdjointPlan(NamedTuple):
    """K□ in two launches: parts, and their sum."""

    collect: Launch
    add: Launch
    parts: int

    @classmethod
    def of(
        cls, x: Tensor, y: Tensor, kernel: Sequence[int], *geometry: Any, bias: bool
    ) -> "_AdjointPlan":
        examples, channels, *sizes = y.shape
        tiles = _Tiles.of(sizes[0], sizes[1], channels)
        count = examples * tiles.row_tiles * tiles.column_tiles
        constants = _constants(kernel, *geometry, transposed=False)
        taps = kernel[0] * kernel[1]
        tap_rows = kernel[0] if taps <= FEW else 1
        sets = kernel[0] // tap_rows * tiles.blocks
        parts = max(1, min(count, resident(x.device, RESIDENT) // sets))
        numbers = (channels, *x.shape[2:], *sizes, *tiles[3:5], count, parts)
        constants |= {"BIAS": bias, "TAP_ROWS": tap_rows, **tiles.constants}
        collect = Launch(adjoint_kernel, (parts * sets,), numbers, **constants)
        at_once = min(power_of_two(parts), 64)
        width = min(tiles.channels, 32)
        blocks = -(-channels // width)
        add = Launch(
            sum_kernel, (blocks * (taps + bias),), (channels, parts, blocks), TAPS=taps, BIAS=bias,
            PARTS=at_once, CHANNELS=width, ACC=tl.float32, num_warps=4,
        )  # fmt: skip
        return cls(collect, add, parts)


def _launch_adjoint(x, y, kernel, stride, padding, dilation, bias) -> list[Tensor]:
    x, y, kernel = _laid_out(x), _laid_out(y), _pair(kernel)
    geometry = tuple(map(_pair, (stride, padding, dilation)))
    key = ("K□", look(x), look(y), kernel, geometry, bias)
    plan = planned(_plans, key, lambda: _AdjointPlan.of(x, y, kernel, *geometry, bias=bias))
    channels, taps = x.shape[1], kernel[0] * kernel[1]
    parts = x.new_empty((plan.parts, taps + bias, channels), dtype=torch.float32)
    weight = x.new_empty((channels, 1, *kernel))
    total = x.new_empty(channels) if bias else None
    plan.collect(x, y, parts)
    plan.add(parts, weight, total)
    return [weight] if total is None else [weight, total]


# As operators ------------------------------------------------------------------------------------

launch.opaque(
    "depthwise(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, "
    "int[] dilation) -> Tensor",
    _launch_forward,
    lambda x, weight, bias, *geometry: _empty(x, _out(x, weight, geometry)),
)
launch.opaque(
    "depthwise_transpose(Tensor y, Tensor weight, int[] sizes, int[] stride, int[] padding, "
    "int[] dilation) -> Tensor",
    _launch_transpose,
    lambda y, weight, sizes, *geometry: _empty(y, sizes),
)
launch.opaque(
    "depthwise_adjoint(Tensor x, Tensor y, int[] kernel, int[] stride, int[] padding, "
    "int[] dilation, bool bias) -> Tensor[]",
    _launch_adjoint,
    lambda x, y, kernel, stride, padding, dilation, bias: [
        x.new_empty((x.shape[1], 1, *kernel)),
        *([x.new_empty(x.shape[1])] if bias else []),
    ],
)


_forward, _transpose, _adjoint = (
    launch.direct[op.default]
    for op in (
        torch.ops.doubleback.depthwise,
        torch.ops.doubleback.depthwise_transpose,
        torch.ops.doubleback.depthwise_adjoint,
    )
)


def _flops(images: Sequence[int], kernel: Sequence[int]) -> int:
    return 2 * math.prod(images) * math.prod(kernel)


@flop_formula(torch.ops.doubleback.depthwise)
def _forward_flops(x_shape, weight_shape, *_, out_shape: Any = None, **__) -> int:
    return _flops(out_shape, weight_shape[2:])


@flop_formula(torch.ops.doubleback.depthwise_transpose)
def _transpose_flops(y_shape, weight_shape, *_, **__) -> int:
    return _flops(y_shape, weight_shape[2:])


@flop_formula(torch.ops.doubleback.depthwise_adjoint)
def _adjoint_flops(x_shape, y_shape, kernel, *_, **__) -> int:
    return _flops(y_shape, kernel)
