"""Where a network is followed: along a path, or over a window.

Paths go through parameters or inputs, base + t · direction; `follow` finds their exact pieces and
the units that end them.

A window is a two-dimensional part of input space; `partition` cuts it into linear regions, exactly.
Each region is a convex polygon on which every value is affine in the window's two coordinates. A
kink cuts a polygon along the line where a unit changes its region, and is linear on the parts.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from ..errors import InputError, NotPiecewiseLinearError
from ..graph import Node
from .network import (
    Motion,
    Network,
    Thresholds,
    check_input,
    find_motion,
    layer_of,
    make_network,
    mapped,
    refreshed,
    run_fixed,
)
from .pieces import Flips, TooManyRows, follow_chunk, propagate

# ------------------------------------------------------------------------------------------ paths


@dataclass(frozen=True)
class Coordinate:
    """One number of one parameter; t is its value.

    >>> Coordinate.parse("2.weight[3,1]")
    Coordinate(name='2.weight', index=(3, 1))
    """

    name: str
    index: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Coordinate:
        """'layer.weight[3,1]' or 'layer.bias[0]'."""
        match = re.fullmatch(r"\s*([^\[\]]+?)\s*\[\s*(-?\d+(?:\s*,\s*-?\d+)*)\s*\]\s*", text)
        if match is None:
            raise InputError(f"{text!r} is not of the form name[index], such as 2.weight[3,1]")
        return cls(match[1], tuple(int(part) for part in match[2].split(",")))

    def __str__(self) -> str:
        return f"{self.name}[{','.join(map(str, self.index))}]"


@dataclass(frozen=True, eq=False)
class Direction:
    """θ + t·d for the parameters named in `by_name`, all others fixed."""

    by_name: Mapping[str, Tensor]

    def __str__(self) -> str:
        return "direction over " + ", ".join(self.by_name)


@dataclass(frozen=True, eq=False)
class InputLine:
    """x + t·d; d has the shape of one example, or of the whole batch."""

    direction: Tensor

    def __str__(self) -> str:
        return "line in input space"


Along = Coordinate | Direction | InputLine


def random_direction(net: nn.Module, *layers: str, seed: int = 0) -> Direction:
    """A Gaussian direction of norm one over the parameters of one layer, of several, or (no name
    given) of the whole net.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> sorted(random_direction(net, "2").by_name)
    ['2.bias', '2.weight']
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = dict(net.named_parameters())
    for layer in layers:
        if not any(_within(name, layer) for name in parameters):
            _unknown("layer", layer, {n.rpartition(".")[0] for n in parameters} | set(parameters))
    chosen = {
        name: torch.randn(p.shape, generator=generator, dtype=torch.float64)
        for name, p in parameters.items()
        if not layers or any(_within(name, layer) for layer in layers)
    }
    size = torch.stack([d.square().sum() for d in chosen.values()]).sum().sqrt()
    return Direction({name: d / size for name, d in chosen.items()})


def before_kinks(net: nn.Module, x: Tensor) -> list[str]:
    """The parameters that move a kink (ReLU, abs, max-pool, …), by name. Raises the first refusal
    where none can be followed."""
    network, names, refused = make_network(net, x), [], None
    for name, value in network.names.items():
        try:
            if find_motion(network, {value: 1}).kinks:
                names.append(name)
        except NotPiecewiseLinearError as error:
            refused = refused or error
    if not names and refused is not None:
        raise refused
    return names


def _within(name: str, layer: str) -> bool:
    return name == layer or name.startswith(layer + ".")


def _unknown(what: str, name: str, known: Iterable[str]) -> None:
    names = sorted(n for n in known if n)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
    raise InputError(
        f"the network has no {what} '{name}'"
        + (f"; did you mean '{near[0]}'?" if near else "")
        + f" It has: {', '.join(names[:12])}{', …' if len(names) > 12 else ''}"
    )


