"""A region of `torch.compile`, as TorchDynamo hands it over: run as eager would, on numbers or on
tensors without, and looked at: what it draws, which results share memory.

Its random numbers are drawn before it and handed to it: so forward, backward and second derivative,
however often they run, see the same ones.
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

from .. import _torch
from .._torch import FakeTensorMode, TorchDispatchMode, make_fx, pytree, set_grad_enabled
from ..errors import CaptureError
from ..graph import compile_sizes

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
        """What was drawn."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_random(func, args, kwargs):
            return func(*args, **kwargs)
        return self._drawn(func, args, kwargs)

    def _drawn(self, op: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
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

    draws: random numbers, which are handed to it behind its inputs.
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
        self.required = [isinstance(t, Tensor) and t.requires_grad for t in self.examples]
        self.obstacle = obstacle(self.module)
        self.branches = any(n.target.name() == _COND for _, n in _on_functions(self.module))
        sizes = [(i, t) for i, t in enumerate(self.examples) if isinstance(t, torch.SymInt)]
        named = {t.node.expr: i for i, t in reversed(sizes) if not t.node.expr.is_number}
        self.open = sorted(named.values())  # of each open size, where it is given first
        # Python's numbers that change come as tensors, whose item is the number
        self.floats = [i for i, t in enumerate(self.examples) if _memo(t) is not None]

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """Its results from inputs and draws, on autograd's tape."""
        count = len(self.examples)
        drawn = inputs[count:]
        replaying = Replaying(self.draws, drawn) if self.draws else nullcontext()
        with self._as_it_was(), _torch.enable_python_dispatcher(), replaying:
            return _AsEager(self.module).run(*inputs[:count])

    def eager(self, *inputs: Any) -> Sequence[Any]:
        """Its results from inputs alone."""
        interpreter = _AsEager if self.obstacle is None else torch.fx.Interpreter
        with self._as_it_was():
            return interpreter(self.module).run(*inputs)

    def record(self, *inputs: Any) -> Sequence[Any]:
        """Its results on tensors without numbers, and a note of what it draws."""
        with self._as_it_was(), _torch.enable_python_dispatcher(), Recording() as seen:
            results = _AsEager(self.module).run(*inputs)
        self.draws = seen.draws
        return results

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """Autocast as it was when Dynamo read the code, without its cache of weights; and what the
        code does to autograd's switch is undone."""
        grad = torch.is_grad_enabled()
        cuda, cpu = (
            torch.autocast(device, dtype=dtype, enabled=on, cache_enabled=False)
            if on or torch.is_autocast_enabled(device)
            else nullcontext()
            for device, on, dtype in self.autocast
        )
        try:
            with cuda, cpu:
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


def _memo(t: Any) -> Any:
    """The number that a tensor without numbers stands for, a symbol."""
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
            if target.name() == _APPLY:
                forward, backward, *rest = args
                result = _Applied.apply(forward, backward, kwargs["non_differentiable_idx"], *rest)
                return result
        return super().call_function(target, args, kwargs)


# Operators on whole functions that do nothing to derivatives.
THROUGH = ("tag_activation_checkpoint", "wrap", "wrap_activation_checkpoint")
_APPLY = "autograd_function_apply"


class _Applied(torch.autograd.Function):
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


_COND = "cond"  # which eager differentiates, and a trace does not


def _on_functions(module: torch.nn.Module) -> Iterator[tuple[torch.fx.GraphModule, Any]]:
    """Calls of operators on whole functions, and the graphs that they are in."""
    for part in module.modules():
        if isinstance(part, torch.fx.GraphModule):
            for node in part.graph.nodes:
                if isinstance(node.target, _torch.HigherOrderOperator):
                    yield part, node


def obstacle(module: torch.nn.Module) -> str | None:
    """An operator on whole functions whose second derivative is not to be had, in words."""
    for part, node in _on_functions(module):
        name = node.target.name()
        if name in (*THROUGH, _COND):
            continue
        if name != _APPLY:
            return f"{name} has no second derivative in a graph"
        if node.kwargs.get("dirty_idx"):
            return "an autograd.Function writes to its input (mark_dirty)"
        body = getattr(part, str(node.args[1].target))
        if any(_switches(n.meta.get("stack_trace")) for n in body.graph.nodes):
            return (
                "the backward of an autograd.Function switches autograd off (no_grad, "
                "once_differentiable), which TorchDynamo does not tell"
            )
    return None


_SWITCHES = ("no_grad", "set_grad_enabled", "inference_mode", "once_differentiable")


def _switches(trace: str | None) -> bool:
    """Whether a function that stands in a stack trace speaks of autograd's switch."""
    for file, line in re.findall(r'File "(.+?)", line (\d+)', trace or ""):
        text = "".join(linecache.getlines(file))
        if any(word in _function_at(text, int(line)) for word in _SWITCHES):
            return True
    return False


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


def _copied(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The same graph once more: Inductor changes the one that it is given."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
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


class Stand:
    """Inputs of a region without numbers, their open sizes as symbols of our own: what is asked
    about these is checked at each call (`fits`), for Dynamo's guards are fixed by then."""

    def __init__(self, code: RegionCode, numbers: Sequence[Any]) -> None:
        self.env = _torch.ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        self.numbers = [self._symbol(n, i) for i, n in enumerate(numbers)]
        self.symbols = [n.node.expr for n in self.numbers]
        self._guards: tuple[int, Callable] = (-1, lambda *_: ())
        self._floats: dict[int, Any] = {}
        self.inputs = self._inputs(code)
        with self.mode:
            self.draws = [d.make(*s) for d, s in zip(code.draws, self._draws(code), strict=True)]

    def _symbol(self, number: int, i: int) -> Any:
        source = _torch.ConstantSource(f"size_{i}")
        if isinstance(number, float):
            symbol = self.env.create_unspecified_symbol(number, source)
            return self.env.create_symfloatnode(symbol, hint=number, source=source)
        symbol = self.env.create_symbol(number, source, _torch.DimDynamic.DYNAMIC)
        return self.env.create_symintnode(symbol, hint=number, source=source)

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
                with self.mode:
                    given.append(
                        torch.empty_strided(shape, strides, dtype=t.dtype, device=t.device)
                    )
                if i in code.floats:
                    self._floats[i] = next(floats)
                    given[-1].item_memo = self._floats[i]
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

    def floats(self) -> dict[int, Tensor]:
        """Inputs that stand for Python's numbers, which they remember anew."""
        for i, number in self._floats.items():
            self.inputs[i].item_memo = number
        return {i: self.inputs[i] for i in self._floats}

    def fits(self, numbers: Sequence[Any]) -> bool:
        """Whether these answer every question about sizes as the first ones did."""
        count = len(self.env.guards)
        if self._guards[0] != count:
            self._guards = count, compile_sizes([g.expr for g in self.env.guards], self.symbols)
        return many(numbers) and all(self._guards[1](*numbers))


def many(numbers: Sequence[Any]) -> bool:
    """Whether all sizes are more than one, as is taken for granted of a symbol."""
    return all(n > 1 for n in numbers if isinstance(n, int))


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
    one for each piece of memory; on_tape: whether they require grad.
    numbers: sizes, strides, offsets of all views, and open results.
    """

    results: tuple[Result, ...]
    outputs: tuple[tuple[int, bool], ...]
    on_tape: tuple[bool, ...]
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
    leaves = [
        t.clone().requires_grad_() if on else t.clone() if _is_large(t) else t
        for t, on in zip(inputs, code.required, strict=True)
    ]
    # a copy on the tape, for a leaf cannot be written to
    given = [t.clone() if on else t for t, on in zip(leaves, code.required, strict=True)]
    with torch.enable_grad():
        results = code.record(*given) if draws is None else code(*given, *draws)
    return _layout(given, results)


def _is_large(t: Any) -> bool:
    """Not a number: its stand-in remembers its symbol."""
    return isinstance(t, Tensor) and _memo(t) is None


def _memory(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def _layout(inputs: Sequence[Any], results: Sequence[Any]) -> Layout:
    own = {_memory(t): i for i, t in reversed(list(enumerate(inputs))) if isinstance(t, Tensor)}
    bases: dict[int, tuple[int, Tensor, bool]] = {}  # of memory: result, base, whether it is one
    for i, t in enumerate(results):
        if isinstance(t, Tensor) and _memory(t) not in own:
            base = t._base if t._is_view() and t._base is not None else t
            base = base if base.dtype is t.dtype else t
            known = bases.get(_memory(t))
            if known is None or (base.requires_grad and not known[1].requires_grad):
                bases[_memory(t)] = i, base, base is not t
    places = {memory: place for place, memory in enumerate(bases)}
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
        memory = _memory(t)
        if memory in own:
            kind, place, base = "input", own[memory], inputs[own[memory]]
        else:
            kind, place, base = "output", places[memory], bases[memory][1]
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
