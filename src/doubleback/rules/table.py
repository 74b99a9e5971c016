"""One record per operator. A rule states its structure and writes only what is left (theory §2).

With y = F(u₁ … u_n), cotangents ξ, tangents q and second-order cotangents γ, four things are
asked of a node:

    forward     y, and whatever the derivatives will read (indices, statistics, a mask)
    backward    ξ_u = (∂_uF)* ξ_y                      (also carries γ in the second sweep)
    tangent     q_y = Σ_u ∂_uF q_u
    curvature   s_u = ∂_u ⟨ξ_y, Σ_u' ∂_u'F q_u'⟩       (the source that joins γ_u)

`backward` and `curvature` return one entry per tensor input and compute only the `wanted` ones.
None stands for zero everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from ..errors import RuleError
from ..graph import Meta, Node, Ref, map_refs

Tensors = Sequence[Tensor | None]
Three = tuple[Any, Tensors, Tensors]  # tangent, sources, cotangents of the inputs


class Structure(Enum):
    """What the planner may conclude without looking at the formulas."""

    LINEAR = "linear"
    BILINEAR = "bilinear"
    COORDINATEWISE = "coordinate-wise"
    PIECEWISE_LINEAR = "piecewise linear"
    STANDARDISATION = "standardisation"
    GENERAL = "general"
    CONSTANT = "constant"

    @property
    def curved(self) -> bool:
        """Whether ∂²F in the activations can differ from zero."""
        return self not in (Structure.LINEAR, Structure.PIECEWISE_LINEAR, Structure.CONSTANT)


@dataclass(slots=True)
class Call:
    """One executed node as its rule sees it.

    `inputs` are the tensor inputs in flattened order; one whose value the rule does not read
    (see `Rule.reads`) may be None, its shape is in `metas`. `out` is None unless the rule reads
    it. `saved` is what `forward` handed over; `shape` is the (first) output's.
    """

    node: Node
    inputs: tuple[Tensor | None, ...]
    metas: tuple[Meta, ...]
    out: Any = None
    saved: Any = None
    shape: tuple[int, ...] = ()

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument that is no tensor, by position or by name."""
        return self.node.argument(position, name, default)

    def value(self, slot: int) -> Tensor:
        """The value of a tensor input that the rule declared to read."""
        value = self.inputs[slot]
        if value is None:
            raise RuleError(f"{self.node} reads input {slot}, which its rule does not declare")
        return value

    def tensor(self, position: int, name: str) -> Tensor | None:
        """A tensor argument by position or by name; None where it was left out."""
        given = self.argument(position, name)
        return self.inputs[self.slot(given)] if isinstance(given, Ref) else None

    def slot(self, ref: Ref) -> int:
        return self.node.inputs.index(ref.index)

    def apply(self, inputs: Sequence[Any]) -> Any:
        """The operator on other tensor inputs, all other arguments unchanged."""
        values = iter(inputs)

        def next_value(_: Ref) -> Any:
            return next(values)

        args = map_refs(self.node.args, next_value)
        kwargs = map_refs(dict(self.node.kwargs), next_value)
        return self.node.op(*args, **kwargs)


PerExample = Callable[[Call, Sequence[bool]], bool]


def alone(slot: int = 0, where: Callable[[Call], bool] = lambda call: True) -> PerExample:
    """Example by example along the first axis of input `slot`, if no other input moves."""

    def per_example(call: Call, moving: Sequence[bool]) -> bool:
        return where(call) and not any(on for i, on in enumerate(moving) if i != slot)

    return per_example


def aligned(where: Callable[[Call], bool] = lambda call: True) -> PerExample:
    """Example by example if every moving input has as many axes as y, so that first axes meet."""

    def per_example(call: Call, moving: Sequence[bool]) -> bool:
        ranks = {len(m.shape) for m, on in zip(call.metas, moving, strict=True) if on}
        return where(call) and ranks <= {len(call.shape)}

    return per_example


