"""Every root of many polynomials at once: in closed form for lines, isolated by Descartes' rule of
signs in the Bernstein basis and then bisected for higher degrees.

    p(a + (b − a)u) = Σ_j β_j C(D, j) u^j (1 − u)^{D−j}

The number of roots in (a, b) is at most the number of sign changes in β₀ … β_D, and equal to it
when that is 0 or 1. An interval with more is cut until each part has 0 or 1: no root is missed,
up to the rounding of β itself. Roots of even multiplicity change no sign and are not reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import torch
from torch import Tensor

CUT = 0.4857142857142857  # off the middle: symmetric polynomials have roots there
NARROW = 1e-14  # intervals of the normalised coordinate are not cut below this width


def horner(coefficients: Sequence[Tensor], s: Tensor) -> Tensor:
    """Σ_k c_k s^k."""
    total = coefficients[-1]
    for c in reversed(coefficients[:-1]):
        total = total * s + c
    return total


def find_roots(coefficients: Sequence[Tensor], lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
    """Sign changes inside (lo, hi) of the polynomials Σ_k c_k s^k.

    coefficients: D+1 tensors of one shape S; lo, hi: broadcast to S. Returns flat indices into S
    and the roots, in no order; a polynomial may appear several times.

    >>> find_roots([torch.tensor([-1.0, 1.0]), torch.tensor([2.0, 0.0])], *torch.tensor([0.0, 1.0]))
    (tensor([0]), tensor([0.5000]))
    """
    shape = coefficients[0].shape
    lo, hi = lo.expand(shape), hi.expand(shape)
    if len(coefficients) == 1:
        return lo.new_empty(0, dtype=torch.long), lo.new_empty(0)
    if len(coefficients) == 2:
        left, right = (horner(coefficients, end) for end in (lo, hi))
        places = ((left < 0) & (right > 0) | (left > 0) & (right < 0)).nonzero(as_tuple=True)
        c0, c1 = (c[places] for c in coefficients)
        return _flat(places, shape), torch.clamp(-c0 / c1, lo[places], hi[places])
    middle, half = (lo + hi) / 2, (hi - lo) / 2
    local = _shifted(coefficients, middle, half)
    spread = sum(c.abs() for c in local[1:])
    index = (local[0].abs() <= spread).flatten().nonzero().squeeze(1)  # |p(mid)| > spread: none
    picked = [c.flatten()[index] for c in coefficients]
    a, b = lo.flatten()[index], hi.flatten()[index]
    return _isolate(_bernstein(picked, a, b), a, b, index)


def _flat(places: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    index = torch.zeros_like(places[0])
    for place, size in zip(places, shape, strict=True):
        index = index * size + place
    return index


def _shifted(coefficients: Sequence[Tensor], at: Tensor, scale: Tensor) -> list[Tensor]:
    """Coefficients in u of p(at + scale·u), by repeated synthetic division."""
    shifted = list(coefficients)
    n = len(shifted)
    for start in range(n - 1):
        for k in range(n - 2, start - 1, -1):
            shifted[k] = shifted[k] + at * shifted[k + 1]
    return [c * scale**k for k, c in enumerate(shifted)]


def _bernstein(coefficients: Sequence[Tensor], a: Tensor, b: Tensor) -> Tensor:
    """β_j = Σ_{k≤j} C(j,k)/C(D,k) q_k with q the coefficients on [a, b]: (N, D+1)."""
    q = _shifted(coefficients, a, b - a)
    degree = len(q) - 1
    columns = [
        torch.stack([comb(j, k) / comb(degree, k) * q[k] for k in range(j + 1)]).sum(0)
        for j in range(degree + 1)
    ]
    return torch.stack(columns, 1)


def _variations(beta: Tensor) -> Tensor:
    """Sign changes along each row, zeros left out."""
    sign = torch.sign(beta)
    last, count = sign[:, 0], torch.zeros_like(sign[:, 0])
    for column in sign.unbind(1)[1:]:
        count = count + (column * last < 0)
        last = torch.where(column != 0, column, last)
    return count


def _cut(beta: Tensor) -> tuple[Tensor, Tensor]:
    """de Casteljau: the same polynomials on the two parts of the interval."""
    left, right, rows = [], [], beta
    while rows.shape[1] > 0:
        left.append(rows[:, 0])
        right.append(rows[:, -1])
        rows = (1 - CUT) * rows[:, :-1] + CUT * rows[:, 1:]
    return torch.stack(left, 1), torch.stack(right[::-1], 1)


def _isolate(beta: Tensor, a: Tensor, b: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    found_index, found = [], []
    while len(index):
        changes = _variations(beta)
        narrow = b - a < NARROW
        single = (changes == 1) | (narrow & (beta[:, 0] * beta[:, -1] < 0))
        found_index.append(index[single])
        found.append(_bisect(beta[single], a[single], b[single]))
        more = (changes > 1) & ~narrow
        beta, a, b, index = beta[more], a[more], b[more], index[more]
        left, right = _cut(beta)
        c = a + CUT * (b - a)
        hit = left[:, -1] == 0  # the cut itself is a root
        found_index.append(index[hit])
        found.append(c[hit])
        beta = torch.cat([left, right])
        a, b, index = torch.cat([a, c]), torch.cat([c, b]), torch.cat([index, index])
    if not found:
        return index, a
    return torch.cat(found_index), torch.cat(found)


def _bisect(beta: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The one root of each, halving the bracket until it has no inner number left."""
    degree = beta.shape[1] - 1
    binomial = beta.new_tensor([comb(degree, j) for j in range(degree + 1)])
    powers = torch.arange(degree + 1)

    def value(u: Tensor) -> Tensor:
        u = u[:, None]
        return (beta * binomial * u**powers * (1 - u) ** (degree - powers)).sum(1)

    sign = torch.sign(beta)
    first = torch.zeros(len(beta), dtype=beta.dtype)
    for column in sign.unbind(1):  # the sign to the left of the root: the first that is not zero
        first = torch.where(first == 0, column, first)
    low, high = torch.zeros_like(a), torch.ones_like(a)
    for _ in range(60):
        middle = (low + high) / 2
        left = torch.sign(value(middle)) == first
        low, high = torch.where(left, middle, low), torch.where(left, high, middle)
    return a + (b - a) * (low + high) / 2
