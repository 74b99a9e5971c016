"""g′ and g″ of smooth activations by name: the curvature source g″(z)⊙h⊙ξ of a coordinate-wise g
(theory §2), with it the tangent g′⊙h and the cotangent g′⊙ξ, and g′⊙γ added to what is there; the
source of softmax along rows (theory §4), and what a mask lets through.

On CUDA source, tangent and cotangent are one Triton kernel: it reads three tensors and writes as
many as are wanted. Elsewhere they are plain tensor operations. Arithmetic is float32 for 16-bit
tensors. Kinks follow autograd.

Every g′ and g″ is written once, in + − × ÷ and the few functions of `_WORDS`, and serves tensors
and the kernels alike (`_in_triton`).
"""

# pyright: reportInvalidTypeForm=false
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import is_functorch_wrapped_tensor
from ..dtypes import accumulation, lifted
from ..errors import InputError
from . import launch
from .launch import Launch, available, jit, look, planned, tl, triton

aten = torch.ops.aten

BLOCK = 1024
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


# g′ and g″ ---------------------------------------------------------------------------------------
#
# Each takes three parameters, used or not. y: from the output of g, else from its input z.

exp, erf, sigmoid, where, clamp = torch.exp, torch.erf, torch.sigmoid, torch.where, torch.clamp
sin, cos = torch.sin, torch.cos


def complement(s, z):
    """1 − s for s = σ(z). The kernel says σ(−z), which on tensors would be a pass over memory."""
    return 1 - s


def _gelu_1(z, a, b, c):
    """Φ(z) + zφ(z)"""
    z = clamp(z, -64, 64)  # beyond, it is 0 and 1
    density = exp(-0.5 * z * z) * 0.3989422804014327
    return 0.5 + 0.5 * erf(z * 0.7071067811865476) + z * density


def _gelu_2(z, a, b, c):
    """(2 − z²)·exp(−z²/2)/√(2π)"""
    z = clamp(z, -64, 64)  # beyond, exp is 0
    square = z * z
    return (2 - square) * exp(-0.5 * square) * 0.3989422804014327


def _gelu_tanh_1(z, a, b, c):
    """½(1 + t) + ½z(1 − t²)u′, t = tanh(u), u = √(2/π)(z + 0.044715z³)"""
    z = clamp(z, -32, 32)  # beyond, it is 0 and 1
    square = z * z
    u = 0.7978845608028654 * z * (1 + 0.044715 * square)
    slope = 0.7978845608028654 * (1 + 0.134145 * square)
    s = sigmoid(2 * u)  # t = 2s − 1
    return s + 2 * z * s * complement(s, 2 * u) * slope


def _gelu_tanh_2(z, a, b, c):
    """(1 − t²)(u′ + ½zu″ − ztu′²), t = tanh(u), u = √(2/π)(z + 0.044715z³)"""
    z = clamp(z, -32, 32)  # beyond, 1 − t² is 0
    square = z * z
    u = 0.7978845608028654 * z * (1 + 0.044715 * square)
    slope = 0.7978845608028654 * (1 + 0.134145 * square)
    s = sigmoid(2 * u)  # t = 2s − 1
    bent = 0.5 * 0.7978845608028654 * 0.26829 * square
    return 4 * s * complement(s, 2 * u) * (slope + bent - z * (2 * s - 1) * slope * slope)


def _silu_1(z, a, b, c):
    """σ(1 + z(1 − σ))"""
    z = clamp(z, -1e4, 1e4)  # beyond, it is 0 and 1
    s = sigmoid(z)
    return s * (1 + z * complement(s, z))


def _silu_2(z, a, b, c):
    """σ(1 − σ)(2 + z(1 − 2σ))"""
    s = sigmoid(z)
    return s * complement(s, z) * (2 + z * (1 - 2 * s))


def _softplus_1(z, beta, threshold, c):
    """σ(βz) up to the threshold, 1 above"""
    return where(beta * z > threshold, 1, sigmoid(beta * z))


def _softplus_2(z, beta, threshold, c):
    """βσ(βz)(1 − σ(βz)) below the threshold"""
    s = sigmoid(beta * z)
    return where(beta * z >= threshold, 0, beta * s * complement(s, beta * z))


