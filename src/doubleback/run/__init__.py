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
from .inductor import SOUND, laid_out, quiet, sound
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
from .state import Itself, behind, kind, read_state, remember, run_prelude, scale, write_state
from .straight_line import NEAR, boxed, clean
