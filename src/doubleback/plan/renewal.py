"""Cotangents that are computed again where they are read, instead of held from sweep to sweep.

The tangent sweep reads ξ at every node that bends. Where u = K(θ, w) goes into y = F(u) alone and
F bends too, ξ_u = (∂F)*ξ_y: with F light (one pass over memory, as for activations and norms) only
ξ_y is held, and the tangent sweep, which comes to K before F, pulls it through F once more. Light
nodes that do not bend themselves (permutations, casts) may stand between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from ..graph import Graph

if TYPE_CHECKING:
    from .steps import Step


@dataclass(frozen=True, slots=True, eq=False)
class Renewal:
    """ξ of a node's output number `place` is what `reader` pulls to its input `slot`."""

    place: int
    reader: Step
    slot: int


def find_renewals(graph: Graph, steps: Sequence[Step], target: int) -> dict[int, Renewal]:
    """By node, how its ξ is had from that of the one node which reads it.

    A node is left out where its ξ has several sources (the penalised output's own among them),
    where it comes through a heavy node or a larger one, and where nobody down the line holds any.
    """
    readers: dict[int, list[tuple[Step, int]]] = {}
    for step in steps:
        for slot, (v, on) in enumerate(zip(step.node.inputs, step.pull, strict=True)):
            if on:
                readers.setdefault(v, []).append((step, slot))
    found: dict[int, Renewal] = {}
    for step in reversed(steps):
        places = [i for i, v in enumerate(step.node.outputs) if v in readers or v == target]
        if len(places) != 1:
            continue
        value = step.node.outputs[places[0]]
        if value == target or len(readers[value]) != 1:
            continue
        reader, slot = readers[value][0]
        held = reader.curves or reader.node.index in found
        grows = prod(graph.shape(reader.node.outputs[0])) > prod(graph.shape(value))
        if held and reader.rule.renews and not grows:
            found[step.node.index] = Renewal(places[0], reader, slot)
    return found
