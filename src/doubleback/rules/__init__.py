"""The table of rules, one family per file, and the look-up with its generic fall-back."""

from __future__ import annotations

from typing import Any

from . import bilinear, normalisation, pointwise, shape
from .bilinear import convolution_of
from .normalisation import softmax_curvature, softmax_derivative
from .shape import drawn_in_place, stop_gradient
from .structures import (
    LOOP,
    coordinatewise,
    generic,
    linear,
    seeded_backward,
    seeded_both,
    vmap_nested,
)
from .structures import bilinear as bilinear_rule
from .table import (
    Call,
    Rule,
    Structure,
    add,
    aligned,
    alone,
    lookup,
    overload,
    register,
    registered,
    unregister,
    zeros,
)

for _family in (bilinear, pointwise, shape, normalisation):
    for _name, _rule in _family.rules():
        _op = overload(_name)
        if _op is not None:
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
    "drawn_in_place",
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
    "unregister",
    "vmap_nested",
    "zeros",
]
