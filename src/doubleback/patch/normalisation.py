"""Layer, group, batch, instance and RMS norm: second derivatives by one closed form (theory §2).

Their backward gives dx = rP(w⊙ξ), dw = Σ ξ⊙x̂, db = Σξ. With cotangents u, τ, β of these,

    ξ̄ = w⊙rP(u) + τ⊙x̂ + β,    x̄ = s_x + rP(τ⊙ξ),    w̄ = s_w

with the tangent w⊙rP(u) and the sources s_x, s_w of ``kernels.standardisation``. Third derivatives
and forward mode take μ and r as functions of x in plain operations; PyTorch takes them as constants
there and is wrong without a word (pytorch issues 196699, 196700).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._torch import peek_interpreter_stack
from ..kernels import (
    Groups,
    Point,
    affine,
    standardise_again,
    standardise_backward,
    standardise_second,
    statistics,
)
from .node import Applied, Formula, Grads, again, below, is_dual, last, plain, through

aten = torch.ops.aten
Arguments = dict[str, Any]


# --------------------------------------------------------- where the derivative is taken


def _first(a: Arguments, *names: str) -> Any:
    for name in names:
        if name in a:
            return a[name]
    raise KeyError(names)


def _xi_name(a: Arguments) -> str:
    return "grad_out" if "grad_out" in a else "grad_output"


_BATCH = Groups.batch_norm()


def _groups(a: Arguments) -> Groups:
    if "normalized_shape" in a:
        make = Groups.layer_norm if "bias" in a else Groups.rms_norm
        return make(a["normalized_shape"])
    return Groups.group_norm(a["group"]) if "group" in a else _BATCH


def _rstd(a: Arguments) -> Any:
    return _first(a, "rstd", "save_invstd", "save_var")


def _point(a: Arguments) -> Point:
    mean = a.get("mean", a.get("save_mean"))
    return Point(_groups(a), a["input"], mean, _rstd(a), a["weight"])


def _trains(a: Arguments) -> bool:
    """Batch norm in eval has constant statistics."""
    return a.get("train", a.get("update", True))


# ----------------------------------------------------------------- statistics of the batch


def _second(call: Applied, cotangents: Grads) -> dict[str, Any]:
    a = call.arguments
    if not _trains(a):
        return _second_in_eval(call, cotangents)
    if not last() and again(*a.values(), *cotangents):
        return through(_composite, call, cotangents)
    name, at = _xi_name(a), _point(a)
    xi, (u, tau, beta) = a[name], (*cotangents, None)[:3]
    xi_bar = x_bar = w_bar = None
    if u is not None:
        wanted = (call.needs("input"), call.needs("weight"))
        xi_bar, x_bar, w_bar = standardise_second(
            at.groups, xi, u, at.x, at.mean, at.rstd, at.weight, wanted, call.needs(name)
        )
    if call.needs(name) and (tau is not None or beta is not None):
        weight = torch.zeros_like(beta) if tau is None else tau  # pyright: ignore
        part = affine(at.groups, at.x, at.mean, at.rstd, weight, beta)
        xi_bar = part if xi_bar is None else xi_bar + part
    if call.needs("input") and tau is not None:
        only_x = (True, False, False)
        part = standardise_backward(at.groups, xi, at.x, at.mean, at.rstd, tau, only_x)[0]
        x_bar = part if x_bar is None or part is None else x_bar + part
    return {name: xi_bar, "input": x_bar, "weight": w_bar}


def _composite(a: Arguments) -> tuple[Tensor | None, ...]:
    at = _point(a)
    if not _trains(a):
        return _backward_in_eval(a)
    found = standardise_again(at.groups, a[_xi_name(a)], at.x, at.rstd, at.weight)
    wanted = a.get("output_mask", (True, True, True))
    return tuple(g if w else None for g, w in zip(found, wanted, strict=False))


# ------------------------------------------------------------------ batch norm in eval


def _backward_in_eval(a: Arguments) -> tuple[Tensor | None, ...]:
    """dx = wr⊙ξ, dw = Σ ξ⊙(x − μ)r, db = Σξ"""
    xi, x, wanted = a[_xi_name(a)], a["input"], a.get("output_mask", (True, True, True))
    mean, r, w = _running(a)
    axes = [i for i in range(x.dim()) if i != 1]
    return (
        xi * (r if w is None else w * r) if wanted[0] else None,
        (xi * (x - mean) * r).sum(axes) if wanted[1] else None,
        xi.sum(axes) if wanted[2] else None,
    )


def _second_in_eval(call: Applied, cotangents: Grads) -> dict[str, Any]:
    """ξ̄ = wr⊙u + τ⊙(x − μ)r + β, x̄ = τr⊙ξ, w̄ = Σ ξ⊙ru"""
    a, (u, tau, beta) = call.arguments, cotangents
    name, x = _xi_name(a), a["input"]
    xi, (mean, r, w) = a[name], _running(a)
    shape = (1, -1, *[1] * (x.dim() - 2))
    found: dict[str, Any] = {}
    terms = []
    if u is not None:
        terms.append(u * (r if w is None else w * r))
        if call.needs("weight"):
            axes = [i for i in range(x.dim()) if i != 1]
            found["weight"] = (xi * u).sum(axes) * r.view(-1)
    if tau is not None:
        terms.append((x - mean) * (tau.view(shape) * r))
        found["input"] = xi * (tau.view(shape) * r)
    if beta is not None:
        terms.append(beta.view(shape).expand_as(x))
    return found | {name: sum(terms[1:], terms[0])}


def _running(a: Arguments) -> tuple[Tensor, Tensor, Tensor | None]:
    """μ, r and w in x's dtype, laid along the channels."""
    x = a["input"]
    shape = (1, -1, *[1] * (x.dim() - 2))
    r = (a["running_var"] + _first(a, "eps", "epsilon")).rsqrt()
    w = a["weight"]
    mean, r, w = (
        None if t is None else t.to(x.dtype).view(shape) for t in (a["running_mean"], r, w)
    )
    return mean, r, w  # type: ignore[return-value]


