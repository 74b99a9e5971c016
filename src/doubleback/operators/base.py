"""What an operator is; operators between spaces; composition and sums."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._torch import pytree
from ..counting import recording
from ..errors import InputError
from ..spaces import Euclidean, Product, Space

Shape = Sequence[int]


def placeholder(like: Tensor, shape: Shape) -> Tensor:
    """A tensor of `shape` without storage of its own, where only a shape is read."""
    return like.new_empty(()).expand(tuple(shape))


def shape_of(weight: Tensor | Shape) -> tuple[int, ...]:
    """The shape, given either itself or the tensor that has it."""
    return tuple(weight.shape) if isinstance(weight, Tensor) else tuple(weight)


class Operator(ABC):
    """K(θ, x), linear in x and in θ, with its adjoints in the spaces of its arguments:

        ⟨K(θ, x), y⟩_Y = ⟨x, Kᵀ(θ, y)⟩_X = ⟨θ, K□(x, y)⟩_Θ

    X = `domain`, Y = `codomain`, Θ = `parameters`, all Euclidean unless `between` says otherwise.
    An operator without parameters takes None for θ and returns None for K□. One of your own
    defines `forward`, `transpose` and `weight_adjoint`; `check_adjoint` tests them.

    >>> import torch
    >>> from doubleback.operators import AveragePool, Convolution
    >>> blur = AveragePool((2, 2)) @ Convolution((1, 1), (1, 1), (1, 1))
    >>> filters, x = torch.randn(4, 3, 3, 3), torch.randn(2, 3, 8, 8)
    >>> y = blur.forward((None, filters), x)
    >>> y.shape, blur.transpose((None, filters), y, x.shape).shape
    (torch.Size([2, 4, 4, 4]), torch.Size([2, 3, 8, 8]))
    """

    domain: Space = Euclidean()
    codomain: Space = Euclidean()
    parameters: Space = Euclidean()

    @abstractmethod
    def forward(self, weight: Any, x: Tensor) -> Tensor:
        """K(θ, x)."""

    @abstractmethod
    def transpose(self, weight: Any, y: Tensor, shape: Shape | None = None) -> Tensor:
        """Kᵀ(θ, y). shape: that of x, for operators that forget it (strides, pooling)."""

    @abstractmethod
    def weight_adjoint(self, x: Tensor, y: Tensor, shape: Any = None) -> Any:
        """K□(x, y). shape: that of θ, or θ itself, of which a bilinear operator reads the shape
        only; a composition needs θ."""

    def sample(self) -> tuple[Any, Tensor]:
        """A small (θ, x) to try the operator on."""
        raise InputError(f"{self} gives no sample; pass one: check_adjoint(op, weight, x)")

    def output_shape(self, weight: Any, shape: Shape) -> tuple[int, ...]:
        """The shape of K(θ, x) for x of this shape; nothing is computed."""

        def hollow(w: Tensor) -> Tensor:
            return torch.empty(w.shape, device="meta")

        with recording():  # no operation of the user's
            out = self.forward(
                pytree.tree_map_only(Tensor, hollow, weight), torch.empty(shape, device="meta")
            )
        return tuple(out.shape)

    def between(
        self,
        domain: Space | None = None,
        codomain: Space | None = None,
        parameters: Space | None = None,
    ) -> Between:
        """The same operator with other inner products; None leaves a space as it is."""
        return Between(
            self, domain or self.domain, codomain or self.codomain, parameters or self.parameters
        )

    def __matmul__(self, inner: Operator) -> Composition:
        if not isinstance(inner, Operator):
            return NotImplemented
        return Composition(self, inner)

    def __add__(self, other: Operator) -> Sum:
        if not isinstance(other, Operator):
            return NotImplemented
        return Sum(self, other)


@dataclass(frozen=True)
class Between(Operator):
    """An operator with chosen inner products: Kᵀ = G_X⁻¹ Wᵀ G_Y, K□ = G_Θ⁻¹ W□(·, G_Y ·).

    >>> import torch
    >>> from doubleback.operators import Dense
    >>> from doubleback.spaces import Weighted
    >>> K = Dense().between(domain=Weighted(2.0))
    >>> K.transpose(torch.eye(2), torch.ones(1, 2))
    tensor([[0.5000, 0.5000]])
    """

    operator: Operator
    domain: Space = field(default_factory=Euclidean)
    codomain: Space = field(default_factory=Euclidean)
    parameters: Space = field(default_factory=Euclidean)

    def __post_init__(self) -> None:
        for name in ("domain", "codomain", "parameters"):
            if not isinstance(getattr(self, name), Space):
                raise InputError(f"{name} must be a space, not {getattr(self, name)!r}")

    def _turned(self, y: Tensor) -> Tensor:
        """G_Y y, as the operator inside measures it."""
        return self.operator.codomain.riesz(self.codomain.riesz_inverse(y))

    def forward(self, weight: Any, x: Tensor) -> Tensor:
        return self.operator.forward(weight, x)

    def transpose(self, weight: Any, y: Tensor, shape: Shape | None = None) -> Tensor:
        x = self.operator.transpose(weight, self._turned(y), shape)
        return self.domain.riesz(self.operator.domain.riesz_inverse(x))

    def weight_adjoint(self, x: Tensor, y: Tensor, shape: Any = None) -> Any:
        theta = self.operator.weight_adjoint(x, self._turned(y), shape)
        if theta is None:
            return None
        return self.parameters.riesz(self.operator.parameters.riesz_inverse(theta))

    def sample(self) -> tuple[Any, Tensor]:
        return self.operator.sample()


@dataclass(frozen=True)
class Composition(Operator):
    """(K₂ K₁)(θ, x) = K₂(θ₂, K₁(θ₁, x)) with θ = (θ₂, θ₁), in the order they are written.

    (K₂K₁)ᵀ = K₁ᵀK₂ᵀ; K□ is (K₂□(K₁(θ₁, x), y), K₁□(x, K₂ᵀ(θ₂, y))) and needs θ. The space
    between the two must be the same on both sides.
    """

    outer: Operator
    inner: Operator

    def __post_init__(self) -> None:
        if self.outer.domain != self.inner.codomain:
            raise InputError(
                f"cannot compose: {self.outer} takes elements of {self.outer.domain}, "
                f"{self.inner} gives elements of {self.inner.codomain}"
            )
        spaces = {
            "domain": self.inner.domain,
            "codomain": self.outer.codomain,
            "parameters": Product(self.outer.parameters, self.inner.parameters),
        }
        for name, space in spaces.items():
            object.__setattr__(self, name, space)

    def forward(self, weight: Any, x: Tensor) -> Tensor:
        second, first = _pair(self, weight)
        return self.outer.forward(second, self.inner.forward(first, x))

    def _back(self, weight: Any, y: Tensor, shape: Shape | None) -> Tensor:
        """K₂ᵀ(θ₂, y)."""
        second, first = _pair(self, weight)
        between = None if shape is None else self.inner.output_shape(first, shape)
        return self.outer.transpose(second, y, between)

    def transpose(self, weight: Any, y: Tensor, shape: Shape | None = None) -> Tensor:
        return self.inner.transpose(_pair(self, weight)[1], self._back(weight, y, shape), shape)

    def weight_adjoint(self, x: Tensor, y: Tensor, shape: Any = None) -> tuple[Any, Any]:
        second, first = _pair(self, shape)
        middle = self.inner.forward(first, x)
        return (
            self.outer.weight_adjoint(middle, y, second),
            self.inner.weight_adjoint(x, self._back(shape, y, x.shape), first),
        )


@dataclass(frozen=True)
class Sum(Operator):
    """(K + L)(θ, x) = K(θ₁, x) + L(θ₂, x) with θ = (θ₁, θ₂), between the same spaces."""

    left: Operator
    right: Operator

    def __post_init__(self) -> None:
        for name in ("domain", "codomain"):
            mine, theirs = getattr(self.left, name), getattr(self.right, name)
            if mine != theirs:
                raise InputError(
                    f"cannot add: the {name} of {self.left} is {mine}, that of {self.right} is "
                    f"{theirs}"
                )
            object.__setattr__(self, name, mine)
        both = Product(self.left.parameters, self.right.parameters)
        object.__setattr__(self, "parameters", both)

    def forward(self, weight: Any, x: Tensor) -> Tensor:
        first, second = _pair(self, weight)
        a, b = self.left.forward(first, x), self.right.forward(second, x)
        if a.shape != b.shape:
            raise InputError(
                f"cannot add: {self.left} gives shape {tuple(a.shape)}, {self.right} gives "
                f"{tuple(b.shape)}"
            )
        return a + b

    def transpose(self, weight: Any, y: Tensor, shape: Shape | None = None) -> Tensor:
        first, second = _pair(self, weight)
        return self.left.transpose(first, y, shape) + self.right.transpose(second, y, shape)

    def weight_adjoint(self, x: Tensor, y: Tensor, shape: Any = None) -> tuple[Any, Any]:
        first, second = _pair(self, shape)
        return self.left.weight_adjoint(x, y, first), self.right.weight_adjoint(x, y, second)


def _pair(op: Operator, weight: Any) -> tuple[Any, Any]:
    if not isinstance(weight, (tuple, list)) or len(weight) != 2:
        found = f"{len(weight)}" if isinstance(weight, (tuple, list)) else type(weight).__name__
        raise InputError(f"{op} takes a pair of weights, one per operator, not {found}")
    return weight[0], weight[1]
