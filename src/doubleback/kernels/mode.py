"""Which form of a fused kernel to use: launched now, one opaque node, or formulas to fuse.

Eager sweeps launch a kernel. Sweeps flattened for replay record it as one operator of the
library `doubleback`. Sweeps flattened for a compiler write the formula out, which it fuses with
what stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .._torch import (
    TorchDispatchModeKey,
    dispatch_tls_is_dispatch_key_included,
    get_dispatch_mode,
    get_proxy_mode,
    is_functorch_wrapped_tensor,
    len_torch_dispatch_stack,
    parse_dispatch_key,
)

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


def compiling() -> bool:
    """Whether torch.compile reads this very code."""
    return torch.compiler.is_compiling()


def fusing() -> bool:
    """Whether the sweeps are being flattened for a compiler."""
    return _fusing or compiling()


def recording() -> bool:
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


# ----------------------------------------------------------------- where sweeps begin

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