def _logsigmoid_1(z, a, b, c):
    """1 − σ(z)"""
    return complement(sigmoid(z), z)


def _logsigmoid_2(z, a, b, c):
    """−σ(z)(1 − σ(z))"""
    s = sigmoid(z)
    return -s * complement(s, z)


def _mish_1(z, a, b, c):
    """t + zt′, t = tanh(log(1 + eᶻ)): t′ = (1 − t²)σ"""
    z = clamp(z, -1000, 40)  # beyond, it is 0 and 1
    e, s = exp(z), sigmoid(z)
    whole = e * e + 2 * e + 2  # t = 1 − 2/whole = (e² + 2e)/whole, 1 − t² = 4((1 + e)/whole)²
    ratio = (1 + e) / whole
    return e * (e + 2) / whole + 4 * z * s * ratio * ratio


def _mish_2(z, a, b, c):
    """2t′ + zt″, t = tanh(log(1 + eᶻ)): t′ = (1 − t²)σ, t″ = (1 − t²)σ(1 − σ − 2tσ)"""
    z = clamp(z, -1000, 40)  # beyond, t′ and t″ are 0
    e, s = exp(z), sigmoid(z)
    whole = e * e + 2 * e + 2  # t = 1 − 2/whole, 1 − t² = 4((1 + e)/whole)²
    ratio = (1 + e) / whole
    bend = 1 - s - 2 * (1 - 2 / whole) * s
    return 4 * ratio * ratio * s * (2 + z * bend)


def _elu_1(z, alpha, scale, inner):
    """s for z > 0, s·α·i·exp(iz) up to 0, s and i the scales of output and input"""
    return where(z > 0, scale, scale * alpha * inner * exp(inner * clamp(z, -1e30, 0)))


def _elu_2(z, alpha, scale, inner):
    """s·α·i²·exp(iz) for z < 0, s and i the scales of output and input"""
    return where(z >= 0, 0, scale * alpha * inner * inner * exp(inner * z))


def _hardswish_1(z, a, b, c):
    """0 up to −3, ⅓z + ½ between, 1 from 3 on"""
    return where(z <= -3, 0, where(z < 3, z / 3 + 0.5, 1))


def _hardswish_2(z, a, b, c):
    """⅓ for |z| < 3"""
    return (z * z < 9).to(z.dtype) / 3


def _sin_1(z, a, b, c):
    """cos(z)"""
    return cos(z)


def _sin_2(z, a, b, c):
    """−sin(z)"""
    return -sin(z)


def _cos_1(z, a, b, c):
    """−sin(z)"""
    return -sin(z)


def _cos_2(z, a, b, c):
    """−cos(z)"""
    return -cos(z)


def _sigmoid_1(y, a, b, c):
    """y(1 − y)"""
    return y * (1 - y)


def _sigmoid_2(y, a, b, c):
    """y(1 − y)(1 − 2y)"""
    return y * (1 - y) * (1 - 2 * y)


def _tanh_1(y, a, b, c):
    """1 − y²"""
    return 1 - y * y


def _tanh_2(y, a, b, c):
    """−2y(1 − y²)"""
    return -2 * y * (1 - y * y)


def _exp_1(y, a, b, c):
    """y"""
    return y


def _exp_2(y, a, b, c):
    """y"""
    return y


def _log_1(z, a, b, c):
    """1/z"""
    return 1 / z


def _log_2(z, a, b, c):
    """−1/z²"""
    return -1 / (z * z)


def _sqrt_1(y, a, b, c):
    """1/(2y)"""
    return 0.5 / y


def _sqrt_2(y, a, b, c):
    """−1/(4y³)"""
    return -0.25 / (y * y * y)


def _rsqrt_1(y, a, b, c):
    """−½y³"""
    return -0.5 * y * y * y


def _rsqrt_2(y, a, b, c):
    """¾y⁵"""
    return 0.75 * y * y * y * y * y


def _reciprocal_1(y, a, b, c):
    """−y²"""
    return -y * y


def _reciprocal_2(y, a, b, c):
    """2y³"""
    return 2 * y * y * y


