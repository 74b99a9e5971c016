"""Writes what benchmarks/results/engine-*.json hold: a short table into README.md with the prices
that its first sentence and its picture's caption name, all tables into docs/benchmarks.md, and the
chart docs/pictures/prices.svg.

python benchmarks/readme_table.py            rewrite them
python benchmarks/readme_table.py --check    exit with 1 if that would change anything
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
START, END = "<!-- bench:start -->", "<!-- bench:end -->"

Row = dict[str, Any]

NAMES = {
    "conv": "6 convolutions", "depthwise": "depthwise convolutions", "mlp": "MLP",
    "resnet18": "ResNet-18", "convnext": "ConvNeXt-T", "vit": "ViT-S/16", "resnet50": "ResNet-50",
    "mobilenetv2": "MobileNetV2", "efficientnet_b0": "EfficientNet-B0", "swin_t": "Swin-T",
    "vit_b": "ViT-B/16", "bert": "BERT-base", "llama": "Llama-like decoder",
}  # fmt: skip

KINDS = (  # heading, and the methods of one launch kind, plain first
    (
        "launched kernel by kernel",
        (
            "stock",
            "stock channels-last",
            "patched",
            "patched channels-last",
            "doubleback",
            "accumulate",
        ),
        ("plain", "plain channels-last"),
    ),
    (
        "as CUDA graphs",
        ("doubleback graphed", "accumulate graphed"),
        ("plain CUDA graph", "plain channels-last CUDA graph"),
    ),
    (
        "compiled",
        (
            "torch.func compiled",
            "make_fx + inductor",
            "make_fx + inductor patched",
            "doubleback compiled",
            "accumulate compiled",
            "accumulate compiled recompute",
        ),
        ("plain compiled", "plain compiled channels-last"),
    ),
    (
        "compiled, as CUDA graphs",
        (
            "doubleback compiled graphed",
            "accumulate compiled graphed",
            "accumulate compiled recompute graphed",
        ),
        ("plain compiled CUDA graph", "plain compiled channels-last CUDA graph"),
    ),
)
HEADS = {
    "stock": "stock autograd", "stock channels-last": "stock, channels-last",
    "patched": "`db.patch()`", "patched channels-last": "`db.patch()`, channels-last",
    "doubleback": "**`Penalised`**", "accumulate": "**`accumulate`**",
    "doubleback graphed": "**`Penalised`**", "accumulate graphed": "**`accumulate`**",
    "doubleback compiled": "**`Penalised`**", "accumulate compiled": "**`accumulate`**",
    "doubleback compiled graphed": "**`Penalised`**",
    "accumulate compiled graphed": "**`accumulate`**",
    "accumulate compiled recompute": "**… `recompute=True`**",
    "accumulate compiled recompute graphed": "**… `recompute=True`**",
}  # fmt: skip


def ran(row: Row, method: str) -> Row | None:
    column = row["columns"].get(method)
    return column if column and column.get("ms") is not None else None


def fastest(row: Row, names: Sequence[str]) -> Row | None:
    found = [column for name in names if (column := ran(row, name))]
    return min(found, key=lambda column: column["ms"]) if found else None


def price(column: Row | None) -> str:
    """'2.03 ± 0.04', the spread being that of the step's own time; '–' where it was not run.

    >>> price({"ms": 10.0, "ms_spread": 0.5, "price": 2.0}), price(None)
    ('2.00 ± 0.10', '–')
    """
    if column is None or column.get("price") is None:
        return "–"
    spread = column["price"] * column["ms_spread"] / column["ms"]
    return f"{column['price']:.2f} ± {spread:.2f}" if spread >= 0.005 else f"{column['price']:.2f}"


def error(row: Row, names: Iterable[str]) -> str:
    found = [c["gradient_error"] for n in names if (c := ran(row, n)) and c.get("gradient_error")]
    return f"{max(found):.0e}" if found else "–"


def memory(row: Row, names: Sequence[str]) -> str:
    column = next((c for n in names if (c := ran(row, n)) and c.get("memory_price")), None)
    return "–" if column is None else f"{column['memory_price']:.2f}"


def label(row: Row) -> str:
    return f"{NAMES.get(row['net'], row['net'])} {row['dtype']}, {row['batch']}"


def markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(heads) + " |",
        "| --- " + "| ---: " * (len(heads) - 1) + "|",
        *("| " + " | ".join(line) + " |" for line in lines),
    ]


def versions(document: Row) -> str:
    known = ", ".join(f"{n} {v}" for n, v in document["versions"].items() if v)
    small = ", reduced sizes" if document["small"] else ""
    return f"**{document['hardware']}**{small} ({known}; {document['date'][:10]})."


def section(path: Path) -> str:
    """All launch kinds of one run."""
    document = json.loads(path.read_text(encoding="utf-8"))
    lines = [versions(document), ""]
    for heading, methods, plain in KINDS:
        used = [m for m in methods if any(ran(row, m) for row in document["rows"])]
        rows = [row for row in document["rows"] if fastest(row, plain)]
        if not used or not rows:
            continue
        ours = [m for m in used[::-1] if "**" in HEADS.get(m, "")]
        held = [m for m in ours if "recompute" not in m]
        again = [m for m in ours if "recompute" in m]
        has_memory = any(memory(row, ours) != "–" for row in rows)
        body = []
        for row in rows:
            best = fastest(row, plain)
            assert best is not None
            cells = [label(row), f"{best['ms']:.2f} ms"]
            cells += [price(ran(row, m)) for m in used]
            cells += [error(row, [m for m in used if m in HEADS and "**" in HEADS[m]])]
            cells += [error(row, ["stock"])] if "stock" in used else []
            cells += [memory(row, held)] if has_memory else []
            cells += [memory(row, again)] if has_memory and again else []
            body.append(cells)
        heads = ["network, batch", "plain", *(HEADS.get(m, m) for m in used), "gradient error"]
        heads += ["… of stock"] if "stock" in used else []
        heads += ["memory"] if has_memory else []
        heads += ["… `recompute=True`"] if has_memory and again else []
        lines += [f"**{heading[0].upper()}{heading[1:]}**", "", *markdown(heads, body), ""]
    name = path.relative_to(ROOT).as_posix()
    note = f" {document['note']}" if document.get("note") else ""
    lines += [f"From [{name}](../{name}): `{document['command']}`.{note}", ""]
    return "\n".join(lines)


SHORT = (
    ("stock autograd", ("stock", "stock channels-last")),
    ("**`db.Penalised`**", ("doubleback",)),
    ("**… as CUDA graphs**", ("doubleback graphed", "accumulate graphed")),
    ("**… compiled too**", ("accumulate compiled graphed",)),
)


def short(path: Path) -> str:
    """The README's table: every network of the run, the worst included."""
    document = json.loads(path.read_text(encoding="utf-8"))
    lines = []
    for row in document["rows"]:
        best = fastest(row, KINDS[0][2])
        if best is None:
            continue
        prices = [price(fastest(row, methods)) for _, methods in SHORT]
        cells = [label(row), f"{best['ms']:.1f} ms", *prices, memory(row, ("doubleback",))]
        lines.append(cells)
    heads = ["network, batch", "plain step", *(heading for heading, _ in SHORT), "memory"]
    about = (
        f"{document['hardware']}, torch {document['versions']['torch']}, {document['date'][:10]}"
    )
    told = f"{about}. Compiled prices are those of `accumulate`; memory is `Penalised`'s, eager."
    if any("–" in cells for cells in lines):
        told += " –: not measured in the time that the row was given."
    return "\n".join([*markdown(heads, lines[:8]), "", told, ""])


