"""One-dimensional paths through parameters or inputs: base + t · direction."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import InputError
from .program import Program


@dataclass(frozen=True)
class Entry:
    """One number of one parameter; t is its value.

    >>> Entry.parse("2.weight[3,1]")
    Entry(name='2.weight', index=(3, 1))
    """

    name: str
    index: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Entry:
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


Along = Entry | Direction | InputLine


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


def resolve(program: Program, name: str) -> int:
    """The value number of a parameter."""
    if name not in program.names:
        _unknown("parameter", name, program.names)
    return program.names[name]


def moving_leaves(
    program: Program, x: Tensor, along: Along, centre: float, radius: float
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
        return {program.x: ((x + centre * d), (radius * d).expand_as(x))}
    if isinstance(along, Entry):
        value = resolve(program, along.name)
        base = program.leaves[value].clone()
        _check_index(along, base)
        base[along.index] = centre
        slope = torch.zeros_like(base)
        slope[along.index] = radius
        return {value: (base, slope)}
    if not along.by_name:
        raise InputError("the direction names no parameter")
    found = {}
    for name, d in along.by_name.items():
        value = resolve(program, name)
        base, d = program.leaves[value], d.detach().double().cpu()
        if d.shape != base.shape:
            raise InputError(
                f"the direction of '{name}' has shape {tuple(d.shape)}, the parameter "
                f"{tuple(base.shape)}"
            )
        found[value] = (base + centre * d, radius * d)
    return found


def _check_index(along: Entry, base: Tensor) -> None:
    fits = len(along.index) == base.dim() and all(
        -size <= i < size for i, size in zip(along.index, base.shape, strict=True)
    )
    if not fits:
        raise InputError(f"{along}: the parameter has shape {tuple(base.shape)}")


def value_at_rest(program: Program, along: Along) -> float:
    """Where the unchanged network lies: the entry's value, or 0."""
    if not isinstance(along, Entry):
        return 0.0
    base = program.leaves[resolve(program, along.name)]
    _check_index(along, base)
    return float(base[along.index])
