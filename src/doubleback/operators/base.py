"""What an operator is; operators between spaces; composition and sums. And those without weights:
average pooling, invertible down-sampling and its inverse, and any multilinear map that an einsum
can write, with its adjoint in any argument.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._torch import pytree
from ..counting import counted, recording
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
        given = f"{len(weight)}" if isinstance(weight, (tuple, list)) else type(weight).__name__
        raise InputError(f"{op} takes a pair of weights, one per operator, not {given}")
    return weight[0], weight[1]


# Operators without weights -----------------------------------------------------------------------


aten = torch.ops.aten
_POOLS = {
    1: (aten.avg_pool2d, aten.avg_pool2d_backward),
    2: (aten.avg_pool2d, aten.avg_pool2d_backward),
    3: (aten.avg_pool3d, aten.avg_pool3d_backward),
}


@dataclass(frozen=True)
class AveragePool(Operator):
    """The mean over windows, in one to three dimensions; no weight: θ is None.

    x: (B, C, *sizes) or (C, *sizes). Arguments as of ``torch.nn.AvgPool2d``.

    >>> import torch
    >>> K, x = AveragePool((2,)), torch.tensor([[[1.0, 3.0, 5.0]]])
    >>> K.forward(None, x), K.transpose(None, torch.ones(1, 1, 1), x.shape)
    (tensor([[[2.]]]), tensor([[[0.5000, 0.5000, 0.0000]]]))
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    ceil_mode: bool = False
    count_include_pad: bool = True
    divisor: int | None = None

    def __post_init__(self) -> None:
        for name in ("kernel", "stride", "padding"):
            if not isinstance(getattr(self, name), tuple):
                raise InputError(
                    f"{self}: {name} is a tuple, one number per spatial axis; for images "
                    "AveragePool((2, 2))"
                )
        n = len(self.kernel)
        given = (len(self.stride), len(self.padding))
        if n not in _POOLS or any(size not in (0, n) for size in given):
            raise InputError(f"{self} needs 1 to 3 window sizes, and as many strides and paddings")

    def _options(self) -> list[Any]:
        parts = [self.kernel, self.stride or self.kernel, self.padding or (0,) * len(self.kernel)]
        if len(self.kernel) == 1:  # a row of height 1
            parts = [(fill, *part) for fill, part in zip((1, 1, 0), parts, strict=True)]
        rest = [self.ceil_mode, self.count_include_pad, self.divisor]
        return [*map(list, parts), *rest]

    def forward(self, weight: None, x: Tensor) -> Tensor:
        pool = _POOLS[len(self.kernel)][0]
        if len(self.kernel) == 1:
            return pool(x.unsqueeze(-2), *self._options()).squeeze(-2)
        return pool(x, *self._options())

    def transpose(self, weight: None, y: Tensor, shape: Shape | None = None) -> Tensor:
        """Each entry of y spread evenly over its window."""
        if shape is None:
            raise InputError(f"the transpose of {self} needs the input's shape")
        flat = len(self.kernel) == 1
        if flat:
            y, shape = y.unsqueeze(-2), (*shape[:-1], 1, shape[-1])
        last = y.dim() == 4 and y.shape[1] > 1 and y.stride(1) == 1  # channels last
        last = last and not (y.is_cuda and self._overlaps)
        form = torch.channels_last if last else torch.contiguous_format
        unread = torch.empty(tuple(shape), dtype=y.dtype, device=y.device, memory_format=form)
        x = _POOLS[len(self.kernel)][1](y, unread, *self._options())
        return x.squeeze(-2) if flat else x

    @property
    def _overlaps(self) -> bool:
        """Whether an entry may lie in several windows, or a window reach over the edge. PyTorch's
        CUDA kernel of this transpose is wrong there for images that lie channels-last."""
        strides = self.stride or self.kernel
        return any(self.padding) or any(s < k for s, k in zip(strides, self.kernel, strict=True))

    def weight_adjoint(self, x: Tensor, y: Tensor, shape: Any = None) -> None:
        return None

    def sample(self) -> tuple[None, Tensor]:
        return None, torch.randn(2, 3, *(2 * k + 1 for k in self.kernel))


