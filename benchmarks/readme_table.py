"""Writes the measured tables from benchmarks/results/engine-*.json: a short one into README.md, all
of them into docs/benchmarks.md.

python benchmarks/readme_table.py            rewrite what lies between the markers
python benchmarks/readme_table.py --check    exit with 1 if that would change anything
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
START, END = "<!-- bench:start -->", "<!-- bench:end -->"

EAGER, COMPILED = "price_vs_plain_eager", "price_vs_plain_compiled"
COLUMNS = (  # heading, method, which ratio goes in brackets
    ("plain", "plain", None),
    ("stock autograd", "stock", EAGER),
    ("**doubleback**", "doubleback eager", EAGER),
    ("**`accumulate`**", "doubleback one-shot", EAGER),
    ("**`accumulate`, CUDA graph**", "doubleback one-shot graphed", EAGER),
    ("plain, compiled", "plain compiled", None),
    ("make_fx + Inductor", "make_fx + inductor", COMPILED),
    ("torch.func, compiled", "torch.func compiled", COMPILED),
    ("JAX plain", "JAX jit plain", None),
    ("JAX", "JAX jit", None),
    ("**doubleback, compiled**", "doubleback compiled", COMPILED),
    ("**`accumulate`, compiled**", "doubleback one-shot compiled", COMPILED),
    ("**… as a CUDA graph**", "doubleback one-shot compiled graphed", COMPILED),
)
SHORT = (  # the README's: columns, and at most eight rows
    ("stock autograd", ("stock",)),
    ("**`db.Penalised`**", ("doubleback eager",)),
    ("**`accumulate`**", ("doubleback one-shot",)),
    ("**… as a CUDA graph**", ("doubleback one-shot graphed",)),
    ("peak memory", ()),
)
SHORT_ROWS = (
    ("conv", "float32"), ("depthwise", "float32"), ("mlp", "float32"), ("resnet18", "float32"),
    ("resnet18", "bf16"), ("convnext", "bf16"), ("vit", "float32"), ("vit", "bf16"),
)  # fmt: skip
MEMORY = (  # heading, whose peak, over whose
    ("peak memory", ("doubleback eager", "doubleback one-shot"), "plain"),
    ("… compiled", ("doubleback compiled", "doubleback one-shot compiled"), "plain compiled"),
)


def cell(row: dict[str, Any] | None, ratio: str | None) -> str:
    """'5.27 (1.88×)'; '–' where a method was not run, 'fails' where it raised.

    >>> cell({"ms": 5.274, "error": None, "suspect": False, "r": 1.884}, "r")
    '5.27 (1.88×)'
    """
    error = (row or {}).get("error") or ""
    if row is None or error.startswith(("not run", "ended at its limit")):
        return "–"
    if row["error"] or row["ms"] is None:
        return "fails"
    text = f"{row['ms']:.2f}" + ("†" if row["suspect"] else "")
    return f"{text} ({row[ratio]:.2f}×)" if ratio and row[ratio] else text


def table(results: list[dict[str, Any]]) -> Iterable[str]:
    """One line per network and dtype; columns that no network filled are left out."""
    found = {(row["net"], row["dtype"], row["method"]): row for row in results}
    nets = list(dict.fromkeys(row["net"] for row in results))
    cases = sorted(
        {(row["net"], row["dtype"], row["batch"]) for row in results},
        key=lambda case: (nets.index(case[0]), case[1] != "float32"),
    )
    body = {
        case: [cell(found.get((*case[:2], method)), ratio) for _, method, ratio in COLUMNS]
        for case in cases
    }
    for case, cells in body.items():
        rows = {method: row for (*of, method), row in found.items() if tuple(of) == case[:2]}
        cells += [peak([rows.get(m) for m in ours], rows.get(plain)) for _, ours, plain in MEMORY]
    headings = [heading for heading, *_ in (*COLUMNS, *MEMORY)]
    used = [i for i in range(len(headings)) if any(cells[i] != "–" for cells in body.values())]
    yield " | ".join(["| network, batch", *(headings[i] for i in used)]) + " |"
    yield "| --- " + "| ---: " * len(used) + "|"
    for (net, dtype, batch), cells in body.items():
        yield " | ".join([f"| {net} {dtype}, {batch}", *(cells[i] for i in used)]) + " |"


def peak(ours: list[dict[str, Any] | None], plain: dict[str, Any] | None) -> str:
    """The first memory there is of ours, over plain's.

    >>> peak([None, {"peak_mib": 3.0}], {"peak_mib": 2.0}), peak([None], {"peak_mib": 2.0})
    ('1.50×', '–')
    """
    above = next((row["peak_mib"] for row in ours if row and row.get("peak_mib")), None)
    below = (plain or {}).get("peak_mib")
    return f"{above / below:.2f}×" if above and below else "–"


def section(path: Path) -> str:
    document = json.loads(path.read_text(encoding="utf-8"))
    rows = document["results"]
    versions = ", ".join(f"{name} {value}" for name, value in document["versions"].items() if value)
    sizes = ", reduced sizes" if document["small"] else ""
    memory = ""
    if any(row.get("peak_mib") for row in rows):
        memory = " Peak memory is doubleback's over the plain step's, both eager or both compiled."
    lines = [
        f"**{document['hardware']}**{sizes} ({versions}; {document['date'][:10]}). Milliseconds of "
        "one training step; in brackets, times the plain step (the compiled plain step for "
        "compiled methods), always of one run." + memory,
        "",
        *table(rows),
        "",
    ]
    if any(row["suspect"] for row in rows):
        lines += ["† further from the exact gradient than rounding explains.", ""]
    name = path.relative_to(ROOT).as_posix()
    lines += [f"From [{name}](../{name}), which names the commands.", ""]
    return "\n".join(lines)


def short(path: Path) -> str:
    """The README's table: prices in plain steps of the same run, no row left out for its result."""
    document = json.loads(path.read_text(encoding="utf-8"))
    found = {(row["net"], row["dtype"], row["method"]): row for row in document["results"]}
    lines = [
        "| network, batch | plain | " + " | ".join(heading for heading, _ in SHORT) + " |",
        "| --- " + "| ---: " * (len(SHORT) + 1) + "|",
    ]
    for net, dtype in SHORT_ROWS:
        rows = {method: row for (*of, method), row in found.items() if of == [net, dtype]}
        if rows:
            plain = rows["plain"]
            cells = [price(rows, methods) for _, methods in SHORT[:-1]]
            cells.append(peak([rows.get(m) for m in MEMORY[0][1]], plain))
            first = f"| {net} {dtype}, {plain['batch']} | {plain['ms']:.1f} ms | "
            lines.append(first + " | ".join(cells) + " |")
    torch = document["versions"]["torch"]
    hardware = f"{document['hardware']}, torch {torch}, {document['date'][:10]}"
    return "\n".join([*lines, "", f"{hardware}; memory over the plain step's. {highlights()}"])


