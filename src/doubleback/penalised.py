"""`Penalised`: an ordinary nn.Module that returns a network's output and a derivative penalty."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ._torch import pytree
from .capture import requires_grad
from .captured import CapturedModule, Site
from .errors import InputError, warn
from .explain import Explanation, explain
from .graph import Graph
from .jacobian import price
from .penalties import (
    Loss,
    LossName,
    Penalty,
    accumulate_on_autograd,
    make_loss,
    on_autograd,
)
from .plan import Plan
from .run import (
    Bridge,
    GraphedProgram,
    GraphedStep,
    GraphRefused,
    Job,
    Replay,
    Request,
    deliver,
    kind,
    no_autocast,
    read_state,
    remember,
    run_prelude,
    scale,
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
        the backward to the tangent sweep: a seventh to a quarter less memory for a twentieth more
        time, compiled up to a fifth more. None: yes, unless `compile` is asked for.
    sweeps: False: autograd computes everything; True: sweeps wherever the network can be captured;
        None: on a CPU, from the second call on, whichever is quicker by the network's sizes, as
        `explain` shows. The numbers are the same to rounding.

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
        self.cuda_graph = cuda_graph
        if cuda_graph and penalty.carries:
            raise InputError(
                f"a CUDA graph cannot carry {type(penalty).__name__}'s vector from call to call; "
                "use warm_start=False or cuda_graph=False"
            )
        if cuda_graph and penalty.ungraphed is not None:
            raise InputError(f"a CUDA graph {penalty.ungraphed}, or use cuda_graph=False")

    if TYPE_CHECKING:  # nn.Module's own says Any

        def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]: ...

    _transient = CapturedModule._transient | {"_graphed", "_pairs", "_carried", "_warned_of_graph"}

    def _reset(self) -> None:
        super()._reset()
        self._graphed: dict[Any, GraphedStep | None] = {}
        self._pairs: dict[Any, Any] = {}  # None: refused
        self._carried: dict[Any, Tensor] = {}  # singular vectors, from call to call
        self._warned_of_graph = False

    # ------------------------------------------------------------------------------ calls

    @property
    def _extras(self) -> int:
        return self.penalty.extras

    def _free_to_choose(self) -> bool:
        return super()._free_to_choose() and self.penalty.one_seed and not self.cuda_graph

    def _captures(self, call: Any) -> bool:
        empty = not call.x[0].shape[0]
        return super()._captures(call) and not (empty and self.penalty.needs_examples)

    def _forward(self, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
        """(what net returns, the penalty)."""
        call = self._call(args, kwargs)
        gradients = torch.is_grad_enabled()
        found: list[Tensor] = []

        def run(graph: Graph, inputs: Sequence[Any]) -> Sequence[Any]:
            site = self._site(graph, inputs, call)
            program: Any
            program, state = self._program(site, gradients)
            plan, asked = program.plan, call.asked if gradients else {}
            prelude = run_prelude(program.prelude, state)
            swept = [prelude[v] for v in (*plan.penalised, *plan.effective)]
            if self._graphs(program, swept[0]):
                owners = [*swept, *asked.values()]
                program = GraphedProgram(program, self._pairs, owners, self._warn_of_graph)
            job = Job(program, {v: prelude[v] for v in plan.constants}, call.constants)
            if plan.trained or asked:
                *outputs, penalty = Bridge.apply(job, *swept, *asked.values())  # type: ignore[misc]
            else:
                with torch.no_grad():
                    first = program.first(job.leaves(swept), job.extra, keep=False)
                outputs, penalty = first.outputs, self.penalty.reduce(first.values)
                job.mutations.update(first.mutated)
            found.append(penalty)
            return self._finish(site, plan, prelude, outputs, job.mutations, gradients)

        way, result = self._through(run, call)
        if way is not None:
            return self._on_autograd(partial(on_autograd, self, call), way)
        return result, found[0]

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
        return self._opaque(self._accumulate)(args, kwargs, loss, weight)

    def _accumulate(
        self, args: tuple, kwargs: Mapping[str, Any], loss: Any, weight: float
    ) -> tuple[Any, Tensor, Tensor]:
        if not isinstance(weight, (int, float)):
            raise InputError(f"weight must be a number, not {type(weight).__name__}")
        own_loss, args, target = self._loss(loss, args)
        call = self._call(args, kwargs)
        if self.penalty.own_loss is not None:
            target = call.extra[0]
        if own_loss is not None and requires_grad(target):
            raise InputError(
                "accumulate holds the loss's target constant, but it requires grad: detach it, or "
                "call the model and backward() for its gradient"
            )
        found: list[Tensor] = []
        pairs: list[tuple[Tensor, Tensor]] = []
        lent: list[bool] = []

        def run(graph: Graph, inputs: Sequence[Any]) -> Sequence[Any]:
            site = self._site(graph, inputs, call)
            if own_loss is not None:
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
                found_by = self._graphed_step(*step, ends)
                lent.append(found_by is not None)
                outputs, loss_value, penalty, grads, mutated = found_by or program.step(*step[1:])
            pairs.extend((t, g) for t, g in zip(ends, grads, strict=True) if g is not None)
            found.extend((loss_value, penalty))
            return self._finish(site, plan, prelude, outputs, mutated, False)

        way, result = self._through(run, call)
        if way is not None:
            return self._on_autograd(
                partial(accumulate_on_autograd, self, call, own_loss, target, weight), way
            )
        # what lies before the sweeps receives its gradient under no_grad and inference_mode too
        with torch.inference_mode(False), no_autocast():
            deliver(pairs, lent=lent[0])
        return result, found[0], found[1]

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
        told = replace(explain(program), way=self._way(site))
        try:
            cost = price(program, call.constants, twice=flat)
        except (RuntimeError, TypeError):  # an operator that no fake tensor can run
            return told
        return replace(told, flops=cost.flops, peak_bytes=cost.peak_bytes)

    def extra_repr(self) -> str:
        return f"penalty={self.penalty!r}, compile={self.compile_mode!r}"

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
        key = (asked, self.penalty, fingerprint, known, seeding)
        varying = self.penalty.varying or seeding

        def make(plan: Plan, key: tuple) -> Any:
            request = Request(
                lambda: plan.at(site.graph), asked, self.debug, self._replay(site), self._carried,
                known, lambda make: self._swept(site, plan, make, key),
            )  # fmt: skip
            return self.penalty.program(request)

        return self._planned(site, gradients, copies, varying, key, make)


def program_of(model: Penalised, *args: Any, **kwargs: Any) -> tuple[Any, dict[int, Tensor]]:
    """(the program of such a call, what it starts from); nothing of the network runs."""
    program, state = model._program(model._find(model._call(args, kwargs)), gradients=True)
    return getattr(program, "program", program), state