def resolve(network: Network, name: str) -> int:
    """The value number of a parameter."""
    if name not in network.names:
        _unknown("parameter", name, network.names)
    return network.names[name]


def moving_leaves(
    network: Network, x: Tensor, along: Along, centre: float, radius: float
) -> dict[int, tuple[Tensor, Tensor]]:
    """Each moving leaf as (constant, slope) in the normalised coordinate s, t = centre + radius·s.

    x: the whole batch, in float64.
    """
    if isinstance(along, InputLine):
        d = along.direction.detach().double().cpu()
        if tuple(d.shape) not in (tuple(x.shape[1:]), tuple(x.shape)):
            raise InputError(
                f"the direction of an InputLine has shape {tuple(d.shape)}; one example has "
                f"{tuple(x.shape[1:])}, the batch {tuple(x.shape)}"
            )
        return {network.x: ((x + centre * d), (radius * d).expand_as(x))}
    if isinstance(along, Coordinate):
        value = resolve(network, along.name)
        base = network.leaves[value].clone()
        _check_index(along, base)
        base[along.index] = centre
        slope = torch.zeros_like(base)
        slope[along.index] = radius
        return {value: (base, slope)}
    if not along.by_name:
        raise InputError("the direction names no parameter")
    moving = {}
    for name, d in along.by_name.items():
        value = resolve(network, name)
        base, d = network.leaves[value], d.detach().double().cpu()
        if d.shape != base.shape:
            raise InputError(
                f"the direction of '{name}' has shape {tuple(d.shape)}, the parameter "
                f"{tuple(base.shape)}"
            )
        moving[value] = (base + centre * d, radius * d)
    return moving


def _check_index(along: Coordinate, base: Tensor) -> None:
    fits = len(along.index) == base.dim() and all(
        -size <= i < size for i, size in zip(along.index, base.shape, strict=True)
    )
    if not fits:
        raise InputError(f"{along}: the parameter has shape {tuple(base.shape)}")


def value_at_rest(network: Network, along: Along) -> float:
    """Where the unchanged network lies: the entry's value, or 0."""
    if not isinstance(along, Coordinate):
        return 0.0
    base = network.leaves[resolve(network, along.name)]
    _check_index(along, base)
    return float(base[along.index])


# ------------------------------------------------------------------------------- follow

CHUNK = 512  # examples followed at a time, halved where they fall into too many pieces


@dataclass(frozen=True)
class Unit:
    """One coordinate of a kink: the layer that feeds it, its index in one example, the operator.

    >>> str(Unit("fc1", (3,), "relu"))
    'fc1[3]'
    """

    layer: str
    index: tuple[int, ...]
    operator: str

    def __str__(self) -> str:
        return f"{self.layer}[{','.join(map(str, self.index))}]"


@dataclass(frozen=True)
class Breakpoint:
    """A place on the path of one example, and every unit that changes its region there."""

    example: int
    t: float
    units: tuple[Unit, ...]

    def __str__(self) -> str:
        return f"t = {self.t:.6g}: {', '.join(map(str, self.units))} of example {self.example}"


