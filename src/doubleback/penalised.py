"""The modules that users hold: `Penalised` returns a network's output and a derivative penalty,
`WithGradient` its output and its gradient, all differentiable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import graph as autograd_graph

from ._torch import compiling, peek_interpreter_stack, pytree
from .capture import Arguments, choose_output, is_sharded, place_of, requires_grad, usable
from .captured import (
    CapturedModule,
    Site,
    Way,
    as_written,
    derivatives,
    first_order,
    separate,
)
from .errors import InputError, warn
from .explain import Explanation, explain
from .graph import Graph
from .jacobian import price
from .penalties import (
    Apart,
    Custom,
    Loss,
    LossName,
    OutputGradient,
    Penalty,
    Thinning,
    at_rows,
    joined,
    make_loss,
    nothing,
    refuse_dependent,
)
from .plan import Plan
from .run import (
    CallersGradient,
    GradientProgram,
    GraphedProgram,
    GraphedStep,
    GraphRefused,
    Itself,
    Replay,
    Request,
    average,
    deliver,
    kind,
    no_autocast,
    read_state,
    refuse_inside_forward,
    remember,
    run_prelude,
    scale,
    several,
)


class Penalised(CapturedModule):
    """`out, penalty = Penalised(net, penalty)(x, …)`, both differentiable.

    `penalty` is R = p((∂out/∂x)* v), reduced over the batch. Gradients of any function of
    `out` and `penalty` equal autograd's double backward to rounding, at the price of four
    sweeps over the network instead of two.

    net: any nn.Module. The call's arguments go to it, except the last `penalty.extras`
        positional ones, which are the penalty's (labels, targets).
    penalty: `LossGradient`, `OutputGradient`, `Jacobian`, `LogDet` or another of the library's, or
        one of your own (`Custom`, `Penalty`).
    compile: flatten each pair of sweeps into one graph and hand it to Inductor. True, or a mode
        of `torch.compile` such as "max-autotune".
    wrt: which argument of `net` is penalised: a position, a keyword, or a tuple of them. An
        argument may itself be a tuple of tensors.
    output: which output is penalised where `net` returns several: an index, a key, or a path.
    allow_unused: an input that the output does not depend on counts as a gradient of zero, instead
        of being an error.
    strict: raise `CaptureError` instead of running on autograd where `net` cannot be captured.
    debug: raise `NonFiniteError` at the first NaN or infinity in any sweep.
    flatten_after: without `compile`, how many calls of one shape run node by node before the
        sweeps are flattened into a straight list of kernel calls, which saves the host's time
        from then on; None: never.
    cuda_graph: on a GPU, `accumulate` runs as one CUDA graph, and a call with its backward pass as
        two, which frees the host: for networks whose kernels are shorter than their launches. Each
        kind of call keeps the memory of one step. Sizes have to stay the same; what cannot be
        captured (data-dependent control flow, operators that wait for the device) runs without,
        and it is said once why.
    recompute: compute cotangents again, where that takes no product, instead of holding them from
        the backward to the tangent sweep; with `compile`, all that norms and activations compute:
        less memory for a little more time (docs/how-it-works.md). None: yes; with `compile`, as
        much of it as costs a few percent of the step's time by estimate.
    sweeps: False: autograd computes everything; True: sweeps wherever the network can be captured;
        None: on a CPU, from the second call on, whichever is quicker by the network's sizes, as
        `explain` shows. The numbers are the same to rounding.
    every, fraction: in training mode, the penalty of one call out of so many only, times `every`,
        zero in the others; and of so large a part of its rows, drawn at random without replacement.
        On average that is the whole penalty and its gradient, for less than its price
        (docs/penalties.md). `calls` counts the calls: it is no part of `state_dict`, and may be
        set. In evaluation mode and without gradients every call has its whole penalty.
    generator: draws the rows; None: PyTorch's own.
    shared: with `fraction`, arguments of the call that all examples share, by position or keyword.
        Of any other, tensors as long as the batch have a row for each example; it is tried whether
        that can be.

    >>> import torch, doubleback as db
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    >>> model = db.Penalised(net, db.LossGradient("cross_entropy"))
    >>> x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> out, penalty = model(x, y)
    >>> loss = torch.nn.functional.cross_entropy(out, y) + 0.01 * penalty
    >>> loss.backward()
    """

    def __init__(
        self,
        net: nn.Module,
        penalty: Penalty,
        compile: bool | str = False,
        *,
        wrt: int | str | tuple = 0,
        output: Any = None,
        allow_unused: bool = False,
        strict: bool = False,
        debug: bool = False,
        flatten_after: int | None = 2,
        cuda_graph: bool = False,
        recompute: bool | None = None,
        sweeps: bool | None = None,
        every: int = 1,
        fraction: float = 1.0,
        generator: torch.Generator | None = None,
        shared: int | str | Sequence[int | str] = (),
    ) -> None:
        if not isinstance(penalty, Penalty):
            raise InputError(
                f"penalty must be one of doubleback's penalties (an instance), not {penalty!r}"
            )
        super().__init__(
            net, compile, wrt=wrt, output=output, allow_unused=allow_unused, strict=strict,
            debug=debug, flatten_after=flatten_after, recompute=recompute, sweeps=sweeps,
        )  # fmt: skip
        self.penalty = penalty
        self.thinning = Thinning(every, fraction, generator)
        self.thinning.check(penalty.reduction)
        self.shared = (shared,) if isinstance(shared, (int, str)) else tuple(shared)
        self.calls = 0
        self.cuda_graph = cuda_graph
        if cuda_graph and penalty.no_graph is not None:
            raise InputError(penalty.no_graph)

    if TYPE_CHECKING:  # nn.Module's own says Any

        def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]: ...

    def _reset(self) -> None:
        super()._reset()
        self._graphed: dict[Any, GraphedStep | None] = {}
        self._pairs: dict[Any, Any] = {}  # None: refused
        self._carried: dict[Any, Tensor] = {}  # singular vectors, from call to call
        self._warned_of_graph = False
        self._apart = Apart()

    # ------------------------------------------------------------------------------ calls

    @property
    def _extras(self) -> int:
        return self.penalty.extras

    @property
    def _leavable(self) -> bool:
        return not self.cuda_graph

    @property
    def _asked(self) -> Penalty:
        return self.penalty

    def _pulls(self, site: Site) -> int | None:
        return self.penalty.pulls(site.shape)

    def _shortens(self) -> bool:
        return self.penalty.seeds_from({}) is None

    def _captures(self, call: Any) -> bool:
        empty = not call.x[0].shape[0]
        return super()._captures(call) and not (empty and self.penalty.needs_examples)

    def _forward(self, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
        """(what net returns, the penalty)."""
        if self.thinning and self.training and torch.is_grad_enabled():
            return self._thinned(args, kwargs)
        return self._whole(args, kwargs)

    def _thinned(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Any, Tensor]:
        """The same where the penalty is not that of every call, or not of every row."""
        thinning, reduction = self.thinning, self.penalty.reduction
        call = self._call(args, kwargs)
        batch = self._rows(call)
        turn = self.calls % thinning.every == 0
        if not turn:
            result = self._plain(call, (args, kwargs))
            out = choose_output(result, self.output)
            self.penalty.check(out.shape, call.x, *call.extra)
            penalty = nothing(out, batch, reduction)
        elif (count := thinning.count(batch)) == batch:
            result, penalty = self._whole(args, kwargs)
            penalty = thinning.every * penalty
        else:
            rows = thinning.draw(batch, call.x[0].device)
            given, shared = (args, kwargs), self._shared(args, kwargs)
            cut = partial(at_rows, given, batch=batch, shared=shared)
            if self._apart.due(given, shared):
                refuse_dependent(self.net, self._by_row, given, rows, cut)
            some, others = map(cut, rows)
            first, penalty = self._whole(*some)
            result = joined((first, self._plain(call, others)), rows)
            penalty = thinning.weight(batch, count, reduction) * penalty
        self.calls += 1
        return result, penalty

    def _rows(self, call: Arguments) -> int:
        sizes = {x.shape[0] if x.dim() else None for x in call.x}
        if len(sizes) > 1 or None in sizes:
            raise InputError(
                "every and fraction need one batch of examples: the penalised inputs have shapes "
                f"{', '.join(str(tuple(x.shape)) for x in call.x)}"
            )
        return sizes.pop()  # type: ignore[return-value]

    def _shared(self, args: tuple, kwargs: Mapping[str, Any]) -> set[int | str]:
        """The arguments of a call that all examples share, by position or keyword."""
        places = {key: place_of(self.net, key, args, kwargs) for key in self.shared}
        for key, place in places.items():
            if place is None:
                raise InputError(f"shared={key!r} names no argument of this call")
        return set(places.values())  # type: ignore[arg-type]

    def _by_row(self, given: tuple) -> tuple[Any, list[Tensor]]:
        """The network's result, and what a caller's penalty makes of it."""
        call = self._call(*given)
        result = self._plain(call, given)
        return result, self.penalty.by_row(choose_output(result, self.output), call.x, *call.extra)

    def _plain(self, call: Arguments, given: tuple) -> Any:
        """The network by itself, on arguments like those of a call."""
        args, kwargs = given
        return self.net(*args[: len(args) - len(call.extra)], **kwargs)

    def _whole(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Any, Tensor]:
        if self._short and (short := self._short_way(args, kwargs)) is not None:
            result, _, _, value, by = self._shortly(args, short, False)
            return result, first_order(value, by)
        result, (penalty,) = self._with_derivative(args, kwargs)
        return result, penalty

    def by_autograd(self, call: Arguments, way: Way = "patched") -> tuple[Any, list[Tensor]]:
        """(what net returns, the penalty alone in a list), by autograd."""
        result, penalty = on_autograd(self, call, way)
        return result, [penalty]

    def _shortly(
        self, args: tuple, way: Way, shared: bool
    ) -> tuple[Any, Tensor, Tensor | None, Tensor, float]:
        """(what net returns, its output, the sum of the losses that v is the gradient of if it is
        `shared`, the penalty as a tensor and the number to multiply it by)."""
        penalty, net = self.penalty, self._written()
        split = len(args) - penalty.extras
        x, extra, out = args[0], args[split:], None
        leaf = separate(x)
        try:
            with derivatives(way):
                result = net(leaf, *args[1:split])
                out = result if type(result) is Tensor else choose_output(result, None)
                penalty.quick_check(out.shape, (x,), *extra)
                told = quick_penalty(out, (leaf,), penalty, extra, True, self._unused, shared)
        except (RuntimeError, IndexError, ValueError):
            call = self._call(args, {})  # raises what is better understood, where it is known
            if out is not None:
                penalty.check(out.shape, call.x, *extra)
            raise
        return result, out, *told

    def accumulate(
        self,
        *args: Any,
        loss: LossName | Loss | Callable[[Tensor, Any], Tensor] | None = None,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> tuple[Any, Tensor, Tensor]:
        """One-shot training step: adds ∇(loss + weight·penalty) to `.grad`, all four sweeps in
        one call (one graph with `compile=True`). Returns (out, loss, penalty), detached.

        loss: "cross_entropy", "mse", "bce" or a callable (out, y) → one loss per example; its
        mean over the batch is taken. Left out, it is the loss of `LossGradient`, or none. Its
        target is the last argument, before the penalty's own unless that is `LossGradient`,
        which shares it, and is held constant; tensors of any other penalty's own that require
        grad receive theirs. weight=0 is a plain training step.

        >>> import torch, doubleback as db
        >>> model = db.Penalised(torch.nn.Linear(4, 3), db.LossGradient("cross_entropy"))
        >>> x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
        >>> out, loss, penalty = model.accumulate(x, y, weight=0.01)
        """
        if compiling():
            return self._opaque(self._accumulate)(args, kwargs, loss, weight)
        return self._accumulate(args, kwargs, loss, weight)

    def _accumulate(
        self, args: tuple, kwargs: Mapping[str, Any], loss: Any, weight: float
    ) -> tuple[Any, Tensor, Tensor]:
        if not isinstance(weight, (int, float)):
            raise InputError(f"weight must be a number, not {type(weight).__name__}")
        if is_sharded(type(self)):
            raise InputError(
                "accumulate of a model that fully_shard has wrapped, whose parameters are whole "
                "inside its forward alone; call model(x, …) and backward()"
            )
        own_loss, args, target = self._loss(loss, args)
        thin = self.thinning and self.training
        if self._short and not thin and not several():
            short = self._short_way(args, kwargs)
            if short is not None:
                return self._accumulate_shortly(args, short, own_loss, target, weight)
        call = self._call(args, kwargs)
        if self.penalty.own_loss is not None:
            target = call.extra[0]
        if own_loss is not None:
            _refuse_moving(target)
        if thin:
            turn = self.calls % self.thinning.every == 0
            if not turn or self.thinning.fraction < 1:
                run = partial(self._thinned, args, kwargs)
                return accumulated(self, run, own_loss, target, weight)
            self.calls += 1
            every = self.thinning.every
            out, value, penalty = self._accumulate_whole(call, own_loss, target, every * weight)
            return out, value, every * penalty
        results = self._accumulate_whole(call, own_loss, target, weight)
        if self._choices and (way := self._chosen(call)) is not None:
            self._shorten(args, kwargs, way)
        return results

    def _accumulate_whole(
        self, call: Arguments, own_loss: Loss | None, target: Any, weight: float
    ) -> tuple[Any, Tensor, Tensor]:
        """One step with the penalty of every row, by sweeps or on autograd."""
        told: list[Tensor] = []
        pairs: list[tuple[Tensor, Tensor]] = []
        lent: list[bool] = []

        def run(graph: Graph, inputs: Sequence[Any]) -> Sequence[Any]:
            site = self._site(graph, inputs, call)
            if own_loss is not None and not self.penalty.shares(own_loss):
                own_loss.check(site.shape, target)
            program, state = self._program(site, True, copies=False, loss=own_loss)
            plan = program.plan
            if program.prelude and graph.mutations:  # its backward pass comes after the writes
                state = read_state(site.open, site.inputs, graph.mutations)
            prelude = run_prelude(program.prelude, state)
            values = {v: prelude[v].detach() for v in (*plan.penalised, *plan.leaves)}
            swept = (prelude[v] for v in (*plan.penalised, *plan.effective))
            ends = [*swept, *call.asked.values()]
            by = scale(weight, call.x[0])
            with torch.no_grad():
                step = (program, values, call.constants, own_loss, target, by)
                by_graph = self._graphed_step(*step, ends)
                lent.append(by_graph is not None)
                outputs, loss_value, penalty, grads, mutated = by_graph or program.step(*step[1:])
            pairs.extend((t, g) for t, g in zip(ends, grads, strict=True) if g is not None)
            told.extend((loss_value, penalty))
            return self._finish(site, plan, prelude, outputs, mutated, False)

        way, result = self._through(run, call)
        if way is not None:
            given = call.for_autograd(), own_loss, usable(target), weight
            return self._on_autograd(partial(accumulate_on_autograd, self, *given), way, call)
        # what lies before the sweeps receives its gradient under no_grad and inference_mode too
        with torch.inference_mode(False), no_autocast():
            deliver(pairs, lent=lent[0])
        return result, told[0], told[1]

    def _accumulate_shortly(
        self, args: tuple, way: Way, loss: Loss | None, target: Any, weight: float
    ) -> tuple[Any, Tensor, Tensor]:
        """The same on autograd, with the least work for the host."""
        if self.penalty.own_loss is not None:
            target = args[len(args) - self.penalty.extras]
        if loss is not None:
            _refuse_moving(target)
        shares = self.penalty.shares(loss)
        result, out, summed, value, by = self._shortly(args, way, shares)
        penalty = value if by == 1.0 else value * by
        if loss is None:
            value = torch.zeros((), device=out.device)
        elif shares and summed is not None:
            value = summed / out.shape[0]
        else:
            loss.check(out.shape, target)
            value = loss.values(out, target).mean()
        whole = penalty.sum() if penalty.dim() else penalty
        total = weight * whole if loss is None else value + weight * whole
        if type(total) is Tensor and total.requires_grad:
            _engine(total, None, False, False, ())
        elif total.requires_grad:
            total.backward()
        if type(result) is Tensor:
            return result.detach(), value.detach(), penalty.detach()
        return pytree.tree_map_only(Tensor, Tensor.detach, (result, value, penalty))

    def _graphed_step(
        self, program: Any, values: Mapping[int, Tensor], extra: tuple, loss: Any, target: Any,
        weight: Tensor | None, ends: Sequence[Tensor],
    ) -> tuple | None:  # fmt: skip
        """All four sweeps as one CUDA graph, where that was asked for and can be had."""
        if not self._graphs(program, values[program.plan.penalised[0]]):
            return None
        moves = set(program.plan.penalised)
        moving = ({v: t for v, t in values.items() if v in moves}, extra, target, weight)
        fixed = {v: t for v, t in values.items() if v not in moves}

        def run(given: Any, rest: Any) -> tuple:
            x, more, y, by = given
            return program.step({**x, **rest}, more, loss, y, by)

        leaves, spec = pytree.tree_flatten(moving)
        key = (program, None if loss is None else loss.fingerprint(), spec, *map(kind, leaves))
        graphed = self._graphed.get(key)
        if graphed is None and key in self._graphed:
            return None
        try:
            if graphed is None:
                graphed = GraphedStep(run, moving, fixed, gradients=lambda out: out[3])
                remember(self._graphed, key, graphed)
            (outputs, loss_value, penalty, _, mutated), grads = graphed(moving, fixed, ends)
        except GraphRefused as refusal:
            remember(self._graphed, key, None)
            self._warn_of_graph(f"a CUDA graph cannot hold {refusal}")
            return None
        return [t.clone() for t in outputs], loss_value.clone(), penalty.clone(), grads, mutated

    def _graphed_program(self, program: Any, owners: Sequence[Tensor]) -> Any:
        if not self._graphs(program, owners[0]):
            return program
        return GraphedProgram(program, self._pairs, owners, self._warn_of_graph)

    def _graphs(self, program: Any, x: Tensor) -> bool:
        """Whether this program's sweeps are to run as CUDA graphs."""
        if not (self.cuda_graph and x.is_cuda):
            return False
        if program.no_graph is not None:
            self._warn_of_graph(program.no_graph)
        return program.no_graph is None

    def _warn_of_graph(self, why: str) -> None:
        if not self._warned_of_graph:
            self._warned_of_graph = True
            warn(f"cuda_graph=True: {why}. Until then this model runs without a graph")

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """The plan for such a call: sweeps, operation counts, FLOPs, memory, rules, and why.

        FLOPs and memory are those of a whole step, gradients included, found by running it on
        tensors without numbers; None where an operator needs numbers.
        """
        call = self._call(args, kwargs)
        site = self._find(call)
        flat = self.flatten_after is not None and not self.debug
        program, _ = self._program(site, gradients=True)
        program = program.to_price(Replay(False, 0 if flat else None))
        told = replace(
            explain(program), penalty=repr(self.penalty), way=self._way(site),
            thinning=self.thinning,
        )  # fmt: skip
        try:
            cost = price(program, call.constants, twice=flat)
        except (RuntimeError, TypeError):  # an operator that no fake tensor can run
            return told
        return replace(told, flops=cost.flops, peak_bytes=cost.peak_bytes)

    def extra_repr(self) -> str:
        thin = f", penalised: {self.thinning}" if self.thinning else ""
        return f"penalty={self.penalty!r}, compile={self.compile_mode!r}{thin}"

    # -------------------------------------------------------------------------- arguments

    def _loss(self, loss: Any, args: tuple) -> tuple[Loss | None, tuple, Any]:
        own = self.penalty.own_loss
        if loss is None:
            return own, args, None
        made = make_loss(loss)
        if own is not None:
            same = own.fingerprint() == made.fingerprint() is not None
            return (own if same else made), args, None
        extras = self.penalty.extras
        if len(args) < extras + 2:
            raise InputError(
                f"accumulate(loss={loss!r}) needs the loss's target among its arguments"
            )
        place = len(args) - extras - 1
        return made, args[:place] + args[place + 1 :], args[place]

    # ---------------------------------------------------------------------------- programs

    def _program(
        self, site: Site, gradients: bool, copies: bool = True, loss: Loss | None = None
    ) -> tuple[Any, dict[int, Tensor]]:
        """The program for this graph and these wanted gradients, and the graph's state.

        copies: of buffers that the network updates, so that the update does not reach what is kept
        of them for a backward to come.
        """
        call = site.call
        asked = tuple(call.asked) if gradients else ()
        self.penalty.check(site.shape, call.x, *call.extra)
        seeding = bool(asked) and any(call.asks(i) for i in self.penalty.in_seed)
        fingerprint = self.penalty.fingerprint()
        known = loss is None or loss.fingerprint() is not None
        key = (asked, Itself(self.penalty), fingerprint, known, seeding)
        varying = self.penalty.varying or seeding

        def make(plan: Plan, key: tuple) -> Any:
            request = Request(
                lambda: plan.at(site.graph), asked, self.debug, self._carried, known,
                lambda make: self._swept(site, plan, make, key),
                lambda make, flat, exact: self._phased(site, plan, make, key, flat, exact),
            )  # fmt: skip
            return self.penalty.program(request)

        return self._planned(site, gradients, copies, varying, key, make)


