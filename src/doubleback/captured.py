"""What `Penalised` and `WithGradient` share: a network that runs captured, with sweeps in the place
of its operations, or on autograd where it cannot be captured."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from time import monotonic
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import _torch
from ._torch import compiling, next_node, peek_interpreter_stack
from .capture import (
    PATIENCE,
    Arguments,
    accept_plain_keys,
    capture_of,
    check_choice,
    choose_output,
    find_graph,
    hooked,
    only_one,
    plain,
    take_apart,
    trackers_off,
)
from .counting import counting
from .errors import CaptureError, InputError, RuleError, refuse_unused, warn
from .graph import Graph, Meta, Node, Ref
from .patch import LASTING, SMALL_ATTENTION, patched, patched_as, supported, watched
from .plan import Plan, make_plan
from .rules import Structure, find_rule
from .run import (
    Family,
    FlattenedProgram,
    Itself,
    Job,
    OpenProgram,
    OpenReplay,
    Replay,
    attach,
    no_autocast,
    read_state,
    refuse_third,
    remember,
    run_prelude,
    write_state,
)


@dataclass(frozen=True)
class Used:
    """What a network on a CPU used of the patch in so many calls (looks), of at most so many
    entries (largest)."""

    looks: int = 0
    names: frozenset[str] = frozenset()
    largest: int = 0

    def and_also(self, seen: Set[str], leaves: Sequence[Any]) -> Used:
        largest = max(self.largest, _entries_of(leaves))
        return Used(self.looks + 1, self.names | seen, largest)

    def way(self, leaves: Sequence[Any]) -> frozenset[str]:
        """What of the patch is switched on for a call: all attention being small in calls that were
        no smaller than half of this one, it goes to PyTorch's unfused kernel."""
        return self._ways[_entries_of(leaves) <= 2 * self.largest]

    @cached_property
    def _ways(self) -> tuple[frozenset[str], frozenset[str]]:
        names = (self.names | LASTING) - {SMALL_ATTENTION}
        unfused = {SMALL_ATTENTION} & self.names if "attention" not in self.names else set()
        return names, names | unfused


def _entries_of(leaves: Sequence[Any]) -> int:
    return sum([t.numel() for t in leaves if isinstance(t, Tensor)])


@dataclass(frozen=True)
class Site:
    """One call, captured.

    open: the graph, whose sizes may be open; numbers: those of its symbols in this call; inputs:
    the tensors it starts from; outputs, shape: its outputs and the target's shape at these numbers;
    key: which graph, at which sizes, with which inputs penalised; asked: with open sizes,
    if it is only asked about and will not run.
    """

    call: Arguments
    open: Graph
    numbers: tuple
    inputs: Sequence[Any]
    penalised: tuple[int, ...]
    outputs: tuple
    shape: tuple[int, ...]
    key: tuple
    asked: bool = False

    @property
    def target(self) -> int:
        return self.open.targets[0]

    @cached_property
    def graph(self) -> Graph:
        """Without open sizes: where sweeps run node by node, or are planned for the first time."""
        return self.open.at(self.numbers)


Way = Literal["stock", "patched", "bare", "math"] | frozenset[str]


def derivatives(way: Way) -> AbstractContextManager:
    """Whose second derivatives autograd uses inside. "stock": PyTorch's, with attention on its
    unfused kernel, the only one that has any; "patched": the library's, fused attention's among
    them, where this version of PyTorch can be patched; "bare": PyTorch's as they are, for networks
    that are known to need no others, "math": likewise, but for attention, as "stock"; a set: the
    library's alone that last and that a network on a CPU is known to use."""
    if way == "bare":
        return nullcontext()
    if way == "math":
        return _Unfused(nullcontext())
    if isinstance(way, frozenset):
        return _Unfused(patched_as(way)) if SMALL_ATTENTION in way else patched_as(way)
    if way == "patched" and supported(torch.__version__):
        return patched()
    return sdpa_kernel(SDPBackend.MATH)


class _Unfused:
    """`sdpa_kernel(SDPBackend.MATH)` on a CPU, which has one fused kernel, in less of the host's
    time; around another block."""

    def __init__(self, inner: AbstractContextManager) -> None:
        self.inner = inner

    def __enter__(self) -> None:
        cuda = torch.backends.cuda
        self.before = cuda.flash_sdp_enabled(), cuda.math_sdp_enabled()
        try:
            self._set(False, True)
            self.inner.__enter__()
        except BaseException:  # Ctrl-C
            self._set(*self.before)
            raise

    def __exit__(self, *raised: Any) -> None:
        try:
            self.inner.__exit__(*raised)
        finally:
            try:
                self._set(*self.before)
            except BaseException:
                self._set(*self.before)
                raise

    def _set(self, flash: bool, unfused: bool) -> None:
        torch.backends.cuda.enable_flash_sdp(flash)
        torch.backends.cuda.enable_math_sdp(unfused)


