"""Bilinear operators K with their two adjoints, Kᵀ and K□ (theory §1).

    ⟨K(θ, x), y⟩ = ⟨x, Kᵀ(θ, y)⟩ = ⟨θ, K□(x, y)⟩

Three functions serve every order of differentiation: the weight-adjoint of Kᵀ is K□ and the
transpose of K□ in x is Kᵀ (adjoint commutativity). The engine's rules call these operators.
"""

from .base import Between, Composition, Operator, Sum, placeholder
from .linear import AveragePool, InvertibleDownsampling, InvertibleUpsampling
from .multilinear import Multilinear
from .products import Convolution, Dense, LocallyConnected

__all__ = [
    "AveragePool",
    "Between",
    "Composition",
    "Convolution",
    "Dense",
    "InvertibleDownsampling",
    "InvertibleUpsampling",
    "LocallyConnected",
    "Multilinear",
    "Operator",
    "Sum",
    "placeholder",
]
