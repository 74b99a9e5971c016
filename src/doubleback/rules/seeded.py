"""Many seeds at once: how a rule runs when ξ and q carry a leading seed axis (theory §6).

The values a rule reads have no such axis; they broadcast over it and are never copied. With
ξ⟨i⟩ and q⟨i⟩ for seeds i = 1 … c,

    backward   ξ_u⟨i⟩ = (∂_uF)* ξ_y⟨i⟩                          (c, *shape of u)
    both       q_y⟨i⟩ = Σ_u ∂_uF q_u⟨i⟩                          (c, *shape of y)
               s_u = Σ_i ∂_u ⟨ξ_y⟨i⟩, Σ_u' ∂_u'F q_u'⟨i⟩⟩        shape of u: summed over seeds

Four ways to do so, the cheapest that a rule allows:

    broadcast  coordinate-wise functions: g″⊙Σ_i q⟨i⟩⊙ξ⟨i⟩
    fold       dense layers and convolutions: seeds join the batch, K□ sums over both
    vmap       any rule made of PyTorch operators
    loop       everything else (fused kernels, rules that call autograd): one seed after another
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._torch import is_vmap_fallback_enabled, pytree, set_vmap_fallback_enabled
from ..counting import folded
from ..dtypes import accumulation
from .table import Call, PerExample, Rule, Tensors, add, alone

Backward = Callable[[Rule, Call, Any, Sequence[bool], int], Tensors]
Both = Callable[[Rule, Call, Any, Tensors, Sequence[bool], bool, int], tuple[Any, Tensors]]


@dataclass(frozen=True)
class Seeded:
    """One way of running a rule over a seed axis; see the module's docstring.

    per_example: where seeds may join the batch, since examples do not meet there.
    """

    name: str
    backward: Backward
    both: Both
    per_example: PerExample | None = None


def seeded_backward(rule: Rule, call: Call, y: Any, wanted: Sequence[bool], seeds: int) -> Tensors:
    """ξ_u⟨i⟩ for every wanted input and every seed."""
    return (rule.seeded or LOOP).backward(rule, call, y, wanted, seeds)


def seeded_both(
    rule: Rule, call: Call, xi: Any, q: Tensors, wanted: Sequence[bool], need: bool, seeds: int
) -> tuple[Any, Tensors]:
    """q_y⟨i⟩ for every seed (where `need`ed), and the sources summed over them."""
    return (rule.seeded or LOOP).both(rule, call, xi, q, wanted, need, seeds)


# --------------------------------------------------------------------------------- loop


def _at(nested: Any, i: int) -> Any:
    if isinstance(nested, (tuple, list)):
        return tuple(None if part is None else part[i] for part in nested)
    return None if nested is None else nested[i]


def _stacked(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if isinstance(first, (tuple, list)):
        return tuple(_stacked([part[k] for part in parts]) for k in range(len(first)))
    return None if first is None else torch.stack(list(parts))


def _loop_backward(rule: Rule, call: Call, y: Any, wanted: Sequence[bool], seeds: int) -> Tensors:
    return _stacked([tuple(rule.backward(call, _at(y, i), wanted)) for i in range(seeds)])


def _loop_both(
    rule: Rule, call: Call, xi: Any, q: Tensors, wanted: Sequence[bool], need: bool, seeds: int
) -> tuple[Any, Tensors]:
    outs, total = [], [None] * len(call.inputs)
    for i in range(seeds):
        out, sources = rule.both(call, _at(xi, i), _at(q, i), wanted, need)
        outs.append(out)
        total = [add(t, s) for t, s in zip(total, sources, strict=True)]  # type: ignore[misc]
    return _stacked(outs), total


LOOP = Seeded("loop", _loop_backward, _loop_both)


# --------------------------------------------------------------------------------- vmap


def _mapped(fn: Callable[..., Any], nested: tuple, seeds: int) -> Any:
    """vmap over the tensors of nested tuples in which None stands for zero."""
    items, spec = pytree.tree_flatten(nested)
    places = [i for i, item in enumerate(items) if item is not None]
    found: list[Any] = []

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        filled: list[Any] = [None] * len(items)
        for place, t in zip(places, given, strict=True):
            filled[place] = t
        parts, result_spec = pytree.tree_flatten(fn(*pytree.tree_unflatten(filled, spec)))
        found[:] = [result_spec, [part is not None for part in parts]]
        return tuple(part for part in parts if part is not None)

    with folded(seeds):
        results = iter(torch.func.vmap(run)(*(items[i] for i in places)))
    result_spec, present = found
    return pytree.tree_unflatten([next(results) if on else None for on in present], result_spec)


_UNMAPPED: set[Any] = set()  # operators whose rule vmap cannot run


@contextmanager
def _without_fallback() -> Iterator[None]:
    """vmap's own fall-back loops over seeds with a warning; ours does so without."""
    allowed = is_vmap_fallback_enabled()
    set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        set_vmap_fallback_enabled(allowed)


