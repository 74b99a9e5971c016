"""TorchDynamo's graph → `Graph`: PyTorch's functions become operators in a functional program.

Dynamo hands over what the forward pass calls: functions, methods, writes in place, and switches of
the gradient mode. Running that once on tensors without numbers, under functionalisation, leaves a
flat list of operators in which `linear`, `conv2d`, `layer_norm`, `scaled_dot_product_attention`, …
are whole; writes have become outputs, autocast explicit casts, and `detach` and `no_grad` regions
`stop_gradient`. Sizes that Dynamo left open stay open (`graph.Size`).

Operators that the sweeps take in parts (recurrent layers, attention with dropout and the like) are
written as the products, activations and draws that they are made of.
"""

from __future__ import annotations

import itertools
import math
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.fx.traceback
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .. import _torch
from .._torch import (
    FunctionalTensorMode,
    HigherOrderOperator,
    OpOverload,
    TorchDispatchMode,
    collect_all_valid_cia_ops_for_aten_namespace,
    decomposition_table,
    get_data_attr,
    make_fx,
    override_composite_implicit_decomp,
    pytree,
    special_op_to_preserve_cia,
)
from ..errors import CaptureError
from ..graph import (
    Graph,
    Meta,
    Node,
    Ref,
    Size,
    draws,
    leaves,
    map_leaves,
    memory,
    saving_hooks_off,
    shares,
)  # fmt: skip
from ..kernels import library
from ..rules import registered, stop_gradient
from .arguments import no_output

aten = torch.ops.aten

_HERE = os.path.dirname(os.path.abspath(__file__))
library.define("mark(Tensor x) -> Tensor")
library.impl("mark", lambda x: x.clone(), "CompositeExplicitAutograd")
mark = torch.ops.doubleback.mark.default
"""Put around a result, so that it is found in Dynamo's graph; never run."""
library.define("missing(Tensor x, str[] names) -> Tensor")
library.impl("missing", lambda x, names: x.clone(), "CompositeExplicitAutograd")


def lift(module: torch.fx.GraphModule, given: Sequence[Any]) -> Graph:
    """The functional program of Dynamo's `module`, which was captured with the inputs `given`.

    `Graph.targets` are the values that were marked, in order. Raises `CaptureError` where the
    sweeps' derivatives would differ from autograd's.
    """
    if assigns_data(module):
        raise CaptureError("it assigns to a tensor's .data, behind autograd's back")
    _refuse_transforms(module)
    marked = _take_marks(module)
    _pass_on(module)
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    fakes = [n.meta["example_value"] for n in placeholders]
    trained = [isinstance(t, Tensor) and t.requires_grad for t in given]
    written: list[int] = []
    returned: dict[int, int] = {}
    asserted: list[str] = []

    def run(*inputs: Any) -> list[Any]:
        written.clear()
        returned.clear()
        with FunctionalTensorMode():
            wrapped = [
                _torch.to_fun(t).requires_grad_(on) if isinstance(t, Tensor) else t
                for t, on in zip(inputs, trained, strict=True)
            ]
            with torch.fx.traceback.preserve_node_meta(), _Autograd() as watch, _Checks(watch):
                results = _Interpreter(module).run(*wrapped)
            for i, t in enumerate(wrapped):
                if isinstance(t, Tensor) and _torch.has_data_mutation(t):
                    written.append(i)
            updates = [wrapped[i] for i in written]
            results = pytree.tree_leaves(results)
            asserted[:] = [message for _, message in watch.asserted]
            results += [condition for condition, _ in watch.asserted]
            places = {id(wrapped[i]): i for i in written}
            returned.update({k: places[id(t)] for k, t in enumerate(results) if id(t) in places})
            return [_torch.from_fun(t) for t in (*results, *updates)]

    whole, parts = _decompositions(_casts(module))
    with (
        _torch.compile_lock, torch.enable_grad(), _kept(whole), _own_kernels_only(),
        saving_hooks_off(),
    ):  # fmt: skip
        trace = make_fx(run, parts, tracing_mode="symbolic", record_module_stack=True)
        flat = trace(*[t.detach() if isinstance(t, Tensor) else t for t in fakes])
    _drop_copies(flat.graph)
    _join_pieces(flat.graph)
    names = [_name(n) for n in placeholders]
    graph = _Converter(flat, names).graph(written, marked, trained)
    return replace(graph, returned=returned, asserted=tuple(asserted))


@dataclass(frozen=True)
class _KeptWhole:
    """What PyTorch's tables hold of an operator, and what they hold while it is kept whole: its
    kernels in Python, and what becomes of tensors without numbers."""

    op: Any
    before: dict[Any, Any]
    kernels: dict[Any, Any]
    on_fakes: Callable | None

    def enter(self) -> None:
        self._set(self.kernels)
        if self.on_fakes is not None:
            _torch.op_implementations_dict[self.op] = self.on_fakes

    def leave(self) -> None:
        self._set(self.before)
        if self.on_fakes is not None:
            _torch.op_implementations_dict.pop(self.op, None)

    def _set(self, kernels: Mapping[Any, Any]) -> None:
        self.op.py_kernels.clear()
        self.op.py_kernels.update(kernels)
        self.op._dispatch_cache.clear()


_entries: dict[frozenset, list[_KeptWhole]] = {}


