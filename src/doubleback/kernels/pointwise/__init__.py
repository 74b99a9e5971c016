"""g″ of activations, the curvature source g″(z)⊙h⊙ξ, and masks."""

from .formulas import cleared, curvature, fused_curvature, second

__all__ = ["cleared", "curvature", "fused_curvature", "second"]
