"""Operators that draw random numbers without the tag that says so.

PyTorch's own are tagged `nondeterministic_seeded`; one from `torch.library` is if its author
thought of it. So it is run once, on numbers made up for it, while the generators are watched.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch import disable_current_modes
from ..graph import Graph, Meta, Node, Ref, map_refs

# of PyTorch itself: tagged, or not to be run by one process alone
_TAGGED = ("aten", "prims", "prim", "doubleback", "rngprims", "higher_order", "torchvision")
_TOGETHER = (
    "c10d",
    "_c10d_functional",
    "_c10d_functional_autograd",
    "_dtensor",
    "symm_mem",
    "fsdp",
)
_KNOWN = frozenset({*_TAGGED, *_TOGETHER})
_FOUND: dict[Any, bool] = {}


def draws_untold(graph: Graph, node: Node) -> bool:
    """Whether a node's operator, of somebody else's, moves a generator; looked at once for each.
    One that cannot be run on made-up numbers counts as one that does not."""
    op = node.op
    if getattr(op, "namespace", "aten") in _KNOWN:
        return False
    if op not in _FOUND:
        _FOUND[op] = _moves_a_generator(graph, node)
    return _FOUND[op]


def _moves_a_generator(graph: Graph, node: Node) -> bool:
    def made_up(ref: Ref) -> Tensor:
        meta = graph.values[ref.index]
        assert meta is not None
        return _numbers(meta)

    devices = {m.device for v in node.inputs if (m := graph.values[v]) is not None}
    cuda = [d for d in devices if d.type == "cuda"]
    with disable_current_modes(), torch.no_grad(), torch.random.fork_rng(cuda):
        args, kwargs = map_refs((node.args, dict(node.kwargs)), made_up)
        before = _states(cuda)
        try:
            node.op(*args, **kwargs)
        except Exception:
            return False
        return any(not torch.equal(a, b) for a, b in zip(before, _states(cuda), strict=True))


def _numbers(meta: Meta) -> Tensor:
    """Ones, in the domain of most functions; integers are zero, an index into anything."""
    make = torch.ones if meta.differentiable or meta.dtype is torch.bool else torch.zeros
    return make(meta.shape, dtype=meta.dtype, device=meta.device)


def _states(cuda: list[torch.device]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in cuda)]
