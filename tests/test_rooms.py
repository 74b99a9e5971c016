"""The house: who may import whom (docs/architecture.md).

A package's `__init__` is its only door, modules import downwards in one order, and no two classes
have the same name.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import doubleback

ROOT = Path(doubleback.__file__).parent

# Each room may import those above it; those on one line do not import one another.
ORDER = (
    ("errors", "dtypes", "_torch", "counting"),
    ("kernels",),
    ("spaces",),
    ("operators",),
    ("patch", "graph"),
    ("rules",),
    ("capture", "plan"),
    ("sweeps",),
    ("run",),
    ("penalties",),
    ("jacobian",),
    ("explain", "state_dicts"),
    ("captured",),
    ("penalised", "with_gradient", "compile"),
    ("check", "landscape"),
    ("",),  # the public names
    ("cli",),
)
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
MOST_FLAT = 12  # modules that lie at the top level, beside the rooms


class Import(NamedTuple):
    """One import of one module of the package by another, both as paths of names."""

    by: tuple[str, ...]
    of: tuple[str, ...]
    line: int

    def __str__(self) -> str:
        return f"{'.'.join(self.by) or '__init__'}:{self.line} imports {'.'.join(self.of)}"


def modules(root: Path = ROOT) -> dict[tuple[str, ...], Path]:
    """Every module, a package standing for its `__init__`."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        *rooms, name = path.relative_to(root).with_suffix("").parts
        found[tuple(rooms) if name == "__init__" else (*rooms, name)] = path
    return found


def imports(root: Path = ROOT) -> list[Import]:
    known = modules(root)
    return [found for name in known for found in _imports_of(name, known)]


def _imports_of(name: tuple[str, ...], known: dict[tuple[str, ...], Path]) -> Iterator[Import]:
    path = known[name]
    package = name if path.name == "__init__.py" else name[:-1]
    for node in _statements(ast.parse(path.read_text())):
        for base, names in _read(node, package):
            for item in names:
                inner = (*base, item)
                yield Import(name, inner if inner in known else base, node.lineno)


def _read(node: ast.stmt, package: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """(a module of this package, the names taken from it) for each that a statement imports."""
    if isinstance(node, ast.ImportFrom):
        parts = tuple(node.module.split(".")) if node.module else ()
        names = [alias.name for alias in node.names]
        if node.level:
            yield (*package[: len(package) - node.level + 1], *parts), names
        elif parts[0] == "doubleback":
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


def through_a_wall(found: Import, known: dict[tuple[str, ...], Path]) -> bool:
    """Whether a module inside a package is imported from outside of that package."""
    package = found.of if known[found.of].name == "__init__.py" else found.of[:-1]
    inner = known[found.of].name != "__init__.py"
    return inner and found.by[: len(package)] != package


def upwards(found: Import) -> bool:
    """Whether a room imports one that stands beside or below it in the order."""
    by, of = (name[0] if name else "" for name in (found.by, found.of))
    return by != of and LEVEL[of] >= LEVEL[by]


def cycle(found: list[Import]) -> list[tuple[str, ...]]:
    """Modules that import one another in a circle, empty where there is none."""
    graph: dict[tuple[str, ...], set] = {}
    for one in found:
        graph.setdefault(one.by, set()).add(one.of)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_doors():
    known = modules()
    assert not [str(found) for found in imports() if through_a_wall(found, known)]


def test_order():
    rooms = {name[0] if name else "" for name in modules()}
    assert rooms <= set(LEVEL), "a new room: give it its place in ORDER"
    assert not [str(found) for found in imports() if upwards(found)]


def test_no_cycles():
    assert not cycle(imports())


def test_few_modules_lie_flat():
    flat = [path.name for path in ROOT.glob("*.py") if path.name != "__init__.py"]
    assert len(flat) <= MOST_FLAT, flat


def test_a_class_name_occurs_once():
    names = Counter(
        node.name
        for path in modules().values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, count in names.items() if count > 1]


@pytest.mark.parametrize("room", [r for rooms in ORDER for r in rooms])
def test_a_room_says_what_it_is(room):
    path = modules().get((room,) if room else ())
    if path is None:
        pytest.skip("not built yet")
    assert ast.get_docstring(ast.parse(path.read_text()))


# ------------------------------------------------------------------- the walk itself is right


@pytest.fixture
def house(tmp_path):
    """A little house, whose modules are given by their text."""

    def build(**texts: str) -> Path:
        for name, text in texts.items():
            path = tmp_path.joinpath(*name.split("__")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            (path.parent / "__init__.py").touch()
            path.write_text(text)
        return tmp_path

    return build


def test_a_wall_is_seen(house):
    root = house(kernels__inner="", rules__one="from ..kernels.inner import x\n")
    (found,) = imports(root)
    assert through_a_wall(found, modules(root))
    root = house(kernels__inner="", rules__one="from ..kernels import inner\n")
    assert through_a_wall(imports(root)[0], modules(root))
    root = house(kernels__inner="", rules__one="from ..kernels import x\n")
    assert not through_a_wall(imports(root)[0], modules(root))
    root = house(kernels__inner="", rules__one="", kernels__other="from .inner import x\n")
    assert not through_a_wall(imports(root)[0], modules(root))


def test_a_back_edge_is_seen(house):
    (found,) = imports(house(kernels__inner="def f():\n    from ..rules import x\n", rules__one=""))
    assert upwards(found)
    (found,) = imports(house(kernels__inner="", rules__one="import doubleback.kernels\n"))
    assert not upwards(found)


def test_a_cycle_is_seen(house):
    root = house(rules__one="from .two import x\n", rules__two="from .one import y\n")
    assert cycle(imports(root))
    checked = "if TYPE_CHECKING:\n    from .one import y\n"
    assert not cycle(imports(house(rules__one="from .two import x\n", rules__two=checked)))
