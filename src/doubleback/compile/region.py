"""A region of `torch.compile`: a graph of PyTorch's functions that TorchDynamo hands to a backend.

Here it is run as eager would run it; a run on tensors without numbers finds out which random
numbers it draws and which of its results share memory; and it is cut in pieces where one of its
results is computed from another.

Its random numbers are drawn before it and handed to it, so that forward, backward and second
derivative see the same ones, however often they run.

Operators on whole functions in its graph (an autograd.Function, a branch) tell more or less of
their derivatives: `obstacle` and `is_linear` say what.
"""

from __future__ import annotations

import ast
import functools
import linecache
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from .. import _torch
from .._torch import (
    TorchDispatchMode,
    is_functorch_wrapped_tensor,
    make_fx,
    peek_interpreter_stack,
    pytree,
    set_grad_enabled,
)
from ..capture import THROUGH, assigns_data, graphs_in, leaving_transforms
from ..errors import CaptureError
from ..graph import OpenSizes, compile_sizes, memory
from ..run import behind

# ----------------------------------------------------------------------------------- random numbers


aten = torch.ops.aten

# What is drawn depends on the sizes of the first argument alone, by operators that return it …
_LIKE = {
    aten.rand_like.default, aten.randn_like.default, aten.randint_like.default,
    aten.randint_like.low_dtype, aten.bernoulli.p,
}  # fmt: skip
# … or write it there
_WRITING = {
    aten.uniform_.default, aten.normal_.default, aten.exponential_.default,
    aten.geometric_.default, aten.log_normal_.default, aten.cauchy_.default,
    aten.random_.default, aten.random_.to, getattr(aten.random_, "from"),
    aten.bernoulli_.float,
}  # fmt: skip
_FROM_SIZES = {
    aten.rand.default, aten.randn.default, aten.randint.default, aten.randint.low,
    aten.randperm.default, aten.normal.float_float,
}  # fmt: skip
_FLOATS = {aten.rand.default, aten.randn.default, aten.normal.float_float}
_NORMAL = {aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor}


@dataclass(frozen=True)
class Draw:
    """One draw of a region: `make(*sizes)`, from sizes that may be open."""

    op: Any
    make: Callable[..., Tensor]
    sizes: tuple[Any, ...]


