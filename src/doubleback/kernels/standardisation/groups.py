"""Which entries a norm standardises together, and the point at which it is differentiated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...dtypes import accumulation
from ...errors import InputError
from ..mode import batched

Three = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Groups:
    """Which entries of x are standardised together, and how the weight is laid over them.

    | constructor     | x                  | one group        | weight            | μ, r       |
    | --------------- | ------------------ | ---------------- | ----------------- | ---------- |
    | `layer_norm(s)` | (…, *s)            | the last axes s  | s                 | (…, 1 … 1) |
    | `rms_norm(s)`   | (…, *s)            | the same, μ = 0  | s                 | (…, 1 … 1) |
    | `group_norm(G)` | (N, C, …)          | C/G channels     | C                 | (N, G)     |
    | `instance_norm` | (N, C, …)          | one channel      | C                 | (N, C)     |
    | `batch_norm`    | (N, C, …)          | channel, all N   | C                 | (C,)       |

    >>> Groups.group_norm(2).size(torch.empty(3, 4, 5, 5))
    50
    """

    kind: str  # "rows", "channels" or "batch"
    shape: tuple[int, ...] = ()  # rows: the normalised shape
    count: int = 0  # channels: groups per example; 0: one per channel
    rms: bool = False

    @classmethod
    def layer_norm(cls, normalized_shape: Sequence[int]) -> Groups:
        return cls("rows", tuple(normalized_shape))

    @classmethod
    def rms_norm(cls, normalized_shape: Sequence[int]) -> Groups:
        return cls("rows", tuple(normalized_shape), rms=True)

    @classmethod
    def group_norm(cls, num_groups: int) -> Groups:
        return cls("channels", count=num_groups)

    @classmethod
    def instance_norm(cls) -> Groups:
        return cls("channels")

    @classmethod
    def batch_norm(cls) -> Groups:
        return cls("batch")

    def per_example(self, x: Tensor) -> int:
        """Groups per example, of norms over channels."""
        channels = x.shape[1]
        count = self.count or channels
        if channels % count:
            raise InputError(
                f"group norm: {channels} channels of x {tuple(x.shape)} do not divide into "
                f"{count} groups; choose a divisor of {channels}"
            )
        return count

    def split(self, x: Tensor) -> Tensor:
        """View of x in which group axes are whole axes: (N, G, C/G, …) for norms over channels."""
        if self.kind != "channels":
            return x
        count = self.per_example(x)
        return x.view(x.shape[0], count, x.shape[1] // count, *x.shape[2:])

    def axes(self, x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Axes of the split x that a group spans: where the weight is constant, where it varies."""
        if self.kind == "rows":
            return (), tuple(range(x.dim() - len(self.shape), x.dim()))
        if self.kind == "channels":
            return tuple(range(3, x.dim() + 1)), (2,)
        return (0, *range(2, x.dim())), ()

    def size(self, x: Tensor) -> int:
        """m, the number of entries in a group."""
        view = self.split(x)
        return math.prod(view.shape[axis] for part in self.axes(x) for axis in part)

    def spread(self, values: Tensor, x: Tensor) -> Tensor:
        """Statistics, or a weight, as a tensor that broadcasts against the split x."""
        if self.kind == "rows":
            return values
        if self.kind == "batch":
            return values.view(-1, *[1] * (x.dim() - 2))
        count = self.per_example(x)
        shape = (1, count, x.shape[1] // count) if values.dim() == 1 else (*values.shape, 1)
        return values.view(*shape, *[1] * (x.dim() - 2))


def layout(groups: Groups, x: Tensor) -> torch.memory_format:
    """Channels-last for norms over channels where x is laid out so and not also contiguous."""
    if groups.kind == "rows" or batched():
        return torch.contiguous_format
    for form in (torch.channels_last, torch.channels_last_3d):
        if not x.is_contiguous() and x.is_contiguous(memory_format=form):
            return form
    return torch.contiguous_format


class Point(NamedTuple):
    """Where derivatives are taken: x with its statistics, and the weight."""

    groups: Groups
    x: Tensor
    mean: Tensor | None
    rstd: Tensor
    weight: Tensor | None

    @classmethod
    def of(cls, groups, x, mean, rstd, weight) -> Point:
        dtype = accumulation(x.dtype)
        if mean is not None and mean.dtype != dtype:
            mean = mean.to(dtype)
        return cls(groups, x, mean, rstd if rstd.dtype == dtype else rstd.to(dtype), weight)

    @property
    def weight_shape(self) -> list[int]:
        return list(self.groups.shape or self.x.shape[1:2])

    def in_statistics_dtype(self) -> Point:
        x = self.x.to(self.rstd.dtype).contiguous(memory_format=layout(self.groups, self.x))
        return self._replace(x=x, weight=cast(self.weight, self.rstd))

    def like_x(self, u: Tensor) -> Tensor:
        return u.to(self.x.dtype).contiguous(memory_format=layout(self.groups, self.x))


def cast(value: Tensor | None, like: Tensor) -> Tensor | None:
    return None if value is None else value.to(like.dtype)
