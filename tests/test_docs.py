"""What is shown runs: python blocks of each page, in one namespace per page, and docstrings."""

from __future__ import annotations

import doctest
import importlib
import json
import pkgutil
import re
import shlex
import statistics
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import doubleback
from doubleback import cli
from support.fresh import run_fresh
from tools import list_rules

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
GALLERY = ROOT / "examples" / "README.md"
TABLE = re.compile(r"(?:^ *\|.*\n)+.*", re.MULTILINE)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]*)(?:#([^)]*))?\)")
MODULES = [
    module.name
    for module in pkgutil.walk_packages(doubleback.__path__, "doubleback.")
    if not module.name.endswith("__main__")  # which runs
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    text = page.read_text(encoding="utf-8")
    if page.stem == "pytorch-errors":  # without doubleback, which mends what it can
        if not torch.__version__.startswith("2.13"):
            pytest.skip("speaks of torch 2.13")
        path = tmp_path / "errors.py"  # TorchDynamo reads sources
        path.write_text("".join(match[1] for match in BLOCK.finditer(text)), encoding="utf-8")
        # graphs on disk may be those of a process that was mended
        return run_fresh(
            "import os, runpy, warnings; warnings.simplefilter('ignore'); "
            f"os.environ['TORCHINDUCTOR_CACHE_DIR'] = {str(tmp_path)!r}; "
            f"runpy.run_path({str(path)!r})"
        )
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


def anchors(page):
    """What a link may name behind `#`: headings as the site names them, and ids."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    named = set(re.findall(r'(?:\bid="|\{#)([\w-]+)', text))
    for heading in re.findall(r"^#+ (.*)$", text, re.M):
        words = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).lower()
        named.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", words).strip()))
    return named


@pytest.mark.parametrize("page", [*PAGES, GALLERY], ids=lambda page: page.name)
def test_links_within_the_repository_exist(page):
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        there = page.parent / target if target else page
        assert there.exists(), f"{page.name} links to {target}"
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there), f"{page.name} links to {target}#{anchor}"


@pytest.mark.parametrize("page", [*PAGES, GALLERY], ids=lambda page: page.name)
def test_tables_are_tables(page):
    """Rows of one length, a bar within a cell escaped; and an empty line below, without which the
    site's table takes in what follows, be that a heading."""
    for table in TABLE.finditer(page.read_text(encoding="utf-8")):
        *rows, below = table.group().split("\n")
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1, rows[0]
        assert not below, below
        assert all(re.match(r"(?: {4})*\|", row) for row in rows), "in a list: four spaces"


@pytest.mark.parametrize("page", [*PAGES, GALLERY], ids=lambda page: page.name)
def test_commands_that_are_shown_exist(page):
    text = page.read_text(encoding="utf-8")
    for block in re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if "doubleback" in words:
                cli._parser().parse_args(words[words.index("doubleback") + 1 :])
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    shown = re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)
    assert set(shown) <= set(targets)


def test_every_page_has_its_place_on_the_site():
    """mkdocs.yml's navigation holds the pages of docs/, and those that a hook adds."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    shown = re.findall(r": ([\w-]+\.md)$", text, re.MULTILINE)
    there = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert len(shown) == len(set(shown))
    assert set(shown) == there | {"contributing.md", "changelog.md", "examples.md"}


def test_the_reference_has_every_public_name():
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    named = {name.removeprefix("doubleback.") for name in re.findall(r"^::: (\S+)$", text, re.M)}
    listed = {word for line in re.findall(r"members: \[(.*?)\]", text) for word in line.split(", ")}
    known = {name.rpartition(".")[2] for name in named} | listed
    known |= {"register_rule", "unregister_rule"} if {"register", "unregister"} <= known else set()
    assert not set(doubleback.__all__) - known


def test_the_list_of_rules_is_that_of_the_table():
    if not torch.__version__.startswith("2.13"):
        pytest.skip("other versions of torch have other operators")
    assert list_rules.PAGE.read_text(encoding="utf-8") == list_rules.page(), "tools/list_rules.py"


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 120
    table = text.partition("<!-- bench:start -->")[2].partition("<!-- bench:end -->")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert 1 <= len(rows) - 2 <= 8 and len(rows[0].split("|")) <= 9


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="make docs installs it")
    pytest.importorskip("mkdocstrings")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_measured_tables_are_those_of_the_results():
    for name in ("readme_table.py", "measured_tables.py"):
        script = ROOT / "benchmarks" / name
        assert subprocess.run([sys.executable, script, "--check"]).returncode == 0, "make readme"


def measured(run, method, value="price"):
    """By network, what a method took, or held, of plain steps in one of the engine's runs."""
    text = (ROOT / "benchmarks" / "results" / f"engine-h200-{run}.json").read_text("utf-8")
    columns = {row["net"]: row["columns"].get(method, {}) for row in json.loads(text)["rows"]}
    return {net: column[value] for net, column in columns.items() if column.get(value)}


def test_the_prose_of_the_readme_is_that_of_the_results():
    text = " ".join((ROOT / "README.md").read_text("utf-8").split())
    graphed = {}
    for run in ("images", "vision", "text"):
        graphed |= measured(f"graphs-{run}", "accumulate graphed")
    for net, name in (
        ("mobilenetv2", "MobileNetV2 {:.2f} plain steps so"), ("resnet50", "ResNet-50 {:.2f}"),
        ("efficientnet_b0", "EfficientNet-B0 {:.2f}"), ("swin_t", "Swin-T {:.2f}"),
        ("vit_b", "ViT-B {:.2f}"), ("bert", "BERT {:.2f}"),
        ("llama", "the Llama-like decoder {:.2f}"),
    ):  # fmt: skip
        assert name.format(graphed[net]) in text
    held = measured("default", "accumulate compiled", "memory_price")
    largest = held.pop("efficientnet_b0")
    whole = measured("bf16", "accumulate compiled", "memory_price")
    prices = measured("default", "accumulate compiled graphed").values()
    without = measured("default", "accumulate compiled").values()
    assert (
        f"{min(held.values()):.2f} to {max(held.values()):.2f} times the memory of compiled plain "
        f"training in place of {statistics.median(whole.values()):.0f} (EfficientNet-B0 "
        f"{largest:.1f}), at [{min(prices):.1f} to {max(prices):.1f} plain steps as CUDA graphs "
        f"and {min(without):.1f} to {max(without):.1f} without]"
    ) in text