@contextmanager
def _kept(whole: Mapping[Any, Callable]) -> Iterator[None]:
    """Inside, these composite operators become what `whole` says. PyTorch makes the entries for
    that once: it takes it as long as all else that there is to the lifting of a small network."""
    key, known = frozenset(whole), _torch.op_implementations_dict
    entries = _entries.get(key)
    if entries is None or any(entry.op.py_kernels != entry.before for entry in entries):
        before = {op: dict(op.py_kernels) for op in whole}
        ours = {op for op in whole if op not in known}
        with override_composite_implicit_decomp(dict(whole)):
            entries = [
                _KeptWhole(op, before[op], dict(op.py_kernels), known[op] if op in ours else None)
                for op in whole
            ]
        _entries[key] = entries
    try:
        for entry in entries:
            entry.enter()
        yield
    finally:
        for entry in entries:
            entry.leave()


@contextmanager
def _own_kernels_only() -> Iterator[None]:
    """Recurrent layers are taken apart into cells, not handed to a library as one."""
    before = torch.backends.mkldnn.set_flags(False)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(*before)


def _take_marks(module: torch.fx.GraphModule) -> list[int]:
    """Places of marked results among the outputs; the marks themselves go."""
    (output,) = (n for n in module.graph.nodes if n.op == "output")
    results = output.args[0]
    places = [
        i for i, n in enumerate(results)
        if isinstance(n, torch.fx.Node) and n.target in (mark, torch.ops.doubleback.mark)
    ]  # fmt: skip
    for node in {results[i] for i in places}:
        node.replace_all_uses_with(node.args[0])
        module.graph.erase_node(node)
    module.recompile()
    return places


def refuse_missing(module: torch.fx.GraphModule, choice: Any) -> None:
    """Raise where the result has no such output, before anything has run; its results are marked
    with the names that it has."""
    op = torch.ops.doubleback.missing
    for node in module.graph.nodes:
        if node.target in (op, op.default):
            raise no_output(choice, node.args[1])


def assigns_data(module: torch.fx.GraphModule) -> bool:
    """Whether Dynamo's graph assigns to a tensor's `.data`: a `set_`, which neither
    functionalisation nor PyTorch's compilers carry over to the tensor."""
    nodes = (n for part in graphs_in(module) for n in part.graph.nodes)
    return "set_" in (getattr(n.target, "__name__", n.target) for n in nodes)


def graphs_in(module: torch.nn.Module) -> Iterator[torch.fx.GraphModule]:
    """A graph of Dynamo's, and those of the functions that its operators take as arguments."""
    return (part for part in module.modules() if isinstance(part, torch.fx.GraphModule))


def _refuse_transforms(module: torch.fx.GraphModule) -> None:
    """Inside a transform of torch.func tensors do not tell whether a derivative reaches them: what
    depends on x would look as if it were cut off."""
    for part in graphs_in(module):
        for node in part.graph.nodes:
            name = getattr(node.target, "__name__", "")
            if name in _ENTERING:
                raise CaptureError(
                    f"it calls a transform of torch.func ({_ENTERING[name]}), inside of which no "
                    "tensor tells whether a derivative reaches it"
                )


_ENTERING = {
    "_vmap_increment_nesting": "vmap",
    "_grad_increment_nesting": "grad, vjp or jacrev",
    "_jvp_increment_nesting": "jvp or jacfwd",
}


def _name(placeholder: torch.fx.Node) -> str:
    """Where Dynamo found this input, as Python code: L['net'].fc._parameters['weight']."""
    argument = placeholder.meta.get("grapharg")
    source = getattr(argument, "source", None)
    name = getattr(source, "name", placeholder.name)
    return str(name() if callable(name) else name)


def _casts(module: torch.fx.GraphModule) -> bool:
    """Whether autocast is on, around the network or somewhere inside."""
    inside = any("autocast" in str(n.target) for n in module.graph.nodes if n.op == "call_function")
    return inside or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


# Composite operators that autocast does not know, and may know what they are made of.
_RECAST = (
    aten.einsum.default, aten.pad.default, aten.square.default, aten.upsample_nearest1d.vec,
    aten.upsample_nearest2d.vec, aten.upsample_nearest3d.vec, aten.upsample_linear1d.vec,
    aten.upsample_bilinear2d.vec, aten.upsample_bicubic2d.vec, aten.upsample_trilinear3d.vec,
)  # fmt: skip


def _decompositions(casts: bool) -> tuple[dict, dict]:
    """(what becomes of composite operators, decompositions of others). Composite operators with a
    rule stay whole; PyTorch takes all others apart, and under autocast those that it would cast
    the parts of."""
    composite = _composite()
    table = decompositions()
    apart = (*table, aten.type_as.default, *(_RECAST if casts else ()))
    whole: dict[Any, Callable] = {
        op: _keep_product if op is aten.einsum.default else _keep(op)
        for op in registered()
        if op in composite and op not in apart
    }
    whole |= {op: fn for op, fn in table.items() if op in composite}
    return whole, {op: fn for op, fn in table.items() if op not in composite}


@cache
def _composite() -> frozenset:
    """ATen's operators that are made of others and can be kept whole."""
    return frozenset(collect_all_valid_cia_ops_for_aten_namespace())


def _keep(op: Any) -> Callable:
    return lambda *args, **kwargs: special_op_to_preserve_cia(*args, kernel=op, **kwargs)


