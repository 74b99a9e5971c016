"""Penalties R = p(J*v): choices of v and p, norms and losses."""

from .losses import (
    CrossEntropy,
    Deviation,
    Loss,
    LossName,
    Norm,
    SquaredNorm,
    make_loss,
)
from .many_seeds import Directions, Jacobian, JacobianMatch, LogDet, SpectralNorm
from .one_seed import (
    Apart,
    BilinearForm,
    Custom,
    GradientMatch,
    LossGradient,
    OutputGradient,
    Penalty,
    Thinning,
    at_rows,
    joined,
    nothing,
    refuse_dependent,
)

__all__ = [
    "Apart",
    "BilinearForm",
    "CrossEntropy",
    "Custom",
    "Deviation",
    "Directions",
    "GradientMatch",
    "Jacobian",
    "JacobianMatch",
    "LogDet",
    "Loss",
    "LossGradient",
    "LossName",
    "Norm",
    "OutputGradient",
    "Penalty",
    "SpectralNorm",
    "SquaredNorm",
    "Thinning",
    "at_rows",
    "joined",
    "make_loss",
    "nothing",
    "refuse_dependent",
]
