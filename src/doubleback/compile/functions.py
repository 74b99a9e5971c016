"""Operators on whole functions in a graph of TorchDynamo's: what of their derivatives it tells."""

from __future__ import annotations

import ast
import functools
import linecache
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .. import _torch
from .._torch import pytree
from ..capture import THROUGH, graphs_in

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


# ------------------------------------------------------------------- linear, as derivatives are
#
# A backward need not be: some clip what comes in, or return the same whatever comes in. Autograd
# calls it once, with all that came in, and not at all where nothing did; a region's passes call it
# with parts of that, and with zeros.

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