def _keep_product(*args: Any, **kwargs: Any) -> Any:
    """einsum, which of one tensor is a view: kept whole it would have memory of its own."""
    op = aten.einsum.default
    if len(args[1]) > 1:
        return _keep(op)(*args, **kwargs)
    return op._op_dk(_torch.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


# Operators on whole functions that do nothing to derivatives: they are looked through.
THROUGH = ("tag_activation_checkpoint", "wrap", "wrap_activation_checkpoint")
_REFUSED = {
    "autograd_function_apply": "an autograd.Function has a backward of its own, which no operator "
    "of the graph tells",
}


class _Interpreter(torch.fx.Interpreter):
    """Calls Dynamo's graph so that `_Autograd` sees it all."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is get_data_attr:
            return args[0].detach()  # what `.data` is, by a name that can be watched
        if isinstance(target, HigherOrderOperator) and target.name() not in THROUGH:
            raise CaptureError(_REFUSED.get(target.name(), f"{target.name()} cannot be swept"))
        return super().call_function(target, args, kwargs)


class _Autograd(TorchFunctionMode):
    """Watches each function of PyTorch that the network calls, and what autograd makes of it.

    A result that does not require grad although an argument does is cut off: `detach`, `.data`,
    or anything under `no_grad`. It becomes `stop_gradient`. Writing in place without autograd's
    knowledge changes numbers and leaves derivatives: no operator says that, so it is refused.
    """

    def __init__(self) -> None:
        super().__init__()
        # what was cut off and lies in the memory of a tensor that requires grad, by that memory
        self.cut: dict[Any, Tensor] = {}
        self.name = ""  # of the function that was called last
        self.open: list[Any] = []  # the Python functions that are being looked into
        self.asserted: list[tuple[Tensor, str]] = []  # what has to be true, what to say otherwise

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.name = name = getattr(func, "__name__", "")
        if name.partition(".")[0] == "_assert_async":
            self.asserted.append((args[0], str(args[1]) if len(args) > 1 else ""))
            return None
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        inputs = [t for t in tensors if t.requires_grad]
        if name in _HOOKS:
            raise CaptureError(
                f"{name} on a tensor sees or changes gradients that sweeps do not pass"
            )
        if tensors and _writes(name, kwargs):
            self._refuse_hidden(name, kwargs.get("out", tensors[0]), inputs)
        # Draws in the order of contiguous memory, `x.bernoulli_(p)` in that of x's own: in a
        # functional program one operator, which the sweeps draw as the latter.
        if name == "bernoulli" and (len(args) > 1 or "p" in kwargs):
            args = (args[0].contiguous(), *args[1:])
        result = self._call(func, args, kwargs)
        if not inputs or name in _QUESTIONS:
            return result
        return pytree.tree_map_only(Tensor, lambda t: self._stopped(t, inputs), result)

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(func, FunctionType) or func in self.open:
            return func(*args, **kwargs)
        self.open.append(func)
        try:
            with self:
                return _opened(func)(*args, **kwargs)
        finally:
            self.open.pop()

    def _stopped(self, result: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        differentiable = result.is_floating_point() or result.is_complex()
        if result.requires_grad or not differentiable:
            return result
        if any(memory(result) == memory(t) for t in inputs):
            stopped = stop_gradient(result)
            # held, so that no other tensor is taken for them
            self.cut |= {memory(result): result, memory(stopped): stopped}
            return stopped
        return stop_gradient(result)

    def _refuse_hidden(self, name: str, written: Any, inputs: Sequence[Tensor]) -> None:
        for t in pytree.tree_leaves(written):
            if not isinstance(t, Tensor):
                continue
            unseen = t.requires_grad and (name == "detach_" or not torch.is_grad_enabled())
            if unseen or memory(t) in self.cut:
                raise CaptureError(
                    f"{name} changes a tensor of shape {tuple(t.shape)} behind autograd's back "
                    "(under no_grad, or through detach() or .data), so that its derivative is "
                    "another than its numbers say"
                )


def _opened(function: FunctionType) -> Callable:
    """A function that PyTorch has in Python, which may detach or write within (`gumbel_softmax`):
    one that goes ahead, and does not hand itself over to whoever watches."""
    ahead = {name: _no for name in function.__globals__ if name.startswith("has_torch_function")}
    opened = FunctionType(
        function.__code__, {**function.__globals__, **ahead}, function.__name__,
        function.__defaults__, function.__closure__,
    )  # fmt: skip
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


def _no(*_: Any) -> bool:
    """What `has_torch_function` answers where nobody watches."""
    return False


class _Checks(TorchDispatchMode):
    """Linear algebra that raises where a matrix is singular: PyTorch computes, then checks a code,
    which no functional program can hold. The computing operator is told to check it instead.

    And what `_Autograd` does not see of a function in C++: that it switches autograd off and writes
    in place. Such an operator needs an entry among the decompositions."""

    def __init__(self, watch: _Autograd) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._linalg_check_errors.default:
            return None
        kwargs = dict(kwargs or {})
        names = [argument.name for argument in func._schema.arguments]
        if func._schema.is_mutable and not torch.is_grad_enabled():
            self._refuse_hidden(func, args)
        if "check_errors" in names and not self.watch.name.endswith("_ex"):
            args = args[: names.index("check_errors")]
            kwargs["check_errors"] = True
        return func(*args, **kwargs)

    def _refuse_hidden(self, func: Any, args: Any) -> None:
        for argument, t in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(t, Tensor) and t.requires_grad:
                raise CaptureError(
                    f"{self.watch.name} changes a tensor of shape {tuple(t.shape)} behind "
                    f"autograd's back ({func} under no_grad)"
                )


_HOOKS = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")
# Functions whose result no derivative of an argument reaches, whatever the mode.
_QUESTIONS = frozenset(
    (
        "requires_grad_",
        "is_floating_point",
        "is_complex",
        "size",
        "dim",
        "stride",
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "new_zeros",
        "new_ones",
        "new_empty",
        "new_full",
    )
)


def _writes(name: str, kwargs: dict) -> bool:
    inplace = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    return inplace or name == "__setitem__" or kwargs.get("out") is not None


# Left by autograd's own kernels. What cuts a derivative off is `stop_gradient` by now.
_SAME = (aten.detach.default, aten.alias.default)


class _Converter:
    """A functional FX graph of ATen operators → `Graph`."""

    def __init__(self, module: torch.fx.GraphModule, names: Sequence[str]) -> None:
        self.module = module
        self.names = names
        self.values: list[Meta | None] = []
        self.number: dict[tuple[torch.fx.Node, int], int] = {}
        self.nodes: list[Node] = []
        self.inputs: list[int | None] = []
        self.constants: dict[int, Tensor] = {}
        self.symbols: dict[Any, tuple] = {}
        self.assumed: dict[Any, None] = {}

    def graph(
        self, written: Sequence[int], marked: Sequence[int], trained: Sequence[bool]
    ) -> Graph:
        results: Sequence[Any] = ()
        for fx_node in self.module.graph.nodes:
            if fx_node.op == "placeholder":
                self._input(fx_node)
            elif fx_node.op == "get_attr":
                self._constant(fx_node)
            elif fx_node.op == "call_function":
                self._call(fx_node)
            elif fx_node.op == "output":
                results = fx_node.args[0]
        count = len(results) - len(written)
        outputs = tuple(self._result(item) for item in results[:count])
        mutations = {}
        for i, item in zip(written, results[count:], strict=True):
            if trained[i]:
                raise CaptureError(
                    f"the network writes to {self.names[i]}, which requires grad, in place; clone "
                    "it first"
                )
            mutations[i] = self.number[item, 0]
        move_constants(self.nodes, self.values, self.constants)
        graph = Graph(
            tuple(self.nodes), tuple(self.values), tuple(self.inputs), self.constants, outputs,
            tuple(outputs[i] for i in marked), mutations, tuple(self.names), self.symbols,
            assumed=tuple(c for c in self.assumed if c.free_symbols <= self.symbols.keys()),
        )  # fmt: skip
        calm = aten.scaled_dot_product_attention.default  # where it drops out, its parts are here
        drawn = [node for node in graph.deciding if draws(node.op) and node.op is not calm]
        if drawn:
            raise CaptureError(f"a size depends on random numbers; {drawn[0].source}")
        if not graph.open_symbols() <= graph.symbols.keys():
            raise CaptureError("a size depends on numbers that no operator of the graph tells")
        return graph

    def _value(self, tensor: Any) -> int:
        meta = None
        if isinstance(tensor, Tensor):
            shape = tuple(size(s) for s in tensor.shape)
            meta = Meta(shape, tensor.dtype, tensor.device)
        self.values.append(meta)
        return len(self.values) - 1

    def _input(self, node: torch.fx.Node) -> None:
        place, example = len(self.inputs), node.meta.get("val")
        if not isinstance(example, Tensor):
            self.inputs.append(None)
            self._symbol(example, (place,))
            return
        self.number[node, 0] = self._value(example)
        self.inputs.append(self.number[node, 0])
        for axis, length in enumerate(example.shape):
            self._symbol(length, (place, axis))

    def _symbol(self, item: Any, where: tuple) -> None:
        """Note where a symbol's number is read off. Where numbers decide it, PyTorch may have
        put in its place what it met, of which no guard knows."""
        open_size = size(item)
        if isinstance(open_size, Size) and open_size.expr.is_Symbol:
            self.symbols.setdefault(open_size.expr, where)
        if isinstance(item, torch.SymBool):  # the only entry of a tensor of truths, 0 or 1
            self.symbols |= {s: where for s in item.node._expr.free_symbols - self.symbols.keys()}
        if isinstance(item, torch.SymInt):
            symbol, known = item.node._expr, item.node.expr
            if symbol != known and symbol.is_Symbol and symbol.name.startswith("u"):
                import sympy

                self.symbols.setdefault(symbol, where)
                self.assumed[sympy.Eq(symbol, known)] = None

    def _constant(self, node: torch.fx.Node) -> None:
        tensor = getattr(self.module, str(node.target))
        if not isinstance(tensor, Tensor):
            raise CaptureError(f"control flow {node.target} cannot be swept")
        value = self.number[node, 0] = self._value(tensor)
        self.constants[value] = tensor

    def _result(self, item: Any) -> Any:
        """A value's number, or what is no tensor in a 1-tuple."""
        if isinstance(item, torch.fx.Node):
            if (item, 0) in self.number:
                return self.number[item, 0]
            return (size(item.meta["val"]),)
        return (item,)

    def _translate(self, item: Any) -> Any:
        """An argument of the traced graph's as one of ours."""
        if not isinstance(item, torch.fx.Node):
            return size(item)
        if (item, 0) in self.number:
            return Ref(self.number[item, 0])
        return size(item.meta["val"])

    def _call(self, node: torch.fx.Node) -> None:
        """Enter an operator's call as a `Node`; what only names a value anew, or computes a number,
        is noted and becomes none."""
        if node.target is operator.getitem:
            value = self.number.get((node.args[0], node.args[1]))  # type: ignore[arg-type]
            if value is not None:
                self.number[node, 0] = value
                return
        if node.target in _SAME:
            self.number[node, 0] = self.number[node.args[0], 0]  # type: ignore[index]
            return
        result = node.meta.get("val")
        if result is None:  # an assertion; those about given sizes are Dynamo's guards
            asserted = [a.meta.get("val") for a in node.args if isinstance(a, torch.fx.Node)]
            told = [a.node._expr for a in asserted if isinstance(a, torch.SymBool)]
            self.assumed |= {c: None for c in told if c.free_symbols}
            return
        if isinstance(result, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)):
            self._number(node, result)
            return
        many = isinstance(result, (tuple, list))
        results: Sequence[Any] = result if many else (result,)  # type: ignore[assignment]
        if not isinstance(node.target, OpOverload) or any(
            part is not None and not isinstance(part, Tensor) for part in results
        ):
            raise CaptureError(f"{node.target} cannot be swept: it is control flow; {source(node)}")
        for length in kept_by_squeeze(node):
            self._assume_several(length)
        args, kwargs = map_leaves((node.args, node.kwargs), self._translate)
        outputs = []
        for position, part in enumerate(results):
            self.number[node, position] = self._value(part)
            outputs.append(self.number[node, position])
            for axis, length in enumerate(() if part is None else part.shape):
                self._symbol(length, (Ref(outputs[-1]), axis))
        inputs = tuple(ref.index for ref in leaves((args, kwargs), Ref))
        self.nodes.append(
            Node(len(self.nodes), node.name, node.target, args, kwargs, inputs, tuple(outputs),
                 many, source(node), _module(node))
        )  # fmt: skip

    def _assume_several(self, length: Size) -> None:
        import sympy

        self.assumed[sympy.Ne(length.expr, 1)] = None

    def _number(self, node: torch.fx.Node, result: Any) -> None:
        """A number that the graph computes: from sizes, or off a tensor of one entry."""
        if node.target in (aten.item.default, aten._local_scalar_dense.default):
            value = self.number[node.args[0], 0]  # type: ignore[index]
            place = self.inputs.index(value) if value in self.inputs else Ref(value)
            self._symbol(result, (place, "item"))


