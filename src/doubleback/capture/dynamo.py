"""The network as TorchDynamo captures it.

Dynamo reads the forward pass's Python, hands its tensor operations over as a graph, and writes code
that checks whether all that it read is still so (attributes, globals, hooks, sizes, modes), calls
the graph, and then does to Python what the forward pass does (attributes it sets, lists it appends
to, counters). What is run in the place of that graph is the caller's choice: here the sweeps.

Where a network cannot be captured, `reason` says why in one short message: the cause, the user's
line, a remedy.

What Dynamo is taught to guard, and what is compared at each call since no guard covers it, is in
`guards.py`.
"""

from __future__ import annotations

import gc
import itertools
import os
import re
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from time import monotonic
from types import FunctionType
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .. import _torch
from ..errors import CaptureError, InputError, let_through, untold, warn
from ..graph import Graph, collector_off
from .arguments import NO_SUCH, names_in, plain, refuse_distributed, tensors_in
from .guards import Surroundings, capturing, global_hooks, teach
from .lifting import lift, refuse_missing

Run = Callable[[Graph, Sequence[Any]], Sequence[Any]]

MANY = 8  # captures of one network, after which it is said what they cost
MOST = 64  # captures of one network, after which it runs on autograd where none fits
PATIENCE = 200  # how many times as long as a failed capture took to wait before the next


