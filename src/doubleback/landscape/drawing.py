"""Figures fit for a paper: vector output, readable fonts, colours that colour-blind readers tell
apart (Okabe and Ito). Drawing needs matplotlib; nothing else in the library does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path as File
from typing import TYPE_CHECKING, Any

import torch

from ..errors import DoublebackError
from .curves import Piecewise
from .polytopes import Polytopes
from .statistics import mean_curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
YELLOW, SKY, BLACK, GREY = "#E69F00", "#56B4E9", "#000000", "#8A8A8A"
COLOURS = (BLUE, ORANGE, GREEN, PINK, YELLOW, SKY, BLACK)

_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "pdf.fonttype": 42,
    "mathtext.fontset": "dejavusans",
}


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise DoublebackError("drawing needs matplotlib: pip install 'doubleback[plots]'") from None
    return matplotlib


@contextmanager
def style() -> Iterator[None]:
    """Fonts, line widths and frames of every figure drawn inside."""
    with _matplotlib().rc_context(_STYLE):
        yield


def panels(columns: int, rows: int = 1, width: float = 3.4, height: float = 2.5):
    """A figure and its axes in reading order; sizes in inches per panel. Use it inside `style`."""
    _matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(columns * width, rows * height))
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def save(figure: Figure, folder: File, name: str) -> tuple[File, File]:
    """name.png (200 dpi) and name.pdf, without dates, so that the same numbers give the same
    files."""
    folder.mkdir(parents=True, exist_ok=True)
    png, pdf = folder / f"{name}.png", folder / f"{name}.pdf"
    with style():
        figure.savefig(png, dpi=200, metadata={"Software": None})
        figure.savefig(pdf, metadata={"CreationDate": None, "Producer": None, "Creator": None})
    return png, pdf


def draw_pieces(
    ax: Axes, f: Piecewise, example: int = 0, colour: str = BLUE, ends: bool = True
) -> None:
    """Each piece as a line of its own; circles mark the two limits at a jump."""
    path = f.path
    left, right = f.ends
    size = float(f.coefficients.abs().max())
    for piece in (path.example == example).nonzero().squeeze(1).tolist():
        t = torch.linspace(float(path.start[piece]), float(path.end[piece]), 65).double()
        ax.plot(t, f.on(torch.full((65,), piece), t), color=colour, solid_capstyle="butt")
        inner = piece + 1 < len(path.example) and int(path.example[piece + 1]) == example
        if not (ends and inner):
            continue
        before, after, at = float(right[piece]), float(left[piece + 1]), float(path.end[piece])
        if abs(before - after) > 1e-9 * (1 + size):
            ax.plot([at, at], [before, after], color=GREY, lw=0.7, ls=":")
            circle: dict[str, Any] = {"color": colour, "marker": "o", "ms": 3.2, "lw": 0}
            ax.plot([at, at], [before, after], markerfacecolor="white", **circle)


def draw_mean(ax: Axes, f: Piecewise, colour: str = BLUE) -> None:
    """The batch mean, drawn through the two limits of every jump."""
    t, left, right = mean_curve(f)
    both = torch.stack([left, right], 1).flatten()
    ax.plot(t.repeat_interleave(2), both, color=colour, lw=1.0, solid_joinstyle="round")


def draw_boundaries(ax: Axes, places: Sequence[float]) -> None:
    for at in places:
        ax.axvline(at, color=GREY, lw=0.6, alpha=0.6, zorder=0)


def mark_rest(ax: Axes, at: float) -> None:
    """The value that the trained network has."""
    ax.axvline(at, color=BLACK, lw=0.8, ls="--", zorder=0)


def draw_polytopes(figure: Figure, ax: Axes, found: Polytopes, label: str) -> None:
    """Regions coloured by the norm of the gradient, which is constant on each."""
    from matplotlib.collections import PolyCollection

    polygons = PolyCollection(
        [r.corners.numpy() for r in found.regions], cmap="cividis", edgecolors="white",
        linewidths=0.25,
    )  # fmt: skip
    polygons.set_array(torch.tensor([r.norm for r in found.regions]).numpy())
    ax.add_collection(polygons)
    ax.set_xlim(found.window.p)
    ax.set_ylim(found.window.q)
    ax.set_aspect("equal")
    figure.colorbar(polygons, ax=ax, label=label, shrink=0.85)