def kept_by_squeeze(node: torch.fx.Node) -> list[Size]:
    """Open lengths of axes that `squeeze` looks at. It was traced as if none were one, of which no
    guard knows where numbers decide the length."""
    if node.target not in _SQUEEZES:
        return []
    given: Any = node.args
    x, *rest = given
    shape = x.meta["val"].shape
    dims = rest[0] if rest else range(len(shape))
    chosen = ([dims] if isinstance(dims, int) else dims) if shape else []
    lengths = [size(shape[i]) for i in chosen]
    return [n for n in lengths if isinstance(n, Size)]


_SQUEEZES = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
_LIFTS = (aten.lift_fresh_copy.default, aten.lift_fresh.default)
_ON_THE_HOST = (aten.tensor_split.tensor_indices_or_sections,)  # which read numbers there


def move_constants(
    nodes: Sequence[Node], values: list[Meta | None], constants: dict[int, Tensor]
) -> None:
    """Put constants of the host's that are read on a device there: once, not at every step, and
    where a CUDA graph can read them."""
    readers: dict[int, list[Node]] = {}
    for node in nodes:
        for v in node.inputs:
            readers.setdefault(v, []).append(node)
    for v, constant in list(constants.items()):
        if constant.device.type != "cpu":
            continue
        chain, ends, frontier = [v], [], [v]
        while frontier:
            for node in readers.get(frontier.pop(), ()):
                if node.op in _LIFTS:
                    chain.append(node.outputs[0])
                    frontier.append(node.outputs[0])
                else:
                    ends.append(node)
        devices = {m.device for n in ends for o in n.outputs if (m := values[o]) is not None}
        if len(devices) != 1 or any(n.op in _ON_THE_HOST for n in ends):
            continue
        (device,) = devices
        if device.type == "cpu":
            continue
        constants[v] = constant.to(device)
        for u in chain:
            meta = values[u]
            assert meta is not None
            values[u] = replace(meta, device=device)


