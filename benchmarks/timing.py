"""Repeats and statistics that every measured process shares. No imports but the standard library.

>>> summary([2.0, 1.0, 4.0, 3.0, 5.0])
{'ms': 3.0, 'ms_spread': 2.0, 'samples': 5}
"""

from __future__ import annotations

import contextlib
import fcntl
import statistics
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def alone(gate: str | Path | None) -> Iterator[None]:
    """The machine to oneself, among all processes that ask at this gate, a file; None: at once."""
    if gate is None:
        yield
        return
    with open(gate, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def plan_repeats(estimate_ms: float, repeats: int, cap_s: float, least: int = 5) -> int:
    """How many steps to time: `repeats`, or fewer if they would take longer than `cap_s`.

    >>> plan_repeats(1.0, 50, 2.0), plan_repeats(100.0, 50, 2.0), plan_repeats(9000.0, 50, 2.0)
    (50, 20, 5)
    """
    return max(least, min(repeats, int(cap_s * 1e3 / max(estimate_ms, 1e-3))))


def summary(samples: list[float]) -> dict:
    """Median and interquartile range."""
    quarters = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else None
    return {
        "ms": statistics.median(samples),
        "ms_spread": quarters[2] - quarters[0] if quarters else 0.0,
        "samples": len(samples),
    }