def _refuse_moving(target: Any) -> None:
    if requires_grad(target):
        raise InputError(
            "accumulate holds the loss's target constant, but it requires grad: detach it, or "
            "call the model and backward() for its gradient"
        )


def program_of(model: Penalised, *args: Any, **kwargs: Any) -> tuple[Any, dict[int, Tensor]]:
    """(the program of such a call, what it starts from); nothing of the network runs."""
    program, state = model._program(model._find(model._call(args, kwargs)), gradients=True)
    return getattr(program, "program", program), state


# ----------------------------------------------------------------------- the same on autograd
#
# By stock autograd's double backward (`create_graph=True`). Networks run here that cannot be
# captured or are quicker so, and `check` compares against it.


def autograd_penalty(
    run: Callable[[Sequence[Tensor]], Any],
    choose: Callable[[Any], Tensor],
    x: Sequence[Tensor],
    penalty: Penalty,
    extra: Sequence[Any],
    way: Way = "stock",
    seeds: Callable[..., Sequence[Tensor]] | None = None,
    unused: Unused = None,
) -> tuple[Any, Tensor]:
    """(result of the network, penalty), both differentiable as autograd makes them.

    run(x) calls the network, choose(result) picks the penalised output. way: see `derivatives`.
    seeds: in place of the penalty's own `oracle_seeds`. unused: called with an input that the
    output does not depend on.
    """
    graph = torch.is_grad_enabled()
    quick = way in ("bare", "math") or (isinstance(way, frozenset) and seeds is None)
    seeds = seeds or penalty.oracle_seeds
    with torch.enable_grad(), derivatives(way):
        leaves = [separate(t) for t in x]
        result = run(leaves)
        out = choose(result)
        if quick:
            _, value, by = quick_penalty(out, leaves, penalty, extra, graph, unused)
            value = value if by == 1.0 else value * by
        else:
            value = penalty.reduce(_values(out, leaves, penalty, extra, graph, unused, seeds))
    if not graph:
        result, value = pytree.tree_map_only(Tensor, lambda t: t.detach(), (result, value))
    return result, value


