"""Quantities along a followed path as piecewise polynomials: outputs, gradients, penalties.

On each piece a quantity is sampled at Chebyshev–Lobatto nodes, both ends included, with the pattern
of the piece held fixed. Where its degree is known the polynomial through the samples *is* the
quantity (`exact`); otherwise it is an interpolant, of degree eight where pieces are few and long
and of degree two where they are many and short, and exact at both ends, so that jump heights are
exact in any case.

They come from values and derivatives *on* a piece: one-sided limits, with the pattern of the piece
held fixed.

At a place s of a row three numbers travel forward per value: u at the middle of the row (it fixes
masks and winners), u at s, and ∂ₛu. Two travel back per cotangent, ξ and ∂ₛξ:

    linear     ξ_u = Aᵀξ                       ∂ξ_u = Aᵀ∂ξ
    product    ξ_u = Bᵀ(w, ξ)                  ∂ξ_u = Bᵀ(w, ∂ξ) + Bᵀ(∂w, ξ)
    kink       ξ_u = T*ξ, T of the middle      ∂ξ_u = T*∂ξ

So J*v and ∂ₛ(J*v) are exact up to the very ends of a piece, where autograd would see a tie.

And how rough a curve is, and what that means for training: jumps and smooth variation of a batch
mean, how they scale, and one paragraph for someone who trains with this penalty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..graph import Node
from ..penalties import Penalty, SquaredNorm
from ..rules import Call, Rule
from .network import (
    Motion,
    Network,
    factors,
    leaky,
    mapped,
    partner,
    passes_through,
    run_fixed,
    run_rows,
)
from .paths import Path, follow, moving_leaves
from .pieces import horner, propagate

# -------------------------------------------------------------- values and derivatives on a piece


@dataclass(frozen=True)
class Jet:
    """Values of one node's output on rows; `slope` None: it does not move."""

    mid: Tensor
    at: Tensor
    slope: Tensor | None


@dataclass(frozen=True)
class Shared:
    """A parameter along the path: coefficients in s, the same for every row."""

    coefficients: tuple[Tensor, ...]