UNASKED = 16  # calls on autograd, until it is asked again whether the network is still refused
LOOKS = 3  # calls on autograd after which it is known what of the patch the network uses


def as_written(net: nn.Module, way: Way) -> AbstractContextManager:
    """Inside, the network runs as it was written: what torch.compile made of it, or of parts of it,
    has no second derivative. By the way "bare" no network goes that has such parts alone."""
    if is_compiled(net) or (way != "bare" and any(map(is_compiled, net.modules()))):
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


def is_compiled(net: nn.Module) -> bool:
    """Whether it is what `torch.compile` returned, or its `compile()` was called."""
    return net._compiled_call_impl is not None or "_orig_mod" in net._modules


def watches_saved() -> bool:
    """Whether hooks of a caller's see what autograd saves: a checkpoint's, which runs the call once
    more and wants it to save the same, so that both have to go one way."""
    return _torch.top_saved_tensors_hooks(True) is not None


OWN_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip

SETTLED = 50  # calls of one size after which it is worth a flat graph of its own

# Where autograd is quicker than sweeps (below), it is taken. Tests are about sweeps, and
# switch this off.
CHOOSE = True


class CapturedModule(nn.Module):
    """Holds `net`, captures it, and keeps plans and programs by what they depend on."""

    def __init__(
        self,
        net: nn.Module,
        compile: bool | str,
        *,
        wrt: Any,
        output: Any,
        allow_unused: bool,
        strict: bool,
        debug: bool,
        flatten_after: int | None,
        recompute: bool | None,
        sweeps: bool | None,
    ) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(accept_plain_keys)
        if not isinstance(net, nn.Module):
            raise InputError(f"net must be an nn.Module, not {type(net).__name__}")
        if isinstance(net, nn.parallel.DistributedDataParallel):
            raise InputError(
                "wrap the other way round, DistributedDataParallel("
                f"{type(self).__name__}(net, …)): inside, its hooks see no backward pass"
            )
        check_choice(output)
        self.net = net
        self.compile_mode = compile
        self.wrt = wrt
        self.output = output
        self.allow_unused = allow_unused
        self.strict = strict
        self.debug = debug
        self.flatten_after = flatten_after
        self.recompute = recompute
        self.sweeps = sweeps
        lasting = set(vars(self))
        self._reset()
        self._transient = {"_partly_compiled", *vars(self)} - lasting

    def _reset(self) -> None:
        """What calls leave behind for later ones, which is neither copied nor pickled."""
        self._bound: dict[Any, tuple[Graph, Graph]] = {}
        self._plans: dict[Any, tuple[Graph, Plan]] = {}
        self._families: dict[Any, tuple[Graph, Family]] = {}
        self._programs: dict[Any, Any] = {}
        self._choices: dict[Any, Choice] = {}
        self._short: dict[Any, Way] = {}  # shapes of calls that go to autograd at once
        self._used: dict[Any, Used] = {}  # of the patch
        self._unasked: list[int] = []  # for how many calls more, where it is known
        self._fits: Any = None  # output and penalty of the last call on autograd that went well
        self._warned = False
        self._refusal: CaptureError | None = None
        self._again = 0.0  # when what could not be swept is tried again
        self._run = self._opaque(self._forward)

    def __getstate__(self) -> dict[str, Any]:
        return {n: v for n, v in self.__dict__.items() if n not in self._transient}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """(what net returns, and what is asked of its derivative)."""
        if compiling():
            return self._run(*args, **kwargs)
        return self._forward(*args, **kwargs)

    def _opaque(self, method: Callable) -> Callable:
        """An outer torch.compile does not look inside: it calls this as it is."""
        return torch.compiler.disable(method)

    @abstractmethod
    def _forward(self, *args: Any, **kwargs: Any) -> Any: ...

    @property
    @abstractmethod
    def _extras(self) -> int:
        """How many of the last positional arguments are not the network's."""

    # ---------------------------------------------------------------------------- capture

    def _call(self, args: tuple, kwargs: Mapping[str, Any]) -> Arguments:
        return take_apart(self.net, self.wrt, self._extras, args, kwargs)

    def _with_derivative(
        self, args: tuple, kwargs: Mapping[str, Any]
    ) -> tuple[Any, Sequence[Tensor]]:
        """(what net returns, what is handed out of its derivative), by sweeps or on autograd."""
        call = self._call(args, kwargs)
        gradients = torch.is_grad_enabled()
        told: list[Tensor] = []

        def run(graph: Graph, inputs: Sequence[Any]) -> Sequence[Any]:
            site = self._site(graph, inputs, call)
            program, state = self._program(site, gradients)
            asked = list(call.asked.values()) if gradients else []
            results, derived = self._attached(
                site, program, state, gradients, call.constants, asked
            )
            told.extend(derived)
            return results

        way, result = self._through(run, call)
        if way is None:
            return result, told
        on_autograd = partial(self.by_autograd, call.for_autograd())
        result, derived = self._on_autograd(on_autograd, way, call)
        self._shorten(args, kwargs, way)
        return result, [first_order(t) for t in derived]

    @abstractmethod
    def _program(self, site: Site, gradients: bool) -> tuple[Any, dict[int, Tensor]]:
        """The program for this graph and these wanted gradients, and the graph's state."""

    @abstractmethod
    def by_autograd(self, call: Arguments, way: Way = "patched") -> tuple[Any, Sequence[Tensor]]:
        """What `_with_derivative` returns, computed by autograd."""

    def _captures(self, call: Arguments) -> bool:
        """Whether this call is one to capture at all."""
        return all(plain(t) for t in call.leaves if isinstance(t, Tensor))

    def _through(self, run: Callable, call: Arguments) -> tuple[Way | None, Any]:
        """(None, what the network returns with `run` in the place of its operations); or the way in
        which the call has to run on autograd, and nothing."""
        chosen = self._chosen(call)
        if chosen is not None:
            return chosen, None
        if self.sweeps is False or not self._captures(call) or self._rests():
            return "patched", None

        ran = False

        def swept(graph: Graph, inputs: Sequence[Any]) -> Sequence[Any]:
            nonlocal ran
            ran = True
            with no_autocast():
                return run(graph, inputs)

        with torch.inference_mode(False), torch.enable_grad():
            args, kwargs = call.with_x(call.aliases)
            capture, start = capture_of(self.net, self.output), monotonic()
            try:
                result = capture(self.net, swept, args, kwargs, at_once=self.strict)
                if not ran:
                    choose_output(result, self.output)  # raises: there is no tensor
                return None, call.with_own(result)
            except CaptureError as error:
                if self.strict:
                    raise
                self._refusal = CaptureError(str(error))  # whose frames hold no tensors
                if error is not capture.refusal:  # captured, but not to be swept with these inputs
                    self._again = monotonic() + PATIENCE * (monotonic() - start)
                return "patched", None

    def _rests(self) -> bool:
        """Whether what was captured could not be swept, not so long ago that it is tried again."""
        return not self.strict and monotonic() < self._again

    # ------------------------------------------------------------------ sweeps or autograd

    def _free_to_choose(self) -> bool:
        """Whether nobody asked for something that only sweeps can do."""
        if self.sweeps is not None:
            return not self.sweeps
        particular = (
            self.compile_mode or self.strict or self.debug or self.flatten_after is None
            or self._partly_compiled or not CHOOSE
        )  # fmt: skip
        return not particular and self._leavable and not watches_saved()

    @property
    @abstractmethod
    def _leavable(self) -> bool:
        """Whether autograd can do what the sweeps are to do."""

    @property
    @abstractmethod
    def _asked(self) -> Any:
        """What is asked of the network's derivative, which may be another from call to call."""

    @cached_property
    def _partly_compiled(self) -> bool:
        """Whether parts of the network, but not the whole, are what torch.compile made of them."""
        return not is_compiled(self.net) and any(map(is_compiled, self.net.modules()))

    def _chosen(self, call: Arguments) -> Way | None:
        """How this call runs on autograd because that is quicker, by what was found at the first
        call of about its size; None where it does not."""
        if not self._choices or self.sweeps is False or not self._free_to_choose() or counting():
            return None
        choice = self._choices.get(self._size(call))
        if choice is None or not choice.autograd:
            return None
        return "math" if choice.attends else "bare"

    def _size(self, call: Arguments) -> tuple:
        """Calls between one power of two and the next count as one size."""
        sizes = [
            (t.dtype, t.device, *[n.bit_length() for n in t.shape])
            for t in call.leaves
            if isinstance(t, Tensor)
        ]
        return Itself(self._asked), self.net.training, torch.is_grad_enabled(), *sizes

    def _choose(self, site: Site) -> None:
        size = self._size(site.call)
        if size not in self._choices and self._free_to_choose():
            remember(self._choices, size, choose(site.graph, self._pulls(site)))

    def _leaves(self, site: Site) -> bool:
        """Whether calls of about this size, which changes, go to autograd from the next one on, so
        that this one is not worth a flat graph."""
        return bool(site.open.symbols) and self._chosen(site.call) is not None

    def _pulls(self, site: Site) -> int | None:
        """How many v autograd would pull through the network; None: more than it should."""
        return 1

    # What goes to autograd once, by choice or for good, goes there without being taken apart again:
    # on networks so small the host's work is all there is.

    def _shortens(self) -> bool:
        """Whether a call may be cut short at all."""
        return True

    def _shorten(self, args: tuple, kwargs: Mapping[str, Any], way: Way) -> None:
        if way == "patched":
            used = self._used.get(self._setting())
            own = args[: len(args) - self._extras]
            way = used.way(own) if used is not None and used.looks == LOOKS else way
        plain = not kwargs and self.wrt == 0 and self.output is None
        quick = way in ("bare", "math") or isinstance(way, frozenset)
        if not (quick and plain and all(type(t) is Tensor for t in args)):
            return
        if not any(map(is_compiled, list(self.net.modules())[1:])):
            remember(self._short, self._shape_of(args), way)

    def _shape_of(self, args: tuple) -> tuple:
        """What `_size` says of a call, from arguments that are not taken apart."""
        key: list[Any] = [self._modules["net"].training]  # type: ignore[union-attr]
        for t in args:
            key += t.dtype, t.is_cpu, *[n.bit_length() for n in t.shape]
        return tuple(key)

    def _short_way(self, args: tuple, kwargs: Mapping[str, Any]) -> Way | None:
        if kwargs or not torch.is_grad_enabled():
            return None
        key: list[Any] = [self._modules["net"].training]  # type: ignore[union-attr]
        for t in args:
            if type(t) is not Tensor or t.is_inference():
                return None
            key += t.dtype, t.is_cpu, t.shape
        exact = tuple(key)  # which is quicker to make than the sizes that count as one
        way = self._short.get(exact)
        if way is None:
            way = self._short.get(self._shape_of(args))
            if way is None:
                return None
            remember(self._short, exact, way)
        if counting() or hooked() or peek_interpreter_stack() is not None or not self._shortens():
            return None
        fits = self._refused() if isinstance(way, frozenset) else self._free_to_choose()
        return way if fits and self._written() is not None else None

    def _refused(self) -> bool:
        """Whether a call goes to autograd since it cannot be captured, or is not to be."""
        if self.sweeps is False:
            return True
        if self.strict:
            return False
        left = self._unasked.pop() if self._unasked else 0
        if left or self._rests() or capture_of(self.net, self.output).resting:
            self._unasked.append(left - 1 if left else UNASKED)
            return True
        return False

    def _written(self) -> Any:
        """What calls the network as it was written, if the whole was compiled; None where hooks of
        the compiled one have to be called as well."""
        net: Any = self._modules["net"]
        parts = net._modules  # TorchScript's have no get()
        if "_orig_mod" not in parts:
            return net if net._compiled_call_impl is None else net._call_impl
        return None if any([getattr(net, name) for name in OWN_HOOKS]) else parts["_orig_mod"]

    def _unused(self, x: Tensor) -> None:
        if not self.allow_unused:
            refuse_unused(self.wrt, x)

    def _way(self, site: Site) -> str:
        """Which it is, and why, for `explain`."""
        if self.sweeps is False:
            return "autograd: asked for"
        if not self._free_to_choose():
            return "sweeps: asked for" if self.sweeps else "sweeps"
        return str(choose(site.graph, self._pulls(site)))

    def _on_autograd(self, run: Callable[[Way], Any], way: Way, call: Arguments) -> Any:
        """The network's call on autograd. Where it could not be captured it is said once why, after
        it succeeded. Whether output and penalty fit the network's result is found out when it has
        run: until a call has gone well, buffers are put back where they do not."""
        asked = self.output, Itself(self._asked)
        unsure = self._fits != asked
        with torch.inference_mode(False):
            before = [(b, b.clone()) for b in self.net.buffers() if unsure and not b.is_inference()]
        gradients = torch.is_grad_enabled()
        try:
            with trackers_off(), torch.inference_mode(False), torch.set_grad_enabled(gradients):
                result = self._with_patch(run, call) if way == "patched" else run(way)
        except Exception as error:  # the network's own error: it was not the capture's fault
            self._refusal, self._again = None, 0.0
            capture_of(self.net, self.output).refusal = None
            if isinstance(error, InputError):
                with torch.inference_mode(False), torch.no_grad():
                    for buffer, kept in before:
                        buffer.copy_(kept)
            raise
        self._fits = asked
        if way not in ("bare", "math") and self._refusal is not None and not self._warned:
            self._warned = True
            warn(f"{self._refusal}\n  Until then it runs on autograd.")
        return result

    def _with_patch(self, run: Callable[[Way], Any], call: Arguments) -> Any:
        """To have all of the patch at every call takes as long as many a step: after a few calls,
        of what is faster than PyTorch's own only that is registered which they used; and attention
        of which all was small goes to PyTorch's unfused kernel, whose derivatives take less of the
        host's time. On a CPU alone: elsewhere PyTorch's may be wrong where ours is not used, and
        the host has time."""
        setting = self._setting()
        if not setting[0] or not supported(torch.__version__):
            return run("patched")
        used = self._used.get(setting, Used())
        if used.looks == LOOKS:
            return run(used.way(call.leaves))
        with watched() as seen:
            result = run("patched")
        self._used[setting] = used.and_also(seen, call.leaves)
        return result

    def _setting(self) -> tuple:
        """(whether the network lies on a CPU, what else may decide which operators it calls)."""
        some = next(self.net.parameters(), None)
        here = some is not None and some.is_cpu
        return here, self.net.training, torch.is_grad_enabled(), torch.is_autocast_enabled()

    def _find(self, call: Arguments) -> Site:
        """The site of this call, without running it; raises `CaptureError`."""
        with torch.inference_mode(False), torch.enable_grad():
            args, kwargs = call.with_x(call.aliases)
            graph, inputs = find_graph(self.net, self.output, args, kwargs)
            site = self._site(graph, inputs, call)
            if not graph.symbols:
                return site
            return replace(site, asked=True, key=("asked", *site.key))

    def _site(self, graph: Graph, inputs: Sequence[Any], call: Arguments) -> Site:
        """This call of the captured graph: its sizes read off, the caller's own tensors in the
        place of the aliases that the capture saw. Raises where the sweeps would not be right."""
        only_one(graph.targets, self.output)
        numbers = graph.read_symbols(inputs)
        if not graph.holds(numbers):
            raise CaptureError(
                f"{type(self.net).__name__} cannot be captured for this call: a size that numbers "
                "decide (how many entries a mask chooses) is not what the graph takes it to be"
                "\n  Remedy: a fixed size (torch.where in the place of a mask as an index)."
            )
        places = {id(t): i for i, t in enumerate(inputs) if isinstance(t, Tensor)}
        where = [places.get(id(t)) for t in call.aliases]
        inputs = list(inputs)
        for place, x in zip(where, call.x, strict=True):
            if place is not None:
                inputs[place] = x
        unused = tuple(i for i, place in enumerate(where) if place is None)
        if unused:
            graph = self._extended(graph, unused, call)
            for i in unused:
                where[i] = len(inputs)
                inputs.append(call.x[i])
        penalised: Any = tuple([graph.inputs[place] for place in where])  # type: ignore[index]
        moving = _sized_by(graph, penalised) if graph.deciding else None
        if moving is not None:
            taken = any(w[-1] == "item" and w[0].index in moving.outputs
                        for w in graph.symbols.values() if isinstance(w[0], Ref))  # fmt: skip
            what, remedy = (
                f"the shape of what {moving.op} yields depends on numbers that are",
                "a fixed size (torch.where in the place of a mask as an index)",
            )
            if taken:
                what = "Python is handed a number (float(), .item()) of what is"
                remedy = "leave it a tensor (.detach(), in a hook that looks on)"
            raise CaptureError(
                f"{type(self.net).__name__} cannot be captured as one graph: {what} computed from "
                f"the penalised input\n  stopped at {moving.source}\n  Remedy: {remedy}."
            )
        outputs, shapes = graph.ends_at(numbers)
        key = (id(graph), numbers, penalised)
        return Site(call, graph, numbers, inputs, penalised, outputs, shapes[0], key)

    def _extended(self, graph: Graph, unused: tuple[int, ...], call: Arguments) -> Graph:
        """The graph with inputs that it does not read."""
        key = (id(graph), unused, tuple([call.x[i].shape for i in unused]))
        held = self._bound.get(key)
        if held is None:  # with the graph itself, so that no other one gets its number
            held = graph, _with_inputs(graph, [call.x[i] for i in unused])
            remember(self._bound, key, held)
        return held[1]

    # ------------------------------------------------------------------- plans and programs

    def _planned(
        self, site: Site, gradients: bool, copies: bool, varying: bool, key: tuple, make: Callable
    ) -> tuple[Any, dict[int, Tensor]]:
        """(the program that `make(plan, key)` yields, kept by `key` and all that the plan depends
        on; the graph's state). The plan may be one that was made at other sizes."""
        graph = site.open
        state = read_state(graph, site.inputs, graph.mutations if copies else ())
        wanted = frozenset(v for v, t in state.items() if gradients and t.requires_grad)
        how = (self.debug, self.compile_mode, self.flatten_after, self.recompute)
        key = (site.key, wanted, varying, *key, how)
        program = self._programs.get(key)
        if program is None:
            self._choose(site)
            program = make(self._plan(site, wanted, varying), key[1:])
            if not program.for_one_call and not self._leaves(site):
                remember(self._programs, key, program)
        if not self.allow_unused:
            self._refuse_unused(site, program.plan)
        return program, state

    def _plan(self, site: Site, wanted: frozenset[int], varying: bool) -> Plan:
        """The plan, at the sizes of the call that it was made for."""
        renew = not self.compile_mode if self.recompute is None else self.recompute
        key = (id(site.open), site.penalised, wanted, varying, renew)
        _, plan = self._plans.get(key, (None, None))
        if plan is None:
            try:
                plan = make_plan(
                    site.graph, site.penalised, site.target, wanted,
                    varying_seed=varying, recompute=renew,
                )  # fmt: skip
            except RuleError as error:  # an operator that draws and has no rule
                raise CaptureError(str(error)) from error
            remember(self._plans, key, (site.open, plan))
        return plan

    def _swept(self, site: Site, plan: Plan, make: Callable[[Plan], Any], key: tuple) -> Any:
        """The program `make(plan)`, whose sweeps run flat unless one is debugging: by graphs for
        these sizes, or for all sizes where they change."""
        if self.debug or self._leaves(site):
            return make(plan.at(site.graph))
        if not site.open.symbols:
            return FlattenedProgram(make(plan), self._replay(site))
        family = self._family(site, key, lambda: make(plan))
        return OpenProgram(family, site.numbers)

    def _phased(
        self, site: Site, plan: Plan, make: Callable[[Plan, Replay], Any], key: tuple,
        flat: bool, exact: bool,
    ) -> Any:  # fmt: skip
        """The program `make(plan, replay)` of phases that are flattened one by one, if at all
        (`flat`). Where sizes change, one is made for all calls of about one size, unless `exact`,
        and runs at the sizes of each."""
        once = self._leaves(site)
        if self.debug or site.asked or once or not site.open.symbols:
            replay = self._replay(site) if flat and not once else Replay(False, None)
            return make(plan.at(site.graph), replay)
        size = site.numbers
        if not exact:  # an open number may be an attribute of the network's, and no size
            size = tuple([n.bit_length() for n in size if isinstance(n, int)])
        here = lambda: make(plan.at(site.graph), Replay(self.compile_mode, None))  # noqa: E731
        family = self._family(site, key, here, phased=flat)
        program = family.programs.get(size)
        if program is None:
            program = here() if family.programs else family.reference
            remember(family.programs, size, program)
        return replace(program, replay=OpenReplay(family, site.numbers))

    def _family(
        self, site: Site, key: tuple, make: Callable[[], Any], phased: bool | None = None
    ) -> Family:
        key = (id(site.open), site.penalised, *key)
        _, family = self._families.get(key, (None, None))
        if family is None:
            after = None if phased is False else self.flatten_after
            compiler = phased is not False and self.compile_mode
            family = Family(site.open, make(), compiler, after, self.recompute, bool(phased))
            remember(self._families, key, (site.open, family))
        return family

    def _refuse_unused(self, site: Site, plan: Plan) -> None:
        for value, x in zip(site.penalised, site.call.x, strict=True):
            if value not in plan.reaching:
                refuse_unused(self.wrt, x)

    def _replay(self, site: Site) -> Replay:
        """Flat graphs for one size: none while debugging, and where sizes change only for one
        that comes again and again."""
        after = None if self.debug else self.flatten_after
        if after is not None and site.open.symbols:
            after = max(after, SETTLED)
        return Replay(False if self.debug else self.compile_mode, after, self.recompute)

    def _attached(
        self, site: Site, program: Any, state: Mapping[int, Tensor], gradients: bool,
        extra: tuple = (), asked: Sequence[Tensor] = (),
    ) -> tuple[list[Any], Sequence[Tensor]]:  # fmt: skip
        """Run a program, as one node of autograd's graph: (the network's outputs in their order,
        what is handed out of its derivative). extra, asked: the penalty's own arguments, and those
        tensors among them that ask for a gradient."""
        plan = program.plan
        before = next_node()
        prelude = run_prelude(program.prelude, state)
        swept = [prelude[v] for v in (*plan.penalised, *plan.effective)]
        program = self._graphed_program(program, [*swept, *asked])
        job = Job(program, {v: prelude[v] for v in plan.constants}, extra)
        if plan.trained or asked:
            results = attach(job, [*swept, *asked], before)
            count = len(plan.outputs)
            outputs, told = results[:count], results[count:]
        else:
            with torch.no_grad():
                first = program.first(job.leaves(swept), extra, keep=False)
            outputs, told = first.outputs, program.results(first.values)
            job.mutations.update(first.mutated)
        return self._finish(site, plan, prelude, outputs, job.mutations, gradients), told

    def _graphed_program(self, program: Any, owners: Sequence[Tensor]) -> Any:
        """The same, by CUDA graphs where they are asked for; owners: what gets gradients."""
        return program

    def _finish(
        self, site: Site, plan: Plan, prelude: Mapping[int, Tensor], outputs: Sequence[Tensor],
        mutated: Mapping[int, Tensor], gradients: bool,
    ) -> list[Any]:  # fmt: skip
        """Write what the network writes, and put its outputs in their order."""
        graph = site.open
        swept = dict(zip(plan.outputs, outputs, strict=True))
        own = len(site.outputs) - len(graph.asserted)
        for item, message in zip(site.outputs[own:], graph.asserted, strict=True):
            if not (swept[item] if item in swept else prelude[item]):
                raise CaptureError(  # autograd comes to the assertion itself
                    f"{type(self.net).__name__} asserts what is not so in this call: {message}"
                )
        written = {v: mutated.get(place, prelude.get(v)) for place, v in graph.mutations.items()}
        write_state(graph, site.inputs, written)  # type: ignore[arg-type]
        ordered = []
        for i, item in enumerate(site.outputs[:own]):
            if i in graph.returned:
                ordered.append(site.inputs[graph.returned[i]])
                continue
            if isinstance(item, tuple):
                ordered.append(item[0])
                continue
            t = swept[item] if item in swept else prelude[item]
            ordered.append(t if gradients else t.detach())
        return ordered


