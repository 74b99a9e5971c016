"""The exact partition of a two-dimensional window of input space into linear regions.

Each region is a convex polygon on which every value is affine in the window's two coordinates.
A kink cuts a polygon along the line where a unit changes its region, and is linear on the parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..graph import Node
from .motion import Motion, Thresholds, find_motion, passes_through
from .network import Network, check_input, make_network, mapped, run_fixed

SLIVER = 1e-12  # corners nearer than this to a line, relative to the window, lie on it


@dataclass(frozen=True, eq=False)
class Window:
    """origin + p·u + q·v, with (p, q) in a rectangle; all of one example's shape.

    >>> Window.of_inputs((-1.0, 1.0), (-2.0, 2.0)).q
    (-2.0, 2.0)
    """

    origin: Tensor
    u: Tensor
    v: Tensor
    p: tuple[float, float]
    q: tuple[float, float]

    @classmethod
    def of_inputs(cls, p: tuple[float, float], q: tuple[float, float]) -> Window:
        """The two coordinates of a network of two inputs."""
        unit = torch.eye(2, dtype=torch.float64)
        return cls(torch.zeros(2, dtype=torch.float64), unit[0], unit[1], p, q)


@dataclass(frozen=True, eq=False)
class Region:
    """A convex polygon (corners (K, 2), counter-clockwise), and the affine map on it: the chosen
    output is constant + ⟨gradient, (p, q)⟩; `norm` is ‖∇ₓ out‖ in the input space's own metric."""

    corners: Tensor
    constant: float
    gradient: tuple[float, float]
    norm: float

    @property
    def area(self) -> float:
        return float(_area(self.corners))


@dataclass(frozen=True, eq=False)
class Polytopes:
    """Every linear region in a window."""

    window: Window
    regions: tuple[Region, ...]

    def table(self) -> dict[str, float]:
        """Count and areas; the areas add up to the window's."""
        areas = torch.tensor([r.area for r in self.regions], dtype=torch.float64)
        whole = (self.window.p[1] - self.window.p[0]) * (self.window.q[1] - self.window.q[0])
        return {
            "regions": len(self.regions),
            "area of the window": whole,
            "sum of areas": float(areas.sum()),
            "largest area": float(areas.max()),
            "median area": float(areas.median()),
            "smallest area": float(areas.min()),
            "regions that cover half": int((areas.sort(descending=True).values.cumsum(0)
                                            < whole / 2).sum()) + 1,
        }  # fmt: skip


def partition(net: nn.Module, window: Window, index: int | tuple[int, ...] = 0) -> Polytopes:
    """All linear regions of out⟨index⟩ in the window, exactly.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> found = partition(net, Window.of_inputs((-1.0, 1.0), (-1.0, 1.0)))
    >>> abs(found.table()["sum of areas"] - 4.0) < 1e-9
    True
    """
    frame = [part.detach().double().cpu() for part in (window.origin, window.u, window.v)]
    if any(part.shape != frame[0].shape for part in frame):
        raise InputError("origin, u and v of a window must have the shape of one example")
    x = frame[0].unsqueeze(0)
    check_input(x)
    network = make_network(net, x)
    motion = find_motion(network, {network.x: 1})
    if max(motion.degree.values()) > 1:
        raise InputError("the network multiplies activations: its regions are no polygons")
    run = _RegionRun(network, motion, window, frame)
    with torch.no_grad():
        for node in network.nodes:
            if motion.moves(node):
                step = run.kink if node.index in motion.kinks else run.affine
                step(node)
        return Polytopes(window, tuple(run.regions(index, frame)))


