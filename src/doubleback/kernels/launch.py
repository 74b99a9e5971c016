"""How a kernel is called: in which form, and with how little work for the host.

Eager sweeps launch a kernel. Sweeps flattened for replay record it as one operator of the library
`doubleback`. Sweeps flattened for a compiler write the formula out, which it fuses with what stands
beside it.

Triton, where it is installed, reads the type, value and alignment of every argument at every launch
to find the compiled kernel, which for the twenty or more arguments here takes longer than a small
kernel runs. A `Launch` knows all but the tensors, and keeps what Triton found for the first ones.
Callers keep their launches by the looks of their tensors, with `planned`. Pointers off a 16-byte
boundary, for which Triton compiles another kernel, take its own way.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._torch import (
    TorchDispatchModeKey,
    compiling,
    dispatch_tls_is_dispatch_key_included,
    get_dispatch_mode,
    get_proxy_mode,
    is_functorch_wrapped_tensor,
    len_torch_dispatch_stack,
    parse_dispatch_key,
)

# In which form -----------------------------------------------------------------------------------


_fusing = False


@contextmanager
def for_compiler() -> Iterator[None]:
    """Inside, rules write formulas out instead of calling kernels."""
    global _fusing
    before, _fusing = _fusing, True
    try:
        yield
    finally:
        _fusing = before


def fusing() -> bool:
    """Whether the sweeps are being flattened for a compiler."""
    return _fusing or compiling()


def being_flattened() -> bool:
    """Whether the sweeps are being flattened, or run on fake tensors to be priced."""
    fake = get_dispatch_mode(TorchDispatchModeKey.FAKE)
    return fake is not None or get_proxy_mode() is not None


def traced() -> bool:
    """Whether what is computed now is recorded, or has no numbers: there is nothing to read."""
    return compiling() or any(get_dispatch_mode(key) is not None for key in _TRACERS)


_TRACERS = (
    TorchDispatchModeKey.FAKE,
    TorchDispatchModeKey.FUNCTIONAL,
    TorchDispatchModeKey.PROXY,
)


def watched() -> bool:
    """Whether torch.compile or a mode of any kind sees each operator that runs now."""
    return compiling() or len_torch_dispatch_stack() > 0


def eager(*tensors: Tensor | None) -> bool:
    """Whether these are plain tensors, computed with now and not recorded by a tracer."""
    if traced():
        return False
    plain = (Tensor, torch.nn.Parameter)
    wrapped = is_functorch_wrapped_tensor
    return not batched() and all(
        t is None or (type(t) in plain and not wrapped(t)) for t in tensors
    )


_BATCHED: Any = parse_dispatch_key("VmapMode")


def batched() -> bool:
    """Whether a backward pass runs on many cotangents at once (`is_grads_batched`, `vectorize`):
    PyTorch's older vmap, which no interpreter of torch.func knows of."""
    return dispatch_tls_is_dispatch_key_included(_BATCHED)


library = torch.library.Library("doubleback", "FRAGMENT")


def opaque(schema: str, launch, fake) -> None:
    """Define `doubleback::…` with its kernel (on a CPU: in Triton's interpreter) and the shapes
    of its results."""
    name = schema.partition("(")[0]
    library.define(schema)
    for key in ("CUDA", "CPU"):
        library.impl(name, launch, key)
    torch.library.register_fake(f"doubleback::{name}", fake, lib=library)
    op = getattr(torch.ops.doubleback, name).default

    def call(*args: Any) -> Any:
        return op(*args) if len_torch_dispatch_stack() else launch(*args)

    direct[op] = call


direct: dict[Any, Callable] = {}  # operator → the same without PyTorch's dispatcher, where it can


def on_cuda(*tensors: Tensor | None) -> bool:
    return all(t is None or t.is_cuda for t in tensors)


# Where sweeps begin ------------------------------------------------------------------------------

