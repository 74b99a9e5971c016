"""A loss that TorchDynamo captured → one flat graph of its value, its gradients and its writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._torch import make_fx
from ..capture import mark
from ..errors import CaptureError
from ..kernels import for_compiler
from ..run import boxed, clean, no_autocast, sound
from .region import THROUGH


@dataclass(frozen=True)
class WholeStep:
    """A compiled graph. `step(inputs)` takes a list and empties it; it returns (the loss, gradients
    of the inputs at `trained`, Dynamo's results, new values of the inputs at `written`).

    place: of the loss among Dynamo's results.
    scaled: the last input is a number by which the loss is multiplied before it is differentiated;
    device: where that number lies.
    halves: whether float16 occurs in the graph.
    """

    run: Callable[[list], Sequence[Any]]
    found: tuple[int | None, ...]  # of each result the place among what `run` returns
    trained: tuple[int, ...]
    written: tuple[int, ...]
    place: int
    scaled: bool
    halves: bool
    device: torch.device | None

    def __call__(self, inputs: list) -> tuple[Tensor, list[Tensor | None], Sequence, Sequence]:
        with torch.no_grad():
            values = self.run(inputs)
        found = [None if i is None else values[i] for i in self.found]
        first, last = 1 + len(self.trained), len(found) - len(self.written)
        return found[0], found[1:first], found[first:last], found[last:]  # type: ignore[return-value]


def take_mark(module: torch.fx.GraphModule) -> torch.fx.Node | None:
    """The marked loss becomes the graph's last output; the mark itself goes. None without one."""
    marks = [n for n in module.graph.nodes if n.target in (mark, torch.ops.doubleback.mark)]
    if len(marks) != 1:
        return None
    loss = marks[0].args[0]
    place = _place(module, marks[0])
    marks[0].replace_all_uses_with(loss)
    module.graph.erase_node(marks[0])
    output = _output(module)
    output.args = ((*_results(output), place, loss),)
    module.recompile()
    return loss  # type: ignore[return-value]


def _results(output: torch.fx.Node) -> Sequence[Any]:
    return output.args[0]  # type: ignore[return-value]


def _output(module: torch.fx.GraphModule) -> torch.fx.Node:
    return next(n for n in module.graph.nodes if n.op == "output")


def _place(module: torch.fx.GraphModule, marked: torch.fx.Node) -> int:
    """Where the results have the marked loss, detached."""
    results = _results(_output(module))
    return next(i for i, n in enumerate(results) if n is marked or n in marked.users)


def trace_whole(
    module: torch.fx.GraphModule, given: Sequence[Any], compiler: str, scaled: bool,
    check: Callable[[Tensor, bool], None],
) -> WholeStep:  # fmt: skip
    """Differentiate Dynamo's graph, whose last outputs are the loss's place and the loss, at its
    inputs `given` that require grad, and compile the whole. check(loss, gradients) may refuse."""
    _refuse(module)
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    fakes = [n.meta["example_value"] for n in placeholders]
    gradients = torch.is_grad_enabled()
    required = [isinstance(t, Tensor) and t.requires_grad for t in given]
    trained = [gradients and on for on in required]
    seen: dict[str, Any] = {}

    def run(*inputs: Any) -> list[Any]:
        with _torch.FunctionalTensorMode():
            count = len(placeholders)
            wrapped = [_torch.to_fun(t) if isinstance(t, Tensor) else t for t in inputs]
            for t, on in zip(wrapped, required, strict=False):
                if on:
                    t.requires_grad_()
            *results, place, loss = torch.fx.Interpreter(module).run(*wrapped[:count])
            check(loss, gradients)
            wanted = [wrapped[i] for i, on in enumerate(trained) if on]
            grads: Sequence[Tensor | None] = []
            if gradients:
                with no_autocast():
                    total = loss * wrapped[count] if scaled else loss
                    grads = torch.autograd.grad(total, wanted, allow_unused=True)
            written = [
                i
                for i, t in enumerate(wrapped)
                if isinstance(t, Tensor) and _torch.has_data_mutation(t)
            ]
            seen["written"], seen["place"] = written, place
            flat = [loss.detach(), *grads, *results, *(wrapped[i] for i in written)]
            present = [t for t in flat if t is not None]
            places = iter(range(len(present)))
            seen["found"] = tuple(None if t is None else next(places) for t in flat)
            return [_torch.from_fun(t) if isinstance(t, Tensor) else t for t in present]

    mode = next((t.fake_mode for t in fakes if isinstance(t, _torch.FakeTensor)), None)
    if mode is None:
        raise CaptureError("it is given no tensor at all")
    # another name only where there is need: a number's stand-in remembers its symbol
    inputs = [t.detach() if isinstance(t, Tensor) and t.requires_grad else t for t in fakes]
    device = None
    if scaled:
        on_device = [t for t, on in zip(fakes, required, strict=True) if on] or inputs
        device = next(t.device for t in on_device if isinstance(t, Tensor))
        inputs.append(mode.from_tensor(torch.ones((), device=device), static_shapes=True))
    compiling = compiler == "inductor"
    with for_compiler() if compiling else nullcontext():
        flat = make_fx(run, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs)
    for i in seen["written"]:
        if required[i]:
            raise CaptureError("it writes to a tensor that requires grad in place; clone it first")
    halves = any(
        isinstance(n.meta.get("val"), Tensor) and n.meta["val"].dtype is torch.float16
        for n in flat.graph.nodes
    )
    clean(flat, for_compiler=compiling)
    with torch.no_grad(), no_autocast():
        ready = _by_inductor(flat, mode, inputs) if compiling else boxed(flat)
    places = tuple(i for i, on in enumerate(trained) if on)
    return WholeStep(
        ready, seen["found"], places, tuple(seen["written"]), seen["place"], scaled, halves, device,
    )  # fmt: skip


def _by_inductor(flat: torch.fx.GraphModule, mode: Any, inputs: list) -> Callable:
    """Inductor on stand-ins whose open sizes are Dynamo's: what it asks about them becomes a guard
    of Dynamo's own."""

    with _torch.tracing(_torch.TracingContext(mode)), sound():
        return _torch.compile_fx(_torch.GmWrapper(flat, list), inputs)  # type: ignore[return-value, arg-type]


def _refuse(module: torch.nn.Module) -> None:
    """Operators on whole functions whose second derivative autograd does not know."""
    for part in module.modules():
        if not isinstance(part, torch.fx.GraphModule):
            continue
        for node in part.graph.nodes:
            target = node.target
            if isinstance(target, _torch.HigherOrderOperator) and (target.name() not in THROUGH):
                raise CaptureError(f"{target.name()} has no second derivative in a graph")
