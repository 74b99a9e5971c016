"""The demo's report: one HTML file that needs nothing beside it."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

COLOURS = ("#6b7480", "#2563a8", "#e07b21", "#2f8f5b")  # plain, then one for each penalty

STYLE = """
:root { color-scheme: light dark; --ink: #22272e; --soft: #667; --line: #d7dce2; --back: #fff;
  --card: #f6f8fa; --good: #2f8f5b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #9aa3ad; --line: #3a414b;
  --back: #15181d; --card: #1e2329; --good: #63c390; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem 4rem; background: var(--back);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.7rem; margin: 0; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .5rem; }
p { margin: .4rem 0; } .soft { color: var(--soft); font-size: .92rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; min-width: 60%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .8rem; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { color: var(--soft); font-weight: 600; font-size: .88rem; }
tr.ours td { font-weight: 600; }
.charts { display: flex; flex-wrap: wrap; gap: 1.5rem; } .charts svg { flex: 1 1 20rem; }
svg { max-width: 34rem; height: auto; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
.grid td { padding: .15rem; border: 0; text-align: center; }
.grid img { width: 4.2rem; height: 4.2rem; image-rendering: pixelated; border-radius: 3px;
  display: block; }
.grid td:first-child { padding-right: .8rem; text-align: left; }
pre { background: var(--card); padding: .8rem 1rem; border-radius: 6px; overflow-x: auto;
  font-size: .84rem; line-height: 1.4; }
details { margin: .6rem 0; } summary { cursor: pointer; font-weight: 600; }
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: 2px;
  margin-right: .4em; }
"""


def page(results: dict[str, Any]) -> str:
    """The report of a run, from what it measured alone."""
    settings, versions = results["settings"], results["versions"]
    told = ", ".join(f"{name} {value}" for name, value in versions.items() if name != "device")
    body = [
        "<h1>What a derivative in the loss buys, and what it costs</h1>",
        f"<p class=soft>{settings['net']} network, {settings['parameters']} parameters, on "
        f"{settings['training images']} training and {settings['test images']} test images "
        f"({escape(settings['data'])}), {settings['epochs']} epochs of batches of "
        f"{settings['batch']}, seed {settings['seed']}. {escape(versions['device'])}; {told}. "
        f"All of it measured in this run, {results['seconds']:.0f} s.</p>",
        *(_section(title, text) for title, text in _sections(results)),
    ]
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        '<link rel=icon href="data:,">'
        f"<title>doubleback: the demo's report</title><style>{STYLE}</style></head>\n"
        f"<body>\n{chr(10).join(body)}\n</body></html>\n"
    )


def _section(title: str, text: str) -> str:
    return f"<h2>{title}</h2>\n{text}"


def _sections(results: dict[str, Any]) -> Iterable[tuple[str, str]]:
    settings = results["settings"]
    yield "What it buys", _quality(results)
    sizes = settings["sizes"]
    charts = (
        _chart(
            f"accuracy under {attack}", sizes, {n: r[attack] for n, r in results["quality"].items()}
        )
        for attack in ("FGSM", "PGD")
    )
    yield (
        "Robustness",
        f"<p class=soft>Accuracy on attacked test images, ‖x′ − x‖<sub>∞</sub> ≤ ε, pixels in "
        f"[0, 1]. FGSM is one step of the gradient's signs, PGD {settings['PGD steps']} smaller "
        f"ones.</p>{_legend(results)}<div class=charts>{''.join(charts)}</div>",
    )
    yield (
        "The gradient that is penalised",
        "<p class=soft>∇ₓℓ of test images, each on its own scale (red: more ink there raises the "
        "loss; blue: lowers it), and its norm.</p>" + _pictures(results),
    )
    yield "What it costs", _costs(results)
    yield "Is it right?", _parity(results)
    yield "The plan", _plans(results)


def _label(results: dict[str, Any], name: str) -> str:
    if name == "plain":
        return "plain"
    return f"+ {results['settings']['weights'][name]:g} · {escape(results['formulas'][name])}"


def _table(head: Sequence[str], rows: Iterable[tuple[Sequence[str], bool]]) -> str:
    lines = ["".join(f"<th>{cell}</th>" for cell in head)]
    marked = [f"<tr>{lines[0]}</tr>"]
    for cells, ours in rows:
        row = "".join(f"<td>{cell}</td>" for cell in cells)
        marked.append(f"<tr{' class=ours' if ours else ''}>{row}</tr>")
    return f"<div class=wide><table>{''.join(marked)}</table></div>"


def _quality(results: dict[str, Any]) -> str:
    sizes = results["settings"]["sizes"]
    at = [i for i, size in enumerate(sizes) if size in (0.05, 0.1)]
    head = ["loss", "accuracy", "mean ‖∇ₓℓ‖", "mean ‖J‖<sub>F</sub>"]
    head += [f"{attack}, ε = {sizes[i]:g}" for attack in ("FGSM", "PGD") for i in at]
    rows = []
    for name, row in results["quality"].items():
        cells = [_label(results, name), f"{row['accuracy']:.1%}"]
        cells += [f"{row['mean ‖∇ₓℓ‖']:.3f}", f"{row['mean ‖J‖_F']:.2f}"]
        cells += [f"{row[attack][i]:.1%}" for attack in ("FGSM", "PGD") for i in at]
        rows.append((cells, False))
    return _table(head, rows)


def _costs(results: dict[str, Any]) -> str:
    names = list(results["costs"])
    first = results["costs"][names[0]]
    head = ["one training step"]
    head += [cell for n in names for cell in (escape(results["formulas"][n]), "over plain")]
    rows = []
    for way in first:
        cells = [escape(way)]
        for name in names:
            cost = results["costs"][name][way]
            cells += [f"{1e3 * cost['seconds']:.1f} ms", f"{cost['over plain']:.2f}×"]
        rows.append((cells, way not in ("plain", "stock autograd")))
    rounds = ", ".join(f"{results['costs'][n][next(iter(first))]['rounds']}" for n in names)
    return (
        "<p class=soft>Medians over interleaved rounds (" + rounds + "): every way takes a turn in "
        "each, so that a busy machine slows all alike. Ratios are to the plain step of the same "
        "round. All but the first row compute the same gradient.</p>" + _table(head, rows)
    )


def _parity(results: dict[str, Any]) -> str:
    parts = []
    for name, found in results["parity"].items():
        parts.append(
            f"<p>{_label(results, name)}: worst relative error {found['worst']:.1e} in "
            f"{found['rows']} quantities.</p><details><summary>the worst of them</summary>"
            f"<pre>{escape(found['text'])}</pre></details>"
        )
    return (
        "<p class=soft>The networks as trained above, in float64, against PyTorch's own double "
        "backward: output, penalty and every gradient (<code>db.check</code>).</p>" + "".join(parts)
    )


def _plans(results: dict[str, Any]) -> str:
    plans = "".join(
        f"<details{' open' if i == 0 else ''}><summary>{_label(results, name)}</summary>"
        f"<pre>{escape(text)}</pre></details>"
        for i, (name, text) in enumerate(results["plans"].items())
    )
    return (
        "<p class=soft><code>print(model.explain(x, y))</code>, before anything runs.</p>" + plans
    )


# -------------------------------------------------------------------------------------- pictures


def _legend(results: dict[str, Any]) -> str:
    items = (
        f'<span style="margin-right:1.4em"><span class=swatch style="background:{colour}"></span>'
        f"{_label(results, name)}</span>"
        for colour, name in zip(COLOURS, results["quality"], strict=False)
    )
    return f"<p>{''.join(items)}</p>"


def _chart(title: str, xs: Sequence[float], curves: dict[str, Sequence[float]]) -> str:
    """Lines over [0, max x] × [0, 1] as SVG."""
    width, height, left, bottom, top = 420, 260, 44, 34, 24

    def at(x: float, y: float) -> tuple[float, float]:
        inner = width - left - 12, height - bottom - top
        return left + x / xs[-1] * (inner[0] - 8), top + (1 - y) * inner[1]

    parts = [f'<text x="{left}" y="14" style="font-weight:600">{title}</text>']
    for tick in (0, 0.25, 0.5, 0.75, 1):
        x0, y = at(0, tick)
        parts.append(
            f'<line x1="{x0}" x2="{width - 12}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>'
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.0%}</text>'
        )
    for x in xs[::2]:
        place, y = at(x, 0)
        parts.append(f'<text x="{place:.1f}" y="{y + 16:.1f}" text-anchor="middle">{x:g}</text>')
    middle, y = at(xs[-1] / 2, 0)
    parts.append(f'<text x="{middle:.1f}" y="{y + 31:.1f}" text-anchor="middle">ε</text>')
    for colour, (name, values) in zip(COLOURS, curves.items(), strict=False):
        points = [at(x, value) for x, value in zip(xs, values, strict=True)]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.2"/>'
        )
        parts += [
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"><title>{escape(name)}, '
            f"ε = {x:g}: {value:.1%}</title></circle>"
            for (a, b), x, value in zip(points, xs, values, strict=True)
        ]
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg>'


def _pictures(results: dict[str, Any]) -> str:
    shown = results["pictures"]
    rows = [["image", *(_image(_grey(image)) for image in shown["images"])]]
    for name, gradients in shown["gradients"].items():
        cells = [_label(results, name)]
        for gradient in gradients:
            norm = sum(v * v for row in gradient for v in row) ** 0.5
            cells.append(f"{_image(_diverging(gradient))}<span class=soft>{norm:.2g}</span>")
        rows.append(cells)
    cells = ("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table class=grid>{"".join(cells)}</table></div>'


Rows = list[list[tuple[int, int, int]]]


def _grey(image: list[list[float]]) -> Rows:
    return [[(int(255 * (1 - v)),) * 3 for v in row] for row in image]  # type: ignore[misc]


def _diverging(gradient: list[list[float]]) -> Rows:
    """White at zero, red above, blue below, full at the largest entry."""
    most = max(max(abs(v) for row in gradient for v in row), 1e-30)

    def colour(v: float) -> tuple[int, int, int]:
        fade = int(255 * (1 - min(abs(v) / most, 1.0)))
        return (
            (255 - (255 - fade) // 8, fade, fade)
            if v > 0
            else (fade, fade, 255 - (255 - fade) // 8)
        )

    return [[colour(v) for v in row] for row in gradient]


def _image(rows: Rows) -> str:
    raw = b"".join(b"\0" + bytes(v for pixel in row for v in pixel) for row in rows)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">2I5B", len(rows[0]), len(rows), 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw))
    data = base64.b64encode(png + chunk(b"IEND", b"")).decode()
    return f'<img alt="" src="data:image/png;base64,{data}">'
