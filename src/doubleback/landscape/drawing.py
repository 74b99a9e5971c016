"""Figures fit for a paper: vector output, readable fonts, colours that colour-blind readers tell
apart (Okabe and Ito); and a self-contained HTML page around them. Drawing needs matplotlib; nothing
else in the library does."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path as File
from typing import TYPE_CHECKING, Any

import torch

from ..errors import DoublebackError
from .curves import Curve, Piecewise, Verdict, mean_curve
from .paths import Coordinate, Polytopes

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
        raise DoublebackError(
            "drawing needs matplotlib: pip install 'doubleback[plots]' (in a checkout: pip install "
            "-e '.[plots]')"
        ) from None
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
            draw_jump(ax, at, before, after, colour)


def draw_jump(ax: Axes, at: float, before: float, after: float, colour: str = BLUE) -> None:
    """The two limits as circles, joined by a dotted line."""
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


def draw_polytopes(figure: Figure, ax: Axes, polytopes: Polytopes, label: str) -> None:
    """Regions coloured by the norm of the gradient, which is constant on each."""
    from matplotlib.collections import PolyCollection

    polygons = PolyCollection(
        [r.corners.numpy() for r in polytopes.regions], cmap="cividis", edgecolors="white",
        linewidths=0.25,
    )  # fmt: skip
    polygons.set_array(torch.tensor([r.norm for r in polytopes.regions]).numpy())
    ax.add_collection(polygons)
    ax.set_xlim(polytopes.window.p)
    ax.set_ylim(polytopes.window.q)
    ax.set_aspect("equal")
    figure.colorbar(polygons, ax=ax, label=label, shrink=0.85)


# ---------------------------------------------------------------------------------- pages


@dataclass
class Table:
    """Numbers behind a figure: column heads and rows, ready to print."""

    title: str
    heads: tuple[str, ...]
    rows: list[tuple]


@dataclass
class Report:
    """One figure of a page: its files' name, what it shows, what was claimed and checked, its
    numbers. note: a few words beside the title."""

    name: str
    title: str
    caption: str
    note: str = ""
    figure: Any = None
    claims: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)


CSS = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --line: #d8dee4;
  --page: #fbfbfa; --card: #ffffff; --accent: #0072B2; --good: #007a56; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --soft: #9aa4ae; --line: #333a41;
  --page: #14171a; --card: #1c2024; --accent: #56B4E9; --good: #4fc79a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.6 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 3rem 1.25rem 5rem; }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 .5rem; letter-spacing: -.01em; }
h2 { font-size: 1.3rem; margin: 0 0 1rem; }
h2 small { color: var(--soft); border: 1px solid var(--line); border-radius: 1rem;
  padding: .1rem .6rem; font-size: .75rem; font-weight: 500; vertical-align: middle;
  white-space: nowrap; }
p.lead { color: var(--soft); margin: 0 0 1.5rem; max-width: 46rem; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 1.5rem; margin: 2rem 0; }
figure { margin: 0; }
figure img { display: block; width: 100%; height: auto; max-width: 100%; background: #fff;
  border-radius: 6px; padding: .5rem; }
figcaption { color: var(--soft); font-size: .92rem; margin: .75rem 0 1rem; }
ul.claims { list-style: none; padding: 0; margin: 0 0 1rem; font-size: .95rem; }
ul.claims li { padding-left: 1.5rem; position: relative; margin: .2rem 0; }
ul.claims li::before { content: "✓"; color: var(--good); position: absolute; left: 0;
  font-weight: 700; }
details { margin: .5rem 0; border-top: 1px solid var(--line); padding-top: .5rem; }
summary { cursor: pointer; color: var(--accent); font-size: .95rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .86rem; margin: .75rem 0;
  font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .75rem; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
nav { display: flex; flex-wrap: wrap; gap: .4rem .9rem; font-size: .92rem; }
a { color: var(--accent); }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .2rem 1.2rem;
  font-size: .95rem; overflow-wrap: anywhere; }
dt { color: var(--soft); } dd { margin: 0; }
"""


