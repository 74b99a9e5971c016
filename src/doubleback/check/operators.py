"""One operator against its oracles: `check_rule` compares its rule with autograd and with finite
differences; `check_adjoint` compares its adjoints with their definition, in the spaces of its
arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._torch import pytree
from ..errors import CheckError, InputError
from ..graph import Meta, Node, Ref, map_leaves
from ..operators import Multilinear, Operator
from ..rules import LOOP, Call, Rule, find_rule
from ..spaces import Product, Space
from .parity import TOLERANCE, CheckReport, Row, compare

# --------------------------------------------------------------------------------- rules


def check_rule(
    op: Any,
    *args: Any,
    rule: Rule | None = None,
    tolerance: float = TOLERANCE,
    finite_differences: bool = True,
    wrt: Sequence[int] | None = None,
    seed: int = 0,
    **kwargs: Any,
) -> CheckReport:
    """Compare one operator's rule with autograd, and with finite differences as a second opinion.

    op: an ATen overload, `torch.ops.aten.tanh.default`; args: float64 sample arguments. Checked:
    forward, backward, tangent, curvature, and what the planner trusts: a linear or piecewise
    linear rule has no curvature; `curves` denies none that is there; `diagonal`, `same_entries`
    and `per_example` hold; nothing is read that `reads` does not name; many seeds at once
    (`seeded`) give what one after another do; what `at_once` and `onto` give together is what comes
    one by one; its other `forms` likewise. wrt: which tensor
    arguments are differentiated, all floating-point ones if left out. Raises `CheckError`.

    >>> import torch, doubleback as db
    >>> report = db.check_rule(torch.ops.aten.tanh.default, torch.randn(4, dtype=torch.float64))
    >>> report.worst < 1e-10
    True
    """
    rule = rule or find_rule(op)
    sample = _Sample(op, args, kwargs, rule, wrt, seed)
    pairs = {**sample.against_autograd(), **sample.declared(), **sample.curving()}
    rows = compare({**pairs, **sample.reading(), **sample.seeding(), **sample.sharing()})
    report = CheckReport(tuple(rows), tolerance, f"{op}: rule against autograd")
    if report.passed and finite_differences:
        second = compare(sample.against_differences())
        loose = replace(report, rows=tuple(second), tolerance=1e-4)
        if not loose.passed:
            raise CheckError(
                f"{op}: autograd and rule agree, finite differences do not\n{loose}", loose
            )
    if not report.passed:
        raise CheckError(str(report), report)
    for form in rule.forms(sample.call.node):
        check_rule(
            op, *args, rule=form, tolerance=tolerance, wrt=wrt, seed=seed,
            finite_differences=finite_differences, **kwargs,
        )  # fmt: skip
    return report


class _Sample:
    """One operator call with random cotangents and tangents for every floating-point input."""

    def __init__(
        self, op: Any, args: tuple, kwargs: dict, rule: Rule, wrt: Sequence[int] | None, seed: int
    ) -> None:
        self.rule = rule
        self.generator = torch.Generator().manual_seed(seed)
        tensors: list[Tensor] = []

        def number(item: Any) -> Any:
            if isinstance(item, Tensor):
                tensors.append(item.detach())
                return Ref(len(tensors) - 1)
            return item

        args, kwargs = map_leaves((tuple(args), kwargs), number)
        metas = tuple(Meta(tuple(t.shape), t.dtype, t.device) for t in tensors)
        many = len(op._schema.returns) > 1 or str(op._schema.returns[0].type).startswith("List")
        node = Node(0, "sample", op, args, kwargs, tuple(range(len(tensors))), (0,), many, "sample")
        self.inputs = tensors
        self.call = Call(node, tuple(tensors), metas)
        self.floats = [m.differentiable and (wrt is None or i in wrt) for i, m in enumerate(metas)]
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            out, saved = rule.forward(self.call)
        self.call.saved = saved
        self.outs = tuple(out) if many else (out,)
        self.call.out = out
        self.call.shape = tuple(self.outs[0].shape)
        has_derivative = [o.requires_grad for o in self._stock(self._leaves())]
        self.xi = [
            self._random(o) if has else None
            for o, has in zip(self.outs, has_derivative, strict=True)
        ]
        self.q = [self._random(t) if f else None for t, f in zip(tensors, self.floats, strict=True)]

    def _random(self, like: Tensor) -> Tensor:
        t = torch.randn(like.shape, generator=self.generator, dtype=torch.float64)
        return t.to(like)

    def _pack(self, parts: Sequence[Any]) -> Any:
        return tuple(parts) if self.call.node.many else parts[0]

    def _stock(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        out = self.call.apply(inputs)
        return tuple(out) if self.call.node.many else (out,)

    def _leaves(self) -> list[Tensor]:
        """Copies of the inputs that autograd differentiates."""
        return [t.clone().requires_grad_(f) for t, f in zip(self.inputs, self.floats, strict=True)]

    def _active(self, outs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """(those that have a derivative, their cotangents)."""
        pairs = [(o, x) for o, x in zip(outs, self.xi, strict=True) if x is not None]
        return [o for o, _ in pairs], [x for _, x in pairs]

    def _ours(self) -> tuple[Any, Sequence, Sequence]:
        wanted = tuple(self.floats)
        pulled = self.rule.backward(self.call, self._pack(self.xi), wanted)
        pushed, bent = self.rule.both(self.call, self._pack(self.xi), tuple(self.q), wanted, True)
        return pushed, pulled, bent

    def against_autograd(self) -> dict[str, tuple[Tensor | None, Tensor | None]]:
        """Reverse mode for backward; reverse over reverse for tangent and curvature."""
        with torch.no_grad():
            pushed, pulled, bent = self._ours()
        pushed = pushed if self.call.node.many else (pushed,)
        leaves = self._leaves()
        outs = self._stock(leaves)
        active, xi = self._active(outs)
        seeds = [x.clone().requires_grad_() for x in xi]
        chosen = [t for t, f in zip(leaves, self.floats, strict=True) if f]
        pulls = torch.autograd.grad(active, chosen, seeds, create_graph=True, allow_unused=True)
        total = sum(
            (g * q).sum()
            for g, q in zip(pulls, (q for q in self.q if q is not None), strict=True)
            if g is not None
        )
        seconds: Sequence[Any] = [None] * (len(seeds) + len(chosen))
        if isinstance(total, Tensor) and total.requires_grad:
            seconds = torch.autograd.grad(total, [*seeds, *chosen], allow_unused=True)
        pairs: dict[str, tuple[Any, Any]] = {}
        for i, (a, b) in enumerate(zip(self.outs, outs, strict=True)):
            pairs[f"forward {i}"] = (a, b)
        slots = [i for i, f in enumerate(self.floats) if f]
        for slot, g, s in zip(slots, pulls, seconds[len(seeds) :], strict=True):
            pairs[f"backward {slot}"] = (pulled[slot], g)
            pairs[f"curvature {slot}"] = (bent[slot], s)
        tangents = [p for p, x in zip(pushed, self.xi, strict=True) if x is not None]
        for i, (mine, theirs) in enumerate(zip(tangents, seconds, strict=False)):
            pairs[f"tangent {i}"] = (mine, theirs)
        return pairs

    def declared(self) -> dict[str, tuple[Tensor, Tensor]]:
        """What the rule declares of its structure, on the stock operator."""
        pairs: dict[str, tuple[Tensor, Tensor]] = {}
        if self.rule.same_entries:
            pairs["same entries"] = (self.outs[0].flatten(), self.inputs[0].flatten())
        out = self.outs[0]
        for slot, moves in enumerate(self.floats):
            alone = [i == slot for i in range(len(self.inputs))]
            u = self.inputs[slot].detach().requires_grad_(moves)
            if not moves or not (u.dim() and out.dim() and self.xi[0] is not None):
                continue
            y = self._stock([*self.inputs[:slot], u, *self.inputs[slot + 1 :]])[0]
            if not y.requires_grad:
                continue
            if self.rule.diagonal:
                pairs[f"diagonal {slot}"] = self._apart(y.flatten(), u, u.numel())
            if self.rule.separates(self.call, alone) and u.shape[:1] == y.shape[:1]:
                pairs[f"per example {slot}"] = self._apart(y, u, u.shape[0])
        return pairs

    def curving(self) -> dict[str, tuple[Any, Any]]:
        """∂_i∂_jF, by autograd, where `curves(i, j)` says that there is none."""
        leaves = self._leaves()
        active, xi = self._active(self._stock(leaves))
        slots = [i for i, f in enumerate(self.floats) if f]
        chosen = [leaves[i] for i in slots]
        pulls = torch.autograd.grad(active, chosen, xi, create_graph=True, allow_unused=True)
        pairs: dict[str, tuple[Any, Any]] = {}
        for j, pull in zip(slots, pulls, strict=True):
            q = self.q[j]
            if pull is None or q is None or not pull.requires_grad:
                continue
            along = (pull * q).sum()
            sources = torch.autograd.grad(along, chosen, retain_graph=True, allow_unused=True)
            for i, source in zip(slots, sources, strict=True):
                if source is not None and not self.rule.curves(i, j):
                    pairs[f"curves({i}, {j}) is False, source"] = (
                        torch.zeros_like(source), source
                    )  # fmt: skip
        return pairs

    # ----------------------------------------------------- what the plan and the sweeps trust

    def _lives(self) -> list[list[bool]]:
        """Which inputs are differentiated: all, and each by itself."""
        slots = [i for i, f in enumerate(self.floats) if f]
        alone = [[i == slot for i in range(len(self.floats))] for slot in slots]
        return [list(self.floats), *(alone if len(slots) > 1 else [])]

    def _bare(self, live: Sequence[bool]) -> Call:
        """The call as the sweeps make it: with the values that the rule declares to read, with
        indices and masks, and with nothing else."""
        rule, call = self.rule, self.call
        if rule.reads_inputs is not None:
            reads = rule.reads_inputs(live)
        else:
            reads = ("inputs" in rule.reads,) * len(live)
        inputs = tuple(
            t if read or not m.differentiable else None
            for t, m, read in zip(call.inputs, call.metas, reads, strict=True)
        )
        return replace(call, inputs=inputs, out=call.out if "output" in rule.reads else None)

    def reading(self) -> dict[str, tuple[Any, Any]]:
        """The rule without the values that it does not declare to read, against itself with all."""
        pairs: dict[str, tuple[Any, Any]] = {}
        for live in self._lives():
            whole = self._parts(*self._once(self.call, live))
            try:
                bare = self._parts(*self._once(self._bare(live), live))
            except Exception as error:  # whatever a formula makes of None
                raise CheckError(
                    f"{self.call.node.op}: undeclared read: with the values that the rule declares "
                    f"to read (reads={sorted(self.rule.reads)}, inputs {_named(live)} "
                    f"differentiated) it fails: {error}"
                ) from error
            for name, theirs in whole.items():
                pairs[f"declared reads, {name}, inputs {_named(live)}"] = (bare[name], theirs)
        return pairs

    def sharing(self) -> dict[str, tuple[Any, Any]]:
        """Tangent, sources and cotangents in one, and a backward that adds to what is there,
        against the same apart."""
        rule, call, xi, pairs = self.rule, self.call, self._pack(self.xi), {}
        for live in self._lives():
            q = tuple(t if on else None for t, on in zip(self.q, live, strict=True))
            apart = self._once(call, live)
            with torch.no_grad():
                found = rule.at_once(call, xi, q, live, True, live) if rule.at_once else None
                if found is not None:
                    pushed, bent, pulled = found
                    own = self._parts(pulled, pushed, bent)
                    pairs |= {
                        f"at once, {name}, inputs {_named(live)}": (own[name], part)
                        for name, part in self._parts(*apart).items()
                        if own[name] is not None or not name.startswith("backward")
                    }
                there = self._like(self.inputs[0]) if live[0] else None
                if rule.onto is not None and there is not None:
                    total = rule.onto(call, xi, live, there)
                    if total is not None:
                        whole = (apart[0][0] + there, *apart[0][1:])
                        for i, pair in enumerate(zip(total, whole, strict=True)):
                            pairs[f"onto, backward {i}, inputs {_named(live)}"] = pair
        return pairs

    def seeding(self, seeds: int = 2) -> dict[str, tuple[Any, Any]]:
        """Many seeds at once against one after another."""
        if self.rule.seeded is None:
            return {}
        xi = [self.xi, *([self._like(x) for x in self.xi] for _ in range(seeds - 1))]
        q = [self.q, *([self._like(t) for t in self.q] for _ in range(seeds - 1))]
        pairs: dict[str, tuple[Any, Any]] = {}
        for live in self._lives():
            call = self._bare(live)
            own = [
                [t if on else None for t, on in zip(tangents, live, strict=True)] for tangents in q
            ]
            packed, moved = self._pack(_stack(xi)), tuple(_stack(own))
            both = []
            for way in (LOOP, self.rule.seeded):
                try:
                    with torch.no_grad():
                        pulled = way.backward(self.rule, call, packed, live, seeds)
                        pushed, bent = way.both(self.rule, call, packed, moved, live, True, seeds)
                except Exception as error:  # whatever shapes that do not fit make of it
                    raise CheckError(
                        f"{call.node.op}: {seeds} seeds with inputs {_named(live)} differentiated: "
                        f"seeded={way.name!r} fails: {error}"
                    ) from error
                both.append(self._parts(pulled, pushed, bent))
            for name, theirs in both[0].items():
                pairs[f"seeded, {name}, inputs {_named(live)}"] = (both[1][name], theirs)
        return pairs

    def _like(self, t: Tensor | None) -> Tensor | None:
        return None if t is None else self._random(t)

    def _once(self, call: Call, live: Sequence[bool]) -> tuple[Sequence, Any, Sequence]:
        """backward, tangent and curvature where these inputs alone are differentiated."""
        q = tuple(t if on else None for t, on in zip(self.q, live, strict=True))
        xi = self._pack(self.xi)
        with torch.no_grad():
            pulled = self.rule.backward(call, xi, live)
            apart = replace(self.rule, at_once=None)
            pushed, bent = apart.both(call, xi, q, live, True)
        return pulled, pushed, bent

    def _parts(self, pulled: Sequence, pushed: Any, bent: Sequence) -> dict[str, Any]:
        """By name; None where a part is zero."""
        outs = pushed if self.call.node.many and pushed is not None else (pushed,)
        named = {f"backward {i}": g for i, g in enumerate(pulled)}
        named |= {f"tangent {i}": t for i, t in enumerate(outs)}
        return named | {f"curvature {i}": s for i, s in enumerate(bent)}

    def _apart(self, y: Tensor, u: Tensor, parts: int) -> tuple[Tensor, Tensor]:
        """(derivatives of the first and the last part of y in the other parts of u, zero)."""
        (first,) = torch.autograd.grad(y[:1].sum(), u, retain_graph=True)
        (last,) = torch.autograd.grad(y[-1:].sum(), u, retain_graph=True)
        rest = torch.cat([first.reshape(parts, -1)[1:], last.reshape(parts, -1)[:-1]])
        return rest, torch.zeros_like(rest)

    def against_differences(self, step: float = 1e-5) -> dict[str, tuple[Any, Any]]:
        """Central differences along q: of F for the tangent, of autograd's *first* derivative
        for the curvature, s_u = d/dt ∇_u⟨ξ, F(u + tq)⟩."""
        with torch.no_grad():
            pushed, _, bent = self._ours()
        pushed = pushed if self.call.node.many else (pushed,)
        (ahead, slope_ahead), (behind, slope_behind) = self._at(step), self._at(-step)
        pairs: dict[str, tuple[Any, Any]] = {}
        for i, x in enumerate(self.xi):
            if x is not None:
                pairs[f"tangent {i}"] = (pushed[i], (ahead[i] - behind[i]) / (2 * step))
        for i, (g, h) in enumerate(zip(slope_ahead, slope_behind, strict=True)):
            if g is not None and h is not None:
                pairs[f"curvature {i}"] = (bent[i], (g - h) / (2 * step))
        scale = sum(float(x.norm()) for x in self.xi if x is not None)
        pairs["scale"] = (torch.tensor(scale), torch.tensor(scale))
        return pairs

    def _at(self, t: float) -> tuple[tuple[Tensor, ...], list[Tensor | None]]:
        """F(u + tq), and ∇⟨ξ, F⟩ there."""
        moved = [
            u if q is None else (u + t * q).requires_grad_()
            for u, q in zip(self.inputs, self.q, strict=True)
        ]
        outs = self._stock(moved)
        active, xi = self._active(outs)
        chosen = [u for u, q in zip(moved, self.q, strict=True) if q is not None]
        derivatives = iter(torch.autograd.grad(active, chosen, xi, allow_unused=True))
        slopes = [None if q is None else next(derivatives) for q in self.q]
        return tuple(o.detach() for o in outs), slopes


def _named(live: Sequence[bool]) -> str:
    return " and ".join(str(i) for i, on in enumerate(live) if on)


def _stack(rows: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """One tensor per column with the rows along a new first axis, None where a column is."""
    return [
        None if column[0] is None else torch.stack([t for t in column if t is not None])
        for column in zip(*rows, strict=True)
    ]


# --------------------------------------------------------------------------------------- adjoints


@dataclass(frozen=True)
class _Form:
    """An operator as a function of several tensors, linear (or affine) in each of them.

    adjoint(k, u, y): the adjoint in argument k, taken at u.
    """

    names: list[str]
    labels: list[str]  # of the adjoints
    spaces: list[Space]
    values: list[Tensor]
    forward: Callable[[Sequence[Tensor]], Tensor]
    adjoint: Callable[[int, Sequence[Tensor], Tensor], Tensor]
    codomain: Space
    pairs: list[tuple[int, int]]  # arguments between which adjoints commute


def check_adjoint(
    op: Operator, *arguments: Any, tolerance: float = TOLERANCE, seed: int = 0
) -> CheckReport:
    """Test ⟨K(θ, x), y⟩ = ⟨x, Kᵀ(θ, y)⟩ = ⟨θ, K□(x, y)⟩ in the operator's spaces.

    Tested besides: that K, Kᵀ and K□ are linear in each argument, and that adjoints commute,
    (Kᵀ)□ = K□ and (K□)ᵀ = Kᵀ. Every comparison takes whole steps between random float64 elements:
    linear maps have no truncation error, so what is left is rounding.

    arguments: (θ, x), or the operands of a `Multilinear`; only their shapes are read. Left out,
    the operator's own small sample. Returns a report; raises `CheckError` with both values of
    each identity that fails.

    >>> import torch, doubleback as db
    >>> K = db.operators.Convolution((2,), (1,), (1,))
    >>> db.check_adjoint(K, torch.empty(4, 3, 5), torch.empty(2, 3, 16)).worst < 1e-12
    True
    """
    if not isinstance(op, Operator):
        raise InputError(f"check_adjoint takes an operator, not {type(op).__name__}")
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        given = arguments or op.sample()

    def random(shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)

    given = pytree.tree_map_only(Tensor, lambda t: random(t.shape), tuple(given))
    form = _multilinear(op, given) if isinstance(op, Multilinear) else _bilinear(op, given)
    with torch.no_grad():
        rows = [*_identities(form, random), *_linearity(form, random)]
    rows += _commutativity(form, random)
    report = CheckReport(tuple(rows), tolerance, f"{op}: adjoints by their definition")
    if not report.passed:
        values = "\n".join(
            f"  {row.name}: {row.ours!r} against {row.oracle!r}"
            for row in rows
            if row.error > tolerance
        )
        raise CheckError(f"{op}: wrong\n{values}\n{report}", report)
    return report


def _multilinear(op: Multilinear, given: tuple) -> _Form:
    count = len(given)
    return _Form(
        [f"u{i}" for i in range(count)],
        [f"K*{i}" for i in range(count)],
        list(op.arguments),
        list(given),
        lambda u: op.forward(*u),
        op.adjoint,
        op.codomain,
        [(i, j) for i in range(count) for j in range(count) if i != j],
    )


def _bilinear(op: Operator, given: tuple) -> _Form:
    """θ may be a tree of tensors, one per operator of a composition; x comes last."""
    if len(given) != 2 or not isinstance(given[1], Tensor):
        raise InputError(f"check_adjoint({op}) takes θ and x, not {len(given)} arguments")
    weight, x = given
    leaves, spec = pytree.tree_flatten(weight)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    last = len(places)

    def tree(u: Sequence[Tensor]) -> Any:
        filled = list(leaves)
        for place, value in zip(places, u, strict=False):
            filled[place] = value
        return pytree.tree_unflatten(filled, spec)

    def adjoint(k: int, u: Sequence[Tensor], y: Tensor) -> Tensor:
        if k == last:
            return op.transpose(tree(u), y, tuple(u[last].shape))
        in_weight = op.weight_adjoint(u[last], y, tree(u))
        return pytree.tree_leaves(in_weight)[places[k]]

    spaces = [_leaf_spaces(op.parameters, weight)[i] for i in places]
    return _Form(
        [*(f"θ{i}" if last > 1 else "θ" for i in range(last)), "x"],
        [*(f"K□{i}" if last > 1 else "K□" for i in range(last)), "Kᵀ"],
        [*spaces, op.domain],
        [*(leaves[i] for i in places), x],
        lambda u: op.forward(tree(u), u[last]),
        adjoint,
        op.codomain,
        [pair for i in range(last) for pair in ((last, i), (i, last))],
    )


def _leaf_spaces(space: Space, weight: Any) -> list[Space]:
    """One space per leaf of θ."""
    if isinstance(weight, (tuple, list)) and isinstance(space, Product):
        pairs = zip(space.spaces, weight, strict=True)
        return [leaf for part, w in pairs for leaf in _leaf_spaces(part, w)]
    return [space] * len(pytree.tree_leaves(weight))


# ------------------------------------------------------------------------------ identities


def _row(name: str, ours: Tensor, oracle: Tensor, scale: float) -> Row:
    """A comparison of two numbers, relative to the size that their terms have."""
    a, b = float(ours), float(oracle)
    error = abs(a - b) / max(scale, 1e-300)
    return Row(name, error if error == error else float("inf"), a, b)


def _near(name: str, ours: Tensor, oracle: Tensor) -> Row:
    """A comparison of two tensors; both values are their norms."""
    if ours.shape != oracle.shape:
        return Row(name, float("inf"), float(ours.norm()), float(oracle.norm()))
    size = float(oracle.norm())
    error = float((ours - oracle).norm()) / max(size, 1e-300)
    return Row(name, error if error == error else float("inf"), float(ours.norm()), size)


def _moved(u: Sequence[Tensor], k: int, step: Tensor) -> list[Tensor]:
    return [*u[:k], u[k] + step, *u[k + 1 :]]


def _identities(form: _Form, random: Callable) -> list[Row]:
    """⟨K(u + δₖ) − K(u), y⟩ = ⟨δ, K*ₖ(u, y)⟩ for each argument k.

    With δ = uₖ where K is linear in uₖ, this is ⟨K(u), y⟩ = ⟨uₖ, K*ₖ(u, y)⟩.
    """
    rows, u = [], form.values
    here = form.forward(u)
    y = random(here.shape)
    for k, (name, space) in enumerate(zip(form.names, form.spaces, strict=True)):
        affine = len(form.values) > 2 and k < len(u) - 1  # a sum is affine in each of its weights
        step = random(u[k].shape) if affine else u[k]
        change = form.forward(_moved(u, k, step)) - here
        adjoint = form.adjoint(k, u, y)
        if adjoint.shape != u[k].shape:
            raise CheckError(
                f"{form.labels[k]} has shape {tuple(adjoint.shape)}, {name} has shape "
                f"{tuple(u[k].shape)}"
            )
        left = form.codomain.inner(change, y, batch_dims=0)
        right = space.inner(step, adjoint, batch_dims=0)
        scale = form.codomain.norm(change, 0) * form.codomain.norm(y, 0)
        rows.append(_row(f"⟨K, y⟩ = ⟨{name}, {form.labels[k]}⟩", right, left, float(scale)))
    return rows


def _linearity(form: _Form, random: Callable) -> list[Row]:
    """f(a u + (1 − a) v) = a f(u) + (1 − a) f(v) for K and each adjoint, in each argument; K
    vanishes with x and with all weights."""
    rows, u, a = [], form.values, 3.0
    y = random(form.forward(u).shape)
    functions: list[tuple[str, Callable]] = [("K", form.forward)]
    functions += [
        (label, lambda at, k=k: form.adjoint(k, at, y)) for k, label in enumerate(form.labels)
    ]
    for f_name, f in functions:
        for k, name in enumerate(form.names):
            v = [*u[:k], random(u[k].shape), *u[k + 1 :]]
            mixed = [*u[:k], a * u[k] + (1 - a) * v[k], *u[k + 1 :]]
            rows.append(_near(f"{f_name} linear in {name}", f(mixed), a * f(u) + (1 - a) * f(v)))
    none = [torch.zeros_like(t) for t in u]
    size = float(form.forward(u).norm())
    zeros = {"K(θ, 0) = 0": [*u[:-1], none[-1]]}
    if len(u) > 1:
        zeros["K(0, x) = 0"] = [*none[:-1], u[-1]]
    for name, at in zeros.items():
        rows.append(_row(name, form.forward(at).norm(), torch.zeros(()), size))
    for k, label in enumerate(form.labels):
        z = random(y.shape)
        both = form.adjoint(k, u, a * y + 2 * z)
        apart = a * form.adjoint(k, u, y) + 2 * form.adjoint(k, u, z)
        rows.append(_near(f"{label} linear in y", both, apart))
    return rows


def _commutativity(form: _Form, random: Callable) -> list[Row]:
    """Only the last argument in which an adjoint is taken matters: the adjoint in uⱼ of
    uⱼ ↦ K*ᵢ(u, y), applied to w, is K*ⱼ with w in place of uᵢ.

    The left side by reverse mode where autograd reaches through the operator; by its pairing with
    a random step otherwise. The right side as a difference, which also a sum, affine in each
    weight, satisfies.
    """
    rows, u = [], form.values
    y = random(form.forward(u).shape)
    for i, j in form.pairs:
        w, step = random(u[i].shape), random(u[j].shape)
        name = f"({form.labels[i]}){form.labels[j].removeprefix('K')} = {form.labels[j]}"
        with torch.no_grad():
            right = form.adjoint(j, _moved(u, i, w), y) - form.adjoint(j, u, y)
        with torch.enable_grad():
            leaf = u[j].clone().requires_grad_()
            pulled = form.adjoint(i, [*u[:j], leaf, *u[j + 1 :]], y)
        if pulled.requires_grad:
            weighted = form.spaces[i].riesz_inverse(w)
            (left,) = torch.autograd.grad(pulled, leaf, weighted)
            rows.append(_near(name, form.spaces[j].riesz(left), right))
            continue
        with torch.no_grad():
            change = form.adjoint(i, _moved(u, j, step), y) - form.adjoint(i, u, y)
            left = form.spaces[i].inner(change, w, batch_dims=0)
            paired = form.spaces[j].inner(step, right, batch_dims=0)
            scale = form.spaces[i].norm(change, 0) * form.spaces[i].norm(w, 0)
            rows.append(_row(name, left, paired, float(scale)))
    return rows
