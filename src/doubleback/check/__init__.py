"""The library's own oracles, for users and for its tests: a model, a rule and an adjoint against
autograd in float64."""

from .operators import check_adjoint, check_rule
from .parity import CheckReport, check

__all__ = [
    "CheckReport",
    "check",
    "check_adjoint",
    "check_rule",
]
