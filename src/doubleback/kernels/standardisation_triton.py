"""Tangent and curvature of standardisation on CUDA, in fused kernels (formulas: standardisation).

| route      | for                                            | read and written per entry of x  |
| ---------- | ---------------------------------------------- | -------------------------------- |
| one pass   | groups that are contiguous rows of up to 8192  | x, q, ξ once; t_y, s_x: 5 units  |
| two passes | strided or longer groups                       | x, q, ξ twice; t_y, s_x: 8 units |

A unit is the size of one entry: 10 or 16 bytes in bfloat16. Where t_y or s_x is not wanted it is
one unit less, and one more where dx = rP(w⊙ξ) is wanted beside them; the tangent alone takes 3 or
5, and what it is to be added to one more. Partial sums go to small buffers and are added in
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
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..dtypes import accumulation
from .launch import Launch, jit, look, planned, power_of_two, resident, tl, triton

if TYPE_CHECKING:
    from .standardisation import Groups, Point, Second, Three

LONGEST = 8192  # entries of a row that is kept in registers: more of them spill
TILE = 2048  # entries that a program holds at a time, where it can choose
AT_ONCE = 4  # tiles that a program which sums asks memory for at the same time
RESIDENT = 12  # programs per multiprocessor that loop: whole rounds of the 2 or 3 that fit


# Kernels -----------------------------------------------------------------------------------------


@jit
def _tangent(q, x_hat, r, mean_q, c):
    """t = rP(q)."""
    return r * (q - mean_q - c * x_hat)


@jit
def _source(g, t, x_hat, r, mean_g, a, c, phi):
    """s_x = −r²(cP(g) + aP(q)) − rφx̂ with t = rP(q), and dx = rP(g)."""
    dx = r * (g - mean_g - a * x_hat)
    return -r * (c * dx + a * t + phi * x_hat), dx


@jit
def rows_kernel(
    xi_ptr, q_ptr, x_ptr, mean_ptr, rstd_ptr, w_ptr, t_y_ptr, s_x_ptr, dx_ptr, onto_ptr, s_w_ptr,
    rows, per_example, channels, length,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, LENGTH: tl.constexpr, ACC: tl.constexpr,
    RMS: tl.constexpr, AFFINE: tl.constexpr, PER_ENTRY: tl.constexpr, TANGENT: tl.constexpr,
    SOURCE: tl.constexpr, WEIGHTED: tl.constexpr, PULLED: tl.constexpr, ONTO: tl.constexpr,
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
            t_y = w * t
            if ONTO:
                t_y += tl.load(onto_ptr + at, mask=live, other=0).to(ACC)
            tl.store(t_y_ptr + at, t_y, mask=live)
        if SOURCE or WEIGHTED:
            xi = tl.load(xi_ptr + at, mask=live, other=0).to(ACC)
            if SOURCE:
                g = w * xi
                mean_g = tl.zeros((ROWS, 1), ACC)
                if not RMS:
                    mean_g = tl.sum(g, 1)[:, None] / m
                a = tl.sum((g - mean_g) * x_hat, 1)[:, None] / m
                phi = tl.sum(g * t, 1)[:, None] / m
                s_x, dx = _source(g, t, x_hat, r, mean_g, a, c, phi)
                tl.store(s_x_ptr + at, s_x, mask=live)
                if PULLED:
                    tl.store(dx_ptr + at, dx, mask=live)
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
    WEIGHTED: tl.constexpr, PULLED: tl.constexpr, ONTO: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Σq, Σq⊙x̂, Σξ, Σξ⊙x̂, Σξ⊙q over cells; with a weight per entry, w⊙ξ in place of ξ.

    A program asks for AT_ONCE tiles before it sums the first, since memory is slow to answer.
    """
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
    for first in range(part, inner * chunks, parts * AT_ONCE):
        for ahead in tl.static_range(AT_ONCE):
            item = first + ahead * parts
            example = (which * inner + item // chunks).to(tl.int64)
            start = (item % chunks) * ENTRIES
            live = known[:, None] & ((start + span < entries) & (item < inner * chunks))[None, :]
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
    WEIGHTED: tl.constexpr, PULLED: tl.constexpr, ONTO: tl.constexpr,
    TOTALS: tl.constexpr,
):  # fmt: skip
    """mean(q), c, mean(g), a, φ of one group, and s_w of its channels.

    With TOTALS, Σq⊙x̂ and Σq of each group go where s_w would.
    """
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
    if TOTALS:
        tl.store(s_w_ptr + group, tl.sum(q_x, 0))
        tl.store(s_w_ptr + groups + group, tl.sum(q_1, 0))
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
    xi_ptr, q_ptr, x_ptr, mean_ptr, rstd_ptr, w_ptr, t_y_ptr, s_x_ptr, dx_ptr, onto_ptr, s_w_ptr,
    values_ptr, groups, examples, channels, entries, example_stride, channel_stride, entry_stride,
    inner, per_set, channels_per_group, parts,
    CHANNELS: tl.constexpr, ENTRIES: tl.constexpr, ACC: tl.constexpr, RMS: tl.constexpr,
    AFFINE: tl.constexpr, PER_ENTRY: tl.constexpr, TANGENT: tl.constexpr, SOURCE: tl.constexpr,
    WEIGHTED: tl.constexpr, PULLED: tl.constexpr, ONTO: tl.constexpr,
):  # fmt: skip
    """t_y, s_x, dx from the five numbers of each group; Σ ξ⊙t where each entry has its weight."""
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
            t_y = w * t
            if ONTO:
                t_y += tl.load(onto_ptr + at, mask=live, other=0).to(ACC)
            tl.store(t_y_ptr + at, t_y, mask=live)
        if SOURCE or (WEIGHTED and PER_ENTRY):
            xi = tl.load(xi_ptr + at, mask=live, other=0).to(ACC)
            if SOURCE:
                mean_g = tl.load(value + 2 * groups, mask=known, other=0)[:, None]
                a = tl.load(value + 3 * groups, mask=known, other=0)[:, None]
                phi = tl.load(value + 4 * groups, mask=known, other=0)[:, None]
                s_x, dx = _source(w * xi, t, x_hat, r, mean_g, a, c, phi)
                tl.store(s_x_ptr + at, s_x, mask=live)
                if PULLED:
                    tl.store(dx_ptr + at, dx, mask=live)
            if WEIGHTED and PER_ENTRY:
                total += xi * t
    if WEIGHTED and PER_ENTRY:
        at_w = part.to(tl.int64) * entries + entry
        tl.store(s_w_ptr + at_w, tl.sum(total, 0), mask=entry < entries)


