"""The four sweeps of theory §2, each a short loop over the plan's steps.

    forward   x_j          values, computed once
    backward  ξ_j          cotangents of the penalised output
    tangent   q_j          tangents along q₀ = ∇p(ξ₀), and the curvature sources they leave
    second    γ_j          gradients of penalty and loss, in one sweep

Pure functions of tensors: they run eagerly, or are flattened into one graph and compiled. A
value leaves its dictionary at its last use; ξ leaves as soon as its source or K□ is taken, and is
not even held where the plan renews it.

With `seeds` the cotangents and tangents carry a leading axis of that many seeds, and sources are
summed over it (theory §5.2), so that one second sweep serves all seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._torch import compiling, pytree
from .errors import DoublebackError, NonFiniteError, RuleError
from .graph import Node
from .kernels import boundary
from .plan import Plan, Renewal, Step
from .rules import Call, add, seeded_backward, seeded_both

Watch = Callable[[str, Step, Any], None]
INPUTS = "inputs"


@dataclass
class State:
    """What passes from one sweep to the next.

    values: by value number; saved: by node, what forward rules handed over;
    xi: by node, cotangents that a curvature source will read and no renewal gives, and under
    `INPUTS` those of the penalised inputs where the penalty will read them; q0: ∇p by penalised
    input.
    """

    values: dict[int, Tensor]
    saved: dict[int, Any] = field(default_factory=dict)
    xi: dict[Any, Any] = field(default_factory=dict)
    q0: list[Tensor] = field(default_factory=list)


def forward(plan: Plan, leaves: Mapping[int, Tensor], watch: Watch | None = None) -> State:
    """Run the network; keep what the derivatives will read."""
    state = State(dict(leaves))
    values = state.values
    for step, drop in zip(plan.steps, plan.drop_forward, strict=True):
        node = step.node
        call = call_of(plan, step, state)
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
    plan: Plan,
    state: State,
    v: Tensor,
    *,
    keep: bool = True,
    watch: Watch | None = None,
    seeds: int | None = None,
) -> tuple[Tensor | None, ...]:
    """ξ₀ = J*v for each penalised input. `keep`: remember ξ where curvature will need it, with
    seeds everywhere: what is cheap to renew once is not for each of them."""
    wanted = plan.graph.values[plan.target]
    v = v if wanted is None else v.to(wanted.dtype)  # as autograd casts what it is given
    xi: dict[int, Tensor] = {plan.target: v}
    boundary((v,))
    for step in reversed(plan.steps):
        if not any(step.pull):
            continue
        y = _collect(step, xi)
        if y is None:
            continue
        if keep and (plan.holds_xi(step) if seeds is None else step.curves):
            state.xi[step.node.index] = y
        grads = _pull("backward", step, call_of(plan, step, state), y, seeds)
        if watch is not None:
            watch("backward", step, grads)
        _accumulate(step, xi, grads, step.pull)
    return tuple(xi.get(value) for value in plan.penalised)


def tangent(
    plan: Plan,
    state: State,
    q0: dict[int, Tensor],
    *,
    keep: bool = False,
    watch: Watch | None = None,
    seeds: int | None = None,
    sources: dict[Any, Tensor] | None = None,
) -> tuple[Tensor | None, dict[Any, Tensor]]:
    """(q at the penalised output, curvature sources by value). `keep`: ξ stays for a rerun.
    `sources`: what to add to. The dictionaries `q0` and `sources` are used up, so that their
    tensors are freed at their last use."""
    q = q0
    sources = {} if sources is None else sources
    held = dict(state.xi) if keep else state.xi
    sweep = _TangentSweep(plan, state, q, held, sources, watch, seeds)
    boundary(q.values())
    for step, drop in zip(plan.steps, plan.drop_tangent, strict=True):
        if step.push or step.curves:
            sweep.advance(step)
        for v in drop:
            q.pop(v, None)
    return q.get(plan.target), sources


class _Postponed(NamedTuple):
    """A node whose source is taken at the turn of another, with the tangents that moved it."""

    step: Step
    moved: tuple[Tensor | None, ...]


@dataclass
class _TangentSweep:
    """Nothing but the dictionaries holds a tensor after a node's turn. waiting: by the node that is
    waited for."""

    plan: Plan
    state: State
    q: dict[int, Tensor]
    held: dict[Any, Any]
    sources: dict[Any, Tensor]
    watch: Watch | None
    seeds: int | None
    waiting: dict[int, list[_Postponed]] = field(default_factory=dict)

    def advance(self, step: Step) -> None:
        index = step.node.index
        moved = tuple(self.q.get(v) for v in step.node.inputs)
        waiting = self.waiting.pop(index, ())
        if any(part is not None for part in moved):
            if index in self.plan.waits and self.seeds is None:
                self._wait(step, moved)
            else:
                self._bend(step, moved, waiting)
        for earlier, parts in waiting:
            self._source(earlier, parts)
            self.held.pop(earlier.node.index, None)
        for earlier, _ in waiting:
            self.held.pop(self.plan.waits[earlier.node.index], None)
        self.held.pop(index, None)

    def _wait(self, step: Step, moved: tuple[Tensor | None, ...]) -> None:
        """Its tangent now, its source later."""
        link = self.plan.waits[step.node.index]
        reader = self.plan.renewals[link].reader.node.index
        self.waiting.setdefault(reader, []).append(_Postponed(step, moved))
        call = call_of(self.plan, step, self.state)
        out, _ = _both("tangent", step, call, None, moved, True, None)
        if self.watch is not None:
            self.watch("tangent", step, out)
        _spread(self.plan, step, self.q, out)

    def _source(self, step: Step, moved: tuple[Tensor | None, ...]) -> None:
        """The source of one that waited."""
        xi = _cotangent(self.plan, self.state, self.held, step, self.seeds)
        call = call_of(self.plan, step, self.state)
        _, bent = _both("tangent", step, call, xi, moved, False, None)
        if self.watch is not None:
            self.watch("tangent", step, bent)
        _accumulate(step, self.sources, bent, step.bend)

    def _bend(
        self, step: Step, moved: tuple[Tensor | None, ...], waiting: Sequence[_Postponed]
    ) -> None:
        """Its tangent and its source, and for those that wait ξ at its input."""
        plan, rule = self.plan, step.rule
        xi = _cotangent(plan, self.state, self.held, step, self.seeds) if step.curves else None
        call = call_of(plan, step, self.state)
        if waiting and xi is not None:
            links = {plan.waits[earlier.step.node.index] for earlier in waiting}
            slots = {plan.renewals[link].slot for link in links}
            asked = tuple(slot in slots for slot in range(len(moved)))
            given = (call, xi, moved, step.bend, step.push, asked)
            result = _guard("tangent", step, rule.all_three, *given)
            out, bent, pulled = result
            for link in links:
                self._hand(link, pulled)
        else:
            result = out, bent = _both("tangent", step, call, xi, moved, step.push, self.seeds)
        if self.watch is not None:
            self.watch("tangent", step, result)
        if step.push:
            _spread(plan, step, self.q, out)
        if step.curves:
            _accumulate(step, self.sources, bent, step.bend)

    def _hand(self, link: int, pulled: Sequence[Tensor | None]) -> None:
        """Hold what came out beside the source as ξ of the node before."""
        renewal = self.plan.renewals[link]
        y = pulled[renewal.slot]
        if y is not None:
            self.held[link] = _placed(self.plan.graph.nodes[link], renewal, y)


def _cotangent(plan: Plan, state: State, held: dict, step: Step, seeds: int | None) -> Any:
    """ξ at a node's output: held, or renewed from the first node down the line that holds its own.
    What is renewed on the way and read there later joins `held`."""
    chain = [step.node]
    renewals = []
    while chain[-1].index not in held and chain[-1].index in plan.renewals:
        renewals.append(plan.renewals[chain[-1].index])
        chain.append(renewals[-1].reader.node)
    y = held.get(chain.pop().index)
    for renewal, node in zip(reversed(renewals), reversed(chain), strict=True):
        if y is None:
            return None
        reader = renewal.reader
        if reader.curves:
            held.setdefault(reader.node.index, y)
        only = tuple(slot == renewal.slot for slot in range(len(reader.pull)))
        y = _pull("tangent", reader, call_of(plan, reader, state), y, seeds, only)[renewal.slot]
        y = None if y is None else _placed(node, renewal, y)
    return y


def _placed(node: Node, renewal: Renewal, y: Tensor) -> Any:
    """ξ of the one output of a node that is renewed, as ξ of the node."""
    if not node.many:
        return y
    return tuple(y if i == renewal.place else None for i in range(len(node.outputs)))


def push(
    plan: Plan, state: State, q0: dict[int, Tensor], *, seeds: int, keep: bool = True
) -> tuple[Tensor | None, dict[int, tuple]]:
    """Tangents before cotangents: (q at the output, what moved at each node that will bend).
    `q0` is used up."""
    q = q0
    moved: dict[int, tuple] = {}
    boundary(q.values())
    for step, drop in zip(plan.steps, plan.drop_tangent, strict=True):
        node = step.node
        parts = tuple(q.get(v) for v in node.inputs)
        if any(part is not None for part in parts):
            if keep and step.curves:
                moved[node.index] = parts
            if step.push:
                call = call_of(plan, step, state)
                out = _both("tangent", step, call, None, parts, True, seeds)[0]
                _spread(plan, step, q, out)
        for v in drop:
            q.pop(v, None)
    return q.get(plan.target), moved


def pull(
    plan: Plan,
    state: State,
    w: Tensor,
    moved: dict[int, tuple],
    *,
    seeds: int,
    sources: dict[Any, Tensor],
) -> tuple[Tensor | None, ...]:
    """Cotangents after tangents: ξ at the penalised inputs; curvature sources add to `sources`."""
    xi: dict[int, Tensor] = {plan.target: w}
    boundary((w,))
    for step in reversed(plan.steps):
        if not (any(step.pull) or step.curves):
            continue
        y = _collect(step, xi)
        if y is None:
            continue
        call = call_of(plan, step, state)
        parts = moved.pop(step.node.index, None)
        if parts is not None:
            bent = _both("backward", step, call, y, parts, False, seeds)[1]
            _accumulate(step, sources, bent, step.bend)
        if any(step.pull):
            _accumulate(step, xi, _pull("backward", step, call, y, seeds), step.pull)
    return tuple(xi.get(value) for value in plan.penalised)


def second(
    plan: Plan,
    state: State,
    gamma: dict[int, Tensor],
    *,
    keep: bool = False,
    watch: Watch | None = None,
    steps: range | None = None,
) -> dict[int, Tensor]:
    """γ at every wanted leaf. `gamma` comes in with the sources and the gradients at outputs.
    steps: some of them, counted from the network's last; the sweep's earlier ones were made."""
    count = len(plan.steps)
    steps = range(count) if steps is None else steps
    if not steps.start:
        boundary(gamma.values())
    for i in steps:
        step, drop = plan.steps[count - 1 - i], plan.drop_second[i]
        if any(step.pull2):
            y = _collect(step, gamma)
            if y is not None:
                grads = _pull_onto(step, call_of(plan, step, state), y, gamma)
                if watch is not None:
                    watch("second", step, grads)
                _accumulate(step, gamma, grads, step.pull2)
        if not keep:
            state.saved.pop(step.node.index, None)
            for v in drop:
                state.values.pop(v, None)
    return gamma


def _pull_onto(step: Step, call: Call, y: Any, gamma: dict[int, Tensor]) -> Any:
    """The second sweep's backward. Where the rule can, it adds in passing what has arrived at its
    first input before, which leaves `gamma` then."""
    onto, inputs = step.rule.onto, step.node.inputs
    waiting = gamma.get(inputs[0]) if onto is not None and step.pull2[0] else None
    if onto is not None and waiting is not None and inputs.count(inputs[0]) == 1:
        grads = _guard("second", step, onto, call, y, step.pull2, waiting)
        if grads is not None:
            del gamma[inputs[0]]
            return grads
    return _guard("second", step, step.rule.backward, call, y, step.pull2)


def _pull(
    sweep: str,
    step: Step,
    call: Call,
    y: Any,
    seeds: int | None,
    wanted: tuple[bool, ...] | None = None,
) -> Any:
    wanted = step.pull if wanted is None else wanted
    if seeds is None:
        return _guard(sweep, step, step.rule.backward, call, y, wanted)
    return _guard(sweep, step, lambda c: seeded_backward(step.rule, c, y, wanted, seeds), call)


def _both(
    sweep: str, step: Step, call: Call, xi: Any, moved: tuple, need: bool, seeds: int | None
) -> Any:
    if seeds is None:
        return _guard(sweep, step, step.rule.both, call, xi, moved, step.bend, need)
    return _guard(
        sweep, step,
        lambda c: seeded_both(step.rule, c, xi, moved, step.bend, need, seeds), call,
    )  # fmt: skip


def _spread(plan: Plan, step: Step, q: dict[int, Tensor], out: Any) -> None:
    """Enter a node's tangents, each of its value's dtype: that of a sum of bfloat16 and float32 is
    float32, also where the bfloat16 alone moves. None is zero."""
    if out is None:
        return
    for value, part in zip(step.node.outputs, out if step.node.many else (out,), strict=True):
        meta = plan.graph.values[value]
        if part is not None:
            q[value] = part if meta is None else part.to(meta.dtype)


def call_of(plan: Plan, step: Step, state: State) -> Call:
    """A node as its rule sees it, with the values that are there."""
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


def _accumulate(step: Step, into: dict[Any, Tensor], grads: Any, wanted: tuple[bool, ...]) -> None:
    for v, grad, want in zip(step.node.inputs, grads, wanted, strict=True):
        if want and grad is not None:
            into[v] = add(into.pop(v, None), grad)  # type: ignore[assignment]


def _guard(sweep: str, step: Step, fn: Callable, *args: Any) -> Any:
    """Run a rule; an error names the sweep, the operator, its shapes and the model's line."""
    try:
        return fn(*args)
    except (DoublebackError, torch.OutOfMemoryError, torch.linalg.LinAlgError):  # type: ignore[reportPrivateImportUsage]
        raise  # the last one is about the caller's matrix, as on autograd
    except (RuntimeError, ValueError, TypeError) as error:
        if compiling():
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
