"""Counting the bilinear operations K, Kᵀ and K□ that really ran (theory §5).

The operators report each call here; a compiled graph reports, on every replay, what was
recorded while it was flattened.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class Operations:
    """How many K (`forward`), Kᵀ (`transpose`) and K□ (`weight_adjoint`) were executed."""

    forward: int = 0
    transpose: int = 0
    weight_adjoint: int = 0

    @property
    def products(self) -> int:
        """K and Kᵀ together: the paper's count, without K□."""
        return self.forward + self.transpose

    def add(self, other: Operations) -> None:
        self.forward += other.forward
        self.transpose += other.transpose
        self.weight_adjoint += other.weight_adjoint


_active: list[Operations] = []
_fold: list[int] = [1]


@contextmanager
def count_operations() -> Iterator[Operations]:
    """Count the bilinear operations executed inside the block.

    A call folded over c seeds counts c. Operations of nodes that do not depend on the
    penalised input, and those of stock autograd, are not counted.

    >>> import torch, doubleback as db
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    >>> model = db.Penalised(net, db.LossGradient("cross_entropy"))
    >>> with db.count_operations() as ops:
    ...     out, penalty = model(torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1]))
    ...     penalty.backward()
    >>> ops.products  # 4L − 1 with L = 2
    7
    """
    counter = Operations()
    _active.append(counter)
    try:
        yield counter
    finally:
        # by identity: two counters with equal totals are still two counters
        _active[:] = [other for other in _active if other is not counter]


def counting() -> bool:
    """Whether anybody counts."""
    return bool(_active)


@contextmanager
def recording() -> Iterator[Operations]:
    """Record operations while a graph is flattened, without reporting them as executed."""
    outside = _active[:]
    record = Operations()
    _active[:] = [record]
    try:
        yield record
    finally:
        _active[:] = outside


@contextmanager
def folded(seeds: int) -> Iterator[None]:
    """Inside, one call stands for `seeds` calls."""
    _fold.append(_fold[-1] * seeds)
    try:
        yield
    finally:
        _fold.pop()


def counted(forward: int = 0, transpose: int = 0, weight_adjoint: int = 0) -> None:
    """Report executed operations to every open `count_operations` block."""
    if torch.compiler.is_dynamo_compiling():  # a layer that is captured: its sweeps will count
        return
    if _active:
        n = _fold[-1]
        done = Operations(n * forward, n * transpose, n * weight_adjoint)
        for counter in _active:
            counter.add(done)


def replayed(done: Operations) -> None:
    """Report the operations of one replay of a compiled graph."""
    for counter in _active:
        counter.add(done)
