"""The wheel: what is in it, what it announces, where its links lead, and that it imports with torch
alone."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from doubleback.cli import commands

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
HEAVY = ("sympy", "torch._dynamo", "torch._inductor", "matplotlib", "rich", "sklearn", "numpy",
         "triton")  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(list(folder.glob("*.tar.gz"))) == 1
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"doubleback", f"doubleback-{PROJECT['version']}.dist-info"}
    assert {"doubleback/py.typed", "doubleback/__main__.py"} <= set(names)


def test_its_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("METADATA"))
        found = email.message_from_bytes(archive.read(name))
    always = [r for r in found.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert len(always) == 1 and always[0].startswith("torch")
    assert {"cli", "demo", "plots", "examples", "docs", "test"} <= set(
        found.get_all("Provides-Extra")
    )
    assert found.get_all("Project-URL")


def test_its_description_has_no_link_into_the_repository(wheel):
    """A package index shows it without the files beside it."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("METADATA"))
        found = email.message_from_bytes(archive.read(name))
    text = found.get_payload(decode=True).decode()
    assert found["Description-Content-Type"].startswith("text/markdown")
    assert text.startswith("# doubleback") and "which one do I want?" in text
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)]*)\)", prose)
    assert links and not [link for link in links if not link.startswith("https://")]


def test_links_lead_into_the_repository_once_it_has_an_address():
    pytest.importorskip("hatchling")
    from tools import package_readme

    found = package_readme.description(
        (ROOT / "README.md").read_text(encoding="utf-8"), "https://example.org/doubleback"
    )
    links = re.findall(r"\]\((https://example.org/doubleback/[^)]*)\)", found)
    assert "https://example.org/doubleback/raw/HEAD/docs/pictures/prices.svg" in links
    for link in links:
        path = re.sub(r"^https://example.org/doubleback/(blob|raw)/HEAD/", "", link)
        assert (ROOT / path.partition("#")[0]).exists(), link


def test_extras_have_what_doctor_asks_for():
    extras = PROJECT["optional-dependencies"]
    packages = {"sklearn": "scikit-learn"}

    def needs(extra: str) -> set[str]:
        own = {re.split(r"[<>=;\[ ]", line)[0] for line in extras[extra]}
        inner = re.findall(r"doubleback\[(.*?)\]", " ".join(extras[extra]))
        return own.union(*(needs(name) for line in inner for name in line.split(",")))

    for extra, modules in commands.EXTRAS.items():
        assert {packages.get(module, module) for module in modules} <= needs(extra)


def test_it_imports_with_torch_alone(wheel, tmp_path):
    """From the wheel itself, where nothing else can be imported; slow modules wait until used."""
    code = f"""
import sys
import torch
known = set(sys.modules)
sys.modules.update(dict.fromkeys(("rich", "sklearn", "matplotlib", "numpy", "triton"), None))
import doubleback
assert doubleback.__file__.startswith({str(wheel)!r}), doubleback.__file__
found = [n for n in {HEAVY!r} if n not in known and sys.modules.get(n)]
assert not found, found
"""
    environment = {**os.environ, "PYTHONPATH": str(wheel)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
