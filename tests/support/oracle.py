"""The slow oracle: penalties by stock autograd, `create_graph=True`, and nothing of the library.

    spec = Spec("r1", "output", norm=("squared",))
    truth = solve(net, args, spec, wrt=0, output=None, seed=1)

A `Spec` says in plain words what a penalty is. With xi = (d out / d x)* v over a batch of B,

    R_i = p(xi_i)          p: squared norm, norm, (norm - t)^2, max(norm - t, 0)^2, ...
    loss:      v = gradient in `out` of the sum over the batch of one loss per example
    output:    v = e_index, or ones for a scalar output
    match:     as output, p(xi) = ||xi - target||^2
    bilinear:  v = w, R_i = <xi_i, q_i>
    custom:    v = v(out, *extras), p given
    jacobian:  the sum over v = e_i, i in `entries` of the flattened output, of ||xi||^2; of the
               class probabilities softmax(out) with `softmax`

The norm's subgradient at xi = 0 is 0, as everywhere in torch (`torch.linalg.vector_norm`).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

WEIGHT = 0.7  # of the penalty beside the ordinary loss


@dataclass(frozen=True)
class Spec:
    name: str
    kind: str  # loss, output, match, bilinear, custom
    loss: str | Callable | None = None  # cross_entropy, mse, bce, or (out, y) -> (B,)
    norm: tuple = ("squared",)  # ("norm",), ("deviation", target, one_sided)
    index: int | None = None
    v: Callable | None = None
    p: Callable | None = None
    sees_output: bool = False  # whether p is called with the output and the extras, too
    reduction: str = "mean"
    label_smoothing: float = 0.0
    class_weights: Tensor | None = None
    ignore_index: int = -100
    extras: tuple = ()
    softmax: bool = False
    entries: tuple[int, ...] = ()


@dataclass
class Result:
    """What a training step produces. `gradients` covers parameters and floating-point arguments."""

    out: list[Tensor]
    penalty: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def ordinary_loss(out) -> Tensor:
    """Some smooth loss that reaches every floating-point output."""
    leaves = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()]
    return torch.stack([(t.float() if t.dtype == torch.bfloat16 else t).sub(0.3).square().mean()
                        for t in leaves]).sum()  # fmt: skip


def total_loss(out, penalty: Tensor) -> Tensor:
    """The ordinary loss plus the weighted penalty; an unreduced one is weighted per example."""
    ramp = torch.linspace(0.5, 1.5, penalty.numel(), dtype=penalty.dtype, device=penalty.device)
    reduced = (penalty * ramp).sum() if penalty.dim() else penalty
    return ordinary_loss(out) + WEIGHT * reduced


def collect(net: nn.Module, args: tuple, out, penalty: Tensor, prefix: str = "") -> Result:
    """Gradients and buffers after a backward call; `prefix` is stripped from the names."""
    gradients = {n.removeprefix(prefix): p.grad for n, p in net.named_parameters()}
    floats = [t for t in tree_leaves(args) if isinstance(t, Tensor) and t.is_leaf]
    gradients |= {f"input {k}": t.grad for k, t in enumerate(floats) if t.requires_grad}
    buffers = {n.removeprefix(prefix): b.clone() for n, b in net.named_buffers()}
    return Result(
        [t.detach() for t in tree_leaves(out)], penalty.detach(),
        {n: None if g is None else g.clone() for n, g in gradients.items()}, buffers,
    )  # fmt: skip


# ------------------------------------------------------------------------------------- penalties


def example_losses(spec: Spec, out: Tensor, y: Any) -> Tensor:
    """One loss per example: summed over positions and outputs, never averaged."""
    if callable(spec.loss):
        return spec.loss(out, y)
    if spec.loss == "cross_entropy":
        weights = None if spec.class_weights is None else spec.class_weights.to(out.dtype)
        losses = F.cross_entropy(
            out,
            y,
            weight=weights,
            ignore_index=spec.ignore_index,
            reduction="none",
            label_smoothing=spec.label_smoothing,
        )
    elif spec.loss == "mse":
        losses = (out - y) ** 2
    elif spec.loss == "bce":
        losses = F.binary_cross_entropy_with_logits(out, y, reduction="none")
    else:
        raise ValueError(f"unknown loss {spec.loss!r}")
    return losses.reshape(losses.shape[0], -1).sum(1)


def seed_at_output(spec: Spec, out: Tensor) -> Tensor:
    if spec.kind == "bilinear":
        return spec.extras[0]
    if spec.kind == "custom":
        return spec.v(out, *spec.extras)
    if spec.index is None:
        return torch.ones_like(out)
    v = torch.zeros_like(out)
    v[:, spec.index] = 1.0
    return v


def as_list(tree) -> list[Tensor]:
    return [tree] if isinstance(tree, Tensor) else tree_leaves(tree)


def per_example(spec: Spec, xi: tuple[Tensor, ...], out: Tensor | None = None) -> Tensor:
    def rows(tensors):
        return torch.cat([t.reshape(t.shape[0], -1) for t in tensors], 1)

    if spec.kind == "custom":
        seen = (out, *spec.extras) if spec.sees_output else ()
        return spec.p(xi[0] if len(xi) == 1 else xi, *seen)
    if spec.kind == "bilinear":
        return (rows(xi) * rows(as_list(spec.extras[1]))).sum(1)
    if spec.kind == "match":
        return (rows(xi) - rows(as_list(spec.extras[0]))).square().sum(1)
    if spec.norm[0] == "squared":
        return rows(xi).square().sum(1)
    size = torch.linalg.vector_norm(rows(xi), dim=1)
    if spec.norm[0] == "norm":
        return size
    _, target, one_sided = spec.norm
    excess = size - target
    return (excess.relu() if one_sided else excess).square()


# -------------------------------------------------------------------------------------- the step


def choose(out, path) -> Tensor:
    for key in () if path is None else path if isinstance(path, tuple) else (path,):
        out = out[key]
    return out


def penalised_inputs(net: nn.Module, args: tuple, kwargs: dict, wrt) -> list[Tensor]:
    names = list(inspect.signature(net.forward).parameters)
    chosen = []
    for w in wrt if isinstance(wrt, tuple) else (wrt,):
        if isinstance(w, str):
            chosen += as_list(kwargs[w] if w in kwargs else args[names.index(w)])
        else:
            chosen += as_list(args[w])
    return chosen


@contextlib.contextmanager
def twice_differentiable(slope: float = 1 / 6):
    """Stock paths that have a second derivative: the math kernel of attention, and hardsigmoid
    (whose own backward has none, and rounds 1/6 to float32) as a hardtanh, flat at both ends.
    slope: what its derivative is taken for, the numbers staying what they are."""

    def hardsigmoid(x, inplace=False):
        inner = x / 6
        if slope != 1 / 6:
            inner = slope * x + (inner - slope * x).detach()
        return F.hardtanh(inner + 0.5, 0.0, 1.0)

    with sdpa_kernel(SDPBackend.MATH), mock.patch.object(F, "hardsigmoid", hardsigmoid):
        yield


def value(net, args, spec: Spec, wrt=0, output=None, kwargs=None) -> tuple[Any, Tensor]:
    """(out, penalty), both with their graph."""
    kwargs = kwargs or {}
    xs = penalised_inputs(net, args, kwargs, wrt)
    full = net(*args, **kwargs)
    out = choose(full, output)
    if spec.kind == "jacobian":
        return full, reduced(spec, jacobian_square(spec, out, xs))
    if spec.kind == "loss":
        head, v = example_losses(spec, out, *spec.extras).sum(), None
    else:
        head, v = out, seed_at_output(spec, out)
    xi = torch.autograd.grad(head, xs, v, create_graph=True, materialize_grads=True)
    return full, reduced(spec, per_example(spec, xi, out))


def reduced(spec: Spec, penalty: Tensor) -> Tensor:
    return {"mean": penalty.mean, "sum": penalty.sum, "none": lambda: penalty}[spec.reduction]()


def jacobian_square(spec: Spec, out: Tensor, xs: list[Tensor]) -> Tensor:
    """Row by row, each with its own graph."""
    flat = (out.softmax(-1) if spec.softmax else out).flatten(1)
    rows = [
        torch.autograd.grad(flat[:, i].sum(), xs, create_graph=True, materialize_grads=True)
        for i in spec.entries or range(flat.shape[1])
    ]
    return torch.stack([per_example(spec, xi) for xi in rows]).sum(0)


def solve(net, args, spec: Spec, wrt=0, output=None, seed: int = 0, kwargs=None) -> Result:
    """One training step of `net` (fresh, gradients empty) under stock autograd."""
    torch.manual_seed(seed)
    with twice_differentiable():
        out, penalty = value(net, args, spec, wrt, output, kwargs)
        total_loss(out, penalty).backward()
    return collect(net, (args, kwargs or {}), out, penalty)


# ------------------------------------------------------------------------------------ comparison


def relative(a: Tensor, b: Tensor, floor: float = 0.0) -> float:
    """||a - b|| / max(||b||, floor); any difference in shape or finiteness is infinite."""
    if a.shape != b.shape:
        return float("inf")
    a, b = a.double(), b.double()
    if not torch.isfinite(b).all():
        return 0.0 if torch.equal(a.nan_to_num(7.0, 8.0, 9.0), b.nan_to_num(7.0, 8.0, 9.0)) else (
            float("inf"))  # fmt: skip
    error = (a - b).norm().item()
    if error == 0:
        return 0.0
    size = max(b.norm().item(), floor)
    return error / size if size > 0 and error == error else float("inf")


def zeros_for_none(g: Tensor | None, like: Tensor | None) -> Tensor:
    if g is not None:
        return g
    return torch.zeros(()) if like is None else torch.zeros_like(like)


def compare(got: Result, truth: Result, floor: float) -> dict[str, float]:
    """Relative errors by name. A gradient that is all rounding (a bias before a batch norm) is
    measured against `floor` times the largest gradient of the step; None counts as zero."""
    errors = {f"out {k}": relative(a, b) for k, (a, b) in
              enumerate(zip(got.out, truth.out, strict=True))}  # fmt: skip
    errors["penalty"] = relative(got.penalty, truth.penalty)
    if got.gradients.keys() != truth.gradients.keys():
        raise AssertionError(f"gradients of {got.gradients.keys() ^ truth.gradients.keys()}")
    scale = max((g.double().norm().item() for g in truth.gradients.values() if g is not None),
                default=0.0)  # fmt: skip
    for name, b in truth.gradients.items():
        a = got.gradients[name]
        errors[f"grad {name}"] = relative(zeros_for_none(a, b), zeros_for_none(b, a), floor * scale)
    if got.buffers.keys() != truth.buffers.keys():
        raise AssertionError(f"buffers {got.buffers.keys() ^ truth.buffers.keys()}")
    for name, b in truth.buffers.items():
        errors[f"buffer {name}"] = relative(got.buffers[name], b)
    return errors
