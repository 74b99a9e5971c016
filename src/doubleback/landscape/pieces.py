"""Exact breakpoints: the graph is run once, on pieces of the path instead of points.

A *row* is one example on one interval of the path on which everything computed so far is a
polynomial. Rows enter a linear node or a product as polynomials and leave as polynomials; a kink
first cuts every row where one of its units changes region, then is linear on each part. So the
rows after the last node are the pieces, and no step of a sweep along the path is ever taken.

Values that the path does not reach are computed once per example, those before the first kink
once per example too: rows multiply only behind the kinks that cut them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..graph import Node
from .cuts import candidates, rival_cuts, rival_flips, threshold_cuts, threshold_flips, touching
from .kinks import Kink, Rivals, Thresholds
from .program import Program, mapped, run_fixed, run_rows
from .roots import horner
from .rows import Flips, Rows, Value, apart, either, evaluate
from .structure import Motion, factors, passes_through

LIMIT = 2**25  # numbers in the largest polynomial of one chunk


class TooManyRows(Exception):
    """The examples of this chunk fall into more pieces than fit; try fewer at a time."""


def follow_chunk(
    program: Program, motion: Motion, x: Tensor, moving: Mapping[int, tuple[Tensor, Tensor]]
) -> Flips:
    """All flips of these examples. x: (M, …) float64; moving leaves as (constant, slope) in s."""
    run = _Run(program, motion, x, moving)
    for node in program.nodes:
        if node.index > run.final:  # nothing behind the last kink can end a piece
            break
        if not motion.moves(node):
            if node.outputs[0] in program.active:
                run.static(node)
        elif node.index in motion.kinks:
            run.kink(node)
        else:
            run.polynomial(node)
        run.forget(node)
    return Flips.join(run.flips)


class _Run:
    def __init__(
        self, program: Program, motion: Motion, x: Tensor, moving: Mapping[int, tuple]
    ) -> None:
        self.program, self.motion = program, motion
        self.rows = Rows(len(x))
        self.flips: list[Flips] = []
        fixed = run_fixed(program, {**moving, program.x: None})
        self.values = {v: Value((t,)) for v, t in fixed.items()}
        self.plain: dict[int, Tensor] = dict(fixed)  # what static nodes read
        if program.x not in moving:
            self.plain[program.x] = x.unsqueeze(1)
            self.values[program.x] = Value((x.unsqueeze(1),), 0)
        for v, (base, slope) in moving.items():
            is_input = v == program.x
            pair = (base.unsqueeze(1), slope.unsqueeze(1)) if is_input else (base, slope)
            self.values[v] = Value(pair, 0 if is_input else None)
        self.final = max(motion.kinks, default=-1)
        self.last = {v: node.index for node in program.nodes for v in node.inputs}

    def forget(self, node: Node) -> None:
        for v in node.inputs:
            if self.last.get(v) == node.index:
                self.values.pop(v, None)
                self.plain.pop(v, None)

    def static(self, node: Node) -> None:
        run_rows(self.program, node, self.plain)
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
            return propagate(self.program, node, either(rows, shared))

        outputs = mapped(one, rows, shared)
        for v, coefficients in zip(node.outputs, outputs, strict=True):
            self.values[v] = Value(tuple(coefficients), generation)

    def kink(self, node: Node) -> None:
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
        rule, program = self.program.rules[node.index], self.program

        def one(rows: Sequence, shared: Sequence) -> list:
            points, middle = rows[1], rows[2]
            coefficients = either(rows[0], shared)
            call = program.forward(node, points)
            found = []
            for k in range(0 if homogeneous else 1, degree + 1):
                q = [c[k] if k < len(c) else None for c in coefficients]
                out = rule.tangent(call, q)
                found.append(out[0] if node.many else out)
            if not homogeneous:
                value = call.out[0] if node.many else call.out
                found.insert(0, value - middle * horner(found, middle))
            return [found, *[None] * (len(node.outputs) - 1)]

        rows, shared = apart(lifted, inputs)
        outputs = mapped(one, [rows, at_mid, mid], shared)
        self.values[node.outputs[0]] = Value(tuple(outputs[0]), self.rows.generation)


def propagate(
    program: Program, node: Node, inputs: Sequence[Sequence[Tensor]]
) -> list[list[Tensor]]:
    """Polynomial coefficients through a linear node or a product, for one row.

    linear:   y_k = A u_k                     product:  y_k = Σ_{a+b=k} B(u_a, w_b) + c_k
    """
    rule = program.rules[node.index]
    if passes_through(node):
        return [list(inputs[0])]
    call = program.forward(node, [c[0] for c in inputs])
    found = [[part] for part in (call.out if node.many else (call.out,))]
    pair = factors(rule, node)
    degree = _product_degree(inputs, pair)
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
                term = rule.tangent(program.call(node, others), along)
                total = term if total is None else total + term
        assert total is not None
        for column, part in zip(found, total if node.many else (total,), strict=True):
            column.append(part.expand(column[0].shape))  # the tangent of a bias may be smaller
    return found


def _product_degree(inputs: Sequence[Sequence[Tensor]], pair: tuple[int, int] | None) -> int:
    single = max(len(c) - 1 for c in inputs)
    if pair is None:
        return single
    return max(single, len(inputs[pair[0]]) + len(inputs[pair[1]]) - 2)
