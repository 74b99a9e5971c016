"""Penalties of the whole Jacobian: the strategies that compute it, their prices, the choice of one,
and the programs that run it; the spectral norm beside them."""

from .planner import Decision, plan_jacobian, price, price_sweeps
from .programs import SpectralProgram
from .strategies import unit_vectors

__all__ = [
    "Decision",
    "SpectralProgram",
    "plan_jacobian",
    "price",
    "price_sweeps",
    "unit_vectors",
]
