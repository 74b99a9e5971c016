"""Flat graphs: what a function of tensors calls, operator by operator (`record`); what does nothing
left out (`clean`); replayed as straight-line code over PyTorch's own bindings (`boxed`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter, getitem
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.node import has_side_effect, map_arg

from .._torch import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    parse_dispatch_key,
)
from ..graph import memory_of
from ..kernels import (
    constant_over_places,
    direct,
    library,
    plus_over_places,
    times_over_places,
)

aten = torch.ops.aten

_VIEWS = {
    aten.detach.default, aten.alias.default, aten.view.default, aten._unsafe_view.default,
    aten.expand.default, aten.permute.default, aten.squeeze.dim, aten.slice.Tensor,
}  # fmt: skip
_PURE_VIEWS = {
    aten.t.default, aten.view.default, aten.transpose.int, aten.permute.default,
    aten.expand.default, aten.unsqueeze.default, aten._unsafe_view.default,
}  # fmt: skip


def clean(module: torch.fx.GraphModule, for_compiler: bool = False) -> None:
    """Leave out what does nothing: views of the same shape, views of views, the same view twice;
    one call for a product that is added to something. Each call costs the host as much as a
    kernel."""
    graph = module.graph
    seen: dict[Any, torch.fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        _skip_views_between(node)
        same = _same_as_input(node)
        if same is None and node.target in _PURE_VIEWS:
            key = (node.target, str(node.args), str(node.kwargs))
            same = seen.setdefault(key, node)
        if same is not None and same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
        elif node.target is aten.add.Tensor:
            _join_product(graph, node, for_compiler)
            if not for_compiler and not node._erased:
                _join_multiple(graph, node)
    graph.eliminate_dead_code()
    if for_compiler:  # elsewhere `boxed` writes the code
        module.recompile()


def _replace(node: torch.fx.Node, make: Callable[..., torch.fx.Node], *args: Any) -> None:
    """Put the node that `make(*args)` adds to the graph in this one's place."""
    with node.graph.inserting_before(node):
        new = make(*args)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


_LIFTS = (aten.lift_fresh_copy.default, aten.lift_fresh.default, aten.detach.default)


def move_constants(module: torch.fx.GraphModule) -> None:
    """Constants of the host's that the graph copies to a device lie there from now on: no copy at
    every call, and none that a CUDA graph could not hold."""
    graph, any_moved = module.graph, False
    for node in list(graph.nodes):
        if node.target is not aten._to_copy.default or "device" not in node.kwargs:
            continue
        source = node.args[0]
        while source.target in _LIFTS:
            source = source.args[0]
        if source.op != "get_attr" or _written(node):
            continue
        constant = getattr(module, source.target)
        device = torch.device(node.kwargs["device"])
        if (
            not isinstance(constant, Tensor)
            or constant.device.type != "cpu"
            or device.type == "cpu"
        ):
            continue
        name = f"{source.target}_moved_{node.name}"
        module.register_buffer(name, aten._to_copy(constant, **node.kwargs), persistent=False)
        _replace(node, graph.get_attr, name)
        any_moved = True
    if any_moved:
        graph.eliminate_dead_code()
        module.recompile()


def _written(node: torch.fx.Node) -> bool:
    """Whether anybody writes to this value or to a view of it."""
    for user in node.users:
        if user.op == "call_method":  # a sum into its first summand; a view
            into = str(user.target).endswith("_")
            if user.args[0] is node and (into or _written(user)):
                return True
            continue
        schema = getattr(user.target, "_schema", None)
        if schema is None and user.op != "output":
            return True
        infos = [a.alias_info for a in schema.arguments] if schema is not None else []
        if any(info is not None and info.is_write for info in infos):
            return True
        if any(info is not None for info in infos) and _written(user):
            return True
    return False


_RESHAPES = (aten.view.default, aten._unsafe_view.default)


def _skip_views_between(node: torch.fx.Node) -> None:
    """A view of a view of x is a view of x; sizes are written out, so that equal views look so."""
    if node.target not in _RESHAPES or node.kwargs:
        return
    source = node.args[0]
    while isinstance(source, torch.fx.Node) and source.target in _RESHAPES:
        source = source.args[0]
    sizes = list(node.meta["val"].shape)
    closed = all(type(n) is int for n in sizes)  # an open size is the node that computes it
    node.args = (source, sizes if closed else node.args[1])


