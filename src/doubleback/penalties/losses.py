"""Losses per example with the two derivatives that a head needs: ∇ℓ and ∇²ℓ·h (theory §4)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dtypes import lifted
from ..errors import InputError, LabelError
from ..run import refuse_others
from ..spaces import Space, per_example
from .fingerprint import fingerprint

GPU_CHECKS = 8  # batches of labels whose range is checked on a GPU


class Loss(ABC):
    """One number per example: `values`; its gradient in the output; its Hessian times h."""

    volatile: tuple[str, ...] = ()  # attributes that no number depends on

    @abstractmethod
    def values(self, out: Tensor, y: Tensor) -> Tensor: ...

    @abstractmethod
    def gradient(self, out: Tensor, y: Tensor) -> Tensor: ...

    @abstractmethod
    def hessian(self, out: Tensor, y: Tensor, h: Tensor) -> Tensor | None: ...

    @abstractmethod
    def check(self, out_shape: Sequence[int], y: Any) -> None: ...

    def fingerprint(self) -> Hashable | None:
        """A key of all that the numbers depend on; None where a caller's code runs."""
        return fingerprint(self)


class CrossEntropy(Loss):
    """ℓ = Σ_c −t_c log softmax(z)_c, summed over positions, t the smoothed and weighted labels.

    ∇ℓ = (Σt) s − t and ∇²ℓ h = (Σt)(s⊙h − ⟨s,h⟩s), classes on axis 1.
    """

    volatile = ("looked_at",)

    def __init__(
        self, label_smoothing: float, class_weights: Tensor | None, ignore_index: int
    ) -> None:
        if not 0 <= label_smoothing <= 1:
            raise InputError(f"label_smoothing must lie in [0, 1], not {label_smoothing}")
        self.smoothing = label_smoothing
        self.weights = class_weights
        self.ignore = ignore_index
        self.looked_at = 0

    def _weights(self, out: Tensor) -> Tensor | None:
        if self.weights is None:
            return None
        w = Space.constant(self.weights, like=lifted(out))
        return w.reshape(-1, *(1,) * (out.dim() - 2))

    def _targets(self, out: Tensor, y: Tensor) -> Tensor:
        """t_c, of the output's shape."""
        dtype, classes = lifted(out).dtype, out.shape[1]
        soft = y.is_floating_point()
        if soft:
            hot = y.to(dtype)
        else:
            axis = torch.arange(classes, device=out.device).reshape(-1, *(1,) * (out.dim() - 2))
            hot = (y.unsqueeze(1) == axis).to(dtype)
        if self.smoothing:
            hot = hot * (1 - self.smoothing) + self.smoothing / classes
        if not soft and (self.smoothing or 0 <= self.ignore < classes):
            hot = hot * (y != self.ignore).unsqueeze(1)  # other ignored labels equal no class
        weights = self._weights(out)
        return hot if weights is None else hot * weights

    def values(self, out: Tensor, y: Tensor) -> Tensor:
        target, logs = self._targets(out, y), torch.log_softmax(lifted(out), 1)
        # 0·log 0 = 0: logits of −∞ exclude classes
        return per_example(-target * logs.masked_fill(target == 0, 0.0))

    def gradient(self, out: Tensor, y: Tensor) -> Tensor:
        target = self._targets(out, y)
        s = torch.softmax(lifted(out), 1)
        return (target.sum(1, keepdim=True) * s - target).to(out.dtype)

    def hessian(self, out: Tensor, y: Tensor, h: Tensor) -> Tensor:
        total = self._targets(out, y).sum(1, keepdim=True)
        s, wide = torch.softmax(lifted(out), 1), lifted(h)
        return (total * s * (wide - (s * wide).sum(1, keepdim=True))).to(h.dtype)

    def check(self, out_shape: Sequence[int], y: Any) -> None:
        shape = tuple(out_shape)
        if len(shape) < 2:
            raise LabelError(f"cross_entropy needs an output of shape (B, C, …), not {shape}")
        _tensor(y)
        positions = (shape[0], *shape[2:])
        if self.weights is not None and tuple(self.weights.shape) != (shape[1],):
            raise LabelError(
                f"class_weights must have shape ({shape[1]},), not {tuple(self.weights.shape)}"
            )
        if y.is_floating_point():
            if tuple(y.shape) != shape:
                raise LabelError(
                    f"class probabilities need the output's shape {shape}, not {tuple(y.shape)}"
                )
            return
        if tuple(y.shape) != positions:
            raise LabelError(f"labels must have shape {positions}, not {tuple(y.shape)}")
        self._check_range(y, shape[1])

    def _check_range(self, y: Tensor, classes: int) -> None:
        """Labels in 0 … C−1. On a GPU the comparison stalls the queue, so only the first batches
        are looked at."""
        if y.numel() == 0 or (y.is_cuda and self.looked_at >= GPU_CHECKS):
            return
        self.looked_at += 1
        low, high = y.aminmax()
        if low >= 0 and high < classes:
            return
        bad = (y != self.ignore) & ((y < 0) | (y >= classes))
        if bool(bad.any()):
            raise LabelError(
                f"labels must lie in 0 … {classes - 1} (or be ignore_index={self.ignore}); "
                f"found {int(y[bad][0])}"
            )


