"""Tangent and curvature of standardisation on CUDA, in fused kernels (formulas: standardisation).

| route      | for                                            | read and written per entry of x  |
| ---------- | ---------------------------------------------- | -------------------------------- |
| one pass   | groups that are contiguous rows of up to 8192  | x, q, ξ once; t_y, s_x: 5 units  |
| two passes | strided or longer groups                       | x, q, ξ twice; t_y, s_x: 8 units |

A unit is the size of one entry: 10 or 16 bytes in bfloat16. Where t_y or s_x is not wanted it is
one unit less; the tangent alone takes 3 or 5. Partial sums go to small buffers and are added in
a fixed order, without atomics: equal input, equal bits.

In two passes x is seen as (O, C, S), with any strides: O examples, C channels, S entries.

| norm                  | O    | C | S     | one group                                         |
| --------------------- | ---- | - | ----- | ------------------------------------------------- |
| batch, contiguous     | N    | C | H·W   | one channel of all examples: one *set* of O       |
| batch, channels-last  | 1    | C | N·H·W | the same                                          |
| group, instance       | N    | C | H·W   | C/G channels of one example: O sets of 1          |
| layer, RMS, long rows | rows | 1 | row   | the same, with a weight per entry, not per channel |
"""

# pyright: reportInvalidTypeForm=false
import importlib
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from doubleback.kernels.groups import Groups, Point, Three, layout, statistics_dtype

try:
    triton: Any = importlib.import_module("triton")
    tl: Any = importlib.import_module("triton.language")
    jit = triton.jit
except ImportError:  # CPU builds of torch come without Triton; nothing here is called then
    triton, tl = None, SimpleNamespace(constexpr=None)

    def jit(function: Any) -> Any:
        return function


LONGEST = 8192  # entries of a row that is kept in registers: more of them spill
TILE = 2048  # entries that a program holds at a time, where it can choose
RESIDENT = 12  # programs per multiprocessor that loop: whole rounds of the 2 or 3 that fit


def available() -> bool:
    return triton is not None


class _Call(NamedTuple):
    groups: Groups
    xi: Tensor | None
    q: Tensor
    x: Tensor
    mean: Tensor | None
    rstd: Tensor
    weight: Tensor | None
    t_y: Tensor | None
    s_x: Tensor | None
    weighted: bool  # s_w is wanted

    @property
    def accumulator(self) -> torch.dtype:
        return statistics_dtype(self.x)

    @property
    def flags(self) -> dict[str, Any]:
        return {
            "ACC": tl.float64 if self.accumulator == torch.float64 else tl.float32,
            "RMS": self.groups.rms,
            "AFFINE": self.weight is not None,
            "PER_ENTRY": self.groups.kind == "rows",
            "TANGENT": self.t_y is not None,
            "SOURCE": self.s_x is not None,
            "WEIGHTED": self.weighted,
        }

    @property
    def channels_per_group(self) -> int:
        over_channels = self.groups.kind == "channels"
        return self.x.shape[1] // self.groups.per_example(self.x) if over_channels else 1


def second(at: Point, xi: Tensor | None, q: Tensor, mask: Sequence[bool]) -> Three:
    """(t_y, s_x, s_w) as in `standardise_second`; `mask` says which are wanted."""
    groups, x = at.groups, at.x
    mean, rstd, weight = (u if u is None else u.contiguous() for u in at[2:])
    form = layout(groups, x)
    x, q = x.contiguous(memory_format=form), q.contiguous(memory_format=form)
    xi = None if xi is None else xi.contiguous(memory_format=form)
    t_y, s_x = (torch.empty_like(x) if want else None for want in mask[:2])
    call = _Call(groups, xi, q, x, mean, rstd, weight, t_y, s_x, mask[2])  # type: ignore[arg-type]
    with torch.cuda.device_of(x):
        s_w = _one_pass(call) if _are_short_rows(call) else _two_passes(call)
    if s_w is not None and weight is not None:
        s_w = s_w.view(-1, *weight.shape).sum(0).to(weight.dtype)
    return t_y, s_x, s_w