def separate(t: Tensor) -> Tensor:
    """The tensor as one of its own that requires grad: the derivative is that in this argument,
    also where another one was computed from the same tensor. Sparse tensors have no views."""
    if not t.requires_grad:
        return t.detach().requires_grad_()
    return t.view_as(t) if t.layout is torch.strided else t.clone()


def first_order(t: Tensor, by: float = 1.0) -> Tensor:
    """t·by, whose gradients raise where they are differentiated again, as those of the sweeps do:
    no call's result depends on which way it took, and PyTorch's third derivatives of layer and
    batch norm are wrong."""
    if not t.requires_grad:
        return t if by == 1.0 else t * by
    told = separate(t) if by == 1.0 else t * by  # another tensor: the hook holds t itself
    hook = partial(refuse_third, t)
    if type(told) is Tensor and told._backward_hooks is None:
        # `register_hook`, without the handle to remove it by, which takes as long as a kernel
        told._backward_hooks = OrderedDict(((_OURS, hook),))
        told.grad_fn._register_hook_dict(told)  # type: ignore[union-attr]
    else:
        told.register_hook(hook)
    return told


_OURS = -1  # PyTorch's own numbers of hooks are none below 0


def _sized_by(graph: Graph, penalised: Sequence[int]) -> Node | None:
    """The node that yields a size from numbers which are swept. Those that are given (edges, masks)
    may decide sizes."""
    moving = set(penalised)
    for node in graph.deciding:
        if moving.intersection(node.inputs):
            moving.update(node.outputs)
    decided = {where[0].index for where in graph.symbols.values() if isinstance(where[0], Ref)}
    return next((n for n in graph.deciding if moving & decided & set(n.outputs)), None)


