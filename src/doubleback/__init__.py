"""doubleback: training with derivatives in the loss, at close to the price of training without."""

from . import landscape, operators, spaces
from .check.adjoint import check_adjoint
from .check.parity import CheckReport, check, check_rule
from .compile import compile
from .counting import Operations, count_operations
from .errors import (
    CaptureError,
    CaptureWarning,
    CheckError,
    DoublebackError,
    InputError,
    LabelError,
    MemoryWarning,
    NonFiniteError,
    NotPiecewiseLinearError,
    OutputChoiceError,
    PatchError,
    PenaltyWarning,
    RuleError,
    StaleGraphError,
    ThirdDerivativeError,
)
from .operators.layers import LocallyConnected1d, LocallyConnected2d
from .patch import patch, patch_report, patched, unpatch
from .penalised import Penalised
from .penalties.jacobian import Jacobian, SpectralNorm
from .penalties.kinds import BilinearForm, Custom, GradientMatch, LossGradient, OutputGradient
from .penalties.norms import Deviation, Norm, SquaredNorm
from .rules import Call, Rule, Structure
from .rules import register as register_rule
from .rules import unregister as unregister_rule
from .spaces.parameters import parameter_spaces

__version__ = "0.1.0"

__all__ = [
    "BilinearForm",
    "Call",
    "CaptureError",
    "CaptureWarning",
    "CheckError",
    "CheckReport",
    "Custom",
    "Deviation",
    "DoublebackError",
    "GradientMatch",
    "InputError",
    "Jacobian",
    "LabelError",
    "LocallyConnected1d",
    "LocallyConnected2d",
    "LossGradient",
    "MemoryWarning",
    "NonFiniteError",
    "Norm",
    "NotPiecewiseLinearError",
    "Operations",
    "OutputChoiceError",
    "OutputGradient",
    "PatchError",
    "Penalised",
    "PenaltyWarning",
    "Rule",
    "RuleError",
    "SpectralNorm",
    "SquaredNorm",
    "StaleGraphError",
    "Structure",
    "ThirdDerivativeError",
    "check",
    "check_adjoint",
    "check_rule",
    "compile",
    "count_operations",
    "landscape",
    "operators",
    "parameter_spaces",
    "patch",
    "patch_report",
    "patched",
    "register_rule",
    "spaces",
    "unpatch",
    "unregister_rule",
]
