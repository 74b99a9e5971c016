"""nn.Module → Graph: `torch.export` (non-strict), then functionalised, composite operators whole.

The graph keeps `linear`, `conv2d`, `layer_norm`, `scaled_dot_product_attention`, … as single
nodes. Autocast appears as explicit casts, buffer updates as outputs, recurrent layers unrolled,
and regions under `no_grad` end in `stop_gradient`.
"""

from __future__ import annotations

import operator
import os
import threading
import traceback
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._export import utils
from torch.export import exported_program
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from ..errors import CaptureError
from ..graph import Graph, Meta, Node, Ref, refs
from .decompositions import CALLED, RECURRENT, decompositions, stop_gradient
from .holder import Holder, inside, untouched

aten = torch.ops.aten


def capture(
    net: nn.Module, args: tuple, kwargs: Mapping[str, Any], still: Collection[int] = ()
) -> Graph:
    """The program that `net(*args, **kwargs)` runs for inputs of these shapes and dtypes.

    still: places among the flattened inputs of which no gradient is asked. Nothing in `net`
    changes. Raises `CaptureError` with the line of the model that stopped it.
    """
    try:
        with warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad():
            leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
            leaves = [_leaf(t, i in still) for i, t in enumerate(leaves)]
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            warnings.simplefilter("ignore")
            with untouched(net):
                program = torch.export.export(Holder(net), args, kwargs, strict=False)
            _mark_stopped(program.graph_module)
            table = decompositions()
            with _keeping_few_whole(program, table):
                program = program.run_decompositions(table)
    except Exception as error:
        raise CaptureError(
            f"{type(net).__name__} cannot be captured: {_first_line(error)}\n"
            f"  stopped at {_model_line(error)}\n"
            "  Remedy: keep Python control flow independent of tensor values, or let the network "
            "run on autograd (strict=False)."
        ) from error
    return _convert(program, net)


def _leaf(t: Any, still: bool) -> Any:
    """As the network would see it under autograd: requiring grad where that is possible."""
    if not isinstance(t, Tensor):
        return t
    t = t.clone() if t.is_inference() else t
    return t.detach().requires_grad_(not still and (t.is_floating_point() or t.is_complex()))


def _mark_stopped(module: torch.fx.GraphModule) -> None:
    """End `detach` and `no_grad` regions in `stop_gradient`, which functionalising keeps."""
    for child in module.modules():
        if not isinstance(child, torch.fx.GraphModule):
            continue
        for node in list(child.graph.nodes):
            if node.op != "call_function":
                continue
            if node.target in (aten.detach.default, aten.detach_.default):
                node.target = stop_gradient
            elif str(node.target) == "wrap_with_set_grad_enabled" and node.args[0] is False:
                for item in list(node.users):
                    with child.graph.inserting_after(item):
                        stopped = child.graph.call_function(stop_gradient, (item,))
                    stopped.meta = dict(item.meta)
                    item.replace_all_uses_with(
                        stopped, delete_user_cb=lambda user, own=stopped: user is not own
                    )
        child.recompile()


@contextmanager
def _keeping_few_whole(program: torch.export.ExportedProgram, table: dict) -> Iterator[None]:
    """`run_decompositions` keeps composite operators whole by overriding each of the thousands
    there are, which takes longer than tracing a small network. Those that this program can call
    are enough; operators of other libraries and PyTorch's own decompositions may call any."""
    operators = {
        node.target
        for module in program.graph_module.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
    }
    ours = all(op.namespace in ("aten", "doubleback") for op in operators)
    every = _every
    if every is None or _every_of_aten is None or not ours or operators & set(RECURRENT):
        yield
        return
    thread, asked = threading.get_ident(), operators | CALLED | set(table)
    few = _every_of_aten() & asked
    with _capturing:
        exported_program._collect_all_valid_cia_ops = (  # type: ignore[attr-defined]
            lambda: few if threading.get_ident() == thread else every()
        )
        try:
            yield
        finally:
            exported_program._collect_all_valid_cia_ops = every  # type: ignore[attr-defined]


_capturing = threading.Lock()
_every = getattr(exported_program, "_collect_all_valid_cia_ops", None)
_every_of_aten = getattr(utils, "_collect_all_valid_cia_ops_for_aten_namespace", None)


