"""Rows: one example on one interval of the path, and the changes of region that end them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .roots import horner

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


class Rows:
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
    found = horner(coefficients, place)
    return found.expand(len(s), *shape)
