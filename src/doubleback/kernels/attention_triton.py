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

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import mode
from .attention_fused import EFFICIENT
from .attention_kernels import (
    columns_kernel,
    first_columns_kernel,
    first_rows_kernel,
    rows_kernel,
)
from .launch import Launch, available, look, planned, triton

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


def better_first(backend: int, mask: Tensor | None, *tensors: Tensor) -> bool:
    """Whether the vjp is better computed here than by the kernel that computed the forward:
    PyTorch's efficient attention multiplies float32 in three TF32 products, allowed or not."""
    exact = tensors[0].dtype == torch.float32
    return backend == EFFICIENT and exact and supported(mask, *tensors)


def first(
    xi: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None,
    causal: bool, scale: float, want: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """(dq, dk, dv), None where `want` says no; shapes as for `second`."""
    call = torch.ops.doubleback.attention_first if _traced() else _launch_first
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
    call = torch.ops.doubleback.attention_second if _traced() else _launch
    return _placed(want, call(xi, tq, tk, tv, q, k, v, out, lse, mask, causal, scale, want))


def _traced() -> bool:
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def _empty(want: Sequence[bool], *like: Tensor) -> list[Tensor]:
    return [torch.empty_like(t) for t, w in zip(like, want, strict=True) if w]


def _placed(
    want: Sequence[bool], results: Sequence[Tensor], other: Tensor | None = None
) -> tuple[Any, ...]:
    """The results, each in the place of one that was wanted, with `other` in those between."""
    found = iter(results)
    return tuple(next(found) if w else other for w in want)


def _launch(xi, tq, tk, tv, q, k, v, out, lse, mask, causal, scale, want) -> list[Tensor]:
    given = (xi, tq, tk, tv, q, k, v, out)
    key = (*map(look, given), look(lse), look(mask), causal, scale, *want)
    plan = planned(_plans, key, lambda: _Plan.of(*given, lse, mask, causal, scale, want))
    if plan.copies:
        xi, tq, tk, tv, q, k, v, out = (_rowwise(t) for t in given)
        lse = lse.contiguous()
    results = _empty(want, out, q, k, v)
    t_out, sq, sk, sv = _placed(want, results, q)
    stats = torch.empty(plan.stats, dtype=torch.float32, device=q.device)
    mask = _readable(mask, q)
    tq, tk, tv, xi = (q if t is None else t for t in (tq, tk, tv, xi))
    for launch in plan.rows:
        launch(q, tq, xi, out, k, tk, v, tv, t_out, sq, lse, stats, mask)
    if plan.columns is not None:
        plan.columns(q, tq, xi, k, tk, v, tv, sk, sv, lse, stats, mask)
    return results


class _Plan(NamedTuple):
    """The launches of calls that look alike; copies: whether a tensor is laid out anew first."""

    copies: bool
    stats: tuple[int, ...]
    rows: list[Launch]
    columns: Launch | None

    @classmethod
    def of(cls, xi, tq, tk, tv, q, k, v, out, lse, mask, causal, scale, want) -> _Plan:
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
    def of_first(cls, xi, q, k, v, out, lse, mask, causal, scale, want) -> _Plan:
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


_plans: dict[Any, _Plan] = {}


def _launch_first(xi, q, k, v, out, lse, mask, causal, scale, want) -> list[Tensor]:
    given = (xi, q, k, v, out)
    key = ("first", *map(look, given), look(lse), look(mask), causal, scale, *want)
    plan = planned(_plans, key, lambda: _Plan.of_first(*given, lse, mask, causal, scale, want))
    if plan.copies:
        xi, q, k, v, out = (_rowwise(t) for t in given)
        lse = lse.contiguous()
    results = _empty(want, q, k, v)
    dq, dk, dv = _placed(want, results, q)
    means = torch.empty(plan.stats, dtype=torch.float32, device=q.device)
    mask = _readable(mask, q)
    for launch in plan.rows:
        launch(q, xi, out, k, v, dq, lse, means, mask)
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


mode.opaque(
    "attention_second(Tensor? xi, Tensor? tq, Tensor? tk, Tensor? tv, Tensor q, Tensor k, "
    "Tensor v, Tensor out, Tensor lse, Tensor? mask, bool causal, float scale, bool[] want) "
    "-> Tensor[]",
    _launch,
    _fake,
)
mode.opaque(
    "attention_first(Tensor xi, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor? mask, bool causal, float scale, bool[] want) -> Tensor[]",
    _launch_first,
    lambda xi, q, k, v, out, lse, mask, causal, scale, want: _empty(
        want, *(_rowwise(t) for t in (q, k, v))
    ),
)