def _with_inputs(graph: Graph, more: Sequence[Tensor]) -> Graph:
    """The graph with inputs that it does not read."""
    if not more:
        return graph
    values = [Meta(tuple(t.shape), t.dtype, t.device) for t in more]
    first = len(graph.values)
    return replace(
        graph,
        values=(*graph.values, *values),
        inputs=(*graph.inputs, *range(first, first + len(more))),
    )


# ------------------------------------------------------------------------ sweeps or autograd
#
# Both compute the same products. The sweeps spare work where PyTorch's own second derivative takes
# many passes (normalisation) or slow kernels (convolutions, above all in groups); in return the
# host does more before the first kernel starts. Where what is spared weighs less than that,
# autograd is the quicker way, and the model takes it. All of this is counted from shapes, so that
# the same network always takes the same way.

aten = torch.ops.aten

# On one core of a CPU: how much is done in a microsecond; what the sweeps cost beside kernels, in
# all, at a normalisation, and at an activation with curvature, which they take in more steps.
FLOPS, BYTES = 20_000, 8_000
HOST, NORM, CURVED = 450.0, 300.0, 40.0
PULLED, SEEDED = 24.0, 30.0  # of autograd for each v at each node; of sweeps for several v there
LARGE = 2000.0  # the convolution from which on its weight gradient has the better kernel

