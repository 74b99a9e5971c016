"""Second derivatives of a function in every argument, and samples from PyTorch's own database."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree


def tensors(values: Any) -> list[Tensor]:
    """The tensors of nested values that a derivative can be taken in."""
    flat = _pytree.tree_leaves(values)
    return [t for t in flat if isinstance(t, Tensor) and t.dtype.is_floating_point]


def second(
    function: Callable,
    inputs: Sequence[Tensor],
    order: int = 2,
    seed: int = 0,
    rounded: torch.dtype = torch.float64,
) -> list[list[Tensor | None]]:
    """Gradients of order 1 to `order`, each of the last one's product with random cotangents.

    Order 1 is differentiated in the output's cotangents too, as double backward is. Cotangents are
    `rounded`, so that they are the same in two dtypes, and laid out like what they belong to.
    """
    outputs = [t for t in tensors(function()) if t.requires_grad]
    generator = torch.Generator().manual_seed(seed)

    def random(like: Tensor) -> Tensor:
        u = torch.randn(like.shape, generator=generator, dtype=torch.float64)
        return torch.empty_like(like, requires_grad=False).copy_(u.to(rounded))

    cotangents = [random(t).requires_grad_() for t in outputs]
    found, at = [], [*inputs]
    for n in range(order):
        live = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
        if not live:
            break
        of, by = zip(*live, strict=True)
        grads = torch.autograd.grad(of, at, by, create_graph=n + 1 < order, allow_unused=True)
        found.append(list(grads))
        at = [*inputs, *(c for _, c in live)] if n == 0 else at
        outputs = [g for g in grads if g is not None]
        cotangents = [random(g) for g in outputs]
    return found


def error(found: Sequence[Sequence[Tensor | None]], expected) -> float:
    """The largest relative difference; an absent gradient is zero."""
    assert len(found) == len(expected), "one of them has fewer orders"
    worst = 0.0
    for a, b in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
        if a is None and b is None:
            continue
        a, b = (torch.zeros_like(y) if x is None else x for x, y in ((a, b), (b, a)))
        assert a.shape == b.shape
        worst = max(worst, float((a - b).detach().norm() / (1 + b.detach().norm())))
    return worst


@functools.cache
def database() -> dict[str, list[Any]]:
    """PyTorch's operators by name; reading them takes expecttest."""
    if importlib.util.find_spec("expecttest") is None:
        pytest.skip("needs expecttest, which torch's database of operators imports")
    from torch.testing._internal.common_methods_invocations import op_db

    found: dict[str, list[Any]] = {}
    for op in op_db:
        found.setdefault(op.name, []).append(op)
    return found


def samples(
    name: str, dtype: torch.dtype = torch.float64, largest: int = 2000
) -> Iterator[tuple[Callable, list[Tensor]]]:
    """(function of nothing, its inputs) for the small samples of an operator, in float64."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in database()[name]:
            for sample in op.sample_inputs("cpu", dtype, requires_grad=True):
                inputs = tensors((sample.input, sample.args, sample.kwargs))
                inputs = [t for t in inputs if t.requires_grad]
                if not inputs or sum(t.numel() for t in inputs) > largest:
                    continue

                def function(op=op, sample=sample):
                    return op.gradcheck_wrapper(
                        op.get_op(), sample.input, *sample.args, **sample.kwargs
                    )

                yield function, inputs
