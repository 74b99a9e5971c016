"""What a caller's function holds: a flat graph keeps its numbers, so they belong to the graph's
key, and takes its tensors as inputs, so they may change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from .calls import PLAIN
from .holder import restore, snapshot


def numbers(fn: Any) -> tuple:
    """Numbers, flags, strings and functions that `fn` reads where it stands: captured variables,
    attributes of captured objects and globals that it names, attributes of modules, arguments of
    a partial, and what lists and dictionaries among these hold.

    >>> rate = 0.1
    >>> numbers(lambda out, y: (1 - rate) * out)
    (0.1,)
    """
    return tuple(_numbers(_contents(fn)))


def likeness(fn: Any) -> Any:
    """The same for functions that do the same: one that a loop defines anew each time is known by
    its code and by what it captures, less the numbers and tensors that are followed anyway."""
    if not isinstance(fn, FunctionType):
        return id(fn)
    captured = [cell.cell_contents for cell in fn.__closure__ or () if _bound(cell)]
    captured += [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    opened = _opened(captured, modules=False)
    others = [v for v in opened if type(v) not in PLAIN and not isinstance(v, Tensor)]
    return fn.__code__, id(fn.__globals__), len(captured), *map(id, others)


def _bound(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def held_by(penalty: Any) -> tuple:
    """Those of the functions that a penalty was made with."""
    return tuple(number for fn in _functions(penalty) for number in _numbers(_contents(fn)))


def tensors_of(penalty: Any, loss: Any = None) -> list[Tensor]:
    """The tensors in the same places, for a penalty and a loss beside it."""
    own = getattr(loss, "fn", None)
    functions = [*_functions(penalty), *([] if own is None else [own])]
    return [v for fn in functions for v in _contents(fn) if isinstance(v, Tensor)]


def sameness(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """For each place the first that holds the same tensor: a graph that was traced when two places
    held one cannot tell them apart.

    >>> import torch
    >>> a, b = torch.zeros(2), torch.zeros(2)
    >>> sameness([a, b, a])
    (0, 1, 0)
    """
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(t), i) for i, t in enumerate(tensors))


@contextmanager
def unchanged(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Whoever writes to one of these in here is told so, and it is as it was before."""
    before = snapshot(tensors)
    yield
    for t in restore(before):
        raise RuntimeError(
            f"a function of yours writes to a tensor of shape {tuple(t.shape)} that it holds"
        )


def _functions(penalty: Any) -> list[Any]:
    loss, norm = getattr(penalty, "loss", None), getattr(penalty, "norm", None)
    own = (penalty, "v"), (loss, "fn"), (norm, "p")
    found = (getattr(holder, name, None) for holder, name in own)
    return [fn for fn in found if fn is not None]


def _numbers(values: Iterator[Any]) -> Iterator[Any]:
    return (v for v in values if type(v) in PLAIN)


def _contents(fn: Any) -> Iterator[Any]:
    if isinstance(fn, partial):
        yield from _contents(fn.func)
        yield from _opened((*fn.args, *fn.keywords.values()))
    elif isinstance(fn, MethodType):
        yield from _contents(fn.__func__)
        if isinstance(fn.__self__, nn.Module):
            yield from _opened((fn.__self__,))
        else:
            yield from _named(fn.__self__, fn.__func__)
    elif isinstance(fn, FunctionType):
        yield from _named(fn.__globals__, fn)
        yield from _opened(fn.__defaults__ or ())
        yield from _opened((fn.__kwdefaults__ or {}).values())
        for content in (cell.cell_contents for cell in fn.__closure__ or () if _bound(cell)):
            yield from _opened((content,))
            yield from _named(content, fn)
    elif isinstance(fn, nn.Module):
        yield from _opened((fn,))


def _opened(values: Any, modules: bool = True, depth: int = 3) -> Iterator[Any]:
    """The values, of lists and dictionaries what they hold; the same for modules, if wanted."""
    for value in values:
        if isinstance(value, nn.Module) and modules:
            for module in value.modules():
                yield from vars(module).values()
                yield from module._parameters.values()
                yield from module._buffers.values()
        elif isinstance(value, (list, tuple, dict)) and depth:
            yield len(value)
            yield from value if isinstance(value, dict) else ()
            items = value.values() if isinstance(value, dict) else value
            yield from _opened(items, modules, depth - 1)
        else:
            yield value


def _named(holder: Any, fn: Any) -> Iterator[Any]:
    """Attributes, or entries, under names that the function's code mentions."""
    held = holder if isinstance(holder, Mapping) else getattr(holder, "__dict__", {})
    code = getattr(fn, "__code__", None)
    return _opened(held[name] for name in getattr(code, "co_names", ()) if name in held)