def _try(call: Call, fn: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """By vmap, or one seed after another where an operator has no batching rule."""
    if call.node.op not in _UNMAPPED:
        try:
            with _without_fallback():
                return fn()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            _UNMAPPED.add(call.node.op)
    return otherwise()


def vmapped(pull: Callable[[Call, Any, Sequence[bool]], Tensors] | None = None) -> Seeded:
    """Run by `torch.func.vmap`. pull: in place of the rule's backward, which may call autograd."""

    def backward(rule: Rule, call: Call, y: Any, wanted: Sequence[bool], seeds: int) -> Tensors:
        fn = pull or rule.backward
        return _try(
            call,
            lambda: _mapped(lambda part: tuple(fn(call, part, wanted)), (y,), seeds),
            lambda: LOOP.backward(rule, call, y, wanted, seeds),
        )  # fmt: skip

    def both(
        rule: Rule, call: Call, xi: Any, q: Tensors, wanted: Sequence[bool], need: bool, seeds: int
    ) -> tuple[Any, Tensors]:
        def run() -> tuple[Any, Tensors]:
            out, sources = _mapped(
                lambda y, moved: rule.both(call, y, moved, wanted, need), (xi, tuple(q)), seeds
            )
            return out, [None if s is None else s.sum(0) for s in sources]

        return _try(
            call, run, lambda: LOOP.both(rule, call, xi, q, wanted, need, seeds)
        )  # fmt: skip

    return Seeded("vmap", backward, both)


VMAP = vmapped()


# --------------------------------------------------------------------------------- fold


def fold(slot: int, applies: Callable[[Call], bool]) -> Seeded:
    """Seeds join the batch of input `slot`, whose leading axis the operator treats example by
    example; K□ then sums over seeds as it sums over examples. By `vmap` where another input
    moves or bends too, or where `applies` says no."""
    fits = alone(slot, applies)

    def joined(call: Call, seeds: int) -> Call:
        meta = call.metas[slot]
        metas, inputs = list(call.metas), list(call.inputs)
        metas[slot] = replace(meta, shape=(seeds * meta.shape[0], *meta.shape[1:]))
        inputs[slot] = None
        shape = (seeds * call.shape[0], *call.shape[1:])
        return replace(call, metas=tuple(metas), inputs=tuple(inputs), shape=shape)

    def apart(t: Tensor | None, seeds: int) -> Tensor | None:
        return None if t is None else t.unflatten(0, (seeds, -1))

    def backward(rule: Rule, call: Call, y: Any, wanted: Sequence[bool], seeds: int) -> Tensors:
        if not fits(call, wanted):
            return VMAP.backward(rule, call, y, wanted, seeds)
        with folded(seeds):
            grads = rule.backward(joined(call, seeds), y.flatten(0, 1), wanted)
        return tuple(apart(g, seeds) for g in grads)

    def both(
        rule: Rule, call: Call, xi: Any, q: Tensors, wanted: Sequence[bool], need: bool, seeds: int
    ) -> tuple[Any, Tensors]:
        if not fits(call, [part is not None for part in q]):
            return VMAP.both(rule, call, xi, q, wanted, need, seeds)
        y = None if xi is None else xi.flatten(0, 1)
        along = tuple(None if part is None else part.flatten(0, 1) for part in q)
        with folded(seeds):
            out, sources = rule.both(joined(call, seeds), y, along, wanted, need)
        return apart(out, seeds), sources

    return Seeded("fold", backward, both, fits)


def choose(pick: Callable[[Call, Tensors], Seeded]) -> Seeded:
    """One way or another, by what moves; backward by vmap."""

    def both(
        rule: Rule, call: Call, xi: Any, q: Tensors, wanted: Sequence[bool], need: bool, seeds: int
    ) -> tuple[Any, Tensors]:
        return pick(call, q).both(rule, call, xi, q, wanted, need, seeds)

    return Seeded("vmap", VMAP.backward, both)


# ---------------------------------------------------------------------------- broadcast


def broadcast(
    scale: Callable[[Call, Tensor], Tensor], bend: Callable[[Call, Tensor], Tensor] | None
) -> Seeded:
    """Coordinate-wise functions. scale(call, y) → g′⊙y; bend(call, p) → g″⊙p."""

    def backward(rule: Rule, call: Call, y: Any, wanted: Sequence[bool], seeds: int) -> Tensors:
        return (scale(call, y) if wanted[0] else None, *(None for _ in call.inputs[1:]))

    def both(
        rule: Rule, call: Call, xi: Any, q: Tensors, wanted: Sequence[bool], need: bool, seeds: int
    ) -> tuple[Any, Tensors]:
        h = q[0]
        rest = (None,) * (len(call.inputs) - 1)
        if h is None:
            return None, (None, *rest)
        source = None
        if wanted[0] and xi is not None and bend is not None:
            source = bend(call, _pair(h, xi))
        return (scale(call, h) if need else None), (source, *rest)

    return Seeded("broadcast", backward, both)


def _pair(h: Tensor, xi: Tensor) -> Tensor:
    """Σ_i h⟨i⟩⊙ξ⟨i⟩, 16-bit numbers summed in float32."""
    return (h * xi).sum(0, dtype=accumulation(h.dtype))
