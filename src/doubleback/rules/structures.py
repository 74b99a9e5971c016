"""From a structure to a whole rule: what linear, bilinear, coordinate-wise … already imply. And how
a rule runs on many seeds at once, when ξ and q carry a leading seed axis (theory §6).

The values a rule reads have no such axis; they broadcast over it and are never copied. With ξ⟨i⟩
and q⟨i⟩ for seeds i = 1 … c,

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
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._torch import is_vmap_fallback_enabled, pytree, set_vmap_fallback_enabled
from ..counting import counted, folded
from ..dtypes import accumulation, lifted_and_back
from ..kernels import fused_bend, fused_onto
from .table import (
    Call,
    PerExample,
    Rule,
    Structure,
    Tensors,
    add,
    alone,
    run,
    sum_to,
    tangent_of,
    zeros,
)

# ------------------------------------------------------------------------------------- many seeds


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


def vmap_nested(fn: Callable[..., Any], *nested: Any) -> Any:
    """fn(*nested) by vmap over the tensors of nested arguments and results, in which None may stand
    for zero; called once where there is no tensor."""
    items, spec = pytree.tree_flatten(nested)
    places = [i for i, item in enumerate(items) if isinstance(item, Tensor)]
    if not places:
        return fn(*nested)
    layout: list[Any] = []

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        filled = list(items)
        for place, t in zip(places, given, strict=True):
            filled[place] = t
        parts, result_spec = pytree.tree_flatten(fn(*pytree.tree_unflatten(filled, spec)))
        layout[:] = [result_spec, [part is not None for part in parts]]
        return tuple(part for part in parts if part is not None)

    results = iter(torch.func.vmap(run)(*(items[i] for i in places)))
    result_spec, present = layout
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


FEW = 16  # seeds that one after another make no large graph


def _try(call: Call, seeds: int, fn: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """By vmap; or one seed after another where an operator has no batching rule, and for a few at
    open sizes, which some of those rules fix (index_select, layer_norm)."""
    few = seeds <= FEW and any(type(n) is not int for meta in call.metas for n in meta.shape)
    if call.node.op not in _UNMAPPED and not few:
        try:
            with _without_fallback(), folded(seeds):
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
            seeds,
            lambda: vmap_nested(lambda part: tuple(fn(call, part, wanted)), y),
            lambda: LOOP.backward(rule, call, y, wanted, seeds),
        )  # fmt: skip

    def both(
        rule: Rule, call: Call, xi: Any, q: Tensors, wanted: Sequence[bool], need: bool, seeds: int
    ) -> tuple[Any, Tensors]:
        def run() -> tuple[Any, Tensors]:
            out, sources = vmap_nested(
                lambda y, moved: rule.both(call, y, moved, wanted, need), xi, tuple(q)
            )
            return out, [None if s is None else s.sum(0) for s in sources]

        return _try(
            call, seeds, run, lambda: LOOP.both(rule, call, xi, q, wanted, need, seeds)
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
    pairs, wide = h * xi, accumulation(h.dtype)
    return pairs[0].to(wide) if len(pairs) == 1 else pairs.sum(0, dtype=wide)


# ------------------------------------------------------------------------------------- structures


def like_output(result: Any, many: bool) -> tuple:
    return tuple(result) if many else (result,)


# ------------------------------------------------------------------------------- linear


def linear(
    transpose: Callable[[Call, Any], Tensor] | None = None,
    *,
    tangent: Callable[[Call, Tensors], Any] | None = None,
    backward: Callable[[Call, Any, Sequence[bool]], Tensors] | None = None,
    forward: Callable[[Call], tuple[Any, Any]] = run,
    structure: Structure = Structure.LINEAR,
    reads: frozenset[str] = frozenset(),
    same_entries: bool = False,
    per_example: PerExample | None = None,
    writes: bool = False,
) -> Rule:
    """y = A(u₁ … u_n), jointly linear in its floating-point inputs.

    transpose(call, y) → Aᵀy for one input; `backward` for several. Left out, Aᵀ is taken by
    reverse mode at zero, which for a linear map is exact and reads no value. The tangent is A
    itself; give `tangent` where the operator adds an offset (`masked_fill`, `add`).
    same_entries, per_example: see `Rule`. writes: y is u₁ with some entries written to, so that u₁
    always gets memory of its own (`base`).
    """
    if writes:
        forward = _written

    def transposed(call: Call, y: Any, wanted: Sequence[bool]) -> Tensors:
        if transpose is None:
            return _transpose_by_reverse_mode(call, y, wanted, writes)
        rest = (None,) * (len(call.inputs) - 1)
        return (transpose(call, y) if wanted[0] else None, *rest)

    return Rule(
        structure=structure,
        forward=forward,
        backward=backward or transposed,
        tangent=tangent or partial(_apply_to_tangents, writes=writes),
        reads=reads,
        curves=lambda i, j: False,
        seeded=_BY_VJP[writes] if transpose is None and backward is None else VMAP,
        same_entries=same_entries,
        per_example=per_example,
    )


def base(t: Tensor) -> Tensor:
    """With memory for every entry. One number that is seen from everywhere (stride 0) must not be
    written to, and compilers do write into it."""
    expanded = any(n > 1 and step == 0 for n, step in zip(t.shape, t.stride(), strict=True))
    return t.contiguous() if expanded else t


def _written(call: Call) -> tuple[Any, None]:
    """forward of an operator that writes into its first input's place."""
    return call.apply([base(call.value(0)), *call.inputs[1:]]), None