@dataclass(frozen=True)
class InvertibleDownsampling(Operator):
    """Blocks of r₁×…×r_n places become channels: (…, C, *sizes) → (…, C·Πr, *sizes/r).

    A permutation, so Kᵀ = K⁻¹. In two dimensions this is ``torch.nn.PixelUnshuffle``.

    >>> import torch
    >>> K, x = InvertibleDownsampling((2, 2)), torch.randn(1, 3, 4, 6)
    >>> y = K.forward(None, x)
    >>> y.shape, bool((K.transpose(None, y) == x).all())
    (torch.Size([1, 12, 2, 3]), True)
    """

    factor: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_factor(self, self.factor)

    @property
    def inverse(self) -> InvertibleUpsampling:
        return InvertibleUpsampling(self.factor)

    def forward(self, weight: None, x: Tensor) -> Tensor:
        return _down(self, self.factor, x)

    def transpose(self, weight: None, y: Tensor, shape: Shape | None = None) -> Tensor:
        return _up(self, self.factor, y)

    def weight_adjoint(self, x: Tensor, y: Tensor, shape: Any = None) -> None:
        return None

    def sample(self) -> tuple[None, Tensor]:
        return None, torch.randn(2, 3, *(2 * r for r in self.factor))


@dataclass(frozen=True)
class InvertibleUpsampling(Operator):
    """The inverse: channels become blocks of places, as ``torch.nn.PixelShuffle``.

    >>> import torch
    >>> K, x = InvertibleUpsampling((2,)), torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    >>> K.forward(None, x)
    tensor([[[1., 3., 2., 4.]]])
    """

    factor: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_factor(self, self.factor)

    @property
    def inverse(self) -> InvertibleDownsampling:
        return InvertibleDownsampling(self.factor)

    def forward(self, weight: None, x: Tensor) -> Tensor:
        return _up(self, self.factor, x)

    def transpose(self, weight: None, y: Tensor, shape: Shape | None = None) -> Tensor:
        return _down(self, self.factor, y)

    def weight_adjoint(self, x: Tensor, y: Tensor, shape: Any = None) -> None:
        return None

    def sample(self) -> tuple[None, Tensor]:
        return None, torch.randn(2, 3 * math.prod(self.factor), *(2 for _ in self.factor))


def _check_factor(op: Operator, factor: Any) -> None:
    if not isinstance(factor, tuple):
        example = (factor, factor) if isinstance(factor, int) else (2, 2)
        raise InputError(
            f"{op}: the factor is a tuple, one number per spatial axis; for images "
            f"{type(op).__name__}({example})"
        )
    if not factor or any(not isinstance(r, int) or r < 1 for r in factor):
        raise InputError(f"{op} needs one positive whole factor per spatial axis")