@dataclass(frozen=True)
class Rule:
    """All that the sweeps need to know of one operator.

    reads: which values the derivatives read, of "inputs" and "output"; integer and boolean
        inputs (indices, masks) are always kept.
    reads_inputs(live): per input, whether its value is read when the `live` inputs are
        differentiated; None derives it from `reads`.
    curves(i, j): whether s_i depends on q_j, that is, whether ∂_i∂_jF can differ from zero.
    own: False for the generic rule, which any operator without a rule of its own runs on.
    tangent_curvature: both at once where they share work: (q_y | None, sources).
    at_once(call, ξ, q, wanted, tangent, pulled): the same, with ξ of the `pulled` inputs, by
        kernels in which all share passes over memory: (q_y | None, sources, ξ_u | None by slot);
        None where there are none, and the parts above do. A product before such a node waits for
        it with its source.
    onto(call, y, wanted, waiting): `backward` with the first input's gradient added to `waiting`
        in passing; None where it cannot.
    seeded: how it runs over many seeds at once (see `structures.py`); None: one after another.
    diagonal: whether ∂F is diagonal: coordinate-wise, in one activation.
    same_entries: whether y holds the entries of its first input in their order, under whatever
        shape: a view or a copy.
    per_example(call, moving): whether example b of y depends on example b alone of the `moving`
        inputs, examples along the first axis of each; None derives it from the three above.
        See `alone` and `aligned`.
    layer: the slots (x, θ) of a product K(θ, x) that counts as a layer (theory §5).
    light: whether `backward` for one input is a few passes over memory, without a product.
    forms(node): other rules for the same call, which read other values. The plan takes the first,
        this one included, that reads only what is kept anyway, and this one if none does.
    """

    structure: Structure
    forward: Callable[[Call], tuple[Any, Any]]
    backward: Callable[[Call, Any, Sequence[bool]], Tensors]
    tangent: Callable[[Call, Tensors], Any]
    curvature: Callable[[Call, Any, Tensors, Sequence[bool]], Tensors] | None = None
    tangent_curvature: (
        Callable[[Call, Any, Tensors, Sequence[bool], bool], tuple[Any, Tensors]] | None
    ) = None
    at_once: (
        Callable[[Call, Any, Tensors, Sequence[bool], bool, Sequence[bool]], Three | None] | None
    ) = None
    onto: Callable[[Call, Any, Sequence[bool], Tensor], Tensors | None] | None = None
    reads: frozenset[str] = frozenset({"inputs"})
    reads_inputs: Callable[[Sequence[bool]], Sequence[bool]] | None = None
    curves: Callable[[int, int], bool] = lambda i, j: True
    own: bool = True
    seeded: Any = None
    diagonal: bool = False
    same_entries: bool = False
    per_example: PerExample | None = None
    layer: tuple[int, int] | None = None
    light: bool = False
    forms: Callable[[Node], Sequence[Rule]] = lambda node: ()

    def __post_init__(self) -> None:
        curved = self.curvature is not None or self.tangent_curvature is not None
        if self.structure.curved and not curved:
            raise RuleError(f"a {self.structure.value} rule needs curvature or tangent_curvature")
        unknown = set(self.reads) - {"inputs", "output"}
        if unknown:
            raise RuleError(f"reads may hold 'inputs' and 'output', not {sorted(unknown)}")

    @property
    def renews(self) -> bool:
        """Whether ξ_u is rather computed again than held: it is light, declared or derived."""
        standardises = self.structure is Structure.STANDARDISATION
        return self.light or self.diagonal or self.same_entries or standardises

    def separates(self, call: Call, moving: Sequence[bool]) -> bool:
        """`per_example`, declared or derived: seeds that may join the batch do not meet in it."""
        declared = self.per_example or getattr(self.seeded, "per_example", None)
        if declared is not None:
            return declared(call, moving)
        return self.diagonal or self.same_entries

    def both(
        self, call: Call, xi: Any, q: Tensors, wanted: Sequence[bool], tangent: bool
    ) -> tuple[Any, Tensors]:
        """The tangent (when asked for) and the curvature sources (when any is wanted), which come
        first: in a flat graph ξ is free before there is a tangent."""
        curve = any(wanted) and xi is not None
        if curve and self.at_once is not None:
            found = self.at_once(call, xi, q, wanted, tangent, (False,) * len(wanted))
            if found is not None:
                return found[:2]
        if curve and self.tangent_curvature is not None:
            return self.tangent_curvature(call, xi, q, wanted, tangent)
        sources: Tensors = (None,) * len(call.inputs)
        if curve and self.curvature is not None:
            sources = self.curvature(call, xi, q, wanted)
        return self.tangent(call, q) if tangent else None, sources

    def all_three(
        self,
        call: Call,
        xi: Any,
        q: Tensors,
        wanted: Sequence[bool],
        tangent: bool,
        pulled: Sequence[bool],
    ) -> Three:
        """`both`, and ξ of the `pulled` inputs."""
        if self.at_once is not None:
            found = self.at_once(call, xi, q, wanted, tangent, pulled)
            if found is not None:
                return found
        return *self.both(call, xi, q, wanted, tangent), self.backward(call, xi, pulled)


