"""Cases of attention, and the oracle: autograd on softmax(s·QKᵀ + mask) V written out plainly."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Relative error in norm against float64. bfloat16 keeps 8 bits, float16 keeps 11; results of these
# dtypes are rounded once more, and P, U, B, C are products of rounded inputs.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 2e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 3e-2,
}


@dataclass(frozen=True)
class Case:
    q: tuple[int, ...]
    k: tuple[int, ...]
    width: int | None = None  # of v; None: as k
    mask: str | None = None
    shape: tuple[int, ...] = ()  # of the mask
    causal: bool = False
    scale: float | None = None
    gqa: bool = False
    v: tuple[int, ...] | None = None


CASES = {
    "plain": Case((2, 3, 7, 8), (2, 3, 7, 8)),
    "cross": Case((2, 3, 5, 8), (2, 3, 11, 8)),
    "odd head": Case((2, 3, 7, 5), (2, 3, 9, 5)),
    "wide value": Case((2, 3, 7, 4), (2, 3, 9, 4), width=6),
    "scale": Case((2, 3, 7, 8), (2, 3, 9, 8), scale=0.3),
    "negative scale": Case((2, 3, 7, 8), (2, 3, 9, 8), scale=-0.7),
    "causal": Case((2, 3, 9, 8), (2, 3, 9, 8), causal=True),
    "causal tall": Case((2, 3, 11, 8), (2, 3, 6, 8), causal=True),
    "causal wide": Case((2, 3, 6, 8), (2, 3, 11, 8), causal=True),
    "float mask": Case((2, 3, 7, 8), (2, 3, 9, 8), mask="float", shape=(7, 9)),
    "float mask of heads": Case((2, 3, 7, 8), (2, 3, 9, 8), mask="float", shape=(1, 3, 7, 9)),
    "float mask of examples": Case((2, 3, 7, 8), (2, 3, 9, 8), mask="float", shape=(2, 1, 7, 9)),
    "bool mask": Case((2, 3, 7, 8), (2, 3, 9, 8), mask="bool", shape=(7, 9)),
    "padding mask": Case((2, 3, 7, 8), (2, 3, 9, 8), mask="bool", shape=(2, 1, 1, 9)),
    "full mask": Case((2, 3, 7, 8), (2, 3, 9, 8), mask="bool", shape=(2, 3, 7, 9)),
    "mask of rows": Case((2, 3, 7, 8), (2, 3, 9, 8), mask="bool", shape=(3, 7, 1)),
    "dead rows": Case((2, 3, 7, 8), (2, 3, 9, 8), mask="dead", shape=(7, 9)),
    "dead rows, float": Case((2, 3, 7, 8), (2, 3, 9, 8), mask="dead float", shape=(2, 3, 7, 9)),
    "mask and causal": Case((2, 3, 9, 8), (2, 3, 9, 8), mask="bool", shape=(9, 9), causal=True),
    "gqa": Case((2, 6, 7, 8), (2, 2, 9, 8), gqa=True),
    "gqa causal": Case((2, 4, 7, 8), (2, 2, 7, 8), gqa=True, causal=True),
    "gqa mask": Case((2, 6, 7, 8), (2, 2, 9, 8), gqa=True, mask="float", shape=(2, 6, 7, 9)),
    "gqa wide value": Case((2, 6, 7, 4), (2, 3, 9, 4), width=6, gqa=True, causal=True),
    "one key head": Case((2, 4, 7, 8), (2, 1, 9, 8)),
    "spread batch": Case((2, 4, 7, 8), (1, 4, 9, 8)),
    "spread query": Case((1, 1, 7, 8), (2, 4, 9, 8)),
    "spread value": Case((2, 4, 7, 8), (2, 4, 9, 8), v=(4, 9, 8)),
    "2-d": Case((7, 8), (9, 8)),
    "3-d": Case((3, 7, 8), (3, 9, 8), mask="float", shape=(3, 7, 9)),
    "5-d": Case((2, 2, 3, 7, 8), (2, 2, 3, 9, 8), mask="bool", shape=(2, 1, 1, 7, 9)),
    "5-d gqa causal": Case((2, 2, 4, 7, 8), (2, 2, 2, 7, 8), gqa=True, causal=True),
    "one row": Case((2, 3, 1, 8), (2, 3, 9, 8)),
    "one column": Case((2, 3, 7, 8), (2, 3, 1, 8)),
}


BLOCKS = {"default": None, "rows": 12, "heads": 200}


def data(case: Case, dtype=torch.float64, seed=0):
    """(q, k, v), (tq, tk, tv), ξ and the layout (mask, is_causal, scale, enable_gqa)."""
    g = torch.Generator().manual_seed(seed)

    def normal(shape):
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    shapes = case.q, case.k, case.v or (*case.k[:-1], case.width or case.k[-1])
    primals, tangents = ([normal(s) for s in shapes] for _ in range(2))
    mask = None
    if case.mask is not None and "float" in case.mask:
        mask = normal(case.shape)
    if case.mask is not None and case.mask != "float":
        keep = torch.rand(case.shape, generator=g) < 0.7
        keep[..., 0] = True
        if "dead" in case.mask:
            keep[..., 2, :] = False
            keep[..., -1, :] = False
        mask = keep if mask is None else mask.masked_fill(~keep, -math.inf)
    layout = (mask, case.causal, case.scale, case.gqa)
    with torch.no_grad():
        xi = normal(plain(*(t.double() for t in primals), *layout).shape)
    return primals, tangents, xi, layout


def plain(q, k, v, mask, causal, scale, gqa, z=1.0):
    if gqa:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).tril() == 0, -math.inf)
    if mask is not None:
        float_mask = mask.dtype != torch.bool
        scores = scores + mask if float_mask else scores.masked_fill(~mask, -math.inf)
    dead = (scores == -math.inf).all(-1, keepdim=True)
    return (scores.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0) * z) @ v


def oracle(primals, tangents, xi, layout, z=1.0):
    """out, (dq, dk, dv), t_out, (sq, sk, sv), in float64 by reverse over reverse."""
    mask = layout[0]
    layout = (mask.double() if mask is not None and mask.is_floating_point() else mask, *layout[1:])
    leaves = [t.detach().double().requires_grad_() for t in (*primals, xi)]
    out = plain(*leaves[:3], *layout, z)
    grads = torch.autograd.grad(out, leaves[:3], leaves[3], create_graph=True)
    pairs = [(g, t.double()) for g, t in zip(grads, tangents, strict=True) if t is not None]
    outputs, seeds = zip(*pairs, strict=True)
    second = torch.autograd.grad(outputs, leaves, seeds, materialize_grads=True)
    return out.detach(), [g.detach() for g in grads], second[3], second[:3]


def close(found, expected, dtype=torch.float64, factor=1.0, terms=1.0):
    """terms: the size of what cancels where the expected result is zero; of one column, P is
    constant, and what is found of dq is the rounding of G − D times K."""
    assert found.shape == expected.shape
    assert found.dtype == dtype
    error = (found.double() - expected).norm()
    scale = expected.norm() if expected.norm() > 1e-12 else terms
    assert error <= factor * TOLERANCE[dtype] * scale, f"relative error {error / scale:.1e}"


def all_close(found, expected, dtype=torch.float64):
    for f, e in zip(found, expected, strict=True):
        close(f, e, dtype)


class Largest(TorchDispatchMode):
    """The number of entries of the largest tensor that any operator returns."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [t.untyped_storage().nbytes() // t.itemsize for t in tree_leaves(result)]
        self.entries = max(self.entries, *sizes)
        return result


LARGE = {
    "several tiles": Case((1, 2, 150, 20), (1, 2, 131, 20), width=24),
    "several causal tiles": Case((1, 2, 150, 16), (1, 2, 131, 16), causal=True),
    "several causal tiles of a group": Case((1, 4, 70, 16), (1, 2, 150, 16), causal=True, gqa=True),
    "several masked tiles": Case((2, 2, 70, 16), (2, 2, 90, 16), mask="dead", shape=(2, 1, 70, 90)),
    "wide heads": Case((1, 2, 70, 100), (1, 2, 70, 100), causal=True),
    "vision": Case((2, 3, 197, 64), (2, 3, 197, 64)),
}