def size(item: Any) -> Any:
    """A symbolic number as `Size`, a plain one as it is."""
    if not isinstance(item, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return item
    expr = item.node.expr
    if expr.is_number:
        kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(item)]
        return kind(expr)
    return Size(expr)


def source(node: torch.fx.Node) -> str:
    """'file.py:31: the line', where the model called this operator."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines() if line.strip()]
    for position in range(len(lines) - 1, -1, -1):
        if lines[position].startswith("File ") and _HERE not in lines[position]:
            path, line = lines[position].split(",")[:2]
            name = os.path.basename(path[5:].strip().strip('"'))
            code = lines[position + 1] if position + 1 < len(lines) else ""
            return f"{name}:{line.strip().removeprefix('line ')}: {code}"
    return str(node.target)


def _module(node: torch.fx.Node) -> str:
    """The innermost submodule that was running, by its name in the network."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    return path.removeprefix("L['net']").lstrip(".")


# What a graph holds that need not be computed -----------------------------------------------------


def _drop_copies(graph: torch.fx.Graph) -> None:
    """Leave out copies of what lies in memory as they would: of `contiguous()`, of dropout at rate
    0, of padding by nothing. They stay where memory is the caller's: where the network was given
    it, since it may be written to before the derivatives read it, or returns it."""
    shown: set[torch.fx.Node] = set()
    for node in graph.output_node().all_input_nodes:
        while node not in shown:
            shown.add(node)
            node = _viewed(node) or node
    for node in list(graph.nodes):
        pads = node.target is aten.pad.default and not any(node.args[1])
        if node in shown or not (pads or node.target is aten.clone.default):
            continue
        root = x = node.args[0]
        while (before := _viewed(root)) is not None:
            root = before
        if root.op == "call_function" and root not in shown and _lies_alike(node, x):
            node.replace_all_uses_with(x)
            graph.erase_node(node)


