"""Triton where it is installed, and its kernels launched again without looking them up.

Triton reads the type, value and alignment of every argument at every launch to find the compiled
kernel, which for the twenty or more arguments here takes longer than a small kernel runs.
`launch` keeps what it found under the numbers, constants and dtypes of a call. Pointers off a
16-byte boundary, for which Triton compiles another kernel, and tensors on other devices, which
Triton refuses, take its own way.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

try:
    triton: Any = importlib.import_module("triton")
    tl: Any = importlib.import_module("triton.language")
except ImportError:  # CPU builds of torch come without Triton; no kernel is called then
    triton, tl = None, SimpleNamespace(constexpr=None)


def _unchanged(function: Any) -> Any:
    return function


jit: Any = _unchanged if triton is None else triton.jit

MOST = 4096  # kinds of calls kept: networks that see a new shape at every step find no end of them
_found: dict[tuple[Any, ...], Any] = {}


def available() -> bool:
    """Whether Triton is installed."""
    return triton is not None


def launch(kernel: Any, grid: Sequence[int], *arguments: Any, **constants: Any) -> None:
    """`kernel[grid](*arguments, **constants)` on the device of the first tensor.

    arguments: tensors, numbers and None, in the kernel's order; constants: its tl.constexpr
    parameters, num_warps and num_stages.
    """
    if not isinstance(kernel, triton.JITFunction):  # Triton's interpreter
        kernel[grid](*arguments, **constants)
        return
    device = next(a.get_device() for a in arguments if isinstance(a, Tensor))
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, *arguments, **constants)
        return
    kinds, numbers, pointers, elsewhere = [], [], 0, False
    for a in arguments:
        if isinstance(a, Tensor):
            pointer = a.data_ptr()
            kinds.append(a.dtype)
            numbers.append(pointer)
            pointers |= pointer
            elsewhere |= a.get_device() != device
        else:
            kinds.append(a)
            numbers.append(a)
    values = [constants[name] for name in kernel.arg_names[len(arguments) :]]
    key = (kernel, device, *kinds, *values, constants.get("num_warps"), constants.get("num_stages"))
    usual = not (pointers & 15 or elsewhere)
    compiled = _found.get(key) if usual else None
    if compiled is not None:  # addresses, not tensors: of these the driver is asked one by one
        compiled[(*grid, 1, 1)[:3]](*numbers, *values)
        return
    compiled = kernel[grid](*arguments, **constants)
    if usual and isinstance(compiled, triton.compiler.CompiledKernel):
        if len(_found) >= MOST:
            _found.clear()
        _found[key] = compiled