# A long step hides the host's work: this share of it may be lost.
SHARE = 0.02
STEP = 5  # the four sweeps with their weight gradients, in forward passes

_DIFFERENTIATED_TWICE = (
    Structure.LINEAR, Structure.BILINEAR, Structure.COORDINATEWISE, Structure.PIECEWISE_LINEAR,
    Structure.STANDARDISATION, Structure.CONSTANT,
)  # fmt: skip
_ALSO = (
    aten._softmax, aten._log_softmax, aten.softmax, aten.log_softmax, aten.logsumexp,
    aten.unsafe_split,
)  # fmt: skip
_NOT = ("hardsigmoid", "hardswish", "embedding_bag")
_CONVOLUTIONS = (aten.conv1d, aten.conv2d, aten.conv3d, aten.convolution)
_PRODUCTS = (aten.linear, aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.matmul)


@dataclass(frozen=True)
class Choice:
    """spared: microseconds of a step that the sweeps save; host: what they cost; step: how long it
    takes, all by estimate. possible: whether stock autograd knows every derivative; attends: if
    attention is taken by its kernel of single operations."""

    spared: float
    host: float
    step: float
    possible: bool
    attends: bool = False

    @property
    def autograd(self) -> bool:
        """Whether autograd is the quicker way."""
        return self.possible and self.spared + SHARE * self.step < self.host

    def __str__(self) -> str:
        way = "autograd" if self.autograd else "sweeps"
        if not self.possible:
            return way
        return (
            f"{way}, by estimate: in a step of about {_time(self.step)} the sweeps save "
            f"{_time(self.spared)} of work and add {_time(self.host)} in Python"
        )


