"""Writes the measured tables of docs/jacobian.md and docs/patch.md, and that of changing sizes on
docs/benchmarks.md, from benchmarks/results.

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


def facts(document: dict[str, Any]) -> str:
    known = ("torch", "cuda", "cudnn")
    versions = ", ".join(f"{n} {document['versions'][n]}" for n in known if document["versions"][n])
    return f"**{document['hardware']}** ({versions}; {document['date'][:10]})."


def source(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    return f"\nFrom [{name}](../{name}), which names the commands.\n"


def milliseconds(row: dict[str, Any] | None, ratio: float | None) -> str:
    """'19.42 (5.8×)'; '–' where it was not run."""
    if row is None or row.get("ms") is None:
        return "–"
    return f"{row['ms']:.2f}" + (f" ({ratio:.1f}×)" if ratio else "")


def beyond(row: dict[str, Any], jax: bool) -> str:
    """MiB beyond what was there before; XLA's plan has nothing before."""
    before = 0 if jax else row.get("before_mib")
    known = before is not None and row.get("peak_mib")
    return f"{row['peak_mib'] - before:.0f}" if known else "–"


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
        ("JAX", "JAX jit Jacobian"),
        ("closed form", "closed form"),
    ]
    held = ("doubleback", "doubleback chunk 1", "stock batched", "JAX jit Jacobian")
    lines = []
    for result in document["results"]:
        rows = result["rows"]
        base = rows["plain"]["ms"]
        ratios = {n: r["ms"] / base for n, r in rows.items() if r.get("ms") and n != "plain"}
        cells = [milliseconds(rows.get(name), ratios.get(name)) for _, name in columns]
        sizes = [beyond(rows.get(name, {}), jax=name.startswith("JAX")) for name in held]
        lines.append([f"{result['net']} {result['dtype']}", *cells, " / ".join(sizes)])
    heads = [
        "network",
        *(head for head, _ in columns),
        "MiB: all seeds / one / stock, batched / JAX",
    ]
    text = (
        f"{facts(document)} Milliseconds of one training step with the exact penalty, in brackets "
        "times the plain step; memory is the peak beyond what was allocated before (JAX: XLA's "
        "plan).\n\n"
    )
    return text + markdown(heads, lines) + source(path)


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
                milliseconds(found.get("stock"), row.get("price_stock")),
                milliseconds(found["patched"], row["price_patched"]),
                f"{plain:.3f}×" if (plain := row.get("price_plain_patched")) else "–",
            ]
        )
    text = (
        f"{facts(document)} Milliseconds of one eager training step at 224², batch 64 (critics: "
        "their own sizes), in brackets times the plain step of the same run; the last column is "
        "what the patch costs a plain step.\n\n"
    )
    heads = ["network", "plain", "gradient penalty, stock", "**patched**", "plain, patched"]
    cpu = path.with_name("patch-cpu.json")
    return text + markdown(heads, lines) + source(path) + "\n" + layers(cpu)


def layers(path: Path) -> str:
    """Single convolutions on a CPU."""
    document = json.loads(path.read_text(encoding="utf-8"))
    lines = [
        [
            f"{row['layer']}, {row['layout']}",
            *(milliseconds(row["methods"][m], None) for m in ("stock", "patched")),
            f"{row['times_faster']:.2f}×",
        ]
        for row in document["results"]
        if row.get("part") == "convolution"
    ]
    text = (
        f"{facts(document)} Milliseconds of a penalised step of one convolution; its share that is "
        "first-order stays PyTorch's.\n\n"
    )
    return text + markdown(["layer", "stock", "**patched**", "faster"], lines) + source(path)


def shapes(path: Path) -> str:
    """Energies and forces of molecules, every batch of another size."""
    document = json.loads(path.read_text(encoding="utf-8"))
    # a file of one network alone says its version of torch and nothing of the network
    version = document.get("versions", document)["torch"]
    lines = []
    for row in document["rows"]:
        name = [row.get("net", "schnet"), row["method"]]
        if row.get("median_ms") is None:
            lines.append([*name, row.get("failed", "not finished").splitlines()[0][:70], *"–––––"])
            continue
        low, high = row["quartiles_ms"]
        warm = row["warm_up_ms"]
        lines.append(
            [
                *name,
                f"{row['median_ms']:.1f} ({low:.1f}–{high:.1f})",
                f"{row['over_stock']:.2f}" if "over_stock" in row else "–",
                f"{row['peak_mib']:.0f}" if "peak_mib" in row else "–",
                f"{warm[0] / 1e3:.1f} / {sum(warm) / 1e3:.1f}",
                f"{row['slowest_ms']:.1f}",
                f"{row['gradient_error']:.0e}",
            ]
        )
    settings = document["settings"]
    text = (
        f"**{document['hardware']}** (torch {version}; {document['date'][:10]}), "
        f"{settings['dtype']} without TF32, {settings['molecules']} molecules of 9 to 27 atoms, "
        f"{settings['turn']} batches in turn.\n\n"
    )
    heads = ["network", "method", "step, ms", "over stock", "MiB", "first / warm-up, s", "slowest",
             "error"]  # fmt: skip
    return text + markdown(heads, lines) + f"\n`{document['command']}`" + source(path)


PAGES = {
    "jacobian.md": ("bench", jacobian, ["jacobian-h200.json"]),
    "patch.md": ("bench", patch, ["patch-h200.json"]),
    "benchmarks.md": (
        "shapes",
        shapes,
        ["shapes-h200-launched.json", "shapes-h200-backend.json", "shapes-h200.json"],
    ),
}


def rewritten(page: str, table: str, mark: str) -> str:
    start, end = f"<!-- {mark}:start -->", f"<!-- {mark}:end -->"
    pattern = re.compile(re.escape(start) + ".*?" + re.escape(end), re.DOTALL)
    if len(pattern.findall(page)) != 1:
        raise SystemExit(f"the page needs one {start} and one {end} after it")
    return pattern.sub(lambda _: f"{start}\n\n{table}\n{end}", page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, exit with 1 if stale")
    stale = False
    checks = parser.parse_args().check
    for file, (mark, make, results) in PAGES.items():
        page = ROOT / "docs" / file
        old = page.read_text(encoding="utf-8")
        new = rewritten(old, "\n".join(make(RESULTS / name) for name in results), mark)
        stale |= new != old
        if not checks:
            page.write_text(new, encoding="utf-8")
    return int(checks and stale)


if __name__ == "__main__":
    sys.exit(main())