class Jets:
    """Forward jets of rows of a path; `pull` gives J*v and its derivative.

    example: (N,) which example; mid, at: (N,) normalised coordinates; moving: leaves of the whole
    batch as (constant, slope).
    """

    def __init__(
        self,
        network: Network,
        motion: Motion,
        x: Tensor,
        moving: Mapping[int, tuple[Tensor, Tensor]],
        example: Tensor,
        mid: Tensor,
        at: Tensor,
    ) -> None:
        self.network, self.motion, self.mid, self.at = network, motion, mid, at
        self.values: dict[int, Jet | Shared] = {}
        fixed = run_fixed(network, {**moving, network.x: None})
        self.values.update({v: Shared((t,)) for v, t in fixed.items()})
        plain = dict(fixed)
        for v, (base, slope) in moving.items():
            if v != network.x:
                self.values[v] = Shared((base, slope))
                continue
            base, slope = base[example].unsqueeze(1), slope[example].unsqueeze(1)
            self.values[v] = Jet(
                base + _lay(mid, base) * slope, base + _lay(at, base) * slope, slope
            )
        # what does not move is computed once per example, then handed to its rows
        few, place = example.unique(return_inverse=True)
        if network.x not in moving:
            plain[network.x] = x[few].unsqueeze(1)
            self.values[network.x] = _still(plain[network.x], place)
        for node in network.nodes:
            if motion.moves(node):
                self._forward(node)
            elif node.outputs[0] in network.active:
                run_rows(network, node, plain)
                for v in node.outputs:
                    self.values[v] = _still(plain[v], place)

    @property
    def out(self) -> tuple[Tensor, Tensor]:
        """z and ∂ₛz, (N, …)."""
        jet = self.values[self.network.out]
        assert isinstance(jet, Jet)
        slope = torch.zeros_like(jet.at) if jet.slope is None else jet.slope
        return jet.at.squeeze(1), slope.squeeze(1)

    # -------------------------------------------------------------------------- forward

    def _forward(self, node: Node) -> None:
        inputs = [self.values[v] for v in node.inputs]
        if all(isinstance(i, Shared) for i in inputs) and node.index not in self.motion.kinks:
            self._shared(node, inputs)  # type: ignore[arg-type]
            return
        rule = self.network.rules[node.index]
        if node.index in self.motion.kinks:
            fn, inputs = self._kink, [self._spread(i) for i in inputs]
        elif factors(rule, node) is not None:
            fn = self._product
        else:
            fn, inputs = self._linear, [self._spread(i) for i in inputs]
        rows, shared = _apart(inputs)

        def one(rows: Any, shared: Any) -> list:
            return fn(node, _together(rows[0], shared), rows[1])

        jets = mapped(one, [rows, [self.at, self.mid]], shared)
        for v, jet in zip(node.outputs, jets, strict=True):
            if jet is not None:
                self.values[v] = Jet(*jet)

    def _shared(self, node: Node, inputs: Sequence[Shared]) -> None:
        outputs = propagate(self.network, node, [i.coefficients for i in inputs])
        for v, coefficients in zip(node.outputs, outputs, strict=True):
            self.values[v] = Shared(tuple(coefficients))

    def _spread(self, value: Jet | Shared) -> Jet | Shared:
        """A moving parameter that is added, or bends, as one value per row."""
        if isinstance(value, Jet) or len(value.coefficients) == 1:
            return value
        c = value.coefficients
        derivative = [k * part for k, part in enumerate(c)][1:]
        mid, at, slope = (
            horner(part, _lay(s, c[0][None])) for part, s in
            ((c, self.mid), (c, self.at), (derivative, self.at))
        )  # fmt: skip
        return Jet(mid, at, slope.expand_as(at))

    def _linear(self, node: Node, inputs: Sequence, _: Any) -> list:
        if passes_through(node):
            return [inputs[0]]
        network, rule = self.network, self.network.rules[node.index]
        mid = network.forward(node, [i[0] for i in inputs]).out
        call = network.forward(node, [i[1] for i in inputs])
        slope = rule.tangent(call, [i[2] for i in inputs])
        return _zip(node, mid, call.out, slope)

    def _kink(self, node: Node, inputs: Sequence, _: Any) -> list:
        rule = self.network.rules[node.index]
        call = self.network.forward(node, [i[0] for i in inputs])
        offset = rule.tangent(call, [i[1] - i[0] for i in inputs])
        slope = rule.tangent(call, [i[2] for i in inputs])
        first = (call.out, offset, slope)
        mid, shift, slope = ((f[0] if node.many else f) for f in first)
        return [[mid, mid + shift, slope], *[None] * (len(node.outputs) - 1)]

    def _product(self, node: Node, inputs: Sequence, places: Sequence[Tensor]) -> list:
        """B(u, w) + c with parameters as polynomials: Σ_k s^k B(u, w_k)."""
        rule = self.network.rules[node.index]
        at, mid = places

        def value(channel: int, s: Tensor) -> Tensor:
            return self._combine(node, rule, inputs, [(channel, channel, 0)], s)

        slope = self._combine(node, rule, inputs, [(2, 1, 0), (1, 2, 1)], at)
        if slope is not None:  # the tangent of a bias may be smaller than the output
            slope = slope.expand(self.network.graph.shape(node.outputs[0]))
        return [[value(0, mid), value(1, at), slope]]

    def _combine(self, node: Node, rule: Any, inputs: Sequence, terms: Sequence, s: Tensor) -> Any:
        """Σ over (channel of u, channel of w, derivative of w's polynomial) of B(u, w)."""
        pair = factors(rule, node)
        assert pair is not None
        i, j = pair
        total = None
        for first, second, order in terms:
            u_parts = _weighted(inputs[i], first, int(first == 2), s)
            w_parts = _weighted(inputs[j], second, order, s)
            for factor_u, u in u_parts:
                for factor_w, w in w_parts:
                    others: list = [_any(part) for part in inputs]
                    others[j] = w
                    along: list = [None] * len(inputs)
                    along[i] = u
                    term = rule.tangent(self.network.call(node, others), along)
                    total = _plus(total, _times(_times(term, factor_u), factor_w))
        channel = 2 if len(terms) > 1 else terms[0][0]
        for slot, part in enumerate(inputs):
            if slot in (i, j):
                continue
            for factor, c in _weighted(part, channel, int(channel == 2), s):
                along = [None] * len(inputs)
                along[slot] = c if factor is None else c * factor
                call = self.network.call(node, [_any(p) for p in inputs])
                total = _plus(total, rule.tangent(call, along))
        return total

    # ------------------------------------------------------------------------- backward

    def pull(self, v: Tensor, dv: Tensor | None) -> tuple[Tensor, Tensor]:
        """J*v and ∂ₛ(J*v) for a seed of the output's shape and its derivative, (N, …)."""
        network = self.network
        xi: dict[int, list] = {
            network.out: [v.unsqueeze(1), None if dv is None else dv.unsqueeze(1)]
        }
        for node in reversed(network.nodes):
            parts = [xi.pop(o, None) for o in node.outputs]
            if not any(part is not None for part in parts) or passes_through(node):
                continue
            wanted = [o in network.active for o in node.inputs]
            if not any(wanted):
                continue
            rows, shared = _apart([self.values[o] for o in node.inputs])

            def one(rows: Any, shared: Any, node: Node = node, wanted: list = wanted) -> list:
                return self._backward(node, _together(rows[0], shared), rows[1], rows[2], wanted)

            pulled = mapped(one, [rows, parts, self.at], shared)
            for value, pair, want in zip(node.inputs, pulled, wanted, strict=True):
                if want and pair is not None:
                    old = xi.get(value, [None, None])
                    xi[value] = [_plus(a, b) for a, b in zip(old, pair, strict=True)]
        pulled = xi.get(network.x)
        like = self.values[network.x]
        assert isinstance(like, Jet)
        zero = torch.zeros_like(like.at)
        pair = [zero if part is None else part for part in (pulled or [None, None])]
        return pair[0].squeeze(1), pair[1].squeeze(1)

    def _backward(self, node: Node, inputs: Sequence, parts: list, s: Tensor, wanted: list) -> list:
        rule, network = self.network.rules[node.index], self.network
        values, slopes = (
            _gather(node, [None if p is None else p[k] for p in parts]) for k in (0, 1)
        )
        if factors(rule, node) is not None:
            return self._product_backward(node, inputs, values, slopes, s, wanted)
        pull: Callable[[Any], Sequence]
        if node.index in self.motion.kinks:
            call = network.forward(node, [_any(i, 0) for i in inputs])
            pull = partial(_pull, rule, call, wanted)
        else:
            pull = _vjp(network, node, [_any(i) for i in inputs], wanted)
        columns = [[None] * len(inputs) if y is None else pull(y) for y in (values, slopes)]
        return [list(pair) for pair in zip(*columns, strict=True)]

    def _product_backward(
        self, node: Node, inputs: Sequence, xi: Any, dxi: Any, s: Tensor, wanted: list
    ) -> list:
        rule = self.network.rules[node.index]
        pairs: list = []
        for slot, want in enumerate(wanted):
            other = partner(rule, node, slot)
            if not want:
                pairs.append(None)
                continue
            only = [i == slot for i in range(len(wanted))]

            def adjoint(y: Any, channel: int, order: int, slot=slot, other=other, only=only) -> Any:
                """Bᵀ(w, y), or Bᵀ(∂w, y) for order 1."""
                total = None
                parts = [(None, None)] if other is None else _weighted(
                    inputs[other], channel, order, s
                )  # fmt: skip
                for factor, w in parts if y is not None else ():
                    others: list = [_any(part) for part in inputs]
                    if other is not None:
                        others[other] = w
                    grad = rule.backward(self.network.call(node, others), y, only)[slot]
                    total = _plus(total, _times(grad, factor))
                return total

            turned = adjoint(xi, 2, 1) if other is not None else None
            pairs.append([adjoint(xi, 1, 0), _plus(adjoint(dxi, 1, 0), turned)])
        return pairs


