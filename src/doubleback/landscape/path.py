"""`follow`: the exact pieces of a path, and the units that end them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from ..errors import InputError
from .kinks import layer_of
from .paths import Along, Direction, Entry, InputLine, moving_leaves, value_at_rest
from .pieces import TooManyRows, follow_chunk
from .program import Program, check_input, make_program, refreshed
from .rows import Flips
from .structure import Motion, find_motion

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
    pattern of that example is constant. t is the value of an `Entry`, an offset otherwise.
    """

    net: nn.Module
    program: Program
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
            nodes = self.program.nodes
            self._cache["producers"] = {v: node for node in nodes for v in node.outputs}
            self._cache["nodes"] = {node.index: node for node in nodes}
            self._cache["leaves"] = {v: name for name, v in self.program.names.items()}
        node = self._cache["nodes"][kink]
        shape = self.program.graph.shape(node.outputs[0])[1:] or (1,)
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
    program: Program | None = None,
) -> Path:
    """Every breakpoint of `net` along a path, for every example of x, exactly.

    along: `Entry` (or "layer.weight[3,1]"), `Direction`, `InputLine`; span: from where to where t
    runs (default: one to either side of the net as it is); program: `path.program` of an earlier
    call for the same net, whose parameters may have changed since, to save the capture. The
    analysis runs on a float64 copy.

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
    along = Entry.parse(along) if isinstance(along, str) else along
    if not isinstance(along, (Entry, Direction, InputLine)):
        raise InputError(f"along must be an Entry, a Direction or an InputLine, not {along!r}")
    program = make_program(net, x) if program is None else refreshed(program, net)
    rest = value_at_rest(program, along)
    span = (rest - 1.0, rest + 1.0) if span is None else (float(span[0]), float(span[1]))
    if not span[0] < span[1] or not all(map(torch.isfinite, torch.tensor(span))):
        raise InputError(f"span must be two finite numbers in increasing order, not {span}")
    x = x.detach().double().cpu()
    centre, radius = (span[0] + span[1]) / 2, (span[1] - span[0]) / 2
    moving = moving_leaves(program, x, along, centre, radius)
    motion = find_motion(program, dict.fromkeys(moving, 1))
    parts = []
    with torch.no_grad():
        for first in range(0, len(x), CHUNK):
            rows = range(first, min(first + CHUNK, len(x)))
            parts += _follow_rows(program, motion, x, moving, rows)
    flips = Flips.join(parts)
    example, lo, hi = _pieces(flips, len(x))
    start, end = centre + radius * lo, centre + radius * hi
    return Path(net, program, motion, x, along, span, rest, flips, example, start, end)


def _follow_rows(
    program: Program, motion: Motion, x: Tensor, moving: dict, rows: range
) -> list[Flips]:
    own = {
        v: (base[rows.start : rows.stop], slope[rows.start : rows.stop])
        if v == program.x
        else (base, slope)
        for v, (base, slope) in moving.items()
    }
    try:
        found = follow_chunk(program, motion, x[rows.start : rows.stop], own)
    except TooManyRows:
        middle = (rows.start + rows.stop) // 2
        halves: Sequence[range] = (range(rows.start, middle), range(middle, rows.stop))
        return [part for half in halves for part in _follow_rows(program, motion, x, moving, half)]
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
