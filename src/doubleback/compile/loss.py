"""`compile`: a whole loss with derivatives inside, as one graph of its value and its gradients.

TorchDynamo reads the loss's Python, guards whatever that depends on, and hands its operations over
as one graph, calls of `torch.autograd.grad` and `torch.func` among them. That graph runs once on
tensors without numbers, autograd watching, and is then differentiated by all parameters, so that a
flat list of operators with no autograd left in it remains: derivatives of any order are plain
operators by then, which Inductor compiles whole, although AOTAutograd knows no double backward.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from .. import _torch, errors
from .._torch import (
    foreach_copy_,
    foreach_mul,
    get_current_graph_task_keep_graph,
    peek_interpreter_stack,
    pytree,
)
from ..capture import (
    Surroundings,
    assigns_data,
    captured_by,
    first_line,
    forget,
    is_distributed,
    leaving_transforms,
    plain,
    refuse_modes,
    remedy,
    stopped_at,
    teach,
)
from ..errors import (
    CaptureError,
    InputError,
    StaleGraphError,
    ThirdDerivativeError,
    warn,
)
from ..graph import memory
from ..kernels import batched
from ..patch import hold_patch, patched, patched_where_known, supported
from ..run import no_autocast, quiet
from .tracing import NO_CUDA_GRAPHS, WholeStep, inductor_options, take_mark, trace_whole

MANY = 8  # traces of one loss, after which it is said what they cost
MOST = 64  # traces of one loss, after which it runs on autograd where none fits
PATIENCE = 50  # how many times as long as a failed trace took to wait before the next


def compile(
    fn: Callable[..., Any], *, compiler: str = "inductor", mode: str | None = None,
    options: dict[str, Any] | None = None, scaler: Any = None, dynamic: bool | None = None,
    strict: bool = False,
) -> Compiled:  # fmt: skip
    """`step = compile(fn)`: a loss with any derivatives inside, as one graph of value and gradient.

    fn: a function (a method, a module) of anything, which returns a scalar loss, or a tuple or list
        that begins with one. `step(…)` returns the same, and `backward()` from the loss hands out
        the gradients of all parameters that fn meets, and of tensors among its arguments that
        require grad. Only the loss is differentiable; all else that fn returns is detached.
    compiler: "inductor", or "eager", which replays the graph kernel by kernel.
    mode, options: Inductor's, as for `torch.compile` ("max-autotune", {"cpp_wrapper": True}), but
        for its CUDA graphs, in whose memory the next call would overwrite gradients.
    scaler: the `torch.amp.GradScaler` that the loss is scaled with, where float16 is in the graph:
        gradients are computed in the same call as the loss, and are scaled there.
    dynamic: as for `torch.compile`. None: a size is a symbol once it has changed.
    strict: raise `CaptureError` instead of running on autograd where fn is not one graph.

    Inside fn, derivatives are PyTorch's own, `torch.autograd.grad(…, create_graph=True)` and
    `torch.func`, of any order, and those that PyTorch lacks the library's. Nothing is stale: what
    fn reads (attributes, globals, closures, modes, sizes) is checked at each call.

    >>> import torch, doubleback as db
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> def residual(x):  # of −Δu = 1
    ...     x = x.detach().requires_grad_()
    ...     (g,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    ...     second = [torch.autograd.grad(g[:, i].sum(), x, create_graph=True)[0] for i in (0, 1)]
    ...     return (sum(s[:, i] for i, s in enumerate(second)) + 1).square().mean()
    >>> step = db.compile(residual, compiler="eager")
    >>> step(torch.rand(16, 2)).backward()
    """
    if not callable(fn):
        raise InputError(f"compile takes a function that returns a loss, not {fn!r}")
    if mode == "reduce-overhead" or (options or {}).get("triton.cudagraphs"):
        raise InputError(
            "a compiled loss runs without CUDA graphs, whose next run would overwrite the "
            'gradients; options={"cpp_wrapper": True} takes work off the host'
        )
    inductor = inductor_options(compiler, mode, options, "compiler")
    inductor = None if inductor is None else {**inductor, **NO_CUDA_GRAPHS}
    if scaler is not None and not hasattr(scaler, "scale"):
        raise InputError(f"scaler must be a torch.amp.GradScaler, not {type(scaler).__name__}")
    return Compiled(fn, inductor, scaler, dynamic, strict)


class Compiled:
    """What `compile` returns: called as the function, whose gradients it computes at once.

    traces: how many graphs there are of it.
    """

    def __init__(
        self, fn: Callable, inductor: dict[str, Any] | None, scaler: Any, dynamic: bool | None,
        strict: bool,
    ) -> None:  # fmt: skip
        functools.update_wrapper(self, fn, updated=())
        self.fn, self.inductor, self.scaler = fn, inductor, scaler
        self.dynamic, self.strict = dynamic, strict
        self.traces = 0
        self.refusal: CaptureError | None = None
        self._again = 0.0
        self._constants = False  # whether Python's numbers are constants of the graph
        self._patched = False
        self._warned: set[str] = set()
        self.changes: list[str] = []
        self._surroundings: dict[Any, tuple[Surroundings, ...]] = {}
        self._functions: dict[Any, Callable] = {}
        self._run = torch.compiler.disable(self._call)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a method of a class, where it decorates one."""
        return self if instance is None else functools.partial(self, instance)

    def __reduce__(self) -> tuple:
        """Copies and pickles begin without graphs, which belong to the function as it was."""
        return Compiled, (self.fn, self.inductor, self.scaler, self.dynamic, self.strict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(args, kwargs)  # type: ignore[call-arg]

    def _call(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        if peek_interpreter_stack() is not None:
            raise InputError(
                "torch.func (grad, vmap, jvp, …) cannot transform a compiled loss; take these "
                "derivatives inside the function that is compiled"
            )
        now = time.monotonic()
        if self.refusal is None or now >= self._again:
            try:
                refuse_modes(f"{_name(self.fn)} cannot be traced")
                return self._through(args, kwargs)
            except CaptureError as error:
                if self.strict:
                    raise
                # without its causes, whose frames hold the arguments
                self.refusal = CaptureError(str(error))
                self._again = time.monotonic() + PATIENCE * (time.monotonic() - now)
        result = self._on_autograd(args, kwargs)
        self._say(f"{self.refusal}\n  Until then it runs on autograd.", "autograd")
        return result

    def _on_autograd(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """fn itself, under the library's derivatives, which stay from the first such call on."""
        if not self._patched:
            self._patched = True
            hold_patch(self)
        result = self.fn(*args, **kwargs)
        loss = _first(result)
        _check(loss, torch.is_grad_enabled())
        return _with_first(result, loss, Tensor.detach)

    def _say(self, text: str, about: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warn(text)

    # --------------------------------------------------------------------------- Dynamo

    def _through(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The call by graphs, raising `CaptureError` where there can be none.

        Dynamo looks at fn without the library's derivatives first, which few functions need for
        that, and makes symbols of Python's numbers that change, which it cannot do everything with
        (iterate over a range up to one), nor can all operators.
        """
        try:
            return self._enter(args, kwargs)
        except _Refusal as refusal:
            lacking = refusal.lacking and supported(torch.__version__)
            if not lacking and self._constants:
                raise
        before = self._constants
        try:
            with patched() if lacking else nullcontext():
                self._constants = before or not lacking
                return self._enter(args, kwargs)
        except _Refusal:
            self._constants = before
            raise

    def _enter(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """One attempt: by the graph that fits, which Dynamo captures where there is none yet."""
        call = _LossCall(args, kwargs)
        stack = _calls()
        stack.append(call)
        failure, returned, handled = None, (None, None), sys.exception()
        try:
            with leaving_transforms():
                returned = self._function((*args, *kwargs.values()))(
                    self.fn, call.args, call.kwargs, _TOOLS
                )  # fmt: skip
        except Exception as error:
            if error is call.error:
                raise
            errors.let_through(error, handled)
            failure = error
        finally:
            stack.pop()
        if failure is not None:
            refusal = call.error or _Refusal(self.fn, failure)
            forget(failure)
            raise refusal
        loss, result = returned
        if call.loss is None:  # no operator of PyTorch at all
            _check(loss, torch.is_grad_enabled())
        self.refusal = None
        return _with_first(result, loss, lambda t: t)

    def _function(self, args: tuple) -> Callable:
        """`_observed` under Dynamo, for the modules as they are now."""
        given = [m for m in args if isinstance(m, nn.Module)]
        key = self._key(given)
        function = self._functions.get(key)
        if function is None:
            self._surroundings.clear()
            key = self._key(given)
            _follow_requires_grad(_calls)
            teach()
            _refuse_to_tell_leaves(_calls)
            # Dynamo looks for other functions' globals in the module of their name
            scope = _globals(self.fn)
            function = captured_by(self, _observed, "call_loss", scope, self.dynamic)
            if len(self._functions) >= MANY:
                self._functions.pop(next(iter(self._functions)))
            self._functions[key] = function
        return function

    def _key(self, given: Sequence[nn.Module]) -> tuple:
        """What Dynamo does not guard, of the modules that fn holds or is given."""
        if not self._surroundings:
            held = held_modules(self.fn)
            self._surroundings = {self: tuple(Surroundings(m) for m in held)}
        for module in given:
            if module not in self._surroundings:
                self._surroundings[module] = (Surroundings(module),)
        keys = (self._surroundings[holder] for holder in (self, *given))
        return tuple([s.key() for each in keys for s in each])

    def settings(self) -> dict[str, Any]:
        """Dynamo's, for a trace."""
        constants = self._constants
        wanted = {
            "trace_autograd_ops": True,  # torch.autograd.grad in the graph
            "allow_rnn": True,
            "allow_unspec_int_on_nn_module": not constants,  # a counter is no reason to trace anew
            "specialize_int": constants,
            "specialize_float": constants,
            "skip_nnmodule_hook_guards": False,  # hooks may come and go
            "recompile_limit": MOST,
            "accumulated_recompile_limit": 4 * MOST,
            "fail_on_recompile_limit_hit": False,
            "use_recursive_dict_tags_for_guards": False,  # as from 2.13 on: it skips guards
            "invalidate_compile_context_weakrefs": True,  # parameters can be swapped
        }
        return {name: value for name, value in wanted.items() if _known(name)}

    def receive(self, module: torch.fx.GraphModule, given: Sequence[Any]) -> Callable:
        """Dynamo's backend: the graph is differentiated and compiled, and run by whoever calls."""
        call = _calls()[-1]
        try:
            strange = [t for t in given if isinstance(t, Tensor) and not plain(t)]
            for t in strange:
                if is_distributed(t):
                    raise InputError(
                        f"the loss reads a distributed tensor of shape {tuple(t.shape)}, through "
                        "which PyTorch's second derivatives are wrong without an error: layers "
                        "split between processes are not supported"
                    )
            _refuse_stored(module)
            loss = take_mark(module)
            if loss is None:
                _check(None, False)
            if strange:
                raise CaptureError(
                    f"it meets a {type(strange[0]).__name__} of layout {strange[0].layout} "
                    "(sparse or quantised), which cannot be traced"
                )
            if assigns_data(module):
                raise CaptureError("it assigns to a tensor's .data")
            with patched_where_known(), quiet():
                step = trace_whole(module, given, self.inductor, self.scaler is not None, _check)
        except InputError as error:
            call.error = error
            raise
        self.traces += 1
        if step.halves and self.scaler is None:
            self._say(
                f"{_name(self.fn)} computes in float16, and its gradients with it, before a "
                "GradScaler can scale the loss: pass it, db.compile(fn, scaler=scaler)",
                "float16",
            )
        if self.traces == MANY:
            changes = "; ".join(dict.fromkeys(self.changes))
            self._say(
                f"{_name(self.fn)} was traced {MANY} times because what it reads changed "
                f"({changes}), and will be at every change; pass what changes often as a tensor",
                "many",
            )

        def run(*inputs: Any) -> Sequence[Any]:
            return self._launch(step, inputs)

        return torch.compiler.disable(run)

    # ------------------------------------------------------------------------------ calls

    def _launch(self, step: WholeStep, inputs: Sequence[Any]) -> Sequence[Any]:
        """What Dynamo's code calls in the graph's place: the loss with its gradients, and what else
        fn returns."""
        call = _calls()[-1]
        try:
            _refuse_shared(step, inputs)
            call.refuse_ways_outside([inputs[i] for i in step.inner])
            scale = None
            if step.scaled:
                scale = self.scaler.scale(torch.ones((), device=step.device))
            job = _LossRun(
                step, [t.detach() if isinstance(t, Tensor) else t for t in inputs], scale
            )
            if step.trained:
                trained = [call.original(inputs[i]) for i in step.trained]
                loss = _LossNode.apply(job, *trained)
            else:
                with torch.no_grad():
                    loss = job.run()[0]
            call.loss = loss
            if step.written:
                with torch.no_grad():
                    foreach_copy_([inputs[i] for i in step.written], job.updates)
            return [*job.results[: step.place], loss, *job.results[step.place + 1 :]]
        except CaptureError as error:
            call.error = CaptureError(f"{_name(self.fn)} cannot run as one graph: {error}")
            raise call.error from None
        except BaseException as error:
            call.error = error
            raise


# ------------------------------------------------------------- requires_grad_ inside a loss
#
# Most losses with derivatives inside say `x = x.detach().requires_grad_()`, which TorchDynamo
# follows from 2.13 on. What it lacks before is little: the call as a node of the graph, and the
# answer to whoever asks the tensor afterwards. Both are given to it here, for tensors that the
# graph itself makes; one of the caller's would have to be changed outside the graph.


@functools.cache
def _follow_requires_grad(ours: Callable[[], Any]) -> None:
    """Teach Dynamo `requires_grad_()`, once, where it has not learned it itself.

    ours: whether a loss of ours is being captured in this thread. All other programs meet PyTorch's
    own answer.
    """
    if hasattr(_torch.SpeculationLog, "graph_break_on_requires_grad_"):
        return
    variable = _torch.TensorVariable
    original = variable.method_requires_grad_

    def method_requires_grad_(self: Any, tx: Any, requires_grad: Any = True) -> Any:
        wanted = requires_grad if requires_grad is True else requires_grad.as_python_constant()
        value = self.as_proxy().node.meta["example_value"]
        if not ours() or self.source is not None or value.requires_grad == wanted:
            return original(self, tx, requires_grad)
        value.requires_grad_(wanted)
        tx.output.create_proxy("call_method", "requires_grad_", (self.as_proxy(), wanted), {})
        self.requires_grad = wanted
        return self

    variable.method_requires_grad_ = method_requires_grad_  # type: ignore[method-assign]


@functools.cache
def _refuse_to_tell_leaves(ours: Callable[[], Any]) -> None:
    """A loss that asks whether a tensor that it is given is a leaf (`is_leaf`, `grad_fn`) is no
    graph: all of them stand there as leaves."""
    variable: Any = _torch.TensorVariable

    def refusing(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def method_attr(self: Any, tx: Any) -> Any:
            given = self.as_proxy().node.meta["example_value"]
            trained = given.requires_grad and not isinstance(given, nn.Parameter)
            if ours() and self.source is not None and trained:
                raise CaptureError(
                    "it asks whether a tensor that it is given is a leaf (is_leaf, grad_fn)"
                )
            return original(self, tx)

        return method_attr

    for name in ("method_attr_is_leaf", "method_attr_grad_fn"):
        setattr(variable, name, refusing(getattr(variable, name)))


def _refuse_stored(module: torch.fx.GraphModule) -> None:
    """Raise where a tensor leaves the graph that requires grad: the loss and what is returned do
    so detached, so this one was stored on a Python object, and might be differentiated later."""
    (output,) = module.graph.find_nodes(op="output")
    for node in output.all_input_nodes:
        value = node.meta.get("example_value")
        if node.op != "placeholder" and isinstance(value, Tensor) and value.requires_grad:
            raise CaptureError(
                f"it stores a tensor that requires grad, of shape {tuple(value.shape)}, on a "
                "Python object; only the loss has gradients outside the graph"
            )


def _refuse_shared(step: WholeStep, inputs: Sequence[Any]) -> None:
    """Raise where a tensor that the graph writes to shares memory with another of its inputs: in
    the graph they are strangers."""
    if not step.written:
        return
    places = [memory(t) if isinstance(t, Tensor) else None for t in inputs]
    count = Counter(places)
    if any(count[places[i]] > 1 for i in step.written):
        raise CaptureError("it writes to a tensor that shares memory with another that it reads")


class _LossRun:
    """One call of a graph, and what it yields besides the loss."""

    def __init__(self, step: WholeStep, inputs: list[Any], scale: Tensor | None) -> None:
        self.step, self.inputs, self.scale = step, inputs, scale
        self.results: Sequence[Any] = ()
        self.updates: Sequence[Tensor] = ()

    def run(self) -> tuple[Tensor, list[Tensor | None]]:
        given = [*self.inputs, *(() if self.scale is None else (self.scale,))]
        self.inputs = []
        with no_autocast():
            loss, grads, self.results, self.updates = self.step(given)
        return loss, grads


class _LossNode(torch.autograd.Function):
    """The loss; its gradients wait for the one that arrives at it."""

    @staticmethod
    def forward(ctx: Any, job: _LossRun, *trained: Tensor) -> Tensor:
        loss, ctx.grads = job.run()
        ctx.scale = job.scale
        ctx.trained = trained
        return loss.detach()  # another name: the same tensor may stand among the results

    @staticmethod
    def backward(ctx: Any, arrived: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise StaleGraphError(
                "backward a second time: the gradients were freed; pass retain_graph=True to the "
                "first backward"
            )
        with torch.no_grad():
            # d(loss)/dθ was computed as d(s·loss)/dθ: by what arrived over s, exactly 1 where the
            # loss was scaled by s
            by = arrived if ctx.scale is None else arrived / ctx.scale
            grads = _multiplied(ctx.grads, by)
        if torch.is_grad_enabled():
            end = _NoMore.apply(arrived, *ctx.trained)
            grads = [None if g is None else _Attached.apply(g, end) for g in grads]
        if not get_current_graph_task_keep_graph():
            ctx.grads = ctx.trained = None
        return (None, *grads)


def _multiplied(grads: Sequence[Tensor | None], by: Tensor) -> list[Tensor | None]:
    """Each gradient times one number, in a kernel for all that are alike."""
    by = by.reshape(())
    present = [g for g in grads if g is not None]
    products: list[Tensor | None] = [None] * len(present)
    groups: dict[Any, list[int]] = {}
    for i, g in enumerate(present):
        groups.setdefault((g.device, g.dtype), []).append(i)
    for (device, _), places in groups.items():
        factor = by.to(device)
        if len(places) > 1 and not batched():
            scaled = foreach_mul([present[i] for i in places], factor)
        else:
            scaled = [present[i] * factor for i in places]
        for i, product in zip(places, scaled, strict=True):
            products[i] = product
    each = iter(products)
    return [None if g is None else next(each) for g in grads]


class _NoMore(torch.autograd.Function):
    """Stands for all that the gradients depend on."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        return torch.zeros((), device=inputs[0].device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ThirdDerivativeError(
            "the gradients of a compiled loss are numbers, without a derivative of their own; take "
            "the further derivative inside the function that is compiled"
        )


class _Attached(torch.autograd.Function):
    """A gradient, joined to the node that stands for all that it depends on."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, end: Tensor) -> Tensor:
        ctx.save_for_backward(end)
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, along: Tensor) -> tuple[None, Tensor]:
        return None, torch.zeros_like(ctx.saved_tensors[0])


# --------------------------------------------------------------------- what Dynamo sees


def _observed(fn: Callable, args: tuple, kwargs: dict[str, Any], tools: tuple) -> Any:
    """What Dynamo captures: (the loss, marked; all that fn returns, detached).

    Tensors that need no gradient are handed on under another name, so that fn may say
    `requires_grad_()` of them. It runs among the globals of fn, so it names none of its own.
    """
    tensor, mark, aliases, detached = tools
    given = [*args, *kwargs.values()]
    names = aliases(given)
    count = len(args)
    result = fn(*names[:count], **dict(zip(kwargs, names[count:])))  # noqa: B905
    loss = result[0] if isinstance(result, (tuple, list)) and len(result) > 0 else result
    marked = None
    if isinstance(loss, tensor):
        marked = mark(loss).detach()
    return marked, detached(result)


def _aliases(given: list) -> list:
    """Each tensor without gradient under one new name, however often it stands there."""
    names: list = []
    for i, t in enumerate(given):
        name = t
        if isinstance(t, Tensor) and not t.requires_grad and t.is_floating_point():
            name = None
            for j in range(i):
                if given[j] is t:
                    name = names[j]
            if name is None:
                name = t.detach()
        names.append(name)
    return names


def _detached(item: Any) -> Any:
    if isinstance(item, Tensor):
        return item.detach()
    if type(item) is tuple:
        return tuple([_detached(part) for part in item])
    if type(item) is list:
        return [_detached(part) for part in item]
    if type(item) is dict:
        return {key: _detached(part) for key, part in item.items()}
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*[_detached(part) for part in item])
    return item


_TOOLS = (Tensor, torch.ops.doubleback.mark, _aliases, _detached)


def _globals(fn: Any) -> dict[str, Any]:
    """The globals of a function, of a method, or of a module's forward."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    if not isinstance(fn, (FunctionType, MethodType)):
        fn = type(fn).forward if isinstance(fn, nn.Module) else type(fn).__call__
    return getattr(inspect.unwrap(fn), "__globals__", globals())


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, (tuple, list)) and result else result


def _with_first(result: Any, loss: Any, rest: Callable[[Tensor], Any]) -> Any:
    """The result with this loss in its place, and `rest` done to the tensors behind it."""
    if not isinstance(result, (tuple, list)):
        return loss
    others = pytree.tree_map_only(Tensor, rest, list(result[1:]))
    if hasattr(result, "_fields"):
        return type(result)(loss, *others)
    return type(result)([loss, *others])


def _check(loss: Any, gradients: bool) -> None:
    """An `InputError` about what is no loss. gradients: whether they are asked for."""
    wanted = "the function must return a scalar loss, or a tuple that begins with one"
    if not isinstance(loss, Tensor):
        given = "" if loss is None else f", not {type(loss).__name__}"
        raise InputError(f"{wanted}{given}")
    if loss.dim() and loss.numel() != 1:
        raise InputError(
            f"{wanted}, not a tensor of shape {tuple(loss.shape)}: take its mean or its sum"
        )
    if not loss.is_floating_point():
        raise InputError(f"{wanted} of floating-point numbers, not of {loss.dtype}")
    if gradients and not loss.requires_grad:
        raise InputError(
            "the loss does not depend on any parameter or argument that requires grad (is it "
            "detached, computed under no_grad, or is everything frozen?). For the value alone, "
            "call it under torch.no_grad()"
        )


# ------------------------------------------------------------------------ surroundings


class _LossCall:
    """One call's arguments, and what became of it. Arguments that were computed from others stand
    there as leaves: what comes before them is not fn's business."""

    def __init__(self, args: tuple, kwargs: dict[str, Any]) -> None:
        self._leaves: dict[int, tuple[Tensor, Tensor]] = {}
        self._originals: dict[int, Tensor] = {}
        self.args = tuple([self._leaf(t) for t in args])
        self.kwargs = {name: self._leaf(t) for name, t in kwargs.items()}
        self.error: BaseException | None = None
        self.loss: Tensor | None = None

    def _leaf(self, t: Any) -> Any:
        if not isinstance(t, Tensor) or t.grad_fn is None or not torch.is_grad_enabled():
            return t
        if id(t) not in self._leaves:
            leaf = t.detach().requires_grad_()
            self._leaves[id(t)] = t, leaf
            self._originals[id(leaf)] = t
        return self._leaves[id(t)][1]

    def original(self, t: Tensor) -> Tensor:
        return self._originals.get(id(t), t)

    def refuse_ways_outside(self, inner: Sequence[Tensor]) -> None:
        """Raise where autograd's graph of the caller would have a part in the derivatives that fn
        takes by these of its inputs: another argument was computed from one, or a hook waits."""
        at = [self.original(t) for t in inner]
        if any(t._backward_hooks for t in at):
            raise CaptureError(
                "it differentiates by a tensor with a hook (register_hook), which no graph holds"
            )
        ends = {get_gradient_edge(t)[:2] for t in at if t.requires_grad}
        stack: list[Any] = [t.grad_fn for t, _ in self._leaves.values()] if ends else []
        seen = set()
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            for edge in node.next_functions:
                if edge in ends:
                    raise CaptureError(
                        "it differentiates by a tensor that another of its arguments was computed "
                        "from; compute that one inside the function, or detach it"
                    )
                stack.append(edge[0])


_local = threading.local()


def _calls() -> list[_LossCall]:
    """The calls that run in this thread, the innermost last."""
    if not hasattr(_local, "calls"):
        _local.calls = []
    return _local.calls


@functools.cache
def _known(name: str) -> bool:
    return hasattr(_torch.dynamo_config, name)


def held_modules(*holders: Any) -> list[nn.Module]:
    """Modules that a function is seen to hold: in its closure, its globals, its arguments, and in
    those of the functions it holds."""
    modules: dict[int, nn.Module] = {}
    seen: set[int] = set()
    stack: list[Any] = list(holders)
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, nn.Module):
            modules[id(item)] = item
        elif isinstance(item, functools.partial):
            stack += [item.func, *item.args, *item.keywords.values()]
        elif isinstance(item, MethodType):
            stack += [item.__self__, item.__func__]
        elif isinstance(item, FunctionType) and not (item.__module__ or "").startswith("torch"):
            variables = inspect.getclosurevars(item)
            stack += [*variables.nonlocals.values(), *variables.globals.values()]
            stack += item.__defaults__ or ()
        elif isinstance(item, (list, tuple)):
            stack += item
        elif isinstance(item, dict):
            stack += item.values()
    return list(modules.values())


def _name(fn: Any) -> str:
    return getattr(fn, "__qualname__", type(fn).__name__)


class _Refusal(CaptureError):
    """Why a function is not one graph: the cause, its line, a remedy.

    lacking: PyTorch has no such derivative.
    """

    def __init__(self, fn: Any, error: BaseException) -> None:
        self.lacking = "derivative" in str(error)
        super().__init__(
            f"{_name(fn)} cannot be traced as one graph: {first_line(error)}"
            f"{stopped_at(error)}{remedy(str(error), _REMEDIES)}"
        )


_REMEDIES = (
    (r"Unsupported Tensor\.requires_grad_\(\) call",
     "say x = x.detach().requires_grad_() inside the function"),
    (r"creation function with requires_grad=True",
     "say torch.zeros(…).requires_grad_() in the place of torch.zeros(…, requires_grad=True)"),
    (r"returning intermediate with requires_grad_\(\)|it stores a tensor that requires grad",
     "store no tensor that requires grad on Python objects, or detach it"),
    ("external grad_fn", "detach what was computed outside, or pass it as an argument"),
    (r"backward\(\)", "use torch.autograd.grad(…, create_graph=True)"),
    (r"\.item\(\)|ata.dependent",
     "keep Python's branches and sizes independent of the values of tensors"),
    ("autograd_function_apply", "write it in PyTorch's own operations, or as a custom operator"),
    ("recompile_limit", "pass what changes at every call as a tensor"),
    (r"C\+\+ compiler", 'without a C++ compiler, db.compile(fn, compiler="eager")'),
)  # fmt: skip
