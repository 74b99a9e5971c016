"""Bilinear operators K with their two adjoints, Kᵀ and K□ (theory §1).

    ⟨K(θ, x), y⟩ = ⟨x, Kᵀ(θ, y)⟩ = ⟨θ, K□(x, y)⟩

Three functions serve every order of differentiation: the weight-adjoint of Kᵀ is K□ and the
transpose of K□ in x is Kᵀ (adjoint commutativity). The engine's rules call these operators.

What an operator is; operators between spaces; composition and sums. Those without weights: average
pooling, invertible down-sampling and its inverse, and any multilinear map that an einsum can write,
with its adjoint in any argument. Those with weights: dense, convolution, locally connected; and
layers that PyTorch lacks: locally connected ones, a filter of its own at every place.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ._torch import pytree
from .counting import counted, recording
from .errors import InputError
from .kernels import (
    Depthwise,
    Part,
    Strided,
    Turned,
    affine_rows,
    local_product,
    local_transpose,
    local_weight_adjoint,
    pays,
    times,
)
from .spaces import Euclidean, Product, Space

__all__ = [
    "AveragePool",
    "Between",
    "Composition",
    "Convolution",
    "Dense",
    "InvertibleDownsampling",
    "InvertibleUpsampling",
    "LocallyConnected",
    "LocallyConnected1d",
    "LocallyConnected2d",
    "Multilinear",
    "Operator",
    "Sum",
    "placeholder",
]

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


class _Weightless(Operator):
    """θ is None."""

    def weight_adjoint(self, x: Tensor, y: Tensor, shape: Any = None) -> None:
        return None


@dataclass(frozen=True)
class AveragePool(_Weightless):
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

    def sample(self) -> tuple[None, Tensor]:
        return None, torch.randn(2, 3, *(2 * k + 1 for k in self.kernel))


@dataclass(frozen=True)
class _Blocks(_Weightless):
    """Blocks of places and channels, one for the other."""

    factor: tuple[int, ...]

    def __post_init__(self) -> None:
        factor = self.factor
        if not isinstance(factor, tuple):
            example = (factor, factor) if isinstance(factor, int) else (2, 2)
            raise InputError(
                f"{self}: the factor is a tuple, one number per spatial axis; for images "
                f"{type(self).__name__}({example})"
            )
        if not factor or any(not isinstance(r, int) or r < 1 for r in factor):
            raise InputError(f"{self} needs one positive whole factor per spatial axis")

    def _down(self, x: Tensor) -> Tensor:
        n, factor = len(self.factor), self.factor
        if x.dim() <= n or any(s % r for s, r in zip(x.shape[-n:], factor, strict=True)):
            raise InputError(
                f"{self}: sizes of an input of shape {tuple(x.shape)} are no multiples"
            )
        lead, (channels, *sizes) = x.shape[: -n - 1], x.shape[-n - 1 :]
        small = [s // r for s, r in zip(sizes, factor, strict=True)]
        split = [part for pair in zip(small, factor, strict=True) for part in pair]
        start = len(lead) + 1
        order = [
            *range(start), *range(start + 1, start + 2 * n, 2), *range(start, start + 2 * n, 2)
        ]  # fmt: skip
        blocks = x.reshape(*lead, channels, *split).permute(order)
        return blocks.reshape(*lead, channels * math.prod(factor), *small)

    def _up(self, y: Tensor) -> Tensor:
        n, block = len(self.factor), math.prod(self.factor)
        if y.dim() <= n or y.shape[-n - 1] % block:
            raise InputError(
                f"{self}: channels of a shape {tuple(y.shape)} are no multiple of {block}"
            )
        lead, (channels, *sizes) = y.shape[: -n - 1], y.shape[-n - 1 :]
        start = len(lead) + 1
        order = [*range(start), *(k for i in range(n) for k in (start + n + i, start + i))]
        blocks = y.reshape(*lead, channels // block, *self.factor, *sizes).permute(order)
        large = [s * r for s, r in zip(sizes, self.factor, strict=True)]
        return blocks.reshape(*lead, channels // block, *large)


@dataclass(frozen=True)
class InvertibleDownsampling(_Blocks):
    """Blocks of r₁×…×r_n places become channels: (…, C, *sizes) → (…, C·Πr, *sizes/r).

    A permutation, so Kᵀ = K⁻¹. In two dimensions this is ``torch.nn.PixelUnshuffle``.

    >>> import torch
    >>> K, x = InvertibleDownsampling((2, 2)), torch.randn(1, 3, 4, 6)
    >>> y = K.forward(None, x)
    >>> y.shape, bool((K.transpose(None, y) == x).all())
    (torch.Size([1, 12, 2, 3]), True)
    """

    @property
    def inverse(self) -> InvertibleUpsampling:
        return InvertibleUpsampling(self.factor)

    def forward(self, weight: None, x: Tensor) -> Tensor:
        return self._down(x)

    def transpose(self, weight: None, y: Tensor, shape: Shape | None = None) -> Tensor:
        return self._up(y)

    def sample(self) -> tuple[None, Tensor]:
        return None, torch.randn(2, 3, *(2 * r for r in self.factor))


@dataclass(frozen=True)
class InvertibleUpsampling(_Blocks):
    """The inverse: channels become blocks of places, as ``torch.nn.PixelShuffle``.

    >>> import torch
    >>> K, x = InvertibleUpsampling((2,)), torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    >>> K.forward(None, x)
    tensor([[[1., 3., 2., 4.]]])
    """

    @property
    def inverse(self) -> InvertibleDownsampling:
        return InvertibleDownsampling(self.factor)

    def forward(self, weight: None, x: Tensor) -> Tensor:
        return self._up(x)

    def transpose(self, weight: None, y: Tensor, shape: Shape | None = None) -> Tensor:
        return self._down(y)

    def sample(self) -> tuple[None, Tensor]:
        return None, torch.randn(2, 3 * math.prod(self.factor), *(2 for _ in self.factor))


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


# --------------------------------------------------------------------------- operators with weights


def _unread(y: Tensor, weight: Tensor | None, shape: Sequence[int]) -> Tensor:
    """An input of which PyTorch reads shape and layout only. A stride-0 placeholder would make it
    copy channels-last cotangents back and forth."""
    if weight is not None and weight.dim() == 4 and not weight.is_contiguous():
        return torch.empty(
            tuple(shape), dtype=y.dtype, device=y.device, memory_format=torch.channels_last
        )
    return placeholder(y, shape)


@dataclass(frozen=True)
class Dense(Operator):
    """K(W, x) = x Wᵀ over the last axis, for any number of leading axes.

    x: (…, n), W: (m, n), y: (…, m).

    >>> import torch
    >>> K, W, x, y = Dense(), torch.ones(2, 3), torch.ones(4, 3), torch.ones(4, 2)
    >>> K.forward(W, x).shape, K.transpose(W, y).shape, K.weight_adjoint(x, y).shape
    (torch.Size([4, 2]), torch.Size([4, 3]), torch.Size([2, 3]))
    """

    def forward(self, weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
        counted(forward=1)
        return affine_rows(x, weight, bias)

    def transpose(self, weight: Tensor, y: Tensor, shape: Shape | None = None) -> Tensor:
        counted(transpose=1)
        return times(y, weight)

    def weight_adjoint(self, x: Tensor, y: Tensor, shape: Any = None) -> Tensor:
        counted(weight_adjoint=1)
        return y.reshape(-1, y.shape[-1]).t() @ x.reshape(-1, x.shape[-1])

    def sample(self) -> tuple[Tensor, Tensor]:
        return torch.randn(4, 5), torch.randn(2, 3, 5)


@dataclass(frozen=True)
class Convolution(Operator):
    """Convolution or transposed convolution in one to three dimensions.

    K(θ, x) = x ⋆ θ with stride, padding, dilation and groups, as ``aten.convolution``.

    >>> import torch
    >>> K = Convolution(stride=(2, 2), padding=(1, 1), dilation=(1, 1))
    >>> K.forward(torch.ones(5, 3, 3, 3), torch.ones(1, 3, 8, 8)).shape
    torch.Size([1, 5, 4, 4])
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool = False
    output_padding: tuple[int, ...] = ()
    groups: int = 1

    def _options(self) -> tuple:
        extra = self.output_padding or (0,) * len(self.stride)
        return (self.stride, self.padding, self.dilation, self.transposed, extra, self.groups)

    def _instead(
        self, part: Part, tensors: Sequence[Tensor | None], x_shape: Sequence[int],
        weight_shape: Sequence[int],
    ) -> Depthwise | Strided | None:  # fmt: skip
        """Another way to compute a part of this convolution from `tensors`, where it is faster than
        PyTorch's."""
        if self.transposed:
            return None
        first = next(t for t in tensors if t is not None)
        if self.folds(first.device, weight_shape, part):
            return Strided(x_shape, weight_shape, self.stride, self.padding, first.dtype)
        options = (self.stride, self.padding, self.dilation, self.groups)
        return Depthwise.where_faster(part, tensors, x_shape, weight_shape, *options)

    def _transposes(
        self, weight: Tensor | None, y: Tensor, x_shape: Sequence[int], weight_shape: Sequence[int]
    ) -> Depthwise | Strided | Turned | None:
        """Another way to compute Kᵀ, likewise."""
        options = (self.stride, self.padding, self.dilation, self.groups)
        turned = None if self.transposed else Turned.where_faster(y, weight_shape, *options)
        return turned or self._instead("Kᵀ", (y, weight), x_shape, weight_shape)

    def folds(self, device: torch.device, weight_shape: Sequence[int], part: Part = "K") -> bool:
        """Whether blocks of x become channels for this, which any layout of x is read for."""
        options = (self.stride, self.padding, self.dilation, self.groups)
        return not self.transposed and pays(device, weight_shape, *options, part == "Kᵀ")

    def forward(self, weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
        counted(forward=1)
        instead = self._instead("K", (x, weight, bias), x.shape, weight.shape)
        if instead is not None:
            return instead.forward(weight, x, bias)
        return aten.convolution(x, weight, bias, *self._options())

    def transpose(
        self,
        weight: Tensor,
        y: Tensor,
        shape: Shape | None = None,
        like: Tensor | None = None,
    ) -> Tensor:
        """Kᵀ(θ, y), of the input's `shape` (a strided convolution forgets it).

        like: any tensor of that shape; PyTorch reads the layout of the result off it.
        """
        if shape is None:
            raise InputError(f"the transpose of {self} needs the input's shape")
        return self.adjoints(like, weight, y, shape, weight.shape, (True, False, False))[0]

    def weight_adjoint(self, x: Tensor, y: Tensor, shape: Any = None) -> Tensor:
        """K□(x, y), of the weight's `shape`."""
        if shape is None:
            raise InputError(f"the weight adjoint of {self} needs the weight's shape")
        return self.adjoints(x, None, y, x.shape, shape_of(shape), (False, True, False))[1]

    def adjoints(
        self,
        x: Tensor | None,
        weight: Tensor | None,
        y: Tensor,
        x_shape: Sequence[int],
        weight_shape: Sequence[int],
        wanted: tuple[bool, bool, bool],
        like: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Kᵀ(θ, y), K□(x, y) and the sum of y for a bias, those that are `wanted`, in one call.

        x may be None where K□ is not wanted, the weight where Kᵀ is not; `like` then lends the
        layout of an x.
        """
        counted(transpose=int(wanted[0]), weight_adjoint=int(wanted[1]))
        shapes = (x_shape, weight_shape)
        turned = self._transposes(weight, y, *shapes) if wanted[0] else None
        crossed = self._instead("K□", (x, y), *shapes) if wanted[1] else None
        dx = dw = db = None
        if turned is not None and weight is not None:
            dx = turned.transpose(weight, y)
        if crossed is not None and x is not None:
            dw, db = crossed.weight_adjoint(x, y, wanted[2])
        rest = (wanted[0] and dx is None, wanted[1] and dw is None, wanted[2] and db is None)
        if any(rest):
            stock = self._adjoints(x, weight, y, *shapes, rest, like)
            dx, dw, db = (
                new if need else old
                for old, new, need in zip((dx, dw, db), stock, rest, strict=True)
            )
        return dx, dw, db  # type: ignore[return-value]

    def _adjoints(self, x, weight, y, x_shape, weight_shape, wanted, like) -> Any:
        """The same by PyTorch's own kernels."""
        if x is None:
            x = like
        if x is None:
            x = _unread(y, weight, x_shape)
        if weight is None:
            weight = placeholder(y, weight_shape)
        channels = [y.shape[1]] if wanted[2] else None
        return aten.convolution_backward(y, x, weight, channels, *self._options(), list(wanted))

    def sample(self) -> tuple[Tensor, Tensor]:
        n, kernel = len(self.stride), 2
        sizes = [5 + d * (kernel - 1) + s for d, s in zip(self.dilation, self.stride, strict=True)]
        before, after = 2 * self.groups, 3
        shape = (before, after) if self.transposed else (after * self.groups, before // self.groups)
        return torch.randn(*shape, *(kernel,) * n), torch.randn(2, before, *sizes)


@dataclass(frozen=True)
class LocallyConnected(Operator):
    """A convolution whose filter changes from place to place, in one or two dimensions.

    y[b, o, p] = Σ_{c,k} θ[p, o, c, k] x[b, c, p·stride + k·dilation − padding]

    x: (B, C, *sizes), θ: (*out sizes, O, C, *kernel), y: (B, O, *out sizes). Computed as batched
    products over a few rows of places at a time: the patches of x never exist as a whole.

    >>> import torch
    >>> K = LocallyConnected(stride=(1, 1), padding=(0, 0), dilation=(1, 1))
    >>> K.forward(torch.randn(6, 6, 5, 3, 3, 3), torch.randn(2, 3, 8, 8)).shape
    torch.Size([2, 5, 6, 6])
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = {len(self.stride), len(self.padding), len(self.dilation)}
        if sizes not in ({1}, {2}):
            raise InputError(f"{self} needs stride, padding and dilation for one or two axes")

    @property
    def _flat(self) -> bool:
        return len(self.stride) == 1

    def _options(self) -> tuple[list[int], list[int], list[int]]:
        """Stride, padding and dilation in two dimensions; a row has height 1."""
        if self._flat:
            return [1, *self.stride], [0, *self.padding], [1, *self.dilation]
        return list(self.stride), list(self.padding), list(self.dilation)

    def out_sizes(self, sizes: Shape, kernel: Shape) -> tuple[int, ...]:
        """Spatial sizes of the output."""
        parts = zip(sizes, kernel, self.stride, self.padding, self.dilation, strict=True)
        return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in parts)

    def _check(self, weight: Tensor, x: Tensor) -> None:
        n = len(self.stride)
        shapes = f"weight of shape {tuple(weight.shape)}, input of shape {tuple(x.shape)}"
        if x.dim() != n + 2 or weight.dim() != 2 * n + 2:
            raise InputError(
                f"{self} takes an input (B, C, *sizes) and a weight (*out sizes, O, C, *kernel) "
                f"with {n} spatial axes: {shapes}"
            )
        wanted = (*self.out_sizes(x.shape[2:], weight.shape[n + 2 :]), x.shape[1])
        if (*weight.shape[:n], weight.shape[n + 1]) != wanted:
            raise InputError(
                f"{self}: {shapes}; such an input has output sizes {wanted[:-1]} and "
                f"{wanted[-1]} channels"
            )

    def _weight2d(self, weight: Tensor) -> Tensor:
        return weight[None].unsqueeze(-2) if self._flat else weight

    def _image(self, t: Tensor) -> Tensor:
        return t.unsqueeze(-2) if self._flat else t

    def forward(self, weight: Tensor, x: Tensor) -> Tensor:
        self._check(weight, x)
        counted(forward=1)
        y = local_product(self._image(x), self._weight2d(weight), *self._options())
        return y.squeeze(-2) if self._flat else y

    def transpose(self, weight: Tensor, y: Tensor, shape: Shape | None = None) -> Tensor:
        if shape is None:
            raise InputError(f"the transpose of {self} needs the input's shape")
        counted(transpose=1)
        sizes = [1, shape[-1]] if self._flat else list(shape[-2:])
        x = local_transpose(self._weight2d(weight), self._image(y), sizes, *self._options())
        return x.squeeze(-2) if self._flat else x

    def weight_adjoint(self, x: Tensor, y: Tensor, shape: Any = None) -> Tensor:
        if shape is None:
            raise InputError(f"the weight adjoint of {self} needs the weight's shape")
        counted(weight_adjoint=1)
        kernel = list(shape_of(shape)[-len(self.stride) :])
        kernel = [1, *kernel] if self._flat else kernel
        weight = local_weight_adjoint(self._image(x), self._image(y), kernel, *self._options())
        return weight.squeeze(-2)[0] if self._flat else weight

    def sample(self) -> tuple[Tensor, Tensor]:
        kernel = (2,) * len(self.stride)
        sizes = tuple(4 + d + s for d, s in zip(self.dilation, self.stride, strict=True))
        weight = torch.randn(*self.out_sizes(sizes, kernel), 3, 2, *kernel)
        return weight, torch.randn(2, 2, *sizes)


# Layers ------------------------------------------------------------------------------------------


Sizes = int | tuple[int, ...]


class _LocalLayer(nn.Module):
    """Common to one and two dimensions; see `LocallyConnected2d`."""

    axes: int

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        input_size: Sizes,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes = 0,
        dilation: Sizes = 1,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.input_size = self._sizes("input_size", input_size, 1)
        self.kernel_size = self._sizes("kernel_size", kernel_size, 1)
        self.operator = LocallyConnected(
            self._sizes("stride", stride, 1),
            self._sizes("padding", padding, 0),
            self._sizes("dilation", dilation, 1),
        )
        out = self.operator.out_sizes(self.input_size, self.kernel_size)
        if min(out) < 1:
            raise InputError(
                f"{type(self).__name__}: an input of size {self.input_size} has no place for a "
                f"window of size {self.kernel_size}; its output would have size {out}"
            )
        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        weight = torch.empty(*out, out_channels, in_channels, *self.kernel_size, **kind)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.empty(out_channels, *out, **kind)) if bias else None
        self.reset_parameters()

    def _sizes(self, name: str, value: Sizes, least: int) -> tuple[int, ...]:
        sizes = (value,) * self.axes if isinstance(value, int) else tuple(value)
        if len(sizes) != self.axes or any(not isinstance(s, int) or s < least for s in sizes):
            raise InputError(
                f"{type(self).__name__}'s {name} must be a whole number ≥ {least}, or "
                f"{self.axes} of them, not {value!r}"
            )
        return sizes

    def reset_parameters(self) -> None:
        """Uniform within ±1/√fan_in, as of PyTorch's convolutions."""
        bound = 1 / math.sqrt(self.in_channels * math.prod(self.kernel_size))
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        y = self.operator.forward(weight, x)
        return y if bias is None else y + bias

    def extra_repr(self) -> str:
        options = self.operator
        return (
            f"{self.in_channels}, {self.out_channels}, input_size={self.input_size}, "
            f"kernel_size={self.kernel_size}, stride={options.stride}, padding={options.padding}, "
            f"dilation={options.dilation}, bias={self.bias is not None}"
        )


class LocallyConnected1d(_LocalLayer):
    """(B, C, L) → (B, O, L′): a convolution with a filter and a bias of its own at every place.

    weight: (L′, O, C, k), bias: (O, L′). input_size is L, which the weights depend on.

    >>> import torch
    >>> LocallyConnected1d(3, 5, input_size=10, kernel_size=3)(torch.randn(2, 3, 10)).shape
    torch.Size([2, 5, 8])
    """

    axes = 1


class LocallyConnected2d(_LocalLayer):
    """(B, C, H, W) → (B, O, H′, W′): a filter and a bias of its own at every place.

    weight: (H′, W′, O, C, k, l), bias: (O, H′, W′). input_size is (H, W).

    >>> import torch
    >>> layer = LocallyConnected2d(3, 5, input_size=(8, 8), kernel_size=3, stride=2, padding=1)
    >>> layer(torch.randn(2, 3, 8, 8)).shape
    torch.Size([2, 5, 4, 4])
    """

    axes = 2
