"""LSTM, GRU and RNN of cuDNN: their backward through PyTorch's unfused cells, which are twice
differentiable. First derivatives stay cuDNN's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torch import (
    VF,
    SingleLevelFunction,
    any_requires_grad,
    get_cudnn_enabled,
    peek_interpreter_stack,
    set_cudnn_enabled,
)
from .node import Applied, Formula, Placement, below, plain, through

Arguments = dict[str, Any]
_CELLS = ("rnn_relu", "rnn_tanh", "lstm", "gru")  # by cuDNN's number of the mode
_LSTM = 2
_NAMES = ("input", "hx", "cx", "grad_output", "grad_hy", "grad_cy")


@contextmanager
def _without_cudnn() -> Iterator[None]:
    before = get_cudnn_enabled()
    set_cudnn_enabled(False)
    try:
        yield
    finally:
        set_cudnn_enabled(before)


def _weights(a: Arguments) -> list[Tensor]:
    return [a[name] for name in a if name.startswith("weight ")]


def _run(a: Arguments, x: Tensor, hx: Tensor, cx: Tensor | None, weights: Sequence[Tensor]):
    """(output, h[, c]) of the whole network, all layers and directions."""
    if a["batch_sizes"]:
        return _run_packed(a, x, hx, cx, weights)
    state = (hx, cx) if a["mode"] == _LSTM else hx
    options = (a["weight_stride0"] >= 4, a["num_layers"], 0.0, a["train"], a["bidirectional"])
    cell: Callable = getattr(VF, _CELLS[a["mode"]])
    with _without_cudnn():
        return cell(x, state, list(weights), *options, a["batch_first"])


def _run_packed(a: Arguments, x: Tensor, hx: Tensor, cx: Tensor | None, weights: Sequence[Tensor]):
    """The same for x (Σ batch_sizes, ·), which holds at each time the sequences that still run."""
    states = list(zip(*(s.unbind() for s in (hx, cx) if s is not None), strict=True))
    per, directions = a["weight_stride0"], 1 + a["bidirectional"]
    cell = _lstm_cell if a["mode"] == _LSTM else _cell(a["mode"])
    last = []
    for layer in range(0, len(states), directions):
        steps, outputs = x.split(list(a["batch_sizes"])), []
        for i, way in zip(range(layer, layer + directions), (1, -1), strict=False):
            own = weights[i * per : (i + 1) * per]
            output, state = _along(cell, steps[::way], states[i], own)
            outputs.append(torch.cat(output[::way]))
            last.append(state)
        x = torch.cat(outputs, -1)
    return (x, *(torch.stack(s) for s in zip(*last, strict=True)))


def _along(cell: Callable, steps: Sequence[Tensor], state: tuple[Tensor, ...], weights):
    """Outputs and last state. Longer sequences come first, so step x moves the first len(x) rows of
    the state; the others have ended, or (backwards) not begun."""
    outputs = []
    for x in steps:
        n = x.shape[0]
        moved = cell(x, tuple(s[:n] for s in state), *weights)
        outputs.append(moved[0])
        state = tuple(torch.cat([m, s[n:]]) for m, s in zip(moved, state, strict=True))
    return outputs, state


def _cell(mode: int) -> Callable:
    cell: Callable = getattr(VF, f"{_CELLS[mode]}_cell")
    return lambda x, state, *weights: (cell(x, *state, *weights),)


def _lstm_cell(x: Tensor, state: tuple[Tensor, Tensor], w_ih: Tensor, w_hh: Tensor, *rest: Tensor):
    """(h, c); `rest` is the biases, if any, and the projection of h, if any."""
    if len(rest) % 2 == 0:
        return VF.lstm_cell(x, state, w_ih, w_hh, *rest)
    *biases, projection = rest
    b_ih, b_hh = biases or (None, None)
    h, c = state
    i, f, g, o = (F.linear(x, w_ih, b_ih) + F.linear(h, w_hh, b_hh)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return F.linear(o.sigmoid() * c.tanh(), projection), c


def _composite(a: Arguments) -> tuple[Tensor | None, ...]:
    """(dx, dh, dc, *dθ) of the cotangents of output, h and c."""
    lstm, weights = a["mode"] == _LSTM, _weights(a)

    def run(x: Tensor, hx: Tensor, *rest: Tensor):
        cx, parameters = (rest[0], rest[1:]) if lstm else (None, rest)
        return _run(a, x, hx, cx, parameters)

    states = (a["hx"], a["cx"]) if lstm else (a["hx"],)
    values, pull = torch.func.vjp(run, a["input"], *states, *weights)[:2]
    seeds = [a[name] for name in _NAMES[3 : 3 + len(values)]]
    seeds = [torch.zeros_like(v) if s is None else s for v, s in zip(values, seeds, strict=True)]
    dx, dh, *rest = pull(tuple(seeds))
    dc, parameters = (rest[0], rest[1:]) if lstm else (None, rest)
    wanted = (*a["output_mask"][:3], *([a["output_mask"][3]] * len(parameters)))
    return tuple(g if w else None for g, w in zip((dx, dh, dc, *parameters), wanted, strict=True))


class _Backward(SingleLevelFunction):
    """`_cudnn_rnn_backward` with its lists spread out."""

    @staticmethod
    def forward(ctx, site, keyset, arguments, args, kwargs, *tensors):
        dx, dh, dc, weights = below(site.op, keyset, args, kwargs)
        names = [*_NAMES, *(f"weight {i}" for i in range(len(tensors) - len(_NAMES)))]
        ctx.names, ctx.options = names, {n: arguments[n] for n in site.options}
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return (dx, dh, dc, *weights)

    @staticmethod
    def backward(ctx, *cotangents):
        needed = dict(zip(ctx.names, ctx.needs_input_grad[5:], strict=True))
        arguments = ctx.options | dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        found: dict[str, Any] = {}
        if any(c is not None for c in cotangents):
            found = through(_composite, Applied(arguments, needed), cotangents)
        return (None, None, None, None, None, *(found.get(name) for name in ctx.names))


def kernel(formula: Formula, stock: Any) -> Callable:
    site, apply = Placement.of(formula, formula.overload()), getattr(_Backward, "apply")  # noqa: B009

    def run(keyset, *args, **kwargs):
        if torch.is_grad_enabled() and any_requires_grad(*args, **kwargs):
            a = site.arguments(args, kwargs)
            if _accepts(a):
                tensors = [a[name] for name in _NAMES]
                flat = apply(site, keyset, a, args, kwargs, *tensors, *a["weight"])
                return (*flat[:3], list(flat[3:]))
        return stock.call_boxed(keyset, *args, **kwargs)

    return run


def _accepts(a: Arguments) -> bool:
    """No dropout between layers, whose mask only cuDNN knows; no torch.func."""
    dropped = a["train"] and a["dropout"] > 0 and a["num_layers"] > 1
    return plain(a["input"]) and peek_interpreter_stack() is None and not dropped


FORMULAS = [
    Formula(
        "_cudnn_rnn_backward",
        "recurrent",
        "PyTorch has no second derivative; through its unfused cells",
        kernel=kernel,
    )
]
