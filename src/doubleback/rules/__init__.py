"""The table of rules, one family per file, and the look-up with its generic fall-back."""

from __future__ import annotations

from typing import Any

from . import (
    arithmetic,
    attention,
    bilinear,
    distances,
    normalisation,
    pointwise,
    pooling,
    shape,
    softmax,
)
from .bilinear import convolution_of
from .seeded import LOOP, seeded_backward, seeded_both
from .shape import stop_gradient
from .softmax import softmax_curvature, softmax_derivative
from .structures import bilinear as bilinear_rule
from .structures import coordinatewise, generic, linear
from .table import (
    Call,
    Rule,
    Structure,
    add,
    aligned,
    alone,
    lookup,
    register,
    registered,
    sum_to,
    unregister,
    zeros,
)

for _family in (
    bilinear, pointwise, arithmetic, softmax, shape, pooling, normalisation, attention, distances,
):  # fmt: skip
    for _op, _rule in _family.rules():
        register(_op, _rule)

GENERIC = generic()


def find_rule(op: Any) -> Rule:
    """The operator's own rule, or the generic one."""
    return lookup(op) or GENERIC


__all__ = [
    "GENERIC",
    "LOOP",
    "Call",
    "Rule",
    "Structure",
    "add",
    "aligned",
    "alone",
    "bilinear_rule",
    "convolution_of",
    "coordinatewise",
    "find_rule",
    "generic",
    "linear",
    "register",
    "registered",
    "seeded_backward",
    "seeded_both",
    "softmax_curvature",
    "softmax_derivative",
    "stop_gradient",
    "sum_to",
    "unregister",
    "zeros",
]
