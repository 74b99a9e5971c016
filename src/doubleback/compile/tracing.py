"""What TorchDynamo captured, traced with its derivatives: a loss becomes one flat graph of its
value, its gradients and its writes; a region of `torch.compile` a graph for each pass over it.

    forward   inputs                     → outputs
    backward  cotangents of outputs      → gradients, those that were asked for
    tangent   cotangents of gradients    → cotangents of the cotangents
    second    both kinds of cotangents   → gradients of all inputs, of first and second order
    first     cotangents of outputs      → gradients of all inputs, where nobody asked for more

All are traced as one function and cut apart by PyTorch's partitioner, which chooses what a pass
keeps for those after it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._torch import make_fx
from ..capture import THROUGH, as_eager, kept_by_squeeze, mark
from ..errors import CaptureError, InputError, nearest
from ..graph import saving_hooks_off
from ..kernels import for_compiler
from ..patch import patched_where_known
from ..rules import drawn_in_place
from ..run import boxed, clean, laid_out, no_autocast, sound
from .region import (
    Layout,
    RegionCode,
    StandIns,
    bare,
    fake_mode_of,
    inputs_behind,
    is_random,
    look,
    nodes_of,
    on_functions,
    sizes_from,
)

aten = torch.ops.aten

COMPILERS = ("inductor", "eager")
NO_CUDA_GRAPHS = {"triton.cudagraphs": False}  # in whose memory the next run writes


def inductor_options(
    compiler: Any, mode: str | None, options: dict[str, Any] | None, name: str
) -> dict[str, Any] | None:
    """Inductor's options; None: graphs are not compiled. name: what `compiler` is called where it
    is wrong."""
    if compiler not in COMPILERS:
        raise InputError(f"{name} must be one of {', '.join(COMPILERS)}, not {compiler!r}")
    if compiler == "eager":
        if options or mode:
            raise InputError('mode and options of Inductor go with compiler="inductor" alone')
        return None
    if not options and mode is None:
        return {}
    modes = _torch.list_mode_options()
    if mode is not None and mode not in modes:
        raise InputError(f"mode must be one of {', '.join(modes)}, not {mode!r}")
    known = _torch.inductor_config.get_config_copy()
    settings = {key.replace("-", "_"): value for key, value in (options or {}).items()}
    for key in settings.keys() - known.keys():
        raise InputError(f"Inductor has no option {key!r}{nearest(key, list(known))}")
    return {**(modes[mode] if mode else {}), **settings}


# ------------------------------------------------------------------------------------- a whole loss


@dataclass(frozen=True)
class WholeStep:
    """A compiled graph. `step(inputs)` takes a list and empties it; it returns (the loss, gradients
    of the inputs at `trained`, Dynamo's results, new values of the inputs at `written`).

    place: of the loss among Dynamo's results.
    inner: the inputs by which the loss takes derivatives itself.
    scaled: the last input is a number by which the loss is multiplied before it is differentiated;
    device: where that number lies.
    halves: whether float16 occurs in the graph.
    """

    run: Callable[[list], Sequence[Any]]
    where: tuple[int | None, ...]  # of each result the place among what `run` returns
    trained: tuple[int, ...]
    written: tuple[int, ...]
    place: int
    inner: tuple[int, ...]
    scaled: bool
    halves: bool
    device: torch.device | None

    def __call__(self, inputs: list) -> tuple[Tensor, list[Tensor | None], Sequence, Sequence]:
        with torch.no_grad():
            values = self.run(inputs)
        results = [None if i is None else values[i] for i in self.where]
        first, last = 1 + len(self.trained), len(results) - len(self.written)
        return results[0], results[1:first], results[first:last], results[last:]  # type: ignore[return-value]


def take_mark(module: torch.fx.GraphModule) -> torch.fx.Node | None:
    """The marked loss becomes the graph's last output; the mark itself goes. None without one."""
    marks = [n for n in module.graph.nodes if n.target in (mark, torch.ops.doubleback.mark)]
    if len(marks) != 1:
        return None
    loss, results = marks[0].args[0], _results(module.graph)
    # where the results have it, detached
    place = next(i for i, n in enumerate(results) if n is marks[0] or n in marks[0].users)
    marks[0].replace_all_uses_with(loss)
    module.graph.erase_node(marks[0])
    module.graph.output_node().args = ((*_results(module.graph), place, loss),)
    module.recompile()
    return loss  # type: ignore[return-value]


def trace_whole(
    module: torch.fx.GraphModule, given: Sequence[Any], inductor: dict[str, Any] | None,
    scaled: bool, check: Callable[[Tensor, bool], None],
) -> WholeStep:  # fmt: skip
    """Differentiate Dynamo's graph, whose last outputs are the loss's place and the loss, at its
    inputs `given` that require grad, and compile the whole. inductor: its options; None: it is
    replayed. check(loss, gradients) may refuse."""
    _refuse(module)
    as_eager(module)
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    fakes = [n.meta["example_value"] for n in placeholders]
    gradients = torch.is_grad_enabled()
    required = [isinstance(t, Tensor) and t.requires_grad for t in given]
    trained = [gradients and on for on in required]
    seen: dict[str, Any] = {}

    def run(*inputs: Any) -> list[Any]:
        with _torch.FunctionalTensorMode():
            count = len(placeholders)
            wrapped = [_torch.to_fun(t) if isinstance(t, Tensor) else t for t in inputs]
            for t, on in zip(wrapped, required, strict=False):
                if on:
                    t.requires_grad_()
            code = _LossCode(module)
            *results, place, loss = code.run(*wrapped[:count])
            seen["inner"] = [i for i, t in enumerate(wrapped) if any(t is at for at in code.inner)]
            check(loss, gradients)
            wanted = [wrapped[i] for i, on in enumerate(trained) if on]
            grads: Sequence[Tensor | None] = []
            if gradients:
                with no_autocast():
                    total = loss * wrapped[count] if scaled else loss
                    grads = torch.autograd.grad(total, wanted, allow_unused=True)
            written = [i for i, t in enumerate(wrapped) if _is_written(t)]
            seen["written"], seen["place"] = written, place
            flat = [loss.detach(), *grads, *results, *(wrapped[i] for i in written)]
            present = [t for t in flat if t is not None]
            places = iter(range(len(present)))
            seen["where"] = tuple(None if t is None else next(places) for t in flat)
            return [_torch.from_fun(t) if isinstance(t, Tensor) else t for t in present]

    mode, inputs = fake_mode_of(fakes), [bare(t) for t in fakes]
    device = None
    if scaled:
        on_device = [t for t, on in zip(fakes, required, strict=True) if on] or inputs
        device = next(t.device for t in on_device if isinstance(t, Tensor))
        inputs.append(mode.from_tensor(torch.ones((), device=device), static_shapes=True))
    compiling = inductor is not None
    table = None if compiling else {aten.bernoulli.p: drawn_in_place}
    fuse = for_compiler() if compiling else nullcontext()
    with _torch.compile_lock, fuse, saving_hooks_off():
        flat = make_fx(run, table, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs)
    for i in seen["written"]:
        if required[i]:
            raise CaptureError("it writes to a tensor that requires grad in place; clone it first")
    for node in flat.graph.nodes:
        if any(s.name.startswith("u") for n in kept_by_squeeze(node) for s in n.expr.free_symbols):
            raise CaptureError(
                "squeeze() drops an axis or not as numbers decide (how many entries a mask chooses)"
                "; reshape keeps it"
            )
    halves = any(
        isinstance(n.meta.get("val"), Tensor) and n.meta["val"].dtype is torch.float16
        for n in flat.graph.nodes
    )
    clean(flat, for_compiler=compiling)
    with torch.no_grad(), no_autocast():
        ready = boxed(flat) if inductor is None else _by_inductor(flat, mode, inputs, inductor)
    places = tuple(i for i, on in enumerate(trained) if on)
    return WholeStep(
        ready, seen["where"], places, tuple(seen["written"]), seen["place"], tuple(seen["inner"]),
        scaled, halves, device,
    )  # fmt: skip


class _LossCode(torch.fx.Interpreter):
    """Dynamo's graph of a loss, run.

    inner: tensors by which it calls `torch.autograd.grad`.

    `torch.bernoulli(x, p)` draws in the order of contiguous memory, `x.bernoulli_(p)` in that of
    x's own; both are one operator in a functional program, which is drawn as the latter.
    """

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.inner: list[Tensor] = []

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.target is torch.autograd.grad:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            at = kwargs["inputs"] if "inputs" in kwargs else args[1]
            self.inner += [at] if isinstance(at, Tensor) else at
        if n.target in (torch.bernoulli, "bernoulli") and (len(n.args) > 1 or "p" in n.kwargs):
            x, *rest = self.fetch_args_kwargs_from_env(n)[0]
            return torch.bernoulli(x.contiguous(), *rest, **n.kwargs)
        return super().run_node(n)


def _by_inductor(
    flat: torch.fx.GraphModule, mode: Any, inputs: list, options: dict[str, Any]
) -> Callable:
    """Inductor on stand-ins whose open sizes are Dynamo's: what it asks about them becomes a guard
    of Dynamo's own."""

    with _torch.tracing(_torch.TracingContext(mode)), sound():
        wrapped: Any = _torch.GmWrapper(flat, list)
        return _torch.compile_fx(wrapped, inputs, config_patches=options)  # type: ignore[return-value]


def _refuse(module: torch.nn.Module) -> None:
    """Operators on whole functions whose second derivative autograd does not know."""
    for _, node in on_functions(module):
        if node.target.name() not in THROUGH:
            raise CaptureError(f"{node.target.name()} has no second derivative in a graph")


# ------------------------------------------------------------------------------- a region in stages


PASSES = ("forward", "backward", "tangent", "second", "first")


class Stage:
    """One pass: `stage(values)` takes what it reads out of a dictionary of named values, and puts
    what it computes into it.

    results: names of what the pass is for, in order; None where there is no such value. One that
    does not depend on the cotangents (a custom backward may ignore them) an earlier pass computes.
    """

    def __init__(
        self, graph: torch.fx.Graph, constants: torch.nn.Module, results: Sequence[str | None],
        stand: StandIns, inductor: dict[str, Any] | None,
    ) -> None:  # fmt: skip
        self.graph, self.constants, self.results = graph, constants, tuple(results)
        self.stand, self.inductor = stand, inductor
        self.reads = [n.name for n in graph.nodes if n.op == "placeholder"]
        self.computes = [n.name for n in _results(graph)]
        given = [n for n in self.results if n is not None and n not in self.computes]
        self.given = tuple(dict.fromkeys(given))
        self.needs = tuple(dict.fromkeys([*self.reads, *given]))

    @cached_property
    def run(self) -> Callable[[list], Sequence[Any]]:
        module = torch.fx.GraphModule(self.constants, self.graph)
        if self.inductor is None or not self.computes:
            clean(module)
            return boxed(module)
        floats = {f"input_{i}": number for i, number in self.stand.floats.items()}
        given = [n for n in self.graph.nodes if n.op == "placeholder"]
        examples = [n.meta["val"] for n in given]
        for n, t in zip(given, examples, strict=True):
            if n.name in floats:
                t.item_memo = floats[n.name]
        context = _torch.TracingContext(self.stand.fakes)
        with torch.no_grad(), no_autocast(), _torch.tracing(context), sound():
            run = _torch.compile_fx(
                _torch.GmWrapper(module, list),  # type: ignore[arg-type]
                examples,
                config_patches=self.inductor or None,
            )
        return laid_out(self.graph, examples, run)  # type: ignore[arg-type]

    def __call__(self, values: dict[str, Any], free: bool = False) -> list[Any]:
        """free: what the pass reads is taken out of `values`, and freed at its last use."""
        given = {name: values[name] for name in self.given}
        take = values.pop if free else values.__getitem__
        with torch.no_grad(), no_autocast():
            computed = self.run([take(name) for name in self.reads])
            values.update(zip(self.computes, computed, strict=True))
            own = {name: t.clone() for name, t in given.items()}
        return [None if n is None else own[n] if n in own else values[n] for n in self.results]


class Stages:
    """The passes of a region at sizes that answer all questions alike.

    written: inputs that forward writes to, whose new values stand behind its outputs; wanted:
    those whose gradients backward yields; moving: whether the cotangents of outputs depend
    on anything, so that there is a tangent pass. inductor: its options; None: kernel by kernel.
    """

    def __init__(
        self, code: RegionCode, numbers: Sequence[int], written: Sequence[int],
        wanted: Sequence[int], moving: bool, inductor: dict[str, Any] | None,
    ) -> None:  # fmt: skip
        self.code, self.inductor = code, inductor
        self.written, self.wanted, self.moving = tuple(written), tuple(wanted), moving
        self.stand = stand = StandIns(code, numbers)
        self.trained = [i for i, on in enumerate(code.required) if on]
        try:
            self._make()
        finally:
            stand.forget_callers()

    def _make(self) -> None:
        stand = self.stand
        self._behind: list[list[frozenset[int] | None]]
        with stand.fakes, stand.env.ignore_fresh_unbacked_symbols():
            self.layout: Layout = look(self.code, stand.inputs, stand.draws)
            with torch.enable_grad():
                self.outputs = self._examples()
        self.on_tape = [i for i, on in enumerate(self.layout.on_tape) if on]
        like = [_format(self.outputs[i]) for i in self.on_tape]
        with stand.fakes:
            across = [_format(stand.inputs[i]) for i in self.wanted]
        self._formats = {"along": like, "across": across, "last": like, "only": like}
        self.numbers = sizes_from(stand.symbols, self.layout.numbers)
        graph, results = self._trace()
        self._cut(graph, results)
        for stage in (self.forward, self.backward, self.tangent, self.second):
            if stage is not None:
                stage.run  # noqa: B018  compiled now: what it asks about sizes is known then

    # ------------------------------------------------------------------------------ tracing

    def _examples(self) -> list[Tensor]:
        """Outputs without numbers; and what the gradients of each are computed from."""
        inputs = [
            t.detach().requires_grad_() if on else t
            for t, on in zip(self.stand.inputs, self.code.required, strict=True)
        ]
        inputs = [t.clone() if on else t for t, on in zip(inputs, self.code.required, strict=True)]
        starts, wanted = nodes_of(inputs), [inputs[i] for i in self.wanted]
        results = self.layout.outputs_of(self.code(*inputs, *self.stand.draws))
        self._behind = []
        for t, on in zip(results, self.layout.on_tape, strict=True):
            if on:
                gradients = _gradients([t], wanted, [_dense(t)], create_graph=True)
                self._behind.append(
                    [None if g is None else inputs_behind(g, starts) for g in gradients]
                )
        return [_dense(t) for t in results]

    def behind(
        self, arrived: Sequence[bool], across: Sequence[Tensor | None]
    ) -> tuple[set[int], set[int]]:
        """The inputs, and the cotangents of outputs, that the gradients by `wanted` are computed
        from, where cotangents have arrived at some outputs, and others at some gradients."""
        inputs: set[int] = set()
        outputs: set[int] = set()
        for i, sets in enumerate(self._behind):
            for places, q in zip(sets, across, strict=True):
                if arrived[i] and q is not None and places is not None:
                    inputs |= places
                    outputs.add(i)
        return inputs, outputs

    def _passes(
        self, given: Sequence[Any], along: Sequence[Tensor], across: Sequence[Tensor],
        last: Sequence[Tensor], only: Sequence[Tensor],
    ) -> Sequence[Sequence[Any]]:  # fmt: skip
        """What each of `PASSES` yields, from the inputs and the cotangents and tangents of each."""
        code = self.code
        for t, on in zip(given, code.required, strict=False):
            if on:
                t.requires_grad_()
        if self.moving:
            along = [t.requires_grad_() for t in along]
        results = self.layout.outputs_of(code(*given))
        ends = [results[i] for i in self.on_tape]
        trained = [given[i] for i in self.trained]
        with no_autocast():
            first = _gradients(ends, trained, only)
            wanted = [given[i] for i in self.wanted]
            backward = _gradients(ends, wanted, along, create_graph=True)
            pairs = [
                (g, q)
                for g, q in zip(backward, across, strict=True)
                if g is not None and g.requires_grad
            ]
            second = _gradients(
                [*ends, *(g for g, _ in pairs)],
                [*trained, *(along if self.moving else ())],
                [*last, *(q for _, q in pairs)],
            )
        second, tangent = second[: len(trained)], second[len(trained) :]
        written = [i for i, t in enumerate(given) if _is_written(t)]
        if written != list(self.written):
            raise CaptureError("it writes to other inputs than it did before")
        return [*results, *(given[i] for i in written)], backward, tangent, second, first

    def _trace(self) -> tuple[torch.fx.Graph, dict[str, list[str | None]]]:
        """One graph of all passes, and the names of their results."""
        stand = self.stand
        with stand.fakes:
            along, last, only = ([_dense(self.outputs[i]) for i in self.on_tape] for _ in range(3))
            across = [_dense(stand.inputs[i]) for i in self.wanted]
        inputs = [*stand.inputs, *stand.draws]
        self.names = {
            "input": [f"input_{i}" for i in range(len(inputs))],
            "along": [f"along_{i}" for i in range(len(along))],  # of backward
            "across": [f"across_{i}" for i in range(len(across))],  # of tangent
            "last": [f"last_{i}" for i in range(len(last))],  # of second
            "only": [f"only_{i}" for i in range(len(only))],  # of first
        }
        counts = [len(names) for names in self.names.values()]
        seen: dict[str, Any] = {}

        def run(*flat: Any) -> list[Any]:
            for i, number in stand.floats.items():  # copies, which have forgotten it
                flat[i].item_memo = number
            with _torch.FunctionalTensorMode():
                wrapped = [_torch.to_fun(t) if isinstance(t, Tensor) else t for t in flat]
                passes = self._passes(*_split(wrapped, counts))
                present: list[Any] = []
                for name, values in zip(PASSES, passes, strict=True):
                    places: list[int | None] = []
                    for t in values:
                        places.append(None if t is None else len(present))
                        present += [] if t is None else [_torch.from_fun(t.detach())]
                    seen[name] = places
                return present

        inductor = self.inductor is not None
        table = _torch.select_decomp_table() if inductor else None
        trace = make_fx(
            run, decomposition_table=table, tracing_mode="symbolic", _allow_non_fake_inputs=True
        )
        fuse = for_compiler() if inductor else nullcontext()
        with _torch.compile_lock, torch.enable_grad(), patched_where_known(), fuse:
            flat = trace(*inputs, *along, *across, *last, *only)
        if any("unbacked_bindings" in n.meta for n in flat.graph.nodes):
            raise CaptureError("a size depends on what tensors hold")
        random = [n for n in flat.graph.nodes if is_random(n.target, n.args, n.kwargs)]
        if random:
            raise CaptureError(f"{random[0].target} draws random numbers in a derivative")
        names = [name for names in self.names.values() for name in names]
        placeholders = [n for n in flat.graph.nodes if n.op == "placeholder"]
        for node, name in zip(placeholders, names, strict=True):
            node.target = node.name = name
        self._constants = flat  # tensors that are part of the graph are its attributes
        _prune(flat.graph)
        graph = _torch.fx_graph_cse(flat.graph)
        nodes = _results(graph)
        return graph, {
            name: [None if i is None else nodes[i].name for i in places]
            for name, places in seen.items()
        }

    # ------------------------------------------------------------------------------ cutting

    def _cut(self, graph: torch.fx.Graph, results: dict[str, list[str | None]]) -> None:
        """The passes, latest first: each is cut off from those before it, which then yield what it
        reads of theirs."""
        names = {name: [n for n in nodes if n is not None] for name, nodes in results.items()}
        inductor = self.inductor is not None

        def cut(
            graph: torch.fx.Graph, after: Sequence[str], before: Sequence[str], last: Sequence[str]
        ) -> tuple[torch.fx.Graph, torch.fx.Graph | None]:
            before = list(dict.fromkeys(before))
            return _cut_off(graph, self._constants, after, before, last, inductor)

        def stage(graph: torch.fx.Graph | None, name: str) -> Stage | None:
            if graph is None:
                if not names[name]:
                    return None
                graph = torch.fx.Graph()
                graph.output(())
            return Stage(graph, self._constants, results[name], self.stand, self.inductor)

        late = [*self.names["last"], *(() if self.moving else self.names["across"])]
        kept = [*names["forward"], *names["backward"], *names["tangent"]]
        early, off = cut(graph, late, kept, names["second"])
        self.second = stage(off, "second")
        self.tangent = None
        if self.moving:
            kept, last = _told_apart(early, self.names["across"])
            early, off = cut(early, self.names["across"], kept, last)
            self.tangent = stage(off, "tangent")
        kept, last = _told_apart(early, self.names["along"])
        early, off = cut(early, self.names["along"], kept, last)
        self.backward = stage(off, "backward")
        # what the others have forward keep is there for `first`, which adds what it lacks
        kept = [n.name for n in _results(early)]
        early, off = cut(graph, self.names["only"], kept, names["first"])
        self.first = stage(off, "first")
        forward = stage(early, "forward")
        assert forward is not None
        self.forward = forward
        known = {*self.names["input"], *forward.computes}
        readers = [self.first, self.backward, self.tangent, self.second]
        reads = [name for s in readers if s is not None for name in s.needs]
        self.kept = [name for name in dict.fromkeys(reads) if name in known]
        known |= {*self.names["along"], *(self.backward.computes if self.backward else ())}
        readers = [self.tangent, self.second]
        reads = [name for s in readers if s is not None for name in s.needs]
        self.kept_by_backward = [
            name for name in dict.fromkeys(reads) if name in known and name not in self.kept
        ]

    def ends_of(self, results: Sequence[Any]) -> list[Tensor]:
        """Outputs on autograd's tape, out of what the code returned."""
        outputs = self.layout.outputs_of(results)
        return [outputs[i] for i in self.on_tape]

    def fits(self, numbers: Sequence[int]) -> bool:
        return self.stand.fits(numbers)

    def dense(self, kind: str, values: Sequence[Tensor]) -> dict[str, Tensor]:
        """Cotangents by name, in the memory format that the passes were traced with."""
        formatted = zip(self.names[kind], values, self._formats[kind], strict=True)
        return {name: t.contiguous(memory_format=form) for name, t, form in formatted}


def _is_written(t: Any) -> bool:
    return isinstance(t, Tensor) and _torch.has_data_mutation(t)


def _split(flat: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    rest = iter(flat)
    return [[next(rest) for _ in range(count)] for count in counts]


def _gradients(
    ends: Sequence[Tensor], at: Sequence[Tensor], along: Sequence[Tensor], create_graph=False
) -> list[Tensor | None]:
    if not ends or not at:
        return [None] * len(at)
    return list(
        torch.autograd.grad(
            ends, at, along, create_graph=create_graph, retain_graph=True, allow_unused=True
        )
    )


def _format(t: Tensor) -> torch.memory_format:
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(t.dim())
    if last is None or t.is_contiguous() or not t.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def _dense(t: Tensor) -> Tensor:
    """One like it in memory of its own."""
    return torch.empty_like(t.detach(), memory_format=_format(t))


# ---------------------------------------------------------------------------------- graphs


def _results(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return list(graph.output_node().args[0])  # type: ignore[arg-type]


def _prune(graph: torch.fx.Graph) -> None:
    """Erase what nobody reads. PyTorch spares all operators that may draw, such as a fused
    attention's backward, which would then read cotangents that a pass does not have; none of those
    here draws."""

    def stays(node: torch.fx.Node) -> bool:
        schema = getattr(node.target, "_schema", None)
        return node.op in ("placeholder", "output") or (
            schema is not None and (schema.is_mutable or not schema.returns)
        )

    graph.eliminate_dead_code(stays)


def _told_apart(graph: torch.fx.Graph, after: Sequence[str]) -> tuple[list[str], list[str]]:
    """A graph's results: those that do not depend on these inputs, and those that do."""
    late: set[torch.fx.Node] = set()
    for node in graph.nodes:
        if node.name in after or any(n in late for n in node.all_input_nodes):
            late.add(node)
    results = list(dict.fromkeys(_results(graph)))
    return [n.name for n in results if n not in late], [n.name for n in results if n in late]


# PyTorch's partitioner counts as costly what is read once more long after it was computed. Of four
# passes most is, and its readers would hold all of it.
_AGAIN = {"ban_recompute_used_far_apart": False, "ban_recompute_long_fusible_chains": False}


def _cut_off(
    graph: torch.fx.Graph, constants: torch.nn.Module, after: Sequence[str],
    before: Sequence[str], last: Sequence[str], inductor: bool,
) -> tuple[torch.fx.Graph, torch.fx.Graph | None]:  # fmt: skip
    """A graph whose results are `before` and what the rest reads of it, and the rest, which
    computes `last` once the inputs `after` are known."""
    copy = torch.fx.Graph()
    nodes: dict[torch.fx.Node, torch.fx.Node] = {}
    copy.graph_copy(graph, nodes)
    named = {old.name: new for old, new in nodes.items()}
    last = list(dict.fromkeys(last))
    results = [named[name] for name in (*before, *last)]
    copy.output(tuple(results))
    _prune(copy)
    for node in list(copy.nodes):
        if node.op == "placeholder":
            if not node.users and node not in results:
                copy.erase_node(node)
            elif node.name in after:
                node.target = f"tangents_{node.name}"
    if not last:
        return copy, None
    if not inductor:
        return _cut_at_uses(copy, list(before), last)
    module = torch.fx.GraphModule(constants, copy)
    with _torch.compile_lock, _torch.functorch_config.patch(_AGAIN):
        early, late = _torch.min_cut_rematerialization_partition(
            module, (), num_fwd_outputs=len(before)
        )
    for part in (early, late):
        for node in part.graph.nodes:
            if node.op == "placeholder":
                node.target = node.name
    again = _had_by_each_pass(graph)
    _replace_inputs(late.graph, graph, again)
    return _once(early.graph, before, again), _once(late.graph, last, again)


_VIEWS = {
    aten.permute.default, aten.t.default, aten.transpose.int, aten.unsqueeze.default,
    aten.alias.default, aten.detach.default, aten.view.default,
}  # fmt: skip


def _had_by_each_pass(graph: torch.fx.Graph) -> set[str]:
    """What each pass takes for itself, and none keeps for another: Python's floats, which Inductor
    takes from their tensors alone, and views of inputs, which cost more to hand on."""
    again: set[torch.fx.Node] = set()
    for node in graph.nodes:
        reads = node.all_input_nodes
        given = all(n.op == "placeholder" or n in again for n in reads)
        is_float = isinstance(node.meta.get("val"), torch.SymFloat)
        if is_float or (node.target in _VIEWS and given):
            again.add(node)
    return {n.name for n in again if n.op == "call_function"}


def _replace_inputs(graph: torch.fx.Graph, whole: torch.fx.Graph, again: set[str]) -> None:
    """In the place of inputs of a pass that it can have from other inputs, what makes them."""
    sources = {n.name: n for n in whole.nodes}
    copies = {sources[n.name]: n for n in graph.nodes if n.op == "placeholder"}
    mine = [n for n in copies.values() if n.name in again]
    first = next((n for n in graph.nodes if n.op != "placeholder"), None)
    assert first is not None

    def copied(node: torch.fx.Node) -> torch.fx.Node:
        if node not in copies or copies[node] in mine:
            for n in node.all_input_nodes:
                copied(n)
            with graph.inserting_before(first):
                copies[node] = graph.node_copy(node, lambda n: copies[n])
        return copies[node]

    for node in mine:
        node.replace_all_uses_with(copied(sources[node.name]))
        graph.erase_node(node)


def _cut_at_uses(
    graph: torch.fx.Graph, before: Sequence[str], last: Sequence[str]
) -> tuple[torch.fx.Graph, torch.fx.Graph]:
    """Nothing is computed twice, nor before somebody reads it."""
    named = {n.name: n for n in graph.nodes}
    early: set[torch.fx.Node] = set()
    stack = [named[name] for name in before]
    while stack:
        node = stack.pop()
        if node not in early:
            early.add(node)
            stack += node.all_input_nodes
    for node in graph.nodes:  # parts and sizes of what is early
        reads = node.all_input_nodes
        known = node.op == "call_function" and reads and all(n in early for n in reads)
        part = node.target is operator.getitem
        if known and (part or not isinstance(node.meta["val"], Tensor)):
            early.add(node)
    given = [n for n in graph.nodes if n.op == "placeholder"]
    held = [
        n
        for n in graph.nodes
        if ((n in early and n.op != "get_attr") or n.op == "placeholder")
        and any((u.op == "output" and n.name in last) or (u.op != "output" and u not in early)
                for u in n.users)
    ]  # fmt: skip
    results = list(dict.fromkeys([*(named[name] for name in before), *held]))
    nodes = [n for n in graph.nodes if n.op in ("call_function", "get_attr")]
    constant = {n for n in nodes if n.op == "get_attr"}
    first = _extract([n for n in given if n in early], [n for n in nodes if n in early | constant],
                     [n for n in results if n in early])  # fmt: skip
    rest = [n for n in nodes if n not in early or n in constant]
    late = _extract(held, rest, [named[name] for name in last])
    return first, late


def _extract(
    inputs: Sequence[torch.fx.Node], nodes: Sequence[torch.fx.Node],
    results: Sequence[torch.fx.Node],
) -> torch.fx.Graph:  # fmt: skip
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in inputs:
        copies[node] = graph.create_node("placeholder", node.name, name=node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(tuple(copies[n] for n in results))
    _prune(graph)
    return graph


def _once(graph: torch.fx.Graph, wanted: Sequence[str], again: set[str]) -> torch.fx.Graph:
    """Each result once, without what others take again."""
    output = graph.output_node()
    results = [n for n in _results(graph) if n.name in wanted or n.name not in again]
    output.args = (tuple(dict.fromkeys(results)),)
    _prune(graph)
    return graph
