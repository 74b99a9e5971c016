"""Failures at a chosen place, and what they must leave as it was.

    with Fault(17, KeyboardInterrupt) as fault:     # at the 17th call of any function
        step()
    Fault(3, torch.OutOfMemoryError, kernels)       # at the third call of one of PyTorch's kernels

Places are counted in calls of functions, Python's and C's, so that the same number is the same
place in every run. `world(net)` is all that a step could change besides its result.
"""

from __future__ import annotations

import inspect
import random
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _len_torch_dispatch_stack

import doubleback as db


class Fault:
    """Raises `error` at the `at`-th call that is counted; None: never, to count them. `where` is
    the code it was raised in, None if it was not."""

    def __init__(
        self,
        at: int | None = None,
        error: type[BaseException] = KeyboardInterrupt,
        counted: Callable[[Any, str, Any], bool] = lambda frame, event, function: True,
    ) -> None:
        self.at, self.error, self.counted = at, error, counted
        self.count = 0
        self.where: str | None = None

    def __enter__(self) -> Fault:
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.setprofile(None)

    def _called(self, frame: Any, event: str, function: Any) -> None:
        code = frame.f_code
        if event not in ("call", "c_call") or code is Fault.__exit__.__code__:
            return
        if event == "call" and code.co_flags & inspect.CO_GENERATOR:
            return  # it may be one that is closed as it is collected, where errors are lost
        if not self.counted(frame, event, function):
            return
        self.count += 1
        if self.at is not None and self.count >= self.at and not _collecting(frame):
            sys.setprofile(None)
            self.where = f"{code.co_filename}:{frame.f_lineno} ({code.co_name})"
            raise self.error("made up")


def _collecting(frame: Any) -> bool:
    """Whether Python runs this as it collects something: it would lose the error."""
    while frame is not None:
        if frame.f_code is weakref.finalize.__call__.__code__ or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def kernels(frame: Any, event: str, function: Any) -> bool:
    """Calls that may ask for memory: those of PyTorch's C functions that compute."""
    if event != "c_call" or function.__name__ in _LOOKS:
        return False
    own = getattr(function, "__self__", None)
    return (
        isinstance(own, Tensor)
        or own is torch._C._VariableFunctions
        or getattr(own, "__name__", "") in ("_VariableFunctionsClass", "torch._C._dynamo.guards")
        or type(own).__name__ == "PyCapsule"
    )


_LOOKS = frozenset({
    "size", "dim", "stride", "numel", "is_contiguous", "untyped_storage", "is_floating_point",
    "is_complex", "is_inference", "data_ptr", "element_size", "storage_offset", "requires_grad_",
    "assert_size_stride", "check_tensor_metadata",
})  # fmt: skip


def world(net: nn.Module) -> dict[str, Any]:
    """What a step that failed must leave as it was, by name."""
    found: dict[str, Any] = {}
    for name, p in net.named_parameters():
        found[f"parameter {name}"] = p.detach().clone()
        found[f"requires_grad of {name}"] = p.requires_grad
        found[f"grad of {name}"] = None if p.grad is None else p.grad.detach().clone()
        hooks = (p._backward_hooks, getattr(p, "_post_accumulate_grad_hooks", None))
        found[f"hooks of {name}"] = [list(h or ()) for h in hooks]
        found[f"type of {name}"] = type(p)
    for name, b in net.named_buffers():
        found[f"buffer {name}"] = b.detach().clone()
        found[f"type of {name}"] = type(b)
    for name, module in net.named_modules():
        hooks = {n: list(h) for n, h in vars(module).items() if n.endswith("_hooks")}
        found[f"hooks of module {name!r}"] = hooks
        found[f"attributes of module {name!r}"] = (type(module), list(vars(module)))
        found[f"training of module {name!r}"] = module.training
    return found | generators() | settings()


def generators() -> dict[str, Any]:
    return {"generator": torch.get_rng_state(), "Python's generator": random.getstate()}


def settings() -> dict[str, Any]:
    """PyTorch's modes and tables, and Python's."""
    from torch._C import _dynamo
    from torch._dynamo import config as dynamo
    from torch._guards import TracingContext
    from torch._inductor import config as inductor

    hooks = vars(torch.nn.modules.module)
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": [torch.is_autocast_enabled(d) for d in ("cpu", "cuda")],
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "forward mode": torch.autograd.forward_ad._current_level,
        "modes": (_len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        "dispatch keys": (
            str(torch._C._dispatch_tls_local_include_set()),
            str(torch._C._dispatch_tls_local_exclude_set()),
        ),
        "tracing": (TracingContext.try_get() is None, torch.compiler.is_compiling()),
        "interpreter": _dynamo.eval_frame.get_eval_frame_callback(),
        "Dynamo's settings": dynamo.get_config_copy(),
        "Inductor's settings": inductor.get_config_copy(),
        "global hooks": {n: list(h) for n, h in hooks.items() if n.startswith("_global") and h},
        "patch": [(entry.operator, entry.state) for entry in db.patch_report()],
        "engine": torch.autograd.graph._engine_run_backward,
        "warnings": list(warnings.filters),
        "threads": torch.get_num_threads(),
        "recursion": sys.getrecursionlimit(),
    }


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names of what is not as it was, to the last bit."""
    names = before.keys() | after.keys()
    return sorted(n for n in names if not _same(before.get(n), after.get(n)))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return a == b