@dataclass(frozen=True, eq=False)
class Path:
    """One path followed for every example of a batch.

    example, start, end: (P,) the pieces, ordered by example and place; on each, the activation
    pattern of that example is constant. t is the value of an `Coordinate`, an offset otherwise.
    """

    net: nn.Module
    network: Network
    motion: Motion
    x: Tensor
    along: Along
    span: tuple[float, float]
    rest: float
    flips: Flips
    example: Tensor
    start: Tensor
    end: Tensor
    _cache: dict = field(default_factory=dict, repr=False)

    @property
    def centre(self) -> float:
        return (self.span[0] + self.span[1]) / 2

    @property
    def radius(self) -> float:
        return (self.span[1] - self.span[0]) / 2

    @property
    def examples(self) -> int:
        return len(self.x)

    @cached_property
    def breakpoints(self) -> tuple[Breakpoint, ...]:
        """Ordered by example, then t."""
        at_place: dict[tuple[int, float], list[Unit]] = {}
        f = self.flips
        for example, at, kink, unit in zip(
            f.example.tolist(), f.at.tolist(), f.kink.tolist(), f.unit.tolist(), strict=True
        ):
            at_place.setdefault((example, at), []).append(self.unit(kink, unit))
        return tuple(
            Breakpoint(example, self.centre + self.radius * at, tuple(units))
            for (example, at), units in at_place.items()
        )

    def unit(self, kink: int, flat: int) -> Unit:
        """The name of a unit."""
        if "producers" not in self._cache:
            nodes = self.network.nodes
            self._cache["producers"] = {v: node for node in nodes for v in node.outputs}
            self._cache["nodes"] = {node.index: node for node in nodes}
            self._cache["leaves"] = {v: name for name, v in self.network.names.items()}
        node = self._cache["nodes"][kink]
        shape = self.network.graph.shape(node.outputs[0])[1:] or (1,)
        index = []
        for size in reversed(shape):
            index.append(flat % size)
            flat //= size
        name = node.op._schema.name.removeprefix("aten::")
        layer = layer_of(node, self._cache["producers"], self._cache["leaves"])
        return Unit(layer, tuple(reversed(index)), name)

    def pieces_of(self, example: int) -> list[tuple[float, float]]:
        """[start, end] of every piece of one example."""
        own = self.example == example
        return list(zip(self.start[own].tolist(), self.end[own].tolist(), strict=True))

    def normalised(self, t: Tensor) -> Tensor:
        return (t - self.centre) / self.radius

    def find(self, example: Tensor, t: Tensor) -> Tensor:
        """The piece that holds t for each example (the right one at a breakpoint)."""
        width = 4 * self.radius
        keys = self.example * width + (self.start - self.span[0])
        places = example * width + (t - self.span[0]).clamp(0, 2 * self.radius)
        return torch.searchsorted(keys, places, right=True) - 1


def follow(
    net: nn.Module,
    x: Tensor,
    along: Along | str,
    span: tuple[float, float] | None = None,
    *,
    network: Network | None = None,
) -> Path:
    """Every breakpoint of `net` along a path, for every example of x, exactly.

    along: `Coordinate` (or "layer.weight[3,1]"), `Direction`, `InputLine`; span: from where to
    where t runs (default: one to either side of the net as it is); network: `path.network` of an
    earlier call for the same net, whose parameters may have changed since, to save the capture.
    The analysis runs on a float64 copy.

    A path through one layer, or through the input, has affine pieces and breakpoints in closed
    form. A direction over several layers has polynomial pieces of known degree, whose roots are
    isolated by Descartes' rule and bisected: none is missed.

    >>> net = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> _ = net[0].weight.data.fill_(1.0), net[0].bias.data.copy_(torch.tensor([-0.5, 0.5]))
    >>> path = follow(net, torch.zeros(1, 1), InputLine(torch.ones(1)), (-1.0, 1.0))
    >>> [str(b) for b in path.breakpoints]
    ['t = -0.5: 0[1] of example 0', 't = 0.5: 0[0] of example 0']
    """
    check_input(x)
    along = Coordinate.parse(along) if isinstance(along, str) else along
    if not isinstance(along, (Coordinate, Direction, InputLine)):
        raise InputError(f"along must be an Coordinate, a Direction or an InputLine, not {along!r}")
    network = make_network(net, x) if network is None else refreshed(network, net)
    rest = value_at_rest(network, along)
    span = (rest - 1.0, rest + 1.0) if span is None else (float(span[0]), float(span[1]))
    if not span[0] < span[1] or not all(map(torch.isfinite, torch.tensor(span))):
        raise InputError(f"span must be two finite numbers in increasing order, not {span}")
    x = x.detach().double().cpu()
    centre, radius = (span[0] + span[1]) / 2, (span[1] - span[0]) / 2
    moving = moving_leaves(network, x, along, centre, radius)
    motion = find_motion(network, dict.fromkeys(moving, 1))
    parts = []
    with torch.no_grad():
        for first in range(0, len(x), CHUNK):
            rows = range(first, min(first + CHUNK, len(x)))
            parts += _follow_rows(network, motion, x, moving, rows)
    flips = Flips.join(parts)
    example, lo, hi = _pieces(flips, len(x))
    start, end = centre + radius * lo, centre + radius * hi
    return Path(net, network, motion, x, along, span, rest, flips, example, start, end)