def _time(microseconds: float) -> str:
    if microseconds < 1000:
        return f"{microseconds:.0f} µs"
    return f"{microseconds / 1000:.3g} ms"


def choose(graph: Graph, pulls: int | None = 1) -> Choice:
    """For a network on a CPU; elsewhere kernels run while the host goes on, so that sweeps are
    never chosen against. pulls: how many v autograd takes one by one and the sweeps together."""
    metas = [m for m in graph.values if m is not None]
    if pulls is None or any(m.device.type != "cpu" for m in metas):
        return Choice(0.0, 0.0, 0.0, False)
    spared, work, host, attends = 0.0, 0.0, HOST, False
    for node in graph.nodes:
        if not node.inputs:
            continue
        if not _known_twice(node):
            return Choice(0.0, 0.0, 0.0, False)
        own, saved, more = _cost(graph, node)
        work += own
        spared += saved
        host += more
        attends |= _packet(node) is aten.scaled_dot_product_attention
        spared += (pulls - 1) * PULLED
        host += SEEDED if pulls > 1 else 0.0
    return Choice(spared, host, pulls * STEP * work, True, attends)


def _known_twice(node: Node) -> bool:
    if any(name in str(node.op) for name in _NOT):
        return False
    if _packet(node) is aten.scaled_dot_product_attention:
        return node.argument(4, "dropout_p", 0.0) == 0
    if _packet(node) is aten.div and len(node.inputs) == 1:  # by a number
        return True
    return _packet(node) in _ALSO or find_rule(node.op).structure in _DIFFERENTIATED_TWICE


