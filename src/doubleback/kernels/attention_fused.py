"""PyTorch's fused attention kernels: which one applies, its value and its vjp.

Each takes (b, heads, length, ·) and keeps its own log-sum-exp and random state (of no dropout) for
its backward.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

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


def choose(f: Frame, q: Tensor, k: Tensor, v: Tensor) -> int:
    """The kernel that F.scaled_dot_product_attention would choose here, as an SDPBackend."""
    spread = any(
        t.shape[:-2] != (*f.batch, heads) for t, heads in ((q, f.h * f.g), (k, f.h), (v, f.h))
    )
    foreign = f.mask is not None and f.mask.dtype not in (torch.bool, q.dtype)
    both = f.mask is not None and f.causal
    empty = any(t.numel() == 0 for t in (q, k, v))
    if not f.shape or spread or foreign or both or empty or q.device.type not in ("cpu", "cuda"):
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
    with _disable_current_modes(), FakeTensorMode(), torch.no_grad(), _Witness() as seen:
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


def forward(backend: int, f: Frame, q, k, v) -> tuple[Tensor, Residual]:
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


def backward(f: Frame, xi, q, k, v, out, residual, wanted) -> list[Maybe]:
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
    return F.pad(t, (0, -t.shape[-1] % 8))
