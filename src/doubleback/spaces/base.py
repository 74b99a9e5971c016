"""What a space is, and those without a grid: Euclidean, weighted, products; and steps in spaces of
parameters, where a gradient is a representer and the space is a choice (theory §7).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..dtypes import lifted
from ..errors import InputError


def per_example(t: Tensor, batch_dims: int = 1) -> Tensor:
    """Sum over all but the first `batch_dims` axes, in float32 at least."""
    wide = lifted(t)
    return wide.reshape(*wide.shape[:batch_dims], prod(wide.shape[batch_dims:])).sum(-1)


def safe_sqrt(square: Tensor) -> Tensor:
    """√s with derivative 0 at s = 0, where autograd alone would give infinity. NaN stays NaN."""
    zero = square <= 0
    return torch.where(zero, 0, torch.where(zero, 1, square).sqrt())


class Space(ABC):
    """A Hilbert space of tensors with ⟨u, v⟩ = uᵀGv, G symmetric and positive definite.

    A space of your own defines two methods, both linear and inverse to each other; they keep
    shape, dtype and device, and treat leading axes as a batch:

        riesz(g) = G⁻¹g           from a Euclidean gradient to its representer
        riesz_inverse(u) = Gu     from an element to the functional ⟨u, ·⟩ as a Euclidean gradient

    so that Σᵢ gᵢvᵢ = ⟨riesz(g), v⟩ for every v. All else follows, also the operator norm between
    two spaces: the adjoint of J: X → Y is J* = X.riesz ∘ Jᵀ ∘ Y.riesz_inverse. A tensor that they
    hold, they read as `self.constant(tensor, like=g)`.

    >>> import torch
    >>> class Damped(Space):  # ⟨u, v⟩ = 4 Σ uᵢvᵢ
    ...     def riesz(self, g):
    ...         return g / 4
    ...     def riesz_inverse(self, u):
    ...         return 4 * u
    >>> Damped().norm(torch.ones(2, 9))
    tensor([6., 6.])
    """

    @property
    def hilbert(self) -> bool:
        """Whether the norm comes from an inner product, so that sums of squares do not depend on
        the directions that they are taken in."""
        return True

    @abstractmethod
    def riesz(self, g: Any) -> Any:
        """G⁻¹g, the representer of the functional u ↦ Σ gᵢuᵢ."""

    @abstractmethod
    def riesz_inverse(self, u: Any) -> Any:
        """Gu, the Euclidean gradient of the functional ⟨u, ·⟩."""

    def inner(self, u: Any, v: Any, batch_dims: int = 1) -> Tensor:
        """uᵀGv, one number for each index of the first `batch_dims` axes (0: one number)."""
        return per_example(lifted(u) * self.riesz_inverse(lifted(v)), batch_dims)

    def norm(self, u: Any, batch_dims: int = 1) -> Tensor:
        """√⟨u, u⟩."""
        return safe_sqrt(self.inner(u, u, batch_dims))

    def check(self, shape: Sequence[int]) -> None:
        """Raise an `InputError` where one example of this shape is no element of the space."""
        return None

    @staticmethod
    def constant(tensor: Tensor, like: Tensor) -> Tensor:
        """A tensor of the space's own in dtype and on the device of `like`, in a form that
        flattened and compiled sweeps can hold."""
        return torch.ops.aten.lift_fresh(tensor).to(device=like.device, dtype=like.dtype)

    def dual_square(self, gradients: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """(Σ ‖g‖²_*, the representers) over several inputs, each in this space; per example.

        The dual norm is ‖g‖_* = sup {Σ gᵢuᵢ : ‖u‖ ≤ 1} = √(gᵀG⁻¹g), and half the gradient of
        its square is G⁻¹g. 16-bit gradients are answered in float32.
        """
        squares, representers = [], []
        for g in gradients:
            g = lifted(g)
            representers.append(self.riesz(g))
            squares.append(per_example(g * representers[-1]))
        return sum(squares[1:], squares[0]), representers


def dual_square(
    space: Space, gradients: Sequence[Tensor], wide: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """`space.dual_square` after a check of the gradients' shapes; axis 0 is the batch, of the same
    size in each.

    wide: leave the representers of 16-bit gradients in float32, for what is still to come.
    """
    if len({tuple(g.shape[:1]) for g in gradients}) > 1:
        shapes = [tuple(g.shape) for g in gradients]
        raise InputError(
            f"a norm per example needs gradients of one leading size, not of shapes {shapes}"
        )
    if isinstance(space, Product):
        space.check_count(gradients)
    else:
        for g in gradients:
            space.check(tuple(g.shape[1:]))
    square, representers = space.dual_square(gradients)
    if wide:
        return square, representers
    return square, [u.to(g.dtype) for u, g in zip(representers, gradients, strict=True)]


@dataclass(frozen=True)
class Euclidean(Space):
    """⟨u, v⟩ = Σ uᵢvᵢ; the Riesz map is the identity.

    >>> import torch
    >>> Euclidean().inner(torch.ones(2, 3), torch.ones(2, 3))
    tensor([3., 3.])
    """

    def riesz(self, g: Tensor) -> Tensor:
        return g

    def riesz_inverse(self, u: Tensor) -> Tensor:
        return u


@dataclass(frozen=True, eq=False)
class Weighted(Space):
    """⟨u, v⟩ = Σ wᵢuᵢvᵢ with positive weights, such as the quadrature weights of a grid.

    The weight, a tensor or a number, broadcasts against one example. It is best kept on the
    inputs' device and in their dtype: any other is converted in every call.

    >>> import torch
    >>> space = Weighted(torch.tensor([2.0, 4.0]))
    >>> space.riesz(torch.ones(1, 2))
    tensor([[0.5000, 0.2500]])
    """

    weight: Tensor | float

    def __post_init__(self) -> None:
        weight = torch.as_tensor(self.weight).detach()
        if not weight.is_floating_point():
            weight = weight.to(torch.get_default_dtype())
        if weight.numel() == 0 or not bool(((weight > 0) & weight.isfinite()).all()):
            smallest = f"; the smallest is {float(weight.min()):g}" if weight.numel() else ""
            raise InputError(
                "Weighted needs positive weights, all finite, not these of shape "
                f"{tuple(weight.shape)}{smallest}"
            )
        object.__setattr__(self, "weight", weight)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Weighted):
            return NotImplemented
        mine, theirs = self.weight, other.weight
        return mine.shape == theirs.shape and bool((mine.cpu() == theirs.cpu()).all())  # type: ignore[union-attr]

    def __hash__(self) -> int:
        return hash((Weighted, tuple(self.weight.shape)))  # type: ignore[union-attr]

    def __repr__(self) -> str:
        weight: Tensor = self.weight  # type: ignore[assignment]
        low, high = float(weight.min()), float(weight.max())
        return f"Weighted(shape {tuple(weight.shape)}, {low:g} … {high:g})"

    def check(self, shape: Sequence[int]) -> None:
        weight: Tensor = self.weight  # type: ignore[assignment]
        try:
            fits = torch.broadcast_shapes(weight.shape, tuple(shape)) == tuple(shape)
        except RuntimeError:
            fits = False
        if not fits:
            raise InputError(
                f"weights of shape {tuple(weight.shape)} do not broadcast against one "
                f"example of shape {tuple(shape)}"
            )

    def _like(self, u: Tensor) -> Tensor:
        self.check(u.shape)
        return self.constant(self.weight, like=u)  # type: ignore[arg-type]

    def riesz(self, g: Tensor) -> Tensor:
        return g / self._like(g)

    def riesz_inverse(self, u: Tensor) -> Tensor:
        return u * self._like(u)


class Product(Space):
    """X₁ × … × X_n for several inputs: ⟨u, v⟩ = Σ ⟨u_k, v_k⟩, elements are tuples of tensors.

    >>> import torch
    >>> space = Product(Euclidean(), Weighted(3.0))
    >>> pair = torch.ones(2, 4), torch.ones(2, 5)
    >>> space.inner(pair, pair)
    tensor([19., 19.])
    """

    def __init__(self, *spaces: Space) -> None:
        for space in spaces:
            if not isinstance(space, Space):
                raise InputError(f"Product takes spaces, not {space!r}")
        if not spaces:
            raise InputError("Product needs at least one space")
        self.spaces = spaces

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Product) and self.spaces == other.spaces

    def __hash__(self) -> int:
        return hash((Product, self.spaces))

    def __repr__(self) -> str:
        return f"Product({', '.join(map(repr, self.spaces))})"

    @property
    def hilbert(self) -> bool:
        return all(space.hilbert for space in self.spaces)

    def _pairs(self, parts: Any) -> list[tuple[Any, Any]]:
        if not isinstance(parts, (tuple, list)) or len(parts) != len(self.spaces):
            given = len(parts) if isinstance(parts, (tuple, list)) else type(parts).__name__
            raise InputError(f"{self} has {len(self.spaces)} factors, its element has {given}")
        return list(zip(self.spaces, parts, strict=True))

    def check_count(self, gradients: Sequence[Tensor]) -> None:
        """As many inputs as factors, each of a shape that its factor takes."""
        if len(gradients) != len(self.spaces):
            shapes = [tuple(g.shape) for g in gradients]
            raise InputError(
                f"{self} has {len(self.spaces)} factors, but {len(gradients)} inputs are "
                f"penalised, of shapes {shapes}; choose them with wrt="
            )
        for space, g in zip(self.spaces, gradients, strict=True):
            space.check(tuple(g.shape[1:]))

    def riesz(self, g: Any) -> tuple:
        return tuple(space.riesz(part) for space, part in self._pairs(g))

    def riesz_inverse(self, u: Any) -> tuple:
        return tuple(space.riesz_inverse(part) for space, part in self._pairs(u))

    def inner(self, u: Any, v: Any, batch_dims: int = 1) -> Tensor:
        pairs = zip(self._pairs(u), v, strict=True)
        return torch.stack([s.inner(a, b, batch_dims) for (s, a), b in pairs]).sum(0)

    def dual_square(self, gradients: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        squares = [space.dual_square([g]) for space, g in self._pairs(list(gradients))]
        total: Any = sum(square for square, _ in squares)
        return total, [u for _, parts in squares for u in parts]


# Spaces of parameters ----------------------------------------------------------------------------


def parameter_spaces(optimizer: Optimizer, spaces: Mapping[Tensor, Space]) -> Optimizer:
    """The same optimiser, stepping with the gradients' representers in the given spaces.

    ∇^Θ ℓ = G_Θ⁻¹ ∇ℓ: the direction of steepest descent depends on what a unit step of a parameter
    means. In a Sobolev space of filters it is smoothed, in a weighted space scaled entry by entry.

    optimizer: any optimiser that holds the parameters; it is returned, so schedulers, `GradScaler`
        and closures work as before. spaces: parameter → space; others keep their gradients.

    Only the step sees the representers: `.grad` holds the Euclidean gradient again afterwards.
    Weight decay, momentum and the like act on the representer, as the optimiser defines them;
    gradients are clipped before, in the Euclidean norm.

    >>> import torch, doubleback as db
    >>> net = torch.nn.Conv2d(3, 8, 7)
    >>> smooth = db.spaces.Sobolev(1.0, spacing=(1.0, 1.0), boundary="neumann")
    >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> optimizer = db.parameter_spaces(optimizer, {net.weight: smooth})
    """
    held = [p for group in optimizer.param_groups for p in group["params"]]
    chosen: list[tuple[Tensor, Space]] = []
    for parameter, space in spaces.items():
        if not isinstance(space, Space):
            raise InputError(f"parameter_spaces needs a space for each parameter, not {space!r}")
        if not any(parameter is p for p in held):
            raise InputError(
                f"the optimiser does not hold the parameter of shape {tuple(parameter.shape)} "
                f"that {space} is for"
            )
        with torch.no_grad():  # a space that does not fit is known before the first step
            space.riesz(torch.zeros_like(parameter))
        chosen.append((parameter, space))
    euclidean: list[tuple[Tensor, Tensor]] = []

    def represent() -> None:
        euclidean.clear()
        with torch.no_grad():
            for parameter, space in chosen:
                if parameter.grad is not None:
                    euclidean.append((parameter, parameter.grad))
                    parameter.grad = space.riesz(parameter.grad)

    def before(_: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0]: the optimiser
        if closure is None:
            represent()
            return None

        def represented() -> Any:
            result = closure()
            represent()
            return result

        if len(args) > 1:
            return (args[0], represented, *args[2:]), kwargs
        return args, {**kwargs, "closure": represented}

    def after(*_: Any) -> None:
        for parameter, gradient in euclidean:
            parameter.grad = gradient
        euclidean.clear()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return optimizer