def price(rows: dict[str, dict[str, Any]], methods: Iterable[str]) -> str:
    """Plain steps that the first of these methods takes, where it ran.

    >>> price({"a": {"error": None, EAGER: 2.26}}, ["b", "a"]), price({}, ["a"])
    ('2.3×', '–')
    """
    for row in (rows[method] for method in methods if method in rows):
        if not row["error"] and row[EAGER]:
            return f"{row[EAGER]:.1f}×"
    return "–"


def highlights() -> str:
    """What the patch and Jacobian penalties gain, in two sentences."""
    patched, jacobian = (
        json.loads((RESULTS / f"{name}-h200.json").read_text(encoding="utf-8"))["results"]
        for name in ("patch", "jacobian")
    )
    prices = {
        f"{row['net']} {row['dtype']}": (row["price_stock"], row["price_patched"])
        for row in patched
        if row.get("price_stock") and row.get("price_patched")
    }
    chosen = ("mobilenetv2 float32", "resnet50 bf16", "convnext-t float32", "stylegan2-r1 bf16")
    steps = ", ".join(f"{prices[n][1]:.1f} instead of {prices[n][0]:.1f} ({n})" for n in chosen)
    rows = next(r["rows"] for r in jacobian if (r["net"], r["dtype"]) == ("conv", "float32"))
    names = ("doubleback", "doubleback chunk 1", "JAX jit Jacobian", "stock loop")
    ours, one, jax, stock = (
        f"{rows[name]['ms']:.0f} ms and {rows[name]['peak_mib'] / 1024:.1f} GiB" for name in names
    )
    return (
        f"On an H200, a gradient penalty by `create_graph=True` under `db.patch()` costs, in "
        f"plain steps, {steps}. The exact Jacobian penalty of the conv network (float32, ten "
        f"outputs) takes {ours}, with one output at a time {one}; JAX {jax}, stock PyTorch "
        f"{stock}.\n"
    )


def rewritten(page: str, tables: str) -> str:
    pattern = re.compile(re.escape(START) + ".*?" + re.escape(END), re.DOTALL)
    if len(pattern.findall(page)) != 1:
        raise SystemExit(f"the page needs one {START} and one {END} after it")
    return pattern.sub(lambda _: f"{START}\n\n{tables}\n{END}", page)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the measured tables of training steps.")
    parser.add_argument("--check", action="store_true", help="change nothing, exit with 1 if stale")
    arguments = parser.parse_args()
    # GPUs first: engine-cpu.json is the appendix.
    paths = sorted(RESULTS.glob("engine-*.json"), key=lambda path: ("cpu" in path.stem, path.stem))
    if not paths:
        print(f"no engine-*.json under {RESULTS.relative_to(ROOT)}: make bench", file=sys.stderr)
        return 0 if arguments.check else 1
    pages = {
        ROOT / "README.md": short(paths[0]),
        ROOT / "docs" / "benchmarks.md": "\n".join(section(path) for path in paths),
    }
    stale = False
    for page, tables in pages.items():
        old = page.read_text(encoding="utf-8")
        new = rewritten(old, tables)
        stale |= new != old
        if not arguments.check:
            page.write_text(new, encoding="utf-8")
    return int(stale and arguments.check)


if __name__ == "__main__":
    sys.exit(main())