def is_random(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws: attention is tagged, too, and does so with dropout only."""
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return False
    for i, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            given = args[i] if i < len(args) else kwargs.get("dropout_p", argument.default_value)
            return given != 0
    return True


class _Randomness(TorchDispatchMode, ABC):
    """Sees each operator that draws."""

    @abstractmethod
    def meet(self, draw: Draw) -> Tensor:
        """The numbers of one draw, which operators are computed from."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_random(func, args, kwargs):
            return func(*args, **kwargs)
        return self._drawn(func, args, kwargs)

    def _drawn(self, op: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What the operator returns, made of numbers that depend on sizes alone: uniform ones in
        the place of those that depend on a probability, normal ones in that of a mean."""
        if kwargs.get("generator") is not None:
            raise CaptureError(f"{op} draws from a generator of its own")
        if op is aten.native_dropout.default:
            x, p, train = args
            if train is False or p == 0:
                return x.clone(), torch.ones_like(x, dtype=torch.bool)
            if p == 1:
                return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
            kept = self.meet(_uniform(op, x, lambda u: u > p))
            return x * kept * (1.0 / (1.0 - p)), kept
        if op is aten.bernoulli.default:
            (probability,) = args
            uniform = self.meet(_uniform(op, probability, lambda u: u))
            return (uniform < probability).to(probability.dtype)
        if op is aten.bernoulli_.Tensor:
            x, probability = args
            uniform = self.meet(_uniform(op, x, lambda u: u))
            return x.copy_(uniform < probability)
        if op in _NORMAL:
            mean, std = (*args, 1.0)[:2]
            like = torch.broadcast_tensors(*(t for t in args if isinstance(t, Tensor)))[0]
            return mean + std * self.meet(_normal(op, like))
        if op in _WRITING:
            return args[0].copy_(self.meet(_of_like(op, args, kwargs)))
        if op in _LIKE:
            if op is not aten.bernoulli.p:
                kwargs = {**kwargs, "dtype": kwargs.get("dtype") or args[0].dtype}
            return self.meet(_of_like(op, args, kwargs))
        if op in _FROM_SIZES:
            if op in _FLOATS:  # Inductor knows one default only
                kwargs = {**kwargs, "dtype": kwargs.get("dtype") or torch.get_default_dtype()}
            return self.meet(_of_sizes(op, args, kwargs))
        raise CaptureError(f"{op} draws random numbers that depend on more than sizes")


class Recording(_Randomness):
    """Keeps a note of each draw, on tensors without numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[Draw] = []

    def meet(self, draw: Draw) -> Tensor:
        self.draws.append(draw)
        return draw.make(*draw.sizes)


class Replaying(_Randomness):
    """Hands out what was drawn before, in the same order."""

    def __init__(self, draws: Sequence[Draw], drawn: Sequence[Tensor]) -> None:
        super().__init__()
        self.rest = list(zip(draws, drawn, strict=True))

    def meet(self, draw: Draw) -> Tensor:
        if not self.rest or self.rest[0][0].op is not draw.op:
            raise CaptureError(f"{draw.op} draws where it did not before")
        return self.rest.pop(0)[1]


def _uniform(op: Any, x: Tensor, then: Callable[[Tensor], Tensor]) -> Draw:
    dtype = x.dtype if x.is_floating_point() else torch.float32
    device = x.device

    def make(*sizes: int) -> Tensor:
        return then(torch.rand(sizes, dtype=dtype, device=device))

    return Draw(op, make, tuple(x.shape))


def _normal(op: Any, x: Tensor) -> Draw:
    dtype, device = x.dtype, x.device
    return Draw(
        op, lambda *sizes: torch.randn(sizes, dtype=dtype, device=device), tuple(x.shape)
    )  # fmt: skip


def _of_like(op: Any, args: tuple, kwargs: dict[str, Any]) -> Draw:
    """Drawn on an empty tensor of the same sizes."""
    x, *rest = args
    dtype, device = x.dtype, x.device
    numbers, fill = _numbers((rest, kwargs))
    axes = x.dim()

    def make(*sizes: int) -> Tensor:
        rest, kwargs = fill(sizes[axes:])
        return op(torch.empty(sizes[:axes], dtype=dtype, device=device), *rest, **kwargs)

    return Draw(op, make, (*x.shape, *numbers))


def _of_sizes(op: Any, args: tuple, kwargs: dict[str, Any]) -> Draw:
    numbers, fill = _numbers((args, kwargs))

    def make(*sizes: int) -> Tensor:
        args, kwargs = fill(sizes)
        return op(*args, **kwargs)

    return Draw(op, make, numbers)


def _numbers(tree: Any) -> tuple[tuple, Callable[[Sequence[int]], Any]]:
    """Integers among arguments, any of which may be an open size, and the arguments from them."""
    leaves, spec = pytree.tree_flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if type(leaf) is int or _is_open(leaf)]
    numbers = tuple(leaves[i] for i in places)
    for i in places:
        leaves[i] = None

    def fill(sizes: Sequence[int]) -> Any:
        filled = list(leaves)
        for i, size in zip(places, sizes, strict=True):
            filled[i] = size
        return pytree.tree_unflatten(filled, spec)

    return numbers, fill


def _is_open(leaf: Any) -> bool:
    return isinstance(leaf, torch.SymInt)


# ------------------------------------------------------------------------------------------ regions


class RegionCode:
    """A graph of PyTorch's functions, run as eager would: derivatives are autograd's business.

    examples: Dynamo's inputs without numbers, of which `required` says which require grad; open:
    the places of its open sizes, floats: of Python's numbers, which come as tensors; draws: random
    numbers, which are handed to it behind its inputs; obstacle: why it has no second derivative.
    """

    def __init__(self, module: torch.fx.GraphModule) -> None:
        self.module = _copied(module)
        self.draws: list[Draw] = []
        self.autocast = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in ("cuda", "cpu")
        ]
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        self.examples = [n.meta["example_value"] for n in placeholders]
        self.required = [on_tape(t) for t in self.examples]
        self.obstacle = obstacle(self.module)
        self.branches = any(n.target.name() == COND for _, n in on_functions(self.module))
        sizes = [(i, t) for i, t in enumerate(self.examples) if isinstance(t, torch.SymInt)]
        named = {t.node.expr: i for i, t in reversed(sizes) if not t.node.expr.is_number}
        self.open = sorted(named.values())  # of each open size, where it is given first
        self.floats = [i for i, t in enumerate(self.examples) if _symbolic_number(t) is not None]

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """Its results from inputs and draws, on autograd's tape."""
        count = len(self.examples)
        drawn = inputs[count:]
        replaying = Replaying(self.draws, drawn) if self.draws else nullcontext()
        with self.as_it_was(), _torch.enable_python_dispatcher(), replaying:
            return _AsEager(self.module).run(*inputs[:count])

    def eager(self, *inputs: Any) -> Sequence[Any]:
        """Its results from inputs alone."""
        interpreter = _AsEager if self.obstacle is None else torch.fx.Interpreter
        with self.as_it_was():
            return interpreter(self.module).run(*inputs)

    def record(self, *inputs: Any) -> Sequence[Any]:
        """Its results on tensors without numbers, and a note of what it draws."""
        with self.as_it_was(), _torch.enable_python_dispatcher(), Recording() as seen:
            results = _AsEager(self.module).run(*inputs)
        self.draws = seen.draws
        return results

    @contextmanager
    def as_it_was(self) -> Iterator[None]:
        """Autocast as it was when Dynamo read the code, without its cache of weights; and what the
        code does to autograd's switch is undone, as are transforms where it fails."""
        grad = torch.is_grad_enabled()
        cuda, cpu = (
            torch.autocast(device, dtype=dtype, enabled=on, cache_enabled=False)
            if on or torch.is_autocast_enabled(device)
            else nullcontext()
            for device, on, dtype in self.autocast
        )
        try:
            with leaving_transforms(), cuda, cpu:
                yield
        finally:
            torch.set_grad_enabled(grad)

    def given_draws(self) -> torch.fx.GraphModule:
        """A graph of inputs and draws. Its one node is this code, which AOTAutograd looks into."""
        graph = torch.fx.Graph()
        count = len(self.examples) + len(self.draws)
        inputs = tuple(graph.placeholder(f"input_{i}") for i in range(count))

        def region(*inputs: Any) -> Sequence[Any]:
            own = len(self.examples)
            with Replaying(self.draws, inputs[own:]):
                return torch.fx.Interpreter(self.module).run(*inputs[:own])

        returned = graph.call_function(region, inputs)
        results = self.module.graph.output_node().args[0]
        parts = [graph.call_function(operator.getitem, (returned, i)) for i in range(len(results))]  # type: ignore[arg-type]
        graph.output(tuple(parts))
        return torch.fx.GraphModule(torch.nn.Module(), graph)

    def numbers(self, inputs: Sequence[Any]) -> list[Any]:
        """The call's open sizes, and Python's numbers."""
        sizes = [inputs[i] for i in self.open]
        return sizes + [inputs[i].item() for i in self.floats] if self.floats else sizes

    def sizes(self, wanted: Sequence[Any]) -> Callable[..., Sequence[Any]]:
        """A function of a call's open sizes that computes these numbers of Dynamo's."""
        symbols = [self.examples[i].node.expr for i in self.open]
        return sizes_from(symbols, wanted)


def _symbolic_number(t: Any) -> Any:
    """The symbol of the Python number that a tensor stands for; None for any other tensor."""
    memo = t.item_memo if isinstance(t, _torch.FakeTensor) and t.dim() == 0 else None
    return memo if isinstance(memo, torch.SymFloat) else None