class _RegionRun:
    """Values as rows of three coefficients: constant, and slopes along p and q."""

    def __init__(
        self, network: Network, motion: Motion, window: Window, frame: Sequence[Tensor]
    ) -> None:
        self.network, self.motion = network, motion
        (a, b), (c, d) = window.p, window.q
        corners = torch.tensor([[a, c], [b, c], [b, d], [a, d]], dtype=torch.float64)
        self.close = SLIVER * float((corners.max(0).values - corners.min(0).values).max())
        self.polygons = [corners]
        self.fixed = run_fixed(network, {network.x: None})
        self.values = {network.x: [part[None, None] for part in frame]}

    def affine(self, node: Node) -> None:
        def one(rows: Sequence, shared: Sequence) -> list:
            inputs = [r if r is not None else [s] for r, s in zip(rows, shared, strict=True)]
            return _affine(self.network, node, inputs)

        rows = [self.values.get(v) for v in node.inputs]
        shared = [None if v in self.values else self.fixed[v] for v in node.inputs]
        for value, found in zip(node.outputs, mapped(one, rows, shared), strict=True):
            self.values[value] = found

    def kink(self, node: Node) -> None:
        kink, coefficients = self.motion.kinks[node.index], self._coefficients(node)
        parents, polygons = [], []
        for row, polygon in enumerate(self.polygons):
            if isinstance(kink, Thresholds):
                parts = self._cut_at(kink.at, coefficients[row], polygon)
            else:
                parts = self._cut_where_overtaken(coefficients[row], polygon)
            polygons += parts
            parents += [row] * len(parts)
        self.polygons, parent = polygons, torch.tensor(parents)
        self.values = {v: [c[parent] for c in found] for v, found in self.values.items()}
        self._through(node)

    def _coefficients(self, node: Node) -> Tensor:
        """(polygons, units, 3), or (polygons, units, rivals, 3) of a maximum."""
        kink, count = self.motion.kinks[node.index], len(self.polygons)
        full = []
        for v in node.inputs:
            found = self.values.get(v)
            full.append(found or [self.fixed[v].expand(count, *self.fixed[v].shape)])
        if isinstance(kink, Thresholds):
            return torch.stack([c.reshape(count, -1) for c in full[0]], -1)
        entries = []
        for k in range(3):
            parts = [c[k] if k < len(c) else torch.zeros_like(c[0]) for c in full]
            found = mapped(lambda rows, _: kink.candidates(rows), parts)
            entries.append(kink.sign * found.reshape(count, -1, found.shape[-1]))
        return torch.stack(entries, -1)

    def _cut_at(self, thresholds: Sequence[float], own: Tensor, polygon: Tensor) -> list[Tensor]:
        parts = [polygon]
        values = own[:, :1] + own[:, 1:] @ polygon.T
        for at in thresholds:
            crossing = (values > at).any(1) & (values < at).any(1)
            for unit in crossing.nonzero().squeeze(1).tolist():
                line = own[unit] - own.new_tensor([at, 0, 0])
                parts = [p for part in parts for p in _cut(part, line, self.close)]
        return parts

    def _cut_where_overtaken(self, own: Tensor, polygon: Tensor) -> list[Tensor]:
        """Cut by the line between two winners as long as a part has several; then join the parts
        on which every unit has one winner and the same."""
        parts = [polygon]
        for unit in own:
            queue, parts = parts, []
            while queue:
                part = queue.pop()
                pair = self._two_winners(unit, part)
                if pair is None:
                    parts.append(part)
                else:
                    queue += _cut(part, unit[pair[0]] - unit[pair[1]], self.close)
        joined: dict[tuple, list[Tensor]] = {}
        for part in parts:
            place = torch.cat([part.new_ones(1), part.mean(0)])
            joined.setdefault(tuple((own @ place).argmax(-1).tolist()), []).append(part)
        return [_hull(torch.cat(same)) if len(same) > 1 else same[0] for same in joined.values()]

    def _two_winners(self, unit: Tensor, part: Tensor) -> tuple[int, int] | None:
        """Two entries whose line separates corners of the part at which they win."""
        here = unit[:, :1] + unit[:, 1:] @ part.T
        winners = here.argmax(0).unique().tolist()
        for i in winners:
            for j in winners:
                if i < j and len(_cut(part, unit[i] - unit[j], self.close)) == 2:
                    return i, j
        return None

    def _through(self, node: Node) -> None:
        network, rule = self.network, self.network.rules[node.index]
        centres = torch.stack([p.mean(0) for p in self.polygons])
        rows = [self.values.get(v) for v in node.inputs]
        shared = [None if v in self.values else self.fixed[v] for v in node.inputs]

        def one(rows: Sequence, shared: Sequence) -> list:
            place = rows[1]
            inputs = [r if r is not None else [s] for r, s in zip(rows[0], shared, strict=True)]
            points = [c[0] + sum(s * x for s, x in zip(c[1:], place, strict=False)) for c in inputs]
            call = network.forward(node, points)
            out = call.out[0] if node.many else call.out
            found = []
            for k in (1, 2):
                slope = rule.tangent(call, [c[k] if len(c) > k else None for c in inputs])
                found.append(slope[0] if node.many else slope)
            constant = out - found[0] * place[0] - found[1] * place[1]
            return [constant, *found]

        self.values[node.outputs[0]] = mapped(one, [rows, list(centres.unbind(1))], shared)

    def regions(self, index: int | tuple[int, ...], frame: Sequence[Tensor]):
        place = (index,) if isinstance(index, int) else tuple(index)
        out = self.values.get(self.network.out)
        if out is None:
            raise InputError("the output does not depend on the input")
        metric = torch.stack([part.flatten() for part in frame[1:]])
        gram = torch.linalg.inv(metric @ metric.T)
        chosen = [c[(slice(None), 0, *place)] for c in out]
        for row, polygon in enumerate(self.polygons):
            constant, p, q = (float(c[row]) for c in chosen)
            g = torch.tensor([p, q], dtype=torch.float64)
            yield Region(polygon, constant, (p, q), float((g @ gram @ g).sqrt()))