def _alike(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether sizes are the same, open ones by their expressions."""
    left, right = ([n if type(n) is int else n.node.expr for n in sizes] for sizes in (left, right))
    return left == right


def _same_as_input(node: torch.fx.Node) -> torch.fx.Node | None:
    """The input of a view that changes neither shape nor strides."""
    if node.target not in _VIEWS:
        return None
    source = node.args[0]
    before, after = source.meta.get("val"), node.meta.get("val")  # type: ignore[union-attr]
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return None
    same = _alike(before.shape, after.shape) and _alike(before.stride(), after.stride())
    return source if same else None  # type: ignore[return-value]


NEAR = 12  # operators


def _near(earlier: torch.fx.Node, later: torch.fx.Node) -> bool:
    """Whether two nodes stand so close that computing the earlier one in the later one's place
    keeps nothing alive for long. Not where gradients are handed over in between, after which what
    it reads may change, nor where that is written to."""
    node, read = later, set(map(memory_of, earlier.all_input_nodes))
    for _ in range(NEAR):
        node = node.prev
        if node is earlier:
            return True
        if node.target is HANDED or not read.isdisjoint(map(memory_of, _writes_to(node))):
            return False
    return False


def _writes_to(node: torch.fx.Node) -> list[torch.fx.Node]:
    if node.op == "call_method":
        return node.all_input_nodes[:1] if str(node.target).endswith("_") else []
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = [node.kwargs.get(a.name) for a in schema.arguments]
    given[: len(node.args)] = node.args
    written: list[torch.fx.Node] = []
    for argument, value in zip(schema.arguments, given, strict=True):
        if argument.alias_info is not None and argument.alias_info.is_write:
            map_arg(value, written.append)  # type: ignore[arg-type]
    return written


def _join_product(graph: torch.fx.Graph, node: torch.fx.Node, for_compiler: bool) -> None:
    """a + b c → addmm(a, b, c), for the product that was computed last; into a itself where a is
    a product that nobody else reads, so that the sum of two takes no copy. Batches of products only
    so, and not for a compiler, which adds them up with what comes next."""
    if node.kwargs or len(node.args) != 2:
        return
    left, right = node.args
    for base, product in ((left, right), (right, left)):
        fits = (
            isinstance(base, torch.fx.Node)
            and isinstance(product, torch.fx.Node)
            and product.target in (aten.mm.default, *_batches(base, for_compiler))
            and len(product.users) == 1
            and _near(product, node)
            and _alike(base.meta["val"].shape, product.meta["val"].shape)
            and base.meta["val"].dtype == product.meta["val"].dtype
        )
        if fits:
            _replace(node, _add_product, graph, base, *product.args, for_compiler)  # type: ignore[union-attr, misc]
            return


def _join_multiple(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """a + b⊙c → addcmul(a, b, c), which passes over memory once: for tensors of one dtype, where
    the sum is laid out like a."""
    if node.kwargs or len(node.args) != 2:
        return
    left, right = node.args
    for base, product in ((left, right), (right, left)):
        if not (isinstance(base, torch.fx.Node) and isinstance(product, torch.fx.Node)):
            continue
        factors = [n for n in product.args if isinstance(n, torch.fx.Node)]
        values: list[Any] = [n.meta.get("val") for n in (node, base, product, *factors)]
        fits = (
            product.target is aten.mul.Tensor
            and len(factors) == 2
            and not product.kwargs
            and len(product.users) == 1
            and _near(product, node)
            and not (_is_over_places(product) or _is_over_places(node))
            and all(isinstance(v, Tensor) and v.dim() and v.is_floating_point() for v in values)
            and len({(v.dtype, v.device) for v in values}) == 1
            and _alike(base.meta["val"].shape, product.meta["val"].shape)
            and _alike(base.meta["val"].stride(), node.meta["val"].stride())
        )
        if fits:
            _replace(node, graph.call_function, aten.addcmul.default, (base, *factors))
            return


_PRODUCTS = (aten.mm.default, aten.addmm.default, "addmm_")
_BATCHES = (aten.bmm.default, "baddbmm_")


def _batches(base: torch.fx.Node, for_compiler: bool) -> tuple[Any, ...]:
    into = base.target in _BATCHES and len(base.users) == 1 and not for_compiler
    return (aten.bmm.default,) if into else ()


def _add_product(
    graph: torch.fx.Graph, base: torch.fx.Node, b: Any, c: Any, for_compiler: bool
) -> torch.fx.Node:
    """The node that holds base + b c."""
    if base.target in _BATCHES:
        return graph.call_method("baddbmm_", (base, b, c))
    readers = [user for user in base.users if user.target is not ADD_PRODUCT]
    if base.target not in _PRODUCTS or len(readers) > 1:
        return graph.call_function(aten.addmm.default, (base, b, c))
    if not for_compiler:
        return graph.call_method("addmm_", (base, b, c))
    graph.call_function(ADD_PRODUCT, (base, b, c))
    return base


def _into(base: Tensor, b: Tensor, c: Tensor) -> None:
    base.addmm_(b, c)


# A compiler gives the sum of `addmm` a place of its own and copies base there; not of this one.
library.define("add_product(Tensor(a!) base, Tensor b, Tensor c) -> ()")
library.impl("add_product", _into, "CompositeExplicitAutograd")
ADD_PRODUCT = torch.ops.doubleback.add_product.default


def _nothing(gradients: Sequence[Tensor]) -> None:
    pass


# Where gradients are complete, and whatever was to be read for them has been read.
library.define("handed(Tensor[] gradients) -> ()")
library.impl("handed", _nothing, "CompositeExplicitAutograd")
HANDED = torch.ops.doubleback.handed.default
has_side_effect(HANDED)


_DIRECT = frozenset(
    ("mm", "addmm", "bmm", "baddbmm", "relu", "add", "mul", "sub", "div", "neg", "sum", "mean", "t",
     "transpose", "permute", "unsqueeze", "squeeze", "clone", "cat", "stack", "unbind",
     "native_layer_norm", "convolution", "where", "eq", "exp", "addcmul", "sigmoid", "tanh",
     "select", "gather", "scatter_add", "le", "ge", "lt", "gt", "ne", "rsub", "masked_fill",
     "index_add", "index_select", "_softmax", "_log_softmax", "ones_like", "zeros_like",
     "unsafe_split")
)  # fmt: skip
_MADE = frozenset(("arange", "zeros", "ones", "full", "scalar_tensor"))
# reshape: some kernels lay their results out otherwise than their fakes say (hardswish_backward at
# a permuted gradient), and what was a view there needs a copy here
_METHODS = {
    aten.view.default: "reshape", aten._unsafe_view.default: "reshape",
    aten.expand.default: "expand", aten.new_zeros.default: "new_zeros",
    aten.new_empty.default: "new_empty", aten.view.dtype: "view",
}  # fmt: skip


def _direct(graph: torch.fx.Graph) -> None:
    """Call PyTorch's own bindings where there are any: a call through `torch.ops` takes the host
    longer."""
    for node in list(graph.nodes):
        gone = node._erased
        if gone or node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        name = node.target._schema.name.removeprefix("aten::")
        if node.target in _METHODS:
            method = _METHODS[node.target]
            if method == "reshape" and _written(node):
                method = "view"  # a copy would lose what is written
            _replace(node, graph.call_method, method, node.args, node.kwargs)
        elif name in ("mm", "addmm") and not node.kwargs and _turned(node.args[-1]):
            x, weight = node.args[-2], node.args[-1].args[0]
            rest = (node.args[0],) if name == "addmm" else ()
            node.target, node.args = torch.nn.functional.linear, (x, weight, *rest)
            _widen(graph, node)
        elif name == "mm" and _widen(graph, node):
            node.target = torch.matmul
        elif name in _OVER_PLACES and _is_over_places(node):
            node.target = _OVER_PLACES[name]
        elif node.target.namespace == "aten" and name in _DIRECT:
            node.target = getattr(torch, name)
        elif node.target.namespace == "aten" and name in _MADE and "device" in node.kwargs:
            node.target = getattr(torch, name)  # not where a default device would decide
        elif node.target is aten.slice.Tensor and (piece := _piece(node)):
            node.target, node.args = torch.narrow, (node.args[0], *piece)
        elif node.target is aten._to_copy.default and _casts(node):
            _replace(node, graph.call_method, "to", (node.args[0], node.kwargs["dtype"]))
        elif node.target is aten.softplus.default:
            node.target = torch.nn.functional.softplus
        elif node.target in direct and not node.kwargs:
            node.target = direct[node.target]
    graph.eliminate_dead_code()


def _piece(node: torch.fx.Node) -> tuple[int, ...]:
    """(axis, start, length) of a slice without gaps, whose sizes are closed; nothing for others."""
    given: Any = node.args
    options: Any = (*given[1:], *(0, None, None, 1)[len(given) - 1 :])
    axis, start, _, step = options
    before, after = given[0].meta.get("val"), node.meta.get("val")
    if not (isinstance(before, Tensor) and isinstance(after, Tensor)):
        return ()
    source, value = before.shape, after.shape
    if node.kwargs or step != 1 or any(type(n) is not int for n in (*source, *value, start or 0)):
        return ()
    size: int = source[axis]
    first = start or 0
    return axis, min(max(first + size if first < 0 else first, 0), size), value[axis]


def _casts(node: torch.fx.Node) -> bool:
    """Whether this changes the dtype and nothing else."""
    source: Any = node.args[0]
    before, after = source.meta.get("val"), node.meta.get("val")
    tensors = isinstance(before, Tensor) and isinstance(after, Tensor)
    return tensors and set(node.kwargs) == {"dtype"} and before.dtype != after.dtype  # type: ignore[union-attr]


_OVER_PLACES = {"mul": times_over_places, "add": plus_over_places}


def _is_over_places(node: torch.fx.Node) -> bool:
    """Whether one of two factors, or terms, is constant over the other's places."""
    if node.kwargs or len(node.args) != 2:
        return False
    left, right = (n.meta.get("val") if isinstance(n, torch.fx.Node) else None for n in node.args)
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)):
        return False
    return constant_over_places(left, right) or constant_over_places(right, left)


