"""Exact breakpoints: the graph is run once, on pieces of the path instead of points.

A *row* is one example on one interval of the path on which everything computed so far is a
polynomial. Rows enter a linear node or a product as polynomials and leave as polynomials; a kink
first cuts every row where one of its units changes region, then is linear on each part. So the rows
after the last node are the pieces, and no step of a sweep along the path is ever taken.

Values that the path does not reach are computed once per example, those before the first kink once
per example too: rows multiply only behind the kinks that cut them.

Cuts are roots of polynomials, every one of many at once: in closed form for lines, isolated by
Descartes' rule of signs in the Bernstein basis and then bisected for higher degrees.

    p(a + (b − a)u) = Σ_j β_j C(D, j) u^j (1 − u)^{D−j}

The number of roots in (a, b) is at most the number of sign changes in β₀ … β_D, and equal to it
when that is 0 or 1. An interval with more is cut until each part has 0 or 1: no root is missed, up
to the rounding of β itself. Roots of even multiplicity change no sign and are not reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb

import torch
from torch import Tensor

from ..graph import Node
from .network import (
    Kink,
    Motion,
    Network,
    Rivals,
    Thresholds,
    factors,
    mapped,
    passes_through,
    run_fixed,
    run_rows,
)

# ------------------------------------------------------------------------------------------ roots


CUT = 0.4857142857142857  # off the middle: symmetric polynomials have roots there
NARROW = 1e-14  # intervals of the normalised coordinate are not cut below this width


def horner(coefficients: Sequence[Tensor], s: Tensor) -> Tensor:
    """Σ_k c_k s^k."""
    total = coefficients[-1]
    for c in reversed(coefficients[:-1]):
        total = total * s + c
    return total


def find_roots(coefficients: Sequence[Tensor], lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
    """Sign changes inside (lo, hi) of the polynomials Σ_k c_k s^k.

    coefficients: D+1 tensors of one shape S; lo, hi: broadcast to S. Returns flat indices into S
    and the roots, in no order; a polynomial may appear several times.

    >>> find_roots([torch.tensor([-1.0, 1.0]), torch.tensor([2.0, 0.0])], *torch.tensor([0.0, 1.0]))
    (tensor([0]), tensor([0.5000]))
    """
    shape = coefficients[0].shape
    lo, hi = lo.expand(shape), hi.expand(shape)
    if len(coefficients) == 1:
        return lo.new_empty(0, dtype=torch.long), lo.new_empty(0)
    if len(coefficients) == 2:
        left, right = (horner(coefficients, end) for end in (lo, hi))
        places = ((left < 0) & (right > 0) | (left > 0) & (right < 0)).nonzero(as_tuple=True)
        c0, c1 = (c[places] for c in coefficients)
        return _flat(places, shape), torch.clamp(-c0 / c1, lo[places], hi[places])
    middle, half = (lo + hi) / 2, (hi - lo) / 2
    local = _shifted(coefficients, middle, half)
    spread = sum(c.abs() for c in local[1:])
    index = (local[0].abs() <= spread).flatten().nonzero().squeeze(1)  # |p(mid)| > spread: none
    picked = [c.flatten()[index] for c in coefficients]
    a, b = lo.flatten()[index], hi.flatten()[index]
    return _isolate(_bernstein(picked, a, b), a, b, index)


def _flat(places: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    index = torch.zeros_like(places[0])
    for place, size in zip(places, shape, strict=True):
        index = index * size + place
    return index


def _shifted(coefficients: Sequence[Tensor], at: Tensor, scale: Tensor) -> list[Tensor]:
    """Coefficients in u of p(at + scale·u), by repeated synthetic division."""
    shifted = list(coefficients)
    n = len(shifted)
    for start in range(n - 1):
        for k in range(n - 2, start - 1, -1):
            shifted[k] = shifted[k] + at * shifted[k + 1]
    return [c * scale**k for k, c in enumerate(shifted)]


def _bernstein(coefficients: Sequence[Tensor], a: Tensor, b: Tensor) -> Tensor:
    """β_j = Σ_{k≤j} C(j,k)/C(D,k) q_k with q the coefficients on [a, b]: (N, D+1)."""
    q = _shifted(coefficients, a, b - a)
    degree = len(q) - 1
    columns = [
        torch.stack([comb(j, k) / comb(degree, k) * q[k] for k in range(j + 1)]).sum(0)
        for j in range(degree + 1)
    ]
    return torch.stack(columns, 1)


def _variations(beta: Tensor) -> Tensor:
    """Sign changes along each row, zeros left out."""
    sign = torch.sign(beta)
    last, count = sign[:, 0], torch.zeros_like(sign[:, 0])
    for column in sign.unbind(1)[1:]:
        count = count + (column * last < 0)
        last = torch.where(column != 0, column, last)
    return count


def _cut(beta: Tensor) -> tuple[Tensor, Tensor]:
    """de Casteljau: the same polynomials on the two parts of the interval."""
    left, right, rows = [], [], beta
    while rows.shape[1] > 0:
        left.append(rows[:, 0])
        right.append(rows[:, -1])
        rows = (1 - CUT) * rows[:, :-1] + CUT * rows[:, 1:]
    return torch.stack(left, 1), torch.stack(right[::-1], 1)


def _isolate(beta: Tensor, a: Tensor, b: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    root_index, roots = [], []
    while len(index):
        changes = _variations(beta)
        narrow = b - a < NARROW
        single = (changes == 1) | (narrow & (beta[:, 0] * beta[:, -1] < 0))
        root_index.append(index[single])
        roots.append(_bisect(beta[single], a[single], b[single]))
        more = (changes > 1) & ~narrow
        beta, a, b, index = beta[more], a[more], b[more], index[more]
        left, right = _cut(beta)
        c = a + CUT * (b - a)
        hit = left[:, -1] == 0  # the cut itself is a root
        root_index.append(index[hit])
        roots.append(c[hit])
        beta = torch.cat([left, right])
        a, b, index = torch.cat([a, c]), torch.cat([c, b]), torch.cat([index, index])
    if not roots:
        return index, a
    return torch.cat(root_index), torch.cat(roots)


def _bisect(beta: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The one root of each, halving the bracket until it has no inner number left."""
    degree = beta.shape[1] - 1
    binomial = beta.new_tensor([comb(degree, j) for j in range(degree + 1)])
    powers = torch.arange(degree + 1)

    def value(u: Tensor) -> Tensor:
        u = u[:, None]
        return (beta * binomial * u**powers * (1 - u) ** (degree - powers)).sum(1)

    sign = torch.sign(beta)
    first = torch.zeros(len(beta), dtype=beta.dtype)
    for column in sign.unbind(1):  # the sign to the left of the root: the first that is not zero
        first = torch.where(first == 0, column, first)
    low, high = torch.zeros_like(a), torch.ones_like(a)
    for _ in range(60):
        middle = (low + high) / 2
        left = torch.sign(value(middle)) == first
        low, high = torch.where(left, middle, low), torch.where(left, high, middle)
    return a + (b - a) * (low + high) / 2