def _down(op: Operator, factor: tuple[int, ...], x: Tensor) -> Tensor:
    n = len(factor)
    if x.dim() <= n or any(s % r for s, r in zip(x.shape[-n:], factor, strict=True)):
        raise InputError(f"{op}: sizes of an input of shape {tuple(x.shape)} are no multiples")
    lead, (channels, *sizes) = x.shape[: -n - 1], x.shape[-n - 1 :]
    small = [s // r for s, r in zip(sizes, factor, strict=True)]
    split = [part for pair in zip(small, factor, strict=True) for part in pair]
    start = len(lead) + 1
    order = [*range(start), *range(start + 1, start + 2 * n, 2), *range(start, start + 2 * n, 2)]
    blocks = x.reshape(*lead, channels, *split).permute(order)
    return blocks.reshape(*lead, channels * math.prod(factor), *small)


def _up(op: Operator, factor: tuple[int, ...], y: Tensor) -> Tensor:
    n, block = len(factor), math.prod(factor)
    if y.dim() <= n or y.shape[-n - 1] % block:
        raise InputError(f"{op}: channels of a shape {tuple(y.shape)} are no multiple of {block}")
    lead, (channels, *sizes) = y.shape[: -n - 1], y.shape[-n - 1 :]
    start = len(lead) + 1
    order = [*range(start), *(k for i in range(n) for k in (start + n + i, start + i))]
    blocks = y.reshape(*lead, channels // block, *factor, *sizes).permute(order)
    large = [s * r for s, r in zip(sizes, factor, strict=True)]
    return blocks.reshape(*lead, channels // block, *large)


# Multilinear maps --------------------------------------------------------------------------------


def einsum_parts(equation: str) -> tuple[list[str], str]:
    """Subscripts of the operands and of the result, an implicit result spelled out.

    >>> einsum_parts("ij, jk")
    (['ij', 'jk'], 'ik')
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        letters = [c for term in terms for c in term if c.isalpha()]
        right = "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    return terms, right


def is_plain(equation: str) -> bool:
    """No ellipsis, and no letter twice in one operand."""
    terms, _ = einsum_parts(equation)
    return "." not in equation and all(len(set(term)) == len(term) for term in terms)


def einsum_adjoint(
    equation: str, argument: int, shape: Shape, others: Sequence[Tensor], y: Tensor
) -> Tensor:
    """The adjoint in one argument, of that argument's `shape`: an einsum of y with the others.

    A letter that this argument alone holds and the result lacks is summed over: its adjoint
    expands.
    """
    terms, result = einsum_parts(equation)
    mine, theirs = terms[argument], terms[:argument] + terms[argument + 1 :]
    known = [c for c in mine if c in result or any(c in term for term in theirs)]
    adjoint = torch.einsum(f"{','.join([result, *theirs])}->{''.join(known)}", y, *others)
    view = [shape[mine.index(c)] if c in known else 1 for c in mine]
    return adjoint.reshape(view).expand(tuple(shape))


@dataclass(frozen=True)
class Multilinear(Operator):
    """M(u₁ … u_n) by an einsum, with the adjoint in any argument:

        ⟨M(u₁ … u_n), y⟩ = ⟨u_k, adjoint(k, (u₁ … u_n), y)⟩

    With two arguments it is a bilinear operator K(θ, x), the weight first. `arguments` and
    `codomain` are the spaces of the uₖ and of y, Euclidean by default.

    >>> import torch
    >>> M = Multilinear("bqd,bkd,bkv->bqv")  # attention without softmax
    >>> q, k, v = torch.randn(2, 3, 4), torch.randn(2, 5, 4), torch.randn(2, 5, 6)
    >>> M.adjoint(1, (q, k, v), torch.randn(2, 3, 6)).shape
    torch.Size([2, 5, 4])
    """

    equation: str
    arguments: tuple[Space, ...] = ()
    codomain: Space = field(default_factory=Euclidean)

    def __post_init__(self) -> None:
        if not is_plain(self.equation):
            raise InputError(
                f"Multilinear({self.equation!r}): an ellipsis, or a letter twice in one operand, "
                "has no adjoint by einsum"
            )
        count = len(einsum_parts(self.equation)[0])
        spaces = self.arguments or (Euclidean(),) * count
        if len(spaces) != count:
            raise InputError(
                f"Multilinear({self.equation!r}) has {count} arguments, but {len(spaces)} spaces "
                f"{spaces}"
            )
        object.__setattr__(self, "arguments", tuple(spaces))
        if count == 2:
            object.__setattr__(self, "parameters", spaces[0])
            object.__setattr__(self, "domain", spaces[1])

    def forward(self, *arguments: Tensor) -> Tensor:
        self._count(arguments)
        counted(forward=1)
        return torch.einsum(self.equation, *arguments)

    def adjoint(self, argument: int, arguments: Sequence[Any], y: Tensor) -> Tensor:
        """The adjoint in one argument; of arguments[argument] only the shape is read, and a shape
        may stand for it."""
        self._count(arguments)
        counted(**{"transpose" if argument else "weight_adjoint": 1})
        others = [u for i, u in enumerate(arguments) if i != argument]
        shape = shape_of(arguments[argument])
        y = self.codomain.riesz_inverse(y)
        return self.arguments[argument].riesz(
            einsum_adjoint(self.equation, argument, shape, others, y)
        )

    def transpose(self, weight: Tensor, y: Tensor, shape: Shape | None = None) -> Tensor:
        return self.adjoint(1, (weight, self._needed(shape)), y)

    def weight_adjoint(self, x: Tensor, y: Tensor, shape: Any = None) -> Tensor:
        return self.adjoint(0, (self._needed(shape), x), y)

    def _needed(self, shape: Any) -> Any:
        if shape is None:
            raise InputError(f"an adjoint of {self} needs the shape of its argument")
        return shape

    def _count(self, arguments: Sequence[Any]) -> None:
        if len(arguments) != len(self.arguments):
            raise InputError(
                f"Multilinear({self.equation!r}) takes {len(self.arguments)} arguments, not "
                f"{len(arguments)}"
            )

    def sample(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        terms, _ = einsum_parts(self.equation)
        size = {c: 2 + i % 3 for i, c in enumerate(sorted({c for term in terms for c in term}))}
        return tuple(torch.randn([size[c] for c in term]) for term in terms)