def _widen(graph: torch.fx.Graph, node: torch.fx.Node) -> bool:
    """A product of rows that are a view of (…, n), whose result becomes (…, m) again, takes the
    whole at once: PyTorch makes the same two views, at a fraction of the host's time."""
    rows, users = node.args[0], list(node.users)
    if not isinstance(rows, torch.fx.Node) or len(users) != 1:
        return False
    if rows.target not in (aten.view.default, "view", "reshape"):
        return False
    if users[0].target not in _RESHAPES:
        return False
    whole = rows.args[0].meta.get("val")  # type: ignore[union-attr]
    wanted, given = users[0].meta["val"].shape, node.meta["val"].shape
    fits = (
        isinstance(whole, Tensor)
        and whole.dim() > 2
        and whole.is_contiguous()
        and _alike(whole.shape[-1:], rows.meta["val"].shape[-1:])
        and _alike(wanted, (*whole.shape[:-1], given[-1]))
    )
    if fits:
        node.args = (rows.args[0], *node.args[1:])
        node.meta = dict(users[0].meta)
        users[0].replace_all_uses_with(node)
        graph.erase_node(users[0])
    return fits


def _turned(node: Any) -> bool:
    """Whether this is Wᵀ and every product with it a dense layer x Wᵀ (+ b), b one-dimensional."""
    if not isinstance(node, torch.fx.Node) or node.target not in (aten.t.default, torch.t):
        return False
    return all(
        user.target is not aten.addmm.default or user.args[0].meta["val"].dim() == 1  # type: ignore[union-attr]
        for user in node.users
    )


