"""Derivatives that PyTorch does not have, or gets wrong: fused attention, cuDNN's recurrent layers,
operators that it differentiates once, and average pooling on a GPU.

Attention: for the backward of every kernel of ``F.scaled_dot_product_attention``, in blocks or in
Triton, never an N×M matrix at once.

The backward gives (dq, dk, dv) = (∂O)*ξ. With cotangents (u_q, u_k, u_v) of these,

    ⟨u_q, dq⟩ + ⟨u_k, dk⟩ + ⟨u_v, dv⟩ = ⟨ξ, t⟩,    t the tangent of O along (u_q, u_k, u_v),

so ξ̄ = t, and q̄, k̄, v̄ are the curvature sources of ``kernels.attention``. O and the log-sum-exp
are functions of q, k, v here: their part is in q̄, k̄, v̄. The dropout of CUDA's kernels is found
by running them again from the random state that they kept. Third derivatives, forward mode and a
bias that itself takes a gradient go through the unfused kernel, in memory N·M.

Recurrent layers, LSTM, GRU and RNN of cuDNN: their backward through PyTorch's unfused cells, which
are twice differentiable. First derivatives stay cuDNN's.

Average pooling of images that lie channels-last: PyTorch's CUDA kernel of its *first* derivative is
wrong where windows overlap or reach over the edge. The kernel for images in rows is right, so that
one runs, and its result is laid out as asked.

The others: each has its backward written in differentiable steps; the second derivative is reverse
mode over these, of any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
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
from ..dtypes import accumulation
from ..kernels import CUDNN, EFFICIENT, FLASH, Dropout, attention_second, recovered
from .mechanism import (
    Applied,
    Arguments,
    Formula,
    Grads,
    Placement,
    Switch,
    again,
    below,
    plain,
    through,
)

# -------------------------------------------------------------------------------------- attention


aten = torch.ops.aten


def _mask(a: Arguments) -> Tensor | None:
    return a.get("attn_mask", a.get("attn_bias"))


def _cotangent_name(a: Arguments) -> str:
    return "grad_out" if "grad_out" in a else "grad_out_"


def _dropout(backend: int, a: Arguments) -> Dropout | None:
    if a["dropout_p"] == 0:
        return None
    state = a["philox_seed"], a["philox_offset"]
    return recovered(backend, a["dropout_p"], a["query"], a["key"], a["value"], *state)


def _second_of_attention(backend: int, call: Applied, cotangents: Grads) -> dict[str, Any]:
    a = call.arguments
    xi_name, names = _cotangent_name(a), ("query", "key", "value")
    bias = "attn_bias" in call.needed and call.needs("attn_bias")
    if bias or again(*a.values(), *cotangents):
        return through(partial(_composite_attention, backend), call, cotangents)
    q, k, v = (a[name] for name in names)
    t, sources = attention_second(
        a[xi_name], cotangents[0], cotangents[1], cotangents[2], q, k, v, a["out"], a["logsumexp"],
        mask=_mask(a), is_causal=a["is_causal"], scale=a["scale"], enable_gqa=True,
        wanted=[call.needs(n) for n in names], tangent=call.needs(xi_name),
        dropout=_dropout(backend, a),
    )  # fmt: skip
    return {xi_name: t, **dict(zip(names, sources, strict=True))}


def _composite_attention(backend: int, a: Arguments) -> tuple[Tensor | None, ...]:
    """The same backward by reverse mode through the unfused kernel."""
    q, k, v, mask = a["query"], a["key"], a["value"], _mask(a)
    group, dropout = q.shape[-3] // k.shape[-3], _dropout(backend, a)
    exact = accumulation(q.dtype)  # 1/(1 − p) is not rounded to 16 bits
    z = None if dropout is None else dropout.dense(k.shape[-2], exact)

    def out(q: Tensor, k: Tensor, v: Tensor, *bias: Tensor) -> Tensor:
        attended, p = aten._scaled_dot_product_attention_math(
            q, k, v, bias[0] if bias else mask, 0.0, a["is_causal"], scale=a["scale"],
            enable_gqa=group > 1,
        )  # fmt: skip
        return attended if z is None else (z * p).to(v.dtype) @ v.repeat_interleave(group, -3)

    wanted = a.get("grad_input_mask", (True, True, True))
    with_bias = len(wanted) == 4 and wanted[3]
    pull = torch.func.vjp(out, q, k, v, *([mask] if with_bias else []))[1]
    grads = (*pull(a[_cotangent_name(a)]), None)[: len(wanted)]
    return tuple(g if w else None for g, w in zip(grads, wanted, strict=True))


SCORES = 1 << 16  # as many are written down rather than recomputed in blocks


def _attention_steps(a: Arguments) -> tuple[Tensor, ...] | None:
    """dv = Pᵀξ, dS = P⊙(ξvᵀ − Σ P⊙ξvᵀ), dq = σ dS k, dk = σ dSᵀq, all of it for autograd to
    differentiate."""
    q, k, v, xi = a["query"], a["key"], a["value"], a[_cotangent_name(a)]
    (*batch, rows, width), keys = q.shape, k.shape[-2]
    plain = a["dropout_p"] == 0 and _mask(a) is None and k.shape[:-2] == q.shape[:-2]
    exact = q.dtype in (torch.float32, torch.float64)
    if not (plain and exact) or math.prod(batch) * rows * keys > SCORES:
        return None
    scale = a["scale"] if a["scale"] is not None else width**-0.5
    scores = (scale * q) @ k.mT
    if a["is_causal"]:
        seen = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    p = scores.softmax(-1)
    ds = aten._softmax_backward_data(xi @ v.mT, p, -1, p.dtype) * scale
    return ds @ k, ds.mT @ q, p.mT @ xi


def _accepts_attention(a: Arguments) -> bool:
    """Dense, of equal lengths in a batch, and with a dropout that can be had again."""
    tensors = (a["query"], a["key"], a["value"], a["out"], a["logsumexp"], _mask(a))
    ragged = a.get("cum_seq_q") is not None and a["cum_seq_q"].numel() > 0
    known = a["dropout_p"] == 0 or "philox_seed" in a
    return plain(*tensors) and not ragged and known and a["query"].dim() == 4


_WHY_ATTENTION = "PyTorch has no second derivative; by blocks, without an N×M matrix"

ATTENTION = [
    Formula(
        name,
        "attention",
        _WHY_ATTENTION,
        partial(_second_of_attention, backend),
        _accepts_attention,
        partial(_composite_attention, backend),
        derived=("out", "logsumexp"),
        steps=_attention_steps if "cpu" in name else None,
    )
    for name, backend in (
        ("_scaled_dot_product_flash_attention_for_cpu_backward", FLASH),
        ("_scaled_dot_product_flash_attention_backward", FLASH),
        ("_scaled_dot_product_efficient_attention_backward", EFFICIENT),
        ("_scaled_dot_product_cudnn_attention_backward", CUDNN),
    )
]


# ------------------------------------------------------------------------------- recurrent layers


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


def _composite_recurrent(a: Arguments) -> tuple[Tensor | None, ...]:
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
        bars: dict[str, Any] = {}
        if any(c is not None for c in cotangents):
            bars = through(_composite_recurrent, Applied(arguments, needed), cotangents)
        return (None, None, None, None, None, *(bars.get(name) for name in ctx.names))


def kernel(formula: Formula, stock: Any, switch: Switch) -> Callable:
    site, apply = Placement.of(formula, formula.overload()), getattr(_Backward, "apply")  # noqa: B009

    def run(keyset, *args, **kwargs):
        off = formula.family not in switch.on and switch.is_off(formula.family)
        if not off and torch.is_grad_enabled() and any_requires_grad(*args, **kwargs):
            a = site.arguments(args, kwargs)
            if _accepts_recurrent(a):
                switch.note(formula)
                tensors = [a[name] for name in _NAMES]
                flat = apply(site, keyset, a, args, kwargs, *tensors, *a["weight"])
                return (*flat[:3], list(flat[3:]))
        return stock.call_boxed(keyset, *args, **kwargs)

    return run


def _accepts_recurrent(a: Arguments) -> bool:
    """No dropout between layers, whose mask only cuDNN knows; no torch.func."""
    dropped = a["train"] and a["dropout"] > 0 and a["num_layers"] > 1
    return plain(a["input"]) and peek_interpreter_stack() is None and not dropped


RECURRENT = [
    Formula(
        "_cudnn_rnn_backward",
        "recurrent",
        "PyTorch has no second derivative; through its unfused cells",
        kernel=kernel,
    )
]


# ------------------------------------------------------------------------------------- the others


def _by_steps(
    operator: str, family: str, steps: Callable[[Arguments], Tensor], derived: tuple[str, ...] = ()
) -> Formula:
    def second(call: Applied, cotangents: Grads) -> dict[str, Any]:
        return through(steps, call, cotangents)

    def accepts(a: Arguments) -> bool:
        tensors = (t for t in a.values() if isinstance(t, Tensor))
        # a sparse or rescaled "gradient" of a bag is not the derivative that is meant here
        unlike = a.get("sparse", False) or a.get("scale_grad_by_freq", False)
        return plain(*tensors) and not unlike

    return Formula(operator, family, _WHY, second, accepts, steps, derived=derived)


_WHY = "PyTorch has no second derivative"


# ------------------------------------------------------------------------- activations


def _hardsigmoid(a: Arguments) -> Tensor:
    """dx = ξ⊙B(1, x), with B's own rounding of 1/6"""
    x = a["self"].detach()
    return a["grad_output"] * aten.hardsigmoid_backward(torch.ones_like(x), x)


