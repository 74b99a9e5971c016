"""Each item in a process of its own, ended after a time limit, so that no failure, crash or endless
loop loses another item's result."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch


def forked(
    function: Callable[[Any], Iterable[Any]], items: Iterable[Any], limit: float
) -> Iterator[tuple[Any, list[Any], str | None]]:
    """(item, what `function(item)` yielded, why it did not end well) for each item, in order."""
    context = multiprocessing.get_context("fork")
    for item in items:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_send, args=(function, item, theirs), daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads of PyTorch's, all idle
            process.start()
        theirs.close()
        until, found, ended = time.monotonic() + limit, [], False
        with contextlib.suppress(EOFError):
            while ours.poll(max(0.0, until - time.monotonic())):
                found.append(ours.recv())
            ended = True  # by the clock: the other end is still open
        why = None
        if ended:
            process.kill()
            why = f"not finished after {limit:.0f} s"
        process.join()
        if process.exitcode and not ended:
            why = f"the process ended with {process.exitcode}"
        ours.close()
        yield item, found, why


def _send(function: Callable[[Any], Iterable[Any]], item: Any, pipe: Any) -> None:
    torch.set_num_threads(1)
    for result in function(item):
        pipe.send(result)
    pipe.close()
