"""Exact piecewise analysis of ReLU networks and of their penalties along paths (theory §8).

`follow` finds every breakpoint of a path; `output`, `gradient` and `penalty` are the curves along
it, with exact jumps; `roughness` and `judge` say what they mean; `partition` cuts a window of input
space into linear regions; `drawing` draws them (matplotlib) and writes pages. This is the room's
only door: its other modules are private.
"""

from . import drawing
from .curves import (
    Curve,
    Jumps,
    Piecewise,
    Roughness,
    Verdict,
    fit_exponent,
    gradient,
    judge,
    output,
    penalty,
    roughness,
)
from .network import Network
from .paths import (
    Breakpoint,
    Coordinate,
    Direction,
    InputLine,
    Path,
    Polytopes,
    Region,
    Unit,
    Window,
    before_kinks,
    follow,
    partition,
    random_direction,
)

__all__ = [
    "Breakpoint",
    "Coordinate",
    "Curve",
    "Direction",
    "InputLine",
    "Jumps",
    "Network",
    "Path",
    "Piecewise",
    "Polytopes",
    "Region",
    "Roughness",
    "Unit",
    "Verdict",
    "Window",
    "before_kinks",
    "drawing",
    "fit_exponent",
    "follow",
    "gradient",
    "judge",
    "output",
    "partition",
    "penalty",
    "random_direction",
    "roughness",
]
