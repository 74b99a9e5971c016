"""The rooms of the package and who imports whom: the walk over the imports, and its drawing.

    python tools/draw_rooms.py      # writes docs/rooms.svg

tests/test_rooms.py holds the package to `ORDER`, and the drawing to the package.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

HOME = Path(__file__).parent.parent
ROOT = HOME / "src" / "doubleback"
DRAWING = HOME / "docs" / "rooms.svg"

# Each room may import those above it; those on one line do not import one another.
ORDER = (
    ("_torch",),
    ("errors", "dtypes", "counting"),
    ("kernels",),
    ("spaces",),
    ("operators",),
    ("patch", "graph"),
    ("rules",),
    ("capture", "plan"),
    ("sweeps",),
    ("run",),
    ("jacobian",),
    ("penalties",),
    ("explain",),
    ("captured",),
    ("penalised", "compile"),
    ("check", "landscape"),
    ("",),  # the public names
    ("cli",),
)
GROUND = (*ORDER[0], *ORDER[1])  # small modules: no arrows are drawn to them

Name = tuple[str, ...]


class Import(NamedTuple):
    """One import of one module of the package by another, both as paths of names."""

    by: Name
    of: Name
    line: int

    def __str__(self) -> str:
        return f"{'.'.join(self.by) or '__init__'}:{self.line} imports {'.'.join(self.of)}"


def modules(root: Path = ROOT) -> dict[Name, Path]:
    """Every module, a package standing for its `__init__`."""
    named = {}
    for path in sorted(root.rglob("*.py")):
        if path.name == "__main__.py":  # `python -m`: one call, no code of its own
            continue
        *rooms, name = path.relative_to(root).with_suffix("").parts
        named[tuple(rooms) if name == "__init__" else (*rooms, name)] = path
    return named


def imports(root: Path = ROOT) -> list[Import]:
    """All imports of the package's modules by one another, those inside functions too."""
    known = modules(root)
    return [each for name in known for each in _imports_of(name, known)]


def _imports_of(name: Name, known: dict[Name, Path]) -> Iterator[Import]:
    path = known[name]
    package = name if path.name == "__init__.py" else name[:-1]
    for node in _statements(ast.parse(path.read_text())):
        for base, names in _read(node, package):
            for item in names:
                inner = (*base, item)
                yield Import(name, inner if inner in known else base, node.lineno)