class Derivatives(NamedTuple):
    """g′, g″ and the names of their parameters."""

    first: Callable
    second: Callable
    parameters: tuple[str, ...] = ()


TABLE = {
    "gelu": Derivatives(_gelu_1, _gelu_2),
    "gelu_tanh": Derivatives(_gelu_tanh_1, _gelu_tanh_2),
    "silu": Derivatives(_silu_1, _silu_2),
    "softplus": Derivatives(_softplus_1, _softplus_2, ("beta", "threshold")),
    "logsigmoid": Derivatives(_logsigmoid_1, _logsigmoid_2),
    "mish": Derivatives(_mish_1, _mish_2),
    "elu": Derivatives(_elu_1, _elu_2, ("alpha", "scale", "input_scale")),
    "hardswish": Derivatives(_hardswish_1, _hardswish_2),
    "sin": Derivatives(_sin_1, _sin_2),
    "cos": Derivatives(_cos_1, _cos_2),
    "sigmoid": Derivatives(_sigmoid_1, _sigmoid_2),  # y
    "tanh": Derivatives(_tanh_1, _tanh_2),  # y
    "exp": Derivatives(_exp_1, _exp_2),  # y
    "log": Derivatives(_log_1, _log_2),
    "sqrt": Derivatives(_sqrt_1, _sqrt_2),  # y
    "rsqrt": Derivatives(_rsqrt_1, _rsqrt_2),  # y
    "reciprocal": Derivatives(_reciprocal_1, _reciprocal_2),  # y
}


def _three(parameters: Sequence[float]) -> tuple[float, ...]:
    return (*(float(p) for p in parameters), 0.0, 0.0, 0.0)[:3]


def second(name: str, v: Tensor, *parameters: float) -> Tensor:
    """g″ at v, in plain tensor operations.

    >>> second("elu", torch.zeros(1) - 1e-9, 2.0, 1.0, 1.0)
    tensor([2.])
    """
    return TABLE[name].second(v, *_three(parameters))


# In Triton ---------------------------------------------------------------------------------------


@jit
def _triton_exp(z):
    return tl.exp(z)


@jit
def _triton_erf(z):
    return tl.erf(z)


@jit
def _triton_sigmoid(z):
    return tl.sigmoid(z)


@jit
def _triton_complement(s, z):
    return tl.sigmoid(-z)


@jit
def _triton_where(condition, a, b):
    return tl.where(condition, a, b)


@jit
def _triton_clamp(z, low, high):
    """NaN stays NaN."""
    return tl.where(z > high, high, tl.where(z < low, low, z))


@jit
def _triton_sin(z):
    return tl.sin(z)


@jit
def _triton_cos(z):
    return tl.cos(z)


_WORDS = {
    "exp": _triton_exp,
    "erf": _triton_erf,
    "sigmoid": _triton_sigmoid,
    "complement": _triton_complement,
    "where": _triton_where,
    "clamp": _triton_clamp,
    "sin": _triton_sin,
    "cos": _triton_cos,
    "tl": tl,
}


def _in_triton(function: Callable) -> Any:
    """A g′ or g″ as a kernel's function: the same code, whose words are Triton's."""
    return jit(FunctionType(function.__code__, {**globals(), **_WORDS}, function.__name__))


_KERNELS = {name: [_in_triton(g) for g in entry[:2]] for name, entry in TABLE.items()}


@jit
def _bend_kernel(
    z_ptr, h_ptr, xi_ptr, s_ptr, t_ptr, dx_ptr, n,
    FIRST: tl.constexpr, SECOND: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
    ACC: tl.constexpr, SIZE: tl.constexpr, TANGENT: tl.constexpr, PULLED: tl.constexpr,
):  # fmt: skip
    """g″⊙h⊙ξ, g′⊙h and g′⊙ξ."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    live = at < n
    z = tl.load(z_ptr + at, mask=live, other=1).to(ACC)
    h = tl.load(h_ptr + at, mask=live, other=0).to(ACC)
    xi = tl.load(xi_ptr + at, mask=live, other=0).to(ACC)
    tl.store(s_ptr + at, SECOND(z, A, B, C) * h * xi, mask=live)
    if TANGENT or PULLED:
        slope = FIRST(z, A, B, C)
        if TANGENT:
            tl.store(t_ptr + at, slope * h, mask=live)
        if PULLED:
            tl.store(dx_ptr + at, slope * xi, mask=live)


@jit
def _onto_kernel(
    z_ptr, y_ptr, there_ptr, out_ptr, n,
    FIRST: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
    ACC: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """g′⊙y + what is there."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    live = at < n
    z = tl.load(z_ptr + at, mask=live, other=1).to(ACC)
    y = tl.load(y_ptr + at, mask=live, other=0).to(ACC)
    there = tl.load(there_ptr + at, mask=live, other=0).to(ACC)
    tl.store(out_ptr + at, FIRST(z, A, B, C) * y + there, mask=live)


