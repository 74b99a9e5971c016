"""Any multilinear map that an einsum can write, with its adjoint in any argument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..counting import counted
from ..errors import InputError
from ..spaces import Euclidean, Space
from .base import Operator, Shape, shape_of


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
