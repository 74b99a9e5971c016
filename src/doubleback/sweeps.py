"""The four sweeps of theory §2, each a short loop over the plan's steps.

    forward   x_j          values, computed once
    backward  ξ_j          cotangents of the penalised output
    tangent   q_j          tangents along q₀ = ∇p(ξ₀), and the curvature sources they leave
    second    γ_j          gradients of penalty and loss, in one sweep

Pure functions of tensors: they run eagerly, or are flattened into one graph and compiled. A
value leaves its dictionary at its last use; ξ leaves as soon as its source or K□ is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .errors import DoublebackError, NonFiniteError, RuleError
from .plan import Plan, Step
from .rules import Call, add

Watch = Callable[[str, Step, Any], None]


@dataclass
class State:
    """What passes from one sweep to the next.

    values: by value number; saved: by node, what forward rules handed over;
    xi: by node, cotangents that a curvature source will read; q0: ∇p by penalised input.
    """

    values: dict[int, Tensor]
    saved: dict[int, Any] = field(default_factory=dict)
    xi: dict[int, Any] = field(default_factory=dict)
    q0: list[Tensor] = field(default_factory=list)


def forward(plan: Plan, leaves: Mapping[int, Tensor], watch: Watch | None = None) -> State:
    """Run the network; keep what the derivatives will read."""
    state = State(dict(leaves))
    values = state.values
    for step, drop in zip(plan.steps, plan.drop_forward, strict=True):
        node = step.node
        call = _call(plan, step, state)
        out, saved = _guard("forward", step, step.rule.forward, call)
        for v, part in zip(node.outputs, out if node.many else (out,), strict=True):
            values[v] = part
        if saved is not None and step.differentiated:
            state.saved[node.index] = saved
        if watch is not None:
            watch("forward", step, out)
        for v in drop:
            values.pop(v, None)
    return state


def backward(
    plan: Plan, state: State, v: Tensor, *, keep: bool = True, watch: Watch | None = None
) -> tuple[Tensor | None, ...]:
    """ξ₀ = J*v for each penalised input. `keep`: remember ξ where curvature will need it."""
    xi: dict[int, Tensor] = {plan.target: v}
    for step in reversed(plan.steps):
        if not any(step.pull):
            continue
        y = _collect(step, xi)
        if y is None:
            continue
        if keep and step.keeps_xi:
            state.xi[step.node.index] = y
        grads = _guard("backward", step, step.rule.backward, _call(plan, step, state), y, step.pull)
        if watch is not None:
            watch("backward", step, grads)
        _accumulate(step, xi, grads, step.pull)
    return tuple(xi.get(value) for value in plan.penalised)


def tangent(
    plan: Plan,
    state: State,
    q0: Mapping[int, Tensor],
    *,
    keep: bool = False,
    watch: Watch | None = None,
) -> tuple[Tensor | None, dict[int, Tensor]]:
    """(q at the penalised output, curvature sources by value). `keep`: ξ stays for a rerun."""
    q: dict[int, Tensor] = dict(q0)
    sources: dict[int, Tensor] = {}
    for step, drop in zip(plan.steps, plan.drop_tangent, strict=True):
        if step.push or step.curves:
            node = step.node
            moved = tuple(q.get(v) for v in node.inputs)
            xi = state.xi.get(node.index) if keep else state.xi.pop(node.index, None)
            if any(part is not None for part in moved):
                out, bent = _guard(
                    "tangent", step, step.rule.both, _call(plan, step, state), xi, moved,
                    step.bend, step.push,
                )  # fmt: skip
                if watch is not None:
                    watch("tangent", step, (out, bent))
                if step.push and out is not None:
                    for value, part in zip(node.outputs, out if node.many else (out,), strict=True):
                        if part is not None:
                            q[value] = part
                if step.curves:
                    _accumulate(step, sources, bent, step.bend)
        for v in drop:
            q.pop(v, None)
    return q.get(plan.target), sources


def second(
    plan: Plan,
    state: State,
    gamma: dict[int, Tensor],
    *,
    keep: bool = False,
    watch: Watch | None = None,
) -> dict[int, Tensor]:
    """γ at every wanted leaf. `gamma` comes in with the sources and the gradients at outputs."""
    for step, drop in zip(reversed(plan.steps), plan.drop_second, strict=True):
        if any(step.pull2):
            y = _collect(step, gamma)
            if y is not None:
                grads = _guard(
                    "second", step, step.rule.backward, _call(plan, step, state), y, step.pull2
                )
                if watch is not None:
                    watch("second", step, grads)
                _accumulate(step, gamma, grads, step.pull2)
        if not keep:
            state.saved.pop(step.node.index, None)
            for v in drop:
                state.values.pop(v, None)
    return gamma


def _call(plan: Plan, step: Step, state: State) -> Call:
    node, values = step.node, state.values
    metas = plan.graph.values
    out = None
    if step.reads_output:
        parts = tuple(values.get(v) for v in node.outputs)
        out = parts if node.many else parts[0]
    return Call(
        node,
        tuple(values.get(v) for v in node.inputs),
        tuple(metas[v] for v in node.inputs),  # type: ignore[misc]
        out,
        state.saved.get(node.index),
        plan.graph.shape(node.outputs[0]),
    )


def _collect(step: Step, grads: dict[int, Tensor]) -> Any:
    """Take the cotangent of a node's outputs; None when all are zero."""
    node = step.node
    if not node.many:
        return grads.pop(node.outputs[0], None)
    parts = tuple(grads.pop(v, None) for v in node.outputs)
    return parts if any(part is not None for part in parts) else None


def _accumulate(step: Step, into: dict[int, Tensor], grads: Any, wanted: tuple[bool, ...]) -> None:
    for v, grad, want in zip(step.node.inputs, grads, wanted, strict=True):
        if want and grad is not None:
            into[v] = add(into.get(v), grad)  # type: ignore[assignment]


def _guard(sweep: str, step: Step, fn: Callable, *args: Any) -> Any:
    """Run a rule; an error names the sweep, the operator, its shapes and the model's line."""
    try:
        return fn(*args)
    except (DoublebackError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        if torch.compiler.is_compiling():
            raise
        call = args[0]
        shapes = ", ".join(str(tuple(meta.shape)) for meta in call.metas)
        raise RuleError(
            f"the {sweep} sweep failed at {step.node} with inputs of shape {shapes} "
            f"({step.node.source}): {error}"
        ) from error


def finite_watch(plan: Plan) -> Watch:
    """A watch that raises at the first NaN or infinity."""

    def watch(sweep: str, step: Step, result: Any) -> None:
        for part in pytree.tree_leaves(result):
            bad = (
                isinstance(part, Tensor)
                and part.is_floating_point()
                and not torch.isfinite(part).all()
            )
            if bad:
                raise NonFiniteError(
                    f"a non-finite value first appears in the {sweep} sweep at {step.node}, "
                    f"output shape {plan.graph.shape(step.node.outputs[0])} ({step.node.source})"
                )

    return watch