def supports(name: str, *tensors: Tensor) -> bool:
    """Whether the kernels can run: CUDA tensors of one shape, and Triton is there."""
    first = tensors[0]
    return (
        name in TABLE
        and all(t.is_cuda and t.device == first.device for t in tensors)
        and all(t.dtype in DTYPES and t.shape == first.shape for t in tensors)
        and available()
    )


def launch_bend(
    name: str, z: Tensor, h: Tensor, xi: Tensor, params: Sequence[float] = (),
    tangent: bool = False, pulled: bool = False,
) -> list[Tensor]:  # fmt: skip
    """[g″(z)⊙h⊙ξ], then g′(z)⊙h and g′(z)⊙ξ where wanted, by one kernel; laid out like z, in z's
    dtype.

    >>> launch_bend("softplus", z, h, xi, (1.0, 20.0))  # doctest: +SKIP
    """
    key = (name, *params, tangent, pulled, look(z), look(h), look(xi))
    given, flags = (z, h, xi), {"TANGENT": tangent, "PULLED": pulled}
    plan = planned(
        _plans, key, lambda: _PointwisePlan.of(_bend_kernel, name, params, given, **flags)
    )
    results = [torch.empty_like(z) if want else None for want in (True, tangent, pulled)]
    plan(given, results)
    return [t for t in results if t is not None]


def launch_onto(
    name: str, z: Tensor, y: Tensor, there: Tensor, params: Sequence[float] = ()
) -> Tensor:
    """g′(z)⊙y + there by one kernel, laid out like z, in z's dtype."""
    key = (name, *params, look(z), look(y), look(there))
    given, out = (z, y, there), torch.empty_like(z)
    plan = planned(_plans, key, lambda: _PointwisePlan.of(_onto_kernel, name, params, given))
    plan(given, [out])
    return out


class _PointwisePlan(NamedTuple):
    """How a call is launched, and which of its tensors are first laid out like the results."""

    launch: Launch | None
    copies: tuple[bool, ...] | None

    @classmethod
    def of(
        cls, kernel: Any, name: str, params: Sequence[float], given: Sequence[Tensor], **flags: bool
    ) -> "_PointwisePlan":
        _check(name, params)
        size, out = given[0].numel(), torch.empty_like(given[0])
        if not size:
            return cls(None, None)
        a, b, c = _three(params)
        wide = accumulation(out.dtype) == torch.float64
        first, second = _KERNELS[name]
        used = {"FIRST": first, "SECOND": second} if kernel is _bend_kernel else {"FIRST": first}
        launch = Launch(
            kernel, (triton.cdiv(size, BLOCK),), (size,), **used, A=a, B=b, C=c,
            ACC=tl.float64 if wide else tl.float32, SIZE=BLOCK, **flags,
        )  # fmt: skip
        copies = tuple([not _same_layout(t, out) for t in given])
        return cls(launch, copies if any(copies) else None)

    def __call__(self, given: Sequence[Tensor], results: Sequence[Tensor | None]) -> None:
        if self.launch is None:
            return
        if self.copies is not None:
            pairs, like = zip(given, self.copies, strict=True), given[0]
            given = [torch.empty_like(like).copy_(t) if copy else t for t, copy in pairs]
        self.launch(*given, *results)


_plans: dict[Any, _PointwisePlan] = {}


def _check(name: str, params: Sequence[float]) -> None:
    if name not in TABLE or len(params) != len(TABLE[name].parameters):
        known = "; ".join(" ".join((n, *entry.parameters)) for n, entry in TABLE.items())
        raise InputError(
            f"curvature: no function {name!r} of {len(params)} parameters; known are {known}"
        )


