"""Paths through parameters or inputs, base + t · direction; `follow` finds their exact pieces and
the units that end them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from ..errors import InputError, NotPiecewiseLinearError
from .motion import Motion, find_motion, layer_of
from .network import Network, check_input, make_network, refreshed
from .pieces import Flips, TooManyRows, follow_chunk


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
    network, found, refused = make_network(net, x), [], None
    for name, value in network.names.items():
        try:
            if find_motion(network, {value: 1}).kinks:
                found.append(name)
        except NotPiecewiseLinearError as error:
            refused = refused or error
    if not found and refused is not None:
        raise refused
    return found


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
    found = {}
    for name, d in along.by_name.items():
        value = resolve(network, name)
        base, d = network.leaves[value], d.detach().double().cpu()
        if d.shape != base.shape:
            raise InputError(
                f"the direction of '{name}' has shape {tuple(d.shape)}, the parameter "
                f"{tuple(base.shape)}"
            )
        found[value] = (base + centre * d, radius * d)
    return found


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
        found: dict[tuple[int, float], list[Unit]] = {}
        f = self.flips
        for example, at, kink, unit in zip(
            f.example.tolist(), f.at.tolist(), f.kink.tolist(), f.unit.tolist(), strict=True
        ):
            found.setdefault((example, at), []).append(self.unit(kink, unit))
        return tuple(
            Breakpoint(example, self.centre + self.radius * at, tuple(units))
            for (example, at), units in found.items()
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
        found = follow_chunk(network, motion, x[rows.start : rows.stop], own)
    except TooManyRows:
        middle = (rows.start + rows.stop) // 2
        halves: Sequence[range] = (range(rows.start, middle), range(middle, rows.stop))
        return [part for half in halves for part in _follow_rows(network, motion, x, moving, half)]
    found.example += rows.start
    return [found]


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
