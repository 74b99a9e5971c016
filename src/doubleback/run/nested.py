"""Nested tuples, lists and dictionaries taken apart and put together again.

The sweeps pass such structures of tensors at every call, and PyTorch's pytrees take several times
as long for them as these few lines. Containers that are registered there are left to it.

>>> leaves = []
>>> structure = take(({"a": 1}, [2, None]), leaves)
>>> leaves
[1, 2, None]
>>> put(structure, iter([10, 20, 30]))
({'a': 10}, [20, 30])
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .._torch import pytree

Structure = tuple[type, Any, tuple["Structure", ...]] | None  # None: a leaf


class _Context:
    """What a registered container is made again from, besides its parts; it may have no hash."""

    def __init__(self, context: Any) -> None:
        self.context = context

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Context) and self.context == other.context

    def __hash__(self) -> int:
        return 0


def take(item: Any, leaves: list[Any]) -> Structure:
    """The structure of `item`, which can be hashed; what it holds is appended to `leaves`."""
    kind = type(item)
    if kind is dict:
        return kind, tuple(item), tuple([take(part, leaves) for part in item.values()])
    if kind is tuple or kind is list or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        return kind, None, tuple([take(part, leaves) for part in item])
    if kind in pytree.SUPPORTED_NODES:
        parts, context = pytree.SUPPORTED_NODES[kind].flatten_fn(item)
        return kind, _Context(context), tuple([take(part, leaves) for part in parts])
    leaves.append(item)
    return None


def put(structure: Structure, leaves: Iterator[Any]) -> Any:
    """The item of this structure that holds `leaves`."""
    if structure is None:
        return next(leaves)
    kind, keys, parts = structure
    built = [put(part, leaves) for part in parts]
    if kind is dict:
        return dict(zip(keys, built, strict=True))
    if kind is list:
        return built
    if kind is tuple:
        return tuple(built)
    if isinstance(keys, _Context):
        return pytree.SUPPORTED_NODES[kind].unflatten_fn(built, keys.context)
    return kind(*built)
