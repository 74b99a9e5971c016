"""docs/coverage.md: other people's networks, PyTorch's database of operators, and which operators
have a rule of their own, by structure.

python tools/list_rules.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from doubleback.rules import Structure, find_rule, registered

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "coverage.md"
RESULTS = ROOT / "benchmarks" / "results"

HEAD = """# Coverage

This page is written by `tools/list_rules.py` from the records of the last runs and from the table of rules.
"""  # noqa: E501
NETWORKS = """## Networks

{families} families of networks that others wrote, each in a tiny size with random weights, in float64, in training and in evaluation: {runs} runs of two or three training steps, node by node and, in training, as flat graphs. Output, penalty, the gradient of every parameter and of the input, and every buffer are compared with stock autograd's double backward under `Penalised`, `accumulate` and `db.patch()`. {agrees} of {runs} agree, to 1e-10 or to a hundred times what a change in the last digits of input and parameters does (float32's, where a network computes in float32 by name); {captured} are captured ({share:.0f} %), the others run on autograd, and are right there too. The catalogue of `make test-zoo` holds more; what has run is on record in `benchmarks/results/zoo.json` ({date}), which `tools/zoo.py --resume` goes on with.
"""  # noqa: E501
OPERATORS = """## PyTorch's operators

Every operator of PyTorch's own database that has a derivative in float64 on a CPU, as a network of one operator: the penalty's gradient holds its second derivatives in all arguments. Of {compared} operators with samples to compare, {stock} have a second derivative in stock PyTorch, {patch} under `db.patch()`, and {penalised} under `Penalised`, which captures {captured} of them; none is wrong. Where PyTorch has none, the oracle is finite differences. `make test-operators` runs them; the record is `benchmarks/results/operators.json` ({date}).
"""  # noqa: E501
RULES = """## Operators with rules

An operator with a rule of its own is swept by closed formulas, and its values are freed as early as these allow. One without runs all the same, on the generic rule (reverse over reverse of that node alone), and `model.explain(x)` lists it. What is composite in PyTorch (`normalize`, `cosine_similarity`, `interpolate`, …) is captured as the operators that it consists of. [Add an operator](../CONTRIBUTING.md#add-an-operator) shows how to write a rule; [the patch](patch.md#coverage) has a list of its own, of what PyTorch's double backward lacks.
"""  # noqa: E501
WHAT = {
    "linear": "the tangent is the operator itself; no curvature",
    "bilinear": "K, Kᵀ and K□ give every derivative",
    "coordinate-wise": "g′ and g″",
    "piecewise linear": "linear with the mask of the forward sweep; no curvature",
    "standardisation": "one closed form for all norms",
    "general": "formulas of their own",
    "constant": "no derivative",
}


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def networks() -> list[str]:
    found = read("zoo.json")
    share = 100 * found["captured"] / found["runs"]
    parts = [NETWORKS.format(**{**found, "share": share, "date": found["date"][:10]})]
    table = ["| package | version | families | runs | agree | captured |", "| --- " * 6 + "|"]
    for package, counts in found["packages"].items():
        if not counts["runs"]:
            continue
        name = package.replace("_", "-")
        numbers = [counts[key] for key in ("families", "runs", "agrees", "captured")]
        cells = [name, found["versions"][name], *map(str, numbers)]
        table.append("| " + " | ".join(cells) + " |")
    parts.append("\n".join(table) + "\n")
    parts += [found["note"] + "\n"] if "note" in found else []
    rows = found["results"]
    lost: dict[str, list[str]] = {}
    for row in rows:
        if not row["captured"]:
            family = row["network"].partition("/")[2]
            lost.setdefault(_short(row["why"]), []).append(family)
    if lost:
        parts.append("Not captured, and why:\n")
        items = sorted((sorted(set(names)), why) for why, names in lost.items())
        parts.append("\n".join(f"- {', '.join(n)}: {why}" for n, why in items) + "\n")
    for package, counts in found["packages"].items():
        if not counts["runs"]:
            continue
        own = sorted({r["network"].partition("/")[2] for r in rows
                      if r["network"].startswith(package + "/")}, key=str.lower)  # fmt: skip
        parts.append(f"**{package.replace('_', '-')}**: {', '.join(own)}\n")
    return parts


def _short(why: str) -> str:
    """The cause alone, without the network's name, the line and the remedy."""
    cause = why.partition("cannot be captured as one graph: ")[2] or why
    cause = cause.partition(" stopped at ")[0].partition(" Remedy:")[0].partition(" (e.g.")[0]
    return cause.strip().rstrip(".")


def operators() -> list[str]:
    found = read("operators.json")
    count = {key.replace("second in ", ""): n for key, n in found["count"].items()}
    parts = [OPERATORS.format(**count, date=found["date"][:10])]
    parts += [found["note"] + "\n"] if "note" in found else []
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in found["results"]:
        for way, why in row.get("reasons", {}).items():
            reasons.setdefault((way, why), []).append(row["operator"])
    told = {
        "penalised": "no second derivative under `Penalised`",
        "patch": "no second derivative under the patch",
        "captured": "not captured, and right on autograd",
        "samples": "nothing to compare",
    }
    items = [
        f"- {told[way]}: {', '.join(f'`{n}`' for n in names)}; {why}"
        for (way, why), names in sorted(reasons.items(), key=lambda item: [*told].index(item[0][0]))
    ]
    parts.append("\n".join(items) + "\n")
    return parts


def page() -> str:
    found: dict[Structure, set[str]] = {}
    for op in registered():
        room, name, *_ = str(op).split(".")
        if room == "aten":
            found.setdefault(find_rule(op).structure, set()).add(name)
    parts = [HEAD, *networks(), *operators(), RULES]
    for structure in Structure:
        names = sorted(found.get(structure, ()))
        if names:
            parts.append(f"### {structure.value.capitalize()}\n")
            parts.append(f"{len(names)} operators; {WHAT[structure.value]}.\n")
            parts.append(" · ".join(f"`{name}`" for name in names) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