def _viewed(node: torch.fx.Node) -> torch.fx.Node | None:
    """What a node may share its memory with: that of which it is a view or a part."""
    if node.op != "call_function" or not node.all_input_nodes:
        return None
    own = isinstance(node.target, OpOverload) and not shares(node.target)
    return None if own else node.all_input_nodes[0]


def _lies_alike(left: torch.fx.Node, right: torch.fx.Node) -> bool:
    a, b = left.meta["val"], right.meta["val"]
    if (a.dtype, a.is_conj(), a.is_neg()) != (b.dtype, b.is_conj(), b.is_neg()):
        return False
    steps = zip((*a.shape, *a.stride()), (*b.shape, *b.stride()), strict=True)
    return all(_surely_equal(m, n) for m, n in steps)


def _join_pieces(graph: torch.fx.Graph) -> None:
    """q, k, v = qkv[0], qkv[1], qkv[2] becomes qkv.unbind(0), and slices that cover a tensor its
    split: the transpose is then one copy. That of a piece alone is a tensor of zeros to write it
    into, as large as the whole, and a sum of as many as there are pieces."""
    pieces: dict[Any, dict[Any, list[torch.fx.Node]]] = {}
    for node in graph.nodes:
        piece = _piece(node)
        if piece is not None:
            whole, where = piece
            pieces.setdefault(whole, {}).setdefault(where, []).append(node)
    for (_, dim, length, kind), places in pieces.items():
        order = sorted(places)
        ends = [0, *(stop for _, stop in order)]
        covered = [start for start, _ in order] == ends[:-1] and ends[-1] == length
        if len(order) < 2 or not covered:
            continue
        nodes = [places[where] for where in order]
        first = min((n for each in nodes for n in each), key=list(graph.nodes).index)
        x = first.args[0]  # which may have become a piece by now
        values = [each[0].meta["val"] for each in nodes]
        with graph.inserting_before(first):
            if kind is aten.select.int:
                whole = graph.call_function(aten.unbind.int, (x, dim))
            else:
                sizes = [stop - start for start, stop in order]
                whole = graph.call_function(aten.split_with_sizes.default, (x, sizes, dim))
            whole.meta = {**first.meta, "val": values}
            for i, each in enumerate(nodes):
                part = graph.call_function(operator.getitem, (whole, i))
                part.meta = {**each[0].meta}
                for node in each:
                    node.replace_all_uses_with(part)
    for places in pieces.values():
        for node in (n for each in places.values() for n in each):
            if not node.users:
                graph.erase_node(node)


def _piece(node: torch.fx.Node) -> tuple[Any, tuple[int, int]] | None:
    """((x, axis, its length, kind of piece), (start, stop)) where a node takes a piece out of x and
    the axis has a known length."""
    kind = node.target
    if kind not in (aten.select.int, aten.slice.Tensor):
        return None
    given: Any = node.args
    x, axis, *rest = given if len(given) > 1 else (*given, 0)
    example = x.meta.get("val") if isinstance(x, torch.fx.Node) else None
    if not isinstance(example, Tensor) or not isinstance(axis, int) or node.kwargs:
        return None
    axis %= example.dim()
    length = example.shape[axis]
    if type(length) is not int or any(type(n) not in (int, type(None)) for n in rest):
        return None
    if kind is aten.select.int:
        start = rest[0] % length
        return (x, axis, length, kind), (start, start + 1)
    start, stop, step = (*rest, *(None, None, None)[len(rest) :])
    start, stop, step = slice(start, stop, step).indices(length)
    if step != 1 or stop <= start:
        return None
    return (x, axis, length, kind), (start, stop)


# --------------------------------------------------------------------------------- decompositions


def decompositions() -> dict:
    """Recurrent layers become cells; attention with dropout, GLU, dropout variants and named
    paddings become the products, activations and pads they are made of; masks become places."""
    chosen: dict[Any, Any] = {
        op: _recurrent(decomposition_table[op]) for op in RECURRENT if op in decomposition_table
    }
    chosen[aten.scaled_dot_product_attention.default] = _attention_products
    chosen[aten.matmul.default] = _matmul_of_heads
    chosen[aten.glu.default] = _glu
    chosen[aten.cosine_similarity.default] = _cosine_similarity
    chosen[aten.instance_norm.default] = _instance_norm
    chosen[aten.empty.memory_format] = _filled(aten.zeros.default)
    chosen[aten.new_empty.default] = aten.new_zeros.default
    chosen[aten.empty_like.default] = aten.zeros_like.default
    chosen[aten.index.Tensor] = _index
    chosen[aten.masked_select.default] = _masked_select
    chosen[aten.as_strided.default] = _as_strided
    chosen[aten.as_strided_scatter.default] = _as_strided_scatter
    for name in ("feature_dropout", "alpha_dropout", "feature_alpha_dropout"):
        chosen[getattr(aten, name).default] = _dropout_variant(name)
    for n in (1, 2, 3):
        chosen[getattr(aten, f"conv{n}d").padding] = _padded_convolution(n)
    return chosen