library.define("boundary(Tensor(a!) t) -> ()")
library.impl("boundary", lambda t: None, "CompositeExplicitAutograd")
BOUNDARY = torch.ops.doubleback.boundary.default


def boundary(tensors: Iterable[Tensor | None]) -> None:
    """Another sweep begins, from these tensors: what it reads of the ones before is computed by
    then, and held (inductor.py)."""
    if _fusing:
        first = next((t for t in tensors if t is not None), None)
        if first is not None:
            BOUNDARY(first)


library.define("again(Tensor(a!) t) -> ()")
library.impl("again", lambda t: None, "CompositeExplicitAutograd")
AGAIN = torch.ops.doubleback.again.default


def had_again(tensors: Iterable[Tensor]) -> None:
    """What was recorded so far is had again from what an earlier graph handed on, one of these
    tensors among it: each of its readers is to compute it for itself (inductor.py)."""
    first = next(iter(tensors), None)
    if _fusing and first is not None:
        AGAIN(first)


# Triton's launches -------------------------------------------------------------------------------


# Triton takes as long to import as the rest of the package. Until a kernel is needed, `triton`,
# `tl` and the functions under `@jit` are stand-ins, which `_make_kernels` replaces in the modules
# that hold them: Triton reads the names in a kernel as they stand there.

CONSTEXPR = "tl.constexpr"


class _Module:
    """Stands for a module that is imported when something of it is asked for."""

    def __init__(self, name: str, **known: Any) -> None:
        self.__name__ = name
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


class _Kernel:
    """Stands for a kernel, or for a function that kernels call."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.made: Any = None
        _kernels.append(self)

    def __getitem__(self, grid: Any) -> Any:
        return made(self)[grid]


_kernels: list[_Kernel] = []
triton: Any = _Module("triton")
tl: Any = _Module("triton.language", constexpr=CONSTEXPR)
jit: Any = _Kernel


def made(item: Any) -> Any:
    """A kernel for its stand-in; anything else as it is."""
    if not isinstance(item, _Kernel):
        return item
    if item.made is None:
        _make_kernels()
    return item.made


def _make_kernels() -> None:
    """All there are, as `triton.jit` would have made them where they stand."""
    modules = {
        id(stand_in): importlib.import_module(stand_in.__name__) for stand_in in (triton, tl)
    }
    real, language = modules.values()
    for kernel in _kernels:
        notes = kernel.function.__annotations__
        notes.update({name: language.constexpr for name, it in notes.items() if it == CONSTEXPR})
        kernel.made = real.jit(kernel.function)
    for names in {id(k.function.__globals__): k.function.__globals__ for k in _kernels}.values():
        for name, item in list(names.items()):
            names[name] = item.made if isinstance(item, _Kernel) else modules.get(id(item), item)


MOST = 4096  # plans kept: networks that see a new shape at every step find no end of them


@cache
def available() -> bool:
    """Whether Triton is installed, which CPU builds of torch come without. To be asked last: the
    answer takes its import."""
    try:
        importlib.import_module("triton.language")
    except ImportError:
        return False
    return True


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
    plan = plans.get(key)
    if plan is None:
        if len(plans) >= MOST:
            plans.clear()
        plan = plans[key] = make()
    return plan


class Launch:
    """`kernel[grid](*tensors, *numbers, **constants)`, with everything but the tensors known.

    To be called with tensors that look alike every time (`look`), None in the same places; all on
    one device. constants: the kernel's tl.constexpr parameters, num_warps and num_stages.
    """

    __slots__ = ("_again", "_constants", "_grid", "_kernel", "_numbers", "_rest")

    def __init__(
        self, kernel: Any, grid: Sequence[int], numbers: Sequence[Any], **constants: Any
    ) -> None:
        self._kernel, self._grid = made(kernel), tuple(grid)
        self._numbers = tuple(numbers)
        self._constants = {name: made(value) for name, value in constants.items()}
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
