"""Writes the measured tables of docs/jacobian.md and docs/patch.md from benchmarks/results.

python benchmarks/measured_tables.py            rewrite what lies between the markers
python benchmarks/measured_tables.py --check    exit with 1 if that would change anything
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from spaces_table import markdown

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
START, END = "<!-- bench:start -->", "<!-- bench:end -->"


def facts(document: dict[str, Any]) -> str:
    known = ("torch", "cuda", "cudnn")
    versions = ", ".join(f"{n} {document['versions'][n]}" for n in known if document["versions"][n])
    return f"**{document['hardware']}** ({versions}; {document['date'][:10]})."


def source(path: Path, commands: str) -> str:
    name = path.relative_to(ROOT).as_posix()
    typed = "`, `".join(dict.fromkeys(commands.splitlines()))
    return f"\nFrom [{name}](../{name}), by `{typed}`.\n"


def milliseconds(row: dict[str, Any] | None, base: float | None) -> str:
    """'19.42 (5.8×)'; '–' where it was not run."""
    if row is None or row.get("ms") is None:
        return "–"
    return f"{row['ms']:.2f}" + (f" ({row['ms'] / base:.1f}×)" if base else "")


def jacobian(path: Path) -> str:
    document = json.loads(path.read_text(encoding="utf-8"))
    columns = [
        ("plain", "plain"),
        ("**doubleback**", "doubleback"),
        ("one seed at a time", "doubleback chunk 1"),
        ("**CUDA graph**", "doubleback one-shot CUDA graph"),
        ("stock, row by row", "stock loop"),
        ("stock, batched", "stock batched"),
        ("`jacrev`", "torch.func.jacrev"),
        ("closed form", "closed form"),
    ]
    lines = []
    for result in document["results"]:
        rows = result["rows"]
        base = rows["plain"]["ms"]
        cells = [
            milliseconds(rows.get(name), None if name == "plain" else base) for _, name in columns
        ]
        sizes = [
            f"{rows[name]['peak_mib'] - rows[name]['before_mib']:.0f}"
            if rows.get(name, {}).get("before_mib")
            else "–"
            for name in ("doubleback", "doubleback chunk 1", "stock batched")
        ]
        lines.append([f"{result['net']} {result['dtype']}", *cells, " / ".join(sizes)])
    heads = ["network", *(head for head, _ in columns), "MiB: all seeds / one / stock, batched"]
    text = (
        f"{facts(document)} Milliseconds of one training step with the exact penalty, in brackets "
        "times the plain step; memory is the peak beyond what was allocated before.\n\n"
    )
    return text + markdown(heads, lines) + source(path, document["command"])


def patch(path: Path) -> str:
    document = json.loads(path.read_text(encoding="utf-8"))
    lines = []
    for row in document["results"]:
        if row.get("part") != "nets" or not isinstance(row.get("price_patched"), float):
            continue
        found = row["methods"]
        lines.append(
            [
                f"{row['net']} {row['dtype']}",
                milliseconds(found["plain"], None),
                milliseconds(found["stock"], found["plain"]["ms"]),
                milliseconds(found["patched"], found["plain"]["ms"]),
                f"{row['price_plain_patched']:.3f}×",
            ]
        )
    text = (
        f"{facts(document)} Milliseconds of one eager training step at 224², batch 64 (critics: "
        "their own sizes), in brackets times the plain step; the last column is what the patch "
        "costs a plain step.\n\n"
    )
    heads = ["network", "plain", "gradient penalty, stock", "**patched**", "plain, patched"]
    return text + markdown(heads, lines) + source(path, document["command"])


PAGES = {
    "jacobian.md": (jacobian, "jacobian-h200.json"),
    "patch.md": (patch, "patch-h200.json"),
}


def rewritten(page: str, table: str) -> str:
    pattern = re.compile(re.escape(START) + ".*?" + re.escape(END), re.DOTALL)
    if len(pattern.findall(page)) != 1:
        raise SystemExit(f"the page needs one {START} and one {END} after it")
    return pattern.sub(lambda _: f"{START}\n\n{table}\n{END}", page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, exit with 1 if stale")
    stale = False
    checks = parser.parse_args().check
    for name, (make, results) in PAGES.items():
        page = ROOT / "docs" / name
        old = page.read_text(encoding="utf-8")
        new = rewritten(old, make(RESULTS / results))
        stale |= new != old
        if not checks:
            page.write_text(new, encoding="utf-8")
    return int(checks and stale)


if __name__ == "__main__":
    sys.exit(main())