RECURRENT = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)


def as_eager(module: torch.fx.GraphModule) -> None:
    """Change Dynamo's graph where PyTorch makes another thing of it than eager does when it traces
    it. Recurrent layers with dropout in between are called one by one: of several it leaves the
    dropout out."""
    _pass_on(module)
    for part in graphs_in(module):
        for node in [n for n in part.graph.nodes if _drops_between_layers(n)]:
            if not isinstance(node.args[3], bool):
                raise CaptureError("packed sequences through recurrent layers with dropout")
            node.target = _recurrent(node.target)
            part.recompile()


def _pass_on(module: torch.fx.GraphModule) -> None:
    """Dropout that drops nothing is its input itself, and no copy: who writes to the one writes to
    the other."""
    for part in graphs_in(module):
        for node in [n for n in part.graph.nodes if n.target in _DROPOUTS]:
            given = dict(zip(("input", "p", "training"), node.args, strict=False)) | node.kwargs
            train = given.get("training", given.get("train", True))
            if train is False or given.get("p", 0.5) == 0:
                node.replace_all_uses_with(given["input"])
                part.graph.erase_node(node)
                part.recompile()


_DROPOUTS = (torch.nn.functional.dropout, torch.dropout, torch.dropout_)


def _drops_between_layers(node: torch.fx.Node) -> bool:
    """(…, layers, dropout, train, …)."""
    if getattr(node.target, "__name__", "") not in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        return False
    rates = [i for i, a in enumerate(node.args) if isinstance(a, float)]
    return any(node.args[i] and node.args[i + 1] for i in rates)


def _recurrent(whole):
    """Layer by layer, with dropout between layers, which PyTorch's own decomposition leaves out."""

    def decomposed(
        x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
    ):
        if not (train and dropout and num_layers > 1):
            return whole(
                x, hx, params, has_biases, num_layers, 0.0, train, bidirectional, batch_first
            )
        several = isinstance(hx, (tuple, list))
        starts = hx if several else (hx,)
        sides, per_layer = 1 + bidirectional, len(params) // num_layers
        x = x.transpose(0, 1) if batch_first else x
        ends = []
        for i in range(num_layers):
            x = torch.dropout(x, dropout, True) if i else x
            state = [h[i * sides : (i + 1) * sides] for h in starts]
            own = params[i * per_layer : (i + 1) * per_layer]
            x, *end = whole(
                x, state if several else state[0], own, has_biases, 1, 0.0, train, bidirectional,
                False,
            )  # fmt: skip
            ends.append(end)
        x = x.transpose(0, 1) if batch_first else x
        return (x, *(torch.cat(parts) for parts in zip(*ends, strict=True)))

    return decomposed


def _glu(x, dim=-1):
    """GLU(a, b) = a ⊙ σ(b)."""
    a, b = x.chunk(2, dim)
    return a * torch.sigmoid(b)


def _cosine_similarity(x1, x2, dim=1, eps=1e-8):
    """Norms below eps are raised to it behind autograd's back: in the numbers, not in the
    derivative."""

    def unit(x):
        norm = torch.linalg.vector_norm(x, 2, dim, True)
        return x / torch.where(norm < eps, norm + stop_gradient(eps - norm), norm)

    dtype = torch.result_type(x1, x2)
    pair = (x if x.is_floating_point() else x.to(dtype) for x in (x1, x2))
    a, b = torch.broadcast_tensors(*pair)
    return (unit(a) * unit(b)).sum(dim)


def _instance_norm(
    x, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, cudnn_enabled
):
    """With running statistics: their update apart from the norm, or batch norm's eval form."""
    if running_mean is None:
        return NotImplemented
    if not use_input_stats:
        return aten.batch_norm(
            x, weight, bias, running_mean, running_var, False, momentum, eps, cudnn_enabled
        )
    axes = list(range(2, x.dim()))
    mean = stop_gradient(x.mean(axes).mean(0))
    var = stop_gradient(x.var(axes).mean(0))
    running_mean.copy_((1 - momentum) * running_mean + momentum * mean)
    running_var.copy_((1 - momentum) * running_var + momentum * var)
    return aten.instance_norm(x, weight, bias, None, None, True, momentum, eps, cudnn_enabled)


def _dropout_variant(name: str):
    """Dropout of whole channels, and dropout that keeps mean and variance of SELU nets."""

    def decomposed(x, p, train):
        if not train or p == 0:
            return x.clone()
        if "feature" in name:
            keep = x.new_empty(x.shape[:2] + (1,) * (x.dim() - 2))
        else:
            keep = torch.empty_like(x)  # in the memory's order, which is the order of the draws
        keep = keep.bernoulli_(1 - p)
        if "alpha" not in name:
            return x * (keep / (1 - p))
        alpha = 1.7580993408473766  # λα of SELU, the value of a dropped unit
        a = (1 / (1 - p) / (1 + p * alpha**2)) ** 0.5 if p < 1 else 0.0
        return x * (keep * a) + ((keep - 1) * (alpha * a) + alpha * a * p)

    return decomposed


