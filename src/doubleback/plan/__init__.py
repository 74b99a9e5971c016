"""What each sweep does at each node of a graph, decided before anything runs: which derivatives are
taken, which values are kept for whom and freed when, what is computed again instead of held."""

from .steps import Plan, Step, make_plan

__all__ = [
    "Plan",
    "Step",
    "make_plan",
]