# ------------------------------------------------------------------------------- helpers


def _still(value: Tensor, place: Tensor) -> Jet:
    rows = value.index_select(0, place)
    return Jet(rows, rows, None)


def _lay(s: Tensor, like: Tensor) -> Tensor:
    return s.reshape(-1, *(1,) * (like.dim() - 1))


def _apart(values: Sequence[Jet | Shared | None]) -> tuple[list, list]:
    """Jets as rows (lists of three), shared parameters as tuples of coefficients."""
    rows = [[v.mid, v.at, v.slope] if isinstance(v, Jet) else None for v in values]
    shared = [v.coefficients if isinstance(v, Shared) else None for v in values]
    return rows, shared


def _together(rows: Sequence, shared: Sequence) -> list:
    """Per input [mid, at, slope]; a parameter that does not move is the same in all places; one
    that moves stays a tuple of coefficients."""
    together = []
    for row, coefficients in zip(rows, shared, strict=True):
        if row is not None or coefficients is None:
            together.append(row)
        elif len(coefficients) == 1:
            together.append([coefficients[0], coefficients[0], None])
        else:
            together.append(tuple(coefficients))
    return together


def _any(part: Any, channel: int = 1) -> Tensor:
    return part[0] if isinstance(part, tuple) else part[channel]


