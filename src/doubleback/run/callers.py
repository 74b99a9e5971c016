"""Programs whose penalty or loss is a caller's own Python.

Such functions may read anything: attributes, globals, a schedule. A graph that was traced once
would keep what they read then, so they are called as they are, once per call of the model, under
autograd; the sweeps around them run flat, each on its own. What is needed of their derivatives
later comes from the graph that autograd kept, which also sees random numbers once, and notices
tensors that change in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import sweeps
from .._torch import pytree
from ..errors import InputError, StaleGraphError
from ..plan import Stretch
from .flattening import Replay
from .program import (
    Arrived,
    First,
    FlattenedProgram,
    FourSweeps,
    GradientProgram,
    Gradients,
    PhasedSweeps,
    Step,
    join,
)
from .state import behind


@dataclass
class Called:
    """What passes from `first` to `last`: the sweeps' values, and autograd's graphs of v and p.

    out, xi: the leaves that v and p were computed from; given: the penalty's own arguments, those
    that ask for a gradient being leaves too.
    """

    values: dict[int, Tensor]
    saved: dict[int, Any]
    held: dict[Any, Any]
    out: Tensor
    v: Tensor
    xi: list[Tensor]
    per_example: Tensor
    given: Sequence[Any]


@dataclass(frozen=True, eq=False)
class CallersProgram(PhasedSweeps):
    """The four sweeps around functions that are not ours."""

    no_graph = (
        "a loss or penalty of your own is Python that a CUDA graph would not call again; use a "
        "built-in loss and norm"
    )

    def to_price(self, replay: Replay) -> FlattenedProgram:
        return FlattenedProgram(FourSweeps(self.plan, self.penalty, asked=self.asked), replay)

    def first(self, leaves: Mapping[int, Tensor], extra: Sequence[Any], keep: bool = True) -> First:
        outputs, mutated, values, saved = self._opened(leaves)
        given = self._given(extra)
        with torch.enable_grad():
            out = values[self.plan.target].detach().requires_grad_()
            v = self.penalty.oracle_seed(out, *given)
        per_example, state = self._penalise(leaves, given, keep, values, saved, out, v)
        return First(outputs, per_example, mutated, state if keep else None)

    def _penalise(
        self, leaves: Mapping[int, Tensor], given: Sequence[Any], keep: bool,
        values: dict[int, Tensor], saved: dict[int, Any], out: Tensor, v: Tensor,
    ) -> tuple[Tensor, Called]:  # fmt: skip
        """(p per example, what `last` needs)."""
        self.penalty.refuse_others(v, out, given)
        xi, held = self._backward(leaves, values, saved, v.detach(), keep)
        with torch.enable_grad():
            xi = [u.detach().requires_grad_() for u in xi]
            per_example = self.penalty.at(out, *given).value(xi, *given)
        own = [t for t in pytree.tree_leaves(tuple(given)) if isinstance(t, Tensor)]
        refuse_others("p", per_example, *xi, out, *own)
        state = Called(values, saved, held, out, v, xi, per_example, given)
        return per_example.detach(), state

    def _given(self, extra: Sequence[Any]) -> Sequence[Any]:
        parts, spec = pytree.tree_flatten(tuple(extra))
        for i in self.asked:
            parts[i] = parts[i].detach().requires_grad_()
        return pytree.tree_unflatten(parts, spec)

    def _backward(
        self, leaves: Mapping[int, Tensor], values: dict, saved: dict, v: Tensor, keep: bool
    ) -> tuple[list[Tensor], dict[Any, Any]]:
        def run(here: CallersProgram, nested: Any) -> Any:
            plan, seed = here.plan, nested[2]
            state = sweeps.State(dict(nested[0]), dict(nested[1]))
            rows = here._rows(seed, plan.target)
            xi = sweeps.backward(plan, state, seed, keep=keep, watch=here.watch, seeds=rows)
            return list(xi), state.xi

        xi, held = self.replay(self, ("backward", keep), run, (values, saved, v))
        front = v.shape[: v.dim() - values[self.plan.target].dim()]
        full = [leaves[x].new_zeros(*front, *leaves[x].shape) if u is None else u
                for x, u in zip(self.plan.penalised, xi, strict=True)]  # fmt: skip
        return full, held

    def _last(
        self, arrived: Arrived, stretches: Sequence[Stretch]
    ) -> tuple[Gradients, Iterator[Gradients]]:
        state, _, grad_outputs, grad_values, keep = arrived
        plan = self.plan
        gamma: dict[int, Tensor] = {}
        own: Gradients = [None] * len(self.asked)
        if grad_values is not None:
            parts = pytree.tree_leaves(tuple(state.given))
            asked = [parts[i] for i in self.asked]
            (*q, seen), own = self._starts(state, grad_values, asked, keep)
            h, gamma = self._tangent(state, q, keep)
            if plan.target in plan.trained:
                join(gamma, plan.target, seen)
            if h is not None and state.v.requires_grad:
                (head,), more = _pulled(state.v, [state.out], asked, h, keep)
                own = [a if b is None else b if a is None else a + b
                       for a, b in zip(own, more, strict=True)]  # fmt: skip
                if plan.target in plan.trained:
                    join(gamma, plan.target, head)
        self._join_outputs(gamma, grad_outputs)
        return own, self._second(state, gamma, keep, stretches)

    def _starts(
        self, state: Called, along: Any, asked: Sequence[Tensor], keep: bool
    ) -> tuple[Sequence[Tensor | None], Gradients]:
        """(q₀ at each penalised input, and the gradient by p of the output; that of what is
        asked)."""
        return _pulled(state.per_example, [*state.xi, state.out], asked, along, keep)

    def _tangent(
        self, state: Called, q: Sequence[Tensor | None], keep: bool
    ) -> tuple[Tensor | None, dict[int, Tensor]]:
        def run(here: CallersProgram, nested: Any) -> Any:
            values, saved, held, start = nested
            inner = sweeps.State(dict(values), dict(saved), dict(held))
            rows = next((here._rows(u, v) for v, u in start.items()), None)
            return sweeps.tangent(here.plan, inner, dict(start), watch=here.watch, seeds=rows)

        start = {v: u for v, u in zip(self.plan.penalised, q, strict=True) if u is not None}
        nested = (state.values, state.saved, state.held, start)
        return self.replay(self, "tangent", run, nested, () if keep else (state.held, start))

    def _second(
        self, state: Called, gamma: dict, keep: bool, stretches: Sequence[Stretch]
    ) -> Iterator[Gradients]:
        def run(here: CallersProgram, nested: Any) -> Iterator[Gradients]:
            values, saved, start = nested
            inner = sweeps.State(dict(values), dict(saved))
            return here._second_sweep(inner, dict(start), False, stretches)

        nested = (state.values, state.saved, gamma)
        consume = () if keep else (state.values, state.saved, gamma)
        return self.replay.parts(self, "second", run, nested, consume, len(stretches) > 1)

    def step(
        self, leaves: Mapping[int, Tensor], extra: Sequence[Any], loss: Any, target: Any,
        weight: Tensor | None,
    ) -> Step:  # fmt: skip
        outputs, mutated, values, saved = self._opened(leaves)
        plan, penalty = self.plan, self.penalty
        given = self._given(extra)
        with torch.enable_grad():
            out = values[plan.target].detach().requires_grad_()
            losses = None if loss is None else loss.values(out, target)
            shared = penalty.shares(loss)
            loss_value, grad_out = _mean_gradient(losses, out, keep=shared)
            v = None
            if weight is not None:
                v = _gradient(losses, out) if shared else penalty.oracle_seed(out, *given)
        zero = torch.zeros((), device=out.device)
        if v is None or weight is None:
            gamma: dict[int, Tensor] = {}
            if plan.target in plan.trained:
                join(gamma, plan.target, grad_out)
            bare = Called(values, saved, {}, out, out, [], out, ())
            swept = next(self._second(bare, gamma, False, plan.whole))
            grads = [*swept, *[None] * len(self.asked)]
            return outputs, loss_value, zero, grads, mutated
        per_example, state = self._penalise(leaves, given, True, values, saved, out, v)
        value = penalty.reduce(per_example)
        weights = weight.to(per_example.dtype).expand(value.shape)
        weights = penalty.unreduce(weights, per_example.shape[0])
        grads = self.last(Arrived(state, extra, {plan.target: grad_out}, weights))
        return outputs, loss_value, value, grads, mutated


@dataclass(frozen=True, eq=False)
class CallersGradient(CallersProgram, GradientProgram):
    """The gradient itself, for a v that is a caller's own."""

    def first(self, leaves: Mapping[int, Tensor], extra: Sequence[Any], keep: bool = True) -> First:
        outputs, mutated, values, saved = self._opened(leaves)
        with torch.enable_grad():
            out = values[self.plan.target].detach().requires_grad_()
            v = self.penalty.seed(out)
        refuse_others("v", v, out)
        xi, held = self._backward(leaves, values, saved, v.detach(), keep)
        xi = self._measured(sweeps.State(values, saved, held), xi, extra)
        state = Called(values, saved, held, out, v, [], out, ())
        return First(outputs, xi, mutated, state if keep else None)

    def _starts(
        self, state: Called, along: Any, asked: Sequence[Tensor], keep: bool
    ) -> tuple[Sequence[Tensor | None], Gradients]:
        metas = [self.plan.graph.values[v] for v in self.plan.penalised]
        q = [
            None if u is None else u.to(meta.dtype)  # type: ignore[union-attr]
            for u, meta in zip(along, metas, strict=True)
        ]
        return [*q, None], []


