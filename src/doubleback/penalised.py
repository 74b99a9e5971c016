"""`Penalised`: an ordinary nn.Module that returns a network's output and a derivative penalty."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .capture.calls import (
    Arguments,
    Owner,
    choose,
    copy_all,
    kind,
    read_state,
    remember,
    requires_grad,
    run_prelude,
    scale,
    take_apart,
)
from .capture.captures import Captures
from .capture.closures import held_by, likeness, numbers
from .errors import CaptureWarning, InputError
from .explain import Explanation, explain, explain_jacobian, with_iterations
from .graph import Graph
from .jacobian.planner import plan_jacobian
from .jacobian.pricing import price
from .jacobian.programs import SpectralProgram
from .penalties.fallback import accumulate_on_autograd, on_autograd
from .penalties.jacobian import Jacobian, SpectralNorm
from .penalties.kinds import LossGradient, Penalty
from .penalties.losses import CallableLoss, Loss, make_loss
from .plan.steps import Plan, make_plan
from .run.bridge import Bridge, Job, Program, _no_autocast, deliver
from .run.cuda_graphs import GraphedStep
from .run.flattening import FlattenedProgram, Replay
from .state_dicts import accept_plain_keys

_TRANSIENT = (
    "_graphs", "_programs", "_graphed", "_losses", "_found_owners", "_carried", "_warned",
)  # fmt: skip


class Penalised(nn.Module):
    """`out, penalty = Penalised(net, penalty)(x, …)`, both differentiable.

    `penalty` is R = p((∂out/∂x)* v), reduced over the batch. Gradients of any function of
    `out` and `penalty` equal autograd's double backward to rounding, at the price of four
    sweeps over the network instead of two.

    net: any nn.Module. The call's arguments go to it, except the last `penalty.extras`
        positional ones, which are the penalty's (labels, targets).
    penalty: `LossGradient`, `OutputGradient`, `GradientMatch`, `BilinearForm`, `Custom`.
    compile: flatten each pair of sweeps into one graph and hand it to Inductor. True, or a mode
        of `torch.compile` such as "max-autotune".
    wrt: which argument of `net` is penalised: a position, a keyword, or a tuple of them. An
        argument may itself be a tuple of tensors.
    output: which output is penalised where `net` returns several: an index, a key, or a path.
    strict: raise `CaptureError` instead of running on autograd where `net` cannot be captured.
    debug: raise `NonFiniteError` at the first NaN or infinity in any sweep.
    flatten_after: without `compile`, how many calls of one shape run node by node before the
        sweeps are flattened into a straight list of kernel calls, which saves the host's time
        from then on; None: never.
    cuda_graph: on a GPU, `accumulate` captures its whole step as one CUDA graph, which frees the
        host altogether: for networks whose kernels are shorter than their launches. The graph
        keeps the memory of one step; data-dependent control flow and operators that wait for the
        device cannot be captured.
    recompute: compute cotangents again, where that takes no product, instead of holding them from
        the backward to the tangent sweep: a seventh to a quarter less memory for a twentieth more
        time, compiled up to a fifth more. None: yes, unless `compile` is asked for.

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
        wrt: int | str | tuple[int | str, ...] = 0,
        output: Any = None,
        strict: bool = False,
        debug: bool = False,
        flatten_after: int | None = 2,
        cuda_graph: bool = False,
        recompute: bool | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(net, nn.Module):
            raise InputError(f"net must be an nn.Module, not {type(net).__name__}")
        if not isinstance(penalty, Penalty):
            raise InputError(
                f"penalty must be one of doubleback's penalties (an instance), not {penalty!r}"
            )
        self.register_load_state_dict_pre_hook(accept_plain_keys)
        self.net = net
        self.penalty = penalty
        self.compile_mode = compile
        self.wrt = wrt if isinstance(wrt, tuple) else (wrt,)
        self.output = output
        self.strict = strict
        self.debug = debug
        self.flatten_after = flatten_after
        self.cuda_graph = cuda_graph
        self.recompute = not compile if recompute is None else recompute
        if cuda_graph and isinstance(penalty, SpectralNorm) and penalty.warm_start:
            raise InputError(
                "a CUDA graph cannot carry SpectralNorm's vector from call to call; use "
                "warm_start=False or cuda_graph=False"
            )
        self._reset()

    def _reset(self) -> None:
        self._graphs = Captures()
        self._programs: dict[Any, Any] = {}
        self._graphed: dict[Any, GraphedStep] = {}
        self._losses: dict[Any, Loss] = {}
        self._found_owners: dict[int, tuple[Graph, list]] = {}
        self._carried: dict[Any, Tensor] = {}  # singular vectors, from call to call
        self._warned = False

    def __getstate__(self) -> dict[str, Any]:
        return {name: item for name, item in self.__dict__.items() if name not in _TRANSIENT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset()

    # ------------------------------------------------------------------------------ calls

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
        """(what net returns, the penalty)."""
        call = self._call(args, kwargs)
        graph = self._graph(call)
        if graph is None:
            return on_autograd(self, call)
        program, state = self._program(graph, call, gradients=torch.is_grad_enabled())
        plan, asked = program.plan, call.asked if torch.is_grad_enabled() else {}
        with _no_autocast():
            prelude = run_prelude(plan, state)
            job = Job(program, {v: prelude[v] for v in plan.constants}, call.constants)
            tensors = [*(prelude[v] for v in (*plan.penalised, *plan.effective)), *asked.values()]
            if plan.trained or asked:
                *outputs, penalty = Bridge.apply(job, *tensors)  # type: ignore[misc]
            else:
                with torch.no_grad():
                    found = program.first(job.leaves(tensors), job.extra, keep=False)
                outputs, penalty = found.outputs, self.penalty.reduce(found.values)
                job.mutations.update(found.mutated)
        self._write_buffers(plan, prelude, job.mutations)
        return self._assemble(plan, outputs, prelude), penalty

    def accumulate(
        self,
        *args: Any,
        loss: Any = None,
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
        if not isinstance(weight, (int, float)):
            raise InputError(f"weight must be a number, not {type(weight).__name__}")
        own_loss, args, target = self._loss(loss, args)
        call = self._call(args, kwargs)
        if isinstance(self.penalty, LossGradient):
            target = call.extra[0]
        if own_loss is not None and requires_grad(target):
            raise InputError(
                "accumulate holds the loss's target constant, but it requires grad: detach it, or "
                "call the model and backward() for its gradient"
            )
        graph = self._graph(call)
        if graph is None:
            return accumulate_on_autograd(self, call, own_loss, target, weight)
        program, state = self._program(graph, call, gradients=True, copies=False)
        plan = program.plan
        if own_loss is not None:
            own_loss.check(graph.shape(plan.target), target)
        # what lies before the sweeps receives its gradient under no_grad and inference_mode too
        with torch.inference_mode(False), _no_autocast():
            prelude = run_prelude(plan, state)
            values = {v: prelude[v].detach() for v in (*plan.penalised, *plan.leaves)}
            swept = (prelude[v] for v in (*plan.penalised, *plan.effective))
            ends = [*swept, *call.asked.values()]
            by = scale(weight, call.x[0])
            with torch.no_grad():
                outputs, loss_value, penalty, grads, mutated = self._step(
                    program, values, call.constants, own_loss, target, by, ends
                )
            pairs = [(t, g) for t, g in zip(ends, grads, strict=True) if g is not None]
            deliver(pairs, lent=self.cuda_graph and call.x[0].is_cuda)
        self._write_buffers(plan, prelude, mutated)
        prelude = {v: t.detach() for v, t in prelude.items()}
        return self._assemble(plan, outputs, prelude), loss_value, penalty

    def _step(
        self, program: Any, values: Mapping[int, Tensor], extra: tuple, loss: Any, target: Any,
        weight: Tensor | None, ends: Sequence[Tensor],
    ) -> tuple:  # fmt: skip
        """All four sweeps, as one CUDA graph where that was asked for."""
        if not (self.cuda_graph and values[program.plan.penalised[0]].is_cuda):
            return program.step(values, extra, loss, target, weight)
        moves = set(program.plan.penalised)
        moving = ({v: t for v, t in values.items() if v in moves}, extra, target, weight)
        held = (program.held(loss),) if isinstance(program, FlattenedProgram) else ()
        fixed = ({v: t for v, t in values.items() if v not in moves}, held)

        def run(given: Any, rest: Any) -> tuple:
            x, more, y, by = given
            return program.step({**x, **rest[0]}, more, loss, y, by, *rest[1])

        leaves, spec = pytree.tree_flatten((moving, held))
        key = (program, loss, spec, *map(kind, leaves))
        graphed = self._graphed.get(key)
        if graphed is None:
            graphed = GraphedStep(run, moving, fixed, gradients=lambda out: out[3])
            remember(self._graphed, key, graphed)
        (outputs, loss_value, penalty, _, mutated), grads = graphed(moving, fixed, ends)
        return [t.clone() for t in outputs], loss_value.clone(), penalty.clone(), grads, mutated

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """The plan for such a call: sweeps, operation counts, FLOPs, memory, rules, and why.

        FLOPs and memory are those of a whole step, gradients included, found by running it on
        tensors without numbers; None where an operator needs numbers.
        """
        call = self._call(args, kwargs)
        graph = self._graph(call, strict=True)
        assert graph is not None
        program, _ = self._program(graph, call, gradients=True)
        plan = program.plan
        flat = self.flatten_after is not None and not self.debug
        replay = Replay(False, 0 if flat else None)
        if isinstance(self.penalty, Jacobian):
            told = explain_jacobian(plan, self.penalty, program.decision)
            bare: Any = replace(program, replay=replay)
        elif isinstance(self.penalty, SpectralNorm):
            bare = SpectralProgram.build(plan, self.penalty, False, replay, {})
            told = with_iterations(explain(plan, self.penalty), plan, self.penalty.iterations)
        else:
            told = explain(plan, self.penalty)
            bare = Program(plan, self.penalty, asked=tuple(call.asked))
            bare = FlattenedProgram(bare, replay) if flat else bare
        try:
            cost = price(bare, call.constants, twice=flat)
        except (RuntimeError, TypeError):  # an operator that no fake tensor can run
            return told
        return replace(told, flops=cost.flops, peak_bytes=cost.peak_bytes)

    def extra_repr(self) -> str:
        return f"penalty={self.penalty!r}, compile={self.compile_mode!r}"

    # -------------------------------------------------------------------------- arguments

    def _call(self, args: tuple, kwargs: Mapping[str, Any]) -> Arguments:
        return take_apart(self.net, self.wrt, self.penalty, args, kwargs)

    def _loss(self, loss: Any, args: tuple) -> tuple[Any, tuple, Any]:
        own = self.penalty.loss if isinstance(self.penalty, LossGradient) else None
        if loss is None:
            return own, args, None
        if own is not None:
            same = isinstance(loss, str) and type(make_loss(loss)) is type(own)
            return (own if same else self._made(loss)), args, None
        extras = self.penalty.extras
        if len(args) < extras + 2:
            raise InputError(
                f"accumulate(loss={loss!r}) needs the loss's target among its arguments"
            )
        place = len(args) - extras - 1
        return self._made(loss), args[:place] + args[place + 1 :], args[place]

    def _made(self, loss: Any) -> Loss:
        """One object per loss: flat graphs are found by it."""
        key = (loss if isinstance(loss, str) else likeness(loss), *numbers(loss))
        found = self._losses.get(key)
        if found is None:
            found = make_loss(loss)
            remember(self._losses, key, found)
        elif isinstance(found, CallableLoss):
            found.fn = loss  # type: ignore[assignment]  # the same code, perhaps other tensors
        return found

    # ------------------------------------------------------------------- graphs and plans

    def _graph(self, call: Arguments, strict: bool | None = None) -> Graph | None:
        seeded = isinstance(self.penalty, (Jacobian, SpectralNorm))
        if seeded and strict is None and not call.x[0].shape[0]:  # no example, nothing to plan
            return None
        found = self._graphs(self.net, call)
        if isinstance(found, Graph):
            return found
        if self.strict if strict is None else strict:
            raise found
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{found}\n  Until then it runs on autograd.", CaptureWarning, stacklevel=3
            )
        return None

    def _program(
        self, graph: Graph, call: Arguments, gradients: bool, copies: bool = True
    ) -> tuple[Any, dict[int, Tensor]]:
        """The program for this graph and these wanted gradients, and the graph's state."""
        state = read_state(self._owners(graph), graph, call.leaves, copies)
        wanted = frozenset(v for v, t in state.items() if gradients and t.requires_grad)
        asked = tuple(call.asked) if gradients else ()
        penalised = tuple(graph.inputs[i] for i in call.penalised)
        target = choose(graph, self.output)
        how = (self.debug, self.compile_mode, self.flatten_after, self.recompute)
        key = (id(graph), wanted, asked, penalised, target, self.penalty, how)
        key += held_by(self.penalty)
        program = self._programs.get(key)
        self.penalty.check(graph.shape(target), call.x, *call.extra)
        if program is None:
            seeding = bool(asked) and any(call.asks(i) for i in self.penalty.in_seed)
            plan = make_plan(
                graph, penalised, target, wanted,  # type: ignore[arg-type]
                varying_seed=self.penalty.varying or seeding, recompute=self.recompute,
            )  # fmt: skip
            program = self._make_program(plan, asked)
            remember(self._programs, key, program)
        return program, state

    def _make_program(self, plan: Plan, asked: tuple[int, ...]) -> Any:
        after = None if self.debug else self.flatten_after
        replay = Replay(False if self.debug else self.compile_mode, after)
        if isinstance(self.penalty, Jacobian):
            return plan_jacobian(plan, self.penalty, self.debug, replay)
        if isinstance(self.penalty, SpectralNorm):
            return SpectralProgram.build(plan, self.penalty, self.debug, replay, self._carried)
        program = Program(plan, self.penalty, self.debug, asked=asked)
        return program if self.debug else FlattenedProgram(program, replay)

    def _owners(self, graph: Graph) -> list[Owner]:
        """Every tensor of a module that the graph starts from, looked for once."""
        _, found = self._found_owners.get(id(graph), (graph, None))
        if found is None:
            found = []
            for name, value in {**graph.state, **graph.attributes}.items():
                owner, _, leaf = name.rpartition(".")
                module = self.net.get_submodule(owner)
                found.append(Owner(module, leaf, value, name if name in graph.mutations else None))
            # with the graph, so that no other one gets its number
            remember(self._found_owners, id(graph), (graph, found))
        return found

    def _write_buffers(
        self, plan: Plan, prelude: Mapping[int, Tensor], swept: Mapping[str, Tensor]
    ) -> None:
        """Batch norm statistics and the like, once per call, after all sweeps succeeded."""
        graph, buffers, values = plan.graph, [], []
        for module, leaf, _, name in self._owners(graph):
            if name is not None:
                buffers.append(getattr(module, leaf))
                values.append(swept[name] if name in swept else prelude[graph.mutations[name]])
        places = {t.untyped_storage().data_ptr() for t in buffers}  # one may move into another
        values = [t.clone() if t.untyped_storage().data_ptr() in places else t for t in values]
        with torch.no_grad():
            copy_all(buffers, values)

    def _assemble(
        self, plan: Plan, outputs: Sequence[Tensor], prelude: Mapping[int, Tensor]
    ) -> Any:
        swept = dict(zip(plan.outputs, outputs, strict=True))
        flat = []
        for item in plan.graph.outputs:
            if isinstance(item, tuple):
                flat.append(item[0])
            else:
                flat.append(swept[item] if item in swept else prelude[item])
        return pytree.tree_unflatten(flat, plan.graph.out_spec)
