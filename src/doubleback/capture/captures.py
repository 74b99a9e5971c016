"""The graphs that a penalised module has captured, and when it has to capture anew.

A graph holds the numbers that the network's code read while it was captured: a dropout rate, a
temperature, the blend of a growing critic. So plain attributes of modules belong to its key, and
the plain values in their lists, tuples, dictionaries and configurations.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import warnings
from collections import Counter
from typing import Any

from torch import nn

from ..errors import CaptureError, CaptureWarning
from ..graph import Graph
from .calls import PLAIN, Arguments, graph_key, remember
from .exporting import capture
from .holder import OWN

MANY = 8  # captures for changed attributes, after which it is said what they cost


class Captures:
    """Graph, or the reason why there is none, by what it depends on."""

    def __init__(self) -> None:
        # with the modules that the key numbers, so that no other one gets such a number
        self._found: dict[Any, tuple[Graph | CaptureError, list[nn.Module]]] = {}
        self._containers: list[tuple[dict[str, Any], str]] = []  # a module's attributes, and a name
        self._attributes: dict[str, Any] = {}
        self._changes: Counter[Any] = Counter()

    def __call__(self, net: nn.Module, call: Arguments) -> Graph | CaptureError:
        key = self._key(net, call)
        found = self._found.get(key)
        if found is not None:
            return found[0]
        usual = graph_key(net, call, attributes=False)
        found = self._found.get(usual)  # what could not be captured is not tried again
        if found is not None:
            return found[0]
        modules = list(net.modules())
        self._containers = _containers(modules)
        key = self._key(net, call)
        try:
            graph = capture(net, call.args, call.kwargs, call.still)
        except CaptureError as error:
            remember(self._found, usual, (error, modules))
            return error
        remember(self._found, key, (graph, modules))
        remember(self._found, self._key(net, call), (graph, modules))  # forward counts its calls
        self._watch(net, usual)
        return graph

    def _key(self, net: nn.Module, call: Arguments) -> Any:
        held = tuple([content(module.get(name)) for module, name in self._containers])
        return graph_key(net, call), held

    def _watch(self, net: nn.Module, usual: Any) -> None:
        """Say once which attributes have it captured again and again."""
        now = {
            f"{name}.{attribute}".lstrip("."): content(value)
            for name, module in net.named_modules()
            for attribute, value in vars(module).items()
            if attribute not in OWN and (type(value) in PLAIN or _is_container(value))
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


# ---------------------------------------------------------------------------- containers

DEEPEST = 4


def _is_container(item: Any) -> bool:
    return type(item) in (list, tuple, dict) or _is_configuration(item)


def _is_configuration(item: Any) -> bool:
    """A record of numbers and flags, as far as one can tell: a dataclass, a namespace, or what
    calls itself a configuration."""
    if isinstance(item, (type, nn.Module)) or not hasattr(item, "__dict__"):
        return False
    named = isinstance(item, (types.SimpleNamespace, argparse.Namespace))
    return named or dataclasses.is_dataclass(item) or type(item).__name__.endswith("Config")


def _containers(modules: list[nn.Module]) -> list[tuple[dict[str, Any], str]]:
    """Where the containers of these modules are; one that many share is named once."""
    found, seen = [], set()
    for module in modules:
        for name, value in vars(module).items():
            if name in OWN or not _is_container(value) or id(value) in seen:
                continue
            seen.add(id(value))
            found.append((vars(module), name))
    return found


def content(item: Any, depth: int = 0) -> Any:
    """The plain values in an attribute, so that they can be told apart.

    >>> content({"k": 2, "sizes": [1, (2, 3)]})
    (('k', 2), ('sizes', (1, (2, 3))))
    """
    if item is None or type(item) in PLAIN:
        return item
    if depth < DEEPEST:
        if _is_configuration(item):
            item = vars(item)
        if type(item) is dict:
            item = tuple(item.items())
        if type(item) in (list, tuple):
            plain = PLAIN.issuperset(map(type, item))  # as most are, and every call asks
            return tuple(item) if plain else tuple([content(i, depth + 1) for i in item])
    return type(item)  # anything else counts by its kind