def _zeros(call: Call, writes: bool) -> list[Any]:
    """Zeros for the differentiable inputs, the others as they are. They take no memory, except
    what is written into."""
    given = [
        zeros(meta) if meta.differentiable else value
        for meta, value in zip(call.metas, call.inputs, strict=True)
    ]
    return [base(given[0]), *given[1:]] if writes else given  # type: ignore[arg-type]


def _apply_to_tangents(call: Call, q: Tensors, writes: bool = False) -> Any:
    inputs = [
        tangent if tangent is not None else (zeros(meta) if meta.differentiable else value)
        for tangent, meta, value in zip(q, call.metas, call.inputs, strict=True)
    ]
    if writes:
        inputs[0] = base(inputs[0])  # type: ignore[arg-type]
    return call.apply(inputs)


def _transpose_by_reverse_mode(
    call: Call, y: Any, wanted: Sequence[bool], writes: bool = False
) -> Tensors:
    with torch.enable_grad():
        inputs = [
            value.requires_grad_(want) if meta.differentiable else value
            for meta, value, want in zip(call.metas, _zeros(call, writes), wanted, strict=True)
        ]
        outputs = like_output(call.apply(inputs), call.node.many)
    return _vjp(outputs, inputs, like_output(y, call.node.many), wanted)


def _transpose_by_vjp(call: Call, y: Any, wanted: Sequence[bool], writes: bool = False) -> Tensors:
    """The same by `torch.func`, which composes with vmap."""
    slots = [i for i, want in enumerate(wanted) if want]

    def run(*moved: Tensor) -> tuple:
        given = _zeros(call, writes)
        for slot, t in zip(slots, moved, strict=True):
            given[slot] = t
        outputs = like_output(call.apply(given), call.node.many)
        return tuple(o for o, part in zip(outputs, parts, strict=True) if part is not None)

    parts = like_output(y, call.node.many)
    start = _zeros(call, writes)
    pull = torch.func.vjp(run, *(start[slot] for slot in slots))[1]
    cotangents = iter(pull(tuple(part for part in parts if part is not None)))
    return tuple(next(cotangents) if want else None for want in wanted)


_BY_VJP = {
    False: vmapped(_transpose_by_vjp),
    True: vmapped(partial(_transpose_by_vjp, writes=True)),
}


def _vjp(outputs: Sequence, inputs: Sequence, y: Sequence, wanted: Sequence[bool]) -> Tensors:
    pairs = [
        (out, part)
        for out, part in zip(outputs, y, strict=True)
        if part is not None and out.requires_grad
    ]
    chosen = [value for value, want in zip(inputs, wanted, strict=True) if want]
    if not pairs or not chosen:
        return (None,) * len(inputs)
    grads = iter(
        torch.autograd.grad(
            [out for out, _ in pairs], chosen, [part for _, part in pairs], allow_unused=True
        )
    )
    return tuple(next(grads) if want else None for want in wanted)


# ----------------------------------------------------------------------------- bilinear