def _gradient(losses: Any, out: Tensor) -> Tensor:
    """∇ of each example's loss, differentiable."""
    return torch.autograd.grad(losses.sum(), out, create_graph=True)[0]


def _mean_gradient(losses: Tensor | None, out: Tensor, keep: bool) -> tuple[Tensor, Tensor | None]:
    """(the mean of the losses, its gradient in the output). keep: for another derivative."""
    if losses is None:
        return torch.zeros((), device=out.device), None
    refuse_others("the loss", losses, out)
    mean = losses.mean()
    (gradient,) = torch.autograd.grad(mean, out, retain_graph=keep)
    return mean.detach(), gradient


def _pulled(
    end: Tensor, leaves: Sequence[Tensor], asked: Sequence[Tensor], along: Tensor, keep: bool
) -> tuple[Gradients, Gradients]:
    """(∂end/∂leaves)* along, and the same for what is asked."""
    if not end.requires_grad:
        return [None] * len(leaves), [None] * len(asked)
    try:
        pulled = torch.autograd.grad(
            end, [*leaves, *asked], along.to(end.dtype), retain_graph=keep, allow_unused=True
        )
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):
            raise StaleGraphError(
                "a tensor that your loss or penalty reads was changed in place before backward; "
                f"change a copy, or run forward again ({error})"
            ) from error
        raise
    return list(pulled[: len(leaves)]), list(pulled[len(leaves) :])


def refuse_others(what: str, result: Tensor, *own: Tensor) -> None:
    """Raise where a caller's function depends on a tensor besides its arguments that requires grad:
    the sweeps, which know its arguments alone, would give it none."""
    for node in behind([result]):
        leaf = getattr(node, "variable", None)
        if leaf is not None and not any(leaf is t for t in own):
            raise InputError(
                f"{what} depends on a tensor of shape {tuple(leaf.shape)} that requires grad and "
                "is none of its arguments, so that it would receive no gradient; pass it in the "
                "call (with the target, as a tuple), or detach it"
            )
