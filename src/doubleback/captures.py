"""The graphs that a penalised module has captured, and when it has to capture anew.

A graph holds the numbers that the network's code read while it was captured: a dropout rate, a
temperature, the blend of a growing critic. So plain attributes of modules belong to its key.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

from torch import nn

from .calls import PLAIN, Arguments, graph_key, remember
from .capture import capture
from .errors import CaptureError, CaptureWarning
from .graph import Graph

MANY = 8  # captures for changed attributes, after which it is said what they cost


class Captures:
    """Graph, or the reason why there is none, by what it depends on."""

    def __init__(self) -> None:
        # with the modules that the key numbers, so that no other one gets such a number
        self._found: dict[Any, tuple[Graph | CaptureError, list[nn.Module]]] = {}
        self._attributes: dict[str, Any] = {}
        self._changes: Counter[Any] = Counter()

    def __call__(self, net: nn.Module, call: Arguments) -> Graph | CaptureError:
        key = graph_key(net, call)
        found = self._found.get(key)
        if found is not None:
            return found[0]
        usual = graph_key(net, call, attributes=False)
        found = self._found.get(usual)  # what could not be captured is not tried again
        if found is not None:
            return found[0]
        modules = list(net.modules())
        try:
            graph = capture(net, call.args, call.kwargs)
        except CaptureError as error:
            remember(self._found, usual, (error, modules))
            return error
        remember(self._found, key, (graph, modules))
        remember(self._found, graph_key(net, call), (graph, modules))  # forward counts its calls
        self._watch(net, usual)
        return graph

    def _watch(self, net: nn.Module, usual: Any) -> None:
        """Say once which attributes have it captured again and again."""
        now = {
            f"{name}.{attribute}".lstrip("."): value
            for name, module in net.named_modules()
            for attribute, value in vars(module).items()
            if type(value) in PLAIN and attribute != "training"
        }
        before, self._attributes = self._attributes, now
        changed = [name for name, value in now.items() if before.get(name, value) != value]
        self._changes[usual] += bool(changed)
        if changed and self._changes[usual] == MANY:
            warnings.warn(
                f"{type(net).__name__} was captured {MANY} times because {', '.join(changed)} "
                "changed, and will be at every change; hold what changes often in a buffer or "
                "pass it as a tensor",
                CaptureWarning,
                stacklevel=2,
            )
