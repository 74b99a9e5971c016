"""`WithGradient`: a network that returns its gradient beside its output, both differentiable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ._torch import pytree
from .capture import Arguments, choose_output
from .captured import CapturedModule, Site
from .errors import InputError, refuse_unused
from .graph import Graph
from .penalties import Custom, OutputGradient, Penalty, Way, derivatives
from .plan import Plan
from .run import Bridge, GradientProgram, Job, run_prelude


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
        example, or a callable out → a tensor shaped like out.
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
        v: str | int | tuple[int, ...] | Callable[[Tensor], Tensor] = "sum",
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
        self._seed = _seed(v)

    if TYPE_CHECKING:  # nn.Module's own says Any

        def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]: ...

    @property
    def _extras(self) -> int:
        return 0

    def extra_repr(self) -> str:
        return f"wrt={self.wrt!r}, v={self.v!r}, compile={self.compile_mode!r}"

    def _forward(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        call = self._call(args, kwargs)
        gradients = torch.is_grad_enabled()
        found: list[Tensor] = []

        def run(graph: Graph, inputs: Sequence[Any]) -> Sequence[Any]:
            site = self._site(graph, inputs, call)
            program, state = self._program(site, gradients)
            plan = program.plan
            prelude = run_prelude(program.prelude, state)
            job = Job(program, {v: prelude[v] for v in plan.constants}, ())
            swept = [prelude[v] for v in (*plan.penalised, *plan.effective)]
            if plan.trained:
                results = Bridge.apply(job, *swept)
                count = len(plan.outputs)
                outputs = results[:count]  # type: ignore[index]
                found.extend(results[count:])  # type: ignore[index]
            else:
                with torch.no_grad():
                    first = program.first(job.leaves(swept), (), keep=False)
                outputs = first.outputs
                found.extend(first.values)
                job.mutations.update(first.mutated)
            return self._finish(site, plan, prelude, outputs, job.mutations, gradients)

        way, result = self._through(run, call)
        if way is not None:
            result, found = self._on_autograd(partial(self.by_autograd, call), way)
        return result, found[0] if len(found) == 1 else tuple(found)

    def _program(self, site: Site, gradients: bool) -> tuple[Any, dict[int, Tensor]]:
        seed = self._seed
        seed.check(site.shape, site.call.x[:1])
        fingerprint = seed.fingerprint()

        def bare(plan: Plan) -> GradientProgram:
            return GradientProgram(plan, seed, self.debug)

        def make(plan: Plan, key: tuple) -> Any:
            if fingerprint is None:  # a v of the caller's, called as it is every time
                return bare(plan.at(site.graph))
            return self._swept(site, plan, bare, key)

        key = (seed, fingerprint)
        return self._planned(site, gradients, True, seed.varying, key, make)

    def by_autograd(self, call: Arguments, way: Way = "patched") -> tuple[Any, list[Tensor]]:
        """The same by autograd: where it is quicker, where it cannot be captured, for `check`."""
        graph = torch.is_grad_enabled()
        with torch.enable_grad(), derivatives(way):
            x = [t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in call.x]
            args, kwargs = call.with_x(x)
            result = self.net(*args, **kwargs)
            out = choose_output(result, self.output)
            self._seed.check(out.shape, x[:1])
            found: Sequence[Tensor | None] = (None,) * len(x)
            if out.requires_grad:
                found = torch.autograd.grad(
                    out, x, self._seed.seed(out), create_graph=graph, allow_unused=True
                )
        if not self.allow_unused:
            for t, g in zip(x, found, strict=True):
                if g is None:
                    refuse_unused(self.wrt, t)
        gradients = [torch.zeros_like(t) if g is None else g for t, g in zip(x, found, strict=True)]
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


def _seed(v: Any) -> Penalty:
    """The object that knows v and its derivative in the output."""
    if isinstance(v, str):
        if v != "sum":
            raise InputError(f'v must be "sum", an index or a callable, not {v!r}')
        return _Ones()
    if callable(v):
        return Custom(v)  # type: ignore[arg-type]
    return _Index(v)
