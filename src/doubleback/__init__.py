"""doubleback: training with derivatives in the loss, at close to the price of training without."""

from . import landscape, operators, spaces
from .check import CheckReport, check, check_rule
from .counting import Operations, count_operations
from .errors import (
    CaptureError,
    CaptureWarning,
    CheckError,
    DoublebackError,
    InputError,
    LabelError,
    NonFiniteError,
    NotPiecewiseLinearError,
    OutputChoiceError,
    RuleError,
    StaleGraphError,
    ThirdDerivativeError,
)
from .norms import Deviation, Norm, SquaredNorm
from .penalised import Penalised
from .penalties import BilinearForm, Custom, GradientMatch, LossGradient, OutputGradient
from .rules import Call, Rule, Structure
from .rules import register as register_rule
from .rules import unregister as unregister_rule

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
    "LabelError",
    "LossGradient",
    "NonFiniteError",
    "Norm",
    "NotPiecewiseLinearError",
    "Operations",
    "OutputChoiceError",
    "OutputGradient",
    "Penalised",
    "Rule",
    "RuleError",
    "SquaredNorm",
    "StaleGraphError",
    "Structure",
    "ThirdDerivativeError",
    "check",
    "check_rule",
    "count_operations",
    "landscape",
    "operators",
    "register_rule",
    "spaces",
    "unregister_rule",
]
