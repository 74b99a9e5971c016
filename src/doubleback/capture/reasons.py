"""Why a network cannot be captured, in one short message: the cause, the user's line, a remedy."""

from __future__ import annotations

import gc
import os
import re
import traceback
from typing import Any

import torch
from torch import nn

from .. import _torch
from ..errors import CaptureError

_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_STANDARD = os.path.dirname(os.path.abspath(os.__file__))

_REMEDIES = (
    (r"random|Random|numpy\.rand",
     "draw random numbers with torch, not with Python's or NumPy's generator"),
    (r"data.dependent|\.item\(\)|_local_scalar_dense|GuardOnDataDependent|nonzero|unbacked",
     "keep Python's branches and sizes independent of the values of tensors (torch.where, a "
     "fixed size)"),
    (r"autograd\.Function|autograd_function",
     "make it an operator (torch.library.custom_op with register_autograd), or write it in "
     "PyTorch's own operations"),
    (r"torch\.autograd\.grad|requires_grad_|backward\(\)|\.backward",
     "take derivatives outside the network, or return them with db.WithGradient"),
    (r"torch\.jit|ScriptMethod|ScriptFunction|RecursiveScriptModule|TorchScript",
     "use the plain Python module (for e3nn: e3nn.set_optimization_defaults(jit_script_fx=False))"),
    (r"hook", "remove the hook while training with a penalty"),
    (r"DistributedDataParallel|DDP", "wrap the other way round: DDP(Penalised(net))"),
    (r"behind autograd's back", "write out of place, or leave it on autograd"),
    (r"recompile_limit|cache_size_limit",
     "hold what changes at every call in a buffer, or pass it as a tensor"),
)  # fmt: skip


def reason(net: nn.Module, error: BaseException) -> CaptureError:
    """The error that a user sees."""
    inner = getattr(error, "inner_exception", None) or error
    text = _first_line(inner)
    if "requires_grad_()" in text:
        text = (
            "it makes a leaf of its own inside (requires_grad_()), so that its output may not "
            "depend on its input any more"
        )
    hint = next((remedy for pattern, remedy in _REMEDIES if re.search(pattern, str(error))), None)
    remedy = f"\n  Remedy: {hint}." if hint else ""
    where = _line(error)
    return CaptureError(
        f"{type(net).__name__} cannot be captured as one graph: {text}"
        + (f"\n  stopped at {where}" if where else "")
        + remedy
    )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    explained = next((x for x in lines if x.startswith("Explanation:")), None)
    if explained:
        return f"{lines[0]}: {explained.removeprefix('Explanation:').strip()}"
    return lines[0]


def _line(error: BaseException) -> str | None:
    """The innermost line of the user's code, from Dynamo's own stack or from Python's."""
    frames: list[Any] = list(getattr(error, "real_stack", None) or ())
    frames += traceback.extract_tb(error.__traceback__)
    own = [
        f for f in frames
        if not os.path.abspath(f.filename).startswith((_TORCH, _HERE, _STANDARD))
        and os.path.exists(f.filename)
    ]  # fmt: skip
    if not own:
        named = re.findall(r'File "([^"]+)", line (\d+)', str(error))
        named = [(path, line) for path, line in named if not path.startswith((_TORCH, _HERE))]
        return f"{os.path.basename(named[-1][0])}:{named[-1][1]}" if named else None
    last = own[-1]
    return f"{os.path.basename(last.filename)}:{last.lineno}: {last.line}"


def forget(error: BaseException) -> None:
    """Let go of a failed trace now. Its frames hold contexts that set PyTorch's state back when
    they are collected, which must not happen in the midst of something else."""
    keys = _torch.dispatch_tls_local_include_set(), _torch.dispatch_tls_local_exclude_set()
    mode, forward = torch.is_grad_enabled(), _torch.is_fwd_grad_enabled()
    with _torch.ForceDispatchKeyGuard(*keys):
        _clear(error)
        gc.collect()
    torch.set_grad_enabled(mode)
    _torch.set_fwd_grad_enabled(forward)


def _clear(error: BaseException) -> None:
    """Empty the frames of an exception and of those that it came from."""
    seen: set[int] = set()
    stack: list[BaseException | None] = [error]
    while stack:
        item = stack.pop()
        if item is not None and id(item) not in seen:
            seen.add(id(item))
            traceback.clear_frames(item.__traceback__)
            item.__traceback__ = None
            stack += [item.__cause__, item.__context__, getattr(item, "inner_exception", None)]
