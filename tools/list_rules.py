"""docs/coverage.md: which operators have a rule of their own, by structure.

python tools/list_rules.py
"""

from __future__ import annotations

from pathlib import Path

from doubleback.rules import Structure, find_rule, registered

PAGE = Path(__file__).parent.parent / "docs" / "coverage.md"

HEAD = """# Operators with rules

An operator with a rule of its own is swept by closed formulas, and its values are freed as early as these allow. One without runs all the same, on the generic rule (reverse over reverse of that node alone), and `model.explain(x)` lists it. What is composite in PyTorch (`normalize`, `cosine_similarity`, `interpolate`, …) is captured as the operators that it consists of. [Add an operator](../CONTRIBUTING.md#add-an-operator) shows how to write a rule; [the patch](patch.md#coverage) has a list of its own, of what PyTorch's double backward lacks.

This page is written by `tools/list_rules.py` from the table of rules.
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


def page() -> str:
    found: dict[Structure, set[str]] = {}
    for op in registered():
        room, name, *_ = str(op).split(".")
        if room == "aten":
            found.setdefault(find_rule(op).structure, set()).add(name)
    parts = [HEAD]
    for structure in Structure:
        names = sorted(found.get(structure, ()))
        if names:
            parts.append(f"## {structure.value.capitalize()}\n")
            parts.append(f"{len(names)} operators; {WHAT[structure.value]}.\n")
            parts.append(" · ".join(f"`{name}`" for name in names) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
