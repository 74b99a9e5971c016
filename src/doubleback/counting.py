"""Counting the bilinear operations K, Kᵀ and K□ that really ran (theory §5).

The operators report each call here; a compiled graph reports, on every replay, what was
recorded while it was flattened.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.util import find_spec
from typing import Any

from ._torch import compiling


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
    if compiling():  # a layer that is captured: its sweeps will count
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


# ------------------------------------------------------------------ formulas for PyTorch's counter
#
# PyTorch counts FLOPs by formulas that are registered in a module of its own, which imports Triton
# and takes as long as all of this package. So ours are handed in when that module is imported, by
# whomever: `FlopCounterMode` finds them, and nobody else waits.

_COUNTER = "torch.utils.flop_counter"
_formulas: list[tuple[Any, Callable]] = []


def flop_formula(targets: Any) -> Callable[[Callable], Callable]:
    """PyTorch's `register_flop_formula`, once there is one."""

    def register(formula: Callable) -> Callable:
        if _COUNTER in sys.modules:
            sys.modules[_COUNTER].register_flop_formula(targets)(formula)
        else:
            _formulas.append((targets, formula))
            if _Waiting.finder not in sys.meta_path:
                sys.meta_path.insert(0, _Waiting.finder)
        return formula

    return register


def flop_registry() -> dict[Any, Callable]:
    """Formulas by operator, PyTorch's and ours."""
    return importlib.import_module(_COUNTER).flop_registry


class _Waiting(MetaPathFinder, Loader):
    """Hands the formulas in after the counter's module was loaded, in the usual way."""

    finder: _Waiting
    loader: Any

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: Any) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        for targets, formula in _formulas:
            module.register_flop_formula(targets)(formula)
        _formulas.clear()


_Waiting.finder = _Waiting()
