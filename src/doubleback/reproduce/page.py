"""One self-contained HTML page: every figure, its caption, what was checked, and the numbers."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path

from .experiment import Report, Table

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
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; font-size: .95rem; }
dt { color: var(--soft); } dd { margin: 0; }
"""


def write_page(
    path: Path,
    title: str,
    lead: str,
    facts: Sequence[tuple[str, str]],
    reports: Sequence[Report],
    images: Sequence[Path],
) -> None:
    """images: the PNG of each report; it is embedded, and the PDF beside it is linked."""
    links = "".join(f'<a href="#{r.name}">{html.escape(r.title)}</a>' for r in reports)
    listed = "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in facts
    )
    body = "".join(_section(r, image) for r, image in zip(reports, images, strict=True))
    path.write_text(
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{CSS}</style></head><body><main>"
        f'<h1>{html.escape(title)}</h1><p class="lead">{html.escape(lead)}</p>'
        f"<dl>{listed}</dl><nav>{links}</nav>{body}</main></body></html>\n",
        encoding="utf-8",
    )


def _section(report: Report, image: Path) -> str:
    data = base64.b64encode(image.read_bytes()).decode()
    claims = "".join(f"<li>{html.escape(text)}</li>" for text in report.claims)
    tables = "".join(map(_table, report.tables))
    return (
        f'<section id="{report.name}"><h2>{html.escape(report.title)}</h2><figure>'
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