def _matmul_of_heads(a, b):
    """Batches of matrices that do not lie one after the other, such as the heads of attention: they
    are copied once, as `matmul` does, but by nodes of their own. Inside of it each product of each
    sweep would copy them again."""
    batch = a.shape[:-2]
    alike = a.dim() == b.dim() and all(map(_surely_equal, batch, b.shape[:-2]))
    if len(batch) < 2 or not alike or (_lies_in_a_row(a) and _lies_in_a_row(b)):
        return NotImplemented
    flat = [t.reshape(math.prod(batch), *t.shape[-2:]) for t in (a, b)]
    return torch.bmm(*flat).reshape(*batch, a.shape[-2], b.shape[-1])


def _surely_equal(m: Any, n: Any) -> bool:
    return _torch.statically_known_true(m == n)


def _lies_in_a_row(t: Tensor) -> bool:
    """Whether the axes before a matrix's two are one in memory, whatever the sizes."""
    steps = list(zip(t.shape, t.stride(), strict=True))[:-2]
    pairs = itertools.pairwise([(n, step) for n, step in steps if not _surely_equal(n, 1)])
    return all(_surely_equal(outer[1], inner[0] * inner[1]) for outer, inner in pairs)


def _padded_convolution(n: int):
    """padding='same' or 'valid': an explicit pad where it is not symmetric, then convolve."""

    def decomposed(x, weight, bias=None, stride=1, padding="valid", dilation=1, groups=1):
        def each(value):
            items = list(value) if isinstance(value, (list, tuple)) else [value]
            return items * n if len(items) == 1 else items

        dilations = each(dilation)
        sizes = weight.shape[2:]
        totals = [0] * n
        if padding == "same":
            totals = [d * (k - 1) for k, d in zip(sizes, dilations, strict=True)]
        extra = [total % 2 for total in totals]
        if any(extra):
            x = torch.constant_pad_nd(x, [e for size in reversed(extra) for e in (0, size)])
        halves = [total // 2 for total in totals]
        convolve = getattr(aten, f"conv{n}d").default
        return convolve(x, weight, bias, each(stride), halves, dilations, groups)

    return decomposed


def _filled(make):
    """Zeros in the place of memory that holds anything: it may hold NaN, which spreads wherever a
    write in place has become a selection between old and new."""

    def decomposed(size, *, memory_format=None, **options):
        made = make(size, **options)
        return made if memory_format is None else made.contiguous(memory_format=memory_format)

    return decomposed


def _index(x, indices):
    """A mask as the places where it is set: how many there are then depends on the mask alone."""
    if not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return NotImplemented
    places = []
    for i in indices:
        if i is not None and i.dtype in (torch.bool, torch.uint8):
            places += i.nonzero().unbind(1)
        else:
            places.append(i)
    return aten.index.Tensor(x, places)


def _masked_select(x, mask):
    x, mask = torch.broadcast_tensors(x, mask)
    return aten.index.Tensor(x, list(mask.nonzero().unbind(1)))


def _as_strided(x, size, stride, storage_offset=None):
    """Entries of the flat tensor by their places, which do not depend on how it lies in memory."""
    flat, places = x.reshape(-1), _places(x, size, stride, storage_offset)
    return flat.index_select(0, places).reshape(size)


def _as_strided_scatter(x, src, size, stride, storage_offset=None):
    """PyTorch's own derivative of it in x is wrong: that of the entries which are overwritten."""
    flat, places = x.reshape(-1), _places(x, size, stride, storage_offset)
    return flat.index_copy(0, places, src.reshape(-1)).reshape(x.shape)


def _places(x, size, stride, storage_offset):
    if not x.is_contiguous() or x.storage_offset() != 0:
        raise CaptureError(
            f"as_strided reads the memory of a tensor of shape {tuple(x.shape)} that is not "
            "contiguous; call contiguous() first"
        )
    places = torch.zeros((), dtype=torch.long, device=x.device) + (storage_offset or 0)
    for length, step in zip(size, stride, strict=True):
        along = torch.arange(length, device=x.device) * step
        places = places.unsqueeze(-1) + along
    return places.reshape(-1)


def _attention_products(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None,
    enable_gqa=False,
):  # fmt: skip
    """softmax(scale·QKᵀ + mask) V as separate nodes, where the whole operator has no rule:
    with dropout, and with a mask that carries a gradient (relative position bias)."""
    if dropout_p == 0.0 and not (attn_mask is not None and attn_mask.requires_grad):
        return NotImplemented
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if is_causal:
        n, m = query.shape[-2], key.shape[-2]
        attn_mask = torch.ones(n, m, dtype=torch.bool, device=query.device).tril()
    # the square root on both factors, as the stock path rounds it
    scores = (query * scale**0.5) @ (key.transpose(-2, -1) * scale**0.5)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(attn_mask.logical_not(), float("-inf"))
        else:
            scores = scores + attn_mask
        weights = aten._safe_softmax(scores, -1)  # a row that is masked throughout gives 0
    else:
        weights = torch.softmax(scores, -1)
    if dropout_p > 0.0:
        weights = torch.dropout(weights, dropout_p, True)
    return weights @ value
