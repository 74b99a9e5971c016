"""`torch.compile(net, backend="doubleback")`: compiled regions that can be differentiated twice.

A region is compiled by AOTAutograd and Inductor as it would be without this backend, and stays so
while nobody differentiates its gradients. The first backward pass with `create_graph=True` that
arrives at it runs on autograd; from the next call on the region is the passes of `tracing.py`.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._torch import (
    current_graph_task_id,
    foreach_copy_,
    get_current_graph_task_keep_graph,
    will_engine_execute_node,
)
from ..capture import (
    Surroundings,
    as_eager,
    first_line,
    forget,
    leaving_transforms,
    plain,
    teach,
)
from ..errors import CaptureError, StaleGraphError, let_through, warn
from ..graph import many, memory, saving_hooks_off
from ..kernels import batched
from ..patch import hold_patch, patched_where_known, unread_by
from ..run import SOUND, no_autocast, quiet, sound
from .loss import held_modules
from .region import (
    Pieces,
    RegionCode,
    bare,
    base_of,
    depends_on,
    fake_mode_of,
    is_linear,
    look,
    lost_write,
    on_tape,
    reached,
)
from .tracing import NO_CUDA_GRAPHS, Stages, inductor_options

NAME = "doubleback"
VARIANTS = 4  # graphs of one region that answer questions about sizes differently


def backend(
    module: torch.fx.GraphModule, inputs: Sequence[Any], *, mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """A backend of `torch.compile` whose regions can be differentiated twice.

    It is known to `torch.compile` by name. Code that says `create_graph=True` stays as it is:

    >>> import torch, doubleback
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> compiled = torch.compile(net, backend="doubleback", options={"compiler": "eager"})
    >>> x = torch.randn(16, 3, requires_grad=True)
    >>> (g,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    >>> g.square().sum().backward()

    options: those of Inductor, and `compiler`: "inductor", or "eager", which runs the graphs kernel
    by kernel. mode: as for Inductor.
    """
    compile_first, inductor = _compilers(mode, options)
    if teach():
        raise _torch.TensorifyScalarRestartAnalysis
    as_eager(module)
    _guard_hooks()
    with leaving_transforms():
        return _compiled(module, inputs, compile_first, inductor)


def _compiled(
    module: torch.fx.GraphModule, inputs: Sequence[Any], compile_first: Callable,
    inductor: dict[str, Any] | None,
) -> Callable[..., Any]:  # fmt: skip
    """The code in one region or several."""

    def region(module: torch.fx.GraphModule, inputs: Sequence[Any], refusal=None) -> Callable:
        if not _is_trained(inputs):
            return compile_first(module, inputs)
        _close_to_dynamo()
        return CompiledRegion(module, inputs, compile_first, inductor, refusal).enter

    lost = lost_write(module)
    if not _is_trained(inputs) or not all(plain(t) for t in inputs if isinstance(t, Tensor)):
        return RegionCode(module).eager if lost else compile_first(module, inputs)
    try:
        if lost:
            raise CaptureError(lost)
        with _plainly():
            pieces = Pieces(module)
    except CaptureError as error:
        return region(module, inputs, error)
    return pieces.compiled(inputs, region) if pieces.parts else region(module, inputs)


def _is_trained(inputs: Sequence[Any]) -> bool:
    """Whether autograd has anything to do."""
    return torch.is_grad_enabled() and any(map(on_tape, inputs))


def _guard_hooks() -> None:
    """Hooks that a module is given later are noticed: Dynamo notes which modules have none, and by
    default does not look again."""
    builder, context = _torch.GuardBuilder, _torch.TracingContext.try_get()
    guards = set() if context is None else context.guards_context.dynamo_guards
    for guard in list(guards):
        if guard.create_fn is builder.EMPTY_NN_MODULE_HOOKS_DICT:
            guards.add(guard.originating_source.make_guard(builder.SEQUENCE_LENGTH))
    if context is not None:
        guards.add(_torch.GlobalStateSource().make_guard(_guard_surroundings))


def _guard_surroundings(builder: Any, _: Any) -> None:
    """Methods that are replaced on a module's class, and hooks of all modules, are noticed too."""
    named = [builder.scope["G"].get(name) for name in builder.f_code.co_names]
    around = [Surroundings(m) for m in held_modules(builder.scope["L"], named)]
    known = [each.key() for each in around]

    def as_before() -> bool:
        return [each.key() for each in around] == known

    builder.add_python_lambda_leaf_guard_to_root(
        ["as_before()"], ["a method of a module's class, or a global hook"],
        {"as_before": as_before},
    )  # fmt: skip


def _compilers(
    mode: str | None, options: dict[str, Any] | None
) -> tuple[Callable, dict[str, Any] | None]:
    """What compiles a region that is differentiated once, and Inductor's options for the graphs of
    one that is differentiated twice; None: they are not compiled."""
    settings = dict(options or {})
    compiler = settings.pop("compiler", "inductor")
    inductor = inductor_options(compiler, mode, settings, 'options["compiler"]')
    if inductor is None:
        return _torch.backend_registry.lookup_backend("aot_eager"), None

    def compile_first(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable:
        patches = {**SOUND, **inductor}  # for its backward pass too, which is compiled later
        with sound():
            return _torch.compile_fx(module, inputs, config_patches=patches)  # type: ignore[return-value]

    return compile_first, {**inductor, **NO_CUDA_GRAPHS}


# ------------------------------------------------------------------------------ a region


class CompiledRegion:
    """One region, and which derivatives of it were asked for so far.

    wanted: inputs by which it was differentiated with `create_graph=True`; moving: whether anything
    was asked about the cotangents that came in. refusal: why it runs on autograd.
    """

    def __init__(
        self, module: torch.fx.GraphModule, inputs: Sequence[Any], compile_first: Callable,
        inductor: dict[str, Any] | None, refusal: CaptureError | None,
    ) -> None:  # fmt: skip
        self.inductor = inductor
        self.code = RegionCode(module)
        self.wanted: set[int] = set()
        self.moving = False
        self.refusal: CaptureError | None = None
        self.variants: list[Stages] = []
        self.written: tuple[int, ...] = ()
        self.behind_results: Sequence[tuple[frozenset[int], frozenset[int]]] = ()
        self._patched = False
        self._draw: Callable[..., Sequence[Tensor]] | None = None
        self._lock = threading.RLock()
        self._examples: list[Any] = list(self.code.examples)
        self._drawn_examples: list[Tensor] = []
        try:
            if refusal is not None:
                raise refusal
            if self.code.obstacle is None:
                self._look()
        except CaptureError as error:
            self._refuse(error)
            return
        given, graph = list(inputs), module
        if self.code.draws:
            self._draw = self._drawing()
            graph = self.code.given_draws()
            given += self._drawn_examples
        with _functions_made() as made:
            self.first = compile_first(graph, given)
        for function in made:
            try:
                if self.code.obstacle is None:
                    self._look_at_writes(function.metadata.input_info)
            except CaptureError as error:
                self._refuse(error)
                return
            _watch(function, self)

    def _look(self) -> None:
        """What the region draws; raises where it cannot be drawn beforehand."""
        code = self.code
        if not is_linear(code.module):
            raise CaptureError(
                "the backward of an autograd.Function is not linear in the gradient that comes in"
            )
        if code.branches:
            raise CaptureError("torch.cond has no second derivative in a graph")
        self._examples = [bare(t) for t in code.examples]
        with fake_mode_of(code.examples), _plainly():
            self._layout = look(code, self._examples, None)
            self.behind_results = self._layout.behind_results
            self._drawn_examples = [d.make(*d.sizes) for d in code.draws]

    def _look_at_writes(self, info: Sequence[Any]) -> None:
        """Which inputs the region writes to, by what AOTAutograd found; raises where values that a
        derivative reads are lost by that."""
        if len(info) != len(self._examples) + len(self._drawn_examples):
            raise CaptureError("two of its inputs share memory, and it writes to one")
        self.written = tuple(i for i, each in enumerate(info) if each.mutates_data)
        depends = any(self.code.required[i] for i in self.written)
        if self.written and not depends:
            inputs = [*self._examples, *self._drawn_examples]
            with _plainly():
                depends = depends_on(self.written, self.code, inputs, self._layout)
        if depends:
            raise CaptureError("it writes to an input that its derivative depends on")

    def _drawing(self) -> Callable[..., Sequence[Tensor]]:
        """All draws of a call, from its open sizes."""
        draws = self.code.draws
        sizes = self.code.sizes([n for d in draws for n in d.sizes])

        def draw(*numbers: int) -> list[Tensor]:
            each = iter(sizes(*numbers))
            return [d.make(*[next(each) for _ in d.sizes]) for d in draws]

        if self.inductor is None:
            return draw
        numbers = [self.code.examples[i] for i in self.code.open]
        trace = _torch.make_fx(draw, tracing_mode="symbolic", _allow_non_fake_inputs=True)
        with _torch.compile_lock, torch.no_grad(), no_autocast(), sound():
            compiled: Any = _torch.compile_fx(
                trace(*numbers), numbers, config_patches=self.inductor or None
            )
        kinds = [t.dtype for t in self._drawn_examples]

        def checked(*numbers: int) -> Sequence[Tensor]:
            drawn = compiled(*numbers)
            return drawn if [t.dtype for t in drawn] == kinds else draw(*numbers)

        return checked

    def _refuse(self, error: CaptureError) -> None:
        reason = str(error).splitlines()[0]
        self.refusal = CaptureError(reason)
        self._hold_patch()
        warn(f"a region of the compiled code runs on autograd: {reason}")

    def _hold_patch(self) -> None:
        """The library's second derivatives, for as long as this region lives: it runs on autograd
        from now on."""
        if not self._patched:
            self._patched = True
            hold_patch(self)

    # ---------------------------------------------------------------------------- calls

    def enter(self, *inputs: Any) -> Sequence[Any]:
        """What Dynamo's code calls in the region's place."""
        if self.refusal is not None:
            return self.code.eager(*inputs)
        if self._draw is not None:
            with torch.no_grad(), no_autocast():
                inputs = (*inputs, *self._draw(*[inputs[i] for i in self.code.open]))
        if not self.wanted or (not self.variants and current_graph_task_id() >= 0):
            return self.first(*inputs)  # in a backward pass: a checkpoint runs again what ran
        numbers = self.code.numbers(inputs)
        stages = self._stages(numbers)
        if stages is None:
            self._hold_patch()
            return self.code(*inputs)
        call = RegionCall(self, stages, numbers, inputs)
        _, *outputs = RegionForward.apply(call, *inputs)  # type: ignore[misc]
        return stages.layout.results_of(inputs, outputs, iter(stages.numbers(*numbers)))

    def _stages(self, numbers: Sequence[int]) -> Stages | None:
        """The passes that serve all that was asked for so far at these sizes; None: autograd."""
        with self._lock:
            wanted = tuple(sorted(self.wanted))
            self.variants = [
                v for v in self.variants if v.wanted == wanted and v.moving == self.moving
            ]
            for variant in self.variants:
                if variant.fits(numbers):
                    return variant
            if self.refusal is not None or len(self.variants) >= VARIANTS:
                return None
            if not many(numbers):
                return None
            handled = sys.exception()
            try:
                with quiet(), saving_hooks_off():
                    made = Stages(
                        self.code, numbers, self.written, wanted, self.moving, self.inductor
                    )
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                let_through(error, handled)
                cause = f"its second derivative cannot be traced: {first_line(error)}"
                forget(error)
                self._refuse(CaptureError(cause))
                return None
            self.variants.append(made)
            return made if made.fits(numbers) else None

    def ask(self, wanted: Sequence[int], moving: bool) -> None:
        """From the next call on, these derivatives are compiled."""
        with self._lock:
            self.wanted |= set(wanted)
            self.moving = self.moving or moving

    # ------------------------------------------------------------------------- on autograd

    def replay(
        self, held: Held, outputs_of: Callable[[Sequence[Any]], Sequence[Any]],
        along: Sequence[Tensor | None], wanted: Sequence[int], create_graph: bool = True,
    ) -> list[Tensor | None]:  # fmt: skip
        """Gradients by the inputs `wanted` on autograd, from the inputs of a call that was."""
        if self.code.obstacle is not None:
            raise CaptureError(
                f"a compiled region cannot be differentiated twice: {self.code.obstacle}; put "
                "@torch.compiler.disable on the function that it is in"
            )
        with torch.enable_grad(), patched_where_known():
            inputs, names = self._again(held)
            ends = outputs_of(self._run_again(inputs))
            return _gradients(ends, [names[i] for i in wanted], along, create_graph)

    def replay_second(
        self, held: Held, outputs_of: Callable[[Sequence[Any]], Sequence[Any]],
        along: Sequence[Tensor | None], wanted: Sequence[int], across: Sequence[Tensor | None],
        create_graph: bool,
    ) -> tuple[dict[int, Tensor | None], list[Tensor | None]]:  # fmt: skip
        """The derivatives of those gradients along `across`: by inputs, and by `along`."""
        with torch.enable_grad(), patched_where_known():
            inputs, names = self._again(held)
            # other names, so that the way stops here
            along = [t.view_as(t) if t is not None and t.requires_grad else t for t in along]
            ends = outputs_of(self._run_again(inputs))
            grads = _gradients(ends, [names[i] for i in wanted], along, True)
            moving = [t for t in along if t is not None and t.requires_grad]
            gradients = _gradients(grads, [*names.values(), *moving], across, create_graph)
            by_along = iter(gradients[len(names) :])
            return (
                dict(zip(names, gradients, strict=False)),
                [next(by_along) if on_tape(t) else None for t in along],
            )

    def _again(self, held: Held) -> tuple[list[Any], dict[int, Tensor]]:
        """Inputs under other names, so that no gradient takes a way from one to another outside of
        the region, nor to one that was frozen in the call; written ones as copies."""
        inputs = held.inputs(self.written)
        names = {i: inputs[i].view_as(inputs[i]) for i, on in enumerate(self.code.required) if on}
        frozen = (t.detach() if isinstance(t, Tensor) else t for t in inputs)
        again = [names.get(i, t) for i, t in enumerate(frozen)]
        for i in self.written:
            again[i] = again[i].clone()
        return again, names

    def _run_again(self, inputs: Sequence[Any]) -> Sequence[Any]:
        states = _generators()
        results = self.code(*inputs)
        if any(not torch.equal(a, b) for a, b in zip(states, _generators(), strict=True)):
            raise CaptureError(
                "a custom operator of the compiled region draws random numbers and is not tagged "
                "torch.Tag.nondeterministic_seeded: its draw cannot be repeated"
            )
        return results


class Held:
    """Inputs of a call, which have to be as they were."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self._inputs: Sequence[Any] | None = inputs
        self._versions = [t._version if isinstance(t, Tensor) else 0 for t in inputs]

    def inputs(self, written: Sequence[int]) -> Sequence[Any]:
        """All of them; those that the region itself writes to may have changed."""
        if self._inputs is None:
            raise StaleGraphError(
                "backward a second time through a compiled region: its values were freed; pass "
                "retain_graph=True to the first backward"
            )
        self.check([i for i in range(len(self._inputs)) if i not in written])
        return self._inputs

    def check(self, places: Sequence[int]) -> None:
        for i in places if self._inputs is not None else ():
            t = self._inputs[i]  # type: ignore[index]
            if isinstance(t, Tensor) and t._version != self._versions[i]:
                raise StaleGraphError(
                    f"a tensor of shape {tuple(t.shape)} that the derivative of a compiled region "
                    "reads was changed in place before backward (an optimiser step in between?); "
                    "change a copy, or run forward again"
                )

    def free(self) -> None:
        self._inputs = None


def _gradients(
    ends: Sequence[Any], at: Sequence[Tensor], along: Sequence[Tensor | None], create_graph: bool
) -> list[Tensor | None]:
    pairs = [(y, t) for y, t in zip(ends, along, strict=False) if on_tape(y) and t is not None]
    if not pairs or not at:
        return [None] * len(at)
    with no_autocast():
        gradients = torch.autograd.grad(
            [y for y, _ in pairs], at, [t for _, t in pairs], create_graph=create_graph,
            allow_unused=True,
        )  # fmt: skip
    return list(gradients)


def _generators() -> list[Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def _executed(ctx: Any, skipped: int) -> list[int]:
    """Inputs of a node, behind the first few, whose gradients this backward pass is after."""
    functions = iter(ctx.next_functions)
    places = []
    for i, (given, needed) in enumerate(zip(ctx.tensors, ctx.needs_input_grad, strict=True)):
        if not given:
            continue
        function, _ = next(functions)
        if i < skipped or not needed or function is None:
            continue
        try:
            after = will_engine_execute_node(function)
        except RuntimeError:  # a leaf by which torch.autograd.grad differentiates
            after = True
        if after:
            places.append(i - skipped)
    return places


# --------------------------------------------- while nobody asks: AOTAutograd's own function


@contextmanager
def _functions_made() -> Iterator[list[Any]]:
    """AOTAutograd's autograd.Functions that are made in this thread meanwhile."""
    made: list[Any] = []
    thread = threading.get_ident()
    base = torch.autograd.Function
    before = base.__dict__.get("__init_subclass__")

    def see(cls: type, **_: Any) -> None:
        if threading.get_ident() == thread and cls.__name__ == "CompiledFunction":
            made.append(cls)

    base.__init_subclass__ = classmethod(see)  # type: ignore[assignment]
    try:
        yield made
    finally:
        if before is None:
            del base.__init_subclass__
        else:
            base.__init_subclass__ = before


def _watch(function: Any, region: CompiledRegion) -> None:
    """AOTAutograd's function, with our own answer to a backward pass under `create_graph=True`."""
    forward, backward = function.forward, function.backward
    metadata = function.metadata
    mutated = metadata.num_mutated_inp_runtime_indices

    # of what the function returns: which result of the region it is, and whether its base
    places: list[tuple[int, bool] | None] = [None] * mutated
    bases: dict[int, tuple[int, bool]] = {}
    for i, info in enumerate(metadata.output_info):
        kind = info.output_type.name
        if kind.startswith("alias_of_intermediate") and "user_output" not in kind:
            bases[info.base_idx] = i, True
        direct = kind in ("non_alias", "unsafe_view_alias", "custom_function_view")
        places.append((i, False) if direct else None)
    places += [bases.get(i) for i in range(metadata.num_intermediate_bases)]
    all_inputs = frozenset(range(len(region.code.examples)))
    behind = region.behind_results or [(all_inputs, all_inputs)] * len(metadata.output_info)
    sets = [all_inputs if at is None else behind[at[0]][at[1]] for at in places]

    def ends(results: Sequence[Any]) -> list[Any]:
        """What the function returns, from what the region does: views as the bases they are of."""
        pairs = [None if at is None else (results[at[0]], at[1]) for at in places]
        return [None if p is None else base_of(p[0]) if p[1] else p[0] for p in pairs]

    def held_forward(ctx: Any, *inputs: Any) -> Any:
        ctx.held = Held(inputs)
        ctx.tensors = [isinstance(t, Tensor) for t in inputs]
        outputs = forward(ctx, *inputs)
        ctx.outputs = [_kind(t) if isinstance(t, Tensor) else None for t in outputs]
        ctx.set_materialize_grads(False)  # it is seen which have arrived
        return outputs

    def open_backward(ctx: Any, *grads: Any) -> Any:
        """AOTAutograd's backward, or autograd once more where that has no derivative."""
        keep = get_current_graph_task_keep_graph()
        create_graph = torch.is_grad_enabled()
        donated = keep and function.compiled_bw is not None and metadata.bw_donated_idxs
        boxed = len(grads) == 1 and isinstance(grads[0], list)
        own = grads[0] if boxed else list(grads)
        if not create_graph and not donated and not batched():
            after = reached(sets, own)
            for i, kind in enumerate(ctx.outputs):
                if own[i] is None and kind is not None and sets[i]:
                    own[i] = _filled([None], [kind])[0]
            gradients = backward(ctx, own) if boxed else backward(ctx, *own)
            if not keep:
                ctx.held.free()
            return tuple(t if i in after else None for i, t in enumerate(gradients))
        grads = tuple(own)
        wanted = _executed(ctx, 0)
        if create_graph:
            region.ask(wanted, any(map(on_tape, grads)))
        gradients = region.replay(ctx.held, ends, grads, wanted, create_graph)
        each = dict(zip(wanted, gradients, strict=True))
        return tuple(each.get(i) for i in range(len(ctx.tensors)))

    function.forward = staticmethod(held_forward)
    function.backward = staticmethod(torch.compiler.disable(open_backward))


# ---------------------------------------------------------------- once asked: our own passes


class RegionCall:
    """One call of a region by its passes.

    waiting: of each backward pass under way, what `RegionBackward` left for `RegionForward`:
    (values for the pass `second`, gradients of inputs, inputs that the pass comes to).
    """

    def __init__(
        self, region: CompiledRegion, stages: Stages, numbers: Sequence[int], inputs: Sequence[Any]
    ) -> None:
        self.region, self.stages, self.numbers = region, stages, numbers
        self.held = Held(inputs)
        self.kept = Kept({}, (), ())
        self.viewed: list[int] = []  # inputs of which views are kept
        self.outputs: list[Any] = []  # sizes, dtype and device of those on the tape
        self.gradients: list[Any] = [_kind(inputs[i]) for i in stages.wanted]
        self.waiting: dict[int, list[tuple[dict[str, Any], dict[int, Any], set[int]]]] = {}

    def leave(self, *what: Any) -> None:
        self.waiting.setdefault(current_graph_task_id(), []).append(what)  # type: ignore[arg-type]

    def left(self) -> list[tuple[dict[str, Any], dict[int, Any], set[int]]]:
        return self.waiting.pop(current_graph_task_id(), [])

    def reached(self, grads: Sequence[Tensor | None]) -> frozenset[int]:
        """Inputs behind the outputs at which these gradients arrive."""
        return reached(self.stages.layout.behind, grads)

    def along(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """Cotangents of the outputs on the tape, zeros where there are none."""
        return _filled([grads[i] for i in self.stages.on_tape], self.outputs)


class Kept:
    """What a pass keeps for those after it.

    watched: names of tensors that others have too, which autograd is given (`tensors`): it notices
    that somebody writes there. All else is ours alone, and is freed at its last use; autograd would
    hold it until the whole pass has run.
    """

    def __init__(
        self, values: dict[str, Any], names: Sequence[str], shared: Sequence[Tensor]
    ) -> None:
        everything = _torch.top_saved_tensors_hooks(True) is not None  # which are to see it
        others = set(map(memory, shared))
        self._own: dict[str, Any] | None = {}
        self.watched: list[str] = []
        self.tensors: list[Tensor] = []
        for name in names:
            t = values[name]
            if isinstance(t, Tensor) and (everything or memory(t) in others):
                self.watched.append(name)
                self.tensors.append(t)
            else:
                self._own[name] = t

    def saved(self) -> list[Tensor]:
        """For autograd to hold from now on."""
        tensors, self.tensors = self.tensors, []
        return tensors

    def take(self, saved: Sequence[Tensor], free: bool) -> dict[str, Any]:
        """All by name, from what autograd gives back. free: nobody else will ask."""
        if self._own is None:
            raise StaleGraphError(
                "backward again after one that failed, which had used up the values of a compiled "
                "region: run forward again"
            )
        values = {**self._own, **dict(zip(self.watched, saved, strict=True))}
        if free:
            self._own = None
        return values


def _kind(t: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return t.shape, t.dtype, t.device


def _filled(given: Sequence[Tensor | None], kinds: Sequence[Any]) -> list[Tensor]:
    return [
        torch.zeros(shape, dtype=dtype, device=device) if t is None else t
        for t, (shape, dtype, device) in zip(given, kinds, strict=True)
    ]


def _apart(outputs: list[Tensor]) -> list[Tensor]:
    """Outputs in memory of their own, as eager's are: a compiler may return one twice."""
    seen: set[int] = set()
    apart = []
    for t in outputs:
        apart.append(t.clone() if memory(t) in seen else t)
        seen.add(memory(t))
    return apart


def _keep_apart(
    call: RegionCall, values: dict[str, Any], inputs: Sequence[Any], outputs: Sequence[Tensor]
) -> None:
    """Values that are kept and lie in the memory of an output are copied: autograd would not notice
    that a caller writes there. Of those in an input's memory it is noted which."""
    own = {memory(t): t for t in outputs}
    given = {memory(t): i for i, t in enumerate(inputs) if isinstance(t, Tensor)}
    viewed = set()
    for name in call.stages.kept:
        t = values[name]
        if not isinstance(t, Tensor):
            continue
        where = memory(t)
        if where in own and t is not own[where]:
            values[name] = t.clone()
        elif where in given and t is not inputs[given[where]]:
            viewed.add(given[where])
    call.viewed = sorted(viewed)


def _sum(a: dict[int, Any], b: dict[int, Any]) -> dict[int, Any]:
    total = dict(a)
    for i, t in b.items():
        if t is not None:
            total[i] = t if total.get(i) is None else total[i] + t
    return total


class RegionForward(torch.autograd.Function):
    """Inputs → (token, outputs). Later nodes hold on to this one by the token, which is empty."""

    @staticmethod
    def forward(ctx: Any, call: RegionCall, *inputs: Any) -> Any:
        stages = call.stages
        values = dict(zip(stages.names["input"], inputs, strict=True))
        computed = stages.forward(values)
        count = len(stages.layout.outputs)
        outputs, written = _apart(computed[:count]), computed[count:]
        if written:
            foreach_copy_([inputs[i] for i in stages.written], written)
        values.update(zip(map(str, stages.forward.results), outputs, strict=False))
        _keep_apart(call, values, inputs, outputs)
        given = [t for t in inputs if isinstance(t, Tensor)]
        call.kept = Kept(values, stages.kept, [*given, *outputs])
        call.outputs = [_kind(outputs[i]) for i in stages.on_tape]
        token = torch.empty(0, device=outputs[0].device if outputs else None)
        ctx.call, ctx.tensors = call, [False, *(isinstance(t, Tensor) for t in inputs)]
        ctx.save_for_backward(token, *call.kept.saved())
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(t for t, on in zip(outputs, stages.layout.on_tape, strict=True) if not on)
        )
        return token, *outputs

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple:
        """Gradients of the inputs, from what arrives at the outputs and from what the region's own
        gradients have left, if they were differentiated: one run of the pass `second` for both."""
        call: RegionCall = ctx.call
        stages = call.stages
        token, *tensors = ctx.saved_tensors
        call.held.check(call.viewed)
        free = not (get_current_graph_task_keep_graph() or torch.is_grad_enabled())
        values = call.kept.take(tensors, free)
        left = call.left()
        gradients: dict[int, Any] = {}
        any_given = any(t is not None for t in grads)
        if torch.is_grad_enabled():
            if any_given:
                gradients = _differentiable(ctx, token, values, grads)
            for _values, ready, _places in left:
                gradients = _sum(gradients, ready)
            return None, *(gradients.get(i) for i in range(len(ctx.tensors) - 1))
        along = call.along(grads)
        runs = sum(1 for waiting, *_ in left if waiting and stages.second is not None)
        for waiting, ready, behind in left:
            gradients = _sum(gradients, ready)
            if not waiting or stages.second is None:
                continue
            runs -= 1
            last = along if any_given else [torch.zeros_like(t) for t in along]
            own = {**values, **waiting, **stages.dense("last", last)}
            waiting.clear()
            if not runs:
                values.clear()
            places = (behind | call.reached(grads)) if any_given else behind
            more: Any = zip(stages.trained, stages.second(own, free), strict=True)
            gradients = _sum(gradients, {i: t for i, t in more if i in places})
            any_given = False  # what has come in at the outputs is in the first of them
        if any_given:
            gradients = _sum(gradients, _first(call, values, grads, free))
        if not get_current_graph_task_keep_graph():
            call.held.free()
        return None, *(gradients.get(i) for i in range(len(ctx.tensors) - 1))


@functools.cache
def _close_to_dynamo() -> None:
    """Compiled code that differentiates its own regions calls these two from inside: Dynamo is not
    to read them. Once there is a region, since this imports Dynamo."""
    functions: Any = RegionForward, RegionBackward
    for function in functions:
        function.backward = staticmethod(torch.compiler.disable(function.backward))
    unread_by(torch.compiler.disable)


def _first(
    call: RegionCall, values: dict[str, Any], grads: Sequence[Tensor | None], free: bool
) -> dict[int, Any]:
    """Gradients of all inputs, of first order alone. free: nobody reads these values again."""
    stages = call.stages
    if stages.first is None:
        return {}
    with quiet():
        stages.first.run  # noqa: B018  where it is compiled now, it may ask more about sizes
    if stages.fits(call.numbers) and not batched():
        values.update(stages.dense("only", call.along(grads)))
        gradients = stages.first(values, free)
        places = call.reached(grads)
        return {i: t for i, t in zip(stages.trained, gradients, strict=True) if i in places}
    else:
        gradients = call.region.replay(
            call.held, stages.layout.outputs_of, grads, stages.trained, create_graph=False
        )
    return dict(zip(stages.trained, gradients, strict=True))


def _differentiable(
    ctx: Any, token: Tensor, values: dict[str, Any], grads: Sequence[Tensor | None]
) -> dict[int, Any]:
    """Gradients that can be differentiated, by the backward pass or, where it was not made for
    what is asked, on autograd."""
    call: RegionCall = ctx.call
    region, stages = call.region, call.stages
    wanted = _executed(ctx, 1)
    moving = any(map(on_tape, grads))
    region.ask(wanted, moving)
    made = set(wanted) <= set(stages.wanted) and moving <= stages.moving
    if made and not batched():  # graphs take one cotangent each
        along = call.along(grads)
        arrived = tuple(grads[i] is not None for i in stages.on_tape)
        gradients = RegionBackward.apply(call, values, arrived, token, *along)
        gradients = dict(zip(stages.wanted, gradients, strict=True))  # type: ignore[arg-type]
        return {i: gradients[i] for i in call.reached(grads).intersection(wanted)}
    gradients = region.replay(call.held, stages.layout.outputs_of, grads, wanted)
    return dict(zip(wanted, gradients, strict=True))


class RegionBackward(torch.autograd.Function):
    """Cotangents of outputs → gradients. Of its own derivative it computes what concerns the
    cotangents, and leaves the rest to `RegionForward`, which is behind it by the token."""

    @staticmethod
    def forward(
        ctx: Any, call: RegionCall, values: dict[str, Any], arrived: tuple[bool, ...],
        token: Tensor, *along: Tensor,
    ) -> Any:  # fmt: skip
        stages = call.stages
        own = {**values, **stages.dense("along", along)}
        ctx.call, ctx.arrived = call, arrived
        ctx.set_materialize_grads(False)
        ctx.count = len(along)
        gradients: Sequence[Any] = [None] * len(stages.wanted)
        if stages.backward is not None:
            gradients = stages.backward(own)
        read = () if stages.tangent is None else stages.tangent.needs
        names = [*stages.kept_by_backward, *(n for n in read if n in values)]
        shared = [*along, *(g for g in gradients if g is not None)]
        shared += [values[n] for n in call.kept.watched]
        ctx.kept = Kept(own, names, shared)
        ctx.save_for_backward(*along, *ctx.kept.saved())
        return tuple(gradients)

    @staticmethod
    def backward(ctx: Any, *across: Tensor | None) -> tuple:
        call: RegionCall = ctx.call
        stages = call.stages
        along, saved = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        if all(q is None for q in across):
            return (None,) * (4 + ctx.count)
        # the node of `RegionForward`, if this backward pass will come to it
        goes_on = will_engine_execute_node(ctx.next_functions[0][0])
        create_graph = torch.is_grad_enabled()
        if create_graph or batched():
            present = [t if on else None for t, on in zip(along, ctx.arrived, strict=True)]
            by_inputs, by_along = call.region.replay_second(
                call.held, stages.ends_of, present, stages.wanted, across, create_graph
            )
            if goes_on:
                call.leave({}, by_inputs, set())
            return None, None, None, None, *by_along
        values = ctx.kept.take(saved, not get_current_graph_task_keep_graph())
        values.update(stages.dense("across", _filled(across, call.gradients)))
        by_along = [None] * ctx.count
        if stages.tangent is not None:
            by_along = stages.tangent(values)
        inputs, outputs = stages.behind(ctx.arrived, across)
        if stages.second is not None and goes_on:
            own = {n: values[n] for n in stages.second.reads if n in values}
            call.leave(own, {}, inputs)
        by_along = [t if k in outputs else None for k, t in enumerate(by_along)]
        return None, None, None, None, *by_along


# ------------------------------------------------------------------------------ surroundings


@contextmanager
def _plainly() -> Iterator[None]:
    """Whatever goes wrong while a region is looked at, as a `CaptureError`. Sizes that depend on
    numbers get new symbols at each look; those are thrown away."""
    handled = sys.exception()
    context = _torch.TracingContext.try_get()
    sizes = getattr(getattr(context, "fake_mode", None), "shape_env", None)
    try:
        with saving_hooks_off(), sizes.ignore_fresh_unbacked_symbols() if sizes else nullcontext():
            yield
    except CaptureError:
        raise
    except Exception as error:
        let_through(error, handled)
        cause = CaptureError(f"{type(error).__name__}: {first_line(error)}")
        forget(error)
        raise cause from None


def register() -> None:
    """Make the backend known by name, now or when TorchDynamo is imported, which takes long."""
    if _REGISTRY in sys.modules:
        _enter(sys.modules[_REGISTRY])
    elif not any(isinstance(finder, _AtImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AtImport())


_REGISTRY = "torch._dynamo.backends.registry"


def _enter(registry: Any) -> None:
    # an entry point of the installed package comes to the same
    if NAME not in registry.list_backends.__globals__["_BACKENDS"]:
        registry.register_backend(backend, name=NAME)


class _AtImport(importlib.abc.MetaPathFinder):
    """Sees the import of Dynamo's registry."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def and_register(module: Any) -> None:
            execute(module)
            _enter(module)

        spec.loader.exec_module = and_register  # type: ignore[method-assign]
        return spec