def _weighted(part: Any, channel: int, order: int, s: Tensor) -> list[tuple[Any, Tensor]]:
    """A factor of a product as Σ factor · tensor: one term of a jet, or the powers of s."""
    if not isinstance(part, tuple):
        return [] if part[channel] is None else [(None, part[channel])]
    if order == 0:
        return [(None if k == 0 else s**k, c) for k, c in enumerate(part)]
    return [(None if k == 1 else k * s ** (k - 1), c) for k, c in enumerate(part) if k > 0]


def _plus(a: Any, b: Any) -> Any:
    if a is None:
        return b
    return a if b is None else a + b


def _times(term: Any, factor: Any) -> Any:
    return term if factor is None or term is None else term * factor


def _zip(node: Node, mid: Any, at: Any, slope: Any) -> list:
    if not node.many:
        return [[mid, at, slope]]
    slopes = [None] * len(node.outputs) if slope is None else slope
    return [[a, b, c] for a, b, c in zip(mid, at, slopes, strict=True)]


def _pull(rule: Rule, call: Call, wanted: Sequence[bool], y: Any) -> Sequence:
    return rule.backward(call, y, wanted)


def _vjp(
    network: Network, node: Node, inputs: Sequence[Tensor], wanted: Sequence[bool]
) -> Callable[[Any], list]:
    """(∂F)* of a node that is linear, or does not move, by a transform that `vmap` can enter."""
    slots = [i for i, want in enumerate(wanted) if want]

    def run(*parts: Tensor) -> tuple:
        whole = list(inputs)
        for slot, part in zip(slots, parts, strict=True):
            whole[slot] = part
        out = network.call(node, whole).apply(whole)
        return tuple(out) if node.many else (out,)

    outs, pull = torch.func.vjp(run, *(inputs[i] for i in slots))[:2]

    def pulled(y: Any) -> list:
        parts = y if node.many else (y,)
        filled = tuple(
            torch.zeros_like(out) if part is None else part
            for out, part in zip(outs, parts, strict=True)
        )
        grads, by_slot = pull(filled), [None] * len(inputs)
        for slot, grad in zip(slots, grads, strict=True):
            by_slot[slot] = grad
        return by_slot

    return pulled


def _gather(node: Node, parts: list) -> Any:
    """The cotangent as the node's rule wants it, None where all of it is zero."""
    if all(part is None for part in parts):
        return None
    return tuple(parts) if node.many else parts[0]


# ----------------------------------------------------------------------------------------- curves


SMOOTH = ((16, 8), (64, 4), (math.inf, 2))  # up to so many pieces per example, this degree
HIGHEST = 16  # degree up to which a polynomial is recovered from its samples
BUDGET = 2**22  # numbers in the widest value of one chunk of samples


@dataclass(frozen=True, eq=False)
class Jumps:
    """Differences of one-sided limits, one per breakpoint: example (J,), t (J,), height (J,);
    `piece` is the piece to the left."""

    example: Tensor
    t: Tensor
    height: Tensor
    piece: Tensor

    def __len__(self) -> int:
        return len(self.t)

    @property
    def largest(self) -> float:
        return float(self.height.abs().max()) if len(self) else 0.0


