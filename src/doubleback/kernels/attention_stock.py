"""PyTorch's own attention kernels: which one applies, its value and its vjp, and the dropout it
draws. Each takes (b, heads, length, ·) and keeps its own log-sum-exp and random state for its
backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from .._torch import (
    FakeTensorMode,
    TorchDispatchMode,
    disable_current_modes,
)
from ..errors import PatchError
from .launch import traced

if TYPE_CHECKING:
    from .attention import Frame

aten = torch.ops.aten

Maybe = Tensor | None
# (log-sum-exp (…, Hq, N) in float32 or float64, backend, *tensors for the backend's own backward)
Residual = tuple[Any, ...]

MATH, FLASH, EFFICIENT, CUDNN = (
    int(b.value)
    for b in (
        SDPBackend.MATH,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
    )
)


def choose_backend(f: Frame, q: Tensor, k: Tensor, v: Tensor) -> int:
    """The kernel that F.scaled_dot_product_attention would choose here, as an SDPBackend."""
    spread = any(
        t.shape[:-2] != (*f.batch, heads) for t, heads in ((q, f.h * f.g), (k, f.h), (v, f.h))
    )
    foreign = f.mask is not None and f.mask.dtype not in (torch.bool, q.dtype)
    both = f.mask is not None and f.causal
    empty = any(t.numel() == 0 for t in (q, k, v))
    turned = f.scale <= 0 and q.is_cuda  # those kernels subtract the largest score before scaling
    odd = spread or foreign or both or empty or turned
    if not f.shape or odd or q.device.type not in ("cpu", "cuda"):
        return MATH
    call = partial(_choice, f, f.heads(q, f.g), f.heads(k), f.heads(v))
    backend = call()
    if backend == CUDNN and f.mask is not None:
        # cuDNN's masks do not give zeros in rows without a score.
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            backend = call()
        finally:
            torch.backends.cuda.enable_cudnn_sdp(True)
    return backend if backend in (FLASH, EFFICIENT, CUDNN) else MATH


def _choice(f: Frame, q: Tensor, k: Tensor, v: Tensor) -> int:
    options: Any = {"is_causal": f.causal, "scale": f.scale, "enable_gqa": f.g > 1}
    like: Any = {"device": q.device}
    if not f.traced:
        return aten._fused_sdp_choice(q, k, v, f.mask, **options)
    # On the tensors of a trace that function knows no device: watch the real choice on fake ones.
    with disable_current_modes(), FakeTensorMode(), torch.no_grad(), _Witness() as seen:
        fakes: Any = [
            None if t is None else torch.empty_strided(t.shape, t.stride(), **like, dtype=t.dtype)
            for t in (q, k, v, f.mask)
        ]
        F.scaled_dot_product_attention(*fakes, **options)
    return seen.backend


class _Witness(TorchDispatchMode):
    """Remembers which fused kernel ran."""

    backend = MATH
    kernels: ClassVar = {
        aten._scaled_dot_product_flash_attention_for_cpu.default: FLASH,
        aten._scaled_dot_product_flash_attention.default: FLASH,
        aten._scaled_dot_product_efficient_attention.default: EFFICIENT,
        aten._scaled_dot_product_cudnn_attention.default: CUDNN,
    }

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.backend = self.kernels.get(func, self.backend)
        return func(*args, **(kwargs or {}))


def stock_forward(backend: int, f: Frame, q, k, v) -> tuple[Tensor, Residual]:
    width = v.shape[-1]
    q, k, v, bias = f.heads(q, f.g), f.heads(k), f.heads(v), _bias(backend, f, q)
    if q.device.type == "cpu":
        out, *kept = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, f.causal, attn_mask=bias, scale=f.scale
        )
    elif backend == FLASH:
        r = aten._scaled_dot_product_flash_attention(
            _pad8(q), _pad8(k), _pad8(v), 0.0, f.causal, scale=f.scale
        )
        out, *kept = r[0][..., :width], r[1], r[6], r[7]
    elif backend == EFFICIENT:
        out, *kept = aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, True, 0.0, f.causal, scale=f.scale
        )
    else:
        r = aten._scaled_dot_product_cudnn_attention(
            q, k, v, bias, True, 0.0, f.causal, scale=f.scale
        )
        out, *kept = r[0], r[1], r[6], r[7]
    lse = kept[0].squeeze(-1) if kept[0].dim() > 3 else kept[0]
    lse = lse[..., : f.n].reshape(*f.shape, f.n)
    return out.reshape(*f.shape, f.n, width), (lse, backend, *kept)


def stock_backward(f: Frame, xi, q, k, v, out, residual, wanted) -> list[Maybe]:
    _, backend, lse, *rng = residual
    shapes = q.shape, k.shape, v.shape
    bias = _bias(backend, f, q)
    xi, q, out = (f.heads(t, f.g) for t in (xi, q, out))
    k, v = f.heads(k), f.heads(v)
    xi = xi if xi.stride(-1) == 1 else xi.contiguous()
    if q.device.type == "cpu":
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            xi, q, k, v, out, lse, 0.0, f.causal, attn_mask=bias, scale=f.scale
        )
    elif backend == FLASH:
        padded = [_pad8(t) for t in (xi, q, k, v, out)]
        grads = aten._scaled_dot_product_flash_attention_backward(
            *padded, lse, None, None, f.n, f.m, 0.0, f.causal, *rng, scale=f.scale
        )
    elif backend == EFFICIENT:
        grads = aten._scaled_dot_product_efficient_attention_backward(
            xi, q, k, v, bias, out, lse, *rng, 0.0, [*wanted, False], f.causal, scale=f.scale
        )
    else:
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            xi, q, k, v, out, lse, *rng, bias, None, None, f.n, f.m, 0.0, f.causal, scale=f.scale
        )
    pairs = zip(grads[:3], shapes, wanted, strict=True)
    return [g[..., : s[-1]].reshape(s) if w else None for g, s, w in pairs]


def _bias(backend: int, f: Frame, q: Tensor) -> Maybe:
    """The mask as a term of the scores, in the layout that `backend` asks for."""
    if f.mask is None:
        return None
    bias = f.mask
    if bias.dtype == torch.bool:
        bias = torch.zeros_like(bias, dtype=q.dtype).masked_fill(~bias, -math.inf)
    if backend != EFFICIENT:
        return bias
    bias = bias.expand(*bias.shape[:-1], f.m)
    bias = F.pad(bias, (0, -f.m % 16))[..., : f.m]  # rows start at multiples of 16
    return bias.expand(f.b, f.h * f.g, f.n, f.m)


def _pad8(t: Tensor) -> Tensor:
    """Zeros up to a width that flash attention takes; a pad by nothing would be a copy."""
    more = -t.shape[-1] % 8
    return F.pad(t, (0, more)) if more else t


# Dropout. A kernel draws its mask from (seed, offset) and the place of a score alone, so the mask
# is read off the kernel itself: where q = k = 0 it returns (Z V)/M, and V can be a code.

BITS = 6  # columns told apart by one number: 2⁶ − 1 is well within the 8 bits of bfloat16


@dataclass(frozen=True)
class Dropout:
    """Z in O = (Z∘P) V: 1/(1 − p) where a probability was kept, else 0.

    codes(first) tells of the columns [first, first + step), as (b, Hq, N, step/BITS) in uint8:
    bit i of entry c is set where column first + BITS·c + i was kept.
    """

    p: float
    step: int
    codes: Callable[[int], Tensor]

    def weights(self, codes: Tensor, m: int, dtype: torch.dtype) -> Tensor:
        """Z (…, m) from codes (…, c)."""
        shifts = torch.arange(BITS, dtype=torch.uint8, device=codes.device)
        bits = torch.bitwise_right_shift(codes.unsqueeze(-1), shifts) & 1
        return bits.flatten(-2)[..., :m].to(dtype) * (1 / (1 - self.p) if self.p < 1 else 0.0)

    def dense(self, m: int, dtype: torch.dtype) -> Tensor:
        """All of Z, (b, Hq, N, m)."""
        firsts = range(0, m, self.step)
        parts = [self.weights(self.codes(j), min(self.step, m - j), dtype) for j in firsts]
        return torch.cat(parts, -1)


def recovered(backend: int, p: float, q, k, v, seed: Tensor, offset: Tensor) -> Dropout:
    """The dropout of the call of `backend` with these q, k, v whose random state was kept."""
    b, heads, n, width = q.shape
    m, columns = k.shape[-2], v.shape[-1]

    def codes(first: int) -> Tensor:
        like: Any = {"dtype": q.dtype, "device": q.device}
        if p >= 1:
            return torch.zeros(b, heads, n, columns, dtype=torch.uint8, device=q.device)
        zero_q, zero_k = (torch.zeros(b, heads, x, width, **like) for x in (n, m))
        code = _code(first, m, columns, **like).expand(b, heads, m, columns).contiguous()
        with torch.no_grad(), _random_state(q.device, *state):
            return _decode(drop(backend, p, zero_q, zero_k, code), m, p)

    state = _read(backend, seed, offset) if p < 1 else (0, 0)
    return Dropout(p, BITS * columns, codes)


def drop(backend: int, p: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """O with dropout, for as many key heads as query heads, from CUDA's random state."""
    if backend == FLASH:
        return aten._scaled_dot_product_flash_attention(q, k, v, p)[0]
    if backend == EFFICIENT:
        return aten._scaled_dot_product_efficient_attention(q, k, v, None, True, p)[0]
    return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, p)[0]


