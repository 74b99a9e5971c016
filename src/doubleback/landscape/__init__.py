"""Exact piecewise analysis of ReLU networks and of their penalties along paths (theory §8)."""

from .curves import Curve, Jumps, Piecewise, gradient, output, penalty
from .path import Breakpoint, Path, Unit, follow
from .paths import Direction, Entry, InputLine, random_direction

__all__ = [
    "Breakpoint",
    "Curve",
    "Direction",
    "Entry",
    "InputLine",
    "Jumps",
    "Path",
    "Piecewise",
    "Unit",
    "follow",
    "gradient",
    "output",
    "penalty",
    "random_direction",
]