# ---------------------------------------------------------------------- margin losses

_MEAN, _SUM = 1, 2  # at::Reduction


def _spread(a: Arguments, examples: int) -> Tensor:
    """ξ per example, with the mean's 1/n."""
    xi = a["grad_output"]
    xi = xi / examples if a["reduction"] == _MEAN else xi
    return xi.expand(examples) if a["reduction"] in (_MEAN, _SUM) else xi.reshape(examples)


def _multi_margin(a: Arguments) -> Tensor:
    """With z_j = m − x_y + x_j of p ∈ {1, 2}: dx_j = ξ w_y p z_j^{p−1}[z_j > 0]/C for j ≠ y, and
    dx_y = −Σ_j dx_j."""
    x, target = a["self"], a["target"].reshape(-1, 1)
    rows = x.reshape(target.shape[0], -1)
    z = a["margin"] - rows.gather(1, target) + rows
    slope = torch.ones_like(z) if a["p"] == 1 else 2 * z
    others = torch.ones_like(z).scatter(1, target, 0.0)
    xi = _spread(a, len(rows)).unsqueeze(1) / rows.shape[1]
    if a["weight"] is not None:
        xi = xi * a["weight"][target]
    part = torch.where(z > 0, slope, 0.0) * others * xi
    return part.scatter_add(1, target, -part.sum(1, keepdim=True)).reshape(x.shape)


