"""Penalties of the whole Jacobian: the strategies that compute it, their prices, the choice of one,
and the programs that run it; the spectral norm and penalties over fixed directions beside them."""

from .planner import Decision, plan_jacobian, price, price_sweeps
from .programs import DirectionsProgram, SpectralProgram
from .strategies import unit_vectors

__all__ = [
    "Decision",
    "DirectionsProgram",
    "SpectralProgram",
    "plan_jacobian",
    "price",
    "price_sweeps",
    "unit_vectors",
]
