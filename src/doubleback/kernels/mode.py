"""Which form of a fused kernel to use: launched now, one opaque node, or formulas to fuse.

Eager sweeps launch a kernel. Sweeps flattened for replay record it as one operator of the
library `doubleback`. Sweeps flattened for a compiler write the formula out, which it fuses with
what stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
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


# ------------------------------------------------------- what a compiler is not to put off
#
# A compiler holds the factors of a product rather than the product, if that spares it a pass, and
# shares what is computed twice. Where the sweeps mean to save memory, two marks tell it not to.

library.define("settle(Tensor(a!) t) -> ()")
library.impl("settle", lambda t: None, "CompositeExplicitAutograd")


def settled(t: Tensor) -> Tensor:
    """t, which a compiler computes here and not where it is read."""
    if fusing():
        torch.ops.doubleback.settle(t)
    return t


def after(t: Tensor, q: Tensor) -> Tensor:
    """t, which a compiler takes to depend on q: what is computed from it comes no earlier."""
    if not fusing() or not q.numel():
        return t
    return torch.where(q[(0,) * q.dim()] > 0, t, t)