def _multilabel_margin(a: Arguments) -> Tensor:
    """With labels y (up to the first −1) and N the others: dx = ξ/C Σ_{y, j ∈ N} (e_j − e_y) where
    1 − x_y + x_j > 0."""
    x = a["self"]
    classes = x.shape[-1] if x.dim() else 1
    rows, labels = x.reshape(-1, classes), a["target"].reshape(-1, classes)
    others = a["is_target"].reshape(rows.shape) == 0
    live = (labels >= 0).cumprod(1).bool()
    index = labels.clamp(min=0)
    z = 1 - rows.gather(1, index).unsqueeze(2) + rows.unsqueeze(1)  # (example, label, class)
    active = (z > 0) & live.unsqueeze(2) & others.unsqueeze(1)
    active = active.to(x.dtype)
    slope = active.sum(1).scatter_add(1, index, -active.sum(2))
    return (slope * _spread(a, len(rows)).unsqueeze(1) / classes).reshape(x.shape)


# --------------------------------------------- connectionist temporal classification

_NEVER = -1e30  # the logarithm of no probability, finite so that differences are


def _ctc(a: Arguments) -> Tensor:
    """dx_tc = ξ (e^{x_tc} − γ_tc) for log-probabilities x: PyTorch's derivative is that behind a
    log-softmax. γ_tc = ∂ log P/∂x_tc is the chance that class c stands at time t."""
    x, xi = a["log_probs"], a["grad"]
    steps = torch.as_tensor(a["input_lengths"], device=x.device)
    _, pull = torch.func.vjp(lambda x: _log_likelihood(a, x, steps), x)[:2]
    (occupied,) = pull(torch.ones(x.shape[1], dtype=x.dtype, device=x.device))
    slope = x.exp() - occupied
    within = torch.arange(x.shape[0], device=x.device).unsqueeze(1) < steps
    slope = torch.where(within.unsqueeze(2), slope, 0.0) * xi.reshape(1, -1, 1)
    impossible = a["neg_log_likelihood"].reshape(1, -1, 1).isinf()
    return torch.where(impossible, 0.0 if a["zero_infinity"] else math.nan, slope)


