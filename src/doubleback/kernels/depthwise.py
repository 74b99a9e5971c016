"""Depthwise convolutions on CUDA, one filter per channel: K, Kᵀ and K□ in Triton, channels-last.

They do little arithmetic per byte, and PyTorch's and cuDNN's kernels stay far from what memory
allows. On an H200, in microseconds, PyTorch (channels-last) / here; the last column is the time in
which memory could move both images once (benchmarks/convolutions.py measures such tables; the K□
of 3×3 filters read x and y three times when this one was made, and reads them once now):

| batch, channels, size, filter, stride | K         | Kᵀ        | K□         | memory |
| ------------------------------------- | --------- | --------- | ---------- | ------ |
| bfloat16, 64, 96, 56², 7×7            | 190 / 142 | 331 / 148 | 125 / 192  | 18     |
| bfloat16, 64, 384, 14², 7×7           | 56 / 39   | 80 / 38   | 41 / 48    | 5      |
| bfloat16, 64, 144, 56², 5×5, 2        | 76 / 54   | 206 / 75  | 57 / 71    | 17     |
| bfloat16, 512, 64, 32², 3×3           | 152 / 64  | 107 / 64  | 88 / 101   | 32     |
| bfloat16, 512, 64, 32², 3×3, 2        | 56 / 29   | 105 / 36  | 52 / 38    | 20     |
| bfloat16, 512, 128, 16², 3×3          | 76 / 34   | 55 / 33   | 51 / 44    | 16     |
| float32, 64, 96, 56², 7×7             | 415 / 142 | 374 / 138 | 4506 / 192 | 37     |
| float32, 64, 384, 14², 7×7            | 111 / 43  | 95 / 40   | 1472 / 59  | 9      |
| float32, 512, 64, 32², 3×3            | 185 / 82  | 104 / 81  | 73 / 128   | 64     |
| float32, 512, 128, 16², 3×3           | 96 / 43   | 53 / 44   | 136 / 66   | 32     |

So all is computed here but the K□ of 16-bit filters beyond 3×3. Sums are taken in float32 and in a
fixed order, without atomics: equal input, equal bits. K□ gives a bias its gradient on the way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import launch, mode
from .depthwise_kernels import adjoint_kernel, apply_kernel, sum_kernel
from .groups import eager
from .launch import Launch, look, planned, power_of_two, resident, tl

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST = 7  # taps along an axis: K□ holds a row of them in registers,
FEW = 9  # or all, up to so many
WIDEST = 24  # inputs that a strip reads from a row
TILE = 512  # strips × channels that a program holds
RESIDENT = 12  # programs per multiprocessor, for sums
Pair = tuple[int, int]
Part = Literal["K", "Kᵀ", "K□"]


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
    ) -> Depthwise | None:  # fmt: skip
        """None where `part` of this convolution, or these tensors, are not for the kernels here."""
        if len(weight_shape) != 4 or weight_shape[1] != 1 or not weight_shape[0] == groups > 1:
            return None
        found = cls(*map(_pair, (x_shape[2:], weight_shape[2:], stride, padding, dilation)))
        reach = 3 * found.stride[1] + found.dilation[1] * (found.kernel[1] - 1)
        if max(found.kernel) > LARGEST or max(found.stride) > 2 or reach >= WIDEST:
            return None
        given = [t for t in tensors if t is not None]
        if not x_shape[0] or min(found.out) < 1 or not _known(given):
            return None
        half = given[0].dtype != torch.float32
        return None if part == "K□" and half and max(found.kernel) > 3 else found

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
        found = _adjoint(x, y, *self[1:], bias)
        return found[0], found[1] if bias else None


def _pair(values: Sequence[int]) -> Pair:
    first, second = values
    return first, second


def _known(tensors: Sequence[Tensor]) -> bool:
    """Whether the kernels here can be called with these tensors now."""
    if not launch.available() or not mode.on_cuda(*tensors):
        return False
    dtype = tensors[0].dtype
    if dtype not in DTYPES or any(t.dtype != dtype for t in tensors):
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return False  # PyTorch differentiates its own operators only
    if any(map(_channels_first, tensors)):
        return False  # two copies more, and a layout that the caller does not expect
    return mode.recording() or mode.fusing() or eager(*tensors)


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
    def of(cls, rows: int, columns: int, channels: int) -> _Tiles:
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


class _Sum(NamedTuple):
    """K□ in two launches: parts, and their sum."""

    collect: Launch
    add: Launch
    parts: int

    @classmethod
    def of(cls, x: Tensor, y: Tensor, kernel: Sequence[int], *geometry: Any, bias: bool) -> _Sum:
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
    plan = planned(_plans, key, lambda: _Sum.of(x, y, kernel, *geometry, bias=bias))
    channels, taps = x.shape[1], kernel[0] * kernel[1]
    parts = x.new_empty((plan.parts, taps + bias, channels), dtype=torch.float32)
    weight = x.new_empty((channels, 1, *kernel))
    total = x.new_empty(channels) if bias else None
    plan.collect(x, y, parts)
    plan.add(parts, weight, total)
    return [weight] if total is None else [weight, total]


# As operators ------------------------------------------------------------------------------------

mode.opaque(
    "depthwise(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, "
    "int[] dilation) -> Tensor",
    _launch_forward,
    lambda x, weight, bias, *geometry: _empty(x, _out(x, weight, geometry)),
)
mode.opaque(
    "depthwise_transpose(Tensor y, Tensor weight, int[] sizes, int[] stride, int[] padding, "
    "int[] dilation) -> Tensor",
    _launch_transpose,
    lambda y, weight, sizes, *geometry: _empty(y, sizes),
)
mode.opaque(
    "depthwise_adjoint(Tensor x, Tensor y, int[] kernel, int[] stride, int[] padding, "
    "int[] dilation, bool bias) -> Tensor[]",
    _launch_adjoint,
    lambda x, y, kernel, stride, padding, dilation, bias: [
        x.new_empty((x.shape[1], 1, *kernel)),
        *([x.new_empty(x.shape[1])] if bias else []),
    ],
)


_forward, _transpose, _adjoint = (
    mode.direct[op.default]
    for op in (
        torch.ops.doubleback.depthwise,
        torch.ops.doubleback.depthwise_transpose,
        torch.ops.doubleback.depthwise_adjoint,
    )
)


def _flops(images: Sequence[int], kernel: Sequence[int]) -> int:
    return 2 * math.prod(images) * math.prod(kernel)


@register_flop_formula(torch.ops.doubleback.depthwise)
def _forward_flops(x_shape, weight_shape, *_, out_shape: Any = None, **__) -> int:
    return _flops(out_shape, weight_shape[2:])


@register_flop_formula(torch.ops.doubleback.depthwise_transpose)
def _transpose_flops(y_shape, weight_shape, *_, **__) -> int:
    return _flops(y_shape, weight_shape[2:])


@register_flop_formula(torch.ops.doubleback.depthwise_adjoint)
def _adjoint_flops(x_shape, y_shape, kernel, *_, **__) -> int:
    return _flops(y_shape, kernel)