def _read(node: ast.stmt, package: Name) -> Iterator[tuple[Name, list[str]]]:
    """(a module of this package, the names taken from it) for each that a statement imports."""
    if isinstance(node, ast.ImportFrom):
        parts = tuple(node.module.split(".")) if node.module else ()
        names = [alias.name for alias in node.names]
        if node.level:
            yield (*package[: len(package) - node.level + 1], *parts), names
        elif parts[:1] == ("doubleback",):
            yield parts[1:], names
    elif isinstance(node, ast.Import):
        for alias in node.names:
            first, *rest = alias.name.split(".")
            if first == "doubleback":
                yield tuple(rest), [""]


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """All statements, but for what only a type checker reads."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.stmt):
            yield child
        yield from _statements(child)


# ------------------------------------------------------------------------------- the drawing

# (column, row) of each room, and what it holds.
PLACES: dict[str, tuple[float, int, str]] = {
    "cli": (2, 0, "the command"),
    "": (1, 1, "public names"),
    "check": (1, 2, "the library's oracles"),
    "penalised": (1, 3, "the modules users hold"),
    "compile": (2, 3, "whole losses"),
    "captured": (0, 4, "what they share"),
    "explain": (2, 4, "a plan in words"),
    "penalties": (2, 5, "v and p, norms, losses"),
    "landscape": (3, 5, "exact ReLU analysis"),
    "jacobian": (2, 6, "many seeds: ways, prices"),
    "capture": (0, 7, "module → graph"),
    "run": (1, 7, "programs, compilation"),
    "patch": (3, 7, "PyTorch's double backward"),
    "sweeps": (1, 8, "the four loops"),
    "plan": (1, 9, "what each sweep does where"),
    "rules": (1, 10, "one record per operator"),
    "graph": (0, 11, "the network as records"),
    "operators": (2, 11, "K, Kᵀ, K□"),
    "spaces": (2, 12, "inner products, norms"),
    "kernels": (2, 13, "fused formulas"),
}
WIDTH, HEIGHT = 194, 46
COLUMN, ROW = 216, 78
LEFT, TOP = 16, 16

STYLE = """
  .paper { fill: #ffffff } .room { fill: #eef3fb; stroke: #4a6fa5 }
  .public { fill: #e6f4ea; stroke: #2f7d4f } .ground { fill: #f4f1ea; stroke: #8a7f6a }
  .name { fill: #14202e; font: 600 14px ui-monospace, Menlo, Consolas, monospace }
  .what { fill: #44525f; font: 12px system-ui, Segoe UI, Helvetica, Arial, sans-serif }
  .arrow { fill: none; stroke: #66788c; stroke-width: 1.5 } .head { fill: #66788c }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #0f151c } .room { fill: #1b2a3d; stroke: #7fa3d9 }
    .public { fill: #17301f; stroke: #6cc08b } .ground { fill: #2a261d; stroke: #b3a688 }
    .name { fill: #e8eef5 } .what { fill: #aebccb }
    .arrow { stroke: #93a5b8 } .head { fill: #93a5b8 }
  }
"""
PUBLIC = ("", "spaces", "operators", "landscape", "cli")


def draw(root: Path = ROOT) -> str:
    """The rooms as SVG. An arrow means 'imports'; one is left out where a longer way leads to the
    same room."""
    here = {name[0] if name else "" for name in modules(root)}
    rooms = {room: place for room, place in PLACES.items() if room in here}
    parts = [_arrow(a, b, rooms) for a, b in sorted(_arrows(root)) if a in rooms and b in rooms]
    parts += [_box(room, rooms[room]) for room in rooms]
    bottom = TOP + (1 + max(row for _, row, _ in rooms.values())) * ROW
    ground = [room for room in GROUND if room in here]
    each = (3 * COLUMN + WIDTH + 12) / len(ground) - 12
    for i, room in enumerate(ground):
        parts += _rectangle(LEFT + i * (each + 12), bottom, each, 32, "ground", [_named(room)])
    width, height = 3 * COLUMN + WIDTH + 2 * LEFT, bottom + 32 + TOP
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" aria-label="Who imports whom">',
            f"<style>{STYLE}</style>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path class="head" d="M0 0 8 4 0 8z"/></marker></defs>',
            f'<rect class="paper" width="{width}" height="{height}" rx="8"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _arrows(root: Path) -> set[tuple[str, str]]:
    """(who, whom) of every import between rooms that no other way through the rooms implies."""
    direct: dict[str, set[str]] = {}
    for each in imports(root):
        by, of = (name[0] if name else "" for name in (each.by, each.of))
        if by != of:
            direct.setdefault(by, set()).add(of)

    def beyond(room: str) -> set[str]:
        return set().union(*(direct.get(r, set()) | beyond(r) for r in direct.get(room, set())))

    return {(a, b) for a, those in direct.items() for b in those - beyond(a)}


def _corner(place: tuple[float, int, str]) -> tuple[float, float]:
    column, row, _ = place
    return LEFT + column * COLUMN, TOP + row * ROW


def _arrow(by: str, of: str, rooms: dict[str, tuple[float, int, str]]) -> str:
    """From the lower edge of one room to the upper edge of another, leaning to where it comes
    from, so that arrows do not meet in one point. A long one turns at its beginning and runs
    straight down, or turns at its end where rooms stand above the second."""
    (x0, y0), (x1, y1) = _corner(rooms[by]), _corner(rooms[of])
    lean = max(-1.0, min(1.0, (x1 - x0) / COLUMN)) * WIDTH / 4
    x0, x1 = x0 + WIDTH / 2 + lean, x1 + WIDTH / 2 - lean
    y0, y1 = y0 + HEIGHT, y1 - 2
    column, row, _ = rooms[of]
    blocked = any(c == column and rooms[by][1] < r < row for c, r, _ in rooms.values())
    gap = ROW - HEIGHT - 2
    a, b = (y1 - gap, y1) if blocked else (y0, y0 + gap)
    turn = f"V{a:g}C{x0:g} {b:g} {x1:g} {a:g} {x1:g} {b:g}V{y1:g}" if x0 != x1 else f"V{y1:g}"
    return f'<path class="arrow" marker-end="url(#head)" d="M{x0:g} {y0:g}{turn}"/>'


def _box(room: str, place: tuple[float, int, str]) -> str:
    style = "public" if room in PUBLIC else "room"
    lines = [_named(room), ("what", place[2])]
    return "\n".join(_rectangle(*_corner(place), WIDTH, HEIGHT, style, lines))


def _named(room: str) -> tuple[str, str]:
    package = room == "" or (ROOT / room / "__init__.py").exists()
    return "name", {"": "doubleback"}.get(room, room + ("/" if package else ".py"))


def _rectangle(
    x: float, y: float, width: float, height: float, style: str, lines: list[tuple[str, str]]
) -> list[str]:
    drawn = [
        f'<rect class="{style}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>'
    ]
    for i, (kind, text) in enumerate(lines):
        base = y + height / 2 + 5 + 17 * (i - (len(lines) - 1) / 2)
        drawn.append(
            f'<text class="{kind}" x="{x + width / 2:g}" y="{base:g}" text-anchor="middle">'
            f"{escape(text)}</text>"
        )
    return drawn


if __name__ == "__main__":
    DRAWING.write_text(draw())
