"""A penalty on some calls and some rows only, with the weight that makes it right on average."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import BatchNorm, pytree
from ..dtypes import accumulation, is_half
from ..errors import InputError


@dataclass(frozen=True)
class Thinning:
    """every: one call out of so many is penalised, the first one to begin with; fraction: of its
    rows, drawn by `generator` without replacement. The weights are 1 over the chance of either, so
    that the average over calls and draws is the whole penalty, and so for its gradient."""

    every: int = 1
    fraction: float = 1.0
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        every, fraction, generator = self.every, self.fraction, self.generator
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise InputError(f"every must be an int, at least 1, not {every!r}")
        number = isinstance(fraction, (int, float)) and not isinstance(fraction, bool)
        if not number or not 0 < fraction <= 1:
            raise InputError(f"fraction must be above 0 and at most 1, not {fraction!r}")
        if generator is not None and not isinstance(generator, torch.Generator):
            raise InputError(f"generator must be a torch.Generator, not {generator!r}")

    def __bool__(self) -> bool:
        return self.every > 1 or self.fraction < 1

    def __str__(self) -> str:
        """In words, for `explain`."""
        told = [] if self.every == 1 else [f"1 of {self.every} calls"]
        told += [] if self.fraction == 1 else [f"{100 * self.fraction:.3g} % of the rows"]
        return " and ".join(told)

    def check(self, reduction: str) -> None:
        if self.fraction < 1 and reduction == "none":
            raise InputError(
                'fraction leaves examples without a value: use reduction="mean" or "sum"'
            )

    def price(self, full: float) -> float:
        """Of an average call, in plain steps, where a penalised one costs `full` of them."""
        return 1 + self.fraction / self.every * (full - 1)

    def weight(self, batch: int, count: int, reduction: str) -> float:
        """What the penalty of `count` rows is multiplied by."""
        return self.every * (batch / count if reduction == "sum" else 1.0)

    def count(self, batch: int) -> int:
        """How many rows of a batch are penalised."""
        return min(batch, max(1, math.floor(self.fraction * batch + 0.5)))

    def draw(self, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(the rows that are penalised, the others), each in order."""
        where = device if self.generator is None else self.generator.device
        order = torch.randperm(batch, generator=self.generator, device=where).to(device)
        count = self.count(batch)
        return order[:count].sort().values, order[count:].sort().values


def nothing(out: Tensor, batch: int, reduction: str) -> Tensor:
    """The penalty of a call that has none: zero, and as differentiable as any."""
    shape = (batch,) if reduction == "none" else ()
    dtype = accumulation(out.dtype).to_real()
    return torch.zeros(shape, dtype=dtype, device=out.device, requires_grad=True)


def at_rows(tree: Any, rows: Tensor, batch: int) -> Any:
    """Arguments of a call at some rows; what has no row for each example stays as it is."""

    def cut(t: Tensor) -> Tensor:
        return t[rows] if t.dim() and t.shape[0] == batch else t

    return pytree.tree_map_only(Tensor, cut, tree)


def joined(parts: tuple[Any, Any], rows: tuple[Tensor, Tensor]) -> Any:
    """A network's result from those at some rows and at the others."""
    order = torch.cat(rows).argsort()

    def join(some: Any, others: Any) -> Any:
        return torch.cat((some, others))[order] if isinstance(some, Tensor) else some

    return pytree.tree_map(join, *parts)


def refuse_dependent(
    net: nn.Module, run: Callable[[Any], Any], given: Any, rows: Tensor, batch: int
) -> None:
    """Raise unless the rows of a network's output are those of its input alone: by its modules, and
    by its output at `rows` with and without the others, in evaluation mode."""
    modes = {module: module.training for module in net.modules()}
    for name, module in net.named_modules():
        if isinstance(module, BatchNorm) and module.training:
            raise InputError(
                f"fraction: {type(module).__name__} '{name}' computes its statistics from the "
                "whole batch, which a part of it does not have; use every, or another norm"
            )
    try:
        net.eval()
        with torch.no_grad(), torch.random.fork_rng(_cuda(given)):
            whole, part = run(given), run(at_rows(given, rows, batch))
    finally:
        for module, mode in modes.items():
            module.training = mode
    for a, b in zip(pytree.tree_leaves(whole), pytree.tree_leaves(part), strict=True):
        if not isinstance(a, Tensor):
            continue
        if a.shape[:1] != (batch,) or b.shape != (len(rows), *a.shape[1:]):
            raise InputError(
                f"fraction needs a row of every output for each example: {batch} examples have one "
                f"of shape {tuple(a.shape)}, {len(rows)} one of shape {tuple(b.shape)}"
            )
        if not a.is_floating_point():
            continue
        a = a[rows]
        bound = 0.1 if is_half(a.dtype) else 1e-3
        if not (a - b).norm() <= bound * a.norm():  # NaN is no proof either
            raise InputError(
                "fraction: the network's output for an example changes with the other examples "
                "of the batch (or by chance), so that no part of a batch has its penalty; use every"
            )


def _cuda(given: Any) -> list[torch.device]:
    return list(
        {t.device for t in pytree.tree_leaves(given) if isinstance(t, Tensor) and t.is_cuda}
    )
