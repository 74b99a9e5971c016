"""From sweeps to autograd: one `autograd.Function` from (x, effective parameters) to
(outputs, penalty). Its forward runs the first two sweeps, its backward the last two. Tensors of the
penalty's own that ask for a gradient are arguments too. And the gradients of sweeps that ran
without it, delivered as autograd would, to one process or to several."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from .._torch import foreach_add_, get_current_graph_task_keep_graph, pytree
from ..errors import InputError, StaleGraphError, ThirdDerivativeError
from ..graph import memory
from ..kernels import batched
from .cuda_graphs import GraphedState, users
from .program import Arrived, FlatState, Gradients, Program
from .state import behind, copies


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

    def read(
        self, tensors: Sequence[Tensor], outputs: Sequence[Tensor], state: Any
    ) -> list[Tensor]:
        """What the last two sweeps read of the inputs, the constants, the penalty's arguments and
        the outputs, all of which callers can change in place, or hold the memory of."""
        plan = self.program.plan
        kept = plan.kept | {plan.target} if plan.needs_head_tangent else plan.kept
        places = (*plan.penalised, *plan.effective)
        callers = [*zip(places, tensors, strict=False), *self.constants.items()]
        callers += zip(plan.outputs, outputs, strict=True)
        reads = [t for v, t in callers if v in kept] + [*tensors[len(places) :]]
        reads += [t for t in pytree.tree_leaves(self.extra) if isinstance(t, Tensor)]
        if plan.beside:
            held = set(map(memory, _tensors(state, kept)))
            reads += [t for v, t in callers if v in plan.beside and memory(t) in held]
        return reads


def _tensors(state: Any, kept: Collection[int]) -> list[Tensor]:
    """The tensors that the last two sweeps are going to read of what the first two left."""
    if isinstance(state, GraphedState):
        state = state.state
    if isinstance(state, FlatState):
        if state.flat.recipe is not None:
            return state.tensors
        state = state.rebuild(state.tensors, state.numbers)
    parts = dict(vars(state))
    values = parts.pop("values", {})
    leaves = pytree.tree_leaves(([t for v, t in values.items() if v in kept], parts))
    return [t for t in leaves if isinstance(t, Tensor)]


def attach(job: Job, tensors: Sequence[Tensor], before: int) -> tuple[Tensor, ...]:
    """(outputs…, what is handed out of the values) as functions of (x…, effective parameters…, the
    penalty's own tensors…). before: `next_node()` ahead of the nodes that the effective parameters
    come from."""
    _shield()
    relay = token = None
    stretches = job.program.stretches if several() else ()
    if len(stretches) > 1:
        plan = job.program.plan
        place = {v: i for i, v in enumerate((*plan.penalised, *plan.effective))}
        relay = Relay(stretches, [[place[v] for v in s.values] for s in stretches])
        for places in reversed(relay.places[1:]):
            token = _RelayNode.apply(relay, token, *[tensors[i] for i in places])
            _last_of_all(token, before)
    return Bridge.apply(job, relay, token, *tensors)  # type: ignore[return-value]


@cache
def _shield() -> None:
    """A `backward()` inside of torch.compile runs what is here as it is: its look inside would end
    in warnings. Not when the module is imported, since it takes Dynamo."""
    for node in (Bridge, _RelayNode):
        node.backward = staticmethod(torch.compiler.disable(node.backward))  # type: ignore[assignment]


@dataclass(eq=False)
class Relay:
    """A backward pass that hands gradients over as they become complete. Where others wait for them
    (DistributedDataParallel, which sends them), its node in autograd's graph is followed by a chain
    of more, one for each stretch of the second sweep.

    places: those of each stretch's gradients among all; parts: what is still to come; None where
    the bridge returns all of them.
    """

    stretches: Sequence[Any]
    places: Sequence[Sequence[int]]
    parts: Iterator[Gradients] | None = None
    left: int = 0

    def begin(self, program: Program, arrived: Arrived) -> Gradients:
        """The bridge's own: gradients of the first stretch and of the penalty's tensors."""
        self.parts, self.left = program.parts(self.stretches, arrived), len(self.places)
        own = next(self.parts)
        gradients: Gradients = [None] * sum(map(len, self.places))
        for i, g in zip(self.places[0], self.next(), strict=True):
            gradients[i] = g
        return [*gradients, *own]

    def next(self) -> Gradients:
        """The next part."""
        if self.parts is None:
            return []
        with torch.no_grad(), no_autocast():
            part = next(self.parts)
        self.left -= 1
        if not self.left:
            self.parts = None  # and what it holds
        return part


class _RelayNode(torch.autograd.Function):
    """Its backward sweeps one more stretch. token: of the node that runs after this one."""

    @staticmethod
    def forward(ctx: Any, relay: Relay, token: Tensor | None, *tensors: Tensor) -> Tensor:
        ctx.relay, ctx.count = relay, len(tensors)
        ctx.set_materialize_grads(False)
        return torch.empty((), device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, *(ctx.relay.next() or (None,) * ctx.count))


def _last_of_all(token: Tensor, before: int) -> None:
    """Have the node of `token` run when autograd has nothing else to do: of nodes that are ready it
    takes the one that was made last, and this was made after those which the effective parameters
    come from (casts, weight norm), whose gradients it would hold up."""
    node: Any = token.grad_fn
    if node is not None:
        node._set_sequence_nr(max(0, before - 1))


class Bridge(torch.autograd.Function):
    """(x…, effective parameters…, the penalty's own tensors…) ↦ (outputs…, penalty)."""

    @staticmethod
    def forward(
        ctx: Any, job: Job, relay: Relay | None, token: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        program: Program = job.program
        leaves = job.leaves([t.detach() for t in tensors])
        outputs, values, mutated, state = program.first(leaves, job.extra)
        job.mutations.update(mutated)
        ctx.set_materialize_grads(False)
        ctx.job, ctx.state, ctx.relay = job, state, relay
        ctx.batch = values.shape[0] if isinstance(values, Tensor) else 0
        ctx.inputs = tensors
        read = job.read(tensors, outputs, state)
        read += getattr(state, "outside", ())  # what is had again, is had from these
        # tensors made under inference_mode count no changes
        ctx.versions = [(t, t._version) for t in read if not t.is_inference()]
        # an alias each: a saved value that became an output would keep this node alive for ever
        results = tuple(out.detach() for out in outputs)
        plan = program.plan
        ctx.mark_non_differentiable(
            *(r for v, r in zip(plan.outputs, results, strict=True) if v not in plan.trained)
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
        if batched():
            raise InputError(
                "a backward pass along many cotangents at once (is_grads_batched, vectorize) does "
                "not go through the sweeps: take one cotangent after another, or make the model "
                "with sweeps=False"
            )
        _check_versions(ctx.versions)
        keep = get_current_graph_task_keep_graph()
        if not keep:
            ctx.versions = None
        program: Program = ctx.job.program
        count = len(program.plan.outputs)
        outputs, arrived = grads[:count], grads[count:]
        relay = None if torch.is_grad_enabled() else ctx.relay
        if ctx.relay is not None:
            ctx.relay.parts = None
        with torch.no_grad(), no_autocast():
            weights = program.along(arrived, ctx.batch)
            seeds = dict(zip(program.plan.outputs, outputs, strict=True))
            given = Arrived(ctx.state, ctx.job.extra, seeds, weights, keep)
            gradients = program.last(given) if relay is None else relay.begin(program, given)
        if torch.is_grad_enabled():
            linear = ctx.batch and len(arrived) == 1
            penalty, rest = (arrived[0], outputs) if linear else (None, grads)
            gradients = _differentiable(gradients, ctx, penalty, rest)
        if not keep:
            ctx.state = ctx.inputs = None
        return (None, None, None, *gradients)


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
    owned = _owned(list(sums.values()), lent)
    plain, rest = [], []
    watched = torch.distributed.is_available() and torch.distributed.is_initialized()
    for t, g in owned:
        hooks = t._backward_hooks or getattr(t, "_post_accumulate_grad_hooks", None)
        alike = _plain(g) and g.dtype == t.dtype and g.stride() == t.stride()
        (rest if watched or hooks or not t.is_leaf or not alike else plain).append((t, g))
    if rest:
        torch.autograd.backward([t for t, _ in rest], [g for _, g in rest])
    _add_to_grads(plain)
    if together:
        average(t for t, _ in owned)


def _add_to_grads(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """All or, where Ctrl-C arrives, none, as a backward pass in C++ would: sums are one call."""
    old: list[Any] = [(t.grad, g) for t, g in pairs if t.grad is not None]
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
) -> Gradients:
    """The gradients, attached to what they depend on."""
    others = [t for t in (*ctx.inputs, *outputs) if t is not None and t.requires_grad]
    places = [i for i, g in enumerate(grads) if g is not None]
    end = _NoThird.apply(*others) if others else None
    if not places or (end is None and (penalty is None or not penalty.requires_grad)):
        return list(grads)
    attached = _Linear.apply(ctx, places, penalty, end, *(grads[i] for i in places))
    result: Gradients = [None] * len(grads)
    for i, g in zip(places, attached, strict=True):  # type: ignore[call-overload]
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
        arrived = Arrived(bridge.state, bridge.job.extra, none, weights, keep=True)
        gradients = program.last(arrived)
    total = seed.new_zeros(())
    for i, c in zip(places, along, strict=True):
        g = gradients[i]
        if g is not None and c is not None:
            total = total + (g.conj() * c).real.sum().to(seed.dtype)
    return total


def refuse_third(t: Tensor, grad: Tensor) -> Tensor | None:
    """A hook on what autograd computed from t alone, a penalty or gradient without sweeps."""
    return grad + _NoThird.apply(t) if torch.is_grad_enabled() else None


class _NoThird(torch.autograd.Function):
    """A node that says, when it is differentiated, that third derivatives are not given."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Tensor) -> Tensor:
        return inputs[0].new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise ThirdDerivativeError(
            "the gradient of a gradient penalty's gradient is a third derivative, which doubleback "
            "does not give, in the parameters, in x, and in anything that the gradient of the "
            "output was made of; in the weight of the penalty it is there, from "
            "torch.autograd.grad(…, weight). For all else use stock autograd (create_graph=True) "
            "on the network itself"
        )


# ----------------------------------------------------------------------- several processes
#
# DistributedDataParallel averages gradients over processes in the backward pass that follows its
# own forward. An `accumulate` is no forward of DDP's, so that its reducer sleeps, and parameters
# would drift apart. So the average is taken here, over the same parameters, in the same process
# group, and not inside `ddp.no_sync()`.

BUCKET = 64 * 2**20  # bytes that are averaged at a time
_VERDICT = "doubleback: who averages this gradient"


def several() -> bool:
    """Whether this process trains together with others."""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return there and torch.distributed.get_world_size() > 1


def refuse_inside_forward() -> None:
    """Inside DDP's forward nothing can be averaged: it waits for a backward pass of its own."""
    if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
        raise InputError(
            "accumulate inside the forward of a DistributedDataParallel: its gradients would not "
            "be averaged. Call accumulate outside, on the model that DDP wraps (it averages them), "
            "or return model(x, …) from that forward and call backward()"
        )


def average(tensors: Iterable[Tensor]) -> None:
    """Average the `.grad`s of all parameters of each DDP that one of the tensors belongs to, or
    depends on."""
    for ddp in dict.fromkeys(_managers(list(_leaves(tensors)))):
        if ddp.require_backward_grad_sync:
            _refuse(ddp)
            _average(ddp)


def _leaves(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    inner = []
    for t in tensors:
        if t.is_leaf:
            yield t
        else:
            inner.append(t)
    for node in behind(inner):
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf


def _managers(leaves: Sequence[Tensor]) -> Iterator[DistributedDataParallel]:
    """Nothing on a parameter tells its DDP, which however keeps the node alive that adds to its
    `.grad`. Whose node lives on is looked for among all objects, once, and noted on the node."""
    unknown = [t for t in leaves if t.requires_grad and _lives_on(t) and not _known(t)]
    if unknown:
        wrappers = [o for o in _objects() if issubclass(type(o), DistributedDataParallel)]
        owner = {id(p): weakref.ref(ddp) for ddp in wrappers for p in ddp._module_parameters}
        for t in unknown:
            _notes(t)[_VERDICT] = owner.get(id(t), _nobody)
    for t in leaves:
        if t.requires_grad:
            ddp = _notes(t).get(_VERDICT, _nobody)()
            if ddp is not None:
                yield ddp


def _objects() -> list[Any]:
    """All that Python's collector knows. It does not show what `gc.freeze` has put aside, which is
    therefore put back for a moment."""
    if not gc.get_freeze_count():
        return gc.get_objects()
    gc.collect()  # or what is garbage would be put aside for good
    gc.unfreeze()
    objects = gc.get_objects()
    gc.freeze()
    return objects


def _nobody() -> None:
    return None


def _notes(t: Tensor) -> dict[Any, Any]:
    """What can be noted on the node that adds to `t.grad`, as long as it lives."""
    return get_gradient_edge(t).node.metadata  # type: ignore[return-value]


def _known(t: Tensor) -> bool:
    return _notes(t).get(_VERDICT, True) is not True


def _lives_on(t: Tensor) -> bool:
    notes = _notes(t)
    if _VERDICT not in notes:
        notes[_VERDICT] = True  # not looked for yet
    del notes
    return _VERDICT in _notes(t)


def _refuse(ddp: DistributedDataParallel) -> None:
    hooks, joins = bool(ddp._comm_hooks), ddp._join_config.enable
    if hooks or joins or ddp.mixed_precision is not None:
        what = "a communication hook" if hooks else "join()" if joins else "mixed_precision"
        raise InputError(
            f"accumulate under a DistributedDataParallel with {what}, which it knows nothing of; "
            "call the wrapped model and backward()"
        )


def _average(ddp: DistributedDataParallel) -> None:
    """grad ← mean over processes; one that is absent here counts as zero. One that is absent
    everywhere stays so with `find_unused_parameters`, and is zero without, as there nobody asks."""
    parameters = [p for p in ddp._module_parameters if p.requires_grad]
    group = ddp.process_group
    used: Sequence[Any] = [True] * len(parameters)
    if ddp.find_unused_parameters and parameters:
        here = [int(p.grad is not None) for p in parameters]
        flags = torch.tensor(here, dtype=torch.int32, device=parameters[0].device)
        torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX, group=group)
        used = flags.tolist()
    chosen = [p for p, on in zip(parameters, used, strict=True) if on]
    with torch.no_grad():
        for p in chosen:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        for bucket in _buckets([p.grad for p in chosen]):  # type: ignore[misc]
            flat = torch.cat([g.reshape(-1) for g in bucket])
            torch.distributed.all_reduce(flat, group=group)
            flat /= torch.distributed.get_world_size(group)
            for g, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                g.copy_(part.view(g.shape))


def _buckets(grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype and device, so many that they are worth a message."""
    bucket: list[Tensor] = []
    size = 0
    for g in grads:
        alike = not bucket or (g.dtype, g.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and (not alike or size > BUCKET):
            yield bucket
            bucket, size = [], 0
        bucket.append(g)
        size += g.numel() * g.element_size()
    if bucket:
        yield bucket