def _packet(node: Node) -> Any:
    return getattr(node.op, "overloadpacket", None)


def _cost(graph: Graph, node: Node) -> tuple[float, float, float]:
    """Microseconds: (of the forward pass; of a step, what the sweeps spare; what they add)."""
    metas = [graph.values[v] for v in (*node.inputs, *node.outputs)]
    passes = sum(m.bytes for m in metas if m is not None) / BYTES
    if not node.outputs:
        return 0.0, 0.0, 0.0
    shape = graph.shape(node.outputs[0])
    once = math.prod(shape) * 4 / BYTES  # over the result
    packet = _packet(node)
    if packet in _CONVOLUTIONS:
        weight = graph.shape(node.inputs[1])
        products = 2 * math.prod(shape) * math.prod(weight[1:]) / FLOPS
        grouped = node.argument(8 if packet is aten.convolution else 6, "groups", 1) != 1
        spared = HOST + 40 * once if grouped else 0.3 * max(0.0, products - LARGE)
        return max(products, passes), spared, 0.0
    if packet in _PRODUCTS:
        inner = graph.shape(node.inputs[1 if packet in (aten.addmm, aten.baddbmm) else 0])[-1]
        return max(2 * math.prod(shape) * inner / FLOPS, passes), 0.0, 0.0
    if packet is aten.scaled_dot_product_attention:  # which the sweeps take without its scores
        keys = graph.shape(node.inputs[1])[-2]
        scores = math.prod(graph.shape(node.inputs[0])[:-1]) * keys * 4 / BYTES
        return max(4 * math.prod(shape) * keys / FLOPS, passes), 20 * scores, 0.0
    structure = find_rule(node.op).structure
    if structure is Structure.STANDARDISATION:
        return 2 * passes, 6 * once, NORM
    return passes, 0.0, CURVED if structure is Structure.COORDINATEWISE else 0.0
