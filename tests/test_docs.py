"""What is shown runs: python blocks of each page, in one namespace per page, and docstrings."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import doubleback

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
MODULES = [
    module.name
    for module in pkgutil.walk_packages(doubleback.__path__, "doubleback.")
    if not module.name.endswith("_triton")  # Triton is installed with GPU builds only
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    text = page.read_text(encoding="utf-8")
    # a module that can be found by its name, as a user's own: TorchDynamo looks functions up there
    module = types.ModuleType(f"page_{page.stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    namespace = vars(module)
    for block in BLOCK.finditer(text):
        # Blank lines in front make the line numbers of a traceback those of the page.
        source = "\n" * text[: block.start(1)].count("\n") + block.group(1)
        exec(compile(source, str(page), "exec"), namespace)


@pytest.mark.parametrize("name", MODULES)
def test_docstrings_run(name):
    torch.manual_seed(0)
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder().find(importlib.import_module(name)):
        runner.run(test, clear_globs=False)  # TorchDynamo tidies up there later on
    assert runner.failures == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_repository_exist(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_measured_tables_are_those_of_the_results():
    for name in ("readme_table.py", "measured_tables.py"):
        script = ROOT / "benchmarks" / name
        assert subprocess.run([sys.executable, script, "--check"]).returncode == 0, "make readme"