def _same_layout(t: Tensor, out: Tensor) -> bool:
    """Whether entry k of t's memory is entry k of out's; `out` is dense."""
    strides = zip(t.shape, t.stride(), out.stride(), strict=True)
    return all(size == 1 or mine == its for size, mine, its in strides)


# For sweeps and patches --------------------------------------------------------------------------


def curvature(name: str, z: Tensor, h: Tensor, xi: Tensor) -> Tensor:
    """g″(z)⊙h⊙ξ in z's dtype, computed in float32 for 16 bits.

    >>> z = torch.zeros(1)
    >>> curvature("silu", z, torch.ones(1), 2 * torch.ones(1))
    tensor([1.])
    """
    if launch.eager(z, h, xi) and supports(name, z, h, xi):
        return launch_bend(name, z, h, xi)[0]
    return (second(name, lifted(z)) * lifted(h) * lifted(xi)).to(z.dtype)


launch.opaque(
    "bend(str name, Tensor z, Tensor h, Tensor xi, float[] params, bool tangent, bool pulled) "
    "-> Tensor[]",
    launch_bend,
    lambda name, z, h, xi, params, tangent, pulled: [
        torch.empty_like(z) for _ in range(1 + tangent + pulled)
    ],
)
launch.opaque(
    "slope_onto(str name, Tensor z, Tensor y, Tensor there, float[] params) -> Tensor",
    launch_onto,
    lambda name, z, y, there, params: torch.empty_like(z),
)


def _has_open_sizes(t: Tensor) -> bool:
    """Whether what is recorded now will run at sizes that change: a launch at a size that was not
    seen takes the host longer than PyTorch's kernels for the same do."""
    return any(type(n) is not int for n in t.shape)


def fused_bend(
    name: str, z: Tensor, h: Tensor, xi: Tensor, params: Sequence[float], tangent: bool,
    pulled: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None] | None:  # fmt: skip
    """Source, tangent and cotangent in the form that the sweeps need now; None where they write the
    formulas out."""
    if launch.fusing() or not launch.on_cuda(z, h, xi) or not supports(name, z, h, xi):
        return None
    if (tangent and h.dtype is not z.dtype) or (pulled and xi.dtype is not z.dtype):
        return None
    if (tangent or pulled) and _has_open_sizes(z):
        return None
    flat = launch.being_flattened()  # one node of the flattened sweeps
    run = torch.ops.doubleback.bend if flat else launch_bend
    source, *rest = run(name, z, h, xi, [float(p) for p in params], tangent, pulled)
    return source, rest.pop(0) if tangent else None, rest.pop() if pulled else None


def fused_onto(
    name: str, z: Tensor, y: Tensor, there: Tensor, params: Sequence[float]
) -> Tensor | None:
    """g′⊙y + there, likewise."""
    if launch.fusing() or not launch.on_cuda(z, y, there) or not supports(name, z, y, there):
        return None
    if not z.dtype is y.dtype is there.dtype or _has_open_sizes(z):
        return None
    run = torch.ops.doubleback.slope_onto if launch.being_flattened() else launch_onto
    return run(name, z, y, there, [float(p) for p in params])


def cleared(flat: Tensor, y: Tensor, zero: Tensor | float = 0.0) -> Tensor:
    """y, with zeros where `flat` is true.

    On a CPU PyTorch's `where` goes one entry after the other, which the vjp of hardtanh, that lets
    through what lies between its bounds, does not.

    >>> cleared(torch.tensor([True, False]), torch.tensor([float("inf"), 2.0]))
    tensor([0., 2.])
    """
    if y.device.type != "cpu" or launch.fusing():
        return torch.where(flat, zero, y)  # type: ignore[call-overload]
    return aten.hardtanh_backward(y, flat.view(torch.uint8).to(y.dtype), -1, 0.5)


# One number per channel, over all places of an image ---------------------------------------------
#
# Channels-last, x⊙s and x + s with one s for each example and channel (squeeze-and-excite, the
# cotangent of a mean over places) are read entry by entry by PyTorch's kernel, with the division
# that each entry's place takes.

