"""Sweeps or autograd: which is quicker where a network is so small that the host decides.

Both compute the same products. The sweeps spare work where PyTorch's own second derivative takes
many passes (normalisation), or slow kernels (convolutions, above all in groups); in return the host
does more before the first kernel starts. Where what is spared weighs less than that, autograd is
the quicker way, and the model takes it. All of this is counted from shapes, so that the same
network always takes the same way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..graph import Graph, Node
from ..rules import Structure, find_rule

aten = torch.ops.aten

# On one core of a CPU: how much is done in a microsecond; what the sweeps cost beside kernels, in
# all, at a normalisation, and at an activation with curvature, which they take in more steps.
FLOPS, BYTES = 20_000, 8_000
HOST, NORM, CURVED = 450.0, 300.0, 40.0
LARGE = 2000.0  # the convolution from which on its weight gradient has the better kernel

# A long step hides the host's work: this share of it may be lost.
SHARE = 0.02
STEP = 5  # the four sweeps with their weight gradients, in forward passes

_DIFFERENTIATED_TWICE = (
    Structure.LINEAR, Structure.BILINEAR, Structure.COORDINATEWISE, Structure.PIECEWISE_LINEAR,
    Structure.STANDARDISATION, Structure.CONSTANT,
)  # fmt: skip
_ALSO = (
    aten._softmax, aten._log_softmax, aten.softmax, aten.log_softmax, aten.logsumexp,
    aten.unsafe_split,
)  # fmt: skip
_NOT = (aten.hardsigmoid, aten.hardswish, aten.embedding_bag, aten._embedding_bag)
_CONVOLUTIONS = (aten.conv1d, aten.conv2d, aten.conv3d, aten.convolution)
_PRODUCTS = (aten.linear, aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.matmul)


@dataclass(frozen=True)
class Choice:
    """spared: microseconds of a step that the sweeps save; host: what they cost; step: how long it
    takes, all by estimate. possible: whether stock autograd knows every derivative."""

    spared: float
    host: float
    step: float
    possible: bool

    @property
    def autograd(self) -> bool:
        """Whether autograd is the quicker way."""
        return self.possible and self.spared + SHARE * self.step < self.host

    def __str__(self) -> str:
        way = "autograd" if self.autograd else "sweeps"
        if not self.possible:
            return f"{way}: PyTorch lacks a second derivative that this network needs"
        return (
            f"{way}: of a step of about {_time(self.step)}, sweeps spare {_time(self.spared)} "
            f"of work and take {_time(self.host)} of the host's"
        )


def _time(microseconds: float) -> str:
    if microseconds < 1000:
        return f"{microseconds:.0f} µs"
    return f"{microseconds / 1000:.3g} ms"


def choose(graph: Graph) -> Choice:
    """For a network on a CPU; elsewhere kernels run while the host goes on, so that sweeps are
    never chosen against."""
    metas = [m for m in graph.values if m is not None]
    if any(m.device.type != "cpu" for m in metas):
        return Choice(0.0, 0.0, 0.0, False)
    spared, work, host = 0.0, 0.0, HOST
    for node in graph.nodes:
        if not node.inputs:
            continue
        if not _known_twice(node):
            return Choice(0.0, 0.0, 0.0, False)
        own, saved, more = _cost(graph, node)
        work += own
        spared += saved
        host += more
    return Choice(spared, host, STEP * work, True)


def _known_twice(node: Node) -> bool:
    packet = _packet(node)
    if packet in _NOT:
        return False
    return packet in _ALSO or find_rule(node.op).structure in _DIFFERENTIATED_TWICE


def _packet(node: Node) -> Any:
    return getattr(node.op, "overloadpacket", None)


def _cost(graph: Graph, node: Node) -> tuple[float, float, float]:
    """Microseconds: (of the forward pass; of a step, what the sweeps spare; what they add)."""
    metas = [graph.values[v] for v in (*node.inputs, *node.outputs)]
    passes = sum(m.bytes for m in metas if m is not None) / BYTES
    if not node.outputs:
        return 0.0, 0.0, 0.0
    shape = graph.shape(node.outputs[0])
    once = math.prod(shape) * 4 / BYTES  # over the result
    packet = _packet(node)
    if packet in _CONVOLUTIONS:
        weight = graph.shape(node.inputs[1])
        products = 2 * math.prod(shape) * math.prod(weight[1:]) / FLOPS
        grouped = node.argument(8 if packet is aten.convolution else 6, "groups", 1) != 1
        spared = HOST + 40 * once if grouped else 0.3 * max(0.0, products - LARGE)
        return max(products, passes), spared, 0.0
    if packet in _PRODUCTS:
        inner = graph.shape(node.inputs[1 if packet in (aten.addmm, aten.baddbmm) else 0])[-1]
        return max(2 * math.prod(shape) * inner / FLOPS, passes), 0.0, 0.0
    structure = find_rule(node.op).structure
    if structure is Structure.STANDARDISATION:
        return 2 * passes, 6 * once, NORM
    return passes, 0.0, CURVED if structure is Structure.COORDINATEWISE else 0.0


__all__ = ["Choice", "choose"]