# ------------------------------------------------------------------------------------- chart

SERIES = (
    ("stock", "stock autograd", ("stock", "stock channels-last")),
    ("ours", "db.Penalised", ("doubleback",)),
    ("best", "compiled, as CUDA graphs", ("doubleback compiled graphed",
                                           "accumulate compiled graphed")),
)  # fmt: skip


def named(page: str, path: Path) -> str:
    """The README with the ranges of the chart in its first sentence and in the chart's caption."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    stock, *ours = (
        [c["price"] for row in rows if (c := fastest(row, names)) and c.get("price")]
        for _, _, names in SERIES
    )
    most = [price for prices in ours for price in prices]
    caption = (
        f"![A step with a penalty in plain steps: stock autograd {min(stock):.0f} to "
        f"{max(stock):.0f}, doubleback {min(most):.1f} to {max(most):.1f}]"
    )
    for pattern, text in (
        (r"where stock PyTorch costs \d+ to \d+\.",
         f"where stock PyTorch costs {min(stock):.0f} to {max(stock):.0f}."),
        (r"!\[A step with a penalty[^]]*\]", caption),
    ):  # fmt: skip
        page, found = re.subn(pattern, lambda _, text=text: text, page)
        if found != 1:
            raise SystemExit(f"README.md needs {pattern} once")
    return page


def chart(path: Path) -> str:
    """Prices as bars on a logarithmic axis, for light and dark pages."""
    document, series = json.loads(path.read_text(encoding="utf-8")), SERIES
    rows = [row for row in document["rows"] if fastest(row, KINDS[0][2])]
    left, wide, bar, gap = 215, 430, 11, 16
    step = len(series) * bar + gap
    height = len(rows) * step + 74
    most = max(
        (c["price"] for row in rows for _, _, names in series if (c := fastest(row, names))
         and c.get("price")), default=2.0,
    )  # fmt: skip
    scale = wide / math.log(most * 1.05)

    def at(value: float) -> float:
        return left + scale * math.log(max(value, 1.0))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + wide + 70} {height}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        "<style>text{fill:#24292f}.axis{stroke:#8c959f;stroke-width:.6}.two{stroke:#24292f;"
        "stroke-dasharray:3 3}.stock{fill:#b9c0c8}.ours{fill:#2f81f7}.best{fill:#0b4f9e}"
        "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.axis{stroke:#6e7681}"
        ".two{stroke:#e6edf3}.stock{fill:#57606a}.ours{fill:#58a6ff}.best{fill:#a5d6ff}}</style>",
    ]
    bottom = height - 46
    for tick in (1, 2, 5, 10, 20, 50):
        if tick <= most * 1.05:
            kind = "two" if tick == 2 else "axis"
            parts.append(
                f'<line class="{kind}" x1="{at(tick):.1f}" x2="{at(tick):.1f}" y1="8" '
                f'y2="{bottom}"/><text x="{at(tick):.1f}" y="{bottom + 15}" '
                f'text-anchor="middle">{tick}</text>'
            )
    for i, row in enumerate(rows):
        top = 12 + i * step
        parts.append(
            f'<text x="{left - 10}" y="{top + len(series) * bar / 2 + 4:.1f}" '
            f'text-anchor="end">{NAMES.get(row["net"], row["net"])} {row["dtype"]}</text>'
        )
        for k, (kind, _, names) in enumerate(series):
            column = fastest(row, names)
            if column is None or not column.get("price"):
                continue
            y = top + k * bar
            width = max(1.0, at(column["price"]) - left)
            parts.append(
                f'<rect class="{kind}" x="{left}" y="{y}" width="{width:.1f}" '
                f'height="{bar - 1}"/><text x="{left + width + 5:.1f}" y="{y + bar - 2}" '
                f'font-size="10">{column["price"]:.1f}</text>'
            )
    x = left
    for kind, name, _ in series:
        parts.append(
            f'<rect class="{kind}" x="{x}" y="{height - 17}" width="11" height="11"/>'
            f'<text x="{x + 16}" y="{height - 7}">{name}</text>'
        )
        x += 34 + 7 * len(name)
    parts.append(
        f'<text x="10" y="{height - 7}" font-size="12">plain steps of the same kind</text></svg>'
    )
    return "\n".join(parts) + "\n"


def rewritten(page: str, tables: str) -> str:
    pattern = re.compile(re.escape(START) + ".*?" + re.escape(END), re.DOTALL)
    if len(pattern.findall(page)) != 1:
        raise SystemExit(f"the page needs one {START} and one {END} after it")
    return pattern.sub(lambda _: f"{START}\n\n{tables}\n{END}", page)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the measured tables of training steps.")
    parser.add_argument("--check", action="store_true", help="change nothing, exit with 1 if stale")
    arguments = parser.parse_args()
    # GPUs first, bf16 before float32: the others are appendices
    paths = sorted(
        RESULTS.glob("engine-*.json"),
        key=lambda path: ("cpu" in path.stem, "float32" in path.stem, path.stem),
    )
    if not paths:
        print(f"no engine-*.json under {RESULTS.relative_to(ROOT)}: make bench", file=sys.stderr)
        return 0 if arguments.check else 1
    readme, book = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
    pages = {
        readme: named(rewritten(readme.read_text(encoding="utf-8"), short(paths[0])), paths[0]),
        book: rewritten(
            book.read_text(encoding="utf-8"), "\n".join(section(path) for path in paths)
        ),
        ROOT / "docs" / "pictures" / "prices.svg": chart(paths[0]),
    }
    stale = False
    for page, new in pages.items():
        old = page.read_text(encoding="utf-8") if page.exists() else ""
        stale |= new != old
        if not arguments.check:
            page.write_text(new, encoding="utf-8")
    return int(stale and arguments.check)


if __name__ == "__main__":
    sys.exit(main())