class _AsEager(torch.fx.Interpreter):
    """Constants of the graph join the mode that its inputs are in; operators on whole functions are
    looked into, so that autograd can differentiate them twice."""

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        mode = _torch.get_dispatch_mode(_torch.TorchDispatchModeKey.FAKE)
        if mode is None or not isinstance(value, Tensor) or isinstance(value, _torch.FakeTensor):
            return value
        return mode.from_tensor(value, static_shapes=True)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(target, _torch.HigherOrderOperator):
            if target.name() in THROUGH:
                body, *rest = args
                return _AsEager(body).run(*rest)
            if target.name() == APPLY:
                forward, backward, *rest = args
                result = _CallersFunction.apply(
                    forward, backward, kwargs["non_differentiable_idx"], *rest
                )
                return result
        return super().call_function(target, args, kwargs)


class _CallersFunction(torch.autograd.Function):
    """A caller's autograd.Function, as Dynamo read it: its backward can be differentiated, too."""

    @staticmethod
    def forward(
        ctx: Any, forward: torch.fx.GraphModule, backward: torch.fx.GraphModule,
        constant: Sequence[int], *inputs: Any,
    ) -> Any:  # fmt: skip
        outputs, saved = _AsEager(forward).run(*inputs)
        ctx.backward = backward
        ctx.save_for_backward(*(t if isinstance(t, Tensor) else None for t in saved))
        ctx.others = [None if isinstance(t, Tensor) else t for t in saved]
        if isinstance(outputs, Tensor):
            return outputs
        ctx.mark_non_differentiable(*(outputs[i] for i in constant))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        saved = zip(ctx.saved_tensors, ctx.others, strict=True)
        values = [other if t is None else t for t, other in saved]
        enabled = torch.is_grad_enabled()
        try:
            gradients = _OnTape(ctx.backward).run(*grads, *values)
        finally:
            torch.set_grad_enabled(enabled)
        gradients = gradients if isinstance(gradients, (tuple, list)) else (gradients,)
        return None, None, None, *gradients


class _OnTape(_AsEager):
    """Dynamo reads a backward as if nobody differentiated it; autograd's switch is left alone."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is set_grad_enabled:
            return None
        return super().call_function(target, args, kwargs)


def lost_write(module: torch.fx.GraphModule) -> str | None:
    """What a graph writes and PyTorch's compilers lose, in words: to an input that is one float64
    without axes, on the CPU, which is taken for one of Python's floats; or to `.data`."""
    numbers = [n for n in module.graph.find_nodes(op="placeholder") if _is_number(n)]
    if any(_writes(user, n) for n in numbers for user in n.users):
        return "it writes to a tensor of one float64 without axes, on the CPU"
    return "it assigns to a tensor's .data" if assigns_data(module) else None


def _is_number(node: torch.fx.Node) -> bool:
    t = node.meta["example_value"]
    is_tensor = isinstance(t, Tensor) and not t.requires_grad
    return is_tensor and t.dim() == 0 and t.dtype is torch.float64 and t.device.type == "cpu"


