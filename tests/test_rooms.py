"""The house: who may import whom (docs/architecture.md).

A package's `__init__` is its only door, modules import downwards in one order, and no two classes
have the same name.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from doubleback.kernels.pointwise import TABLE as SECOND_DERIVATIVES
from tools.draw_rooms import DRAWING, ORDER, ROOT, Import, draw, imports, modules

BOOK = DRAWING.with_name("architecture.md")
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
MOST_FLAT = 12  # modules that lie at the top level, beside the rooms
MOST_FILES = 75  # a file is one thought: two that are one are merged


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def own_imports() -> list[Import]:
    return imports()


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
    assert not [str(found) for found in own_imports() if through_a_wall(found, known)]


def test_nobody_is_let_through_a_door_for_nothing():
    """What a room's `__init__` imports is used by itself, in another room, or by tests; a public
    room's is for users."""
    texts = {path: path.read_text() for path in (*modules().values(), *TESTS)}
    idle = []
    for door in {path for path in modules().values() if path.name == "__init__.py"}:
        room = door.parent.name
        if room in ("doubleback", "landscape"):
            continue
        code = [node for node in parsed(door).body if "__all__" not in ast.unparse(node)]
        imports = [n for n in code if isinstance(n, ast.ImportFrom) and n.level == 1]
        users = [ast.unparse(node) for node in code if node not in imports]
        users += [text for path, text in texts.items() if door.parent not in path.parents]
        words = set(re.findall(r"\w+", "".join(users)))
        names = {alias.asname or alias.name for node in imports for alias in node.names}
        idle += [f"{room}.{name}" for name in names - words]
    assert not idle


def test_every_fused_second_derivative_has_a_rule():
    rooms = [ROOT / "rules", ROOT / "patch"]
    texts = "".join(path.read_text() for room in rooms for path in room.glob("*.py"))
    assert not [name for name in SECOND_DERIVATIVES if f'"{name}"' not in texts]


def test_order():
    rooms = {name[0] if name else "" for name in modules()}
    assert rooms <= set(LEVEL), "a new room: give it its place in ORDER"
    assert not [str(found) for found in own_imports() if upwards(found)]


def test_no_cycles():
    assert not cycle(own_imports())


def test_few_files_and_few_of_them_flat():
    flat = [path.name for path in ROOT.glob("*.py") if not path.name.startswith("__")]
    assert len(flat) <= MOST_FLAT, flat
    assert len(list(ROOT.rglob("*.py"))) <= MOST_FILES


def test_a_class_name_occurs_once():
    """Nor one that differs from another by an underscore alone."""
    names = Counter(
        node.name.strip("_")
        for path in modules().values()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, count in names.items() if count > 1]


def test_the_drawing_is_of_this_house():
    assert draw() == DRAWING.read_text(), "run python tools/draw_rooms.py"


def test_every_hop_of_the_book_exists():
    """Rows of docs/architecture.md: | number | `file` | `function`, … | what happens |."""
    rows = re.findall(r"^\| \d+ \| `(.+?)` \| (.+?) \|", BOOK.read_text(), flags=re.M)
    assert len(rows) > 20
    for name, functions in rows:
        defined = set(_defined(parsed(ROOT / name)))
        for function in re.findall(r"`(.+?)`", functions):
            assert function in defined, f"{name} defines no {function}"


def test_every_name_of_the_book_exists():
    """Whatever stands in backticks: files and rooms, and words that the package's code knows."""
    known = {word for path in modules().values() for word in re.findall(r"\w+", path.read_text())}
    for item in re.findall(r"`([^`]+)`", BOOK.read_text()):
        command = item.removeprefix("python ")
        if command.endswith((".py", "/")):
            places = (ROOT.parents[1], ROOT, *(p for p in ROOT.iterdir() if p.is_dir()))
            assert any((place / command).exists() for place in places), f"no {item}"
        else:
            gone = [word for word in re.findall(r"[^\W\d]\w*", item) if word not in known]
            assert not gone, f"`{item}`: nothing is called {gone}"


def test_every_cache_of_the_book_exists():
    names = re.findall(r"`(CapturedModule|Penalised)\.(_\w+)`", BOOK.read_text())
    assert {"_bound", "_plans", "_families", "_programs"} <= {name for _, name in names}
    texts = {"CapturedModule": "captured.py", "Penalised": "penalised.py"}
    for owner, name in names:
        assert re.search(rf"self\.{name}\b|def {name}\b", (ROOT / texts[owner]).read_text()), name


def _defined(tree: ast.AST, prefix: str = "") -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield prefix + node.name
            yield from _defined(node, f"{prefix}{node.name}.")


@pytest.mark.parametrize("room", [r for rooms in ORDER for r in rooms])
def test_a_room_says_what_it_is(room):
    path = modules()[(room,) if room else ()]
    assert ast.get_docstring(parsed(path))


# ------------------------------------------------------------------------------- the tests


TESTS = sorted(Path(__file__).parent.rglob("*.py"))


def test_no_test_imports_another():
    """What tests share lies in tests/support."""
    found = [
        f"{path.name}:{node.lineno}"
        for path in TESTS
        for node in ast.walk(parsed(path))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in (getattr(node, "module", None) or "", *(a.name for a in node.names))
        if name.startswith("test_") or name == "conftest"
    ]
    assert not found


def test_no_test_reaches_into_a_model():
    """Into what `Penalised` and `WithGradient` keep for themselves."""
    private = {
        node.name if isinstance(node, ast.FunctionDef) else node.attr
        for name in ("captured", "penalised")
        if (path := ROOT / f"{name}.py").exists()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef)
        or (isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self")
    }
    private = {name for name in private if name.startswith("_") and not name.startswith("__")}
    assert "_carried" in private and "_programs" in private
    others = {"self", *(name[-1] for name in modules() if name)}  # whose functions may be called so
    found = [
        f"{path.name}:{node.lineno} {ast.unparse(node)}"
        for path in TESTS
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute) and node.attr in private
        if ast.unparse(node.value) not in others
    ]
    assert not found


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
