"""The library's docstrings as Markdown, for the API reference.

Lines `name: what it is` become a list of arguments; examples with `>>>` become code.
"""

from __future__ import annotations

import re
from typing import Any

import griffe  # pyright: ignore[reportMissingImports]  (comes with [docs])

CODE = re.compile(r"(`[^`]*`)")
ARGUMENT = re.compile(r"^((?:[a-z_]\w*)(?:, [a-z_]\w*)*): (?=\S)")
OUTPUT = re.compile(r"^\S")


def as_markdown(text: str) -> str:
    """
    >>> print(as_markdown("Adds J*v.\\n\\nx: a number,\\n    any."))
    Adds J\\*v.
    <BLANKLINE>
    - **`x`**: a number,
        any.
    """
    lines: list[str] = []
    inside = ""  # of "arguments" or "code"
    for line in text.splitlines():
        if line.startswith(">>>"):
            if inside != "code":
                lines += ([""] if lines and lines[-1] else []) + ["```python"]
                inside = "code"
            lines.append(line)
        elif inside == "code" and line.strip():
            lines.append(line)
        else:
            if inside == "code":
                lines.append("```")
                inside = ""
            found = ARGUMENT.match(line)
            if found and (inside or not lines or not lines[-1].strip()):
                names = ", ".join(f"`{name}`" for name in found.group(1).split(", "))
                lines.append(f"- **{names}**: {_prose(line[found.end() :])}")
                inside = "arguments"
            else:
                if inside == "arguments" and not line.startswith(" "):
                    inside = ""
                formula = line.startswith("    ") and not inside
                lines.append(line if formula else _prose(line))
    return "\n".join([*lines, "```"] if inside == "code" else lines)


def _prose(line: str) -> str:
    """A star is an adjoint or a dimension here; none begins italics."""
    parts = CODE.split(line)  # code is every second one
    return "".join(p if i % 2 else p.replace("*", r"\*") for i, p in enumerate(parts))


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