def write_page(
    path: File,
    title: str,
    lead: str,
    facts: Sequence[tuple[str, str]],
    reports: Sequence[Report],
    images: Sequence[File],
    links: Sequence[tuple[str, str]] = (),
) -> None:
    """images: the PNG of each report; it is embedded, and the PDF beside it is linked.
    links: (text, address) below the lead; nothing is loaded from them."""
    contents = "".join(f'<a href="#{r.name}">{html.escape(r.title)}</a>' for r in reports)
    listed = "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in facts
    )
    outside = "".join(
        f' <a href="{html.escape(address)}">{html.escape(text)}</a>' for text, address in links
    )
    body = "".join(_section(r, image) for r, image in zip(reports, images, strict=True))
    path.write_text(
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{html.escape(title)}</title><style>{CSS}</style></head><body><main>"
        f'<h1>{html.escape(title)}</h1><p class="lead">{html.escape(lead)}{outside}</p>'
        f"<dl>{listed}</dl><nav>{contents}</nav>{body}</main></body></html>\n",
        encoding="utf-8",
    )


def _section(report: Report, image: File) -> str:
    data = base64.b64encode(image.read_bytes()).decode()
    claims = "".join(f"<li>{html.escape(text)}</li>" for text in report.claims)
    tables = "".join(map(_table, report.tables))
    note = f" <small>{html.escape(report.note)}</small>" if report.note else ""
    return (
        f'<section id="{report.name}"><h2>{html.escape(report.title)}{note}</h2><figure>'
        f'<img alt="{html.escape(report.caption)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{html.escape(report.caption)} "
        f'<a href="{image.with_suffix(".pdf").name}">PDF</a></figcaption></figure>'
        f'<ul class="claims">{claims}</ul>{tables}</section>'
    )


def _table(table: Table) -> str:
    heads = "".join(f"<th>{html.escape(head)}</th>" for head in table.heads)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(shown(cell))}</td>" for cell in row) + "</tr>"
        for row in table.rows
    )
    if not table.rows:
        rows = f'<tr><td colspan="{len(table.heads)}">none</td></tr>'
    return (
        f"<details><summary>{html.escape(table.title)}</summary>"
        f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
        "</div></details>"
    )


def shown(cell: object) -> str:
    """Four significant digits for numbers, as they are for everything else.

    >>> shown(0.0123456), shown(12), shown(float("inf"))
    ('0.01235', '12', '∞')
    """
    if isinstance(cell, float):
        return "∞" if cell == float("inf") else f"{cell:.4g}".replace("-", "−")
    return str(cell)


# ------------------------------------------------------------------- one path of one's own


def write_landscape(out: File, curve: Curve, verdict: Verdict) -> list[File]:
    """landscape.png, .pdf and .json and index.html: R and ∂R along a path, as the batch mean and
    for the example with the highest jump, with the verdict and the highest jumps by unit."""
    path, worst = curve.value.path, curve.slope.jumps()
    example = int(worst.example[worst.height.abs().argmax()]) if len(worst) else 0
    with style():
        figure, axes = panels(2, 2)
        for row, (name, f) in enumerate((("$R$", curve.value), ("$∂R$", curve.slope))):
            draw_mean(axes[2 * row], f)
            axes[2 * row].set_title(f"mean of {name} over {path.examples}")
            draw_pieces(axes[2 * row + 1], f, example, ORANGE)
            axes[2 * row + 1].set_title(f"{name}, example {example}")
        for ax in axes:
            mark_rest(ax, path.rest)
            ax.set_xlabel(str(path.along) if isinstance(path.along, Coordinate) else "$t$")
        png, pdf = save(figure, out, "landscape")
    order = worst.height.abs().argsort(descending=True)[:20].tolist()
    rows = [
        (path.breakpoints[k].t, float(worst.height[k]) / path.examples,
         ", ".join(map(str, path.breakpoints[k].units[:4])), path.breakpoints[k].example)
        for k in order
    ]  # fmt: skip
    report = Report(
        "landscape", str(path.along),
        "The penalty R and its derivative along the path: the batch mean, with every jump, and the "
        "example with the highest jump. Dashed: the network as it is.",
        tables=[
            Table("Highest jumps of the mean of ∂R", ("at", "height", "units", "example"), rows),
            Table("Roughness", ("", "R", "∂R"),
                  [(k, v, getattr(verdict.slope, k)) for k, v in vars(verdict.value).items()]),
        ],
    )  # fmt: skip
    page, numbers = out / "index.html", out / "landscape.json"
    between = "exact" if curve.value.exact else "interpolated; exact at breakpoints"
    facts = [("penalty", curve.name), ("between breakpoints", between)]
    write_page(page, "Loss landscape", str(verdict), facts, [report], [png])
    numbers.write_text(json.dumps(verdict.as_dict(), indent=1) + "\n", encoding="utf-8")
    return [png, pdf, page, numbers]