# Batch norm itself, channels-last: x is seen as (entries, channels) ------------------------------


@jit
def moments_kernel(
    x_ptr, moments_ptr, plane, entries, channels, parts,
    CHANNELS: tl.constexpr, ENTRIES: tl.constexpr, ACC: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Number, mean and sum of squared deviations of each part of each channel.

    Every place of the tile has its own running mean (Welford), and the places are put together at
    the end, so that a large mean beside a small deviation loses no digits.
    """
    part, block = tl.program_id(0) % parts, tl.program_id(0) // parts
    channel = block * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < channels
    span = tl.arange(0, ENTRIES)
    count = tl.zeros((1, ENTRIES), ACC)
    mean = tl.zeros((CHANNELS, ENTRIES), ACC)
    squares = tl.zeros((CHANNELS, ENTRIES), ACC)
    chunks = tl.cdiv(entries, ENTRIES)
    for first in range(part, chunks, parts * AT_ONCE):
        for ahead in tl.static_range(AT_ONCE):
            entry = (first + ahead * parts) * ENTRIES + span
            there = (entry < entries)[None, :]
            live = known[:, None] & there
            at = entry.to(tl.int64)[None, :] * channels + channel[:, None]
            x = tl.load(x_ptr + at, mask=live, other=0).to(ACC)
            count += there.to(ACC)
            off = tl.where(live, x - mean, 0)
            mean += off / tl.maximum(count, 1)
            squares += off * tl.where(live, x - mean, 0)
    number = tl.sum(count, 1)
    whole = tl.sum(count * mean, 1) / tl.maximum(number, 1)
    apart = mean - whole[:, None]
    squared = tl.sum(squares + count * apart * apart, 1)
    cell = channel.to(tl.int64) * parts + part
    tl.store(moments_ptr + cell, number + tl.zeros((CHANNELS,), ACC), mask=known)
    tl.store(moments_ptr + plane + cell, whole, mask=known)
    tl.store(moments_ptr + 2 * plane + cell, squared, mask=known)


@jit
def statistics_kernel(
    moments_ptr, old_mean_ptr, old_var_ptr, mean_ptr, rstd_ptr, new_mean_ptr, new_var_ptr,
    plane, channels, parts, momentum, momentum_rest, eps, eps_rest,
    CHANNELS: tl.constexpr, PARTS: tl.constexpr, ACC: tl.constexpr, RUNNING: tl.constexpr,
):  # fmt: skip
    """μ and r from the moments of all parts; running statistics moved towards them.

    Triton takes numbers in float32: what that leaves of momentum and ε comes beside them.
    """
    momentum = tl.cast(momentum, ACC) + tl.cast(momentum_rest, ACC)
    eps = tl.cast(eps, ACC) + tl.cast(eps_rest, ACC)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < channels
    base = moments_ptr + channel.to(tl.int64)[:, None] * parts
    number = tl.zeros((CHANNELS,), ACC)
    total = tl.zeros((CHANNELS,), ACC)
    for begin in range(0, parts, PARTS):
        part = begin + tl.arange(0, PARTS)[None, :]
        live = known[:, None] & (part < parts)
        n = tl.load(base + part, mask=live, other=0)
        number += tl.sum(n, 1)
        total += tl.sum(n * tl.load(base + plane + part, mask=live, other=0), 1)
    number = tl.maximum(number, 1)
    mean = total / number
    squares = tl.zeros((CHANNELS,), ACC)
    for begin in range(0, parts, PARTS):
        part = begin + tl.arange(0, PARTS)[None, :]
        live = known[:, None] & (part < parts)
        n = tl.load(base + part, mask=live, other=0)
        apart = tl.load(base + plane + part, mask=live, other=0) - mean[:, None]
        squares += tl.sum(tl.load(base + 2 * plane + part, mask=live, other=0), 1)
        squares += tl.sum(n * apart * apart, 1)
    tl.store(mean_ptr + channel, mean, mask=known)
    tl.store(rstd_ptr + channel, 1 / tl.sqrt(squares / number + eps), mask=known)
    if RUNNING:
        old = tl.load(old_mean_ptr + channel, mask=known, other=0).to(ACC)
        tl.store(new_mean_ptr + channel, old + momentum * (mean - old), mask=known)
        old = tl.load(old_var_ptr + channel, mask=known, other=0).to(ACC)
        unbiased = squares / tl.maximum(number - 1, 1)
        tl.store(new_var_ptr + channel, old + momentum * (unbiased - old), mask=known)


@jit
def normalise_kernel(
    x_ptr, mean_ptr, rstd_ptr, w_ptr, b_ptr, y_ptr, entries, channels,
    CHANNELS: tl.constexpr, ENTRIES: tl.constexpr, ACC: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """y = w⊙(x − μ)r + b."""
    chunks = tl.cdiv(entries, ENTRIES)
    channel = (tl.program_id(0) // chunks) * CHANNELS + tl.arange(0, CHANNELS)
    entry = (tl.program_id(0) % chunks) * ENTRIES + tl.arange(0, ENTRIES)
    known = channel < channels
    live = known[:, None] & (entry < entries)[None, :]
    at = entry.to(tl.int64)[None, :] * channels + channel[:, None]
    mean = tl.load(mean_ptr + channel, mask=known, other=0).to(ACC)[:, None]
    scale = tl.load(rstd_ptr + channel, mask=known, other=0).to(ACC)[:, None]
    if WEIGHT:
        scale *= tl.load(w_ptr + channel, mask=known, other=0).to(ACC)[:, None]
    y = (tl.load(x_ptr + at, mask=live, other=0).to(ACC) - mean) * scale
    if BIAS:
        y += tl.load(b_ptr + channel, mask=known, other=0).to(ACC)[:, None]
    tl.store(y_ptr + at, y, mask=live)


# Launching ---------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """Everything that calls with the same launches have in common."""

    groups: "Groups"
    shape: tuple[int, ...]
    contiguous: bool  # else channels-last
    dtype: torch.dtype
    device: torch.device
    affine: bool
    tangent: bool
    source: bool
    weighted: bool  # s_w is wanted
    pulled: bool = False  # dx is wanted beside s_x
    onto: bool = False  # t_y is added to what is there
    totals: bool = False  # Σq⊙x̂ and Σq are wanted, in the weight's dtype

    @property
    def accumulator(self) -> torch.dtype:
        return accumulation(self.dtype)

    @property
    def flags(self) -> dict[str, Any]:
        return {
            "ACC": tl.float64 if self.accumulator == torch.float64 else tl.float32,
            "RMS": self.groups.rms,
            "AFFINE": self.affine,
            "PER_ENTRY": self.groups.kind == "rows",
            "TANGENT": self.tangent,
            "SOURCE": self.source,
            "WEIGHTED": self.weighted,
            "PULLED": self.pulled,
            "ONTO": self.onto,
        }

    @property
    def channels_per_group(self) -> int:
        over_channels = self.groups.kind == "channels"
        return self.shape[1] // (self.groups.count or self.shape[1]) if over_channels else 1

    @property
    def group_size(self) -> int:
        groups, shape = self.groups, self.shape
        if groups.kind == "rows":
            return math.prod(groups.shape)
        examples = shape[0] if groups.kind == "batch" else 1
        return examples * self.channels_per_group * math.prod(shape[2:])


class _KernelTensors(NamedTuple):
    """The tensors of a call, in the order of the kernels' arguments."""

    xi: Tensor | None
    q: Tensor
    x: Tensor
    mean: Tensor | None
    rstd: Tensor
    weight: Tensor | None
    t_y: Tensor | None
    s_x: Tensor | None
    dx: Tensor | None
    onto: Tensor | None


class _StandardisationPlan(NamedTuple):
    """How calls that look alike are run: on which layout, whether it has to be made first, and
    what gives s_w and fills t_y and s_x."""

    form: torch.memory_format
    copies: bool
    run: "Callable[[_KernelTensors], Tensor | None]"

    @classmethod
    def of(
        cls, at: "Point", xi: Tensor | None, q: Tensor, onto: Tensor | None, wanted: Sequence[bool]
    ) -> "_StandardisationPlan":
        """wanted: t_y, s_x, s_w, dx, whether t_y is added to something, and whether totals are."""
        groups, x = at.groups, at.x
        if groups.kind == "channels":
            groups.per_example(x)  # says which channels do not divide
        form = groups.layout(x)
        images, others = (x, q, xi, onto), at[2:]
        copies = not all(t is None or t.is_contiguous(memory_format=form) for t in images)
        copies = copies or not all(t is None or t.is_contiguous() for t in others)
        laid = x.contiguous(memory_format=form)
        kind = _Kind(
            groups, tuple(x.shape), laid.is_contiguous(), x.dtype, x.device,
            at.weight is not None, *wanted,
        )  # fmt: skip
        return cls(form, copies, (_one_pass if _are_short_rows(kind) else _two_passes)(kind))


_plans: dict[Any, _StandardisationPlan] = {}


def second(at: "Point", xi: Tensor | None, q: Tensor, mask: Sequence[bool]) -> "Second":
    """(t_y, s_x, s_w, dx) as in `standardise_second`; `mask` says which are wanted."""
    t_y, s_x, dx, s_w = _launched(at, xi, q, None, (*mask, False, False))
    if s_w is not None and at.weight is not None:
        s_w = s_w[0] if s_w.shape[0] == 1 else s_w.sum(0)
        s_w = s_w.view(at.weight.shape).to(at.weight.dtype)
    return t_y, s_x, s_w, dx


def batch_backward(
    at: "Point", xi: Tensor, mask: Sequence[bool], onto: Tensor | None = None
) -> "Three":
    """(dx, dw, db) of a batch norm; `mask` says which are wanted, `onto` what dx is added to. Its
    weight is constant on each group, so that dx = rP(w⊙ξ) = w⊙rP(ξ) is the tangent along ξ."""
    wanted = (mask[0], False, False, False, onto is not None, mask[1] or mask[2])
    dx, _, _, totals = _launched(at, None, xi, onto, wanted)
    dw, db = (None, None) if totals is None else totals
    return dx, dw if mask[1] else None, db if mask[2] else None


class _Forward(NamedTuple):
    """The three launches of a batch norm, and the shape of what the first two share."""

    moments: Launch
    statistics: Launch
    normalise: Launch
    shape: tuple[int, int, int]
    accumulator: torch.dtype


def _two_parts(number: float) -> tuple[float, float]:
    """A number in float32, and the rest."""
    head = torch.tensor(number, dtype=torch.float32).item()
    return head, number - head


def _planned_forward(
    x: Tensor, w: Tensor | None, b: Tensor | None, running: bool, momentum: float, eps: float
) -> _Forward:
    channels = x.shape[1]
    entries = x.numel() // channels
    accumulator = accumulation(x.dtype)
    acc = {"ACC": tl.float64 if accumulator == torch.float64 else tl.float32}
    span = min(power_of_two(channels), 64)
    tile = {"CHANNELS": span, "ENTRIES": max(1, TILE // span), "num_warps": 4, **acc}
    blocks, chunks = triton.cdiv(channels, span), triton.cdiv(entries, tile["ENTRIES"])
    programs = resident(x.device, RESIDENT)
    parts = max(1, min(triton.cdiv(chunks, AT_ONCE), triton.cdiv(programs, blocks)))
    few = {"CHANNELS": 4, "PARTS": min(power_of_two(parts), 256), "RUNNING": running, **acc}
    return _Forward(
        Launch(
            moments_kernel, (blocks * parts,), (channels * parts, entries, channels, parts),
            AT_ONCE=AT_ONCE, **tile,
        ),
        Launch(
            statistics_kernel, (triton.cdiv(channels, 4),),
            (channels * parts, channels, parts, *_two_parts(momentum), *_two_parts(eps)), **few,
        ),
        Launch(
            normalise_kernel, (blocks * chunks,), (entries, channels), WEIGHT=w is not None,
            BIAS=b is not None, **tile,
        ),
        (3, channels, parts),
        accumulator,
    )  # fmt: skip


_forward_plans: dict[Any, _Forward] = {}


def batch_forward(
    x: Tensor,
    w: Tensor | None,
    b: Tensor | None,
    running: tuple[Tensor, Tensor] | None,
    momentum: float,
    eps: float,
) -> list[Tensor]:
    """y, μ, r and, where there are running statistics, the new ones, of an x that is channels-last,
    as y is."""
    w, b = (None if t is None else t.contiguous() for t in (w, b))
    old = (None, None) if running is None else tuple(t.contiguous() for t in running)
    key = (*map(look, (x, w, b, *old)), momentum, eps)
    plan = planned(
        _forward_plans,
        key,
        lambda: _planned_forward(x, w, b, running is not None, momentum, eps),
    )
    moments = x.new_empty(plan.shape, dtype=plan.accumulator)
    mean, rstd = (x.new_empty(x.shape[1], dtype=plan.accumulator) for _ in range(2))
    new = [None if t is None else torch.empty_like(t) for t in old]
    y = torch.empty_like(x)
    plan.moments(x, moments)
    plan.statistics(moments, *old, mean, rstd, *new)
    plan.normalise(x, mean, rstd, w, b, y)
    return [y, mean, rstd, *(t for t in new if t is not None)]


def _launched(
    at: "Point", xi: Tensor | None, q: Tensor, onto: Tensor | None, wanted: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """t_y, s_x, dx, and s_w's parts or the totals."""
    groups, x, mean, rstd, weight = at
    key = (groups, *wanted, *map(look, (xi, q, x, mean, rstd, weight, onto)))
    plan = planned(_plans, key, lambda: _StandardisationPlan.of(at, xi, q, onto, wanted))
    if plan.copies:
        images = (x, q, xi, onto)
        x, q, xi, onto = (t if t is None else t.contiguous(memory_format=plan.form) for t in images)  # type: ignore[misc]
        mean, rstd, weight = (t if t is None else t.contiguous() for t in (mean, rstd, weight))  # type: ignore[misc]
    t_y, s_x, dx = (
        torch.empty_like(x) if want else None for want in (wanted[0], wanted[1], wanted[3])
    )
    call = _KernelTensors(xi, q, x, mean, rstd, weight, t_y, s_x, dx, onto)
    return t_y, s_x, dx, plan.run(call)


def _are_short_rows(kind: _Kind) -> bool:
    if kind.groups.kind == "batch" or not kind.contiguous:
        return False
    channels = kind.channels_per_group
    return power_of_two(channels) * power_of_two(kind.group_size // channels) <= LONGEST


def _empty_sums(kind: _Kind, call: _KernelTensors, shape: tuple[int, int] | None) -> Tensor | None:
    """For the parts of s_w, of which a single one is s_w itself, or for the totals."""
    if shape is None:
        return None
    like = call.x if call.weight is None else call.weight
    whole = shape[0] == 1 or kind.totals
    return call.x.new_empty(shape, dtype=like.dtype if whole else kind.accumulator)


# One pass ----------------------------------------------------------------------------------------


class _RowPlan(NamedTuple):
    """How rows are dealt to programs."""

    programs: int
    numbers: tuple[int, int, int, int]  # rows, groups per example, channels, length
    sums: tuple[int, int] | None  # shape of s_w's parts
    constants: dict[str, Any]


def _rows(kind: _Kind) -> _RowPlan:
    per_entry = kind.groups.kind == "rows"
    channels = kind.channels_per_group
    length = kind.group_size // channels
    rows = math.prod(kind.shape) // (channels * length)
    row = power_of_two(channels) * power_of_two(length)
    at_once = max(1, min(TILE // row, power_of_two(rows)))
    programs = triton.cdiv(rows, at_once)
    per_example = 1 if per_entry else kind.shape[1] // channels
    sums = None
    if kind.weighted and per_entry:
        programs = min(programs, max(1, resident(kind.device, RESIDENT) * TILE // max(TILE, row)))
        sums = (programs, length)
    elif kind.weighted:
        sums = (rows // per_example, per_example * channels)
    warps = max(1, min(32, at_once * row // 256))
    tile = {"ROWS": at_once, "CHANNELS": power_of_two(channels), "LENGTH": power_of_two(length)}
    numbers = (rows, per_example, channels, length)
    return _RowPlan(programs, numbers, sums, {**tile, **kind.flags, "num_warps": warps})


def _one_pass(kind: _Kind) -> Callable[[_KernelTensors], Tensor | None]:
    """Each program keeps whole rows in registers; s_w as partial sums (programs or N, *weight)."""
    plan = _rows(kind)
    launch = Launch(rows_kernel, (plan.programs,), plan.numbers, **plan.constants)

    def run(call: _KernelTensors) -> Tensor | None:
        s_w = _empty_sums(kind, call, plan.sums)
        launch(*call, s_w)
        return s_w

    return run


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
    def of(cls, kind: _Kind) -> "_Extents":
        if kind.groups.kind == "rows":
            m = kind.group_size
            rows = math.prod(kind.shape) // m
            return cls(rows, 1, m, m, m, 1, 1, min(power_of_two(m), TILE))
        examples, channels, entries = *kind.shape[:2], math.prod(kind.shape[2:])
        if kind.contiguous and entries > 1:
            span = min(power_of_two(entries), TILE)
            tile = (min(power_of_two(channels), TILE // span), span)
            return cls(examples, channels, entries, channels * entries, entries, 1, *tile)
        if kind.groups.kind == "batch":
            examples, entries = 1, examples * entries
        span = min(power_of_two(channels), 64)
        tile = (span, min(power_of_two(entries), TILE // span))
        return cls(examples, channels, entries, channels * entries, 1, channels, *tile)


class _Passes(NamedTuple):
    """Grids, numbers and constants of the three launches, and the shapes of what they share."""

    shape: tuple[int, ...]
    sums: tuple[int, int, int]
    groups: int
    s_w: tuple[int, int] | None
    cells: tuple[int, int]  # sums kernel: programs, parts
    combination: tuple[tuple[int, ...], dict[str, Any]]
    entries: tuple[int, int]  # apply kernel: programs, parts
    constants: dict[str, Any]


def _passes(kind: _Kind) -> _Passes:
    ext, per_entry = _Extents.of(kind), kind.groups.kind == "rows"
    programs = resident(kind.device, RESIDENT)
    channels_per_group = kind.channels_per_group
    inner = ext.examples if kind.groups.kind == "batch" else 1  # examples in a set
    sets, per_set = ext.examples // inner, ext.channels // channels_per_group
    blocks = triton.cdiv(ext.channels, ext.tile_channels)
    chunks = triton.cdiv(ext.entries, ext.tile_entries)
    parts = min(triton.cdiv(inner * chunks, AT_ONCE), triton.cdiv(programs, sets * blocks))
    at_once = min(power_of_two(channels_per_group), 16)
    combination = (ext.channels, per_set, channels_per_group, parts, kind.group_size)
    tile = {"CHANNELS": at_once, "PARTS": min(power_of_two(parts), 1024 // at_once)}
    repeats, s_w = ext.examples, None
    if kind.weighted and per_entry:
        repeats = min(repeats, triton.cdiv(programs, chunks))
        s_w = (repeats, ext.entries)
    elif kind.weighted:
        s_w = (sets, ext.channels)
    elif kind.totals:
        s_w = (2, sets * per_set)
    return _Passes(
        shape=(*ext[:6], inner, per_set, channels_per_group),
        sums=(5 if kind.source or kind.weighted else 2, sets * ext.channels, parts),
        groups=sets * per_set,
        s_w=s_w,
        cells=(sets * blocks * parts, parts),
        combination=(combination, {**tile, **kind.flags, "TOTALS": kind.totals}),
        entries=(blocks * chunks * repeats, repeats),
        constants={
            "CHANNELS": ext.tile_channels, "ENTRIES": ext.tile_entries, "num_warps": 4,
            **kind.flags,
        },
    )  # fmt: skip


def _two_passes(kind: _Kind) -> Callable[[_KernelTensors], Tensor | None]:
    """Sums, their combination to five numbers per group, then t_y and s_x entry by entry."""
    plan = _passes(kind)
    plane = plan.sums[1] * plan.sums[2]
    programs, parts = plan.cells
    numbers = (plane, *plan.shape, parts)
    sum_up = Launch(sums_kernel, (programs,), numbers, AT_ONCE=AT_ONCE, **plan.constants)
    numbers, constants = plan.combination
    combine = Launch(combine_kernel, (plan.groups,), (plane, *numbers), **constants)
    apply = None
    if kind.tangent or kind.source or kind.groups.kind == "rows":
        programs, parts = plan.entries
        numbers = (plan.groups, *plan.shape, parts)
        apply = Launch(apply_kernel, (programs,), numbers, **plan.constants)

    def run(call: _KernelTensors) -> Tensor | None:
        empty = call.x.new_empty
        sums = empty(plan.sums, dtype=kind.accumulator)
        values = empty((5, plan.groups), dtype=kind.accumulator)
        s_w = _empty_sums(kind, call, plan.s_w)
        sum_up(*call[:6], sums)
        combine(sums, call.rstd, call.weight, values, s_w)
        if apply is not None:
            apply(*call, s_w, values)
        return s_w

    return run
