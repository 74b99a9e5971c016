"""Every error the library raises on purpose: which operator, which shape, what to do."""

from __future__ import annotations

import difflib
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class DoublebackError(Exception):
    """Base of all errors raised on purpose."""


class InputError(DoublebackError, ValueError):
    """An argument does not fit: the message names it, its shape and the remedy."""


class LabelError(InputError):
    """Labels whose shape, dtype or range does not fit the network's output."""


class OutputChoiceError(InputError):
    """The network returns several tensors, or a choice of output that does not exist."""


class NotPiecewiseLinearError(DoublebackError, ValueError):
    """A landscape needs piecewise linearity; the message names the operator, its line, a remedy."""


class CaptureError(DoublebackError, RuntimeError):
    """The network cannot be captured as a graph; the message quotes the line that stopped it."""


class RuleError(DoublebackError, RuntimeError):
    """A rule is registered twice, is incomplete, or failed on a node."""


class ThirdDerivativeError(DoublebackError, RuntimeError):
    """A gradient of doubleback's gradients was requested."""


class StaleGraphError(DoublebackError, RuntimeError):
    """Backward after the saved values were freed, or after an input was changed in place."""


class NonFiniteError(DoublebackError, FloatingPointError):
    """A NaN or infinity; the message says in which sweep and at which node it first appears."""


class CheckError(DoublebackError, AssertionError):
    """A derivative disagrees with the oracle; ``report`` holds the comparison."""

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(message)
        self.report = report


class PatchError(DoublebackError, RuntimeError):
    """`db.patch()` does not know this version of torch or this family of operators, or a
    derivative that it supplies cannot be had here."""


class CaptureWarning(UserWarning):
    """The network runs on autograd instead of the explicit sweeps."""


class MemoryWarning(UserWarning):
    """Fewer seeds are swept at once than planned, for want of memory."""


class PenaltyWarning(UserWarning):
    """A penalty is well defined but hardly what was meant."""


_HERE = os.path.dirname(os.path.abspath(__file__))


def warn(message: str, category: type[Warning] | None = None) -> None:
    """Warn at the line of the user's that called, past the frames of this library and PyTorch's."""
    torch_folder = os.path.dirname(os.path.abspath(sys.modules["torch"].__file__ or ""))
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_HERE, torch_folder)):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category or CaptureWarning, stacklevel=level)


class _Untold(logging.Filter):
    """Drops what PyTorch logs of operators that fail on tensors without numbers, with their whole
    traces, in threads that expect it."""

    def __init__(self) -> None:
        super().__init__()
        self.here = threading.local()
        logging.getLogger("torch._subclasses.fake_tensor").addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        return not getattr(self.here, "depth", 0)


_untold = _Untold()


@contextmanager
def untold() -> Iterator[None]:
    """Inside, a trace is an attempt: the library itself says what comes of one that fails."""
    here = _untold.here
    here.depth = getattr(here, "depth", 0) + 1
    try:
        yield
    finally:
        here.depth -= 1


def let_through(error: BaseException, before: BaseException | None) -> None:
    """Raise the interruption behind an error, if there is one. Ctrl-C may arrive while PyTorch has
    a mode taken off; putting the others away fails then, and that error is what comes out.
    before: what was being handled already (`sys.exception()`), by a program that ends, say."""
    seen: set[int] = set()
    behind: BaseException | None = error
    while behind is not None and behind is not before and id(behind) not in seen:
        if not isinstance(behind, (Exception, GeneratorExit)):
            raise behind
        seen.add(id(behind))
        behind = behind.__cause__ or behind.__context__


def refuse_unused(wrt: Any, x: Any) -> None:
    """Raise about a penalised input that the output does not depend on."""
    raise InputError(
        f"the output does not depend on the penalised input wrt={wrt!r} of shape {tuple(x.shape)}: "
        "its derivative is zero everywhere (is it detached inside the network, or not used?). Pass "
        "allow_unused=True if that is meant"
    )


def nearest(key: Any, names: Sequence[Any]) -> str:
    """What may have been meant by a name that is not there, to stand behind a message."""
    close = difflib.get_close_matches(str(key), [str(n) for n in names], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