def _convert(program: torch.export.ExportedProgram, net: nn.Module) -> Graph:
    values: list[Meta | None] = []
    number: dict[tuple[torch.fx.Node, int], int] = {}
    nodes: list[Node] = []

    def new_value(tensor: Any) -> int:
        meta = None
        if isinstance(tensor, Tensor):
            meta = Meta(tuple(int(s) for s in tensor.shape), tensor.dtype, tensor.device)
        values.append(meta)
        return len(values) - 1

    def translate(item: Any) -> Any:
        if isinstance(item, torch.fx.Node):
            if (item, 0) not in number:
                raise CaptureError(f"{item} has no tensor value; used at {_source(item)}")
            return Ref(number[item, 0])
        if isinstance(item, (tuple, list)):
            return type(item)(translate(part) for part in item)
        if isinstance(item, dict):
            return {key: translate(part) for key, part in item.items()}
        return item

    placeholders: dict[str, int] = {}
    for fx_node in program.graph.nodes:
        if fx_node.op == "placeholder":
            number[fx_node, 0] = placeholders[fx_node.name] = new_value(fx_node.meta.get("val"))
        elif fx_node.op == "call_function":
            if fx_node.target is operator.getitem:
                number[fx_node, 0] = number[fx_node.args[0], fx_node.args[1]]
                continue
            result = fx_node.meta.get("val")
            if result is None:  # an assertion: checked by capture itself
                continue
            many = isinstance(result, (tuple, list))
            results = result if many else (result,)
            if not isinstance(fx_node.target, torch._ops.OpOverload) or any(
                part is not None and not isinstance(part, Tensor) for part in results
            ):
                raise CaptureError(
                    f"{fx_node.target} cannot be swept: it is control flow or yields a Python "
                    f"number; stopped at {_source(fx_node)}"
                )
            if any(isinstance(s, torch.SymInt) for t in results if t is not None for s in t.shape):
                raise CaptureError(
                    f"the shape of what {fx_node.target} yields depends on the values it is given; "
                    f"stopped at {_source(fx_node)}"
                )
            args, kwargs = translate(fx_node.args), translate(fx_node.kwargs)
            outputs = []
            for position, part in enumerate(results):
                number[fx_node, position] = new_value(part)
                outputs.append(number[fx_node, position])
            inputs = (*refs(args), *refs(kwargs))
            nodes.append(
                Node(len(nodes), fx_node.name, fx_node.target, args, kwargs, inputs,
                     tuple(outputs), many, _source(fx_node), _module(fx_node))
            )  # fmt: skip
        elif fx_node.op == "get_attr":
            raise CaptureError(f"control flow {fx_node.target} cannot be swept")
    signature = program.graph_signature
    inputs, state, constants, attributes = _read_inputs(program, net, placeholders)
    outputs, mutations = [], {}
    results: Any = program.graph.output_node().args[0]
    for spec, result in zip(signature.output_specs, results, strict=True):
        if spec.kind is OutputKind.BUFFER_MUTATION:
            mutations[inside(str(spec.target))] = number[result, 0]
        elif spec.kind is OutputKind.USER_OUTPUT:
            is_tensor = isinstance(spec.arg, TensorArgument)
            outputs.append(number[result, 0] if is_tensor else (result,))
        else:
            raise CaptureError(
                f"the network changes {spec.target or spec.arg} in place ({spec.kind.name}); "
                "clone it first"
            )
    return Graph(
        tuple(nodes), tuple(values), inputs, state, constants, tuple(outputs),
        program.call_spec.out_spec, mutations, attributes,
    )  # fmt: skip


def _read_inputs(program, net, placeholders):
    inputs: list[int | None] = []
    state: dict[str, int] = {}
    constants: dict[int, Tensor] = {}
    attributes: dict[str, int] = {}
    for spec in program.graph_signature.input_specs:
        value = placeholders.get(spec.arg.name)
        if spec.kind is InputKind.USER_INPUT:
            inputs.append(value if isinstance(spec.arg, TensorArgument) else None)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            state[inside(spec.target)] = value
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            constants[value] = program.constants[spec.target]
            if _is_attribute(net, spec.target, constants[value]):
                attributes[inside(spec.target)] = value
        else:
            raise CaptureError(f"an input of kind {spec.kind.name} cannot be swept: {spec.target}")
    return tuple(inputs), state, constants, attributes


def _is_attribute(net: nn.Module, name: str, tensor: Tensor) -> bool:
    """Whether it lies under this name in a module, where another may come to lie."""
    owner, _, leaf = inside(name).rpartition(".")
    try:
        return getattr(net.get_submodule(owner), leaf) is tensor
    except AttributeError:
        return False


_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_HERE = os.path.dirname(os.path.abspath(__file__))
_STANDARD = os.path.dirname(os.path.abspath(os.__file__))


def _source(node: torch.fx.Node) -> str:
    """'file.py:31: the line', where the model called this operator."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines() if line.strip()]
    for position in range(len(lines) - 1, -1, -1):
        if lines[position].startswith("File "):
            path, line = lines[position].split(",")[:2]
            name = os.path.basename(path[5:].strip().strip('"'))
            code = lines[position + 1] if position + 1 < len(lines) else ""
            return f"{name}:{line.strip().removeprefix('line ')}: {code}"
    return str(node.target)


def _module(node: torch.fx.Node) -> str:
    """The innermost submodule that was running, by its name in the network."""
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    return "" if path == "held" else inside(path)


def _model_line(error: BaseException) -> str:
    """The innermost line of the model; if it is made of stock layers alone, of the layer."""
    own, stock = "", ""
    layers = os.path.join(_TORCH, "nn", "modules", "")
    for frame in traceback.extract_tb(error.__traceback__):
        path = os.path.abspath(frame.filename)
        text = f"{os.path.basename(path)}:{frame.lineno}: {frame.line}"
        if path.startswith(layers) and not path.endswith("module.py"):
            stock = text
        elif not path.startswith((_TORCH, _HERE, _STANDARD)) and os.path.exists(path):
            own = text
    return own or stock or "an unknown line"


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
