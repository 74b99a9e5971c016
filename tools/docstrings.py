"""The library's docstrings as Markdown, for the API reference.

Lines `name: what it is` become a list of arguments; examples with `>>>` become code.
"""

from __future__ import annotations

import re
from typing import Any

import griffe  # pyright: ignore[reportMissingImports]  (comes with [docs])

ARGUMENT = re.compile(r"^((?:[a-z_]\w*)(?:, [a-z_]\w*)*): (?=\S)")
OUTPUT = re.compile(r"^\S")


def as_markdown(text: str) -> str:
    """
    >>> print(as_markdown("Adds.\\n\\nx: a number,\\n    any.\\n\\n>>> add(1)\\n2"))
    Adds.
    <BLANKLINE>
    - **`x`**: a number,
        any.
    <BLANKLINE>
    ```python
    >>> add(1)
    2
    ```
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
                lines.append(f"- **{names}**: {line[found.end() :]}")
                inside = "arguments"
            else:
                if inside == "arguments" and not line.startswith(" "):
                    inside = ""
                lines.append(line)
    return "\n".join([*lines, "```"] if inside == "code" else lines)


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