Unused = Callable[[Tensor], None] | None


def quick_penalty(
    out: Tensor, leaves: Sequence[Tensor], penalty: Penalty, extra: Sequence[Any], graph: bool,
    unused: Unused, shared: bool = False,
) -> tuple[Tensor | None, Tensor, float]:  # fmt: skip
    """(the sum that v is the gradient of, if `shared` with a loss or quicker; the penalty as a
    tensor and the number to multiply it by)."""
    v = summed = None
    if out.requires_grad:
        v = None if shared else penalty.quick_seed(out, leaves, *extra)
        summed = penalty.quick_total(out, *extra) if v is None else None
    if v is None and summed is None:
        seeds = penalty.oracle_seeds
        return None, penalty.reduce(_values(out, leaves, penalty, extra, graph, unused, seeds)), 1.0
    end = out if summed is None else summed
    xi = quick_pulled(end, leaves, v, graph, unused)
    return summed, *penalty.at(out, *extra).quick_value(xi, *extra)


def quick_pulled(
    out: Tensor, leaves: Sequence[Tensor], v: Tensor | None, graph: bool, unused: Unused
) -> Sequence[Tensor]:
    """`pulled`, by the engine itself where nothing else is at work."""
    fits = type(out) is Tensor and out.requires_grad and (v is None or v.shape == out.shape)
    if fits and len(leaves) == 1 and peek_interpreter_stack() is None:
        xi = _engine(out, v, True, graph, leaves)
        if xi[0] is not None:
            return xi
    return pulled(out, leaves, v, graph, unused)


