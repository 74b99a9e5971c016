"""Penalties R = p(J*v): choices of v and p, norms and losses."""

from .losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    Deviation,
    Loss,
    LossName,
    Norm,
    SquaredError,
    SquaredNorm,
    make_loss,
)
from .many_seeds import Directions, Jacobian, JacobianMatch, LogDet, SpectralNorm
from .one_seed import BilinearForm, Custom, GradientMatch, LossGradient, OutputGradient, Penalty
from .thinning import Thinning, at_rows, joined, nothing, refuse_dependent

__all__ = [
    "BilinearForm",
    "BinaryCrossEntropy",
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
    "SquaredError",
    "SquaredNorm",
    "Thinning",
    "at_rows",
    "joined",
    "make_loss",
    "nothing",
    "refuse_dependent",
]