def light(rule: Rule) -> Rule:
    """The rule, declared light."""
    return replace(rule, light=True)


def run(call: Call) -> tuple[Any, None]:
    """forward: the operator itself."""
    return call.apply(call.inputs), None


_TABLE: dict[Any, Rule] = {}


def register(op: Any, rule: Rule, *, replace: bool = False) -> None:
    """Enter a rule for one operator overload. A second rule for it is an error.

    Beside its formulas a rule declares what the planner may use, all of it off by default:

        diagonal       ∂F is diagonal                → Jacobians in closed form
        same_entries   y is u under another shape    → a dense layer behind it is still the first
        per_example    no example meets another      → Jacobians by columns and through a waist
        layer          K(θ, x) with slots (x, θ)     → its K, Kᵀ and K□ in `explain`
        light          ξ_u is a pass over memory     → ξ_u is computed again instead of held
        forms          the same off other values     → what is kept anyway is read

    `check_rule` tests the first three and the forms on its sample.
    """
    if op in _TABLE and not replace:
        raise RuleError(f"{op} has a rule already; pass replace=True to override it")
    _TABLE[op] = rule


def unregister(op: Any) -> None:
    """Remove a rule; the operator then runs on the generic rule."""
    if op not in _TABLE:
        raise RuleError(f"{op} has no rule to remove")
    del _TABLE[op]


def lookup(op: Any) -> Rule | None:
    return _TABLE.get(op)


def registered() -> tuple[Any, ...]:
    """Every operator that has a rule of its own."""
    return tuple(_TABLE)


def overload(name: str) -> Any | None:
    """'relu.default' → aten.relu.default, an operator of the library's own where aten has none, or
    None where this torch has no such overload."""
    packet, _, which = name.partition(".")
    operator = getattr(torch.ops.aten, packet, None) or getattr(torch.ops.doubleback, packet, None)
    return getattr(operator, which or "default", None) if operator is not None else None


def named(table: Iterable[tuple[Rule, Sequence[str]]]) -> Iterator[tuple[str, Rule]]:
    """(operator's name, rule) of each, from rules with the names of the operators that they hold
    for."""
    return ((name, rule) for rule, names in table for name in names)


def tangent_of(q: Tensors, slot: int = 0) -> Tensor:
    """The tangent of an input that is known to move."""
    moved = q[slot]
    assert moved is not None
    return moved


def zeros(meta: Meta) -> Tensor:
    """A zero of a value's shape that takes no memory."""
    return torch.zeros((), dtype=meta.dtype, device=meta.device).expand(meta.shape)


def sum_to(grad: Tensor, shape: Sequence[int]) -> Tensor:
    """The transpose of broadcasting: sum over the axes that were expanded."""
    shape = tuple(shape)
    return grad if tuple(grad.shape) == shape else grad.sum_to_size(shape)


def add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """Sum where None is zero.

    An expanded summand comes second: the sum has the layout of the other. (PyTorch says so in any
    order, except of bfloat16 without numbers, where a compiler then gets the wrong layout.)
    """
    if left is None or right is None:
        return right if left is None else left
    return right + left if 0 in left.stride() else left + right
