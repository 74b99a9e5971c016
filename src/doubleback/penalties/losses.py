"""What a penalty p(J*v) is made of: norms, the p; losses, of which v may be the gradient; and a key
of what their numbers depend on.

Norms give p's value per example and its gradient q₀ = ∇p (theory §2).

A norm's `value(ξ)` takes one tensor per penalised input and returns one number per example,
differentiably; `measure(ξ)` returns that and the gradient.

‖ξ‖ is the dual norm of the inputs' space: what a perturbation of size one can change. The space
yields ‖ξ‖² and ½∇‖ξ‖², in a Hilbert space the representer of ξ; the norms below are functions of
the two.

Losses, per example, come with the two derivatives that a head needs: ∇ℓ and ∇²ℓ·h (theory §4).

A fingerprint is what the numbers of a penalty depend on, as a key. A graph that is traced once and
replayed holds every number that the penalty, its norm, its space and its loss had then. With the
library's own classes all of these are attributes, so they can be compared before each replay. A
caller's code may read anything, so that no key tells whether it still does the same: it is run as
it is, at every call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dtypes import lifted
from ..errors import InputError, LabelError
from ..run import refuse_others
from ..spaces import Euclidean, Space, dual_square, per_example, safe_sqrt

LossName = Literal["cross_entropy", "mse", "bce"]
Reduction = Literal["mean", "sum", "none"]


class Measure(Protocol):
    """What stands for p: one number per example, and its gradient."""

    def value(self, xi: Sequence[Tensor]) -> Tensor: ...

    def measure(self, xi: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]: ...


NormLike = Measure | Callable[..., Tensor]

# ----------------------------------------------------------------------------------- fingerprints


_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None), range, torch.dtype})
_PACKAGE = __name__.partition(".")[0] + "."


class _Unknown(Exception):
    """Something whose numbers cannot be listed."""


class _SameTensor:
    """A tensor as part of a key: the same one, not written to since. It is kept alive, so that no
    other tensor takes its place in memory."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version

    def __hash__(self) -> int:
        return hash((id(self.tensor), self.version))

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, _SameTensor) and self.tensor is other.tensor
        return same and self.version == other.version  # type: ignore[union-attr]

    def __repr__(self) -> str:
        return f"<tensor of shape {tuple(self.tensor.shape)}, version {self.version}>"


def fingerprint(item: Any) -> Hashable | None:
    """Equal for equal numbers; None where a caller's code runs.

    Numbers and strings count by value, tensors by identity and version, objects of the library's
    own classes by class and attributes (less those that their class names in `volatile`), afresh
    at every call.

    >>> import doubleback as db
    >>> fingerprint(db.Deviation(1.0)) == fingerprint(db.Deviation(2.0))
    False
    >>> fingerprint(db.Custom(lambda out: out)) is None
    True
    """
    try:
        return _key(item)
    except _Unknown:
        return None


def _key(item: Any) -> Hashable:
    kind = type(item)
    if kind in _PLAIN:
        return item
    if isinstance(item, Tensor):
        if item.is_inference():  # it counts no changes
            raise _Unknown
        return _SameTensor(item)
    if kind is tuple or kind is list:
        return (kind, *[_key(part) for part in item])
    if kind.__module__.startswith(_PACKAGE):
        return (kind, *[_key(value) for value in _attributes(item)])
    if isinstance(item, (Number, torch.device)):  # NumPy's numbers among them
        return item  # type: ignore[return-value]
    raise _Unknown


def _attributes(item: Any) -> Iterator[Any]:
    volatile = getattr(item, "volatile", ())
    try:
        held = vars(item)
    except TypeError:
        raise _Unknown from None
    if not volatile:
        return iter(held.values())
    return (value for name, value in held.items() if name not in volatile)


# ------------------------------------------------------------------------------------------ norms