def bilinear(
    product: Callable[[Call, Tensor, Tensor], Tensor],
    adjoint0: Callable[[Call, Tensor, Tensor], Tensor],
    adjoint1: Callable[[Call, Tensor, Tensor], Tensor],
    *,
    bias: Callable[[Call, Tensor], Tensor] | None = None,
    forward: Callable[[Call], tuple[Any, Any]] = run,
    backward: Callable[[Call, Tensor, Sequence[bool]], Tensors] | None = None,
    offset: Callable[[Call, Tensor], Tensor] | None = None,
    seeded: Seeded = VMAP,
    per_example: PerExample | None = None,
    layer: bool = False,
) -> Rule:
    """y = B(u₀, u₁) + b, bilinear in the first two tensor inputs, plus an offset.

    ⟨B(u₀,u₁), y⟩ = ⟨u₀, adjoint0(u₁, y)⟩ = ⟨u₁, adjoint1(u₀, y)⟩; `bias(call, y)` is the
    transpose of adding the third input, `offset(call, q₂)` its tangent. All else follows:

        q_y = B(q₀, u₁) + B(u₀, q₁) + offset(q₂)
        s₀ = adjoint0(q₁, ξ),   s₁ = adjoint1(q₀, ξ)

    per_example: see `Rule`; layer: B is a layer K(u₁, u₀), and its K, Kᵀ and K□ are counted.
    """
    if layer:
        forward, product = _counting(forward, forward=1), _counting(product, forward=1)
        adjoint0 = _counting(adjoint0, transpose=1)
        adjoint1 = _counting(adjoint1, weight_adjoint=1)

    def pull(call: Call, y: Tensor, wanted: Sequence[bool]) -> Tensors:
        grads: list[Tensor | None] = [None] * len(call.inputs)
        if wanted[0]:
            grads[0] = adjoint0(call, call.value(1), y)
        if wanted[1]:
            grads[1] = adjoint1(call, call.value(0), y)
        if len(wanted) > 2 and wanted[2] and bias is not None:
            grads[2] = bias(call, y)
        return grads

    def tangent(call: Call, q: Tensors) -> Tensor | None:
        out = None
        if q[0] is not None:
            out = product(call, q[0], call.value(1))
        if q[1] is not None:
            out = add(out, product(call, call.value(0), q[1]))
        if len(q) > 2 and q[2] is not None:
            shift = offset(call, q[2]) if offset is not None else q[2]
            out = add(out, shift)
        return out

    def curvature(call: Call, xi: Tensor, q: Tensors, wanted: Sequence[bool]) -> Tensors:
        sources: list[Tensor | None] = [None] * len(call.inputs)
        if wanted[0] and q[1] is not None:
            sources[0] = adjoint0(call, q[1], xi)
        if wanted[1] and q[0] is not None:
            sources[1] = adjoint1(call, q[0], xi)
        return sources

    def reads_inputs(live: Sequence[bool]) -> Sequence[bool]:
        return (live[1], live[0], *(False for _ in live[2:]))

    return Rule(
        structure=Structure.BILINEAR,
        forward=forward,
        backward=backward or pull,
        tangent=tangent,
        curvature=curvature,
        reads=frozenset({"inputs"}),
        reads_inputs=reads_inputs,
        curves=lambda i, j: (i, j) in ((0, 1), (1, 0)),
        seeded=seeded,
        per_example=per_example,
        layer=(0, 1) if layer else None,
    )


def _counting(fn: Callable, **operations: int) -> Callable:
    """fn, reporting to `count_operations`."""

    def run(*args: Any) -> Any:
        counted(**operations)
        return fn(*args)

    return run


# ---------------------------------------------------------------------- coordinate-wise


