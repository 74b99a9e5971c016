"""Writes the measured tables of README.md from benchmarks/results/engine-*.json.

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
    lines += [f"From [{name}]({name}), which names the commands.", ""]
    return "\n".join(lines)


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


def rewritten(readme: str, paths: list[Path]) -> str:
    tables = "".join("\n" + section(path) for path in paths)
    tables = f"\n{highlights()}{tables}" if tables else ""
    pattern = re.compile(re.escape(START) + ".*?" + re.escape(END), re.DOTALL)
    if len(pattern.findall(readme)) != 1:
        raise SystemExit(f"README.md needs one {START} and one {END} after it")
    return pattern.sub(
        lambda _: f"{START}\n{tables}\n{END}" if tables else f"{START}\n{END}", readme
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the measured tables of README.md.")
    parser.add_argument("--check", action="store_true", help="change nothing, exit with 1 if stale")
    arguments = parser.parse_args()
    # GPUs first: engine-cpu.json is the appendix.
    paths = sorted(RESULTS.glob("engine-*.json"), key=lambda path: ("cpu" in path.stem, path.stem))
    if not paths:
        print(f"no engine-*.json under {RESULTS.relative_to(ROOT)}: make bench", file=sys.stderr)
        return 0 if arguments.check else 1
    readme = ROOT / "README.md"
    old = readme.read_text(encoding="utf-8")
    new = rewritten(old, paths)
    if arguments.check:
        return int(new != old)
    readme.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