@dataclass(frozen=True, eq=False)
class Piecewise:
    """A polynomial per piece: coefficients (P, K) in u ∈ [−1, 1], which runs along the piece."""

    path: Path
    coefficients: Tensor
    exact: bool

    def __call__(self, t: Tensor, example: int | Tensor = 0) -> Tensor:
        """The value at each t, for one example or for one example per t."""
        t = torch.as_tensor(t, dtype=torch.float64)
        which = torch.as_tensor(example).expand(t.shape)
        return self.on(self.path.find(which, t), t)

    def on(self, piece: Tensor, t: Tensor) -> Tensor:
        """The value at t of a given piece's polynomial."""
        start, end = self.path.start[piece], self.path.end[piece]
        u = (2 * t - start - end) / (end - start)
        return horner(self.coefficients[piece].unbind(-1), u)

    @property
    def ends(self) -> tuple[Tensor, Tensor]:
        """Limits at both ends of every piece."""
        signs = (-1.0) ** torch.arange(self.coefficients.shape[1], dtype=torch.float64)
        return self.coefficients @ signs, self.coefficients.sum(1)

    def jumps(self) -> Jumps:
        """Height of every jump, right limit minus left limit."""
        left, right = self.ends
        path = self.path
        piece = (path.example[1:] == path.example[:-1]).nonzero().squeeze(1)
        height = left[piece + 1] - right[piece]
        return Jumps(path.example[piece], path.end[piece], height, piece)

    def table(self, t: Tensor) -> Tensor:
        """Every example at each t: (M, T)."""
        parts = []
        for chunk in torch.arange(self.path.examples).split(max(1, BUDGET // max(len(t), 1))):
            values = self(t.repeat(len(chunk)), chunk.repeat_interleave(len(t)))
            parts.append(values.reshape(len(chunk), -1))
        return torch.cat(parts)

    def mean(self, t: Tensor) -> Tensor:
        """The average over the batch at each t."""
        return self.table(t).mean(0)


@dataclass(frozen=True, eq=False)
class Curve:
    """A quantity and its derivative along the path; `again(other)` is the same quantity along
    another path of the same examples."""

    name: str
    value: Piecewise
    slope: Piecewise
    again: Callable[[Path], Curve]


def output(path: Path, index: int | tuple[int, ...] = 0) -> Curve:
    """One entry of the network's output."""
    place = _index(path, index)

    def sample(jets: Jets, example: Tensor) -> tuple[Tensor, Tensor]:
        z, dz = jets.out
        return z[(slice(None), *place)], dz[(slice(None), *place)]

    degree = path.motion.degree.get(path.network.out, 0)
    return _curve(path, f"output {index}", sample, degree, lambda other: output(other, index))


def gradient(
    path: Path, index: int | tuple[int, ...] = 0, direction: Tensor | None = None
) -> Curve:
    """The derivative of one output entry in the input: ⟨∇ₓ out⟨index⟩, d⟩.

    direction: of one example's shape; may be left out where an example is a single number.
    """
    place = _index(path, index)
    if direction is None:
        if path.x[0].numel() != 1:
            raise InputError(
                f"an example has shape {tuple(path.x.shape[1:])}: choose a direction of that shape"
            )
        direction = torch.ones_like(path.x[0])
    if direction.shape != path.x.shape[1:]:
        raise InputError(
            f"the direction has shape {tuple(direction.shape)}, an example "
            f"{tuple(path.x.shape[1:])}"
        )
    along = direction.detach().double().flatten()

    def sample(jets: Jets, example: Tensor) -> tuple[Tensor, Tensor]:
        z, _ = jets.out
        v = torch.zeros_like(z)
        v[(slice(None), *place)] = 1.0
        xi, dxi = jets.pull(v, None)
        return xi.flatten(1) @ along, dxi.flatten(1) @ along

    def again(other: Path) -> Curve:
        return gradient(other, index, direction)

    return _curve(path, f"gradient of output {index}", sample, path.motion.slope, again)


def penalty(path: Path, of: Penalty, *extra: Tensor) -> Curve:
    """R(t) = p(J*v) of every example and its derivative along the path.

    of: `OutputGradient`, `LossGradient`, an exact `Jacobian`, or any whose v does not depend on
    the output; extra: labels or targets of the whole batch, as in `Penalised`. Squared norms of a
    linear output's gradients and of the squared error's are polynomials on each piece (`exact`).

    >>> from torch import nn
    >>> import doubleback as db
    >>> net = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1))
    >>> path = db.landscape.follow(net, torch.randn(8, 1), "0.bias[2]")
    >>> float(db.landscape.penalty(path, db.OutputGradient()).slope.coefficients.abs().max())
    0.0
    """
    _refuse_unknown(of)
    shape = (path.examples, *path.network.graph.shape(path.network.out)[1:])
    of.check(shape, [path.x], *extra)
    extra = tuple(e.double() if e.is_floating_point() else e for e in extra)

    def sample(jets: Jets, example: Tensor) -> tuple[Tensor, Tensor]:
        z, dz = jets.out
        own = tuple(e[example] for e in extra)
        total = (0.0, 0.0)
        for v, dv in of.seeds_along(z, dz, *own):
            xi, dxi = jets.pull(v, dv)
            value, (q,) = of.measure([xi], *own)
            total = total[0] + value, total[1] + (q * dxi).flatten(1).sum(1)
        return total  # type: ignore[return-value]

    def again(other: Path) -> Curve:
        return penalty(other, of, *extra)

    return _curve(path, repr(of), sample, _degree(path, of), again)


def _refuse_unknown(of: Penalty) -> None:
    """A landscape is a function of weights and inputs: nothing drawn at random, no iteration."""
    takes = (
        "a landscape takes OutputGradient, LossGradient or an exact Jacobian (without projections)"
    )
    if of.chance is not None:
        raise InputError(f"{of.chance}; {takes}")
    if of.varying and not of.symmetric:
        raise InputError(
            f"{type(of).__name__} has a v that depends on the output in a way that is not known "
            f"here; {takes}"
        )


def _degree(path: Path, of: Penalty) -> int | None:
    if type(of.norm) is not SquaredNorm:
        return None
    degree = of.seed_degree(path.motion.degree.get(path.network.out, 0))
    return None if degree is None else 2 * (path.motion.slope + degree)


def _index(path: Path, index: int | tuple[int, ...]) -> tuple[int, ...]:
    place = (index,) if isinstance(index, int) else tuple(index)
    shape = path.network.graph.shape(path.network.out)[1:]
    if len(place) != len(shape) or not all(-n <= i < n for i, n in zip(place, shape, strict=True)):
        raise InputError(f"output index {index!r} does not fit one example's output, {shape}")
    return place


Sample = Callable[[Jets, Tensor], tuple[Tensor, Tensor]]


def _curve(
    path: Path, name: str, sample: Sample, degree: int | None, again: Callable[[Path], Curve]
) -> Curve:
    exact = degree is not None and degree <= HIGHEST
    if degree is None:
        per_example = len(path.start) / path.examples
        degree = next(order for most, order in SMOOTH if per_example <= most)
    count = min(degree, HIGHEST) + 1
    angles = math.pi * torch.linspace(0, 1, count, dtype=torch.float64)
    nodes = -torch.cos(angles) if count > 1 else torch.zeros(1, dtype=torch.float64)
    values, slopes = sample_pieces(path, sample, nodes)
    fit = torch.linalg.inv(nodes[:, None] ** torch.arange(count)).T
    slope_coefficients = slopes @ fit
    if exact and count > 1:  # one degree less: the last coefficient is rounding
        slope_coefficients = slope_coefficients[:, :-1]
    return Curve(
        name,
        Piecewise(path, values @ fit, exact),
        Piecewise(path, slope_coefficients, exact),
        again,
    )


def sample_pieces(path: Path, sample: Sample, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """A quantity and its derivative in t at the same relative places of every piece: (P, K)."""
    network, count = path.network, len(nodes)
    lo, hi = path.normalised(path.start), path.normalised(path.end)
    mid, half = (lo + hi) / 2, (hi - lo) / 2
    at = (mid[:, None] + half[:, None] * nodes).flatten()
    moving = moving_leaves(network, path.x, path.along, path.centre, path.radius)
    rows = torch.arange(len(lo)).repeat_interleave(count)
    width = max(m.bytes // 8 for m in network.graph.values if m is not None)
    size = max(1, BUDGET // width)
    parts: list[Any] = []
    with torch.no_grad():
        for row, place in zip(rows.split(size), at.split(size), strict=True):
            example = path.example[row]
            jets = Jets(network, path.motion, path.x, moving, example, mid[row], place)
            parts.append(sample(jets, example))
    value = torch.cat([v for v, _ in parts]).reshape(-1, count)
    slope = torch.cat([d for _, d in parts]).reshape(-1, count)
    return value, slope / path.radius


# ---------------------------------------------------------------------------------------- how rough


GRID = 4097  # places at which the smooth part is sampled


@dataclass(frozen=True)
class Roughness:
    """The batch mean of a piecewise smooth function f on the span of its path.

    jumps: how many are higher than rounding; mean_height, largest: of |jump of the mean|, that is
    of one example's jump over M; jump_variation: Σ|jump|; smooth_variation: total variation of
    f minus its jumps, on a grid; size: largest minus smallest value.
    """

    examples: int
    jumps: int
    mean_height: float
    largest: float
    jump_variation: float
    smooth_variation: float
    size: float

    @property
    def ratio(self) -> float:
        """Jump variation over smooth variation."""
        if self.smooth_variation == 0:
            return float("inf") if self.jump_variation else 0.0
        return self.jump_variation / self.smooth_variation


def roughness(
    f: Piecewise, examples: Tensor | None = None, table: Tensor | None = None
) -> Roughness:
    """How rough the mean over the batch is, or that over the `examples` with these numbers.

    table: `f.table` at equally spaced places of the span, where several batches share it.

    >>> from torch import nn
    >>> import doubleback as db
    >>> net = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1))
    >>> path = db.landscape.follow(net, torch.randn(8, 1), "0.weight[2,0]", (-2.0, 2.0))
    >>> slope = db.landscape.penalty(path, db.OutputGradient()).slope
    >>> roughness(slope, torch.arange(4)).jumps <= roughness(slope).jumps
    True
    """
    t, height = mean_jumps(f, examples)
    count = f.path.examples if examples is None else len(examples)
    scale = float(f.coefficients.abs().max())
    real = height.abs() * count > 1e-12 * scale
    t, height = t[real], height[real]
    grid = GRID if table is None else table.shape[1]
    places = torch.linspace(*f.path.span, grid, dtype=torch.float64)
    table = f.table(places) if table is None else table
    values = (table if examples is None else table[examples]).mean(0)
    climbed = torch.cat([height.new_zeros(1), torch.cumsum(height, 0)])
    smooth = values - climbed[torch.searchsorted(t, places, right=True)]
    variation = float((smooth[1:] - smooth[:-1]).abs().sum())
    rounding = 1e-14 * scale * grid  # what a sum over the grid makes of nothing
    return Roughness(
        count, len(t), float(height.abs().mean()) if len(t) else 0.0,
        float(height.abs().max()) if len(t) else 0.0, float(height.abs().sum()),
        variation if variation > rounding else 0.0, float(values.max() - values.min()),
    )  # fmt: skip


def mean_jumps(f: Piecewise, examples: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Places (in order) and heights of the jumps of the batch mean."""
    jumps = f.jumps()
    if examples is None:
        t, height = jumps.t, jumps.height / f.path.examples
    else:
        own = torch.isin(jumps.example, examples)
        t, height = jumps.t[own], jumps.height[own] / len(examples)
    order = torch.argsort(t)
    return t[order], height[order]


def mean_curve(f: Piecewise, grid: int = 513) -> tuple[Tensor, Tensor, Tensor]:
    """(t, left limit, right limit) of the batch mean at every jump and on a grid between."""
    at, height = mean_jumps(f)
    places = torch.linspace(*f.path.span, grid, dtype=torch.float64)
    t = torch.cat([places, at])
    right = f.mean(t)
    left = right - torch.cat([torch.zeros_like(places), height])
    order = torch.argsort(t, stable=True)
    return t[order], left[order], right[order]


def fit_exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The exponent a of values ≈ c·sizes^a, by least squares of the logarithms.

    >>> round(fit_exponent([1, 10, 100], [5.0, 0.5, 0.05]), 6)
    -1.0
    """
    pairs = [(s, v) for s, v in zip(sizes, values, strict=True) if v > 0]
    if len(pairs) < 2:
        return float("nan")
    x = torch.tensor([float(s) for s, _ in pairs], dtype=torch.float64).log()
    y = torch.tensor([float(v) for _, v in pairs], dtype=torch.float64).log()
    x = x - x.mean()
    return float((x * (y - y.mean())).sum() / x.square().sum())


SMALL, LARGE = 0.01, 0.1  # largest jump over the size of the curve: unseen below, felt above
LEAK = 0.1  # slope of the leaky ReLU that a verdict compares with


@dataclass(frozen=True)
class Verdict:
    """Roughness of the batch mean of R and of ∂R, and of single examples, along one path.

    share: largest jump of the mean of ∂R over the larger of its range and its value at rest;
    alone: the same for the worst single example; leaky: `share` of the same path with leaky ReLUs
    of slope 0.1 and the weights as they are (None: not asked for, or no ReLU); enough: a batch size
    at which share falls below 1 % if the highest jump of one example stays what it is here, so
    that the mean's falls like 1/M, and the size of the mean's curve does.
    """

    path: str
    span: tuple[float, float]
    examples: int
    value: Roughness
    slope: Roughness
    breakpoints_per_example: float
    share: float
    alone: float
    leaky: float | None
    enough: int
    nearest: float | None

    def __str__(self) -> str:
        s = self.slope
        if not s.jumps and not self.value.jumps:
            return (
                f"Along {self.path}, t from {self.span[0]:.4g} to {self.span[1]:.4g}, neither the "
                f"penalty nor its derivative jumps for any of the {self.examples} examples "
                f"({self.breakpoints_per_example:.3g} breakpoints per example, none felt by them): "
                "this direction is smooth for training."
            )
        text = (
            f"Along {self.path}, t from {self.span[0]:.4g} to {self.span[1]:.4g}, each example "
            f"meets {self.breakpoints_per_example:.3g} breakpoints on average; the mean over "
            f"{self.examples} has {self.value.jumps} jumps in R and {s.jumps} in ∂R. The largest "
            f"jump of the mean of ∂R is {s.largest:.3g}, {_percent(self.share)} of the curve's "
            f"size (for the worst example alone: {_percent(self.alone)}); jumps make up "
            f"{_percent(_part(s))} of the total variation of ∂R and {_percent(_part(self.value))} "
            "of R's. "
        )
        if self.nearest is not None:
            text += f"The nearest breakpoint lies {self.nearest:.2g} from the present value. "
        if self.share <= SMALL:
            text += f"At batch size {self.examples} the surface is smooth in practice."
        else:
            word = "visible" if self.share <= LARGE else "strong"
            text += (
                f"At batch size {self.examples} the jumps are {word}; a batch of about "
                f"{self.enough} would bring them below 1 % if no example jumps higher than these "
                "and the mean's curve is of the same size. "
            )
            if self.leaky is not None:
                text += (
                    f"With leaky ReLUs of slope {LEAK:g} and these weights the largest would be "
                    f"{_percent(self.leaky)}. "
                )
            text += "A smooth activation (softplus) has none, only steep places."
        if _part(self.value) > LARGE:
            text += (
                " R itself moves by jumps to a good part, which no gradient of it shows: watch the "
                "penalty's value, not only its gradient."
            )
        return text

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "text": str(self)}


def judge(curve: Curve) -> Verdict:
    """The verdict on a penalty's curve along its path.

    >>> from torch import nn
    >>> import doubleback as db
    >>> net = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> path = db.landscape.follow(net, torch.randn(64, 1), "0.weight[2,0]")
    >>> print(str(db.landscape.judge(db.landscape.penalty(path, db.OutputGradient())))[:5])
    Along
    """
    path = curve.value.path
    slope, value = roughness(curve.slope), roughness(curve.value)
    share = _share(curve, slope)
    leaky_share = None
    softer = leaky(path.network, LEAK) if share > SMALL else None
    if softer is not None:
        other = curve.again(follow(path.net, path.x, path.along, path.span, network=softer))
        leaky_share = _share(other, roughness(other.slope))
    rest = min(max(path.rest, path.span[0]), path.span[1])
    places = torch.tensor([b.t for b in path.breakpoints], dtype=torch.float64)
    return Verdict(
        str(path.along), path.span, path.examples, value, slope,
        len(path.breakpoints) / path.examples, share, _worst_example(curve), leaky_share,
        max(path.examples, round(path.examples * share / SMALL)),
        float((places - rest).abs().min()) if len(places) else None,
    )  # fmt: skip


def _share(curve: Curve, slope: Roughness) -> float:
    """The largest jump of the mean of ∂R over the size of that curve."""
    path = curve.slope.path
    rest = min(max(path.rest, path.span[0]), path.span[1])
    there = curve.slope.mean(torch.tensor([rest], dtype=torch.float64))
    size = max(slope.size, abs(float(there)))
    return slope.largest / size if size else 0.0


def _worst_example(curve: Curve) -> float:
    """Largest jump of one example's ∂R over the range of that example's curve."""
    left, right = curve.slope.ends
    path, jumps = curve.slope.path, curve.slope.jumps()
    low = torch.full((path.examples,), torch.inf, dtype=torch.float64)
    high = -low
    for end in (left, right):
        low.scatter_reduce_(0, path.example, end, "amin")
        high.scatter_reduce_(0, path.example, end, "amax")
    worst = torch.zeros(path.examples, dtype=torch.float64)
    worst.scatter_reduce_(0, jumps.example, jumps.height.abs(), "amax")
    size = high - low
    return float(torch.where(size > 0, worst / size, 0.0).max())


def _part(r: Roughness) -> float:
    total = r.jump_variation + r.smooth_variation
    return r.jump_variation / total if total else 0.0


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"
