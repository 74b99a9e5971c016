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
from .shape import stop_gradient
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
    "Call",
    "Rule",
    "Structure",
    "add",
    "aligned",
    "alone",
    "bilinear_rule",
    "coordinatewise",
    "find_rule",
    "generic",
    "linear",
    "register",
    "registered",
    "stop_gradient",
    "sum_to",
    "unregister",
    "zeros",
]