def _affine(network: Network, node: Node, inputs: Sequence[Sequence[Tensor]]) -> list:
    """(constant, slopes) through a node that is linear in what moves."""
    if passes_through(node):
        return [list(inputs[0])]
    rule = network.rules[node.index]
    call = network.forward(node, [c[0] for c in inputs])
    columns = [[part] for part in (call.out if node.many else (call.out,))]
    for k in (1, 2):
        slope = rule.tangent(call, [c[k] if len(c) > k else None for c in inputs])
        for column, part in zip(columns, slope if node.many else (slope,), strict=True):
            column.append(part)
    return columns


def _cut(polygon: Tensor, line: Tensor, close: float) -> list[Tensor]:
    """The polygon's parts on both sides of constant + ⟨slopes, ·⟩ = 0; one where it lies on one."""
    size = float(line[1:].norm())
    if size == 0:
        return [polygon]
    side = ((line[0] + polygon @ line[1:]) / size).tolist()
    if max(side) <= close or min(side) >= -close:
        return [polygon]
    parts: tuple[list, list] = ([], [])
    points = polygon.tolist()
    for k, (point, s) in enumerate(zip(points, side, strict=True)):
        after, s_after = points[(k + 1) % len(points)], side[(k + 1) % len(points)]
        if s >= -close:
            parts[0].append(point)
        if s <= close:
            parts[1].append(point)
        if (s > close and s_after < -close) or (s < -close and s_after > close):
            w = s / (s - s_after)
            between = [a + w * (b - a) for a, b in zip(point, after, strict=True)]
            parts[0].append(between)
            parts[1].append(between)
    return [torch.tensor(part, dtype=torch.float64) for part in parts if len(part) > 2]


def _hull(points: Tensor) -> Tensor:
    """Corners of the convex hull, counter-clockwise, by Andrew's monotone chain."""
    ordered = sorted(map(tuple, points.tolist()))
    span = max(abs(a - b) for a, b in zip(ordered[0], ordered[-1], strict=True))

    def half(points: Sequence[tuple]) -> list[tuple]:
        chain: list[tuple] = []
        for p in points:
            while len(chain) > 1 and _turn(chain[-2], chain[-1], p) <= SLIVER * span**2:
                chain.pop()
            chain.append(p)
        return chain[:-1]

    return torch.tensor(half(ordered) + half(ordered[::-1]), dtype=torch.float64)


def _turn(a: tuple, b: tuple, c: tuple) -> float:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


def _area(corners: Tensor) -> Tensor:
    x, y = corners.unbind(1)
    return 0.5 * (x * y.roll(-1) - y * x.roll(-1)).sum()