def _are_short_rows(call: _Call) -> bool:
    if call.groups.kind == "batch" or not call.x.is_contiguous():
        return False
    channels = call.channels_per_group
    return _power(channels) * _power(call.groups.size(call.x) // channels) <= LONGEST


def _power(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()


def _resident(x: Tensor) -> int:
    """How many looping programs fill the device."""
    if not x.is_cuda:  # Triton's interpreter
        return 3
    return RESIDENT * torch.cuda.get_device_properties(x.device).multi_processor_count


# One pass ----------------------------------------------------------------------------------------


def _one_pass(call: _Call) -> Tensor | None:
    """Each program keeps whole rows in registers; s_w as partial sums (programs or N, *weight)."""
    x, groups, per_entry = call.x, call.groups, call.groups.kind == "rows"
    channels = call.channels_per_group
    length = groups.size(x) // channels
    rows = x.numel() // (channels * length)
    row = _power(channels) * _power(length)
    at_once = max(1, min(TILE // row, _power(rows)))
    programs = triton.cdiv(rows, at_once)
    s_w = None
    if call.weighted and per_entry:
        programs = min(programs, max(1, _resident(x) * TILE // max(TILE, row)))
        s_w = x.new_empty((programs, length), dtype=call.accumulator)
    elif call.weighted:
        s_w = x.new_empty((rows, channels), dtype=call.accumulator)
    _rows_kernel[(programs,)](
        *call[1:9], s_w, rows, 1 if per_entry else groups.per_example(x), channels, length,
        ROWS=at_once, CHANNELS=_power(channels), LENGTH=_power(length),
        num_warps=max(1, min(32, at_once * row // 256)),
        **call.flags,
    )  # fmt: skip
    return s_w


@jit
def _tangent(q, x_hat, r, mean_q, c):
    """t = rP(q)."""
    return r * (q - mean_q - c * x_hat)


@jit
def _source(g, t, x_hat, r, mean_g, a, c, phi):
    """s_x = −r²(cP(g) + aP(q)) − rφx̂ with t = rP(q)."""
    return -r * (r * c * (g - mean_g - a * x_hat) + a * t + phi * x_hat)


@jit
def _rows_kernel(
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


class _Extents(NamedTuple):
    """x as (O, C, S), its strides, and the tile of channels × entries that a program holds."""

    examples: int
    channels: int
    entries: int
    example_stride: int
    channel_stride: int
    entry_stride: int
    tile_channels: int
    tile_entries: int

    @classmethod
    def of(cls, call: _Call) -> "_Extents":
        x = call.x
        if call.groups.kind == "rows":
            m = call.groups.size(x)
            return cls(x.numel() // m, 1, m, m, m, 1, 1, min(_power(m), TILE))
        examples, channels, entries = x.shape[0], x.shape[1], math.prod(x.shape[2:])
        if x.is_contiguous() and entries > 1:
            span = min(_power(entries), TILE)
            tile = (min(_power(channels), TILE // span), span)
            return cls(examples, channels, entries, channels * entries, entries, 1, *tile)
        if call.groups.kind == "batch":
            examples, entries = 1, examples * entries
        span = min(_power(channels), 64)
        tile = (span, min(_power(entries), TILE // span))
        return cls(examples, channels, entries, channels * entries, 1, channels, *tile)


def _two_passes(call: _Call) -> Tensor | None:
    """Sums, their combination to five numbers per group, then t_y and s_x entry by entry."""
    ext, groups, x = _Extents.of(call), call.groups, call.x
    channels_per_group = call.channels_per_group
    inner = ext.examples if groups.kind == "batch" else 1  # examples in a set
    sets, per_set = ext.examples // inner, ext.channels // channels_per_group
    blocks = triton.cdiv(ext.channels, ext.tile_channels)
    chunks = triton.cdiv(ext.entries, ext.tile_entries)
    parts = min(inner * chunks, triton.cdiv(_resident(x), sets * blocks))
    flags = call.flags
    tile = {"CHANNELS": ext.tile_channels, "ENTRIES": ext.tile_entries, "num_warps": 8}
    reads_xi = call.s_x is not None or call.weighted
    sums = x.new_empty((5 if reads_xi else 2, sets * ext.channels, parts), dtype=call.accumulator)
    shape = (*ext[:6], inner, per_set, channels_per_group)
    _sums_kernel[(sets * blocks * parts,)](
        *call[1:7], sums, sums[0].numel(), *shape, parts, **tile, **flags
    )
    values = x.new_empty((5, sets * per_set), dtype=call.accumulator)
    s_w = None
    if call.weighted and groups.kind != "rows":
        s_w = x.new_empty((sets, ext.channels), dtype=call.accumulator)
    _combine_kernel[(sets * per_set,)](
        sums, sums[0].numel(), call.rstd, call.weight, values, s_w,
        ext.channels, per_set, channels_per_group, parts, groups.size(x),
        CHANNELS=min(_power(channels_per_group), 16),
        PARTS=min(_power(parts), 1024 // min(_power(channels_per_group), 16)),
        **flags,
    )  # fmt: skip
    if call.t_y is None and call.s_x is None and s_w is not None:
        return s_w
    parts = ext.examples
    if call.weighted and groups.kind == "rows":
        parts = min(parts, triton.cdiv(_resident(x), chunks))
        s_w = x.new_empty((parts, ext.entries), dtype=call.accumulator)
    _apply_kernel[(blocks * chunks * parts,)](
        *call[1:9], s_w, values, sets * per_set, *shape, parts, **tile, **flags
    )
    return s_w


@jit
def _sums_kernel(
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
def _combine_kernel(
    sums_ptr, plane, rstd_ptr, w_ptr, values_ptr, s_w_ptr, channels, per_set, channels_per_group,
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
def _apply_kernel(
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
