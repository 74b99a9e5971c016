"""Triton where it is installed, and its kernels launched again without looking them up.

Triton reads the type, value and alignment of every argument at every launch to find the compiled
kernel, which for the twenty or more arguments here takes longer than a small kernel runs. A
`Launch` knows all but the tensors, and keeps what Triton found for the first ones. Callers keep
their launches by the looks of their tensors, with `planned`. Pointers off a 16-byte boundary, for
which Triton compiles another kernel, take its own way.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .. import _torch

try:
    triton: Any = importlib.import_module("triton")
    tl: Any = importlib.import_module("triton.language")
except ImportError:  # CPU builds of torch come without Triton; no kernel is called then
    triton, tl = None, SimpleNamespace(constexpr=None)


def _unchanged(function: Any) -> Any:
    return function


jit: Any = _unchanged if triton is None else triton.jit

MOST = 4096  # plans kept: networks that see a new shape at every step find no end of them


def available() -> bool:
    """Whether Triton is installed."""
    return triton is not None


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n.

    >>> [power_of_two(n) for n in (1, 3, 4, 5)]
    [1, 4, 4, 8]
    """
    return 1 << (n - 1).bit_length()


def resident(device: torch.device, each: int) -> int:
    """How many looping programs fill the device, with `each` on every multiprocessor."""
    if device.type != "cuda":  # Triton's interpreter
        return 3
    return each * torch.cuda.get_device_properties(device).multi_processor_count


def look(t: Tensor | None) -> Any:
    """What plans and compiled kernels depend on."""
    return None if t is None else (t.shape, t.stride(), t.dtype, t.get_device())


def planned(plans: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """The plan under `key`, made when first asked for."""
    found = plans.get(key)
    if found is None:
        if len(plans) >= MOST:
            plans.clear()
        found = plans[key] = make()
    return found


class Launch:
    """`kernel[grid](*tensors, *numbers, **constants)`, with everything but the tensors known.

    To be called with tensors that look alike every time (`look`), None in the same places; all on
    one device. constants: the kernel's tl.constexpr parameters, num_warps and num_stages.
    """

    __slots__ = ("_again", "_constants", "_grid", "_kernel", "_numbers", "_rest")

    def __init__(
        self, kernel: Any, grid: Sequence[int], numbers: Sequence[Any], **constants: Any
    ) -> None:
        self._kernel, self._grid = kernel, tuple(grid)
        self._numbers, self._constants = tuple(numbers), constants
        self._again: Any = None
        self._rest: tuple[Any, ...] = ()

    def __call__(self, *tensors: Tensor | None) -> None:
        again = self._again
        if again is None:
            return self._first(tensors)
        pointers, bits = [], 0
        for t in tensors:
            pointer = None if t is None else t.data_ptr()
            pointers.append(pointer)
            bits |= pointer or 0
        device, compiled = again
        if bits & 15 or device != _current_device():
            return self._first(tensors)
        # addresses, not tensors: of these the driver is asked one by one
        compiled(*pointers, *self._rest)

    def _first(self, tensors: Sequence[Tensor | None]) -> None:
        """By Triton's own way; what it compiled is kept."""
        kernel, arguments = self._kernel, (*tensors, *self._numbers)
        if not isinstance(kernel, triton.JITFunction):  # Triton's interpreter
            kernel[self._grid](*arguments, **self._constants)
            return
        device = next(t.get_device() for t in tensors if t is not None)
        if device != _current_device():
            with torch.cuda.device(device):
                self._first(tensors)
            return
        compiled = kernel[self._grid](*arguments, **self._constants)
        aligned = not any(t.data_ptr() & 15 for t in tensors if t is not None)
        if aligned and isinstance(compiled, triton.compiler.CompiledKernel):
            values = [self._constants[name] for name in kernel.arg_names[len(arguments) :]]
            self._rest = (*self._numbers, *values)
            self._again = device, compiled[(*self._grid, 1, 1)[:3]]


def _current_device() -> int:
    return _torch.cuda_get_device() if torch.cuda.is_initialized() else -1
