"""Bilinear operators K with their two adjoints, Kᵀ and K□ (theory §1).

    ⟨K(θ, x), y⟩ = ⟨x, Kᵀ(θ, y)⟩ = ⟨θ, K□(x, y)⟩

Three functions serve every order of differentiation: the weight-adjoint of Kᵀ is K□ and the
transpose of K□ in x is Kᵀ (adjoint commutativity). The engine's rules call these operators.
"""

from .base import Between, Composition, Operator, Sum, placeholder
from .layers import LocallyConnected1d, LocallyConnected2d
from .linear import AveragePool, InvertibleDownsampling, InvertibleUpsampling
from .multilinear import Multilinear

# for the rules, not for users
from .multilinear import einsum_adjoint as einsum_adjoint
from .multilinear import einsum_parts as einsum_parts
from .multilinear import is_plain as is_plain
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
    "LocallyConnected1d",
    "LocallyConnected2d",
    "Multilinear",
    "Operator",
    "Sum",
    "placeholder",
]
