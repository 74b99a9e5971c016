"""Second derivatives that PyTorch has, computed in fewer and better kernels: convolution, norms,
activations.

Convolution: the second derivative by K, Kᵀ and K□, each one call of its proper kernel.

`convolution_backward` gives dx = Kᵀ(θ, ξ), dθ = K□(x, ξ), db = Σξ. With cotangents u, τ, β of these
three,

    ⟨u, dx⟩ + ⟨τ, dθ⟩ + ⟨β, db⟩ = ⟨K(θ, u) + K(τ, x) + β, ξ⟩,

so ξ̄ = K(θ, u) + β + K(τ, x), x̄ = Kᵀ(τ, ξ), θ̄ = K□(u, ξ). All three are differentiable again.

Where only dx is asked for, as by a gradient penalty, it is itself a (transposed) convolution of ξ
with θ, and the double backward is that convolution's first: PyTorch's own node, with the same
kernels and no Python. cuDNN computes both alike; depthwise kernels have no transposed form, and
CPUs compute the two by different kernels.

Norms, layer, group, batch, instance and RMS: second derivatives by one closed form (theory §2).

Their backward gives dx = rP(w⊙ξ), dw = Σ ξ⊙x̂, db = Σξ. With cotangents u, τ, β of these,

    ξ̄ = w⊙rP(u) + τ⊙x̂ + β,    x̄ = s_x + rP(τ⊙ξ),    w̄ = s_w

with the tangent w⊙rP(u) and the sources s_x, s_w of ``kernels.standardisation``. Third derivatives
and forward mode take μ and r as functions of x in plain operations; PyTorch takes them as constants
there and is wrong without a word (pytorch issues 196699, 196700).

Activations, GELU and SiLU: B(ξ, z) = g′(z)⊙ξ has the second derivative ξ̄ = B(u, z), z̄ =
g″(z)⊙u⊙ξ, two kernels where PyTorch runs a chain of ten. SiLU has a node of its own besides: under
create_graph PyTorch writes its first derivative out in small operators.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._torch import peek_interpreter_stack
from ..kernels import (
    Groups,
    Point,
    affine,
    curvature,
    eager,
    standardise_again,
    standardise_backward,
    standardise_second,
    statistics,
)
from ..operators import Convolution
from .mechanism import (
    Applied,
    Arguments,
    Formula,
    Grads,
    Switch,
    again,
    below,
    derivative_kernel,
    is_dual,
    last,
    plain,
    through,
)

# ------------------------------------------------------------------------------------ convolution


aten = torch.ops.aten


def _operator(call: Applied) -> Convolution:
    return Convolution(
        tuple(call["stride"]),
        tuple(call["padding"]),
        tuple(call["dilation"]),
        call["transposed"],
        tuple(call["output_padding"]),
        call["groups"],
    )


def _second_of_convolution(call: Applied, cotangents: Grads) -> dict[str, Any]:
    u, tau, beta = cotangents
    K, xi, x, weight = _operator(call), call["grad_output"], call["input"], call["weight"]
    bars: dict[str, Any] = {}
    if call.needs("grad_output"):
        bars["grad_output"] = _tangent(K, u, tau, beta, x, weight, xi)
    wanted = (call.needs("input") and tau is not None, call.needs("weight") and u is not None)
    if any(wanted):
        like, shape = x, weight.shape
        if _slow_when_contiguous(K, u, tau, xi, x, weight):
            u, tau, like = (_laid(t) for t in (u, tau, x))
            xi = xi.contiguous(memory_format=torch.channels_last)
        x_bar, weight_bar, _ = K.adjoints(u, tau, xi, x.shape, shape, (*wanted, False), like=like)
        bars |= {"input": _like(x_bar, x), "weight": _like(weight_bar, weight)}
    return bars


def _tangent(K: Convolution, u, tau, beta, x, weight, xi) -> Tensor | None:
    """K(θ, u) + β + K(τ, x)"""
    tangent = None
    if u is not None:
        tangent, beta = K.forward(weight, u, beta), None
    if tau is not None:
        part = K.forward(tau, x, beta)
        tangent, beta = part if tangent is None else tangent + part, None
    if beta is not None:
        tangent = beta.view(-1, *[1] * (xi.dim() - 2)).expand_as(xi)
    return tangent


def _laid(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous(memory_format=torch.channels_last)


def _like(t: Tensor | None, like: Tensor) -> Tensor | None:
    return t.contiguous() if t is not None and like.is_contiguous() else t


def _slow_when_contiguous(K: Convolution, u, tau, xi, x, weight) -> bool:
    """Filter gradients for which the CPU has a fast kernel for channels-last tensors alone: groups
    of a few channels, and depthwise filters beyond 3×3. Worth two copies."""
    if not (weight.is_cpu and weight.dim() == 4 and K.groups > 1 and eager(u, tau, xi, x, weight)):
        return False
    channels = min(x.shape[1], xi.shape[1]) // K.groups
    entries = weight.shape[2] * weight.shape[3]
    fast = channels >= 16 or (channels == 1 and entries <= 9)
    return weight.dtype in (torch.float32, torch.bfloat16) and not fast


def kernel(formula: Formula, stock: Any, switch: Switch) -> Callable:
    """`derivative_kernel`, with dx alone as a convolution of its own."""
    general = derivative_kernel(formula, stock, switch)

    def run(keyset, *args, **kwargs):
        on = formula.family in switch.on and not kwargs
        if not on or args[-1] != [True, False, False] or not _is_one_convolution(*args[:-1]):
            return general(keyset, *args, **kwargs)
        switch.note(formula)
        xi, x, weight, _, stride, padding, dilation, transposed, _, groups = args[:-1]
        missing = _missing(xi, x, weight, stride, padding, dilation, transposed)
        options = (stride, padding, dilation, not transposed, missing, groups)
        return aten.convolution.default(xi, weight, None, *options), None, None

    return run


def _is_one_convolution(
    xi, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups
) -> bool:
    """Whether dx is computed by the kernel of a convolution of ξ, here and now."""
    return (
        torch.is_grad_enabled()
        and _by_cudnn(xi, x, weight)
        and groups == 1
        and len(stride) == len(padding) == len(dilation) == xi.dim() - 2
        and not torch.is_autocast_enabled(weight.device.type)
        and forward_ad._current_level < 0
        and peek_interpreter_stack() is None
        and not (transposed and any(p >= s for p, s in zip(output_padding, stride, strict=True)))
    )


def _by_cudnn(*tensors: Tensor) -> bool:
    return (
        torch.backends.cudnn.enabled
        and all(t.is_cuda and t.dtype == tensors[0].dtype for t in tensors)
        and plain(*tensors)
        and tensors[0].dim() == 4
        and tensors[0].numel() > 0
    )


def _missing(xi, x, weight, stride, padding, dilation, transposed) -> list[int]:
    """Rows and columns of x that a strided convolution did not reach: dx has them too."""
    if transposed:
        return [0] * len(stride)
    return [
        size - ((n - 1) * s - 2 * p + d * (k - 1) + 1)
        for size, n, k, s, p, d in zip(
            x.shape[2:], xi.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
        )
    ]


def _accepts_convolution(a: Arguments) -> bool:
    return plain(a["grad_output"], a["input"], a["weight"]) and a["grad_output"].dim() > 2


def _convolution_pays(xi: Tensor, x: Tensor, weight: Tensor, *others: Any) -> bool:
    """In groups always; else from about 60 million operations on. A trace with open sizes must not
    ask, and before 2.13 PyTorch's own formula fails in one."""
    if others[6] != 1 or isinstance(xi.numel(), torch.SymInt):
        return True
    per_output = weight.numel() // max(1, weight.shape[0])
    return 2 * xi.numel() * per_output >= 6e7


