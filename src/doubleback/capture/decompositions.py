"""Operators that the sweeps take in parts: recurrent layers, attention with dropout and the like,
written as the products, activations and draws that they are made of."""

from __future__ import annotations

from typing import Any

import torch

from .._torch import decomposition_table
from ..errors import CaptureError
from ..rules import stop_gradient

aten = torch.ops.aten


def decompositions() -> dict:
    """Recurrent layers become cells; attention with dropout, GLU, dropout variants and named
    paddings become the products, activations and pads they are made of."""
    chosen: dict[Any, Any] = {
        op: _recurrent(decomposition_table[op]) for op in RECURRENT if op in decomposition_table
    }
    chosen[aten.scaled_dot_product_attention.default] = _attention_products
    chosen[aten.glu.default] = _glu
    chosen[aten.instance_norm.default] = _instance_norm
    chosen[aten.empty.memory_format] = _filled(aten.zeros.default)
    chosen[aten.new_empty.default] = aten.new_zeros.default
    chosen[aten.empty_like.default] = aten.zeros_like.default
    chosen[aten.as_strided.default] = _as_strided
    chosen[aten.as_strided_scatter.default] = _as_strided_scatter
    for name in ("feature_dropout", "alpha_dropout", "feature_alpha_dropout"):
        chosen[getattr(aten, name).default] = _dropout_variant(name)
    for n in (1, 2, 3):
        chosen[getattr(aten, f"conv{n}d").padding] = _padded_convolution(n)
    return chosen


RECURRENT = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)


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
        shape = x.shape[:2] + (1,) * (x.dim() - 2) if "feature" in name else x.shape
        keep = torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(1 - p)
        if "alpha" not in name:
            return x * (keep / (1 - p))
        alpha = 1.7580993408473766  # λα of SELU, the value of a dropped unit
        a = (1 / (1 - p) / (1 + p * alpha**2)) ** 0.5 if p < 1 else 0.0
        return x * (keep * a) + ((keep - 1) * (alpha * a) + alpha * a * p)

    return decomposed


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
