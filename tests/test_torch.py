"""Private names of PyTorch: each is where `_torch` says, and no other module uses one."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import doubleback
from doubleback import _torch
from support.fresh import run_fresh

SOURCES = sorted(Path(doubleback.__file__).parent.rglob("*.py"))
ONLY_WITH_CUDA = ("cuda_get_device",)
SINCE = {"object_protocol": (2, 13)}


@pytest.mark.parametrize("name", _torch.NAMES)
def test_name(name):
    if name in ONLY_WITH_CUDA and not torch.backends.cuda.is_built():
        pytest.skip("needs a CUDA build of torch")
    if name in SINCE and _torch.before(*SINCE[name]):
        pytest.skip(f"needs torch {SINCE[name][0]}.{SINCE[name][1]}")
    path, why = _torch.NAMES[name]
    try:
        _torch.find(path)
    except (ImportError, AttributeError):
        pytest.fail(f"torch {torch.__version__} has no {path}; needed: {why}")


SAMPLES = (torch.fx.Graph().placeholder("x"), torch.ops.aten.add.Tensor)


@pytest.mark.parametrize(
    ("owner", "attribute", "why"), _torch.ATTRIBUTES, ids=[a for _, a, _ in _torch.ATTRIBUTES]
)
def test_attribute(owner, attribute, why):
    found = _torch.find(owner)
    sample = next((s for s in SAMPLES if type(s) is found), found)
    # what only an object has that is hard to make here is set by its class
    there = hasattr(sample, attribute) or _sets(found, attribute)
    assert there, f"torch {torch.__version__}: {owner} has no {attribute}; needed: {why}"


def _sets(found: type, attribute: str) -> bool:
    texts = [inspect.getsource(c) for c in inspect.getmro(found) if c is not object]
    return any(re.search(rf"self\.{attribute}(: [^=]*)? = ", text) for text in texts)


@pytest.mark.parametrize("name", _torch.OPERATORS)
def test_operator(name):
    there = hasattr(torch.ops.aten, name)
    why = _torch.OPERATORS[name]
    assert there, f"torch {torch.__version__} has no aten::{name}; needed: {why}"


def test_a_name_that_is_gone_says_why(monkeypatch):
    monkeypatch.setitem(_torch.NAMES, "gone", ("torch._C:_gone", "it did this"))
    with pytest.raises(ImportError, match=r"torch\._C\._gone.*: it did this"):
        _torch.gone  # noqa: B018
    with pytest.raises(AttributeError, match="never_there"):
        _torch.never_there  # noqa: B018


# --------------------------------------------------------------------- nobody else uses any


def test_private_names_come_from_one_place():
    found = [
        f"{path.name}:{node.lineno} {name}"
        for path in SOURCES
        if path.name != "_torch.py"
        for node in ast.walk(ast.parse(path.read_text()))
        for name in _of_torch(node)
        if _is_private(name)
    ]
    assert not found


def _of_torch(node: ast.AST) -> Iterator[str]:
    """Names of PyTorch that a statement imports or an expression spells out."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Import):
        yield from (a.name for a in node.names if a.name.startswith("torch"))
    elif isinstance(node, ast.Attribute):
        name = ast.unparse(node)
        if name.startswith("torch.") and not name.startswith("torch.ops."):
            yield name


def _is_private(name: str) -> bool:
    parts = name.split(".")
    own = any(part.startswith("_") and not part.startswith("__") for part in parts)
    return own or "experimental" in parts


def test_private_attributes_are_listed():
    """Those of ATen's operators, and those of objects that are not this package's own."""
    trees = {path: ast.parse(path.read_text()) for path in SOURCES}
    own = {name for tree in trees.values() for name in _defined(tree)}
    listed = {a for _, a, _ in _torch.ATTRIBUTES} | set(_torch.OPERATORS)
    # of named tuples, of sys and of argparse
    python = {"_fields", "_replace", "_getframe", "_actions", "_SubParsersAction"}
    used = {
        node.attr: f"{path.name}:{node.lineno} {ast.unparse(node)}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and _is_private(node.attr)
    }
    assert not [where for name, where in used.items() if name not in own | listed | python]
    texts = "\n".join(path.read_text() for path in SOURCES if path.name != "_torch.py")
    assert not [name for name in listed if name not in texts], "listed, and used nowhere"
    assert not [name for name in _torch.NAMES if name not in texts], "listed, and used nowhere"


def _defined(tree: ast.AST) -> Iterator[str]:
    """Private names that this package gives: functions, fields, and what it sets on `self`."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.alias):
            yield node.asname or node.name


LIGHT = """
import sys
known = set(sys.modules)
import doubleback
slow = ("sympy", "torch._dynamo", "torch._inductor", "triton", "numpy", "doubleback.landscape",
        "torch.utils.flop_counter", "matplotlib")
found = [name for name in slow if name in set(sys.modules) - known]
assert not found, found
"""
FLOPS = ["import doubleback", "from torch.utils import flop_counter"]
LOOK = "import torch; assert torch.ops.doubleback.locally_connected in flop_counter.flop_registry"
LANDSCAPE = """
import sys, doubleback as db
assert "landscape" in dir(db)
db.landscape.Network
assert "matplotlib" not in sys.modules
"""


def test_imports():
    """Dynamo, Inductor, Triton and SymPy take longer to import than all of doubleback, which leaves
    them alone; FLOP formulas are there when the counter is, whichever is imported first; landscape
    comes when it is asked for, without matplotlib."""
    orders = ("; ".join([*both, LOOK]) for both in (FLOPS, FLOPS[::-1]))
    run_fresh(LIGHT, *orders, LANDSCAPE)
