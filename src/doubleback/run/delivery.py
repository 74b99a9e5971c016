"""Gradients delivered to those they are of: added to `.grad`, or sent on where a tensor is no leaf.

Under `DistributedDataParallel` they are averaged. DDP does so in the backward pass that follows its
own forward. An `accumulate` is no forward of DDP's, so that its reducer sleeps, and parameters
would drift apart. So the average is taken here, over the same parameters, in the same process
group, and not inside `ddp.no_sync()`.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from .._torch import foreach_add_
from ..errors import InputError
from .cuda_graphs import users
from .state import behind, copies

BUCKET = 64 * 2**20  # bytes that are averaged at a time
_VERDICT = "doubleback: who averages this gradient"


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
    with torch.no_grad():
        old = [(t.grad, g) for t, g in plain if t.grad is not None]
        if old:
            foreach_add_([a for a, _ in old], [g for _, g in old])
        for t, g in plain:
            if t.grad is None:
                t.grad = g
    if together:
        average(t for t, _ in found)


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


# --------------------------------------------------------------------- several processes


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
        found = [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)]
        owner = {id(p): weakref.ref(ddp) for ddp in found for p in ddp._module_parameters}
        for t in unknown:
            _notes(t)[_VERDICT] = owner.get(id(t), _nobody)
    for t in leaves:
        if t.requires_grad:
            ddp = _notes(t).get(_VERDICT, _nobody)()
            if ddp is not None:
                yield ddp


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
