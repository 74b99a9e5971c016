"""What a forward pass reads and TorchDynamo does not guard, as a key that is compared at each call.

Dynamo takes classes to be finished: a method that is replaced on a class later, or a hook for all
modules, goes unnoticed; so does an Enum that a dictionary is looked up with. Each of these is rare,
few in number and quick to compare.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

DEEPEST = 4  # how far into a module's attributes Enums are looked for

_GLOBAL_HOOKS = (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks",
    "_global_backward_pre_hooks", "_global_forward_hooks_always_called",
)  # fmt: skip


class Surroundings:
    """`key()` changes when something changed that Dynamo does not see."""

    def __init__(self, net: nn.Module) -> None:
        modules = list(net.modules())
        kinds = {kind for module in modules for kind in type(module).__mro__}
        self._classes = [
            kind for kind in sorted(kinds, key=lambda k: k.__qualname__)
            if issubclass(kind, nn.Module) and kind is not nn.Module
        ]  # fmt: skip
        self._places = list(_enums(modules))
        hooks = torch.nn.modules.module
        self._hooks = [getattr(hooks, name, {}) for name in _GLOBAL_HOOKS]

    def key(self) -> Hashable:
        hooks = tuple([tuple(hook) for hook in self._hooks])
        methods = tuple([tuple(map(id, vars(kind).values())) for kind in self._classes])
        enums = tuple([id(_at(holder, name)) for holder, name in self._places])
        return hooks, methods, enums


def _enums(modules: list[nn.Module]) -> Iterator[tuple[Any, Any]]:
    """Where Enums lie: (what holds one, under which name)."""
    seen: set[int] = set()
    stack: list[tuple[Any, int]] = [(vars(module), 0) for module in modules]
    while stack:
        holder, depth = stack.pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        items = holder.items() if isinstance(holder, Mapping) else enumerate(holder)
        for name, item in list(items):
            if isinstance(item, enum.Enum):
                yield holder, name
            elif depth < DEEPEST and not isinstance(item, (nn.Module, torch.Tensor, type)):
                if isinstance(item, (dict, list, tuple)):
                    stack.append((item, depth + 1))
                elif hasattr(item, "__dict__"):
                    stack.append((vars(item), depth + 1))


def _at(holder: Any, name: Any) -> Any:
    try:
        return holder[name]
    except (KeyError, IndexError):
        return None