class SquaredError(Loss):
    """ℓ = ‖out − y‖², ∇ℓ = 2(out − y), ∇²ℓ h = 2h."""

    def values(self, out: Tensor, y: Tensor) -> Tensor:
        return per_example((lifted(out) - y).square())

    def gradient(self, out: Tensor, y: Tensor) -> Tensor:
        return (2 * (out - y)).to(out.dtype)

    def hessian(self, out: Tensor, y: Tensor, h: Tensor) -> Tensor:
        return 2 * h

    def check(self, out_shape: Sequence[int], y: Any) -> None:
        _same_shape("mse", out_shape, y)


class BinaryCrossEntropy(Loss):
    """ℓ = Σ −y log σ(z) − (1−y) log σ(−z); ∇ℓ = σ − y, ∇²ℓ h = σ(1−σ)h."""

    def values(self, out: Tensor, y: Tensor) -> Tensor:
        wide = lifted(out)
        return per_example(
            F.binary_cross_entropy_with_logits(wide, y.to(wide.dtype), reduction="none")
        )

    def gradient(self, out: Tensor, y: Tensor) -> Tensor:
        s = torch.sigmoid(lifted(out))
        return (s - y.to(s.dtype)).to(out.dtype)

    def hessian(self, out: Tensor, y: Tensor, h: Tensor) -> Tensor:
        s = torch.sigmoid(lifted(out))
        return (s * (1 - s) * h).to(h.dtype)

    def check(self, out_shape: Sequence[int], y: Any) -> None:
        _same_shape("bce", out_shape, y)


class CallableLoss(Loss):
    """Your own (out, y) → one loss per example; both derivatives by autograd on the head."""

    def __init__(self, fn: Callable[[Tensor, Any], Tensor]) -> None:
        self.fn = fn

    def values(self, out: Tensor, y: Any) -> Tensor:
        values = self.fn(out, y)
        if not isinstance(values, Tensor) or tuple(values.shape) != (out.shape[0],):
            found = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise InputError(
                f"the loss must return one value per example, shape ({out.shape[0]},), not "
                f"{found}; use reduction='none' and sum over the remaining axes"
            )
        return values

    def gradient(self, out: Tensor, y: Any) -> Tensor:
        with torch.enable_grad():
            leaf = out if out.requires_grad else out.detach().requires_grad_()
            values = self.values(leaf, y)
            refuse_others("the loss", values, leaf)
            create = out.requires_grad
            return torch.autograd.grad(values.sum(), leaf, create_graph=create)[0]

    def hessian(self, out: Tensor, y: Any, h: Tensor) -> Tensor | None:
        with torch.enable_grad():
            leaf = out.detach().requires_grad_()
            grad = self.gradient(leaf, y)
            if not grad.requires_grad:
                return None
            return torch.autograd.grad(grad, leaf, h, allow_unused=True)[0]

    def check(self, out_shape: Sequence[int], y: Any) -> None:
        return None


def make_loss(
    loss: str | Callable,
    label_smoothing: float = 0.0,
    class_weights: Tensor | None = None,
    ignore_index: int = -100,
) -> Loss:
    """A `Loss` from its name or from a callable."""
    if isinstance(loss, Loss):
        return loss
    if loss == "cross_entropy":
        return CrossEntropy(label_smoothing, class_weights, ignore_index)
    if label_smoothing or class_weights is not None or ignore_index != -100:
        raise InputError(
            "label_smoothing, class_weights and ignore_index belong to 'cross_entropy'"
        )
    if loss == "mse":
        return SquaredError()
    if loss == "bce":
        return BinaryCrossEntropy()
    if callable(loss):
        return CallableLoss(loss)
    raise InputError(
        f"loss must be 'cross_entropy', 'mse', 'bce' or a callable (out, y) → one loss per "
        f"example, not {loss!r}"
    )


def _tensor(y: Any) -> None:
    if not isinstance(y, Tensor):
        raise LabelError(f"labels must be a tensor, not {type(y).__name__}")


def _same_shape(name: str, out_shape: Sequence[int], y: Any) -> None:
    _tensor(y)
    if tuple(y.shape) != tuple(out_shape):
        raise LabelError(
            f"{name} needs a target of the output's shape {tuple(out_shape)}, not {tuple(y.shape)}"
        )
