"""Running a plan: the four sweeps with a penalty as one program, that program flattened into graphs
(replayed, or compiled by Inductor, or captured as a CUDA graph), its place in autograd, and the
delivery of its gradients."""

from .bridge import (
    Job,
    attach,
    average,
    deliver,
    no_autocast,
    refuse_inside_forward,
    refuse_third,
    several,
)
from .callers import CallersGradient, CallersProgram, refuse_others
from .cuda_graphs import GraphedProgram, GraphedStep, GraphRefused
from .flattening import Family, OpenReplay, Replay
from .inductor import laid_out, quiet, sound
from .program import (
    Arrived,
    First,
    FlattenedProgram,
    FourSweeps,
    GradientProgram,
    Gradients,
    OpenProgram,
    PhasedSweeps,
    Program,
    Request,
)
from .state import Itself, kind, read_state, remember, run_prelude, scale, write_state
from .straight_line import NEAR, boxed, clean

__all__ = [
    "NEAR",
    "Arrived",
    "CallersGradient",
    "CallersProgram",
    "Family",
    "First",
    "FlattenedProgram",
    "FourSweeps",
    "GradientProgram",
    "Gradients",
    "GraphRefused",
    "GraphedProgram",
    "GraphedStep",
    "Itself",
    "Job",
    "OpenProgram",
    "OpenReplay",
    "PhasedSweeps",
    "Program",
    "Replay",
    "Request",
    "attach",
    "average",
    "boxed",
    "clean",
    "deliver",
    "kind",
    "laid_out",
    "no_autocast",
    "quiet",
    "read_state",
    "refuse_inside_forward",
    "refuse_others",
    "refuse_third",
    "remember",
    "run_prelude",
    "scale",
    "several",
    "sound",
    "write_state",
]
