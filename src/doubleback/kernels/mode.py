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
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

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
    return _fusing or torch.compiler.is_compiling()


def recording() -> bool:
    """Whether the sweeps are being flattened, or run on fake tensors to be priced."""
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)  # type: ignore[attr-defined]
    return fake is not None or get_proxy_mode() is not None


def eager(*tensors: Tensor | None) -> bool:
    """Whether these are plain tensors, computed with now and not recorded by a tracer."""
    if torch.compiler.is_compiling():
        return False
    mode = torch._C._TorchDispatchModeKey
    if any(torch._C._get_dispatch_mode(key) for key in (mode.FAKE, mode.FUNCTIONAL, mode.PROXY)):
        return False
    plain = (Tensor, torch.nn.Parameter)
    wrapped = is_functorch_wrapped_tensor
    return not batched() and all(
        t is None or (type(t) in plain and not wrapped(t)) for t in tensors
    )


_BATCHED: Any = torch._C._parse_dispatch_key("VmapMode")


def batched() -> bool:
    """Whether a backward pass runs on many cotangents at once (`is_grads_batched`, `vectorize`):
    PyTorch's older vmap, which no interpreter of torch.func knows of."""
    return torch._C._dispatch_tls_is_dispatch_key_included(_BATCHED)


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
        return op(*args) if torch._C._len_torch_dispatch_stack() else launch(*args)

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
