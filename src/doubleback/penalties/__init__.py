"""Penalties R = p(J*v): choices of v and p, norms and losses, and the same by plain autograd."""

from .autograd import Way, accumulate_on_autograd, derivatives, on_autograd
from .directions import Directions, JacobianMatch, LogDet
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
from .many_seeds import Jacobian, SpectralNorm
from .one_seed import BilinearForm, Custom, GradientMatch, LossGradient, OutputGradient, Penalty

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
    "Way",
    "accumulate_on_autograd",
    "derivatives",
    "make_loss",
    "on_autograd",
]
