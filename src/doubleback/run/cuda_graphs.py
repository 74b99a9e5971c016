"""A whole step as one CUDA graph: the host launches one thing instead of hundreds.

What changes from call to call (inputs, labels) is copied into fixed buffers before a replay;
parameters are read where they lie, since optimisers update them in place. Results lie in fixed
buffers too, which the next replay overwrites: gradients are `Lent`, whoever hands out anything else
copies it first.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._torch import pytree, storage_use_count
from ..counting import Operations, recording, replayed
from ..errors import DoublebackError
from ..graph import Node
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


class GraphRefused(DoublebackError, RuntimeError):
    """A step that cannot be captured; the message names the operator. Nothing is left changed."""


class GraphedStep:
    """fn(moving, fixed) → nested tensors, captured once and replayed.

    moving, fixed: nested tensors and constants, of the same shapes and dtypes in every call. A
    fixed tensor that does move after all (a parameter that was replaced) gets a buffer as well,
    at the price of one more capture. gradients: those among the results, which are `lent`.
    Warming up and capturing draw no random numbers that a caller would miss. Raises `GraphRefused`.
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
        before = torch.cuda.get_rng_state()
        try:
            self._warm()
        finally:
            torch.cuda.set_rng_state(before)
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
        self.graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        with _undone(pool), torch.cuda.graph(self.graph, pool=pool), recording() as self.operations:
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


@contextmanager
def _undone(pool: tuple[int, int]) -> Iterator[None]:
    """A capture that fails is undone. PyTorch leaves its stream current then, its memory open for
    what is allocated next, and the generator as if the capture still ran."""
    stream, before = torch.cuda.current_stream(), torch.cuda.get_rng_state()
    try:
        yield
    except BaseException as error:
        torch.cuda.set_stream(stream)
        _close(pool)
        torch.cuda.set_rng_state(before)
        if not isinstance(error, Exception):
            raise
        first = innermost(error)
        text = (str(first).strip() or type(first).__name__).splitlines()[0]
        raise GraphRefused(f"{culprit(first)} ({text})") from error


def _close(pool: tuple[int, int]) -> None:
    """End what a failed capture began, as far as it was not ended: a capture that succeeds tells
    the generator that none runs any more."""
    device = torch.cuda.current_device()
    with suppress(RuntimeError):  # it was ended
        _torch.cuda_end_allocate_to_pool(device, pool)
        _torch.cuda_release_pool(device, pool)
    place = torch.zeros((), device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        place.add_(0)


def innermost(error: BaseException) -> BaseException:
    """The error that came first: ending a broken capture raises another."""
    while error.__context__ is not None:
        error = error.__context__
    return error


_CALL = re.compile(r"= (?:torch\.ops\.|torch\.|\w+\.)?(\w+(?:\.\w+)*)\(")


def culprit(error: BaseException) -> str:
    """The operator that raised it: of the node that was running, or of a flat graph's line."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    for frame, number in reversed(frames):
        node = frame.f_locals.get("node")
        if isinstance(node, Node):
            return str(node)
        file = frame.f_code.co_filename
        found = _CALL.search(linecache.getline(file, number)) if file.startswith("<") else None
        if found is not None:
            return found[1]
    return "an operator of this step"
