"""A whole step as one CUDA graph: the host launches one thing instead of hundreds.

What changes from call to call (inputs, labels) is copied into fixed buffers before a replay;
parameters are read where they lie, since optimisers update them in place. Results lie in fixed
buffers too, which the next replay overwrites: whoever hands them out copies them first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .counting import Operations, recording, replayed

WARM_UP = 3  # calls before capture: kernels are chosen, sweeps are flattened


class GraphedStep:
    """fn(moving, fixed) → nested tensors, captured once and replayed.

    moving, fixed: nested tensors and constants, of the same shapes and dtypes in every call. A
    fixed tensor that does move after all (a parameter that was replaced) gets a buffer as well,
    at the price of one more capture.
    """

    def __init__(self, fn: Callable[[Any, Any], Any], moving: Any, fixed: Any) -> None:
        self.fn = fn
        own = pytree.tree_map_only(Tensor, torch.clone, moving)
        self.leaves, self.spec = pytree.tree_flatten((own, fixed))
        count = len(pytree.tree_leaves(own))
        self.owned = [i < count for i in range(len(self.leaves))]
        self.operations = Operations()
        self._warm()
        self._capture()

    def _run(self) -> Any:
        return self.fn(*pytree.tree_unflatten(self.leaves, self.spec))

    def _warm(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), recording():
            for _ in range(WARM_UP):
                self._run()
        torch.cuda.current_stream().wait_stream(stream)

    def _capture(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph), recording() as self.operations:
            self.out = self._run()

    def __call__(self, moving: Any, fixed: Any) -> Any:
        stale = False
        for i, new in enumerate(pytree.tree_leaves((moving, fixed))):
            old = self.leaves[i]
            if not isinstance(new, Tensor) or new.data_ptr() == old.data_ptr():
                continue
            if self.owned[i]:
                old.copy_(new)
            else:
                self.leaves[i], self.owned[i], stale = new.clone(), True, True
        if stale:
            self._capture()
        self.graph.replay()
        replayed(self.operations)
        return self.out
