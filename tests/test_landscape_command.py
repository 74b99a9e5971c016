"""``doubleback landscape``: what it writes, what it reads, what it refuses; the room's door."""

from __future__ import annotations

import ast
import builtins
import json
import sys
from pathlib import Path

import pytest
import torch

import doubleback as db
from doubleback.cli import main
from doubleback.landscape import drawing

ROOT = Path(__file__).parents[1]
NETS = """
from torch import nn


def classifier():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU(), nn.Flatten(), nn.Linear(64, 5)
    )


def critic():
    return nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 1))


def kinked():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 4)
    )
"""


@pytest.fixture
def nets(tmp_path, monkeypatch):
    (tmp_path / "landscape_cli_nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "landscape_cli_nets"
    sys.modules.pop("landscape_cli_nets", None)


def test_landscape_writes_figure_page_and_verdict(nets, tmp_path, capsys):
    command = ["landscape", f"{nets}:kinked", "--input-shape", "6,1,4,4", "--out", "found"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert text.startswith("Along 0.weight[") and "batch size 6" in text
    names = {f.name for f in (tmp_path / "found").iterdir()}
    assert names == {"landscape.png", "landscape.pdf", "index.html", "landscape.json"}
    saved = json.loads((tmp_path / "found" / "landscape.json").read_text())
    assert saved["examples"] == 6 and saved["text"] in text


def test_landscape_reads_inputs_and_paths(nets, tmp_path, capsys):
    torch.save(torch.randn(5, 1, 4, 4), tmp_path / "x.pt")
    torch.save(torch.tensor([0, 1, 2, 3, 0]), tmp_path / "y.pt")
    common = ["landscape", f"{nets}:kinked", "--input", "x.pt", "--json", "--span", "-2", "2"]
    for more in (
        ["--labels", "y.pt", "--parameter", "0.bias[1]"],
        ["--layer", "0,4", "--penalty", "output-gradient", "--index", "2"],
        ["--penalty", "jacobian"],
        ["--penalty", "jacobian", "--of", "softmax", "--parameter", "0.bias[1]"],
        ["--input-line"],
    ):
        assert main([*common, *more]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["examples"] == 5 and found["span"] == [-2.0, 2.0]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--input-shape", "2,1,4,4", "--parameter", "0.wieght[0]"], "did you mean '0.weight'"),
        (["--input-shape", "2,1,4,4", "--parameter", "0.bias"], "name[index]"),
        (["--input-shape", "2,1,4,4", "--layer", "0", "--input-line"], "choose one"),
        (["--input", "none.pt"], "cannot read none.pt"),
        (
            ["--input-shape", "2,1,4,4", "--penalty", "jacobian", "--projections", "2"],
            "exact Jacobian",
        ),
        (["--input-shape", "2,1,4,4", "--penalty", "spectral-norm"], "by iteration"),
        ([], "--input"),
    ],
)
def test_landscape_usage_errors(nets, capsys, more, message):
    assert main(["landscape", f"{nets}:kinked", *more]) == 2
    assert message in capsys.readouterr().err


def test_landscape_refuses_smooth_and_coupled_nets(nets, capsys):
    assert main(["landscape", f"{nets}:critic", "--input-shape", "3,6", "--penalty",
                 "output-gradient"]) == 2  # fmt: skip
    assert "softplus" in capsys.readouterr().err
    assert main(["landscape", f"{nets}:classifier", "--input-shape", "3,3,4,4"]) == 2
    error = capsys.readouterr().err
    assert "BatchNorm2d" in error and "pass --eval" in error and "net.eval()" not in error


def test_matplotlib_is_asked_for_by_name(monkeypatch, capsys):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(db.DoublebackError, match=r"pip install 'doubleback\[plots\]'"):
        drawing.panels(1)


def _imports(path: Path) -> set[str]:
    """Every module that a file imports, in full."""
    package = (path.relative_to(ROOT / "src") if (ROOT / "src") in path.parents
               else path.relative_to(ROOT)).with_suffix("").parts  # fmt: skip
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level] if node.level else ()
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def test_other_rooms_come_in_by_the_door():
    room = ROOT / "src" / "doubleback" / "landscape"
    private = {f"doubleback.landscape.{f.stem}" for f in room.glob("*.py")}
    # all but the door itself and `drawing`, which is public
    private -= {
        "doubleback.landscape.__init__",
        "doubleback.landscape.drawing",
    }
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "reproduce").glob("*.py"),
             *(ROOT / "benchmarks").glob("*.py")]  # fmt: skip
    for file in files:
        if room not in file.parents:
            assert not _imports(file) & private, file


def test_the_product_imports_nothing_of_the_papers():
    for file in (ROOT / "src").rglob("*.py"):
        assert not {name for name in _imports(file) if "reproduce" in name.split(".")}, file


def test_class_names_of_the_room_occur_once_in_the_package():
    names: dict[str, list[Path]] = {}
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                names.setdefault(node.name, []).append(file)
    ours = {n: f for n, f in names.items() if any(p.parent.name == "landscape" for p in f)}
    assert ours and {n: f for n, f in ours.items() if len(f) > 1} == {}