def coordinatewise(
    of: str,
    first: Callable[..., Tensor],
    second: Callable[..., Tensor] | None,
    *,
    fused: Callable[[Call, Tensor, Tensor], Tensor] | None = None,
    kernel: Callable[[Call], tuple[str, tuple]] | None = None,
    forward: Callable[[Call], tuple[Any, Any]] = run,
) -> Rule:
    """y = g(u), coordinate by coordinate: dg·q = g′⊙q is its own adjoint, s_u = g″⊙q⊙ξ.

    of: what g′ and g″ are functions of: the "input", the "output", or what `forward` "saved".
    first(call, v) → g′, second(call, v) → g″ (None: piecewise linear).
    fused(call, y, v) → g′⊙y by one stock kernel.
    kernel(call) → (name, parameters) of kernels that fuse g″⊙q⊙ξ with g′⊙q and g′⊙ξ, and g′⊙γ with
    a sum, where Triton runs.
    """

    def value(call: Call) -> Tensor:
        return call.saved if of == "saved" else call.out if of == "output" else call.value(0)

    def scale(call: Call, y: Tensor) -> Tensor:
        if fused is not None:
            return fused(call, y, value(call))
        wide, back = lifted_and_back(value(call))
        return back(first(call, wide) * y)

    def curvature(call: Call, xi: Tensor, q: Tensors, wanted: Sequence[bool]) -> Tensors:
        h = q[0]
        if not wanted[0] or h is None or second is None:
            return (None,) * len(call.inputs)
        v, rest = value(call), (None,) * (len(call.inputs) - 1)
        if kernel is not None:
            name, parameters = kernel(call)
            found = fused_bend(name, v, h, xi, parameters, False, False)
            if found is not None:
                return (found[0], *rest)
        wide, back = lifted_and_back(v)
        return (back(second(call, wide) * h * xi), *rest)

    def at_once(
        call: Call, xi: Any, q: Tensors, wanted: Sequence[bool], need: bool, pulled: Sequence[bool]
    ) -> tuple[Any, Tensors, Tensors] | None:
        assert kernel is not None
        if not wanted[0] or q[0] is None:
            return None
        name, parameters = kernel(call)
        found = fused_bend(name, value(call), q[0], xi, parameters, need, pulled[0])
        if found is None:
            return None
        source, t, dx = found
        rest = (None,) * (len(call.inputs) - 1)
        return t, (source, *rest), (dx, *rest)

    def onto(call: Call, y: Any, wanted: Sequence[bool], waiting: Tensor) -> Tensors | None:
        assert kernel is not None
        name, parameters = kernel(call)
        added = fused_onto(name, value(call), y, waiting, parameters)
        return None if added is None else (added, *(None for _ in call.inputs[1:]))

    piecewise = second is None

    def scale_seeds(call: Call, y: Tensor) -> Tensor:
        """g′ once, whatever the number of seeds; by the stock kernel where there is one seed, and
        where it is no dearer than a product: a rectifier reads its mask as it goes, a function of
        the output computes g′ from it in passing."""
        if fused is not None and (piecewise or of == "output"):
            return fused(call, y, value(call))
        if fused is not None and len(y) == 1:
            return fused(call, y[0], value(call))[None]
        return first(call, lifted_and_back(value(call))[0]).to(y.dtype) * y

    def bend_seeds(call: Call, pairs: Tensor) -> Tensor:
        assert second is not None
        wide, back = lifted_and_back(value(call))
        return back(second(call, wide) * pairs)

    return Rule(
        structure=Structure.PIECEWISE_LINEAR if piecewise else Structure.COORDINATEWISE,
        forward=forward,
        backward=lambda call, y, wanted: (
            scale(call, y) if wanted[0] else None,
            *(None for _ in call.inputs[1:]),
        ),
        tangent=lambda call, q: scale(call, tangent_of(q)),
        curvature=None if piecewise else curvature,
        at_once=None if kernel is None else at_once,
        onto=None if kernel is None else onto,
        reads=frozenset({"input": ["inputs"], "output": ["output"], "saved": []}[of]),
        curves=(lambda i, j: False) if piecewise else (lambda i, j: True),
        seeded=broadcast(scale_seeds, None if piecewise else bend_seeds),
        diagonal=True,
    )


# ------------------------------------------------------------------------------ generic


def generic(forward: Callable[[Call], tuple[Any, Any]] = run, again: Any = Call.apply) -> Rule:
    """Any operator that PyTorch can differentiate twice, itself or as `again(call, inputs)`, by
    reverse over reverse.

    With v(ξ) = (∂F)*ξ and s = ⟨v(ξ), q⟩, one gradient of s gives both the tangent
    ∂s/∂ξ = ∂F·q and the source ∂s/∂u. Reverse over *forward* is wrong for several of
    PyTorch's norms.
    """

    def pull(call: Call, y: Any, wanted: Sequence[bool]) -> Tensors:
        with torch.enable_grad():
            inputs = _leaves(call, wanted)
            outputs = like_output(call.apply(inputs), call.node.many)
        return _vjp(outputs, inputs, like_output(y, call.node.many), wanted)

    def tangent(call: Call, q: Tensors) -> Any:
        return push(call, None, q, (False,) * len(call.inputs), True)[0]

    def push(
        call: Call, xi: Any, q: Tensors, wanted: Sequence[bool], need_tangent: bool
    ) -> tuple[Any, Tensors]:
        many = call.node.many
        moving = [part is not None for part in q]
        with torch.enable_grad():
            leaves = _leaves(call, [m or w for m, w in zip(moving, wanted, strict=True)])
            outputs = like_output(again(call, leaves), many)
            along = [leaf for leaf, m in zip(leaves, moving, strict=True) if m]
            cotangents = _parts(xi, outputs, many)
            seeds = [
                None if not out.requires_grad else _seed(out, part)
                for out, part in zip(outputs, cotangents, strict=True)
            ]
            # what no cotangent arrived at adds to no source, and has a tangent all the same
            present = [part is not None for part in cotangents]
            totals: list[Tensor | None] = []
            for here in (True, False):
                some = [s if p is here else None for s, p in zip(seeds, present, strict=True)]
                total = _paired(outputs, some, along, q) if here or need_tangent else None
                totals.append(total)
        return _second_gradients(call, totals, seeds, present, leaves, wanted, need_tangent)

    return Rule(
        structure=Structure.GENERAL,
        forward=forward,
        backward=pull,
        tangent=tangent,
        tangent_curvature=push,
        own=False,
    )


