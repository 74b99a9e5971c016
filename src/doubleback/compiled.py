"""Sweeps flattened into one graph and compiled: how double backprop reaches Inductor.

`make_fx` runs the sweeps once on fake tensors and records every operator they call; the flat
graph has no closures and no autograd left in it, so it compiles whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from . import sweeps
from .bridge import Program
from .counting import Operations, recording, replayed
from .losses import Loss
from .penalties import Penalty
from .plan import Plan


@dataclass(frozen=True)
class Flat:
    """A compiled function of tensors whose results are put back into their nested form."""

    run: Callable[..., Sequence[Tensor]]
    spec: Any
    constants: Sequence[Any]
    operations: Operations

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        replayed(self.operations)
        found = iter(self.run(*tensors))
        leaves = [next(found) if item is _TENSOR else item for item in self.constants]
        return pytree.tree_unflatten(leaves, self.spec)


_TENSOR = object()


def flatten(fn: Callable[..., Any], tensors: Sequence[Tensor], mode: bool | str) -> Flat:
    """Trace `fn(*tensors)`, which returns nested tensors and constants, and compile the trace."""
    layout: dict[str, Any] = {}

    def flat(*given: Tensor) -> list[Tensor]:
        leaves, spec = pytree.tree_flatten(fn(*given))
        layout["spec"] = spec
        layout["constants"] = [_TENSOR if isinstance(t, Tensor) else t for t in leaves]
        return [t for t in leaves if isinstance(t, Tensor)]

    with recording() as operations, torch.no_grad():
        graph = make_fx(flat, tracing_mode="fake")(*tensors)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    options = {"mode": mode} if isinstance(mode, str) else {}
    run = torch.compile(graph, fullgraph=True, dynamic=False, **options)
    return Flat(run, layout["spec"], layout["constants"], operations)


class CompiledProgram:
    """A `Program` whose sweeps run as compiled graphs; the same interface.

    Each pair of sweeps is compiled on first use, `last` once per set of gradients that arrive.
    """

    def __init__(self, program: Program, mode: bool | str) -> None:
        self.program = program
        self.mode = mode
        self._flat: dict[Any, Flat] = {}

    @property
    def plan(self) -> Plan:
        return self.program.plan

    @property
    def penalty(self) -> Penalty:
        return self.program.penalty

    def _run(self, key: Any, fn: Callable[..., Any], arguments: Any) -> Any:
        """Call `fn(arguments)`, nested tensors in and out, through its compiled form."""
        leaves, spec = pytree.tree_flatten(arguments)
        places = [i for i, t in enumerate(leaves) if isinstance(t, Tensor)]
        tensors = [leaves[i] for i in places]
        shapes = tuple((t.shape, t.stride(), t.dtype) for t in tensors)
        flat = self._flat.get((key, spec, shapes))
        if flat is None:

            def unpacked(*given: Tensor) -> Any:
                filled = list(leaves)
                for i, t in zip(places, given, strict=True):
                    filled[i] = t
                return fn(pytree.tree_unflatten(filled, spec))

            flat = flatten(unpacked, tensors, self.mode)
            self._flat[key, spec, shapes] = flat
        return flat(tensors)

    def first(
        self, leaves: Mapping[int, Tensor], extra: Sequence[Any], keep: bool = True
    ) -> tuple[list[Tensor], Tensor, list[Tensor], sweeps.State]:
        def run(arguments: Any) -> Any:
            given, more = arguments
            outputs, values, q0, state = self.program.first(given, more, keep)
            if not keep:
                needed = {*self.plan.mutations.values()}
                state = sweeps.State({v: state.values[v] for v in needed})
            # leaves come back from the caller, not out of the graph
            kept = {v: t for v, t in state.values.items() if v not in given}
            return outputs, values, q0, (kept, state.saved, state.xi)

        outputs, values, q0, (kept, saved, xi) = self._run(
            ("first", keep), run, (dict(leaves), tuple(extra))
        )
        return outputs, values, q0, sweeps.State({**leaves, **kept}, saved, xi)

    def last(
        self,
        state: sweeps.State,
        q0: Sequence[Tensor],
        extra: Sequence[Any],
        grad_outputs: Mapping[int, Tensor | None],
        grad_values: Tensor | None,
        keep: bool = False,
    ) -> list[Tensor | None]:
        def run(arguments: Any) -> Any:
            (values, saved, xi), q, more, seeds, weights = arguments
            copied = sweeps.State(dict(values), dict(saved), dict(xi))
            return self.program.last(copied, q, more, seeds, weights)

        arguments = (
            (state.values, state.saved, state.xi), list(q0), tuple(extra), dict(grad_outputs),
            grad_values,
        )  # fmt: skip
        return self._run("last", run, arguments)

    def step(
        self,
        leaves: Mapping[int, Tensor],
        extra: Sequence[Any],
        loss: Loss | None,
        target: Any,
        weight: float,
    ) -> tuple[list[Tensor], Tensor, Tensor, list[Tensor | None], dict[str, Tensor]]:
        def run(arguments: Any) -> Any:
            given, more, y = arguments
            return self.program.step(given, more, loss, y, weight)

        return self._run(
            ("step", id(loss), weight), run, (dict(leaves), tuple(extra), target)
        )


__all__ = ["CompiledProgram", "Flat", "flatten"]
