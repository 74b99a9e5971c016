"""CUDA graphs: the host launches one thing instead of hundreds. A whole step is one graph
(`GraphedStep`), or its first two sweeps are one and its last two another (`GraphedProgram`).

What changes from call to call (inputs, labels) is copied into fixed buffers before a replay;
parameters are read where they lie, since optimisers update them in place. Results lie in fixed
buffers too, which the next replay overwrites: gradients are `Lent`, whoever hands out anything else
copies it first.
"""

from __future__ import annotations

import dis
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._torch import pytree, storage_use_count
from ..counting import Operations, recording, replayed
from ..errors import DoublebackError
from ..graph import Node
from .program import Arrived, Gradients
from .state import copies, kind, remember
from .straight_line import OPERATORS

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
        gradients = [None if t is None else t.detach() for t in self._gradients]
        for i, old in self._kept.items():
            place: Any = self._gradients[i]
            gradients[i] = place.clone()
            place.copy_(old)
        self._kept = {}
        return gradients

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


@dataclass(eq=False)
class GraphedState:
    """What passes from a graphed `first` to a graphed `last`: numbers in the graphs' memory."""

    state: Any
    pair: _Pair
    read: bool = False

    @property
    def outside(self) -> Sequence[Tensor]:
        """Tensors from outside that a graphed `last` reads besides."""
        return getattr(self.state, "outside", ())


class _Pair:
    """The graphs of one kind of call: one of the first two sweeps, and one of the last two for each
    choice of what arrives there. The memory between them holds one step."""

    def __init__(self, program: Any, moving: Any, fixed: Any) -> None:
        self.program = program
        self.first = GraphedStep(self._first, moving, fixed, gradients=lambda out: ())
        self.last: dict[Any, GraphedStep] = {}
        self.current: weakref.ref[GraphedState] | None = None

    def _first(self, moving: Any, fixed: Any) -> Any:
        x, extra = moving
        return self.program.first({**x, **fixed}, extra, True)

    @property
    def busy(self) -> bool:
        """Whether a backward pass is still to read what lies in the graphs' memory."""
        held = None if self.current is None else self.current()
        return held is not None and not held.read

    def run_first(self, moving: Any, fixed: Any) -> Any:
        graph = self.first.graph
        out, _ = self.first(moving, fixed, ())
        if self.first.graph is not graph:  # captured anew, into other memory
            self.last.clear()
        state = GraphedState(out.state, self)
        self.current = weakref.ref(state)
        values = pytree.tree_map_only(Tensor, torch.clone, out.values)
        return out._replace(outputs=[t.clone() for t in out.outputs], values=values, state=state)

    def run_last(self, arrived: Arrived, owners: Sequence[Tensor]) -> Gradients:
        moving = (dict(arrived.outputs), arrived.values)
        leaves, spec = pytree.tree_flatten(moving)
        key = (spec, *map(kind, leaves))
        graphed = self.last.get(key)
        if graphed is None:
            extra = pytree.tree_unflatten(self.first.leaves, self.first.spec)[0][1]
            inner = (
                arrived.state.state
            )  # not all of it: a call that is kept alive keeps the pair busy

            def run(given: Any, fixed: Any) -> Any:
                return self.program.last(Arrived(inner, extra, *given, keep=True))

            graphed = GraphedStep(run, moving, (), gradients=lambda out: out)
            remember(self.last, key, graphed)
        return graphed(moving, (), owners)[1]


class GraphedProgram:
    """A program whose first two sweeps are one CUDA graph and whose last two another, with the same
    interface, for one call. owners: the tensors that gradients are asked of.

    What the last two sweeps read lies in the graphs' memory. A call that comes while an earlier
    one's backward pass is still to come runs without graphs, and so does one that cannot be
    captured, which `refuse` is told once.
    """

    def __init__(
        self, program: Any, pairs: dict, owners: Sequence[Tensor], refuse: Callable[[str], None]
    ) -> None:
        self.program, self.owners = program, owners
        self._pairs, self._refuse = pairs, refuse

    def __getattr__(self, name: str) -> Any:
        return getattr(self.program, name)

    def first(self, leaves: Any, extra: Sequence[Any], keep: bool = True) -> Any:
        moves = set(self.program.plan.penalised)
        moving = ({v: t for v, t in leaves.items() if v in moves}, tuple(extra))
        fixed = {v: t for v, t in leaves.items() if v not in moves}
        tensors, spec = pytree.tree_flatten(moving)
        key = (self.program, spec, *map(kind, tensors))
        pair = self._pairs.get(key)
        if not keep or (pair is None and key in self._pairs) or (pair is not None and pair.busy):
            return self.program.first(leaves, extra, keep)
        try:
            if pair is None:
                pair = _Pair(self.program, moving, fixed)
                remember(self._pairs, key, pair)
            return pair.run_first(moving, fixed)
        except GraphRefused as refusal:
            self._refused(key, refusal)
            return self.program.first(leaves, extra, keep)

    @property
    def stretches(self) -> Sequence[Any]:
        """One: a graph is replayed as a whole."""
        return self.program.plan.whole

    def last(self, arrived: Arrived) -> Gradients:
        state = arrived.state
        if not isinstance(state, GraphedState):
            return self.program.last(arrived)
        try:
            gradients = state.pair.run_last(arrived, self.owners)
        except GraphRefused as refusal:
            for key in [k for k, pair in self._pairs.items() if pair is state.pair]:
                self._refused(key, refusal)
            gradients = self.program.last(arrived._replace(state=state.state, keep=True))
        state.read = not arrived.keep
        return gradients

    def _refused(self, key: Any, refusal: GraphRefused) -> None:
        remember(self._pairs, key, None)
        self._refuse(f"a CUDA graph cannot hold {refusal}")


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


def culprit(error: BaseException) -> str:
    """The operator that raised it: of the node that was running, or of a flat graph's line."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame, trace.tb_lasti))
        trace = trace.tb_next
    for frame, instruction in reversed(frames):
        for name in ("node", "step", "call"):
            held = frame.f_locals.get(name)
            node = getattr(held, "node", held)
            if isinstance(node, Node):
                return str(node)
        generated = frame.f_code.co_filename.startswith("<") or INDUCTORS in frame.f_globals
        name = _called(frame.f_code, instruction) if generated else None
        if name is not None:
            return frame.f_globals.get(OPERATORS, {}).get(name, name)
    return "an operator of this step"


INDUCTORS = "extern_kernels"  # a global of the code that Inductor writes


def _called(code: CodeType, last: int) -> str | None:
    """What the line of this instruction calls: of its names the first, with its attributes. The
    text of generated code is not kept."""
    start = max((at for at, _ in dis.findlinestarts(code) if at <= last), default=0)
    names: list[str] = []
    for step in dis.get_instructions(code):
        if start <= step.offset <= last:
            if step.opname in ("LOAD_ATTR", "LOAD_METHOD") or (
                step.opname == "LOAD_GLOBAL" and not names
            ):
                names.append(step.argval)
            elif names:
                break
    return ".".join(names).removeprefix("torch.").removeprefix("ops.") or None