def _scaled(factor: Tensor, representers: Sequence[Tensor], xi: Sequence[Tensor]) -> list[Tensor]:
    """Each example's factor times its representer, in the dtypes of ξ."""
    return [
        (factor.reshape(-1, *(1,) * (u.dim() - 1)) * u).to(like.dtype)
        for u, like in zip(representers, xi, strict=True)
    ]


def _check_space(norm: Any) -> None:
    if not isinstance(norm.space, Space):
        raise InputError(
            f"{type(norm).__name__}'s space must be one of doubleback.spaces, or a subclass of "
            f"spaces.Space, not {norm.space!r}"
        )


@dataclass(frozen=True)
class SquaredNorm:
    """p(ξ) = ‖ξ‖², ∇p = 2ξ (twice its representer in a space other than Euclidean).

    >>> import torch
    >>> SquaredNorm().measure([torch.tensor([[3.0, 4.0]])])[0]
    tensor([25.])
    """

    space: Space = field(default_factory=Euclidean)

    def __post_init__(self) -> None:
        _check_space(self)

    def value(self, xi: Sequence[Tensor]) -> Tensor:
        if len(xi) == 1 and type(self.space) is Euclidean:  # in the fewest operations
            return per_example(lifted(xi[0]).square())
        return dual_square(self.space, xi)[0]

    def measure(self, xi: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        square, representers = dual_square(self.space, xi, wide=True)
        return square, [(2 * u).to(like.dtype) for u, like in zip(representers, xi, strict=True)]


@dataclass(frozen=True)
class Norm:
    """p(ξ) = ‖ξ‖, ∇p = ξ/‖ξ‖, and 0 where ξ = 0."""

    space: Space = field(default_factory=Euclidean)

    def __post_init__(self) -> None:
        _check_space(self)

    def value(self, xi: Sequence[Tensor]) -> Tensor:
        return safe_sqrt(dual_square(self.space, xi)[0])

    def of_length(self, norm: Tensor) -> Tensor:
        return norm

    def measure(self, xi: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        square, representers = dual_square(self.space, xi, wide=True)
        norm = safe_sqrt(square)
        factor = torch.where(norm == 0, 0, 1 / norm)
        return norm, _scaled(factor, representers, xi)


@dataclass(frozen=True)
class Deviation:
    """p(ξ) = (‖ξ‖ − target)², or max(0, ‖ξ‖ − target)² if one-sided (WGAN-GP, WGAN-LP).

    >>> import torch
    >>> Deviation(target=1.0).measure([torch.tensor([[3.0, 4.0]])])[0]
    tensor([16.])
    """

    target: float = 1.0
    one_sided: bool = False
    space: Space = field(default_factory=Euclidean)

    def __post_init__(self) -> None:
        _check_space(self)
        if isinstance(self.target, Tensor) and self.target.requires_grad:
            raise InputError(
                "Deviation holds its target constant, but it requires grad: detach it, or pass it "
                "to Custom(v, p, extras=1, sees_output=True) as an extra"
            )

    def value(self, xi: Sequence[Tensor]) -> Tensor:
        return self.of_length(safe_sqrt(dual_square(self.space, xi)[0]))

    def of_length(self, norm: Tensor) -> Tensor:
        excess = norm - self.target
        return (excess.clamp(min=0) if self.one_sided else excess).square()

    def measure(self, xi: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        square, representers = dual_square(self.space, xi, wide=True)
        norm = safe_sqrt(square)
        excess = norm - self.target
        if self.one_sided:
            excess = excess.clamp(min=0)
        factor = torch.where(norm == 0, 0, 2 * excess / norm)
        return excess.square(), _scaled(factor, representers, xi)


PER_EXAMPLE = (SquaredNorm, Norm, Deviation)  # example b of p depends on example b of ξ alone


@dataclass(frozen=True)
class Callback:
    """Any callable from an input-shaped tensor (a tuple for several inputs) to one number per
    example, which may depend on all of them; its gradient is taken by autograd, on the input's
    derivative alone."""

    p: Callable[..., Tensor]

    def value(self, xi: Sequence[Tensor]) -> Tensor:
        values = self.p(xi[0] if len(xi) == 1 else tuple(xi))
        batch = xi[0].shape[0]
        if not isinstance(values, Tensor) or tuple(values.shape) != (batch,):
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise InputError(
                f"p must return one number per example, shape ({batch},); it returned {shape}"
            )
        return values

    def measure(self, xi: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        with torch.enable_grad():
            leaves = [u.detach().requires_grad_() for u in xi]
            values = self.value(leaves)
            if not values.requires_grad:
                return values, [torch.zeros_like(u) for u in leaves]
            grads = torch.autograd.grad(values.sum(), leaves, allow_unused=True)
        return values.detach(), [
            torch.zeros_like(u) if g is None else g for u, g in zip(leaves, grads, strict=True)
        ]


def as_norm(p: Any) -> Any:
    """A norm as it is; a callable wrapped."""
    if hasattr(p, "measure"):
        return p
    if callable(p):
        return Callback(p)  # type: ignore[arg-type]
    raise InputError(
        f"norm must be SquaredNorm(), Norm(), Deviation() or a callable, not {type(p).__name__}"
    )


# ----------------------------------------------------------------------------------------- losses


GPU_CHECKS = 8  # batches of labels whose range is checked on a GPU


def _unread(y: Tensor) -> bool:
    """Whether these are labels where looking at them costs time at every step."""
    return y.is_cuda and not y.is_floating_point()


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

    def quick_check(self, out_shape: Sequence[int], y: Any) -> None:
        """The same before `total` or `quick_gradient`, which may look at numbers themselves."""
        self.check(out_shape, y)

    def total(self, out: Tensor, y: Any) -> Tensor | None:
        """The sum of all losses, where autograd differentiates it in few operations."""
        return self.values(out, y).sum()

    def quick_gradient(self, out: Tensor, y: Any) -> Tensor | None:
        """∇ℓ as a formula in the fewest operations, None where there is none."""
        return self.gradient(out, y)

    def gradient_degree(self, degree: int) -> int | None:
        """The degree of ∇ℓ as a polynomial in whatever the output is one of degree `degree` in;
        None where it is none."""
        return None

    def trial(self, out: Tensor, classes: int | None = None) -> Tensor | None:
        """Random labels that fit this output, None where it is not known what they have to be."""
        return None

    def fingerprint(self) -> Hashable | None:
        """A key of all that the numbers depend on; None where a caller's code runs."""
        return fingerprint(self)


class CrossEntropy(Loss):
    """ℓ = Σ_c −t_c log softmax(z)_c, summed over positions, t the smoothed and weighted labels.

    ∇ℓ = (Σt) s − t and ∇²ℓ h = (Σt)(s⊙h − ⟨s,h⟩s), classes on axis 1.
    """

    volatile = ("looked_at", "ignored")

    def __init__(
        self, label_smoothing: float, class_weights: Tensor | None, ignore_index: int
    ) -> None:
        if not 0 <= label_smoothing <= 1:
            raise InputError(f"label_smoothing must lie in [0, 1], not {label_smoothing}")
        self.smoothing = label_smoothing
        self.weights = class_weights
        self.ignore = ignore_index
        self.looked_at = 0
        self.ignored = False  # whether labels to be ignored were met

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
        values = per_example(-target * logs.masked_fill(target == 0, 0.0))
        if not _unread(y):
            return values
        wrong = self._wrong(y, out.shape[1])
        return torch.where(wrong if y.dim() == 1 else wrong.flatten(1).any(1), torch.nan, values)

    def gradient(self, out: Tensor, y: Tensor) -> Tensor:
        target = self._targets(out, y)
        s, total = torch.softmax(lifted(out), 1), target.sum(1, keepdim=True)
        if _unread(y):
            total = torch.where(self._wrong(y, out.shape[1]).unsqueeze(1), torch.nan, total)
        return (total * s - target).to(out.dtype)

    def _bare(self, y: Tensor) -> bool:
        """Whether PyTorch's operators take these labels, of 64 bits alone, and look at them."""
        return not self.smoothing and self.weights is None and y.dtype is torch.long

    def total(self, out: Tensor, y: Any) -> Tensor | None:
        if not self._bare(y):
            return None
        return F.cross_entropy(lifted(out), y, ignore_index=self.ignore, reduction="sum")

    def quick_gradient(self, out: Tensor, y: Any) -> Tensor | None:
        if not self._bare(y):
            return self.gradient(out, y)
        if self.ignored or out.dim() != 2 or 0 <= self.ignore < out.shape[1]:
            return None
        wide = lifted(out)
        s = torch.softmax(wide, 1)
        try:
            v = s.scatter_add(1, y.unsqueeze(1), s.new_full((out.shape[0], 1), -1.0))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # labels beyond the classes: to be ignored, or wrong
            self.ignored = True
            return None
        return v if wide is out else v.to(out.dtype)

    def hessian(self, out: Tensor, y: Tensor, h: Tensor) -> Tensor:
        total = self._targets(out, y).sum(1, keepdim=True)
        s, wide = torch.softmax(lifted(out), 1), lifted(h)
        return (total * s * (wide - (s * wide).sum(1, keepdim=True))).to(h.dtype)

    def trial(self, out: Tensor, classes: int | None = None) -> Tensor | None:
        if out.dim() < 2:
            raise LabelError(f"cross_entropy needs one column per class, not {tuple(out.shape)}")
        return torch.randint(classes or out.shape[1], (out.shape[0], *out.shape[2:]))

    def check(self, out_shape: Sequence[int], y: Any) -> None:
        self._check_shapes(out_shape, y)
        if not y.is_floating_point():
            self._check_range(y, out_shape[1])

    def quick_check(self, out_shape: Sequence[int], y: Any) -> None:
        if (
            not self._bare(y)
            or len(out_shape) < 2
            or tuple(y.shape) != (out_shape[0], *out_shape[2:])
        ):
            self.check(out_shape, y)

    def _check_shapes(self, out_shape: Sequence[int], y: Any) -> None:
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

    def _wrong(self, y: Tensor, classes: int) -> Tensor:
        return (y != self.ignore) & (y != y.clamp(0, classes - 1))

    def _check_range(self, y: Tensor, classes: int) -> None:
        """Labels in 0 … C−1. On a GPU the comparison stalls the queue, so only the first batches
        are looked at; those after them make NaN of what is wrong."""
        if y.numel() == 0 or y.is_meta or (_unread(y) and self.looked_at >= GPU_CHECKS):
            return
        self.looked_at += 1
        low, high = y.aminmax()
        if low >= 0 and high < classes:
            return
        bad = self._wrong(y, classes)
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

    def gradient_degree(self, degree: int) -> int | None:
        return degree

    def trial(self, out: Tensor, classes: int | None = None) -> Tensor | None:
        return torch.randn_like(out)

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

    def trial(self, out: Tensor, classes: int | None = None) -> Tensor | None:
        return torch.randint(2, out.shape).to(out.dtype)

    def check(self, out_shape: Sequence[int], y: Any) -> None:
        _same_shape("bce", out_shape, y)


class CallableLoss(Loss):
    """Your own (out, y) → one loss per example; both derivatives by autograd on the head."""

    def __init__(self, fn: Callable[[Tensor, Any], Tensor]) -> None:
        self.fn = fn

    def quick_gradient(self, out: Tensor, y: Any) -> Tensor | None:
        return None

    def values(self, out: Tensor, y: Any) -> Tensor:
        values = self.fn(out, y)
        if not isinstance(values, Tensor) or tuple(values.shape) != (out.shape[0],):
            given = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise InputError(
                f"the loss must return one value per example, shape ({out.shape[0]},), not "
                f"{given}; use reduction='none' and sum over the remaining axes"
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
    loss: LossName | Loss | Callable[[Tensor, Any], Tensor],
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