def _engine(
    end: Tensor, v: Tensor | None, retain: bool, graph: bool, inputs: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """What `torch.autograd.grad` does, and without inputs `backward`, less the host's work of
    looking at arguments; v is known to have the shape of `end`, and is 1 for a number and None."""
    # by its module, where `db.patch` listens
    run: Any = autograd_graph._engine_run_backward
    seed = (torch.ones_like(end) if v is None else v,)
    return run((end,), seed, retain, graph, tuple(inputs), True, accumulate_grad=not inputs)


def _values(
    out: Tensor, leaves: Sequence[Tensor], penalty: Penalty, extra: Sequence[Any], graph: bool,
    unused: Unused, seeds: Callable[..., Sequence[Tensor]],
) -> Tensor:  # fmt: skip
    """p per example, seed by seed."""

    def pull(v: Tensor, differentiable: bool | None = None) -> list[Tensor]:
        through = graph if differentiable is None else differentiable
        return pulled(out, leaves, v, through, unused)

    total = penalty.oracle_values(out, pull, *extra)
    if total is None:
        for v in seeds(out, leaves, *extra) if out.requires_grad else [None]:
            xi = pulled(out, leaves, v, graph, unused)
            value = penalty.at(out, *extra).value(xi, *extra)
            total = value if total is None else total + value
    assert total is not None
    return total


def pulled(
    out: Tensor,
    leaves: Sequence[Tensor],
    v: Tensor | None,
    graph: bool,
    unused: Callable[[Tensor], None] | None = None,
) -> list[Tensor]:
    """J*v by autograd, the gradient of a scalar `out` for None; zeros where the output does not
    depend on the input, unless that is refused."""
    xi: Sequence[Tensor | None] = (None,) * len(leaves)
    if out.requires_grad:
        xi = torch.autograd.grad(
            out, leaves, v, create_graph=graph, retain_graph=True, allow_unused=True
        )
    for t, u in zip(leaves, xi, strict=True):
        if u is None and unused is not None:
            unused(t)
    return [torch.zeros_like(t) if u is None else u for t, u in zip(leaves, xi, strict=True)]


def on_autograd(model: Penalised, call: Arguments, way: Way = "patched") -> tuple[Any, Tensor]:
    """(result of the net, penalty); "stock" is the oracle."""

    def run(x: Sequence[Tensor]) -> Any:
        args, kwargs = call.with_x(x)
        with as_written(model.net, way):
            return model.net(*args, **kwargs)

    def choose(result: Any) -> Tensor:
        out = choose_output(result, model.output)
        model.penalty.check(out.shape, call.x, *call.extra)
        return out

    seeds = None
    if way == "patched" or isinstance(way, frozenset):
        # a call without gradients leaves v as it was
        carried = model._carried if torch.is_grad_enabled() else dict(model._carried)
        seeds = model.penalty.seeds_from(carried)
    return autograd_penalty(
        run,
        choose,
        call.x,
        model.penalty,
        call.extra,
        way=way,
        seeds=seeds,
        unused=model._unused,
    )


def accumulate_on_autograd(
    model: Penalised, call: Arguments, loss: Any, target: Any, weight: float, way: Way = "patched"
) -> tuple[Any, Tensor, Tensor]:
    """(result, loss, penalty), their gradients added to the parameters'."""
    return accumulated(model, partial(on_autograd, model, call, way), loss, target, weight)


def accumulated(
    model: Penalised, run: Callable[[], tuple[Any, Tensor]], loss: Any, target: Any, weight: float
) -> tuple[Any, Tensor, Tensor]:
    """The same for what `run` yields: the network's result and a penalty."""
    if several():
        refuse_inside_forward()
    with torch.enable_grad():
        result, penalty = run()
        out = choose_output(result, model.output)
        value = torch.zeros((), device=out.device)
        if loss is not None:
            if not model.penalty.shares(loss):  # whose labels were checked with the penalty's
                loss.check(out.shape, target)
            value = loss.values(out, target).mean()
        total = value + weight * penalty.sum()
        if total.requires_grad:  # an output that depends on nothing has no gradient to add
            total.backward()
    if several():
        average(model.net.parameters())
    told = (result, value, penalty)
    result, value, penalty = pytree.tree_map_only(Tensor, Tensor.detach, told)
    return result, value, penalty


Cotangent = str | int | tuple[int, ...] | Callable[[Tensor], Tensor]


class WithGradient(CapturedModule):
    """`out, gradient = WithGradient(net)(x, …)`, both differentiable.

    gradient = (∂out/∂x)* v, by default ∂(Σ out)/∂x: forces are `-gradient` of an energy. What a
    loss sends back to `gradient` is the tangent that the last two sweeps start from (theory §2), so
    any penalty can be written in plain PyTorch, several on one forward pass, at the price of four
    sweeps instead of two.

    net: any nn.Module; all arguments of the call go to it.
    wrt: by which argument to differentiate: a position, a keyword or the name of a parameter of
        `forward`, or a path into a dictionary or dataclass, ("data", "pos"); a list of these for
        several, whose sizes may differ. One tensor gives one gradient, several a tuple.
    v: the cotangent of the output: "sum" for ones, an index (or tuple of indices) of one entry per
        example, or a callable out → a tensor shaped like out. A list of these for several, one row
        of J*v each: the gradient is (rows, *x.shape); so it is where a callable returns
        (rows, *out.shape).
    output: which output is differentiated where `net` returns several: an index, a key, or a path.
    The other options are those of `Penalised`.

    >>> import torch, doubleback as db
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> pos, forces = torch.randn(5, 3), torch.randn(5, 3)
    >>> energy, gradient = db.WithGradient(net)(pos)
    >>> loss = energy.mean() + torch.nn.functional.l1_loss(-gradient, forces)
    >>> loss.backward()
    """

    def __init__(
        self,
        net: nn.Module,
        wrt: Any = 0,
        v: Cotangent | Sequence[Cotangent] = "sum",
        output: Any = None,
        compile: bool | str = False,
        *,
        allow_unused: bool = False,
        strict: bool = False,
        debug: bool = False,
        flatten_after: int | None = 2,
        recompute: bool | None = None,
        sweeps: bool | None = None,
    ) -> None:
        super().__init__(
            net, compile, wrt=wrt, output=output, allow_unused=allow_unused, strict=strict,
            debug=debug, flatten_after=flatten_after, recompute=recompute, sweeps=sweeps,
        )  # fmt: skip
        self.v = v

    @property
    def v(self) -> Cotangent | Sequence[Cotangent]:
        return self._v

    @v.setter
    def v(self, v: Cotangent | Sequence[Cotangent]) -> None:
        self._v, self._seed = v, _seed(v)

    if TYPE_CHECKING:  # nn.Module's own says Any

        def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]: ...

    @property
    def _extras(self) -> int:
        return 0

    @property
    def _leavable(self) -> bool:
        """Autograd takes several rows one after another, the sweeps together."""
        return not isinstance(self._seed, _SeveralSeeds)

    @property
    def _asked(self) -> Penalty:
        return self._seed

    def extra_repr(self) -> str:
        return f"wrt={self.wrt!r}, v={self.v!r}, compile={self.compile_mode!r}"

    def _forward(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self._short and (short := self._short_way(args, kwargs)) is not None:
            return self._shortly(args, short)
        result, slopes = self._with_derivative(args, kwargs)
        return result, slopes[0] if len(slopes) == 1 else tuple(slopes)

    def _program(self, site: Site, gradients: bool) -> tuple[Any, dict[int, Tensor]]:
        seed = self._seed
        seed.check(site.shape, site.call.x[:1])
        fingerprint = seed.fingerprint()

        def bare(plan: Plan) -> GradientProgram:
            return GradientProgram(plan, seed, self.debug)

        def make(plan: Plan, key: tuple) -> Any:
            if fingerprint is None:  # a v of the caller's, called as it is every time
                own = lambda plan, replay: CallersGradient(plan, seed, self.debug, replay=replay)  # noqa: E731
                return self._phased(site, plan, own, key, flat=True, exact=False)
            return self._swept(site, plan, bare, key)

        key = (seed, fingerprint)
        return self._planned(site, gradients, True, seed.varying, key, make)

    def _shortens(self) -> bool:
        return not isinstance(self._seed, (_SeveralSeeds, _Own))

    def _shortly(self, args: tuple, way: Way) -> tuple[Any, Tensor]:
        leaf, net = separate(args[0]), self._written()
        try:
            with derivatives(way):
                result = net(leaf, *args[1:])
                out = result if type(result) is Tensor else choose_output(result, None)
                self._seed.check(out.shape, args[:1])
                v = self._seed.seed(out)
                return result, first_order(quick_pulled(out, (leaf,), v, True, self._unused)[0])
        except (RuntimeError, IndexError, ValueError):
            self._call(args, {})  # raises what is better understood, where it is known
            raise

    def by_autograd(self, call: Arguments, way: Way = "patched") -> tuple[Any, list[Tensor]]:
        """The same by autograd: where it is quicker, where it cannot be captured, for `check`."""
        graph = torch.is_grad_enabled()
        with torch.enable_grad(), derivatives(way):
            x = [separate(t) for t in call.x]
            args, kwargs = call.with_x(x)
            with as_written(self.net, way):
                result = self.net(*args, **kwargs)
            out = choose_output(result, self.output)
            self._seed.check(out.shape, x[:1])
            v = self._seed.seed(out)
            single = v.dim() == out.dim()
            rows = [
                pulled(out, x, row, graph, self._unused) for row in ((v,) if single else v.unbind())
            ]
            if single:
                gradients = rows[0]
            else:
                gradients = [
                    torch.stack([row[i] for row in rows]) if rows else t.new_zeros(0, *t.shape)
                    for i, t in enumerate(x)
                ]
        if not graph:
            result = pytree.tree_map_only(Tensor, Tensor.detach, result)
            gradients = [g.detach() for g in gradients]
        return result, gradients


class _Ones(Penalty):
    """v = 1: the gradient of the sum of all outputs."""

    def seed(self, out: Tensor, *extra: Tensor) -> Tensor:
        return torch.ones_like(out)


class _Index(OutputGradient):
    """v = e⟨index⟩, the same for every example."""


class _Own(Custom):
    """A caller's v, or several of them along an axis in front."""

    def seed(self, out: Tensor, *extra: Tensor) -> Tensor:
        v = self.v(out, *extra)
        shape = tuple(v.shape) if isinstance(v, Tensor) else None
        if shape is None or shape[-out.dim() :] != tuple(out.shape) or len(shape) > out.dim() + 1:
            raise InputError(
                f"v(out) must have the output's shape {tuple(out.shape)}, or that with an axis of "
                f"rows in front of it, not {type(v).__name__ if shape is None else shape}"
            )
        return v


class _SeveralSeeds(Penalty):
    """Several v, one after another along an axis in front."""

    def __init__(self, parts: Sequence[Penalty]) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.varying = any(part.varying for part in self.parts)

    def seed(self, out: Tensor, *extra: Tensor) -> Tensor:
        rows = [part.seed(out) for part in self.parts]
        for row in rows:
            if row.shape != out.shape:
                raise InputError(
                    f"each v of a list must have the output's shape {tuple(out.shape)}, not "
                    f"{tuple(row.shape)}"
                )
        return torch.stack(rows)

    def check(self, out_shape: Sequence[int], x: Sequence[Tensor], *extra: Any) -> None:
        for part in self.parts:
            part.check(out_shape, x)


def _seed(v: Any) -> Penalty:
    """The object that knows v and its derivative in the output."""
    if isinstance(v, list):
        if not v:
            raise InputError("v is an empty list: name one cotangent for each row")
        if any(isinstance(part, list) for part in v):
            raise InputError(
                "v is a list of lists; an entry of an output with several axes is a tuple"
            )
        return _SeveralSeeds([_seed(part) for part in v])
    if isinstance(v, str):
        if v != "sum":
            raise InputError(f'v must be "sum", an index, a callable, or a list, not {v!r}')
        return _Ones()
    if isinstance(v, Tensor):
        raise InputError(
            "v is a tensor; its rows would have to be those of every batch. Pass a callable, "
            "v=lambda out: …, of the output's shape or with an axis of rows in front"
        )
    if callable(v):
        return _Own(v)  # type: ignore[arg-type]
    return _Index(v)
