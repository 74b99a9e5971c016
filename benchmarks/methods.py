"""Every way to take one training step that the benchmarks compare.

A method is built once for a network and an example batch, and then called as `step(x, y)`. A step
leaves the gradient of

    mean_i ℓ_i + weight · mean_i ‖∂(Σ_j ℓ_j)/∂x_i‖²        (ℓ: cross entropy; plain steps: weight 0)

in the parameters' `.grad` and returns (loss, penalty), the penalty being None for plain steps.

Suffixes make variants of a method: 'channels-last' (network and inputs in that memory format) and
'CUDA graph' (the whole step captured once and replayed).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]

CHANNELS_LAST, CUDA_GRAPH = " channels-last", " CUDA graph"


@dataclass(frozen=True)
class Method:
    """`build(net, x, y, weight)` makes the step; `compiled` says whether a first call compiles.

    `peer` marks other libraries' double backward, slow to compile on heavy nets. Whoever builds,
    calls and times the step does so inside `around()`.
    """

    build: Callable[[nn.Module, Tensor, Tensor, float], Step]
    compiled: bool = False
    penalised: bool = True
    peer: bool = False
    around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


def math_attention() -> contextlib.AbstractContextManager:
    """The only attention kernel of PyTorch with a second derivative."""
    return sdpa_kernel(SDPBackend.MATH)


def objective(forward: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """(mean ℓ_i, mean ‖∂x_i‖²), both differentiable, by autograd's double backward."""
    x = x.detach().requires_grad_()
    losses = F.cross_entropy(forward(x), y, reduction="none")
    (gradient,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
    return losses.mean(), gradient.float().square().flatten(1).sum(1).mean()


# --- plain training -------------------------------------------------------------------------------


def _plain(net: nn.Module, x: Tensor, y: Tensor, weight: float) -> Step:
    def step(x, y):
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        return loss.detach(), None

    return step


def _plain_compiled(net: nn.Module, x: Tensor, y: Tensor, weight: float) -> Step:
    compiled = torch.compile(lambda x, y: F.cross_entropy(net(x), y), fullgraph=True, dynamic=False)

    def step(x, y):
        loss = compiled(x, y)
        loss.backward()
        return loss.detach(), None

    return step


# --- other people's double backward ---------------------------------------------------------------


def _stock(net: nn.Module, x: Tensor, y: Tensor, weight: float) -> Step:
    def step(x, y):
        with math_attention():
            loss, penalty = objective(net, x, y)
            (loss + weight * penalty).backward()
        return loss.detach(), penalty.detach()

    return step


def _patched(net: nn.Module, x: Tensor, y: Tensor, weight: float) -> Step:
    """Stock's loop; the library's derivatives are in it from outside."""

    def step(x, y):
        loss, penalty = objective(net, x, y)
        (loss + weight * penalty).backward()
        return loss.detach(), penalty.detach()

    return step


def _patch() -> contextlib.AbstractContextManager:
    import doubleback as db

    return db.patched()


def _give(net: nn.Module, names: list[str], gradients) -> None:
    """Hand functional gradients to the parameters, as `.backward()` would."""
    for name, gradient in zip(names, gradients, strict=True):
        net.get_parameter(name).grad = gradient


def _torch_func(net: nn.Module, x: Tensor, y: Tensor, weight: float) -> Step:
    """torch.func.grad of a function that holds torch.func.grad, compiled as one graph."""
    names = [name for name, _ in net.named_parameters()]

    def total(parameters, buffers, x, y):
        def losses(x):
            # The forward updates these copies: a transform may not write to what it captured.
            state = {name: buffer.clone() for name, buffer in buffers.items()}
            each = F.cross_entropy(
                functional_call(net, (parameters, state), (x,)), y, reduction="none"
            )
            return each.sum(), (each.mean(), state)

        gradient, (loss, state) = torch.func.grad(losses, has_aux=True)(x)
        penalty = gradient.float().square().flatten(1).sum(1).mean()
        return loss + weight * penalty, (loss, penalty, state)

    compiled = torch.compile(torch.func.grad(total, has_aux=True), fullgraph=True, dynamic=False)

    def step(x, y):
        parameters = {name: p.detach() for name, p in net.named_parameters()}
        buffers = dict(net.named_buffers())
        with math_attention(), torch.no_grad():
            gradients, (loss, penalty, state) = compiled(parameters, buffers, x, y)
            for name, value in state.items():
                buffers[name].copy_(value)
        _give(net, names, [gradients[name] for name in names])
        return loss, penalty

    return step


def _make_fx(net: nn.Module, x: Tensor, y: Tensor, weight: float) -> Step:
    """Autograd's double backward, traced to one ATen graph and compiled by Inductor."""
    from torch.fx.experimental.proxy_tensor import make_fx

    names = [name for name, _ in net.named_parameters()]
    buffers = dict(net.named_buffers())

    def pure(parameters, state, x, y):
        parameters = [p.detach().requires_grad_() for p in parameters]
        values = dict(zip(names, parameters, strict=True)) | dict(zip(buffers, state, strict=True))
        loss, penalty = objective(lambda x: functional_call(net, values, (x,)), x, y)
        gradients = torch.autograd.grad(loss + weight * penalty, parameters)
        return [loss.detach(), penalty.detach(), *(g.detach() for g in gradients)]

    counts = len(names), len(buffers)

    def flat(*tensors):
        parameters, state = tensors[: counts[0]], tensors[counts[0] : sum(counts)]
        return pure(parameters, state, tensors[-2], tensors[-1])

    def inputs(x, y):
        return [*(p.detach() for p in net.parameters()), *buffers.values(), x, y]

    with math_attention():
        graph = make_fx(flat, tracing_mode="fake")(*inputs(x, y))
    compiled = torch.compile(graph, fullgraph=True, dynamic=False)

    def step(x, y):
        with torch.no_grad():
            loss, penalty, *gradients = compiled(*inputs(x, y))
        _give(net, names, gradients)
        return loss, penalty

    return step


def _make_fx_patched(net: nn.Module, x: Tensor, y: Tensor, weight: float) -> Step:
    """The same, traced through doubleback's replaced second derivatives."""
    import doubleback as db

    with db.patched():
        return _make_fx(net, x, y, weight)


# --- doubleback -----------------------------------------------------------------------------------


@cache
def _model(net: nn.Module, compiled: bool, recompute: bool | None) -> nn.Module:
    """One for all methods that differ in how it is called: it is compiled once."""
    import doubleback as db

    loss = db.LossGradient("cross_entropy")
    return db.Penalised(net, loss, compile=compiled, recompute=recompute)


def _doubleback(
    compiled: bool, one_shot: bool, graphed: bool = False, recompute: bool | None = None
) -> Callable[..., Step]:
    def build(net: nn.Module, x: Tensor, y: Tensor, weight: float) -> Step:
        model: Any = _model(net, compiled, recompute)

        def two_calls(x, y):
            model.cuda_graph = graphed
            out, penalty = model(x, y)
            loss = F.cross_entropy(out, y)
            (loss + weight * penalty).backward()
            return loss.detach(), penalty.detach()

        def one_call(x, y):
            model.cuda_graph = graphed
            _, loss, penalty = model.accumulate(x, y, loss="cross_entropy", weight=weight)
            return loss, penalty

        return one_call if one_shot else two_calls

    return build


METHODS: dict[str, Method] = {
    "plain": Method(_plain, penalised=False),
    "plain compiled": Method(_plain_compiled, compiled=True, penalised=False),
    "stock": Method(_stock),
    "patched": Method(_patched, around=_patch),
    "doubleback": Method(_doubleback(compiled=False, one_shot=False)),
    "doubleback graphed": Method(_doubleback(False, one_shot=False, graphed=True)),
    "accumulate": Method(_doubleback(compiled=False, one_shot=True)),
    "accumulate graphed": Method(_doubleback(False, one_shot=True, graphed=True)),
    "doubleback compiled": Method(_doubleback(compiled=True, one_shot=False), compiled=True),
    "doubleback compiled graphed": Method(
        _doubleback(True, one_shot=False, graphed=True), compiled=True
    ),
    "accumulate compiled": Method(_doubleback(compiled=True, one_shot=True), compiled=True),
    "accumulate compiled graphed": Method(
        _doubleback(True, one_shot=True, graphed=True), compiled=True
    ),
    "accumulate compiled recompute": Method(
        _doubleback(True, one_shot=True, recompute=True), compiled=True
    ),
    "accumulate compiled recompute graphed": Method(
        _doubleback(True, one_shot=True, graphed=True, recompute=True), compiled=True
    ),
    "torch.func compiled": Method(_torch_func, compiled=True, peer=True),
    "make_fx + inductor": Method(_make_fx, compiled=True, peer=True),
    "make_fx + inductor patched": Method(_make_fx_patched, compiled=True, peer=True),
}

DEFAULT = [
    *(
        name + layout + graph
        for name in ("plain", "plain compiled")
        for layout in ("", CHANNELS_LAST)
        for graph in ("", CUDA_GRAPH)
    ),
    "stock",
    "stock" + CHANNELS_LAST,
    "patched",
    "patched" + CHANNELS_LAST,
    "doubleback",
    "doubleback graphed",
    "accumulate",
    "accumulate graphed",
    "doubleback compiled",
    "doubleback compiled graphed",
    "accumulate compiled",
    "accumulate compiled graphed",
    "accumulate compiled recompute",
    "accumulate compiled recompute graphed",
    "torch.func compiled",
    "make_fx + inductor",
    "make_fx + inductor patched",
]


def slug(method: str) -> str:
    """The method's name on a command line.

    >>> slug("make_fx + inductor"), slug("plain channels-last")
    ('make-fx-inductor', 'plain-channels-last')
    """
    return re.sub("[^a-z0-9]+", "-", method.lower())


def known() -> dict[str, str]:
    """Slug → name, for every method with every suffix."""
    names: list[str] = []
    for name in METHODS:
        names += [
            name + layout + graph for layout in ("", CHANNELS_LAST) for graph in ("", CUDA_GRAPH)
        ]
    return {slug(name): name for name in names}


def parse(method: str) -> tuple[Method, bool, bool]:
    """(base method, channels-last?, CUDA graph?) of a full name.

    >>> parse("plain channels-last")[1:]
    (True, False)
    """
    base = method.removesuffix(CUDA_GRAPH)
    graph = base != method
    layout = base.endswith(CHANNELS_LAST)
    return METHODS[base.removesuffix(CHANNELS_LAST)], layout, graph


def captures(method: str) -> bool:
    """Whether a method keeps a CUDA graph.

    >>> captures("plain CUDA graph"), captures("accumulate graphed"), captures("plain")
    (True, True, False)
    """
    return method.endswith((CUDA_GRAPH, " graphed"))


def launch(method: str) -> tuple[bool, bool]:
    """(compiled?, CUDA graph?): what two methods share whose times may be compared.

    >>> launch("accumulate compiled graphed") == launch("plain compiled CUDA graph")
    True
    """
    return parse(method)[0].compiled, captures(method)


def capture(step: Step, net: nn.Module, x: Tensor, y: Tensor) -> Step:
    """`step` as one CUDA graph. Gradients live in the graph's memory and are written anew."""
    if not x.is_cuda:
        raise ValueError("a CUDA graph needs a CUDA device")
    x_static, y_static = x.clone(), y.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            net.zero_grad(set_to_none=True)
            step(x_static, y_static)
    torch.cuda.current_stream().wait_stream(stream)
    net.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, penalty = step(x_static, y_static)
    gradients = [(p, p.grad) for p in net.parameters()]

    def replay(x, y):
        x_static.copy_(x)
        y_static.copy_(y)
        graph.replay()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        return loss, penalty

    return replay


def build(method: str, net: nn.Module, x: Tensor, y: Tensor, weight: float) -> Step:
    """The step of a method by its full name. `net` and `x` already have the method's layout."""
    base, _, graph = parse(method)
    step = base.build(net, x, y, weight)
    return capture(step, net, x, y) if graph else step