CONVOLUTION = [
    Formula(
        "convolution_backward",
        "convolution",
        "weight gradient by the filter-gradient kernel, all groups at once",
        _second_of_convolution,
        _accepts_convolution,
        kernel=kernel,
        pays=_convolution_pays,
    )
]


# ------------------------------------------------------------------------------------------ norms


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


def _second_of_norm(call: Applied, cotangents: Grads) -> dict[str, Any]:
    a = call.arguments
    if not _trains(a):
        return _second_of_norm_in_eval(call, cotangents)
    if not last() and again(*a.values(), *cotangents):
        return through(_composite_norm, call, cotangents)
    name, at = _xi_name(a), _point(a)
    xi, (u, tau, beta) = a[name], (*cotangents, None)[:3]
    xi_bar = x_bar = w_bar = None
    if u is not None:
        wanted = (call.needs("input"), call.needs("weight"))
        xi_bar, x_bar, w_bar, _ = standardise_second(
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


def _composite_norm(a: Arguments) -> tuple[Tensor | None, ...]:
    at = _point(a)
    if not _trains(a):
        return _backward_in_eval(a)
    grads = standardise_again(at.groups, a[_xi_name(a)], at.x, at.rstd, at.weight)
    wanted = a.get("output_mask", (True, True, True))
    return tuple(g if w else None for g, w in zip(grads, wanted, strict=False))


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


def _second_of_norm_in_eval(call: Applied, cotangents: Grads) -> dict[str, Any]:
    """ξ̄ = wr⊙u + τ⊙(x − μ)r + β, x̄ = τr⊙ξ, w̄ = Σ ξ⊙ru"""
    a, (u, tau, beta) = call.arguments, cotangents
    name, x = _xi_name(a), a["input"]
    xi, (mean, r, w) = a[name], _running(a)
    shape = (1, -1, *[1] * (x.dim() - 2))
    bars: dict[str, Any] = {}
    terms = []
    if u is not None:
        terms.append(u * (r if w is None else w * r))
        if call.needs("weight"):
            axes = [i for i in range(x.dim()) if i != 1]
            bars["weight"] = (xi * u).sum(axes) * r.view(-1)
    if tau is not None:
        terms.append((x - mean) * (tau.view(shape) * r))
        bars["input"] = xi * (tau.view(shape) * r)
    if beta is not None:
        terms.append(beta.view(shape).expand_as(x))
    return bars | {name: sum(terms[1:], terms[0])}


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


def _accepts_norm(a: Arguments) -> bool:
    x, rstd = a["input"], _rstd(a)
    known = rstd is not None if _trains(a) else a["running_var"] is not None
    empty = x.numel() == 0 and 0 in a.get("normalized_shape", (0,))
    return known and not empty and plain(a[_xi_name(a)], x, rstd, a["weight"])


_WHY_NORM = "one closed form in a few fused passes, and right in forward mode"


def _norm_gains(xi: Tensor, x: Tensor, *others: Any) -> bool:
    """From some ten thousand entries on, and in dtypes that PyTorch's chain of operators rounds."""
    exact = xi.dtype is x.dtype and x.dtype in (torch.float32, torch.float64)
    return not exact or isinstance(x.numel(), torch.SymInt) or x.numel() >= 1 << 15


_BACKWARDS = [
    Formula(
        name, "normalisation", _WHY_NORM, _second_of_norm, _accepts_norm, _composite_norm,
        gains=_norm_gains if name in ("native_layer_norm_backward", "native_batch_norm_backward")
        else None,
    )
    for name in (
        "native_layer_norm_backward",
        "native_group_norm_backward",
        "native_batch_norm_backward",
        "cudnn_batch_norm_backward",
        "batch_norm_backward",
        "_fused_rms_norm_backward",
    )
]  # fmt: skip


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


def forward_kernel(formula: Formula, stock: Any, switch: Switch) -> Callable:
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
        switch.note(formula)
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

NORMALISATION = [*_BACKWARDS, *_THEMSELVES, *_FORWARDS]


# ------------------------------------------------------------------------------------ activations


def _accepts_activation(a: Arguments) -> bool:
    return plain(*(t for t in a.values() if isinstance(t, Tensor)))


def _bent(
    name: str, backward: Callable[..., Tensor], call: Applied, cotangents: Grads
) -> dict[str, Any]:
    """ξ̄ = B(u, z) and z̄ = g″(z)⊙u⊙ξ, with B the operator itself."""
    (u,), bars = cotangents, {}
    assert u is not None  # the only result
    z = call["self"]
    if call.needs("grad_output"):
        bars["grad_output"] = backward(u, z)
    if call.needs("self"):
        bars["self"] = curvature(name, z, u, call["grad_output"])
    return bars


def _gelu_backward(call: Applied, cotangents: Grads) -> dict[str, Any]:
    form = call["approximate"]
    name = "gelu" if form == "none" else "gelu_tanh"
    return _bent(name, partial(aten.gelu_backward, approximate=form), call, cotangents)


def _silu_backward(call: Applied, cotangents: Grads) -> dict[str, Any]:
    return _bent("silu", aten.silu_backward, call, cotangents)


def _silu_steps(a: Arguments) -> Tensor:
    """ξ⊙s(1 + z(1 − s)) with s = σ(z)"""
    z = a["self"]
    s = torch.sigmoid(z)
    return a["grad_output"] * (s * (1 + z * (1 - s)))


def _silu(call: Applied, cotangents: Grads) -> dict[str, Any]:
    return {"self": aten.silu_backward(cotangents[0], call["self"])}


def _silu_pays(*args: Any) -> bool:
    """From a hundred thousand entries on, and where a trace leaves their number open."""
    count = args[0].numel()
    return isinstance(count, torch.SymInt) or count >= 1 << 17


def _activation(
    operator: str, why: str, second: Callable[[Applied, Grads], dict[str, Any]], steps: Any = None,
    pays: Callable[..., bool] = _silu_pays,
) -> Formula:  # fmt: skip
    return Formula(operator, "activation", why, second, _accepts_activation, steps, pays=pays)


ACTIVATION = [
    # on a CPU its erf costs more than the chain of cheaper kernels
    _activation(
        "gelu_backward",
        "g″⊙u⊙ξ in one kernel, not a chain",
        _gelu_backward,
        pays=lambda *args: False,
    ),
    _activation("silu_backward", "g″⊙u⊙ξ in one kernel", _silu_backward, _silu_steps),
    _activation("silu", "its backward under create_graph as one operator", _silu),
]
