"""docs/forces.md against the packages it speaks of: each recipe's net, by each way that the page
says works, has stock autograd's gradients at sizes that change.

A recipe whose package is not installed is skipped; `make test-forces` installs them.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
import types
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[1] / "docs" / "forces.md"
TEXT = PAGE.read_text(encoding="utf-8")
WAYS = {"`WithGradient`": "with_gradient", "`db.compile`": "compiled", "backend": "by_backend",
        "`db.patch()`": "patched"}  # fmt: skip
SIZES = [(5, 7), (6, 4, 8), (9, 5), (4, 6, 7, 5)]
# what these packages say of their own futures
pytestmark = [pytest.mark.forces, pytest.mark.filterwarnings("ignore")]


def table() -> dict[str, dict[str, str]]:
    """By package and way, what the page's table says."""
    lines = TEXT.partition("| package |")[2].splitlines()
    heads = [cell.strip() for cell in lines[0].strip("| ").split("|")]
    found = {}
    for line in lines[2:]:
        if not line.startswith("|"):
            break
        name, *cells = [cell.strip() for cell in line.strip("| ").split("|")]
        found[name] = dict(zip([WAYS[head] for head in heads], cells, strict=True))
    return found


def section(name: str) -> str:
    """The recipe: all that stands in blocks of Python under a heading."""
    part = re.search(rf"^## {re.escape(name)}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert part is not None, f"the page has no recipe for {name}"
    return "\n".join(re.findall(r"^```py\n(.*?)^```$", part.group(1), re.MULTILINE | re.DOTALL))


def common() -> str:
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)[:1])


PAIRS = [
    pytest.param(name, way, id=f"{name}-{way}")
    for name, cells in table().items()
    for way, said in cells.items()
    if said == "yes"
]


_count = itertools.count()


@pytest.fixture
def recipe(request, monkeypatch):
    """The page's names, and the recipe's on top: net, energy, prepare."""
    source = section(request.param)
    for package in re.findall(r"^(?:import|from) (\w+)", source, re.MULTILINE):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: make test-forces installs it")
    # a name of its own: Dynamo's guards find modules by theirs
    module = types.ModuleType(f"page_forces_{next(_count)}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    torch._dynamo.reset()
    for part in (common(), source):
        exec(compile(part, str(PAGE), "exec"), vars(module))
    yield module
    torch.set_default_dtype(torch.float32)


def gradients(step, given, parameters):
    for p in parameters:
        p.grad = None
    loss = step(given)
    loss.backward()
    return [loss.detach(), *(torch.zeros_like(p) if p.grad is None else p.grad for p in parameters)]


@pytest.mark.parametrize(("recipe", "way"), PAIRS, indirect=["recipe"])
def test_recipe(recipe, way):
    net, energy = recipe.net, recipe.energy
    options = {"strict": True} if way in ("with_gradient", "compiled") else {}
    if way in ("compiled", "by_backend"):
        options["compiler"] = "eager"
    step = getattr(recipe, way)(net, energy, **options)
    stock = recipe.stock(lambda given: energy(net, given))
    parameters = list(net.parameters())
    for seed, sizes in enumerate(SIZES):
        given = recipe.prepare(recipe.draw(sizes, seed))
        expected = gradients(stock, given, parameters)
        found = gradients(step, given, parameters)
        whole = sum(w.square().sum() for w in expected[1:]).sqrt()
        assert whole > 0
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours - theirs).norm() <= 1e-10 * max(theirs.norm(), 1e-3 * whole)


def test_every_package_of_the_table_has_a_recipe():
    assert table() and PAIRS
    for name in table():
        assert "net =" in section(name) and "def prepare" in section(name)
