"""What moves along a path, and how: degrees of polynomials, before anything runs.

On a piece every value is a polynomial in the path's coordinate. Linear operators and kinks keep
the degree, a product adds degrees. Anything else that moves is refused, with its line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..errors import NotPiecewiseLinearError
from ..graph import Node, Ref
from ..operators.multilinear import is_plain
from ..rules import Rule, Structure
from .kinks import Kink, find_kink
from .program import Program

aten = torch.ops.aten

MAX_DEGREE = 12  # a monomial basis on [−1, 1] keeps twelve digits up to here

_PASSED = (aten.detach.default, torch.ops.doubleback.stop_gradient.default)


@dataclass(frozen=True, eq=False)
class Motion:
    """Degrees along one path.

    degree: of every moving value; slope: of ξ = J*v for constant v (0 where J does not move);
    kinks: by node, those whose input moves.
    """

    degree: Mapping[int, int]
    slope: int
    kinks: Mapping[int, Kink]

    def moves(self, node: Node) -> bool:
        return any(v in self.degree for v in node.inputs)


def factors(rule: Rule, node: Node) -> tuple[int, int] | None:
    """The two inputs whose product the node takes; None for any other node."""
    if node.op is aten.einsum.default:
        plain = len(node.inputs) == 2 and is_plain(str(node.args[0]))
        return (0, 1) if plain else None
    if rule.structure is not Structure.BILINEAR:
        return None
    slots = range(len(node.inputs))
    return next(((i, j) for i in slots for j in slots if i < j and rule.curves(i, j)), None)


def partner(rule: Rule, node: Node, slot: int) -> int | None:
    """The other factor of the product that an input enters, None where it is only added."""
    pair = factors(rule, node)
    if pair is None or slot not in pair:
        return None
    return pair[1] if slot == pair[0] else pair[0]


def find_motion(program: Program, leaves: Mapping[int, int]) -> Motion:
    """Degrees of everything that the moving `leaves` (value → degree) reach."""
    degree, kinks, discrete = dict(leaves), {}, set()
    for node in program.nodes:
        for v in node.inputs:
            if v in discrete:
                raise NotPiecewiseLinearError(
                    f"{_name(node)} reads indices that change along this path"
                )
        if not any(v in degree for v in node.inputs):
            continue
        found, kink = _degree(program, node, degree)
        if kink is not None:
            kinks[node.index] = kink
        for v in node.outputs:
            if not program.differentiable(v):
                discrete.add(v)
            elif found > 0:
                degree[v] = found
        if found > MAX_DEGREE:
            raise NotPiecewiseLinearError(
                f"along this path {_name(node)} is a polynomial of degree {found}, "
                f"beyond {MAX_DEGREE}; move the parameters of fewer layers at a time"
            )
    return Motion(degree, _cotangent_degree(program, degree), kinks)


def _degree(program: Program, node: Node, degree: Mapping[int, int]) -> tuple[int, Kink | None]:
    rule = program.rules[node.index]
    moving = [i for i, v in enumerate(node.inputs) if v in degree]
    top = max(degree[node.inputs[i]] for i in moving)
    pair = factors(rule, node)
    if node.op in _PASSED or rule.structure is Structure.LINEAR:
        return top, None
    if node.op is aten.threshold.default:
        raise NotPiecewiseLinearError(
            f"{_name(node)} jumps in its value, not only in its derivative; use relu or clamp"
        )
    kink = find_kink(program.call(node, [None] * len(node.inputs)))
    if kink is not None:
        return top, kink
    if pair is not None:
        return max(top, sum(degree.get(node.inputs[i], 0) for i in pair)), None
    if rule.structure is Structure.BILINEAR:
        return top, None  # the other factor is a number
    if node.op is aten.div.Tensor and moving == [0] and isinstance(node.args[0], Ref):
        return top, None
    if node.op in (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf):
        return top, None  # the mask is a Boolean: it cannot move
    raise NotPiecewiseLinearError(
        f"{_name(node)} is not piecewise linear (it is "
        f"{'smooth or general' if rule.structure.curved else rule.structure.value}), and its input "
        "moves along this path. Breakpoints exist for (leaky) ReLU, abs, clamp and max-pool nets: "
        "replace it, end the network before it (logits, not probabilities), or choose a path "
        "behind it"
    )


def _name(node: Node) -> str:
    """'aten.tanh.default at net.py:7: torch.tanh(x), in module fc'."""
    inside = f", in module '{node.module}'," if node.module else ""
    return f"{node.op} at {node.source}{inside}"


def _cotangent_degree(program: Program, degree: Mapping[int, int]) -> int:
    xi = {program.out: 0}
    for node in reversed(program.nodes):
        known = [xi[v] for v in node.outputs if v in xi]
        if not known or node.op in _PASSED:
            continue
        rule = program.rules[node.index]
        for slot, v in enumerate(node.inputs):
            if v not in program.active:
                continue
            other = partner(rule, node, slot)
            gain = 0 if other is None else degree.get(node.inputs[other], 0)
            xi[v] = max(xi.get(v, 0), max(known) + gain)
    return xi.get(program.x, 0)


def passes_through(node: Node) -> bool:
    """Whether the node hands on values and stops derivatives only."""
    return node.op in _PASSED
