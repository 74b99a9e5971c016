"""A whole step as one CUDA graph: the host launches one thing instead of hundreds.

What changes from call to call (inputs, labels) is copied into fixed buffers before a replay;
parameters are read where they lie, since optimisers update them in place. Results lie in fixed
buffers too, which the next replay overwrites: gradients are `Lent`, whoever hands out anything else
copies it first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import pytree, storage_use_count
from ..counting import Operations, recording, replayed
from .state import copies

WARM_UP = 3  # calls before capture: kernels are chosen, sweeps are flattened


class Lent:
    """Gradients in memory that is written again and again, handed out without a copy.

    Nobody loses what they hold by then: a gradient that is still its owner's `.grad` moves to
    memory of its own, and what anybody else still reads is put back afterwards.
    """

    def __init__(self, gradients: Sequence[Tensor | None]) -> None:
        self._gradients = gradients
        self._storages = [None if t is None else t.untyped_storage()._cdata for t in gradients]
        self._idle = [users(storage) for storage in self._storages]
        self._kept: dict[int, Tensor] = {}

    def recall(self, owners: Sequence[Tensor]) -> None:
        """Before the memory is written; owners: whose `.grad` each gradient was to become."""
        held = self._held(range(len(owners)))
        grads: list[Any] = [owners[i].grad for i in held if self._only_grad(i, owners[i])]
        for grad, copy in zip(grads, copies(grads), strict=True):
            grad.data = copy  # the same tensor, for whoever holds it
        self._kept = {i: self._gradients[i].clone() for i in self._held(held)}  # type: ignore[union-attr]

    def hand_out(self) -> list[Tensor | None]:
        """After the memory was written: the gradients, to be held as long as anybody likes."""
        found = [None if t is None else t.detach() for t in self._gradients]
        for i, old in self._kept.items():
            place: Any = self._gradients[i]
            found[i] = place.clone()
            place.copy_(old)
        self._kept = {}
        return found

    def _only_grad(self, i: int, owner: Tensor) -> bool:
        """Whether `owner.grad` is all that reads gradient i, and no view of it."""
        if not owner.is_leaf or owner.grad is None or users(self._storages[i]) > self._idle[i] + 1:
            return False
        return owner.grad.untyped_storage()._cdata == self._storages[i]

    def _held(self, among: Sequence[int]) -> list[int]:
        """Which gradients somebody else reads."""
        return [i for i in among if users(self._storages[i]) > self._idle[i]]


def users(storage: int | None) -> int:
    """How many tensors and storage objects refer to a storage, given by its `_cdata`."""
    return 0 if storage is None else storage_use_count(storage)


class GraphedStep:
    """fn(moving, fixed) → nested tensors, captured once and replayed.

    moving, fixed: nested tensors and constants, of the same shapes and dtypes in every call. A
    fixed tensor that does move after all (a parameter that was replaced) gets a buffer as well,
    at the price of one more capture. gradients: those among the results, which are `lent`.
    """

    lent: Lent

    def __init__(
        self,
        fn: Callable[[Any, Any], Any],
        moving: Any,
        fixed: Any,
        gradients: Callable[[Any], Sequence[Tensor | None]],
    ) -> None:
        self.fn, self.gradients = fn, gradients
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
        self.lent = Lent(self.gradients(self.out))

    def __call__(
        self, moving: Any, fixed: Any, owners: Sequence[Tensor]
    ) -> tuple[Any, list[Tensor | None]]:
        """(results, gradients); owners: the tensors whose `.grad` the gradients may become."""
        self.lent.recall(owners)
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
        return self.out, self.lent.hand_out()