# ----------------------------------------------------------------------------------------- pieces


LIMIT = 2**25  # numbers in the largest polynomial of one chunk


class TooManyRows(Exception):
    """The examples of this chunk fall into more pieces than fit; try fewer at a time."""


def follow_chunk(
    network: Network, motion: Motion, x: Tensor, moving: Mapping[int, tuple[Tensor, Tensor]]
) -> Flips:
    """All flips of these examples. x: (M, …) float64; moving leaves as (constant, slope) in s."""
    run = _PieceRun(network, motion, x, moving)
    for node in network.nodes:
        if node.index > run.final:  # nothing behind the last kink can end a piece
            break
        if not motion.moves(node):
            if node.outputs[0] in network.active:
                run.static(node)
        elif node.index in motion.kinks:
            run.kink(node)
        else:
            run.polynomial(node)
        run.forget(node)
    return Flips.join(run.flips)


class _PieceRun:
    """One run of the network on rows of some examples: values as polynomials, and the flips so
    far."""

    def __init__(
        self, network: Network, motion: Motion, x: Tensor, moving: Mapping[int, tuple]
    ) -> None:
        self.network, self.motion = network, motion
        self.rows = PieceRows(len(x))
        self.flips: list[Flips] = []
        fixed = run_fixed(network, {**moving, network.x: None})
        self.values = {v: Value((t,)) for v, t in fixed.items()}
        self.plain: dict[int, Tensor] = dict(fixed)  # what static nodes read
        if network.x not in moving:
            self.plain[network.x] = x.unsqueeze(1)
            self.values[network.x] = Value((x.unsqueeze(1),), 0)
        for v, (base, slope) in moving.items():
            is_input = v == network.x
            pair = (base.unsqueeze(1), slope.unsqueeze(1)) if is_input else (base, slope)
            self.values[v] = Value(pair, 0 if is_input else None)
        self.final = max(motion.kinks, default=-1)
        self.last = {v: node.index for node in network.nodes for v in node.inputs}

    def forget(self, node: Node) -> None:
        for v in node.inputs:
            if self.last.get(v) == node.index:
                self.values.pop(v, None)
                self.plain.pop(v, None)

    def static(self, node: Node) -> None:
        run_rows(self.network, node, self.plain)
        for v in node.outputs:
            self.values[v] = Value((self.plain[v],), 0)

    def polynomial(self, node: Node) -> None:
        """A linear node or a product."""
        inputs = [self.values[v] for v in node.inputs]
        generations = [v.generation for v in inputs if v.generation is not None]
        generation = max(generations) if generations else None
        if generation is not None and any(g != generation for g in generations):
            generation = self.rows.generation
        lifted = [
            self.rows.lift(v, generation) if generation is not None else v.coefficients
            for v in inputs
        ]
        rows, shared = apart(lifted, inputs)

        def one(rows: Sequence, shared: Sequence) -> list:
            return propagate(self.network, node, either(rows, shared))

        outputs = mapped(one, rows, shared)
        for v, coefficients in zip(node.outputs, outputs, strict=True):
            self.values[v] = Value(tuple(coefficients), generation)

    def kink(self, node: Node) -> None:
        """Cut every row where a unit of the node changes its region; on each part the node is
        linear."""
        kink, rows = self.motion.kinks[node.index], self.rows
        inputs = [self.values[v] for v in node.inputs]
        if all(v.generation is None for v in inputs):  # a kink in the parameters alone
            inputs = [self._spread(v) for v in inputs]
        lifted = [rows.lift(v, rows.generation) for v in inputs]
        before = rows.generation
        if isinstance(kink, Thresholds):
            flat = [c.reshape(len(rows.lo), -1) for c in lifted[0]]
            cuts = threshold_cuts(kink, flat, rows)
            touched = touching(kink, flat, rows)
            rows.cut(cuts[0], cuts[2])
            self.flips.append(threshold_flips(kink, flat, rows, before, cuts, touched, node.index))
        else:
            rows.cut(*rival_cuts(candidates(kink, lifted, inputs), rows))
        if node.index == self.final and isinstance(kink, Thresholds):
            return
        self._check_size(lifted)
        if rows.generation != before:
            parent = rows.maps[before]
            lifted = [
                tuple(c.index_select(0, parent) for c in cs) if v.generation is not None else cs
                for cs, v in zip(lifted, inputs, strict=True)
            ]
        mid = rows.middle
        at_mid = [
            evaluate(c, mid, v.generation is not None) for c, v in zip(lifted, inputs, strict=True)
        ]
        if isinstance(kink, Rivals):
            self.flips.append(rival_flips(kink, at_mid, rows, node.index))
        if node.index != self.final:
            self._through(node, kink, lifted, inputs, at_mid, mid)

    def _spread(self, value: Value) -> Value:
        count = len(self.rows.lo)
        spread = tuple(c.expand(count, *c.shape) for c in value.coefficients)
        return Value(spread, self.rows.generation)

    def _check_size(self, lifted: Sequence[Sequence[Tensor]]) -> None:
        width = max(c[0].numel() // max(c[0].shape[0], 1) for c in lifted)
        count = len(self.rows.lo) * width * max(len(c) for c in lifted)
        if count > LIMIT and self.rows.maps[0].max() > 0:
            raise TooManyRows

    def _through(
        self,
        node: Node,
        kink: Kink,
        lifted: Sequence[Sequence[Tensor]],
        inputs: Sequence[Value],
        at_mid: Sequence[Tensor],
        mid: Tensor,
    ) -> None:
        """y_k = T u_k with the derivative T of the piece, and y₀ from the value at the middle."""
        degree = max(len(c) for c in lifted) - 1
        homogeneous = isinstance(kink, Rivals) or kink.at == (0.0,)
        rule, network = self.network.rules[node.index], self.network

        def one(rows: Sequence, shared: Sequence) -> list:
            points, middle = rows[1], rows[2]
            coefficients = either(rows[0], shared)
            call = network.forward(node, points)
            powers = []
            for k in range(0 if homogeneous else 1, degree + 1):
                q = [c[k] if k < len(c) else None for c in coefficients]
                out = rule.tangent(call, q)
                powers.append(out[0] if node.many else out)
            if not homogeneous:
                value = call.out[0] if node.many else call.out
                powers.insert(0, value - middle * horner(powers, middle))
            return [powers, *[None] * (len(node.outputs) - 1)]

        rows, shared = apart(lifted, inputs)
        outputs = mapped(one, [rows, at_mid, mid], shared)
        self.values[node.outputs[0]] = Value(tuple(outputs[0]), self.rows.generation)


def propagate(
    network: Network, node: Node, inputs: Sequence[Sequence[Tensor]]
) -> list[list[Tensor]]:
    """Polynomial coefficients through a linear node or a product, for one row.

    linear:   y_k = A u_k                     product:  y_k = Σ_{a+b=k} B(u_a, w_b) + c_k
    """
    rule = network.rules[node.index]
    if passes_through(node):
        return [list(inputs[0])]
    call = network.forward(node, [c[0] for c in inputs])
    columns = [[part] for part in (call.out if node.many else (call.out,))]
    pair = factors(rule, node)
    degree = max(len(c) for c in inputs) - 1
    if pair is not None:
        degree = max(degree, len(inputs[pair[0]]) + len(inputs[pair[1]]) - 2)
    for k in range(1, degree + 1):
        q = [
            c[k] if k < len(c) and (pair is None or i not in pair) else None
            for i, c in enumerate(inputs)
        ]
        total = rule.tangent(call, q) if any(part is not None for part in q) else None
        if pair is not None:
            i, j = pair
            for a in range(min(k, len(inputs[i]) - 1) + 1):
                b = k - a
                if b >= len(inputs[j]):
                    continue
                others: list = [c[0] for c in inputs]
                others[j] = inputs[j][b]
                along: list = [None] * len(inputs)
                along[i] = inputs[i][a]
                term = rule.tangent(network.call(node, others), along)
                total = term if total is None else total + term
        assert total is not None
        for column, part in zip(columns, total if node.many else (total,), strict=True):
            column.append(part.expand(column[0].shape))  # the tangent of a bias may be smaller
    return columns


# ---------------------------------------------------------------------------------- rows

CLOSE = 1e-13  # cuts nearer than this to one another are one cut (normalised coordinate)


@dataclass
class Flips:
    """Changes of region, one per unit and breakpoint, ordered by example and place.

    example, kink (node index), unit (flat, inside one example's output), before, after: (F,)
    integers; at: (F,) places in the normalised coordinate.
    """

    example: Tensor
    at: Tensor
    kink: Tensor
    unit: Tensor
    before: Tensor
    after: Tensor

    @classmethod
    def join(cls, parts: Sequence[Flips]) -> Flips:
        names = ("example", "at", "kink", "unit", "before", "after")
        if not parts:
            empty = torch.empty(0, dtype=torch.long)
            return cls(empty, torch.empty(0, dtype=torch.float64), empty, empty, empty, empty)
        columns = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        order = torch.argsort(columns["at"], stable=True)
        order = order[torch.argsort(columns["example"][order], stable=True)]
        return cls(**{name: column[order] for name, column in columns.items()})


@dataclass(frozen=True)
class Value:
    """A polynomial: coefficients (R, …) over the rows of one generation, or shared by all."""

    coefficients: tuple[Tensor, ...]
    generation: int | None = None


class PieceRows:
    """The current rows, and how each earlier generation is found from them."""

    def __init__(self, examples: int) -> None:
        self.example = torch.arange(examples)
        self.lo = torch.full((examples,), -1.0, dtype=torch.float64)
        self.hi = torch.full((examples,), 1.0, dtype=torch.float64)
        self.maps = [torch.arange(examples)]

    @property
    def generation(self) -> int:
        return len(self.maps) - 1

    @property
    def middle(self) -> Tensor:
        return (self.lo + self.hi) / 2

    def lift(self, value: Value, generation: int) -> tuple[Tensor, ...]:
        """Coefficients over the rows of a later generation."""
        if value.generation is None or value.generation == generation:
            return value.coefficients
        assert generation == self.generation
        index = self.maps[value.generation]
        return tuple(c.index_select(0, index) for c in value.coefficients)

    def cut(self, row: Tensor, at: Tensor) -> None:
        """A new generation with every row cut at these places."""
        inside = (at > self.lo[row] + CLOSE) & (at < self.hi[row] - CLOSE)
        row, at = row[inside], at[inside]
        if not len(row):
            return
        order = torch.argsort(at)
        order = order[torch.argsort(row[order], stable=True)]
        row, at = row[order], at[order]
        fresh = torch.ones_like(row, dtype=torch.bool)
        fresh[1:] = (row[1:] != row[:-1]) | (at[1:] - at[:-1] > CLOSE)
        row, at = row[fresh], at[fresh]
        count = torch.bincount(row, minlength=len(self.lo))
        parent = torch.repeat_interleave(torch.arange(len(self.lo)), count + 1)
        first = torch.cumsum(count + 1, 0) - count - 1  # of each old row among the new
        starts = self.lo[parent].clone()
        place = torch.arange(len(row)) - (torch.cumsum(count, 0) - count)[row]
        starts[first[row] + 1 + place] = at
        ends = self.hi[parent].clone()
        ends[first[row] + place] = at
        self.example, self.lo, self.hi = self.example[parent], starts, ends
        self.maps = [index[parent] for index in self.maps]
        self.maps.append(torch.arange(len(parent)))


def apart(items: Sequence, inputs: Sequence[Value]) -> tuple[list, list]:
    """(what belongs to rows, what they share), None in the other's places."""
    own = [v.generation is not None for v in inputs]
    rows = [item if mine else None for item, mine in zip(items, own, strict=True)]
    return rows, [None if mine else item for item, mine in zip(items, own, strict=True)]


def either(rows: Sequence, shared: Sequence) -> list:
    return [a if a is not None else b for a, b in zip(rows, shared, strict=True)]


def evaluate(coefficients: Sequence[Tensor], s: Tensor, rows: bool) -> Tensor:
    """The polynomial at one place per row."""
    if len(coefficients) == 1 and rows:
        return coefficients[0]
    shape = coefficients[0].shape[1:] if rows else coefficients[0].shape
    place = s.reshape(-1, *(1,) * len(shape))
    values = horner(coefficients, place)
    return values.expand(len(s), *shape)


# ---------------------------------------------------------------------------------- cuts

NEAR = 1e-9  # a value this small, relative to its coefficients, may be a root at the row's end


def threshold_cuts(
    kink: Thresholds, flat: Sequence[Tensor], rows: PieceRows
) -> tuple[Tensor, Tensor, Tensor]:
    """Where units cross a threshold: row, unit, place."""
    pairs, places = [], []
    for threshold in kink.at:
        shifted = [flat[0] - threshold if threshold else flat[0], *flat[1:]]
        pair, at = find_roots(shifted, rows.lo[:, None], rows.hi[:, None])
        pairs.append(pair)
        places.append(at)
    pair, width = torch.cat(pairs), max(flat[0].shape[1], 1)
    return pair // width, pair % width, torch.cat(places)


def touching(kink: Thresholds, flat: Sequence[Tensor], rows: PieceRows) -> tuple[Tensor, Tensor]:
    """(row, unit) that may change region at the end of the row, where an earlier kink cut it: no
    root lies inside either row, but the value is of rounding size at their common end."""
    inner = (rows.example[1:] == rows.example[:-1]).nonzero().squeeze(1)
    end = rows.hi[inner, None]
    hits = []
    for side in (inner, inner + 1):
        own = [c.index_select(0, side) for c in flat]
        value = horner(own, end)
        scale = NEAR * torch.stack([c.abs() for c in own]).sum(0)
        for threshold in kink.at:
            near = (value - threshold).abs() <= scale + NEAR * abs(threshold)
            hits.append(near.nonzero())
    touched = torch.cat(hits).unique(dim=0)
    return inner[touched[:, 0]], touched[:, 1]


def threshold_flips(
    kink: Thresholds,
    flat: Sequence[Tensor],
    rows: PieceRows,
    before: int,
    cuts: tuple[Tensor, Tensor, Tensor],
    touching: tuple[Tensor, Tensor],
    node: int,
) -> Flips:
    """Cuts and touchings at which the regions in the middles of the two neighbours differ."""
    parent = rows.maps[before]
    old, unit, at = cuts
    left = torch.searchsorted(4.0 * parent + rows.hi, 4.0 * old + at - 2 * CLOSE)
    last = torch.cumsum(torch.bincount(parent, minlength=len(flat[0])), 0) - 1
    left = torch.cat([left, last[touching[0]]])
    unit = torch.cat([unit, touching[1]])
    width = flat[0].shape[1]
    pair = (left * width + unit).unique()
    left, unit = pair // width, pair % width
    inside = left + 1 < len(parent)
    left, unit = left[inside], unit[inside]

    def region(row: Tensor) -> Tensor:
        own = parent[row]
        value = horner([c[own, unit] for c in flat], rows.middle[row])
        return torch.stack([value > threshold for threshold in kink.at]).sum(0)

    first, second = region(left), region(left + 1)
    real = (first != second) & (rows.example[left] == rows.example[left + 1])
    left = left[real]
    return Flips(
        rows.example[left], rows.hi[left], torch.full_like(left, node), unit[real], first[real],
        second[real],
    )  # fmt: skip


def candidates(kink: Rivals, lifted, inputs: Sequence[Value]) -> list[Tensor]:
    """The rivals of every unit as polynomials: D+1 tensors (R, U, W)."""
    degree = max(len(c) for c in lifted)
    entries = []
    for k in range(degree):
        parts = [c[k] if k < len(c) else torch.zeros_like(c[0]) for c in lifted]
        entries.append(_entries(kink, parts, inputs))
    return entries


def _entries(kink: Rivals, parts: Sequence[Tensor], inputs: Sequence[Value]) -> Tensor:
    rows, shared = apart(parts, inputs)
    out = mapped(lambda r, s: kink.candidates(either(r, s)), rows, shared)
    return kink.sign * out.reshape(out.shape[0], -1, out.shape[-1])


def rival_cuts(entries: Sequence[Tensor], rows: PieceRows) -> tuple[Tensor, Tensor]:
    """Where a unit's winner is overtaken: from each start, the first crossing with any rival."""
    shape = entries[0].shape
    row = torch.arange(shape[0]).repeat_interleave(shape[1])
    items = [c.reshape(-1, shape[2]) for c in entries]
    start, end = rows.lo[row], rows.hi[row]
    found_row, found_at = [], []
    while len(row):
        just = torch.minimum(start + CLOSE, (start + end) / 2)
        now = horner(items, just[:, None])
        winner = now.argmax(1, keepdim=True)
        lead = [c.gather(1, winner) - c for c in items]
        index, at = find_roots(lead, just[:, None], end[:, None])
        first = torch.full_like(start, torch.inf)
        first.scatter_reduce_(0, index // shape[2], at, "amin")
        go_on = first < end
        found_row.append(row[go_on])
        found_at.append(first[go_on])
        row, start, end = row[go_on], first[go_on], end[go_on]
        items = [c[go_on] for c in items]
    return torch.cat(found_row), torch.cat(found_at)


def rival_flips(kink: Rivals, at_mid: Sequence[Tensor], rows: PieceRows, node: int) -> Flips:
    """Neighbouring rows of one example with different winners; a tie is no change."""
    now = _entries(kink, at_mid, [Value((), 0)] * len(at_mid))
    best, winner = now.max(-1)
    joined = (rows.example[1:] == rows.example[:-1])[:, None]
    changed = (winner[1:] != winner[:-1]) & joined
    left, unit = changed.nonzero(as_tuple=True)
    here, there = winner[left, unit], winner[left + 1, unit]
    lost = now[left + 1, unit, here] < best[left + 1, unit]
    won = now[left, unit, there] < best[left, unit]
    real = lost & won
    left, unit, here, there = left[real], unit[real], here[real], there[real]
    return Flips(rows.example[left], rows.hi[left], torch.full_like(left, node), unit, here, there)