_OVERLOAD = re.compile(r" = torch\.ops\.(\w+)\.(\w+)\.(\w+)\(")


OPERATORS = "operators"  # a global of straight-line code: what its names for operators stand for


def boxed(module: Any) -> Callable:
    """Straight-line code that takes its inputs out of a list: nobody else holds them. With `HANDED`
    in it, a generator: there it lays the gradients into that list, alone, and waits."""
    graph = module.graph
    _direct(graph)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    first = inputs[0] if inputs else next(iter(graph.nodes))
    with graph.inserting_before(first):
        box = graph.placeholder("box")
    place = box
    for node in reversed(inputs):
        with graph.inserting_after(place):
            place = graph.call_method("pop", (box,))
        node.replace_all_uses_with(place)
        graph.erase_node(node)
    for node in [n for n in graph.nodes if n.target is HANDED]:
        with graph.inserting_before(node):
            graph.call_method("append", (box, *node.args))
        graph.erase_node(node)
    laid = f"{box.name}.append("

    def wait(lines: list[str]) -> list[str]:
        return [part for line in lines for part in ([line, "yield\n"] if laid in line else [line])]

    graph.on_generate_code(lambda _: wait)
    code, constants = graph.python_code("self"), [n for n in graph.nodes if n.op == "get_attr"]
    names = dict(code.globals)
    known: dict[str, str] = {}  # operators, and what each is called in the code

    def bound(call: re.Match) -> str:
        operator = ".".join(call.groups())
        name = known.setdefault(operator, f"__operator_{len(known)}")
        names[name] = attrgetter(operator)(torch.ops)._op
        return f" = {name}("

    # an operator's own `__call__` is one more frame of Python
    exec(_OVERLOAD.sub(bound, code.src), names)
    names[OPERATORS] = {name: operator for operator, name in known.items()}
    held = SimpleNamespace(**{n.target: getattr(module, n.target) for n in constants})
    return MethodType(names["forward"], held)


