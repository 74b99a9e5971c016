"""The network while it is captured, and what would be missing from its graph.

A graph holds the operators that the forward pass calls. What a network does to its gradients apart
from them (an `autograd.Function` with a backward of its own, hooks on gradients) would be lost
without a word, hooks that only look on would not be called, and what is drawn outside PyTorch's
generators would never change again. So all are refused: such a network runs on autograd.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import BackwardCFunction
from torch.utils import _pytree as pytree

OWN = frozenset(vars(nn.Module()))  # what every module has: its parameters, hooks and so on


class Holder(nn.Module):
    """Holds the network under one name, so that no name inside it (`code`, `graph`) can clash
    with an attribute of the exported module."""

    def __init__(self, held: nn.Module) -> None:
        super().__init__()
        self.held = held
        self.training = held.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for name, module in self.held.named_modules():
            if module._backward_hooks or module._backward_pre_hooks:
                text = f"the backward hook of {name or 'the network'} sees gradients that sweeps"
                raise RuntimeError(f"{text} do not pass")
        with _refused_hooks(), _refused_draws(), _assignments(self.held), _lookers_on(self.held):
            result = self.held(*args, **kwargs)
        _refuse_functions(result)
        return result


def inside(name: str) -> str:
    """A qualified name as the network itself has it."""
    return name.removeprefix("held.")


Snapshot = list[tuple[Tensor, int, Tensor]]


def snapshot(values: Iterable[Any]) -> Snapshot:
    """The plain tensors among these, with what they hold now."""
    plain = (t for t in values if type(t) is Tensor and not t.is_inference())
    return [(t, t._version, t.detach().clone()) for t in plain]


def restore(before: Snapshot) -> list[Tensor]:
    """Those that were written to since, now what they were."""
    written = [(t, numbers) for t, version, numbers in before if t._version != version]
    for t, numbers in written:
        t.detach().copy_(numbers)
    return [t for t, _ in written]


@contextmanager
def untouched(net: nn.Module) -> Iterator[None]:
    """Attributes of modules stay what they are: tensors that are no buffers, which the network may
    have written to before that was a reason to refuse it, and lists and dictionaries, which
    torch.export leaves copies of, whoever else holds them."""
    kept = [
        (vars(module), name, value, value.copy())
        for module in net.modules()
        for name, value in vars(module).items()
        if type(value) in (list, dict) and name not in OWN
    ]
    before = snapshot(t for module in net.modules() for t in vars(module).values())
    try:
        yield
    finally:
        restore(before)
        for attributes, name, value, items in kept:
            value.clear()
            (value.update if type(value) is dict else value.extend)(items)
            attributes[name] = value


@contextmanager
def _assignments(net: nn.Module) -> Iterator[None]:
    """Tensors that the network assigns to its modules. A buffer that was there is written in place,
    which a graph can tell; what is new (features, a mask for later) holds no numbers, and goes."""
    before = [(m, dict(m._buffers), set(vars(m))) for m in net.modules()]
    try:
        yield
        for module, buffers, _ in before:
            for name, old in buffers.items():
                new = module._buffers.get(name)
                if old is None or new is None or new is old:
                    continue
                if (new.shape, new.dtype) != (old.shape, old.dtype):
                    raise RuntimeError(f"it changes the shape or the dtype of its buffer {name!r}")
                old.copy_(new.detach())
    finally:
        for module, buffers, names in before:
            module._buffers.clear()
            module._buffers.update(buffers)
            for name in vars(module).keys() - names:
                if isinstance(vars(module)[name], FakeTensor):
                    delattr(module, name)


def _refuse_functions(result: Any) -> None:
    """No `autograd.Function` among what the result depends on: its backward is Python code, which
    no operator of the graph tells."""
    for node in behind(t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)):
        own = type(node).__name__.startswith("GeneratedBackwardFor_")  # of a custom operator
        if isinstance(node, BackwardCFunction) and not own:
            name = type(node).__name__.removesuffix("Backward")
            raise RuntimeError(
                f"the autograd.Function {name} has a backward of its own, which is not captured; "
                "torch.library.custom_op and register_autograd make it an operator that is"
            )


def behind(tensors: Iterable[Tensor]) -> Iterator[Any]:
    """Every node of autograd's graph that these tensors come from."""
    stack = [t.grad_fn for t in tensors if t.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        new = {parent for parent, _ in node.next_functions if parent is not None} - seen
        seen |= new
        stack.extend(new)


@contextmanager
def _refused_hooks() -> Iterator[None]:
    """No `register_hook` on a tensor of the network, in this thread."""
    thread, usual = threading.get_ident(), Tensor.register_hook

    def refuse(self: Tensor, hook: Any) -> Any:
        if threading.get_ident() != thread:
            return usual(self, hook)
        raise RuntimeError("register_hook on a tensor changes or sees gradients unknown to sweeps")

    with _holding:
        Tensor.register_hook = refuse  # type: ignore[method-assign]
        try:
            yield
        finally:
            Tensor.register_hook = usual  # type: ignore[method-assign]


@contextmanager
def _lookers_on(net: nn.Module) -> Iterator[None]:
    """No forward hook that returns nothing: it is there to store or print what it sees, and no
    graph would call it again."""
    hooks = [
        (module._forward_hooks, key, hook, name)
        for name, module in net.named_modules()
        for key, hook in module._forward_hooks.items()
    ]
    for place, key, hook, name in hooks:
        place[key] = _answering(hook, name or "the network")
    try:
        yield
    finally:
        for place, key, hook, _ in hooks:
            if key in place:  # it may have removed itself
                place[key] = hook


def _answering(hook: Any, whose: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = hook(*args, **kwargs)
        if result is None:
            raise RuntimeError(
                f"the forward hook of {whose} returns nothing, so it is there to look on, and "
                "sweeps would not call it; remove it for speed"
            )
        return result

    return call


_holding = threading.RLock()  # a network may hold one that is captured meanwhile


@contextmanager
def _refused_draws() -> Iterator[None]:
    """No number from Python's or NumPy's generator, both of which are left as they were."""
    numpy: Any = sys.modules.get("numpy.random") or _NoNumpy
    python, array = random.getstate(), numpy.get_state()
    try:
        yield
        if random.getstate() != python or str(numpy.get_state()) != str(array):
            raise RuntimeError(
                "it draws from Python's or NumPy's random numbers, which a graph would hold; draw "
                "with torch"
            )
    finally:
        random.setstate(python)
        numpy.set_state(array)


class _NoNumpy:
    """Nothing was drawn from a library that nobody imported."""

    @staticmethod
    def get_state() -> None:
        return None

    @staticmethod
    def set_state(state: None) -> None:
        return None
