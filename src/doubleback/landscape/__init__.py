"""Exact piecewise analysis of ReLU networks and of their penalties along paths (theory §8).

`follow` finds every breakpoint of a path; `output`, `gradient` and `penalty` are the curves along
it, with exact jumps; `roughness` and `judge` say what they mean; `partition` cuts a window of input
space into linear regions. `doubleback.landscape.drawing` draws them (matplotlib).
"""

from .curves import Curve, Jumps, Piecewise, gradient, output, penalty
from .path import Breakpoint, Path, Unit, follow
from .paths import Direction, Entry, InputLine, random_direction
from .polytopes import Polytopes, Region, Window, partition
from .statistics import Roughness, roughness
from .verdict import Verdict, judge

__all__ = [
    "Breakpoint",
    "Curve",
    "Direction",
    "Entry",
    "InputLine",
    "Jumps",
    "Path",
    "Piecewise",
    "Polytopes",
    "Region",
    "Roughness",
    "Unit",
    "Verdict",
    "Window",
    "follow",
    "gradient",
    "judge",
    "output",
    "partition",
    "penalty",
    "random_direction",
    "roughness",
]