# ----------------------------------------------------------------------------------------- a tape


_PLAIN = (
    bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip


class OffTape(Exception):
    """Something that a tape does not hold, and `make_fx` may."""


class Taped(nn.Module):
    """A graph, and as buffers the constants that it reads."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        super().__init__()
        self.graph = graph

    def recompile(self) -> None:
        """Nothing: its code is written where it is run (`straight_line.boxed`)."""


def record(fn: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor]) -> Taped:
    """The graph of `fn(*tensors)`: `make_fx` for fixed sizes and no compiler, in less time. There
    are no proxies and no sizes to follow, only tensors without numbers, each with the node that it
    came from."""
    fakes: list[Any] = [t for t in tensors if isinstance(t, FakeTensor)]
    mode: Any = fakes[0].fake_mode if fakes else FakeTensorMode(allow_non_fake_inputs=True)
    mode._allow_unsafe_data_ptr_access = False
    tape = _Tape()
    fakes = [tape.take(mode, t) for t in tensors]
    with mode, tape:
        results = fn(*fakes)
    tape.give(results)
    return tape.taped


_DEVICE = torch.ops.prim.device.default


class _Tape(TorchDispatchMode):
    """Writes down every operator that runs, with the nodes that its tensors came from."""

    def __init__(self) -> None:
        super().__init__()
        self.taped = Taped(torch.fx.Graph())
        self._nodes: dict[int, torch.fx.Node] = {}  # by the tensor, which the node keeps alive

    def take(self, mode: FakeTensorMode, tensor: Tensor) -> Tensor:
        """An input, without numbers."""
        fake = mode.from_tensor(tensor)
        if id(fake) in self._nodes:  # the same tensor twice may be two the next time
            fake = fake.detach()
        return self._enter(fake, self.taped.graph.placeholder(f"arg{len(self._nodes)}"))

    def give(self, results: Sequence[Tensor]) -> None:
        self.taped.graph.output([self._argument(t) for t in results])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a tensor's device, which is asked for more than operators
            t = args[0]
            known = type(t) is FakeTensor and not t.fake_mode.in_kernel_invocation
            return t.fake_device if known and func is _DEVICE else func(*args, **kwargs)
        if _composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if func is aten.lift_fresh.default:
            func = aten.lift_fresh_copy.default  # of a constant, which may be written to
        arguments = tuple([self._argument(a) for a in args])
        named = {name: self._argument(a) for name, a in kwargs.items()}
        graph = self.taped.graph
        name = func.overloadpacket.__name__
        node = graph.create_node("call_function", func, arguments, named, name)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            self._enter(result, node)
        elif isinstance(result, (tuple, list)):
            for i, part in enumerate(result):
                if isinstance(part, Tensor):
                    self._enter(part, graph.create_node("call_function", getitem, (node, i), {}))
                elif part is not None:
                    raise OffTape(func)
        elif result is not None:
            raise OffTape(func)
        return result

    def _enter(self, tensor: Tensor, node: torch.fx.Node) -> Tensor:
        node.meta["val"] = tensor
        self._nodes[id(tensor)] = node
        return tensor

    def _argument(self, item: Any) -> Any:
        if isinstance(item, Tensor):
            return self._nodes.get(id(item)) or self._constant(item)
        if isinstance(item, (list, tuple)):
            return type(item)([self._argument(part) for part in item])
        if type(item) in _PLAIN:
            return item
        raise OffTape(item)

    def _constant(self, tensor: Tensor) -> torch.fx.Node:
        if type(tensor) not in (Tensor, nn.Parameter):
            raise OffTape(tensor)
        name = f"constant{len(self._nodes)}"
        self.taped.register_buffer(name, tensor, persistent=False)
        node = self.taped.graph.create_node("get_attr", name)
        self._enter(tensor, node)
        return node


@cache
def _composite(func: Any) -> bool:
    """Whether this operator is called by what it is made of, everywhere."""
    has = func.has_kernel_for_dispatch_key
    kernels = [parse_dispatch_key(name) for name in ("CPU", "CUDA")]
    return has(parse_dispatch_key("CompositeImplicitAutograd")) and not any(map(has, kernels))