def _accepts(a: Arguments) -> bool:
    x, rstd = a["input"], _rstd(a)
    known = rstd is not None if _trains(a) else a["running_var"] is not None
    empty = x.numel() == 0 and 0 in a.get("normalized_shape", (0,))
    return known and not empty and plain(a[_xi_name(a)], x, rstd, a["weight"])


_WHY = "one closed form in a few fused passes, and right in forward mode"

_BACKWARDS = [
    Formula(name, "normalisation", _WHY, _second, _accepts, _composite)
    for name in (
        "native_layer_norm_backward",
        "native_group_norm_backward",
        "native_batch_norm_backward",
        "cudnn_batch_norm_backward",
        "batch_norm_backward",
        "_fused_rms_norm_backward",
    )
]


# ----------------------------------------------------- group and RMS norm themselves
#
# Under create_graph PyTorch differentiates these two by a chain of small operators. Their own node
# calls the backward operators above.


def _group_norm(call: Applied, cotangents: Grads) -> dict[str, Any]:
    xi, *of_statistics = cotangents
    if xi is None or any(c is not None for c in of_statistics):
        call.arguments["bias"] = call["input"].new_zeros(call["C"])
        return through(_normalised, call, cotangents)
    x, weight, groups = call["input"], call["weight"], Groups.group_norm(call["group"])
    form = groups.layout(x) if x.is_cpu else torch.contiguous_format
    xi, x = xi.contiguous(memory_format=form), x.contiguous(memory_format=form)
    names = ("input", "weight", "bias")
    sizes = (call[n] for n in ("N", "C", "HxW", "group"))
    mask = [call.needs(name) for name in names]
    grads = aten.native_group_norm_backward(xi, x, *call.results, weight, *sizes, mask)
    return dict(zip(names, grads, strict=True))


def _rms_norm(call: Applied, cotangents: Grads) -> dict[str, Any]:
    xi, of_rstd = cotangents
    if xi is None or of_rstd is not None:
        return through(_normalised, call, cotangents)
    names = ("input", "weight")
    mask, a = [call.needs(name) for name in names], call.arguments
    grads = aten._fused_rms_norm_backward(
        xi, a["input"], a["normalized_shape"], *call.results, a["weight"], mask
    )
    return dict(zip(names, grads, strict=True))


def _normalised(a: Arguments) -> tuple[Tensor, ...]:
    """y = w⊙x̂ + b, μ and r as functions of x."""
    x, groups = a["input"], _groups(a)
    eps = torch.finfo(x.dtype).eps if a["eps"] is None else a["eps"]
    mean, rstd = statistics(groups, x, eps)
    y = affine(groups, x, mean, rstd, a["weight"], a.get("bias"))
    return (y, rstd) if mean is None else (y, mean.to(x.dtype), rstd.to(x.dtype))


_OWN = "its backward under create_graph as one operator, not a chain of small ones"
_THEMSELVES = [
    Formula(
        "native_group_norm", "normalisation", _OWN, _group_norm,
        lambda a: plain(a["input"], a["weight"]) and a["input"].numel() > 0, keeps=(1, 2),
        unread=("bias",),
    ),
    Formula(
        "_fused_rms_norm", "normalisation", _OWN, _rms_norm,
        lambda a: plain(a["input"], a["weight"]) and a["input"].numel() > 0, keeps=(1,),
        keys=("AutogradCUDA",),  # elsewhere it has no backward operator
    ),
]  # fmt: skip


# ------------------------------------------------------------------ forward mode


def forward_kernel(formula: Formula, stock: Any) -> Callable:
    """Dual tensors are normalised in plain operations, all else by the stock kernel.

    A tangent that nothing differentiates again is right in stock, and stays bit for bit.
    """
    op = formula.overload()
    assert op is not None  # asked for by the patcher
    names = [a.name for a in op._schema.arguments]

    def kernel(keyset, *args, **kwargs):
        a = dict(zip(names, args, strict=False)) | kwargs
        tensors = [a.get(name) for name in ("input", "weight", "bias")]
        if not (is_dual(*tensors) and _watched(tensors) and a.get("training", True)):
            return stock.call_boxed(keyset, *args, **kwargs)
        groups = _groups(a)
        # the statistics as numbers, and batch norm's running ones brought up to date
        _, *kept = below(op, keyset, [_primal(t) for t in args], kwargs)
        x, weight, bias = a["input"], *tensors[1:]
        known = statistics(groups, x, _first(a, "eps", "epsilon"))
        return (affine(groups, x, *known, weight, bias), *kept)

    return kernel


def _primal(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) and is_dual(value) else value


def _watched(tensors: list[Any]) -> bool:
    """Whether a derivative may be taken of the tangent."""
    if peek_interpreter_stack() is not None:
        return True
    duals = [forward_ad.unpack_dual(t) for t in tensors if t is not None]
    return torch.is_grad_enabled() and any(
        part is not None and part.requires_grad for dual in duals for part in dual
    )


_FORWARDS = [
    Formula(
        name,
        "normalisation",
        "forward mode with the statistics as functions of the input",
        armed_by="forward_mode",
        kernel=forward_kernel,
    )
    for name in (
        "native_layer_norm",
        "native_batch_norm",
        "cudnn_batch_norm",
        "_native_batch_norm_legit",
        "_native_batch_norm_legit.no_stats",
    )
]

FORMULAS = [*_BACKWARDS, *_THEMSELVES, *_FORWARDS]
