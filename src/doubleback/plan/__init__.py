"""What each sweep does at each node of a graph, decided before anything runs: which derivatives are
taken, which values are kept for whom and freed when, what is computed again instead of held."""

from .choice import Choice, choose
from .steps import Plan, Step, make_plan

__all__ = [
    "Choice",
    "Plan",
    "Step",
    "choose",
    "make_plan",
]
