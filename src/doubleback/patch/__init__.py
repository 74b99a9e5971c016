"""PyTorch's own double backward, made fast and complete.

    import doubleback as db

    db.patch()      # every create_graph=True of this process; undo with db.unpatch()

Replaced are the derivatives of PyTorch's *backward* operators, and one backward operator that is
wrong (average pooling on a GPU). Models, losses and training loops stay as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .faster import ACTIVATION, CONVOLUTION, NORMALISATION
from .mechanism import Patcher, PatchReport, in_steps, supported
from .missing import ATTENTION, OTHERS, POOLING, RECURRENT

__all__ = [
    "LASTING",
    "SMALL_ATTENTION",
    "PatchReport",
    "hold_patch",
    "patch",
    "patch_report",
    "patched",
    "patched_as",
    "patched_where_known",
    "supported",
    "unpatch",
    "unread_by",
    "watched",
]

_patcher = Patcher(
    [*CONVOLUTION, *ATTENTION, *NORMALISATION, *ACTIVATION, *RECURRENT, *OTHERS, *POOLING]
)


def patch(only: Iterable[str] | None = None) -> None:
    """Replace second derivatives process-wide, all of them or the families in `only`.

    Calling it twice is calling it once; families add up.

    >>> patch(only=["convolution"])
    >>> patch_report()[0].state in ("ready", "replaced")  # the latter from its first use on
    True
    >>> unpatch()
    """
    _patcher.patch(only)


def unpatch() -> None:
    """Undo `patch`. What runs inside `with patched():` keeps it until the block ends."""
    _patcher.unpatch()


def patched(only: Iterable[str] | None = None) -> AbstractContextManager[None]:
    """`patch` for the length of a `with` block; blocks nest. Every thread sees it.

    >>> with patched():
    ...     {entry.state for entry in patch_report() if entry.family == "convolution"}
    {'replaced'}
    """
    return _patcher.patched(only)


def patched_where_known() -> AbstractContextManager[None]:
    """`patched`, or nothing where the patch does not know this version of PyTorch."""
    return patched() if supported(torch.__version__) else nullcontext()


def hold_patch(owner: object) -> None:
    """`patched_where_known` for as long as `owner` lives: to enter it takes as long as a small
    step."""
    held = patched_where_known()
    held.__enter__()
    weakref.finalize(owner, held.__exit__, None, None, None).atexit = False


def unread_by(disable: Callable) -> None:
    """Compiled code that differentiates its own regions comes through the patch, whose state Dynamo
    is not to guard: it changes meanwhile. disable: `torch.compiler.disable`, which imports it."""
    hidden: Any = disable(Patcher.before_second)
    Patcher.before_second = hidden


LASTING = _patcher.lasting
"""Families that cost nothing between the blocks that want them: second derivatives which PyTorch
lacks altogether, so that a network which comes to need one in its thousandth step has it."""


SMALL_ATTENTION = in_steps("attention")
"""What `watched` sees of attention that is quicker on a CPU by PyTorch's unfused kernel."""


def patched_as(seen: frozenset[str]) -> AbstractContextManager[None]:
    """`patched` for what `watched` saw, in microseconds from the second time on."""
    return _patcher.patched_as(seen)


def watched() -> AbstractContextManager[set[str]]:
    """What of the patch is used inside: families, and operators by themselves whose kernels do not
    stay when a block ends, since forward passes call them."""
    return _patcher.watched()


def patch_report() -> PatchReport:
    """Each operator: its family, whether it is replaced, and why."""
    return _patcher.report()
