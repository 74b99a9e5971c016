"""What the numbers of a penalty depend on, as a key.

A graph that is traced once and replayed holds every number that the penalty, its norm, its space
and its loss had then. With the library's own classes all of these are attributes, so they can be
compared before each replay. A caller's code may read anything, so that no key tells whether it
still does the same: it is run as it is, at every call.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from numbers import Number
from typing import Any

import torch
from torch import Tensor

_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None), range, torch.dtype})
_PACKAGE = __name__.partition(".")[0] + "."


class _Unknown(Exception):
    """Something whose numbers cannot be listed."""


class _Held:
    """A tensor as part of a key: the same one, not written to since. It is kept alive, so that no
    other tensor takes its place in memory."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version

    def __hash__(self) -> int:
        return hash((id(self.tensor), self.version))

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, _Held) and self.tensor is other.tensor
        return same and self.version == other.version  # type: ignore[union-attr]

    def __repr__(self) -> str:
        return f"<tensor of shape {tuple(self.tensor.shape)}, version {self.version}>"


def fingerprint(item: Any) -> Hashable | None:
    """Equal for equal numbers; None where a caller's code runs.

    Numbers and strings count by value, tensors by identity and version, objects of the library's
    own classes by class and attributes (less those that their class names in `volatile`), afresh
    at every call.

    >>> import doubleback as db
    >>> fingerprint(db.Deviation(1.0)) == fingerprint(db.Deviation(2.0))
    False
    >>> fingerprint(db.Custom(lambda out: out)) is None
    True
    """
    try:
        return _key(item)
    except _Unknown:
        return None


def _key(item: Any) -> Hashable:
    kind = type(item)
    if kind in _PLAIN:
        return item
    if isinstance(item, Tensor):
        if item.is_inference():  # it counts no changes
            raise _Unknown
        return _Held(item)
    if kind is tuple or kind is list:
        return (kind, *[_key(part) for part in item])
    if kind.__module__.startswith(_PACKAGE):
        return (kind, *[_key(value) for value in _attributes(item)])
    if isinstance(item, (Number, torch.device)):  # NumPy's numbers among them
        return item  # type: ignore[return-value]
    raise _Unknown


def _attributes(item: Any) -> Iterator[Any]:
    volatile = getattr(item, "volatile", ())
    try:
        held = vars(item)
    except TypeError:
        raise _Unknown from None
    if not volatile:
        return iter(held.values())
    return (value for name, value in held.items() if name not in volatile)