def _log_likelihood(a: Arguments, x: Tensor, steps: Tensor) -> Tensor:
    """log P(labels | x) per example, over all ways to place labels and blanks in between: with
    l = (blank, label, blank, …), α_t(s) = x_t(l_s) + log(e^{α(s)} + e^{α(s−1)} + [l_s is a label
    other than l_{s−2}] e^{α(s−2)}), all at t − 1."""
    labels, lengths = _padded_labels(a, x)
    width = 2 * labels.shape[1] + 1
    classes = torch.full((len(labels), width), a["blank"], dtype=torch.long, device=x.device)
    classes[:, 1::2] = labels
    skips = torch.zeros_like(classes, dtype=torch.bool)
    skips[:, 3::2] = labels[:, 1:] != labels[:, :-1]
    x = x.clamp(min=_NEVER)
    place = torch.arange(width, device=x.device)
    alpha = torch.where(place < 2, x[0].gather(1, classes), _NEVER)
    for t in range(1, x.shape[0]):
        one, two = (torch.constant_pad_nd(alpha[:, :-k], (k, 0), _NEVER) for k in (1, 2))
        two = torch.where(skips, two, _NEVER)
        moved = x[t].gather(1, classes) + torch.logsumexp(torch.stack([alpha, one, two]), 0)
        alpha = torch.where((t < steps).unsqueeze(1), moved, alpha)
    last = 2 * lengths.unsqueeze(1)
    ends = (place == last) | (place == last - 1)
    return torch.logsumexp(torch.where(ends, alpha, _NEVER), 1)


def _padded_labels(a: Arguments, x: Tensor) -> tuple[Tensor, Tensor]:
    """(labels (example, place), how many of them count)."""
    lengths = torch.as_tensor(a["target_lengths"], device=x.device)
    targets = a["targets"].to(x.device, torch.long)
    if targets.dim() == 2:
        labels = targets
    else:  # one after the other
        place = torch.arange(int(lengths.max()), device=x.device)
        start = (lengths.cumsum(0) - lengths).unsqueeze(1)
        labels = targets[(start + place).clamp(max=max(len(targets) - 1, 0))]
    within = torch.arange(labels.shape[1], device=x.device) < lengths.unsqueeze(1)
    return torch.where(within, labels, a["blank"]), lengths


# ----------------------------------------------------------------------- segments


