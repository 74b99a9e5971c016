"""Caches that a forward pass fills hold tensors with numbers, whoever filled them first."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from support.stock import numbers, pair, same_training

TABLE: dict = {}


@functools.lru_cache
def ramp(width: int) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, width, dtype=torch.float64)


def table(width: int) -> torch.Tensor:
    if width not in TABLE:
        TABLE[width] = torch.linspace(0.5, 1.5, width, dtype=torch.float64)
    return TABLE[width]


@functools.lru_cache
def mask(rows: int) -> torch.Tensor:
    return (torch.arange(rows, dtype=torch.float64) % 2 + 0.5).unsqueeze(1)


class Cached(nn.Module):
    def __init__(self, look) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 1)
        self.look = look

    def forward(self, x):
        return self.last(torch.tanh(self.first(x) * self.look(x)))


class OnModule(Cached):
    """A cache among the module's own attributes, None until the first call."""

    def __init__(self, look) -> None:
        super().__init__(look)
        self.cache = None

    def forward(self, x):
        if self.cache is None:
            self.cache = self.look(x)
        return self.last(torch.tanh(self.first(x) * self.cache))


class InDictionary(Cached):
    def __init__(self, look) -> None:
        super().__init__(look)
        self.cache: dict = {}

    def forward(self, x):
        if x.shape[1] not in self.cache:
            self.cache[x.shape[1]] = self.look(x)
        return self.last(torch.tanh(self.first(x) * self.cache[x.shape[1]]))


def by_width(x):
    return ramp(6)


def by_dictionary(x):
    return table(6)


def by_rows(x):
    return mask(x.shape[0])


def fresh(x):
    return torch.linspace(0.5, 1.5, 6, dtype=x.dtype)


CASES = {
    "lru_cache": (Cached, by_width),
    "lru_cache by batch": (Cached, by_rows),
    "global dictionary": (Cached, by_dictionary),
    "attribute": (OnModule, fresh),
    "dictionary of the module": (InDictionary, fresh),
}


@pytest.mark.parametrize("how", ["backward", "accumulate"])
@pytest.mark.parametrize("name", CASES)
def test_sizes_change_behind_a_cache(name, how):
    kind, look = CASES[name]
    TABLE.clear()
    ramp.cache_clear()
    mask.cache_clear()
    torch.manual_seed(0)
    model, twin = pair(kind(look))
    sizes = (4, 4, 4, 5, 5, 4, 3)
    try:
        same_training(
            model, twin, batch=lambda i: (numbers(i, sizes[i], 5),), how=how, steps=len(sizes),
            own_first=True,
        )  # fmt: skip
        kept = [*TABLE.values(), ramp(6), mask(4)]
        assert all(type(t) is torch.Tensor for t in kept), "a cache holds no numbers"
        assert torch.equal(ramp(6), fresh(ramp(6)))
    finally:
        TABLE.clear()
        ramp.cache_clear()
        mask.cache_clear()