def _call(net: nn.Module, output: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What Dynamo captures: the network, and marks at those results that a penalty may be about."""
    result = net(*args, **kwargs)
    try:
        chosen = tensors_in(result, output)
    except NO_SUCH:
        chosen = [None]
    if output is not None and not isinstance(chosen[0], torch.Tensor):
        names = names_in(result, output)
        return [torch.ops.doubleback.missing(t, names) for t in tensors_in(result, None)], result
    return [torch.ops.doubleback.mark(t) for t in chosen], result


class Capture:
    """One network's graphs. `capture(net, run, args, kwargs)` is `net(*args, **kwargs)`, with
    `run(graph, inputs)` in the place of all its operations: it is given the graph that fits this
    call and the tensors that the graph starts from, and returns the graph's outputs.

    Raises `CaptureError` where the network cannot be captured as one graph; nothing was changed or
    run then. A network that could not be is tried again when the calls since have taken `PATIENCE`
    times as long as the attempt, which bounds what the attempts cost; or at_once, where somebody
    waits for the answer.
    """

    def __init__(self, output: Any) -> None:
        self.output = output
        self.graphs = 0
        self.refusal: CaptureError | None = None
        self._again = 0.0
        self._surroundings: Surroundings | None = None
        self._compiled: dict[Any, Callable] = {}
        self.changes: list[str] = []
        self._calls = 0
        self._warned = False

    def __call__(
        self, net: nn.Module, run: Run, args: tuple, kwargs: dict[str, Any], at_once: bool = False
    ) -> Any:
        if self.resting and not at_once:
            assert self.refusal is not None
            raise self.refusal
        refuse_modes(f"{type(net).__name__} cannot be captured")
        box = _Box(run)
        start, handled, known = monotonic(), sys.exception(), self.graphs
        failure: Exception | None = None
        result: Any = None
        try:
            with leaving_transforms(), _modes_off(box), trackers_off():
                result = self._enter(net, box, args, kwargs)
        except Exception as error:
            if error is box.error:
                raise
            let_through(error, handled)
            failure = error
        if failure is not None and _met_a_trace(failure):
            forget(failure)
            return self(net, run, args, kwargs, at_once)
        if failure is not None:
            refuse_distributed(net.parameters())  # which fail wherever they meet plain tensors
            inner = getattr(failure, "inner_exception", None)
            refusal = inner if isinstance(inner, InputError) else reason(net, failure)
            forget(failure)
            if isinstance(refusal, CaptureError):
                self.refusal = refusal
                now = monotonic()
                self._again = now + PATIENCE * (now - start)
            raise refusal
        self.refusal = None
        self._calls += 1
        if self.graphs > known and self.graphs >= MANY:
            self._reckon(net, monotonic() - start)
        return result

    @property
    def resting(self) -> bool:
        """Whether it was refused, and not so long ago that it is tried again."""
        return self.refusal is not None and monotonic() < self._again

    def _enter(self, net: nn.Module, box: _Box, args: tuple, kwargs: dict[str, Any]) -> Any:
        _Quiet.install()
        teach()
        boxes = _local.boxes
        boxes.append(box)
        try:
            known, collects = len(self._compiled), gc.isenabled()
            function = self._function(net)
            with nullcontext() if len(self._compiled) == known else collector_off():
                _local.collects = collects and not gc.isenabled()
                return function(net, self.output, args, kwargs)[1]
        finally:
            _local.collects = False
            boxes.pop()

    def _function(self, net: nn.Module) -> Callable:
        """`_call` under Dynamo, for the network as it is now."""
        if self._surroundings is None:
            self._surroundings = Surroundings(net)
        key = self._surroundings.key()
        compiled = self._compiled.get(key)
        if compiled is None:
            self._surroundings = Surroundings(net)
            # a copy: Dynamo adds names of its own there
            scope = dict(_call.__globals__)
            compiled = captured_by(self, _call, "call_network", scope)
            if len(self._compiled) >= MANY:
                self._compiled.pop(next(iter(self._compiled)))
            self._compiled[self._surroundings.key()] = compiled
        return compiled

    def receive(self, module: torch.fx.GraphModule, given: Sequence[Any]) -> Callable:
        """Dynamo's backend: the graph is lifted, and run by whoever calls."""
        refuse_distributed(t for t in given if isinstance(t, torch.Tensor))
        strange = [t for t in given if isinstance(t, torch.Tensor) and not plain(t)]
        if strange:
            raise CaptureError(
                f"it holds a {type(strange[0]).__name__} of layout {strange[0].layout} "
                "(distributed, sparse or quantised), which the sweeps do not know"
            )
        refuse_missing(module, self.output)
        graph = lift(module, given)
        self.graphs += 1

        def call(*inputs: Any) -> Sequence[Any]:
            return _local.boxes[-1](graph, inputs)

        return torch.compiler.disable(call)

    def settings(self) -> Mapping[str, Any]:
        """Dynamo's, for a capture. It collects garbage after each, which Python's collector is
        about to do where it was but switched off."""
        return {**_SETTINGS, "run_gc_after_compile": False} if _local.collects else _SETTINGS

    def _reckon(self, net: nn.Module, took: float) -> None:
        """After one more capture: a network that is captured at most of its calls runs on autograd
        for a while; of one that is captured less often it is said once what captures cost."""
        name, changes = type(net).__name__, "; ".join(dict.fromkeys(self.changes))
        if 2 * self.graphs > self._calls:
            self.refusal = CaptureError(
                f"{name} was captured {self.graphs} times in {self._calls} calls: what it reads "
                f"changes ({changes})\n  Remedy: hold what changes often in a buffer or pass it as "
                "a tensor; a list that a hook fills has to be emptied."
            )
            self._again = monotonic() + PATIENCE * took
        elif not self._warned:
            self._warned = True
            warn(
                f"{name} was captured {self.graphs} times because what it reads changed "
                f"({changes}), and will be at every change; hold what changes often in a buffer or "
                "pass it as a tensor"
            )


_SETTINGS = {
    "allow_rnn": True,  # recurrent layers are taken apart into cells
    "allow_unspec_int_on_nn_module": True,  # a counter is no reason to capture anew
    "use_numpy_random_stream": True,  # NumPy's numbers, not PyTorch's in their place
    "skip_nnmodule_hook_guards": False,  # hooks may come and go
    "optimize_ddp": False,  # inside DistributedDataParallel too: one graph, whatever its buckets
    "recompile_limit": MOST,
    "accumulated_recompile_limit": 4 * MOST,
    "fail_on_recompile_limit_hit": False,
    "use_recursive_dict_tags_for_guards": False,  # as from 2.13 on: it skips guards
    "invalidate_compile_context_weakrefs": True,  # parameters can be swapped
}


# Before 2.13 Dynamo's settings are those of all threads, and one at a time may change them.
_turn: Any = threading.RLock() if _torch.before(2, 13) else nullcontext()


def captured_by(
    owner: Any, template: Any, name: str, scope: dict[str, Any], dynamic: bool | None = None
) -> Callable:
    """A function as one graph of Dynamo's for each call that no earlier graph fits.

    owner: its `receive` is Dynamo's backend, its `settings` are Dynamo's for captures alone, and
    its `changes` say which guards failed last. Dynamo never forgets a backend, so that this one
    knows its owner by a weak reference.
    template, name, scope: the function has its code with a code object and a name of its own, and
    these globals: by the one Dynamo keeps graphs, by the other it remembers which sizes have
    changed.
    """
    code = template.__code__.replace(co_name=f"{name}_{next(_count)}")
    own: Any = FunctionType(code, scope)
    me: Any = weakref.ref(owner)

    def receive(module: torch.fx.GraphModule, given: Sequence[Any]) -> Callable:
        return me().receive(module, given)

    def changed(failure: Any) -> None:
        holder = me()
        holder.changes = [*holder.changes[-3:], str(failure.reason).splitlines()[0]]

    optimise = _torch.dynamo_optimize(
        receive, nopython=True, dynamic=dynamic, guard_fail_fn=changed
    )
    optimise.callback = _CaptureCallback(optimise.callback, lambda: me().settings())
    compiled = optimise(own)
    assert compiled is not None
    weakref.finalize(own, _torch.dynamo_reset_code, code).atexit = False
    return compiled


class _CaptureCallback:
    """What Dynamo calls where no graph fits, under settings of its own: to set and put them back
    takes as long as a few kernels, so calls by graphs that there are do without."""

    def __init__(self, callback: Any, settings: Callable[[], Mapping[str, Any]]) -> None:
        self._torchdynamo_orig_backend = callback  # the name by which Dynamo looks for a backend
        self._settings = settings

    def __call__(self, *frame: Any) -> Any:
        before: dict[str, Any] = {}
        with _turn:
            outer, capturing.now = capturing.now, True
            try:
                for name, value in self._settings().items():
                    before[name] = getattr(_torch.dynamo_config, name)
                    setattr(_torch.dynamo_config, name, value)
                return self._torchdynamo_orig_backend(*frame)
            finally:
                capturing.now = outer
                try:
                    _put_back(before)
                except BaseException:  # Ctrl-C
                    _put_back(before)
                    raise


def _put_back(before: dict[str, Any]) -> None:
    for name in list(before):
        setattr(_torch.dynamo_config, name, before[name])
        del before[name]


class _Box:
    """What one call runs in the place of the graph.

    error: the one that `run` raised itself; modes: the caller's, which were off for the capture.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.error: BaseException | None = None
        self.modes: Sequence[Any] = ()

    def __call__(self, graph: Graph, inputs: Sequence[Any]) -> Sequence[Any]:
        for mode in self.modes:
            _torch.push_mode(mode)
        try:
            return self.run(graph, inputs)
        except BaseException as error:
            self.error = error
            raise
        finally:
            for _ in self.modes:
                _torch.pop_mode()


@contextmanager
def _modes_off(box: _Box) -> Iterator[None]:
    """Modes of the caller's (a counter of FLOPs) see the sweeps, not the capture, which Dynamo
    would leave out for them."""
    if not _torch.len_torch_dispatch_stack():
        yield
        return
    with _torch.disable_current_modes() as modes:
        box.modes = modes[::-1]
        yield


class _Local(threading.local):
    """Of one thread. boxes: those of its calls, the innermost last; collects: whether Python's
    collector looks for garbage as soon as a capture is over."""

    def __init__(self) -> None:
        self.boxes: list[_Box] = []
        self.collects = False


_local = _Local()
_count = itertools.count()


def refuse_modes(what: str) -> None:
    """A mode of the caller's that changes what PyTorch's functions return would do so as Dynamo
    reads them, and once more where they are traced and run."""
    modes = [m for m in _torch.get_function_modes() if not isinstance(m, _torch.DeviceContext)]
    if modes:
        raise CaptureError(
            f"{what} while {type(modes[-1]).__name__} is active: as a TorchFunctionMode it would "
            "change what functions return twice\n  Remedy: enter it inside, or leave it."
        )


@contextmanager
def trackers_off() -> Iterator[None]:
    """A counter of FLOPs hangs hooks on all modules to know which one is running; they are no part
    of the network, no graph could hold them, and they fail in an inner autograd.grad."""
    taken = []
    for hooks in global_hooks():
        for key, hook in list(hooks.items()):
            if getattr(hook, "__module__", "") == "torch.utils.module_tracker":
                taken.append((hooks, key, hooks.pop(key)))
    try:
        yield
    finally:
        for hooks, key, hook in taken:
            hooks[key] = hook


def _met_a_trace(failure: Exception) -> bool:
    """Whether a call failed since another thread was tracing, which it has ended by now: Dynamo
    looks at a mark of the process."""
    if "trace a dynamo-optimized function" not in str(failure):
        return False
    with _torch.compile_lock:  # which whoever traces holds
        return not _torch.is_fx_tracing()


class _Quiet:
    """What PyTorch warns and logs of its own calls while it captures is nobody's business: a
    capture that fails says itself why."""

    held: ClassVar[list[ExitStack]] = []

    @classmethod
    def install(cls) -> None:
        handler = _torch.callback_handler
        if cls.start not in handler.start_callbacks:  # torch._dynamo.reset() forgets them
            handler.register_start_callback(cls.start)
            handler.register_end_callback(cls.end)

    @classmethod
    def start(cls, _: Any) -> None:
        if _local.boxes:
            cls.held.append(ExitStack())
            cls.held[-1].enter_context(warnings.catch_warnings())
            cls.held[-1].enter_context(untold())
            warnings.simplefilter("ignore")

    @classmethod
    def end(cls, _: Any) -> None:
        if _local.boxes and cls.held:
            cls.held.pop().close()


class _Escape(Exception):
    """Carries a graph out of the network's call, so that nothing of it runs."""

    def __init__(self, graph: Graph, inputs: Sequence[Any]) -> None:
        super().__init__("a graph, carried out of a call")
        self.graph, self.inputs = graph, inputs


_captures: WeakKeyDictionary[nn.Module, dict[Any, Capture]] = WeakKeyDictionary()


def capture_of(net: nn.Module, output: Any = None) -> Capture:
    """The network's graphs with this output penalised; all models that hold the network share
    them."""
    by_output = _captures.setdefault(net, {})
    if output not in by_output:
        by_output[output] = Capture(output)
    return by_output[output]


def find_graph(
    net: nn.Module, output: Any, args: tuple, kwargs: dict[str, Any]
) -> tuple[Graph, Sequence[Any]]:
    """The graph that fits this call and the tensors it starts from; the network does not run."""

    def escape(graph: Graph, inputs: Sequence[Any]) -> Sequence[Any]:
        raise _Escape(graph, inputs)

    try:
        capture_of(net, output)(net, escape, args, kwargs, at_once=True)
    except _Escape as escaped:
        traceback.clear_frames(escaped.__traceback__)
        return escaped.graph, escaped.inputs
    raise CaptureError(f"{type(net).__name__} calls no operator of PyTorch")


# ---------------------------------------------------------------------------------------- reasons


_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_STANDARD = os.path.dirname(os.path.abspath(os.__file__))

_REMEDIES = (
    (r"builtin operator `(print|open|input)`",
     "print, read and write outside of forward, or switch it off while training"),
    (r"a size depends on random numbers", "draw what decides a size outside, and hand it in"),
    (r"random|Random|numpy\.rand",
     "draw random numbers with torch, not with Python's or NumPy's generator"),
    (r"data.dependent|\.item\(\)|_local_scalar_dense|GuardOnDataDependent|nonzero|unbacked",
     "keep Python's branches and sizes independent of the values of tensors (torch.where, a "
     "fixed size)"),
    (r"autograd\.Function|autograd_function",
     "make it an operator (torch.library.custom_op with register_autograd), or write it in "
     "PyTorch's own operations"),
    (r"torch\.autograd\.grad|requires_grad_|backward\(\)|\.backward",
     "take derivatives outside the network, or return them with db.WithGradient"),
    (r"torch\.jit|ScriptMethod|ScriptFunction|RecursiveScriptModule|TorchScript",
     "use the plain Python module (for e3nn: e3nn.set_optimization_defaults(jit_script_fx=False))"),
    (r"ao.quantization|FakeQuantize|Observer",
     "none: quantisation observes in Python what no graph holds; sweeps=False says that autograd "
     "is meant"),
    (r"transform of torch\.func",
     "write it on batches, or compile the whole loss (db.compile); sweeps=False says that autograd "
     "is meant"),
    (r"hook", "remove the hook while training with a penalty"),
    (r"DistributedDataParallel|DDP", "wrap the other way round: DDP(Penalised(net))"),
    (r"sparse Tensor", "multiply by indices and values (index_add), or with a dense tensor"),
    (r"behind autograd's back", "write out of place, or leave it on autograd"),
    (r"recompile_limit|cache_size_limit",
     "hold what changes at every call in a buffer, or pass it as a tensor"),
)  # fmt: skip


def reason(net: nn.Module, error: BaseException) -> CaptureError:
    """The error that a user sees."""
    text, told = first_line(error), str(error)
    scripted = [name for name, m in net.named_modules() if isinstance(m, torch.jit.ScriptModule)]
    if scripted:
        which = f"its module {scripted[0]!r}" if scripted[0] else "it"
        told = text = f"{which} is TorchScript, which hides its operations"
    if "requires_grad_()" in text:
        text = (
            "it makes a leaf of its own inside (requires_grad_()), so that its output may not "
            "depend on its input any more"
        )
    return CaptureError(
        f"{type(net).__name__} cannot be captured as one graph: {text}"
        f"{stopped_at(error)}{remedy(told, _REMEDIES)}"
    )


def remedy(told: str, remedies: Sequence[tuple[str, str]]) -> str:
    """What to do about it, by the first of the patterns that what is told contains."""
    hint = next((hint for pattern, hint in remedies if re.search(pattern, told)), None)
    return f"\n  Remedy: {hint}." if hint else ""


def stopped_at(error: BaseException) -> str:
    """At which line of the user's, where it is known."""
    where = _line(error)
    return f"\n  stopped at {where}" if where else ""


def first_line(error: BaseException) -> str:
    """What went wrong, in one line; of an error of Dynamo's with its explanation, of a backend's
    the error inside."""
    inner = getattr(error, "inner_exception", None) or error
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    if not lines:
        return type(inner).__name__
    explained = next((x for x in lines if x.startswith("Explanation:")), None)
    if explained:
        return f"{lines[0]}: {explained.removeprefix('Explanation:').strip()}"
    return lines[0]


def _line(error: BaseException) -> str | None:
    """The innermost line of the user's code, from Dynamo's own stack or from Python's."""
    frames: list[Any] = list(getattr(error, "real_stack", None) or ())
    frames += traceback.extract_tb(error.__traceback__)
    own = [
        f for f in frames
        if not os.path.abspath(f.filename).startswith((_TORCH, _HERE, _STANDARD))
        and os.path.exists(f.filename)
    ]  # fmt: skip
    if not own:
        named = re.findall(r'File "([^"]+)", line (\d+)', str(error))
        named = [(path, line) for path, line in named if not path.startswith((_TORCH, _HERE))]
        return f"{os.path.basename(named[-1][0])}:{named[-1][1]}" if named else None
    last = own[-1]
    return f"{os.path.basename(last.filename)}:{last.lineno}: {last.line}"


def forget(error: BaseException) -> None:
    """Let go of a failed trace now. Its frames hold contexts that set PyTorch's state back when
    they are collected, which must not happen in the midst of something else."""
    keys = _torch.dispatch_tls_local_include_set(), _torch.dispatch_tls_local_exclude_set()
    mode, forward = torch.is_grad_enabled(), _torch.is_fwd_grad_enabled()
    with _torch.ForceDispatchKeyGuard(*keys):
        _clear(error)
        gc.collect()
    torch.set_grad_enabled(mode)
    _torch.set_fwd_grad_enabled(forward)


_EXITS = {
    "Vmap": _torch.leave_vmap, "Grad": _torch.leave_grad, "Jvp": _torch.leave_jvp,
    "Functionalize": _torch.leave_functionalize,
}  # fmt: skip


@contextmanager
def leaving_transforms() -> Iterator[None]:
    """An error leaves the transforms of torch.func that were entered since. In a graph they are
    entered and left by calls, in PyTorch's Python by `with`, which a trace does not always mind."""
    transforms, forward = _torch.jvp_transforms, _torch.forward_ad
    depth, jvps, level = _torch.transforms_entered(), transforms.JVP_NESTING, forward._current_level
    try:
        yield
    except BaseException:
        while _torch.transforms_entered() > depth:
            _EXITS[_torch.peek_interpreter_stack().key().name]()
        with suppress(RuntimeError):  # there is one level at most
            _torch.exit_dual_level(level=level + 1)
        transforms.JVP_NESTING, forward._current_level = jvps, level
        raise


def _clear(error: BaseException) -> None:
    """Empty the frames of an exception and of those that it came from."""
    seen: set[int] = set()
    stack: list[BaseException | None] = [error]
    while stack:
        item = stack.pop()
        if item is not None and id(item) not in seen:
            seen.add(id(item))
            traceback.clear_frames(item.__traceback__)
            item.__traceback__ = None
            stack += [item.__cause__, item.__context__, getattr(item, "inner_exception", None)]
