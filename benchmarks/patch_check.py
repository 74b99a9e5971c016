"""Second derivatives under `db.patch()` on this device, against float64.

Each case is differentiated twice in its own dtype under the patch, and for comparison in stock
PyTorch on a path that can (unfused attention, no cuDNN for recurrent nets); both against stock in
float64 from the same numbers. A second derivative can be no better than the kernel that it belongs
to, so the error of that kernel's first derivatives, without the patch, is measured too. `suspect`
marks a patched error over three times the larger of these two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import doubleback as db
from doubleback.kernels import FLASH, recovered
from methods import math_attention

Context = Callable[[], contextlib.AbstractContextManager]
nothing = contextlib.nullcontext


@dataclass(frozen=True)
class Case:
    """function(inputs) with its shapes; `under` selects the kernel that is patched, `reference`
    a path on which stock has a second derivative, of `stock` if that is another function."""

    name: str
    function: Callable[..., Tensor]
    shapes: list[tuple[int, ...]]
    dtypes: tuple[str, ...] = ("float32", "bf16")
    under: Context = nothing
    reference: Context = nothing
    form: torch.memory_format = torch.contiguous_format
    cuda: bool = False
    stock: Callable[..., Tensor] | None = None
    options: dict[str, Any] = field(default_factory=dict)


def first(
    case: Case, inputs: list[Tensor], seed: Tensor, again: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """The inputs as leaves, and ∂_{inputs}⟨sin y, seed⟩."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    y = case.function(*leaves, **case.options)
    loss = (y.float() if y.dtype != torch.float64 else y).sin().mul(seed.to(y.device)).sum()
    return leaves, list(torch.autograd.grad(loss, leaves, create_graph=again))


def second(case: Case, inputs: list[Tensor], seed: Tensor) -> list[Tensor]:
    """The first derivatives, and ∂ of half their square in all inputs."""
    leaves, grads = first(case, inputs, seed, again=True)
    total = sum((g.float() if g.dtype != torch.float64 else g).square().sum() for g in grads) / 2
    found = [*grads, *torch.autograd.grad(total, leaves)]
    return [g.detach() for g in found]


def relative(found: list[Tensor], exact: list[Tensor]) -> float:
    """The largest ‖a − b‖/‖b‖ of all results."""
    errors = []
    for a, b in zip(found, exact, strict=True):
        b = b.double().cpu()
        errors.append(float((a.double().cpu() - b).norm() / b.norm().clamp(min=1e-30)))
    return max(errors)


def row(case: Case, dtype_name: str, dtype: torch.dtype, device: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(s, generator=generator).to(device, dtype) for s in case.shapes]
    inputs[0] = inputs[0].contiguous(memory_format=case.form)
    with torch.no_grad(), case.reference():
        seed = torch.randn(case.function(*inputs, **case.options).shape, generator=generator)
    found: dict[str, Any] = {"part": "check", "case": case.name, "dtype": dtype_name}
    unfused = replace(case, function=case.stock or case.function)
    try:
        with case.reference():
            exact = second(unfused, [t.double() for t in inputs], seed.double())
            stock = relative(second(unfused, inputs, seed), exact)
        with case.under():
            kernel = relative(first(case, inputs, seed)[1], exact[: len(inputs)])
            with db.patched():
                patched = relative(second(case, inputs, seed), exact)
        suspect = not patched <= 3 * max(stock, kernel) + 1e-6
        found |= {"error_patched": patched, "error_stock": stock, "error_kernel": kernel}
        found["suspect"] = suspect
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return found


@contextlib.contextmanager
def without_cudnn() -> Iterator[None]:
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


def recurrent(name: str, sizes: list[int] | None) -> Callable[..., Tensor]:
    """Two layers, 8 inputs, 16 hidden units; with `sizes`, packed sequences."""

    def function(x: Tensor, *weights: Tensor) -> Tensor:
        h = x.new_zeros(2, sizes[0] if sizes else x.shape[1], 16)
        state = (h, h) if name == "lstm" else h
        weights, network = tuple(0.3 * w for w in weights), getattr(torch._VF, name)
        if sizes:
            return network(x, torch.tensor(sizes), state, weights, True, 2, 0.0, True, False)[0]
        return network(x, state, weights, True, 2, 0.0, True, False, False)[0]

    return function