MOST_EXAMPLES = 65535  # a launch's second axis is no longer
MANY = 1 << 20  # entries from which on that costs more than a launch from here


@jit
def _places_kernel(
    x_ptr, s_ptr, out_ptr, places, channels, example_stride, channel_stride,
    TIMES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    example = tl.program_id(1).to(tl.int64)
    blocks = tl.cdiv(channels, COLUMNS)
    place = (tl.program_id(0) // blocks) * ROWS + tl.arange(0, ROWS)
    channel = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    known = channel < channels
    live = (place < places)[:, None] & known[None, :]
    at = (example * places + place)[:, None] * channels + channel[None, :]
    s_at = s_ptr + example * example_stride + channel * channel_stride
    s = tl.load(s_at, mask=known, other=0).to(ACC)[None, :]
    x = tl.load(x_ptr + at, mask=live, other=0).to(ACC)
    tl.store(out_ptr + at, x * s if TIMES else x + s, mask=live)


def constant_over_places(x: Tensor, s: Tensor) -> bool:
    """Whether x is a large channels-last image on a GPU and s has one number per example and
    channel for it."""
    if x.dim() not in (4, 5) or s.dim() != x.dim() or not (x.is_cuda and s.is_cuda):
        return False
    if x.dtype is not s.dtype or x.dtype not in DTYPES or isinstance(x.numel(), torch.SymInt):
        return False
    form = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    if x.numel() < MANY or x.is_contiguous() or not x.is_contiguous(memory_format=form):
        return False
    if x.shape[0] > MOST_EXAMPLES:
        return False
    sizes = zip(s.shape, x.shape, strict=True)
    if s.shape[1] != x.shape[1] or any(mine not in (1, its) for mine, its in sizes):
        return False
    places = zip(s.shape[2:], s.stride()[2:], strict=True)
    return all(size == 1 or stride == 0 for size, stride in places)


def times_over_places(left: Tensor, right: Tensor) -> Tensor:
    """left⊙right; by a kernel of its own where one of them is constant over the other's places."""
    return _over_places(left, right, torch.mul)


def plus_over_places(left: Tensor, right: Tensor) -> Tensor:
    """left + right, likewise."""
    return _over_places(left, right, torch.add)


def _over_places(left: Tensor, right: Tensor, otherwise: Callable) -> Tensor:
    key = (otherwise, look(left), look(right))
    plan = planned(_places_plans, key, lambda: _planned_over_places(left, right, otherwise))
    if plan is None or launch.watched():
        return otherwise(left, right)
    turned, go = plan
    x, s = (right, left) if turned else (left, right)
    out = torch.empty_like(x)
    go(x, s, out)
    return out


def _planned_over_places(left: Tensor, right: Tensor, op: Callable) -> tuple[bool, Launch] | None:
    """Whether the image is the right one, and the launch."""
    turned = constant_over_places(right, left)
    x, s = (right, left) if turned else (left, right)
    if not (turned or constant_over_places(x, s)) or not available():
        return None
    examples, channels, *_ = x.shape
    places = x[0, 0].numel()
    strides = [0 if s.shape[i] == 1 else s.stride(i) for i in (0, 1)]
    columns = min(launch.power_of_two(channels), 128)
    rows = 2048 // columns
    grid = (triton.cdiv(places, rows) * triton.cdiv(channels, columns), examples)
    wide = accumulation(x.dtype) == torch.float64
    return turned, Launch(
        _places_kernel, grid, (places, channels, *strides), TIMES=op is torch.mul, ROWS=rows,
        COLUMNS=columns, ACC=tl.float64 if wide else tl.float32,
    )  # fmt: skip


_places_plans: dict[Any, tuple[bool, Launch] | None] = {}


# A product of two, entry by entry -----------------------------------------------------------------


@jit
def _gate_kernel(
    a_ptr, b_ptr, qa_ptr, qb_ptr, xi_ptr, t_ptr, sa_ptr, sb_ptr, xa_ptr, xb_ptr, n,
    QA: tl.constexpr, QB: tl.constexpr, TANGENT: tl.constexpr, SA: tl.constexpr, SB: tl.constexpr,
    XA: tl.constexpr, XB: tl.constexpr, ACC: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """t = qₐ⊙b + a⊙q_b, sources ξ⊙q_b and ξ⊙qₐ, cotangents ξ⊙b and ξ⊙a."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    live = at < n
    t = tl.zeros((SIZE,), ACC)
    a, b, xi = t, t, t
    if SA or SB or XA or XB:
        xi = tl.load(xi_ptr + at, mask=live, other=0).to(ACC)
    if (TANGENT and QA) or XA:
        b = tl.load(b_ptr + at, mask=live, other=0).to(ACC)
    if (TANGENT and QB) or XB:
        a = tl.load(a_ptr + at, mask=live, other=0).to(ACC)
    if QA:
        qa = tl.load(qa_ptr + at, mask=live, other=0).to(ACC)
        if TANGENT:
            t += qa * b
        if SB:
            tl.store(sb_ptr + at, xi * qa, mask=live)
    if QB:
        qb = tl.load(qb_ptr + at, mask=live, other=0).to(ACC)
        if TANGENT:
            t += a * qb
        if SA:
            tl.store(sa_ptr + at, xi * qb, mask=live)
    if TANGENT:
        tl.store(t_ptr + at, t, mask=live)
    if XA:
        tl.store(xa_ptr + at, xi * b, mask=live)
    if XB:
        tl.store(xb_ptr + at, xi * a, mask=live)


Gate = tuple[Tensor | None, ...]  # of (t, sₐ, s_b, ξₐ, ξ_b) or of (a, b, qₐ, q_b, ξ)


def launch_gate(given: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor]:
    """Those of (t, sₐ, s_b, ξₐ, ξ_b) that are wanted, from (a, b, qₐ, q_b, ξ), by one kernel. What
    no wanted result reads may be None."""
    key = (*wanted, *map(look, given))
    launch, copies, like = planned(_gate_plans, key, lambda: _planned_gate(given, wanted))
    laid = given[like]
    assert laid is not None
    results = [torch.empty_like(laid) if want else None for want in wanted]
    if copies is not None:
        pairs = zip(given, copies, strict=True)
        given = [torch.empty_like(laid).copy_(t) if copy else t for t, copy in pairs]  # type: ignore[arg-type]
    if launch is not None:
        launch(*given, *results)
    return [t for t in results if t is not None]


def _planned_gate(
    given: Sequence[Tensor | None], wanted: Sequence[bool]
) -> tuple[Launch | None, tuple[bool, ...] | None, int]:
    """The launch, which tensors are first laid out like the results, and which is laid out so."""
    like = next(i for i, t in enumerate(given) if t is not None)
    laid = given[like]
    assert laid is not None
    out = torch.empty_like(laid)
    copies = tuple([t is not None and not _same_layout(t, out) for t in given])
    launch = None
    if out.numel():
        names = ("TANGENT", "SA", "SB", "XA", "XB")
        launch = Launch(
            _gate_kernel, (triton.cdiv(out.numel(), BLOCK),), (out.numel(),),
            QA=given[2] is not None, QB=given[3] is not None,
            **dict(zip(names, map(bool, wanted), strict=True)),
            ACC=tl.float64 if accumulation(out.dtype) == torch.float64 else tl.float32, SIZE=BLOCK,
        )  # fmt: skip
    return launch, copies if any(copies) else None, like


_gate_plans: dict[Any, Any] = {}


launch.opaque(
    "gate(Tensor? a, Tensor? b, Tensor? qa, Tensor? qb, Tensor? xi, bool[] wanted) -> Tensor[]",
    lambda a, b, qa, qb, xi, wanted: launch_gate((a, b, qa, qb, xi), wanted),
    lambda a, b, qa, qb, xi, wanted: [
        torch.empty_like(next(t for t in (a, b, qa, qb, xi) if t is not None))
        for want in wanted
        if want
    ],
)


def fused_gate(given: Sequence[Tensor | None], wanted: Sequence[bool]) -> Gate | None:
    """The same in the form that the sweeps need now, None for what is not wanted; None as a whole
    where they write the formulas out."""
    tensors = [t for t in given if t is not None]
    if launch.fusing() or launch.batched() or not launch.on_cuda(*tensors):
        return None
    first = tensors[0]
    if any(t.shape != first.shape or t.dtype is not first.dtype for t in tensors):
        return None
    if first.dtype not in DTYPES or any(map(is_functorch_wrapped_tensor, tensors)):
        return None
    if not any(wanted) or _has_open_sizes(first) or not available():
        return None
    wanted = [bool(want) for want in wanted]
    flat = launch.being_flattened()
    found = iter(torch.ops.doubleback.gate(*given, wanted) if flat else launch_gate(given, wanted))
    return tuple([next(found) if want else None for want in wanted])


# Softmax along rows ------------------------------------------------------------------------------


LONGEST_ROW = 4096  # entries that a program holds at once


@jit
def _softmax_kernel(
    s_ptr, xi_ptr, q_ptr, source_ptr, t_ptr, rows, length,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACC: tl.constexpr, TANGENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    live = (row < rows)[:, None] & (column < length)[None, :]
    at = row[:, None] * length + column[None, :]
    s = tl.load(s_ptr + at, mask=live, other=0).to(ACC)
    a = tl.load(xi_ptr + at, mask=live, other=0).to(ACC)
    b = tl.load(q_ptr + at, mask=live, other=0).to(ACC)
    a -= tl.sum(s * a, 1)[:, None]
    b -= tl.sum(s * b, 1)[:, None]
    if TANGENT:
        tl.store(t_ptr + at, s * b, mask=live)
    ab = a * b
    tl.store(source_ptr + at, s * (ab - tl.sum(s * ab, 1)[:, None]), mask=live)


def launch_softmax(s: Tensor, xi: Tensor, q: Tensor, tangent: bool) -> list[Tensor]:
    """[s⊙(a⊙b − ⟨s, a⊙b⟩)] with a = ξ − ⟨s,ξ⟩, b = q − ⟨s,q⟩, and where wanted the tangent s⊙b,
    over the last axis; contiguous."""
    given = [t.contiguous() for t in (s, xi, q)]
    source = torch.empty_like(given[0])
    t = torch.empty_like(source) if tangent else None
    if s.numel():
        key = (tangent, look(given[0]))
        planned(_softmax_plans, key, lambda: _planned_softmax(s, tangent))(*given, source, t)
    return [source] if t is None else [source, t]


def _planned_softmax(s: Tensor, tangent: bool) -> Launch:
    length = s.shape[-1]
    count, columns = s.numel() // length, launch.power_of_two(length)
    rows = max(1, 2048 // columns)
    wide = accumulation(s.dtype) == torch.float64
    return Launch(
        _softmax_kernel, (triton.cdiv(count, rows),), (count, length), ROWS=rows, COLUMNS=columns,
        ACC=tl.float64 if wide else tl.float32, TANGENT=tangent,
    )  # fmt: skip


_softmax_plans: dict[Any, Launch] = {}


launch.opaque(
    "softmax_second(Tensor s, Tensor xi, Tensor q, bool tangent) -> Tensor[]",
    launch_softmax,
    lambda s, xi, q, tangent: [
        torch.empty_like(s, memory_format=torch.contiguous_format) for _ in range(1 + tangent)
    ],
)


def fused_softmax(s: Tensor, xi: Tensor, q: Tensor, dim: int, tangent: bool) -> Any:
    """The same as (tangent or None, source) in the form that the sweeps need now; None where they
    write the formula out."""
    tensors = (s, xi, q)
    if launch.fusing() or launch.batched() or not launch.on_cuda(*tensors):
        return None
    if (
        not s.dim()
        or dim % s.dim() != s.dim() - 1
        or any(map(is_functorch_wrapped_tensor, tensors))
    ):
        return None
    length = s.shape[-1]
    alike = all(t.dtype is s.dtype and t.shape == s.shape for t in tensors)
    if not alike or s.dtype not in DTYPES or type(length) is not int or length > LONGEST_ROW:
        return None
    if not available():
        return None
    flat = launch.being_flattened()
    source, *t = (torch.ops.doubleback.softmax_second if flat else launch_softmax)(
        *tensors, tangent
    )
    return (t[0] if tangent else None), source
