"""Where a kink cuts the rows, and which of its units change region there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .kinks import Rivals, Thresholds
from .program import mapped
from .roots import find_roots, horner
from .rows import CLOSE, Flips, Rows, Value, apart, either

NEAR = 1e-9  # a value this small, relative to its coefficients, may be a root at the row's end


def threshold_cuts(
    kink: Thresholds, flat: Sequence[Tensor], rows: Rows
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


def touching(kink: Thresholds, flat: Sequence[Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
    """(row, unit) that may change region at the end of the row, where an earlier kink cut it: no
    root lies inside either row, but the value is of rounding size at their common end."""
    inner = (rows.example[1:] == rows.example[:-1]).nonzero().squeeze(1)
    end = rows.hi[inner, None]
    found = []
    for side in (inner, inner + 1):
        own = [c.index_select(0, side) for c in flat]
        value = horner(own, end)
        scale = NEAR * torch.stack([c.abs() for c in own]).sum(0)
        for threshold in kink.at:
            near = (value - threshold).abs() <= scale + NEAR * abs(threshold)
            found.append(near.nonzero())
    touched = torch.cat(found).unique(dim=0)
    return inner[touched[:, 0]], touched[:, 1]


def threshold_flips(
    kink: Thresholds,
    flat: Sequence[Tensor],
    rows: Rows,
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
    found = []
    for k in range(degree):
        parts = [c[k] if k < len(c) else torch.zeros_like(c[0]) for c in lifted]
        found.append(_entries(kink, parts, inputs))
    return found


def _entries(kink: Rivals, parts: Sequence[Tensor], inputs: Sequence[Value]) -> Tensor:
    rows, shared = apart(parts, inputs)
    out = mapped(lambda r, s: kink.candidates(either(r, s)), rows, shared)
    return kink.sign * out.reshape(out.shape[0], -1, out.shape[-1])


def rival_cuts(entries: Sequence[Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
    """Where a unit's winner is overtaken: from each start, the first crossing with any rival."""
    shape = entries[0].shape
    row = torch.arange(shape[0]).repeat_interleave(shape[1])
    items = [c.reshape(-1, shape[2]) for c in entries]
    start, end = rows.lo[row], rows.hi[row]
    found_row, found_at = [], []
    while len(row):
        just = torch.minimum(start + CLOSE, (start + end) / 2)
        now = horner([c for c in items], just[:, None])
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


def rival_flips(kink: Rivals, at_mid: Sequence[Tensor], rows: Rows, node: int) -> Flips:
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
