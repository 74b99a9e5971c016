"""Writes the measured tables of docs/spaces.md from benchmarks/results/spaces-*.json.

python benchmarks/spaces_table.py            rewrite what lies between the markers
python benchmarks/spaces_table.py --check    exit with 1 if that would change anything
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "spaces.md"


def markdown(heads: list[str], lines: list[list[str]]) -> str:
    rule = ["---", *("---:" for _ in heads[1:])]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [heads, rule, *lines]) + "\n"


def source(path: Path, document: dict[str, Any]) -> str:
    name = path.relative_to(ROOT).as_posix()
    return f"\nFrom [{name}](../{name}), by `{document['command']}`.\n"


def grid(path: Path) -> str:
    """Penalty by space and size."""
    document = json.loads(path.read_text(encoding="utf-8"))
    values = {(row["space"], row["points"]): row["penalty"] for row in document["results"]}
    sizes = list(dict.fromkeys(points for _, points in values))
    names = list(dict.fromkeys(name for name, _ in values))
    lines = [[name, *(f"{values[name, n]:.5g}" for n in sizes)] for name in names]
    return markdown(["penalty", *(str(n) for n in sizes)], lines) + source(path, document)


def critic(path: Path) -> str:
    """Means over the seeds."""
    document = json.loads(path.read_text(encoding="utf-8"))
    rows = document["results"]
    columns = [
        "real scored above noisy",
        "gradient energy below |ω| = π/2",
        "noise removed along the gradient",
        "noise removed along the representer",
    ]
    lines = []
    for name in dict.fromkeys(row["space"] for row in rows):
        runs = [row for row in rows if row["space"] == name]
        means = [statistics.fmean(row[column] for row in runs) for column in columns]
        lines.append([name, *(f"{100 * mean:.1f} %" for mean in means)])
    heads = ["critic in", *(column.replace("|", "\\|") for column in columns)]
    return markdown(heads, lines) + source(path, document)


def cost(paths: list[Path]) -> str:
    """One table per machine and part."""
    parts = []
    for path in paths:
        document = json.loads(path.read_text(encoding="utf-8"))
        versions = f"torch {document['versions']['torch']}"
        small = ", tiny sizes" if document["tiny"] else ""
        parts.append(f"**{document['hardware']}**{small} ({versions}; {document['date'][:10]}).\n")
        for part, base in (("price", "Euclidean"), ("local", "unfold")):
            rows = [row for row in document["results"] if row["part"] == part]
            if rows:
                parts.append(_cost_table(rows, base))
        parts.append(source(path, document).lstrip())
    return "\n".join(parts)


def _cost_table(rows: list[dict[str, Any]], base: str) -> str:
    memory = any(row.get("beyond_mib") for row in rows)
    lines = []
    for row in rows:
        line = [f"{row['problem']}, {row['dtype']}", row["variant"]]
        line += [f"{row['ms']:.2f}", f"{row['times_' + base]:.2f}×"]
        if memory:
            times = row.get("memory_times_" + base)
            line += [f"{row['beyond_mib']:.0f}", f"{times:.2f}×" if times else "–"]
        lines.append(line)
    heads = ["step", "variant", "ms", f"time / {base}"]
    if memory:
        heads += ["MiB beyond parameters", f"memory / {base}"]
    return markdown(heads, lines)


def rewritten(page: str) -> str:
    timed = [p for p in RESULTS.glob("spaces-*.json") if "results" in p.read_text("utf-8")]
    timed = [p for p in timed if p.stem not in ("spaces-grid", "spaces-critic")]
    timed.sort(key=lambda path: ("cpu" in path.stem, path.stem))
    tables = {
        "grid": grid(RESULTS / "spaces-grid.json"),
        "critic": critic(RESULTS / "spaces-critic.json"),
        "cost": cost(timed),
    }
    for name, text in tables.items():
        start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
        pattern = re.compile(re.escape(start) + ".*?" + re.escape(end), re.DOTALL)
        if len(pattern.findall(page)) != 1:
            raise SystemExit(f"{PAGE.name} needs one {start} and one {end} after it")
        page = pattern.sub(lambda _, s=start, t=text, e=end: f"{s}\n\n{t}\n{e}", page)
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the measured tables of docs/spaces.md.")
    parser.add_argument("--check", action="store_true", help="change nothing, exit with 1 if stale")
    old = PAGE.read_text(encoding="utf-8")
    new = rewritten(old)
    if parser.parse_args().check:
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
