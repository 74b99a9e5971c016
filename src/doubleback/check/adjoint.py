"""`check_adjoint`: an operator's adjoints by their definition, in the spaces of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._torch import pytree
from ..errors import CheckError, InputError
from ..operators import Multilinear, Operator
from ..spaces import Product, Space
from .parity import TOLERANCE, CheckReport, Row


@dataclass(frozen=True)
class _Form:
    """An operator as a function of several tensors, linear (or affine) in each of them.

    adjoint(k, u, y): the adjoint in argument k, taken at u.
    """

    names: list[str]
    labels: list[str]  # of the adjoints
    spaces: list[Space]
    values: list[Tensor]
    forward: Callable[[Sequence[Tensor]], Tensor]
    adjoint: Callable[[int, Sequence[Tensor], Tensor], Tensor]
    codomain: Space
    pairs: list[tuple[int, int]]  # arguments between which adjoints commute


def check_adjoint(
    op: Operator, *arguments: Any, tolerance: float = TOLERANCE, seed: int = 0
) -> CheckReport:
    """Test ⟨K(θ, x), y⟩ = ⟨x, Kᵀ(θ, y)⟩ = ⟨θ, K□(x, y)⟩ in the operator's spaces.

    Tested besides: that K, Kᵀ and K□ are linear in each argument, and that adjoints commute,
    (Kᵀ)□ = K□ and (K□)ᵀ = Kᵀ. Every comparison takes whole steps between random float64 elements:
    linear maps have no truncation error, so what is left is rounding.

    arguments: (θ, x), or the operands of a `Multilinear`; only their shapes are read. Left out,
    the operator's own small sample. Returns a report; raises `CheckError` with both values of
    each identity that fails.

    >>> import torch, doubleback as db
    >>> K = db.operators.Convolution((2,), (1,), (1,))
    >>> db.check_adjoint(K, torch.empty(4, 3, 5), torch.empty(2, 3, 16)).worst < 1e-12
    True
    """
    if not isinstance(op, Operator):
        raise InputError(f"check_adjoint takes an operator, not {type(op).__name__}")
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        given = arguments or op.sample()

    def random(shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)

    given = pytree.tree_map_only(Tensor, lambda t: random(t.shape), tuple(given))
    form = _multilinear(op, given) if isinstance(op, Multilinear) else _bilinear(op, given)
    with torch.no_grad():
        rows = [*_identities(form, random), *_linearity(form, random)]
    rows += _commutativity(form, random)
    report = CheckReport(tuple(rows), tolerance, f"{op}: adjoints by their definition")
    if not report.passed:
        values = "\n".join(
            f"  {row.name}: {row.ours!r} against {row.oracle!r}"
            for row in rows
            if row.error > tolerance
        )
        raise CheckError(f"{op}: wrong\n{values}\n{report}", report)
    return report


def _multilinear(op: Multilinear, given: tuple) -> _Form:
    count = len(given)
    return _Form(
        [f"u{i}" for i in range(count)],
        [f"K*{i}" for i in range(count)],
        list(op.arguments),
        list(given),
        lambda u: op.forward(*u),
        op.adjoint,
        op.codomain,
        [(i, j) for i in range(count) for j in range(count) if i != j],
    )


def _bilinear(op: Operator, given: tuple) -> _Form:
    """θ may be a tree of tensors, one per operator of a composition; x comes last."""
    if len(given) != 2 or not isinstance(given[1], Tensor):
        raise InputError(f"check_adjoint({op}) takes θ and x, not {len(given)} arguments")
    weight, x = given
    leaves, spec = pytree.tree_flatten(weight)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    last = len(places)

    def tree(u: Sequence[Tensor]) -> Any:
        filled = list(leaves)
        for place, value in zip(places, u, strict=False):
            filled[place] = value
        return pytree.tree_unflatten(filled, spec)

    def adjoint(k: int, u: Sequence[Tensor], y: Tensor) -> Tensor:
        if k == last:
            return op.transpose(tree(u), y, tuple(u[last].shape))
        found = op.weight_adjoint(u[last], y, tree(u))
        return pytree.tree_leaves(found)[places[k]]

    spaces = [_leaf_spaces(op.parameters, weight)[i] for i in places]
    return _Form(
        [*(f"θ{i}" if last > 1 else "θ" for i in range(last)), "x"],
        [*(f"K□{i}" if last > 1 else "K□" for i in range(last)), "Kᵀ"],
        [*spaces, op.domain],
        [*(leaves[i] for i in places), x],
        lambda u: op.forward(tree(u), u[last]),
        adjoint,
        op.codomain,
        [pair for i in range(last) for pair in ((last, i), (i, last))],
    )


def _leaf_spaces(space: Space, weight: Any) -> list[Space]:
    """One space per leaf of θ."""
    if isinstance(weight, (tuple, list)) and isinstance(space, Product):
        found = zip(space.spaces, weight, strict=True)
        return [leaf for part, w in found for leaf in _leaf_spaces(part, w)]
    return [space] * len(pytree.tree_leaves(weight))


# ------------------------------------------------------------------------------ identities


def _row(name: str, ours: Tensor, oracle: Tensor, scale: float) -> Row:
    """A comparison of two numbers, relative to the size that their terms have."""
    a, b = float(ours), float(oracle)
    error = abs(a - b) / max(scale, 1e-300)
    return Row(name, error if error == error else float("inf"), a, b)


def _near(name: str, ours: Tensor, oracle: Tensor) -> Row:
    """A comparison of two tensors; both values are their norms."""
    if ours.shape != oracle.shape:
        return Row(name, float("inf"), float(ours.norm()), float(oracle.norm()))
    size = float(oracle.norm())
    error = float((ours - oracle).norm()) / max(size, 1e-300)
    return Row(name, error if error == error else float("inf"), float(ours.norm()), size)


def _moved(u: Sequence[Tensor], k: int, step: Tensor) -> list[Tensor]:
    return [*u[:k], u[k] + step, *u[k + 1 :]]


def _identities(form: _Form, random: Callable) -> list[Row]:
    """⟨K(u + δₖ) − K(u), y⟩ = ⟨δ, K*ₖ(u, y)⟩ for each argument k.

    With δ = uₖ where K is linear in uₖ, this is ⟨K(u), y⟩ = ⟨uₖ, K*ₖ(u, y)⟩.
    """
    rows, u = [], form.values
    here = form.forward(u)
    y = random(here.shape)
    for k, (name, space) in enumerate(zip(form.names, form.spaces, strict=True)):
        affine = len(form.values) > 2 and k < len(u) - 1  # a sum is affine in each of its weights
        step = random(u[k].shape) if affine else u[k]
        change = form.forward(_moved(u, k, step)) - here
        adjoint = form.adjoint(k, u, y)
        if adjoint.shape != u[k].shape:
            raise CheckError(
                f"{form.labels[k]} has shape {tuple(adjoint.shape)}, {name} has shape "
                f"{tuple(u[k].shape)}"
            )
        left = form.codomain.inner(change, y, batch_dims=0)
        right = space.inner(step, adjoint, batch_dims=0)
        scale = form.codomain.norm(change, 0) * form.codomain.norm(y, 0)
        rows.append(_row(f"⟨K, y⟩ = ⟨{name}, {form.labels[k]}⟩", right, left, float(scale)))
    return rows


def _linearity(form: _Form, random: Callable) -> list[Row]:
    """f(a u + (1 − a) v) = a f(u) + (1 − a) f(v) for K and each adjoint, in each argument; K
    vanishes with x and with all weights."""
    rows, u, a = [], form.values, 3.0
    y = random(form.forward(u).shape)
    functions: list[tuple[str, Callable]] = [("K", form.forward)]
    functions += [
        (label, lambda at, k=k: form.adjoint(k, at, y)) for k, label in enumerate(form.labels)
    ]
    for f_name, f in functions:
        for k, name in enumerate(form.names):
            v = [*u[:k], random(u[k].shape), *u[k + 1 :]]
            mixed = [*u[:k], a * u[k] + (1 - a) * v[k], *u[k + 1 :]]
            rows.append(_near(f"{f_name} linear in {name}", f(mixed), a * f(u) + (1 - a) * f(v)))
    none = [torch.zeros_like(t) for t in u]
    size = float(form.forward(u).norm())
    zeros = {"K(θ, 0) = 0": [*u[:-1], none[-1]]}
    if len(u) > 1:
        zeros["K(0, x) = 0"] = [*none[:-1], u[-1]]
    for name, at in zeros.items():
        rows.append(_row(name, form.forward(at).norm(), torch.zeros(()), size))
    for k, label in enumerate(form.labels):
        z = random(y.shape)
        both = form.adjoint(k, u, a * y + 2 * z)
        apart = a * form.adjoint(k, u, y) + 2 * form.adjoint(k, u, z)
        rows.append(_near(f"{label} linear in y", both, apart))
    return rows


def _commutativity(form: _Form, random: Callable) -> list[Row]:
    """Only the last argument in which an adjoint is taken matters: the adjoint in uⱼ of
    uⱼ ↦ K*ᵢ(u, y), applied to w, is K*ⱼ with w in place of uᵢ.

    The left side by reverse mode where autograd reaches through the operator; by its pairing with
    a random step otherwise. The right side as a difference, which also a sum, affine in each
    weight, satisfies.
    """
    rows, u = [], form.values
    y = random(form.forward(u).shape)
    for i, j in form.pairs:
        w, step = random(u[i].shape), random(u[j].shape)
        name = f"({form.labels[i]}){form.labels[j].removeprefix('K')} = {form.labels[j]}"
        with torch.no_grad():
            right = form.adjoint(j, _moved(u, i, w), y) - form.adjoint(j, u, y)
        with torch.enable_grad():
            leaf = u[j].clone().requires_grad_()
            pulled = form.adjoint(i, [*u[:j], leaf, *u[j + 1 :]], y)
        if pulled.requires_grad:
            weighted = form.spaces[i].riesz_inverse(w)
            (left,) = torch.autograd.grad(pulled, leaf, weighted)
            rows.append(_near(name, form.spaces[j].riesz(left), right))
            continue
        with torch.no_grad():
            change = form.adjoint(i, _moved(u, j, step), y) - form.adjoint(i, u, y)
            left = form.spaces[i].inner(change, w, batch_dims=0)
            paired = form.spaces[j].inner(step, right, batch_dims=0)
            scale = form.spaces[i].norm(change, 0) * form.spaces[i].norm(w, 0)
            rows.append(_row(name, left, paired, float(scale)))
    return rows
