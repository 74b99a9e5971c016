"""Layer, RMS, group, instance and batch norm and their derivatives; see formulas.py."""

from .formulas import (
    affine,
    second_now,
    standardise,
    standardise_again,
    standardise_backward,
    standardise_second,
    statistics,
)
from .groups import Groups, Point, layout

__all__ = [
    "Groups",
    "Point",
    "affine",
    "layout",
    "second_now",
    "standardise",
    "standardise_again",
    "standardise_backward",
    "standardise_second",
    "statistics",
]