def _segments(a: Arguments) -> Tensor:
    """dx_i = ξ_{s(i)} times 1, 1/n_s, [x_i is the largest]/(how many are), or Π_{j ≠ i} x_j over
    the segment s(i)."""
    x, axis, kind = a["data"], a["axis"], a["reduce"]
    offsets = a["offsets"]
    if offsets is None:
        offsets = torch.constant_pad_nd(a["lengths"].cumsum(-1), (1, 0))
    start, ends = offsets[..., :1], offsets[..., 1:]
    count = torch.arange(x.shape[axis], device=x.device).expand(*ends.shape[:-1], -1)
    segment = torch.searchsorted(ends.contiguous(), count.contiguous(), right=True)
    inside = (segment < ends.shape[-1]) & (count >= start)
    segment = segment.clamp(max=max(ends.shape[-1] - 1, 0))

    def wide(t: Tensor) -> Tensor:
        return t.reshape(*t.shape, *(1 for _ in x.shape[axis + 1 :])).expand(x.shape)

    def spread(t: Tensor) -> Tensor:
        return t.gather(axis, wide(segment))

    xi = torch.where(wide(inside), spread(a["grad"]), 0.0)
    if kind == "sum":
        return xi
    if kind == "mean":
        return xi / wide(offsets.diff().gather(-1, segment).clamp(min=1))
    if kind in ("max", "min"):
        hit = (x == spread(a["output"])).to(x.dtype)
        several = torch.zeros_like(a["grad"]).scatter_add(axis, wide(segment), hit)
        return xi * hit / spread(several).clamp(min=1)
    x = x.movedim(axis, -1)
    pairs = (segment.unsqueeze(-1) == segment.unsqueeze(-2)) & inside.unsqueeze(-2)
    pairs = pairs & ~torch.eye(x.shape[-1], dtype=torch.bool, device=x.device)
    pairs = pairs.reshape(*segment.shape[:-1], *(1 for _ in x.shape[axis:-1]), *pairs.shape[-2:])
    others = torch.where(pairs, x.unsqueeze(-2), 1.0).prod(-1)
    return xi * others.movedim(-1, axis) * (1.0 if a["initial"] is None else a["initial"])


# ----------------------------------------------------------------------- embedding bags

_BAG_MEAN, _BAG_MAX = 1, 2


def _bag_weights(a: Arguments) -> Tensor:
    """dW_v = Σ_{i: index_i = v} c_i ξ_{bag(i)}, or of the largest entry of each bag."""
    xi = a["grad"]
    zeros = xi.new_zeros(a["num_weights"], xi.shape[1])
    if a["mode"] == _BAG_MAX:
        filled = (a["bag_size"] > 0).unsqueeze(1)
        return zeros.scatter_add(0, a["maximum_indices"], torch.where(filled, xi, 0.0))
    indices, bags = a["indices"], _bags(a)
    c = xi.new_ones(len(indices)) if a["per_sample_weights"] is None else a["per_sample_weights"]
    if a["mode"] == _BAG_MEAN:
        c = c / a["bag_size"][bags]
    c = torch.where(indices == a["padding_idx"], 0.0, c)
    return zeros.index_add(0, indices, c.unsqueeze(1) * xi[bags])


def _bag_samples(a: Arguments) -> Tensor:
    """dc_i = ⟨ξ_{bag(i)}, W_{index_i}⟩"""
    indices = a["indices"]
    products = (a["grad"][_bags(a)] * a["weight"][indices]).sum(1)
    return torch.where(indices == a["padding_idx"], 0.0, products)


def _bags(a: Arguments) -> Tensor:
    """bag(i), from the bags' first places where the forward left it out."""
    indices, bags = a["indices"], a["offset2bag"]
    if bags.numel() == indices.numel():
        return bags
    starts = a["offsets"][a["offsets"] < len(indices)].long()
    begun = torch.zeros(len(indices), dtype=torch.long, device=indices.device)
    return begun.index_add(0, starts, torch.ones_like(starts)).cumsum(0) - 1


# ---------------------------------------------------------------------------- distances


