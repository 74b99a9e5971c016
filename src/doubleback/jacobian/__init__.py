"""Programs with many seeds. For the whole Jacobian: the strategies that sweep it, their prices, the
choice of one; beside them the spectral norm's and that of penalties over fixed directions."""

from .planner import Decision, plan_jacobian, price, price_sweeps
from .programs import DirectionsProgram, SpectralProgram
from .strategies import coupling, unit_vectors
