"""Spaces of inputs, outputs and parameters: inner products, norms, Riesz maps (theory §7).

A penalty measures the derivative J*v, a Euclidean gradient g, in the space X of inputs: with
⟨u, v⟩_X = uᵀGv the representer is G⁻¹g and its squared norm gᵀG⁻¹g.
"""

from .base import (
    Euclidean,
    Product,
    Space,
    Weighted,
    dual_square,
    parameter_spaces,
    per_example,
    safe_sqrt,
)
from .function_spaces import Grid, Lp, Sobolev

__all__ = [
    "Euclidean",
    "Grid",
    "Lp",
    "Product",
    "Sobolev",
    "Space",
    "Weighted",
    "dual_square",
    "parameter_spaces",
    "per_example",
    "safe_sqrt",
]