def _slope(difference: Tensor, p: float) -> Tensor:
    """∂‖δ‖_p/∂δ over the last axis, 0 where the distance is not differentiable by itself."""
    if p == 0:
        return torch.zeros_like(difference)
    if p == 1:
        return difference.sign()
    size = difference.abs()
    if p == math.inf:
        return difference.sign() * (size == size.amax(-1, keepdim=True))
    apart = size > 0
    size = torch.where(apart, size, 1.0)  # powers of 0 have no derivative to give
    total = torch.where(apart, size**p, 0.0).sum(-1, keepdim=True)
    total = torch.where(total > 0, total, 1.0)
    slope = difference.sign() * size ** (p - 1) * total ** (1 / p - 1)
    return torch.where(apart, slope, 0.0)


def _cdist(a: Arguments) -> Tensor:
    """dx_i = Σ_j ξ_ij ∂‖x_i − y_j‖_p"""
    if a["x1"].numel() == 0 or a["x2"].numel() == 0:
        return torch.zeros_like(a["x1"])
    difference = a["x1"].unsqueeze(-2) - a["x2"].unsqueeze(-3)
    return (a["grad"].unsqueeze(-1) * _slope(difference, a["p"])).sum(-2)


def _pdist(a: Arguments) -> Tensor:
    """dx_i = Σ_{j > i} ξ_ij ∂‖x_i − x_j‖_p − Σ_{j < i} …"""
    x = a["self"]
    i, j = torch.triu_indices(len(x), len(x), 1, device=x.device)
    part = a["grad"].unsqueeze(-1) * _slope(x[i] - x[j], a["p"])
    return torch.zeros_like(x).index_add(0, i, part).index_add(0, j, -part)


OTHERS = [
    _by_steps("hardsigmoid_backward", "activation", _hardsigmoid),
    _by_steps("multi_margin_loss_backward", "loss", _multi_margin),
    _by_steps("multilabel_margin_loss_backward", "loss", _multilabel_margin),
    *(
        _by_steps(f"_ctc_loss_backward{way}", "loss", _ctc, ("neg_log_likelihood", "log_alpha"))
        for way in ("", ".Tensor")
    ),
    _by_steps("_segment_reduce_backward", "reduction", _segments, ("output",)),
    _by_steps("_embedding_bag_backward", "embedding", _bag_weights),
    _by_steps("_embedding_bag_dense_backward", "embedding", _bag_weights),
    _by_steps("_embedding_bag_per_sample_weights_backward", "embedding", _bag_samples),
    _by_steps("_cdist_backward", "distance", _cdist),
    _by_steps("_pdist_backward", "distance", _pdist),
]


# ---------------------------------------------------------------------------------------- pooling


def wrong(x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> bool:
    """Whether PyTorch would choose that kernel, for windows at which it is wrong."""
    if x.dim() != 4 or x.shape[1] == 1 or (x.is_contiguous() and x.stride(1) != 1):
        return False
    kernel = _sizes(kernel)
    return any(padding) or any(s < k for s, k in zip(_sizes(stride) or kernel, kernel, strict=True))


def _sizes(sizes: Sequence[int]) -> Sequence[int]:
    return [*sizes, *sizes] if len(sizes) == 1 else sizes


def in_rows(backward: Callable[..., Tensor], grad: Tensor, x: Tensor, *options: Any) -> Tensor:
    """The derivative of `backward`, of which x gives the shape alone, by its kernel for rows."""
    grad = grad.contiguous()
    unread = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return backward(grad, unread, *options).contiguous(memory_format=torch.channels_last)


def _pooling_kernel(formula: Formula, stock: Any, switch: Switch) -> Callable:
    call_stock = stock.call_boxed

    def kernel(keyset, grad, x, kernel_size, stride, padding, *options):
        sizes = (kernel_size, stride, padding)
        if not wrong(x, *sizes):
            return call_stock(keyset, grad, x, *sizes, *options)
        return in_rows(lambda *args: call_stock(keyset, *args), grad, x, *sizes, *options)

    return kernel


POOLING = [
    Formula(
        "avg_pool2d_backward",
        "pooling",
        "PyTorch's CUDA kernel is wrong for channels-last images with overlapping windows",
        armed_by="patch",
        keys=("AutogradCUDA",),
        kernel=_pooling_kernel,
    )
]
