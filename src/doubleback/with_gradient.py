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
        self._seed = _seed(v)

    if TYPE_CHECKING:  # nn.Module's own says Any

        def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]: ...

    @property
    def _extras(self) -> int:
        return 0

    def _free_to_choose(self) -> bool:
        """Autograd takes several rows one after another, the sweeps together."""
        return super()._free_to_choose() and not isinstance(self._seed, _Rows)

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

        captured, result = self._through(run, call)
        if not captured:
            result, found = self._on_autograd(partial(self.by_autograd, call), call)
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
            v = self._seed.seed(out)
            single = v.dim() == out.dim()
            rows: list[Sequence[Tensor | None]] = []
            for row in (v,) if single else v.unbind():
                found: Sequence[Tensor | None] = (None,) * len(x)
                if out.requires_grad:
                    found = torch.autograd.grad(
                        out, x, row, create_graph=graph, retain_graph=True, allow_unused=True
                    )
                rows.append(found)
            gradients = []
            for t, *given in zip(x, *rows, strict=True):
                if not self.allow_unused and all(g is None for g in given):
                    refuse_unused(self.wrt, t)
                full = [torch.zeros_like(t) if g is None else g for g in given]
                gradients.append(full[0] if single else torch.stack(full))
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


class _Rows(Penalty):
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
        return _Rows([_seed(part) for part in v])
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