def _writes(node: torch.fx.Node, to: torch.fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE
    return (in_place and node.args[0] is to) or node.kwargs.get("out") is to


_IN_PLACE = {"setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow"}


def fake_mode_of(examples: Sequence[Any]) -> Any:
    """The mode of a graph's example inputs, which are tensors without numbers."""
    mode = next((t.fake_mode for t in examples if isinstance(t, _torch.FakeTensor)), None)
    if mode is None:
        raise CaptureError("it is given no tensor")
    return mode


def bare(t: Any) -> Any:
    """A tensor without its history on autograd's tape, under another name only where it has one:
    the stand-in for one of Python's numbers remembers its symbol."""
    return t.detach() if on_tape(t) else t


def _copied(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The same graph once more: Inductor changes the one that it is given. Without what Dynamo
    notes of the inputs, which refers to the caller's tensors, so that none could be swapped."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        node.meta.pop("grapharg", None)
    return torch.fx.GraphModule(module, graph)


def sizes_from(symbols: Sequence[Any], wanted: Sequence[Any]) -> Callable[..., Sequence[Any]]:
    """A function of the symbols' numbers that computes these, which may be plain numbers too."""
    import sympy

    exprs = [n.node.expr if isinstance(n, torch.SymInt) else sympy.Integer(n) for n in wanted]
    strange = set().union(*(e.free_symbols for e in exprs)) - set(symbols)
    if strange:
        raise CaptureError(f"a size ({next(iter(strange))}) is not among the region's inputs")
    return compile_sizes(exprs, symbols)


# ------------------------------------------------------------------- tensors without numbers


class StandIns(OpenSizes):
    """A region's inputs and draws without numbers, their open sizes as symbols of our own: what is
    asked about these is checked at each call, for Dynamo's own guards are fixed by then.

    floats: Python's numbers, by the places of the tensors that stand for them.
    """

    def __init__(self, code: RegionCode, numbers: Sequence[Any]) -> None:
        super().__init__(numbers)
        self.floats: dict[int, Any] = {}
        self.inputs = self._inputs(code)
        with self.fakes:
            self.draws = [d.make(*s) for d, s in zip(code.draws, self._draws(code), strict=True)]

    def _inputs(self, code: RegionCode) -> list[Any]:
        shapes = [(*t.shape, *t.stride()) for t in code.examples if isinstance(t, Tensor)]
        own = self.numbers[: len(code.open)]
        numbers = iter(code.sizes([n for shape in shapes for n in shape])(*own))
        symbols = {code.examples[i].node.expr: n for i, n in zip(code.open, own, strict=False)}
        floats = iter(self.numbers[len(code.open) :])
        given: list[Any] = []
        for i, t in enumerate(code.examples):
            if isinstance(t, Tensor):
                shape, strides = ([next(numbers) for _ in t.shape] for _ in range(2))
                with self.fakes:
                    given.append(
                        torch.empty_strided(shape, strides, dtype=t.dtype, device=t.device)
                    )
                if i in code.floats:
                    self.floats[i] = given[-1].item_memo = next(floats)
            elif isinstance(t, torch.SymInt):
                expr = t.node.expr
                given.append(int(expr) if expr.is_number else symbols[expr])
            else:
                raise CaptureError(f"an input is a {type(t).__name__}")
        return given

    def _draws(self, code: RegionCode) -> list[list[Any]]:
        own = self.numbers[: len(code.open)]
        numbers = iter(code.sizes([n for d in code.draws for n in d.sizes])(*own))
        return [[next(numbers) for _ in d.sizes] for d in code.draws]


# ------------------------------------------------------------------------- what it is like


@dataclass(frozen=True)
class Result:
    """One of a region's results.

    kind: "constant" (`value`), "number" (an open size), "input" itself or a view of it, "output" of
    the graph itself or a view of it; place: which. view: (axes, whether it is on the tape).
    """

    kind: str
    place: int = -1
    value: Any = None
    view: tuple[int, bool] | None = None


@dataclass(frozen=True)
class Layout:
    """What a region does beside computing.

    results: in Dynamo's order; outputs: (result, whether it is its base) that the graph returns,
    one for each piece of memory; on_tape: whether they require grad; behind: the inputs that each
    is computed from; behind_results: those of each result, and of its base.
    numbers: sizes, strides, offsets of all views, and open results.
    """

    results: tuple[Result, ...]
    outputs: tuple[tuple[int, bool], ...]
    on_tape: tuple[bool, ...]
    behind: tuple[frozenset[int], ...]
    behind_results: tuple[tuple[frozenset[int], frozenset[int]], ...]
    numbers: tuple[Any, ...]

    def outputs_of(self, results: Sequence[Any]) -> list[Tensor]:
        """What the graph returns, out of what the code returned."""
        return [results[i]._base if base else results[i] for i, base in self.outputs]

    def results_of(
        self, inputs: Sequence[Any], outputs: Sequence[Tensor], numbers: Iterator[Any]
    ) -> list[Any]:
        """What the code would return; views are taken anew, so that autograd knows of them."""
        results = []
        for result in self.results:
            if result.kind == "constant":
                results.append(result.value)
                continue
            if result.kind == "number":
                results.append(next(numbers))
                continue
            base = (inputs if result.kind == "input" else outputs)[result.place]
            if result.view is not None:
                axes, on_tape = result.view
                shape, strides = ([next(numbers) for _ in range(axes)] for _ in range(2))
                offset = base.storage_offset() + next(numbers)
                base = (base if on_tape else base.detach()).as_strided(shape, strides, offset)
            results.append(base)
        return results


def look(code: RegionCode, inputs: Sequence[Any], draws: Sequence[Tensor] | None) -> Layout:
    """Run the code on tensors without numbers. Without draws, it is noted what is drawn."""
    given = _to_write_to(code, inputs)
    starts = nodes_of(given)
    with torch.enable_grad():
        results = code.record(*given) if draws is None else code(*given, *draws)
    return _layout(given, results, starts)


# A tensor from which nothing that is differentiated was computed has the gradient None, not zero:
# an optimiser leaves it alone.


def nodes_of(inputs: Sequence[Any]) -> dict[Any, int]:
    """Autograd's node of each that is on its tape, and its place."""
    return {get_gradient_edge(t).node: i for i, t in enumerate(inputs) if on_tape(t)}


def inputs_behind(end: Any, starts: Mapping[Any, int]) -> frozenset[int]:
    """The places of inputs that a tensor is computed from, by autograd's graph."""
    nodes = behind([end]) if isinstance(end, Tensor) else ()
    return frozenset(starts[node] for node in nodes if node in starts)


def reached(sets: Sequence[frozenset[int]], grads: Sequence[Tensor | None]) -> frozenset[int]:
    """The inputs behind tensors, of those at which gradients arrive."""
    arrived = (places for places, g in zip(sets, grads, strict=True) if g is not None)
    return frozenset().union(*arrived)


def _to_write_to(code: RegionCode, inputs: Sequence[Any]) -> list[Any]:
    """Copies of the inputs. Those that require grad are on the tape: no leaf can be written to."""
    leaves = [
        t.clone().requires_grad_() if on else t.clone() if _is_large(t) else t
        for t, on in zip(inputs, code.required, strict=True)
    ]
    return [t.clone() if on else t for t, on in zip(leaves, code.required, strict=True)]


def _is_large(t: Any) -> bool:
    """Not a number: its stand-in remembers its symbol."""
    return isinstance(t, Tensor) and _symbolic_number(t) is None


def base_of(t: Any) -> Any:
    return t._base if isinstance(t, Tensor) and t._base is not None else t


def _layout(inputs: Sequence[Any], results: Sequence[Any], starts: Mapping[Any, int]) -> Layout:
    """The layout of what a run has returned. A result in an input's memory is that input or a view
    of it; of the others, those that share memory are views of one output."""
    own = {memory(t): i for i, t in reversed(list(enumerate(inputs))) if isinstance(t, Tensor)}
    bases: dict[int, tuple[int, Tensor, bool]] = {}  # of memory: result, base, whether it is one
    for i, t in enumerate(results):
        if isinstance(t, Tensor) and memory(t) not in own:
            base = base_of(t) if t._is_view() else t
            base = base if base.dtype is t.dtype else t
            known = bases.get(memory(t))
            if known is None or (base.requires_grad and not known[1].requires_grad):
                bases[memory(t)] = i, base, base is not t
    places = {where: place for place, where in enumerate(bases)}
    numbers: list[Any] = []
    kinds = []
    for t in results:
        if isinstance(t, torch.SymInt):
            numbers.append(t)
            kinds.append(Result("number"))
            continue
        if not isinstance(t, Tensor):
            kinds.append(Result("constant", value=t))
            continue
        where = memory(t)
        if where in own:
            kind, place, base = "input", own[where], inputs[own[where]]
        else:
            kind, place, base = "output", places[where], bases[where][1]
        view = None
        if t is not base:
            if (t.requires_grad and not base.requires_grad) or t.dtype is not base.dtype:
                raise CaptureError("a result is a view of a tensor that autograd takes as another")
            numbers += [*t.shape, *t.stride(), t.storage_offset() - base.storage_offset()]
            view = t.dim(), t.requires_grad
        kinds.append(Result(kind, place, view=view))
    return Layout(
        tuple(kinds),
        tuple((i, is_base) for i, _, is_base in bases.values()),
        tuple(base.requires_grad for _, base, _ in bases.values()),
        tuple(inputs_behind(base, starts) for _, base, _ in bases.values()),
        tuple((inputs_behind(t, starts), inputs_behind(base_of(t), starts)) for t in results),
        tuple(numbers),
    )


def depends_on(
    written: Sequence[int], code: RegionCode, inputs: Sequence[Any], layout: Layout
) -> bool:
    """Whether a result depends on what these inputs held before the region wrote to them."""

    def run(*given: Any) -> list[Any]:
        with _torch.FunctionalTensorMode(), torch.no_grad():
            wrapped = [_torch.to_fun(t) if isinstance(t, Tensor) else t for t in given]
            results = layout.outputs_of(code(*wrapped))
            return [_torch.from_fun(t) for t in results]

    trace = make_fx(
        run, decomposition_table=_torch.decomposition_table, tracing_mode="symbolic",
        _allow_non_fake_inputs=True,
    )  # fmt: skip
    with _torch.compile_lock:
        graph = trace(*inputs).graph
    graph.eliminate_dead_code()
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    return any(
        user.op != "call_function" or "sym_" not in str(user.target)
        for i in written
        for user in placeholders[i].users
    )


# ----------------------------------------------------------------- a result that others depend on
#
# Inputs and results of a region are joined by one node of autograd's graph, in which no result
# depends on another. A caller who differentiates one by another, or puts a hook on it, would miss
# the ways between them. So a region ends where a result is complete that others are computed from;
# what follows is another region, which is given it.


@dataclass(frozen=True)
class Piece:
    """Part of a graph. inputs: placeholders of the whole, and nodes of pieces before it; results:
    its nodes that pieces after it read, or that the whole returns."""

    module: torch.fx.GraphModule
    inputs: tuple[torch.fx.Node, ...]
    results: tuple[torch.fx.Node, ...]


class Pieces:
    """A graph of Dynamo's in pieces that run one after the other. Most graphs are one: `parts` is
    empty then. Raises where a piece would write to what one before it made or reads."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        self.parts: list[Piece] = []
        self.module = _copied(module)
        self.returned: Sequence[Any] = self.module.graph.output_node().args[0]  # type: ignore[assignment]
        nodes = {n for n in self.returned if isinstance(n, torch.fx.Node)}
        ends = {n for n in nodes if n.op != "placeholder" and on_tape(n.meta["example_value"])}
        if len(ends) > 1:
            ways = _Dependencies(self.module, [n for n in self.module.graph.nodes if n in ends])
            cuts = ways.cuts()
            if cuts:
                self.parts = _Cutter(self.module, ways.values, cuts).pieces()

    def compiled(
        self, inputs: Sequence[Any], region: Callable[[torch.fx.GraphModule, list], Callable]
    ) -> Callable[..., list[Any]]:
        """The whole, each piece of which is what `region` makes of it and its example inputs."""
        given = self.module.graph.find_nodes(op="placeholder")
        examples: dict[Any, Any] = dict(zip(given, inputs, strict=True))
        regions = []
        for piece in self.parts:
            nodes = zip(piece.inputs, piece.module.graph.find_nodes(op="placeholder"), strict=True)
            for n, own in nodes:
                examples.setdefault(n, own.meta["example_value"])
            regions.append(region(piece.module, [examples[n] for n in piece.inputs]))

        exposed = self._exposed(given)

        def run(*inputs: Any) -> list[Any]:
            values: dict[Any, Any] = dict(zip(given, inputs, strict=True))
            handed: dict[Any, Tensor] = {}
            lent: dict[Any, tuple[Tensor, Tensor]] = {}  # copies, by their memory
            for piece, run_piece in zip(self.parts, regions, strict=True):
                results = run_piece(*[handed.get(n, values[n]) for n in piece.inputs])
                for n, result in zip(piece.results, results, strict=True):
                    values[n] = _of_the_original(result, lent)
                    if n in exposed:
                        handed[n] = copy = _copy(values[n])
                        lent[memory(copy)] = copy, values[n]
            return [values[n] if isinstance(n, torch.fx.Node) else n for n in self.returned]

        return run

    def _exposed(self, given: Sequence[torch.fx.Node]) -> set[torch.fx.Node]:
        """Results that a caller may write to while later pieces hold them: those are handed
        copies."""
        read = set().union(*(piece.inputs for piece in self.parts)).difference(given)
        returned = [n for n in self.returned if isinstance(n, torch.fx.Node)]
        kinds: dict[Any, set[torch.dtype]] = {}
        for n in returned:
            t = n.meta["example_value"]
            if isinstance(t, Tensor):
                kinds.setdefault(memory(t), set()).add(t.dtype)
        reread = read.intersection(n for n in returned if on_tape(n.meta["example_value"]))
        # as another dtype the memory of a copy cannot be told from the original's
        return {n for n in reread if len(kinds[memory(n.meta["example_value"])]) == 1}


def _copy(t: Tensor) -> Tensor:
    """On autograd's tape. What lies in its memory with gaps stays as it is."""
    copy = t.clone()
    return copy if copy.stride() == t.stride() else t


def _of_the_original(result: Any, lent: Mapping[Any, tuple[Tensor, Tensor]]) -> Any:
    """A piece's result, which is a view of the original where it is one of a copy that the piece
    was lent."""
    if not isinstance(result, Tensor) or memory(result) not in lent:
        return result
    copy, t = lent[memory(result)]
    if t is copy:
        return result
    if not result.requires_grad:
        t = t.detach()
    offset = result.storage_offset() - copy.storage_offset() + t.storage_offset()
    return t.as_strided(result.size(), result.stride(), offset)


class _Dependencies(_AsEager):
    """A run on tensors without numbers that notes what each node reads, makes and writes to, so as
    to follow which results on autograd's tape are computed from others."""

    def __init__(self, module: torch.fx.GraphModule, ends: Sequence[torch.fx.Node]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[torch.fx.Node, Any] = {}
        self.notes: list[_Note] = []
        code = RegionCode(module)
        mode, dispatcher = fake_mode_of(code.examples), _torch.enable_python_dispatcher()
        with mode, code.as_it_was(), torch.enable_grad(), dispatcher:
            self.run(*_to_write_to(code, [bare(t) for t in code.examples]))
        given = {id(t) for note in self.notes if note.is_input for t in note.made}
        results = [self.values[n] for n in ends]
        self.ends = {id(t): t for t in results if id(t) not in given}

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.op == "output":
            return None
        read = [(t, t._version) for m in n.all_input_nodes for t in _tensors(self.values[m])]
        value = self.values[n] = super().run_node(n)
        changed = [t for t, version in read if t._version > version]
        made, on = _tensors(value), torch.is_grad_enabled()
        self.notes.append(
            _Note(
                [t for t, _ in read], made, {memory(t) for t in changed}, n.op == "placeholder",
                on and any(map(_may_be_on_tape, (*made, *changed))),
                not on or peek_interpreter_stack() is not None,
            )
        )  # fmt: skip
        return value

    def cuts(self) -> list[int]:
        """Behind which nodes a piece ends: where a result that others depend on is complete."""
        behind: dict[int, set[int]] = {}  # of each tensor: ends that it depends on
        written: dict[int, set[int]] = {}  # of memory: ends that what was written depends on
        for note in self.notes:
            own: set[int] = set()
            for t in note.read if note.on_tape else ():
                own |= behind.get(id(t), set()) | written.get(memory(t), set())
                own |= {id(t)} & self.ends.keys()
            for t in note.made:
                behind[id(t)] = behind.get(id(t), set()) | own
            for where in note.written:
                written[where] = written.get(where, set()) | own
        read_on: set[int] = set()
        for i, t in self.ends.items():
            read_on |= (behind[i] | written.get(memory(t), set())) - {i}
        spans = sorted((self._span(self.ends[i]) for i in read_on), key=lambda span: span[1])
        places: list[int] = []
        barred = self._barred() if spans else set()
        for first, last in spans:
            free = [place for place in range(first, last + 1) if place not in barred]
            if not free:
                raise CaptureError(
                    "behind a result that others depend on it writes in place to what was before"
                )
            if not any(place in free for place in places):
                places.append(free[-1])
        return sorted(places)

    def _span(self, t: Tensor) -> tuple[int, int]:
        """Behind what makes a tensor and all that autograd sees write to it, and before autograd
        first reads it then."""
        where = memory(t)
        made = next(i for i, note in enumerate(self.notes) if any(t is m for m in note.made))
        written = [i for i, note in enumerate(self.notes) if note.on_tape and where in note.written]
        first = last = max([made, *written])
        for note in self.notes[first + 1 :]:
            if note.on_tape and any(memory(r) == where for r in note.read):
                break
            last += 1
        return first, last

    def _barred(self) -> set[int]:
        """Places across which something is written to (a piece may write to the graph's inputs, and
        not where one before it has read them), and those within another mode."""
        inputs = {memory(t) for note in self.notes if note.is_input for t in note.made}
        held: dict[int, int] = {}  # memory, and since when
        barred = {i for i, note in enumerate(self.notes) if note.within}
        for i, note in enumerate(self.notes):
            for where in note.written & held.keys():
                barred.update(range(held[where], i))
            for t in (*note.read, *(() if note.is_input else note.made)):
                if memory(t) not in inputs or memory(t) not in note.written:
                    held.setdefault(memory(t), i)
            for where in note.written & inputs:  # which is handed on as it is now
                held[where] = len(self.notes)
        return barred


@dataclass(frozen=True)
class _Note:
    """What one node of the graph reads, makes and writes to, by memory.

    on_tape: whether autograd has a part in what it makes or writes; within: whether autograd is off
    behind it, or a transform of torch.func on.
    """

    read: list[Tensor]
    made: list[Tensor]
    written: set[int]
    is_input: bool
    on_tape: bool
    within: bool


def on_tape(t: Any) -> bool:
    """Whether autograd follows what is computed from it."""
    return isinstance(t, Tensor) and t.requires_grad


def _may_be_on_tape(t: Tensor) -> bool:
    return t.requires_grad or is_functorch_wrapped_tensor(t)


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]


class _Cutter:
    """What becomes of a graph's nodes in pieces that end behind certain places."""

    def __init__(
        self, module: torch.fx.GraphModule, values: dict[torch.fx.Node, Any], places: Sequence[int]
    ) -> None:
        self.module, self.values = module, values
        self.stage: dict[torch.fx.Node, int] = {}
        for i, n in enumerate(values):
            # parts of a tuple stand beside it
            whole = n.all_input_nodes[0] if n.target is operator.getitem else n
            part = not isinstance(values[whole], Tensor) and whole is not n
            self.stage[n] = self.stage[whole] if part else sum(place < i for place in places)
        self.exits = {n.all_input_nodes[0]: n for n in values if _called(n) == "_exit_autocast"}

    def pieces(self) -> list[Piece]:
        returned = {n for n in self.module.graph.output_node().all_input_nodes}
        read = [self._read(k) for k in range(max(self.stage.values()) + 1)]
        wanted = returned.union(*(inputs for inputs, _ in read))
        return [
            self._piece(k, inputs, again, [n for n in self._own(k) if n in wanted])
            for k, (inputs, again) in enumerate(read)
        ]

    def _own(self, k: int) -> list[torch.fx.Node]:
        return [n for n in self.values if self.stage[n] == k and n.op != "placeholder"]

    def _read(self, k: int) -> tuple[list[torch.fx.Node], list[torch.fx.Node]]:
        """Nodes that a piece is given, all open sizes among them; and those without tensors (sizes,
        autocast) that it takes again."""
        own = self._own(k)
        sizes = [n for n in self.values if n.op == "placeholder"]
        inputs = [n for n in sizes if isinstance(self.values[n], torch.SymInt)]
        again: list[torch.fx.Node] = []
        known = {*own, *inputs}

        def need(n: torch.fx.Node) -> None:
            if n in known:
                return
            known.add(n)
            if n.op == "placeholder" or (n.op != "get_attr" and isinstance(self.values[n], Tensor)):
                inputs.append(n)
                return
            if n.op != "get_attr" and _tensors(self.values[n]):
                raise CaptureError(f"a result that others depend on stands beside {n.target}")
            for m in n.all_input_nodes:
                need(m)
            again.append(n)

        for n in self._entered(k - 1):
            need(n)
        for n in own:
            for m in n.all_input_nodes:
                need(m)
        return inputs, again

    def _entered(self, k: int) -> list[torch.fx.Node]:
        """Autocasts in which piece k ends, the innermost last."""
        within = [n for n in self.values if n in self.exits]
        return [n for n in within if self.stage[n] <= k < self.stage[self.exits[n]]]

    def _piece(
        self, k: int, inputs: list[torch.fx.Node], again: list[torch.fx.Node],
        results: list[torch.fx.Node],
    ) -> Piece:  # fmt: skip
        graph = torch.fx.Graph()
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        for n in inputs:
            copies[n] = graph.placeholder(n.name)
            copies[n].meta = dict(n.meta)
            if n.op != "placeholder":
                t = n.meta["example_value"]
                copies[n].meta["example_value"] = t.detach().requires_grad_(t.requires_grad)
        for n in (*again, *self._own(k)):
            copies[n] = graph.node_copy(n, lambda m: copies[m])
        for n in reversed(self._entered(k)):
            graph.node_copy(self.exits[n], lambda m: copies[m])
        graph.output(tuple(copies[n] for n in results))
        return Piece(torch.fx.GraphModule(self.module, graph), tuple(inputs), tuple(results))


def _called(n: torch.fx.Node) -> str:
    return getattr(n.target, "__name__", "") if n.op == "call_function" else ""


# ------------------------------------------------------------------- operators on whole functions


APPLY = "autograd_function_apply"
COND = "cond"  # which eager differentiates, and a trace does not


def on_functions(module: torch.nn.Module) -> Iterator[tuple[torch.fx.GraphModule, Any]]:
    """Calls of operators on whole functions, and the graphs that they are in."""
    for part in graphs_in(module):
        for node in part.graph.nodes:
            if isinstance(node.target, _torch.HigherOrderOperator):
                yield part, node


def obstacle(module: torch.nn.Module) -> str | None:
    """An operator on whole functions whose second derivative is not to be had, in words."""
    for part, node in on_functions(module):
        name = node.target.name()
        if name in (*THROUGH, COND):
            continue
        if name != APPLY:
            return f"{name} has no second derivative in a graph"
        if node.kwargs.get("dirty_idx"):
            return "an autograd.Function writes to its input (mark_dirty)"
        traces = [n.meta.get("stack_trace") for n in _body(part, node, 1).graph.nodes]
        if any(_switches(trace) for trace in traces):
            return (
                "the backward of an autograd.Function switches autograd off (no_grad, "
                "once_differentiable), which TorchDynamo does not tell"
            )
        if any(_calls_another(trace) for trace in traces):
            return (
                "the backward of an autograd.Function calls another, whose own backward "
                "TorchDynamo does not tell"
            )
    return None


def _body(part: torch.fx.GraphModule, node: torch.fx.Node, place: int) -> torch.fx.GraphModule:
    return getattr(part, str(node.args[place].target))  # type: ignore[union-attr]


_SWITCHES = ("no_grad", "set_grad_enabled", "inference_mode", "once_differentiable")


def _switches(trace: str | None) -> bool:
    """Whether a function that stands in a stack trace speaks of autograd's switch."""
    for file, line in re.findall(r'File "(.+?)", line (\d+)', trace or ""):
        text = "".join(linecache.getlines(file))
        if any(word in _function_at(text, int(line)) for word in _SWITCHES):
            return True
    return False


def _calls_another(trace: str | None) -> bool:
    """Whether a stack trace comes through a backward into the forward of another Function."""
    frames = re.findall(r'File ".+?", line \d+, in (\S+)\n\s*(.*)', trace or "")
    backward = [i for i, (name, _) in enumerate(frames) if name == "backward"]
    return bool(backward) and any(".apply(" in line for _, line in frames[backward[0] :])


@functools.lru_cache(maxsize=64)
def _function_at(text: str, line: int) -> str:
    """The innermost function around a line, decorators and all."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return ""
    source = ""
    for node in ast.walk(tree):  # outer ones come first
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            source = "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    return source


# A derivative is linear in what comes in. A backward that somebody wrote may not be: some clip what
# comes in, or return the same whatever comes in. Autograd calls it once, with all that came in, and
# not at all where nothing did; a region's passes call it with parts of that, and with zeros.

_ZERO, _LINEAR, _FIXED = "zero", "linear", "fixed"
_ZEROS = {"zeros", "zeros_like", "new_zeros"}
_FORMS = {
    "shape", "size", "dim", "ndim", "numel", "dtype", "device", "stride", "ones_like", "new_ones",
    "empty_like", "new_empty", "full_like", "new_full", "rand_like", "randn_like", "is_contiguous",
    "is_complex", "is_floating_point", "layout", "is_cuda", "requires_grad",
}  # fmt: skip
_SUMS = {
    "add", "sub", "iadd", "isub", "where", "masked_fill", "cat", "stack", "concat", "copy",
    "setitem",
}  # fmt: skip
_PRODUCTS = {
    "mul", "imul", "multiply", "matmul", "imatmul", "mm", "bmm", "mv", "dot", "outer", "inner",
    "kron", "einsum", "tensordot", "linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d",
}  # fmt: skip
_OF_THE_FIRST = {
    "neg", "negative", "pos", "div", "truediv", "itruediv", "divide", "sum", "mean", "cumsum",
    "view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "expand", "expand_as",
    "broadcast_to", "repeat", "tile", "repeat_interleave", "squeeze", "unsqueeze", "transpose",
    "swapaxes", "permute", "movedim", "t", "T", "mT", "H", "mH", "flip", "roll", "narrow",
    "getitem", "select", "index_select", "gather", "take_along_dim", "chunk", "split", "unbind",
    "tensor_split", "diagonal", "diag", "diag_embed", "diagonal_scatter", "trace", "triu", "tril",
    "clone", "contiguous", "detach", "to", "type", "type_as", "float", "double", "half",
    "bfloat16", "cpu", "cuda", "conj", "real", "imag", "view_as_real", "view_as_complex", "pad",
    "fold", "unfold", "interpolate", "avg_pool1d", "avg_pool2d", "avg_pool3d", "sum_to_size",
    "fft", "ifft", "rfft", "irfft", "fft2", "ifft2", "rfft2", "irfft2", "fftn", "ifftn",
}  # fmt: skip


def is_linear(module: torch.nn.Module) -> bool:
    """Whether the backward of each autograd.Function is seen to be linear in what comes in."""
    for part, node in on_functions(module):
        if node.target.name() == APPLY:
            outputs = _body(part, node, 0).graph.output_node().args[0][0]  # type: ignore[index]
            count = len(outputs) if isinstance(outputs, (tuple, list)) else 1  # type: ignore[arg-type]
            if not _is_linear(_body(part, node, 1).graph, count):
                return False
    return True


def _is_linear(graph: torch.fx.Graph, count: int) -> bool:
    kinds: dict[Any, str] = {}
    for i, n in enumerate(graph.nodes):
        if n.op == "placeholder":
            kinds[n] = _LINEAR if i < count else _FIXED
        elif n.op != "output":
            kind = _kind_of(n, kinds)
            if kind is None:
                return False
            kinds[n] = kind
    results = pytree.tree_leaves(graph.output_node().args[0])
    return all(r is None or _kind(r, kinds) != _FIXED for r in results)


def _kind(item: Any, kinds: dict[Any, str]) -> str:
    if isinstance(item, torch.fx.Node):
        return kinds[item]
    return _ZERO if type(item) in (int, float) and item == 0 else _FIXED


def _kind_of(n: torch.fx.Node, kinds: dict[Any, str]) -> str | None:
    """What a node makes: of zeros, linear in what comes in, or of neither; None: not seen to be."""
    name = n.target if isinstance(n.target, str) else getattr(n.target, "__name__", "")
    if name == "getattr":
        name = str(n.args[1])
    writes = name == "setitem" or (name.endswith("_") and not name.endswith("__"))
    name = name.removesuffix("_")
    read = [kinds[m] for m in n.all_input_nodes]
    if name in _ZEROS or name in _FORMS or n.op == "get_attr":
        return _ZERO if name in _ZEROS else _FIXED
    if writes and isinstance(n.args[0], torch.fx.Node) and kinds[n.args[0]] == _FIXED:
        return None if _LINEAR in read else _FIXED
    if name not in _SUMS and _LINEAR not in read:
        kept = name in _OF_THE_FIRST and _kind(n.args[0], kinds) == _ZERO
        if kept or (name in _PRODUCTS and _ZERO in read):
            return _ZERO
        return None if writes else _FIXED
    kind = _made(name, n, kinds)
    if writes and isinstance(n.args[0], torch.fx.Node):
        if kind == _FIXED:
            return None
        kinds[n.args[0]] = kind or _LINEAR
    return kind


def _made(name: str, n: torch.fx.Node, kinds: dict[Any, str]) -> str | None:
    given = [_kind(a, kinds) for a in pytree.tree_leaves((n.args, n.kwargs))]
    if name in _SUMS:
        terms = [_kind(a, kinds) for a in _terms(name, n)]
        if _LINEAR in terms:
            rest = given.count(_LINEAR) == terms.count(_LINEAR)
            return _LINEAR if rest and _FIXED not in terms else None
        return _ZERO if set(terms) == {_ZERO} else None if _LINEAR in given else _FIXED
    if name in _PRODUCTS:
        bias = name.startswith(("linear", "conv")) and _FIXED in [
            _kind(a, kinds) for a in (*n.args[2:3], n.kwargs.get("bias")) if a is not None
        ]
        return _LINEAR if given.count(_LINEAR) == 1 and not bias else None
    first = [_kind(a, kinds) for a in pytree.tree_leaves(n.args[:1])]
    alone = given.count(_LINEAR) == first.count(_LINEAR)
    rounded = (
        n.kwargs.get("rounding_mode") or n.kwargs.get("value") or (name == "pad" and n.args[3:])
    )
    return _LINEAR if name in _OF_THE_FIRST and alone and not rounded else None


def _terms(name: str, n: torch.fx.Node) -> Sequence[Any]:
    if name in ("cat", "stack", "concat"):
        return pytree.tree_leaves(n.args[:1] or n.kwargs["tensors"])
    if name == "copy":
        return n.args[1:2]
    if name == "setitem":
        return n.args[0], n.args[2]
    if name == "masked_fill":
        return n.args[0], n.kwargs.get("value", n.args[-1])
    return n.args[1:] if name == "where" else n.args[:2]
