"""From sweeps to autograd: one `autograd.Function` from (x, effective parameters) to
(outputs, penalty). Its forward runs the first two sweeps, its backward the last two. Tensors of the
penalty's own that ask for a gradient are arguments too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._torch import get_current_graph_task_keep_graph, pytree
from ..errors import StaleGraphError, ThirdDerivativeError
from .program import Program


@dataclass(eq=False)
class Job:
    """One call: its program, the values no gradient is asked of, and what backward needs.

    extra: the penalty's own arguments, detached.
    """

    program: Program
    constants: Mapping[int, Tensor]
    extra: tuple
    mutations: dict[int, Tensor] = field(default_factory=dict)

    def leaves(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """The graph's values by number. The penalty's own tensors, which come last among those
        given, are none of them."""
        plan = self.program.plan
        named = dict(zip((*plan.penalised, *plan.effective), tensors, strict=False))
        return {**named, **self.constants}

    def read(self, tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
        """What the last two sweeps read of the inputs, the constants, the penalty's arguments and
        the outputs, all of which callers can change in place."""
        plan = self.program.plan
        kept = plan.kept | {plan.target} if plan.needs_head_tangent else plan.kept
        places = (*plan.penalised, *plan.effective)
        every = not getattr(self.program.penalty, "one_seed", False)  # sweeps that start anew
        found = [t for v, t in zip(places, tensors, strict=False) if every or v in kept]
        found += tensors[len(places) :]
        found += [t for v, t in self.constants.items() if v in kept]
        found += [t for t in pytree.tree_leaves(self.extra) if isinstance(t, Tensor)]
        return found + [t for v, t in zip(plan.outputs, outputs, strict=True) if v in kept]


class Bridge(torch.autograd.Function):
    """(x…, effective parameters…, the penalty's own tensors…) ↦ (outputs…, penalty)."""

    @staticmethod
    def forward(ctx: Any, job: Job, *tensors: Tensor) -> tuple[Tensor, ...]:
        program: Program = job.program
        leaves = job.leaves([t.detach() for t in tensors])
        outputs, values, mutated, state = program.first(leaves, job.extra)
        job.mutations.update(mutated)
        ctx.set_materialize_grads(False)
        ctx.job, ctx.state = job, state
        ctx.batch = values.shape[0] if isinstance(values, Tensor) else 0
        ctx.inputs = tensors
        read = job.read(tensors, outputs)  # tensors made under inference_mode count no changes
        ctx.versions = [(t, t._version) for t in read if not t.is_inference()]
        # an alias each: a saved value that became an output would keep this node alive for ever
        results = tuple(out.detach() for out in outputs)
        ctx.mark_non_differentiable(
            *(r for r in results if not (r.is_floating_point() or r.is_complex()))
        )
        return (*results, *(t.detach() for t in program.results(values)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.state is None:
            raise StaleGraphError(
                "backward a second time: the sweeps' values were freed; pass retain_graph=True "
                "to the first backward"
            )
        _check_versions(ctx.versions)
        keep = _keeps_graph()
        if not keep:
            ctx.versions = None
        program: Program = ctx.job.program
        count = len(program.plan.outputs)
        outputs, arrived = grads[:count], grads[count:]
        with torch.no_grad(), no_autocast():
            weights = program.along(arrived, ctx.batch)
            seeds = dict(zip(program.plan.outputs, outputs, strict=True))
            found = program.last(ctx.state, ctx.job.extra, seeds, weights, keep=keep)
        if torch.is_grad_enabled():
            linear = ctx.batch and len(arrived) == 1
            penalty, rest = (arrived[0], outputs) if linear else (None, grads)
            found = _differentiable(found, ctx, penalty, rest)
        if not keep:
            ctx.state = ctx.inputs = None
        return (None, *found)


def _keeps_graph() -> bool:
    """Whether the running backward was called with retain_graph=True."""
    return get_current_graph_task_keep_graph()


def no_autocast() -> AbstractContextManager:
    """The graph holds its casts explicitly; nothing is to be cast again."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return torch.autocast(device, enabled=False)
    return nullcontext()


def _check_versions(versions: Sequence[tuple[Tensor, int]]) -> None:
    for tensor, version in versions:
        if tensor._version != version:
            raise StaleGraphError(
                f"a tensor of shape {tuple(tensor.shape)} that the backward pass reads (an input, "
                "a label, a parameter, a buffer or the output) was changed in place before it (an "
                "optimiser step in between?); change a copy, or run forward again"
            )


# ------------------------------------------------------------- gradients of the gradients
#
# The gradients are linear in what arrived at the penalty, ḡ, so they have a derivative there: with
# R_b the penalty of example b, ∂⟨c, Σ_b ḡ_b ∇R_b⟩/∂ḡ_b = ⟨c, ∇R_b⟩, one more pair of sweeps for a
# reduced penalty. That is the hypergradient of a penalty's weight. In x and the parameters it would
# be a third derivative; in what arrived at the outputs a tangent along parameters. Neither is among
# the four sweeps.


def _differentiable(
    grads: Sequence[Tensor | None], ctx: Any, penalty: Tensor | None, outputs: Sequence
) -> list[Tensor | None]:
    """The gradients, attached to what they depend on."""
    others = [t for t in (*ctx.inputs, *outputs) if t is not None and t.requires_grad]
    places = [i for i, g in enumerate(grads) if g is not None]
    end = _NoThird.apply(*others) if others else None
    if not places or (end is None and (penalty is None or not penalty.requires_grad)):
        return list(grads)
    found = _Linear.apply(ctx, places, penalty, end, *(grads[i] for i in places))
    result: list[Tensor | None] = [None] * len(grads)
    for i, g in zip(places, found, strict=True):  # type: ignore[call-overload]
        result[i] = g
    return result


class _Linear(torch.autograd.Function):
    """Gradients as functions of the penalty's ḡ; `end` stands for all else they depend on."""

    @staticmethod
    def forward(
        ctx: Any, bridge: Any, places: list[int], penalty: Any, end: Any, *grads: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.bridge, ctx.places, ctx.end = bridge, places, None if end is None else end.detach()
        ctx.like = None if penalty is None else penalty.detach()
        ctx.set_materialize_grads(False)
        return tuple(g.detach() for g in grads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *along: Tensor | None) -> tuple[Tensor | None, ...]:
        bridge, like = ctx.bridge, ctx.like
        grad = None
        if ctx.needs_input_grad[2]:
            if bridge.state is None:
                raise StaleGraphError(
                    "the sweeps' values were freed; pass retain_graph=True to the first backward"
                )
            _check_versions(bridge.versions)
            grad = torch.zeros_like(like)
            units = torch.eye(like.numel(), dtype=like.dtype, device=like.device)
            for place, unit in zip(grad.view(-1), units, strict=True):
                place.copy_(_paired(bridge, unit.reshape(like.shape), ctx.places, along))
        return (None, None, grad, ctx.end, *(None for _ in along))


def _paired(
    bridge: Any, seed: Tensor, places: Sequence[int], along: Sequence[Tensor | None]
) -> Tensor:
    """⟨c, ∇⟨seed, R⟩⟩ over all gradients."""
    program = bridge.job.program
    with no_autocast():
        weights = program.penalty.unreduce(seed, bridge.batch)
        none = dict.fromkeys(program.plan.outputs)
        found = program.last(bridge.state, bridge.job.extra, none, weights, keep=True)
    total = seed.new_zeros(())
    for i, c in zip(places, along, strict=True):
        g = found[i]
        if g is not None and c is not None:
            total = total + (g.conj() * c).real.sum().to(seed.dtype)
    return total


class _NoThird(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        return torch.zeros((), device=inputs[0].device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise ThirdDerivativeError(
            "the gradient of a gradient penalty's gradient is a third derivative, which the four "
            "sweeps do not give, in the parameters, in x, and in anything that the gradient of the "
            "output was made of; in the weight of the penalty it is there, from "
            "torch.autograd.grad(…, weight). For all else use stock autograd (create_graph=True) "
            "on the network itself"
        )