def _code(first: int, m: int, columns: int, **like: Any) -> Tensor:
    """V (m, columns): 2ⁱ in row first + BITS·c + i of column c, zero in the rows of other calls."""
    j = torch.arange(m, device=like["device"]).unsqueeze(-1) - first
    here = j.div(BITS, rounding_mode="floor") == torch.arange(columns, device=like["device"])
    return torch.where(here, torch.exp2((j % BITS).float()), 0.0).to(like["dtype"])


def _decode(out: Tensor, m: int, p: float) -> Tensor:
    """out = Σ_j Z_j V_j / m, where Z is 0 or 1/(1 − p): whole numbers after rescaling."""
    return (out.float() * (m * (1 - p))).round().to(torch.uint8)


def _read(backend: int, seed: Tensor, offset: Tensor) -> tuple[int, int]:
    """The two numbers; flash attention keeps both in one tensor."""
    captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    if traced() or captured:
        raise PatchError(
            "second derivative of fused attention with dropout: its random state cannot be read "
            "while a graph is captured or traced; take it eagerly, set dropout_p=0, or run under "
            "sdpa_kernel(SDPBackend.MATH)"
        )
    both = seed.view(torch.int64) if backend == FLASH else (seed, offset)
    return int(both[0]) % 2**64, int(both[1]) % 2**64


@contextmanager
def _random_state(device: torch.device, seed: int, offset: int) -> Iterator[None]:
    """CUDA's generator at (seed, offset), and afterwards where it was."""
    generator = torch.cuda.default_generators[device.index]
    before = generator.get_state()
    try:
        generator.manual_seed(seed)
        generator.set_offset(offset)
        yield
    finally:
        generator.set_state(before)