def _pairing(u: Tensor, v: Tensor) -> Tensor:
    """⟨u, v⟩, for complex tensors that of their real and imaginary parts."""
    return (u.conj() * v).real.sum() if u.is_complex() else (u * v).sum()


def _leaves(call: Call, wanted: Sequence[bool]) -> list:
    return [
        value.detach().requires_grad_(want) if meta.differentiable and value is not None else value
        for value, meta, want in zip(call.inputs, call.metas, wanted, strict=True)
    ]


def _parts(xi: Any, outputs: Sequence[Tensor], many: bool) -> Sequence[Tensor | None]:
    return (None,) * len(outputs) if xi is None else like_output(xi, many)


def _seed(out: Tensor, xi: Tensor | None) -> Tensor:
    # the pull-back is linear, its derivative the same at any ξ; some are written with logarithms or
    # quotients of ξ, which have none at zero
    seed = torch.ones_like(out) if xi is None else xi.detach()
    return seed.requires_grad_()


def _paired(
    outputs: Sequence[Tensor], seeds: Sequence[Tensor | None], along: Sequence[Tensor], q: Tensors
) -> Tensor | None:
    """⟨(∂F)*ξ, q⟩ for the ξ that are there."""
    pairs = [(o, s) for o, s in zip(outputs, seeds, strict=True) if s is not None]
    if not pairs:
        return None
    pulled = torch.autograd.grad(
        [o for o, _ in pairs], along, [s for _, s in pairs], create_graph=True, allow_unused=True
    )
    terms = [
        _pairing(grad, part)
        for grad, part in zip(pulled, (p for p in q if p is not None), strict=True)
        if grad is not None
    ]
    return torch.stack(terms).sum() if terms else None


def _second_gradients(
    call: Call,
    totals: Sequence[Tensor | None],
    seeds: Sequence[Tensor | None],
    present: Sequence[bool],
    leaves: Sequence,
    wanted: Sequence[bool],
    need_tangent: bool,
) -> tuple[Any, Tensors]:
    """totals: of the seeds that are cotangents, and of those that stand for none."""
    tangents: list[Tensor | None] = [None] * len(seeds)
    sources: list[Tensor | None] = [None] * len(leaves)
    for total, here in zip(totals, (True, False), strict=True):
        if total is None or not total.requires_grad:
            continue
        ends = [
            i for i, (s, p) in enumerate(zip(seeds, present, strict=True))
            if need_tangent and s is not None and p is here
        ]  # fmt: skip
        targets = [i for i, want in enumerate(wanted) if want and here]
        asked = [*(seeds[i] for i in ends), *(leaves[i] for i in targets)]
        if not asked:
            continue
        grads = torch.autograd.grad(total, asked, allow_unused=True)  # type: ignore[arg-type]
        for i, grad in zip(ends, grads, strict=False):
            tangents[i] = grad
        for i, grad in zip(targets, grads[len(ends) :], strict=True):
            sources[i] = grad
    if not need_tangent:
        return None, tuple(sources)
    return (tuple(tangents) if call.node.many else tangents[0]), tuple(sources)


def broadcast_adjoint(call: Call, position: int, grad: Tensor) -> Tensor:
    """Sum a gradient down to the shape of one input, which may have another dtype."""
    meta = call.metas[position]
    return sum_to(grad, meta.shape).to(meta.dtype)
