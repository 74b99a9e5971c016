"""doubleback: training with derivatives in the loss, at close to the price of training without."""

import importlib
from typing import TYPE_CHECKING, Any

from . import operators, spaces
from .check import CheckReport, check, check_adjoint, check_rule
from .compile import compile, register
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
from .operators import LocallyConnected1d, LocallyConnected2d
from .patch import patch, patch_report, patched, unpatch
from .penalised import Penalised, WithGradient
from .penalties import (
    BilinearForm,
    Custom,
    Deviation,
    GradientMatch,
    Jacobian,
    JacobianMatch,
    LogDet,
    LossGradient,
    Norm,
    OutputGradient,
    Penalty,
    SpectralNorm,
    SquaredNorm,
)
from .rules import Call, Rule, Structure
from .rules import register as register_rule
from .rules import unregister as unregister_rule
from .spaces import parameter_spaces

if TYPE_CHECKING:
    from . import landscape

__version__ = "0.1.0"

register()  # torch.compile(…, backend="doubleback")
del register

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
    "JacobianMatch",
    "LabelError",
    "LocallyConnected1d",
    "LocallyConnected2d",
    "LogDet",
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
    "Penalty",
    "PenaltyWarning",
    "Rule",
    "RuleError",
    "SpectralNorm",
    "SquaredNorm",
    "StaleGraphError",
    "Structure",
    "ThirdDerivativeError",
    "WithGradient",
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


def __getattr__(name: str) -> Any:
    """`landscape` is imported when it is first used: training needs none of it."""
    if name == "landscape":
        return importlib.import_module(".landscape", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
