"""Numbers that a caller's function holds: a flat graph keeps them, so they belong to its key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from .calls import PLAIN


def numbers(fn: Any) -> tuple:
    """Numbers, flags, strings and functions that `fn` reads where it stands: captured variables,
    those in captured dictionaries, attributes of captured objects and globals that it names,
    attributes of a module, arguments of a partial."""
    return tuple(_numbers(fn))


def held_by(penalty: Any) -> tuple:
    """Those of the functions that a penalty was made with."""
    loss, norm = getattr(penalty, "loss", None), getattr(penalty, "norm", None)
    own = (penalty, "v"), (loss, "fn"), (norm, "p")
    found = (getattr(holder, name, None) for holder, name in own)
    return tuple(number for fn in found if fn is not None for number in _numbers(fn))


def _numbers(fn: Any) -> Iterator[Any]:
    if isinstance(fn, partial):
        yield from _numbers(fn.func)
        yield from _plain((*fn.args, *fn.keywords.values()))
    elif isinstance(fn, MethodType):
        yield from _numbers(fn.__func__)
        yield from _named(fn.__self__, fn.__func__)
    elif isinstance(fn, FunctionType):
        yield from _named(fn.__globals__, fn)
        yield from _plain(fn.__defaults__ or ())
        for cell in fn.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not bound yet
                continue
            yield from _plain((content,))
            yield from (
                _plain(content.values()) if isinstance(content, dict) else _named(content, fn)
            )
    elif isinstance(fn, nn.Module):
        for module in fn.modules():
            yield from _plain(vars(module).values())


def _plain(values: Any) -> Iterator[Any]:
    return (v for v in values if type(v) in PLAIN)


def _named(holder: Any, fn: Any) -> Iterator[Any]:
    """Attributes, or entries, under names that the function's code mentions."""
    held = holder if isinstance(holder, Mapping) else getattr(holder, "__dict__", {})
    code = getattr(fn, "__code__", None)
    return _plain(held[name] for name in getattr(code, "co_names", ()) if name in held)