def dropped(backend: SDPBackend, dtype: torch.dtype, causal: bool) -> tuple[Callable, Callable]:
    """Attention of one random state by its kernel, and unfused with that kernel's mask: a wrong
    mask would show in the first derivatives, which are the kernel's own."""
    rate, state = 0.1, torch.tensor([7, 0])

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(7)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=causal)

    def unfused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        like, kernel, given = (t.detach().to(dtype) for t in (q, k, v)), int(backend.value), q.dtype
        seed, offset = (state, state) if kernel == FLASH else state.unbind()
        q, k, v = (t.to(torch.promote_types(given, torch.float32)) for t in (q, k, v))
        z = recovered(kernel, rate, *like, seed, offset).dense(k.shape[-2], q.dtype)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        return ((z * scores.softmax(-1)) @ v).to(given)

    return fused, unfused


def cases() -> Iterator[Case]:
    yield Case(
        "convolution, grouped", lambda x, w: F.conv2d(x, w, padding=1, stride=2, groups=4),
        [(4, 16, 14, 14), (16, 4, 3, 3)],
    )  # fmt: skip
    yield Case(
        "convolution, depthwise, channels-last", lambda x, w: F.conv2d(x, w, padding=1, groups=16),
        [(4, 16, 14, 14), (16, 1, 3, 3)], form=torch.channels_last,
    )  # fmt: skip
    norms: dict[str, tuple[Callable, list[tuple[int, ...]]]] = {
        "batch norm": (
            lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
            [(8, 16, 9, 9), (16,), (16,)],
        ),
        "group norm": (lambda x, w, b: F.group_norm(x, 4, w, b), [(8, 16, 9, 9), (16,), (16,)]),
        "instance norm": (
            lambda x, w, b: F.instance_norm(x, weight=w, bias=b), [(8, 16, 9, 9), (16,), (16,)],
        ),
        "layer norm": (lambda x, w, b: F.layer_norm(x, (96,), w, b), [(4, 33, 96), (96,), (96,)]),
        "RMS norm": (lambda x, w: F.rms_norm(x, (96,), w), [(4, 33, 96), (96,)]),
    }  # fmt: skip
    for name, (function, shapes) in norms.items():
        yield Case(name, function, shapes)
        if len(shapes[0]) == 4:
            yield Case(f"{name}, channels-last", function, shapes, form=torch.channels_last)
    for backend, dtypes in (
        (SDPBackend.FLASH_ATTENTION, ("bf16",)),
        (SDPBackend.EFFICIENT_ATTENTION, ("float32", "bf16")),
        (SDPBackend.CUDNN_ATTENTION, ("bf16",)),
    ):
        for label, causal in (("", False), (", causal", True)):
            under = partial(sdpa_kernel, backend)
            yield Case(
                f"attention {backend.name.lower()}{label}", F.scaled_dot_product_attention,
                [(2, 4, 197, 32)] * 3, dtypes, under, math_attention, cuda=True,
                options={"is_causal": causal},
            )  # fmt: skip
            for dtype in dtypes:
                exact = torch.float32 if dtype == "float32" else torch.bfloat16
                fused, unfused = dropped(backend, exact, causal)
                yield Case(
                    f"attention {backend.name.lower()}{label}, dropout", fused,
                    [(2, 4, 197, 32)] * 3, (dtype,), under, math_attention, cuda=True,
                    stock=unfused,
                )  # fmt: skip
    for name, kind in (("lstm", nn.LSTM), ("gru", nn.GRU), ("rnn_tanh", nn.RNN)):
        shapes = [tuple(p.shape) for p in kind(8, 16, 2).parameters()]
        sizes = [4, 4, 3, 2, 2, 1, 1]
        for label, x, packed in (("", (7, 4, 8), None), (", packed", (sum(sizes), 8), sizes)):
            yield Case(
                f"{name} of cuDNN{label}", recurrent(name, packed), [x, *shapes], ("float32",),
                reference=without_cudnn, cuda=True,
            )  # fmt: skip


def rows(device: str, dtypes: dict[str, torch.dtype]) -> Iterator[dict[str, Any]]:
    """One row per case and dtype, in exact float32: without tf32."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        for case in cases():
            for name in case.dtypes:
                if name in dtypes and (device == "cuda" or not case.cuda):
                    yield row(case, name, dtypes[name], device)
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
