"""Layer, RMS, group, instance and batch norm: one closed form for all (theory §2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..graph import Ref
from ..kernels import Groups, fusing, second_now, standardise, standardise_backward
from .seeded import LOOP, VMAP, choose
from .structures import generic
from .table import Call, PerExample, Rule, Structure, Tensors, alone, overload, tangent_of

aten = torch.ops.aten
_GENERIC = generic()


def _affine(call: Call, place: int) -> tuple[int | None, int | None]:
    """Slots of weight and bias among the tensor inputs."""
    found = [call.argument(place, "weight"), call.argument(place + 1, "bias")]
    weight, bias = (call.slot(ref) if isinstance(ref, Ref) else None for ref in found)
    return weight, bias


def standardisation(
    groups: Callable[[Call], Groups],
    place: int,
    eps: Callable[[Call], float | None],
    forward: Callable[[Call], tuple[Any, Any]] | None = None,
    per_example: PerExample | None = None,
) -> Rule:
    """y = w⊙x̂ + b. `place` is the position of the weight; statistics are kept by `forward`.

    A weight that itself depends on the penalised input is left to the generic rule.
    """

    def weight(call: Call) -> Tensor | None:
        slot = _affine(call, place)[0]
        return None if slot is None else call.inputs[slot]

    def run(call: Call) -> tuple[Any, Any]:
        w, b = (None if s is None else call.inputs[s] for s in _affine(call, place))
        y, mean, rstd = standardise(groups(call), _x(call), w, b, eps(call), fused=not fusing())
        return y, (mean, rstd)

    def spread(call: Call, x: Any, w: Any, b: Any = None) -> Tensors:
        found: list[Tensor | None] = [None] * len(call.inputs)
        found[0] = x
        for slot, grad in zip(_affine(call, place), (w, b), strict=True):
            if slot is not None:
                found[slot] = grad
        return found

    def backward(call: Call, y: Any, wanted: Sequence[bool]) -> Tensors:
        slots = _affine(call, place)
        mask = (wanted[0], *(s is not None and wanted[s] for s in slots))
        mean, rstd = call.saved
        grads = standardise_backward(
            groups(call), _main(call, y), _x(call), mean, rstd, weight(call), mask,
            fused=not fusing(),
        )  # fmt: skip
        return spread(call, *grads)

    def tangent(call: Call, q: Tensors) -> Any:
        if _moves_parameters(q):
            return _GENERIC.tangent(call, q)
        return both(call, None, q, (False,) * len(q), True)[0]

    def both(
        call: Call, xi: Any, q: Tensors, wanted: Sequence[bool], need: bool
    ) -> tuple[Any, Tensors]:
        if _moves_parameters(q):
            return _GENERIC.both(call, xi, q, wanted, need)
        slot = _affine(call, place)[0]
        mask = (wanted[0], slot is not None and wanted[slot])
        mean, rstd = call.saved
        t, s_x, s_w = second_now(
            groups(call), _main(call, xi), tangent_of(q), _x(call), mean, rstd, weight(call), mask,
            need,
        )  # fmt: skip
        return (_pack(call, t) if need else None), spread(call, s_x, s_w)

    return Rule(
        Structure.STANDARDISATION, forward or run, backward, tangent, tangent_curvature=both,
        per_example=per_example,
    )  # fmt: skip


def _x(call: Call) -> Tensor:
    return call.value(0)


def _moves_parameters(q: Tensors) -> bool:
    return q[0] is None or any(part is not None for part in q[1:])


def _main(call: Call, y: Any) -> Any:
    """The cotangent of the normalised tensor; statistics returned beside it have none."""
    return y[0] if call.node.many and y is not None else y


def _pack(call: Call, t: Tensor | None) -> Any:
    return (t, *(None for _ in call.node.outputs[1:])) if call.node.many else t


def _batch_norm_forward(call: Call) -> tuple[Any, Any]:
    out = call.apply(call.inputs)
    return out, (out[1], out[2])


# ------------------------------------------------------------------- batch norm in eval


def _batch_norm_eval() -> Rule:
    """y = (x − μ) r w + b with the running μ and r = (var + ε)^(−1/2): bilinear in (x, w)."""

    def scale(call: Call, like: Tensor) -> tuple[Tensor, Tensor | None]:
        var = call.tensor(4, "running_var")
        eps = call.argument(6, "eps")
        shape = (1, -1, *(1,) * (like.dim() - 2))
        r = torch.rsqrt(var + eps).to(like.dtype).reshape(shape)  # type: ignore[operator]
        slot = _affine(call, 1)[0]
        w = None if slot is None else call.inputs[slot].to(like.dtype).reshape(shape)  # type: ignore[union-attr]
        return r, w

    def apply(call: Call, t: Tensor) -> Tensor:
        r, w = scale(call, t)
        return t * (r if w is None else r * w)

    def per_channel(t: Tensor) -> Tensor:
        return t.sum([i for i in range(t.dim()) if i != 1])

    def backward(call: Call, y: Any, wanted: Sequence[bool]) -> Tensors:
        y = y[0]
        grads: list[Tensor | None] = [None] * len(call.inputs)
        weight, bias = _affine(call, 1)
        if wanted[0]:
            grads[0] = apply(call, y)
        if weight is not None and wanted[weight]:
            mean = call.tensor(3, "running_mean").to(y.dtype)  # type: ignore[union-attr]
            r, _ = scale(call, y)
            centred = (_x(call) - mean.reshape(r.shape)) * r
            grads[weight] = per_channel(y * centred).to(call.metas[weight].dtype)
        if bias is not None and wanted[bias]:
            grads[bias] = per_channel(y).to(call.metas[bias].dtype)
        return grads

    def tangent(call: Call, q: Tensors) -> Any:
        if _moves_parameters(q):
            return _GENERIC.tangent(call, q)
        return _pack(call, apply(call, q[0]))  # type: ignore[arg-type]

    def both(
        call: Call, xi: Any, q: Tensors, wanted: Sequence[bool], need: bool
    ) -> tuple[Any, Tensors]:
        if _moves_parameters(q):
            return _GENERIC.both(call, xi, q, wanted, need)
        sources: list[Tensor | None] = [None] * len(call.inputs)
        weight = _affine(call, 1)[0]
        if weight is not None and wanted[weight]:
            r, _ = scale(call, xi[0])
            source = per_channel(xi[0] * q[0] * r)  # type: ignore[operator]
            sources[weight] = source.to(call.metas[weight].dtype)
        return (tangent(call, q) if need else None), sources

    return Rule(
        Structure.BILINEAR, lambda call: (call.apply(call.inputs), None), backward, tangent,
        tangent_curvature=both,
        curves=lambda i, j: i != j,
        seeded=choose(lambda call, q: LOOP if _moves_parameters(q) else VMAP),
        per_example=alone(),
        light=True,
    )  # fmt: skip


def _sizes(value: Any) -> list[int]:
    return [value] if isinstance(value, int) else list(value)


def _within_examples(call: Call) -> bool:
    """Whether the normalised axes leave out the first."""
    return len(call.metas[0].shape) > len(_sizes(call.argument(1, "normalized_shape")))


def rules() -> Iterator[tuple[Any, Rule]]:
    table = {
        "layer_norm.default": standardisation(
            lambda c: Groups.layer_norm(_sizes(c.argument(1, "normalized_shape"))), 2,
            lambda c: c.argument(4, "eps", 1e-5), per_example=alone(where=_within_examples),
        ),
        "rms_norm.default": standardisation(
            lambda c: Groups.rms_norm(_sizes(c.argument(1, "normalized_shape"))), 2,
            lambda c: c.argument(3, "eps", None), per_example=alone(where=_within_examples),
        ),
        "group_norm.default": standardisation(
            lambda c: Groups.group_norm(c.argument(1, "num_groups")), 2,
            lambda c: c.argument(4, "eps", 1e-5), per_example=alone(),
        ),
        "instance_norm.default": standardisation(
            lambda c: Groups.instance_norm(), 1, lambda c: c.argument(7, "eps", 1e-5),
            per_example=alone(),
        ),
        "_native_batch_norm_legit_functional.default": standardisation(
            lambda c: Groups.batch_norm(), 1, lambda c: c.argument(7, "eps"), _batch_norm_forward
        ),
        "_native_batch_norm_legit.no_stats": standardisation(
            lambda c: Groups.batch_norm(), 1, lambda c: c.argument(5, "eps"), _batch_norm_forward
        ),
        "_native_batch_norm_legit_no_training.default": _batch_norm_eval(),
    }  # fmt: skip
    for name, rule in table.items():
        op = overload(name)
        if op is not None:
            yield op, rule
