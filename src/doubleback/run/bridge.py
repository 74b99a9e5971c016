"""From sweeps to autograd: one `autograd.Function` from (x, effective parameters) to
(outputs, penalty). Its forward runs the first two sweeps, its backward the last two. Tensors of the
penalty's own that ask for a gradient are arguments too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import sweeps
from .._torch import foreach_add_, get_current_graph_task_keep_graph, pytree
from ..errors import StaleGraphError, ThirdDerivativeError
from ..graph import Node
from ..kernels import taps_first
from ..plan import Plan
from ..rules import add
from .cuda_graphs import users
from .distributed import average, refuse_inside_forward, several
from .state import copies


class First(NamedTuple):
    """What the first two sweeps yield: outputs, penalty per example, buffers to write, and what
    the last two will need."""

    outputs: list[Tensor]
    values: Tensor
    mutated: dict[int, Tensor]
    state: Any


@dataclass(frozen=True, eq=False)
class Program:
    """The sweeps of one plan with its penalty, as functions of tensors.

    asked: the places of those tensors among the penalty's flattened extras that ask for a gradient.
    """

    plan: Plan
    penalty: Any
    debug: bool = False
    asked: tuple[int, ...] = field(default=(), kw_only=True)

    @property
    def prelude(self) -> Sequence[Node]:
        """What runs before the sweeps, under autograd."""
        return self.plan.prelude

    def first(self, leaves: Mapping[int, Tensor], extra: Sequence[Any], keep: bool = True) -> First:
        """Forward and backward sweep. `keep`: for a `last` to come."""
        plan, penalty = self.plan, self.penalty
        watch = sweeps.finite_watch(plan) if self.debug else None
        state = sweeps.forward(plan, self._laid_out(leaves), watch)
        outputs = [self._usual(state.values[v]) for v in plan.outputs]
        mutated = {name: state.values[v] for name, v in plan.mutations.items()}
        seed = penalty.seed(state.values[plan.target], *extra)
        xi = sweeps.backward(plan, state, seed, keep=keep, watch=watch)
        xi = [
            torch.zeros_like(leaves[v]) if u is None else u
            for v, u in zip(plan.penalised, xi, strict=True)
        ]
        values = self._measured(state, xi, extra)
        return First(outputs, values, mutated, state if keep else None)

    def _measured(self, state: sweeps.State, xi: list[Tensor], extra: Sequence[Any]) -> Any:
        """p per example; what the tangents will start from goes into the state."""
        values, state.q0 = self.penalty.measure(xi, *extra)
        if self.asked or self.penalty.coupled:
            state.xi[sweeps.INPUTS] = xi
        return values

    def _start(self, state: sweeps.State, along: Any, extra: Sequence[Any]) -> dict[int, Tensor]:
        """q₀ at each penalised input, for what arrived at the values."""
        xi = state.xi.get(sweeps.INPUTS, ())
        q0 = self.penalty.weighted(state.q0, xi, along, *extra)
        return dict(zip(self.plan.penalised, q0, strict=True))

    def results(self, values: Any) -> tuple[Tensor, ...]:
        """What is handed out of the values."""
        return (self.penalty.reduce(values),)

    def along(self, grads: Sequence[Tensor | None], batch: int) -> Any:
        """What arrived at the values, from what arrived at the results; None for nothing."""
        return None if grads[0] is None else self.penalty.unreduce(grads[0], batch)

    def last(
        self,
        state: sweeps.State,
        extra: Sequence[Any],
        grad_outputs: Mapping[int, Tensor | None],
        grad_values: Tensor | None,
        keep: bool = False,
    ) -> list[Tensor | None]:
        """Tangent and second sweep: gradients of the penalised inputs, of the effective
        parameters, and of what is `asked`.

        With q₀ = ḡ⊙∇p and h the tangent of the output, the second sweep starts from the
        outputs' gradients plus the head (∂v/∂out)* h plus the curvature sources.
        """
        plan, penalty = self.plan, self.penalty
        watch = sweeps.finite_watch(plan) if self.debug else None
        gamma: dict[int, Tensor] = {}
        own: list[Tensor | None] = [None] * len(self.asked)
        if grad_values is not None:
            xi = state.xi.get(sweeps.INPUTS, ())
            start = self._start(state, grad_values, extra)
            if not keep:
                state.q0 = []
            h, gamma = sweeps.tangent(plan, state, start, keep=keep, watch=watch)
            if self.asked:
                out = state.values[plan.target]
                own = penalty.pull(self.asked, out, h, xi, grad_values, *extra)
            if plan.needs_head_tangent and h is not None and plan.target in plan.trained:
                head = penalty.head(state.values[plan.target], h, *extra)
                join(gamma, plan.target, head)
        for v, grad in grad_outputs.items():
            if v in plan.trained:
                join(gamma, v, grad)
        gamma = sweeps.second(plan, state, gamma, keep=keep, watch=watch)
        swept = [
            self._usual(gamma[v]) if v in plan.trained and v in gamma else None
            for v in (*plan.penalised, *plan.effective)
        ]
        return [*swept, *own]

    def _laid_out(self, leaves: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
        """Images and filters in the layouts of the plan."""
        plan = self.plan
        if not plan.channels_last and not plan.taps_first:
            return leaves
        laid = dict(leaves)
        for v, t in leaves.items():
            if v in plan.channels_last:
                laid[v] = t.contiguous(memory_format=torch.channels_last)
            elif v in plan.taps_first:
                laid[v] = taps_first(t)
        return laid

    def _usual(self, t: Tensor) -> Tensor:
        """Back to the usual layout."""
        laid = self.plan.channels_last or self.plan.taps_first
        return t.contiguous() if laid and t.dim() == 4 else t

    def step(
        self,
        leaves: Mapping[int, Tensor],
        extra: Sequence[Any],
        loss: Any,
        target: Any,
        weight: Tensor | None,
    ) -> tuple[list[Tensor], Tensor, Tensor, list[Tensor | None], dict[int, Tensor]]:
        """All four sweeps: (outputs, loss, penalty, gradients of loss + weight·penalty, buffers).

        The loss is the mean over the rows of the output, the penalty is reduced over those of the
        penalised input: of a network from atoms to molecules, one loss per molecule and one
        penalty per atom. Without a weight this is a plain training step: forward and second sweep
        alone.
        """
        plan, penalty = self.plan, self.penalty
        values = None
        if weight is None:
            state = sweeps.forward(plan, self._laid_out(leaves))
            outputs = [self._usual(state.values[v]) for v in plan.outputs]
            mutated = {name: state.values[v] for name, v in plan.mutations.items()}
        else:
            outputs, values, mutated, state = self.first(leaves, extra)
            assert state is not None
        out = state.values[plan.target]
        loss_value, grad_out = loss_gradient(penalty, loss, out, target, extra)
        grad_values = None
        penalty_value = torch.zeros((), device=out.device)
        if values is not None and weight is not None:
            penalty_value = penalty.reduce(values)
            per_value = weight.to(values.dtype).expand_as(values)
            mean = penalty.reduction == "mean"
            grad_values = per_value / values.numel() if mean else per_value
        grads = self.last(state, extra, {plan.target: grad_out}, grad_values)
        return outputs, loss_value, penalty_value, grads, mutated


def loss_gradient(
    penalty: Any, loss: Any, out: Tensor, target: Any, extra: Sequence[Any]
) -> tuple[Tensor, Tensor | None]:
    """(the mean of the losses, its gradient in the output)."""
    if loss is None:
        return torch.zeros((), device=out.device), None
    losses = loss.values(out, target)
    gradient = penalty.seed(out, *extra) if penalty.shares(loss) else loss.gradient(out, target)
    return losses.mean(), gradient / losses.numel()


def join(gamma: dict[int, Tensor], value: int, grad: Tensor | None) -> None:
    if grad is not None:
        gamma[value] = add(gamma.get(value), grad)  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class GradientProgram(Program):
    """The sweeps of a network that returns ξ₀ = J*v itself: one value for each penalised input, and
    what arrives there is q₀. `penalty` is what knows v."""

    def _measured(self, state: sweeps.State, xi: list[Tensor], extra: Sequence[Any]) -> Any:
        held = {t.untyped_storage()._cdata for t in pytree.tree_leaves((state.values, state.xi))
                if isinstance(t, Tensor)}  # fmt: skip
        # a copy of what is held: it is the caller's, who may write to it
        return [
            u.clone() if u.untyped_storage()._cdata in held else u for u in map(self._usual, xi)
        ]

    def _start(self, state: sweeps.State, along: Any, extra: Sequence[Any]) -> dict[int, Tensor]:
        metas = self.plan.graph.values
        return {
            v: q.to(metas[v].dtype)  # type: ignore[union-attr]
            for v, q in zip(self.plan.penalised, along, strict=True)
            if q is not None
        }

    def results(self, values: Any) -> tuple[Tensor, ...]:
        return tuple(values)

    def along(self, grads: Sequence[Tensor | None], batch: int) -> Any:
        return None if all(g is None for g in grads) else list(grads)


@dataclass(eq=False)
class Job:
    """One call: its program, the values no gradient is asked of, and what backward needs.

    extra: the penalty's own arguments, detached.
    """

    program: Any
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
        if ctx.versions is None:
            raise StaleGraphError(
                "backward again after one that failed, which had used up the sweeps' values: run "
                "forward again"
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


def deliver(pairs: Sequence[tuple[Tensor, Tensor]], lent: bool = False) -> None:
    """Add each gradient to its tensor's `.grad`, or send it on where the tensor is no leaf.

    Leaves that nobody watches get theirs at once, in a few kernels for all of them; hooks and
    distributed training see the backward pass they expect, and what `DistributedDataParallel`
    would have averaged behind its forward is averaged here. What
    becomes a `.grad` is all that its memory holds, and nobody else's: gradients that share memory
    with one another, with an input, a buffer or an output are copied. lent: they lie in memory of
    their own that a CUDA graph will write to again, and have owners there who know.
    """
    together = several()
    if together:
        refuse_inside_forward()
    sums = {id(t): (t, g) for t, g in pairs}
    if len(sums) < len(pairs):  # a tensor stands in two places
        sums.clear()
        for t, g in pairs:
            sums[id(t)] = (t, sums[id(t)][1] + g if id(t) in sums else g)
    found = _owned(list(sums.values()), lent)
    plain, rest = [], []
    watched = torch.distributed.is_available() and torch.distributed.is_initialized()
    for t, g in found:
        hooks = t._backward_hooks or getattr(t, "_post_accumulate_grad_hooks", None)
        alike = _plain(g) and g.dtype == t.dtype and g.stride() == t.stride()
        (rest if watched or hooks or not t.is_leaf or not alike else plain).append((t, g))
    if rest:
        torch.autograd.backward([t for t, _ in rest], [g for _, g in rest])
    _add_to_grads(plain)
    if together:
        average(t for t, _ in found)


def _add_to_grads(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """All or, where Ctrl-C arrives, none, as a backward pass in C++ would: sums are one call."""
    old = [(t.grad, g) for t, g in pairs if t.grad is not None]
    new = [(t, g) for t, g in pairs if t.grad is None]
    version = old[0][0]._version if old else None
    try:
        for t, g in new:
            t.grad = g
        if old:
            with torch.no_grad():
                foreach_add_([a for a, _ in old], [g for _, g in old])
    except BaseException:
        if not old or old[0][0]._version == version:
            for t, _ in new:
                t.grad = None
        raise


def _owned(pairs: list[tuple[Tensor, Tensor]], lent: bool) -> list[tuple[Tensor, Tensor]]:
    """The same, each gradient alone in its memory. A leaf whose `.grad` exists already only reads
    its gradient, which stays as it is."""
    places = [g.untyped_storage()._cdata if _plain(g) else i for i, (_, g) in enumerate(pairs)]
    count = Counter(places)
    shared = [
        (count[place] > 1 or not (lent or _alone(g))) and not (t.is_leaf and t.grad is not None)
        for place, (t, g) in zip(places, pairs, strict=True)
    ]
    own = iter(copies([g for (_, g), copy in zip(pairs, shared, strict=True) if copy]))
    return [(t, next(own) if copy else g) for (t, g), copy in zip(pairs, shared, strict=True)]


def _plain(t: Tensor) -> bool:
    """Autograd delivers anything else, and copies what it must."""
    return type(t) is Tensor and t.layout is torch.strided


def _alone(t: Tensor) -> bool:
    """Whether a tensor fills its storage, and no other tensor refers to that."""
    if not _plain(t):
        return True
    storage = t.untyped_storage()
    fills = storage.nbytes() == t.numel() * t.element_size()
    return fills and users(storage._cdata) <= 2  # the tensor's and `storage`'s own


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
