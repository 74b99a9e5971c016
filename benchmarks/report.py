"""Ratios, tables and the JSON file of engine.py."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

PLAIN = ("plain", "plain compiled", "plain channels-last", "plain compiled channels-last")
FIELDS = (
    "ms",
    "ms_spread",
    "peak_mib",
    "price_vs_plain_eager",
    "price_vs_plain_compiled",
    "price_vs_best_plain",
    "memory_vs_plain",
    "relative_error",
    "relative_error_exact",
    "relative_error_worst",
    "relative_error_worst_exact",
    "penalty",
    "penalty_error",
    "penalty_error_exact",
    "loss",
    "reserved_mib",
    "first_call_s",
    "samples",
    "error",
)


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def complete(net: str, dtype: str, batch: int, weight: float, facts: dict[str, Any]) -> list[Row]:
    """One row per method, with its ratios to the plain steps of the same run.

    `suspect` marks a gradient that is further from the exact one than rounding explains: three
    times as far as stock autograd's in the same dtype.
    """
    raw = facts["rows"]
    ms = {method: row.get("ms") for method, row in raw.items() if not row.get("error")}
    peak = {method: row.get("peak_mib") for method, row in raw.items()}
    best = min((ms[m] for m in PLAIN if ms.get(m)), default=None)
    stock = raw.get("stock", {}).get("relative_error_exact")
    rows = []
    for method, measured in raw.items():
        time, error = ms.get(method), measured.get("relative_error_exact")
        row = {"net": net, "dtype": dtype, "batch": batch, "weight": weight, "method": method}
        row |= {field: measured.get(field) for field in FIELDS}
        row |= {
            "price_vs_plain_eager": _ratio(time, ms.get("plain")),
            "price_vs_plain_compiled": _ratio(time, ms.get("plain compiled")),
            "price_vs_best_plain": _ratio(time, best),
            "memory_vs_plain": _ratio(peak[method], peak.get("plain")),
            "parameter_and_gradient_mib": facts.get("parameter_and_gradient_mib"),
            "suspect": None if error is None or stock is None else error > 3 * stock + 1e-5,
        }
        rows.append(row)
    return rows


MEMORY = ("peak_mib", "reserved_mib", "memory_vs_plain")


def _place(row: Row) -> tuple[str, str, str]:
    return row["net"], row["dtype"], row["method"]


def combine(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several runs as one document: a later run's row replaces an earlier one's for the same
    network, dtype and method, and where it has no memory of its own takes over the earlier one's.
    Ratios stay those of the run in which they were measured."""
    together = {**documents[-1], "results": []}
    machines = {json.dumps([d["hardware"], d["versions"], d["small"]]) for d in documents}
    if len(machines) > 1:
        raise SystemExit(f"not from the same machine and sizes: {sorted(machines)}")
    for document in documents:
        measured = [row for row in document["results"] if row.get("ms") is not None]
        known = {_place(row): row for row in together["results"]}
        for row in measured:
            before = known.get(_place(row))
            if before is not None and row.get("peak_mib") is None:
                row |= {name: before.get(name) for name in MEMORY}
            known[_place(row)] = row
        together["results"] = list(known.values())
    together["command"] = "\n".join(dict.fromkeys(d["command"] for d in documents))
    return together


def write(path: Path | None, document: dict[str, Any]) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".partial")
    scratch.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(scratch, path)


def jax_version(python: str) -> str | None:
    question = "import importlib.metadata as m; print(m.version('jax'))"
    answer = subprocess.run([python, "-c", question], capture_output=True, text=True)
    return answer.stdout.strip() or None


# --- tables ---------------------------------------------------------------------------------------


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def print_table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """With rich where it is installed, else in aligned plain text."""
    lines = [list(map(str, line)) for line in lines]
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
        for line in [list(heads), *lines]:
            first, *rest = (
                cell.rjust(width) if i else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            print("  ".join([first, *rest]))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, head in enumerate(heads):
        table.add_column(head, justify="right" if i else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    console = Console()
    if not console.is_terminal:
        console = Console(width=sum(max(map(len, c)) + 3 for c in zip(heads, *lines, strict=True)))
    console.print(table)


def show(rows: Sequence[Row]) -> None:
    """All methods on one network and dtype."""
    heads = [
        "method",
        "ms",
        "±",
        "× plain",
        "× compiled",
        "× best",
        "MiB",
        "× MiB",
        "error",
        "exact",
        "",
    ]
    lines = []
    for row in rows:
        lines.append(
            [
                row["method"],
                _number(row["ms"], ".2f"),
                _number(row["ms_spread"], ".2f"),
                _number(row["price_vs_plain_eager"], ".2f"),
                _number(row["price_vs_plain_compiled"], ".2f"),
                _number(row["price_vs_best_plain"], ".2f"),
                _number(row["peak_mib"], ".0f"),
                _number(row["memory_vs_plain"], ".2f"),
                _number(row["relative_error"], ".1e"),
                _number(row["relative_error_exact"], ".1e"),
                "suspect" if row["suspect"] else "",
            ]
        )
    print_table(heads, lines)
    for row in rows:
        if row["error"]:
            print(f"  {row['method']}: {row['error'].strip().splitlines()[0][:200]}")


def overview(rows: Sequence[Row]) -> None:
    """One line per network and dtype: milliseconds, and the prices that count."""
    found = {(row["net"], row["dtype"], row["method"]): row for row in rows}
    pairs = dict.fromkeys((row["net"], row["dtype"]) for row in rows)

    def cell(net: str, dtype: str, method: str, price: str | None = None) -> str:
        row = found.get((net, dtype, method))
        if row is None or row["ms"] is None or row["error"]:
            return "–" if row is None else "failed"
        text = f"{row['ms']:.2f}" + ("!" if row["suspect"] else "")
        return f"{text} ({row[price]:.2f})" if price and row[price] else text

    eager, compiled = "price_vs_plain_eager", "price_vs_plain_compiled"
    columns = [
        ("plain", "plain", None),
        ("compiled", "plain compiled", None),
        ("ours", "doubleback eager", eager),
        ("ours compiled", "doubleback compiled", compiled),
        ("one-shot compiled", "doubleback one-shot compiled", compiled),
        ("stock", "stock", eager),
        ("make_fx", "make_fx + inductor", compiled),
        ("torch.func", "torch.func compiled", compiled),
        ("JAX plain", "JAX jit plain", None),
        ("JAX", "JAX jit", None),
    ]
    lines = []
    for net, dtype in pairs:
        memory = found.get((net, dtype, "doubleback compiled"), {}).get("memory_vs_plain")
        cells = [cell(net, dtype, method, price) for _, method, price in columns]
        lines.append([f"{net} {dtype}", *cells, _number(memory, ".2f")])
    print("ms; in brackets times plain for eager methods, times compiled plain for compiled ones;")
    print("! a gradient further from the exact one than rounding explains")
    print_table(["", *(head for head, _, _ in columns), "× MiB"], lines)
