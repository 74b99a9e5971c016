"""Bilinear operators K with their two adjoints, Kᵀ and K□ (theory §1).

    ⟨K(θ, x), y⟩ = ⟨x, Kᵀ(θ, y)⟩ = ⟨θ, K□(x, y)⟩

Three functions serve every order of differentiation: the weight-adjoint of Kᵀ is K□ and the
transpose of K□ in x is Kᵀ (adjoint commutativity). The engine's rules call these operators.
"""

from .base import (
    AveragePool,
    Between,
    Composition,
    InvertibleDownsampling,
    InvertibleUpsampling,
    Multilinear,
    Operator,
    Sum,
    placeholder,
)

# for the rules, not for users
from .base import einsum_adjoint as einsum_adjoint
from .base import einsum_parts as einsum_parts
from .base import is_plain as is_plain
from .products import Convolution, Dense, LocallyConnected, LocallyConnected1d, LocallyConnected2d

__all__ = [
    "AveragePool",
    "Between",
    "Composition",
    "Convolution",
    "Dense",
    "InvertibleDownsampling",
    "InvertibleUpsampling",
    "LocallyConnected",
    "LocallyConnected1d",
    "LocallyConnected2d",
    "Multilinear",
    "Operator",
    "Sum",
    "placeholder",
]
