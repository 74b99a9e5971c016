"""What a forward pass reads and TorchDynamo does not guard, as a key that is compared at each call.

Dynamo takes classes to be finished: a method that is replaced on a class later, or a hook for all
modules, goes unnoticed; so does an Enum that a dictionary is looked up with. Each of these is rare,
few in number and quick to compare. Older versions of PyTorch also miss a module whose class is
swapped, and numbers of a class that serves as a record.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterator, Mapping
from types import ModuleType
from typing import Any
from weakref import ref

import torch
from torch import nn

DEEPEST = 4  # how far into a module's attributes Enums are looked for

_GLOBAL_HOOKS = (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks",
    "_global_backward_pre_hooks", "_global_forward_hooks_always_called",
)  # fmt: skip


def global_hooks() -> list[dict]:
    """The tables of hooks that every module calls."""
    return [getattr(torch.nn.modules.module, name, {}) for name in _GLOBAL_HOOKS]


class Surroundings:
    """`key()` changes when something changed that Dynamo does not see."""

    def __init__(self, net: nn.Module) -> None:
        modules = list(net.modules())
        kinds = {kind for module in modules for kind in type(module).__mro__}
        self._classes = [
            kind for kind in sorted(kinds, key=lambda k: k.__qualname__)
            if issubclass(kind, nn.Module) and kind is not nn.Module
        ]  # fmt: skip
        self._modules = [ref(module) for module in modules]  # the key is not to keep them alive
        self._places = list(_watched(modules))
        self._hooks = global_hooks()

    def key(self) -> Hashable:
        hooks = tuple([tuple(hook) for hook in self._hooks])
        methods = tuple([tuple(map(id, vars(kind).values())) for kind in self._classes])
        types = tuple([type(module()) for module in self._modules])
        return hooks, methods, types, tuple([_mark(holder, name) for holder, name in self._places])


def _watched(modules: list[nn.Module]) -> Iterator[tuple[Any, Any]]:
    """Where Enums lie, and the entries of classes that serve as records: (what holds one, under
    which name)."""
    seen: set[int] = set()
    stack: list[tuple[Any, int]] = [(vars(module), 0) for module in modules]
    while stack:
        holder, depth = stack.pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        record = isinstance(holder, type)
        entries: Any = vars(holder) if record else holder
        items = entries.items() if isinstance(entries, Mapping) else enumerate(entries)
        for name, item in list(items):
            if isinstance(item, enum.Enum) or (record and not str(name).startswith("__")):
                yield entries, name
            if depth >= DEEPEST or isinstance(item, (nn.Module, torch.Tensor, enum.Enum)):
                continue
            if isinstance(item, (dict, list, tuple)) or _is_record(item):
                stack.append((item, depth + 1))
            elif hasattr(item, "__dict__") and not isinstance(item, (type, ModuleType)):
                stack.append((vars(item), depth + 1))


def _is_record(item: Any) -> bool:
    """A class that somebody wrote to hold numbers, as far as one can tell: no module's, none of
    PyTorch's or Python's own."""
    if not isinstance(item, type) or issubclass(item, nn.Module):
        return False
    return item.__module__.partition(".")[0] not in ("torch", "builtins", "typing", "numpy")


def _mark(holder: Any, name: Any) -> Any:
    """What tells a value apart from another: plain ones themselves, others by identity."""
    try:
        value = holder[name]
    except (KeyError, IndexError):
        return None
    return value if type(value) in (bool, int, float, str, type(None)) else id(value)