def _follow_rows(
    network: Network, motion: Motion, x: Tensor, moving: dict, rows: range
) -> list[Flips]:
    own = {
        v: (base[rows.start : rows.stop], slope[rows.start : rows.stop])
        if v == network.x
        else (base, slope)
        for v, (base, slope) in moving.items()
    }
    try:
        piece = follow_chunk(network, motion, x[rows.start : rows.stop], own)
    except TooManyRows:
        middle = (rows.start + rows.stop) // 2
        halves: Sequence[range] = (range(rows.start, middle), range(middle, rows.stop))
        return [part for half in halves for part in _follow_rows(network, motion, x, moving, half)]
    piece.example += rows.start
    return [piece]


def _pieces(flips: Flips, examples: int) -> tuple[Tensor, Tensor, Tensor]:
    """Intervals between neighbouring flips, from −1 to 1 for each example."""
    fresh = torch.ones(len(flips.at), dtype=torch.bool)
    fresh[1:] = (flips.example[1:] != flips.example[:-1]) | (flips.at[1:] != flips.at[:-1])
    cut, at = flips.example[fresh], flips.at[fresh]
    count = torch.bincount(cut, minlength=examples)
    example = torch.repeat_interleave(torch.arange(examples), count + 1)
    place = cut + torch.arange(len(cut))  # the piece that ends at each cut
    lo = torch.full((len(example),), -1.0, dtype=torch.float64)
    hi = torch.full((len(example),), 1.0, dtype=torch.float64)
    hi[place] = at
    lo[place + 1] = at
    return example, lo, hi


# ---------------------------------------------------------------------------------------- windows


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
    >>> polytopes = partition(net, Window.of_inputs((-1.0, 1.0), (-1.0, 1.0)))
    >>> abs(polytopes.table()["sum of areas"] - 4.0) < 1e-9
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
            return propagate(self.network, node, inputs)

        rows = [self.values.get(v) for v in node.inputs]
        shared = [None if v in self.values else self.fixed[v] for v in node.inputs]
        for value, coefficients in zip(node.outputs, mapped(one, rows, shared), strict=True):
            self.values[value] = coefficients

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
        self.values = {v: [c[parent] for c in powers] for v, powers in self.values.items()}
        self._through(node)

    def _coefficients(self, node: Node) -> Tensor:
        """(polygons, units, 3), or (polygons, units, rivals, 3) of a maximum."""
        kink, count = self.motion.kinks[node.index], len(self.polygons)
        full = []
        for v in node.inputs:
            known = self.values.get(v)
            full.append(known or [self.fixed[v].expand(count, *self.fixed[v].shape)])
        if isinstance(kink, Thresholds):
            return torch.stack([c.reshape(count, -1) for c in full[0]], -1)
        entries = []
        for k in range(3):
            parts = [c[k] if k < len(c) else torch.zeros_like(c[0]) for c in full]
            rivals = mapped(lambda rows, _: kink.candidates(rows), parts)
            entries.append(kink.sign * rivals.reshape(count, -1, rivals.shape[-1]))
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
            slopes = []
            for k in (1, 2):
                slope = rule.tangent(call, [c[k] if len(c) > k else None for c in inputs])
                slopes.append(slope[0] if node.many else slope)
            constant = out - slopes[0] * place[0] - slopes[1] * place[1]
            return [constant, *slopes]

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
