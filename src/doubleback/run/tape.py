"""What a function of tensors calls, operator by operator, as a graph: `make_fx` for fixed sizes and
no compiler, in a third of its time. There are no proxies and no sizes to follow, only tensors
without numbers, each with the node that it came from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from operator import getitem
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import FakeTensor, FakeTensorMode, TorchDispatchMode, parse_dispatch_key

aten = torch.ops.aten

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
    """The graph of `fn(*tensors)`."""
    fakes: list[Any] = [t for t in tensors if isinstance(t, FakeTensor)]
    mode: Any = fakes[0].fake_mode if fakes else FakeTensorMode(allow_non_fake_inputs=True)
    mode._allow_unsafe_data_ptr_access = False
    tape = _Tape()
    fakes = [tape.take(mode, t) for t in tensors]
    with mode, tape:
        results = fn(*fakes)
    tape.give(results)
    return tape.taped


class _Tape(TorchDispatchMode):
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
        if func.namespace == "prim":  # a tensor's device, asked for
            return func(*args, **kwargs)
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
