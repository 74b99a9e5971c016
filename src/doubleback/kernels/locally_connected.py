"""Locally connected products in two dimensions: K, Kᵀ and K□ as operators of the library
`doubleback`, each differentiable by the other two (adjoint commutativity).

x: (B, C, H, W), θ: (H′, W′, O, C, k, l), y: (B, O, H′, W′).

For every place p, y_p = θ_p x_p with θ_p: (O, Ckl) and the patch x_p: (Ckl, B), so that examples
lie side by side in memory and a patch is copied in long runs. Rows of places are taken in chunks:
the patches of one chunk exist at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..dtypes import accumulation
from .launch import library

PARTS = 4  # chunks that the patches are taken in …
LEAST = 2**22  # … unless all of them are smaller than so many bytes

Ints = Sequence[int]


def _chunks(rows: int, bytes_per_row: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows of places."""
    budget = max(rows * bytes_per_row / PARTS, LEAST)
    step = max(1, int(budget // max(bytes_per_row, 1)))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _places_first(y: Tensor, a: int, b: int) -> Tensor:
    """Rows a … b of (B, O, H′, W′) as (places, O, B)."""
    return y[:, :, a:b].permute(2, 3, 1, 0).flatten(0, 1)


def _windows(x: Tensor, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    """Every patch as a view: (H′, W′, C, k, l, B)."""
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = kernel, stride, padding, dilation
    height, width = x.shape[2:]
    new = x.new_zeros if ph or pw else x.new_empty
    padded = new(x.shape[1], height + 2 * ph, width + 2 * pw, x.shape[0])  # (C, H, W, B)
    padded[:, ph : ph + height, pw : pw + width].copy_(x.permute(1, 2, 3, 0))
    view = padded.unfold(1, dh * (kh - 1) + 1, sh)[..., ::dh]
    view = view.unfold(2, dw * (kw - 1) + 1, sw)[..., ::dw]  # (C, H′, W′, B, k, l)
    return view.permute(1, 2, 0, 4, 5, 3)


def _row_bytes(windows: Tensor) -> int:
    return windows[0].numel() * windows.element_size() if windows.shape[0] else 0


def _forward(x: Tensor, weight: Tensor, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    """y_p = θ_p x_p."""
    rows, columns, out, _, *kernel = weight.shape
    windows = _windows(x, kernel, stride, padding, dilation)
    filters = weight.reshape(rows, columns, out, -1)
    y = x.new_empty(x.shape[0], out, rows, columns)
    for a, b in _chunks(rows, _row_bytes(windows)):
        patches = windows[a:b].reshape((b - a) * columns, -1, x.shape[0])
        part = torch.bmm(filters[a:b].flatten(0, 1), patches)
        y[:, :, a:b] = part.reshape(b - a, columns, out, -1).permute(3, 2, 0, 1)
    return y


def _transpose(
    weight: Tensor, y: Tensor, sizes: Ints, stride: Ints, padding: Ints, dilation: Ints
) -> Tensor:
    """x = Σ_p of θ_pᵀ y_p, put back in its place."""
    rows, columns, out, channels, *kernel = weight.shape
    batch = y.shape[0]
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = kernel, stride, padding, dilation
    filters = weight.reshape(rows, columns, out, -1)
    shape = channels, sizes[0] + 2 * ph, sizes[1] + 2 * pw, batch
    x = y.new_zeros(shape, dtype=accumulation(y.dtype))
    row_bytes = columns * filters.shape[-1] * batch * y.element_size()
    for a, b in _chunks(rows, row_bytes):
        patches = torch.bmm(filters[a:b].flatten(0, 1).transpose(1, 2), _places_first(y, a, b))
        patches = patches.reshape(b - a, columns, channels, kh, kw, batch)
        for i in range(kh):
            for j in range(kw):
                top, left = a * sh + i * dh, j * dw
                place = x[:, top : top + (b - a - 1) * sh + 1 : sh]
                place = place[:, :, left : left + (columns - 1) * sw + 1 : sw]
                place += patches[:, :, :, i, j].permute(2, 0, 1, 3)
    inside = x[:, ph : ph + sizes[0], pw : pw + sizes[1]].permute(3, 0, 1, 2)
    return y.new_empty(inside.shape).copy_(inside)


def _weight_adjoint(
    x: Tensor, y: Tensor, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints
) -> Tensor:
    """θ_p = y_p x_pᵀ."""
    windows = _windows(x, kernel, stride, padding, dilation)
    rows, columns, channels = windows.shape[:3]
    weight = x.new_empty(rows, columns, y.shape[1], channels, *kernel)
    for a, b in _chunks(rows, _row_bytes(windows)):
        patches = windows[a:b].reshape((b - a) * columns, -1, x.shape[0])
        torch.bmm(
            _places_first(y, a, b),
            patches.transpose(1, 2),
            out=weight[a:b].view((b - a) * columns, y.shape[1], -1),
        )
    return weight


# ------------------------------------------------------------------------------- as operators

_GEOMETRY = "int[] stride, int[] padding, int[] dilation"


def _define(schema: str, run: Any, fake: Any, backward: Any, setup: Any) -> Any:
    name = schema.partition("(")[0]
    library.define(schema)
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"doubleback::{name}", fake, lib=library)
    torch.library.register_autograd(
        f"doubleback::{name}", backward, setup_context=setup, lib=library
    )
    return getattr(torch.ops.doubleback, name)


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.rest = inputs[2:]


def _backward_of_forward(ctx: Any, y: Tensor) -> tuple:
    x, weight = ctx.saved_tensors
    want_x, want_weight = ctx.needs_input_grad[:2]
    return (
        local_transpose(weight, y, list(x.shape[2:]), *ctx.rest) if want_x else None,
        local_weight_adjoint(x, y, list(weight.shape[4:]), *ctx.rest) if want_weight else None,
        None, None, None,
    )  # fmt: skip


def _backward_of_transpose(ctx: Any, x: Tensor) -> tuple:
    weight, y = ctx.saved_tensors
    want_weight, want_y = ctx.needs_input_grad[:2]
    geometry = ctx.rest[1:]
    return (
        local_weight_adjoint(x, y, list(weight.shape[4:]), *geometry) if want_weight else None,
        local_product(x, weight, *geometry) if want_y else None,
        None, None, None, None,
    )  # fmt: skip


def _backward_of_weight_adjoint(ctx: Any, weight: Tensor) -> tuple:
    x, y = ctx.saved_tensors
    want_x, want_y = ctx.needs_input_grad[:2]
    geometry = ctx.rest[1:]
    return (
        local_transpose(weight, y, list(x.shape[2:]), *geometry) if want_x else None,
        local_product(x, weight, *geometry) if want_y else None,
        None, None, None, None,
    )  # fmt: skip


def _fake_forward(x, weight, stride, padding, dilation):
    return x.new_empty(x.shape[0], weight.shape[2], *weight.shape[:2])


def _fake_transpose(weight, y, sizes, stride, padding, dilation):
    return y.new_empty(y.shape[0], weight.shape[3], *sizes)


def _fake_weight_adjoint(x, y, kernel, stride, padding, dilation):
    return x.new_empty(*y.shape[2:], y.shape[1], x.shape[1], *kernel)


local_product = _define(
    f"locally_connected(Tensor x, Tensor weight, {_GEOMETRY}) -> Tensor",
    _forward, _fake_forward, _backward_of_forward, _save,
)  # fmt: skip
local_transpose = _define(
    f"locally_connected_transpose(Tensor weight, Tensor y, int[] sizes, {_GEOMETRY}) -> Tensor",
    _transpose, _fake_transpose, _backward_of_transpose, _save,
)  # fmt: skip
local_weight_adjoint = _define(
    f"locally_connected_weight_adjoint(Tensor x, Tensor y, int[] kernel, {_GEOMETRY}) -> Tensor",
    _weight_adjoint, _fake_weight_adjoint, _backward_of_weight_adjoint, _save,
)  # fmt: skip


@register_flop_formula([local_product, local_transpose, local_weight_adjoint])
def _flops(first: Any, second: Any, *rest: Any, out_shape: Any = None, **named: Any) -> int:
    """One multiplication and one addition per example and entry of θ, whichever the result."""
    shapes = (first, second, out_shape)
    (weight,) = (shape for shape in shapes if len(shape) == 6)
    batch = next(shape for shape in shapes if len(shape) == 4)[0]
    return 2 * batch * math.prod(weight)
