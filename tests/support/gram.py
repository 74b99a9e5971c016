"""Gram matrices written out entry by entry: what the spaces are compared with."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor


def basis(size: int, h: float, boundary: str) -> tuple[Tensor, Tensor]:
    """(orthonormal columns, their frequencies) of `size` cells of width h."""
    length, columns, omegas = size * h, [], []
    x = [(j + 0.5) * h for j in range(size)]
    if boundary == "neumann":
        waves = [(math.cos, math.pi * k / length) for k in range(size)]
    elif boundary == "dirichlet":
        waves = [(math.sin, math.pi * k / length) for k in range(1, size + 1)]
    else:
        waves = [(math.cos, 0.0)]
        for k in range(1, (size - 1) // 2 + 1):
            waves += [(math.cos, 2 * math.pi * k / length), (math.sin, 2 * math.pi * k / length)]
        if size % 2 == 0:  # the wave that changes sign from cell to cell
            waves.append((math.sin, math.pi / h))
    for wave, omega in waves:
        column = torch.tensor([wave(omega * t) for t in x], dtype=torch.float64)
        columns.append(column / column.norm())
        omegas.append(omega)
    return torch.stack(columns, 1), torch.tensor(omegas, dtype=torch.float64)


def sobolev(order: float, sizes, spacing, boundaries) -> tuple[Tensor, Tensor]:
    """(G, G⁻¹) on a flattened grid."""
    parts = [basis(n, h, b) for n, h, b in zip(sizes, spacing, boundaries, strict=True)]
    columns = torch.ones(1, 1, dtype=torch.float64)
    for matrix, _ in parts:
        columns = torch.kron(columns, matrix)
    squares = torch.tensor(
        [1 + sum(float(w) ** 2 for w in ws) for ws in itertools.product(*(w for _, w in parts))],
        dtype=torch.float64,
    )
    cell = math.prod(spacing)
    gram = cell * columns @ torch.diag(squares**order) @ columns.T
    inverse = columns @ torch.diag(squares**-order) @ columns.T / cell
    return gram, inverse


def grid(sizes, spacing, rule: str) -> tuple[Tensor, Tensor]:
    weights = []
    for place in itertools.product(*(range(n) for n in sizes)):
        weight = 1.0
        for i, n, h in zip(place, sizes, spacing, strict=True):
            weight *= h / 2 if rule == "trapezoid" and i in (0, n - 1) else h
        weights.append(weight)
    diagonal = torch.tensor(weights, dtype=torch.float64)
    return torch.diag(diagonal), torch.diag(1 / diagonal)


def apply(matrix: Tensor, u: Tensor, axes: int) -> Tensor:
    """The matrix on the last `axes` axes of u, flattened."""
    flat = u.reshape(*u.shape[: u.dim() - axes], -1)
    return (flat @ matrix.T).reshape(u.shape)
